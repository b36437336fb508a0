"""Actors on one memory store, one store operation at a time, in the order that a schedule says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

from kit.build import Killed, PlainView

from journal.codec import Entry
from journal.ids import RunId
from journal.store import AppendAnswer, Loaded, RawRecord, Stamp
from journal.stores.memory import MemoryStore

_ME: ContextVar[int | None] = ContextVar("actor", default=None)
TURNS_MAX = 10_000

Actor = Callable[[MemoryStore], Awaitable[Any]]


class Stage:
    """Plays two actors: the first one for `first` operations, the other one for `other`, then the
    first to its end, then the other. `killed`: this actor dies before that operation of its."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._killed: tuple[int, int] | None = None
        self._arrived = asyncio.Event()
        self.operations = [0, 0]

    async def turn(self) -> None:
        """Before each operation of an actor."""
        me = _ME.get()
        if me is None:
            return
        self._waiting[me] = asyncio.get_running_loop().create_future()
        self._arrived.set()
        await self._waiting[me]
        if self._killed == (me, self.operations[me]):
            raise Killed
        self.operations[me] += 1

    async def play(
        self,
        actors: Sequence[Actor],
        *,
        first: int = TURNS_MAX,
        other: int = 0,
        killed: tuple[int, int] | None = None,
    ) -> list[Any]:
        """What each came to: its result, or what it raised."""
        self._killed = killed
        tasks = [asyncio.create_task(self._act(me, actor)) for me, actor in enumerate(actors)]
        for me, count in ((0, first), (1, other), (0, TURNS_MAX), (1, TURNS_MAX)):
            for _ in range(count):
                await self._waits(me, tasks[me])
                if tasks[me].done():
                    break
                self._waiting.pop(me).set_result(None)
        return [await task for task in tasks]

    async def _waits(self, me: int, task: asyncio.Task[Any]) -> None:
        """Until the actor stands before its next operation, or has ended."""
        while me not in self._waiting and not task.done():
            self._arrived.clear()
            arrival = asyncio.ensure_future(self._arrived.wait())
            await asyncio.wait([arrival, task], return_when=asyncio.FIRST_COMPLETED)
            arrival.cancel()

    async def _act(self, me: int, actor: Actor) -> Any:
        _ME.set(me)
        try:
            return await actor(Stepped(self))
        except (Exception, Killed) as error:
            return error


class Stepped(PlainView):
    """One actor's way to the store."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage.store)
        self._stage = stage

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        await self._stage.turn()
        return await super().load(run_id, after=after)

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        await self._stage.turn()
        return await super().append(run_id, entry, expected=expected)

    async def stored(
        self, run_id: RunId, *, after: int = 0
    ) -> AsyncGenerator[Sequence[RawRecord], None]:
        await self._stage.turn()
        async for page in super().stored(run_id, after=after):
            for record in page:  # a record a page: a purge may come between any two
                yield [record]
                await self._stage.turn()

    async def stamp(self, run_id: RunId) -> Stamp:
        await self._stage.turn()
        return await super().stamp(run_id)

    async def trim(self, run_id: RunId, *, before: int) -> None:
        await self._stage.turn()
        await super().trim(run_id, before=before)
