"""UR-70: who may decide, by HTTP, NATS and the command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import nats
import nats.errors
import pytest
from cases.bridge_world import STEP, WAIT_S, House, Name, house_on
from cases.fleet_agents import plan
from cases.fleet_world import fleet_on
from cases.world import World
from cases.zygote import Zygote
from kit.bridge_process import bearer, bridge_process
from kit.servers import NatsServer
from kit.waiting import eventually

from runfold import AwaitingApproval

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

ROLES = Path(__file__).resolve().parents[2] / "deploy" / "nats"


@pytest.fixture
async def house(
    world: World, zygote: Zygote, nats_url: str, namespace: str
) -> AsyncIterator[House]:
    async with (
        fleet_on(world.home, zygote, nats_url, namespace) as fleet,
        house_on(fleet, zygote) as house,
    ):
        yield house


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
                there = (
                    path.replace("{id}", "r1").replace("{task}", "t").replace("{request_id}", "i")
                )
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
    await house.settled()
    await fleet.reaches(runs, {"completed"})
    by = {one: (await fleet.records(one, "signal"))[0]["by"] for one in runs}
    assert by == {"r1": "alice", "r2": "root", "r3": "nats", "r4": "bob"}


async def test_ur70_the_command_is_let_in_by_the_same_tokens(house: House, zygote: Zygote) -> None:
    """UR-70: `runfold … --store http://…` without a token, with an unknown one, one of another
    role: exit 9 and the reason, nothing written; with the right one the record says whose it is."""
    fleet = house.fleet
    await fleet.worker()
    await fleet.start("r1", plan(["gated"]))
    await fleet.reaches(["r1"], {"awaiting_approval"})
    marker = await house.marker("r1")
    before = await house.written()
    lines = (
        ("approve", marker),
        ("cancel", "r1"),
        ("start", "fleet", "--id", "r2", "--input", "x"),
        ("reconcile", "r1", STEP, "--retry"),
    )
    refused = {"": "unauthorized", "rf_nobody": "unauthorized", "rf_rita": "forbidden"}
    refused["rf_wanda"] = "forbidden"
    children = [
        (house.doors[0].command(zygote, *line, token=token), code)
        for line in lines
        for token, code in refused.items()
    ]
    for child, code in children:
        done = await asyncio.to_thread(child.wait)
        assert (done.code, done.json["error"]["code"]) == (9, code), done
        assert "rf_" not in done.out + done.err
    assert await house.written() == before
    done = await asyncio.to_thread(house.doors[1].command(zygote, *lines[0]).wait)
    assert (done.code, done.json["result"]) == (0, "applied"), done
    await fleet.reaches(["r1"], {"completed"})
    assert (await fleet.records("r1", "signal"))[0]["by"] == "alice"


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
    shutil.copytree(ROLES, folder)
    roles = ("worker", "bridge", "ops", "alice", "auditor", "keeper", "admin", "sys")
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
            fleet.url = url("worker")  # who sets it up works no runs
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
