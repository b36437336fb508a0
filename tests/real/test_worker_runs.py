"""Runs on real workers: cancel, priorities, keys, children, changed code (R43, R54, R56, R57)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kit.ledger import Ledger
from kit.servers import NatsServer
from kit.waiting import eventually

from journal import keys
from journal.fleet import Fleet
from journal.ids import RunId
from journal.log import Log
from journal.records import Claim, Park, Signal, StepCompleted, StepStarted
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.terms import Bounds, Complete, Continue, Fail, Next, Pause, Retry
from journal.views import Cancelled, Completed, Failed, RunState
from runfold.testing import ScriptedModel, call, say
from worker import runner
from worker.agent import Agent, turn
from worker.context import Call, Context
from worker.opening import connect
from worker.service import Worker
from worker.tools import SAFE, UNSAFE, Tool, ToolCall, read, write

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

WAIT_S = 20.0


class Site:
    """A server with a namespace of the test's own, a fleet on it, and workers to start."""

    def __init__(self, url: str, namespace: str, fleet: Fleet, stack: AsyncExitStack) -> None:
        self.url, self.namespace, self.fleet = url, namespace, fleet
        self._stack = stack

    async def worker(self, *agents: Agent, **options: Any) -> tuple[Worker, asyncio.Task[None]]:
        ready = asyncio.Event()
        options = {"ack_wait_s": 3.0, "sweep_s": 1.0, "grace_s": 5.0} | options
        made = Worker(self.url, agents, namespace=self.namespace, on_ready=ready.set, **options)
        task = asyncio.create_task(made.serve())
        self._stack.push_async_callback(self._stop, made, task)
        await asyncio.wait([task, asyncio.create_task(ready.wait())], return_when="FIRST_COMPLETED")
        return made, task

    async def _stop(self, worker: Worker, task: asyncio.Task[None]) -> None:
        if not task.done():
            worker.force()
            await asyncio.wait([task], timeout=10)
        task.cancel()

    async def until(self, run: str, status: str, timeout: float = WAIT_S) -> RunState:
        async def there() -> RunState | None:
            found = await self.fleet.get(run)
            return found if found.status == status else None

        try:
            return await eventually(there, timeout)
        except AssertionError:
            raise AssertionError(f"{run} is {await self.fleet.get(run)}, not {status}") from None

    async def records(self, run: str) -> list[Any]:
        return [record async for record in self.fleet.follow(run)]

    async def types(self, run: str) -> list[str]:
        loaded = await self.fleet.store.load(run)  # type: ignore[arg-type]
        return [entry.type for entry in loaded.entries]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncIterator[Site]:
    await provision(nats_server.url, namespace=namespace)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(connect(nats_server.url, namespace=namespace))
        yield Site(nats_server.url, namespace, fleet, stack)


