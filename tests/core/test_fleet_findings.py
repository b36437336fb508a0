"""What two reviews of handlers, attempts and the fleet found and is mended: one test a promise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Log,
    PlainView,
    VirtualTime,
    claimed,
    folded,
    start_of,
    started,
    types_of,
)
from kit.turns import Clock, World, agent_of, begun, ended, work

from journal.codec import Entry
from journal.doors import signal, start
from journal.errors import RunfoldError
from journal.handle import Journal
from journal.ids import RunId
from journal.limits import PROBE_RETRIES_MAX
from journal.messages import JSON
from journal.records import Park, Record, StepStarted
from journal.steps import CannotTell, DidNotHappen, Probed
from journal.store import AppendAnswer
from journal.terms import Complete, Continue, Next, Retry
from journal.views import Cancelled, Indeterminate, RunState
from worker.agent import Agent, turn
from worker.context import Call, Context
from worker.tools import SAFE, UNSAFE, ToolCall

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]

ONCE = Retry(attempts=1)
TICKS = 100  # of the loop: what takes long, in a test


class Hooked(FaultyStore):
    """A shared store that awaits `before` and `after` each append that it is given."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.before: Callable[[Record], Awaitable[None]] | None = None
        self.after: Callable[[Record], Awaitable[None]] | None = None

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        if self.before is not None:
            await self.before(entry.record)
        answer = await super().append(run_id, entry, expected=expected)
        if self.after is not None:
            await self.after(entry.record)
        return answer


async def hooked() -> Hooked:
    store = Hooked()
    await start(PlainView(store), "helpdesk", "go", run_id=RUN)
    return store


async def says(store: FaultyStore, name: str, **payload: JSON) -> None:
    await signal(PlainView(store), RUN, name, payload, worker=name == "late")


async def until_over(store: FaultyStore, agent: Agent, clock: Clock) -> RunState:
    """Work the run over its waits for a time until it has ended or waits for somebody."""
    for _ in range(20):
        found = await work(store, agent, clock=clock)
        if found.status != "waiting" or (until := found.waiting_on[0].until) is None:
            return found
        clock.now = max(clock.now, until)
    raise AssertionError("not over")


async def starts(store: FaultyStore) -> list[StepStarted]:
    return [r for r in (await store.load(RUN)).records if isinstance(r, StepStarted)]


# ---- what the next attempt honours --------------------------------------------------------------


@pytest.mark.parametrize("since", [1, 2])
async def test_a_write_with_a_safe_twin_before_it_is_honoured_by_the_next_attempt(since: int):
    store, world = await begun(), World()

    def put(effect: str, safe: bool) -> Call:
        async def fn(call: ToolCall) -> JSON:
            return await world.does(effect)()

        return Call(name="http", input=1, fn=fn, replay=SAFE if safe else UNSAFE)

    async def handler(ctx: Context) -> Next:
        if ctx.attempt >= since:
            await ctx.tool(put("read", safe=True))
        wrote = await ctx.tool(put("wrote", safe=False))
        if ctx.attempt == 1:
            raise ValueError
        return Complete(wrote.output)

    found = await until_over(store, agent_of(handler), Clock())
    assert found.outcome == ended("wrote 1")
    assert world.calls.count("wrote") == 1


class Permitted:
    """A run whose write got lost, was permitted to be made again, and was not yet: the turn
    fails before it comes to it. The next attempt comes to it at another position."""

    def __init__(self) -> None:
        self.world, self.clock, self.fails = World(), Clock(), False

        async def handler(ctx: Context) -> Next:
            if self.fails:
                raise ValueError
            if ctx.attempt > 1:
                await ctx.tool(self.world.call("look", safe=True))
            return Complete((await ctx.tool(self.world.call("pay"))).output)

        self.agent = agent_of(handler)

    async def store(self) -> FaultyStore:
        store = await begun()
        self.world.raising["pay"] = OSError("cut off")
        assert isinstance((await self.work(store)).outcome, Indeterminate)
        await says(store, "reconcile", step="0/0", outcome="retry")
        self.fails = True
        assert (await self.work(store)).attempt == 2
        self.fails = False
        self.world.raising.clear()
        self.clock.passes(seconds=2)
        return store

    async def work(self, store: FaultyStore) -> RunState:
        return await work(store, self.agent, clock=self.clock)


