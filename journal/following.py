"""Shell: a run's records as they come, and waiting for what they bring.

Whoever waits reads the journal; what a server says of appends only tells when to read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from . import ids
from .codec import Damage, Entry
from .errors import JournalDamaged
from .fold import Fold
from .ids import RunId
from .log import Log
from .order import buried
from .store import Loaded, Store
from .stores.jetstream import JetStreamStore

POLL_FIRST_S = 0.01
POLL_S = 3.0
"""A hint may be lost with its connection."""

POLL_FILES_S = 0.25
"""A directory says nothing."""


class Watch:
    """Says when it is worth reading a run's journal again."""

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._pause_s = POLL_FIRST_S
        self._hinted = asyncio.Event()

    def hint(self) -> None:
        self._hinted.set()

    async def changed(self, at_most_s: float | None = None) -> None:
        """Returns when a record may be there, or `at_most_s` seconds are over. A hint comes with
        the request to append, before the record can be read: so a short wait at first, a longer
        one after each that brought nothing."""
        if self._hinted.is_set():
            self._hinted.clear()
            self._pause_s = POLL_FIRST_S
        pause_s = self._pause_s if at_most_s is None else min(self._pause_s, max(at_most_s, 0))
        self._pause_s = min(2 * self._pause_s, self._poll_s)
        try:
            async with asyncio.timeout(pause_s):
                await self._hinted.wait()
        except TimeoutError:
            pass


@asynccontextmanager
async def watching(store: Store, run_id: RunId) -> AsyncGenerator[Watch, None]:
    """From now on what is appended to the run is hinted at."""
    if isinstance(store, JetStreamStore):
        watch = Watch(POLL_S)
        async with store.appended(run_id, watch.hint):
            yield watch
    else:
        yield Watch(POLL_FILES_S)


async def followed(store: Store, run_id: str, *, after: int = 0) -> AsyncGenerator[Entry, None]:
    """The run's entries from ordinal `after` + 1 on, each once, as they come; ends with the run.

    Raises RunNotFound; JournalDamaged and NewerVersion after the entries before that place.
    """
    run = ids.run_id(run_id)
    log = Log(store, run, by="")
    fold, tail = log.fold, 0
    async with watching(store, run) as watch:
        while True:
            damage: JournalDamaged | None = None
            try:
                loaded = await store.load(run, after=tail)
            except JournalDamaged as error:
                damage, loaded = error, Loaded(error.good, tail)
            if loaded.entries and buried(fold, loaded.entries[0].record):
                raise log.purged()
            for entry in loaded.entries:
                _apply(store, run, fold, entry)
                if fold.purged is not None:  # a tombstone is no record to show
                    raise log.purged()
                tail = entry.position
                if entry.record.n > after:
                    yield entry
            if damage is not None:
                raise damage
            log.check_runnable()
            if fold.finished:
                return
            await watch.changed()


def _apply(store: Store, run: RunId, fold: Fold, entry: Entry) -> None:
    try:
        fold.apply(entry)
    except Damage as damage:
        where = store.where(run, fold.n, entry)
        raise JournalDamaged(f"run {run}: {where}: {damage}", where=where, run_id=run) from damage
