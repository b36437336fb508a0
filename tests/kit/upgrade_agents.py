"""The agent of the rolling upgrades: two writes, the first of which may note how far it came."""

from __future__ import annotations

import os
from pathlib import Path

from kit.fleet_agents import Here, affect, stay

from journal.terms import Complete, Next
from worker.agent import turn
from worker.context import Call, Context
from worker.tools import UNSAFE, ToolCall

Here.folder, Here.worker = Path(os.environ["UPGRADE_FOLDER"]), os.environ["UPGRADE_WORKER"]
REVISIONS = os.environ["UPGRADE_REVISIONS"].split(",")
"""This worker's own, then those it takes over."""


@turn("clerk", revision=REVISIONS[0], compatible=REVISIONS[1:])
async def clerk(ctx: Context) -> Next:
    async def begin(call: ToolCall) -> str:
        if ctx.input["notes"]:
            await call.progress("half of it")
        affect(call)
        return Here.worker

    async def finish(call: ToolCall) -> str:
        affect(call)
        return Here.worker

    first = await ctx.tool(Call(name="begin", input=None, fn=begin, replay=UNSAFE))
    await stay("between")
    second = await ctx.tool(Call(name="finish", input=None, fn=finish, replay=UNSAFE))
    return Complete([first.output, second.output])
