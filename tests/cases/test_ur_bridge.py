"""The doors of the bridge: HTTP, SSE, `nats pub`, `nats req`, through one bridge process or two.

UR-12, 14, 16, 20, 22, 24, 27, 64, 67, 70. Random moments and places come from a seed that is
printed: RUNFOLD_TEST_SEED repeats one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import nats
import nats.errors
import pytest
from cases.fleet_agents import build, plan
from cases.fleet_world import ENDED, Workers, fleet_on
from cases.test_ur_signals import MALFORMED
from cases.test_ur_starts import BAD, GOOD
from cases.test_ur_values import REFUSED, TEXTS
from cases.world import World
from cases.zygote import Zygote
from kit.bridge_process import (
    BridgeProcess,
    CuttingWire,
    Event,
    Events,
    bearer,
    bridge_process,
)
from kit.proxy import Proxy
from kit.raw_client import ask
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.handle import Journal
from journal.ids import RunId
from journal.records import RunCompleted
from journal.stores.memory import MemoryStore
from journal.stores.provision import provision
from runfold import AwaitingApproval, Fleet, run

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

Name = Literal["rita", "alice", "wanda", "root", "nobody"]
STEP = "tool/1/0/gated"
WAIT_S = 30.0
ROLES = Path(__file__).resolve().parents[2] / "deploy" / "nats"


@pytest.fixture
def rng() -> random.Random:
    seed = int(os.environ.get("RUNFOLD_TEST_SEED", time.time_ns() % 2**32))
    print(f"RUNFOLD_TEST_SEED={seed}")
    return random.Random(seed)


class Door:
    """A bridge as somebody with a token finds it."""

    def __init__(self, bridge: BridgeProcess, name: Name = "alice") -> None:
        self.bridge = bridge
        self.http = httpx.AsyncClient(headers=bearer(name), timeout=WAIT_S)

    async def __call__(self, method: str, path: str, body: Any = None) -> httpx.Response:
        given: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
        if body is None:
            given = {}
        return await self.http.request(method, self.bridge.address + path, **given)

    async def signal(self, run: str, name: str, payload: Any) -> httpx.Response:
        return await self("POST", f"/runs/{run}/signals/{name}", payload)


class House:
    """A fleet and two bridges on its namespace, and a plain NATS client."""

    def __init__(self, fleet: Workers, bridges: list[BridgeProcess], plain: Any) -> None:
        self.fleet = fleet
        self.bridges = bridges
        self.plain = plain
        self.doors = [Door(bridge) for bridge in bridges]
        self._others: dict[str, Door] = {}

    def door(self, name: Name) -> Door:
        """The first bridge, as somebody else."""
        return self._others.setdefault(name, Door(self.bridges[0], name))

    @property
    def any_door(self) -> Iterator[Door]:
        return itertools.cycle(self.doors)

    async def publish(self, rest: str, payload: Any) -> None:
        """As `nats pub` does."""
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self.plain.publish(f"{self.fleet.namespace}.signal.{rest}", data)

    async def request(self, rest: str, payload: Any) -> Any:
        """As `nats req` does."""
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        answer = await self.plain.request(f"{self.fleet.namespace}.api.{rest}", data, timeout=10)
        return json.loads(answer.data)

    async def rejected(self) -> list[dict[str, Any]]:
        found = await self.door("rita")("GET", "/rejected?limit=500")
        return found.json()["rejected"]

    async def settled(self) -> None:
        """Every signal that was published was applied or refused."""

        async def empty() -> bool:
            return (await self.stream("SIGNALS"))["messages"] == 0

        await eventually(empty, WAIT_S, what="all signals are settled")

    async def stream(self, name: str) -> dict[str, Any]:
        subject = f"$JS.API.STREAM.INFO.{self.fleet.namespace.upper()}_{name}"
        return (await ask(self.fleet.url, subject))["state"]

    async def written(self) -> dict[str, int]:
        """The last sequence of each stream."""
        names = ("JOURNAL_0", "TASKS", "SIGNALS", "REJECTED")
        return {name: (await self.stream(name))["last_seq"] for name in names}

    async def marker(self, run_id: str) -> str:
        found = await self.fleet.fleet.get(run_id)
        assert isinstance(found.outcome, AwaitingApproval), found
        return found.outcome.pending[0].marker

    async def unknown(self, runs: list[str]) -> None:
        """Runs whose charge was cut off by the death of their worker."""
        fleet = self.fleet
        fleet.hold("pay")
        worker = await fleet.worker(concurrency=100)
        await fleet.starts(dict.fromkeys(runs, plan([("charge", {"hold": "pay"})])))
        await eventually(lambda: len(fleet.ledger.lines()) == len(runs), WAIT_S)
        await fleet.kill(worker)
        fleet.go("pay")
        await fleet.worker(concurrency=100)
        await fleet.reaches(runs, {"indeterminate"})

    async def close(self) -> None:
        for door in (*self.doors, *self._others.values()):
            await door.http.aclose()
        await self.plain.close()
        for bridge in self.bridges:
            assert "Traceback" not in bridge.log, bridge.log


@contextlib.asynccontextmanager
async def house_on(
    fleet: Workers, zygote: Zygote, count: int = 2, **options: Any
) -> AsyncGenerator[House]:
    async with contextlib.AsyncExitStack() as stack:
        bridges = [
            await stack.enter_async_context(
                bridge_process(
                    zygote, fleet.url, fleet.namespace, fleet.home / f"bridge-{n}", **options
                )
            )
            for n in range(count)
        ]
        plain = await nats.connect(fleet.url)
        house = House(fleet, bridges, plain)
        yield house
        await house.close()


@pytest.fixture
async def house(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[House]:
    async with (
        fleet_on(world.home, zygote, nats_url, namespace) as fleet,
        house_on(fleet, zygote) as house,
    ):
        yield house


async def learnt(home: Path, run_id: str, given: Any) -> str:
    """The marker that the run will ask for, from the same run elsewhere: it binds run and call."""
    end = await run(MemoryStore(), build(home), run_id, given)
    assert isinstance(end, AwaitingApproval)
    return end.pending[0].marker


async def at_once(*all: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*all)


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
    await fleet.reaches(runs, {"completed"})
    await house.settled()
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
    await fleet.reaches(runs, {"completed"})
    await fleet.check()


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
            payloads: dict[str, Any] = {"approve": {"marker": await house.marker(one)}, "cancel": {}}
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
    await fleet.reaches(["r1"], {"completed"})
    assert (await fleet.fleet.get("r2")).status == "awaiting_approval"
    assert worker in fleet.alive and all(bridge.running for bridge in house.bridges)
    assert len(await house.rejected()) == published
    assert len(fleet.ledger.lines()) == 1


# ---- UR-20 ------------------------------------------------------------------------------------


async def test_ur20_approve_and_reject_at_once_through_two_bridges(
    house: House, zygote: Zygote, tmp_path: Path
) -> None:
    """UR-20: 100 runs: approve by one bridge and reject by the other, or one of them by a process
    that writes the journal itself, at once: one decision record; the loser is told who won; the
    effects are the approves that won; a repeat through either is no error."""
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

    async def decide(door: Door, one: str, decision: str) -> dict[str, Any]:
        said = await door(
            "POST", "/decisions", {"marker": markers[one], "decision": decision}
        )
        assert said.status_code in (200, 409), said.text
        return said.json()

    async def pair(number: int, one: str) -> list[dict[str, Any]]:
        if one in processes:
            said = await decide(house.doors[number % 2], one, "reject")
            return [(await asyncio.to_thread(processes[one].wait)).json, said]
        order = house.doors[:: 1 if number % 2 else -1]
        return await at_once(decide(order[0], one, "approve"), decide(order[1], one, "reject"))

    barrier.touch()
    pairs = await at_once(*(pair(number, one) for number, one in enumerate(runs)))
    approved = 0
    for number, (one, said) in enumerate(zip(runs, pairs, strict=True)):
        (won,) = [n for n, answer in enumerate(said) if "result" in answer]
        name, loser = ("approve", "reject")[won], said[1 - won]
        assert said[won]["result"] == "applied"
        if "error" in loser:  # the process
            assert loser["error"] == "decision_conflict"
        else:
            assert (loser["code"], loser["winner"]) == ("decision_conflict", said[won]["n"])
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
    commands = {
        n: zygote.cli("start", "pay", "--id", "x", "--input", "PQ"[n % 2], *where)
        for n in range(10)
    }
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
        return said.is_success, "created" if said.status_code == 201 else said.json().get("code", "")

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


# ---- UR-27 ------------------------------------------------------------------------------------

FRAMES = {
    "frames": "a\n\nevent: end\ndata: {}\n\nid: 99\n\nb",
    "carriage": "a\r\revent: record\rdata: {}\r\r",
    "comment": ": here\n: there\nretry: 1\n",
}


async def followed(door: Door, run: str, **headers: str) -> list[Event]:
    """All events of a stream that ends."""
    events, found = Events(), list[Event]()
    url = f"{door.bridge.address}/runs/{run}/journal?follow=1"
    async with door.http.stream("GET", url, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for data in answer.aiter_raw():
            data.decode("utf-8", "strict") if len(data) < 1000 else None
            found += events.feed(data)
    return found


async def test_ur27_text_that_breaks_stores_comes_exactly_through_http_and_sse(
    house: House,
) -> None:
    """UR-27: in an input, in arguments and results, in a comment, in a message: started, approved,
    told by HTTP, read back by GET, SSE, the inbox: exactly, in valid UTF-8, in frames that no text
    can forge; half a surrogate is refused."""
    fleet = house.fleet
    await fleet.worker(concurrency=20)
    texts = TEXTS | FRAMES
    doors = house.any_door

    async def one(name: str, text: str) -> None:
        run_id = name.replace(" ", "-")
        given = plan([("lookup", {"q": text})], ["gated"]) | {"name": text[:100]}
        said = await next(doors)(
            "POST", "/runs", {"agent": "fleet", "input": given, "run": run_id}
        )
        assert said.status_code == 201, said.text
        shown = await next(doors)("GET", f"/runs/{run_id}?wait=30s")
        (pending,) = shown.json()["pending"]
        told = await next(doors)(
            "POST", f"/runs/{run_id}/inputs", {"content": text, "request_id": "i1"}
        )
        if len(text.encode()) < 60_000:
            assert told.status_code == 201 and told.json()["content"] == text
        approve = {"marker": pending["marker"], "comment": text[:10_000], "decision": "approve"}
        assert (await next(doors)("POST", "/decisions", approve)).status_code == 200
        *records, end = await followed(next(doors), run_id)
        assert end.json == {"status": "completed"}
        stored = [entry.raw for entry in (await fleet.store.load(RunId(run_id))).entries]
        assert [event.data for event in records if event.event == "record"] == stored
        page = (await next(doors)("GET", f"/runs/{run_id}/journal")).content
        assert page == b'{"run":"%s","records":[%s],"next":null}' % (
            run_id.encode(),
            b",".join(stored),
        )
        found = [json.loads(event.data) for event in records if event.event == "record"]
        assert found[0]["input"] == given
        (looked,) = [r for r in found if "result" in r and r.get("step") == "tool/1/0/lookup"]
        assert looked["result"] == f"{text} is known"
        (decision,) = [r for r in found if r["type"] == "signal"]
        assert decision["payload"].get("comment", "") == text[:10_000]

    await at_once(*(one(name, text) for name, text in texts.items()))
    for text in REFUSED.values():
        for body in (
            json.dumps({"agent": "fleet", "input": text}).encode(),
            json.dumps({"agent": "fleet", "input": text}, ensure_ascii=False).encode(
                "utf-8", "surrogatepass"
            ),
        ):
            said = await next(doors)("POST", "/runs", body)
            assert said.status_code == 400, said.text
    await fleet.check()


# ---- UR-64 ------------------------------------------------------------------------------------


async def test_ur64_bad_ids_at_every_door_of_the_bridge(house: House) -> None:
    """UR-64: paths, devices, wildcards, too long ones: the same answer at HTTP, SSE, `nats req`; by
    `nats pub` as far as they can be a subject at all; nothing is written but what was refused."""
    fleet = house.fleet
    before = await house.written()
    doors = house.any_door
    published = 0
    for bad in BAD:
        quoted = httpx.URL(path="/" + bad.replace("/", "\0")).raw_path.decode() if False else None
        assert quoted is None
        with contextlib.suppress(UnicodeEncodeError):
            raw = "".join(f"%{byte:02X}" for byte in bad.encode())
            for method, path, body in (
                ("GET", f"/runs/{raw}", None),
                ("GET", f"/runs/{raw}/journal?follow=1", None),
                ("POST", f"/runs/{raw}/signals/cancel", {}),
                ("POST", f"/runs/{raw}/inputs", {"content": 1}),
                ("DELETE", f"/runs/{raw}/inputs/i1", None),
            ):
                said = await next(doors)(method, path, body)
                assert said.status_code in ((400,) if bad else (400, 404, 405)), (bad, said.text)
                assert not bad or said.json()["code"] == "invalid_id", (bad, said.text)
            said = await next(doors)("POST", "/runs", {"agent": "pay", "input": 1, "run": bad})
            assert (said.status_code, said.json()["code"]) == (400, "invalid_id"), bad
            for action, payload in (
                ("submit", {"content": 1}),
                ("get", {"request_id": "i1"}),
                ("withdraw", {"request_id": "i1"}),
            ):
                answer = await house.request(f"inputs.{action}", payload | {"run": bad})
                assert answer["error"]["code"] == "invalid_id", (bad, answer)
        if bad and bad.isprintable() and bad.isascii() and not set(bad) & set(" *>") and ".." not in bad:
            if bad.startswith(".") or bad.endswith("."):
                continue
            subject = f"{bad}.cancel"
            if len(subject) < 4000:
                await house.publish(subject, {})
                published += 1
                answer = await house.request(f"signals.{subject}", {})
                assert answer["error"]["code"] in ("invalid_id", "run_not_found"), (bad, answer)
    await house.settled()
    refused = await house.rejected()
    assert len(refused) == published
    now = await house.written()
    assert {name: now[name] for name in ("JOURNAL_0", "TASKS")} == {
        name: before[name] for name in ("JOURNAL_0", "TASKS")
    }
    for good in GOOD:
        said = await next(doors)("POST", "/runs", {"agent": "pay", "input": 1, "run": good})
        assert said.status_code == 201, said.text
        assert (await next(doors)("GET", f"/runs/{good}")).json()["run"] == good
    rest = [f"{good}.cancel" for good in GOOD if not good.startswith(".") and "x." != good]
    for subject in rest:
        answer = await house.request(f"signals.{subject}", {})
        assert answer.get("result") == "applied", (subject, answer)
    assert sorted(await fleet.statuses()) == sorted(GOOD)


# ---- UR-67 ------------------------------------------------------------------------------------


async def _written(fleet: Workers, run: str, calls: int) -> list[bytes]:
    """A completed run of 2 * calls + 3 records."""
    await fleet.start(run, None, "by-hand")
    async with await Journal.open(fleet.store, run, is_write=lambda tool: False) as journal:
        for n in range(calls):

            async def fetch(n: int = n) -> str:
                return f"{n} " + "é\n" * (n % 50)

            await journal.run_step(f"step-{n}", "tool", fetch, tool="fetch")
        message = {"role": "assistant", "content": "done"}
        await journal.append(lambda fold: RunCompleted(message=message, iteration=fold.iteration))
    return [entry.raw for entry in (await fleet.store.load(RunId(run))).entries]


async def test_ur67_a_stream_cut_at_30_places_is_the_journal(
    house: House, rng: random.Random
) -> None:
    """UR-67: 503 records through a proxy that cuts at 30 random bytes, two of them between the
    lines, while the bridge is killed and restarted twice: the concatenation is the journal."""
    fleet = house.fleet
    stored = await _written(fleet, "r1", 250)
    assert len(stored) > 500
    size = sum(map(len, stored))
    cuts = [rng.randrange(1, size // 15) for _ in range(28)] + [1, 200]
    rng.shuffle(cuts)
    print(f"{len(stored)} records, {size} bytes; cuts after {cuts} bytes")
    door = house.door("rita")
    got: list[Event] = []
    asked = 0
    restarted = 0
    async with CuttingWire(house.bridges[0].port, cuts) as wire:
        while not got or got[-1].event != "end":
            last = next((event.id for event in reversed(got) if event.id), "")
            events = Events()
            headers = {"accept": "text/event-stream", "connection": "close"}
            headers |= {"last-event-id": last} if last else {}
            asked += 1
            try:
                url = f"{wire.address}/runs/r1/journal"
                async with door.http.stream("GET", url, headers=headers) as answer:
                    assert answer.status_code == 200, await answer.aread()
                    async for data in answer.aiter_raw():
                        got += events.feed(data)
            except httpx.TransportError:
                pass
            if wire.cut in (10, 20) and restarted < wire.cut // 10:
                restarted += 1
                await house.bridges[0].restart()
    print(f"{asked} connections, {wire.cut} cuts, {restarted} restarts")
    assert wire.cut == 30 or not wire.cuts or got[-1].event == "end"
    *records, end = got
    assert [event.data for event in records] == stored
    assert [event.id for event in records] == [str(n + 1) for n in range(len(stored))]
    assert restarted == 2


async def test_ur67_a_bad_last_event_id_is_never_silence(house: House) -> None:
    """UR-67: what is no ordinal of this run is 400 by name; the last one of a finished run is 204;
    `from` likewise."""
    fleet = house.fleet
    stored = await _written(fleet, "r1", 2)
    await fleet.start("r2", None, "by-hand")
    door = house.door("rita")
    url = f"{door.bridge.address}/runs/r1/journal?follow=1"
    for bad in ("abc", "-1", "", "0", str(10**30), "1.0", "r2:1", str(len(stored) + 1), "٣"):
        said = await door.http.get(url, headers={"last-event-id": bad.encode()})
        assert said.status_code == 400, (bad, said.status_code)
        assert said.headers["content-type"] == "application/problem+json"
        assert "Last-Event-ID" in said.json()["detail"]
    said = await door.http.get(url, headers={"last-event-id": str(len(stored))})
    assert (said.status_code, said.content) == (204, b"")
    for n in range(1, len(stored)):
        *records, end = await followed(door, "r1", **{"last-event-id": str(n)})
        assert [event.data for event in records] == stored[n:] and end.event == "end"
    # An id of another run, which has only one record:
    other = f"{door.bridge.address}/runs/r2/journal?follow=1"
    said = await door.http.get(other, headers={"last-event-id": str(len(stored))})
    assert said.status_code == 400


async def test_ur67_an_idle_stream_is_kept_alive_by_comments(
    house: House, zygote: Zygote
) -> None:
    """UR-67: while nothing happens comments come, each well within the minute after which proxies
    cut (15 s; here the constant is 50 ms); they are no events, and the stream ends with the run."""
    from bridge.sse import KEEP_ALIVE_S

    assert KEEP_ALIVE_S <= 20
    fleet = house.fleet
    await fleet.start("r1", plan(["charge"]))
    async with house_on(fleet, zygote, 1, knobs={"bridge.sse:KEEP_ALIVE_S": 0.05}) as quick:
        door, events, got = quick.door("rita"), Events(), list[Event]()
        url = f"{door.bridge.address}/runs/r1/journal?follow=1"
        async with door.http.stream("GET", url) as answer:
            async for data in answer.aiter_raw():
                got += events.feed(data)
                if events.comments == 5:
                    assert len(got) == 1
                    await fleet.worker()
                    events.comments += 1
        assert got[-1].event == "end"
    stored = [entry.raw for entry in (await fleet.store.load(RunId("r1"))).entries]
    assert [event.data for event in got if event.event == "record"] == stored


# ---- UR-70 ------------------------------------------------------------------------------------


async def test_ur70_without_the_right_token_nothing_is_said_or_done(house: House) -> None:
    """UR-70: no token, an unknown one, one of another role: 401, 403 at each operation of the
    description; no stream changes. A token's file that changes counts at once."""
    fleet = house.fleet
    await fleet.worker()
    await fleet.start("r1", plan(["gated"]))
    await fleet.reaches(["r1"], {"awaiting_approval"})
    marker = await house.marker("r1")
    before = await house.written()
    document = (await house.door("rita")("GET", "/openapi.json")).json()
    bodies: dict[str, Any] = {
        "/runs": {"agent": "pay", "input": 1},
        "/decisions": {"marker": marker, "decision": "approve"},
        "/runs/{id}/signals/approve": {"marker": marker},
        "/runs/{id}/signals/reject": {"marker": marker},
        "/runs/{id}/signals/reconcile": {"step": STEP, "outcome": "retry"},
        "/runs/{id}/inputs": {"content": 1},
        "/tasks/poll": {"agents": [{"name": "fleet"}], "wait_s": 0},
    }
    url = house.bridges[0].address
    reading, deciding = set[str](), set[str]()
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if "security" not in operation:
                    continue
                there = path.replace("{id}", "r1").replace("{task}", "t").replace("{request_id}", "i")
                body = bodies.get(path, {}) if "requestBody" in operation else None
                for headers, status in (
                    ({}, 401),
                    ({"authorization": "Bearer rf_nobody"}, 401),
                    ({"authorization": "Bearer"}, 401),
                    ({"authorization": "Basic cml0YTpyZl9yaXRh"}, 401),
                ):
                    said = await http.request(method, there, json=body, headers=headers)
                    assert said.status_code == status, (method, path, said.status_code)
                    assert said.headers["www-authenticate"] == "Bearer"
                scope = operation["description"].split("`")[1]
                (deciding if scope == "signal" else reading).add(operation["operationId"])
                few: dict[str, list[Name]] = {
                    "read": ["wanda"],
                    "signal": ["rita", "wanda"],
                    "work": ["rita", "alice"],
                    "admin": ["rita", "alice", "wanda"],
                }
                for name in few[scope]:
                    said = await http.request(method, there, json=body, headers=bearer(name))
                    assert said.status_code == 403, (name, method, path, said.status_code)
    assert {"start_run", "approve_run", "reconcile_run", "cancel_run", "decide"} <= deciding
    assert await house.written() == before


