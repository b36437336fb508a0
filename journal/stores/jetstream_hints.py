"""Store: what is told without being kept: previews, notices, who works. Only to be faster.

Nobody's safety hangs on any of it: a message is lost where nobody listens or a connection is cut.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec

from ..errors import InvalidId
from ..ids import RunId, from_subject_token, subject_token
from .nats_connection import Connection
from .nats_waiting import STATUS, Incoming, Reply

PREVIEW_BYTES_MAX = 64 * 1024
"""A piece of a model's text; what is longer is cut, for the whole stands in the journal later."""


class Hints:
    """Core NATS messages of a namespace."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace

    async def preview(self, run_id: RunId, text: str) -> None:
        payload = text.encode("utf-8", "replace")
        if len(payload) > PREVIEW_BYTES_MAX:
            payload = payload[:PREVIEW_BYTES_MAX].decode("utf-8", "ignore").encode()
        await self._connection.publish(self._subject("live", run_id), payload)

    async def notify(self, run_id: RunId, payload: bytes) -> None:
        await self._connection.publish(self._subject("notice", run_id), payload)

    def notices(self, handle: Callable[[RunId, bytes], None]) -> AbstractAsyncContextManager[None]:
        return self._hearing("notice", handle)

    def previews(
        self, run_id: RunId, handle: Callable[[str], None]
    ) -> AbstractAsyncContextManager[None]:
        def take(message: Incoming) -> None:
            handle(message.data.decode("utf-8", "replace"))

        return self._connection.listening(self._subject("live", run_id), take)

    def _hearing(
        self, kind: str, handle: Callable[[RunId, bytes], None]
    ) -> AbstractAsyncContextManager[None]:
        def take(message: Incoming) -> None:
            with contextlib.suppress(InvalidId):  # nobody's: no run has such a subject
                handle(from_subject_token(message.subject.rpartition(".")[2]), message.data)

        return self._connection.listening(f"{self._namespace}.{kind}.*", take)

    @asynccontextmanager
    async def reporting(
        self, report: Callable[[bytes], bytes | None], topic: str = "workers"
    ) -> AsyncGenerator[None, None]:
        async def answer(question: Reply) -> bytes | None:
            try:
                return report(question.data)
            except Exception as error:  # who asks sees that something is wrong with this worker
                return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"})

        subject = f"{self._namespace}.{topic}"
        async with self._connection.subscribed(subject, answer):
            await self._connection.confirm(subject)
            yield

    async def ask_workers(
        self, wait_s: float, topic: str = "workers", question: bytes = b""
    ) -> list[bytes]:
        reports: list[bytes] = []

        def take(reply: Reply) -> bool:
            if STATUS in reply.headers:  # nobody is there
                return True
            reports.append(reply.data)
            return False

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._connection.collect(
                    f"{self._namespace}.{topic}", question, take, idle_s=wait_s
                )
        return reports

    @asynccontextmanager
    async def peers(
        self, handle: Callable[[bytes], None], hello: bytes
    ) -> AsyncGenerator[None, None]:
        """Hear other workers' hellos, and answer theirs who are new, while inside."""

        def take(message: Incoming) -> None:
            handle(message.data)
            if message.reply:
                self._connection.send(message.reply, hello)

        async with self._connection.listening(self._peers, take):
            yield

    async def meet(self, hello: bytes, handle: Callable[[bytes], None], wait_s: float) -> None:
        """Say hello, and hear who is there, for as long as somebody answers within `wait_s`."""

        def take(reply: Reply) -> bool:
            if STATUS in reply.headers:
                return True
            handle(reply.data)
            return False

        await self._connection.collect(self._peers, hello, take, idle_s=wait_s)

    async def greet(self, hello: bytes) -> None:
        await self._connection.publish(self._peers, hello)

    @property
    def _peers(self) -> str:
        return f"{self._namespace}.peer"

    def _subject(self, kind: str, run_id: RunId) -> str:
        return f"{self._namespace}.{kind}.{subject_token(run_id)}"
