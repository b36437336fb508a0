"""Shell: runs as people and programs are shown them, one or a page of them (PROTOCOL 8)."""

from __future__ import annotations

import asyncio
from collections import deque
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from .errors import JournalDamaged
from .escape import visible
from .ids import RunId
from .inbox import candidates
from .limits import LIST_PAGE
from .log import Log
from .store import Store
from .views import instant, run_json
from .waits import instant_text

AT_ONCE = 16
"""Journals read at once for a page: enough to hide the server's answer time."""

LOOKED_AT_MAX = 20 * LIST_PAGE
"""A filter that finds nothing must not read all journals of a large store in one request."""


class Page(Struct, frozen=True):
    """Run objects in the order of their ids. `next`: the id to go on after; None at the end. A page
    may hold less than was asked for where a filter passes little."""

    runs: list[dict[str, Any]]
    next: RunId | None


class Filter(Struct, frozen=True, kw_only=True):
    """`older_than_s`: since the run's last record; a journal that can't be read has no age."""

    status: str | None = None
    agent: str | None = None
    older_than_s: float | None = None


async def page(
    store: Store, wanted: Filter, *, after: RunId | None = None, limit: int = LIST_PAGE
) -> Page:
    """The first `limit` runs behind the id `after`. A journal that can't be read is listed with the
    status `damaged` or `newer`; a purged run is not."""
    try:
        async with asyncio.TaskGroup() as group:
            return await _Paging(store, wanted, limit, group).page(after)
    except ExceptionGroup as failures:  # the first one cancelled the others
        raise failures.exceptions[0] from None


class _Paging:
    """One page in the making: several journals are read at once, and taken in order."""

    def __init__(self, store: Store, wanted: Filter, limit: int, group: asyncio.TaskGroup) -> None:
        self._store = store
        self._wanted = wanted
        self._limit = limit
        self._group = group
        self._found: list[dict[str, Any]] = []
        self._reading: deque[tuple[RunId, asyncio.Task[dict[str, Any] | None]]] = deque()
        self._taken: RunId | None = None

    async def page(self, after: RunId | None) -> Page:
        begun = 0
        async for run in candidates(self._store, self._wanted.status):
            if after is not None and run <= after:
                continue
            # What is being read may be on the page: no more of it is begun than fits.
            while self._reading and (
                len(self._reading) == AT_ONCE
                or len(self._found) + len(self._reading) >= self._limit
            ):
                await self._take()
            if len(self._found) >= self._limit or begun == LOOKED_AT_MAX:
                while self._reading:
                    await self._take()
                return Page(self._found, self._taken)
            begun += 1
            task = self._group.create_task(_passing(self._store, run, self._wanted))
            self._reading.append((run, task))
        while self._reading:
            await self._take()
        return Page(self._found, None)

    async def _take(self) -> None:
        self._taken, task = self._reading.popleft()
        shown = await task
        if shown is not None:
            self._found.append(shown)


async def shown(store: Store, run: RunId) -> dict[str, Any]:
    """The run object as of now, also of a journal that can't be read. Raises RunNotFound."""
    try:
        log = await Log.read(store, run)
    except JournalDamaged as damage:
        return unreadable(run, "damaged", damage.message)
    return shown_log(log, held=await store.holder(run) is not None)


def shown_log(log: Log, *, held: bool) -> dict[str, Any]:
    """The run object of a journal that was read. Raises RunNotFound."""
    if log.fold.newer is not None and log.fold.started is None:
        return unreadable(log.run_id, "newer", log.fold.newer)
    if log.fold.started is None:
        log.check_runnable()
    return run_json(log.fold, held=held, now=instant_text(datetime.now(UTC)))


async def _passing(store: Store, run: RunId, wanted: Filter) -> dict[str, Any] | None:
    """The run object; None where the filter stops it, or it was purged."""
    try:
        log = await Log.read(store, run)
    except JournalDamaged as damage:
        found, age_s = unreadable(run, "damaged", damage.message), -1.0
    else:
        if log.fold.started is None and log.fold.newer is None:
            return None
        found = shown_log(log, held=await store.holder(run) is not None)
        age_s = (datetime.now(UTC) - instant(log.fold.head_at)).total_seconds()
    if wanted.status not in (None, found["status"]) or wanted.agent not in (None, found["agent"]):
        return None
    if wanted.older_than_s is not None and age_s < wanted.older_than_s:
        return None
    return found


def unreadable(run: RunId, status: str, reason: str) -> dict[str, Any]:
    """The run object of a journal that can't be read."""
    wait = {"what": "operator", "since": None, "until": None}
    return {
        "run": run,
        "agent": None,
        "status": status,
        "message": None,
        "pending": [],
        "unknown": [],
        "waiting_on": [{**wait, "ended_by": "`runfold show` says where"}],
        "reason": visible(reason),
        "detail": None,
        "iteration": None,
        "attempt": None,
        "records": None,
        "model_calls": None,
    }
