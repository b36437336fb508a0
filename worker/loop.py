"""Shell: the built-in agent loop: model, tool calls, model … answer (R30-R36), as a turn.

It goes through the conversation since the last commit at every pick-up; recorded steps answer from
the journal. After many steps it commits, so that a long run resumes as fast as a short one (R41).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, assert_never

import msgspec
from msgspec import Struct

from journal.errors import ReplayMismatch
from journal.fold import Fold
from journal.grouped import Job
from journal.handle import Journal
from journal.inputs import decide_placing
from journal.messages import JSON, Message, Reply, ToolRequest
from journal.records import InputPlaced, StepCompleted, StepError, StepStarted, Verdict, VerdictDeny
from journal.step_state import call_step
from journal.steps import completed_value, make_call
from journal.stops import AwaitDecisions
from journal.terms import Complete, Continue, Fail, Next
from journal.unknown import NO_WAYS, Superseded, Ways, doubt, indeterminate, wait_over
from journal.values import recordable

from .agent import Agent
from .calls import TEXT_CHARS_MAX, model_failed, perform_tool, step_failed, text_of
from .context import Context
from .replies import (
    ILL_FORMED,
    TOO_MANY,
    Answered,
    AwaitDecision,
    Changed,
    Doubt,
    Execute,
    Refuse,
    decide_call,
    judge_reply,
)

STEER, BOTH = ("steer",), ("steer", "follow_up")


class Talk(Struct, kw_only=True):
    """The conversation: what a commit of the loop holds. `n`: the next model call; `bad`: unusable
    replies in a row; `modes`: which queued inputs may be placed before the next model call."""

    messages: list[Message]
    n: int = 1
    bad: int = 0
    modes: tuple[str, ...] = ()


async def converse(ctx: Context, agent: Agent) -> Next:
    """Take the conversation to its answer, a bound, or a commit. Raises AwaitDecisions, StepFailed
    (a model call failed; no result of it), and the engine's errors."""
    journal = ctx.journal
    talk = _talk(ctx, agent)
    while True:
        if f"llm/{talk.n}" not in journal.fold.steps:  # bounds stop new calls, never recorded ones
            if (reached := _bound(agent, talk)) is not None:
                return reached
            if journal.store.shared and len(journal.fold.steps) >= journal.commit_steps:
                return Continue(state=msgspec.to_builtins(talk))
        completed = await _model_step(journal, agent, talk)
        if (problem := _not_recordable(completed)) is not None:
            return Fail(reason=problem.type, detail=problem.message)
        reply = msgspec.convert(completed.result, Reply)
        if reply.finish == "refusal":
            return Fail(reason="model_refused", detail=reply.text[:TEXT_CHARS_MAX])
        talk.messages.append(Message(role="assistant", content=reply.text, calls=reply.calls))
        if not reply.calls and reply.finish != "length" and reply.text.strip():
            if not _continued(journal.fold, talk.n + 1):
                return Complete(Message(role="assistant", content=reply.text))
            talk.modes = BOTH
            usable = True
        elif any(isinstance(v, VerdictDeny) and v.type == TOO_MANY for v in completed.verdicts):
            detail = f"llm/{talk.n} made {len(reply.calls)} calls"
            return Fail(reason="calls_per_reply", detail=detail)
        elif reply.calls:
            results = await _answer_calls(journal, agent, talk.n, reply, completed.verdicts)
            for request, result in zip(reply.calls, results, strict=True):
                if (problem := _not_recordable(result)) is not None:
                    return Fail(reason=problem.type, detail=problem.message)
                talk.messages.append(_tool_message(request, result))
            usable = any(not _ill_formed(result) for result in results)
            talk.modes = STEER
        else:
            talk.messages.append(Message(role="user", content=_complaint(reply)))
            usable = False
            talk.modes = STEER
        talk.bad = 0 if usable else talk.bad + 1
        talk.n += 1


def _talk(ctx: Context, agent: Agent) -> Talk:
    state = ctx.load_checkpoint()
    if state is None:
        return Talk(messages=_first_messages(agent, ctx.input))
    return msgspec.convert(state, Talk)


