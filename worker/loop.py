"""Shell: the built-in agent loop: model, tool calls, model … answer (R30-R36).

It goes through the whole conversation at every pick-up; recorded steps answer from the journal. It
returns when the run has ended, or when nothing is left to do before a person decides.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from journal.errors import (
    IndeterminateError,
    ReplayMismatch,
    StepFailed,
    ToolError,
    Transient,
)
from journal.fold import Fold
from journal.handle import Journal
from journal.ids import RunId
from journal.messages import JSON, Message, Reply, ToolRequest
from journal.records import (
    Commit,
    RunCompleted,
    StepCompleted,
    StepError,
    StepStarted,
    Verdict,
    VerdictDeny,
)
from journal.stepping import doubt, indeterminate, recordable, wait_over
from journal.steps import completed_value, make_call

from .agent import Agent
from .invoke import invoke
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
from .tools import Tool, ToolCall

log = logging.getLogger("runfold")
_TEXT_MAX = 4000


async def drive(journal: Journal, agent: Agent) -> None:
    """Take the run as far as it goes. Raises IndeterminateError (an unknown write), StepFailed (a
    model call failed; no result of it), Fenced, ReplayMismatch, NotEncodable, TooLarge."""
    assert journal.fold.started is not None
    messages = _first_messages(agent, journal.fold.started.input)
    bad_rounds = 0
    for n in itertools.count(1):
        if f"llm/{n}" not in journal.fold.steps:  # bounds stop new calls, never recorded ones
            if n > agent.bounds.iterations:
                return await fail(journal, "iterations", f"{n - 1} model calls made")
            if bad_rounds >= agent.bounds.bad_replies:
                return await fail(journal, "bad_replies", f"{bad_rounds} unusable replies in a row")
        completed = await _model_step(journal, agent, n, messages)
        if (problem := _not_recordable(completed)) is not None:
            return await fail(journal, problem.type, problem.message)
        reply = msgspec.convert(completed.result, Reply)
        if reply.finish == "refusal":
            return await fail(journal, "model_refused", reply.text[:_TEXT_MAX])
        messages.append(Message(role="assistant", content=reply.text, calls=reply.calls))
        if not reply.calls and reply.finish != "length" and reply.text.strip():
            answer = Message(role="assistant", content=reply.text)
            return await _complete(journal, answer)
        if any(isinstance(v, VerdictDeny) and v.type == TOO_MANY for v in completed.verdicts):
            return await fail(journal, "calls_per_reply", f"llm/{n} made {len(reply.calls)} calls")
        if reply.calls:
            results = await _answer_calls(journal, agent, n, reply, completed.verdicts)
            if results is None:
                return None
            for request, result in zip(reply.calls, results, strict=True):
                if (problem := _not_recordable(result)) is not None:
                    return await fail(journal, problem.type, problem.message)
                messages.append(_tool_message(request, result))
            usable = any(not _ill_formed(result) for result in results)
        else:
            messages.append(Message(role="user", content=_complaint(reply)))
            usable = False
        bad_rounds = 0 if usable else bad_rounds + 1
    return None


def _first_messages(agent: Agent, recorded: JSON) -> list[Message]:
    """The recorded input as messages: a list of them as it is, anything else as the user's text."""
    system = [Message(role="system", content=agent.system)] if agent.system else []
    if isinstance(recorded, list) and recorded:
        try:
            return system + msgspec.convert(recorded, list[Message])
        except msgspec.ValidationError:
            pass  # a JSON list that is no conversation: the user's content
    return [*system, Message(role="user", content=recorded)]


async def _model_step(
    journal: Journal, agent: Agent, n: int, messages: Sequence[Message]
) -> StepCompleted:
    step = f"llm/{n}"
    specs = [tool.spec for tool in agent.tools.values()]

    async def ask(start: StepStarted) -> StepCompleted:
        try:
            reply = await agent.model.reply(tuple(messages), specs, preview=_no_preview)
        except Exception as error:
            raise StepFailed(
                f"run {journal.run_id}: the model call {step} failed: "
                f"{type(error).__name__}: {_text(error)}",
                step=step,
                run_id=journal.run_id,
                hint="nothing of it was recorded; run again to go on from here",
            ) from error
        try:
            plain = msgspec.to_builtins(reply)
            checked = msgspec.convert(plain, Reply)
        except (msgspec.ValidationError, TypeError) as error:
            raise StepFailed(
                f"run {journal.run_id}: the model of {step} returned no Reply: {error}",
                step=step,
                run_id=journal.run_id,
                hint="mend the model's adapter; nothing of it was recorded",
            ) from error
        result = recordable(plain, f"the reply of {step}")
        try:
            verdicts = judge_reply(agent, journal.run_id, n, checked)
        except Exception as error:  # the gate is the application's code
            raise StepFailed(
                f"run {journal.run_id}: the gate failed on the calls of {step}: "
                f"{type(error).__name__}: {_text(error)}",
                step=step,
                run_id=journal.run_id,
                hint="mend the gate; the model is asked again",
            ) from error
        return StepCompleted(step=step, result=result, verdicts=verdicts)

    return await journal.step(make_call(step, "model", "", None, unsafe=False), ask)


