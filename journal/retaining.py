"""Shell: finished runs are purged after their time, by a worker that may (R15). Safe on several: of
two that purge one run both find it purged, and passes are short and far apart.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing

from msgspec import Struct

from .errors import PermissionDenied, RunfoldError
from .ids import RunId
from .limits import RETAIN_RUNS, RETAIN_S, SWEEP_S
from .purging import Purged, Purger
from .retention import Retention
from .store import Store

log = logging.getLogger("runfold")

FOR_PEOPLE = frozenset({"damaged", "flawed", "orphan"})
"""Kept until somebody has looked at them."""

TOLD_MAX = 10_000
"""Runs that were named in the log and are not again: a bound on what is remembered."""


class Pass(Struct, frozen=True, kw_only=True):
    """One pass. `cursor`: where the next one goes on; None: from the start."""

    purged: int
    looked_at: int
    named: tuple[Purged, ...] = ()
    cursor: RunId | None = None


async def retain(
    purger: Purger, *, after: RunId | None = None, runs_max: int = RETAIN_RUNS
) -> Pass:
    """Look at up to `runs_max` runs behind `after` whose time is over, and purge what may go.

    Raises StoreUnavailable, PermissionDenied."""
    purged = looked_at = 0
    named: list[Purged] = []
    async with aclosing(purger.purge_ended(after=after)) as outcomes:
        async for done in outcomes:
            looked_at += 1
            purged += done.what != "kept"
            if done.why in FOR_PEOPLE:
                named.append(done)
            if looked_at >= runs_max:
                return Pass(purged=purged, looked_at=looked_at, named=tuple(named), cursor=done.run)
    return Pass(purged=purged, looked_at=looked_at, named=tuple(named))


async def keep_retaining(store: Store, keep_s: float, *, by: str) -> None:
    """Pass after pass, until it is cancelled; returns where the store does not let us purge, and
    says so."""
    if not await _may(store):
        return
    purger = Purger(store, Retention(keep_s=keep_s, resumable_s=keep_s), by=by)
    told: set[RunId] = set()
    cursor: RunId | None = None
    while True:
        every_s = RETAIN_S if cursor is None else SWEEP_S
        await asyncio.sleep(every_s * random.uniform(0.5, 1.5))
        try:
            done = await retain(purger, after=cursor)
        except RunfoldError as error:
            log.warning("purging finished runs was cut short: %s", error.message)
            continue
        cursor = done.cursor
        if done.purged:
            log.info("%d finished runs were purged", done.purged)
        for kept in done.named:
            if kept.run not in told:
                log.warning("run %s is kept beyond its time: %s", kept.run, kept.text)
            told.add(kept.run)
        if len(told) > TOLD_MAX:
            told.clear()


async def _may(store: Store) -> bool:
    while True:
        try:
            await store.check_trim()
            return True
        except PermissionDenied as error:
            log.error(
                "finished runs are not purged here: this user lacks the permission for %s; the "
                "worker goes on without",
                error.subject,
            )
            return False
        except RunfoldError as error:
            log.warning("whether finished runs may be purged is not known yet: %s", error.message)
            await asyncio.sleep(SWEEP_S)