async def test_a_permitted_retry_still_waits_for_the_earlier_call_in_a_new_attempt():
    case = Permitted()
    store = await case.store()
    store.answers["w1"] = "yes"
    waits = await case.work(store)
    assert (waits.status, case.world.calls) == ("waiting", ["pay", "look"])
    store.answers["w1"] = "no"
    case.clock.now = waits.waiting_on[0].until or case.clock.now
    assert (await case.work(store)).outcome == ended("pay 2")


async def test_late_truth_about_an_earlier_attempts_permitted_write_is_its_result():
    case = Permitted()
    store = await case.store()
    (lost,) = await starts(store)
    await says(store, "late", step="0/0", start=lost.n, result="L")
    assert (await case.work(store)).outcome == ended("L")
    assert case.world.calls.count("pay") == 1


async def test_a_reconcile_without_a_start_is_refused_where_an_earlier_attempt_had_the_step():
    store, world, clock = await begun(), World(), Clock()
    world.raising = {"pay": OSError(), "mail": OSError()}

    async def handler(ctx: Context) -> Next:
        if ctx.attempt == 1:
            await ctx.tool(world.call("pay"))
            raise ValueError
        return Complete((await ctx.tool(world.call("mail"))).output)

    agent = agent_of(handler)
    assert isinstance((await work(store, agent, clock=clock)).outcome, Indeterminate)
    await says(store, "reconcile", step="0/0", outcome="done", result="paid")
    asked = (await until_over(store, agent, clock)).outcome
    assert isinstance(asked, Indeterminate)
    assert asked.step == "0/0"
    with pytest.raises(RunfoldError):  # said by somebody who still looks at the payment
        await says(store, "reconcile", step="0/0", outcome="done", result="paid")
    n = asked.unknown[0].start
    await says(store, "reconcile", step="0/0", outcome="done", result="mailed", start=n)
    assert (await work(store, agent, clock=clock)).outcome == ended("mailed")


# ---- keys ---------------------------------------------------------------------------------------


async def test_a_safe_call_keeps_its_key_over_attempts_and_a_resume():
    store, world, clock = await begun(), World(), Clock()

    async def handler(ctx: Context) -> Next:
        await ctx.tool(world.call("charge", 5, safe=True))
        if len(world.keys) < 3:
            raise ValueError
        return Complete("x")

    agent = agent_of(handler, retry=Retry(attempts=2, backoff_s=1))
    assert (await until_over(store, agent, clock)).status == "failed"
    await says(store, "resume")
    assert (await until_over(store, agent, clock)).outcome == ended("x")
    assert len(world.keys) == 3
    assert len(set(world.keys)) == 1


async def test_another_call_at_an_old_position_in_a_later_attempt_has_another_key():
    store, world = await begun(), World()

    async def handler(ctx: Context) -> Next:
        if ctx.attempt == 1:
            await ctx.model(world.does("ask"))
        await ctx.tool(world.call("pay"))
        if ctx.attempt == 1:  # the payment stands at 0/1; it is honoured at 0/0 the next time
            raise ValueError
        return Complete((await ctx.tool(world.call("pay"))).output)

    found = await until_over(store, agent_of(handler), Clock())
    assert found.outcome == ended("pay 2")
    assert len(set(world.keys)) == len(world.keys) == 2


# ---- probes -------------------------------------------------------------------------------------


def probing(world: World, probe: Callable[[str], Awaitable[Probed]]) -> Agent:
    async def handler(ctx: Context) -> Next:
        paid = await ctx.tool(world.call("pay", on_unknown="probe", probe=probe))
        return Complete(paid.output)

    return agent_of(handler)


