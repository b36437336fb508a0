"""Restate: a workflow whose calls are `ctx.run_typed`; the approval is a durable promise. This is
the worker; the server calls it, and calls it again when it dies.

usage: restate_program.py PORT [once]    once: the invocation is tried once, then paused
"""

import asyncio
import sys

import hypercorn.asyncio
import ledger
import restate
from hypercorn.config import Config
from restate.retry_policy import InvocationRetryPolicy

PORT, *REST = sys.argv[1:]
ONCE = InvocationRetryPolicy(max_attempts=1, on_max_attempts="pause") if REST == ["once"] else None
till = restate.Workflow("Till", invocation_retry_policy=ONCE)


async def model(prompt: str) -> dict[str, int]:
    return {"amount": 10}


async def charge(amount: int) -> str:
    return ledger.charge(amount)


@till.main()
async def run(ctx: restate.WorkflowContext, prompt: str) -> str:
    asked = await ctx.run_typed("model", model, prompt=prompt)
    if not await ctx.promise("approval", type_hint=bool).value():
        return "rejected"
    return await ctx.run_typed("charge", charge, amount=asked["amount"])


@till.handler()
async def approve(ctx: restate.WorkflowSharedContext) -> None:
    await ctx.promise("approval", type_hint=bool).resolve(True)


config = Config()
config.bind = [f"127.0.0.1:{PORT}"]
asyncio.run(hypercorn.asyncio.serve(restate.app([till]), config))
