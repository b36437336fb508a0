"""Workers that watch each other (R51, R83), in virtual time: the ack wait is 30 s, as by default,
and a moment is exact. Real processes: tests/real/test_fleet_takeover.py."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from kit.simulated.server import ModelServer
from kit.waiting import eventually
from simulation import patches
from simulation.loop import VirtualLoop
from simulation.members import WorkerProcess
from simulation.schedule import _bury, collecting_later
from simulation.trace import Trace
from simulation.world import OUTSIDE

import journal.stores.nats_connection
import worker.peers
from journal.fleet import Fleet
from journal.ids import RunId
from journal.records import Claim, Record
from journal.stores.jetstream import JetStreamStore
from journal.terms import Complete, Next
from worker.agent import Agent, turn
from worker.context import Call, Context
from worker.dispatch import Dispatcher
from worker.tools import SAFE, UNSAFE, ToolCall

ACK_WAIT_S = 30.0
TOOL_S = 8.0


async def slow(call: ToolCall) -> str:
    await asyncio.sleep(TOOL_S)
    return "done"


@turn("reader")
async def reader(ctx: Context) -> Next:
    return Complete((await ctx.tool(Call(name="look", input=1, fn=slow, replay=SAFE))).output)


@turn("writer")
async def writer(ctx: Context) -> Next:
    return Complete((await ctx.tool(Call(name="act", input=1, fn=slow, replay=UNSAFE))).output)


class Once(WorkerProcess):
    def comes_back(self) -> bool:
        return False


class Town:
    """A model server, workers on it, and somebody who looks."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.server = ModelServer(now=lambda: patches.EPOCH_NS + int(loop.time() * 1e9))
        self.server.provision()
        loop.outside = OUTSIDE
        self.context = contextvars.copy_context()
        self.agents: list[Agent] = [reader, writer]
        self.plan = SimpleNamespace(skews_s=(0.0,), ack_wait_s=ACK_WAIT_S, restart_limit=5)
        self.rng = random.Random(0)
        self.trace = Trace(loop)
        self.ending = False
        self.stalls = 0
        self.members: list[Once] = []
        self.store: JetStreamStore

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        self.loop.call_later(delay_s, what, context=self.context)

    async def worker(self) -> Once:
        member = Once(self, len(self.members))  # type: ignore[arg-type]
        self.members.append(member)
        member.start()
        await self.until(lambda: member.ready)
        return member

    async def crew(self, count: int) -> list[Once]:
        """Workers that have heard of each other."""
        found = [await self.worker() for _ in range(count)]
        await asyncio.sleep(1)
        return found

    async def at_work(self, count: int, agent: str = "reader") -> tuple[Once, int]:
        """A crew, one of which works run "r": that one, and how many tasks were published."""
        await self.crew(count)
        await Fleet(self.store).start(agent, 1, run_id="r")
        await self.claimed("r", 1)
        return await self.holder("r"), self.published

    async def until(self, met: Callable[[], Any], within_s: float = 60.0) -> None:
        await eventually(met, within_s)

    async def records(self, run: str) -> list[Record]:
        return [entry.record for entry in (await self.store.load(RunId(run))).entries]

    async def claims(self, run: str) -> list[Claim]:
        return [one for one in await self.records(run) if isinstance(one, Claim)]

    async def claimed(self, run: str, times: int, within_s: float = 120.0) -> float:
        """When it has so many claims: the virtual time."""

        async def there() -> bool:
            return len(await self.claims(run)) >= times

        await eventually(there, within_s)
        return self.loop.time()

    async def holder(self, run: str) -> Once:
        worker_id = (await self.claims(run))[-1].worker
        return next(one for one in self.members if one.worker and one.worker.id == worker_id)

    async def ended(self, run: str) -> str:
        async def there() -> str:
            found = await Fleet(self.store).get(run)
            return found.status if found.outcome is not None else ""

        return await eventually(there, 200)

    def tasks(self, run: str) -> int:
        """Messages of the run in TASKS, at work or waiting."""
        messages = self.server.streams["RUNFOLD_TASKS"].messages.values()
        return sum(message.subject.split(".")[3] == run for message in messages)

    @property
    def published(self) -> int:
        """Tasks that were ever published."""
        return self.server.streams["RUNFOLD_TASKS"].last_seq

    def client(self, member: Once) -> Any:
        return next(one for one in self.server.clients if one.process == member.process.name)


