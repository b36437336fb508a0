"""Core: what becomes of a model's reply: verdicts when it is recorded, one decision per call later.

Why it is safe: a verdict is recorded with the reply, so the journal says what is pending. A call
runs only if the gate of today still lets it: an approval whose marker the present tool, policy and
arguments would not produce covers nothing (R32).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from copy import deepcopy
from typing import TypeAlias

from msgspec import Struct

from journal import ids, limits
from journal.fold import Fold
from journal.messages import JSON, Reply, ToolRequest
from journal.positions import AGAIN
from journal.records import (
    StepCompleted,
    StepError,
    StepStarted,
    Verdict,
    VerdictAllow,
    VerdictAsk,
    VerdictDeny,
)
from journal.step_state import call_step
from journal.steps import Call, Run, decide_step, make_call
from journal.values import call_digest, marker_digest

from .agent import Agent
from .gate import Allow, Deny, GateDecision, NeedsApproval, check_decision
from .tools import BadArguments, Tool

TOO_MANY = "too_many_calls"
ILL_FORMED = ("unknown_tool", "bad_arguments", "bad_reply")
_ATTEMPT = 1


class Answered(Struct, frozen=True):
    """The call has its recorded result."""

    completed: StepCompleted


class Refuse(Struct, frozen=True):
    """Record this error as the call's result; never start it (R31)."""

    step: str
    error: StepError


class Execute(Struct, frozen=True):
    """Take the call through the step table. `tool` is None only where the table will not run it."""

    call: Call
    tool: Tool | None


class Changed(Struct, frozen=True):
    """A person permits the write again, and its tool or policy is another by now: nothing is
    written, nothing executed, until the old code is back (R43)."""

    step: str
    recorded: str
    why: str


class Doubt(Struct, frozen=True):
    """A write that dedupes on its key was started, and today's tool or policy is another: calling
    it is not let through, and telling the model it failed could be false. A person is asked."""

    start: StepStarted


class AwaitDecision(Struct, frozen=True):
    """Nobody has decided on the marker yet."""

    marker: str


CallDecision: TypeAlias = Answered | Refuse | Execute | Changed | Doubt | AwaitDecision


def judge_reply(
    agent: Agent, run_id: str, n: int, reply: Reply, interrupted: Set[str] = frozenset()
) -> tuple[Verdict, ...]:
    """The verdict on each call of reply `n`, to be recorded with it. `interrupted`: digests of
    calls that were cut off; the same again is held for approval (R27)."""
    shared_ids = {id for id, count in Counter(c.id for c in reply.calls).items() if count > 1}
    verdicts: list[Verdict] = []
    for index, request in enumerate(reply.calls):
        if reply.finish == "length":
            verdicts.append(VerdictDeny(type="bad_reply", reason="the reply was cut off"))
        elif len(reply.calls) > agent.bounds.calls_per_reply:
            verdicts.append(VerdictDeny(type=TOO_MANY, reason="too many calls in one reply"))
        elif not request.id or request.id in shared_ids:
            reason = "its id is empty" if not request.id else "another call has the same id"
            verdicts.append(VerdictDeny(type="bad_reply", reason=reason))
        else:
            step = call_step(n, index, request.name)
            verdicts.append(judge_call(agent, run_id, step, request, interrupted)[0])
    return tuple(verdicts)


def judge_call(
    agent: Agent,
    run_id: str,
    step: str,
    request: ToolRequest,
    interrupted: Set[str] = frozenset(),
) -> tuple[Verdict, JSON]:
    """The verdict on one well-placed call, and its parsed arguments (None where denied)."""
    tool = agent.tools.get(request.name)
    if tool is None:  # near names are not mapped (R36)
        known = ", ".join(agent.tools) or "none"
        reason = f"there is no tool {ids.shown(request.name)}; the tools are: {known[:500]}"
        return VerdictDeny(type="unknown_tool", reason=reason), None
    try:
        arguments = tool.parse(request.arguments)
    except BadArguments as error:
        return VerdictDeny(type="bad_arguments", reason=str(error)), None
    decision = agent.gate.decide(tool.spec, deepcopy(arguments))  # what was shown is what runs
    check_decision(decision, f"the gate's decision on {request.name}")
    if call_digest(request.name, arguments) in interrupted:
        decision = _held(decision)
    match decision:
        case Allow():
            return VerdictAllow(), arguments
        case Deny(reason):
            return VerdictDeny(type="denied", reason=reason), None
        case NeedsApproval(text):
            digest = marker_digest(
                run_id, step, call_digest(request.name, arguments), text, tool.revision
            )
            marker = ids.marker(ids.RunId(run_id), step, _ATTEMPT, digest)
            return VerdictAsk(marker=marker, text=text), arguments


