"""R15 on every store: what a purge leaves, cut off or not, and what becomes of who read before."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kit.build import Killed, answered, claimed, failed, started, submitted
from kit.build import Log as Honest
from kit.simulated.as_process import ModelProcess

from journal.audit import Violation
from journal.auditing import audit_run
from journal.codec import Entry
from journal.doors import signal, start
from journal.errors import InputMismatch, RunNotFound
from journal.fleet import Fleet
from journal.following import followed
from journal.ids import RunId
from journal.limits import RETENTION_S
from journal.listing import Filter
from journal.log import Log
from journal.online_audit import online_audit
from journal.purging import Purger, purge
from journal.records import Record
from journal.retention import FINISHED, Retention
from journal.store import Appended, Conflict, Store
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

pytestmark = pytest.mark.timeout(60)

each_store = pytest.mark.parametrize(
    "backend", ["memory", "file", "jetstream", "sharded", "model"], indirect=True
)
"""Not the cluster, which takes seconds to start: a trim on it is in test_store_conformance.py."""

RUN = RunId("a1")
NOW = Retention(keep_s=0, resumable_s=0)


class Journal:
    """One as its writers left it, with the headers a shared store keeps, put there bit by bit."""

    def __init__(self, store: Store, run: str, *bodies: Record) -> None:
        self.entries: list[Entry] = []
        self.tail = 0
        self._store = store
        self._run = RunId(run)
        self._put = 0
        log = Honest()
        log.at = datetime.now(UTC).isoformat(timespec="milliseconds")
        for body in bodies:
            log.add(body)
            status = log.fold.status() if store.shared else None
            self.entries.append(Entry(log.entries[-1].record, log.entries[-1].raw, status))

    async def put(self, upto: int | None = None) -> None:
        """Its first records; None: all of them."""
        for entry in self.entries[self._put : upto]:
            answer = await self._store.append(self._run, entry, expected=self.tail)
            assert isinstance(answer, Appended), answer
            self.tail = answer.tail
            self._put += 1


async def put(store: Store, run: str, *bodies: Record) -> None:
    await Journal(store, run, *bodies).put()


def done(run: str, *middle: Record) -> list[Record]:
    return [started(run=run), claimed(), *middle, answered()]


async def types(store: Store, run: RunId = RUN) -> list[str]:
    return [entry.type for entry in (await store.load(run)).entries]


async def to_purge(
    store: Store, age_s: float = 0, statuses: frozenset[str] = FINISHED
) -> list[str]:
    return [run async for run in store.ended(age_s=age_s, statuses=statuses)]


async def cut_off(store: Any, monkeypatch: pytest.MonkeyPatch, run: RunId = RUN) -> None:
    """A purger that is killed between the tombstone and the trim."""

    async def killed(run_id: RunId, *, before: int) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(store, "trim", killed)
        with pytest.raises(Killed):
            await purge(store, run)
    assert (await types(store, run))[-1] == "run.purged"
    assert len(await types(store, run)) > 1


@each_store
async def test_a_purge_that_was_cut_off_is_listed_and_finished_by_the_next(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store, RUN, *done(RUN))
    await put(store, "b1", started(run="b1"))
    await cut_off(store, monkeypatch)
    assert "a1" in await to_purge(store, RETENTION_S)  # whatever its age
    assert (await Fleet(store).page(Filter(status="completed"))).runs == []
    assert [run["run"] for run in (await Fleet(store).page(Filter())).runs] == ["b1"]
    audited = await audit_run(store, RUN)
    assert (audited.violations, audited.records) == ((), 4)
    with pytest.raises(InputMismatch, match="stays used"):
        await start(store, "helpdesk", "VPN is down", run_id=RUN)
    purger = Purger(store, Retention(), by="x")
    outcomes = [(one.run, one.what) async for one in purger.purge_ended()]
    assert ("a1", "finished") in outcomes
    assert await types(store) == ["run.purged"]
    audited = await audit_run(store, RUN)
    assert (audited.violations, audited.records) == ((), 1)
    assert await types(store, RunId("b1")) == ["run.started"]


@each_store
@pytest.mark.parametrize("read", [1, 2, 3, 4])
async def test_whoever_read_a_run_before_its_purge_finds_it_purged_and_not_damaged(
    store: Store, read: int
) -> None:
    journal = Journal(store, RUN, *done(RUN, submitted()))
    await journal.put(read)
    log = await Log.read(store, RUN)
    async with aclosing(followed(store, RUN)) as follower:
        assert [(await anext(follower)).record.n for _ in range(read)] == [*range(1, read + 1)]
        await journal.put()
        await purge(store, RUN)
        written = await log.append(lambda fold: None if fold.finished else submitted("i2"))
        await log.refresh()
        assert written is None and log.gone
        if read < len(journal.entries):
            with pytest.raises(RunNotFound, match="was purged"):
                await anext(follower)
    with pytest.raises(RunNotFound, match="was purged"):
        await signal(store, RUN, "cancel", {})
    assert await types(store) == ["run.purged"]


@each_store
async def test_nothing_is_appended_behind_a_tombstone_at_whatever_token(store: Store) -> None:
    """A directory's are offsets, and one of the old file may be where the tombstone ends."""
    journal = Journal(store, RUN, *done(RUN))
    await journal.put()
    await purge(store, RUN)
    end = (await store.load(RUN)).tail
    other = Journal(store, RUN, *done(RUN, submitted()))
    tails = {0, 1, journal.tail, *([end] if isinstance(store, FileStore) else [])}
    for tail in tails:
        assert await store.append(RUN, other.entries[-1], expected=tail) == Conflict()
    assert await types(store) == ["run.purged"]


