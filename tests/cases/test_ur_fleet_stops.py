"""UR-56, UR-57: workers that are stopped in order, and runs that kill their workers."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cases.fleet_agents import plan
from cases.fleet_world import ENDED, FLEET, RESTS, Workers, fleet_on
from cases.world import World, named
from cases.zygote import Zygote
from kit.waiting import eventually

pytestmark = pytest.mark.real
CHARGE = "tool/1/0/charge"


@pytest.fixture
async def fleet(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[Workers]:
    async with fleet_on(world.home, zygote, nats_url, namespace) as fleet:
        yield fleet


async def draining(fleet: Workers) -> bool:
    return any(report["draining"] for report in await fleet.fleet.workers(wait_s=0.2))


# ---- UR-56 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
async def test_ur56_within_the_grace_the_write_is_recorded(
    fleet: Workers, number: signal.Signals
) -> None:
    """UR-56: stopped inside an unsafe call that ends within the grace: its result is recorded, the
    run released, exit 0; what comes after the signal is not taken; another worker goes on."""
    fleet.hold("charge")
    a = await fleet.worker(grace_s=20)
    await fleet.start("r1", plan([("charge", {"hold": "charge"})], ["charge"]))
    await eventually(fleet.ledger.lines)
    a.kill(number)
    await eventually(lambda: draining(fleet))
    await fleet.starts({f"n{n}": plan() for n in range(5)})
    fleet.go("charge")
    assert (await fleet.ended(a)).code == 0
    records = await fleet.records("r1")
    assert named(records)[-2:] == [f"step.completed {CHARGE}", "release"]
    assert not fleet.asked.lines("n0") and len(await fleet.records("n0")) == 1
    await fleet.worker()
    runs = ["r1", *(f"n{n}" for n in range(5))]
    await fleet.reaches(runs, {"completed"}, 10)
    assert len(fleet.ledger.lines()) == 2
    await fleet.check()


async def test_ur56_beyond_the_grace_the_write_is_unknown(fleet: Workers) -> None:
    """UR-56: an async unsafe call outlasts the grace of 1 s: the worker exits in time, the run is
    Indeterminate and not failed, also after others looked at it; `done` settles it."""
    fleet.hold("charge")
    a = await fleet.worker(grace_s=1)
    await fleet.start("r1", plan([("charge", {"hold": "charge"})]))
    await eventually(fleet.ledger.lines)
    a.kill(signal.SIGTERM)
    assert (await fleet.ended(a, 1 + 5)).code == 0
    for _ in range(2):
        b = await fleet.worker()
        await fleet.reaches(["r1"], {"indeterminate"}, 15)
        await fleet.stop(b)
    await fleet.check()
    (unknown,) = (await fleet.fleet.get("r1")).outcome.unknown  # type: ignore[union-attr]
    assert unknown.step == CHARGE
    await fleet.worker()
    await fleet.fleet.signal(
        "r1", "reconcile", {"step": CHARGE, "outcome": "done", "result": "paid"}
    )
    await fleet.reaches(["r1"], {"completed"})
    assert len(fleet.ledger.lines()) == 1
    await fleet.check()


async def test_ur56_a_blocked_write_beyond_the_grace(fleet: Workers) -> None:
    """UR-56: as above with a sync unsafe tool, whose thread can't be stopped: the process ends all
    the same, within grace + 4 s; never a second call."""
    fleet.hold("block")
    a = await fleet.worker(grace_s=1)
    await fleet.start("r1", plan([("block", {"hold": "block"})]))
    await eventually(fleet.ledger.lines)
    a.kill(signal.SIGTERM)
    assert (await fleet.ended(a, 1 + 5)).code == 0
    await fleet.worker()
    await fleet.reaches(["r1"], {"indeterminate"}, 15)
    assert len(fleet.ledger.lines()) == 1
    await fleet.check()


async def test_ur56_a_second_signal_ends_the_grace(fleet: Workers) -> None:
    """UR-56: a grace of 600 s, and a second SIGTERM: the worker exits now; Indeterminate."""
    fleet.hold("charge")
    a = await fleet.worker(grace_s=600)
    await fleet.start("r1", plan([("charge", {"hold": "charge"})]))
    await eventually(fleet.ledger.lines)
    a.kill(signal.SIGTERM)
    await eventually(lambda: draining(fleet))
    a.kill(signal.SIGTERM)
    assert (await fleet.ended(a, 10)).code == 0
    await fleet.worker()
    await fleet.reaches(["r1"], {"indeterminate"}, 15)
    assert len(fleet.ledger.lines()) == 1
    await fleet.check()


async def test_ur56_stopped_while_it_waits(fleet: Workers) -> None:
    """UR-56: stopped while one run waits for its model and another for approval: exit 0 within the
    grace, the model's run is released, not lost; the approval's goes on under its marker."""
    fleet.hold("model")
    a = await fleet.worker(grace_s=1)
    await fleet.start("m", plan(["charge"]) | {"hold_model": "model"})
    await fleet.start("g", plan(["gated"]))
    await fleet.reaches(["g"], {"awaiting_approval"})
    await eventually(lambda: len(fleet.asked.lines()) == 2)
    a.kill(signal.SIGTERM)
    assert (await fleet.ended(a, 1 + 5)).code == 0
    assert (await fleet.records("m"))[-1]["type"] == "release"
    fleet.go("model")
    await fleet.worker(restart_limit=1)  # nothing of this was a loss
    await fleet.approve("g")
    await fleet.reaches(["m", "g"], {"completed"})
    assert sorted(run for run, _, _ in fleet.ledger.lines()) == ["g", "m"]
    await fleet.check()


async def test_ur56_a_rolling_restart_loses_nothing(fleet: Workers) -> None:
    """UR-56: three workers are replaced one after another, twice, over 100 runs with unsafe calls
    that end within the grace: every run completes, each effect happened once, each exit is 0; no
    worker counts as lost (restart limit 1)."""
    given = plan([("charge", {"s": 0.2})], [("lookup", {"s": 0.2})], [("charge", {"s": 0.2})])
    runs = [f"r{n}" for n in range(100)]
    options: dict[str, Any] = {"grace_s": 10, "restart_limit": 1, "concurrency": 8}
    serving = [await fleet.worker(**options) for _ in range(3)]
    await fleet.starts(dict.fromkeys(runs, given))
    for _ in range(6):
        serving.append(await fleet.worker(**options))
        await fleet.stop(serving.pop(0))
    await fleet.reaches(runs, ENDED | RESTS, 60)
    assert set((await fleet.statuses()).values()) == {"completed"}
    journals = await fleet.check()
    assert len(fleet.ledger.lines()) == 200
    assert any(r["type"] == "release" for records in journals.values() for r in records)


# ---- UR-57 ------------------------------------------------------------------------------------

BOTH = (*FLEET, {"name": "importer"})


@pytest.mark.parametrize("kind", ["tool", "import"])
async def test_ur57_a_poison_pill_is_stopped_by_the_restart_limit(
    fleet: Workers, kind: str
) -> None:
    """UR-57: a run kills each of three supervised workers that takes it, by its tool or before its
    first step: after three the run has failed and says how many; 20 healthy runs finish; what the
    workers' deaths cost them is no failure of theirs; each effect happened at most once."""
    healthy = [f"h{n}" for n in range(20)]
    async with fleet.supervised(3, BOTH, restart_limit=3):
        if kind == "tool":
            await fleet.start("bad", plan(["poison"]))
        else:
            await fleet.start("bad", {}, "importer")
        given = plan(*[[("lookup", {"s": 0.1})] for _ in range(5)])
        await fleet.starts(dict.fromkeys(healthy, given))
        await fleet.reaches(["bad"], {"failed"}, 40)
        await fleet.reaches(healthy, {"completed"}, 40)
    deaths = [child for child in fleet.children if child.ended.is_set()]
    assert [child.code for child in deaths] == [137] * 3
    assert len(fleet.reads.lines("bad")) == 3
    records = (await fleet.check())["bad"]
    assert records[-1]["reason"] == "restart_limit"
    assert "3 workers in a row were lost" in records[-1]["detail"]
    state = await fleet.fleet.get("bad")
    assert "3 workers" in str(state.outcome)


