"""`Fleet` on a store in memory: start, wait, follow, talk, the inbox (R3, R4, R7, R62)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit.build import RUN
from kit.records import Chain, fill

from journal import purging
from journal.errors import StoreUnavailable
from journal.following import followed as entries_of
from journal.records import NewerRecord
from runfold import (
    Agent,
    BadPayload,
    Complete,
    Completed,
    Context,
    Continue,
    Fleet,
    InputMismatch,
    InvalidId,
    JournalDamaged,
    MemoryStore,
    Next,
    Pause,
    Record,
    RunFinished,
    RunId,
    RunNotFound,
    StaleSignal,
    Waiting,
    run,
    turn,
    write,
)
from runfold.testing import ScriptedModel, call, say


class Telling(MemoryStore):
    """Keeps what workers would be told; `fails` times it is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.tasks_told: list[tuple[str, str, int, int]] = []
        self.fails = 0

    async def wake(self, run_id: RunId, agent: str, *, cause: int, priority: int = 0) -> None:
        if self.fails:
            self.fails -= 1
            raise StoreUnavailable("no answer")
        self.tasks_told.append((run_id, agent, cause, priority))


@write
def pay(amount: int) -> str:
    return "paid"


def teller() -> Agent:
    return Agent("teller", model=ScriptedModel(call("pay", amount=5), say("Done.")), tools=[pay])


@turn("chat")
async def chat(ctx: Context) -> Next:
    placed = await ctx.place_inputs("steer")
    heard = [*(ctx.load_checkpoint() or []), *(one.content for one in placed)]
    if "bye" in heard:
        return Complete(heard)
    return Continue(state=heard, until_input=True)


@turn("careful")
async def careful(ctx: Context) -> Next:
    if ctx.load_checkpoint() is None:
        return Pause(reason="look at me", state=1)
    return Complete("looked at")


@pytest.fixture
def store() -> Telling:
    return Telling()


@pytest.fixture
def fleet(store: Telling) -> Fleet:
    return Fleet(store, by="test")


async def listed(fleet: Fleet, **which: Any) -> list[str]:
    return [state.run_id async for state in fleet.list(**which)]


async def followed(fleet: Fleet, run_id: str, after: int = 0) -> list[Record]:
    return [record async for record in fleet.follow(run_id, after=after)]


# -- starting ---------------------------------------------------------------------------------


async def test_a_start_writes_one_record_and_tells_the_agents_workers(
    fleet: Fleet, store: Telling
) -> None:
    started = await fleet.start("teller", {"a": 1}, run_id="r1", priority=1, key="customer:7")
    assert (started.run_id, started.created) == ("r1", True)
    assert store.tasks_told == [("r1", "teller", 1, 1)]
    (record,) = (await store.load(RunId("r1"))).records
    assert (record.by, record.revision, record.priority, record.key) == (  # type: ignore[attr-defined]
        "test",
        "",
        1,
        "customer:7",
    )


async def test_a_start_that_died_before_its_task_is_made_good_by_its_repeat(
    fleet: Fleet, store: Telling
) -> None:
    store.fails = 1
    with pytest.raises(StoreUnavailable):
        await fleet.start("teller", 1, run_id="r1", priority=-1)
    assert store.tasks_told == []
    again = await fleet.start("teller", 1, run_id="r1")
    assert not again.created
    assert store.tasks_told == [("r1", "teller", 1, -1)]  # with the recorded priority
    assert len((await store.load(RunId("r1"))).entries) == 1


async def test_a_repeat_wakes_nobody_for_a_run_that_waits_or_has_ended(
    fleet: Fleet, store: Telling
) -> None:
    await fleet.start("teller", "x", run_id="r1")
    await run(store, teller(), "r1")
    await fleet.signal("r1", "cancel", {})
    store.tasks_told.clear()
    await run(store, teller(), "r1")
    assert not (await fleet.start("teller", "x", run_id="r1")).created
    assert store.tasks_told == []


