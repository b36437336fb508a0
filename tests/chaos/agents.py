"""The agents in the worker processes of the soak: they play the plan in the run's input (plans.py).

Each call of a tool is a line in the run's ledger when it begins and another when it has had its
effect, fsynced, by its key: what happened outside, whatever the journal says.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from chaos.plans import result_of
from kit.ledger import Ledger

from journal.steps import DidNotHappen, Happened, Probe, Probed
from journal.values import canonical
from runfold import (
    SAFE,
    UNSAFE,
    Agent,
    Call,
    ChildFailed,
    Complete,
    Context,
    Continue,
    Message,
    Next,
    Pause,
    Reply,
    Retry,
    ToolCall,
    ToolRequest,
    ToolResult,
    ToolSpec,
    read,
    turn,
    write,
)
from worker.tools import OnUnknown

RETRY = Retry(attempts=5, backoff_s=0.2, backoff_max_s=2.0)
WRITE_S = 4.0
"""A permitted retry waits until the earlier call has surely ended, so not long."""

READ_S = 600.0
"""The time-out of a read is a result: a stalled worker's would change the answer."""


def ledger_of(run_id: str) -> Ledger:
    return Ledger(Path(os.environ["CHAOS_LEDGERS"]) / run_id)


def once(run_id: str, what: str, times: int) -> bool:
    """True `times` times over all processes (or less often: a crash may come in between)."""
    ledger = ledger_of(run_id)
    if sum(kind == what for _, kind, _ in ledger.lines()) >= times:
        return False
    ledger.add(run_id, what, None)
    return True


def begin(call: ToolCall) -> None:
    ledger_of(call.run_id).add(call.step, "start", [call.key, call.name])


def end(call: ToolCall, result: Any) -> None:
    ledger_of(call.run_id).add(call.step, "effect", [call.key, call.name, result])


async def act(call: ToolCall, tool: str, number: int, ms: int) -> dict[str, Any]:
    result = result_of(tool, number)
    begin(call)
    await asyncio.sleep(ms / 2000)
    end(call, result)
    await asyncio.sleep(ms / 2000)
    return result


async def happened(key: str) -> Probed:
    """The outside system is asked; the key begins with the run's id."""
    for _, kind, said in ledger_of(key.partition(":")[0]).lines():
        if kind == "effect" and said[0] == key:
            return Happened(said[2])
    return DidNotHappen()


# ---- the built-in loop --------------------------------------------------------------------------


@read(timeout_s=READ_S)
async def look(number: int, ms: int, call: ToolCall) -> dict[str, Any]:
    return await act(call, "look", number, ms)


@write(approval=False, timeout_s=WRITE_S)
async def pay(number: int, ms: int, call: ToolCall) -> dict[str, Any]:
    return await act(call, "pay", number, ms)


@write(timeout_s=WRITE_S)
async def gated(number: int, ms: int, call: ToolCall) -> dict[str, Any]:
    return await act(call, "gated", number, ms)


@write(approval=False, timeout_s=WRITE_S, on_unknown="interrupt")
async def note(number: int, ms: int, call: ToolCall) -> dict[str, Any]:
    await call.progress({"noted": number})
    return await act(call, "note", number, ms)


@write(approval=False, timeout_s=WRITE_S, on_unknown="probe", probe=happened)
async def book(number: int, ms: int, call: ToolCall) -> dict[str, Any]:
    return await act(call, "book", number, ms)


@write(approval=False, timeout_s=WRITE_S)
def blocking(number: int, ms: int, call: ToolCall) -> dict[str, Any]:
    result = result_of("blocking", number)
    begin(call)
    time.sleep(ms / 2000)
    end(call, result)
    time.sleep(ms / 2000)
    return result


