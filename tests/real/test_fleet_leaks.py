"""What a worker holds does not grow: not with the runs it has worked, nor with those that wait
(R63, R84, R85)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.fleet import Crew, WorkerProcess, crew_on
from kit.servers import NatsServer, monitor
from kit.waiting import eventually

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

PARKED = int(os.environ.get("RUNFOLD_TEST_PARKED", "3000"))
"""R84 asks for many more: `RUNFOLD_TEST_PARKED=20000`."""

ROUNDS = (500, 1_000, 1_500, 2_000)
AT_ONCE = 64
GROWTH_MB_MAX = 64.0


@pytest.fixture
async def crew(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        yield crew


async def each(
    runs: Sequence[str], do: Callable[[str], Coroutine[Any, Any, Any]], at_once: int = AT_ONCE
) -> None:
    left = iter(runs)

    async def some() -> None:
        for run in left:
            await do(run)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(some())


async def counted(crew: Crew, status: str) -> int:
    """By the headers of the last records."""
    return len([run async for run, _ in crew.store.heads(status=frozenset({status}))])


async def all_are(crew: Crew, status: str, count: int) -> None:
    async def there() -> bool:
        await asyncio.sleep(0.2)  # listing costs the server what the workers could use
        return await counted(crew, status) == count

    await eventually(there, 600, what=f"{count} runs are {status}")


async def idle(crew: Crew, agent: str, workers: Sequence[WorkerProcess]) -> None:
    """Every hint was followed, and nothing is held."""

    async def nothing() -> bool:
        found = await crew.consumer(agent)
        if found["num_ack_pending"] or found["num_pending"]:
            return False
        told = [await worker.stats() for worker in workers]
        return all(one["held"] == one["works"] == one["backlog"] == 0 for one in told)

    await eventually(nothing, 60, what="the workers are idle")


async def test_parked_runs_cost_a_worker_no_memory_and_all_of_them_wake(crew: Crew) -> None:
    runs = [f"parked-{number:06}" for number in range(PARKED)]
    worker = await crew.worker("waiter", ack_wait_s=10.0, sweep_s=30.0)
    await each(runs[:200], lambda run: crew.start("waiter", run))
    await all_are(crew, "waiting", 200)  # code and buffers are in place
    await idle(crew, "waiter", [worker])
    rss, tasks = [worker.rss_mb], [(await worker.stats())["tasks"]]
    began = time.monotonic()
    await each(runs[200:], lambda run: crew.start("waiter", run))
    started_s = time.monotonic() - began
    await all_are(crew, "waiting", PARKED)
    await idle(crew, "waiter", [worker])
    parked_s = time.monotonic() - began
    rss.append(worker.rss_mb)
    tasks.append((await worker.stats())["tasks"])

    async def wake(run: str) -> None:
        await crew.fleet.send(run, f"wake {run}", request_id="wake")

    began = time.monotonic()
    await each(runs, wake)
    await all_are(crew, "completed", PARKED)
    await idle(crew, "waiter", [worker])
    woken_s = time.monotonic() - began
    rss.append(worker.rss_mb)
    tasks.append((await worker.stats())["tasks"])
    print(
        f"\n{PARKED} runs: started in {started_s:.1f} s, parked after {parked_s:.1f} s, woken and "
        f"completed in {woken_s:.1f} s; RSS before, parked, woken: "
        f"{', '.join(f'{mb:.1f} MB' for mb in rss)}; tasks {tasks}"
    )
    assert max(rss) - rss[0] < GROWTH_MB_MAX
    assert tasks == [tasks[0]] * 3
    for run in (runs[0], runs[PARKED // 2], runs[-1]):
        state = await crew.fleet.get(run)
        assert state.outcome.message.content == [f"wake {run}"]
        assert [claim.reason for claim in await crew.claims(run)] == ["new", "wake"]


async def test_two_thousand_runs_leave_no_consumer_subscription_task_or_memory_behind(
    crew: Crew, nats_server: NatsServer
) -> None:
    workers = [await crew.worker("quick", ack_wait_s=10.0, sweep_s=1.0) for _ in range(2)]
    await each([f"warm-{number}" for number in range(100)], lambda run: crew.start("quick", run))
    await all_are(crew, "completed", 100)
    seen: list[tuple[int, int, list[dict[str, int]]]] = []
    rss: list[list[float]] = []
    began = time.monotonic()
    print()
    for before, upto in zip((0, *ROUNDS), ROUNDS, strict=False):
        runs = [f"run-{number}" for number in range(before, upto)]
        await each(runs, lambda run: crew.start("quick", run))
        await all_are(crew, "completed", 100 + upto)
        await idle(crew, "quick", workers)
        subs = (await monitor(nats_server.monitor_url, "subsz"))["num_subscriptions"]
        told = [await worker.stats() for worker in workers]
        seen.append((await crew.consumers(), subs, told))
        rss.append([worker.rss_mb for worker in workers])
        print(
            f"{upto} runs, {time.monotonic() - began:.1f} s: consumers {seen[-1][0]}, "
            f"subscriptions {subs}, workers {told}, "
            f"RSS {', '.join(f'{mb:.1f} MB' for mb in rss[-1])}"
        )
    for _, _, told in seen:
        for one in told:
            assert one.pop("waiting") <= 3 + 3, "three pulls, and what a sweep may be asking"
    assert all(one == seen[0] for one in seen), seen
    assert seen[0][0] == 3, "the agent's consumers, and no reader's"
    for first, last in zip(rss[0], rss[-1], strict=True):
        assert last - first < GROWTH_MB_MAX / 4
