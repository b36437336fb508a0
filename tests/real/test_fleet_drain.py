"""A worker that is told to stop: a rolling restart loses, repeats and delays nothing (R51, R83)."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.fleet import Crew, WorkerProcess, crew_on, instant
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.records import Claim, Release, StepStarted

pytestmark = pytest.mark.real


@pytest.fixture
async def crew(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        yield crew


async def is_draining(crew: Crew, worker: WorkerProcess) -> None:
    """Wait until the worker says that it is being stopped."""

    async def says() -> bool:
        reports = await crew.fleet.workers(wait_s=0.1)
        return any(one["worker"] == worker.id and one["draining"] for one in reports)

    await eventually(says, what=f"{worker.name} is being stopped")


async def test_a_rolling_restart_under_load_loses_and_repeats_nothing_and_counts_no_restart(
    crew: Crew,
) -> None:
    turns, runs = 8, [f"roll-{number}" for number in range(20)]
    old = await asyncio.gather(*(crew.worker("roller", ack_wait_s=2.0) for _ in range(3)))
    for run in runs:
        await crew.start("roller", run, {"turns": turns})
    await asyncio.gather(*(crew.until(run, lambda one: one.iteration >= 1) for run in runs))
    ended_s: list[float] = []
    for worker in old:
        told = time.monotonic()
        worker.term()
        replacement = crew.begin_worker("roller", ack_wait_s=2.0)
        assert (await worker.ended()).code == 0, worker.log
        ended_s.append(time.monotonic() - told)
        await replacement.ready()
    await crew.all_completed(runs)

    handed_over_ms: list[float] = []
    released_by: Counter[str] = Counter()
    for run in runs:
        records = await crew.records(run)
        starts = [r for r in records if isinstance(r, StepStarted) and r.replay == "unsafe"]
        effects = crew.effects(run)
        assert [step for _, step, _ in effects] == [f"{n}/1" for n in range(turns)], run
        assert [key for _, _, key in effects] == [start.key for start in starts], run
        assert await crew.restarts(run) == 0
        claims = [record for record in records if isinstance(record, Claim)]
        assert {claim.reason for claim in claims} <= {"new", "wake"}, (run, claims)
        for release in (record for record in records if isinstance(record, Release)):
            released_by[release.by] += 1
            claim = next(claim for claim in claims if claim.n > release.n)
            handed_over_ms.append((instant(claim) - instant(release)) * 1000)
    assert all(released_by[worker.id] for worker in old), released_by
    print(
        f"\n{len(handed_over_ms)} hand-overs: release to next claim median "
        f"{statistics.median(handed_over_ms):.0f} ms, max {max(handed_over_ms):.0f} ms; "
        f"over 100 ms: {sum(ms > 100 for ms in handed_over_ms)}; SIGTERM to exit "
        f"{', '.join(f'{s:.2f} s' for s in ended_s)}"
    )


async def test_an_async_write_longer_than_the_grace_is_unknown_not_failed_and_never_repeated(
    crew: Crew,
) -> None:
    crew.hold("write")
    worker = await crew.worker("writer", grace_s=0.3)
    await crew.start("writer", "cut")
    await crew.reaches("write", worker)
    told = time.monotonic()
    worker.term()
    done = await worker.ended()
    print(f"\nSIGTERM to exit: {time.monotonic() - told:.2f} s with 0.3 s of grace")
    assert done.code == 0, done
    await crew.worker("writer")
    run = await crew.status("cut", "indeterminate")
    assert run.waiting_on[0].what == "reconcile"
    assert crew.reached("write") == 1 and crew.effects("cut") == []
    assert await crew.restarts("cut") == 0


async def test_a_write_in_a_thread_longer_than_the_grace_is_not_released_and_is_then_unknown(
    crew: Crew,
) -> None:
    crew.hold("thread")
    worker = await crew.worker("desk", grace_s=0.3)
    await crew.start("desk", "stuck")
    await crew.reaches("thread", worker)
    told = time.monotonic()
    worker.term()
    done = await worker.ended()
    print(f"\nSIGTERM to exit: {time.monotonic() - told:.2f} s with 0.3 s of grace")
    assert done.code == 0, done
    assert not any(isinstance(record, Release) for record in await crew.records("stuck"))
    second = await crew.worker("desk")
    await crew.claimed_by("stuck", second)
    await crew.status("stuck", "indeterminate")
    assert crew.reached("thread") == 1 and crew.effects("stuck") == []


async def test_a_second_sigterm_ends_the_grace_at_once(crew: Crew) -> None:
    crew.hold("write")
    worker = await crew.worker("writer", grace_s=3000)
    await crew.start("writer", "forced")
    await crew.reaches("write", worker)
    worker.term()
    await is_draining(crew, worker)
    assert worker.running
    worker.term()
    assert (await worker.ended()).code == 0
    await crew.worker("writer")
    await crew.status("forced", "indeterminate")
    assert crew.reached("write") == 1


async def test_a_stopping_worker_takes_nothing_new_and_lets_its_step_end(crew: Crew) -> None:
    crew.hold("read")
    first = await crew.worker("reader", grace_s=3000)
    await crew.start("reader", "held")
    await crew.reaches("read", first)
    first.term()
    await is_draining(crew, first)
    late = [await crew.start("reader", f"late-{number}") for number in range(5)]
    second = await crew.worker("reader")
    for run in late:
        await crew.claimed_by(run, second)
    assert first.running
    crew.let_go("read")
    assert (await first.ended()).code == 0
    await crew.all_completed(["held", *late])
    for run in late:
        assert [claim.worker for claim in await crew.claims(run)] == [second.id], first.log
    claims = await crew.claims("held")
    assert [(claim.worker, claim.reason) for claim in claims] == [
        (first.id, "new"),
        (second.id, "wake"),
    ]
    assert crew.reached("read", second) == len(late), "the read of the first worker was recorded"
