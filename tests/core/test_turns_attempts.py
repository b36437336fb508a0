"""Turn handlers: attempts, the retry policy, another try, and bounds (R44, R47, R52)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Killed,
    Log,
    PlainView,
    approved,
    asked_for,
    claimed,
    folded,
    parked,
    rejected,
    started,
    types_of,
)
from kit.deadlines import deadlines_passed
from kit.turns import Clock, World, agent_of, begun, ended, work

from journal.doors import signal, state, submit
from journal.errors import StepFailed, ToolError
from journal.messages import JSON
from journal.positions import decided
from journal.records import Commit, Park, StepError
from journal.steps import make_call
from journal.terms import Bounds, Complete, Continue, Fail, Next, Pause, Retry
from journal.views import AwaitingApproval, Failed, Indeterminate, RunState, Waiting
from worker.agent import Agent
from worker.context import Call, Context, ToolResult
from worker.runner import run
from worker.tools import SAFE, UNSAFE, ToolCall

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
NOW_S = 0.05  # a time limit that is meant to pass


async def until_over(
    store: FaultyStore, agent: Agent, clock: Clock, tries: int = 20
) -> tuple[RunState, list[float]]:
    """Work the run, passing each wait for a time, until it ends or waits for somebody; with the
    seconds of the waits."""
    waits: list[float] = []
    for _ in range(tries):
        found = await work(store, agent, clock=clock)
        (on, *more) = found.waiting_on or [None]
        if on is None or on.what != "timer" or more or on.until is None:
            return found, waits
        waits.append(round((on.until - clock.now).total_seconds(), 2))
        clock.now = on.until
    raise AssertionError(f"not over after {waits}")


class Flaky:
    """A handler that asks, looks, pays, mails, and then fails `fails` times."""

    def __init__(self, fails: int, **options: Any) -> None:
        self.world = World()
        self.fails = fails
        self.attempts: list[int] = []
        self.results: list[Any] = []

        async def handler(ctx: Context) -> Next:
            self.attempts.append(ctx.attempt)
            asked = await ctx.model(self.world.does("ask"))
            looked = await ctx.tool(self.world.call("look", safe=True))
            paid = await ctx.tool(self.world.call("pay", 10))
            again = await ctx.tool(self.world.call("pay", 10))
            self.results.append([asked, looked.output, paid.output, again.output])
            if len(self.attempts) <= self.fails:
                raise KeyError(f"failure {len(self.attempts)}")
            return Complete(self.results[-1])

        self.agent = agent_of(handler, **options)


# ---- attempts (R44) -----------------------------------------------------------------------------


async def test_an_exception_raises_the_attempt_which_asks_afresh_and_honours_what_was_written():
    store, flaky, clock = await begun(), Flaky(fails=2), Clock()
    found, waits = await until_over(store, flaky.agent, clock)
    assert found.outcome == ended(["ask 3", "look 3", "pay 1", "pay 2"])
    assert (flaky.attempts, waits) == ([1, 2, 3], [1.0, 2.0])
    calls = flaky.world.calls
    assert [calls.count(name) for name in ("ask", "look", "pay")] == [3, 3, 2]
    assert found.model_calls == 3


async def test_the_parks_between_attempts_say_what_failed():
    store, flaky, clock = await begun(), Flaky(fails=2), Clock()
    waits = await work(store, flaky.agent, clock=clock)
    assert (waits.status, waits.attempt) == ("waiting", 2)
    assert "KeyError: 'failure 1'" in waits.waiting_on[0].ended_by
    assert not (await folded(store)).runnable()  # before its time nobody takes it up
    assert (await work(store, flaky.agent, clock=clock)).records == waits.records
    clock.passes(seconds=1)
    await work(store, flaky.agent, clock=clock)
    parks = [r for r in (await store.load(RUN)).records if isinstance(r, Park)]
    assert [(p.attempt, p.why, p.afresh) for p in parks] == [(1, "retry", True), (2, "retry", True)]


@pytest.mark.parametrize("attempts", [1, 2, 5])
async def test_after_the_last_attempt_the_run_has_failed(attempts: int):
    flaky = Flaky(fails=99, retry=Retry(attempts=attempts, backoff_s=10, backoff_max_s=40))
    store = await begun()
    found, waits = await until_over(store, flaky.agent, Clock())
    assert isinstance(found.outcome, Failed)
    assert found.outcome.reason == "step_failed"
    assert f"failure {attempts}" in found.outcome.detail
    assert flaky.attempts == list(range(1, attempts + 1))
    assert waits == [10.0, 20.0, 40.0, 40.0][: attempts - 1]
    assert flaky.world.calls.count("pay") == 2


async def test_resume_gives_a_failed_run_another_try_that_completes():
    flaky = Flaky(fails=3)
    store, clock = await begun(), Clock()
    found, _ = await until_over(store, flaky.agent, clock)
    assert isinstance(found.outcome, Failed)
    await signal(PlainView(store), RUN, "resume", {"reason": "mended"})
    found, waits = await until_over(store, flaky.agent, clock)
    assert found.outcome == ended(["ask 4", "look 4", "pay 1", "pay 2"])
    assert (flaky.attempts, waits) == ([1, 2, 3, 1], [])


async def test_a_try_after_resume_begins_from_the_same_checkpoint():
    seen: list[Any] = []

    async def handler(ctx: Context) -> Next:
        seen.append((ctx.load_checkpoint(), ctx.attempt))
        if ctx.load_checkpoint() is None:
            return Continue(state="second")
        if len(seen) < 3:
            return Fail(reason="quota", retriable=True)
        return Complete("done")

    store, agent = await begun(), agent_of(handler, retry=Retry(attempts=1))
    assert (await work(store, agent)).outcome == Failed("quota", "")
    await signal(PlainView(store), RUN, "resume", {})
    assert (await work(store, agent)).outcome == ended("done")
    assert seen == [(None, 1), ("second", 1), ("second", 1)]


async def test_a_resume_while_an_attempt_is_awaited_begins_it_at_once():
    store, flaky = await begun(), Flaky(fails=1, retry=Retry(backoff_s=3600, backoff_max_s=3600))
    await work(store, flaky.agent)
    await signal(PlainView(store), RUN, "resume", {})
    assert (await work(store, flaky.agent)).outcome is not None
    assert flaky.attempts == [1, 2]


async def test_a_permanent_failure_is_not_tried_again_and_not_reopened():
    async def handler(ctx: Context) -> Next:
        return Fail(reason="no_stock")

    store = await begun()
    assert (await work(store, agent_of(handler))).outcome == Failed("no_stock", "")
    assert (await state(PlainView(store), RUN)).attempt == 1


async def test_an_attempt_that_fails_by_its_return_counts_like_one_that_raises():
    async def handler(ctx: Context) -> Next:
        return Fail(reason="quota", retriable=True, detail="try later")

    found, waits = await until_over(await begun(), agent_of(handler), Clock())
    assert (found.outcome, waits) == (Failed("quota", "try later"), [1.0, 2.0])


@both
async def test_run_raises_a_failure_and_keeps_the_attempt_and_everything_recorded(shared: bool):
    store, flaky = FaultyStore(shared=shared), Flaky(fails=2)
    for n in (1, 2):
        with pytest.raises(StepFailed, match=f"failure {n}"):
            await run(store, flaky.agent, RUN, "go")
    assert await run(store, flaky.agent, RUN) == ended(["ask 1", "look 1", "pay 1", "pay 2"])
    assert (flaky.attempts, flaky.world.calls) == ([1, 1, 1], ["ask", "look", "pay", "pay"])


async def test_a_model_request_that_fails_ends_the_attempt():
    store, flaky = await begun(), Flaky(fails=0)
    flaky.world.raising["ask"] = OSError("503")
    waits = await work(store, flaky.agent)
    assert (waits.status, waits.attempt) == ("waiting", 2)
    assert "OSError: 503" in waits.waiting_on[0].ended_by


async def test_a_safe_call_that_fails_ends_the_attempt_and_is_made_again():
    store, flaky, clock = await begun(), Flaky(fails=0), Clock()
    flaky.world.raising["look"] = OSError("gone")
    waits = await work(store, flaky.agent, clock=clock)
    assert (waits.status, waits.attempt) == ("waiting", 2)
    flaky.world.raising.clear()
    found, _ = await until_over(store, flaky.agent, clock)
    assert found.outcome == ended(["ask 2", "look 2", "pay 1", "pay 2"])


async def test_a_declared_failure_of_an_earlier_attempt_is_honoured_too():
    store, world, clock, seen = await begun(), World(), Clock(), list[ToolResult]()
    world.raising["pay"] = ToolError("declined")

    async def handler(ctx: Context) -> Next:
        seen.append(await ctx.tool(world.call("pay")))
        if ctx.attempt < 3:
            raise KeyError
        return Complete("x")

    await until_over(store, agent_of(handler), clock)
    assert world.calls == ["pay"]
    assert seen == [ToolResult(error="declined")] * 3


async def test_an_honoured_call_is_matched_by_tool_input_and_occurrence_wherever_it_stands():
    store, world, clock, seen = await begun(), World(), Clock(), list[JSON]()

    async def handler(ctx: Context) -> Next:
        names = [("pay", 1), ("pay", 2), ("mail", 1), ("pay", 1)]
        if ctx.attempt == 2:
            names = [("mail", 1), ("pay", 2), ("new", 0), ("pay", 1), ("pay", 1), ("pay", 1)]
        got = [(await ctx.tool(world.call(name, input))).output for name, input in names]
        if ctx.attempt == 1:
            raise KeyError
        seen.extend(got)
        return Complete("x")

    await until_over(store, agent_of(handler), clock)
    assert seen == ["mail 1", "pay 2", "new 1", "pay 1", "pay 3", "pay 4"]
    assert world.calls == ["pay", "pay", "mail", "pay", "new", "pay"]


async def test_keys_differ_by_call_and_a_new_call_of_a_new_attempt_has_its_own():
    store, world, clock = await begun(), World(), Clock()

    async def handler(ctx: Context) -> Next:
        await ctx.tool(world.call("pay", 1))
        await ctx.tool(world.call("look", 1, safe=True))
        if ctx.attempt == 1:
            raise KeyError
        await ctx.tool(world.call("pay", 2))
        return Complete("x")

    await until_over(store, agent_of(handler), clock)
    pay, look, again, new = world.keys
    assert look == again  # the same call at the same place
    assert len({pay, look, new}) == 3


async def test_what_was_recorded_in_this_attempt_is_reused_when_it_is_cut_off():
    store, flaky, clock = await begun(), Flaky(fails=1), Clock()
    await work(store, flaky.agent, clock=clock)
    clock.passes(seconds=1)
    store.faults[store.appends + 5] = "killed after"  # its claim, ask, look: the last result
    with pytest.raises(Killed):
        await work(store, flaky.agent, clock=clock)
    found = await work(store, flaky.agent, clock=clock)
    assert found.outcome == ended(["ask 2", "look 2", "pay 1", "pay 2"])
    assert flaky.attempts == [1, 2, 2]


async def test_an_unknown_write_is_settled_before_its_attempt_can_fail():
    store, world, clock = await begun(), World(), Clock()
    world.raising["pay"] = OSError("cut")

    async def handler(ctx: Context) -> Next:
        result = await ctx.tool(world.call("pay"))
        if ctx.attempt == 1:
            raise KeyError
        return Complete(result.output)

    agent = agent_of(handler)
    asks = await work(store, agent, clock=clock)
    assert (asks.status, asks.attempt) == ("indeterminate", 1)
    assert isinstance(asks.outcome, Indeterminate)
    said = {"step": asks.outcome.step, "outcome": "done", "result": "P-7"}
    await signal(PlainView(store), RUN, "reconcile", said)
    found, _ = await until_over(store, agent, clock)
    assert (found.outcome, world.calls) == (ended("P-7"), ["pay"])


async def test_an_interrupted_write_of_an_earlier_attempt_is_interrupted_for_the_next():
    store, world, clock, seen = await begun(), World(), Clock(), list[ToolResult]()
    world.raising["pay"] = OSError("cut")

    async def handler(ctx: Context) -> Next:
        seen.append(await ctx.tool(world.call("pay", on_unknown="interrupt")))
        if ctx.attempt == 1:
            raise KeyError
        return Complete("x")

    found, _ = await until_over(store, agent_of(handler), clock)
    assert (found.outcome, world.calls) == (ended("x"), ["pay"])
    assert seen == [ToolResult(interrupted=True)] * 2


async def test_restarts_over_the_limit_are_a_failed_attempt_and_call_nothing():
    store, world = await begun(), World()

    async def handler(ctx: Context) -> Next:
        world.calls.append("handler")
        store.faults[store.appends + 1] = "killed before"
        await ctx.model(world.does("ask"))
        return Complete("x")

    agent = agent_of(handler, retry=Retry(attempts=1))
    for _ in range(5):
        with pytest.raises(Killed):
            await work(store, agent)
    store.faults.clear()
    found = (await work(store, agent)).outcome
    assert isinstance(found, Failed) and found.reason == "restart_limit"
    assert world.calls == ["handler"] * 5
    assert (await folded(store)).can_reopen


# ---- inputs and attempts ------------------------------------------------------------------------


async def test_a_new_attempt_sees_the_inputs_that_were_placed_in_the_last_one():
    store, clock, seen = await begun(), Clock(), list[Any]()

    async def handler(ctx: Context) -> Next:
        inputs = await ctx.place_inputs("steer")
        seen.append([one.content for one in inputs])
        if ctx.attempt == 1:
            raise KeyError
        return Complete("x")

    await submit(PlainView(store), RUN, "hurry")
    await until_over(store, agent_of(handler), clock)
    assert seen == [["hurry"], ["hurry"]]


async def test_a_new_attempt_that_takes_another_way_sees_the_placed_inputs_all_the_same():
    """The model is asked afresh and may answer otherwise: the input is then placed and unseen."""
    store, clock, seen = await begun(), Clock(), list[Any]()

    async def handler(ctx: Context) -> Next:
        if ctx.attempt == 2:
            await ctx.tool(World().call("look", safe=True))
        inputs = await ctx.place_inputs("steer")
        seen.append([one.content for one in inputs])
        if ctx.attempt == 1:
            raise KeyError
        return Complete("x")

    await submit(PlainView(store), RUN, "hurry")
    await until_over(store, agent_of(handler), clock)
    assert seen == [["hurry"], ["hurry"]]


async def test_another_try_sees_the_inputs_that_were_placed_in_the_failed_one():
    store, seen = await begun(), list[Any]()

    async def handler(ctx: Context) -> Next:
        inputs = await ctx.place_inputs("steer")
        seen.append([one.content for one in inputs])
        return Fail(reason="quota", retriable=True) if len(seen) == 1 else Complete("x")

    agent = agent_of(handler, retry=Retry(attempts=1))
    await submit(PlainView(store), RUN, "hurry")
    await work(store, agent)
    await signal(PlainView(store), RUN, "resume", {})
    await work(store, agent)
    assert seen == [["hurry"], ["hurry"]]


# ---- bounds (R47) -------------------------------------------------------------------------------


@both
async def test_the_bound_of_iterations_ends_a_handler_that_never_ends(shared: bool):
    turns: list[int] = []

    async def handler(ctx: Context) -> Next:
        turns.append(ctx.iteration)
        assert len(turns) < 100
        return Continue()

    store = FaultyStore(shared=shared)
    agent = agent_of(handler, bounds=Bounds(iterations=5))
    for _ in range(2):
        outcome = await run(store, agent, RUN, "go")
        assert isinstance(outcome, Failed) and outcome.reason == "iterations"
    assert turns == [0, 1, 2, 3, 4]


async def test_the_bound_of_iterations_lets_a_run_end_in_the_last_one():
    async def handler(ctx: Context) -> Next:
        return Continue() if ctx.iteration < 4 else Complete("x")

    agent = agent_of(handler, bounds=Bounds(iterations=5))
    assert await run(FaultyStore(), agent, RUN, "go") == ended("x")


Turns = Callable[[Context], Awaitable[object]]


@pytest.mark.parametrize("swallowed", [False, True])
async def test_the_bound_of_calls_in_a_turn_ends_the_run(swallowed: bool):
    world = World()

    async def handler(ctx: Context) -> Next:
        try:
            for n in range(100):
                await ctx.tool(world.call("look", n, safe=True))
        except Exception:
            if not swallowed:
                raise
        return Complete("ignored")

    store = await begun()
    found = (await work(store, agent_of(handler, bounds=Bounds(calls_per_iteration=7)))).outcome
    assert isinstance(found, Failed) and found.reason == "calls_per_iteration"
    assert len(world.calls) == 7


async def test_parallel_calls_count_one_by_one_and_none_is_made_beyond_the_bound():
    world = World()

    async def handler(ctx: Context) -> Next:
        await ctx.parallel(*(world.call("look", n, safe=True) for n in range(8)))
        return Complete("x")

    found = (
        await work(await begun(), agent_of(handler, bounds=Bounds(calls_per_iteration=7)))
    ).outcome
    assert isinstance(found, Failed) and found.reason == "calls_per_iteration"
    assert world.calls == []


async def hangs(ctx: Context) -> object:
    return await asyncio.Event().wait()


async def hangs_in_a_model_call(ctx: Context) -> object:
    async def ask() -> JSON:
        await asyncio.Event().wait()

    return await ctx.model(ask)


async def hangs_in_a_safe_call(ctx: Context) -> object:
    async def look(call: ToolCall) -> JSON:
        await asyncio.Event().wait()

    return await ctx.tool(Call(name="look", input=None, fn=look, replay=SAFE))


async def swallows_its_cancellation(ctx: Context) -> object:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return None


HANGS: list[Turns] = [hangs, hangs_in_a_model_call, hangs_in_a_safe_call, swallows_its_cancellation]


@pytest.mark.parametrize("hang", HANGS)
async def test_a_turn_that_takes_too_long_is_a_failed_attempt(hang: Turns):
    async def handler(ctx: Context) -> Next:
        if ctx.attempt == 1:
            await hang(ctx)
        return Complete("in time")

    store, clock = await begun(), Clock()
    agent = agent_of(handler, bounds=Bounds(turn_timeout_s=NOW_S))
    waits = await work(store, agent, clock=clock)
    assert (waits.status, waits.attempt) == ("waiting", 2)
    assert "longer than 0.05 s" in waits.waiting_on[0].ended_by
    found, _ = await until_over(store, agent, clock)
    assert found.outcome == ended("in time")


def paying(policy: Any = "reconcile") -> tuple[Agent, list[str]]:
    calls: list[str] = []

    async def pay(call: ToolCall) -> JSON:
        calls.append("pay")
        await call.progress("half")
        await asyncio.Event().wait()

    async def handler(ctx: Context) -> Next:
        made = Call(name="pay", input=None, fn=pay, replay=UNSAFE, on_unknown=policy)
        result = await ctx.tool(made)
        return Complete([result.output, result.interrupted, result.partial])

    return agent_of(handler, bounds=Bounds(turn_timeout_s=NOW_S)), calls


async def test_a_turn_that_is_too_long_in_a_write_leaves_the_write_unknown():
    agent, calls = paying()
    store, clock = await begun(), Clock()
    found = (await work(store, agent, clock=clock)).outcome
    assert isinstance(found, Indeterminate)
    assert found.unknown[0].partial == "half"
    await signal(
        PlainView(store), RUN, "reconcile", {"step": found.step, "outcome": "done", "result": "P"}
    )
    assert (await work(store, agent, clock=clock)).outcome == ended(["P", False, None])
    assert calls == ["pay"]


async def test_a_write_that_the_end_of_its_turn_cut_off_is_settled_by_its_policy():
    agent, calls = paying("interrupt")
    store = await begun()
    found, _ = await until_over(store, agent, Clock())
    assert found.outcome == ended([None, True, "half"])
    assert calls == ["pay"]


DAY = timedelta(days=1)
WAITS: dict[str, Callable[[Context], Awaitable[Next]]] = {}


def waiting(make: Callable[[Context], Awaitable[Next]]) -> Callable[[Context], Awaitable[Next]]:
    WAITS[make.__name__] = make
    return make


@waiting
async def for_an_input(ctx: Context) -> Next:
    return Continue(until_input=True)


@waiting
async def for_a_day(ctx: Context) -> Next:
    return Continue(delay=DAY)


@waiting
async def for_an_operator(ctx: Context) -> Next:
    return Pause(reason="look")


@waiting
async def for_an_approval(ctx: Context) -> Next:
    await ctx.tool(World().call("pay", approval="Pay?"))
    return Complete("x")


@waiting
async def for_the_next_attempt(ctx: Context) -> Next:
    raise KeyError


@waiting
async def for_a_child(ctx: Context) -> Next:
    return Continue(until_child=await ctx.spawn("other", 1, name="kid"))


@pytest.mark.parametrize("case", WAITS)
async def test_the_duration_counts_while_a_run_waits_and_ends_it_by_its_timer(case: str):
    store, clock = await begun(), Clock()
    alarms: list[Any] = []

    async def wake_at(*args: Any, at: Any, **rest: Any) -> None:
        alarms.append(at)

    store.wake_at = wake_at  # type: ignore[method-assign]
    retry = Retry(backoff_s=86400, backoff_max_s=86400)
    agent = agent_of(WAITS[case], bounds=Bounds(duration_s=3600), retry=retry)
    waits = await work(store, agent, clock=clock)
    assert waits.outcome is not None
    (alarm,) = alarms
    started = (await folded(store)).started
    assert started is not None
    assert abs((alarm - clock.now).total_seconds() - 3600) < 2
    clock.passes(seconds=3500)
    assert not (await folded(store)).runnable(clock.now.isoformat())
    clock.now = alarm
    found = await work(store, agent, clock=clock)
    assert isinstance(found.outcome, Failed) and found.outcome.reason == "duration"


async def test_the_duration_cuts_a_turn_that_runs():
    async def handler(ctx: Context) -> Next:
        await asyncio.Event().wait()
        return Complete("x")

    outcome = await run(
        FaultyStore(), agent_of(handler, bounds=Bounds(duration_s=NOW_S)), RUN, "go"
    )
    assert isinstance(outcome, Failed) and outcome.reason == "duration"


async def test_a_run_that_is_over_before_it_begins_calls_nothing():
    store, clock, world = await begun(), Clock(), World()
    clock.passes(hours=2)

    async def handler(ctx: Context) -> Next:
        await ctx.model(world.does("ask"))
        return Complete("x")

    found = await work(store, agent_of(handler, bounds=Bounds(duration_s=3600)), clock=clock)
    assert isinstance(found.outcome, Failed) and found.outcome.reason == "duration"
    assert world.calls == []
    (commit,) = [r for r in (await store.load(RUN)).records if isinstance(r, Commit)]
    assert (commit.action, commit.reason) == ("fail", "duration")


async def test_a_run_does_not_end_by_its_duration_while_a_write_of_it_is_unknown():
    store, clock, world = await begun(), Clock(), World()
    world.raising["pay"] = OSError()

    async def handler(ctx: Context) -> Next:
        await ctx.tool(world.call("pay"))
        return Complete("x")

    agent = agent_of(handler, bounds=Bounds(duration_s=3600))
    await work(store, agent, clock=clock)
    clock.passes(hours=2)
    asks = await work(store, agent, clock=clock)
    assert isinstance(asks.outcome, Indeterminate)
    said = {"step": asks.outcome.step, "outcome": "done", "result": 1}
    await signal(PlainView(store), RUN, "reconcile", said)
    found = await work(store, agent, clock=clock)
    assert isinstance(found.outcome, Failed) and found.outcome.reason == "duration"


# ---- approval (R31, R32) ------------------------------------------------------------------------


class Gated:
    """A handler that pays, gated by `text`, beside a read."""

    def __init__(self, **options: Any) -> None:
        self.world = World()
        self.text: str | None = "Pay 10?"
        self.input: JSON = 10
        self.tool = "pay"
        self.fails = 0
        self.results: list[ToolResult] = []

        async def handler(ctx: Context) -> Next:
            looked, result = await ctx.parallel(
                self.world.call("look", safe=True),
                self.world.call(self.tool, self.input, approval=self.text),
            )
            self.results.append(result)
            if len(self.results) <= self.fails:
                raise KeyError
            return Complete([looked.output, result.output, result.error])

        self.agent = agent_of(handler, **options)


def pending(outcome: object) -> list[tuple[str, str, JSON, str]]:
    assert isinstance(outcome, AwaitingApproval)
    return [(one.step, one.tool, one.input, one.text) for one in outcome.pending]


async def decide(store: FaultyStore, outcome: object, name: str = "approve", **more: str) -> None:
    assert isinstance(outcome, AwaitingApproval)
    for one in outcome.pending:
        await signal(PlainView(store), RUN, name, {"marker": one.marker, **more})


@both
async def test_a_gated_call_parks_the_run_and_an_approval_makes_it_once(shared: bool):
    store, gated = FaultyStore(shared=shared), Gated()
    for _ in range(2):
        asks = await run(store, gated.agent, RUN, "go")
        assert pending(asks) == [("0/1", "pay", 10, "Pay 10?")]
    assert gated.world.calls == ["look"]  # what needs nobody is made first
    records = len(await types_of(store))
    assert (await state(PlainView(store), RUN)).records == records
    await decide(store, asks)
    for _ in range(2):
        assert await run(store, gated.agent, RUN) == ended(["look 1", "pay 1", None])
    assert gated.world.calls == ["look", "pay"]


@both
async def test_a_rejected_call_is_never_made_and_the_handler_gets_the_reason(shared: bool):
    store, gated = FaultyStore(shared=shared), Gated()
    await decide(store, await run(store, gated.agent, RUN, "go"), "reject", reason="too much")
    assert await run(store, gated.agent, RUN) == ended(["look 1", None, "too much"])
    assert gated.world.calls == ["look"]
    step = (await folded(store)).steps["0/1"]
    assert (step.starts, step.completed.via if step.completed else None) == ([], "refused")


@both
async def test_a_rejected_call_is_not_made_by_code_that_asks_nobody_any_more(shared: bool):
    store, gated = FaultyStore(shared=shared), Gated()
    await decide(store, await run(store, gated.agent, RUN, "go"), "reject", reason="too much")
    gated.text = None
    assert await run(store, gated.agent, RUN) == ended(["look 1", None, "too much"])
    assert gated.world.calls == ["look"]


def test_a_rejection_that_comes_after_the_claim_binds_code_that_asks_nobody_too():
    """Of two that a person was asked about, the other one woke the run."""
    one, other = asked_for("0/0"), asked_for("0/1", digest="1" * 16)
    log = Log(started(), claimed(), parked("approval", asks=(one, other)))
    for body in (approved(one.marker), claimed("w2"), rejected(other.marker, "too much")):
        log.add(body)
    first, second = (make_call(step, "tool", "pay", None, unsafe=True) for step in ("0/0", "0/1"))
    assert decided(log.fold, first, None) == 0
    assert decided(log.fold, second, None) == StepError(type="rejected", message="too much")


@both
@pytest.mark.parametrize("change", ["text", "input", "tool"])
async def test_an_approval_covers_only_what_was_shown(shared: bool, change: str):
    store, gated = FaultyStore(shared=shared), Gated()
    await decide(store, await run(store, gated.agent, RUN, "go"))
    setattr(gated, change, {"text": "Pay 1000?", "input": 1000, "tool": "transfer"}[change])
    async with asyncio.timeout(20):
        asks = await run(store, gated.agent, RUN)
    expected = ("0/1", gated.tool, gated.input, gated.text)
    assert pending(asks) == [expected]
    assert gated.world.calls == ["look"]
    await decide(store, asks)
    assert isinstance(await run(store, gated.agent, RUN), type(ended("")))
    assert gated.world.calls == ["look", gated.tool]


async def test_a_new_attempt_asks_again_unless_the_call_was_made():
    store, gated, clock = await begun(), Gated(), Clock()
    gated.fails = 1
    first = await work(store, gated.agent, clock=clock)
    await decide(store, first.outcome)
    found, _ = await until_over(store, gated.agent, clock)
    assert found.outcome == ended(["look 2", "pay 1", None])  # it was made: its result is honoured

    store, gated, clock = await begun(), Gated(), Clock()
    first = await work(store, gated.agent, clock=clock)
    gated.world.raising["look"] = OSError()
    await decide(store, first.outcome, "reject")
    gated.fails = 1
    second, _ = await until_over(store, gated.agent, clock)  # refused in attempt 1
    assert isinstance(second.outcome, Waiting | Failed | AwaitingApproval)
    assert gated.world.calls.count("pay") == 0


async def test_a_marker_names_its_attempt():
    store, world, clock = await begun(), World(), Clock()
    markers: list[str] = []

    async def handler(ctx: Context) -> Next:
        if ctx.attempt == 1 and markers:
            raise KeyError
        await ctx.tool(world.call("pay", approval="Pay?"))
        return Complete("x")

    agent = agent_of(handler)
    for attempt in (1, 2):
        asks, _ = await until_over(store, agent, clock)
        assert isinstance(asks.outcome, AwaitingApproval)
        markers.append(asks.outcome.pending[0].marker)
        assert f"@{attempt}." in markers[-1]
        if attempt == 1:
            await decide(store, asks.outcome)
    assert markers[0] != markers[1]
    assert world.calls == []  # the approval of attempt 1 was not used for attempt 2
    await decide(store, asks.outcome)
    found, _ = await until_over(store, agent, clock)
    assert (found.outcome, world.calls) == (ended("x"), ["pay"])


@both
async def test_of_several_gated_calls_each_is_made_when_its_own_approval_is_there(shared: bool):
    store, world = FaultyStore(shared=shared), World()

    async def handler(ctx: Context) -> Next:
        results = await ctx.parallel(
            world.call("pay", 1, approval="Pay 1?"),
            world.call("look", safe=True),
            world.call("pay", 2, approval="Pay 2?"),
        )
        return Complete([result.output for result in results])

    agent = agent_of(handler)
    asks = await run(store, agent, RUN, "go")
    assert [step for step, *_ in pending(asks)] == ["0/0", "0/2"]
    assert isinstance(asks, AwaitingApproval)
    await signal(PlainView(store), RUN, "approve", {"marker": asks.pending[1].marker})
    asks = await run(store, agent, RUN)
    assert [step for step, *_ in pending(asks)] == ["0/0"]
    assert world.calls == ["look", "pay"]
    await decide(store, asks)
    assert await run(store, agent, RUN) == ended(["pay 2", "look 1", "pay 1"])


@both
async def test_an_approval_that_comes_as_the_run_stops_is_acted_on(shared: bool):
    """It lands between the decision to park and the park: one of the two loses (R61)."""
    store, gated = FaultyStore(shared=shared), Gated()
    other = Gated()
    asks = await run(FaultyStore(shared=shared), other.agent, RUN, "go")
    assert isinstance(asks, AwaitingApproval)
    real = store.append

    async def append(run_id: Any, entry: Any, *, expected: int) -> Any:
        if entry.type == "park":
            store.append = real  # type: ignore[method-assign]
            await signal(PlainView(store), RUN, "approve", {"marker": asks.pending[0].marker})
        return await real(run_id, entry, expected=expected)

    store.append = append  # type: ignore[method-assign]
    assert await run(store, gated.agent, RUN, "go") == ended(["look 1", "pay 1", None])
    assert "park" not in await types_of(store)


@both
async def test_a_crash_after_the_approval_was_used_makes_it_a_matter_for_a_person(shared: bool):
    store, gated = FaultyStore(shared=shared), Gated()
    await decide(store, await run(store, gated.agent, RUN, "go"))
    store.faults[store.appends + 1 + shared] = "killed after"  # the start of the payment
    with pytest.raises(Killed):
        await run(store, gated.agent, RUN)
    outcome = await run(store, gated.agent, RUN)
    assert isinstance(outcome, Indeterminate)
    assert gated.world.calls == ["look"]
    said = {"step": outcome.step, "outcome": "retry"}
    await signal(PlainView(store), RUN, "reconcile", said)  # covers the approval, too (R22)
    with deadlines_passed():
        assert await run(store, gated.agent, RUN) == ended(["look 1", "pay 1", None])