async def cut_off_by_w0(**fields: Any) -> FaultyStore:
    log = Log(started("go"), claimed("w0"), start_of("0/0", "pay", **fields))
    return await log.store(FaultyStore(shared=True))


async def test_the_probe_is_asked_only_once_the_earlier_call_is_over():
    store, world, clock = await cut_off_by_w0(policy="probe"), World(), Clock()
    asked: list[str] = []

    async def probe(key: str) -> Probed:
        asked.append(key)
        return DidNotHappen()

    store.answers["w0"] = "yes"
    waits = await work(store, probing(world, probe), clock=clock)
    assert (waits.status, asked, world.calls) == ("waiting", [], [])
    store.answers["w0"] = "no"
    clock.now = waits.waiting_on[0].until or clock.now
    assert (await work(store, probing(world, probe), clock=clock)).outcome == ended("pay 1")
    assert len(asked) == 1


async def test_a_write_that_always_fails_is_probed_so_often_and_then_a_persons_matter():
    store, world = await begun(), World()
    world.raising["pay"] = ConnectionRefusedError("down")

    async def probe(key: str) -> Probed:
        return DidNotHappen()

    found = await work(store, probing(world, probe))
    assert isinstance(found.outcome, Indeterminate)
    assert len(world.calls) == 1 + PROBE_RETRIES_MAX


@pytest.mark.parametrize("word", ["late", "reconcile"])
async def test_a_word_that_comes_while_a_probe_is_asked_is_acted_on(word: str):
    store, world = await cut_off_by_w0(policy="probe"), World()
    store.answers["w0"] = "no"

    async def probe(key: str) -> Probed:
        more = {} if word == "late" else {"outcome": "done"}
        await says(store, word, step="0/0", start=3, result="R", **more)
        return CannotTell()

    assert (await work(store, probing(world, probe))).outcome == ended("R")
    assert world.calls == []


# ---- parallel writes ----------------------------------------------------------------------------


async def test_a_run_with_parallel_interrupt_writes_goes_on_after_a_crash_between_their_starts():
    log = Log(started("go"), claimed("w0"), start_of("0/0", "a", policy="interrupt"))
    store, world = Hooked(), World()
    await log.store(store)
    store.before = lambda record: asyncio.sleep(0)  # b meets a while a is being settled

    async def handler(ctx: Context) -> Next:
        calls = [world.call(name, on_unknown="interrupt") for name in ("a", "b")]
        return Complete([made.interrupted for made in await ctx.parallel(*calls)])

    assert (await work(store, agent_of(handler))).outcome == ended([True, False])
    assert world.calls == ["b"]


async def test_no_write_starts_beside_one_of_its_group_that_became_unknown():
    store, world = await hooked(), World()
    world.raising["a"] = OSError("cut off")

    async def handler(ctx: Context) -> Next:
        await ctx.parallel(*[world.call(name) for name in ("a", "b", "c")])
        return Complete("x")

    store.before = lambda record: asyncio.sleep(0)
    assert isinstance((await work(store, agent_of(handler))).outcome, Indeterminate)
    assert world.calls == ["a"]


async def test_two_doubted_steps_are_one_park():
    log = Log(started("go"), claimed("w0"))
    for step, tool in (("0/0", "a"), ("0/1", "b")):
        log.add(start_of(step, tool, unsafe=False))
    store, world = await log.store(FaultyStore(shared=True)), World()

    async def handler(ctx: Context) -> Next:
        await ctx.parallel(world.call("a"), world.call("b"))
        return Complete("x")

    found = (await work(store, agent_of(handler))).outcome
    assert isinstance(found, Indeterminate)
    assert [unknown.step for unknown in found.unknown] == ["0/0", "0/1"]
    assert (await types_of(store)).count("park") == 1
    assert world.calls == []


# ---- a start that is on its way -----------------------------------------------------------------


