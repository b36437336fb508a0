"""Core: the step table (R20-R26) and the start of a run, as pure functions over the fold.

Why the order is safe: a write is called only after its `step.started` was acknowledged at a tail at
which this table said Run. The next holder folds that start and gets Ask, whatever became of the
call; only a person's `reconcile` for exactly that start moves it on, and a `retry` is spent by the
start that names it (`permit`), because that start is then the step's last and not reconciled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from typing import Literal, TypeAlias

from msgspec import UNSET, Struct

from .errors import InputMismatch
from .fold import Fold
from .limits import TOOL_TIMEOUT_S
from .messages import JSON
from .records import Kind, Policy, RunStarted, StepCompleted, StepError, StepStarted
from .step_state import StepState
from .values import call_digest, canonical, digest


class Happened(Struct, frozen=True):
    """A probe's answer: the write took effect, with this result."""

    result: JSON


class DidNotHappen(Struct, frozen=True):
    """A probe's answer: the write took no effect, and won't: it may be made again, once."""


class CannotTell(Struct, frozen=True):
    """A probe's answer: a person is asked."""

    detail: str = ""


Probed: TypeAlias = Happened | DidNotHappen | CannotTell
Probe: TypeAlias = Callable[[str], Awaitable[Probed]]
"""Asks the outside system about the write with this idempotency key (R27)."""


class Call(Struct, frozen=True, kw_only=True):
    """A call that the code wants to make at a position. `input` is a strict JSON value.

    `unsafe`: twice is not harmless, by its declaration or the gate. `read`: it was declared one,
    and may run while its start travels (R25). `permit`: the n of the approval that lets it start, 0
    where none is needed. `timeout_s` bounds the call; it is no part of what the call is.
    """

    step: str
    kind: Kind
    tool: str
    input: JSON
    digest: str
    unsafe: bool
    read: bool = False
    permit: int = 0
    timeout_s: float = TOOL_TIMEOUT_S
    policy: Policy = "reconcile"


class Reuse(Struct, frozen=True):
    """The step has a recorded result: return it, call nothing (R20)."""

    completed: StepCompleted


class Run(Struct, frozen=True):
    """Record the start with this permit, key and safety, then call (R22, R24)."""

    permit: int
    key: str
    unsafe: bool


class Settle(Struct, frozen=True):
    """A person said `done`, or the fenced holder reported its result late: record it, call nothing
    (R21, R29)."""

    result: JSON
    by: int
    via: Literal["reconcile", "late"]


class Ask(Struct, frozen=True):
    """The write's outcome is unknown: its policy or a person decides (R23, R27)."""

    start: StepStarted
    policy: Policy = "reconcile"


class Wait(Struct, frozen=True):
    """A retry is permitted, but the earlier call may still be running until then (R22)."""

    start: StepStarted


class Mismatch(Struct, frozen=True):
    """The journal holds another call at this position (R43)."""

    recorded: str
    attempted: str


StepDecision: TypeAlias = Reuse | Run | Settle | Ask | Wait | Mismatch


def make_call(
    step: str,
    kind: Kind,
    tool: str,
    input: JSON,
    *,
    unsafe: bool,
    read: bool = False,
    permit: int = 0,
    timeout_s: float = TOOL_TIMEOUT_S,
    policy: Policy = "reconcile",
) -> Call:
    """A Call with its digest; `input` already passed values.normalise."""
    return Call(
        step=step,
        kind=kind,
        tool=tool,
        input=input,
        digest=call_digest(tool, input),
        unsafe=unsafe,
        read=read and not unsafe,
        permit=permit,
        timeout_s=timeout_s,
        policy=policy,
    )


def step_key(run_id: str, call: Call, attempt: int = 1) -> str:
    """The idempotency key: stable over deliveries, injective in run, step and attempt (R28). A
    handler's position may be another call in a later attempt; what is the same call keeps the
    earlier key."""
    again = attempt > 1 and call.step[0].isdecimal()
    position = f"{call.step}@{attempt}" if again else call.step
    return f"{run_id}:{position}:{call.digest[:16]}"


