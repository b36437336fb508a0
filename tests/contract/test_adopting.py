"""Which runs are at work, by whom, and which of them a look wakes (R51)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.records import Chain, fill, journal_of
from kit.servers import NatsServer
from kit.waiting import eventually

from journal import doors
from journal.adopting import Looked, wake_abandoned
from journal.doors import started_body
from journal.fleet import Fleet
from journal.handle import Journal
from journal.ids import RunId
from journal.log import Log
from journal.records import (
    SPAWN,
    Claim,
    Commit,
    RunCompleted,
    StepCompleted,
    StepStarted,
    Waits,
)
from journal.stores import jetstream_lasts
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.stores.tasks import Task
from journal.stores.tasks_flight import InFlight
from journal.sweep import sweep
from worker.children import spawning
from worker.peers import PeerWatch

AGENT = "a"
NOBODY = frozenset[str]()


@asynccontextmanager
async def delivered(
    store: JetStreamStore, count: int, agent: str = AGENT, priority: int = 0
) -> AsyncIterator[list[Task]]:
    """So many tasks in the hands of somebody who does nothing with them."""
    got: list[Task] = []
    await store.tasks.ensure(agent, ack_wait_s=600)
    async with store.tasks.pulling(agent, priority, got.append) as puller:
        await puller.pull(count)
        yield got


# ---- what is at work -----------------------------------------------------------------------------


async def test_in_flight_is_what_was_delivered_and_is_not_settled(direct: JetStreamStore) -> None:
    flight = direct.tasks.flight
    assert await flight.of([AGENT]) == {}  # no consumer yet
    for number in range(1, 8):
        await direct.wake(RunId(f"r.{number}"), AGENT, cause=1)
    async with delivered(direct, 5) as tasks:
        for one in (tasks[0], tasks[2]):
            assert await direct.tasks.ack(one)
        found = await flight.of([AGENT])
        assert found == {
            RunId(f"r.{number}"): InFlight(RunId(f"r.{number}"), AGENT, number, number, 1)
            for number in (2, 4, 5)
        }
        for one in (tasks[1], tasks[3], tasks[4]):
            assert await direct.tasks.ack(one)
        assert await flight.of([AGENT]) == {}


async def test_in_flight_are_tasks_of_every_priority_and_agent_and_the_first_of_a_run(
    direct: JetStreamStore,
) -> None:
    for run, agent, priority in (("h", AGENT, 1), ("l", "a.b", -1), ("n", AGENT, 0)):
        await direct.wake(RunId(run), agent, cause=1, priority=priority)
        await direct.wake(RunId(run), agent, cause=2, priority=priority)
    async with (
        delivered(direct, 2, priority=1),
        delivered(direct, 1, agent="a.b", priority=-1),
        delivered(direct, 2),
    ):
        found = await direct.tasks.flight.of([AGENT, "a.b", "nobody"])
        assert found == {
            RunId("h"): InFlight(RunId("h"), AGENT, 1, 2, 2),
            RunId("l"): InFlight(RunId("l"), "a.b", 3, 3, 1),
            RunId("n"): InFlight(RunId("n"), AGENT, 5, 6, 2),
        }
        newest = direct.tasks.flight.newest
        assert await newest(RunId("h"), AGENT, 1) == 2
        assert await newest(RunId("l"), "a.b", -1) == 4
        assert await newest(RunId("l"), AGENT, 0) == 0


async def test_last_records_of_many_runs_come_in_pages_from_every_shard(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_lasts, "PAGE", 4)
    await provision(server.url, shards=4)
    async with JetStreamStore(server.url) as store:
        for number in range(10):
            await fill(store, journal_of(1 + number % 3, f"run.{number}"))
        wanted = [RunId(f"run.{number}") for number in range(10)]
        found = await store.last_records([*wanted, RunId("not-there")])
        assert {run_id: one.n for run_id, one in found.items()} == {
            RunId(f"run.{number}"): 1 + number % 3 for number in range(10)
        }
        assert await store.last_records([]) == {}


# ---- what is woken -------------------------------------------------------------------------------


async def held_by(store: JetStreamStore, run: str, *claims: Claim, write: bool = False) -> None:
    """A journal whose last claim is live; with `write`, in the middle of one."""
    chain = Chain(run)
    chain.started()
    for claim in claims:
        chain.add(claim)
    if write:
        body = StepStarted(
            step="s", kind="tool", tool="t", digest="0" * 16, replay="unsafe", key="k"
        )
        chain.add(body, claim=len(chain.entries))
    await fill(store, chain)


def claim(worker: str, task: int, **more: Any) -> Claim:
    return Claim(worker=worker, revision="r", reason="new", task=task, delivery=1, **more)


async def woken(
    store: JetStreamStore, gone: Sequence[str] | None, before: Looked | None = None
) -> Looked:
    looked = await wake_abandoned(
        store, [AGENT], before.left if before else {}, None if gone is None else frozenset(gone)
    )
    if looked.woken:
        async with delivered(store, len(looked.woken)) as tasks:
            assert {one.run_id for one in tasks} == set(looked.woken)
    return looked


async def test_a_look_wakes_the_runs_of_who_is_gone_and_no_others(direct: JetStreamStore) -> None:
    await held_by(direct, "dead", claim("w1", 1))
    await held_by(direct, "alive", claim("w2", 2))
    await held_by(direct, "writing", claim("w1", 3), write=True)
    await held_by(direct, "http", claim("w1", 4, remote=True))
    await held_by(direct, "poison", claim("w7", 9), claim("w8", 9), claim("w1", 5))
    for run in ("dead", "alive", "writing", "http", "poison"):
        await direct.wake(RunId(run), AGENT, cause=1)
    async with delivered(direct, 5):
        looked = await woken(direct, ["w1"])
        assert looked == Looked(("dead",), {})
        assert await direct.tasks.cause(RunId("dead"), AGENT) == 2
        again = await woken(direct, ["w1"])
        assert again == Looked((), {RunId("dead"): 2})  # somebody has its new task
        assert (await woken(direct, [])).woken == ()
        gone = frozenset(["w1"])
        looked = await wake_abandoned(direct, [AGENT], again.left, gone)
        assert looked == Looked(("dead",), {})  # and has not come to claim it
        looked = await wake_abandoned(direct, [AGENT], again.left, gone)
        assert looked == Looked((), {})  # that one waits for a worker


@pytest.mark.usefixtures("short_tries")
async def test_at_the_start_each_holder_is_asked_itself(direct: JetStreamStore) -> None:
    await held_by(direct, "dead", claim("w1", 1))
    await held_by(direct, "alive", claim("w2", 2))
    await held_by(direct, "silent", claim("w3", 3))
    for run in ("dead", "alive", "silent"):
        await direct.wake(RunId(run), AGENT, cause=1)

    async with (
        delivered(direct, 3),
        direct.answering("w2", lambda run_id, claim: True),
        direct._connection.listening("runfold.worker.w3", lambda _: None),
    ):
        assert (await woken(direct, None)).woken == ("dead",)


async def test_a_run_that_nobody_holds_is_woken_if_it_is_so_twice(direct: JetStreamStore) -> None:
    chain = Chain("unclaimed")
    chain.started()
    tail = await fill(direct, chain)
    moved = Chain("moved")
    moved.started()
    moved_tail = await fill(direct, moved)
    for run in ("unclaimed", "moved"):
        await direct.wake(RunId(run), AGENT, cause=1)
    async with delivered(direct, 2):
        first = await woken(direct, NOBODY)
        assert first == Looked((), {RunId("unclaimed"): 1, RunId("moved"): 1})
        await direct.append(RunId("moved"), moved.claimed("w9"), expected=moved_tail)
        second = await woken(direct, NOBODY, first)
        assert second.woken == ("unclaimed",)
        third = await woken(direct, NOBODY, second)
        assert third.woken == ()
    assert tail


async def test_a_run_whose_task_knows_of_a_lost_record_is_woken_by_no_look_and_no_repeated_start(
    direct: JetStreamStore,
) -> None:
    """Workers leave it alone for that task; they would follow one about what is left, and make a
    write again whose start is what was lost."""
    fleet = Fleet(direct)
    await fleet.start(AGENT, "x", run_id="unclaimed")
    await held_by(direct, "claimed", claim("w1", 9))
    await direct.wake(RunId("claimed"), AGENT, cause=2)
    for run in ("unclaimed", "claimed"):
        await direct.wake(RunId(run), AGENT, cause=7)
    async with delivered(direct, 4):
        first = await woken(direct, ["w1"])
        assert first == Looked((), {})
        assert not (await fleet.start(AGENT, "x", run_id="unclaimed")).created
        assert await woken(direct, ["w1"], Looked((), {"unclaimed": 1, "claimed": 2})) == first
        flight = await direct.tasks.flight.of([AGENT])
        for one in flight.values():
            newest = await direct.tasks.flight.newest(one.run_id, AGENT, 0)
            assert (one.cause, newest) == (7, one.last)


CHILD = RunId("p.kid")
SPAWNED = StepStarted(
    step="s",
    kind="tool",
    tool=SPAWN,
    digest="0" * 16,
    replay="safe",
    key="k",
    input={"run": CHILD, "agent": AGENT, "input": "hi"},
)


async def parent_and_child(store: JetStreamStore, *, ended: bool) -> None:
    """A parent that waits for its child."""
    parent = Chain("p")
    parent.started()
    parent.add(claim("w1", 1))
    parent.add(SPAWNED, claim=2)
    parent.add(StepCompleted(step="s", result=CHILD, via="run"), claim=2)
    parent.add(Commit(action="continue", iteration=0, waits=Waits(until_child=CHILD)), claim=2)
    await fill(store, parent)
    child = Chain(CHILD)
    child.add(started_body(CHILD, AGENT, "hi", parent="p", depth=1))
    if ended:
        child.add(claim("w1", 2))
        child.add(RunCompleted(message="done"), claim=2, status="completed")
    await fill(store, child)


async def test_a_parent_of_which_records_are_lost_is_not_told_of_its_childs_end_by_a_sweep(
    direct: JetStreamStore,
) -> None:
    """That would be a task about what is left, and `doctor` would not find the loss any more."""
    await parent_and_child(direct, ended=True)
    await direct.wake(RunId("p"), AGENT, cause=8)
    assert (await sweep(direct, agents={AGENT: "r"}, fresh_s=0)).dispatched == ()
    assert (await Log.read(direct, RunId("p"))).fold.n == 5
    assert await direct.task_cause(RunId("p"), AGENT) == 8


async def test_a_child_of_which_records_are_lost_is_not_woken_by_its_parents_repeated_step(
    direct: JetStreamStore,
) -> None:
    await parent_and_child(direct, ended=False)
    parent = Journal(direct, RunId("p"), by="w1", is_write=lambda _: False)
    await parent.refresh()
    _, _, perform = spawning(parent, "s", AGENT, "hi", name="kid", priority=0)
    await perform(SPAWNED)
    assert await direct.task_cause(CHILD, AGENT) == 1
    await direct.wake(CHILD, AGENT, cause=5)
    await perform(SPAWNED)
    assert await direct.task_cause(CHILD, AGENT) == 5


async def test_a_start_repeated_after_its_task_was_lost_is_told_again(
    direct: JetStreamStore,
) -> None:
    await doors.start(direct, AGENT, "x", run_id="r1", revision="")
    assert not (await Fleet(direct).start(AGENT, "x", run_id="r1")).created
    assert await direct.tasks.cause(RunId("r1"), AGENT) == 1


async def test_a_damaged_run_keeps_no_other_from_being_woken(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await held_by(direct, "dead", claim("w1", 3))
    broken = journal_of(1, "broken")
    tail = await fill(direct, broken)
    await direct.append(broken.run_id, broken.rival().step_completed("x"), expected=tail)
    await direct.append(broken.run_id, broken.step_completed("y"), expected=tail + 1)
    for run in ("missing", "broken", "dead"):
        await direct.wake(RunId(run), AGENT, cause=1)
    async with delivered(direct, 3):
        assert (await woken(direct, ["w1"])).woken == ("dead",)


async def test_who_holds_a_run_at_the_start_is_watched_also_if_it_never_says_hello(
    direct: JetStreamStore,
) -> None:
    """A worker may be killed between our first look and its answer to our first hello."""
    await held_by(direct, "run", claim("w1", 1))
    await direct.wake(RunId("run"), AGENT, cause=1)
    watch = PeerWatch(direct, "w2", [AGENT])
    async with delivered(direct, 1):
        watching = asyncio.create_task(watch.run())
        try:
            async with direct.answering("w1", lambda run, claim: True):
                await eventually(
                    lambda: [peer.worker for peer in watch.watched] == ["w1"], what="it is watched"
                )
            async with delivered(direct, 1) as tasks:
                assert [one.run_id for one in tasks] == ["run"]
        finally:
            watching.cancel()
            await asyncio.wait([watching])