def _first_messages(agent: Agent, recorded: JSON) -> list[Message]:
    """The recorded input as messages: a list of them as it is, anything else as the user's text."""
    system = [Message(role="system", content=agent.system)] if agent.system else []
    if isinstance(recorded, list) and recorded:
        try:
            return system + msgspec.convert(recorded, list[Message])
        except msgspec.ValidationError:
            pass  # a JSON list that is no conversation: the user's content
    return [*system, Message(role="user", content=recorded)]


def _bound(agent: Agent, talk: Talk) -> Fail | None:
    if talk.n > agent.bounds.iterations:
        return Fail(reason="iterations", detail=f"{talk.n - 1} model calls made")
    if talk.bad >= agent.bounds.bad_replies:
        return Fail(reason="bad_replies", detail=f"{talk.bad} unusable replies in a row")
    return None


def _continued(fold: Fold, n: int) -> bool:
    """Whether the conversation goes on behind a final answer: inputs wait, or were placed (R62)."""
    step = f"llm/{n}"
    return bool(fold.queued() or fold.placed_at(step)) or step in fold.steps


# ---- the model -------------------------------------------------------------------------------


async def _model_step(journal: Journal, agent: Agent, talk: Talk) -> StepCompleted:
    """The model's reply, with what was placed before it appended to the conversation. An input that
    comes before the request is made is placed first."""
    step = f"llm/{talk.n}"
    before = len(talk.messages)
    specs = [tool.spec for tool in agent.tools.values()]

    async def preview(text: str) -> None:
        await journal.store.preview(journal.run_id, text)

    async def ask(start: StepStarted) -> StepCompleted:
        try:
            reply = await agent.model.reply(tuple(talk.messages), specs, preview=preview)
        except Exception as error:
            raise model_failed(journal, step, error) from error
        return _reply_record(journal, agent, talk.n, reply)

    def to_place(fold: Fold) -> bool:
        return decide_placing(fold, step, talk.modes) is not None and bool(talk.modes)

    call = make_call(step, "model", "", None, unsafe=False)
    while True:
        await _place(journal, step, talk.modes)
        del talk.messages[before:]
        talk.messages += [
            Message(role="user", content=known.content) for known in journal.fold.placed_at(step)
        ]
        ways = Ways(unless=to_place) if step not in journal.fold.steps else NO_WAYS
        try:
            return await journal.step(call, ask, ways)
        except Superseded:
            continue


async def _place(journal: Journal, step: str, modes: tuple[str, ...]) -> None:
    """Place what is queued before this model call, unless the call was made without it."""

    def due(fold: Fold) -> InputPlaced | None:
        if not modes or step in fold.steps or fold.cancel is not None:
            return None
        return decide_placing(fold, step, modes)

    while await journal.append(due) is not None:
        pass


def _reply_record(journal: Journal, agent: Agent, n: int, reply: object) -> StepCompleted:
    """The record of a model's reply with the verdict on each call; raises StepFailed."""
    step = f"llm/{n}"
    try:
        plain = msgspec.to_builtins(reply)
        checked = msgspec.convert(plain, Reply)
    except (msgspec.ValidationError, TypeError) as error:
        hint = "mend the model's adapter; nothing of it was recorded"
        what = f"the model of {step} returned no Reply: {error}"
        raise step_failed(journal, step, what, hint) from error
    result = recordable(plain, f"the reply of {step}")
    try:
        verdicts = judge_reply(agent, journal.run_id, n, checked, journal.fold.interrupted)
    except Exception as error:  # the gate is the application's code
        kind = type(error).__name__
        what = f"the gate failed on the calls of {step}: {kind}: {text_of(error)}"
        raise step_failed(journal, step, what, "mend the gate; the model is asked again") from error
    return StepCompleted(step=step, result=result, verdicts=verdicts)


# ---- the calls -------------------------------------------------------------------------------


