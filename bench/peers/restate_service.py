"""The service that Restate calls, by HTTP/2. usage: restate_service.py PORT [INACTIVITY_S]"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta
from typing import Any

import restate
from hypercorn.asyncio import serve
from hypercorn.config import Config
from load import STEPS, now, say, step_value
from processes import HOST

INACTIVITY = timedelta(seconds=float(sys.argv[2])) if len(sys.argv) > 2 else None
bench = restate.Service("Bench")


async def model(i: int) -> dict:
    return step_value(i)


async def tool(i: int) -> dict:
    return step_value(i)


async def step(ctx: restate.Context, index: int) -> Any:
    name, function = ("tool", tool) if index % 2 else ("model", model)
    return await ctx.run_typed(name, function, i=index)


@bench.handler()
async def ten(ctx: restate.Context, value: dict) -> list:
    return [(await step(ctx, index))["t"] for index in range(STEPS)]


async def stay() -> dict:
    say("AT", now())
    await asyncio.sleep(3600)
    return {}


@bench.handler()
async def long(ctx: restate.Context, steps: int) -> dict:
    say("BEGUN", now())
    for index in range(steps):
        await step(ctx, index)
    return await ctx.run_typed("stay", stay)


@bench.handler(inactivity_timeout=INACTIVITY)
async def waiter(ctx: restate.Context, number: int) -> dict:
    name, sent = ctx.awakeable()

    async def tell() -> dict:
        say("WAITS", number, name)
        return step_value(0)

    await ctx.run_typed("model", tell)
    signal = await sent

    async def after() -> dict:
        say("SIGNALLED", now() - signal["t"])
        return step_value(1)

    return await ctx.run_typed("tool", after)


inner = restate.app([bench])


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http" and "long" in scope["path"]:
        say("REQUEST", now())
    await inner(scope, receive, send)


async def main() -> None:
    config = Config()
    config.bind = [f"{HOST}:{sys.argv[1]}"]
    config.loglevel = "ERROR"
    config.accesslog = None
    config.h2_max_concurrent_streams = 2000
    config.keep_alive_timeout = 3600
    await serve(app, config, mode="asgi")


if __name__ == "__main__":
    asyncio.run(main())