async def test_ur57_a_cycling_run_is_cancelled(fleet: Workers) -> None:
    """UR-57: while a run kills one worker after another, and would for long, it is cancelled: it
    ends, and kills nobody any more."""
    async with fleet.supervised(2, restart_limit=1000):
        await fleet.start("bad", plan(["poison"]))
        await eventually(lambda: len(fleet.reads.lines()) >= 2, 30)
        await fleet.fleet.cancel("bad", reason="it kills workers")
        await fleet.reaches(["bad"], {"cancelled"}, 15)
        killed = len(fleet.reads.lines())
        await fleet.start("good", plan(["charge"]))
        await fleet.reaches(["good"], {"completed"})
        assert len(fleet.reads.lines()) == killed <= 4
    await fleet.check()


async def test_ur57_deploys_use_up_no_restart(fleet: Workers) -> None:
    """UR-57: with a restart limit of 2, six workers are stopped in order while they hold the run,
    beyond their grace; one is killed: the run goes on, and ends."""
    fleet.hold("lookup")
    await fleet.start("r1", plan([("lookup", {"hold": "lookup"})]))
    for number in range(6):
        a = await fleet.worker(restart_limit=2, grace_s=0)
        await eventually(lambda n=number: len(fleet.reads.lines()) == n + 1, 15)
        await fleet.stop(a)
    killed = await fleet.worker(restart_limit=2)
    await eventually(lambda: len(fleet.reads.lines()) == 7, 15)
    await fleet.kill(killed)
    fleet.go("lookup")
    await fleet.worker(restart_limit=2)
    await fleet.reaches(["r1"], {"completed"})
    records = (await fleet.check())["r1"]
    assert [r["type"] for r in records].count("release") == 6
