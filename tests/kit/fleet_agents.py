"""What runs in the worker processes of tests: agents, and the process itself.

What agents do leaves lines in the crew's folder: `effects` (a Ledger) and `places`, each place that
was reached and by which worker. While a file `hold/<place>` or `hold/<place>@<worker>` exists,
whoever reaches that place stays there.
"""

from __future__ import annotations

import asyncio
import datetime as clocks
import itertools
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from kit.ledger import Ledger

from journal.codec import Entry
from journal.errors import DecisionConflict, RunFinished, RunfoldError, StaleSignal
from journal.fleet import Fleet
from journal.ids import RunId
from journal.records import Park
from journal.steps import DidNotHappen, Happened, Probed
from journal.store import AppendAnswer
from journal.stores.jetstream import JetStreamStore
from journal.terms import Bounds, Complete, Continue, Next, Retry
from worker.agent import Agent, turn
from worker.context import Call, Context
from worker.models.scripted import ScriptedModel, call, say
from worker.service import Worker
from worker.tools import SAFE, UNSAFE, ToolCall, write

POLL_S = 0.005


class Here:
    """Where this worker process works."""

    folder = Path(".")
    worker = "nobody"


def holds(place: str) -> bool:
    hold = Here.folder / "hold"
    return (hold / place).exists() or (hold / f"{place}@{Here.worker}").exists()


