"""Shell: the records of the runs that are followed, once for all followers of a run.

A follower that reads slowly holds its place in the list, no copy of the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from journal.codec import Damage, Entry
from journal.errors import JournalDamaged, RunNotFound
from journal.ids import RunId
from journal.log import Log
from journal.order import buried
from journal.store import Loaded, Store


class Feed:
    """One run's records as they are stored, from the first on: `raws[n - 1]` is record n."""

    def __init__(self, store: Store, run: RunId) -> None:
        self.raws: list[bytes] = []
        self._store = store
        self._run = run
        self._log = Log(store, run, by="bridge")
        self._tail = 0
        self._damage: JournalDamaged | RunNotFound | None = None
        self._reading = asyncio.Lock()
        self._begun = self._done = 0

    @property
    def ended(self) -> str | None:
        """The status of a run that has ended, as of the last record here."""
        fold = self._log.fold
        return fold.status() if fold.finished else None

    async def read(self, after: int) -> None:
        """Read on, where no record behind ordinal `after` is here. One follower does it for all: a
        read that began after this was asked serves as well."""
        asked = self._begun
        async with self._reading:
            if len(self.raws) > after or self._damage is not None or self._done > asked:
                return
            self._begun += 1
            try:
                loaded = await self._store.load(self._run, after=self._tail)
            except JournalDamaged as error:
                self._damage, loaded = error, Loaded(error.good, self._tail)
            try:
                if loaded.entries and buried(self._log.fold, loaded.entries[0].record):
                    raise self._log.purged()
                for entry in loaded.entries:
                    self._take(entry)
            except (JournalDamaged, RunNotFound) as error:
                self._damage = error
            self._done = self._begun

    def check(self) -> None:
        """What follows the last record here can't be read: raises JournalDamaged, NewerVersion;
        RunNotFound of a purged run."""
        if self._damage is not None:
            raise self._damage
        self._log.check_runnable()

    def _take(self, entry: Entry) -> None:
        fold = self._log.fold
        try:
            fold.apply(entry)
        except Damage as damage:
            where = self._store.where(self._run, fold.n, entry)
            raise JournalDamaged(
                f"run {self._run}: {where}: {damage}", where=where, run_id=self._run
            ) from damage
        if fold.purged is not None:  # a tombstone is no record to show
            self._log.check_runnable()
        self.raws.append(entry.raw)
        self._tail = entry.position


class Feeds:
    """Those that have a follower."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._feeds: dict[RunId, Feed] = {}
        self._followers: dict[RunId, int] = {}

    @contextmanager
    def of(self, run: RunId) -> Generator[Feed]:
        """The run's feed while inside; it is forgotten with its last follower."""
        feed = self._feeds.get(run)
        if feed is None:
            feed = self._feeds[run] = Feed(self._store, run)
        self._followers[run] = self._followers.get(run, 0) + 1
        try:
            yield feed
        finally:
            self._followers[run] -= 1
            if not self._followers[run]:
                del self._followers[run], self._feeds[run]
