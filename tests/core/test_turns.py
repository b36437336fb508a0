"""Turn handlers (R40-R43, R46): what a handler may rely on, whatever befalls the run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kit.build import RUN, FaultyStore, Killed, PlainView, claimed, folded, types_of, write_as_other
from kit.turns import Clock, Handler, World, agent_of, begun, ended, work
from kit.waiting import eventually

from journal.doors import signal, state, submit
from journal.errors import (
    ConcurrentUse,
    Fenced,
    IndeterminateError,
    NotEncodable,
    ReplayMismatch,
    RunCancelled,
    RunfoldError,
    StepFailed,
    ToolError,
)
from journal.ids import RunId
from journal.messages import JSON, Message
from journal.records import Commit, StepProgress
from journal.stepping import Draining
from journal.stores.file import FileStore
from journal.terms import Complete, Continue, Fail, Next, Pause, Retry
from journal.views import Completed, Failed, Indeterminate, Outcome, Waiting
from journal.waits import instant_text
from worker.context import Call, Context, ToolResult
from worker.runner import run
from worker.tools import SAFE, UNSAFE, ToolCall

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
HOUR = timedelta(hours=1)


# ---- what a turn may return (R40, R41) ----------------------------------------------------------


@both
async def test_a_handler_that_journals_nothing_runs_as_a_plain_task(shared: bool):
    async def handler(ctx: Context) -> Next:
        return Complete({"echo": ctx.input})

    store = FaultyStore(shared=shared)
    for _ in range(2):
        assert await run(store, agent_of(handler), RUN, {"a": 1}) == ended({"echo": {"a": 1}})
    expected = ["run.started", "claim", "run.completed"] if shared else ["run.started"]
    assert (await types_of(store))[: len(expected)] == expected
    assert (await types_of(store))[-1] == "run.completed"
    assert store.appends == (3 if shared else 2)


async def test_a_handler_runs_on_a_directory_too(tmp_path: Path):
    world = World()

    async def handler(ctx: Context) -> Next:
        seen: Any = ctx.load_checkpoint()
        if seen is None:
            return Continue(state=[await ctx.model(world.does("ask"))])
        result = await ctx.tool(world.call("pay", 10))
        return Complete([*seen, result.output])

    store, agent = FileStore(tmp_path), agent_of(handler)
    for _ in range(2):
        assert await run(store, agent, RUN, "go") == ended(["ask 1", "pay 1"])
    assert world.calls == ["ask", "pay"]


@both
async def test_the_next_turn_begins_from_the_committed_state(shared: bool):
    seen: list[Any] = []

    async def handler(ctx: Context) -> Next:
        seen.append((ctx.iteration, ctx.attempt, ctx.load_checkpoint(), ctx.input))
        if ctx.iteration < 3:
            return Continue(state={"turn": ctx.iteration})
        return Complete("over")

    store = FaultyStore(shared=shared)
    assert await run(store, agent_of(handler), RUN, "go") == ended("over")
    states = [None, {"turn": 0}, {"turn": 1}, {"turn": 2}]
    assert seen == [(n, 1, states[n], "go") for n in range(4)]
    commits = [r for r in (await store.load(RUN)).records if isinstance(r, Commit)]
    assert [(c.iteration, c.action) for c in commits] == [(n, "continue") for n in range(3)]


@both
async def test_a_message_as_the_answer_is_the_runs_message(shared: bool):
    async def handler(ctx: Context) -> Next:
        return Complete(Message(role="assistant", content=["a", 1]))

    assert await run(FaultyStore(shared=shared), agent_of(handler), RUN, "go") == ended(["a", 1])


@both
async def test_a_failure_ends_the_run_with_its_reason(shared: bool):
    async def handler(ctx: Context) -> Next:
        return Fail(reason="no_stock", detail="none left")

    store = FaultyStore(shared=shared)
    for _ in range(2):
        assert await run(store, agent_of(handler), RUN, "go") == Failed("no_stock", "none left")
    with pytest.raises(RunfoldError):
        await signal(store, RUN, "resume", {})


@both
async def test_a_pause_waits_for_resume_and_goes_on_from_its_state(shared: bool):
    async def handler(ctx: Context) -> Next:
        seen: Any = ctx.load_checkpoint()
        return Complete(seen) if seen else Pause(reason="check the printer", state={"page": 3})

    store, agent = FaultyStore(shared=shared), agent_of(handler)
    for _ in range(2):
        outcome = await run(store, agent, RUN, "go")
        assert isinstance(outcome, Waiting)
        assert [on.what for on in outcome.on] == ["operator"]
        assert "check the printer" in outcome.on[0].ended_by
    assert (await state(PlainView(store), RUN)).status == "paused"
    await signal(PlainView(store), RUN, "resume", {})
    assert await run(store, agent, RUN) == ended({"page": 3})


async def test_a_pause_ends_at_its_instant_by_itself():
    clock = Clock()

    async def handler(ctx: Context) -> Next:
        return Complete("on") if ctx.iteration else Pause(reason="wait", until=clock.now + HOUR)

    store, agent = await begun(), agent_of(handler)
    paused = await work(store, agent, clock=clock)
    assert (paused.status, paused.waiting_on[-1].what) == ("paused", "timer")
    assert not (await folded(store)).runnable()
    clock.now += HOUR
    assert (await work(store, agent, clock=clock)).outcome == ended("on")


@pytest.mark.parametrize("delay", [timedelta(0), timedelta(seconds=-5), timedelta.min])
@both
async def test_a_delay_that_is_over_begins_the_next_turn_at_once(shared: bool, delay: timedelta):
    async def handler(ctx: Context) -> Next:
        return Complete("on") if ctx.iteration else Continue(delay=delay)

    store = FaultyStore(shared=shared)
    assert await run(store, agent_of(handler), RUN, "go") == ended("on")
    assert (await types_of(store)).count("claim") == (1 if shared else 0)


NAIVE = datetime(2030, 1, 1)
FAR = datetime.max.replace(tzinfo=timezone(timedelta(hours=-5)))
REFUSED: dict[str, tuple[Next, str]] = {
    "an instant without a zone": (Continue(until=NAIVE), "time zone"),
    "a pause until one": (Pause(reason="x", until=NAIVE), "time zone"),
    "a delay behind all time": (Continue(delay=timedelta.max), "9999"),
    "a state that is no JSON": (Continue(state={1, 2}), "state"),
    "an answer that is no JSON": (Complete(object()), "answer"),
    "an instant behind all time": (Continue(until=FAR), "until"),
    "an answer that is half a text": (Complete("half \ud800"), "answer"),
}


@pytest.mark.parametrize("case", REFUSED)
@both
async def test_what_can_not_be_recorded_is_a_failure_that_says_what(shared: bool, case: str):
    outcome, text = REFUSED[case]

    async def handler(ctx: Context) -> Next:
        return outcome

    found = await run(FaultyStore(shared=shared), agent_of(handler), RUN, "go")
    assert isinstance(found, Failed)
    assert found.reason == "not_recordable"
    assert text in found.detail


@pytest.mark.parametrize("case", REFUSED)
async def test_a_worker_records_that_failure(case: str):
    async def handler(ctx: Context) -> Next:
        return REFUSED[case][0]

    store = await begun()
    found = (await work(store, agent_of(handler))).outcome
    assert isinstance(found, Failed) and found.reason == "not_recordable"


NONE: list[Any] = [
    Continue(delay=5),  # type: ignore[arg-type]
    Continue(until="tomorrow"),  # type: ignore[arg-type]
    Continue(until_input="yes"),  # type: ignore[arg-type]
    Continue(until_child=7),  # type: ignore[arg-type]
    Fail(reason=None),  # type: ignore[arg-type]
    Pause(reason=5),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("value", [None, "done", Complete, {"state": 1}, *NONE], ids=repr)
async def test_a_turn_that_returns_nothing_of_use_is_a_failed_attempt(value: Any):
    async def handler(ctx: Context) -> Next:
        return value

    store = await begun()
    waits = await work(store, agent_of(handler))
    assert (waits.status, waits.attempt) == ("waiting", 2)
    assert type(value).__name__ in waits.waiting_on[0].ended_by
    with pytest.raises(StepFailed):
        await run(FaultyStore(), agent_of(handler), RUN, "go")


async def test_an_instant_far_away_or_in_another_zone_is_kept():
    clock = Clock()
    zone = datetime.now().astimezone().tzinfo
    until = (clock.now + timedelta(days=400_000)).astimezone(zone)

    async def handler(ctx: Context) -> Next:
        return Continue(until=until)

    waits = await work(await begun(), agent_of(handler), clock=clock)
    found = waits.waiting_on[0].until
    assert found is not None and abs(found - until) < timedelta(seconds=1)


@pytest.mark.parametrize(
    ("delay", "until_s"), [(HOUR, 60), (timedelta(minutes=1), 3600)], ids=["until", "delay"]
)
async def test_of_several_waits_the_first_one_counts(delay: timedelta, until_s: int):
    clock = Clock()
    until = clock.now + timedelta(seconds=until_s)

    async def handler(ctx: Context) -> Next:
        if ctx.iteration:
            return Complete("on")
        return Continue(delay=delay, until=until, until_input=True)

    store, agent = await begun(), agent_of(handler)
    waits = await work(store, agent, clock=clock)
    assert {on.what for on in waits.waiting_on} == {"timer", "input"}
    found = waits.waiting_on[0].until
    assert found is not None and abs(found - clock.now - timedelta(minutes=1)) < timedelta(
        seconds=1
    )
    await submit(PlainView(store), RUN, "hello")  # comes first
    assert (await folded(store)).runnable()
    assert (await work(store, agent, clock=clock)).outcome == ended("on")


# ---- everything recorded is reused (R42) --------------------------------------------------------


def errand(world: World) -> Handler:
    """Two turns with one of each call."""

    async def handler(ctx: Context) -> Next:
        if ctx.iteration == 0:
            asked = await ctx.model(world.does("ask"))
            (one,) = await ctx.place_inputs("steer")
            pair = await ctx.parallel(
                world.call("look", 1, safe=True), world.call("look", 2, safe=True)
            )
            paid = await ctx.tool(world.call("pay", {"to": "anna"}))
            child = await ctx.spawn("other", {"do": 1}, name="kid")
            return Continue(
                state=[asked, one.content, sorted(str(r.output) for r in pair), paid.output, child]
            )
        mailed = await ctx.tool(world.call("mail"))
        seen: Any = ctx.load_checkpoint()
        return Complete([*seen, mailed.output])

    return handler


DONE = ["ask 1", "hurry", ["look 1", "look 2"], "pay 1", "a1.kid", "mail 1"]
APPENDS = 16


async def errand_store(shared: bool) -> FaultyStore:
    store = await begun(shared=shared)
    await submit(PlainView(store), RUN, "hurry", request_id="i1")
    return store


@both
async def test_the_errand_makes_each_call_once(shared: bool):
    store, world = await errand_store(shared), World()
    for _ in range(3):
        assert await run(store, agent_of(errand(world)), RUN) == ended(DONE)
    assert sorted(world.calls) == ["ask", "look", "look", "mail", "pay"]
    assert store.appends == APPENDS + shared
    fold = await folded(store)
    assert fold.inputs["i1"].status == "done"


@both
@pytest.mark.parametrize("fault", ["killed before", "killed after", "ack lost", "lost"])
@pytest.mark.parametrize("at", range(1, APPENDS + 1))
async def test_a_run_that_is_cut_off_anywhere_reuses_what_was_recorded(
    shared: bool, fault: Any, at: int
):
    store, world = await errand_store(shared), World()
    agent = agent_of(errand(world))
    store.faults[at] = fault
    try:
        outcome: Outcome = await run(store, agent, RUN)
    except (Killed, Fenced):  # Fenced: beside a parallel call that died
        recorded = {
            step.starts[0].tool or "ask"
            for step in (await folded(store)).steps.values()
            if step.completed is not None
        }
        before = list(world.calls)
        outcome = await run(store, agent, RUN)
        again = set(world.calls[len(before) :]) & set(before)
        assert not (again & recorded - {"look"})  # two looks have one name
    if isinstance(outcome, Indeterminate):
        assert world.calls[-1] in ("pay", "mail") or fault == "killed after"
        tool = outcome.unknown[0].tool
        said = {"step": outcome.step, "outcome": "done", "result": f"{tool} 1"}
        await signal(PlainView(store), RUN, "reconcile", said)
        outcome = await run(store, agent, RUN)
    assert isinstance(outcome, Completed)
    content: Any = outcome.message.content
    assert (content[1], content[3:]) == ("hurry", DONE[3:])
    assert max(world.calls.count("pay"), world.calls.count("mail")) <= 1
    assert await types_of(store, "a1.kid") == ["run.started"]


async def test_a_release_in_between_keeps_the_attempt_and_what_is_recorded():
    store, world, turns = await begun(), World(), list[int]()

    async def handler(ctx: Context) -> Next:
        turns.append(ctx.attempt)
        asked = await ctx.model(world.does("ask"))
        if len(turns) < 4:
            ctx.journal.stop = "drain"
        await ctx.heartbeat()
        return Complete(asked)

    agent = agent_of(handler)
    for _ in range(3):
        with pytest.raises(Draining):
            await run(store, agent, RUN)
    assert await run(store, agent, RUN) == ended("ask 1")
    assert (turns, world.calls) == ([1, 1, 1, 1], ["ask"])


async def test_a_failed_model_request_records_nothing_and_is_asked_again():
    store, world = FaultyStore(), World()
    world.raising["ask"] = OSError("down")

    async def handler(ctx: Context) -> Next:
        return Complete(await ctx.model(world.does("ask")))

    with pytest.raises(RunfoldError, match="OSError: down"):
        await run(store, agent_of(handler), RUN, "go")
    assert await types_of(store) == ["run.started", "step.started"]
    world.raising.clear()
    assert await run(store, agent_of(handler), RUN) == ended("ask 2")


@both
async def test_a_tool_error_is_the_calls_result(shared: bool):
    store, world, seen = FaultyStore(shared=shared), World(), list[ToolResult]()
    world.raising["pay"] = ToolError("declined", {"code": 7})

    async def handler(ctx: Context) -> Next:
        seen.append(await ctx.tool(world.call("pay")))
        await ctx.heartbeat()
        return Pause(reason="look") if not ctx.iteration else Complete("x")

    await run(store, agent_of(handler), RUN, "go")
    assert seen == [ToolResult(error="declined", output={"code": 7})]
    assert world.calls == ["pay"]


async def test_progress_of_a_call_is_recorded_and_shown_once_the_call_is_unknown():
    store = FaultyStore()

    async def pay(call: ToolCall) -> JSON:
        await call.progress({"paid": 1})
        await call.progress({"paid": 2})
        raise OSError

    async def handler(ctx: Context) -> Next:
        await ctx.tool(Call(name="pay", input=None, fn=pay, replay=UNSAFE))
        return Complete("x")

    outcome = await run(store, agent_of(handler), RUN, "go")
    assert isinstance(outcome, Indeterminate)
    assert outcome.unknown[0].partial == {"paid": 2}
    outputs = [r.output for r in (await store.load(RUN)).records if isinstance(r, StepProgress)]
    assert outputs == [{"paid": 1}, {"paid": 2}]


async def test_previews_go_to_followers_and_are_no_records():
    store, shown = FaultyStore(), list[tuple[str, str]]()

    async def preview(run_id: str, text: str) -> None:
        shown.append((run_id, text))

    store.preview = preview  # type: ignore[method-assign, assignment]

    async def handler(ctx: Context) -> Next:
        await ctx.put_stream("Hel")
        await ctx.put_stream("lo")
        return Complete("Hello")

    assert await run(store, agent_of(handler), RUN, "go") == ended("Hello")
    assert shown == [(RUN, "Hel"), (RUN, "lo")]
    assert await types_of(store) == ["run.started", "run.completed"]


# ---- positions (R43) ----------------------------------------------------------------------------


async def old(ctx: Context, world: World) -> None:
    await ctx.tool(world.call("look", 1, safe=True))
    await ctx.tool(world.call("pay", 10))


async def another_kind(ctx: Context, world: World) -> None:
    await ctx.model(world.does("ask"))


async def another_tool(ctx: Context, world: World) -> None:
    await ctx.tool(world.call("mail", 1, safe=True))


async def another_input(ctx: Context, world: World) -> None:
    await ctx.tool(world.call("look", 2, safe=True))


async def another_order(ctx: Context, world: World) -> None:
    await ctx.tool(world.call("pay", 10))


async def a_child(ctx: Context, world: World) -> None:
    await ctx.spawn("other", 1, name="kid")


async def fewer_calls(ctx: Context, world: World) -> None:
    await ctx.tool(world.call("look", 1, safe=True))


async def no_calls(ctx: Context, world: World) -> None:
    pass


CHANGES: dict[str, tuple[Callable[[Context, World], Awaitable[None]], str]] = {
    "another kind": (another_kind, "0/0"),
    "another tool": (another_tool, "0/0"),
    "another input": (another_input, "0/0"),
    "another order": (another_order, "0/0"),
    "a child": (a_child, "0/0"),
    "fewer calls": (fewer_calls, "0/1"),
    "no calls": (no_calls, "0/0"),
}


class Version:
    """An agent whose code can be changed under its run; each turn ends by stopping there."""

    def __init__(self, code: Callable[[Context, World], Awaitable[None]] = old) -> None:
        self.world = World()
        self.code = code
        self.stops = True

        async def handler(ctx: Context) -> Next:
            await self.code(ctx, self.world)
            if self.stops:
                raise KeyError("the process is stopped here")
            return Complete("done")

        self.agent = agent_of(handler)


async def stopped_behind_two_calls(shared: bool) -> tuple[FaultyStore, Version]:
    store, version = FaultyStore(shared=shared), Version()
    with pytest.raises(RunfoldError, match="stopped here"):
        await run(store, version.agent, RUN, "go")
    assert version.world.calls == ["look", "pay"]
    version.stops = False
    return store, version


@both
@pytest.mark.parametrize("case", CHANGES)
async def test_changed_code_is_stopped_at_the_position_and_nothing_happens(shared: bool, case: str):
    store, version = await stopped_behind_two_calls(shared)
    version.code, position = CHANGES[case]
    steps = [t for t in await types_of(store) if t not in ("claim", "release")]
    for _ in range(2):
        with pytest.raises(ReplayMismatch) as raised:
            await run(store, version.agent, RUN)
        assert raised.value.position == position
        assert raised.value.recorded != raised.value.attempted
    assert version.world.calls == ["look", "pay"]
    assert [t for t in await types_of(store) if t not in ("claim", "release")] == steps
    version.code = old
    assert await run(store, version.agent, RUN) == ended("done")
    assert version.world.calls == ["look", "pay"]


@pytest.mark.parametrize("case", CHANGES)
async def test_a_worker_pauses_a_run_whose_code_changed_until_resume(case: str):
    store, version = await stopped_behind_two_calls(shared=True)
    version.code, position = CHANGES[case]
    for n in range(2):
        paused = await work(store, version.agent)
        assert (paused.status, paused.attempt) == ("paused", 1)
        (on,) = paused.waiting_on
        assert on.what == "operator"
        assert position in on.ended_by
        assert not (await folded(store)).runnable()  # no retry loop
        await signal(PlainView(store), RUN, "resume", {}, request_id=f"r{n}")
    version.code = old
    assert (await work(store, version.agent)).outcome == ended("done")
    assert version.world.calls == ["look", "pay"]


async def look_for_inputs_then_pay(ctx: Context, world: World) -> None:
    await ctx.place_inputs("steer")
    await ctx.tool(world.call("pay", 10))


async def test_inputs_in_the_place_of_a_call_are_a_mismatch():
    """Else the write behind it is made a second time."""
    store, version = FaultyStore(), Version(another_order)
    with pytest.raises(RunfoldError, match="stopped here"):
        await run(store, version.agent, RUN, "go")
    version.stops = False
    version.code = look_for_inputs_then_pay
    with pytest.raises(ReplayMismatch):
        await run(store, version.agent, RUN)
    assert version.world.calls == ["pay"]


async def test_a_call_that_moved_up_because_inputs_are_not_looked_for_is_a_mismatch():
    """Else the write is made a second time, at a position that the journal does not know."""
    store, version = FaultyStore(), Version(look_for_inputs_then_pay)
    with pytest.raises(RunfoldError, match="stopped here"):
        await run(store, version.agent, RUN, "go")
    version.stops = False
    version.code = another_order
    with pytest.raises(ReplayMismatch):
        await run(store, version.agent, RUN)
    assert version.world.calls == ["pay"]


async def test_a_mismatch_names_what_was_recorded_and_what_was_asked_for():
    store, version = await stopped_behind_two_calls(shared=False)
    version.code = another_tool
    with pytest.raises(ReplayMismatch) as raised:
        await run(store, version.agent, RUN)
    assert (raised.value.recorded, raised.value.attempted) == ("tool look 1", "tool mail 1")
    assert "old code" in raised.value.hint


# ---- engine errors (R23) ------------------------------------------------------------------------

Meets = Callable[[Context, World, FaultyStore], Awaitable[None]]


async def unknown(ctx: Context, world: World, store: FaultyStore) -> None:
    world.raising["pay"] = OSError()
    await ctx.tool(world.call("pay"))


async def mismatch(ctx: Context, world: World, store: FaultyStore) -> None:
    await ctx.tool(world.call("look", world.calls, safe=True))
    ctx._position = 0  # pyright: ignore[reportPrivateUsage]
    await ctx.tool(world.call("look", "another", safe=True))


async def fenced(ctx: Context, world: World, store: FaultyStore) -> None:
    await write_as_other(store, claimed("rival"))
    await ctx.tool(world.call("pay"))


async def cancelled(ctx: Context, world: World, store: FaultyStore) -> None:
    await signal(PlainView(store), RUN, "cancel", {"reason": "stop"})
    await ctx.tool(world.call("pay"))


async def drained(ctx: Context, world: World, store: FaultyStore) -> None:
    ctx.journal.stop = "drain"
    await ctx.tool(world.call("pay"))


async def gated(ctx: Context, world: World, store: FaultyStore) -> None:
    await ctx.tool(world.call("pay", approval="Pay?"))


ENGINE: dict[str, tuple[Meets, type[Exception] | None, str]] = {
    "unknown": (unknown, IndeterminateError, "indeterminate"),
    "mismatch": (mismatch, ReplayMismatch, "paused"),
    "fenced": (fenced, Fenced, "running"),
    "cancelled": (cancelled, RunCancelled, "cancelled"),
    "drained": (drained, Draining, "running"),
    "waits for approval": (gated, None, "awaiting_approval"),
}


@pytest.mark.parametrize("goes_on", ["returns", "raises", "calls on"])
@pytest.mark.parametrize("case", ENGINE)
async def test_nobody_goes_on_past_an_engine_error(case: str, goes_on: str):
    meets, error, status = ENGINE[case]
    store, world = await begun(), World()
    raised: list[Exception] = []

    async def handler(ctx: Context) -> Next:
        try:
            await meets(ctx, world, store)
        except Exception as met:
            raised.append(met)
        before = list(world.calls)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: ctx.model(world.does("ask")),
            lambda: ctx.tool(world.call("mail")),
            lambda: ctx.parallel(world.call("mail"), world.call("mail", 2)),
            lambda: ctx.place_inputs("steer"),
            lambda: ctx.spawn("other", 1, name="kid"),
            ctx.heartbeat,
            lambda: ctx.put_stream("x"),
        ]
        for call in calls if goes_on == "calls on" else []:
            with pytest.raises(type(raised[0])) as again:
                await call()
            assert again.value is raised[0]
        assert world.calls == before
        if goes_on == "raises":
            raise ValueError("something else")
        return Complete("ignored")

    agent = agent_of(handler)
    if case in ("fenced", "drained"):
        with pytest.raises((Fenced, Draining)) as out:
            await work(store, agent)
        assert out.value is raised[0]
    else:
        await work(store, agent)
    assert len(raised) == 1
    assert error is None or isinstance(raised[0], error)
    assert (await state(PlainView(store), RUN)).status == status
    assert "run.completed" not in await types_of(store)
    assert {"mail", "ask"} & set(world.calls) == set()


@both
async def test_run_raises_a_mismatch_that_the_handler_swallowed(shared: bool):
    store, world = FaultyStore(shared=shared), World()

    async def handler(ctx: Context) -> Next:
        with contextlib.suppress(ReplayMismatch):
            await mismatch(ctx, world, store)
        return Complete("ignored")

    with pytest.raises(ReplayMismatch):
        await run(store, agent_of(handler), RUN, "go")


# ---- one task at a time (R46) -------------------------------------------------------------------


@both
async def test_two_tasks_that_use_one_context_at_once_are_told_so(shared: bool):
    store, go = FaultyStore(shared=shared), asyncio.Event()

    async def slow(call: ToolCall) -> JSON:
        go.set()
        await asyncio.sleep(0)
        return "slow"

    async def handler(ctx: Context) -> Next:
        first = asyncio.create_task(ctx.tool(Call(name="slow", input=None, fn=slow, replay=SAFE)))
        await go.wait()
        with pytest.raises(ConcurrentUse):
            await ctx.model(World().does("ask"))
        await first
        return Complete("never")

    with pytest.raises(ConcurrentUse):  # it stays the error of this turn
        await run(store, agent_of(handler), RUN, "go")
    assert "run.completed" not in await types_of(store)


async def test_a_call_whose_input_is_no_json_is_a_recorded_failure():
    async def handler(ctx: Context) -> Next:
        await ctx.tool(World().call("pay", object()))
        return Complete("x")

    outcome = await run(FaultyStore(), agent_of(handler), RUN, "go")
    assert isinstance(outcome, Failed) and outcome.reason == "not_recordable"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "\ud800"])
async def test_a_call_with_a_bad_name_fails_the_attempt_and_never_loops(name: str):
    async def handler(ctx: Context) -> Next:
        await ctx.tool(World().call(name))
        return Complete("x")

    waits = await work(await begun(), agent_of(handler))
    assert (waits.status, waits.attempt) == ("waiting", 2)


async def test_a_result_that_is_no_json_is_the_writes_recorded_failure():
    store = FaultyStore()
    calls: list[str] = []

    async def pay(call: ToolCall) -> Any:
        calls.append("pay")
        return {1, 2}

    async def handler(ctx: Context) -> Next:
        await ctx.tool(Call(name="pay", input=None, fn=pay, replay=UNSAFE))
        return Complete("x")

    for _ in range(2):
        outcome = await run(store, agent_of(handler), RUN, "go")
        assert isinstance(outcome, Failed) and outcome.reason == "not_recordable"
    assert calls == ["pay"]
    with pytest.raises(NotEncodable):
        await run(FaultyStore(), agent_of(handler), RUN, object())


# ---- what a handler leaves behind ---------------------------------------------------------------


@both
async def test_a_run_that_is_cancelled_from_outside_goes_on_later(shared: bool):
    store, world, reached = FaultyStore(shared=shared), World(), asyncio.Event()

    async def handler(ctx: Context) -> Next:
        asked = await ctx.model(world.does("ask"))
        if not reached.is_set():
            reached.set()
            await asyncio.Event().wait()
        return Complete(asked)

    task = asyncio.create_task(run(store, agent_of(handler), RUN, "go"))
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await run(store, agent_of(handler), RUN) == ended("ask 1")


@both
@pytest.mark.parametrize("then", ["returns", "calls on"])
async def test_a_write_that_the_handler_cut_off_itself_is_unknown(shared: bool, then: str):
    store, world = FaultyStore(shared=shared), World()

    async def pay(call: ToolCall) -> JSON:
        world.calls.append("pay")
        return await asyncio.Event().wait()

    async def handler(ctx: Context) -> Next:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await ctx.tool(Call(name="pay", input=None, fn=pay, replay=UNSAFE))
        if then == "calls on":
            await ctx.tool(world.call("mail"))
        return Complete("x")

    outcome = await run(store, agent_of(handler), RUN, "go")
    assert isinstance(outcome, Indeterminate)
    assert world.calls == ["pay"]


@both
async def test_a_write_that_the_handler_left_running_is_not_made_beside_itself(shared: bool):
    store, go, active, most = FaultyStore(shared=shared), asyncio.Event(), list[str](), list[int]()
    tasks: list[asyncio.Task[Any]] = []

    async def pay(call: ToolCall) -> JSON:
        active.append("pay")
        most.append(len(active))
        await go.wait()
        active.pop()
        return "paid"

    async def handler(ctx: Context) -> Next:
        call = ctx.tool(Call(name="pay", input=None, fn=pay, replay=UNSAFE))
        if not tasks:
            tasks.append(asyncio.create_task(call))
            while not active:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return Complete("left it behind")
        go.set()
        return Complete((await call).output)

    agent = agent_of(handler)
    running = asyncio.create_task(run(store, agent, RUN, "go"))
    for _ in range(1000):
        await asyncio.sleep(0)
    if running.done() and isinstance(outcome := running.result(), Indeterminate):
        said = {"step": outcome.step, "start": outcome.unknown[0].start, "outcome": "retry"}
        await signal(PlainView(store), RUN, "reconcile", said)
        with contextlib.suppress(RunfoldError):
            await run(store, agent, RUN)
    go.set()
    await asyncio.gather(running, *tasks, return_exceptions=True)
    assert max(most) == 1


async def test_a_context_that_outlives_its_turn_calls_nothing():
    store, world, kept = FaultyStore(), World(), list[Context]()

    async def handler(ctx: Context) -> Next:
        kept.append(ctx)
        if ctx.iteration:
            with pytest.raises(RunfoldError):
                await kept[0].tool(world.call("pay"))
            assert world.calls == []
        return Complete("x") if ctx.iteration else Continue()

    await run(store, agent_of(handler), RUN, "go")
    with pytest.raises(RunfoldError):
        await kept[0].tool(world.call("pay"))
    assert world.calls == []


async def test_a_wait_for_a_run_that_is_no_child_is_refused():
    """Nothing could ever end it."""

    async def handler(ctx: Context) -> Next:
        return Continue(until_child=RunId("somebody.else"))

    found = await work(await begun(), agent_of(handler, retry=Retry(attempts=1)))
    assert isinstance(found.outcome, Failed)


# ---- times, on `run()` --------------------------------------------------------------------------

SOON = timedelta(milliseconds=30)


async def pauses(ctx: Context) -> Next:
    return Complete("on") if ctx.iteration else Pause(reason="x", until=datetime.now(UTC) + SOON)


async def delays(ctx: Context) -> Next:
    return Complete("on") if ctx.iteration else Continue(delay=SOON, until_input=True)


async def fails(ctx: Context) -> Next:
    return Complete("on") if ctx.attempt > 1 else Fail(reason="quota", retriable=True)


@both
@pytest.mark.parametrize("handler", [pauses, delays, fails])
async def test_run_takes_a_run_up_whose_time_has_come_and_claims_it(shared: bool, handler: Handler):
    store, agent = FaultyStore(shared=shared), agent_of(handler, retry=Retry(backoff_s=0.03))
    assert isinstance(await run(store, agent, RUN, "go"), Waiting)
    await eventually(lambda: _due(store))
    assert await run(store, agent, RUN) == ended("on")
    types = await types_of(store)
    if shared:
        assert types == ["run.started", "claim", types[2], "claim", "run.completed"]


async def _due(store: FaultyStore) -> bool:
    return (await folded(store)).runnable(instant_text(datetime.now(UTC)))