def reach(place: str) -> None:
    fd = os.open(Here.folder / "places", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{place} {Here.worker}\n".encode())
    os.close(fd)


async def stay(place: str) -> None:
    reach(place)
    while holds(place):  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def affect(call: ToolCall) -> None:
    Ledger(Here.folder / "effects").add(call.run_id, call.step, call.key)


# ---- agents -----------------------------------------------------------------------------------


def pause_of(call: ToolCall) -> float:
    """50 to 200 ms, the same for the same call."""
    return 0.05 + int(call.key[-4:], 16) % 150 / 1000


async def slow_read(call: ToolCall) -> Any:
    await asyncio.sleep(pause_of(call))
    return call.input


async def slow_write(call: ToolCall) -> str:
    await asyncio.sleep(pause_of(call) / 2)
    affect(call)
    await asyncio.sleep(pause_of(call) / 2)
    return call.key


@turn("roller")
async def roller(ctx: Context) -> Next:
    """`turns` turns of a read and an unsafe write, and a count of them."""
    done = ctx.load_checkpoint() or 0
    await ctx.tool(Call(name="look", input=done, fn=slow_read, replay=SAFE))
    await ctx.tool(Call(name="act", input=done, fn=slow_write, replay=UNSAFE))
    if done + 1 == ctx.input["turns"]:
        return Complete({"turns": done + 1})
    return Continue(state=done + 1)


@turn("reader")
async def reader(ctx: Context) -> Next:
    """A read at the place `read`, then a write."""

    async def look(call: ToolCall) -> str:
        await stay("read")
        return Here.worker

    async def act(call: ToolCall) -> str:
        affect(call)
        return Here.worker

    read = await ctx.tool(Call(name="look", input=None, fn=look, replay=SAFE))
    await stay("between")
    acted = await ctx.tool(Call(name="act", input=None, fn=act, replay=UNSAFE))
    return Complete([read.output, acted.output])


@turn("writer")
async def writer(ctx: Context) -> Next:
    """An async unsafe write that takes effect once it may leave the place `write`."""

    async def act(call: ToolCall) -> str:
        await stay("write")
        affect(call)
        return f"by {Here.worker}"

    acted = await ctx.tool(Call(name="act", input=None, fn=act, replay=UNSAFE))
    return Complete(acted.output)


@turn("prober")
async def prober(ctx: Context) -> Next:
    """As the writer; whoever finds the write cut off looks for its effect."""

    async def act(call: ToolCall) -> str:
        await stay("write")
        affect(call)
        return f"by {Here.worker}"

    async def look(key: str) -> Probed:
        effects = Ledger(Here.folder / "effects").lines()
        found = any(known == key for _, _, known in effects)
        return Happened("found") if found else DidNotHappen()

    acted = await ctx.tool(
        Call(name="act", input=None, fn=act, replay=UNSAFE, on_unknown="probe", probe=look)
    )
    return Complete(acted.output)


@write(approval=False)
def ticket(title: str, call: ToolCall) -> str:
    reach("thread")
    while holds("thread"):
        time.sleep(POLL_S)
    affect(call)
    return f"by {Here.worker}"


desk = Agent(
    "desk", model=ScriptedModel(call("ticket", title="VPN"), say("Filed.")), tools=[ticket]
)
"""A sync unsafe write, so in a thread, that takes effect once it may leave the place `thread`."""


@turn("asker")
async def asker(ctx: Context) -> Next:
    """An approval, then the write."""

    async def act(call: ToolCall) -> str:
        affect(call)
        return Here.worker

    acted = await ctx.tool(Call(name="act", input=None, fn=act, replay=UNSAFE, approval="May it?"))
    return Complete(acted.output)


@turn("waiter")
async def waiter(ctx: Context) -> Next:
    """Waits for an input; the second turn answers."""
    if ctx.load_checkpoint() is None:
        return Continue(state=1, until_input=True)
    placed = await ctx.place_inputs("steer")
    return Complete([one.content for one in placed])


@turn("sleeper")
async def sleeper(ctx: Context) -> Next:
    """Waits `delay_s`, or until the instant `until`; then says at which turn it woke."""
    state = ctx.load_checkpoint() or 0
    wanted = ctx.input
    if state < wanted.get("turns", 1):
        if "until" in wanted:
            return Continue(state=state + 1, until=clocks.datetime.fromisoformat(wanted["until"]))
        return Continue(state=state + 1, delay=clocks.timedelta(seconds=wanted["delay_s"]))

    async def woken(call: ToolCall) -> str:
        affect(call)
        return Here.worker

    await ctx.tool(Call(name="woken", input=state, fn=woken, replay=UNSAFE))
    return Complete(state)


@turn("quick")
async def quick(ctx: Context) -> Next:
    """Two steps, then the answer."""

    async def think() -> str:
        return "thought"

    async def look(call: ToolCall) -> str:
        return "seen"

    await ctx.model(think)
    await ctx.tool(Call(name="look", input=None, fn=look, replay=SAFE))
    return Complete("done")


@turn("parker", bounds=Bounds(iterations=100_000), retry=Retry(attempts=1))
async def parker(ctx: Context) -> Next:
    """Each turn places what is queued, asks for one write, and waits for the next input; ends when
    it has placed an input that says so."""
    told = ctx.load_checkpoint() or 0
    placed = await ctx.place_inputs("steer")

    async def act(call: ToolCall) -> str:
        affect(call)
        return "done"

    if any(one.content == "end" for one in placed):
        return Complete(told + len(placed))
    await ctx.tool(Call(name="act", input=ctx.iteration, fn=act, replay=UNSAFE, approval="Go on?"))
    return Continue(state=told + len(placed), until_input=True)


@turn("parent")
async def parent(ctx: Context) -> Next:
    """Waits for its child `kid`, a waiter."""
    child = await ctx.spawn("waiter", None, name="kid")
    if ctx.load_checkpoint() is None:
        return Continue(state=1, until_child=child)
    return Complete(await ctx.child(child))


AGENTS = {
    agent.name: agent
    for agent in (
        roller,
        reader,
        writer,
        prober,
        desk,
        asker,
        waiter,
        sleeper,
        quick,
        parker,
        parent,
    )
}


# ---- who talks to a run -----------------------------------------------------------------------


class Outcome(NamedTuple):
    """What became of a request, as who made it was told."""

    request: str
    what: str


async def submit_many(
    url: str, namespace: str, run: str, count: int, at_once: int
) -> list[Outcome]:
    """Inputs, until each is taken; some sent twice, some then taken back, if they still can be."""
    numbers = iter(range(count))
    found: list[Outcome] = []

    async def some(fleet: Fleet) -> None:
        for number in numbers:
            request = f"in-{number:04}"
            while True:
                try:
                    taken = await fleet.send(run, number, request_id=request)
                    break
                except StaleSignal:  # so many are queued already
                    found.append(Outcome(request, "refused"))
                    await asyncio.sleep(0.02)
            assert taken.created, taken
            found.append(Outcome(request, "taken"))
            if number % 10 == 3:
                again = await fleet.send(run, "another", request_id=request)
                assert not again.created and again.content == number, again
                found.append(Outcome(request, "repeated"))
            if number % 5 == 0:
                try:
                    what = (await fleet.withdraw(run, request)).status
                except StaleSignal:
                    what = "placed before it was withdrawn"
                found.append(Outcome(request, what))

    async with JetStreamStore(url, namespace=namespace) as store, asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(some(Fleet(store, by="submitter")))
    return found


async def decide_many(url: str, namespace: str, run: str, at_once: int, name: str) -> list[Outcome]:
    """Approvals and rejections of all that the run asks, until its end: each question by each of
    `at_once` deciders, each of which decides some twice."""
    numbers = itertools.count()
    found: list[Outcome] = []

    async def decide(fleet: Fleet, word: str, marker: str) -> None:
        request = f"{name}-{next(numbers):04}"
        try:
            receipt = await fleet.signal(run, word, {"marker": marker}, request_id=request)
            found.append(Outcome(request, receipt.result))
        except (StaleSignal, DecisionConflict, RunFinished) as error:
            found.append(Outcome(request, error.code))

    async def some(fleet: Fleet, number: int) -> None:
        last = ""
        async for record in fleet.follow(run):
            for ask in record.asks if isinstance(record, Park) else ():
                word = "reject" if int(ask.marker[-2:], 16) % 5 == number else "approve"
                await decide(fleet, word, ask.marker)
                if int(ask.marker[-1], 16) % 4 == 0:
                    await decide(fleet, "approve", last or ask.marker)
                last = ask.marker

    async with JetStreamStore(url, namespace=namespace) as store, asyncio.TaskGroup() as group:
        for number in range(at_once):
            group.create_task(some(Fleet(store, by=name), number))
    return found


# ---- the process ------------------------------------------------------------------------------


def work(
    url: str,
    namespace: str,
    agents: list[str],
    folder: str,
    name: str,
    options: dict[str, Any],
    skew_s: float,
    hold_append: str,
) -> str:
    """A worker, until it is stopped: SIGTERM once in order, twice at once; SIGUSR1: write down what
    it holds. `skew_s`: how far its clock is wrong. `hold_append`: before the first record of this
    type is published it stays at the place `append`."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    Here.folder, Here.worker = Path(folder), name
    if skew_s:
        put_clock_wrong(clocks.timedelta(seconds=skew_s))
    if hold_append:
        hold_appends(hold_append)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(
            serve(
                Worker(
                    url,
                    [AGENTS[agent] for agent in agents],
                    name=name,
                    namespace=namespace,
                    **options,
                )
            )
        )
    except RunfoldError as error:
        print(f"ended by {type(error).__name__}: {error.message}", file=sys.stderr)
        sys.exit(3)
    return "stopped"  # as the CLI: what is stubborn is left to the end of the process


async def serve(worker: Worker) -> None:
    loop = asyncio.get_running_loop()
    told: list[asyncio.Task[None]] = []

    def on_term() -> None:
        if told:
            worker.force()
        else:
            told.append(loop.create_task(worker.stop()))

    def on_ready() -> None:
        leave("ready", {"id": worker.id, "pid": os.getpid()})

    loop.add_signal_handler(signal.SIGTERM, on_term)
    loop.add_signal_handler(signal.SIGUSR1, lambda: leave("stats", stats(worker)))
    worker._on_ready = on_ready
    await worker.serve()


def stats(worker: Worker) -> dict[str, Any]:
    connection = worker._store._connection
    held = worker._dispatcher.held if worker._dispatcher else {}
    return {
        "tasks": len(asyncio.all_tasks()),
        "subscriptions": len(connection._nc._subs),
        "takers": len(connection._nc._takers),
        "waiting": len(connection._waiting),
        "held": len(held),
        "lost": sum(one.journal.lost for one in held.values()),
        "works": len(worker._works),
        "backlog": len(worker._waiting),
    }


def leave(what: str, found: dict[str, Any]) -> None:
    """Whole or not at all."""
    path = Here.folder / f"{what}@{Here.worker}"
    path.with_name(f".{path.name}").write_text(json.dumps(found))
    path.with_name(f".{path.name}").rename(path)


def put_clock_wrong(by: clocks.timedelta) -> None:
    """Everywhere in the product: as on a machine whose clock is wrong."""
    right = clocks.datetime

    class Wrong(right):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return right.now(tz) + by

    for module in list(sys.modules.values()):
        package = getattr(module, "__name__", "").split(".")[0]
        path = getattr(module, "__file__", None)
        if package not in ("journal", "worker") or path is None:
            continue
        if "datetime.now(" in Path(path).read_text():
            assert getattr(module, "datetime", None) is right
            module.datetime = Wrong  # type: ignore[attr-defined]


def hold_appends(type_: str) -> None:
    append = JetStreamStore.append
    held: list[str] = []

    async def held_back(
        self: JetStreamStore, run_id: RunId, entry: Entry, *, expected: int
    ) -> AppendAnswer:
        if entry.type == type_ and not held:
            held.append(run_id)
            await stay("append")
        return await append(self, run_id, entry, expected=expected)

    JetStreamStore.append = held_back  # type: ignore[method-assign]