async def test_a_cancel_between_a_start_and_its_slow_acknowledgement_is_not_called_past(
    time: VirtualTime,
):
    store, world = await hooked(), World()

    async def after(record: Record) -> None:
        if isinstance(record, StepStarted):
            await says(store, "cancel")
            time.now += 25  # of the 30 s of the claim

    async def handler(ctx: Context) -> Next:
        await ctx.tool(world.call("pay"))
        return Complete("x")

    store.after = after
    await work(store, agent_of(handler))
    assert world.calls == []


async def test_a_handle_given_up_while_a_start_is_on_its_way_never_calls():
    store, world = await hooked(), World()
    journal = await Journal.open(store, RUN, is_write=lambda _: True, ack_wait_s=30)

    async def after(record: Record) -> None:
        if isinstance(record, StepStarted):
            journal.give_up()

    store.after = after
    with pytest.raises(RunfoldError):
        await journal.run_step("tool/1/0/pay", "tool", world.does("pay"), tool="pay")
    assert world.calls == []


async def test_a_turn_that_cuts_off_its_own_call_is_a_failed_attempt():
    store, world, clock = await hooked(), World(), Clock()
    reached, go = asyncio.Event(), asyncio.Event()

    async def before(record: Record) -> None:
        if isinstance(record, StepStarted):
            reached.set()
            await go.wait()

    async def handler(ctx: Context) -> Next:
        call = asyncio.create_task(ctx.tool(world.call("look", safe=True)))
        if ctx.attempt == 1:
            await reached.wait()
            call.cancel()
            go.set()
        await asyncio.gather(call, return_exceptions=True)
        return Complete("x")

    store.before = before
    waits = await work(store, agent_of(handler), clock=clock)
    assert (waits.status, waits.attempt) == ("waiting", 2)
    assert (await until_over(store, agent_of(handler), clock)).outcome == ended("x")
    assert (await folded(store)).restarts == 0


# ---- the end of a turn --------------------------------------------------------------------------


async def test_a_write_that_the_handler_did_not_await_ends_before_the_turns_record():
    store, order = await hooked(), list[str]()
    under_way = asyncio.Event()

    async def pay(call: ToolCall) -> JSON:
        under_way.set()
        for _ in range(TICKS):
            await asyncio.sleep(0)
        order.append("paid")
        return "paid"

    async def raises() -> None:
        await under_way.wait()
        raise ValueError

    async def handler(ctx: Context) -> Next:
        call = ctx.tool(Call(name="pay", input=None, fn=pay, replay=UNSAFE))
        await asyncio.gather(call, raises())
        return Complete("x")

    async def before(record: Record) -> None:
        if isinstance(record, Park):
            order.append(record.why)

    store.before = before
    await work(store, agent_of(handler))
    assert order[0] == "paid"
    assert len(order) == 2
    types = await types_of(store)
    assert types.index("step.completed") < types.index("park")


async def test_an_acknowledged_cancel_is_not_turned_into_a_failure():
    store, world = await begun(), World()

    async def handler(ctx: Context) -> Next:
        await says(store, "cancel", reason="stop")
        raise ValueError

    found = await work(store, agent_of(handler, retry=ONCE))
    assert isinstance(found.outcome, Cancelled)
    assert world.calls == []


async def test_no_request_id_of_a_person_stands_in_the_way_of_a_childs_end():
    store = await begun()

    async def handler(ctx: Context) -> Next:
        child: Any = ctx.load_checkpoint()
        if child is not None:
            return Complete(await ctx.child(child))
        child = await ctx.spawn("other", 1, name="kid")
        kept = {"marker": f"{RUN}/9/9@1.0123456789abcdef"}
        await signal(PlainView(store), RUN, "approve", kept, request_id=child)
        return Continue(state=child, until_child=child)

    @turn("other")
    async def other(ctx: Context) -> Next:
        return Complete("answer")

    await work(store, agent_of(handler))
    await work(store, other, run=f"{RUN}.kid")
    assert (await work(store, agent_of(handler))).outcome == ended("answer")