@each_store
async def test_a_trim_that_comes_twice_takes_nothing_more(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another purger's that read the run before it was trimmed."""
    trim, bounds = store.trim, list[int]()

    async def noted(run_id: RunId, *, before: int) -> None:
        bounds.append(before)
        await trim(run_id, before=before)

    await put(store, RUN, *done(RUN))
    monkeypatch.setattr(store, "trim", noted)
    await purge(store, RUN)
    await trim(RUN, before=bounds[0])
    assert await types(store) == ["run.purged"]


@each_store
async def test_two_purgers_at_once_leave_one_tombstone_and_each_run_once(store: Store) -> None:
    runs = [f"r{n}" for n in range(8)]
    for run in runs:
        await put(store, run, *done(run))

    async def pass_of(by: str) -> list[Any]:
        return [one async for one in Purger(store, NOW, by=by).purge_ended()]

    outcomes = [one for each in await asyncio.gather(*map(pass_of, "xyz")) for one in each]
    assert sorted(one.run for one in outcomes if one.what == "purged") == runs
    assert {one.why for one in outcomes if one.what == "kept"} <= {"changed"}
    for run in runs:
        assert await types(store, RunId(run)) == ["run.purged"]


@each_store
async def test_a_purge_while_it_is_read_in_pages_is_no_damage(store: Store) -> None:
    """A page is 256 records; the purge comes behind the first one."""
    await put(store, RUN, *done(RUN, *[submitted(f"i{n}") for n in range(250)]))
    pages = store.stored(RUN)
    first = await anext(pages)
    await purge(store, RUN)
    rest = [record async for page in pages for record in page]
    assert first[0].data and len(first) + len(rest) >= 1
    assert (await Log.read(store, RUN)).gone
    assert (await audit_run(store, RUN)).violations == ()
    assert (await Fleet(store).page(Filter())).runs == []


@each_store
async def test_only_what_may_be_to_purge_is_listed(store: Store) -> None:
    await put(store, "a1", *done("a1"))
    await put(store, "b1", started(run="b1"), claimed(), failed(retriable=True))
    await put(store, "c1", started(run="c1"), claimed())
    await put(store, "d1", *done("d1"))
    await purge(store, "d1")
    told = isinstance(store, JetStreamStore)
    listed = await to_purge(store)
    assert [run for run in listed if run in ("a1", "b1")] == ["a1", "b1"]
    if told:
        assert listed == ["a1", "b1"]
        assert await to_purge(store, statuses=frozenset({"failed"})) == ["b1"]
        heads = [head async for head in store.heads()]
        words = ["completed", "failed", "running", "purged"]
        assert heads == list(zip(["a1", "b1", "c1", "d1"], words, strict=True))
        done_ = [run async for run, _ in store.heads(status=frozenset({"completed"}))]
        assert done_ == ["a1"]
    if told or isinstance(store, FileStore):
        assert "d1" not in listed
        assert await to_purge(store, 3600) == []
    purger = Purger(store, NOW, by="x")
    outcomes = {one.run: one.why or one.what async for one in purger.purge_ended()}
    assert outcomes.pop("c1", "running") == "running"
    assert outcomes.pop("d1", "finished") == "finished"
    assert outcomes == {"a1": "purged", "b1": "purged"}


@each_store
async def test_a_stamp_is_the_stores_and_new_with_each_record(store: Store) -> None:
    journal = Journal(store, RUN, *done(RUN))
    await journal.put(1)
    first = await store.stamp(RUN)
    assert first.stored <= first.now
    await journal.put()
    last = await store.stamp(RUN)
    assert first.stored <= last.stored <= last.now
    none = await store.stamp(RunId("nobody"))
    assert none.stored == none.now
    await store.check_trim()
    assert len(await types(store)) == len(journal.entries)


@each_store
async def test_a_trim_without_a_bound_is_refused(store: Store) -> None:
    """To nats-server a purge up to 0 is one of everything."""
    await put(store, RUN, *done(RUN))
    with suppress(AssertionError):  # a memory store has nothing below 0
        await store.trim(RUN, before=0)
    assert len(await types(store)) == 3


async def test_of_a_file_nothing_but_a_tombstone_is_left_alone(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    journal = Journal(store, RUN, *done(RUN))
    await journal.put()
    for before in (1, journal.tail):
        with pytest.raises(AssertionError):
            await store.trim(RUN, before=before)
    assert len(await types(store)) == len(journal.entries)
    assert os.listdir(tmp_path) == ["a1.jsonl"]


# ---- clocks -------------------------------------------------------------------------------------


DAY_NS = 86400 * 10**9


async def test_a_worker_whose_clock_is_ahead_purges_nothing_early(
    model: ModelProcess, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stamps what it stores, and says what time it is; ours must agree."""
    ahead_ns = 0
    now = model.model.clock.now
    monkeypatch.setattr(model.model.clock, "now", lambda: now() + ahead_ns)
    await provision(model.url, namespace=namespace)
    async with JetStreamStore(model.url, namespace=namespace) as store:
        await put(store, RUN, *done(RUN))

        async def passed(ours_ahead: timedelta) -> list[str]:
            def clock() -> datetime:
                return datetime.now(UTC) + ours_ahead

            purger = Purger(store, Retention(), by="x", clock=clock)
            return [one.why or one.what async for one in purger.purge_ended()]

        ahead_ns = 29 * DAY_NS
        assert await passed(timedelta(days=31)) == []
        ahead_ns = 31 * DAY_NS
        assert await passed(timedelta(days=29)) == ["young"]
        assert await passed(timedelta(days=31)) == ["purged"]


# ---- who audits meanwhile -----------------------------------------------------------------------


@each_store
async def test_an_audit_that_goes_on_finds_no_fault_with_a_purge_in_two_parts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks before it, between the tombstone and the trim, and behind it; and begins anew."""
    if not isinstance(store, JetStreamStore | FileStore):
        return
    found: list[Violation] = []

    def report(run: RunId | None, violation: Violation) -> None:
        found.append(violation)

    for run in ("a1", "b1"):
        await put(store, run, *done(run, submitted()))
    audit = online_audit(store, report)
    await audit.look()
    await cut_off(store, monkeypatch)
    await audit.look()
    await online_audit(store, report).look()
    await purge(store, RUN)
    await purge(store, "b1")
    await audit.look()
    await online_audit(store, report).look()
    assert found == []
