"""UR-52: the code changes while runs wait, and a fleet runs two versions of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cases.fleet_agents import build, plan
from cases.fleet_world import Workers, fleet_on
from cases.world import World
from cases.zygote import Zygote
from kit.waiting import eventually

from runfold import Worker

pytestmark = pytest.mark.real
V1 = ({"name": "fleet", "revision": "1"},)
V2 = ({"name": "fleet", "revision": "2"},)


def v2(**changes: Any) -> tuple[dict[str, Any]]:
    """The next version, which may go on with runs of the first."""
    return ({"name": "fleet", "revision": "2", "compatible": ["1"]} | changes,)


@pytest.fixture
async def fleet(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[Workers]:
    async with fleet_on(world.home, zygote, nats_url, namespace) as fleet:
        yield fleet


def results(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        r["step"]: r.get("result", r.get("error"))
        for r in records
        if r["type"] == "step.completed" and not r["step"].startswith("llm/")
    }


async def test_ur52_a_mixed_fleet_keeps_runs_with_their_revision(fleet: Workers) -> None:
    """UR-52: 20 runs wait under v1; v1 and v2 workers, which do not go together, serve one queue:
    each run ends under the revision it is bound to. Without a v1 worker such a run waits, owned by
    nobody and lost to nobody, until one comes."""
    old = await fleet.worker(V1)
    runs = [f"r{n}" for n in range(20)]
    await fleet.starts({run: plan(["gated"]) for run in runs})
    await fleet.reaches(runs, {"awaiting_approval"})
    await fleet.worker(V2)
    for run in runs:
        await fleet.approve(run)
    fresh = [f"n{n}" for n in range(20)]
    await fleet.starts({run: plan(["charge"]) for run in fresh})
    await fleet.reaches([*runs, *fresh], {"completed"}, 60)
    journals = await fleet.check()
    for run, records in journals.items():
        by = {r["revision"] for r in records if r["type"] == "claim"}
        assert by == {"1"} if run in runs else len(by) == 1
    assert len(fleet.ledger.lines()) == 40

    await fleet.start("left", plan(["lookup"], ["gated"]) | {"name": "left"})
    await fleet.reaches(["left"], {"awaiting_approval"})
    (claim,) = await fleet.records("left", "claim")
    if claim["revision"] == "1":
        await fleet.stop(old)
        other = V1
    else:
        await fleet.stop(fleet.children[1])
        other = V2
    await fleet.approve("left")
    await fleet.start("seen", plan())  # the one that is left works on, and has seen the task
    if other == V1:
        await fleet.reaches(["seen"], {"completed"})
    assert len(await fleet.records("left", "claim")) == 1
    await fleet.worker(other)
    await fleet.reaches(["left", "seen"], {"completed"}, 20)
    assert len(fleet.ledger.lines("left")) == 1
    await fleet.check()


async def test_ur52_a_worker_without_the_agent_leaves_the_run(fleet: Workers) -> None:
    """UR-52: the only worker has another agent: the run keeps waiting, `queue` says that no worker
    has its agent; one that has it ends it."""
    await fleet.worker([{"name": "other"}])
    await fleet.start("r1", plan(["charge"]))
    await fleet.start("o1", plan(["charge"]), "other")
    await fleet.reaches(["o1"], {"completed"})
    assert len(await fleet.records("r1")) == 1
    loads = {load.agent: load for load in await fleet.fleet.queue(wait_s=0.3)}
    assert (loads["fleet"].workers, loads["fleet"].pending) == (0, 1)
    await fleet.worker()
    await fleet.reaches(["r1"], {"completed"})
    await fleet.check()


async def _under_v1(fleet: Workers) -> None:
    """A run that looked up and waits for approval, under v1, whose worker is gone."""
    old = await fleet.worker(V1)
    await fleet.start("r1", plan(["lookup"], ["gated"], ["lookup"]))
    await fleet.reaches(["r1"], {"awaiting_approval"})
    await fleet.stop(old)


async def test_ur52_a_recorded_result_needs_no_tool(fleet: Workers) -> None:
    """UR-52: v2 lacks a tool whose result is recorded: it is replayed; a new call of it is an
    explicit error for the model."""
    await _under_v1(fleet)
    await fleet.worker(v2(without=["lookup"]))
    await fleet.approve("r1")
    await fleet.reaches(["r1"], {"completed"})
    found = results((await fleet.check())["r1"])
    assert found["tool/1/0/lookup"] == " is known"
    assert found["tool/2/0/gated"] == "paid 1"
    assert found["tool/3/0/lookup"]["type"] == "unknown_tool"
    assert len(fleet.reads.lines()) == len(fleet.ledger.lines()) == 1


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "removed": ({"without": ["gated"]}, "unknown_tool"),
    "renamed": ({"rename": {"gated": "gated_v2"}}, "unknown_tool"),
    "argument added": ({"wider": ["gated"]}, "bad_arguments"),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_ur52_what_was_approved_is_not_another_tool(fleet: Workers, change: str) -> None:
    """UR-52: the approved call's tool is gone, has another name, or takes another argument in v2:
    an explicit error for the model, no effect, and the run ends."""
    await _under_v1(fleet)
    changes, error = CHANGES[change]
    await fleet.worker(v2(**changes))
    await fleet.approve("r1")
    await fleet.reaches(["r1"], {"completed"})
    found = results((await fleet.check())["r1"])
    assert found["tool/2/0/gated"]["type"] == error
    assert not fleet.ledger.lines()


async def test_ur52_an_unknown_write_whose_tool_is_gone_still_asks(fleet: Workers) -> None:
    """UR-52: a worker dies inside a write; v2 lacks the tool: a person is asked as ever, and `done`
    settles it; `retry` is not made into another call, the run pauses and says why."""
    fleet.hold("charge")
    old = await fleet.worker(V1)
    runs = ["d", "r"]
    await fleet.starts({run: plan([("charge", {"hold": "charge"})]) for run in runs})
    await eventually(lambda: len(fleet.ledger.lines()) == 2)
    await fleet.kill(old)
    await fleet.worker(v2(without=["charge"]))
    await fleet.reaches(runs, {"indeterminate"})
    about = {"step": "tool/1/0/charge"}
    done = about | {"outcome": "done", "result": "paid"}
    await fleet.fleet.signal("d", "reconcile", done)
    await fleet.fleet.signal("r", "reconcile", about | {"outcome": "retry"})
    await fleet.reaches(["d"], {"completed"})
    await fleet.reaches(["r"], {"paused"})
    assert len(fleet.ledger.lines()) == 2
    await fleet.check()


def test_ur52_double_registration_is_refused(tmp_path: Path) -> None:
    """UR-52: two agents under one name, also of two revisions: refused before anything starts."""
    agents = [build(tmp_path), build(tmp_path, revision="2")]
    with pytest.raises(ValueError, match="two agents have one name: fleet, fleet"):
        Worker("nats://127.0.0.1:1", agents)
