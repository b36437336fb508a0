"""UR-31, UR-33, UR-42: long journals, many runs, servers that come and go."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cases.fleet_agents import plan
from cases.fleet_world import ENDED, RESTS, Workers, fds, fleet_on, rss
from cases.world import World
from cases.zygote import Child, Zygote
from kit.raw_client import ask
from kit.servers import NatsServer, monitor
from kit.waiting import eventually

pytestmark = pytest.mark.real
MB = 1024 * 1024


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """Of the test's own: it counts what the server counts, or does it harm."""
    server = await NatsServer.start(tmp_path / "server")
    yield server
    await server.stop()


@pytest.fixture
async def fleet(world: World, zygote: Zygote, server: NatsServer) -> AsyncIterator[Workers]:
    async with fleet_on(world.home, zygote, server.url) as fleet:
        yield fleet


async def connections(server: NatsServer) -> list[dict[str, Any]]:
    return (await monitor(server.monitor_url, "connz?subs=1"))["connections"]


async def connection_of(server: NatsServer, fleet: Workers) -> dict[str, Any]:
    """That of the only worker: the one that listens for its own name."""
    (report,) = await fleet.fleet.workers(wait_s=0.3)
    found = [
        one
        for one in await connections(server)
        if any(report["worker"] in subject for subject in one.get("subscriptions_list", []))
    ]
    assert len(found) == 1, found
    return found[0]


# ---- UR-31 ------------------------------------------------------------------------------------


async def test_ur31_a_long_run_is_taken_over_from_its_last_commit(
    fleet: Workers, server: NatsServer
) -> None:
    """UR-31: 5 000 records, results of 2 kB; killed near the end of the last turn; another worker
    takes over and makes the last calls: it is sent far fewer messages than the journal has, and
    grows by less than 50 MB (the case allows 200)."""
    agents = [{"name": "counter"}]
    first = await fleet.worker(agents, ack_wait_s=2, sweep_s=600)
    fleet.hold("counter")
    given = {"turns": 25, "calls": 100, "size": 2000, "hold_at": "24/95"}
    await fleet.start("long", given, "counter")
    await eventually(fleet.reads.lines, 90)
    await fleet.kill(first)
    second = await fleet.worker(agents, ack_wait_s=2, sweep_s=600)
    before = rss(second)
    await eventually(lambda: len(fleet.reads.lines()) == 2, 20, what="the takeover")
    sent = (await connection_of(server, fleet))["out_msgs"]
    assert sent < 500, f"{sent} messages were sent to the worker before its first call"
    fleet.go("counter")
    assert (await fleet.end("long")).status == "completed"
    sent = (await connection_of(server, fleet))["out_msgs"]
    assert sent < 1000, f"{sent} messages were sent to the worker"
    assert rss(second) - before < 50 * MB
    records = (await fleet.check())["long"]
    assert len(records) > 5000
    assert records[-1]["message"]["content"] == 25


# ---- UR-33 ------------------------------------------------------------------------------------

RUNS = 2000


async def test_ur33_many_short_runs_leave_nothing_behind(
    fleet: Workers, server: NatsServer
) -> None:
    """UR-33: 2 000 short runs on one worker (the case: 3 000): memory is within 50 MB
    of the level at 500 runs; subscriptions, consumers and descriptors are as at the start."""
    worker = await fleet.worker(ack_wait_s=10)

    async def level() -> tuple[int, int, int]:
        found = await connection_of(server, fleet)
        streams = (await monitor(server.monitor_url, "jsz?streams=1"))["account_details"]
        consumers = sum(
            s["state"]["consumer_count"] for one in streams for s in one["stream_detail"]
        )
        return found["subscriptions"], consumers, fds(worker)

    async def many(first: int, last: int) -> None:
        runs = {f"r{n}": plan() for n in range(first, last)}
        await fleet.starts(runs, at_once=50)
        await fleet.reaches(list(runs), {"completed"}, 90)

    await many(0, 500)
    at_start, at_500 = await level(), rss(worker)
    await many(500, RUNS)
    assert rss(worker) - at_500 < 50 * MB

    async def rests() -> bool:
        return await level() == at_start

    await eventually(rests, 20)
    queue = await fleet.store.tasks.backlog("fleet")
    assert (queue.pending, queue.in_progress) == (0, 0)
    assert len(fleet.asked.lines()) == RUNS
    await fleet.stop(worker)


