"""A journal read in pages is the run as it is, and who reads it never holds it whole (R13, R41)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from kit.build import (
    RUN,
    BridgedStore,
    Log,
    answered,
    cancel,
    claimed,
    goes_on,
    result_of,
    start_of,
    started,
    submitted,
)

import bridge.feed
import bridge.pages
from bridge.feed import Feed, Feeds
from bridge.pages import Pages
from bridge.sse import Follow
from journal.cursor import Cursor
from journal.errors import JournalDamaged, NewerVersion, RunNotFound
from journal.following import Watch, followed
from journal.ids import RunId
from journal.log import Log as RunLog
from journal.records import RunPurged
from journal.store import Loaded
from journal.stores.file import FileStore

ROOT = Path(__file__).resolve().parents[2]
SIZES = [1, 2, 3, 5]


class Paged(BridgedStore):
    """Gives pages of `size` records. `between`: what happens after the first page of a read, once.
    `read`: how many pages were given; `left_out`: positions that are not given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.read = 0
        self.between: Callable[[], Awaitable[object]] | None = None
        self.left_out: set[int] = set()

    async def pages(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Loaded, None]:
        while True:
            loaded = await self.load(run_id, after=after)
            entries = [e for e in loaded.entries if e.position not in self.left_out][: self.size]
            self.read += 1
            await asyncio.sleep(0)  # others go on meanwhile
            last = entries[-1].position if entries else loaded.tail
            yield Loaded(tuple(entries), last)
            if last == loaded.tail:
                return
            after = last
            act, self.between = self.between, None
            if act is not None:
                await act()


def run_of(steps: int, *, end: bool = False) -> Log:
    """A started run with so many steps."""
    log = Log(started(revision=""))
    for n in range(steps):
        log.add(start_of(f"0/{n}"))
        log.add(result_of(f"0/{n}"))
    if end:
        log.add(answered())
    return log


async def stored(log: Log, size: int) -> Paged:
    store = Paged(size)
    for position, entry in enumerate(log.entries):
        await store.append(RUN, entry, expected=position)
    return store


def break_at(store: Paged, n: int) -> None:
    """Record n says that it is another one."""
    raw = store._journals[RUN][n]
    store._journals[RUN][n] = raw.replace(b'"n":%d,' % n, b'"n":%d,' % (n + 500), 1)


async def shown(cursor: Cursor, into: list[int] | None = None) -> list[int]:
    """The ordinals that it gives until nothing follows."""
    found = [] if into is None else into
    while page := await cursor.page():
        found += [entry.record.n for entry in page]
    return found


async def follow(store: Paged, into: list[int], *, after: int = 0) -> None:
    """The ordinals that a follower is given, to the run's end."""
    async with aclosing(followed(store, RUN, after=after)) as entries:
        async for entry in entries:
            into.append(entry.record.n)


def purge_of(store: Paged, log: Log, *, trim: bool = True) -> Callable[[], Awaitable[None]]:
    """The ended run is purged, as a process beside the reader does it."""

    async def act() -> None:
        at = len(log.entries)
        log.add(RunPurged())
        await store.append(RUN, log.entries[-1], expected=at)
        if trim:
            await store.trim(RUN, before=at + 1)

    return act


# ---- the fold ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
async def test_a_journal_read_in_pages_is_the_run_as_it_is(size: int):
    log = Log(started(revision=""), claimed())
    log.add(log.here(goes_on({"turn": 1}, until_input=True)))
    log.add(submitted())
    log.add(claimed("w2"))
    log.add(cancel())
    whole = await RunLog.read(await stored(log, 99), RUN)
    read = await RunLog.read(await stored(log, size), RUN)
    assert (read.tail, read.fold.n, read.fold.head) == (6, 6, whole.fold.head)
    assert (read.restart_at, read.over_at, read.trace) == (
        whole.restart_at,
        whole.over_at,
        whole.trace,
    )
    assert read.state == whole.state


@pytest.mark.parametrize("size", SIZES)
async def test_a_run_that_is_purged_while_it_is_read_is_purged_and_not_damaged(size: int):
    log = run_of(3, end=True)
    store = await stored(log, size)
    store.between = purge_of(store, log)
    read = await RunLog.read(store, RUN)
    assert read.gone and read.fold.purged is not None and read.tail == len(log.entries)


@pytest.mark.parametrize("missing", [4, 8])
@pytest.mark.parametrize("size", SIZES)
async def test_records_that_are_missing_before_a_tombstone_are_damage(size: int, missing: int):
    """What is still missing when it is read again was missing before."""
    log = run_of(3, end=True)
    store = await stored(log, size)
    await purge_of(store, log, trim=False)()
    store.left_out = {missing}
    with pytest.raises(JournalDamaged, match=f"record {missing} is missing"):
        await RunLog.read(store, RUN)


