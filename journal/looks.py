"""Shell: which runs may be in a status, and their journals, for lists of many."""

from __future__ import annotations

from collections.abc import AsyncIterator

from .errors import StoreUnavailable
from .ids import RunId
from .log import Log
from .store import Store
from .stores.jetstream import JetStreamStore
from .stores.jetstream_listing import Head

BECOMES_RUNNING = frozenset({"running", "waiting", "paused", "awaiting_approval"})
"""A header is as old as its record: a wait for a time may have ended since."""


class Looks:
    """At the runs of one store, for one list: their order is that of their ids. `sparing`: a
    journal stream that can't be read keeps nobody from the others; its name is then in `unread`.
    `by_heads`: they are read with `log`, soon after they were told, up to where the listing found
    them; what it told of each is kept until then."""

    def __init__(self, store: Store, *, sparing: bool = False, by_heads: bool = True) -> None:
        self.store = store
        self._by_heads = by_heads
        self.unread: set[str] | None = set() if sparing else None
        self._heads: dict[RunId, Head] = {}  # of those not read yet

    async def candidates(
        self, status: str | None, after: RunId | None = None
    ) -> AsyncIterator[RunId]:
        """Runs behind the id `after` that may have this status (any where None), as far as can be
        told without reading them. A header doesn't tell that a journal can't be read."""
        if status is None or status in ("damaged", "newer"):
            words = None
        else:
            words = BECOMES_RUNNING if status == "running" else frozenset({status})
        async for run in self.told(words, after):
            yield run

    async def told(
        self, words: frozenset[str] | None, after: RunId | None = None
    ) -> AsyncIterator[RunId]:
        """Runs behind the id `after` whose last record left one of these statuses, or tells none
        (any where None); all, on a store without headers."""
        if not isinstance(self.store, JetStreamStore):
            async for run in self.store.runs(after=after):
                yield run
            return
        async for run, head in self.store.lasts(words, after, self.unread):
            if self._by_heads:
                self._heads[run] = head
            yield run
        if self.unread and len(self.unread) == len(self.store.shards):
            raise StoreUnavailable(
                f"no journal stream can be read: {', '.join(sorted(self.unread))}"
            )

    async def log(self, run: RunId) -> Log:
        """Its journal as it is. Raises JournalDamaged."""
        head = self._heads.pop(run, None)
        if head is None or not isinstance(self.store, JetStreamStore):
            return await Log.read(self.store, run)
        return Log.of(self.store, run, await self.store.load_listed(run, head))
