"""Workers over HTTP in a soak: examples/http_worker.py; its agent plays the clerk's plan."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.agents import POLICIES, READ_S, WRITE_S, ledger_of, once
from chaos.plans import result_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
POLL_S, REQUEST_S = 5.0, 5.0
"""A bridge that stands still is given up sooner than the example does."""

RETRY = {"attempts": 5, "backoff_s": 0.2, "backoff_max_s": 2.0}


def example(name: str) -> Any:
    """examples/<name>.py."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def _tool(run: str, tool: str, number: int, ms: int) -> Callable[[Any], Any]:
    def made(call: Any) -> Any:
        ledger, result = ledger_of(run), result_of(tool, number)
        ledger.add(tool, "start", [call.key, tool])
        time.sleep(ms / 2000)
        ledger.add(tool, "effect", [call.key, tool, result])
        time.sleep(ms / 2000)
        return result

    return made


def _happened(key: str) -> dict[str, Any]:
    for _, kind, said in ledger_of(key.partition(":")[0]).lines():
        if kind == "effect" and said[0] == key:
            return {"happened": said[2]}
    return {"did_not_happen": True}


def _said(result: Any) -> Any:
    if result.error is not None:
        return {"error": result.error}
    return {"interrupted": result.partial} if result.interrupted else result.output


def remote(ctx: Any) -> Any:
    """One turn of the plan, as chaos.agents.clerk; without children."""
    http = example("http_task")
    state = ctx.state or {"turn": 0, "told": [], "heard": []}
    told, heard = list(state["told"]), list(state["heard"])
    heard += [one["content"] for one in ctx.place_inputs("steer")]
    heard += [one["content"] for one in ctx.place_inputs("follow_up")]
    turns = ctx.input["turns"]
    if state["turn"] == len(turns):
        return http.Complete({"told": told, "heard": heard})
    this = turns[state["turn"]]
    for tool, number, ms in this["calls"]:
        how: dict[str, Any] = {"on_unknown": POLICIES.get(tool, "reconcile")}
        if tool == "gated":
            how["approval"] = "Shall it?"
        safe = tool == "look"
        result = ctx.tool(
            tool,
            {"number": number},
            _tool(ctx.run, tool, number, ms),
            safe=safe,
            probe=_happened if tool == "book" else None,
            timeout_s=READ_S if safe else WRITE_S,
            **how,
        )
        told.append(_said(result))
    if once(ctx.run, f"boom {state['turn']}", this["boom"]):
        raise RuntimeError("the handler stumbles")
    after = {"turn": state["turn"] + 1, "told": told, "heard": heard}
    delay = {"delay_s": this["delay_ms"] / 1000}
    match this["then"]:
        case "delay":
            return http.Continue(after, **delay)
        case "input":
            return http.Continue(after, until_input=True)
        case "delay_or_input":
            return http.Continue(after, until_input=True, **delay)
        case "pause":
            return http.Pause("an operator must look", after)
        case _:
            return http.Continue(after)


def work(url: str, token: str, ledgers: str) -> str:
    """A worker process, until it is stopped."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    os.environ["CHAOS_LEDGERS"] = ledgers
    worker, task = example("http_worker"), example("http_task")
    worker.POLL_S, task.REQUEST_S = POLL_S, REQUEST_S
    logging.info("worker over HTTP is ready")
    worker.serve(url, token, {"remote": remote}, {"remote": {"retry": RETRY}})
    return "stopped"
