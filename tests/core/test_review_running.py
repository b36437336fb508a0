"""What a second reading of running for real found in the core: patience is of one append, and each
record of ours is told once, however late it lands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kit.build import RUN, FaultyStore, PlainView, VirtualTime, types_of

from journal.codec import Entry
from journal.doors import start
from journal.errors import StoreUnavailable
from journal.handle import Journal
from journal.ids import RunId
from journal.messages import JSON
from journal.records import StepCompleted
from journal.grouped import Job
from journal.steps import make_call
from journal.store import AppendAnswer, Loaded, Unknown
from journal.unknown import NO_WAYS

pytestmark = pytest.mark.usefixtures("no_waiting")

PAY, READ = "tool/1/0/pay", "tool/1/1/lookup"
OUTAGE_S = 600.0


class Away(FaultyStore):
    """Neither takes nor tells anything from `since` on until the outage is over."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(shared=True)
        self._time = time
        self.since: float | None = None
        self.refused: list[str] = []

    def _is(self) -> bool:
        return self.since is not None and self._time.now < self.since + OUTAGE_S

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        await asyncio.sleep(0)
        if self._is():
            self.refused.append(getattr(entry.record, "step", entry.type))
            return Unknown("not connected")
        return await super().append(run_id, entry, expected=expected)

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        await asyncio.sleep(0)
        if self._is():
            self._time.now += 20.0
            raise StoreUnavailable("not connected; gave up")
        return await super().load(run_id, after=after)


async def opened(store: FaultyStore) -> Journal:
    await start(PlainView(store), "helpdesk", "go", run_id=RUN)
    journal = await Journal.open(store, RUN, is_write=lambda tool: tool == "pay", ack_wait_s=30)
    journal.result_patience_s = 3600.0
    return journal


def job(name: str, fn: Callable[[], Awaitable[JSON]]) -> Job:
    async def perform(_: object) -> StepCompleted:
        return StepCompleted(step=name, result=await fn())

    tool = name.rpartition("/")[2]
    return make_call(name, "tool", tool, None, unsafe=tool == "pay"), perform, NO_WAYS


async def test_a_read_that_ends_beside_a_write_takes_none_of_its_patience(time: VirtualTime):
    store = Away(time)
    journal = await opened(store)
    trying = asyncio.Event()

    async def pay() -> JSON:
        store.since = time.now
        return "paid"

    async def look() -> JSON:
        while PAY not in store.refused:
            await asyncio.sleep(0)
        return "seen"

    results = await journal.steps([job(PAY, pay), job(READ, look)])
    assert [one.result for one in results] == ["paid", "seen"]
    await journal.close()
