"""Shell: calling a tool for a step: what its result, its exception or its silence means (R26)."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from journal.errors import IndeterminateError, StepFailed, ToolError, Transient
from journal.handle import Journal
from journal.ids import RunId
from journal.messages import JSON
from journal.records import StepCompleted, StepError, StepStarted
from journal.values import recordable

from .invoke import invoke, limited
from .tools import Tool, ToolCall

log = logging.getLogger("runfold")
TEXT_CHARS_MAX = 4000
NOTHING_RECORDED = "nothing of it was recorded; run again to go on from here"


def tool_call(journal: Journal, start: StepStarted) -> ToolCall:
    """The call as its function sees it."""

    async def report(output: JSON) -> None:
        await journal.progress(start.step, output)

    return ToolCall(
        run_id=RunId(journal.run_id),
        step=start.step,
        name=start.tool,
        input=start.input,
        key=start.key,
        report=report,
    )


async def perform_tool(journal: Journal, tool: Tool, start: StepStarted) -> StepCompleted:
    """Call a declared tool and make the record of its result."""
    # a read that is past its time may go on in its thread: nobody waits for it
    keep = journal.abandoned.append if start.replay == "unsafe" else None
    work = invoke(tool, start.input, tool_call(journal, start), keep=keep)
    return await _performed(journal, start, tool.timeout_s, work, read=not tool.spec.write)


async def perform_call(
    journal: Journal,
    fn: Callable[[ToolCall], Awaitable[JSON]],
    timeout_s: float,
    start: StepStarted,
) -> StepCompleted:
    """Make a turn handler's call. Other exceptions than ToolError are no result, of a safe call
    either: a keyed write may have taken effect."""

    async def work() -> object:
        return await limited(start.tool, timeout_s, fn(tool_call(journal, start)))

    return await _performed(journal, start, timeout_s, work(), read=False)


async def _performed(
    journal: Journal,
    start: StepStarted,
    timeout_s: float,
    work: Awaitable[object],
    *,
    read: bool,
) -> StepCompleted:
    try:
        with journal.bounded(timeout_s):
            value = await work
    except ToolError as error:
        data = recordable(error.data, f"the data of {start.step}'s ToolError")
        problem = StepError(type="tool_error", message=text_of(error), data=data)
        return StepCompleted(step=start.step, error=problem)
    except Exception as error:
        return _failed(journal, start, error, read=read)
    return StepCompleted(step=start.step, result=recordable(value, f"the result of {start.step}"))


def _failed(journal: Journal, start: StepStarted, error: Exception, *, read: bool) -> StepCompleted:
    """What an exception of a tool's body means: a read's result; for a write, nobody knows."""
    what = f"{start.step} raised {type(error).__name__}: {text_of(error)}"
    if start.replay == "unsafe":
        what = f"run {journal.run_id}: {what}"
        log.warning(
            "%s; whether it happened is unknown",
            what,
            extra={"run": journal.run_id, "step": start.step},
        )
        raise IndeterminateError(what, step=start.step, run_id=journal.run_id) from error
    if isinstance(error, Transient) or not read:
        raise step_failed(journal, start.step, what) from error
    problem = StepError(type=type(error).__name__[:100], message=text_of(error))
    return StepCompleted(step=start.step, error=problem)


def text_of(error: BaseException) -> str:
    """An exception's text, bounded and storable: half surrogates are replaced."""
    try:
        text = str(error)
    except Exception:  # the text is the tool's own code too
        text = "(an exception without a text)"
    return text[:TEXT_CHARS_MAX].encode("utf-8", "replace").decode()


def step_failed(journal: Journal, step: str, what: str, hint: str = NOTHING_RECORDED) -> StepFailed:
    """The error of a step that has no result: it ends the attempt (R26, R45)."""
    run = journal.run_id
    return StepFailed(f"run {run}: {what}", step=step, run_id=run, hint=hint)


def model_failed(journal: Journal, step: str, error: Exception) -> StepFailed:
    """As step_failed, for a model request."""
    what = f"the model call {step} failed: {type(error).__name__}: {text_of(error)}"
    return step_failed(journal, step, what)
