"""Shell: runs of one key go one at a time over the fleet (R54). For fairness, not for safety.

Who wants a key listens on its subject, then asks there, and waits: a holder's answer, or word of a
run that wants it too and comes first by its id, sends it away for a while. A question is such word,
as an answer is: both listen before they ask, so who asked first hears the other's question, if not
its answer; by then it holds the key, and says so, or it is told who comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import msgspec
from msgspec import Struct

from .ids import RunId
from .stores.jetstream import JetStreamStore
from .values import digest

WAIT_S = 0.2
"""Answers come from memory; one that takes longer is missed: two runs of the key at once."""


class _Claimant(Struct, frozen=True):
    run: str
    held: bool


_decode = msgspec.json.Decoder(_Claimant).decode
_encode = msgspec.json.Encoder().encode


def _read(said: bytes) -> list[_Claimant]:
    """What was said, if it is anything: a worker that fails to answer says something else."""
    try:
        return [_decode(said)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


class Keys:
    """The keys that this worker's runs hold or want."""

    def __init__(self, store: JetStreamStore) -> None:
        self._store = store
        self._closing: set[asyncio.Task[None]] = set()

    async def take(self, key: str, run_id: RunId) -> Callable[[], None] | None:
        """Hold the key for the run, unless another run holds it or comes first: then None. What is
        returned gives it up."""
        if not key:
            return _nothing
        held = False
        stack = AsyncExitStack()
        others: list[_Claimant] = []

        def answer(question: bytes) -> bytes:
            if not held:
                others.extend(_read(question))
            return _encode(_Claimant(run_id, held))

        topic = f"key.{digest('key', key)}"
        await stack.enter_async_context(self._store.reporting(answer, topic))
        try:
            mine = _encode(_Claimant(run_id, held))
            for said in await self._store.ask_workers(WAIT_S, topic, mine):
                others.extend(_read(said))
        except BaseException:
            await stack.aclose()
            raise
        if any(o.run != run_id and (o.held or o.run < run_id) for o in others):
            await stack.aclose()
            return None
        held = True

        def give() -> None:
            task = asyncio.create_task(stack.aclose(), name=f"key of run {run_id}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

        return give


def _nothing() -> None:
    pass
