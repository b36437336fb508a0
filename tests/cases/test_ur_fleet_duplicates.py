"""UR-01, UR-03, UR-06, UR-44, UR-50: two workers, one run: stalled, killed, or blocked."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator

import pytest
from cases.fleet_agents import plan
from cases.fleet_world import Workers, fleet_on
from cases.world import World, named
from cases.zygote import Zygote
from kit.waiting import eventually

pytestmark = pytest.mark.real


@pytest.fixture
async def fleet(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[Workers]:
    async with fleet_on(world.home, zygote, nats_url, namespace) as fleet:
        yield fleet


# ---- UR-01 ------------------------------------------------------------------------------------


async def test_ur01_a_write_that_outlives_the_ack_wait_happens_once(fleet: Workers) -> None:
    """UR-01: two workers, an ack wait of 1 s, an async unsafe tool of 3.5 s: one effect, one start,
    one result, one claim."""
    await fleet.worker()
    await fleet.worker()
    await fleet.start("r1", plan([("charge", {"s": 3.5})]))
    assert (await fleet.end("r1")).status == "completed"
    assert len(fleet.ledger.lines()) == 1
    records = (await fleet.check())["r1"]
    assert named(records).count("step.started tool/1/0/charge") == 1
    assert [r["type"] for r in records].count("claim") == 1


# ---- UR-03 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["start", "result"])
async def test_ur03_the_loser_stops_there_and_serves_other_runs(
    fleet: Workers, before: str
) -> None:
    """UR-03: A is stopped after step 0's work and before its append, that of its result alone or of
    its start, too (a read begins beside it); B takes the run over and does step 1; A goes on: its
    append is refused, and nothing of the run follows from it. Then A alone serves another run."""
    recorded = ["tool/1/0/stop_once"] if before == "result" else []
    if recorded:
        fleet.hold("stop")
    a = await fleet.worker()
    given = {"hold": "stop"} if recorded else {}
    await fleet.start("r1", plan([("stop_once", given)], ["charge"]))
    await eventually(fleet.reads.lines)
    if recorded:
        await eventually(lambda: _started(fleet, "stop_once"), what="its start is recorded")
        fleet.go("stop")
    b = await fleet.worker()
    assert (await fleet.end("r1")).status == "completed"
    asked = len(fleet.asked.lines())
    records = await fleet.records("r1")
    a.kill(signal.SIGCONT)
    await fleet.stop(b)
    await fleet.start("r2", plan(["charge"]))
    assert (await fleet.end("r2")).status == "completed"
    assert await fleet.records("r1") == records
    assert len(fleet.asked.lines()) == asked + 2  # those of r2
    first, second = [r["n"] for r in records if r["type"] == "claim"]
    assert all(r["claim"] == second for r in records[second - 1 :] if r.get("claim"))
    steps = [r["step"] for r in records if r.get("claim") == first]
    assert steps == ["llm/1"] * 2 + recorded
    assert len(fleet.ledger.lines("r1")) == len(fleet.ledger.lines("r2")) == 1
    await eventually(lambda: _settled(fleet), what="no task is left")
    assert not a.ended.is_set()
    await fleet.check()


async def _started(fleet: Workers, tool: str) -> bool:
    return any(r["step"].endswith(tool) for r in await fleet.records("r1", "step.started"))


async def test_ur03_a_stalled_write_that_did_finish_is_told(fleet: Workers) -> None:
    """UR-03: A is stopped inside a write; B takes over: Indeterminate. A goes on and the write
    ends: A says so (R29), and the run goes on from that result; nothing is repeated."""
    fleet.hold("charge")
    a = await fleet.worker()
    await fleet.start("r1", plan([("charge", {"hold": "charge"})], ["charge"]))
    await eventually(fleet.ledger.lines)
    a.kill(signal.SIGSTOP)
    await fleet.worker()
    await fleet.reaches(["r1"], {"indeterminate"}, 15)
    fleet.go("charge")
    a.kill(signal.SIGCONT)
    await fleet.reaches(["r1"], {"completed"}, 15)
    assert [step for _, step, _ in fleet.ledger.lines()] == [
        "tool/1/0/charge",
        "tool/2/0/charge",
    ]
    await fleet.check()


# ---- UR-06 ------------------------------------------------------------------------------------

AROUND_THE_ACK = ["claim:before", "claim:after", "run.completed:after", "ack:before", "ack:after"]


@pytest.mark.parametrize("where", AROUND_THE_ACK)
async def test_ur06_killed_twice_around_claim_and_ack(fleet: Workers, where: str) -> None:
    """UR-06: a worker, and the one that takes over from it, die at the same boundary; the run ends
    by itself, its effect happened once, no task is left."""
    first = await fleet.worker(crash=where)
    await fleet.start("r1", plan(["charge"]))
    assert (await fleet.ended(first)).code == -signal.SIGKILL
    second = await fleet.worker(crash=where)
    if where not in ("run.completed:after", "ack:after"):  # there the second does no such thing
        assert (await fleet.ended(second)).code == -signal.SIGKILL
    await fleet.worker()
    assert (await fleet.end("r1")).status == "completed"
    await eventually(lambda: _settled(fleet), what="no task is left")
    assert len(fleet.ledger.lines()) == 1
    assert len(fleet.asked.lines()) <= 2 + 2
    await fleet.check()


async def test_ur06_killed_twice_after_a_park(fleet: Workers) -> None:
    """UR-06: as above, where the claim ends with a wait for a person: the marker stays, one approve
    is enough."""
    await fleet.start("r1", plan(["gated"]))
    for where in ("park:after", "ack:before"):
        dying = await fleet.worker(crash=where)
        assert (await fleet.ended(dying)).code == -signal.SIGKILL
    await fleet.worker()
    await eventually(lambda: _settled(fleet), what="no task is left")
    await fleet.approve("r1")
    await fleet.reaches(["r1"], {"completed"})
    assert len(fleet.ledger.lines()) == 1
    assert len(await fleet.records("r1", "park")) == 1
    await fleet.check()


async def _settled(fleet: Workers) -> bool:
    queue = await fleet.store.tasks.backlog("fleet")
    return queue.pending == queue.in_progress == 0


# ---- UR-44 ------------------------------------------------------------------------------------


async def test_ur44_a_blocking_tool_stalls_neither_heartbeat_nor_runs(fleet: Workers) -> None:
    """UR-44: a plain `def` write blocks for 3 ack waits and more: five other runs of the same
    worker end meanwhile, a cancel and a SIGTERM are noticed meanwhile, the second worker gets
    nothing, one effect."""
    a = await fleet.worker(grace_s=20)
    fleet.hold("block")
    await fleet.start("slow", plan([("block", {"hold": "block"})]))
    await eventually(fleet.ledger.lines)
    await fleet.start("other", plan([("lookup", {"s": 60})]))
    others = {f"r{n}": plan(["charge"]) for n in range(5)}
    await fleet.starts(others)
    await fleet.reaches(list(others), {"completed"}, 5)
    await fleet.fleet.cancel("other")
    await fleet.reaches(["other"], {"cancelled"}, 5)
    b = await fleet.worker()
    lines = len(fleet.ledger.lines())
    start = asyncio.get_running_loop().time()
    await eventually(lambda: asyncio.get_running_loop().time() - start > 3.5)  # > 3 ack waits
    assert len(await fleet.records("slow", "claim")) == 1
    a.kill(signal.SIGTERM)

    async def draining() -> bool:
        reports = await fleet.fleet.workers(wait_s=0.3)
        return any(report["draining"] for report in reports)

    await eventually(draining)
    fleet.go("block")
    assert (await fleet.ended(a)).code == 0
    assert (await fleet.end("slow")).status == "completed"
    assert len(fleet.ledger.lines()) == lines
    assert not b.ended.is_set()
    await fleet.check()


async def test_ur44_a_tool_that_blocks_the_loop_is_named(fleet: Workers) -> None:
    """UR-44: an async tool that blocks the event loop past the ack wait: the watchdog names its
    place in the log; the run ends; safety never needed the heartbeat."""
    a = await fleet.worker()
    await fleet.start("r1", plan([("freeze", {"s": 2.5})], ["charge"]))
    assert (await fleet.end("r1")).status == "completed"
    assert len(fleet.ledger.lines()) == 1
    log = fleet.log(a)
    assert "the event loop is blocked" in log and "fleet_agents.py" in log and "freeze" in log
    await fleet.check()


async def test_ur44_a_write_that_blocks_the_loop_happens_once(fleet: Workers) -> None:
    """UR-44: an async unsafe tool blocks its worker's loop for 3 ack waits, another worker takes
    over: Indeterminate at most, one effect; the first worker says what became of it (R29)."""
    a = await fleet.worker()
    await fleet.start("r1", plan([("freeze_write", {"s": 3.5})]))
    await eventually(fleet.ledger.lines)
    await fleet.worker()
    await fleet.reaches(["r1"], {"completed", "indeterminate"}, 15)
    await eventually(lambda: "the event loop goes on" in fleet.log(a), 15)
    await fleet.reaches(["r1"], {"completed"}, 5)
    assert len(fleet.ledger.lines()) == 1
    await fleet.check()  # of a run that goes on, it would read the status and the records apart


# ---- UR-50 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("agent", ["fleet", "gatherer"])
async def test_ur50_calls_at_once_keep_their_own_results(fleet: Workers, agent: str) -> None:
    """UR-50: 20 runs with three calls at once, by a model's reply or by `ctx.parallel`, random
    delays; the worker is killed when two are recorded and the third is on; the next one has other
    delays: each call keeps its own result, none that was recorded runs again, no mismatch."""
    fleet.hold(agent)
    first = await fleet.worker([{"name": agent}])
    runs: dict[str, object] = {}
    for number in range(20):
        slow = random.randrange(3)
        if agent == "gatherer":
            runs[f"r{number}"] = {"by": "parallel", "hold_at": "abc"[slow]}
        else:
            about = [{"q": q} | ({"hold": agent} if q == "abc"[slow] else {}) for q in "abc"]
            runs[f"r{number}"] = plan([("wander", given) for given in about])
    await fleet.starts(runs, agent)
    for run_id in runs:
        await eventually(lambda run_id=run_id: _two_of_three(fleet, run_id), 20)
    await fleet.kill(first)
    recorded = {run: _results(await fleet.records(run)) for run in runs}
    fleet.go(agent)
    random.seed()
    await fleet.worker([{"name": agent}])
    await fleet.reaches(list(runs), {"completed"})
    journals = await fleet.check()
    for run_id in runs:
        before, after = recorded[run_id], _results(journals[run_id])
        values = [after[step] for step in sorted(after)]
        expected = [f"result of {q}" for q in "abc"] if agent == "gatherer" else ["a!", "b!", "c!"]
        assert values == expected
        assert before.items() <= after.items() and len(before) == 2
        again = [step for run, step, _ in fleet.reads.lines(run_id)]
        assert all(again.count(step) == 1 for step in before)


def _results(records: list[dict[str, object]]) -> dict[str, object]:
    return {
        str(r["step"]): r["result"]
        for r in records
        if r["type"] == "step.completed" and "llm" not in str(r["step"])
    }


async def _two_of_three(fleet: Workers, run_id: str) -> bool:
    return len(_results(await fleet.records(run_id))) == 2


@pytest.mark.parametrize("by", ["gather", "as_completed"])
async def test_ur50_gather_on_the_context_is_refused(fleet: Workers, by: str) -> None:
    """UR-50: asyncio's own gather or as_completed over a context's calls can't be replayed: the run
    fails and says why; nothing guesses an order."""
    await fleet.worker([{"name": "gatherer"}])
    await fleet.start("r1", {"by": by}, "gatherer")
    state = await fleet.end("r1")
    assert state.status == "failed"
    (end,) = await fleet.records("r1", "commit")
    assert (end["reason"], end["action"]) == ("concurrent_use", "fail")
    await fleet.check()
