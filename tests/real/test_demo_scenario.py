"""The demo of deploy/demo.sh with local processes and no engine (R72): a worker, a server and a
network are lost in the middle of payments; none is lost, and none is made twice.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.scene import STREAM, Process, Scene, scene_on
from kit.servers import NatsServer
from kit.waiting import eventually

pytestmark = [pytest.mark.real, pytest.mark.cluster]

KILLED = ("inv-1", "inv-2")
"""An odd invoice's money has not moved when its worker is killed, an even one's has."""

LEADERLESS = ("inv-3", "inv-4")
CUT = ("inv-6", "inv-8", "inv-10")
MEANWHILE = ("inv-5", "inv-7")
RUNS = (*KILLED, *LEADERLESS, *CUT, *MEANWHILE[:1])


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    async with scene_on(tmp_path) as scene:
        yield scene


async def test_a_worker_a_leader_and_a_node_are_lost_and_every_payment_is_made_once(
    scene: Scene,
) -> None:
    n1, n2, n3 = scene.split.servers
    made = await scene.runfold("init")
    assert made["replicas"] == 3
    for name, home in (("w1", n1), ("w2", n2), ("w3", n3)):
        await scene.worker(name, home)
    bridges = [await scene.bridge(name, home) for name, home in (("b1", n1), ("b2", n2))]
    for number, run in enumerate(RUNS):
        await start(scene, run, bridges[number % 2])
    await scene.are(RUNS, "awaiting_approval")

    await a_worker_is_killed_in_the_middle(scene)
    killed = await the_leader_is_killed_in_the_middle(scene)
    known = {run: [entry.raw for entry in await scene.entries(run)] for run in RUNS}
    await killed.restart()
    await all_nodes_are_current(scene)
    cut_off = await the_next_leader_is_cut_off_in_the_middle(scene)
    await scene.all_paid(KILLED)

    for process in [one for one in scene.processes if one.running]:
        assert (await process.ends(signal.SIGTERM)).code == 0, process.log
    everything = (*RUNS, *MEANWHILE[1:])
    listed = await scene.runfold("list")
    assert {one["run"]: one["status"] for one in listed["runs"]} == dict.fromkeys(
        everything, "completed"
    )
    assert {run: scene.payments(run) for run in everything} == dict.fromkeys(everything, 1)
    for run, records in known.items():
        now = [entry.raw for entry in await scene.entries(run)]
        assert now[: len(records)] == records, run
    checked = await scene.runfold("check", "--all", store=cut_off.url)
    assert (checked["runs"], checked["violations"]) == (len(everything), [])
    assert await scene.runfold("inbox") == []
    assert (await scene.runfold("doctor"))["runs"] == []


async def start(scene: Scene, run: str, bridge: Process) -> None:
    words = ("start", "payer", "--id", run, "--input", f"invoice {run.split('-')[1]}")
    await scene.runfold(*words, store=bridge.health_url.removesuffix("/healthz"))


async def a_worker_is_killed_in_the_middle(scene: Scene) -> None:
    """SIGKILL; what was being paid is unknown, and a person settles it. What is to be paid again
    waits until the killed worker's call can no longer be running."""
    scene.hold()
    await scene.approve(*KILLED)
    await scene.in_the_middle(len(KILLED))
    victims = {(await scene.holder(run)).name: await scene.holder(run) for run in KILLED}
    for victim in victims.values():
        assert (await victim.ends(signal.SIGKILL)).code == -signal.SIGKILL
    scene.let_go()
    for victim in victims.values():
        await scene.worker(victim.name, scene.homes[victim.name])
    await scene.are(KILLED, "indeterminate")
    assert [scene.payments(run) for run in KILLED] == [0, 1]
    assert set(await scene.settle()) == set(KILLED)
    await scene.all_paid(KILLED[1:])


async def the_leader_is_killed_in_the_middle(scene: Scene) -> NatsServer:
    """SIGKILL of the server that leads the journal."""
    scene.hold()
    await scene.approve(*LEADERLESS)
    await scene.in_the_middle(len(LEADERLESS))
    leader = await scene.split.cluster.leader_of(STREAM)
    await leader.kill()
    scene.reachable = [one for one in scene.split.servers if one is not leader]
    scene.let_go()
    await scene.all_paid(LEADERLESS)
    return leader


async def the_next_leader_is_cut_off_in_the_middle(scene: Scene) -> NatsServer:
    """It is alive and answers its clients, but it reaches no other node: the others elect one of
    them and go on, what its clients hold is taken over, and they leave it for the others."""
    scene.reachable = scene.split.servers
    scene.hold()
    await scene.approve(*CUT)
    await scene.in_the_middle(len(CUT))
    leader = await scene.split.cluster.leader_of(STREAM)
    scene.split.cut_off(leader)
    scene.reachable = [one for one in scene.split.servers if one is not leader]
    scene.let_go()
    await scene.approve(MEANWHILE[0])
    await scene.runfold("start", "payer", "--id", MEANWHILE[1], "--input", "invoice 7")
    await scene.are(MEANWHILE[1:], "awaiting_approval")
    await scene.approve(MEANWHILE[1])
    await scene.all_paid([*CUT, *MEANWHILE])
    await scene.each(Process.healthy, "is well without that node")
    scene.split.heal()
    return leader


async def all_nodes_are_current(scene: Scene) -> None:
    async def current() -> bool:
        info = await scene.split.stream_info(STREAM)
        replicas = (info.get("cluster") or {}).get("replicas") or []
        return len(replicas) == 2 and all(one.get("current") for one in replicas)

    await eventually(current, 60, what="all replicas of the journal are current")
