"""Restart points, heads of many runs, and what is told without being kept."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from kit.raw_client import ask
from kit.records import Chain, fill, journal_of, raws
from kit.servers import NatsServer
from kit.waiting import eventually

from journal import following
from journal.codec import Entry, record_hash
from journal.fleet import Fleet
from journal.ids import RunId
from journal.limits import READ_BATCH
from journal.log import Log
from journal.store import Appended, Loaded
from journal.stores import jetstream_listing
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_read import Patience, Stored

STREAM = "RUNFOLD_JOURNAL_0"


# ---- restart points ------------------------------------------------------------------------------


async def committed(store: JetStreamStore, chain: Chain, at: frozenset[int]) -> list[int]:
    """Append the chain; the records with these n are commits to restart at. The sequences."""
    tokens: list[int] = []
    commit = 0
    for entry in chain.entries:
        named = -1 if entry.record.n in at else commit
        answer = await store.append(
            chain.run_id,
            msgspec.structs.replace(entry, commit=named),
            expected=tokens[-1] if tokens else 0,
        )
        assert isinstance(answer, Appended)
        tokens.append(answer.tail)
        commit = answer.tail if named == -1 else commit
    return tokens


def numbers(loaded: Loaded) -> list[int]:
    return [entry.record.n for entry in loaded.entries]


@pytest.mark.parametrize("records", [7, 8, 20])
async def test_a_holder_resumes_from_the_first_record_and_the_last_commit(
    direct: JetStreamStore, records: int
) -> None:
    chain = journal_of(records)
    await fill(direct, journal_of(3, "another"))
    tokens = await committed(direct, chain, frozenset([4, 7]))
    resumed = await direct.resume(chain.run_id)
    whole = await direct.load(chain.run_id)
    assert numbers(resumed) == [1, *range(7, records + 1)]
    assert resumed.entries == (whole.entries[0], *whole.entries[6:])
    assert resumed.tail == whole.tail == tokens[-1]
    commits = [entry.commit for entry in whole.entries]
    assert commits == [0, 0, 0, -1, tokens[3], tokens[3], -1, *[tokens[6]] * (records - 7)]


async def test_without_a_restart_point_a_holder_resumes_with_everything(
    direct: JetStreamStore,
) -> None:
    chain = journal_of(5)
    await fill(direct, chain)
    assert await direct.resume(chain.run_id) == await direct.load(chain.run_id)
    assert await direct.resume(RunId("nobody")) == Loaded((), 0)


async def test_a_restart_point_at_the_first_record_leaves_nothing_out(
    direct: JetStreamStore,
) -> None:
    chain = journal_of(5)
    await committed(direct, chain, frozenset([1]))
    assert await direct.resume(chain.run_id) == await direct.load(chain.run_id)


@pytest.mark.parametrize("commit", ["1", "3", "999", "abc", "-5", ""])
async def test_a_restart_point_that_is_none_is_not_believed(
    direct: JetStreamStore, server: NatsServer, commit: str
) -> None:
    await fill(direct, journal_of(2, "another"))  # sequences 1 and 2
    chain = journal_of(3)
    tail = await fill(direct, chain)
    last: Entry = chain.step_started("late")
    headers = {"Nats-Expected-Last-Subject-Sequence": str(tail), "Runfold-Commit": commit}
    await ask(server.url, f"runfold.journal.0.{chain.run_id}", last.raw, headers)
    assert raws(await direct.resume(chain.run_id)) == [entry.raw for entry in chain.entries]


def asked_by(store: JetStreamStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Whom the store asks from now on: the leader, or anybody, for a batch."""
    asked: list[str] = []
    ask_one, ask_many = store._connection.request, store._connection.collect

    async def request(subject: str, *args: Any, **how: Any) -> Any:
        asked.append("leader")
        return await ask_one(subject, *args, **how)

    async def collect(subject: str, *args: Any, **how: Any) -> Any:
        asked.append("batch")
        return await ask_many(subject, *args, **how)

    monkeypatch.setattr(store._connection, "request", request)
    monkeypatch.setattr(store._connection, "collect", collect)
    return asked