async def test_ur70_who_decided_is_whose_token_it_is(house: House) -> None:
    """UR-70: `decided_by`, `by`, `user` in a body are refused; the record says the token's name; by
    NATS it says `nats`, or the user of the subject."""
    fleet = house.fleet
    await fleet.worker()
    runs = ["r1", "r2", "r3", "r4"]
    await fleet.starts({one: plan(["gated"]) for one in runs})
    await fleet.reaches(runs, {"awaiting_approval"})
    markers = {one: await house.marker(one) for one in runs}
    before = await house.written()
    for field in ("decided_by", "by", "user", "name"):
        for path, body in (
            ("/runs/r1/signals/approve", {"marker": markers["r1"], field: "root"}),
            ("/decisions", {"marker": markers["r1"], "decision": "approve", field: "root"}),
            ("/runs/r1/signals/cancel", {field: "root"}),
            ("/runs/r1/inputs", {"content": 1, field: "root"}),
            ("/runs", {"agent": "pay", "input": 1, field: "root"}),
        ):
            said = await house.doors[0]("POST", path, body)
            assert (said.status_code, said.json()["code"]) == (400, "bad_payload"), said.text
    assert await house.written() == before
    assert (await house.doors[0].signal("r1", "approve", {"marker": markers["r1"]})).is_success
    assert (await house.door("root").signal("r2", "approve", {"marker": markers["r2"]})).is_success
    await house.publish("r3.approve", {"marker": markers["r3"]})
    await house.publish("as.bob.r4.approve", {"marker": markers["r4"]})
    await fleet.reaches(runs, {"completed"})
    by = {one: (await fleet.records(one, "signal"))[0]["by"] for one in runs}
    assert by == {"r1": "alice", "r2": "root", "r3": "nats", "r4": "bob"}