async def test_another_input_or_agent_under_the_same_id_is_refused(fleet: Fleet) -> None:
    await fleet.start("teller", "x", run_id="r1")
    for agent, value in (("teller", "y"), ("other", "x")):
        with pytest.raises(InputMismatch):
            await fleet.start(agent, value, run_id="r1")
    first, second = await fleet.start("teller", "x"), await fleet.start("teller", "x")
    assert first.run_id != second.run_id


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"priority": 2}, BadPayload),
        ({"key": ""}, BadPayload),
        ({"key": "a\nb"}, BadPayload),
        ({"key": "k" * 129}, BadPayload),
        ({"run_id": "no id"}, InvalidId),
        ({"agent": "no name"}, InvalidId),
    ],
)
async def test_what_is_no_start_is_refused_and_nothing_written(
    fleet: Fleet, wrong: dict[str, Any], error: type[Exception]
) -> None:
    line = {"agent": "teller", "input": "x", "run_id": "r1"} | wrong
    with pytest.raises(error):
        await fleet.start(**line)
    assert await listed(fleet) == []


async def test_what_is_about_no_run_is_refused(fleet: Fleet) -> None:
    for refused in (
        fleet.get("r1"),
        fleet.wait("r1", timeout_s=9),
        fleet.cancel("r1"),
        fleet.resume("r1"),
        fleet.send("r1", "x"),
        fleet.input("r1", "i1"),
        fleet.withdraw("r1", "i1"),
        followed(fleet, "r1"),
    ):
        with pytest.raises(RunNotFound):
            await refused


# -- waiting and following --------------------------------------------------------------------


async def test_waiting_ends_when_the_run_waits_for_somebody(fleet: Fleet, store: Telling) -> None:
    await fleet.start("chat", None, run_id="r1")
    as_it_is = await fleet.wait("r1", timeout_s=0)
    assert (as_it_is.status, as_it_is.outcome) == ("running", None)
    waiting = asyncio.ensure_future(fleet.wait("r1", timeout_s=60))
    await run(store, chat, "r1")
    assert isinstance((await waiting).outcome, Waiting)


async def test_a_follower_sees_each_record_once_and_the_end(fleet: Fleet, store: Telling) -> None:
    await fleet.start("chat", None, run_id="r1")
    followers = [asyncio.ensure_future(followed(fleet, "r1", after)) for after in (0, 2, 99)]
    await run(store, chat, "r1")
    for text in ("hello", "bye"):
        await fleet.send("r1", text)
        await run(store, chat, "r1")
    whole, later, nothing = [await follower for follower in followers]
    assert [record.n for record in whole] == list(range(1, len(whole) + 1))
    assert later == whole[2:] and nothing == []
    assert (await fleet.get("r1")).records == len(whole)
    assert await followed(fleet, "r1") == whole


@pytest.mark.dishonest
async def test_a_follower_gets_what_stands_before_a_damage(fleet: Fleet, store: Telling) -> None:
    await fleet.start("chat", None, run_id="r1")
    journal = store._journals[RunId("r1")]
    (raw,) = journal.values()
    journal[2] = raw  # does not chain
    seen: list[int] = []

    async def see() -> None:
        async for record in fleet.follow("r1"):
            seen.append(record.n)

    with pytest.raises(JournalDamaged):
        await see()
    assert seen == [1]


# -- inputs -----------------------------------------------------------------------------------


async def test_an_input_is_sent_once_placed_and_done(fleet: Fleet, store: Telling) -> None:
    await fleet.start("chat", None, run_id="r1")
    first = await fleet.send("r1", "bye", request_id="i1")
    again = await fleet.send("r1", "other words", request_id="i1")
    assert (first.created, first.status) == (True, "queued")
    assert (again.created, again.content) == (False, "bye")
    settled = asyncio.ensure_future(fleet.input("r1", "i1", wait_s=60))
    await run(store, chat, "r1")
    assert (await settled).status == "done"
    with pytest.raises(RunFinished):
        await fleet.send("r1", "more")
    with pytest.raises(StaleSignal):
        await fleet.withdraw("r1", "i1")