@pytest.mark.parametrize("at", ["one record", "at its commit", "behind its commit"])
async def test_a_holder_resumes_in_two_round_trips_at_most(
    direct: JetStreamStore, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader is asked for both ends at once, and for nothing between them where nothing is."""
    chain = journal_of(1 if at == "one record" else 30)
    point = {"one record": 0, "at its commit": 30, "behind its commit": 20}[at]
    await committed(direct, chain, frozenset([point]))
    asked = asked_by(direct, monkeypatch)
    resumed = await direct.resume(chain.run_id)
    assert resumed is not None
    assert numbers(resumed) == ([1, *range(point, 31)] if point else [1])
    assert asked == ["leader", "leader", *["batch"] * (at == "behind its commit")]


async def test_a_long_journal_without_a_restart_point_is_read_in_pages(
    direct: JetStreamStore,
) -> None:
    chain = journal_of(READ_BATCH + 1)
    await fill(direct, chain)
    assert await direct.resume(chain.run_id) is None
    log = await Log.resumed(direct, chain.run_id, by="w")
    assert (log.fold.n, log.fold.head) == (READ_BATCH + 1, record_hash(chain.entries[-1].raw))
    async with aclosing(direct.pages(chain.run_id)) as pages:
        sizes = [len(page.entries) async for page in pages]
    assert max(sizes) <= READ_BATCH and sum(sizes) == READ_BATCH + 1


@pytest.mark.parametrize("point", [0, 4], ids=["all of it", "from its commit"])
@pytest.mark.parametrize("when", ["between the ends", "behind the ends", "within the rest"])
async def test_a_run_that_is_purged_while_a_holder_reads_it_is_purged_and_not_damaged(
    direct: JetStreamStore, point: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = journal_of(9)
    chain.completed()
    tokens = await committed(direct, chain, frozenset([point]))
    reader = direct._shard(chain.run_id).reader
    last, batch = reader.last, reader._batch
    done = asyncio.Event()

    async def purge() -> None:
        if not done.is_set():
            done.set()
            stone = msgspec.structs.replace(
                chain.purged(), commit=tokens[point - 1] if point else 0
            )
            answer = await direct.append(chain.run_id, stone, expected=tokens[-1])
            assert isinstance(answer, Appended)
            await direct.trim(chain.run_id, before=answer.tail)

    async def last_of(subject: str, patience: Patience) -> Stored | None:
        if when == "between the ends":
            await first_read.wait()
            await purge()
        return await last(subject, patience)

    first_read = asyncio.Event()
    first = reader.first

    async def first_of(subjects: str, after: int, patience: Patience) -> Stored | None:
        found = await first(subjects, after, patience)
        first_read.set()
        return found

    async def batch_of(subject: str, after: int, tail: int) -> list[Stored]:
        if when == "behind the ends":
            await purge()
        found = await batch(subject, after, tail)
        if when == "within the rest" and not done.is_set():
            await purge()
            return found[:2]  # it was paused there
        return found

    monkeypatch.setattr(reader, "last", last_of)
    monkeypatch.setattr(reader, "first", first_of)
    monkeypatch.setattr(reader, "_batch", batch_of)
    log = await Log.resumed(direct, chain.run_id, by="w")
    assert done.is_set() and log.gone and log.fold.purged is not None
    assert log.fold.n == 11


async def test_a_restart_point_of_another_run_is_not_believed(
    direct: JetStreamStore, server: NatsServer
) -> None:
    """It is a sequence between the run's own records."""
    chain, other = journal_of(4), journal_of(2, "another")
    tail = await fill(direct, chain)
    await fill(direct, other)  # sequences 5 and 6
    last: Entry = chain.step_started("late")
    headers = {"Nats-Expected-Last-Subject-Sequence": str(tail), "Runfold-Commit": "5"}
    await ask(server.url, f"runfold.journal.0.{chain.run_id}", last.raw, headers)
    log = await Log.resumed(direct, chain.run_id, by="w")
    assert (log.fold.n, log.fold.head) == (5, record_hash(last.raw))


async def test_a_purged_run_resumes_with_its_tombstone(direct: JetStreamStore) -> None:
    chain = journal_of(5)
    chain.completed()
    tokens = await committed(direct, chain, frozenset([3]))
    stone = msgspec.structs.replace(chain.purged(), commit=tokens[2])
    answer = await direct.append(chain.run_id, stone, expected=tokens[-1])
    assert isinstance(answer, Appended)
    await direct.trim(chain.run_id, before=answer.tail)
    assert numbers(await direct.resume(chain.run_id)) == [7]


# ---- heads ---------------------------------------------------------------------------------------


async def test_heads_tell_every_run_and_its_status_in_order(
    direct: JetStreamStore, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_listing, "HEADS_PAGE", 4)
    for number in range(10):
        chain = journal_of(2, f"run.{number}")
        if number % 3 == 0:
            chain.completed()
        await fill(direct, chain)
    bare = Chain("a-run")
    headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
    await ask(server.url, "runfold.journal.0.a-run", bare.started().raw, headers)
    everything = [head async for head in direct.heads()]
    wanted = [(f"run.{n}", "running" if n % 3 else "completed") for n in range(10)]
    assert everything == [("a-run", None), *wanted]
    done = [head async for head in direct.heads(status=frozenset(["completed"]))]
    assert done == [("a-run", None), *((f"run.{n}", "completed") for n in (0, 3, 6, 9))]


async def test_heads_of_no_run_are_none(direct: JetStreamStore) -> None:
    assert [head async for head in direct.heads()] == []


# ---- telling -------------------------------------------------------------------------------------


async def test_notices_and_previews_reach_who_listens(direct: JetStreamStore) -> None:
    run_id = RunId("Order.7")
    notices: list[tuple[str, bytes]] = []
    texts: list[str] = []
    async with (
        direct.notices(lambda run, payload: notices.append((run, payload))),
        direct.previews(run_id, texts.append),
    ):
        await direct.notify(run_id, b"cancel")
        await direct.preview(run_id, "Hé")
        await direct.preview(RunId("other"), "unheard")
        await direct.preview(run_id, "é" * 40_000)
        await eventually(lambda: len(texts) == 2)
    assert notices == [("Order.7", b"cancel")]
    assert texts[0] == "Hé" and len(texts[1].encode()) == 64 * 1024


async def test_a_follower_hears_of_appends_to_its_run_only(direct: JetStreamStore) -> None:
    heard: list[str | None] = []
    chain = journal_of(3)
    async with direct.appended(chain.run_id, heard.append):
        await fill(direct, journal_of(2, "another"))
        await fill(direct, chain)
        await eventually(lambda: len(heard) == 3)
    assert heard == [entry.status for entry in (await direct.load(chain.run_id)).entries]
    answer = await direct.append(
        chain.run_id, chain.step_started("x"), expected=(await direct.load(chain.run_id)).tail
    )
    assert isinstance(answer, Appended) and len(heard) == 3


async def test_who_waits_reads_once_a_run_may_have_stopped_not_at_each_of_its_records(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of ten steps has over twenty records: as many reads for each client that waits."""
    monkeypatch.setattr(following, "POLL_S", 60.0)
    read, refresh = Log.read, Log.refresh
    first, reads = asyncio.Event(), 0

    async def noted(*args: Any, **options: Any) -> Log:
        log = await read(*args, **options)
        first.set()
        return log

    async def counted(log: Log) -> None:
        nonlocal reads
        reads += 1
        await refresh(log)

    monkeypatch.setattr(Log, "read", noted)
    monkeypatch.setattr(Log, "refresh", counted)
    heard: list[str | None] = []
    chain = journal_of(21)
    tail = await fill(direct, journal_of(1))
    fleet = Fleet(direct)
    async with direct.appended(chain.run_id, heard.append), asyncio.TaskGroup() as group:
        waiting = group.create_task(fleet.wait(chain.run_id, timeout_s=60))
        await first.wait()
        for entry in chain.entries[1:]:
            answer = await direct.append(chain.run_id, entry, expected=tail)
            assert isinstance(answer, Appended)
            tail = answer.tail
        await eventually(lambda: len(heard) == 20)
        assert reads == 1, "but the first one"
        assert isinstance(
            await direct.append(chain.run_id, chain.completed(), expected=tail), Appended
        )
    assert waiting.result().status == "completed"
    assert reads > 1


async def test_all_workers_report_also_one_that_is_broken(direct: JetStreamStore) -> None:
    assert await direct.ask_workers(5) == []

    def broken(question: bytes) -> bytes:
        raise KeyError("x")

    async with direct.reporting(lambda _: b"one"), direct.reporting(broken):
        reports = await direct.ask_workers(0.5)
    assert sorted(reports) == [b"one", b'{"error":"KeyError: \'x\'"}']


async def test_a_store_wakes_through_its_tasks(direct: JetStreamStore) -> None:
    run_id = RunId("Order.7")
    await direct.wake(run_id, "desk", cause=3)
    assert await direct.tasks.holds(run_id, "desk")
