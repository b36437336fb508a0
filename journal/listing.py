"""Shell: runs as people and programs are shown them, one or a page of them (PROTOCOL 8)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec import Struct

from .errors import JournalDamaged
from .escape import visible
from .ids import RunId
from .limits import LIST_PAGE
from .log import Log
from .looks import Looks
from .ordered import ordered
from .store import Store
from .views import instant, run_json
from .waits import instant_text


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
    looks = Looks(store)
    runs = looks.candidates(wanted.status, after)

    async def read(run: RunId) -> list[dict[str, Any]]:
        shown = await _passing(looks, run, wanted)
        return [] if shown is None else [shown]

    found, following = await ordered(runs, read, after=after, limit=limit)
    return Page(found, following)


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
    if log.gone:
        log.check_runnable()
    return run_json(log.fold, held=held, now=instant_text(datetime.now(UTC)))


async def _passing(looks: Looks, run: RunId, wanted: Filter) -> dict[str, Any] | None:
    """The run object; None where the filter stops it, or it was purged."""
    try:
        log = await looks.log(run)
    except JournalDamaged as damage:
        found, age_s = unreadable(run, "damaged", damage.message), -1.0
    else:
        if log.gone and log.fold.newer is None:
            return None
        found = shown_log(log, held=await looks.store.holder(run) is not None)
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
