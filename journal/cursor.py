"""Shell: a place in a run's journal that moves on a page at a time, all before it read and proven.

Whoever shows a journal reads it so: it holds a page of it, and what the fold keeps.
"""

from __future__ import annotations

from contextlib import aclosing

from .codec import Damage, Entry
from .errors import JournalDamaged, RunNotFound
from .fold import Fold
from .ids import RunId
from .log import Log
from .order import buried, check_run
from .store import Store


class Cursor:
    """At first before the first record. `torn` as in Loaded. One task at a time."""

    def __init__(self, store: Store, run_id: RunId) -> None:
        self.torn = 0
        self._store = store
        self._log = Log(store, run_id, by="")
        self._problem: JournalDamaged | RunNotFound | None = None

    @property
    def fold(self) -> Fold:
        """The run as of this place."""
        return self._log.fold

    async def page(self) -> list[Entry]:
        """The next entries; none where nothing follows now. Raises, once what is good in front of
        it was given, JournalDamaged; RunNotFound of a purged run, whose tombstone is no record to
        show."""
        if self._problem is not None:
            raise self._problem
        entries: tuple[Entry, ...]
        try:
            async with aclosing(self._store.pages(self._log.run_id, after=self._log.tail)) as pages:
                loaded = await anext(pages)
                entries, self.torn = loaded.entries, loaded.torn
        except JournalDamaged as damage:
            self._problem, entries = damage, damage.good
        found: list[Entry] = []
        for entry in entries:
            if (problem := self._taken(entry)) is not None:
                self._problem = problem
                break
            found.append(entry)
        if self._problem is not None and not found:
            raise self._problem
        return found

    def _taken(self, entry: Entry) -> JournalDamaged | RunNotFound | None:
        fold, run = self.fold, self._log.run_id
        if buried(fold, entry.record):
            return self._log.purged()
        try:
            check_run(run, entry.record)
            fold.apply(entry)
        except Damage as damage:
            where = self._store.where(run, fold.n, entry)
            return JournalDamaged(f"run {run}: {where}: {damage}", where=where, run_id=run)
        if fold.purged is not None:
            return self._log.purged()
        self._log.tail = entry.position
        return None

    def check(self) -> None:
        """Raises RunNotFound, NewerVersion where what was read is no run for this version."""
        self._log.check_runnable()