class PlanModel:
    """Asks for the rounds of the plan; its answer says what it was told."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: Any
    ) -> Reply:
        given: Any = next(message.content for message in messages if message.role == "user")
        n = sum(message.role == "assistant" for message in messages)
        await preview(f"round {n}")
        if n == 1 and once(given["run"], "flaky", given["flaky"]):
            raise RuntimeError("the model is down")
        rounds = given["rounds"]
        if n >= len(rounds):
            told = [message.content for message in messages if message.role == "tool"]
            heard = [message.content for message in messages if message.role == "user"][1:]
            return Reply(text=canonical({"told": told, "heard": heard}).decode())
        calls = tuple(
            ToolRequest(
                id=f"{n}-{index}",
                name=tool,
                arguments=canonical({"number": number, "ms": ms}).decode(),
            )
            for index, (tool, number, ms) in enumerate(rounds[n])
        )
        return Reply(calls=calls, finish="tool_calls")


desk = Agent("desk", model=PlanModel(), tools=[look, pay, gated, note, book, blocking], retry=RETRY)


# ---- turn handlers ------------------------------------------------------------------------------

POLICIES: dict[str, OnUnknown] = {"note": "interrupt", "book": "probe"}


def _made(tool: str, number: int, ms: int) -> Call:
    async def perform(call: ToolCall) -> Any:
        if tool == "note":
            await call.progress({"noted": number})
        return await act(call, tool, number, ms)

    fn: Callable[[ToolCall], Awaitable[Any]] = perform
    probe: Probe | None = happened if tool == "book" else None
    return Call(
        name=tool,
        input={"number": number},
        fn=fn,
        replay=SAFE if tool == "look" else UNSAFE,
        on_unknown=POLICIES.get(tool, "reconcile"),
        probe=probe,
        approval="Shall it?" if tool == "gated" else None,
        timeout_s=READ_S if tool == "look" else WRITE_S,
    )


def _said(result: ToolResult) -> Any:
    if result.error is not None:
        return {"error": result.error}
    if result.interrupted:
        return {"interrupted": result.partial}
    return result.output


@turn("clerk", retry=RETRY)
async def clerk(ctx: Context) -> Next:
    """One turn of the plan; its state is what was done and heard so far."""
    state: Any = ctx.load_checkpoint() or {"turn": 0, "told": [], "heard": [], "child": None}
    told, heard = list(state["told"]), list(state["heard"])
    if state["child"] is not None:
        told.append(await _of_child(ctx, state["child"]))
    heard += [one.content for one in await ctx.place_inputs("steer")]
    heard += [one.content for one in await ctx.place_inputs("follow_up")]
    turns: Any = ctx.input["turns"]  # type: ignore[index, call-overload]
    if state["turn"] == len(turns):
        return Complete({"told": told, "heard": heard})
    this = turns[state["turn"]]
    calls = [_made(*call) for call in this["calls"]]
    if this["parallel"] and calls:
        told += [_said(result) for result in await ctx.parallel(*calls)]
    else:
        told += [_said(await ctx.tool(call)) for call in calls]
    if once(ctx.run_id, f"boom {state['turn']}", this["boom"]):
        raise RuntimeError("the handler stumbles")
    after: dict[str, Any] = {"turn": state["turn"] + 1, "told": told, "heard": heard, "child": None}
    delay = timedelta(milliseconds=this["delay_ms"])
    match this["then"]:
        case "delay":
            return Continue(state=after, delay=delay)
        case "input":
            return Continue(state=after, until_input=True)
        case "delay_or_input":
            return Continue(state=after, delay=delay, until_input=True)
        case "child":
            child = await ctx.spawn("small", {"number": this["number"]}, name=str(state["turn"]))
            return Continue(state=after | {"child": child}, until_child=child)
        case "pause":
            return Pause(reason="an operator must look", state=after)
        case _:
            return Continue(state=after)


async def _of_child(ctx: Context, child: Any) -> Any:
    try:
        return await ctx.child(child)
    except ChildFailed as error:
        return {"error": error.message}


@turn("small", retry=RETRY)
async def small(ctx: Context) -> Next:
    """A child: one write."""
    number: Any = ctx.input["number"]  # type: ignore[index, call-overload]
    result = await ctx.tool(_made("pay", number, 50))
    return Complete(_said(result))


AGENTS = {agent.name: agent for agent in (desk, clerk, small)}
