"""Shell: find runs that nothing would move on, and dispatch them again (R53). Safe on every worker,
and on every bridge, for its workers over HTTP: a task is a hint, and repeated ones are harmless.

Covered are runs without a task message in TASKS that a holder would have something to do on: never
claimed, released, or whose wait has ended; whose time is overdue; whose child has ended; and runs
under a claim whose worker is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from .errors import JournalDamaged, RunfoldError, StoreUnavailable
from .fold import Fold
from .ids import RunId
from .limits import SWEEP_RUNS
from .log import Log
from .owed import pay
from .stores.jetstream import JetStreamStore
from .views import instant
from .waits import instant_text, other_code_may

log = logging.getLogger("runfold")

FRESH_S = 5.0
"""A record this young is somebody's at work: its task is on the way."""

SHARE = 0.1
"""Of the time, at most about: a pass over a million headers takes long (docs/operations.md)."""

RUNNING = frozenset({"running"})
RESTING = frozenset({"waiting", "paused", "awaiting_approval", "indeterminate"})
"""By the header of a run's last record, which knows no time: these may be overdue."""


class Swept(Struct, frozen=True, kw_only=True):
    """One pass. `cursor`: where the next one goes on; None: from the start."""

    dispatched: tuple[RunId, ...]
    looked_at: int
    cursor: RunId | None = None


async def sweep(
    store: JetStreamStore,
    *,
    statuses: frozenset[str] = RUNNING | RESTING,
    agents: Mapping[str, str] | None = None,
    held: Collection[RunId] = (),
    after: RunId | None = None,
    runs_max: int = SWEEP_RUNS,
    fresh_s: float = FRESH_S,
) -> Swept:
    """Look at up to `runs_max` runs behind `after` with these statuses, and dispatch those of these
    agents (name to revision; all where None) that nothing would move on. `held`: by who asks.

    Raises StoreUnavailable."""
    dispatched: list[RunId] = []
    looked_at = 0
    async for run_id, _ in store.heads(status=statuses):
        if after is not None and run_id <= after:
            continue
        looked_at += 1
        if run_id not in held and await _dispatched(store, run_id, agents, fresh_s):
            dispatched.append(run_id)
        if looked_at >= runs_max:
            return Swept(dispatched=tuple(dispatched), looked_at=looked_at, cursor=run_id)
    return Swept(dispatched=tuple(dispatched), looked_at=looked_at)


async def keep_sweeping(
    store: JetStreamStore,
    agents: Callable[[], Mapping[str, str]],
    held: Callable[[], Collection[RunId]],
    *,
    every_s: float,
) -> None:
    """Pass after pass, until it is cancelled: of runs that run and of those that rest, each from
    where the last one ended. `agents`, `held`: as `sweep` takes them, asked for before each; no
    agents: nothing is looked at."""
    cursors: dict[frozenset[str], RunId | None] = {RUNNING: None, RESTING: None}
    took_s = 0.0
    while True:
        pause_s = max(every_s, took_s * (1 / SHARE - 1))
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        began = time.monotonic()
        wanted = agents()
        if not wanted:
            continue
        try:
            for statuses, cursor in cursors.items():
                done = await sweep(
                    store, statuses=statuses, agents=wanted, held=held(), after=cursor
                )
                cursors[statuses] = done.cursor
        except RunfoldError as error:
            log.warning("the sweep was cut short: %s", error.message)
        took_s = time.monotonic() - began


async def _dispatched(
    store: JetStreamStore, run_id: RunId, agents: Mapping[str, str] | None, fresh_s: float
) -> bool:
    try:
        log = await Log.resumed(store, run_id, by="sweep")
    except JournalDamaged:
        return False  # doctor and inbox show it
    started = log.fold.started
    if started is None or (agents is not None and started.agent not in agents):
        return False
    now = datetime.now(UTC)
    if instant(log.fold.head_at) > now - timedelta(seconds=fresh_s):
        return False
    revision = None if agents is None else agents[started.agent]
    reason = await stranded(store, log, instant_text(now), revision)
    if reason is None or await store.tasks.holds(run_id, started.agent):
        return False
    await store.wake(run_id, started.agent, cause=log.fold.n, priority=started.priority)
    return True


async def stranded(
    store: JetStreamStore, log: Log, now: str, revision: str | None = None
) -> str | None:
    """Why nothing would move the run on but a task, or None. Lets the ended child of a waiting
    parent tell it. `revision`: of the worker that asks."""
    fold = log.fold
    if fold.newer is not None or fold.finished:
        return None
    if fold.claim is not None:
        answer = await store.ask(fold.claim.worker, log.run_id, fold.claim.n)
        gone = answer in ("no", "nobody")
        return f"worker {fold.claim.worker}, which held it, is gone" if gone else None
    if fold.runnable(now):
        return "nobody holds it and it could go on"
    if revision is not None and other_code_may(fold, revision):
        return "it is paused because other code than this worker's did not match it"
    if await _child_ended(store, fold):
        return "the child it waits for has ended"
    return None


async def _child_ended(store: JetStreamStore, fold: Fold) -> bool:
    """Let the child's journal tell its parent, if it has ended; whether it has."""
    wait = fold.wait
    if wait is None or not wait.child:
        return False
    try:
        child = await Log.resumed(store, RunId(wait.child), by="sweep")
        if child.fold.end is None:
            return False
        await pay(child)
    except StoreUnavailable:
        raise
    except RunfoldError:  # this run is not to keep the sweep from the others
        return False
    return True