Play = Callable[[Callable[[Town], Awaitable[None]]], None]


@pytest.fixture
def play() -> Iterator[Play]:
    loop = VirtualLoop()
    with (
        collecting_later(),
        patches.deterministic(loop, 0),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(worker.peers, "PEER_PROBE_S", 0.2)
        town = Town(loop)
        patch.setattr(journal.stores.nats_connection, "Client", town.server.client)

        @asynccontextmanager
        async def opened() -> AsyncIterator[None]:
            async with JetStreamStore(town.server.url) as town.store:
                yield
            for member in town.members:
                member.kill()

        def run(scene: Callable[[Town], Awaitable[None]]) -> None:
            async def main() -> None:
                async with opened():
                    await scene(town)

            loop.run_until_complete(main())
            assert loop.failures == []

        yield run
        _bury(town)  # type: ignore[arg-type]


def test_a_killed_workers_run_is_claimed_within_a_second(play: Play) -> None:
    async def scene(town: Town) -> None:
        await town.crew(3)
        for number in range(10):
            await Fleet(town.store).start("reader", 1, run_id=f"r{number}")
            await town.claimed(f"r{number}", 1)
        mine = [f"r{number}" for number in range(10)]
        first = await town.holder("r0")
        mine = [run for run in mine if await town.holder(run) is first]
        first.kill()
        at = town.loop.time()
        for run in mine:
            assert await town.claimed(run, 2) - at < 1.0
            assert (await town.claims(run))[1].reason == "adopted"
            assert town.tasks(run) == 2  # one hint, and the task of the claim before
        for run in mine:
            assert await town.ended(run) == "completed"
        await town.until(lambda: not town.server.streams["RUNFOLD_TASKS"].messages)

    play(scene)


def test_a_worker_that_comes_after_a_killed_one_claims_its_runs_within_a_second(
    play: Play,
) -> None:
    async def scene(town: Town) -> None:
        (first,) = await town.crew(1)
        await Fleet(town.store).start("reader", 1, run_id="r")
        await town.claimed("r", 1)
        first.kill()
        second = await town.worker()
        at = town.loop.time()
        assert await town.claimed("r", 2) - at < 1.0
        assert await town.holder("r") is second

    play(scene)


def test_a_worker_that_stands_still_is_silent_and_left_to_the_ack_wait(play: Play) -> None:
    async def scene(town: Town) -> None:
        first, before = await town.at_work(3)
        first.process.stop()
        await asyncio.sleep(ACK_WAIT_S - 3)
        assert len(await town.claims("r")) == 1 and town.published == before
        await town.claimed("r", 2, within_s=5)
        first.process.go_on()
        assert await town.ended("r") == "completed"
        assert town.published == before and len(await town.claims("r")) == 2

    play(scene)


def test_a_worker_that_is_cut_off_for_a_moment_keeps_its_run(play: Play) -> None:
    """The alarm is false: the run is woken, its holder is asked, says yes, and the task goes."""

    async def scene(town: Town) -> None:
        first, before = await town.at_work(3)
        town.client(first).cut(reconnect_s=0.45)
        await town.until(lambda: town.published > before, within_s=0.45)
        await town.until(lambda: town.tasks("r") == 1, within_s=2)
        assert await town.ended("r") == "completed"
        assert len(await town.claims("r")) == 1
        await town.until(lambda: not town.tasks("r"), within_s=2)

    play(scene)


def test_a_worker_that_came_back_is_watched_as_before(play: Play) -> None:
    async def scene(town: Town) -> None:
        first, before = await town.at_work(3)
        town.client(first).cut(reconnect_s=0.45)
        await town.until(lambda: town.published > before, within_s=0.45)
        await asyncio.sleep(1.5)
        first.kill()
        at = town.loop.time()
        assert await town.claimed("r", 2) - at < 1.0

    play(scene)


def test_nobody_is_suspected_after_the_server_went_away_for_everybody(play: Play) -> None:
    """The first to be connected again would find the others gone."""

    async def scene(town: Town) -> None:
        first, before = await town.at_work(4)
        others = [member for member in town.members if member is not first]
        for number, member in enumerate([*others, first]):
            town.client(member).cut(reconnect_s=0.3 * (number + 1))
        await asyncio.sleep(4)
        assert town.published == before and len(await town.claims("r")) == 1

    play(scene)


def test_alarm_after_alarm_leaves_a_run_with_one_hint_and_its_holder(play: Play) -> None:
    async def scene(town: Town) -> None:
        first, before = await town.at_work(4)
        most = 0
        for _ in range(8):
            town.client(first).cut(reconnect_s=0.4)
            for _ in range(90):
                await asyncio.sleep(0.01)
                most = max(most, town.tasks("r"))
        assert town.published > before + 1, "there was more than one alarm"
        assert most <= 3, "two watchers may be at it at the same moment"
        assert await town.ended("r") == "completed"
        assert len(await town.claims("r")) == 1

    play(scene)


def test_a_run_with_a_write_under_way_is_not_hurried(play: Play) -> None:
    """A person is asked after the ack wait, as ever, and no worker's place is taken meanwhile."""

    async def scene(town: Town) -> None:
        await town.crew(3)
        await Fleet(town.store).start("writer", 1, run_id="r")
        await town.claimed("r", 1)
        await asyncio.sleep(1)
        first, before = await town.holder("r"), town.published
        first.kill()
        at = town.loop.time()
        await asyncio.sleep(ACK_WAIT_S / 2)
        assert town.published == before
        assert await town.claimed("r", 2) - at > ACK_WAIT_S / 2
        assert await town.ended("r") == "indeterminate"

    play(scene)


def test_a_run_that_loses_worker_after_worker_waits_for_the_ack_wait(play: Play) -> None:
    async def scene(town: Town) -> None:
        await town.crew(5)
        await Fleet(town.store).start("reader", 1, run_id="r")
        took_s: list[float] = []
        for times in range(1, 5):
            at = town.loop.time()
            took_s.append(await town.claimed("r", times) - at)
            (await town.holder("r")).kill()
        assert took_s[1] < 1.0 and took_s[2] < 1.0 < ACK_WAIT_S - 5 < took_s[3]

    play(scene)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_worker_that_dies_with_a_task_before_it_claims_is_replaced_at_once(
    play: Play, monkeypatch: pytest.MonkeyPatch, restarted: bool
) -> None:
    """No journal says who had the task."""
    taken = Dispatcher._taken
    doomed: list[str] = []

    async def dies(self: Dispatcher, task: Any, lease: Any) -> Any:
        if not doomed:
            doomed.append(self.worker)
            await asyncio.Event().wait()
        return await taken(self, task, lease)

    monkeypatch.setattr(Dispatcher, "_taken", dies)

    async def scene(town: Town) -> None:
        await town.crew(1 if restarted else 3)
        await Fleet(town.store).start("reader", 1, run_id="r")
        await town.until(lambda: doomed)
        for member in town.members:
            if member.worker is not None and member.worker.id == doomed[0]:
                member.kill()
        if restarted:
            await town.worker()
        at = town.loop.time()
        assert await town.claimed("r", 1) - at < 1.5
        assert town.published == 2

    play(scene)


def test_most_of_a_fleet_dies_at_once_and_the_rest_goes_on_with_its_runs(play: Play) -> None:
    async def scene(town: Town) -> None:
        crew = await town.crew(8)
        runs = [f"r{number}" for number in range(24)]
        for run in runs:
            await Fleet(town.store).start("reader", 1, run_id=run)
            await town.claimed(run, 1)
        lost = [run for run in runs if await town.holder(run) in crew[:6]]
        assert len(lost) > 5
        for member in crew[:6]:
            member.kill()
        at = town.loop.time()
        for run in lost:
            assert await town.claimed(run, 2) - at < 3.0

    play(scene)


def test_a_worker_that_is_stopped_in_order_leaves_nothing_to_wake(play: Play) -> None:
    async def scene(town: Town) -> None:
        first, *_ = await town.crew(3)
        await Fleet(town.store).start("reader", 1, run_id="r")
        await town.claimed("r", 1)
        first = await town.holder("r")
        before = town.published
        first.finish()
        await asyncio.wait([first.main])
        await asyncio.sleep(2)
        assert town.published == before

    play(scene)
