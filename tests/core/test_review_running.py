"""What a second reading of running for real found in the core: patience is of one append, and each
record of ours is told once, however late it lands."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from kit.build import RUN, FaultyStore, PlainView, VirtualTime

from journal.codec import Entry
from journal.doors import start
from journal.errors import StoreUnavailable
from journal.fold import Fold
from journal.grouped import Job
from journal.handle import Journal
from journal.ids import RunId
from journal.messages import JSON
from journal.observing import Trace, Unobserved
from journal.records import Record, StepCompleted
from journal.steps import make_call
from journal.store import AppendAnswer, Appended, Loaded, Unknown
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
        self.on_refused: Callable[[], None] = lambda: None

    def _is(self) -> bool:
        return self.since is not None and self._time.now < self.since + OUTAGE_S

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        await asyncio.sleep(0)
        if self._is():
            self.on_refused()
            return Unknown("not connected")
        return await super().append(run_id, entry, expected=expected)

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        await asyncio.sleep(0)
        if self._is():
            self._time.now += 20.0
            raise StoreUnavailable("not connected; gave up")
        return await super().load(run_id, after=after)


class Telling(Unobserved):
    """Keeps the ids of what it is told of."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: Trace) -> None:
        self._told.append(record.id)


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
    looking, refused = asyncio.Event(), asyncio.Event()
    store.on_refused = refused.set

    async def pay() -> JSON:
        await looking.wait()
        store.since = time.now
        return "paid"

    async def look() -> JSON:
        looking.set()
        await refused.wait()
        return "seen"

    results = await journal.steps([job(PAY, pay), job(READ, look)])
    assert [one.result for one in results] == ["paid", "seen"]
    await journal.close()


async def test_a_record_that_was_cut_off_and_lands_behind_the_recovery_is_told_once():
    """The metrics say what the journals say."""
    store = FaultyStore(shared=True)
    journal = await opened(store)
    told: list[str] = []
    store.observer = Telling(told)
    cut: list[tuple[Entry, int]] = []
    real = store.append

    async def append(run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        store.append = real  # type: ignore[method-assign]
        cut.append((entry, expected))
        raise asyncio.CancelledError

    store.append = append  # type: ignore[method-assign]

    async def look() -> JSON:
        return "seen"

    with pytest.raises(asyncio.CancelledError):
        await journal.steps([job(READ, look)])
    await journal.recover()
    ((entry, expected),) = cut
    assert isinstance(await real(RUN, entry, expected=expected), Appended)
    await journal.steps([job(READ, look)])
    await journal.close()
    journals = (await store.load(RUN)).entries
    assert told == [one.record.id for one in journals if one.record.n > entry.record.n - 1]