class Door:
    """A place that says it was reached, and holds whoever is there until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open, self.cut = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def through(self) -> str:
        self.reached.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cut.set()
            raise
        return "through"


# ---- cancel (R56) -------------------------------------------------------------------------------


class SlowModel(ScriptedModel):
    def __init__(self, door: Door) -> None:
        super().__init__(say("x"))
        self.door = door

    async def reply(self, messages: Any, tools: Any, **rest: Any) -> Any:
        await self.door.through()
        return await super().reply(messages, tools, **rest)


async def test_a_model_call_that_runs_is_cancelled_at_once(site: Site):
    """Told by a notice: its heartbeat would come after twenty seconds."""
    door = Door()
    await site.worker(Agent("desk", model=SlowModel(door)), ack_wait_s=60.0)
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.wait_for(door.reached.wait(), WAIT_S)
    began = time.monotonic()
    await site.fleet.cancel("r", reason="enough")
    assert (await site.until("r", "cancelled")).outcome == Cancelled("enough")
    assert time.monotonic() - began < 5
    assert door.cut.is_set()


def mailing(door: Door, calls: list[str], *replies: Any) -> Agent:
    @write(approval=False)
    async def mail() -> str:
        calls.append("mail")
        return await door.through()

    return Agent("desk", model=ScriptedModel(*(replies or (call("mail"), say("x")))), tools=[mail])


async def test_a_write_in_flight_is_let_end_and_its_result_is_kept(site: Site):
    door, calls = Door(), list[str]()
    twice = (call("mail"), call("mail"), say("x"))
    await site.worker(mailing(door, calls, *twice))
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.wait_for(door.reached.wait(), WAIT_S)
    await site.fleet.cancel("r")
    await asyncio.sleep(1.5)  # more than a heartbeat: it had its chance to be cut
    assert not door.cut.is_set()
    assert (await site.fleet.get("r")).status == "running"
    door.open.set()
    await site.until("r", "cancelled")
    records = await site.records("r")
    (sent,) = [r for r in records if isinstance(r, StepCompleted) and r.step.startswith("tool")]
    assert (sent.result, calls) == ("through", ["mail"])


async def test_a_write_in_its_thread_is_let_end_too(site: Site):
    reached, go = threading.Event(), threading.Event()

    @write(approval=False)
    def mail() -> str:
        reached.set()
        assert go.wait(WAIT_S)
        return "sent"

    agent = Agent("desk", model=ScriptedModel(call("mail"), say("x")), tools=[mail])
    await site.worker(agent)
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.to_thread(reached.wait, WAIT_S)
    await site.fleet.cancel("r")
    await asyncio.sleep(1.5)
    assert (await site.fleet.get("r")).status == "running"
    go.set()
    await site.until("r", "cancelled")
    records = await site.records("r")
    (sent,) = [r for r in records if isinstance(r, StepCompleted) and r.step.startswith("tool")]
    assert sent.result == "sent"


@pytest.mark.parametrize("then", ["completes", "goes on", "fails"])
async def test_a_handler_that_swallows_its_cancellation_is_cancelled_all_the_same(
    site: Site, then: str
):
    reached = asyncio.Event()

    @turn("desk")
    async def desk(ctx: Context) -> Next:
        reached.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if then == "fails":
                raise KeyError("cut") from None
        return Complete("x") if then == "completes" else Continue(state="x")

    await site.worker(desk)
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.wait_for(reached.wait(), WAIT_S)
    await site.fleet.cancel("r", reason="enough")
    assert (await site.until("r", "cancelled", 8)).outcome == Cancelled("enough")
    assert await site.types("r") == ["run.started", "claim", "signal", "commit"]


async def test_a_handler_that_only_beats_hears_of_the_cancellation(site: Site):
    beats: list[int] = []

    @turn("desk")
    async def desk(ctx: Context) -> Next:
        while True:
            await ctx.heartbeat()
            beats.append(1)
            await asyncio.sleep(0.01)

    await site.worker(desk)
    await site.fleet.start("desk", "go", run_id="r")
    await eventually(lambda: beats)
    await site.fleet.cancel("r")
    await site.until("r", "cancelled", 5)
    count = len(beats)
    await asyncio.sleep(0.1)
    assert len(beats) == count


@pytest.mark.parametrize("kind", ["loop", "handler"])
async def test_a_stubborn_tool_is_named_and_the_run_cancelled_within_the_grace(
    site: Site, kind: str, caplog: pytest.LogCaptureFixture
):
    reached, end, returned = asyncio.Event(), asyncio.Event(), list[str]()

    async def clinging() -> str:
        reached.set()
        while not end.is_set():
            try:
                await asyncio.wait_for(end.wait(), 30)
            except asyncio.CancelledError:
                continue
        returned.append("late")
        return "late"

    @read
    async def cling() -> str:
        return await clinging()

    @turn("desk")
    async def handler(ctx: Context) -> Next:
        async def fn(call: ToolCall) -> Any:
            return await clinging()

        await ctx.tool(Call(name="cling", input=None, fn=fn, replay=SAFE))
        return Complete("ignored")

    loop = Agent("desk", model=ScriptedModel(call("cling"), say("x")), tools=[cling])
    worker, _ = await site.worker(handler if kind == "handler" else loop, grace_s=0.5)
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.wait_for(reached.wait(), WAIT_S)
    began = time.monotonic()
    with caplog.at_level(logging.ERROR, "runfold"):
        await site.fleet.cancel("r", reason="enough")
        assert (await site.until("r", "cancelled")).outcome == Cancelled("enough")
    assert time.monotonic() - began < 5
    assert "ignores that it was cancelled" in caplog.text
    assert worker.health().details["stubborn"] == 1
    records = await site.types("r")
    end.set()
    await eventually(lambda: returned and not worker.stubborn)
    await asyncio.sleep(0.2)
    assert await site.types("r") == records  # nothing of it is recorded any more


def clinging(deadlines: dict[str, float], end: asyncio.Event, *, call: str) -> Agent:
    """A handler that ignores its cancellation in this place."""

    async def cling() -> Any:
        while not end.is_set():
            try:
                await asyncio.wait_for(end.wait(), 30)
            except asyncio.CancelledError:
                continue
        return "late"

    async def fn(made: ToolCall) -> Any:
        return await cling()

    @turn("desk", bounds=Bounds(**deadlines), retry=Retry(attempts=1))  # type: ignore[arg-type]
    async def desk(ctx: Context) -> Next:
        if call == "write":
            made = Call(name="pay", input=None, fn=fn, replay=UNSAFE, timeout_s=0.5)
            await ctx.tool(made)
        else:
            await cling()
        return Complete("late")

    return desk


@pytest.mark.parametrize(
    ("deadlines", "reason"),
    [({"turn_timeout_s": 0.5}, "step_failed"), ({"duration_s": 0.5}, "duration")],
    ids=["turn", "duration"],
)
async def test_code_that_ignores_its_cancellation_stretches_no_deadline(
    site: Site, deadlines: dict[str, float], reason: str
):
    end = asyncio.Event()
    await site.worker(clinging(deadlines, end, call="handler"), grace_s=0.5)
    await site.fleet.start("desk", "go", run_id="r")
    try:
        found = (await site.until("r", "failed", 5)).outcome
        assert isinstance(found, Failed) and found.reason == reason
    finally:
        end.set()


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_write_that_ignores_its_time_limit_is_unknown_when_that_is_over(
    site: Site, cancels: bool
):
    end = asyncio.Event()

    async def started() -> bool:  # a cancel before that would simply end the run
        return "step.started" in await site.types("r")

    await site.worker(clinging({}, end, call="write"), grace_s=0.5)
    await site.fleet.start("desk", "go", run_id="r")
    try:
        await eventually(started, WAIT_S)
        if cancels:
            await site.fleet.cancel("r")
        await site.until("r", "indeterminate", 6)
    finally:
        end.set()


async def test_a_cancel_wakes_a_run_that_waits(site: Site):
    @turn("desk")
    async def desk(ctx: Context) -> Next:
        async def fn(call: ToolCall) -> Any:
            return "x"

        match ctx.input:
            case "input":
                return Continue(until_input=True)
            case "hour":
                return Continue(delay=timedelta(hours=1))
            case "operator":
                return Pause(reason="look")
            case "retry":
                raise KeyError
            case _:
                made = Call(name="pay", input=1, fn=fn, replay=UNSAFE, approval="Pay?")
                await ctx.tool(made)
                return Complete("x")

    waits = {
        "input": "waiting",
        "hour": "waiting",
        "operator": "paused",
        "retry": "waiting",
        "approval": "awaiting_approval",
    }
    await site.worker(
        turn("desk", retry=Retry(backoff_s=60))(desk.handler),  # type: ignore[arg-type]
        sweep_s=3600,
    )
    for run in waits:
        await site.fleet.start("desk", run, run_id=run)
    for run, status in waits.items():
        await site.until(run, status)
        await site.fleet.cancel(run, reason="enough")
        assert (await site.until(run, "cancelled", 5)).outcome == Cancelled("enough")


async def test_work_that_is_queued_when_it_is_cancelled_never_runs(site: Site):
    door, calls = Door(), list[str]()
    await site.worker(mailing(door, calls), concurrency=1)
    await site.fleet.start("desk", "go", run_id="first")
    await asyncio.wait_for(door.reached.wait(), WAIT_S)
    for n in range(3):
        await site.fleet.start("desk", "go", run_id=f"queued{n}")
        await site.fleet.cancel(f"queued{n}")
    door.open.set()
    await site.until("first", "completed")
    for n in range(3):
        await site.until(f"queued{n}", "cancelled")
        assert "step.started" not in await site.types(f"queued{n}")
    assert calls == ["mail"]


async def test_nothing_starts_after_the_cancel_is_in_the_journal(site: Site):
    """Runs that start step after step, cancelled somewhere in the middle."""

    @turn("busy")
    async def busy(ctx: Context) -> Next:
        async def fn(call: ToolCall) -> Any:
            await asyncio.sleep(0.01)
            return "x"

        for n in range(200):
            await ctx.tool(Call(name="put", input=n, fn=fn, replay=UNSAFE))
        return Complete("x")

    await site.worker(busy)
    runs = [f"b{n}" for n in range(8)]
    for run in runs:
        await site.fleet.start("busy", "go", run_id=run)

    async def cancel(n: int, run: str) -> None:
        async def so_far() -> bool:
            return len(await site.types(run)) > 5 + 9 * n

        await eventually(so_far, WAIT_S)
        await site.fleet.cancel(run)

    await asyncio.gather(*(cancel(n, run) for n, run in enumerate(runs)))
    for run in runs:
        await site.until(run, "cancelled")
        types = await site.types(run)
        assert "step.started" not in types[types.index("signal") :]


# ---- priorities and keys (R54) ------------------------------------------------------------------


def in_order(door: Door, order: list[str]) -> Agent:
    @turn("desk")
    async def desk(ctx: Context) -> Next:
        order.append(ctx.run_id)
        if ctx.run_id == "blocker":
            await door.through()
        return Complete("x")

    return desk


async def started_in_order(site: Site, tasks: dict[str, int]) -> list[str]:
    """The order in which a worker with one slot, which is busy, takes these up later."""
    door, order = Door(), list[str]()
    await site.worker(in_order(door, order), concurrency=1)
    await site.fleet.start("desk", "go", run_id="blocker")
    await asyncio.wait_for(door.reached.wait(), WAIT_S)
    for run, priority in tasks.items():
        await site.fleet.start("desk", "go", run_id=run, priority=priority)
    await asyncio.sleep(0.3)
    door.open.set()
    for run in tasks:
        await site.until(run, "completed")
    return order[1:]


async def test_with_one_slot_a_high_task_goes_before_earlier_normal_ones(site: Site):
    tasks = {"normal0": 0, "normal1": 0, "normal2": 0, "high": 1}
    assert await started_in_order(site, tasks) == ["high", "normal0", "normal1", "normal2"]


async def test_with_one_slot_all_high_tasks_go_before_earlier_normal_ones(site: Site):
    tasks = {"normal0": 0, "normal1": 0} | {f"high{n}": 1 for n in range(4)}
    expected = ["high0", "high1", "high2", "high3", "normal0", "normal1"]
    assert await started_in_order(site, tasks) == expected


async def test_with_one_slot_a_low_task_goes_after_later_normal_ones(site: Site):
    tasks = {"low": -1, "normal0": 0, "normal1": 0, "normal2": 0}
    assert await started_in_order(site, tasks) == ["normal0", "normal1", "normal2", "low"]


async def test_two_runs_of_one_key_are_never_active_at_once_over_two_workers(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With patience for a busy machine: an answer that comes too late is missed (keys.py)."""
    monkeypatch.setattr(keys, "WAIT_S", 0.6)
    ledger, active = Ledger(tmp_path / "ledger"), set[str]()

    def agent() -> Agent:
        @turn("desk")
        async def desk(ctx: Context) -> Next:
            ledger.add(ctx.run_id, "begin", sorted(active))
            active.add(ctx.run_id)
            await asyncio.sleep(0.15)
            active.discard(ctx.run_id)
            ledger.add(ctx.run_id, "end", None)
            return Complete("x")

        return desk

    for _ in range(2):
        await site.worker(agent())
    runs = [f"{key}{n}" for n in range(4) for key in ("a", "b")]
    for run in runs:
        await site.fleet.start("desk", "go", run_id=run, key=f"customer {run[0]}")
    for run in runs:
        await site.until(run, "completed", 40)
    lines = ledger.lines()
    assert sorted(run for run, step, _ in lines if step == "begin") == sorted(runs)
    for key in ("a", "b"):
        mine = [step for run, step, _ in lines if run[0] == key]
        assert mine == ["begin", "end"] * 4
    workers = {r.worker for run in runs for r in await site.records(run) if isinstance(r, Claim)}
    assert len(workers) <= 2


