"""From a Label to the record it stands for, as a holder, a door or a bridge writes it."""

from __future__ import annotations

from msgspec import structs

from journal.fold import Fold
from journal.records import (
    NO_WAITS,
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    Interrupted,
    Park,
    Record,
    Release,
    RunCompleted,
    Signal,
    StepCompleted,
    StepError,
    StepStarted,
    Waits,
)
from journal.steps import Call
from journal.summary import with_summary
from journal.waits import wait_of, would_go_on

from .bounds import Bounds
from .plots import AT, UNTIL, Plot
from .states import Label

INPUT = "i1"


def body_of(label: Label, fold: Fold, plot: Plot, bounds: Bounds) -> Record:
    """The record, for the journal with this fold."""
    match label:
        case ("start", index, permit, unsafe, key):
            return _start(plot, index, permit, unsafe, key, fold.attempt, bounds)
        case ("done", index, value, via):
            return StepCompleted(step=_call(plot, index).step, result=value, via=via)
        case ("interrupted", step):
            return StepCompleted(step=step, interrupted=Interrupted(), via="interrupted")
        case ("refused", index, type_, message):
            error = StepError(type=type_, message=message)
            return StepCompleted(step=_call(plot, index).step, error=error, via="refused")
        case ("signal", name, request_id, *payload):
            return Signal(name=name, request_id=request_id, payload=dict(payload))
        case ("input", mode, content):
            return Input(request_id=INPUT, mode=mode, content=content)
        case ("withdrawn",):
            return InputWithdrawn(request_id=INPUT)
        case ("placed", position):
            return InputPlaced(request_id=INPUT, position=position, iteration=fold.iteration)
        case ("claim", reason, task):
            return Claim(worker="w", revision="1", reason=reason, task=task, delivery=int(task > 0))
        case ("release",):
            return Release(reason="stopped")
        case _:
            return _end(label, fold, plot, bounds)


def _end(label: Label, fold: Fold, plot: Plot, bounds: Bounds) -> Record:
    """What ends a turn, as ends.py makes it."""
    here, attempt = fold.iteration, fold.attempt
    match label:
        case ("park", "retry"):
            step = plot.calls[plot.write].step
            return Park(why="retry", steps=(step,), iteration=here, attempt=attempt, until=UNTIL)
        case ("park", why):
            return Park(why=why, iteration=here, attempt=attempt)
        case ("failed",):
            return Park(why="retry", iteration=here, attempt=attempt, until=UNTIL, afresh=True)
        case ("cancelled",):
            return Commit(action="cancel", reason="asked to", iteration=here)
        case ("completed", answer):
            message = {"role": "assistant", "content": list(answer)}
            return RunCompleted(message=message, iteration=here)
        case ("commit", state, waiting):
            waits = Waits(until=UNTIL, until_input=True) if waiting else NO_WAITS
            commit = Commit(action="continue", at=AT, iteration=here, state=state, waits=waits)
            careful = plot.rules.waits_for_nothing_there
            if careful and wait_of(commit) is not None and would_go_on(fold, commit):
                commit = structs.replace(commit, waits=NO_WAITS)
            return with_summary(fold, commit) if bounds.shared else commit
        case _:
            raise AssertionError(label)


def _call(plot: Plot, index: int) -> Call:
    return plot.calls[index]


def _start(
    plot: Plot, index: int, permit: int, unsafe: bool, key: str, attempt: int, bounds: Bounds
) -> StepStarted:
    call = _call(plot, index)
    return StepStarted(
        step=call.step,
        kind="tool",
        tool=call.tool,
        input=call.input,
        digest=call.digest,
        replay="unsafe" if unsafe else "safe",
        key=key,
        permit=permit,
        policy=bounds.policy,
        attempt=attempt,
        deadline=UNTIL if unsafe else "",
    )