async def test_ur70_a_worker_cannot_approve_its_own_call(house: House) -> None:
    """UR-70: a worker over HTTP asks for approval, then approves with its own token: 403 at each
    door of HTTP; the call waits on."""
    fleet, wanda = house.fleet, house.door("wanda")
    await fleet.start("r1", None, "clerk")
    polled = await wanda("POST", "/tasks/poll", {"agents": [{"name": "clerk"}], "wait_s": 10})
    task = polled.json()["task"]
    claimed = await wanda("POST", f"/tasks/{task}/journal.read", {})
    record = {
        "type": "step.started",
        "position": 0,
        "kind": "tool",
        "tool": "pay",
        "input": 10,
        "approval": "Pay 10?",
    }
    body = {"id": 1, "record": record, "claim": claimed.json()["claim"]}
    parked = await wanda("POST", f"/tasks/{task}/journal.append", body)
    assert (parked.status_code, parked.json()["code"]) == (409, "awaiting_approval"), parked.text
    marker = await house.marker("r1")
    before = await house.written()
    for path, body in (
        ("/decisions", {"marker": marker, "decision": "approve"}),
        ("/runs/r1/signals/approve", {"marker": marker}),
        ("/runs/r1/signals/reconcile", {"step": "0/0", "outcome": "done", "result": 1}),
        ("/runs/r1/signals/cancel", {}),
        ("/runs", {"agent": "clerk", "input": 1}),
    ):
        said = await wanda("POST", path, body)
        assert (said.status_code, said.json()["code"]) == (403, "forbidden"), said.text
    assert await house.written() == before
    assert (await fleet.fleet.get("r1")).status == "awaiting_approval"
    assert (await house.doors[1].signal("r1", "approve", {"marker": marker})).is_success


