"""Restart points, heads of many runs, and what is told without being kept."""

from __future__ import annotations

import msgspec
import pytest
from kit.raw_client import ask
from kit.records import Chain, fill, journal_of, raws
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.codec import Entry
from journal.ids import RunId
from journal.store import Appended, Loaded
from journal.stores import jetstream_listing
from journal.stores.jetstream import JetStreamStore

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
    heard: list[int] = []
    chain = journal_of(3)
    async with direct.appended(chain.run_id, lambda: heard.append(1)):
        await fill(direct, journal_of(2, "another"))
        await fill(direct, chain)
        await eventually(lambda: len(heard) == 3)
    answer = await direct.append(
        chain.run_id, chain.step_started("x"), expected=(await direct.load(chain.run_id)).tail
    )
    assert isinstance(answer, Appended) and len(heard) == 3


async def test_all_workers_report_also_one_that_is_broken(direct: JetStreamStore) -> None:
    assert await direct.ask_workers(5) == []

    def broken() -> bytes:
        raise KeyError("x")

    async with direct.reporting(lambda: b"one"), direct.reporting(broken):
        reports = await direct.ask_workers(0.5)
    assert sorted(reports) == [b"one", b'{"error":"KeyError: \'x\'"}']


async def test_a_store_wakes_through_its_tasks(direct: JetStreamStore) -> None:
    run_id = RunId("Order.7")
    await direct.wake(run_id, "desk", cause=3)
    assert await direct.tasks.holds(run_id, "desk")
