from __future__ import annotations
import asyncio, random, signal, time, contextlib, gc
from pathlib import Path
from collections import Counter
import pytest
from cases.fleet_agents import plan, build, PlanModel, tools_of
from cases.fleet_world import ENDED, FLEET, RESTS, Workers, fleet_on
from kit.servers import NatsServer, monitor
from kit.waiting import eventually
from runfold import Worker, Agent, Retry

@pytest.fixture
async def server(tmp_path: Path):
    server = await NatsServer.start(tmp_path / "server")
    yield server
    await server.stop()

@pytest.fixture
async def fleet(world, zygote, server):
    async with fleet_on(world.home, zygote, server.url) as fleet:
        yield fleet

@pytest.mark.parametrize("how", ["TERM", "rolling"])
async def test_stop_long_lease(fleet, server, how):
    opts = dict(ack_wait_s=30, grace_s=5, sweep_s=600)
    if how == "TERM":
        b = await fleet.worker(**opts)
        worst = 0
        for i in range(6):
            a = await fleet.worker(**opts)
            runs = [f"r{i}-{n}" for n in range(60)]
            st = asyncio.create_task(fleet.starts(dict.fromkeys(runs, plan())))
            await asyncio.sleep(random.uniform(0.01, 0.1))
            t = time.monotonic()
            a.kill(signal.SIGTERM)
            await st
            await fleet.reaches(runs, {"completed"}, 60)
            worst = max(worst, time.monotonic() - t)
            await fleet.ended(a)
        print("worst", worst)
    else:
        given = plan([("charge", {"s": 0.2})], [("lookup", {"s": 0.2})], [("charge", {"s": 0.2})])
        runs = [f"r{n}" for n in range(100)]
        serving = [await fleet.worker(**opts, concurrency=8) for _ in range(3)]
        t = time.monotonic()
        await fleet.starts(dict.fromkeys(runs, given))
        for _ in range(8):
            serving.append(await fleet.worker(**opts, concurrency=8))
            await fleet.stop(serving.pop(0))
        print("rolled", time.monotonic() - t)
        await fleet.reaches(runs, {"completed"}, 90)
        print("rolling", time.monotonic() - t)

async def test_kill_long_lease(fleet, server):
    opts = dict(ack_wait_s=30, grace_s=5, sweep_s=600)
    a = await fleet.worker(**opts)
    fleet.hold("x")
    await fleet.starts({f"r{n}": plan([("lookup", {"hold": "x"})]) for n in range(20)})
    await eventually(lambda: len(fleet.reads.lines()) == 20)
    b = await fleet.worker(**opts)
    fleet.go("x")
    t = time.monotonic()
    a.kill()
    await fleet.reaches([f"r{n}" for n in range(20)], {"completed"}, 90)
    print("after kill, ack wait 30 s:", time.monotonic() - t)

async def test_leak(fleet, server):
    w = Worker(server.url, [build(fleet.home), build(fleet.home, name="sleeper")], ack_wait_s=2, grace_s=1, sweep_s=600)
    task = asyncio.create_task(w.serve())
    async def level():
        await asyncio.sleep(1.5)
        gc.collect()
        d = w._dispatcher
        return dict(held=len(d.held), claiming=len(d._claiming), turns=len(d._turns), works=len(w._works), waiting=len(w._waiting), stub=len(w.stubborn), tasks=len(asyncio.all_tasks()), subs=sorted(x["subscriptions"] for x in (await monitor(server.monitor_url, "connz?subs=1"))["connections"]))
    await fleet.start("r0", plan(["charge"])); await fleet.reaches(["r0"], {"completed"})
    print(await level())
    runs = {}
    for n in range(60):
        runs[f"g{n}"] = plan(["gated"])
        runs[f"c{n}"] = plan([("lookup", {"s": 30})])
        runs[f"d{n}"] = plan([("deaf", {"how": "swallow"})])
        runs[f"f{n}"] = {"nonsense": 1}
        runs[f"t{n}"] = plan([("block", {"s": .1})])
    await fleet.starts(runs, at_once=40)
    await eventually(lambda: len(fleet.reads.lines()) >= 60, 20)
    for n in range(60):
        for k in "cd": await fleet.fleet.cancel(f"{k}{n}")
    await fleet.reaches(list(runs), ENDED | {"awaiting_approval"}, 60)
    for n in range(30):
        await fleet.fleet.cancel(f"g{n}"); await fleet.approve(f"g{n+30}")
    await fleet.reaches(list(runs), ENDED, 60)
    for n in range(30):
        await fleet.fleet.start("fleet", plan(), run_id=f"k{n}", key=f"k{n%15}")
    await fleet.reaches([f"k{n}" for n in range(30)], ENDED, 60)
    print(Counter((await fleet.statuses()).values()))
    print(await level())
    await w.stop(); await task

async def test_sweep_cost(fleet, server):
    fleet.hold("counter")
    w = await fleet.worker([{"name": "counter"}], ack_wait_s=2, sweep_s=1)
    given = {"turns": 2, "calls": 250, "size": 2000, "hold_at": "0/245"}
    await fleet.start("long", given, "counter")
    await eventually(fleet.reads.lines, 60)
    async def out():
        return sum(c["out_msgs"] for c in (await monitor(server.monitor_url, "connz"))["connections"]), sum(c["out_bytes"] for c in (await monitor(server.monitor_url, "connz"))["connections"])
    await asyncio.sleep(6)
    a = await out(); t = time.monotonic()
    await asyncio.sleep(8)
    b = await out()
    print("a held run that does nothing, 8 s, sweep 1 s: msgs, bytes", b[0] - a[0], b[1] - a[1])
    fleet.go("counter")
