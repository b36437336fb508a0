"""A process of a command that is traced, and the agent that such a worker works."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from kit.fleet_agents import stay
from opentelemetry import trace

from journal.terms import Complete, Next
from worker.agent import turn
from worker.context import Call, Context
from worker.tools import SAFE, UNSAFE, ToolCall


@turn("clerk")
async def clerk(ctx: Context) -> Next:
    """A read that traces something itself, the place `between`, a payment that a person allows."""

    async def look(call: ToolCall) -> str:
        with trace.get_tracer("test").start_as_current_span("own"):
            return "seen"

    async def pay(call: ToolCall) -> str:
        return "paid"

    await ctx.tool(Call(name="look", input=None, fn=look, replay=SAFE))
    await stay("between")
    paid = await ctx.tool(Call(name="pay", input=None, fn=pay, replay=UNSAFE, approval="Pay?"))
    return Complete(paid.output)


def command(args: list[str], folder: str, environment: dict[str, str], flush_s: float) -> NoReturn:
    """In the child: `runfold` with these words. `flush_s`: how long it tries to send the last."""
    from runfold import tracing
    from runfold.cli import main

    os.environ.update(environment)
    os.chdir(folder)
    tracing.FLUSH_S = flush_s  # type: ignore[misc]
    sys.argv = ["runfold", *args]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
