"""Shell: the records of the runs that are followed, read once for all followers of a run.

A feed keeps the latest of them. Who is further behind (it joined late, or reads slowly) reads those
by a feed of its own until it has caught up: a long journal is never held, and nobody waits for the
slowest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from journal.cursor import Cursor
from journal.errors import JournalDamaged, RunNotFound
from journal.ids import RunId
from journal.store import Store

KEPT_BYTES: Final = 1024 * 1024
"""Of the latest records, beside those of the last page."""


class Feed:
    """One run's records as they are stored. `last`: the ordinal of the last one that was read."""

    def __init__(self, store: Store, run: RunId) -> None:
        self.last = 0
        self._raws: deque[bytes] = deque()
        self._size = 0
        self._cursor = Cursor(store, run)
        self._problem: JournalDamaged | RunNotFound | None = None
        self._reading = asyncio.Lock()
        self._begun = self._done = 0

    @property
    def ended(self) -> str | None:
        """The status of a run that has ended, as of the last record here."""
        fold = self._cursor.fold
        return fold.status() if fold.finished else None

    def behind(self, n: int) -> list[bytes]:
        """The records behind ordinal `n`; none where the next one is not kept any more."""
        skipped = n - (self.last - len(self._raws))
        return [] if skipped < 0 else [*self._raws][skipped:]

    async def read(self, after: int) -> None:
        """Read on, until a record behind ordinal `after` was read, or all is. One follower does it
        for all: a read that began after this was asked serves as well."""
        asked = self._begun
        async with self._reading:
            if self.last > after or self._problem is not None or self._done > asked:
                return
            self._begun += 1
            while self.last <= after and await self._page():
                pass
            self._done = self._begun

    async def _page(self) -> bool:
        """Read the next page; False where there is none."""
        try:
            page = await self._cursor.page()
        except (JournalDamaged, RunNotFound) as error:
            self._problem = error
            return False
        while self._size > KEPT_BYTES:
            self._size -= len(self._raws.popleft())
        self._raws += [entry.raw for entry in page]
        self._size += sum(len(entry.raw) for entry in page)
        self.last += len(page)
        return bool(page)

    def check(self) -> None:
        """What follows the last record here can't be read: raises JournalDamaged, NewerVersion;
        RunNotFound of a purged run."""
        if self._problem is not None:
            raise self._problem
        self._cursor.check()


class Feeds:
    """Those that have a follower."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._feeds: dict[RunId, Feed] = {}
        self._followers: dict[RunId, int] = {}

    def own(self, run: RunId) -> Feed:
        """One that nobody shares."""
        return Feed(self._store, run)

    @contextmanager
    def of(self, run: RunId) -> Generator[Feed]:
        """The run's feed while inside; it is forgotten with its last follower."""
        feed = self._feeds.get(run)
        if feed is None:
            feed = self._feeds[run] = self.own(run)
        self._followers[run] = self._followers.get(run, 0) + 1
        try:
            yield feed
        finally:
            self._followers[run] -= 1
            if not self._followers[run]:
                del self._followers[run], self._feeds[run]
