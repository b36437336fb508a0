"""Guards of a worker that no other core test reaches: who may touch a task message, and when a run
is given up (R29, R49-R51). The queue and the store are plain recorders."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Killed,
    Log,
    PlainView,
    asking,
    asks,
    claimed,
    folded,
    model_start,
    parked,
    placed,
    reply_of,
    request,
    started,
    submitted,
    types_of,
    write_as_other,
)
from kit.turns import agent_of, begun

import journal.lease
from journal.claims import Delivery, Drop, Take, decide_task
from journal.codec import Damage
from journal.doors import submit
from journal.errors import Fenced, StaleSignal, StoreLocked, StoreUnavailable
from journal.handle import Journal
from journal.ids import RunId
from journal.lease import Lease
from journal.log import Log as RunLog
from journal.records import Claim, Release
from journal.stepping import Draining
from journal.stores.tasks import Task
from journal.terms import Complete, Continue, Next
from journal.waits import other_code_may
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.context import Call, Context
from worker.dispatch import Dispatcher
from worker.held import Held
from worker.runner import run
from worker.tools import UNSAFE, ToolCall, read, write

ACK_WAIT_S = 0.03


class Told:
    """Stands for a TaskQueue: what it was told about the message, in order."""

    def __init__(self, log: list[str] | None = None) -> None:
        self.log = [] if log is None else log

    def in_progress(self, task: Task) -> None:
        self.log.append("in_progress")

    def nak(self, task: Task, delay_s: float) -> None:
        self.log.append("nak")

    async def ack(self, task: Task) -> None:
        self.log.append("ack")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of leases."""
    clock = Clock()
    monkeypatch.setattr(journal.lease, "time", clock)
    return clock


def task_at(clock: Clock) -> Task:
    return Task(
        run_id=RUN,
        agent="helpdesk",
        cause=1,
        sequence=7,
        delivery=1,
        priority=0,
        pending=0,
        at=datetime.now(UTC),
        reply="",
        arrived=clock.now,
    )


def lease_of(told: Told, clock: Clock, ack_wait_s: float = 30) -> Lease:
    return Lease(told, task_at(clock), ack_wait_s)  # pyright: ignore[reportArgumentType]


# ---- who may touch the message ------------------------------------------------------------------


async def touch(lease: Lease) -> None:
    lease.hold()
    lease.nak()
    await lease.ack()


async def test_a_delivery_is_touched_for_half_the_ack_wait_and_again_once_it_is_renewed(
    clock: Clock,
):
    told = Told()
    lease = lease_of(told, clock)
    clock.now += 14.9
    lease.hold()
    clock.now += 14.9  # counted from when it was last held
    lease.hold()
    assert told.log == ["in_progress"] * 2
    clock.now += 15
    await touch(lease)
    assert told.log == ["in_progress"] * 2
    lease.renew(clock.now)
    await lease.ack()
    assert told.log == ["in_progress", "in_progress", "ack"]


@pytest.mark.parametrize("settled", ["left", "ack", "nak"])
async def test_a_message_that_was_left_or_settled_is_never_touched_again(
    clock: Clock, settled: str
):
    told = Told()
    lease = lease_of(told, clock)
    match settled:
        case "left":
            lease.leave()
        case "ack":
            await lease.ack()
        case _:
            lease.nak()
    before = list(told.log)
    lease.renew(clock.now)
    await touch(lease)
    assert told.log == before


# ---- a run under a claim ------------------------------------------------------------------------


