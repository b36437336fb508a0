"""What mutants of the shells around the append survived (docs/guards.md): a log that is read from
its last commit on, that was purged meanwhile, or that is read from a leader that fell behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from kit.build import (
    AT,
    RUN,
    FaultyStore,
    Log,
    PlainView,
    VirtualTime,
    answered,
    cancel,
    claimed,
    goes_on,
    start_of,
    started,
    submitted,
    types_of,
    write_as_other,
)

from journal.codec import Entry
from journal.doors import signal, submit, withdraw
from journal.errors import (
    ConcurrentUse,
    Fenced,
    JournalDamaged,
    NewerVersion,
    RunNotFound,
    StoreUnavailable,
)
from journal.handle import Journal
from journal.ids import RunId
from journal.log import Log as RunLog
from journal.purging import purge
from journal.records import Claim, Release
from journal.store import AppendAnswer, Loaded
from journal.summary import is_restart_point, with_summary

pytestmark = pytest.mark.usefixtures("no_waiting")


class Resuming(FaultyStore):
    """Gives a holder the first record and what stands from the last commit on, as JetStream does.
    `left_out` more records are missing; `commits` are the headers of what was appended."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.left_out = 0
        self.commits: list[int] = []

    async def resume(self, run_id: RunId) -> Loaded:
        loaded = await self.load(run_id)
        points = [i for i, e in enumerate(loaded.entries) if is_restart_point(e.record)]
        from_here = points[-1] + self.left_out if points else 1
        return Loaded((*loaded.entries[:1], *loaded.entries[from_here:]), loaded.tail)

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        self.commits.append(entry.commit)
        return await super().append(run_id, entry, expected=expected)


def committed(*behind: Any) -> Log:
    """A run whose first turn has ended with a summary, at record 3; it waits for an input."""
    log = Log(started_here(), claimed())
    body: Any = log.here(goes_on({"turn": 1}, until_input=True))
    commit = msgspec.structs.replace(body, at=AT)
    log.add(with_summary(log.fold, commit))
    for body in behind:
        log.add(body)
    return log


def started_here() -> Any:
    return started(revision="")


# ---- from the last commit on --------------------------------------------------------------------


@pytest.mark.parametrize("behind", [(), (submitted(),), (submitted(), claimed("w2"))])
async def test_what_is_read_from_the_last_commit_on_is_the_run_as_it_is(behind: Any):
    store = Resuming()
    await committed(*behind).store(store)
    whole = await RunLog.read(store, RUN)
    log = await RunLog.resumed(store, RUN, by="w3", known=whole.tail)
    assert (log.tail, log.restart_at) == (whole.tail, 3) == (3 + len(behind), whole.restart_at)
    assert (log.fold.n, log.fold.head, log.fold.state) == (log.tail, whole.fold.head, {"turn": 1})
    assert list(log.fold.inputs) == list(whole.fold.inputs)
    assert log.fold.iteration == 1


async def test_what_is_appended_to_it_follows_the_tail_and_names_the_commit():
    store = Resuming()
    await committed(submitted()).store(store)
    log = await RunLog.resumed(store, RUN, by="w3")
    store.commits.clear()
    assert await log.append(lambda fold: Claim(worker="w3", revision="1", reason="wake"))
    assert store.commits == [3]
    assert (await types_of(store))[-2:] == ["input", "claim"]


async def test_what_is_appended_where_no_commit_is_names_none():
    store = Resuming()
    await Log(started_here()).store(store)
    log = await RunLog.resumed(store, RUN, by="w3")
    store.commits.clear()
    for n in (1, 2):
        assert await log.append(lambda fold, n=n: submitted(f"i{n}"))
    assert (store.commits, log.restart_at) == ([0, 0], 0)


async def test_a_run_without_a_commit_is_read_from_its_start():
    store = Resuming()
    await Log(started_here(), claimed("w1"), submitted()).store(store)
    log = await RunLog.resumed(store, RUN, by="w3")
    assert (log.tail, log.restart_at, log.fold.n) == (3, 0, 3)
    assert list(log.fold.claims) == [2]


@pytest.mark.dishonest
async def test_a_gap_that_no_commit_closes_is_damage_at_the_record_behind_it():
    store = Resuming()
    await committed(submitted()).store(store)
    store.left_out = 1
    with pytest.raises(JournalDamaged, match="record 4 is no commit to restart at") as caught:
        await RunLog.resumed(store, RUN, by="w3")
    assert caught.value.where == "memory, run a1, record 4"
    assert [entry.record.n for entry in caught.value.good] == [1]


@pytest.mark.dishonest
async def test_another_runs_journal_is_damage_from_its_last_commit_on_too():
    store = Resuming()
    for position, entry in enumerate(committed().entries):
        await store.append(RunId("b2"), entry, expected=position)
    with pytest.raises(JournalDamaged, match="it is the journal of run a1"):
        await RunLog.resumed(store, RunId("b2"), by="w3")


# ---- whose journal, and where it is damaged -----------------------------------------------------


