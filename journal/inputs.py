"""Core: inputs: messages for a running agent: submit, withdraw, place (R62).

Why it is safe: withdrawing and placing are records that compete for one sequence, and each is due
only while the input is queued at the tail it is appended to. So an input is placed at most once,
and never after a withdrawal that was acknowledged.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from . import ids
from .errors import BadPayload, RunFinished, StaleSignal, TooLarge
from .fold import Fold
from .limits import INPUT_BYTES_MAX, INPUTS_QUEUED_MAX
from .messages import JSON
from .records import Input, InputPlaced, InputStatus, InputWithdrawn, Mode, Submitted
from .values import canonical

MODES = ("steer", "follow_up")


class InputState(Struct, frozen=True, kw_only=True):
    """An input and what became of it. `created`: this very call submitted it."""

    request_id: str
    mode: Mode
    content: JSON
    status: InputStatus
    created: bool = False


class Queue(Struct, frozen=True):
    """Append this input."""

    body: Input


class Known(Struct, frozen=True):
    """It was submitted before: the original, whatever the content says now."""

    input: Submitted


InputDecision: TypeAlias = Queue | Known


def input_body(request_id: str, mode: str, content: JSON) -> Input:
    """The record of an input; raises BadPayload, TooLarge. `content` passed values.normalise."""
    if mode not in MODES:
        raise BadPayload(f"the mode of an input is steer or follow_up, not {ids.shown(mode)}")
    size = len(canonical(content))
    if size > INPUT_BYTES_MAX:
        raise TooLarge(f"an input is at most {INPUT_BYTES_MAX} bytes, not {size}")
    return Input(request_id=request_id, mode=mode, content=content)  # pyright: ignore[reportArgumentType]


def decide_input(fold: Fold, body: Input) -> InputDecision:
    """Whether the input may be appended at this fold; raises the refusal."""
    assert fold.started is not None
    run = fold.started.run
    known = fold.inputs.get(body.request_id)
    if known is not None:
        return Known(known)
    if fold.finished:
        raise RunFinished(f"run {run} is {fold.status()}: it takes no more inputs", run_id=run)
    if fold.cancel is not None:
        raise RunFinished(f"run {run} is being cancelled: it takes no more inputs", run_id=run)
    if len(fold.queued()) >= INPUTS_QUEUED_MAX:
        raise StaleSignal(
            f"run {run} has {INPUTS_QUEUED_MAX} inputs queued",
            run_id=run,
            hint="wait until its agent takes some, or withdraw some",
        )
    return Queue(body)


def decide_withdrawal(fold: Fold, request_id: str) -> InputWithdrawn | None:
    """The record that withdraws the input; None where that was done. Raises the refusal."""
    assert fold.started is not None
    run = fold.started.run
    known = fold.inputs.get(request_id)
    if known is None:
        raise StaleSignal(f"run {run} has no input {ids.shown(request_id)}", run_id=run)
    if known.status == "withdrawn":
        return None
    if known.status != "queued":
        raise StaleSignal(
            f"input {request_id} of run {run} is {known.status}: only queued ones are withdrawn",
            run_id=run,
        )
    return InputWithdrawn(request_id=request_id)


def decide_placing(fold: Fold, position: str, modes: tuple[str, ...]) -> InputPlaced | None:
    """The record that places the oldest queued input of these modes here; None where none is."""
    queued = fold.queued(*modes)
    if not queued or fold.finished:
        return None
    return InputPlaced(request_id=queued[0].request_id, iteration=fold.iteration, position=position)


def input_state(known: Submitted, *, created: bool = False) -> InputState:
    """An input as callers see it."""
    return InputState(
        request_id=known.request_id,
        mode=known.mode,
        content=known.content,
        status=known.status,
        created=created,
    )