@pytest.mark.parametrize("size", SIZES)
async def test_a_record_that_is_missing_between_pages_is_damage(size: int):
    store = await stored(run_of(3), size)
    store.left_out = {4}
    with pytest.raises(JournalDamaged, match="record 4 is missing") as caught:
        await RunLog.read(store, RUN)
    assert caught.value.where == "memory, run a1, record 4"


# ---- who shows it --------------------------------------------------------------------------------


@pytest.mark.dishonest
@pytest.mark.parametrize("size", SIZES)
async def test_what_is_good_is_shown_before_the_damage_is_told(size: int):
    store = await stored(run_of(3), size)
    break_at(store, 5)
    cursor = Cursor(store, RUN)
    found: list[int] = []
    with pytest.raises(JournalDamaged, match="memory, run a1, record 5: "):
        await shown(cursor, found)
    assert found == [1, 2, 3, 4]
    with pytest.raises(JournalDamaged):
        await cursor.page()


@pytest.mark.dishonest
async def test_the_journal_of_another_run_is_not_shown():
    store = Paged(3)
    for position, entry in enumerate(run_of(2).entries):
        await store.append(RunId("b2"), entry, expected=position)
    with pytest.raises(JournalDamaged, match="it is the journal of run a1"):
        await Cursor(store, RunId("b2")).page()


@pytest.mark.parametrize("size", SIZES)
async def test_who_shows_a_run_that_is_purged_meanwhile_says_so(size: int):
    log = run_of(3, end=True)
    store = await stored(log, size)
    cursor = Cursor(store, RUN)
    await cursor.page()
    await purge_of(store, log)()
    with pytest.raises(RunNotFound, match="was purged"):
        await shown(cursor)


async def test_a_cursor_goes_on_where_records_follow():
    log = run_of(2)
    store = await stored(log, 2)
    cursor = Cursor(store, RUN)
    assert await shown(cursor) == [1, 2, 3, 4, 5]
    log.add(answered())
    await store.append(RUN, log.entries[-1], expected=5)
    assert await shown(cursor) == [6]
    assert cursor.fold.finished


@pytest.mark.parametrize("size", SIZES)
async def test_a_follower_is_given_each_record_once_to_the_end(size: int):
    store = await stored(run_of(4, end=True), size)
    found: list[int] = []
    await follow(store, found, after=2)
    assert found == list(range(3, 11))


async def test_what_follows_a_record_of_a_newer_version_is_given_before_it_is_told():
    log = run_of(1)
    raw = log.sealed(submitted()).raw.replace(b'"type":"input"', b'"type":"thought"')
    log.entries.append(log.raw(raw))
    store = await stored(log, 2)
    found: list[int] = []
    with pytest.raises(NewerVersion):
        await follow(store, found)
    assert found == [1, 2, 3, 4]


# ---- pages of it ---------------------------------------------------------------------------------


def pages_of(store: Any) -> Pages:
    return Pages(store)


async def test_page_after_page_shows_each_record_once_and_reads_the_journal_once():
    log = run_of(40)
    store = await stored(log, 8)
    pages = pages_of(store)
    found: list[bytes] = []
    more = True
    while more:
        page, more = await pages.page(RUN, len(found) + 1, 5)
        found += page
    assert found == [entry.raw for entry in log.entries]
    assert store.read <= len(log.entries) / 8 + 2


@pytest.mark.parametrize("first", [1, 2, 7, 40, 81])
async def test_any_page_is_the_same_as_when_asked_for_in_order(first: int):
    log = run_of(40)
    store = await stored(log, 8)
    page, more = await pages_of(store).page(RUN, first, 5)
    assert page == [entry.raw for entry in log.entries[first - 1 : first + 4]]
    assert more == (first + 4 < len(log.entries))


@pytest.mark.dishonest
async def test_a_page_behind_damage_is_refused_and_one_before_it_is_shown():
    store = await stored(run_of(6), 4)
    break_at(store, 6)
    pages = pages_of(store)
    page, more = await pages.page(RUN, 1, 5)
    assert (len(page), more) == (5, True)
    for first in (6, 7, 12):
        with pytest.raises(JournalDamaged):
            await pages.page(RUN, first, 5)


async def test_a_page_that_is_asked_for_twice_is_the_same_twice():
    log = run_of(10)
    pages = pages_of(await stored(log, 4))
    await pages.page(RUN, 1, 5)
    both = await asyncio.gather(pages.page(RUN, 6, 5), pages.page(RUN, 6, 5))
    assert both[0] == both[1] == ([entry.raw for entry in log.entries[5:10]], True)
    following = await pages.page(RUN, 11, 5)
    assert following == ([entry.raw for entry in log.entries[10:15]], True)