async def test_a_journal_that_was_loaded_is_folded_to_its_end():
    store = await Log(started_here(), claimed(), submitted()).store()
    log = RunLog.of(store, RUN, await store.load(RUN))
    assert (log.run_id, log.by, log.tail, log.fold.n) == (RUN, "library", 3, 3)


@pytest.mark.dishonest
async def test_the_journal_of_another_run_is_damage_at_its_first_record():
    store = FaultyStore()
    for position, entry in enumerate(Log(started_here(), submitted()).entries):
        await store.append(RunId("b2"), entry, expected=position)
    with pytest.raises(JournalDamaged, match="it is the journal of run a1") as caught:
        await RunLog.read(store, "b2")
    assert (caught.value.where, caught.value.good) == ("memory, run b2, record 1", ())


@pytest.mark.dishonest
@pytest.mark.parametrize("read_before", [0, 2])
async def test_damage_is_said_to_be_where_it_stands_however_much_was_read_before(read_before: int):
    good = Log(started_here(), submitted("i1"), submitted("i2"))
    stray = Log(started_here(), submitted("i3"), submitted("i4"), submitted("i5"))
    store, log = FaultyStore(), None
    for position, entry in enumerate([*good.entries, stray.entries[3]]):
        if position == read_before:
            log = await RunLog.read(store, RUN)
        await store.append(RUN, entry, expected=position)
    assert log is not None
    with pytest.raises(JournalDamaged) as caught:
        await log.refresh()
    assert caught.value.where == "memory, run a1, record 4"
    assert [entry.record.n for entry in caught.value.good] == [1, 2, 3][read_before:]


@pytest.mark.dishonest
async def test_damage_behind_a_tombstone_is_said_to_be_where_it_stands_now():
    """What stood before the tombstone is gone: places are counted in what is left."""
    store = await Log(started_here(), claimed(), answered()).store(FaultyStore())
    await purge(store, RUN)
    stray = Log(started_here(), *[submitted(f"i{n}") for n in range(4)])
    await store.append(RUN, stray.entries[4], expected=4)
    with pytest.raises(JournalDamaged) as caught:
        await RunLog.read(store, RUN)
    assert caught.value.where == "memory, run a1, record 2"


async def test_a_run_that_a_newer_version_began_is_there_and_not_runnable():
    log = Log()
    log.entries.append(log.raw(newer(Log().sealed(started_here()), b"run.begun")))
    with pytest.raises(NewerVersion, match=r"run\.begun"):
        (await RunLog.read(await log.store(), RUN)).check_runnable()


async def test_an_owner_that_reads_a_newer_versions_record_stops_there():
    store = await Log(started_here()).store(FaultyStore())
    journal = await Journal.open(store, RUN, is_write=lambda _: True)
    log = Log(started_here())
    log.entries.append(log.raw(newer(log.sealed(submitted()), b"thought")))
    await PlainView(store).append(RUN, log.entries[1], expected=1)
    with pytest.raises(NewerVersion, match="thought"):
        await journal.refresh()
    await journal.close()


def newer(entry: Entry, type_: bytes) -> bytes:
    return entry.raw.replace(b'"%s"' % entry.type.encode(), b'"%s"' % type_, 1)


# ---- a leader that fell behind ------------------------------------------------------------------


@pytest.mark.parametrize("known", [2, 3])
async def test_a_read_that_ends_at_what_was_known_is_good(known: int):
    store = await Log(started_here(), claimed(), submitted()).store(FaultyStore(shared=True))
    assert (await RunLog.resumed(store, RUN, by="w3", known=known)).tail == 3


async def test_nothing_is_decided_on_a_read_that_ends_before_what_was_known():
    store = await Log(started_here(), claimed()).store(FaultyStore(shared=True))
    with pytest.raises(StoreUnavailable, match="read up to 2, and to 3 before") as caught:
        await RunLog.resumed(store, RUN, by="w3", known=3)
    assert caught.value.run_id == RUN
    with pytest.raises(StoreUnavailable):
        await signal(store, RUN, "cancel", {"reason": "enough"}, known=3)
    with pytest.raises(StoreUnavailable):
        await submit(store, RUN, "hurry", known=3)
    assert await types_of(store) == ["run.started", "claim"]


# ---- a run that was purged meanwhile ------------------------------------------------------------


async def end_and_purge(store: FaultyStore) -> None:
    await write_as_other(store, answered())
    await purge(PlainView(store), RUN)


async def test_a_reader_finds_a_run_purged_that_it_read_before():
    store = await Log(started_here(), claimed(), submitted()).store(FaultyStore(shared=True))
    log = await RunLog.read(store, RUN)
    await end_and_purge(store)
    await log.refresh()
    assert log.fold.purged is not None
    assert (log.tail, log.fold.n, log.fold.started, log.fold.inputs) == (5, 5, None, {})
    with pytest.raises(RunNotFound, match="was purged"):
        log.check_runnable()
    await log.refresh()
    assert log.tail == 5


