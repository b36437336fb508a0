"""Shell: a run's records as they come, and waiting for what they bring.

Whoever waits reads the journal; what a server says of appends only tells when to read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from . import ids
from .codec import Entry
from .cursor import Cursor
from .ids import RunId
from .store import Store
from .stores.jetstream import JetStreamStore

POLL_FIRST_S = 0.01
POLL_STOPPED_S = 0.001
POLL_S = 3.0
"""A hint may be lost with its connection."""

POLL_FILES_S = 0.25
"""A directory says nothing."""


class Watch:
    """Says when it is worth reading a run's journal again. `stops`: for one who waits until the run
    is not running any more, which most of its records can't bring about."""

    def __init__(self, poll_s: float, *, stops: bool = False) -> None:
        self._poll_s = poll_s
        self._stops = stops
        self._first_s = POLL_STOPPED_S if stops else POLL_FIRST_S
        self._pause_s = poll_s if stops else POLL_FIRST_S
        self._hinted = asyncio.Event()

    def hint(self, status: str | None) -> None:
        """A record is on its way that leaves the run with this status word; None: it tells none."""
        if not (self._stops and status == "running"):  # not needed for safety
            self._hinted.set()

    async def changed(self, at_most_s: float | None = None) -> None:
        """Returns when a record may be there, or `at_most_s` seconds are over. A hint comes with
        the request to append, before the record can be read: so a short wait at first, a longer
        one after each that brought nothing."""
        if self._hinted.is_set():
            self._hinted.clear()
            self._pause_s = self._first_s
        pause_s = self._pause_s if at_most_s is None else min(self._pause_s, max(at_most_s, 0))
        self._pause_s = min(2 * self._pause_s, self._poll_s)
        try:
            async with asyncio.timeout(pause_s):
                await self._hinted.wait()
        except TimeoutError:
            pass


@asynccontextmanager
async def watching(
    store: Store, run_id: RunId, *, stops: bool = False
) -> AsyncGenerator[Watch, None]:
    """From now on what is appended to the run is hinted at; `stops`: see Watch."""
    if isinstance(store, JetStreamStore):
        watch = Watch(POLL_S, stops=stops)
        async with store.appended(run_id, watch.hint):
            yield watch
    else:
        yield Watch(POLL_FILES_S)


async def followed(store: Store, run_id: str, *, after: int = 0) -> AsyncGenerator[Entry, None]:
    """The run's entries from ordinal `after` + 1 on, each once, as they come; ends with the run.

    Raises RunNotFound; JournalDamaged and NewerVersion after the entries before that place.
    """
    run = ids.run_id(run_id)
    cursor = Cursor(store, run)
    async with watching(store, run) as watch:
        while True:
            page = await cursor.page()
            for entry in page:
                if entry.record.n > after:
                    yield entry
            if page:
                continue
            cursor.check()
            if cursor.fold.finished:
                return
            await watch.changed()
