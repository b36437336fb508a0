"""Waits for a time: no crash loses one, no wrong clock makes one wake twice or never (R63)."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kit.fleet import Crew, crew_on, instant
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.records import Commit
from journal.waits import instant_text

pytestmark = pytest.mark.real
HOUR_S = 3600.0


@pytest.fixture
async def crew(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        yield crew


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """One that may be killed."""
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    yield server
    await server.stop()


def soon(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


async def waits(crew: Crew, run: str) -> list[Commit]:
    """The commits that begin a wait."""
    records = await crew.records(run)
    return [one for one in records if isinstance(one, Commit) and one.waits.until]


async def fired_once_each(crew: Crew, run: str) -> float:
    """Each wait of the run was followed by one claim, not before it was due; how late the last of
    them was, in seconds."""
    late_s = 0.0
    claims = await crew.claims(run)
    for wait in await waits(crew, run):
        late_s = (
            instant(next(claim for claim in claims if claim.n > wait.n))
            - datetime.fromisoformat(wait.waits.until).timestamp()
        )
        assert late_s >= 0, (run, claims)
    assert [claim.reason for claim in claims] == ["new"] + ["wake"] * len(await waits(crew, run))
    assert len(crew.effects(run)) == 1
    return late_s


async def test_timers_outlive_a_killed_server_and_an_outage_of_all_workers_and_fire_once(
    own_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with crew_on(own_server.url, namespace, tmp_path / "crew") as crew:
        workers = [await crew.worker("sleeper") for _ in range(2)]
        during, later = soon(2.0), soon(4.0)
        wanted = {
            "delay-during": {"delay_s": 2.0},
            "until-during": {"until": during},
            "delay-later": {"delay_s": 4.0},
            "until-later": {"until": later},
        }
        for run, input in wanted.items():
            await crew.start("sleeper", run, input)
        for run in wanted:
            await crew.status(run, "waiting")
        for worker in workers:
            await worker.kill()
        await own_server.kill()
        await own_server.restart()

        async def due() -> bool:
            (wait,) = await waits(crew, "delay-during")
            return max(wait.waits.until, during) < instant_text(datetime.now(UTC))

        await eventually(due, what="the first two are due, and no worker is there")
        assert {run: len(await crew.claims(run)) for run in wanted} == dict.fromkeys(wanted, 1)
        for _ in range(2):
            await crew.worker("sleeper")
        await crew.all_completed(list(wanted))
        late = {run: await fired_once_each(crew, run) for run in wanted}
        print("\nlate by", {run: f"{late_s:.3f} s" for run, late_s in late.items()})
        assert await crew.store.tasks.timers() == 0


async def test_an_instant_wakes_each_run_once_with_workers_two_hours_apart(crew: Crew) -> None:
    await crew.worker("sleeper", skew_s=HOUR_S)
    await crew.worker("sleeper", skew_s=-HOUR_S)
    runs = [f"until-{number}" for number in range(30)]
    await asyncio.gather(
        *(crew.start("sleeper", run, {"until": soon(1.0), "turns": 3}) for run in runs)
    )
    await crew.all_completed(runs)
    by = Counter()
    for run in runs:
        assert [step for _, step, _ in crew.effects(run)] == ["3/0"], "each turn was made once"
        claims, waited = await crew.claims(run), await waits(crew, run)
        assert len(claims) == 1 + len(waited) and await crew.restarts(run) == 0
        by.update(claim.worker for claim in claims)
    assert len(by) == 2, by
    print("\nclaims by worker", dict(by))


async def test_a_delay_wakes_each_run_once_with_workers_two_hours_apart(crew: Crew) -> None:
    """One that a worker an hour ahead began is overdue to that worker alone; its sweep finds it."""
    ahead = await crew.worker("sleeper", skew_s=HOUR_S, sweep_s=0.3)
    behind = await crew.worker("sleeper", skew_s=-HOUR_S, sweep_s=0.3)
    runs = [f"delay-{number}" for number in range(12)]
    for run in runs:
        await crew.start("sleeper", run, {"delay_s": 0.5})
    await crew.all_completed(runs)
    began: Counter[str] = Counter()
    for run in runs:
        claims = await crew.claims(run)
        began[claims[0].worker] += 1
        assert len(claims) == 2 and len(crew.effects(run)) == 1, (run, claims)
        if claims[0].worker == ahead.id:
            assert claims[1].worker == ahead.id
    print(f"\nbegan ahead {began[ahead.id]}, behind {began[behind.id]}")
    assert await crew.store.tasks.timers() <= began[ahead.id], "hints that come an hour late"


async def test_an_instant_in_the_year_2300_is_waited_for(crew: Crew) -> None:
    worker = await crew.worker("sleeper", sweep_s=0.3)
    await crew.start("sleeper", "far", {"until": "2300-01-01T00:00:00+00:00"})
    await crew.start("sleeper", "end", {"until": "9999-12-31T23:59:59+00:00"})
    for run, year in (("far", 2300), ("end", 9999)):
        state = await crew.status(run, "waiting")
        assert [one.until.year for one in state.waiting_on if one.until] == [year]

    async def settled() -> bool:
        return (await crew.consumer("sleeper"))["num_ack_pending"] == 0

    await eventually(settled, what="nothing of them is held")
    assert await crew.store.tasks.timers() == 2
    await crew.start("sleeper", "near", {"delay_s": 0.05})
    await crew.status("near", "completed")
    for run in ("far", "end"):
        assert (await crew.fleet.get(run)).status == "waiting"
        assert len(await crew.claims(run)) == 1, worker.log
    await crew.fleet.cancel("far", reason="enough")
    await crew.status("far", "cancelled")
    print(f"\ntimers after the cancellation: {await crew.store.tasks.timers()}")


async def test_an_instant_without_a_time_zone_fails_the_run_and_says_so(crew: Crew) -> None:
    worker = await crew.worker("sleeper")
    await crew.start("sleeper", "naive", {"until": "2300-01-01T00:00:00"})
    run = await crew.status("naive", "failed", timeout_s=10)
    assert "no time zone" in json.dumps([run.outcome.reason, run.outcome.detail]), run
    assert len(await crew.claims("naive")) == 1, worker.log


async def test_a_delay_beyond_the_year_9999_fails_the_run_and_says_so(crew: Crew) -> None:
    worker = await crew.worker("sleeper")
    await crew.start("sleeper", "endless", {"delay_s": 1e13 / 86400 * 20_000})
    run = await crew.status("endless", "failed", timeout_s=10)
    assert "9999" in json.dumps([run.outcome.reason, run.outcome.detail]), run
    assert len(await crew.claims("endless")) == 1, worker.log
