"""Shell: what the record that ended a claim owes (PROTOCOL 5): a parent's wake-up, its children's
cancellation, its own alarm. Whoever meets such a record may pay again: each is a hint or a repeat.
"""

from __future__ import annotations

import logging

from .doors import signal
from .errors import (
    DecisionConflict,
    JournalDamaged,
    NewerVersion,
    RunFinished,
    RunNotFound,
    StaleSignal,
)
from .limits import SIGNAL_BYTES_MAX
from .log import Log
from .messages import JSON
from .records import Commit
from .values import canonical
from .views import end_json
from .waits import parse_instant, wakes_at

logger = logging.getLogger("runfold")


async def pay(log: Log) -> None:
    """Pay what this journal owes at its tail. Raises StoreUnavailable: it is paid by who comes
    next. A parent or child that can't be told is said, and holds up nobody else."""
    fold = log.fold
    if fold.end is not None:
        if isinstance(fold.end, Commit):
            await _cancel_children(log)
        await _tell_parent(log)
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
    if started is not None and started.parent:
        outcome = {"run": log.run_id, "outcome": _told(log)}
        await _tell(log, started.parent, "child", outcome, request_id=log.run_id)


async def _tell(
    log: Log, other: str, name: str, payload: dict[str, JSON], request_id: str | None = None
) -> None:
    """A signal to a relative. One that has ended, was purged, or knows already needs nothing."""
    try:
        await signal(log.store, other, name, payload, request_id=request_id, by=log.by, worker=True)
    except (RunFinished, RunNotFound, StaleSignal, DecisionConflict):
        pass
    except (JournalDamaged, NewerVersion) as error:
        logger.warning("run %s can't tell %s of its end: %s", log.run_id, other, error.message)


def _told(log: Log) -> dict[str, JSON]:
    """How the run ended, as its parent is told: an answer that is large stays in its journal."""
    outcome = end_json(log.fold)
    if len(canonical(outcome)) <= SIGNAL_BYTES_MAX:
        return outcome
    return {"status": outcome["status"], "large": True}


async def _cancel_children(log: Log) -> None:
    for child, outcome in log.fold.children.items():
        if outcome is None:
            reason = f"its parent {log.run_id} has ended"
            await _tell(log, child, "cancel", {"reason": reason})