# ---- children (R57) -----------------------------------------------------------------------------


def family(kid: Agent) -> tuple[Agent, Agent]:
    @turn("parent", retry=Retry(attempts=1))
    async def parent(ctx: Context) -> Next:
        child: Any = ctx.load_checkpoint()
        if child is None:
            child = await ctx.spawn("kid", ctx.input, name="kid")
            return Continue(state=child, until_child=child)
        return Complete(await ctx.child(child))

    return parent, kid


async def test_a_childs_end_wakes_its_parent(site: Site):
    @turn("kid")
    async def kid(ctx: Context) -> Next:
        value: Any = ctx.input
        return Complete({"twice": value * 2}) if value else Fail(reason="nothing_to_do")

    await site.worker(*family(kid))
    for run, value in (("good", 21), ("bad", 0)):
        await site.fleet.start("parent", value, run_id=run)
    good = (await site.until("good", "completed")).outcome
    assert isinstance(good, Completed) and good.message.content == {"twice": 42}
    bad = (await site.until("bad", "failed")).outcome
    assert isinstance(bad, Failed)
    assert (bad.reason, "nothing_to_do" in bad.detail) == ("child_failed", True)


async def test_a_cancelled_parent_cancels_the_call_that_its_child_makes(site: Site):
    door = Door()

    @turn("kid")
    async def kid(ctx: Context) -> Next:
        return Complete(await ctx.model(door.through))

    await site.worker(*family(kid))
    await site.fleet.start("parent", 1, run_id="p")
    await asyncio.wait_for(door.reached.wait(), WAIT_S)
    await site.fleet.cancel("p", reason="enough")
    await site.until("p", "cancelled")
    assert isinstance((await site.until("p.kid", "cancelled")).outcome, Cancelled)
    assert door.cut.is_set()


