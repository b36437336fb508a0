"""R53: a sweep's pass reads what changed, finds what nobody would move on, and stops at no stream
that can't be read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from kit.raw_client import ask
from kit.records import fill, journal_of
from kit.servers import NatsServer
from kit.waiting import eventually

from journal import sweep as module
from journal.errors import StoreUnavailable
from journal.ids import RunId
from journal.shards import shard_of
from journal.store import Loaded
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_listing import Head, Listing
from journal.stores.provision import provision
from journal.sweep import keep_sweeping, sweep_shard
from journal.sweep_book import Book


@pytest.fixture(autouse=True)
def none_is_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRESH_S", -3600.0)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[RunId]:
    """Runs whose heads were asked for."""
    found: list[RunId] = []
    page = Listing._page

    async def noted(self: Listing, run_ids: Sequence[RunId]) -> tuple[dict[RunId, Head], int]:
        found.extend(run_ids)
        return await page(self, run_ids)

    monkeypatch.setattr(Listing, "_page", noted)
    return found


def agent_of(run: str = "r1") -> str:
    return journal_of(1, run).entries[0].record.agent  # type: ignore[attr-defined]


async def swept(
    store: JetStreamStore, book: Book, agents: Mapping[str, str] | None = None
) -> list[str]:
    wanted = agents or {agent_of(): "1"}
    (shard,) = store.shards
    done = await sweep_shard(store, shard, book, agents=wanted, known=wanted, held=())
    return sorted(done.dispatched)


async def test_a_pass_reads_what_changed_since_the_last_one(
    direct: JetStreamStore, read: list[RunId]
) -> None:
    book = Book()
    assert await swept(direct, book) == []
    for run in ("r1", "r2"):
        await fill(direct, journal_of(1, run))
    assert await swept(direct, book) == ["r1", "r2"]
    read.clear()
    assert await swept(direct, book) == [], "a task tells of them now"
    done = journal_of(1, "r3")
    done.completed()
    await fill(direct, done)
    await fill(direct, journal_of(2, "r4"))
    assert await swept(direct, book) == ["r4"]
    assert read == [] and sorted(book.open) == ["r1", "r2", "r4"]


async def test_a_server_that_lags_hides_no_run(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On three servers any of them may tell the heads: as of what it has."""
    page = Listing._page
    stale: dict[RunId, Head] = {}

    async def lags(self: Listing, run_ids: Sequence[RunId]) -> tuple[dict[RunId, Head], int]:
        found, _ = await page(self, run_ids)
        return found | stale, 1

    chain = journal_of(1, "r1")
    chain.entries[0] = msgspec.structs.replace(chain.entries[0], status="completed")
    await fill(direct, chain)  # what the lagging server has; there is more
    stale |= (await page(direct.shards[0].listing, [RunId("r1")]))[0]
    again = journal_of(2, "r1").entries[1]
    await direct.append(RunId("r1"), again, expected=1)
    monkeypatch.setattr(Listing, "_page", lags)
    assert await swept(direct, Book()) == ["r1"]


async def test_a_look_that_ends_before_what_was_noted_settles_nothing(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was deposed answers so: the run would be forgotten, as one that rests."""
    chain = journal_of(2, "r1")
    await fill(direct, chain)
    book, resume = Book(), direct.resume

    async def old(run_id: RunId) -> Loaded:
        return Loaded((), 0)

    monkeypatch.setattr(direct, "resume", old)
    with pytest.raises(StoreUnavailable, match="read up to 0, and to 2 before"):
        await swept(direct, book)
    monkeypatch.setattr(direct, "resume", resume)
    assert await swept(direct, book) == ["r1"]


async def test_runs_of_other_agents_are_looked_at_once(direct: JetStreamStore) -> None:
    await fill(direct, journal_of(1, "r1"))
    book = Book()
    assert await swept(direct, book, {"other": "1"}) == []
    assert book.open == {}


async def test_a_stream_that_can_not_be_read_keeps_nobody_from_the_others(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await provision(server.url, shards=2)
    runs = [f"r{number}" for number in range(8)]
    kept = {run for run in runs if shard_of(RunId(run), 2) == 1}
    async with JetStreamStore(server.url) as store:
        for run in runs:
            await fill(store, journal_of(1, run))
        assert (await ask(server.url, "$JS.API.STREAM.DELETE.RUNFOLD_JOURNAL_0"))["success"]
        looking = asyncio.create_task(
            keep_sweeping(store, lambda: {agent_of(): "1"}, lambda: (), every_s=0.05)
        )

        async def woken() -> bool:
            return {run for run in runs if await store.tasks.holds(RunId(run), agent_of())} == kept

        await eventually(woken)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking


async def test_an_agent_that_comes_later_has_its_runs_looked_at(direct: JetStreamStore) -> None:
    """A bridge's workers come and go: it sweeps for those who polled lately."""
    await fill(direct, journal_of(1, "r1"))
    wanted: dict[str, str] = {"other": "1"}
    asked: list[Any] = []

    def agents() -> dict[str, str]:
        asked.append(1)
        return wanted if len(asked) < 3 else wanted | {agent_of(): "1"}

    looking = asyncio.create_task(keep_sweeping(direct, agents, lambda: (), every_s=0.05))
    await eventually(lambda: direct.tasks.holds(RunId("r1"), agent_of()))
    assert len(asked) >= 3
    looking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await looking
