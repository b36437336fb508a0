"""A subscription of a client."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

import nats.errors
from nats.aio.msg import Msg

if TYPE_CHECKING:
    from .client import ModelClient

Handle: TypeAlias = Callable[[Msg], Awaitable[None]]


class Subscription:
    """Messages to a coroutine one after another, or to a taker as they come."""

    def __init__(
        self, client: ModelClient, sid: int, subject: str, queue: str, handle: Handle | None
    ) -> None:
        self._client = client
        self.sid = sid
        self.subject = subject
        self.queue = queue
        self._handle = handle
        self._messages: deque[Msg] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._context = contextvars.copy_context()

    def got(self, message: Msg) -> None:
        if self._handle is None:
            return  # nobody asks for them
        self._messages.append(message)
        if self._task is None:
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._work(), context=self._context.copy())

    async def _work(self) -> None:
        assert self._handle is not None
        try:
            while self._messages:
                try:
                    await self._handle(self._messages.popleft())
                except Exception as error:
                    await self._client.complain(error)
        finally:
            self._task = None

    async def unsubscribe(self) -> None:
        self._client.check_open()
        if self._closed:
            raise nats.errors.BadSubscriptionError
        self.stop()
        self._client.unsubscribe(self.sid)

    async def handled(self) -> None:
        """Until what has come was handled."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self) -> None:
        self._closed = True
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
