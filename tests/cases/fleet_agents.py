"""The agents of the fleet's cases. A run's input says what its model asks for; every effect is a
line in a ledger.

`plan(["charge"], ["lookup", "lookup"])` is the input of a run whose first reply asks for a charge,
whose second one for two look-ups at once, and whose third one is the answer. A call is a tool's
name or `(name, {arguments})`. While a file `hold/<name>` exists in the home, a tool that was given
that `hold` stays.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from kit.ledger import Ledger

from journal.values import canonical
from runfold import (
    SAFE,
    UNSAFE,
    Agent,
    Bounds,
    Call,
    Complete,
    Context,
    Continue,
    Message,
    Next,
    Reply,
    Retry,
    Tool,
    ToolCall,
    ToolRequest,
    ToolSpec,
    read,
    turn,
    write,
)

POLL_S = 0.01
ANSWER = "done"
ONCE = Retry(attempts=1)


def plan(*rounds: Sequence[str | tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The input of a run: the calls of each reply."""
    return {"plan": [[[c, {}] if isinstance(c, str) else list(c) for c in one] for one in rounds]}


class PlanModel:
    """Plays the plan in the run's input. Each request is a line in the ledger `asked`."""

    def __init__(self, home: Path) -> None:
        self._asked = Ledger(home / "asked")
        self._home = home

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: Any
    ) -> Reply:
        given: Any = next(message.content for message in messages if message.role == "user")
        n = sum(message.role == "assistant" for message in messages)
        self._asked.add(given.get("name", ""), f"llm/{n + 1}", None)
        await held(self._home, given.get("hold_model", ""))
        rounds = given["plan"]
        if n >= len(rounds):
            return Reply(text=ANSWER)
        calls = tuple(
            ToolRequest(id=f"{n}-{index}", name=name, arguments=canonical(arguments).decode())
            for index, (name, arguments) in enumerate(rounds[n])
        )
        return Reply(calls=calls, finish="tool_calls")


async def held(home: Path, name: str) -> None:
    while name and (home / "hold" / name).exists():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def tools_of(home: Path) -> dict[str, Tool]:
    """All of them; see what each does to its `Ledger` in the home."""
    ledger, reads = Ledger(home / "ledger"), Ledger(home / "reads")

    def add(this: ToolCall, to: Ledger = ledger) -> None:
        to.add(this.run_id, this.step, this.input)

    @write(approval=False)
    async def charge(this: ToolCall, amount: int = 1, s: float = 0, hold: str = "") -> str:
        add(this)
        await asyncio.sleep(s)
        await held(home, hold)
        return f"paid {amount}"

    @write
    async def gated(this: ToolCall, amount: int = 1) -> str:
        add(this)
        return f"paid {amount}"

    @write(approval=False)
    def block(this: ToolCall, s: float = 0, hold: str = "") -> str:
        add(this)
        time.sleep(s)
        while hold and (home / "hold" / hold).exists():
            time.sleep(POLL_S)
        return "unblocked"

    @read
    async def lookup(this: ToolCall, q: str = "", s: float = 0, hold: str = "") -> str:
        add(this, reads)
        await asyncio.sleep(s)
        await held(home, hold)
        return f"{q} is known"

    @read
    async def wander(this: ToolCall, q: str, hold: str = "") -> str:
        """Takes its time, a random one; the third of a reply may be held."""
        add(this, reads)
        await asyncio.sleep(random.uniform(0, 0.2))
        await held(home, hold)
        return f"{q}!"

    @read
    async def freeze(this: ToolCall, s: float) -> str:
        """What a tool must not do: it blocks the event loop."""
        add(this, reads)
        time.sleep(s)  # noqa: ASYNC251
        return "thawed"

    @write(approval=False)
    async def freeze_write(this: ToolCall, s: float) -> str:
        """As `freeze`, and not to be repeated."""
        add(this)
        time.sleep(s)  # noqa: ASYNC251
        return "thawed"

    @write(approval=False)
    async def deaf_write(this: ToolCall, how: str, s: float = 3600) -> str:
        """As `deaf`, and not to be repeated."""
        add(this)
        return await _DEAF[how](s)

    @read
    async def stop_once(this: ToolCall, hold: str = "") -> str:
        """The work is done; before its result can be recorded, and its start, too, unless `hold`
        keeps it until then, the process is stopped, once."""
        add(this, reads)
        await held(home, hold)
        if len(reads.lines(this.run_id)) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return "continued"

    @read
    async def poison(this: ToolCall) -> str:
        """Kills its worker, every time."""
        add(this, reads)
        os._exit(137)

    @read
    async def deaf(this: ToolCall, how: str, s: float = 3600) -> str:
        """A tool that makes something else of its cancellation."""
        add(this, reads)
        return await _DEAF[how](s)

    tools = [charge, gated, block, lookup, wander, freeze, freeze_write, stop_once, poison]
    tools += [deaf, deaf_write]
    return {tool.spec.name: tool for tool in tools}


async def _swallow(s: float) -> str:
    try:
        await asyncio.sleep(s)
    except asyncio.CancelledError:
        return "swallowed"
    return "slept"


async def _carry_on(s: float) -> str:
    end = time.monotonic() + s
    while time.monotonic() < end:
        try:
            await asyncio.sleep(s)
        except BaseException:
            continue
    return "slept"


