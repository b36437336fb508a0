"""Shell: what the record that ended a claim owes (PROTOCOL 5): a parent's wake-up, its children's
cancellation, its own alarm. Whoever meets such a record may pay again: each is a hint or a repeat.
"""

from __future__ import annotations

from contextlib import suppress

from .doors import signal
from .errors import DecisionConflict, RunFinished, RunNotFound, StaleSignal
from .limits import SIGNAL_BYTES_MAX
from .log import Log
from .messages import JSON
from .records import Commit
from .values import canonical
from .views import end_json
from .waits import parse_instant, wakes_at


async def pay(log: Log) -> None:
    """Pay what this journal owes at its tail. Raises StoreUnavailable: it is paid by who comes
    next."""
    fold = log.fold
    if fold.end is not None:
        await _tell_parent(log)
        if isinstance(fold.end, Commit):
            await _cancel_children(log)
    elif until := wakes_at(fold):
        assert fold.started is not None
        assert fold.wait is not None
        await log.store.wake_at(
            log.run_id,
            fold.started.agent,
            at=parse_instant(until),
            cause=fold.wait.n,
            priority=fold.started.priority,
        )


async def _tell_parent(log: Log) -> None:
    started = log.fold.started
    if started is None or not started.parent:
        return
    # a parent that ended, was purged, or has been told of an earlier end needs nothing
    with suppress(RunFinished, RunNotFound, StaleSignal, DecisionConflict):
        await signal(
            log.store,
            started.parent,
            "child",
            {"run": log.run_id, "outcome": _told(log)},
            request_id=log.run_id,
            by=log.by,
            worker=True,
        )


def _told(log: Log) -> dict[str, JSON]:
    """How the run ended, as its parent is told: an answer that is large stays in its journal."""
    outcome = end_json(log.fold)
    if len(canonical(outcome)) <= SIGNAL_BYTES_MAX:
        return outcome
    return {"status": outcome["status"], "large": True}


async def _cancel_children(log: Log) -> None:
    for child, outcome in log.fold.children.items():
        if outcome is None:
            with suppress(RunFinished, RunNotFound, StaleSignal, DecisionConflict):
                await signal(
                    log.store,
                    child,
                    "cancel",
                    {"reason": f"its parent {log.run_id} has ended"},
                    by=log.by,
                )
