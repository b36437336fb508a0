"""Of runs on their last chance a worker holds one at a time: what kills it kills no other (R52)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from kit.records import Chain, fill

from journal import doors
from journal.fold import Fold
from journal.handle import Journal
from journal.ids import RunId
from journal.lease import Lease
from journal.limits import HELD_BACK_DELIVERIES
from journal.records import Claim, Release, StepStarted
from journal.stores.jetstream import JetStreamStore
from journal.stores.tasks import Task
from journal.taking import Taken, Taking
from worker.agent import Agent
from worker.models.scripted import ScriptedModel

AGENT = "a"
LIMIT = 3
ACK_WAIT_S = 600.0


class Desk:
    """A worker that takes what it is given, and works nothing."""

    def __init__(self, store: JetStreamStore) -> None:
        self.store = store
        self.tasks: asyncio.Queue[Task] = asyncio.Queue()
        self.agent = Agent(AGENT, model=ScriptedModel(), revision="r")
        self.taking = Taking(store, "w9", ack_wait_s=ACK_WAIT_S, restart_limit=LIMIT)

    async def next(self) -> Task:
        async with asyncio.timeout(10):
            return await self.tasks.get()

    async def take(self, task: Task) -> Taken | None:
        return await self.taking.take(task, Lease(self.store.tasks, task, ACK_WAIT_S), self.agent)

    async def taken(self, task: Task) -> Taken:
        found = await self.take(task)
        assert found is not None
        return found


@pytest.fixture
async def desk(direct: JetStreamStore) -> AsyncIterator[Desk]:
    desk = Desk(direct)
    await direct.tasks.ensure(AGENT, ack_wait_s=ACK_WAIT_S)
    async with direct.tasks.pulling(AGENT, 0, desk.tasks.put_nowait) as puller:
        pulling = asyncio.create_task(puller.pull(64, expires_s=60))
        try:
            yield desk
        finally:
            pulling.cancel()
            await asyncio.wait([pulling])


async def lost_workers(desk: Desk, run: str, count: int) -> Task:
    """A run that has lost so many in a row, and nobody holds now; its task."""
    chain = Chain(run)
    chain.started()
    for number in range(count + 1):
        chain.add(
            Claim(worker=f"w{number}", revision="r", reason="new", task=number + 1, delivery=1)
        )
    chain.add(Release(reason="drain"), claim=len(chain.entries))
    await fill(desk.store, chain)
    await desk.store.wake(RunId(run), AGENT, cause=1)
    return await desk.next()


def step(fold: Fold) -> StepStarted:
    return StepStarted(
        step=f"s{fold.n}", kind="tool", tool="t", digest="0" * 16, replay="safe", key="k"
    )


async def test_one_at_a_time_until_it_has_moved_on(desk: Desk) -> None:
    first = await desk.taken(await lost_workers(desk, "first", LIMIT - 1))
    second = await lost_workers(desk, "second", LIMIT - 1)
    assert await desk.take(second) is None
    again = await desk.next()  # it was given back, and comes again
    assert (again.run_id, again.delivery) == ("second", 2)
    run = first.run
    run.claim = first.claim.n
    await run.append(step)
    assert run.fold.restarts == 0
    assert (await desk.taken(again)).run.run_id == "second"


async def test_one_at_a_time_until_it_is_given_back(desk: Desk) -> None:
    first = await desk.taken(await lost_workers(desk, "first", LIMIT - 1))
    assert await desk.take(await lost_workers(desk, "second", LIMIT - 1)) is None
    again = await desk.next()
    first.give()
    second = await desk.taken(again)
    first.give()  # once more: the place is another run's now
    assert await desk.take(await lost_workers(desk, "third", LIMIT - 1)) is None
    second.give()
    await desk.taken(await desk.next())


async def test_of_two_that_are_looked_at_at_once_one_is_taken(desk: Desk) -> None:
    tasks = [await lost_workers(desk, run, LIMIT - 1) for run in ("one", "two")]
    found = await asyncio.gather(*(desk.take(task) for task in tasks))
    assert sorted(one is None for one in found) == [False, True]


async def test_others_go_on_beside_it(desk: Desk) -> None:
    await desk.taken(await lost_workers(desk, "first", LIMIT - 1))
    for run, lost in (("fresh", 0), ("unlucky", LIMIT - 2), ("over", LIMIT)):
        taken = await desk.taken(await lost_workers(desk, run, lost))
        assert taken.lost == (lost if lost == LIMIT else 0)
    assert await desk.take(await lost_workers(desk, "second", LIMIT - 1)) is None


async def test_one_that_waited_too_long_keeps_its_place_to_itself(desk: Desk) -> None:
    """It shares the worker with the first; when it has ended, that one still stands there."""
    await desk.taken(await lost_workers(desk, "first", LIMIT - 1))
    waiting = await lost_workers(desk, "second", LIMIT - 1)
    long = msgspec.structs.replace(waiting, delivery=HELD_BACK_DELIVERIES + 1)
    (await desk.taken(long)).give()
    assert await desk.take(await lost_workers(desk, "third", LIMIT - 1)) is None


async def test_a_cancelled_one_does_not_wait(desk: Desk) -> None:
    """To end it calls nothing, and a person waits for that."""
    await desk.taken(await lost_workers(desk, "first", LIMIT - 1))
    await lost_workers(desk, "second", LIMIT - 1)
    await doors.signal(desk.store, "second", "cancel", {"reason": "now"})
    assert (await desk.taken(await desk.next())).run.run_id == "second"


async def test_it_moves_on_by_the_handle_of_its_work(desk: Desk) -> None:
    first = await desk.taken(await lost_workers(desk, "first", LIMIT - 1))
    work = Journal.claimed(
        first.run, first.claim, is_write=desk.agent.is_unsafe, ack_wait_s=ACK_WAIT_S
    )
    assert await desk.take(await lost_workers(desk, "second", LIMIT - 1)) is None
    again = await desk.next()
    await work.append(step)
    assert (await desk.taken(again)).run.run_id == "second"


async def test_a_claim_that_came_to_nothing_keeps_no_place(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await lost_workers(desk, "first", LIMIT - 1)
    with monkeypatch.context() as patch:
        patch.setattr(desk.store, "append", None)
        with pytest.raises(TypeError):
            await desk.take(task)
    assert (await desk.taken(await lost_workers(desk, "second", LIMIT - 1))).run.run_id == "second"