def _held(decision: GateDecision) -> GateDecision:
    """What the gate says of a call that was interrupted before: a person is asked (R27)."""
    match decision:
        case Allow():
            return NeedsApproval(AGAIN)
        case NeedsApproval(text):
            return NeedsApproval(f"{text}; {AGAIN}")
        case Deny():
            return decision


def decide_call(
    fold: Fold, agent: Agent, n: int, index: int, request: ToolRequest, verdict: Verdict
) -> CallDecision:
    """What to do about one call of the recorded reply `n` at this fold."""
    assert fold.started is not None
    run_id = fold.started.run
    step = call_step(n, index, request.name)
    state = fold.steps.get(step)
    if state is not None and state.completed is not None:
        return Answered(state.completed)
    if state is not None:
        return _resume(fold, agent, step, state.last, request, verdict)
    permit = 0
    match verdict:
        case VerdictDeny(type=type_, reason=reason):
            return Refuse(step, StepError(type=type_, message=reason))
        case VerdictAsk(marker=marker):
            answer = fold.decisions.get(marker)
            if answer is None:
                return AwaitDecision(marker)
            if answer.name == "reject":
                reason = answer.reason or "no reason given"
                return Refuse(step, StepError(type="rejected", message=reason))
            permit = answer.n
        case VerdictAllow():
            pass
    today, arguments = judge_call(agent, run_id, step, request, fold.interrupted)
    if (refusal := _refusal(verdict, today)) is not None:
        return Refuse(step, refusal)
    tool = agent.tools[request.name]
    return Execute(_call(agent, step, request.name, arguments, permit), tool)


def _refusal(recorded: Verdict, today: Verdict) -> StepError | None:
    """Why a call that was let through then is not let through today; None where it still is."""
    if isinstance(today, VerdictDeny):
        return StepError(type=today.type, message=today.reason)
    if isinstance(today, VerdictAsk) and today != recorded:
        message = "the tool or the policy changed since this call was let through: ask again"
        return StepError(type="outdated", message=message)
    return None


def _resume(
    fold: Fold,
    agent: Agent,
    step: str,
    last: StepStarted,
    request: ToolRequest,
    verdict: Verdict,
) -> Execute | Refuse | Changed | Doubt:
    """A call that was started before. Settling and asking need no tool; running it again needs
    today's tool and gate to let it, as the first time (R32)."""
    assert fold.started is not None
    call = _call(agent, step, last.tool, last.input, last.permit)
    if isinstance(run := decide_step(fold, call, earlier_over=True), Run):
        today, _ = judge_call(agent, fold.started.run, step, request, fold.interrupted)
        refusal = _refusal(verdict, today)
        if refusal is not None and run.unsafe and refusal.type != "denied":
            return Changed(step, last.tool, refusal.message)
        if refusal is not None and not run.unsafe and agent.tools[last.tool].spec.write:
            return Doubt(last)
        if refusal is not None:
            return Refuse(step, refusal)
    return Execute(call, agent.tools.get(last.tool))


def _call(agent: Agent, step: str, tool_name: str, arguments: JSON, permit: int) -> Call:
    tool = agent.tools.get(tool_name)
    return make_call(
        step,
        "tool",
        tool_name,
        arguments,
        unsafe=agent.is_unsafe(tool_name),
        read=tool is not None and not tool.spec.write,
        permit=permit,
        timeout_s=tool.timeout_s if tool else limits.TOOL_TIMEOUT_S,
        policy=tool.on_unknown if tool else "reconcile",
    )
