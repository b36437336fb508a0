"""Shell: calling a declared tool, so that it can neither stall the loop nor outlive its run unseen.

Who gets an exception from here knows no more than that: for a write, anything but `ToolError`
leaves it unknown whether the call took effect (R26).
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from copy import deepcopy
from threading import Thread
from typing import Any, TypeAlias

import msgspec

from journal.messages import JSON

from .tools import Tool, ToolCall


async def invoke(
    tool: Tool,
    input: JSON,
    call: ToolCall,
    *,
    keep: Callable[[Future[Any]], None] | None = None,
) -> object:
    """Call the tool with `input` (as `Tool.parse` gave it) and return what the function returned.

    Async functions run in this task, others in a thread. What comes out besides the function's own
    result or exception:

    - `TimeoutError` after `tool.timeout_s`. A thread can't be stopped: `keep`, where given, gets
      what is done when it ends. An async function is cancelled, and whatever it makes of that is
      ignored; one that never ends all the same keeps this call from ending.
    - `CancelledError` when the task was cancelled, whatever the function made of it. With `keep` a
      thread that runs is waited for, however long, so that no write goes on behind a released lock;
      without, it is left to itself.
    - `BadArguments` when `input` does not fit the tool; nothing was called then.
    - `TypeError` for a plain function that returned an awaitable: its body never ran.
    """
    task = asyncio.current_task()
    assert task is not None
    if task.cancelling():
        raise asyncio.CancelledError  # the result could not be used, so nothing is started
    arguments = tool.typed(input)
    if tool.call_parameter is not None:
        # A copy: a tool that changes it in place does not change what is recorded.
        copy = msgspec.structs.replace(call, input=deepcopy(call.input))
        arguments[tool.call_parameter] = copy
    if inspect.iscoroutinefunction(tool.fn):
        return await limited(tool.spec.name, tool.timeout_s, tool.fn(**arguments))
    return await _judged(tool.spec.name, _in_thread(tool, arguments, keep))


async def limited(name: str, timeout_s: float, call: Awaitable[Any]) -> object:
    """Await an async call for at most `timeout_s`; as `invoke` in what comes out."""
    return await _judged(name, _in_task(name, timeout_s, call))


async def _judged(name: str, work: Awaitable[object]) -> object:
    """What a tool's own work comes to, in the terms of `invoke`."""
    task = asyncio.current_task()
    assert task is not None
    try:
        result = await work
    except (Exception, asyncio.CancelledError, SystemExit, GeneratorExit) as error:
        meaning = _meaning(task, name, error)
        if meaning is error:
            raise
        raise meaning from error
    if task.cancelling():
        raise asyncio.CancelledError  # the function swallowed it
    return result


def _meaning(task: asyncio.Task[Any], name: str, error: BaseException) -> BaseException:
    """The exception to raise for one that came out of a tool."""
    if task.cancelling():
        return asyncio.CancelledError()
    if isinstance(error, SystemExit | GeneratorExit):  # a tool's failure ends no process
        return RuntimeError(f"{name} raised {type(error).__name__}")
    if isinstance(error, asyncio.CancelledError):
        # Nobody cancelled this run: the tool awaited something else that was cancelled. As a
        # CancelledError it would end the run without a word.
        return RuntimeError(f"{name} was cancelled from inside")
    return error


async def _in_task(name: str, timeout_s: float, call: Awaitable[Any]) -> object:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            result = await call
    except Exception as error:
        if limit.expired():  # also when the function turned its cancellation into another exception
            raise _late(name, timeout_s) from error
        raise
    if limit.expired():  # the function swallowed its cancellation
        raise _late(name, timeout_s)
    return result


# Exceptions travel as values: set on a future, asyncio would refuse some (StopIteration), replace
# others (TimeoutError) and report those of an abandoned thread as never retrieved.
_Ended: TypeAlias = tuple[object, BaseException | None]


async def _in_thread(
    tool: Tool, arguments: dict[str, Any], keep: Callable[[Future[Any]], None] | None
) -> object:
    job: Future[_Ended] = Future()
    work = contextvars.copy_context().run
    # A thread of its own, not a pool's: what hangs keeps no other call waiting, and, being a
    # daemon, no process from ending.
    name = f"runfold-{tool.spec.name}"
    Thread(target=work, args=(_work, job, tool, arguments), name=name, daemon=True).start()
    ended = asyncio.wrap_future(job)
    try:
        await asyncio.wait([ended], timeout=tool.timeout_s)
    except asyncio.CancelledError:
        if keep is not None:
            await _wait_out(ended)
        raise
    if not ended.done():
        if keep is not None:
            keep(job)
        raise _late(tool.spec.name, tool.timeout_s)
    result, error = ended.result()
    if error is not None:
        raise error
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(f"{tool.spec.name} is a plain function but returned an awaitable")
    return result


def _work(job: Future[_Ended], tool: Tool, arguments: dict[str, Any]) -> None:
    job.set_running_or_notify_cancel()
    try:
        ended = tool.fn(**arguments), None
    except BaseException as error:  # raised again in the task that waits, like every executor does
        ended = None, error
    job.set_result(ended)


async def _wait_out(ended: asyncio.Future[_Ended]) -> None:
    while not ended.done():
        try:
            await asyncio.wait([ended])
        except asyncio.CancelledError:
            continue  # the caller raises it again; the thread still runs


def _late(name: str, timeout_s: float) -> TimeoutError:
    return TimeoutError(f"{name} did not end within {timeout_s:g} s")
