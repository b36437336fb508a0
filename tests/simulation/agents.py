"""Agents of the simulated world, each with the answer it must come to.

What they do outside goes through the world (`HERE`), which counts it. Their answers say what every
call of theirs came to, so that an answer can be judged by what happened.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from journal.messages import JSON, Message, Preview, Reply, ToolSpec
from journal.steps import CannotTell, DidNotHappen, Happened, Probed
from journal.terms import Bounds, Complete, Continue, Fail, Next, Pause
from worker.agent import Agent, turn
from worker.context import Call, Context, ToolResult
from worker.models.scripted import call, say
from worker.tools import SAFE, UNSAFE, ToolCall, read, write

TOOL_S = 4.0
"""Time limit of a write: a stalled worker's is over soon."""


class Outside(Protocol):
    """What the world offers to agents."""

    async def look(self, what: str) -> str: ...
    async def act(self, call: ToolCall, text: str) -> str: ...
    async def think(self) -> None: ...
    def probe(self, key: str) -> str | None: ...
    def chance(self, probability: float) -> bool: ...


class Here:
    """The world of the schedule that runs now."""

    world: Outside


# ---- tools ---------------------------------------------------------------------------------------


async def lookup(query: str) -> str:
    return await Here.world.look(query)


async def pay(amount: int, call: ToolCall) -> str:
    return await Here.world.act(call, f"paid {amount}")


async def post(title: str, call: ToolCall) -> str:
    await call.progress("half")
    return await Here.world.act(call, f"posted {title}")


async def probe(key: str) -> Probed:
    await Here.world.think()
    found = Here.world.probe(key)
    if found is None:
        return DidNotHappen() if not Here.world.chance(0.1) else CannotTell("the line is dead")
    return Happened(found) if not Here.world.chance(0.1) else CannotTell("the line is dead")


LOOKUP = read(name="lookup", timeout_s=TOOL_S)(lookup)
PAY = write(name="pay", approval=False, timeout_s=TOOL_S)(pay)
PAY_ASKED = write(name="pay", timeout_s=TOOL_S)(pay)
PAY_CUT = write(name="pay", approval=False, timeout_s=TOOL_S, on_unknown="interrupt")(pay)
PAY_PROBED = write(name="pay", approval=False, timeout_s=TOOL_S, on_unknown="probe", probe=probe)(
    pay
)
POST = write(name="post", approval=False, timeout_s=TOOL_S)(post)
POST_KEYED = write(name="post", approval=False, replay=SAFE, timeout_s=TOOL_S)(post)


class Script:
    """A model that plays its replies, and then answers with what it was told."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = replies

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: Preview
    ) -> Reply:
        await Here.world.think()
        n = sum(message.role == "assistant" for message in messages)
        return self.replies[n] if n < len(self.replies) else say(told(messages))


def told(messages: Sequence[Message]) -> str:
    """The final answer of a script: what its calls came to, and what people said after the first
    message."""
    calls = [came_to(one.content) for one in messages if one.role == "tool"]
    heard = [one.content for one in messages if one.role == "user"][1:]
    return json.dumps({"calls": calls, "heard": heard})


def came_to(content: JSON) -> JSON:
    """A tool message's content; of an error its type alone."""
    match content:
        case {"error": {"type": kind}}:
            return f"error {kind}"
        case _:
            return content


def script(name: str, *replies: Reply, tools: Sequence[Any], **options: Any) -> Agent:
    return Agent(name, model=Script(*replies), tools=tools, **options)


def both(*replies: Reply) -> Reply:
    """One reply with the calls of all."""
    return Reply(calls=tuple(each for one in replies for each in one.calls), finish="tool_calls")


CLERK = script("clerk", call("lookup", query="a"), call("pay", amount=1), tools=[LOOKUP, PAY])
GATED = script("gated", call("pay", amount=2), tools=[PAY_ASKED])
CUTTER = script("cutter", call("pay", amount=3), tools=[PAY_CUT])
PROBER = script("prober", call("pay", amount=4), tools=[PAY_PROBED])
KEYED = script("keyed", call("post", title="x"), call("pay", amount=5), tools=[POST_KEYED, PAY])
PAIR = script(
    "pair",
    both(call("pay", amount=10), call("post", title="z"), call("lookup", query="b")),
    tools=[PAY, POST, LOOKUP],
    parallel_writes=True,
)