async def _no_preview(text: str) -> None:
    """Live previews come with the fleet (R38)."""


async def _answer_calls(
    journal: Journal, agent: Agent, n: int, reply: Reply, verdicts: Sequence[Verdict]
) -> list[StepCompleted] | None:
    """The results of all calls in order, or None where a decision is awaited for some. The others
    run first, so that a person's absence holds up only what waits for the person."""
    results: list[StepCompleted] = []
    awaited = False
    for index, request in enumerate(reply.calls):
        result = await _answer_call(journal, agent, n, index, request, verdicts[index])
        if result is None:
            awaited = True
        else:
            results.append(result)
    return None if awaited else results


async def _answer_call(
    journal: Journal, agent: Agent, n: int, index: int, request: ToolRequest, verdict: Verdict
) -> StepCompleted | None:
    while True:
        decision = decide_call(journal.fold, agent, n, index, request, verdict)
        match decision:
            case Answered(completed):
                return completed
            case AwaitDecision():
                return None
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

                refused = await journal.append(due)
                if refused is not None:
                    return refused
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
                return await journal.step(call, lambda start: _perform(journal, tool, start))
            case other:
                assert_never(other)


async def _perform(journal: Journal, tool: Tool | None, start: StepStarted) -> StepCompleted:
    """Call the tool and make the record of its result (R26)."""
    assert tool is not None  # decide_call refuses to run a tool that is gone
    call = ToolCall(
        run_id=RunId(journal.run_id),
        step=start.step,
        name=start.tool,
        input=start.input,
        key=start.key,
    )
    try:
        # a read that is past its time may go on in its thread: nobody waits for it
        keep = journal.abandoned.append if start.replay == "unsafe" else None
        value = await invoke(tool, start.input, call, keep=keep)
    except ToolError as error:
        data = recordable(error.data, f"the data of {start.step}'s ToolError")
        problem = StepError(type="tool_error", message=_text(error), data=data)
        return StepCompleted(step=start.step, error=problem)
    except Exception as error:
        return _failed(journal, tool, start, error)
    result = recordable(value, f"the result of {start.step}")
    return StepCompleted(step=start.step, result=result)


def _failed(journal: Journal, tool: Tool, start: StepStarted, error: Exception) -> StepCompleted:
    """What an exception of a tool's body means: a read's result; for a write, nobody knows."""
    what = f"run {journal.run_id}: {start.step} raised {type(error).__name__}: {_text(error)}"
    if start.replay == "unsafe":
        log.warning("%s; whether it happened is unknown", what)
        raise IndeterminateError(what, step=start.step, run_id=journal.run_id) from error
    if isinstance(error, Transient) or tool.spec.write:
        hint = "nothing of it was recorded; run again to go on from here"
        raise StepFailed(what, step=start.step, run_id=journal.run_id, hint=hint) from error
    problem = StepError(type=type(error).__name__[:100], message=_text(error))
    return StepCompleted(step=start.step, error=problem)


async def _complete(journal: Journal, answer: Message) -> None:
    body = RunCompleted(message=msgspec.to_builtins(answer))
    await journal.append(lambda fold: None if fold.finished else body)


async def fail(journal: Journal, reason: str, detail: str) -> None:
    """End the run with a recorded reason; not while a write is unknown: a person is asked first."""
    body = Commit(action="fail", reason=reason, detail=detail)
    await journal.append(lambda fold: None if fold.finished or fold.unknown() else body)
    for step in journal.fold.unknown():
        raise indeterminate(journal, step.last)


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


def _text(error: Exception) -> str:
    """An exception's text, bounded and storable: half surrogates are replaced."""
    try:
        text = str(error)
    except Exception:  # the text is the tool's own code too
        text = "(an exception without a text)"
    return text[:_TEXT_MAX].encode("utf-8", "replace").decode()
