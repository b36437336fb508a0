"""UR-14, UR-46: signals that race, runs that were cancelled, tools that will not hear of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
from cases.fleet_agents import plan
from cases.fleet_world import ENDED, Workers, fleet_on
from cases.world import World
from cases.zygote import Zygote
from kit.waiting import eventually

from journal.records import StepCompleted, VerdictAsk
from runfold import RunfoldError

pytestmark = pytest.mark.real


@pytest.fixture
async def fleet(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[Workers]:
    async with fleet_on(world.home, zygote, nats_url, namespace) as fleet:
        yield fleet


# ---- UR-12 ------------------------------------------------------------------------------------


async def test_ur12_an_approve_that_meets_the_park_is_not_lost(fleet: Workers) -> None:
    """UR-12: 150 runs are approved as soon as the model's reply is in the journal, while the worker
    parks them: none needs a second approve, each effect happens once."""
    await fleet.worker()
    runs = [f"r{n}" for n in range(150)]
    limit = asyncio.Semaphore(10)

    async def approved(run: str) -> None:
        async with limit:
            await fleet.start(run, plan(["gated"]))
            async for record in fleet.fleet.follow(run):
                if isinstance(record, StepCompleted) and record.verdicts:
                    (ask,) = record.verdicts
                    assert isinstance(ask, VerdictAsk)
                    await fleet.fleet.signal(run, "approve", {"marker": ask.marker})
                    return

    await asyncio.gather(*(approved(run) for run in runs))
    await fleet.reaches(runs, {"completed"})
    assert len(fleet.ledger.lines()) == len(runs)
    parked = {len([r for r in j if r["type"] == "park"]) for j in (await fleet.check()).values()}
    assert parked <= {0, 1}


# ---- UR-14 ------------------------------------------------------------------------------------


async def test_ur14_approve_and_cancel_race(fleet: Workers) -> None:
    """UR-14: 100 runs are approved and then cancelled, 100 the other way round, up to 1 s
    apart, with an unsafe gated tool: what stands first in the journal wins. After a cancel nothing
    is started; a write that was started is recorded; the ledger says the same as the journal."""
    await fleet.worker()
    runs = [f"r{n}" for n in range(200)]
    await fleet.starts({run: plan(["gated"]) for run in runs})
    await fleet.reaches(runs, {"awaiting_approval"})
    refused: dict[str, str] = {}
    limit = asyncio.Semaphore(25)

    async def race(run: str, first: str) -> None:
        async with limit:
            (ask,) = (await fleet.fleet.get(run)).outcome.pending  # type: ignore[union-attr]

            async def decide(what: str) -> None:
                payload = {"marker": ask.marker} if what == "approve" else {}
                try:
                    await fleet.fleet.signal(run, what, payload)
                except RunfoldError as error:
                    refused[f"{what} {run}"] = error.code

            second = "cancel" if first == "approve" else "approve"
            ahead = asyncio.create_task(decide(first))
            await asyncio.sleep(random.choice([0, 0.002, 0.01, 0.1, 1.0]))
            await asyncio.gather(ahead, decide(second))

    await asyncio.gather(
        *(race(run, "approve" if n < 100 else "cancel") for n, run in enumerate(runs))
    )
    await fleet.reaches(runs, ENDED)
    journals = await fleet.check()
    ends: set[str] = set()
    for run, records in journals.items():
        status = (await fleet.statuses())[run]
        ends.add(status)
        signals = {r["name"]: r["n"] for r in records if r["type"] == "signal"}
        started = [r["n"] for r in records if r.get("step") == "tool/1/0/gated"]
        assert len(fleet.ledger.lines(run)) == (1 if started else 0)
        if status == "completed":
            assert started and "cancel" not in signals
            assert refused[f"cancel {run}"] == "run_finished"
        else:
            assert signals["cancel"]
            starts = [r for r in records if r["type"].endswith("started") and r["n"] != 1]
            assert all(r["n"] < signals["cancel"] for r in starts)
            if "approve" not in signals or signals["approve"] > signals["cancel"]:
                assert not started
    assert "cancelled" in ends <= {"completed", "cancelled"}
    assert set(refused.values()) <= {"run_finished", "stale_signal"}


async def test_ur14_queued_work_of_cancelled_runs_never_executes(fleet: Workers) -> None:
    """UR-14: 20 runs are cancelled while their tasks wait for a worker: it ends them and asks and
    calls nothing; 20 more are cancelled while they hold a turn of a key or wait for approval."""
    waiting = [f"w{n}" for n in range(20)]
    await fleet.starts({run: plan(["charge"]) for run in waiting})
    for run in waiting:
        await fleet.fleet.cancel(run, reason="not any more")
    await fleet.worker()
    await fleet.reaches(waiting, {"cancelled"})
    assert not fleet.ledger.lines() and not fleet.asked.lines()
    gated = [f"g{n}" for n in range(20)]
    await fleet.starts({run: plan(["gated"], ["charge"]) for run in gated})
    await fleet.reaches(gated, {"awaiting_approval"})
    await asyncio.gather(*(fleet.fleet.cancel(run) for run in gated))
    await fleet.reaches(gated, {"cancelled"})
    assert not fleet.ledger.lines()
    await fleet.check()


async def test_ur14_signals_after_the_end_change_nothing(fleet: Workers) -> None:
    """UR-14: every signal and an input to a completed and to a cancelled run are refused with the
    final status; no record, no task."""
    await fleet.worker()
    await fleet.start("done", plan(["gated"]))
    await fleet.reaches(["done"], {"awaiting_approval"})
    await fleet.approve("done")
    await fleet.start("off", plan(["gated"]))
    await fleet.reaches(["off"], {"awaiting_approval"})
    (ask,) = (await fleet.fleet.get("off")).outcome.pending  # type: ignore[union-attr]
    await fleet.fleet.cancel("off")
    await fleet.reaches(["done", "off"], ENDED)
    before = await fleet.check()
    late: dict[str, Any] = {
        "approve": {"marker": ask.marker},
        "reject": {"marker": ask.marker},
        "reconcile": {"step": "tool/1/0/gated", "outcome": "retry"},
        "cancel": {},
        "resume": {},
    }
    for run, word in (("done", "completed"), ("off", "cancelled")):
        for name, payload in late.items():
            given = payload
            if "marker" in payload:
                given = {"marker": ask.marker.replace("off/", f"{run}/")}
            with pytest.raises(RunfoldError, match=word):
                await fleet.fleet.signal(run, name, given, request_id=f"late-{name}")
        with pytest.raises(RunfoldError, match=word):
            await fleet.fleet.send(run, "hurry")
    assert await fleet.check() == before
    assert len(fleet.ledger.lines()) == 1


# ---- UR-46 ------------------------------------------------------------------------------------

GRACE_S = 1.0


async def test_ur46_a_cancelled_run_ends_whatever_its_tool_makes_of_it(fleet: Workers) -> None:
    """UR-46: tools that return instead, shield their wait, or catch everything for ever. Each run
    is cancelled within the grace; nothing that its tool still returns is recorded; the stubborn
    task is named in the log; other runs go on; SIGTERM ends the worker within grace + 2 s."""
    a = await fleet.worker(grace_s=GRACE_S)
    kinds = ["swallow", "shield", "carry_on"]
    await fleet.starts({kind: plan([("deaf", {"how": kind})], ["charge"]) for kind in kinds})
    await eventually(lambda: len(fleet.reads.lines()) == len(kinds))
    await asyncio.gather(*(fleet.fleet.cancel(kind) for kind in kinds))
    await fleet.reaches(kinds, {"cancelled"}, GRACE_S + 5)
    journals = await fleet.check()
    for kind in kinds:
        assert not any(r.get("step") == "tool/1/0/deaf" and "result" in r for r in journals[kind])
    await fleet.start("next", plan(["charge"]))
    assert (await fleet.end("next")).status == "completed"
    assert [run for run, _, _ in fleet.ledger.lines()] == ["next"]
    a.kill(signal.SIGTERM)
    done = await fleet.ended(a, GRACE_S + 2)
    assert done.code == 0
    await fleet.check()
    (stubborn,) = [line for line in done.err.splitlines() if "ignores that it was" in line]
    assert "run carry_on: " in stubborn and "in _carry_on" in stubborn


@pytest.mark.parametrize("kind", ["swallow", "shield", "carry_on"])
async def test_ur46_sigterm_ends_a_worker_with_a_deaf_tool(fleet: Workers, kind: str) -> None:
    """UR-46: SIGTERM while such a tool runs: the worker exits within grace + 2 s, the run goes on
    elsewhere, and no result of the deaf call was recorded by the first worker."""
    a = await fleet.worker(grace_s=GRACE_S)
    await fleet.start("r1", plan([("deaf", {"how": kind})], ["charge"]))
    await eventually(fleet.reads.lines)
    a.kill(signal.SIGTERM)
    done = await fleet.ended(a, GRACE_S + 3)  # 2 s, and a second for the machine
    assert done.code == 0, done
    assert not fleet.ledger.lines()
    records = await fleet.records("r1")
    assert not any(r.get("step") == "tool/1/0/deaf" and "result" in r for r in records)
    await fleet.check(running=["r1"])
    await fleet.worker(grace_s=GRACE_S)
    await eventually(lambda: len(fleet.reads.lines()) == 2, what="another worker has it")
    await fleet.fleet.cancel("r1")
    await fleet.reaches(["r1"], {"cancelled"})
    await fleet.check()
    if kind == "carry_on":
        (stubborn,) = [line for line in done.err.splitlines() if "ignores that it was" in line]
        assert "run r1: " in stubborn and "in _carry_on" in stubborn


async def test_ur46_no_time_limit_is_stretched_by_a_deaf_tool(fleet: Workers) -> None:
    """UR-46, R56: the run's duration of 1 s is over while a tool catches everything for 15 s: the
    run has failed soon after, whatever the tool makes of it."""
    await fleet.worker([{"name": "brief"}], grace_s=GRACE_S)
    await fleet.start("r1", plan([("deaf", {"how": "carry_on", "s": 15})]), "brief")
    await fleet.reaches(["r1"], {"failed"}, GRACE_S + 8)
    assert (await fleet.records("r1"))[-1]["reason"] == "duration"
    await fleet.check()


async def test_ur46_a_cancel_that_meets_the_end_of_a_wait_for(fleet: Workers) -> None:
    """UR-46: 100 runs whose tool's own wait ends about when they are cancelled: each is completed
    or cancelled; none hangs, no result follows the end."""
    a = await fleet.worker(concurrency=100)
    runs = [f"r{n}" for n in range(100)]
    given = plan([("deaf", {"how": "wait_for", "s": 0.5})])
    await fleet.starts(dict.fromkeys(runs, given))

    async def cancel(run: str) -> None:
        await eventually(lambda: fleet.reads.lines(run))
        await asyncio.sleep(random.uniform(0.3, 0.55))
        with contextlib.suppress(RunfoldError):
            await fleet.fleet.cancel(run)

    await asyncio.gather(*(cancel(run) for run in runs))
    await fleet.reaches(runs, {"completed", "cancelled"})
    await fleet.check()
    await fleet.stop(a)
