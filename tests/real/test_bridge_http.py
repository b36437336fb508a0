"""The bridge's HTTP: runs, signals, inputs, who may do what, what is refused (R64, R66).

Each answer is also held to /openapi.json (kit.bridge).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.bridge import SCOPES, Site, bearer, bridge_on, ids
from kit.servers import NatsServer
from kit.waiting import eventually

from bridge import bodies, desk, http_server
from bridge.auth import GRANTED_BY, NoAuth, TokenFile, digest_of
from bridge.operation import Operation
from bridge.pulse import NO_RUN
from bridge.service import Bridge, OpenBridge
from journal.codec import Entry, decode, record_hash
from journal.errors import StoreUnavailable
from journal.ids import RunId
from journal.records import Signal
from journal.stores.provision import provision
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.service import Worker
from worker.tools import write

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

BAD_IDS = ["*", ">", "a b", "../x", ".", "a\r\nb", "a\x00b", "a/b", "é", "x" * 129, "~", "a%2Fb"]
MARKER = "r1/tool/1/0/x@1.0123456789abcdef"


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncIterator[Site]:
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace) as site:
        yield site


def told(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """A refusal with this status and code."""
    assert response.status_code == status, response.text
    problem = response.json()
    assert problem["code"] == code
    return problem


# ---- runs ---------------------------------------------------------------------------------------


async def test_a_run_is_started_once_and_a_repeat_says_so(site: Site) -> None:
    body = {"agent": "desk", "input": {"q": 1}, "run": "r.1"}
    first = await site.post("/runs", body)
    assert (first.status_code, first.json()) == (201, {"run": "r.1", "created": True})
    assert first.headers["location"] == "/runs/r.1"
    again = await site.post("/runs", body)
    assert (again.status_code, again.json()) == (200, {"run": "r.1", "created": False})
    other = await site.post("/runs", body | {"input": 2})
    problem = told(other, 409, "input_mismatch")
    assert problem["run"] == "r.1"
    assert problem["hint"] == "start it under another id"
    unnamed = await site.post("/runs", {"agent": "desk", "input": None})
    assert unnamed.status_code == 201 and unnamed.json()["run"] != "r.1"


async def test_a_run_is_shown_as_the_cli_shows_it(site: Site) -> None:
    await site.started("r1")
    found = (await site.get("/runs/r1")).json()
    assert found == json.loads(json.dumps(await site.fleet.shown("r1")))
    assert (found["status"], found["agent"], found["records"]) == ("running", "nobody", 1)
    told(await site.get("/runs/none"), 404, "run_not_found")


async def test_pages_hold_every_run_once_in_order_by_the_filters(site: Site) -> None:
    runs = [f"r{number:02}" for number in range(40)]
    await asyncio.gather(*(site.started(run, f"a{int(run[1:]) % 2}") for run in runs))
    for run in runs[::4]:
        await site.fleet.cancel(run)
    pages: list[list[str]] = []
    after: dict[str, str] = {}
    while True:
        page = (await site.get("/runs", params={"limit": "7"} | after)).json()
        pages.append(ids(page["runs"]))
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert [len(page) for page in pages] == [7, 7, 7, 7, 7, 5]
    assert [run for page in pages for run in page] == runs

    async def found(**params: str) -> list[str]:
        return ids((await site.get("/runs", params=params)).json()["runs"])

    assert await found(agent="a1") == runs[1::2]
    assert await found(agent="a1", after="r20", limit="2") == ["r21", "r23"]
    assert await found(status="running", limit="3") == runs[:3]
    assert await found(status="failed") == []
    assert await found(older_than="0") == runs
    assert await found(older_than="3600") == []


async def test_a_damaged_journal_hides_no_other_and_says_what_it_is(site: Site) -> None:
    await site.started("r1")
    await site.started("r2")
    async with site.nats() as nats:
        await nats.jetstream().publish(f"{site.namespace}.journal.0.r1", b"\x1b[2Jnot a record")
    one, two = (await site.get("/runs")).json()["runs"]
    assert (one["run"], one["status"], one["agent"]) == ("r1", "damaged", None)
    assert one["reason"].isprintable()
    assert two["status"] == "running"
    assert (await site.get("/runs/r1")).json() == one
    assert (await site.get("/runs/r1?wait=10")).json() == one
    page = (await site.get("/runs/r1/journal")).json()
    assert ([one["n"] for one in page["records"]], page["next"]) == ([1], 2)
    told(await site.get("/runs/r1/journal?from=2"), 409, "journal_damaged")
    told(await site.post("/runs/r1/signals/cancel", {}), 409, "journal_damaged")
    assert ids((await site.get("/runs?status=damaged")).json()["runs"]) == ["r1"]


async def test_a_newer_versions_run_is_shown_and_left_alone(site: Site) -> None:
    await site.started("r1")
    loaded = await site.store.load(RunId("r1"))
    prev = record_hash(loaded.entries[-1].raw)
    record = {"v": 2, "n": 2, "id": "0123456789ab-1", "prev": prev, "at": "", "by": ""}
    raw = json.dumps({"type": "dream"} | record).encode()
    await site.store.append(RunId("r1"), Entry(decode(raw), raw), expected=loaded.tail)
    found = (await site.get("/runs/r1")).json()
    assert found["status"] == "newer", found["reason"]
    assert ids((await site.get("/runs?status=newer")).json()["runs"]) == ["r1"]
    told(await site.post("/runs/r1/signals/cancel", {}), 409, "newer_version")
    events = await site.follow("r1")
    assert [event.event for event in events] == ["record", "record", "problem"]
    assert events[-1].data["code"] == "newer_version"
    response = await site.get("/runs/r1/journal?follow=1", headers={"Last-Event-ID": "2"})
    told(response, 409, "newer_version")


async def test_a_wait_ends_with_the_run_and_not_before(site: Site) -> None:
    @write(approval=True)
    def ticket(title: str) -> str:
        return title

    await site.post("/runs", {"agent": "desk", "input": "x", "run": "r1"})
    waiting = asyncio.create_task(site.get("/runs/r1?wait=30s"))
    await site.followers(1)
    ready = asyncio.Event()
    agent = Agent(
        "desk", model=ScriptedModel(call("ticket", title="T"), say("Done.")), tools=[ticket]
    )
    worker = Worker(site.url, [agent], namespace=site.namespace, on_ready=ready.set)
    working = asyncio.create_task(worker.serve())
    try:
        parked = (await waiting).json()
        assert parked["status"] == "awaiting_approval"
        await site.followers(0)
        (item,) = (await site.get("/inbox")).json()["items"]
        assert (item["kind"], item["marker"]) == ("approval", parked["pending"][0]["marker"])
        (report,) = (await site.get("/workers")).json()["workers"]
        assert report["worker"] == worker.id
        decision = {"marker": item["marker"], "decision": "approve", "request_id": "d1"}
        receipt = (await site.post("/decisions", decision)).json()
        assert (receipt["run"], receipt["result"]) == ("r1", "applied")
        assert (await site.post("/decisions", decision)).json() == receipt | {"result": "repeated"}

        async def ended() -> Any:
            run = (await site.get("/runs/r1?wait=5")).json()
            return run if run["status"] == "completed" else None

        assert (await eventually(ended))["message"] == "Done."
        told(await site.post("/runs/r1/signals/cancel", {}), 409, "run_finished")
        assert await site.follow("r1", headers={}) != []
    finally:
        worker.force()
        await asyncio.wait([working], timeout=10)
        working.cancel()


async def test_a_wait_that_brings_nothing_ends_by_itself(site: Site) -> None:
    await site.started("r1")
    assert (await site.get("/runs/r1?wait=20ms")).json()["status"] == "running"


# ---- signals and inputs -------------------------------------------------------------------------


async def test_who_signs_is_whose_token_it_is(site: Site) -> None:
    await site.started("r1")
    receipt = await site.post("/runs/r1/signals/cancel", {"reason": "enough", "request_id": "c1"})
    assert receipt.json() == {"run": "r1", "request_id": "c1", "result": "applied", "n": 2}
    record = (await site.store.load(RunId("r1"))).records[-1]
    assert isinstance(record, Signal) and record.by == "signaler"
    for body in ({"by": "alice"}, {"reason": "x", "user": "alice"}):
        told(await site.post("/runs/r1/signals/cancel", body), 400, "bad_payload")


async def test_the_first_decision_wins_and_the_other_is_told_which(site: Site) -> None:
    await site.started("r1")
    first = await site.post("/runs/r1/signals/approve", {"marker": MARKER, "comment": "ok"})
    assert (first.json()["result"], first.json()["n"]) == ("kept", 2)
    lost = await site.post("/decisions", {"marker": MARKER, "decision": "reject", "reason": "no"})
    assert told(lost, 409, "decision_conflict")["winner"] == 2
    same = await site.post("/decisions", {"marker": MARKER, "decision": "approve"})
    assert same.status_code in (200, 409)
    mixed = {"marker": MARKER, "decision": "approve", "reason": "why"}
    told(await site.post("/decisions", mixed), 400, "bad_payload")
    told(await site.post("/runs/r2/signals/approve", {"marker": MARKER}), 404, "run_not_found")


async def test_an_input_is_sent_read_and_withdrawn(site: Site) -> None:
    await site.started("r1")
    body = {"content": {"a": [1]}, "request_id": "a/b ?"}
    state = {"run": "r1", "mode": "steer", "status": "queued"} | body
    sent = await site.post("/runs/r1/inputs", body)
    assert (sent.status_code, sent.json()) == (201, state)
    again = await site.post("/runs/r1/inputs", body | {"content": "other"})
    assert (again.status_code, again.json()) == (200, state)
    at = sent.headers["location"]
    assert (await site.get(at)).json() == state
    assert (await site.get(f"{at}?wait=10ms")).json() == state
    assert (await site.delete(at)).status_code == 204
    assert (await site.delete(at)).status_code == 204
    assert (await site.get(f"{at}?wait=30s")).json()["status"] == "withdrawn"
    told(await site.get("/runs/r1/inputs/none"), 404, "not_found")
    told(await site.delete("/runs/r1/inputs/none"), 404, "not_found")
    told(await site.delete("/runs/none/inputs/none"), 404, "run_not_found")
    too_large = {"content": "x" * 70_000}
    told(await site.post("/runs/r1/inputs", too_large), 413, "too_large")


# ---- what is refused ----------------------------------------------------------------------------


async def test_nothing_of_a_bad_id_goes_any_further(site: Site) -> None:
    """Each place of an id, each bad id: 400 before anything is read or written."""
    subjects: list[str] = []
    async with site.nats() as nats:

        async def note(message: Any) -> None:
            # not what the bridge asks for its own health, nor what the server says of requests
            own = NO_RUN.encode() in message.data or "_SIGNALS" in message.subject
            if not own and not message.subject.startswith("$JS.EVENT."):
                subjects.append(message.subject)

        await nats.subscribe(">", cb=note)
        await nats.flush()

        async def refused(operation: Operation, bad: str) -> None:
            quoted = "".join(f"%{byte:02X}" for byte in bad.encode())
            path = operation.path.replace("{id}", quoted).replace("{request_id}", "x")
            body = {} if operation.body is None else {"json": {"content": 1}}
            response = await site.client().request(operation.method, path, **body)
            told(response, 400, "invalid_id")

        places = [operation for operation in site.table if "{id}" in operation.path]
        await asyncio.gather(*(refused(place, bad) for place in places for bad in BAD_IDS))
        for bad in BAD_IDS:
            told(await site.get("/runs", params={"after": bad}), 400, "invalid_id")
            told(await site.get("/runs", params={"agent": f"{bad}!"}), 400, "invalid_id")
            told(
                await site.post("/runs", {"agent": "a", "input": 1, "run": bad}), 400, "invalid_id"
            )
            decision = {"marker": f"{bad}/{MARKER[3:]}!", "decision": "approve"}
            told(await site.post("/decisions", decision), 400, "bad_payload")
        await nats.flush()
    assert [one for one in subjects if one.startswith((f"{site.namespace}.", "$JS"))] == []


BODIES = [
    (b"", "bad_request"),
    (b"{", "bad_request"),
    (b'{"agent":"a","agent":"a","input":1}', "bad_request"),
    (b'{"agent":"a","input":NaN}', "bad_request"),
    (b'{"agent":"a","input":1e999}', "bad_request"),
    (b'{"agent":"a","input":"\\ud800"}', "bad_request"),
    (b'{"agent":"a","input":"\xff"}', "bad_request"),
    (b'{"agent":"a","input":' + b"[" * 5000 + b"]" * 5000 + b"}", "bad_request"),
    (b'\xef\xbb\xbf{"agent":"a","input":1}', "bad_request"),
    (b"[]", "bad_payload"),
    (b'{"agent":"a"}', "bad_payload"),
    (b'{"agent":"a","input":1,"by":"root"}', "bad_payload"),
    (b'{"agent":"a","input":1,"priority":"1"}', "bad_payload"),
    (b'{"agent":"a","input":1,"priority":true}', "bad_payload"),
    (b'{"agent":"a","input":1,"priority":2}', "bad_payload"),
    (b'{"agent":"a","input":1,"key":""}', "bad_payload"),
    (b'{"agent":"a","input":1,"revision":"\\n"}', "bad_payload"),
]


async def test_a_body_is_read_strictly(site: Site) -> None:
    for raw, code in BODIES:
        told(await site.post("/runs", content=raw), 400, code)
    assert (await site.get("/runs")).json()["runs"] == []


async def test_what_is_wrong_with_a_body_comes_with_what_to_send(site: Site) -> None:
    await site.started("r1")
    for path, body, code, hint in (
        ("/runs/r1/signals/cancel", None, "bad_request", "send {}"),
        ("/runs/r1/signals/resume", None, "bad_request", "send {}"),
        ("/runs/r1/signals/approve", None, "bad_request", "openapi"),
        ("/runs", None, "bad_request", "openapi"),
        ("/runs/r1/inputs", {"content": 1, "mode": "follow-up"}, "bad_payload", "follow_up, steer"),
        ("/runs", {"agent": "a", "input": 1, "priority": 7}, "bad_payload", "one of -1, 0, 1"),
        ("/decisions", {"marker": MARKER, "decision": "maybe"}, "bad_payload", "approve, reject"),
        (
            "/runs/r1/signals/reconcile",
            {"step": "s", "outcome": "no"},
            "bad_payload",
            "done, retry",
        ),
    ):
        found = told(await site.post(path, body), 400, code)
        assert hint in found["hint"], found


async def test_a_bad_marker_is_the_same_wherever_it_stands(site: Site) -> None:
    await site.started("r1")
    bare = told(
        await site.post("/decisions", {"marker": "x", "decision": "approve"}), 400, "bad_payload"
    )
    own = told(await site.post("/runs/r1/signals/approve", {"marker": "x"}), 400, "bad_payload")
    assert (bare["detail"], bare["hint"]) == (own["detail"], own["hint"])


async def test_queries_and_headers_are_read_strictly(site: Site) -> None:
    await site.started("r1")
    for query in (
        *(
            "limit=0",
            "limit=501",
            "limit=+1",
            "limit=",
            "limit=1&limit=2",
            "limit=1_0",
            "limit=%FF",
        ),
        *("status=done", "older_than=-1", "older_than=1.5", "nothing=1", "a=1&" * 60),
    ):
        assert told(await site.get(f"/runs?{query}"), 400, "bad_request"), query
    for wait in ("61", "60.1s", "1m", "-1", "1e1", "60001ms", "", "٣", "nan"):
        told(await site.get("/runs/r1", params={"wait": wait}), 400, "bad_request")
    for ordinal in ("abc", "-1", "", "0", "2", "01x", str(10**30), "1.0", "١"):
        path, header = "/runs/r1/journal?follow=1", ordinal.encode()
        response = await site.get(path, headers={b"Last-Event-ID": header})  # type: ignore[dict-item]
        told(response, 400, "bad_request")
        if ordinal != "2":
            response = await site.get("/runs/r1/journal", params={"from": ordinal})
            told(response, 400, "bad_request")
    told(await site.get("/runs/r1/journal?follow=1&from=3"), 400, "bad_request")
    told(await site.get("/runs/r1/journal?follow=yes"), 400, "bad_request")


async def test_a_large_body_is_refused_unread(site: Site) -> None:
    body = b'"' + b"x" * bodies.BODY_BYTES_MAX + b'"'
    told(await site.post("/runs", content=body), 413, "too_large")

    async def pieces() -> AsyncIterator[bytes]:  # of no declared length
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    told(await site.post("/runs", content=pieces()), 413, "too_large")
    # A declared length alone is enough: nothing of the body is waited for.
    reader, writer = await asyncio.open_connection(*_where(site))
    writer.write(b"POST /runs HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n")
    writer.write(b"Authorization: Bearer rf_signal\r\n\r\n")
    assert b" 413 " in await asyncio.wait_for(reader.readline(), 10)
    assert b"connection: close" in (await asyncio.wait_for(reader.read(), 10)).lower()
    writer.close()
    assert (await site.get("/runs")).json()["runs"] == []


def _where(site: Site) -> tuple[str, int]:
    host, _, port = site.bridge.address.removeprefix("http://").rpartition(":")
    return host, int(port)


async def test_what_is_not_there_says_so_in_the_same_shape(site: Site) -> None:
    for path in ("/nothing", "/runs/r1/signals/late", "/runs/", "/runs/r1/", "/web/../x"):
        response = await site.get(path)
        assert response.status_code in (400, 404, 405), path
        assert response.headers["content-type"] == "application/problem+json"
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "DELETE"):
        told(await site.client().request(method, "/runs"), 405, "method_not_allowed")
    assert (await site.client().head("/runs")).status_code == 200


async def test_more_than_it_can_do_at_once_is_put_off(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.started("r1")
    monkeypatch.setattr(desk, "FOLLOWERS_MAX", 1)
    async with site.following("r1") as events:
        await anext(events)
        refused = await site.get("/runs/r1/journal?follow=1")
        told(refused, 503, "busy")
        assert int(refused.headers["retry-after"]) > 0
        told(await site.get("/runs/r1?wait=1s"), 503, "busy")
        assert (await site.get("/runs/r1")).status_code == 200
    await site.followers(0)
    monkeypatch.setattr(desk, "REQUESTS_MAX", 0)
    monkeypatch.setattr(desk, "REQUEST_WAIT_S", 0.05)
    async with bridge_on(site.url, site.namespace) as full:
        told(await full.get("/runs/r1"), 503, "busy")
        assert (await full.get("/openapi.json")).status_code == 503
        assert (await full.get("/")).status_code == 200


# ---- who may ------------------------------------------------------------------------------------


async def test_each_operation_takes_the_tokens_of_its_scope_and_no_others(site: Site) -> None:
    for operation in site.table:
        path = operation.path.replace("{id}", "r1").replace("{request_id}", "x")
        path = path.replace("{file}", "none.js")
        for scope in (None, *SCOPES):
            response = await site.client(scope).request(operation.method, path)
            status = response.status_code
            if operation.scope is None:
                assert status in (200, 404), operation.name
            elif scope is None:
                told(response, 401, "unauthorized")
                assert response.headers["www-authenticate"] == "Bearer"
            elif scope in GRANTED_BY[operation.scope]:
                assert status not in (401, 403), (operation.name, scope)
            else:
                told(response, 403, "forbidden")
    for header in ("", "Bearer", "Basic rf_read", "rf_read", "Bearer rf_read x", "é"):
        response = await site.client(None).get(
            "/runs",
            headers={"authorization": header.encode("latin-1")},  # type: ignore[dict-item]
        )
        told(response, 401, "unauthorized")


async def test_the_token_file_is_read_again_and_a_broken_one_locks_nobody_out(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    def entry(name: str) -> dict[str, Any]:
        return {"name": name, "scopes": ["read"], "sha256": digest_of(f"rf_{name}")}

    await provision(nats_server.url, namespace=namespace)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"tokens": [entry("ann")]}))
    async with bridge_on(nats_server.url, namespace, TokenFile(path)) as site:

        async def status(name: str) -> int:
            return (await site.client(None).get("/runs", headers=bearer(name))).status_code

        assert (await status("ann"), await status("bob")) == (200, 401)
        path.write_text(json.dumps({"tokens": [entry("bob"), entry("cid")]}))
        assert (await status("ann"), await status("bob")) == (401, 200)
        path.write_text(json.dumps({"tokens": [entry("dan") | {"name": "nats"}]}))
        assert (await status("bob"), await status("dan")) == (200, 401)
        health = await site.client(None).get("/healthz")
        assert health.status_code == 503 and "tokens" in health.json()["problems"][0]
        assert (await site.client(None).get("/readyz")).status_code == 200  # who is in stays in
        path.unlink()
        assert await status("bob") == 200
        path.write_text(json.dumps({"tokens": []}))
        assert await status("bob") == 401
        assert (await site.client(None).get("/readyz")).json() == {"ok": True, "problems": []}


async def test_without_auth_only_this_machine_and_its_own_page_are_served(
    nats_server: NatsServer, namespace: str
) -> None:
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace, NoAuth()) as site:
        client = site.client(None)
        body = {"agent": "a", "input": 1, "run": "r1"}
        assert (await client.post("/runs", json=body)).status_code == 201
        assert (await site.store.load(RunId("r1"))).records[0].by == "dev"
        port = site.bridge.address.rpartition(":")[2]
        for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}"):
            assert (await client.get("/runs", headers={"host": host})).status_code == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0"):
            for path in ("/runs", "/", "/healthz"):
                told(await client.get(path, headers={"host": host}), 403, "forbidden")
        own = {"origin": site.bridge.address}
        assert (await client.post("/runs", json=body, headers=own)).status_code == 200
        for origin in ("http://evil.example", "null", "http://localhost:1", "http://127.0.0.1"):
            response = await client.post("/runs", json=body, headers={"origin": origin})
            told(response, 403, "forbidden")
            response = await client.delete("/runs/r1/inputs/x", headers={"origin": origin})
            told(response, 403, "forbidden")
    with pytest.raises(OpenBridge):
        Bridge(nats_server.url, auth=NoAuth(), host="0.0.0.0")


# ---- what else it serves ------------------------------------------------------------------------


async def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(site: Site) -> None:
    client = site.client(None)
    page = await client.get("/?run=r1")
    assert page.status_code == 200 and page.text.startswith("<!doctype html>")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert page.headers["referrer-policy"] == "no-referrer"
    assert (await client.get("/web/app.js")).headers["content-type"].startswith("text/javascript")
    for name in ("none.js", "..%2Fapp.py", "%2e%2e", "..%2F..%2Fpyproject.toml", "app.js%00", ""):
        told(await client.get(f"/web/{name}"), 404, "not_found")


async def test_metrics_count_by_the_names_of_the_table_only(site: Site) -> None:
    await site.started("r1")
    await site.get("/nothing/at/all")
    await site.post("/runs/r1/signals/cancel", {"reason": "x"})
    await site.post("/runs/r1/signals/cancel", {"reason": 1})
    await site.post("/runs/r1/inputs", {"content": 1})
    site.bridge.metrics.signal("no-such-name", "bad_payload")
    text = (await site.get("/metrics")).text
    assert 'operation="",status="404"} 1.0' in text
    assert 'operation="cancel_run",status="400"} 1.0' in text
    for name, result in (
        ("cancel", "applied"),
        ("cancel", "bad_payload"),
        ("input", "run_finished"),
        ("other", "bad_payload"),
    ):
        assert f'runfold_bridge_signals_total{{name="{name}",result="{result}"}} 1.0' in text
    assert "runfold_bridge_connected 1.0" in text and "r1" not in text


async def test_refused_signals_are_shown_newest_first(site: Site) -> None:
    response = await site.get("/rejected?limit=5")
    assert (response.status_code, response.json()) == (200, {"rejected": []})


async def test_the_description_covers_every_operation_and_each_name_in_it_is_there(
    site: Site,
) -> None:
    document = (await site.get("/openapi.json")).json()
    assert document == json.loads(json.dumps(site.document)) and document["openapi"] == "3.1.0"
    described = {
        (path, method.upper()) for path, item in document["paths"].items() for method in item
    }
    assert described == {(one.path, one.method) for one in site.table}
    names = json.dumps(document).split('"#/components/schemas/')[1:]
    assert {name.partition('"')[0] for name in names} <= set(document["components"]["schemas"])
    operation_ids = [one.name for one in site.table]
    assert len(set(operation_ids)) == len(operation_ids)


# ---- the connection -----------------------------------------------------------------------------


async def test_health_is_red_while_the_server_is_away(tmp_path: Path, namespace: str) -> None:
    server = await NatsServer.start(tmp_path)
    try:
        await provision(server.url, namespace=namespace)
        async with bridge_on(server.url, namespace) as site:

            async def status() -> int:
                return (await site.get("/readyz")).status_code

            async def red() -> bool:
                return await status() == 503

            async def green() -> bool:
                return await status() == 200

            await eventually(green)
            await server.kill()
            await eventually(red)
            assert "runfold_bridge_connected 0.0" in (await site.get("/metrics")).text
            await server.restart()
            await eventually(green)
            assert (await site.post("/runs", {"agent": "a", "input": 1})).status_code == 201
    finally:
        await server.stop()


async def test_a_connection_closed_for_good_ends_the_bridge_and_its_streams(site: Site) -> None:
    await site.started("r1")
    async with site.following("r1") as events:
        await anext(events)
        store = site.bridge._store
        assert store is not None
        await store._connection._nc.close()
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(site.serving, 10)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(_where(site), timeout=1)


@pytest.mark.parametrize(
    "sent",
    [(), (b"GET /runs HT",), (b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /again")],
    ids=["nothing", "half a request", "half a second one"],
)
async def test_who_connects_and_asks_nothing_is_cut_off(
    site: Site, monkeypatch: pytest.MonkeyPatch, sent: tuple[bytes, ...]
) -> None:
    monkeypatch.setattr(http_server, "REQUEST_S", 0.2)
    await site.started("r1")
    async with site.following("r1") as events:  # begun in time, so it may last
        await anext(events)
        reader, writer = await asyncio.open_connection(*_where(site))
        for part in sent:
            writer.write(part)
            if part != sent[-1]:
                await reader.readuntil(b"}")
        with contextlib.suppress(ConnectionResetError):
            async with asyncio.timeout(10):
                while await reader.read(65536):
                    pass
        writer.close()
        await site.fleet.send("r1", "x")
        assert (await anext(events)).id == "2"


async def test_answers_leave_at_once(site: Site) -> None:
    """asyncio looks at the protocol to set TCP_NODELAY; 40 ms a request hang on it."""
    with http_server.bound("127.0.0.1", 0) as listening:
        _, writer = await asyncio.open_connection(*listening.getsockname())
        accepted, _ = await asyncio.get_running_loop().sock_accept(listening)
        with accepted:
            assert accepted.proto == socket.IPPROTO_TCP
        writer.close()


async def test_a_bridge_that_is_cancelled_leaves_nothing_behind(site: Site) -> None:
    await site.started("r1")
    async with site.following("r1") as events:
        await anext(events)
        waiting = asyncio.create_task(site.get("/runs/r1?wait=60s"))
        await site.followers(2)
        site.serving.cancel()
        await asyncio.wait([site.serving], timeout=10)
        assert site.serving.cancelled()
        await asyncio.wait([waiting], timeout=10)
        assert waiting.done()
        waiting.exception()  # an answer, or the connection was cut
    left = [str(task.get_coro()) for task in asyncio.all_tasks()]
    assert not [one for one in left if "RequestResponseCycle" in one or "Follow" in one]