# ---- UR-42 ------------------------------------------------------------------------------------


async def test_ur42_an_idle_worker_hears_after_server_restarts(
    fleet: Workers, server: NatsServer
) -> None:
    """UR-42: the server is killed and restarted ten times under an idle worker, with random gaps;
    after each, a run is claimed and ends. Then the consumer is deleted: it is made again, and the
    next run ends; the log says so."""
    worker = await fleet.worker()
    for number in range(10):
        await server.kill()
        await asyncio.sleep(random.uniform(0, 0.3))  # the gap
        await server.restart()
        await fleet.start(f"r{number}", plan(["charge"]))
        await fleet.reaches([f"r{number}"], {"completed"}, 10)
    for name in ("fleet", "fleet~high", "fleet~low"):
        assert (await ask(server.url, f"$JS.API.CONSUMER.DELETE.RUNFOLD_TASKS.{name}"))["success"]
    await fleet.start("after", plan(["charge"]))
    await fleet.reaches(["after"], {"completed"}, 10)
    assert "can't be pulled" in fleet.log(worker)
    assert len(fleet.ledger.lines()) == 11
    await fleet.check()
    await fleet.stop(worker)


async def test_ur42_a_stream_that_is_gone_is_a_loud_failure(
    fleet: Workers, server: NatsServer
) -> None:
    """UR-42: the tasks' stream is deleted under a worker: it exits, not 0, and names the stream."""
    worker = await fleet.worker()
    assert (await ask(server.url, "$JS.API.STREAM.DELETE.RUNFOLD_TASKS"))["success"]
    done = await fleet.ended(worker, 15)
    assert done.code == 9 and "no stream RUNFOLD_TASKS" in done.err


WORKERS, STORM, BOUNCES = 12, 120, 6


async def test_ur42_a_storm_of_reconnects(fleet: Workers, server: NatsServer) -> None:
    """UR-42: 12 workers with 120 runs in progress (the case: 50 and 300; two cores here) while the
    server is killed and restarted 6 times: all runs end or wait for a person, each effect happened
    at most once, no worker died, and each has one connection, the consumers are three."""
    workers = [await fleet.worker(ready=False, ack_wait_s=2) for _ in range(WORKERS)]
    await eventually(lambda: len(list(fleet.home.glob("ready-*"))) == WORKERS, 30)
    runs = [f"r{n}" for n in range(STORM)]
    given = plan([("lookup", {"s": 0.3})], [("charge", {"s": 0.3})], [("lookup", {"s": 0.3})])
    starting = asyncio.create_task(fleet.starts(dict.fromkeys(runs, given)))
    for _ in range(BOUNCES):
        await asyncio.sleep(random.uniform(0.2, 0.6))
        await server.kill()
        await asyncio.sleep(random.uniform(0, 0.3))
        await server.restart()
    await starting
    await fleet.reaches(runs, ENDED | RESTS, 60)
    await fleet.check()
    assert not any(child.ended.is_set() for child in workers)
    statuses = list((await fleet.statuses()).values())
    assert set(statuses) <= {"completed", "indeterminate"}
    assert statuses.count("completed") >= STORM // 2  # a write is unknown only where cut off
    effects = [run for run, _, _ in fleet.ledger.lines()]
    assert len(effects) == len(set(effects))
    info = await ask(server.url, "$JS.API.STREAM.INFO.RUNFOLD_TASKS")
    assert info["state"]["consumer_count"] == 3
    assert len(await fleet.fleet.workers(wait_s=1.0)) == WORKERS
    assert len(await connections(server)) == WORKERS + 1
    await _all_stopped(fleet, workers)


async def _all_stopped(fleet: Workers, workers: list[Child]) -> None:
    for done in await asyncio.gather(*(fleet.stop(worker) for worker in workers)):
        assert done.code == 0