async def test_a_withdrawn_input_is_never_placed(fleet: Fleet, store: Telling) -> None:
    await fleet.start("chat", None, run_id="r1")
    await fleet.send("r1", "bye", request_id="i1")
    assert (await fleet.withdraw("r1", "i1")).status == "withdrawn"
    assert isinstance(await run(store, chat, "r1"), Waiting)
    assert (await fleet.input("r1", "i1")).status == "withdrawn"
    with pytest.raises(StaleSignal):
        await fleet.input("r1", "i2")
    with pytest.raises(BadPayload):
        await fleet.input("r1", "i1", wait_s=61)


# -- lists and the inbox ----------------------------------------------------------------------


async def people_are_waited_for(fleet: Fleet, store: Telling) -> None:
    """r1 for an approval, r2 for an operator, r3 damaged, r4 newer, r5 running, r6 over."""
    await run(store, teller(), "r1", "x")
    await run(store, careful, "r2", "x")
    for damaged in ("r3", "r5"):
        await fleet.start("teller", "x", run_id=damaged)
    store._journals[RunId("r3")][2] = b"{}"
    await fleet.start("chat", "x", run_id="r4")
    raw = (await store.load(RunId("r4"))).entries[0].raw
    store._journals[RunId("r4")][1] = raw.replace(b'"v":1', b'"v":2')
    assert isinstance((await store.load(RunId("r4"))).records[0], NewerRecord)
    await fleet.start("chat", "x", run_id="r6")
    await fleet.send("r6", "bye")
    assert isinstance(await run(store, chat, "r6"), Completed)


@pytest.mark.dishonest
async def test_the_inbox_holds_what_people_must_do_and_nothing_else(
    fleet: Fleet, store: Telling
) -> None:
    await people_are_waited_for(fleet, store)
    approval, paused, damaged, newer = await fleet.inbox()
    state = await fleet.get("r1")
    assert (approval.kind, approval.run, approval.status) == ("approval", "r1", "awaiting_approval")
    assert approval.marker == state.outcome.pending[0].marker  # type: ignore[union-attr]
    assert (approval.tool, approval.input, approval.agent) == ("pay", {"amount": 5}, "teller")
    assert (paused.kind, paused.run, paused.text) == ("operator", "r2", "look at me")
    assert (damaged.kind, damaged.run, damaged.status) == ("operator", "r3", "damaged")
    assert (newer.kind, newer.run, newer.status) == ("operator", "r4", "newer")
    await fleet.resume("r2", reason="I did")
    await fleet.signal("r1", "approve", {"marker": approval.marker})
    assert [item.run for item in await fleet.inbox()] == ["r3", "r4"]


@pytest.mark.dishonest
async def test_lists_are_by_status_agent_and_page(fleet: Fleet, store: Telling) -> None:
    await people_are_waited_for(fleet, store)
    assert await listed(fleet) == ["r1", "r2", "r3", "r4", "r5", "r6"]
    assert await listed(fleet, after=RunId("r4")) == ["r5", "r6"]
    assert await listed(fleet, agent="teller") == ["r1", "r5"]
    found = {
        status: await listed(fleet, status=status)
        for status in ("awaiting_approval", "paused", "damaged", "newer", "running", "completed")
    }
    assert list(found.values()) == [["r1"], ["r2"], ["r3"], ["r4"], ["r5"], ["r6"]]
    (unreadable,) = [state async for state in fleet.list(status="damaged")]
    assert [wait.what for wait in unreadable.waiting_on] == ["operator"]  # R7


async def test_a_store_without_workers_says_so(fleet: Fleet) -> None:
    for refused in (fleet.workers(), fleet.queue()):
        with pytest.raises(InvalidId):
            await refused


async def test_who_follows_a_run_that_is_purged_meanwhile_is_told_so() -> None:
    store, chain = MemoryStore(), Chain(RUN)
    chain.started()
    await fill(store, chain)
    entries = entries_of(store, RUN)
    assert (await anext(entries)).record.n == 1
    chain.completed()
    await store.append(chain.run_id, chain.entries[-1], expected=1)
    await purging.purge(store, RUN)
    with pytest.raises(RunNotFound):
        await anext(entries)