# ---- turn handlers -------------------------------------------------------------------------------


def write_call(name: str, text: str, *, approval: str | None = None, safe: bool = False) -> Call:
    async def fn(made: ToolCall) -> JSON:
        return await Here.world.act(made, text)

    return Call(
        name=name,
        input={"text": text},
        fn=fn,
        replay=SAFE if safe else UNSAFE,
        approval=approval,
        timeout_s=TOOL_S,
    )


def result(found: ToolResult) -> JSON:
    if found.error is not None:
        return f"error {found.error}"
    return "interrupted" if found.interrupted else found.output


@turn("waiter")
async def waiter(ctx: Context) -> Next:
    """A write, a wait for a moment, a wait for an input or a moment, a write."""
    state: Any = ctx.load_checkpoint() or {"calls": [], "heard": []}
    match ctx.iteration:
        case 0:
            paid = await ctx.tool(write_call("pay", "paid 6"))
            state["calls"].append(result(paid))
            return Continue(state=state, delay=timedelta(seconds=0.5))
        case 1:
            return Continue(state=state, delay=timedelta(seconds=3), until_input=True)
        case _:
            heard = await ctx.place_inputs("steer")
            state["heard"] += [one.content for one in heard]
            paid = await ctx.tool(write_call("pay", "paid 7"))
            state["calls"].append(result(paid))
            return Complete(state)


@turn("retrier")
async def retrier(ctx: Context) -> Next:
    """Fails once, behind a write that the second attempt must not repeat."""
    paid = await ctx.tool(write_call("pay", "paid 8"))
    if ctx.attempt == 1:
        return Fail(reason="flaky", retriable=True)
    seen = await ctx.tool(write_call("post", "seen", safe=True))
    return Complete({"calls": [result(paid), result(seen)], "heard": []})


@turn("asker")
async def asker(ctx: Context) -> Next:
    """Two writes at once, one of which a person decides."""
    found = await ctx.parallel(
        write_call("pay", "paid 9"), write_call("post", "posted y", approval="Post y?")
    )
    return Complete({"calls": [result(one) for one in found], "heard": []})


@turn("pauser")
async def pauser(ctx: Context) -> Next:
    """Waits for an operator, between two writes."""
    state: Any = ctx.load_checkpoint() or []
    paid = await ctx.tool(write_call("pay", f"paid {11 + ctx.iteration}"))
    state.append(result(paid))
    if ctx.iteration == 0:
        return Pause(reason="have a look", state=state)
    return Complete({"calls": state, "heard": []})


@turn("bounded", bounds=Bounds(duration_s=4.0, turn_timeout_s=2.0))
async def bounded(ctx: Context) -> Next:
    """Has little time: a write, and a wait that is too long."""
    await ctx.tool(write_call("pay", "paid 13"))
    return Continue(delay=timedelta(seconds=60))


@turn("parent")
async def parent(ctx: Context) -> Next:
    if ctx.iteration == 0:
        child = await ctx.spawn("clerk", "from above", name="kid")
        return Continue(state=child, until_child=child)
    answer: Any = await ctx.child(ctx.load_checkpoint())  # type: ignore[arg-type]
    return Complete({"child": answer})


AGENTS: dict[str, Agent] = {
    agent.name: agent
    for agent in (
        *(CLERK, GATED, CUTTER, PROBER, KEYED, PAIR),
        *(waiter, retrier, asker, pauser, bounded, parent),
    )
}
NEEDS: dict[str, tuple[str, ...]] = {"parent": ("parent", "clerk")}
"""Agents that runs of an agent need beside it."""

CALLS: dict[str, tuple[str, ...]] = {
    "clerk": ("found a", "paid 1"),
    "gated": ("paid 2",),
    "cutter": ("paid 3",),
    "prober": ("paid 4",),
    "keyed": ("posted x", "paid 5"),
    "waiter": ("paid 6", "paid 7"),
    "retrier": ("paid 8", "seen"),
    "asker": ("paid 9", "posted y"),
    "pair": ("paid 10", "posted z", "found b"),
    "pauser": ("paid 11", "paid 12"),
}
"""What the calls of each come to where nothing is in the way."""
