"""Core: a turn handler's calls, by position: who decides on one, what stood there (R42-R44)."""

from __future__ import annotations

from itertools import islice

from .errors import ReplayMismatch
from .fold import Fold
from .ids import RunId, marker
from .inputs import decide_placing
from .records import Asked, InputPlaced, Known, Mode, StepError, Submitted
from .step_state import StepState
from .steps import Call
from .values import marker_digest

AGAIN = "the same call was interrupted before and may have taken effect"
"""What a person is told of a call that was cut off and is asked for again (R27)."""


def step_at(iteration: int, position: int) -> str:
    """The step's name."""
    return f"{iteration}/{position}"


def later(fold: Fold, iteration: int, position: int) -> str | None:
    """A step of the turn at this position or behind it."""
    for name in fold.steps:
        turn, _, place = name.partition("/")
        if turn == str(iteration) and place.isdecimal() and int(place) >= position:
            return name
    return None


class Furthest:
    """How far the recorded calls of a turn go, for one that makes many: while it is played steps
    are only added, so each is looked at once."""

    def __init__(self) -> None:
        self._steps: dict[str, StepState] = {}
        self._seen = 0
        self._place = -1

    def before(self, fold: Fold, iteration: int, position: int) -> bool:
        """Whether `later` has nothing to find there."""
        steps = fold.steps
        if steps is not self._steps or len(steps) < self._seen:
            self._steps, self._seen, self._place = steps, 0, -1
        for name in islice(reversed(steps), len(steps) - self._seen):
            turn, _, place = name.partition("/")
            if turn == str(iteration) and place.isdecimal():
                self._place = max(self._place, int(place))
        self._seen = len(steps)
        return self._place < position


def earlier_call(
    fold: Fold, call: Call, occurrence: int, safe_occurrence: int
) -> tuple[str, StepState | None]:
    """The same call of an earlier attempt, by tool, input and occurrence (R28, R44): a safe one
    lends its key; an unsafe one is this call. `occurrence`: how many of the turn's calls before
    this one were matched to such an unsafe one; `safe_occurrence`: how many were safe and the same.
    """
    what = (call.tool, call.digest)
    keys = () if call.unsafe else fold.keys.get(what, ())
    if safe_occurrence < len(keys):
        return keys[safe_occurrence], None
    honoured = fold.honoured.get(what, [])
    return "", honoured[occurrence] if occurrence < len(honoured) else None


def decided(fold: Fold, call: Call, text: str | None) -> int | StepError | Asked:
    """The permit of a call that a person decides on by this text (None: nobody need; then 0), the
    refusal, or what the person is asked. A write that was interrupted is not simply made again
    (R27)."""
    assert fold.started is not None
    if call.digest in fold.interrupted:
        text = f"{text}; {AGAIN}" if text else AGAIN
    if text is None:  # code that asks no more does not undo what a person said
        refused = _refusal(fold, call)
        return 0 if refused is None else _rejected(refused.reason)
    run = RunId(fold.started.run)
    digest = marker_digest(run, call.step, call.digest, text, "")
    asked = marker(run, call.step, fold.attempt, digest)
    answer = fold.decisions.get(asked)
    if answer is None:
        return Asked(marker=asked, step=call.step, tool=call.tool, input=call.input, text=text)
    if answer.name == "reject":
        return _rejected(answer.reason)
    return answer.n


def _refusal(fold: Fold, call: Call) -> Known | None:
    """What a person who was asked about this very call said against it, under whatever text."""
    for marker_, what in fold.offered.items():
        said = fold.decisions.get(marker_)
        if what == (call.step, call.digest) and said is not None and said.name == "reject":
            return said
    return None


def _rejected(reason: str) -> StepError:
    return StepError(type="rejected", message=reason or "no reason given")


def placing(
    fold: Fold, iteration: int, position: int, mode: Mode, furthest: Furthest
) -> InputPlaced | None:
    """The record that places the next queued input at this position; None where none is, or a call
    was recorded behind it: that was made without them (R62)."""
    if fold.cancel is not None or not furthest.before(fold, iteration, position + 1):
        return None
    return decide_placing(fold, step_at(iteration, position), (mode,))


def told(fold: Fold, mode: Mode) -> list[Submitted]:
    """Inputs that an earlier attempt of this turn was told: they come first, at the first call."""
    return [one for one in fold.placed_at("") if one.status == "placed" and one.mode == mode]


def moved(fold: Fold, position: str, attempted: str) -> ReplayMismatch:
    """The error for code that asks for something else than the journal holds here (R43)."""
    assert fold.started is not None
    run = fold.started.run
    step = fold.steps.get(position)
    last = step.last if step is not None and step.starts else None
    recorded = f"{last.kind} {last.tool}".strip() if last is not None else "no call"
    return ReplayMismatch(
        f"run {run}: at {position} the journal holds {recorded}; the code asks for {attempted}",
        position=position,
        recorded=recorded,
        attempted=attempted,
        run_id=run,
        hint="the code changed under the run: bring the old code back to finish it",
    )


def ended_before(fold: Fold, left: str, attempted: str) -> ReplayMismatch:
    """The error for a turn that ends in front of a recorded call."""
    assert fold.started is not None
    run = fold.started.run
    return ReplayMismatch(
        f"run {run}: the journal holds a call at {left}; the code ends the turn before",
        position=left,
        recorded=left,
        attempted=attempted,
        run_id=run,
        hint="the code changed under the run: bring the old code back to finish it",
    )
