"""What worker processes over HTTP do in tests, and native ones with the same agents.

As kit.fleet_agents: effects and places are lines in the crew's folder; `hold/<place>` holds.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from kit import fleet_agents
from kit.fleet_agents import Here, holds, leave, reach
from kit.ledger import Ledger

import journal.stepping
from journal.steps import DidNotHappen, Happened, Probed
from worker.agent import turn
from worker.context import Call, Context
from worker.tools import SAFE, UNSAFE, ToolCall

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
POLL_S = 0.005


def example() -> Any:
    """examples/http_worker.py."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("http_worker")


def stay(place: str) -> None:
    reach(place)
    while holds(place):
        time.sleep(POLL_S)


def affect(run: str, what: str, key: str) -> None:
    Ledger(Here.folder / "effects").add(run, what, key)


def happened(key: str) -> bool:
    return any(found == key for _, _, found in Ledger(Here.folder / "effects").lines())


# ---- agents -----------------------------------------------------------------------------------


def look(call: Any) -> Any:
    stay("look")
    return {"seen": call.input}


def act(run: str) -> Any:
    def made(call: Any) -> Any:
        stay("act")
        affect(run, "act", call.key)
        stay("acted")
        if holds("raise"):
            raise RuntimeError("the line went dead")
        return f"done {call.input['n']}"

    return made


def probed(key: str) -> dict[str, Any]:
    reach("probe")
    return {"happened": "done 1"} if happened(key) else {"did_not_happen": True}


def clerk(ctx: Any) -> Any:
    """Look, act, say; the input says how."""
    http = example()
    how = dict(ctx.input or {})
    if how.get("on_unknown") == "probe":
        how["probe"] = probed
    found = ctx.tool("look", "it", look, safe=True)
    stay("between")
    acted = ctx.tool("act", {"n": 1}, act(ctx.run), **how)
    said = ctx.model(lambda: (reach("model"), "said")[1])
    result = "interrupted" if acted.interrupted else acted.error or acted.output
    stay("end")
    return http.Complete([found.output["seen"], result, said])


def talker(ctx: Any) -> Any:
    """Look, hear, answer; hear follow-ups, answer them too."""
    http = example()
    ctx.tool("look", "it", look, safe=True)
    heard = [one["content"] for one in ctx.place_inputs("steer")]
    said = ctx.model(lambda: "said")
    stay("end")
    later = [one["content"] for one in ctx.place_inputs("follow_up")]
    return http.Complete([heard, said, later])


def roller(ctx: Any) -> Any:
    """`turns` turns of a look and an act."""
    http = example()
    done = ctx.state or 0
    ctx.tool("look", done, look, safe=True)
    ctx.tool("act", {"n": done}, act(ctx.run))
    if done + 1 == ctx.input["turns"]:
        return http.Complete({"turns": done + 1})
    return sys.modules["http_task"].Continue(state=done + 1)


def stumbler(ctx: Any) -> Any:
    """Hears, acts twice alike, and fails; the next attempt knows what it heard, and finds both."""
    http = example()
    heard = [one["content"] for one in ctx.place_inputs("steer")]

    def keyed(call: Any) -> str:
        affect(ctx.run, "act", call.key)
        return call.key

    acted = [ctx.tool("act", {"n": 1}, keyed).output for _ in range(2)]
    said = ctx.model(lambda: f"attempt {ctx.attempt}")
    if ctx.attempt == 1:
        raise ValueError("no")
    return http.Complete([*heard, *acted, said])


ODD: dict[str, Any] = {"nan": float("nan"), "surrogate": "\ud800", "huge": "x" * 2**21, "deep": []}
for _ in range(500):
    ODD["deep"] = [ODD["deep"]]


def odd(ctx: Any) -> Any:
    """Its write returns what is no result."""

    def made(call: Any) -> Any:
        affect(ctx.run, "act", call.key)
        return ODD[ctx.input["value"]]

    found = ctx.tool("act", {"n": 1}, made)
    if found.error:
        return sys.modules["http_task"].Fail("odd")
    return example().Complete(found.output)


def swallower(ctx: Any) -> Any:
    """Has it that nothing can stop it."""
    try:
        ctx.tool("act", {"n": 1}, act(ctx.run), approval="May it?")
    except Exception:
        reach("swallowed")
    return example().Complete("done all the same")


def changed(ctx: Any) -> Any:
    """What became of `clerk`: it looks for something else."""
    return example().Complete(ctx.tool("look", "that", look, safe=True).output)


def shorter(ctx: Any) -> Any:
    """What became of `clerk`: it looks for nothing."""
    return example().Complete(None)


HANDLERS = {
    one.__name__: one for one in (clerk, talker, roller, stumbler, odd, swallower, changed, shorter)
}
HANDLERS["send.email"] = HANDLERS["send-email"] = clerk


async def native_clerk(ctx: Context) -> Any:
    """`clerk`, natively."""
    how: dict[str, Any] = dict(ctx.input or {})  # type: ignore[arg-type]

    async def native_look(call: ToolCall) -> Any:
        return await asyncio.to_thread(look, call)

    async def native_act(call: ToolCall) -> Any:
        return await asyncio.to_thread(act(ctx.run_id), call)

    async def say() -> str:
        reach("model")
        return "said"

    async def probe(key: str) -> Probed:
        reach("probe")
        return Happened("done 1") if happened(key) else DidNotHappen()

    if how.get("on_unknown") == "probe":
        how["probe"] = probe
    found: Any = await ctx.tool(Call(name="look", input="it", fn=native_look, replay=SAFE))
    await asyncio.to_thread(stay, "between")
    acted = await ctx.tool(
        Call(name="act", input={"n": 1}, fn=native_act, replay=UNSAFE, **how),
    )
    said = await ctx.model(say)
    result = "interrupted" if acted.interrupted else acted.error or acted.output
    await asyncio.to_thread(stay, "end")
    return fleet_agents.Complete([found.output["seen"], result, said])


# ---- processes --------------------------------------------------------------------------------


def work(url: str, agents: list[str], folder: str, name: str, **options: Any) -> str:
    """A worker over HTTP, until it is stopped. An agent is a handler's name, or `agent=handler`.
    `options`: module globals of the example."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    Here.folder, Here.worker = Path(folder), name
    http = example()
    for key, value in options.items():
        module = http if hasattr(http, key) else sys.modules["http_task"]
        assert hasattr(module, key)
        setattr(module, key, value)
    leave("ready", {"id": name, "pid": os.getpid()})
    pairs = [agent.partition("=") for agent in agents]
    http.serve(url, "", {agent: HANDLERS[handler or agent] for agent, _, handler in pairs})
    return "stopped"


def native(agents: list[str], append_budget_s: float, **how: Any) -> str:
    """A native worker with the twins of these agents."""
    journal.stepping.APPEND_BUDGET_S = append_budget_s  # type: ignore[misc]
    for agent in agents:
        fleet_agents.AGENTS[agent] = turn(agent)(native_clerk)
    return fleet_agents.work(agents=agents, **how)