class Following(FaultyStore):
    """Logs into the same list as the queue when a parent is told; `unreadable`: loads fail."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(shared=True)
        self.log = log
        self.unreadable = False

    async def load(self, run_id: RunId, *, after: int = 0) -> Any:
        if self.unreadable:
            raise StoreUnavailable("no answer")
        return await super().load(run_id, after=after)

    async def wake_at(self, run_id: RunId, agent: str, **what: Any) -> None:
        self.log.append("timer")


async def held_of(agent: Agent, clock: Clock, *, grace_s: float = 5) -> tuple[Held, Any, Told]:
    log: list[str] = []
    plain = await begun()
    store = Following(log)
    store._journals = plain._journals
    log_ = await RunLog.read(store, RUN, by="w1")
    claim = await log_.append(lambda fold: Claim(worker="w1", revision="1", reason="new"))
    assert claim is not None
    told = Told(log)
    held = Held(
        Journal.claimed(log_, claim, is_write=agent.is_unsafe, ack_wait_s=ACK_WAIT_S),
        agent,
        lease_of(told, clock),
        lost=0,
        ack_wait_s=ACK_WAIT_S,
        grace_s=grace_s,
        stubborn=lambda turn: None,
        ended=lambda: None,
        clock=lambda: datetime.now(UTC),
    )
    return held, store, told


async def test_a_fenced_holder_settles_nothing(clock: Clock):
    async def handler(ctx: Context) -> Next:
        await write_as_other(store, claimed("w2"))
        return Complete("over")

    held, store, told = await held_of(agent_of(handler), clock)
    held._ack_wait_s = 60  # no heartbeat comes before
    await held.work()
    assert told.log == []
    assert await types_of(store) == ["run.started", "claim", "claim"]


async def until(true: Callable[[], bool]) -> None:
    for _ in range(100_000):
        if true():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came true")


async def test_a_heartbeat_that_reads_a_newer_claim_ends_the_turn_and_touches_nothing(
    clock: Clock,
):
    begun_, cut = asyncio.Event(), asyncio.Event()

    async def handler(ctx: Context) -> Next:
        begun_.set()
        try:
            await asyncio.Event().wait()
        finally:
            cut.set()
        return Complete("over")

    held, store, told = await held_of(agent_of(handler), clock)
    held._ack_wait_s = 60
    work = asyncio.create_task(held.work())
    await begun_.wait()
    await write_as_other(store, claimed("w2"))
    held.look()
    async with asyncio.timeout(5):
        await work
    assert cut.is_set()
    assert told.log == []


async def test_a_message_is_held_only_once_the_tail_was_read(clock: Clock):
    go_on = asyncio.Event()

    async def handler(ctx: Context) -> Next:
        await go_on.wait()
        return Complete("over")

    held, store, told = await held_of(agent_of(handler), clock)
    store.unreadable = True
    work = asyncio.create_task(held.work())
    for _ in range(3):
        held.look()
        await until(lambda: not held._told.is_set())
    for _ in range(20):
        await asyncio.sleep(0)
    assert told.log == []
    store.unreadable = False
    held.look()
    await until(lambda: bool(told.log))
    assert set(told.log) == {"in_progress"}
    go_on.set()
    await work
    assert told.log[-1] == "ack"


async def test_a_message_is_acknowledged_only_after_what_the_wait_owes(clock: Clock):
    async def handler(ctx: Context) -> Next:
        return Continue(state=1, delay=timedelta(hours=1))

    held, _, told = await held_of(agent_of(handler), clock)
    await held.work()
    assert [word for word in told.log if word != "in_progress"] == ["timer", "ack"]


@pytest.mark.parametrize("calls_on", [True, False])
async def test_at_the_end_of_the_grace_a_run_is_released_only_if_no_call_of_it_runs(
    clock: Clock, calls_on: bool
):
    async def handler(ctx: Context) -> Next:
        await asyncio.Event().wait()
        return Complete("over")

    held, store, told = await held_of(agent_of(handler), clock)
    turn = asyncio.create_task(asyncio.sleep(0))
    await turn
    running: Future[Any] = Future()
    held.journal.abandoned.append(running)
    if not calls_on:
        running.set_result(None)
    await held._cut(turn)
    assert told.log == ([] if calls_on else ["nak"])
    assert (await types_of(store))[-1] == ("claim" if calls_on else "release")


async def test_a_handle_that_was_succeeded_writes_nothing(clock: Clock):
    async def handler(ctx: Context) -> Next:
        return Complete("over")

    held, store, _ = await held_of(agent_of(handler), clock)
    other = held.journal.succeed()
    with pytest.raises(Fenced):
        await held.journal.append(lambda fold: Release(reason="late"))
    assert await other.append(lambda fold: Release(reason="drain")) is not None
    assert await types_of(store) == ["run.started", "claim", "release"]


async def test_a_fenced_holder_tells_what_its_own_write_returned(clock: Clock):
    async def send(call: ToolCall) -> Any:
        await write_as_other(store, claimed("w2"))
        return "sent"

    async def handler(ctx: Context) -> Next:
        await ctx.tool(Call(name="send", input=1, fn=send, replay=UNSAFE))
        return Complete("over")

    held, store, told = await held_of(agent_of(handler), clock)
    held._ack_wait_s = 60
    await held.work()
    assert told.log == []
    assert (await folded(store)).steps["0/0"].late[3].payload["result"] == "sent"


async def test_a_lost_run_is_held_until_what_its_write_came_to_is_told(clock: Clock):
    """A retry that a person has permitted waits for a "no": said before the late result stands in
    the journal, that would be made beside a write that did happen."""
    asked: list[tuple[str, bool]] = []

    async def act(_: ToolCall) -> str:
        await write_as_other(store, claimed("w2"))
        return "sent"

    async def handler(ctx: Context) -> Next:
        await ctx.tool(Call(name="send", input=None, fn=act, replay=UNSAFE))
        return Complete("done")

    held, store, _ = await held_of(agent_of(handler), clock)
    held._ack_wait_s = 60
    append = store.append

    async def asked_meanwhile(run_id: RunId, entry: Any, *, expected: int) -> Any:
        asked.append((entry.type, held.holds(run_id, held.claim)))
        return await append(run_id, entry, expected=expected)

    store.append = asked_meanwhile
    await held.work()
    assert asked[-1] == ("signal", True)
    assert not held.holds(RUN, held.claim)


# ---- journal ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_waiting")
async def test_a_claim_that_loses_to_another_is_decided_anew_without_the_old_answers():
    store = await Log(started(), claimed("w1")).store(FaultyStore(shared=True))
    store.answers |= {"w1": "no", "w2": "yes"}
    store.faults[store.appends + 1] = lambda: write_as_other(store, claimed("w2"))
    with pytest.raises(StoreLocked, match="w2"):
        await Journal.open(store, RUN, is_write=lambda tool: True)
    assert store.asked == ["w1", "w2"]


async def test_a_run_that_is_handed_over_starts_nothing_new():
    store = await Log(started()).store(FaultyStore(shared=True))
    async with await Journal.open(store, RUN, is_write=lambda tool: True) as journal:
        journal.stop = "drain"
        with pytest.raises(Draining):
            await journal.run_step("llm/1", "model", never)
    assert await types_of(store) == ["run.started", "claim", "release"]


async def test_a_run_that_was_not_claimed_starts_nothing():
    ask = asking(1, 0, "pay")
    waits = Log(
        started(), claimed(), model_start(), reply_of(1, asks(request("pay")), ask), parked()
    )
    store = await waits.store(FaultyStore(shared=True))
    before = await types_of(store)
    async with await Journal.open(store, RUN, is_write=lambda tool: True) as journal:
        assert journal.claim == 0
        with pytest.raises(StaleSignal):
            await journal.run_step("tool/1/0/pay", "tool", never, tool="pay")
    assert await types_of(store) == before


async def never() -> Any:
    raise AssertionError("called")


def test_a_later_claim_binds_the_run_to_no_other_revision():
    log = Log(started(revision=""), claimed("w1", revision="1"), claimed("w2", revision="2"))
    assert log.fold.revision == "1"


def test_an_input_is_placed_in_the_iteration_that_it_names():
    log = Log(started(), claimed(), submitted())
    wrong = log.sealed(placed())
    assert log.fold.iteration == 0
    record: Any = wrong.record
    with pytest.raises(Damage, match="places in iteration 1"):
        log.fold.check(msgspec.structs.replace(record, iteration=1))
    log.fold.check(record)


async def test_an_input_is_not_placed_before_a_model_call_that_was_made_without_it():
    @read
    def lookup(q: int) -> int:
        return q

    def agent() -> Agent:
        script = [call("lookup", q=1), call("lookup", q=2), say("over")]
        return Agent("helpdesk", model=ScriptedModel(*script), tools=[lookup])

    store = FaultyStore({7: "killed after"})  # llm/2 has its reply
    with pytest.raises(Killed):
        await run(store, agent(), RUN, "go")
    assert (await folded(store)).done("llm/2")
    await submit(PlainView(store), RUN, "hurry")
    await run(store, agent(), RUN)
    assert [known.placed_at for known in (await folded(store)).inputs.values()] == ["llm/3"]


async def test_a_write_of_a_reply_begins_only_when_the_one_before_it_is_over():
    running: list[int] = []
    most: list[int] = []

    @write(approval=False)
    async def pay(amount: int) -> str:
        running.append(amount)
        most.append(len(running))
        for _ in range(5):
            await asyncio.sleep(0)
        running.remove(amount)
        return "paid"

    both = asks(request("pay", {"amount": 1}, "a"), request("pay", {"amount": 2}, "b"))
    agent = Agent("helpdesk", model=ScriptedModel(both, say("over")), tools=[pay])
    await run(FaultyStore(), agent, RUN, "go")
    assert most == [1, 1]


# ---- a task that comes --------------------------------------------------------------------------


def dispatcher_of(store: FaultyStore, told: Told, *, work: list[str]) -> Dispatcher:
    async def handler(ctx: Context) -> Next:
        work.append(ctx.run_id)
        return Complete("over")

    store.tasks = told  # pyright: ignore[reportAttributeAccessIssue]
    return Dispatcher(
        store,  # pyright: ignore[reportArgumentType]
        "w3",
        {"helpdesk": agent_of(handler)},
        ack_wait_s=60,
        restart_limit=5,
        grace_s=1,
        stubborn=lambda turn: None,
    )


async def test_answers_about_one_claim_claim_no_run_that_another_worker_took_meanwhile(
    clock: Clock,
):
    told, work = Told(), list[str]()
    store = await Log(started(revision=""), claimed("w1", task=1)).store(FaultyStore(shared=True))
    store.answers |= {"w1": "no", "w2": "yes"}
    store.faults[store.appends + 1] = lambda: write_as_other(store, claimed("w2", task=1))
    await dispatcher_of(store, told, work=work).look(task_at(clock))
    assert (work, told.log, store.asked) == ([], ["ack"], ["w1", "w2"])
    assert await types_of(store) == ["run.started", "claim", "claim"]


async def test_a_worker_that_stops_claims_nothing_and_gives_the_task_back(clock: Clock):
    told, work = Told(), list[str]()
    store = await Log(started()).store(FaultyStore(shared=True))
    dispatcher = dispatcher_of(store, told, work=work)
    dispatcher.drain()
    await dispatcher.look(task_at(clock))
    assert (work, told.log) == ([], ["nak"])
    assert await types_of(store) == ["run.started"]


def test_a_task_of_another_agent_than_the_runs_claims_nothing():
    decided = [
        decide_task(
            Log(started()).fold,
            Delivery(sequence=7, delivery=1, cause=1),
            [],
            agent=agent,
            accepts=("1",),
            now="2026-01-02T03:04:05.678Z",
            ack_wait_s=30,
            restart_limit=5,
        )
        for agent in ("helpdesk", "another")
    ]
    assert decided == [Take("new"), Drop()]


def test_a_run_paused_over_changed_code_is_tried_by_other_code_only():
    log = Log(started(revision=""), claimed("w1", revision="1"), parked("pause"))
    assert [other_code_may(log.fold, revision) for revision in ("1", "2")] == [False, True]