async def test_a_run_with_a_tombstone_has_no_pages_though_records_are_left():
    log = run_of(6, end=True)
    store = await stored(log, 4)
    await purge_of(store, log, trim=False)()
    with pytest.raises(RunNotFound, match="was purged"):
        await pages_of(store).page(RUN, 1, 5)


async def test_places_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bridge.pages, "KEPT_MAX", 300)
    store = Paged(8)
    for number in range(20):
        run = RunId(f"r{number}")
        log = Log(started(run=run), claimed(), *(submitted(f"i{n}") for n in range(6)))
        for position, entry in enumerate(log.entries):
            await store.append(run, entry, expected=position)
    pages = pages_of(store)
    for number in range(20):
        _, more = await pages.page(RunId(f"r{number}"), 1, 2)
        assert more
    assert 1 <= len(pages._kept) < 8
    for number in range(20):
        page, _ = await pages.page(RunId(f"r{number}"), 3, 2)
        assert len(page) == 2
    assert pages._weight == sum(weight for _, weight in pages._kept.values())


# ---- following over HTTP -------------------------------------------------------------------------


class Place:
    def leave(self) -> None: ...


class Desk:
    def __init__(self, store: Any) -> None:
        self.store, self.feeds = store, Feeds(store)
        self.stopping = asyncio.Event()

    def take_place(self) -> Place:
        return Place()


async def sent(desk: Any, feed: Feed, after: int) -> list[int]:
    """The ids of all records that a follower is sent, to the run's end."""
    follow = Follow(desk, RUN, after)
    found: list[int] = []

    async def take() -> None:
        while (event := await follow._queue.get()) is not None:
            made: Any = event() if callable(event) else event
            if made.event == "end":
                return
            found.append(int(made.id))

    async with asyncio.TaskGroup() as group:
        group.create_task(follow._records(feed, Watch(0.01)))
        group.create_task(take())
    return found


@pytest.mark.parametrize("after", [0, 1, 7, 30, 81])
async def test_who_joins_late_is_sent_each_record_once_though_the_feed_keeps_few(
    after: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bridge.feed, "KEPT_BYTES", 1000)
    log = run_of(40, end=True)
    desk = Desk(await stored(log, 4))
    with desk.feeds.of(RUN) as feed:
        assert await sent(desk, feed, 0) == list(range(1, 83))
        assert len(feed.behind(feed.last - 2)) == 2
        assert feed.behind(0) == []  # it is long gone
        assert await sent(desk, feed, after) == list(range(after + 1, 83))
    assert sum(len(raw) for raw in feed._raws) < 5000


# ---- memory --------------------------------------------------------------------------------------

BIG = 200_000
"""Bytes of each result."""

GROWTH = """
import asyncio, sys
from contextlib import aclosing
from journal.cursor import Cursor
from journal.following import followed
from journal.ids import RunId
from journal.log import Log
from journal.stores.file import FileStore

def peak_mb():
    with open("/proc/self/status") as status:
        return int(status.read().split("VmHWM:")[1].split()[0]) / 1024

async def follow(store):
    n = 0
    async with aclosing(followed(store, "a1")) as entries:
        async for entry in entries:
            n = entry.record.n
    return n

async def show(store):
    cursor = Cursor(store, RunId("a1"))
    while await cursor.page():
        pass
    return cursor.fold.n

async def main():
    store = FileStore(sys.argv[1])
    before = peak_mb()
    read = await Log.read(store, "a1")
    resumed = await Log.resumed(store, RunId("a1"), by="w")
    print(read.fold.n, resumed.fold.n, await follow(store), await show(store), peak_mb() - before)

asyncio.run(main())
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells the peak")
async def test_a_long_journal_is_read_without_being_held_whole(tmp_path: Path):
    """80 MB, of which the fold keeps only what belongs to the iteration."""
    log = Log(started(revision=""), claimed())
    step = 0
    while len(log.entries) * BIG < 3 * 80_000_000:
        log.add(log.here(start_of(f"{step}/0")))
        log.add(log.here(result_of(f"{step}/0", "x" * BIG)))
        log.add(log.here(goes_on({"turn": step})))
        step += 1
    log.add(log.here(answered()))
    path = FileStore(tmp_path).path(RUN)
    path.write_bytes(b"".join(entry.raw + b"\n" for entry in log.entries))
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", textwrap.dedent(GROWTH), str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    *counts, grown_mb = done.stdout.split()
    assert counts == [str(len(log.entries))] * 4
    assert float(grown_mb) < 80, done.stdout  # twice that where it is held, its records decoded
