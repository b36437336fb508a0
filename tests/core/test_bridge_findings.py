"""What the bridge promises and does not keep, without a server. Each test fails now."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit.build import RUN, failed
from kit.records import Chain, fill

from bridge.auth import TokenFile, digest_of
from bridge.feed import Feed, Feeds
from bridge.metrics import Metrics
from bridge.service import Bridge
from bridge.sse import Follow
from journal import doors, purging
from journal.errors import JournalDamaged, RunfoldError, RunNotFound, StoreUnavailable
from journal.following import Watch
from journal.ids import RunId
from journal.log import Log
from journal.records import RunPurged
from journal.store import Loaded
from journal.stores.memory import MemoryStore


class Away(MemoryStore):
    """A store that can't be reached for the first `failures` reads, each taking a moment."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        for _ in range(5):
            await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("not now")
        return await super().load(run_id, after=after)


async def read_and_checked(feed: Feed) -> str:
    try:
        await feed.read(0)
        feed.check()
    except RunfoldError as error:
        return error.code
    return str(feed.last)


async def test_a_read_that_failed_for_another_follower_is_no_read_of_mine() -> None:
    store = Away(0)
    chain = Chain(RUN)
    chain.started()
    await fill(store, chain)
    store.failures = 2
    feed = Feed(store, RUN)
    found = await asyncio.gather(*(read_and_checked(feed) for _ in range(4)))
    assert RunNotFound.code not in found, found


async def test_a_follower_is_not_told_run_not_found_when_two_before_it_go_away() -> None:
    store = Away(0)
    chain = Chain(RUN)
    chain.started()
    await fill(store, chain)
    feed = Feed(store, RUN)
    tasks = [asyncio.create_task(read_and_checked(feed)) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    for _ in range(4):
        await asyncio.sleep(0)
    tasks[1].cancel()
    found = await asyncio.gather(*tasks[2:])
    assert list(found) == ["1", "1"]


class Place:
    def leave(self) -> None: ...


class DeskOf:
    def __init__(self, store: Any) -> None:
        self.store, self.feeds = store, Feeds(store)
        self.stopping, self.metrics = asyncio.Event(), Metrics()

    def take_place(self) -> Place:
        return Place()


async def told(follow: Follow, feed: Feed) -> list[tuple[str, Any]]:
    """What a follower is sent until it ends, or waits for more."""
    task = asyncio.create_task(follow._records(feed, Watch(0.25)))
    done, _ = await asyncio.wait([task], timeout=0.3)
    task.cancel()
    found: list[tuple[str, Any]] = []
    while not follow._queue.empty():
        event = follow._queue.get_nowait()
        made: Any = event() if callable(event) else event
        found.append((made.event, json.loads(made.data).get("name")))
    if done:
        await task
    return found


async def test_a_reopened_run_is_followed_on_beside_who_has_not_read_its_end_yet() -> None:
    """A failed run was resumed. Somebody who still reads what was before keeps the feed; whoever
    joins then from an earlier record is told `end`, and never of what follows."""
    store = MemoryStore()
    chain = Chain(RUN)
    chain.started()
    chain.add(failed("model", retriable=True), status="failed")
    await fill(store, chain)
    desk: Any = DeskOf(store)
    with desk.feeds.of(RUN) as slow:
        await slow.read(0)
        assert slow.ended == "failed"
        assert (await doors.signal(store, RUN, "resume", {})).n == 3
        with desk.feeds.of(RUN) as feed:
            found = await told(Follow(desk, RUN, 1), feed)
    assert ("record", "resume") in found, found
    assert not any(event == "end" for event, _ in found)


async def purged_behind(store: MemoryStore, chain: Chain) -> None:
    """The run goes on, ends and is purged."""
    store_tail = len(chain.entries)
    chain.completed()
    await store.append(chain.run_id, chain.entries[-1], expected=store_tail)
    await purging.purge(store, chain.run_id)


async def test_who_follows_a_run_that_is_purged_meanwhile_hears_of_no_damage() -> None:
    store = MemoryStore()
    chain = Chain(RUN)
    chain.started()
    await fill(store, chain)
    feed = Feed(store, RUN)
    await feed.read(0)
    await purged_behind(store, chain)
    await feed.read(1)
    try:
        feed.check()
    except RunNotFound:
        return
    except JournalDamaged as error:
        raise AssertionError(f"purged, not damaged: {error}") from error


async def test_who_waits_for_a_run_that_is_purged_meanwhile_hears_of_no_damage() -> None:
    store = MemoryStore()
    chain = Chain(RUN)
    chain.started()
    await fill(store, chain)
    log = await Log.read(store, RUN)
    await purged_behind(store, chain)
    try:
        await log.refresh()
    except JournalDamaged as error:
        raise AssertionError(f"purged, not damaged: {error}") from error
    assert isinstance(log.fold.purged, RunPurged)


def written(path: Path, token: str, name: str = "alice") -> None:
    entry = {"name": name, "scopes": ["admin"], "sha256": digest_of(token)}
    path.write_bytes(msgspec.json.encode({"tokens": [entry]}))


def test_the_token_file_is_read_again_also_where_its_size_and_mtime_are_the_same(
    tmp_path: Path,
) -> None:
    """Two writes within one tick of the file system's clock, or a copy that keeps times."""
    path = tmp_path / "tokens.json"
    written(path, "rf_old")
    was = path.stat()
    auth = TokenFile(path)
    assert auth.identify("Bearer rf_old") is not None
    written(path, "rf_new")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert auth.identify("Bearer rf_old") is None


def test_who_has_no_token_learns_neither_the_files_path_nor_a_name_from_health(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens.json"
    written(path, "rf_old")
    auth = TokenFile(path)
    path.write_text('{"tokens": [{"name": "carol", "scopes": [], "sha256": ""}]}')
    said = " ".join(Bridge("nats://127.0.0.1:1", auth=auth).health().problems)
    assert str(tmp_path) not in said
    assert "carol" not in said


@pytest.mark.dishonest
async def test_a_journal_that_lost_records_is_damaged_also_where_its_tombstone_is_there() -> None:
    """A purge removes from the front: who reads from record 1 on and finds a gap has lost some."""
    store = MemoryStore()
    chain = Chain(RUN)
    chain.started()
    chain.steps(2)
    chain.completed()
    chain.purged()
    await fill(store, chain)
    del store._journals[RUN][3], store._journals[RUN][4]
    try:
        log = await Log.read(store, RUN)
    except JournalDamaged:
        return
    raise AssertionError(f"taken as purged: {log.fold.purged is not None}")