async def test_a_holder_finds_its_run_purged_and_writes_no_more():
    store = await Log(started_here()).store(FaultyStore(shared=True))
    log = await RunLog.read(store, RUN, by="w1")
    claim = await log.append(lambda fold: Claim(worker="w1", revision="1", reason="new"))
    assert claim is not None
    log.claim, log.owner = claim.n, True
    await write_as_other(store, submitted())
    await end_and_purge(store)
    with pytest.raises(Fenced, match="has ended and was purged") as caught:
        await log.refresh()
    assert caught.value.run_id == RUN
    appends = store.appends
    with pytest.raises(Fenced):
        await log.append(lambda fold: Release(reason="late"))
    assert store.appends == appends
    assert await types_of(store) == ["run.purged"]


DOORS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "signal": lambda store: signal(store, RUN, "cancel", {"reason": "enough"}),
    "input": lambda store: submit(store, RUN, "hurry"),
    "withdrawal": lambda store: withdraw(store, RUN, "i1"),
}


@pytest.mark.parametrize("door", DOORS)
async def test_what_is_sent_as_a_run_ends_and_is_purged_is_refused(door: str):
    store = await Log(started_here(), claimed(), submitted()).store(FaultyStore(shared=True))
    store.faults[store.appends + 1] = lambda: end_and_purge(store)
    with pytest.raises(RunNotFound, match="was purged"):
        await DOORS[door](store)
    assert await types_of(store) == ["run.purged"]


async def test_an_input_that_is_sent_again_as_its_run_is_purged_is_refused():
    store = await Log(started_here(), claimed(), submitted()).store(FaultyStore(shared=True))
    told = store.notify

    async def notify(run_id: RunId, payload: bytes) -> None:
        await end_and_purge(store)
        await told(run_id, payload)

    store.notify = notify  # type: ignore[method-assign]
    with pytest.raises(RunNotFound, match="was purged"):
        await submit(store, RUN, "hurry", request_id="i1")


async def test_of_two_who_purge_at_once_both_have_done_it():
    log = Log(started_here(), claimed(), answered())
    store = await log.store(FaultyStore(shared=True))
    store.faults[store.appends + 1] = lambda: purge(PlainView(store), RUN)
    await purge(store, RUN)
    assert await types_of(store) == ["run.purged"]


async def test_a_run_that_is_purged_as_it_is_taken_is_not_there():
    store = await Log(started_here(), claimed("w1")).store(FaultyStore(shared=True))
    store.answers["w1"] = "no"
    store.faults[store.appends + 1] = lambda: end_and_purge(store)
    with pytest.raises(RunNotFound, match="was purged"):
        await Journal.open(store, RUN, is_write=lambda _: True)
    assert await types_of(store) == ["run.purged"]


# ---- an append that is in doubt -----------------------------------------------------------------


async def test_an_append_that_is_cancelled_between_two_tries_ends_the_handle(time: VirtualTime):
    """What was published may still land: nothing is written behind it."""
    store = await Log(started_here()).store(FaultyStore())
    store.every = "lost"
    log = await RunLog.read(store, RUN)

    async def cancelled() -> None:
        raise asyncio.CancelledError

    time.on_sleep.append(cancelled)
    with pytest.raises(asyncio.CancelledError):
        await log.append(lambda fold: submitted("i1"))
    appends = store.appends
    with pytest.raises(Fenced):
        await log.append(lambda fold: submitted("i2"))
    assert store.appends == appends


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        (start_of("0/0", unsafe=False), start_of("0/1", unsafe=False)),
        (submitted("i2"), cancel()),
    ],
)
async def test_another_record_of_the_same_id_is_not_this_one(theirs: Any, mine: Any):
    """An id may come from outside, and be given twice."""
    store = await Log(started_here(), submitted()).store(FaultyStore())
    log = await RunLog.read(store, RUN)
    store.faults[store.appends + 1] = lambda: write_as_other(store, theirs)
    given = "fedcba987654-3"
    assert await log.append(lambda f: None if f.repeats(given) else mine, record_id=given) is None
    assert (log.fold.n, log.fold.cancel) == (3, None)


async def test_bytes_that_were_never_acknowledged_are_remembered():
    store = await Log(started_here()).store(FaultyStore())
    load = store.load
    torn = [7, 0]

    async def cut(run_id: RunId, *, after: int = 0) -> Loaded:
        loaded = await load(run_id, after=after)
        return Loaded(loaded.entries, loaded.tail, torn.pop(0))

    store.load = cut  # type: ignore[method-assign]
    log = await RunLog.read(store, RUN)
    assert log.torn == 7
    await log.refresh()
    assert log.torn == 7


async def test_a_log_that_two_tasks_write_to_at_once_refuses_the_second_one():
    store = await Log(started_here()).store(FaultyStore())
    log = await RunLog.read(store, RUN)

    async def second() -> None:
        with pytest.raises(ConcurrentUse, match="two tasks"):
            await log.append(lambda fold: submitted("i2"))

    store.faults[store.appends + 1] = second
    assert await log.append(lambda fold: submitted("i1"))
    assert await types_of(store) == ["run.started", "input"]
