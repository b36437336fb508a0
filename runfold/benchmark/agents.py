"""Shell: the agents of the benchmark's workers: no-op steps, approvals, something to take over."""

from __future__ import annotations

import asyncio
from time import time
from typing import Any, cast

from journal.terms import Bounds, Complete, Continue, Next
from worker.agent import turn
from worker.context import Call, Context
from worker.tools import SAFE, UNSAFE, ToolCall

STEPS = 10
SLOW_STEP_S = 0.05
NO_BOUNDS = Bounds(iterations=10_000_000, calls_per_iteration=10_000_000)


async def _nothing(call: ToolCall) -> None: ...


async def _stamp(call: ToolCall) -> float:
    return time()


async def _slow(call: ToolCall) -> None:
    await asyncio.sleep(SLOW_STEP_S)


_noop = Call(name="noop", input=None, fn=_nothing, replay=SAFE)


def _gated(number: int) -> Call:
    return Call(name="stamp", input=number, fn=_stamp, replay=UNSAFE, approval="go on?")


@turn("bench")
async def ten_steps(ctx: Context) -> Next:
    """Ten durable no-op steps."""
    for _ in range(STEPS):
        await ctx.tool(_noop)
    return Complete("done")


@turn("gated")
async def gated(ctx: Context) -> Next:
    """A step, an approval, a step: each returns when it was called."""
    first = await ctx.tool(Call(name="stamp", input=1, fn=_stamp, replay=SAFE))
    second = await ctx.tool(_gated(2))
    return Complete([first.output, second.output])


@turn("slow", bounds=NO_BOUNDS)
async def slow(ctx: Context) -> Next:
    """Steps of 50 ms without end: something to take over."""
    while True:
        await ctx.tool(Call(name="slow", input=None, fn=_slow, replay=SAFE))


@turn("long", bounds=NO_BOUNDS)
async def long(ctx: Context) -> Next:
    """`steps` no-op steps, with a commit after `every` of them; then steps that each wait for an
    approval, and return when they were called, without end. With `every` as large as `steps` there
    is no commit: all is one turn."""
    wanted = cast("dict[str, Any]", ctx.input)
    steps, every = int(wanted["steps"]), int(wanted["every"])
    done = cast("int", ctx.load_checkpoint() or 0)
    commits = every < steps
    for _ in range(min(every, steps - done)):
        await ctx.tool(_noop)
        done += 1
    if done < steps:
        return Continue(state=done)
    number = 0
    while True:
        number += 1
        await ctx.tool(_gated(number))
        if commits:
            return Continue(state=done)
