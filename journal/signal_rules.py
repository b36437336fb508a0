"""Core: whether a signal may be appended (R60).

Why it is safe: a signal is valid against the fold it is appended to, or refused. Two decisions
compete for one sequence; the loser re-reads and is a repeat or a conflict that names the winner.
"""

from __future__ import annotations

from typing import TypeAlias, assert_never

import msgspec
from msgspec import Struct

from . import ids
from .errors import BadPayload, DecisionConflict, InvalidId, RunFinished, StaleSignal
from .fold import Fold
from .heard import payload_digest, request_key
from .records import Known, SignalName
from .records import Signal as SignalRecord
from .signals import (
    AnySignal,
    Approve,
    Cancel,
    Child,
    Late,
    Reconcile,
    Reject,
    Resume,
    name_of,
)
from .step_state import StepState
from .values import canonical
from .waits import asked


class Append(Struct, frozen=True):
    """Append this record. `kept`: its call is not there yet; it waits for the gate (R60)."""

    body: SignalRecord
    kept: bool


class Repeated(Struct, frozen=True):
    """The same was said before, in record `n`: nothing to append."""

    n: int


SignalDecision: TypeAlias = Append | Repeated


def decide_signal(fold: Fold, signal: AnySignal, request_id: str, *, held: bool) -> SignalDecision:
    """Whether the signal applies at this fold; raises the refusal.

    `held`: somebody runs the run now under a lock (a claim stands in the fold itself); its open
    writes are running then, not unknown.
    """
    assert fold.started is not None
    assert fold.newer is None
    run = fold.started.run
    earlier = fold.requests.get(request_key(name_of(signal), request_id))
    if earlier is not None:
        return _repeat(earlier, signal, run)
    if fold.finished and not (fold.can_reopen and isinstance(signal, Resume)):
        raise RunFinished(
            f"run {run} is {fold.status()}: it takes no more signals",
            run_id=run,
            hint="`runfold resume` gives it another try" if fold.can_reopen else "",
        )
    match signal:
        case Approve() | Reject():
            return _decide_marker(fold, signal, request_id, run, held)
        case Reconcile():
            return _decide_reconcile(fold, signal, request_id, run, held)
        case Cancel():
            if fold.cancel is not None:  # cancelled is cancelled, whoever said it first
                return Repeated(fold.cancel.n)
            return Append(_body(signal, request_id), kept=False)
        case Resume():
            return _decide_resume(fold, signal, request_id, run)
        case Late():
            return _decide_late(fold, signal, request_id, run)
        case Child():
            if signal.run not in fold.children:
                raise StaleSignal(f"run {run} has no child {ids.shown(signal.run)}", run_id=run)
            return Append(_body(signal, request_id), kept=False)
        case other:
            assert_never(other)


def _body(signal: AnySignal, request_id: str, start: int | None = None) -> SignalRecord:
    payload = msgspec.to_builtins(signal)
    payload.pop("request_id", None)
    if start is not None:
        payload["start"] = start
    return SignalRecord(name=name_of(signal), request_id=request_id, payload=payload)


def _start_of(fold: Fold, signal: AnySignal) -> int | None:
    """The start a reconcile is about: the one named, or the step's only one."""
    if not isinstance(signal, Reconcile):
        return None
    step = fold.steps.get(signal.step)
    earlier = any(one.name == signal.step for steps in fold.honoured.values() for one in steps)
    if signal.start is None and step is not None and len(step.starts) == 1 and not earlier:
        return step.last.n
    return signal.start


def _repeat(earlier: Known, signal: AnySignal, run: str) -> Repeated:
    start = None
    if isinstance(signal, Reconcile):  # left out, it is the start that was meant the first time
        start = signal.start
        if start is None and earlier.name == "reconcile":
            start = int(earlier.about)
    body = _body(signal, earlier.request_id, start)
    if earlier.name == body.name and earlier.digest == payload_digest(body.payload):
        return Repeated(earlier.n)
    raise DecisionConflict(
        f"request id {earlier.request_id} was used for another signal, record {earlier.n}",
        winner=earlier.n,
        run_id=run,
    )


def _decide_marker(
    fold: Fold, signal: Approve | Reject, request_id: str, run: str, held: bool
) -> SignalDecision:
    try:
        of_run = ids.marker_run(signal.marker)
    except InvalidId as error:
        raise BadPayload(error.message, run_id=run, hint=error.hint) from error
    if of_run != run:
        raise BadPayload(f"marker {signal.marker} is of run {of_run}, not {run}", run_id=run)
    winner = fold.decisions.get(signal.marker)
    if winner is not None:
        return _same_decision(winner, name_of(signal), run, signal.marker)
    pending = {ask.marker for ask in asked(fold)}
    if signal.marker in pending:
        return Append(_body(signal, request_id), kept=False)
    if _was_asked(fold, signal.marker) or fold.status(held=held) != "running":
        raise _stale_marker(signal.marker, pending, run)
    return Append(_body(signal, request_id), kept=True)


