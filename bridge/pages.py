"""Shell: pages of a run's journal (R64). Each record shown is one that the fold took, as are all
before it.

Who asks for one page after another goes on where the last one stopped: that place is kept for a
while. Any other page is read from the journal's start, a page at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from msgspec import Struct

from journal.cursor import Cursor
from journal.errors import JournalDamaged
from journal.ids import RunId
from journal.log import Log
from journal.stores.jetstream import JetStreamStore

KEPT_MAX: Final = 50_000
"""Of all places that are kept, what their folds and pages hold, in records; one is always kept."""

_WEIGHT: Final = 50
"""What a fold weighs without any step, in records."""


class _Place(Struct):
    """`ahead`: records that were read on, the next one first."""

    cursor: Cursor
    ahead: list[bytes]

    @property
    def weight(self) -> int:
        fold = self.cursor.fold
        kept = 2 * len(fold.steps) + len(fold.inputs) + len(fold.requests)
        return _WEIGHT + kept + len(self.ahead)


class Pages:
    """Of all runs. A place is one request's at a time: it is taken out while that reads on."""

    def __init__(self, store: JetStreamStore) -> None:
        self._store = store
        self._kept: OrderedDict[tuple[RunId, int], tuple[_Place, int]] = OrderedDict()
        self._weight = 0

    async def page(self, run: RunId, first: int, limit: int) -> tuple[list[bytes], bool]:
        """The records from ordinal `first` on, as they are stored, and whether to ask for more.
        Raises RunNotFound; JournalDamaged where what is good ends before `first`."""
        if await self._store.has_tombstone(run):
            raise Log(self._store, run, by="").purged()
        place = self._place(run, first)
        cursor, found = place.cursor, place.ahead
        try:
            while len(found) <= limit and (page := await cursor.page()):
                found += [entry.raw for entry in page if entry.record.n >= first]
        except JournalDamaged:
            if not found:
                raise
            return found[:limit], True
        if cursor.fold.newer is None:
            cursor.check()
        if len(found) <= limit:
            return found, False
        self._keep(run, first + limit, _Place(cursor, found[limit:]))
        return found[:limit], True

    def _place(self, run: RunId, first: int) -> _Place:
        kept = self._kept.pop((run, first), None)
        if kept is None:
            return _Place(Cursor(self._store, run), [])
        place, weight = kept
        self._weight -= weight
        return place

    def _keep(self, run: RunId, following: int, place: _Place) -> None:
        replaced = self._kept.pop((run, following), None)
        self._weight += place.weight - (0 if replaced is None else replaced[1])
        self._kept[run, following] = place, place.weight
        while self._weight > KEPT_MAX and len(self._kept) > 1:
            _, (_, weight) = self._kept.popitem(last=False)
            self._weight -= weight