@contextlib.asynccontextmanager
async def guarded(folder: Path) -> AsyncGenerator[NatsServer]:
    """The server of deploy/nats, with its roles; the password of each is its name."""
    folder.mkdir()
    for conf in ROLES.glob("*.conf"):
        shutil.copy(conf, folder)
    roles = ("worker", "bridge", "ops", "alice", "auditor", "admin", "sys")
    with pytest.MonkeyPatch.context() as patch:
        for role in roles:
            patch.setenv(f"RUNFOLD_{role.upper()}_PASSWORD", role)
        patch.setenv("RUNFOLD_NATS_DATA", str(folder / "data"))
        server = NatsServer(folder)
        (folder / "nats-server.conf").write_text('include "server.conf"\n')
        await server._launch()
    try:
        yield server
    finally:
        await server.stop()


async def test_ur70_what_a_nats_user_may_do_is_what_the_permissions_say(
    world: World, zygote: Zygote, tmp_path: Path
) -> None:
    """UR-70: with the shipped roles, a bridge process that is `bridge`: ops decides as nobody,
    alice as alice and as nobody else, the auditor decides nothing, by NATS or by the command."""
    async with guarded(tmp_path / "guarded") as server:

        def url(role: str) -> str:
            return server.url.replace("://", f"://{role}:{role}@")

        async with (
            fleet_on(world.home, zygote, url("admin")) as fleet,
            bridge_process(zygote, url("bridge"), "runfold", tmp_path / "bridge") as bridge,
        ):
            await fleet.worker()
            runs = ["r1", "r2", "r3"]
            await fleet.starts({one: plan(["gated"]) for one in runs})
            await fleet.reaches(runs, {"awaiting_approval"})
            markers: dict[str, str] = {}
            for one in runs:
                outcome = (await fleet.fleet.get(one)).outcome
                assert isinstance(outcome, AwaitingApproval)
                markers[one] = outcome.pending[0].marker

            denied: dict[str, list[str]] = {}

            async def as_user(role: str) -> Any:
                async def note(error: Exception) -> None:
                    denied.setdefault(role, []).append(str(error))

                return await nats.connect(
                    url(role), inbox_prefix=f"_INBOX.runfold.{role}", error_cb=note
                )

            ops, alice, auditor = [await as_user(r) for r in ("ops", "alice", "auditor")]
            approve = {one: json.dumps({"marker": markers[one]}).encode() for one in runs}
            for client, role, subject in (
                (auditor, "auditor", "runfold.signal.r3.approve"),
                (auditor, "auditor", "runfold.api.signals.r3.approve"),
                (alice, "alice", "runfold.signal.r3.approve"),
                (alice, "alice", "runfold.signal.as.bob.r3.approve"),
                (ops, "ops", "runfold.signal.as.alice.r3.approve"),
                (ops, "ops", "runfold.journal.0.r3"),
            ):
                known = len(denied.get(role, []))
                await client.publish(subject, approve["r3"])
                await client.flush()
                await eventually(
                    lambda role=role, known=known: len(denied.get(role, [])) > known,
                    what=f"{role} is denied {subject}",
                )
            await ops.publish("runfold.signal.r1.approve", approve["r1"])
            answer = await alice.request(
                "runfold.api.as.alice.signals.r2.approve", approve["r2"], timeout=10
            )
            assert json.loads(answer.data)["result"] == "applied"
            await fleet.reaches(["r1", "r2"], {"completed"})
            by = {one: (await fleet.records(one, "signal"))[0]["by"] for one in ("r1", "r2")}
            assert by == {"r1": "nats", "r2": "alice"}

            async def command(role: str) -> Any:
                args = ("approve", markers["r3"], "--store", url(role), "--json")
                return await asyncio.to_thread(zygote.cli(*args).wait)

            before = await fleet.records("r3")
            done = await command("auditor")
            assert done.code == 9, done
            assert done.json["error"]["code"] == "permission_denied", done
            assert "auditor:auditor" not in done.out + done.err
            assert await fleet.records("r3") == before
            assert (await fleet.fleet.get("r3")).status == "awaiting_approval"
            done = await command("ops")  # by a request: it may not write the journal itself
            assert (done.code, done.json["result"]) == (0, "applied"), done
            assert (await fleet.records("r3", "signal"))[0]["by"] == "nats"
            assert bridge.running and "Traceback" not in bridge.log
            for client in (ops, alice, auditor):
                await client.close()