async def _shield(s: float) -> str:
    await asyncio.shield(asyncio.sleep(s))
    return "slept"


async def _wait_for(s: float) -> str:
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(s, done.set)
    await asyncio.wait_for(done.wait(), 3600)
    return "waited"


_DEAF: dict[str, Callable[[float], Awaitable[str]]] = {
    "swallow": _swallow,
    "carry_on": _carry_on,
    "shield": _shield,
    "wait_for": _wait_for,
}


# ---- turn handlers -----------------------------------------------------------------------------


def sleeper(name: str) -> Agent:
    """Waits for `{"delay": seconds}`, or until `{"at": ISO time, "zone": …, "fold": …}`."""

    @turn(name, retry=ONCE)
    async def sleeps(ctx: Context) -> Next:
        given: Any = ctx.input
        if ctx.load_checkpoint() is not None:
            return Complete("woke")
        if "delay" in given:
            return Continue(state=1, delay=timedelta(seconds=given["delay"]))
        at = datetime.fromisoformat(given["at"])
        if zone := given.get("zone"):
            at = at.replace(tzinfo=ZoneInfo(zone), fold=given.get("fold", 0))
        return Continue(state=1, until=at)

    return sleeps


def counter(home: Path) -> Agent:
    """`turns` turns of `calls` reads each, with results of `size` bytes; stays at call `hold_at`
    while a file hold/counter is there."""
    reads = Ledger(home / "reads")

    @turn("counter")
    async def counts(ctx: Context) -> Next:
        given: Any = ctx.input
        done: Any = ctx.load_checkpoint() or 0

        async def fetch(this: ToolCall) -> str:
            if f"{ctx.iteration}/{this.step.partition('/')[2]}" == given.get("hold_at"):
                reads.add(this.run_id, this.step, None)
                await held(home, "counter")
            return "x" * given["size"]

        for _ in range(given["calls"]):
            await ctx.tool(Call(name="fetch", input=None, fn=fetch, replay=SAFE))
        return Complete(done + 1) if done + 1 == given["turns"] else Continue(state=done + 1)

    return counts


def importer(home: Path) -> Agent:
    """Its code needs a module whose import kills the process."""
    (home / "deadly.py").write_text("import os\nos._exit(137)\n")

    @turn("importer", retry=ONCE)
    async def imports(ctx: Context) -> Next:
        Ledger(home / "reads").add(ctx.run_id, "import", None)
        exec(compile((home / "deadly.py").read_text(), "deadly.py", "exec"))
        return Complete("never")

    return imports


def gatherer(home: Path) -> Agent:
    """Three calls at once: `{"by": "parallel"}`, or by asyncio's own gather or as_completed."""
    reads = Ledger(home / "reads")

    @turn("gatherer", retry=ONCE)
    async def gathers(ctx: Context) -> Next:
        given: Any = ctx.input

        def made(name: str, replay: Any = SAFE) -> Call:
            async def fn(this: ToolCall) -> str:
                reads.add(this.run_id, this.step, name)
                await asyncio.sleep(random.uniform(0, 0.2))
                if name == given.get("hold_at"):
                    await held(home, "gatherer")
                return f"result of {name}"

            return Call(name=name, input=name, fn=fn, replay=replay)

        calls = [made(name) for name in ("a", "b", "c")]
        match given["by"]:
            case "parallel":
                found = await ctx.parallel(*calls)
            case "gather":
                found = await asyncio.gather(*(ctx.tool(one) for one in calls))
            case _:
                found = [await one for one in asyncio.as_completed([ctx.tool(c) for c in calls])]
        return Complete([result.output for result in found])

    return gathers


def build(
    home: Path,
    *,
    name: str = "fleet",
    revision: str = "1",
    compatible: Sequence[str] = (),
    without: Sequence[str] = (),
    rename: dict[str, str] | None = None,
    wider: Sequence[str] = (),
    attempts: int = 1,
) -> Agent:
    """The agent `fleet`, or what `name` says (`brief` has 1 s for a run). `without`: tools it
    lacks; `rename`: old to new name; `wider`: tools that take one argument more."""
    match name.partition("-")[0]:
        case "sleeper":
            return sleeper(name)
        case "counter":
            return counter(home)
        case "importer":
            return importer(home)
        case "gatherer":
            return gatherer(home)
        case _:
            pass
    tools = tools_of(home)
    for old in wider:
        tools[old] = _widened(tools[old])
    for old, new in (rename or {}).items():
        tools[old] = write(name=new, approval=tools[old].approval)(tools[old].fn)
    return Agent(
        name,
        model=PlanModel(home),
        tools=[tool for old, tool in tools.items() if old not in without],
        revision=revision,
        compatible=compatible,
        retry=Retry(attempts=attempts, backoff_s=0.1),
        bounds=Bounds(duration_s=1.0) if name == "brief" else None,
    )


def _widened(tool: Tool) -> Tool:
    async def wider(this: ToolCall, currency: str, amount: int = 1) -> Any:
        return await tool.fn(this, amount=amount)

    return write(name=tool.spec.name, approval=tool.approval)(wider)


__all__ = ["ANSWER", "SAFE", "UNSAFE", "build", "plan"]
