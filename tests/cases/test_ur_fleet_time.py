"""UR-34, UR-37: sleeping and waiting runs over an outage; instants, zones, odd times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cases.fleet_agents import plan
from cases.fleet_world import FLEET, Workers, fleet_on
from cases.world import World
from cases.zygote import Zygote
from kit.raw_client import ask
from kit.servers import NatsServer
from kit.waiting import eventually

pytestmark = pytest.mark.real


@pytest.fixture
async def fleet(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[Workers]:
    async with fleet_on(world.home, zygote, nats_url, namespace) as fleet:
        yield fleet


# ---- UR-34 ------------------------------------------------------------------------------------

BOTH = (*FLEET, {"name": "sleeper"})


async def test_ur34_timers_and_approvals_outlive_everything(
    world: World, zygote: Zygote, tmp_path: Path
) -> None:
    """UR-34: 200 runs sleep, 20 wait for approval; every worker and the server are killed, and come
    back (three workers) when all sleeps are over: each run goes on once; the pending list is the
    old one, with the markers noted before, and each approve works once."""
    server = await NatsServer.start(tmp_path / "server")
    try:
        async with fleet_on(world.home, zygote, server.url) as fleet:
            first = [await fleet.worker(BOTH) for _ in range(2)]
            sleepers = [f"s{n}" for n in range(200)]
            gated = [f"g{n:02}" for n in range(20)]
            wakes = datetime.now(UTC) + timedelta(seconds=6)
            await fleet.starts({run: plan(["gated"]) for run in gated})
            await fleet.starts({run: {"at": wakes.isoformat()} for run in sleepers}, "sleeper")
            await fleet.reaches(gated, {"awaiting_approval"})
            await fleet.reaches(sleepers, {"waiting"}, 5)  # none has woken
            before = await fleet.fleet.inbox()
            assert len(before) == 20
            for worker in first:
                await fleet.kill(worker)
            await server.kill()
            await asyncio.sleep(max((wakes - datetime.now(UTC)).total_seconds(), 0))  # the outage
            await server.restart()
            for _ in range(3):
                await fleet.worker(BOTH)
            await fleet.reaches(sleepers, {"completed"}, 15)
            assert await fleet.fleet.inbox() == before
            for item in before:
                said = [
                    await fleet.fleet.signal(item.run, "approve", {"marker": item.marker})
                    for _ in range(2)
                ]
                assert [receipt.result for receipt in said] == ["applied", "repeated"]
            await fleet.reaches(gated, {"completed"})
            assert len(fleet.ledger.lines()) == 20
            journals = await fleet.check()
            for run in sleepers:
                types = [r["type"] for r in journals[run]]
                assert types == ["run.started", "claim", "commit", "claim", "run.completed"], run
                assert datetime.fromisoformat(journals[run][3]["at"]) >= wakes
            assert await fleet.store.tasks.timers() == 0
    finally:
        await server.stop()


async def test_ur34_a_timer_outlives_who_owes_it(fleet: Workers) -> None:
    """UR-34: the worker dies after the record that begins the wait and before its timer is set; the
    next one before the task is acknowledged: the run wakes, once."""
    agents = [{"name": "sleeper"}]
    first = await fleet.worker(agents, crash="commit:after")
    await fleet.start("r1", {"delay": 1.5}, "sleeper")
    await fleet.ended(first)
    second = await fleet.worker(agents, crash="ack:before")
    await fleet.ended(second)
    await fleet.worker(agents)
    await fleet.reaches(["r1"], {"completed"}, 15)
    types = [r["type"] for r in (await fleet.check())["r1"]]
    assert types == ["run.started", "claim", "commit", "claim", "run.completed"]


async def test_ur34_lost_tasks_and_timers_are_made_again(fleet: Workers) -> None:
    """UR-34: the tasks' stream is purged while 10 runs sleep, 10 wait for a worker and 10 have lost
    theirs: the sweep finds them all; each effect happens once."""
    first = await fleet.worker(BOTH)
    fleet.hold("lookup")
    kinds = {
        "s": ("sleeper", {"delay": 1}),
        "h": ("fleet", plan([("lookup", {"hold": "lookup"})], ["charge"])),
    }
    for kind, (agent, given) in kinds.items():
        await fleet.starts({f"{kind}{n}": given for n in range(10)}, agent)
    await eventually(lambda: len(fleet.reads.lines()) == 10)
    await fleet.reaches([f"s{n}" for n in range(10)], {"waiting", "completed"})
    await fleet.kill(first)
    await fleet.starts({f"q{n}": plan(["charge"]) for n in range(10)})
    tasks = f"{fleet.namespace.upper()}_TASKS"
    assert (await ask(fleet.url, f"$JS.API.STREAM.PURGE.{tasks}"))["success"]
    fleet.go("lookup")
    for _ in range(2):
        await fleet.worker(BOTH)
    await fleet.reaches(list(await fleet.statuses()), {"completed"}, 30)
    assert len(fleet.ledger.lines()) == 20
    await fleet.check()


# ---- UR-37 ------------------------------------------------------------------------------------

ZONES = {"sleeper-utc": "UTC", "sleeper-ny": "America/New_York", "sleeper-in": "Asia/Kolkata"}
NY = "America/New_York"
SOON: dict[str, tuple[dict[str, Any], str]] = {
    "aware": ({"at": "2100-06-01T12:00:00+05:30"}, "2100-06-01T06:30:00.000Z"),
    "zoned": ({"at": "2100-07-01T02:30", "zone": NY}, "2100-07-01T06:30:00.000Z"),
    # 2026-11-01T01:30 happens twice in New York: fold says which; 2027-03-14T02:30 never does, and
    # is read with the offset before the switch (fold 0) or after it (fold 1)
    "first": ({"at": "2027-11-07T01:30", "zone": NY, "fold": 0}, "2027-11-07T05:30:00.000Z"),
    "second": ({"at": "2027-11-07T01:30", "zone": NY, "fold": 1}, "2027-11-07T06:30:00.000Z"),
    "gap0": ({"at": "2027-03-14T02:30", "zone": NY, "fold": 0}, "2027-03-14T07:30:00.000Z"),
    "gap1": ({"at": "2027-03-14T02:30", "zone": NY, "fold": 1}, "2027-03-14T06:30:00.000Z"),
    "last": ({"at": "9999-12-31T23:59:59+00:00"}, "9999-12-31T23:59:59.000Z"),
}
AT_ONCE: dict[str, dict[str, Any]] = {
    "past": {"at": "2026-03-08T02:30", "zone": NY},
    "ancient": {"at": "0001-01-01T00:00:00+00:00"},
    "zero": {"delay": 0},
    "negative": {"delay": -5},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "naive": ({"at": "2100-06-01T12:00:00"}, "no time zone"),
    "too-long": ({"delay": 1e12}, "year 9999"),
    "too-late": ({"at": "9999-12-31T23:59:59-05:00"}, "9999"),
    "too-early": ({"at": "0001-01-01T00:00:00+05:00"}, ""),
    "leap": ({"at": "2026-12-31T23:59:60Z"}, "second"),  # Python makes no such datetime
}


async def test_ur37_an_instant_is_the_same_in_every_zone(fleet: Workers) -> None:
    """UR-37: the same waits under TZ=UTC, America/New_York and Asia/Kolkata: aware times are the
    same instant everywhere, a gap and a fold of the clock mean what Python says, a moment in the
    past and a delay of 0 or less go on at once; naive times, leap seconds and what lies after 9999
    end the run when it asks, with that reason; what waits can be cancelled."""
    waiting: list[str] = []
    for agent, zone in ZONES.items():
        await fleet.worker([{"name": agent}], zone=zone)
        await fleet.starts({f"{agent}.{n}": given for n, (given, _) in SOON.items()}, agent)
        await fleet.starts({f"{agent}.{n}": given for n, given in AT_ONCE.items()}, agent)
        await fleet.starts({f"{agent}.{n}": given for n, (given, _) in REFUSED.items()}, agent)
        waiting += [f"{agent}.{n}" for n in SOON]
    for agent in ZONES:
        await fleet.reaches([f"{agent}.{n}" for n in AT_ONCE], {"completed"})
        await fleet.reaches([f"{agent}.{n}" for n in REFUSED], {"failed"})
        await fleet.reaches([f"{agent}.{n}" for n in SOON], {"waiting"})
        for name, (_, instant) in SOON.items():
            (commit,) = await fleet.records(f"{agent}.{name}", "commit")
            assert commit["waits"]["until"] == instant, (agent, name)
        for name, (_, text) in REFUSED.items():
            (commit,) = await fleet.records(f"{agent}.{name}", "commit")
            assert commit["action"] == "fail", (agent, name)
            assert text in commit["detail"] or text in commit["reason"], (agent, name, commit)
        for name in AT_ONCE:
            claims = await fleet.records(f"{agent}.{name}", "claim")
            assert len(claims) <= 2, (agent, name)
    await asyncio.gather(*(fleet.fleet.cancel(run) for run in waiting))
    await fleet.reaches(waiting, {"cancelled"})
    for child in fleet.children:
        assert "Traceback" not in fleet.log(child)
    await fleet.check()


async def test_ur37_a_delay_is_waited_for_and_once(fleet: Workers) -> None:
    """UR-37: 30 runs with a delay of 1 s: none goes on before that by its own record of it."""
    await fleet.worker([{"name": "sleeper"}])
    runs = [f"r{n}" for n in range(30)]
    await fleet.starts({run: {"delay": 1.0} for run in runs}, "sleeper")
    await fleet.reaches(runs, {"completed"})
    for records in (await fleet.check()).values():
        commit, woken = records[2], records[3]
        assert (commit["type"], woken["type"]) == ("commit", "claim")
        until = datetime.fromisoformat(commit["waits"]["until"])
        assert datetime.fromisoformat(woken["at"]) >= until - timedelta(milliseconds=50)
