"""Core: what a signal says, and whether it may be appended (PROTOCOL 8, R59, R60).

Why it is safe: a signal is valid against the fold it is appended to, or refused. Two decisions
compete for one sequence; the loser re-reads and is a repeat or a conflict that names the winner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, assert_never, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from . import ids
from .errors import (
    BadPayload,
    DecisionConflict,
    InvalidId,
    NotEncodable,
    RunFinished,
    StaleSignal,
)
from .escape import visible
from .fold import Fold
from .limits import SIGNAL_BYTES_MAX
from .messages import JSON
from .records import Signal as SignalRecord
from .step_state import StepState
from .values import BadJSON, canonical, normalise, parse_strict

# `request_id` is optional in each payload (PROTOCOL 8); it becomes the record's own field.


class Approve(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Let the call behind this marker run, once."""

    marker: str
    comment: str = ""
    request_id: str = ""


class Reject(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Refuse the call behind this marker; the model sees the reason."""

    marker: str
    reason: str = ""
    request_id: str = ""


class Reconcile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Say what became of a write: `done` with its result, or `retry`.

    `start` is the ordinal of the start it answers; left out it means the step's only one.
    """

    step: str
    outcome: Literal["done", "retry"]
    start: int | None = None
    result: JSON | UnsetType = UNSET
    request_id: str = ""


AnySignal: TypeAlias = Approve | Reject | Reconcile
SignalName: TypeAlias = Literal["approve", "reject", "reconcile"]
_SHAPES: dict[str, type[AnySignal]] = {
    "approve": Approve,
    "reject": Reject,
    "reconcile": Reconcile,
}


class Append(Struct, frozen=True):
    """Append this record. `kept`: its call is not there yet; it waits for the gate (R60)."""

    body: SignalRecord
    kept: bool


class Repeated(Struct, frozen=True):
    """The same was said before, in record `n`: nothing to append."""

    n: int


SignalDecision: TypeAlias = Append | Repeated


def parse_signal(name: str, payload: AnySignal | Mapping[str, Any] | bytes | str) -> AnySignal:
    """The payload as a signal; raises BadPayload with the reason. Unknown keys, loose types and
    duplicate keys are refused, never repaired."""
    shape = _SHAPES.get(name)
    if shape is None:
        raise BadPayload(
            f"{ids.shown(name)} is not a signal", hint=f"signals are {', '.join(_SHAPES)}"
        )
    if isinstance(payload, Struct) and not isinstance(payload, shape):
        raise BadPayload(f"a {type(payload).__name__} was sent as {name}")
    try:
        value = _parsed(payload)
        if len(canonical(value)) > SIGNAL_BYTES_MAX:
            raise BadPayload(f"a signal's payload is at most {SIGNAL_BYTES_MAX} bytes")
        if not isinstance(value, dict):
            raise BadPayload(f"the payload of {name} is not a JSON object")
        found = msgspec.convert(value, shape)
    except BadJSON as error:
        raise BadPayload(f"the payload of {name} is not JSON: {_short(error)}") from error
    except NotEncodable as error:
        raise BadPayload(f"the payload of {name} is not JSON: {_short(error)}") from error
    except msgspec.ValidationError as error:
        raise BadPayload(f"the payload of {name} is wrong: {_short(error)}") from error
    if isinstance(found, Reconcile):
        _check_reconcile(found)
    return found


def _short(error: Exception) -> str:
    """What parsers say, without all that they quote."""
    text = visible(str(error)[:300])
    return text[:300]


def _parsed(payload: AnySignal | Mapping[str, Any] | bytes | str) -> JSON:
    if isinstance(payload, bytes | str):
        size = len(payload)
        if size > SIGNAL_BYTES_MAX:
            raise BadPayload(f"a signal's payload is at most {SIGNAL_BYTES_MAX} bytes, not {size}")
        return parse_strict(payload)
    plain = msgspec.to_builtins(payload) if isinstance(payload, Struct) else dict(payload)
    return normalise(plain, "the payload")


def _check_reconcile(signal: Reconcile) -> None:
    if signal.outcome == "done" and signal.result is UNSET:
        raise BadPayload("reconcile done needs the result", hint="null is a result too")
    if signal.outcome == "retry" and signal.result is not UNSET:
        raise BadPayload("reconcile retry takes no result")


def name_of(signal: AnySignal) -> SignalName:
    """The signal's name on the wire."""
    return cast("SignalName", type(signal).__name__.lower())


def decide_signal(fold: Fold, signal: AnySignal, request_id: str, *, held: bool) -> SignalDecision:
    """Whether the signal applies at this fold; raises the refusal.

    `held`: somebody runs the run now under a lock (a claim stands in the fold itself); its open
    writes are running then, not unknown.
    """
    assert fold.started is not None
    assert fold.newer is None
    run = fold.started.run
    earlier = fold.requests.get(request_id)
    if earlier is not None:
        return _repeat(earlier, signal, run)
    if fold.finished:
        raise RunFinished(f"run {run} is {fold.status()}: it takes no more signals", run_id=run)
    match signal:
        case Approve() | Reject():
            return _decide_marker(fold, signal, request_id, run, held)
        case Reconcile():
            return _decide_reconcile(fold, signal, request_id, run, held)
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
    if signal.start is None and step is not None and len(step.starts) == 1:
        return step.last.n
    return signal.start


def _repeat(earlier: SignalRecord, signal: AnySignal, run: str) -> Repeated:
    start = None
    if isinstance(signal, Reconcile):  # left out, it is the start that was meant the first time
        start = signal.start if signal.start is not None else earlier.payload.get("start")
    body = _body(signal, earlier.request_id, start)
    if earlier.name == body.name and canonical(earlier.payload) == canonical(body.payload):
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
    pending = {verdict.marker for _, verdict in fold.pending()}
    if signal.marker in pending:
        return Append(_body(signal, request_id), kept=False)
    if _was_asked(fold, signal.marker) or fold.status(held=held) != "running":
        raise _stale_marker(signal.marker, pending, run)
    return Append(_body(signal, request_id), kept=True)


def _was_asked(fold: Fold, marker: str) -> bool:
    """Whether the marker's step already exists, so that no later gate will ask for it."""
    step = marker.partition("/")[2].rpartition("@")[0]
    here = fold.reply is not None and step in fold.reply.steps
    return step in fold.steps or here


def _stale_marker(marker: str, pending: set[str], run: str) -> StaleSignal:
    now = f"pending now: {', '.join(sorted(pending))}" if pending else "nothing is pending"
    return StaleSignal(f"marker {marker} is not pending", run_id=run, hint=now)


def _same_decision(winner: SignalRecord, name: SignalName, run: str, what: str) -> Repeated:
    if winner.name == name:
        return Repeated(winner.n)
    raise DecisionConflict(
        f"{what} was decided before: {winner.name} by {winner.by or 'somebody'}, record {winner.n}",
        winner=winner.n,
        run_id=run,
    )


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
            f"step {signal.step} was started {len(step.starts)} times: say which start",
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


def parse_request_id(value: str | None) -> str | None:
    """A caller's request id, or None; raises BadPayload for one that is not printable ASCII."""
    if value is None:
        return None
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadPayload("a request id is text")
    if not value.isascii() or not value.isprintable() or not 1 <= len(value) <= 128:
        raise BadPayload("a request id is 1 to 128 printable ASCII characters")
    return value