def _was_asked(fold: Fold, marker: str) -> bool:
    """Whether the marker's step already exists, so that no later gate will ask for it."""
    step, _, attempt = marker.partition("/")[2].rpartition("@")
    here = fold.reply is not None and step in fold.reply.steps
    iteration = step.partition("/")[0]
    # of a turn handler: of an earlier turn or attempt
    past = iteration.isdecimal() and (int(iteration), int(attempt.partition(".")[0])) < (
        fold.iteration,
        fold.attempt,
    )
    return step in fold.steps or here or past


def _stale_marker(marker: str, pending: set[str], run: str) -> StaleSignal:
    now = f"pending now: {', '.join(sorted(pending))}" if pending else "nothing is pending"
    return StaleSignal(f"marker {marker} is not pending", run_id=run, hint=now)


def _same_decision(winner: Known, name: SignalName, run: str, what: str) -> Repeated:
    if winner.name == name:
        return Repeated(winner.n)
    raise DecisionConflict(
        f"{what} was decided before: {winner.name} by {winner.by or 'somebody'}, record {winner.n}",
        winner=winner.n,
        run_id=run,
    )


def _decide_resume(fold: Fold, signal: Resume, request_id: str, run: str) -> SignalDecision:
    wait = fold.wait
    resumable = (
        wait is not None
        and (wait.resume or wait.why == "retry")
        and fold.claim is None
        and fold.resumed < wait.n
    )
    if not (fold.can_reopen or resumable):
        raise StaleSignal(
            f"run {run} is {fold.status()}, not paused",
            run_id=run,
            hint="resume is for a run that is paused, waits for a retry, or failed retriably",
        )
    return Append(_body(signal, request_id), kept=False)


def _decide_late(fold: Fold, signal: Late, request_id: str, run: str) -> SignalDecision:
    """A late result beats a retry that nothing has started on; a person's `done` stands (R29)."""
    step = fold.find(signal.step, signal.start)
    if step is None or step.last.n != signal.start:
        raise StaleSignal(
            f"record {signal.start} is not the last start of step {ids.shown(signal.step)}",
            run_id=run,
        )
    answer = step.reconciled.get(signal.start)
    if step.completed is not None or (answer and answer.payload["outcome"] == "done"):
        raise StaleSignal(f"step {signal.step} has its result already", run_id=run)
    if signal.start in step.late:
        return Repeated(step.late[signal.start].n)
    if fold.claim is not None and fold.claim.n == step.last.claim:
        raise StaleSignal(
            f"step {signal.step} is running under claim {step.last.claim}: its holder records it",
            run_id=run,
        )
    return Append(_body(signal, request_id), kept=False)


def _decide_reconcile(
    fold: Fold, signal: Reconcile, request_id: str, run: str, held: bool
) -> SignalDecision:
    step = fold.steps.get(signal.step)
    if step is None or not step.starts:
        raise StaleSignal(
            f"run {run} has no step {ids.shown(signal.step)} to reconcile", run_id=run
        )
    start = _start_of(fold, signal)
    if start is None:
        raise StaleSignal(
            f"step {signal.step} was started more than once: say which start",
            run_id=run,
            hint=f"the last one is --start {step.last.n}",
        )
    winner = step.reconciled.get(start)
    if winner is not None:
        body = _body(signal, request_id, start)
        return _repeat_reconcile(winner, body, run)
    refusal = _not_unknown(fold, step, start, held)
    if refusal is not None:
        raise StaleSignal(f"step {signal.step} is not unknown: {refusal}", run_id=run)
    return Append(_body(signal, request_id, start), kept=False)


def _repeat_reconcile(winner: SignalRecord, body: SignalRecord, run: str) -> Repeated:
    if canonical(winner.payload) == canonical(body.payload):  # 1 is not true
        return Repeated(winner.n)
    raise DecisionConflict(
        f"{body.payload['step']} was reconciled before: {winner.payload['outcome']} by "
        f"{winner.by or 'somebody'}, record {winner.n}",
        winner=winner.n,
        run_id=run,
    )


def _not_unknown(fold: Fold, step: StepState, start: int, held: bool) -> str | None:
    """Why this start of the step can't be reconciled, or None where it can."""
    last = step.last
    if last.n != start:
        return f"record {start} is not its last start, which is record {last.n}"
    if step.completed is not None:
        return f"it has a result, record {step.completed.n}"
    if start in step.late:
        return f"its worker reported the result, record {step.late[start].n}"
    if not step.unsafe:
        return "it is safe to repeat and simply runs again"
    if held:
        return "the run is being worked on now"
    if fold.claim is not None and fold.claim.n == last.claim:
        return (
            f"it is running under claim {last.claim} of worker {fold.claim.worker} "
            "(if that is gone, `runfold run` takes the run over first)"
        )
    return None
