"""Shell: runs that nobody would move on, for `runfold doctor` (R7). Changes nothing.

A run is found only if two looks at it agree: between the first and the second a worker may have
taken it up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from journal.errors import JournalDamaged, NotProvisioned
from journal.fold import Fold
from journal.ids import RunId
from journal.log import Log
from journal.looks import Looks
from journal.store import Store
from journal.stores.jetstream import JetStreamStore
from journal.sweep import FRESH_S
from journal.views import instant
from journal.waits import instant_text

UNFINISHED = frozenset(
    {"running", "waiting", "paused", "awaiting_approval", "indeterminate", "newer", "damaged"}
)
RUNS_MAX = 2000
PROGRESS_RUNS = 200

Problem: TypeAlias = Literal[
    "damaged",
    "newer",
    "lost",
    "no_task",
    "worker_gone",
    "overdue",
    "child_ended",
    "child_gone",
    "no_worker",
]


class Found(Struct, frozen=True, kw_only=True):
    """A run that needs an operator: what is wrong, and what to do."""

    run: str
    problem: Problem
    what: str
    fix: str


class Diagnosis(Struct, frozen=True, kw_only=True):
    """`looked_at` runs were read; `next`: go on after this one, there are more."""

    found: tuple[Found, ...]
    looked_at: int
    next: str | None = None


RESTORED = "docs/operations.md says what to do after an older backup was put back"
SWEEP = "a worker's sweep wakes it within a minute; `runfold sweep` does so now"


async def diagnose(
    store: Store,
    workers: Sequence[Mapping[str, Any]],
    progress: Callable[[str], None],
    after: RunId | None = None,
) -> Diagnosis:
    """Look at up to RUNS_MAX unfinished runs behind `after`. `workers`: what the connected ones
    report."""
    found: list[Found] = []
    looked_at = 0
    last: RunId | None = None
    async for run in Looks(store, by_heads=False).told(UNFINISHED, after):
        if looked_at == RUNS_MAX:
            return Diagnosis(found=tuple(found), looked_at=looked_at, next=last)
        looked_at, last = looked_at + 1, run
        if looked_at % PROGRESS_RUNS == 0:
            progress(f"{looked_at} runs looked at, {len(found)} found")
        first = await _look(store, workers, run)
        if first is None or first[1].problem in ("damaged", "newer"):
            found += [first[1]] if first else []
            continue
        second = await _look(store, workers, run)
        if second is not None and second[0] == first[0]:
            found.append(second[1])
    return Diagnosis(found=tuple(found), looked_at=looked_at)


async def _look(
    store: Store, workers: Sequence[Mapping[str, Any]], run: RunId
) -> tuple[int, Found] | None:
    """What is wrong with the run, at which ordinal."""
    try:
        log = await Log.read(store, run)
    except JournalDamaged as damage:
        fix = f"no worker takes it; settle outside what `runfold show {run}` says that it began"
        return 0, Found(run=run, problem="damaged", what=damage.message, fix=fix)
    fold = log.fold
    if fold.newer is not None:
        what = f"it holds a record of a newer version: {fold.newer}"
        return fold.n, Found(run=run, problem="newer", what=what, fix=_newer_workers(workers))
    if fold.started is None or fold.finished or not isinstance(store, JetStreamStore):
        return None
    problem = await _stuck(store, log)
    try:
        cause = await store.tasks.cause(run, fold.started.agent)
    except NotProvisioned:  # which doctor says, too
        cause = None
    if cause is not None and cause > fold.n:
        problem = _lost(fold, run, cause)
    elif problem is None or cause is not None:
        problem = _nobody_may(fold, run, workers)
    return None if problem is None else (fold.n, problem)


def _lost(fold: Fold, run: RunId, cause: int) -> Found:
    """A worker takes the journal for an old copy, and leaves the run alone: as long as it is one,
    rightly. What is missing may be the start of a write that happened."""
    what = (
        f"a task is about its record {cause}, and its journal ends at record {fold.n}: "
        "acknowledged records are gone"
    )
    return Found(run=run, problem="lost", what=what, fix=f"{RESTORED}; `runfold cancel {run}`")


def _newer_workers(workers: Sequence[Mapping[str, Any]]) -> str:
    """What to do about a run that a newer version wrote to."""
    releases = sorted({str(one["runfold"]) for one in workers if "runfold" in one})
    connected = (
        f"connected are workers of {', '.join(releases)}" if releases else "none is connected"
    )
    return f"start a worker of that release ({connected}), and update this installation"


async def _stuck(store: JetStreamStore, log: Log) -> Found | None:
    """What would leave the run as it is, without a task."""
    fold, run = log.fold, log.run_id
    now = datetime.now(UTC)
    if instant(fold.head_at) > now - timedelta(seconds=FRESH_S):
        return None
    if fold.claim is not None:
        answer = await store.ask(fold.claim.worker, run, fold.claim.n)
        if answer == "yes":
            return None
        said = {"no": "does not hold it", "silent": "does not answer"}.get(answer, "is gone")
        what = f"worker {fold.claim.worker}, which claimed it (record {fold.claim.n}), {said}"
        fix = "it is frozen or blocked: restart it" if answer == "silent" else SWEEP
        return Found(run=run, problem="worker_gone", what=f"{what}; no task is left", fix=fix)
    if fold.runnable():
        what = "it could go on, and no task tells a worker"
        return Found(run=run, problem="no_task", what=what, fix=SWEEP)
    if fold.runnable(instant_text(now - timedelta(seconds=FRESH_S))):
        assert fold.wait is not None
        what = f"its wait was over at {fold.wait.until}, and no task tells a worker"
        return Found(run=run, problem="overdue", what=what, fix=SWEEP)
    return await _childless(store, fold, run)


async def _childless(store: Store, fold: Fold, run: RunId) -> Found | None:
    """Where the child that the run waits for won't end its wait."""
    if fold.wait is None or not fold.wait.child:
        return None
    child = fold.wait.child
    try:
        log = await Log.resumed(store, RunId(child), by="doctor")
    except JournalDamaged:
        return None  # it is found itself
    if log.fold.finished:
        what = f"the child it waits for, {child}, has ended and it was not told"
        return Found(run=run, problem="child_ended", what=what, fix=SWEEP)
    if log.fold.n == 0:  # a parent waits only for a child that was started
        what = f"the child it waits for, {child}, has no journal: acknowledged records are gone"
        return Found(
            run=run, problem="child_gone", what=what, fix=f"{RESTORED}; `runfold cancel {run}`"
        )
    return None


def _nobody_may(fold: Fold, run: RunId, workers: Sequence[Mapping[str, Any]]) -> Found | None:
    """Where no connected worker may take the run that is to go on (R8)."""
    assert fold.started is not None
    agent, revision = fold.started.agent, fold.revision
    if fold.claim is not None or not fold.runnable():
        return None
    listed = [one for report in workers for one in _agents(report) if one.get("name") == agent]
    if any(not revision or revision in _accepts(one) for one in listed):
        return None
    if listed:
        has = ", ".join(sorted({str(one.get("revision")) for one in listed}))
        what = f"it is bound to revision {revision} of agent {agent}; workers have {has}"
        fix = f"start a worker with that revision, or declare compatible=({revision!r},)"
    else:
        what = f"no connected worker has agent {agent}"
        fix = f"`runfold worker FILE:agent`, or `runfold run FILE:agent --id {run}`"
    return Found(run=run, problem="no_worker", what=what, fix=fix)


def _agents(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: Any = report.get("agents")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []  # pyright: ignore[reportUnknownVariableType]


def _accepts(agent: Mapping[str, Any]) -> list[Any]:
    found: Any = agent.get("accepts") or [agent.get("revision")]
    return list(found) if isinstance(found, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType]