def decide_step(
    fold: Fold,
    call: Call,
    *,
    attempted: Set[int] = frozenset(),
    earlier_over: bool = False,
    honoured: StepState | None = None,
    key: str = "",
) -> StepDecision:
    """What to do about the call at this fold. `honoured`: the unsafe step of an earlier attempt
    that this call is matched to, by tool, input and occurrence (R44); `key`: that of a safe one.

    `attempted`: starts this very process has executed; such a call did happen here, so it is never
    run again on the strength of what the journal lacks (found by the explorer). `earlier_over`: the
    call of the step's last start can no longer be running; asked only for a permitted retry.
    """
    assert fold.started is not None
    assert not fold.finished
    step = fold.steps.get(call.step)
    if step is None and honoured is not None:
        if honoured.completed is not None:
            return Reuse(honoured.completed)
        return _decide_open(honoured, call, attempted, earlier_over)
    if step is None:
        return Run(call.permit, key or step_key(fold.started.run, call, fold.attempt), call.unsafe)
    if step.starts and (step.last.kind, step.last.digest) != (call.kind, call.digest):
        return Mismatch(_describe(step.last.kind, step.last.tool, step.last.input), _asked(call))
    if step.completed is not None:
        return Reuse(step.completed)
    return _decide_open(step, call, attempted, earlier_over)


def _decide_open(
    step: StepState, call: Call, attempted: Set[int], earlier_over: bool
) -> StepDecision:
    last = step.last
    if not step.unsafe and not call.unsafe:
        return Run(last.permit, last.key, unsafe=False)
    late = step.late.get(last.n)
    if late is not None:  # the truth beats a retry that nothing has started on yet
        return Settle(late.payload["result"], late.n, "late")
    answer = step.reconciled.get(last.n)
    if answer is None or last.n in attempted:
        by_policy = step.unknown and not step.needs_person  # else it could settle nothing
        policy = last.policy if by_policy else "reconcile"
        return Ask(last, policy)
    match answer.payload["outcome"]:
        case "done":
            return Settle(answer.payload["result"], answer.n, "reconcile")
        case "retry":
            return Run(answer.n, last.key, unsafe=True) if earlier_over else Wait(last)
        case _:  # a permit is never read into a word this version does not know
            return Ask(last)


def _asked(call: Call) -> str:
    return _describe(call.kind, call.tool, call.input)


def _describe(kind: str, tool: str, value: JSON) -> str:
    text = canonical(value).decode()
    return f"{kind} {tool} {text[:200]}{'…' if len(text) > 200 else ''}".replace("  ", " ")


def completed_value(completed: StepCompleted) -> tuple[JSON, StepError | None]:
    """A recorded step as (result, error): one of them is None unless the result itself is null. An
    interrupted one is an error here: nobody knows what it did (R27)."""
    if completed.error is not UNSET:
        return None, completed.error
    if completed.interrupted is not UNSET:
        message = "the call was interrupted: it may or may not have taken effect"
        partial = completed.interrupted.partial
        return None, StepError(type="interrupted", message=message, data=partial)
    return completed.result, None


def input_digest(agent: str, value: JSON) -> str:
    """What two starts are the same by (R3)."""
    return digest(agent, canonical(value))


def decide_start(fold: Fold, body: RunStarted) -> bool:
    """True: append the start; False: the run is there with the same input and agent (R3).

    Raises InputMismatch for another input or agent, for finished and purged runs too.
    """
    if fold.purged is not None:
        raise InputMismatch(
            f"run {body.run} has been purged and its id stays used",
            run_id=body.run,
            hint="start it under another id",
        )
    if fold.started is None:
        return fold.n == 0
    if fold.started.digest != body.digest or fold.started.agent != body.agent:
        what = "agent" if fold.started.agent != body.agent else "input"
        raise InputMismatch(
            f"run {body.run} exists with another {what}; nothing was written",
            run_id=body.run,
            hint="leave the input out to resume it, or start under another id",
        )
    return False