async def _answer_calls(
    journal: Journal, agent: Agent, n: int, reply: Reply, verdicts: Sequence[Verdict]
) -> list[StepCompleted]:
    """The results of all calls in order; raises AwaitDecisions where a decision is missing. The
    others run first, so that a person's absence holds up only what waits for the person."""
    for index, request in enumerate(reply.calls):
        if journal.fold.done(step := call_step(n, index, request.name)):
            journal.store.observer.replayed(journal.run_id, step)
    if not await _in_parallel(journal, agent, n, reply, verdicts):
        for index, request in enumerate(reply.calls):
            await _answer_call(journal, agent, n, index, request, verdicts[index])
    results: list[StepCompleted] = []
    for index, request in enumerate(reply.calls):
        decision = decide_call(journal.fold, agent, n, index, request, verdicts[index])
        if not isinstance(decision, Answered):
            raise AwaitDecisions
        results.append(decision.completed)
    return results


async def _in_parallel(
    journal: Journal, agent: Agent, n: int, reply: Reply, verdicts: Sequence[Verdict]
) -> bool:
    """Make the calls of the reply at once where they all are simply to be executed, and are reads,
    or the agent says so of its writes (R35). False: one by one, which is always right."""
    jobs: list[Job] = []
    for index, request in enumerate(reply.calls):
        match decide_call(journal.fold, agent, n, index, request, verdicts[index]):
            case Answered():
                continue
            case Execute(call, tool) if tool is not None and (
                not tool.spec.write or agent.parallel_writes
            ):
                if call.step in journal.fold.steps and call.unsafe:
                    return False
                jobs.append((call, partial(perform_tool, journal, tool), Ways(probe=tool.probe)))
            case _:
                return False
    if len(jobs) < 2:
        return False
    await journal.steps(jobs)
    return True


async def _answer_call(
    journal: Journal, agent: Agent, n: int, index: int, request: ToolRequest, verdict: Verdict
) -> None:
    """Bring one call to its result, or leave it where a decision is awaited."""
    while True:
        decision = decide_call(journal.fold, agent, n, index, request, verdict)
        match decision:
            case Answered() | AwaitDecision():
                return
            case Refuse(step, error):
                started = journal.fold.steps.get(step)
                if started is not None:
                    await wait_over(journal, started.last)
                body = StepCompleted(step=step, error=error, via="refused")

                def due(
                    fold: Fold, body: StepCompleted = body, refusal: Refuse = decision
                ) -> StepCompleted | None:
                    now = decide_call(fold, agent, n, index, request, verdict)
                    return body if now == refusal else None

                await journal.append(due)
            case Changed(step, recorded, why):
                raise ReplayMismatch(
                    f"run {journal.run_id}: {step} may run again, but {why}",
                    position=step,
                    recorded=recorded,
                    attempted=why,
                    run_id=journal.run_id,
                    hint="bring the old code back to finish this run",
                )
            case Doubt(start):
                await doubt(journal, start)
                raise indeterminate(journal, start)
            case Execute(call, tool):
                assert tool is not None or call.step in journal.fold.steps
                ways = Ways(probe=tool.probe) if tool is not None else NO_WAYS
                await journal.step(call, partial(_perform, journal, tool), ways)
            case other:
                assert_never(other)


async def _perform(journal: Journal, tool: Any, start: StepStarted) -> StepCompleted:
    assert tool is not None  # decide_call refuses to run a tool that is gone
    return await perform_tool(journal, tool, start)


def _tool_message(request: ToolRequest, completed: StepCompleted) -> Message:
    value, error = completed_value(completed)
    content: Any = value if error is None else {"error": msgspec.to_builtins(error)}
    return Message(role="tool", content=content, call_id=request.id)


def _ill_formed(completed: StepCompleted) -> bool:
    error = completed_value(completed)[1]
    return error is not None and completed.via == "refused" and error.type in ILL_FORMED


def _not_recordable(completed: StepCompleted) -> StepError | None:
    error = completed_value(completed)[1]
    return error if error is not None and error.type == "not_recordable" else None


def _complaint(reply: Reply) -> str:
    if reply.finish == "length":
        return "Your reply was cut off at the length limit. Answer again, shorter."
    return "Your reply was empty. Answer with text or call a tool."