async def test_a_parent_whose_childs_end_was_never_told_is_found_by_the_sweep(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    """Its holder died between the child's last record and the signal."""

    @turn("kid")
    async def kid(ctx: Context) -> Next:
        return Complete("from the kid")

    async def dies(log: Log) -> None:
        raise Died

    class Died(Exception):
        pass

    parent, _ = family(kid)
    await site.worker(parent)
    await site.fleet.start("parent", 1, run_id="p")
    await site.until("p", "waiting")
    monkeypatch.setattr(runner, "pay", dies)
    with pytest.raises(Died):
        await runner.run(site.fleet.store, kid, "p.kid")
    assert (await site.fleet.get("p.kid")).status == "completed"
    assert (await site.fleet.get("p")).status == "waiting"
    found = (await site.until("p", "completed", 20)).outcome
    assert isinstance(found, Completed) and found.message.content == "from the kid"
    signals = [r for r in await site.records("p") if isinstance(r, Signal)]
    assert [r.name for r in signals] == ["child"]


async def test_depth_is_bounded_and_every_level_ends(site: Site):
    @turn("nest", retry=Retry(attempts=1))
    async def nest(ctx: Context) -> Next:
        child: Any = ctx.load_checkpoint()
        if child is None:
            child = await ctx.spawn("nest", "go", name="c")
            return Continue(state=child, until_child=child)
        return Complete(await ctx.child(child))

    await site.worker(nest)
    await site.fleet.start("nest", "go", run_id="n")
    found = (await site.until("n", "failed")).outcome
    assert isinstance(found, Failed) and found.reason == "child_failed"
    deepest = (await site.fleet.get("n.c.c.c")).outcome
    assert isinstance(deepest, Failed) and "levels deep" in deepest.detail


# ---- attempts, changed code, adoption -----------------------------------------------------------


async def test_a_handler_that_fails_is_tried_again_after_its_backoff_and_fails_for_good(site: Site):
    tries: list[int] = []
    mended: list[bool] = []

    @turn("desk", retry=Retry(attempts=2, backoff_s=0.5))
    async def desk(ctx: Context) -> Next:
        tries.append(ctx.attempt)
        if not mended:
            raise KeyError("the database is gone")
        return Complete("x")

    await site.worker(desk)
    await site.fleet.start("desk", "go", run_id="r")
    found = (await site.until("r", "failed")).outcome
    assert isinstance(found, Failed) and "the database is gone" in found.detail
    assert tries == [1, 2]
    mended.append(True)
    await site.fleet.resume("r")
    await site.until("r", "completed")
    assert tries == [1, 2, 1]


async def test_a_run_whose_code_changed_is_paused_until_the_old_code_is_back(site: Site):
    calls: list[str] = []
    door = Door()

    def version(tool: str, *, waits: bool = False) -> Agent:
        @turn("desk")
        async def desk(ctx: Context) -> Next:
            async def fn(call: ToolCall) -> Any:
                calls.append(call.name)
                return "x"

            await ctx.tool(Call(name=tool, input=None, fn=fn, replay=UNSAFE))
            if waits:
                await ctx.model(door.through)
            return Complete("x")

        return desk

    first, task = await site.worker(version("pay", waits=True))
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.wait_for(door.reached.wait(), WAIT_S)
    first.force()
    await asyncio.wait([task])
    second, task = await site.worker(version("mail"))
    paused = await site.until("r", "paused")
    assert "0/0" in paused.waiting_on[0].ended_by
    records = paused.records
    await asyncio.sleep(1.5)
    assert (await site.fleet.get("r")).records == records  # no retry loop
    second.force()
    await asyncio.wait([task])
    door.open.set()
    await site.worker(version("pay", waits=True))
    await site.fleet.resume("r")
    await site.until("r", "completed")
    assert calls == ["pay"]


async def test_an_adopted_run_reuses_what_was_recorded_and_keeps_its_attempt(site: Site):
    calls: list[str] = []
    door, attempts = Door(), list[int]()

    def agent() -> Agent:
        @turn("desk")
        async def desk(ctx: Context) -> Next:
            attempts.append(ctx.attempt)

            async def ask() -> Any:
                calls.append("ask")
                return "asked"

            async def fn(call: ToolCall) -> Any:
                calls.append(call.name)
                return "x"

            asked = await ctx.model(ask)
            await ctx.tool(Call(name="pay", input=1, fn=fn, replay=UNSAFE))
            await ctx.model(door.through)
            return Complete(asked)

        return desk

    _, task = await site.worker(agent())
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.wait_for(door.reached.wait(), WAIT_S)
    task.cancel()  # as if it had died: nothing is released
    await asyncio.wait([task])
    door.open.set()
    await site.worker(agent())
    found = (await site.until("r", "completed")).outcome
    assert isinstance(found, Completed) and found.message.content == "asked"
    assert (calls, attempts) == (["ask", "pay"], [1, 1])
    reasons = [r.reason for r in await site.records("r") if isinstance(r, Claim)]
    assert reasons[0] == "new" and reasons[1] in ("adopted", "redelivery")


async def test_a_turn_timeout_is_a_failed_attempt_on_a_worker(site: Site):
    @turn("desk", bounds=Bounds(turn_timeout_s=0.3), retry=Retry(backoff_s=0.1))
    async def desk(ctx: Context) -> Next:
        if ctx.attempt == 1:
            await asyncio.Event().wait()
        return Complete(ctx.attempt)

    await site.worker(desk)
    await site.fleet.start("desk", "go", run_id="r")
    await site.until("r", "completed")
    (park,) = [r for r in await site.records("r") if isinstance(r, Park)]
    assert (park.why, park.afresh, "longer than 0.3 s" in park.reason) == ("retry", True, True)


async def test_the_duration_ends_a_run_that_waits_by_its_timer(site: Site):
    @turn("desk", bounds=Bounds(duration_s=1.0))
    async def desk(ctx: Context) -> Next:
        async def fn(call: ToolCall) -> Any:
            return "x"

        if ctx.input == "input":
            return Continue(until_input=True)
        await ctx.tool(Call(name="pay", input=1, fn=fn, replay=UNSAFE, approval="Pay?"))
        return Complete("x")

    await site.worker(desk, sweep_s=3600)
    for run in ("input", "approval"):
        await site.fleet.start("desk", run, run_id=run)
    for run in ("input", "approval"):
        found = (await site.until(run, "failed")).outcome
        assert isinstance(found, Failed) and found.reason == "duration"


# ---- long runs (R41) ----------------------------------------------------------------------------


async def test_a_long_run_is_taken_up_from_its_last_commit(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    rounds, door, seen = 45, Door(), list[int]()

    def agent() -> Agent:
        tools: list[Tool] = []

        @read
        async def look(q: str) -> str:
            seen.append(len(seen))
            if len(seen) == rounds - 5:
                await door.through()
            return "found"

        tools.append(look)
        model = ScriptedModel(*[call("look", q="x")] * rounds, say("Done."))
        return Agent("desk", model=model, tools=tools)

    _, task = await site.worker(agent())
    await site.fleet.start("desk", "go", run_id="r")
    await asyncio.wait_for(door.reached.wait(), 60)
    total = (await site.fleet.get("r")).records
    task.cancel()
    await asyncio.wait([task])
    door.open.set()
    loads: list[int] = []
    real = JetStreamStore.resume

    async def resume(self: JetStreamStore, run_id: RunId) -> Any:
        loaded = await real(self, run_id)
        loads.append(len(loaded.entries))
        return loaded

    monkeypatch.setattr(JetStreamStore, "resume", resume)
    resumed = await Log.resumed(site.fleet.store, RunId("r"), by="test")
    full = await Log.read(site.fleet.store, RunId("r"))
    assert loads[0] < 2 + 2 * 32 + 8 < total
    for part in ("n", "head", "iteration", "state", "committed", "model_calls", "revision"):
        assert getattr(resumed.fold, part) == getattr(full.fold, part), part
    assert set(resumed.fold.steps) == set(full.fold.steps)
    await site.worker(agent())
    found = (await site.until("r", "completed", 60)).outcome
    assert isinstance(found, Completed) and found.message.content == "Done."
    assert max(loads) < 2 + 2 * 32 + 8
    assert len(seen) == rounds + 1  # the one that was cut off, again
    starts = [r for r in await site.records("r") if isinstance(r, StepStarted)]
    assert len({r.step for r in starts}) == 2 * rounds + 1
