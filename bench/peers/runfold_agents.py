"""Runfold's side: the agents, as a user writes them. Run by `runfold worker` and by `run()`."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from load import STEPS, now, say, step_value

from runfold import SAFE, UNSAFE, Bounds, Call, Complete, Context, Continue, Next, ToolCall, turn

COMMIT_STEPS = 32
GATES = 3
"""How often a long run can be asked for its next step."""

LONG = Bounds(calls_per_iteration=100_000, iterations=10_000)


async def _model(index: int) -> Any:
    return step_value(index)


async def _tool(call: ToolCall) -> Any:
    return step_value(call.input)


async def step(ctx: Context, index: int) -> Any:
    """One durable step. Each second one is an unsafe write: its start is durable before the call,
    and one that is cut off is never made again, which no peer's step promises."""
    if index % 2 == 0:
        return await ctx.model(partial(_model, index))
    return (await ctx.tool(Call(name="tool", input=index, fn=_tool, replay=UNSAFE))).output


async def _told(call: ToolCall) -> Any:
    value = step_value(0)
    say("AT", call.run_id, value["t"])
    return value


async def gate(ctx: Context, number: int) -> Any:
    """A step that a person approves; it tells when it is called."""
    gated = Call(name="told", input=number, fn=_told, replay=UNSAFE, approval="go on?")
    return (await ctx.tool(gated)).output


@turn("ten")
async def ten(ctx: Context) -> Next:
    """W1. Answers when each step was called."""
    return Complete([(await step(ctx, index))["t"] for index in range(STEPS)])


@turn("long", bounds=LONG)
async def long(ctx: Context) -> Next:
    """W2. So many steps in one turn, all replayed by each resume; or, with the state `commit`, in
    turns of 32, as Runfold's own loop makes them."""
    state: Any = ctx.load_checkpoint()
    wanted: Any = ctx.input
    begin = 0 if state is None else state["i"] + 1
    last = wanted["steps"]
    end = min(begin + COMMIT_STEPS, last) if wanted["state"] == "commit" else last
    for index in range(begin, end):
        state = await step(ctx, index)
    if begin < end < last:
        return Continue(state=state)
    for number in range(GATES):
        await gate(ctx, number)
    return Complete("done")


async def _stay(call: ToolCall) -> None:
    say("AT", call.run_id, now())
    await asyncio.sleep(3600)


@turn("slow")
async def slow(ctx: Context) -> Next:
    """W3. Three steps, then one to be killed in, that may be made again."""
    for index in range(3):
        await step(ctx, index)
    await ctx.tool(Call(name="stay", input=None, fn=_stay, replay=SAFE, timeout_s=3600))
    return Complete("done")


@turn("waiter")
async def waiter(ctx: Context) -> Next:
    """W4, W5. A step, a wait for a person, a step."""
    await step(ctx, 0)
    return Complete((await gate(ctx, 0))["t"])
