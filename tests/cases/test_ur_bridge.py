"""UR-12, 14, 16, 20, 22, 24 by HTTP, `nats pub`, `nats req`, through two bridge processes.

Random moments and places come from a seed that is printed: RUNFOLD_TEST_SEED repeats one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import nats
import nats.errors
import pytest
from cases.bridge_world import STEP, WAIT_S, Door, House, at_once, house_on, learnt
from cases.fleet_agents import plan
from cases.fleet_world import ENDED, fleet_on
from cases.test_ur_signals import MALFORMED
from cases.world import World
from cases.zygote import Child, Zygote
from kit.bridge_process import bridge_process
from kit.proxy import Proxy
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.stores.provision import provision

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("RUNFOLD_TEST_SEED", time.time_ns() % 2**32))
    print(f"RUNFOLD_TEST_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
async def house(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[House]:
    async with (
        fleet_on(world.home, zygote, nats_url, namespace) as fleet,
        house_on(fleet, zygote) as house,
    ):
        yield house


# ---- UR-12 ------------------------------------------------------------------------------------


async def test_ur12_an_approve_by_nats_or_http_before_the_gate_is_enough(
    house: House, rng: random.Random, tmp_path: Path
) -> None:
    """UR-12: 200 runs reach their gate after 150 ms; each is approved once, at a random moment from
    0 to 300 ms after its start, by `nats pub` or by HTTP: none needs a second approve."""
    fleet = house.fleet
    await fleet.worker(concurrency=100)
    (tmp_path / "elsewhere" / "hold").mkdir(parents=True)
    runs = [f"r{n}" for n in range(200)]
    early = plan([("lookup", {"s": 0.15})], ["gated"])
    quick = plan([("lookup", {})], ["gated"])  # the marker binds the call, not what came before
    markers = {one: await learnt(tmp_path / "elsewhere", one, quick) for one in runs}
    moments = {one: rng.uniform(0, 0.3) for one in runs}
    doors = house.any_door
    limit = asyncio.Semaphore(25)

    async def approved(number: int, one: str) -> None:
        async with limit:
            await fleet.start(one, early)
            await asyncio.sleep(moments[one])
            if number % 2:
                await house.publish(f"{one}.approve", {"marker": markers[one]})
            else:
                said = await next(doors).signal(one, "approve", {"marker": markers[one]})
                assert said.status_code == 200, said.text
                assert said.json()["result"] in ("kept", "applied")

    await at_once(*(approved(number, one) for number, one in enumerate(runs)))
    await house.settled()
    await fleet.reaches(runs, {"completed"})
    assert await house.rejected() == []
    assert len(fleet.ledger.lines()) == len(runs)
    journals = await fleet.check()
    kept = sum(
        next(r["n"] for r in j if r["type"] == "signal")
        < next(r["n"] for r in j if r.get("step") == "llm/2" and r["type"] == "step.completed")
        for j in journals.values()
    )
    by = {r["by"] for j in journals.values() for r in j if r["type"] == "signal"}
    print(f"{kept} of {len(runs)} approvals came before their gate")
    assert by == {"nats", "alice"} and kept


async def test_ur12_an_approve_before_the_run_exists_is_refused_visibly(
    house: House, tmp_path: Path, zygote: Zygote
) -> None:
    """UR-12: ten approvals of runs that are not there yet: refused with that reason, which the
    bridge and the command show; the runs then wait for one that counts."""
    fleet = house.fleet
    (tmp_path / "elsewhere" / "hold").mkdir(parents=True)
    runs = [f"r{n}" for n in range(10)]
    markers = {one: await learnt(tmp_path / "elsewhere", one, plan(["gated"])) for one in runs}
    for one in runs:
        await house.publish(f"{one}.approve", {"marker": markers[one]})
        said = await house.doors[0].signal(one, "approve", {"marker": markers[one]})
        assert (said.status_code, said.json()["code"]) == (404, "run_not_found")
    await house.settled()
    refused = await house.rejected()
    assert sorted(one["run"] for one in refused) == runs
    assert {(one["code"], one["name"], one["by"]) for one in refused} == {
        ("run_not_found", "approve", "nats")
    }
    args = ("signals", "--rejected", "--json", "--store", fleet.url, "--namespace", fleet.namespace)
    shown = await asyncio.to_thread(zygote.cli(*args).wait)
    assert shown.json["rejected"] == refused
    await fleet.worker()
    await fleet.starts({one: plan(["gated"]) for one in runs})
    await fleet.reaches(runs, {"awaiting_approval"})
    assert not fleet.ledger.lines()
    for one in runs:
        await house.publish(f"{one}.approve", {"marker": markers[one]})
    await house.settled()
    await fleet.reaches(runs, {"completed"})
    await fleet.check()


async def test_ur12_approvals_published_while_bridges_are_killed_count_once(
    world: World, zygote: Zygote, nats_url: str, namespace: str, rng: random.Random
) -> None:
    """UR-12, R58: 150 approvals and 150 inputs by `nats pub` while the two bridges are killed and
    started again, six times in turn, sometimes both gone: none is lost, none is refused, each is
    one record. (A signal that a dead bridge held comes again after 30 s; here after 1 s.)"""
    knobs = {"journal.stores.signals_queue:ACK_WAIT_S": 1.0}
    async with (
        fleet_on(world.home, zygote, nats_url, namespace) as fleet,
        house_on(fleet, zygote, knobs=knobs) as house,
    ):
        worker = await fleet.worker(concurrency=100)
        runs = [f"r{n}" for n in range(150)]
        await fleet.starts({one: plan(["gated"]) for one in runs})
        await fleet.reaches(runs, {"awaiting_approval"})
        await fleet.stop(worker)
        markers = {one: await house.marker(one) for one in runs}
        pauses = [rng.uniform(0, 0.02) for _ in runs]

        async def publish() -> None:
            for one, pause in zip(runs, pauses, strict=True):
                await house.publish(f"{one}.input", {"content": one, "mode": "follow_up"})
                await house.publish(f"{one}.approve", {"marker": markers[one]})
                await asyncio.sleep(pause)

        publishing = asyncio.create_task(publish())
        for n in range(6):
            await house.bridges[n % 2].kill()
            if n == 3:
                await house.bridges[0].kill()
                await house.bridges[0].start()
            await house.bridges[n % 2].start()
        await publishing
        await house.settled()
        assert await house.rejected() == []
        await fleet.worker(concurrency=100)
        await fleet.reaches(runs, {"completed"})
        journals = await fleet.check()
        for one, records in journals.items():
            (said,) = [r for r in records if r["type"] == "signal"]
            (told,) = [r for r in records if r["type"] == "input"]
            assert (said["by"], told["by"], told["content"]) == ("nats", "nats", one)
        assert len(fleet.ledger.lines()) == len(runs)


# ---- UR-14 ------------------------------------------------------------------------------------


async def test_ur14_signals_after_the_end_say_the_final_status_at_each_door(house: House) -> None:
    """UR-14: each signal and an input to a completed and to a cancelled run: 409 with its status,
    the same code by `nats req`, the same in what was refused of `nats pub`; no record, no task."""
    fleet = house.fleet
    await fleet.worker()
    await fleet.starts({"done": plan(["gated"]), "off": plan(["gated"])})
    await fleet.reaches(["done", "off"], {"awaiting_approval"})
    markers = {one: await house.marker(one) for one in ("done", "off")}
    assert (await house.doors[0].signal("done", "approve", {"marker": markers["done"]})).is_success
    assert (await house.doors[1].signal("off", "cancel", {})).is_success
    await fleet.reaches(["done", "off"], ENDED)
    before, tasks = await fleet.check(), (await house.stream("TASKS"))["last_seq"]
    doors = house.any_door
    sent = 0
    for one, word in (("done", "completed"), ("off", "cancelled")):
        late: dict[str, Any] = {
            "approve": {"marker": markers[one]},
            "reject": {"marker": markers[one]},
            "reconcile": {"step": STEP, "outcome": "retry"},
            "cancel": {},
            "resume": {},
        }
        for name, payload in late.items():
            payload = payload | {"request_id": f"late-{name}"}
            said = await next(doors).signal(one, name, payload)
            assert said.status_code == 409, said.text
            problem = said.json()
            assert problem["code"] == "run_finished" and word in problem["detail"]
            answer = await house.request(f"signals.{one}.{name}", payload)
            assert answer["error"]["code"] == "run_finished"
            await house.publish(f"{one}.{name}", payload)
            sent += 1
        said = await next(doors)("POST", f"/runs/{one}/inputs", {"content": "hurry"})
        assert said.status_code == 409 and word in said.json()["detail"]
        answer = await house.request("inputs.submit", {"run": one, "content": "hurry"})
        assert answer["error"]["code"] == "run_finished"
        await house.publish(f"{one}.input", {"content": "hurry"})
        sent += 1
    await house.settled()
    refused = await house.rejected()
    assert len(refused) == sent
    assert {one["code"] for one in refused} == {"run_finished"}
    assert await fleet.check() == before
    assert (await house.stream("TASKS"))["last_seq"] == tasks
    assert len(fleet.ledger.lines()) == 1


async def test_ur14_approve_against_cancel_through_two_bridges(
    house: House, rng: random.Random
) -> None:
    """UR-14: 60 waiting runs: approve shortly after cancel, or cancel after approve, through
    different bridges: the first decision in the journal counts; a cancelled run starts nothing."""
    fleet = house.fleet
    await fleet.worker(concurrency=50)
    runs = [f"r{n}" for n in range(60)]
    await fleet.starts({one: plan(["gated"]) for one in runs})
    await fleet.reaches(runs, {"awaiting_approval"})
    pauses = {one: rng.choice([0, 0.002, 0.01, 0.1]) for one in runs}
    answers: dict[tuple[str, str], httpx.Response] = {}
    limit = asyncio.Semaphore(20)

    async def race(number: int, one: str) -> None:
        async with limit:
            payloads: dict[str, Any] = {
                "approve": {"marker": await house.marker(one)},
                "cancel": {},
            }
            first, second = list(payloads)[:: 1 if number % 2 else -1]

            async def decide(door: Door, name: str) -> None:
                answers[one, name] = await door.signal(one, name, payloads[name])

            ahead = asyncio.create_task(decide(house.doors[0], first))
            await asyncio.sleep(pauses[one])
            await at_once(ahead, decide(house.doors[1], second))

    await at_once(*(race(number, one) for number, one in enumerate(runs)))
    await fleet.reaches(runs, ENDED)
    journals, statuses = await fleet.check(), await fleet.statuses()
    assert set(statuses.values()) <= {"completed", "cancelled"}
    for one, records in journals.items():
        at = {r["name"]: r["n"] for r in records if r["type"] == "signal"}
        started = [r["n"] for r in records if r.get("step") == STEP and r["type"] == "step.started"]
        assert len(fleet.ledger.lines(one)) == len(started) <= 1
        for name in ("approve", "cancel"):
            said = answers[one, name]
            assert said.is_success == (name in at), (one, said.text)
            if not said.is_success:
                assert said.status_code == 409
                assert said.json()["code"] in ("run_finished", "stale_signal")
        if "cancel" in at:
            assert all(n < at["cancel"] for n in started)


# ---- UR-16 ------------------------------------------------------------------------------------


async def test_ur16_malformed_signals_by_nats_and_http(house: House) -> None:
    """UR-16: each is refused: by HTTP with 4xx, by `nats pub` once, with a bounded reason that is
    shown; the run waits until the right one comes; the worker and both bridges live."""
    fleet = house.fleet
    worker = await fleet.worker()
    await fleet.starts({"r1": plan(["gated"]), "r2": plan(["gated"])})
    await fleet.reaches(["r1", "r2"], {"awaiting_approval"})
    marker = await house.marker("r1")
    before = await fleet.check()
    doors = house.any_door
    published = 0
    for what, payload in MALFORMED:
        if not isinstance(payload, bytes):  # what no wire can carry
            continue
        sent = payload.replace(b"MARKER", marker.encode())
        said = await next(doors)("POST", "/runs/r1/signals/approve", sent)
        wanted = (413,) if len(sent) > 2**20 else (400, 409)
        assert said.status_code in wanted, (what, said.status_code, said.text[:300])
        assert said.headers["content-type"] == "application/problem+json"
        if len(sent) > 2**20:
            with pytest.raises(nats.errors.MaxPayloadError):
                await house.publish("r1.approve", sent)
            continue
        await house.publish("r1.approve", sent)
        published += 1
    for name in ("approved", "APPROVE", "late", "child", "x" * 300):
        await house.publish(f"r1.{name}", {"marker": marker})
        said = await next(doors).signal("r1", name, {"marker": marker})
        assert said.status_code == 404
        published += 1
    await house.settled()
    refused = await house.rejected()
    assert len(refused) == published, "each was refused once, and not delivered again"
    for one in refused:
        assert one["code"] in ("bad_payload", "too_large", "stale_signal", "invalid_id"), one
        assert 0 < len(one["reason"]) < 1000 and one["reason"].isprintable()
        assert len(one["payload"]) < 5000 and one["run"] == "r1"
    assert len({one["at"] + one["reason"] for one in refused}) > 1
    assert await fleet.check() == before
    await house.publish("r1.approve", {"marker": marker})
    await house.settled()
    await fleet.reaches(["r1"], {"completed"})
    assert (await fleet.fleet.get("r2")).status == "awaiting_approval"
    assert worker in fleet.alive and all(bridge.running for bridge in house.bridges)
    assert len(await house.rejected()) == published
    assert len(fleet.ledger.lines()) == 1


# ---- UR-20 ------------------------------------------------------------------------------------


async def test_ur20_approve_and_reject_at_once_through_two_bridges(
    house: House, zygote: Zygote, tmp_path: Path, rng: random.Random
) -> None:
    """UR-20: 100 runs: approve by one bridge and reject by the other at once; or approve by a
    process that writes the journal itself; or by the command, through the other bridge: one
    decision record; the loser is told who won; the effects are the approves that won; a repeat
    through either is no error."""
    fleet = house.fleet
    worker = await fleet.worker(concurrency=50)
    runs = [f"r{n}" for n in range(100)]
    await fleet.starts({one: plan(["gated"]) for one in runs})
    await fleet.reaches(runs, {"awaiting_approval"})
    await fleet.stop(worker)  # so that who is late still meets a run that goes on
    markers = {one: await house.marker(one) for one in runs}
    barrier = tmp_path / "barrier"
    processes = {
        one: zygote.call(
            "cases.child:decide",
            store=fleet.url,
            namespace=fleet.namespace,
            run_id=one,
            name="approve",
            payload={"marker": markers[one]},
            barrier=str(barrier),
        )
        for one in runs[:20]
    }
    later = {one: rng.uniform(0, 0.4) for one in runs[20:30]}  # a command takes its time

    async def decide(door: Door, one: str, decision: str) -> dict[str, Any]:
        said = await door("POST", "/decisions", {"marker": markers[one], "decision": decision})
        assert said.status_code in (200, 409), said.text
        return said.json()

    async def pair(number: int, one: str) -> list[dict[str, Any]]:
        if one in processes:
            said = await decide(house.doors[number % 2], one, "reject")
            return [(await asyncio.to_thread(processes[one].wait)).json, said]
        if one in later:
            child = house.doors[0].command(zygote, "approve", markers[one])
            await asyncio.sleep(later[one])
            said = await decide(house.doors[1], one, "reject")
            return [(await asyncio.to_thread(child.wait)).json, said]
        order = house.doors[:: 1 if number % 2 else -1]
        return await at_once(decide(order[0], one, "approve"), decide(order[1], one, "reject"))

    barrier.touch()
    pairs = await at_once(*(pair(number, one) for number, one in enumerate(runs)))
    approved = 0
    for number, (one, said) in enumerate(zip(runs, pairs, strict=True)):
        (won,) = [n for n, answer in enumerate(said) if "result" in answer]
        name, loser = ("approve", "reject")[won], said[1 - won]
        assert said[won]["result"] == "applied"
        code = loser.get("code") or loser["error"]
        assert (code if isinstance(code, str) else code["code"]) == "decision_conflict"
        if "winner" in loser:  # by HTTP
            assert loser["winner"] == said[won]["n"]
            assert f"record {said[won]['n']}" in loser["detail"]
        if number < 40:
            again = await decide(house.doors[number % 2], one, name)
            assert (again["result"], again["n"]) == ("repeated", said[won]["n"])
        approved += name == "approve"
    await fleet.worker(concurrency=50)
    await fleet.reaches(runs, {"completed"})
    journals = await fleet.check()
    for records in journals.values():
        assert len([r for r in records if r["type"] == "signal"]) == 1
    assert len(fleet.ledger.lines()) == approved
    print(f"{approved} of {len(runs)} approves won")


# ---- UR-22 ------------------------------------------------------------------------------------


async def test_ur22_two_reconciles_through_two_bridges(house: House) -> None:
    """UR-22 a, b, c: done and retry, one after the other and at once, by HTTP and `nats req`: the
    first stands, the other hears of it; one effect for done, two for retry."""
    fleet = house.fleet
    runs = [f"r{n}" for n in range(40)]
    await house.unknown(runs)
    step = "tool/1/0/charge"
    payloads: list[dict[str, Any]] = [
        {"step": step, "outcome": "done", "result": "by hand"},
        {"step": step, "outcome": "retry"},
    ]

    async def by_http(door: Door, one: str, payload: dict[str, Any]) -> dict[str, Any]:
        said = await door.signal(one, "reconcile", payload)
        assert said.status_code in (200, 409), said.text
        return said.json()

    async def by_nats(one: str, payload: dict[str, Any]) -> dict[str, Any]:
        said = await house.request(f"signals.{one}.reconcile", payload)
        return said.get("error", said)

    async def pair(number: int, one: str) -> list[dict[str, Any]]:
        first, second = payloads[:: 1 if number % 2 else -1]
        if number < 10:
            ahead = await by_http(house.doors[0], one, first)
            return [ahead, await by_http(house.doors[1], one, second)]
        other = by_nats(one, second) if number % 4 < 2 else by_http(house.doors[1], one, second)
        return await at_once(by_http(house.doors[0], one, first), other)

    pairs = await at_once(*(pair(number, one) for number, one in enumerate(runs)))
    await fleet.reaches(runs, {"completed"})
    for number, (one, said) in enumerate(zip(runs, pairs, strict=True)):
        (won,) = [n for n, answer in enumerate(said) if "result" in answer]
        assert said[1 - won]["code"] in ("decision_conflict", "stale_signal", "run_finished"), said
        if number < 10:
            assert won == 0
        first = 1 if number % 2 else -1
        outcome = [payload["outcome"] for payload in payloads][::first][won]
        assert len(fleet.ledger.lines(one)) == (1 if outcome == "done" else 2)
        (signal,) = await fleet.records(one, "signal")
        assert signal["payload"]["outcome"] == outcome


async def test_ur22_reconciles_that_answer_nothing_are_refused(house: House) -> None:
    """UR-22 d, e: of a step that is not unknown or not there, of a completed run, with a result of
    3 MB or that is no JSON: refused, nothing written; unknown is not failed."""
    fleet = house.fleet
    await house.unknown(["r1"])
    await fleet.start("done", plan(["charge"]))
    await fleet.reaches(["done"], {"completed"})
    step = "tool/1/0/charge"
    before = await fleet.records("r1")
    refusals: list[tuple[str, Any, int]] = [
        ("r1", {"step": "llm/1", "outcome": "retry"}, 409),
        ("r1", {"step": "tool/1/1/charge", "outcome": "retry"}, 409),
        ("r1", {"step": step, "outcome": "retry", "start": 1}, 409),
        ("done", {"step": step, "outcome": "retry"}, 409),
        ("none", {"step": step, "outcome": "retry"}, 404),
        ("r1", {"step": step, "outcome": "done", "result": "x" * 3_000_000}, 413),
        ("r1", {"step": step, "outcome": "done", "result": "x" * 900_000}, 400),
        ("r1", b'{"step":"%s","outcome":"done","result":NaN}' % step.encode(), 400),
        ("r1", {"step": step, "outcome": "done"}, 400),
    ]
    doors = house.any_door
    for one, payload, status in refusals:
        said = await next(doors).signal(one, "reconcile", payload)
        assert said.status_code == status, (payload, said.text[:300])
    assert await fleet.records("r1") == before
    shown = (await house.door("rita")("GET", "/runs/r1")).json()
    assert shown["status"] == "indeterminate" and shown["unknown"][0]["step"] == step
    listed = (await house.door("rita")("GET", "/runs?status=failed")).json()
    assert listed["runs"] == []
    (item,) = (await house.door("rita")("GET", "/inbox")).json()["items"]
    assert item["run"] == "r1"


# ---- UR-24 ------------------------------------------------------------------------------------


async def test_ur24_fifty_starts_by_command_and_http(house: House, zygote: Zygote) -> None:
    """UR-24: 50 starts of one id at once, half with another input, by the command and through two
    bridges: one run; who brought its input gets it, the others a conflict. (No start by NATS.)"""
    fleet = house.fleet
    where = ["--store", fleet.url, "--namespace", fleet.namespace, "--json"]
    commands: dict[int, Child] = {}
    for n in range(12):
        words = ("start", "pay", "--id", "x", "--input", "PQ"[n % 2])
        door = house.doors[n // 2 % 2]
        commands[n] = zygote.cli(*words, *where) if n < 6 else door.command(zygote, *words)
    await eventually(lambda: all(one.started.is_set() for one in commands.values()))

    async def one(n: int) -> tuple[bool, str]:
        if n in commands:
            done = await asyncio.to_thread(commands[n].wait)
            assert done.code in (0, 8), done
            return done.code == 0, done.json.get("error", {}).get("code", "")
        said = await house.doors[n // 2 % 2](
            "POST", "/runs", {"agent": "pay", "input": "PQ"[n % 2], "run": "x"}
        )
        assert said.status_code in (200, 201, 409), said.text
        return said.is_success, "created" if said.status_code == 201 else said.json().get(
            "code", ""
        )

    said = await at_once(*(one(n) for n in range(50)))
    (record,) = await fleet.records("x")
    won = "PQ".index(record["input"])
    for n, (good, code) in enumerate(said):
        assert good == (n % 2 == won)
        assert good or code == "input_mismatch"
    assert [code for _, code in said].count("created") <= 1
    shown = (await house.door("rita")("GET", "/runs/x")).json()
    assert (shown["agent"], shown["status"]) == ("pay", "running")


async def test_ur24_a_proxy_answers_504_and_the_client_repeats(house: House) -> None:
    """UR-24: POST /runs reaches the bridge, the answer is a proxy's 504; repeated three times it is
    the same run."""
    fleet = house.fleet
    body = json.dumps({"agent": "pay", "input": "P", "run": "x"}).encode()
    bridge = house.bridges[0]

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readexactly(len(head) + len(body))
        there, to_bridge = await asyncio.open_connection("127.0.0.1", bridge.port)
        to_bridge.write(request)
        answers.append(await there.read())
        to_bridge.close()
        lost = b"HTTP/1.1 504 Gateway Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        writer.write(lost if len(answers) == 1 else answers[-1])
        writer.close()

    head = (
        b"POST /runs HTTP/1.1\r\nHost: bridge\r\nConnection: close\r\n"
        b"Authorization: Bearer rf_alice\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    answers: list[bytes] = []
    async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        for n in range(4):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + body)
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 504" if n == 0 else b"HTTP/1.1 200"), answer
            assert n == 0 or answer.endswith(b'{"run":"x","created":false}')
    assert answers[0].startswith(b"HTTP/1.1 201")
    (record,) = await fleet.records("x")
    assert (record["input"], record["by"]) == ("P", "alice")


async def test_ur24_the_server_dies_between_a_start_and_its_answer(
    tmp_path: Path, zygote: Zygote
) -> None:
    """UR-24: killed with the request on its way, and with the record stored and its ack lost: the
    client asks until it is answered; what was answered is there at once and for ever."""
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    await provision(server.url)
    proxy = await Proxy.start(server.url)
    try:
        async with bridge_process(zygote, proxy.url, "runfold", tmp_path / "bridge") as bridge:
            door = Door(bridge)

            async def start(one: str) -> int:
                while True:
                    said = await door("POST", "/runs", {"agent": "pay", "input": "P", "run": one})
                    if said.status_code != 503:
                        return said.status_code
                    assert said.headers["retry-after"]
                    await asyncio.sleep(0.05)

            server.pause()
            starting = asyncio.create_task(start("x1"))
            await asyncio.sleep(0.05)  # it is on its way, or is not: both must do
            await server.kill()
            await server.restart()
            assert await starting == 201
            gone = proxy.drop_next_ack()
            starting = asyncio.create_task(start("x2"))
            await gone.wait()
            await server.kill()
            await server.restart()
            assert await starting in (200, 201)
            for _ in range(2):
                for one in ("x1", "x2"):

                    async def read(one: str = one) -> bool:
                        said = await door("GET", f"/runs/{one}")
                        assert said.status_code in (200, 503), said.text
                        return said.is_success and said.json()["records"] == 1

                    await eventually(read, WAIT_S)
                    assert await start(one) == 200
                await server.kill()
                await server.restart()
            await door.http.aclose()
    finally:
        await proxy.stop()
        await server.stop()
