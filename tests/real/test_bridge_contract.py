"""The bridge keeps to /openapi.json, and what is malformed changes nothing (R59, R64).

Generated requests to every operation that is documented there, and some thousand malformed ones
over raw sockets, against a bridge in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import hypothesis
import pytest
import requests
import schemathesis
from hypothesis import strategies as st
from kit.bridge_process import BridgeProcess, bearer, bridge_process
from kit.fleet import Crew, crew_on, zygote
from kit.raw_client import ask
from kit.servers import NatsServer
from kit.waiting import eventually
from schemathesis import checks as judges
from schemathesis.specs.openapi import checks as openapi_judges

from journal.views import AwaitingApproval

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

SEED = 20261130
EXAMPLES = 8
"""For each operation and each kind of data, right and wrong."""

WAIT_S = 30.0


class Place:
    """A namespace with a bridge: `ask` waits for a person, `idle` for a worker that never comes,
    `over` is completed."""

    def __init__(self, bridge: BridgeProcess, crew: Crew, marker: str) -> None:
        self.bridge = bridge
        self.crew = crew
        self.marker = marker
        self.http = httpx.AsyncClient(base_url=bridge.address, timeout=WAIT_S)

    async def document(self) -> dict[str, Any]:
        return (await self.http.get("/openapi.json", headers=bearer("rita"))).json()

    async def written(self) -> dict[str, tuple[int, int]]:
        """Of each stream: the last sequence, and how many consumers it has."""
        found: dict[str, tuple[int, int]] = {}
        for name in ("JOURNAL_0", "TASKS", "SIGNALS", "REJECTED"):
            subject = f"$JS.API.STREAM.INFO.{self.crew.namespace.upper()}_{name}"
            state = (await ask(self.crew.url, subject))["state"]
            found[name] = (state["last_seq"], state["consumer_count"])
        return found


@pytest.fixture
async def place(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Place]:
    async with (
        crew_on(nats_server.url, namespace, tmp_path / "crew") as crew,
        bridge_process(zygote(), nats_server.url, namespace, tmp_path / "bridge") as bridge,
    ):
        worker = await crew.worker("asker", "quick")
        await crew.start("asker", "ask")
        await crew.start("quick", "over")
        await crew.start("nobody", "idle")
        await crew.all_completed(["over"])
        outcome = (await crew.status("ask", "awaiting_approval")).outcome
        assert isinstance(outcome, AwaitingApproval)
        worker.term()
        await worker.ended()
        made = Place(bridge, crew, outcome.pending[0].marker)
        async with made.http:
            yield made


# ---- what is documented -------------------------------------------------------------------------

JUDGES = [
    judges.not_a_server_error,
    openapi_judges.status_code_conformance,
    openapi_judges.content_type_conformance,
    openapi_judges.response_headers_conformance,
    openapi_judges.response_schema_conformance,
]


async def test_every_answer_is_one_that_is_documented(place: Place) -> None:
    """Each operation with right and with wrong data, half of it about runs that are there."""
    document = await place.document()
    print(f"seed {SEED}")
    asked = await asyncio.to_thread(_examine, document, place)
    print(f"{asked} requests to {sum(map(len, document['paths'].values()))} operations")
    assert asked > 400
    well = await place.http.get("/healthz")
    assert well.json() == {"ok": True, "problems": []}
    assert "Traceback" not in place.bridge.log


def _examine(document: dict[str, Any], place: Place) -> int:
    asked: list[str] = []
    session = requests.Session()
    session.headers.update(bearer("root"))

    def answers(strategy: st.SearchStrategy[Any]) -> None:
        @hypothesis.seed(SEED)
        @hypothesis.settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )
        @hypothesis.given(st.data())
        def one(data: st.DataObject) -> None:
            case = data.draw(strategy)
            _steer(case, data, place)
            asked.append(case.path)
            response = case.call(base_url=place.bridge.address, session=session, timeout=WAIT_S)
            case.validate_response(response, checks=JUDGES)

        one()

    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        answers(operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing there can be wrong
            answers(operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))
    return len(asked)


def _steer(case: Any, data: st.DataObject, place: Place) -> None:
    """To runs that are there, every other time; and away from what waits or streams for long."""
    if "id" in (case.path_parameters or {}) and data.draw(st.booleans()):
        case.path_parameters["id"] = data.draw(st.sampled_from(["ask", "idle", "over"]))
    if isinstance(case.body, dict):
        if isinstance(case.body.get("marker"), str) and data.draw(st.booleans()):
            case.body["marker"] = place.marker
        if isinstance(case.body.get("wait_s"), int | float) and case.body["wait_s"] > 0.05:
            case.body["wait_s"] = 0.05
        elif case.path == "/tasks/poll":
            case.body.setdefault("wait_s", 0.05)
    query = case.query or {}
    if query.get("wait"):
        query["wait"] = "20ms"
    if case.path == "/runs/{id}/journal" and str(query.get("follow")) == "1":
        case.path_parameters["id"] = "over"  # a stream that ends


# ---- what is malformed --------------------------------------------------------------------------


class Sent(NamedTuple):
    """A request as bytes on the wire, and what it is."""

    what: str
    raw: bytes
    statuses: Sequence[int] = (400, 401, 404, 405, 409, 410, 413)


ROOT = b"Authorization: Bearer rf_root\r\n"


def request(
    method: str,
    path: str | bytes,
    body: bytes | None = None,
    *,
    headers: bytes = b"",
    what: str = "",
    statuses: Sequence[int] = (400, 404),
) -> Sent:
    """`path` as it stands on the wire."""
    raw = path if isinstance(path, bytes) else path.encode("latin-1")
    length = b"" if body is None else b"Content-Length: %d\r\n" % len(body)
    head = b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" % (method.encode(), raw)
    named = f"{method} {raw[:80]!r} {(body or b'')[:60]!r} {headers[:60]!r} {what}"
    return Sent(named, head + ROOT + headers + length + b"\r\n" + (body or b""), statuses)


BODIES: list[tuple[bytes, int]] = [
    (b"", 400),
    (b" ", 400),
    (b"null", 400),
    (b"[]", 400),
    (b"{", 400),
    (b'"approve"', 400),
    (b"17", 400),
    (b"-0.0", 400),
    (b"1" * 5000, 400),
    (b"\xff\xfe", 400),
    (b"\xef\xbb\xbf{}", 400),
    (b'"' + b"a" * 900_000 + b'"', 400),
    (b'{"marker":"' + b"a" * 1_200_000 + b'"}', 413),
    (b'{"marker":' * 10_000 + b"1" + b"}" * 10_000, 400),
    (b"[" * 10_000 + b"]" * 10_000, 400),
    (b'{"approve":true,"approve":false}', 400),
    (b'{"marker":NaN}', 400),
    (b'{"input":Infinity}', 400),
    (gzip.compress(b'{"marker":"x"}'), 400),
    (b'{"force":true}', 400),
    (b'{"run":"over","decided_by":"root"}', 400),
    (b'{"comment":"\\ud83d","content":"\\ud83d"}', 400),
    (b"{} {}", 400),
    (b"{'marker':1}", 400),
]

WRONG: dict[str, list[str]] = {
    "/runs": [
        '{"agent":1,"input":1}',
        '{"agent":"a b","input":1}',
        '{"agent":"","input":1}',
        '{"agent":"fleet","input":1,"priority":2}',
        '{"agent":"fleet","input":1,"priority":"1"}',
        '{"agent":"fleet","input":1,"priority":true}',
        '{"agent":"fleet","input":1,"key":""}',
        '{"agent":"fleet","input":1,"key":"a\\nb"}',
        '{"agent":"fleet","input":1,"revision":""}',
        '{"agent":"fleet","input":1,"revision":3}',
        '{"agent":"fleet","input":1,"by":"root"}',
        '{"agent":"fleet","run":7,"input":1}',
        '{"agent":"fleet"}',
        '{"agent":"fleet","input":"\\ud83d"}',
        '{"agent":"fleet","input":1,"input":1}',
    ],
    "/decisions": [
        '{"marker":"MARKER"}',
        '{"marker":"MARKER","decision":"Approve"}',
        '{"marker":"MARKER","decision":"reconcile"}',
        '{"marker":"MARKER","decision":true}',
        '{"marker":["MARKER"],"decision":"approve"}',
        '{"marker":"MARKER","decision":"approve","reason":"x"}',
        '{"marker":"MARKER","decision":"reject","comment":"x"}',
        '{"marker":"MARKER","decision":"approve","by":"root"}',
        '{"marker":"MARKER","decision":"approve","request_id":"é"}',
        '{"marker":"MARKER ","decision":"approve"}',
        '{"decision":"approve","decision":"approve","marker":"MARKER"}',
    ],
    "/runs/ask/signals/approve": [
        '{"marker":"MARKER","force":true}',
        '{"marker":"MARKER","comment":1}',
        '{"marker":"MARKER","comment":null}',
        '{"marker":"MARKER","marker":"MARKER"}',
        '{"marker":"MARKER","decided_by":"root"}',
        '{"marker":"MARKER","request_id":7}',
        '{"marker":"MARKER","request_id":"%s"}' % ("x" * 129),
        '{"marker":"MARKER","comment":"%s"}' % ("x" * 70_000),
        '{"marker":""}',
        '{"marker":null}',
    ],
    "/runs/ask/signals/reject": ['{"marker":"MARKER","comment":"x"}', '{"marker":1}'],
    "/runs/ask/signals/reconcile": [
        '{"step":"tool/1/0/act"}',
        '{"step":"tool/1/0/act","outcome":"maybe"}',
        '{"step":"tool/1/0/act","outcome":"done"}',
        '{"step":"tool/1/0/act","outcome":"retry","result":1}',
        '{"step":"tool/1/0/act","outcome":"retry","start":"5"}',
        '{"step":"tool/1/0/act","outcome":"retry","start":true}',
    ],
    "/runs/ask/signals/cancel": ['{"reason":1}', '{"reason":"x","by":"root"}', '{"request_id":[]}'],
    "/runs/ask/signals/resume": ['{"reason":null}', '{"until":"2030-01-01T00:00:00Z"}'],
    "/runs/ask/signals/late": ['{"step":"tool/1/0/act","start":5,"result":1}'],
    "/runs/ask/signals/child": ['{"run":"over","outcome":{}}'],
    "/runs/idle/inputs": [
        '{"content":1,"mode":"shout"}',
        '{"content":1,"mode":null}',
        '{"content":1,"request_id":1}',
        '{"content":1,"request_id":"a\\u0000b"}',
        '{"content":1,"to":"x"}',
        '{"mode":"steer"}',
        '{"content":"%s"}' % ("x" * 70_000),
    ],
    "/tasks/poll": [
        '{"agents":[]}',
        '{"agents":"fleet"}',
        '{"agents":[{"name":"a*"}]}',
        '{"agents":[{"name":">"}]}',
        '{"agents":[{"name":"fleet","bounds":{"iterations":-1}}]}',
        '{"agents":[{"name":"fleet"}],"wait_s":61}',
        '{"agents":[{"name":"fleet"}],"wait_s":-1}',
        '{"agents":[{"name":"fleet"}],"wait_s":"1"}',
        '{"agents":[{"name":"fleet"}],"by":"root"}',
    ],
    "/tasks/TASK/journal.read": ['{"claim":"1"}', '{"claim":-1}', '{"claim":true}', '{"x":1}'],
    "/tasks/TASK/journal.append": [
        '{"id":1}',
        '{"id":0,"record":{"type":"step.started","position":0,"kind":"model"}}',
        '{"id":1,"record":{"type":"run.completed"}}',
        '{"id":1,"record":{"type":"claim","position":0}}',
        '{"id":1,"record":{"type":"signal","position":0}}',
        '{"id":1,"record":{"type":"step.started","position":-1,"kind":"model"}}',
        '{"id":1,"record":{"type":"step.started","position":0,"kind":"magic"}}',
        '{"id":1,"record":{"type":"step.started","position":0,"kind":"model","n":4}}',
        '{"id":"1","record":{"type":"step.started","position":0,"kind":"model"}}',
    ],
    "/tasks/TASK/load_checkpoint": ['{"x":1}'],
    "/tasks/TASK/heartbeat": ['{"preview":1}', '{"preview":"%s"}' % ("x" * 70_000)],
    "/tasks/TASK/complete": ['{"id":1}', '{"message":1}', '{"id":1,"message":1,"calls":-1}'],
    "/tasks/TASK/continue": ["{}", '{"id":1,"delay_s":"soon"}', '{"id":1,"until":"tomorrow"}'],
    "/tasks/TASK/pause": ['{"id":1}', '{"id":1,"reason":7}'],
    "/tasks/TASK/fail": ['{"id":1}', '{"id":1,"reason":"x","retriable":1}'],
}
"""Wrong in their types, keys, words: by the address they are sent to."""

BAD_IDS = [
    *("", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "C:x", "a:b", "x ", " x", "a*", "*", ">"),
    *("a.>", "a\tb", "a\nb", "a\r\nb", "a\0b", "%2e%2e", "~", "a~b", "-rf", "_a", ".a", "é", "😀"),
    *("ａ", "a\u202eb", "\x1b[31mx", "x" * 129, "x" * 255, "x" * 5000),
]
"""The list of UR-64, and the like."""

RAW_IDS = [b"%ff", b"%C0%AF", b"%", b"%2", b"%zz", b"a%00", b"%252e%252e", b"a%0d%0aX-Y:%201"]


def with_bad_ids(marker: str) -> Iterator[Sent]:
    for number, raw in enumerate([quote(bad, safe="").encode() for bad in BAD_IDS] + RAW_IDS):
        text = (BAD_IDS[number] if number < len(BAD_IDS) else raw.decode()).encode(
            "utf-8", "surrogatepass"
        )
        digest = marker.rpartition("/")[2]
        yield request("GET", b"/runs/%s" % raw)
        yield request("GET", b"/runs/%s/journal" % raw)
        yield request("GET", b"/runs/%s/journal?follow=1" % raw)
        yield request("GET", b"/runs?after=%s" % raw)
        for name, body in {
            "approve": b'{"marker":"%s"}' % marker.encode(),
            "reject": b'{"marker":"%s"}' % marker.encode(),
            "reconcile": b'{"step":"tool/1/0/act","outcome":"retry"}',
            "cancel": b"{}",
            "resume": b"{}",
        }.items():
            yield request("POST", b"/runs/%s/signals/%s" % (raw, name.encode()), body)
        yield request("POST", b"/runs/%s/inputs" % raw, b'{"content":1}')
        yield request("GET", b"/runs/%s/inputs/i1" % raw)
        yield request("DELETE", b"/runs/%s/inputs/i1" % raw)
        yield request("POST", b"/tasks/%s/journal.read" % raw, b"{}", statuses=(400, 404, 405))
        named = json.dumps(text.decode("utf-8", "replace"))
        yield request("POST", "/runs", b'{"agent":"nobody","input":1,"run":%s}' % named.encode())
        bad = json.dumps(f"{text.decode('utf-8', 'replace')}/tool/1/0/{digest}").encode()
        yield request("POST", "/decisions", b'{"decision":"approve","marker":%s}' % bad)
        name = BAD_IDS[number] if number < len(BAD_IDS) else ""
        if not name.isascii() or not name.isprintable() or len(name) > 128:
            yield request("GET", b"/runs/idle/inputs/%s" % raw)
            yield request("DELETE", b"/runs/idle/inputs/%s" % raw)


QUERIES = [
    *(
        f"/runs?limit={text}"
        for text in ("0", "501", "-1", "1.0", "1e2", "", "x", "9" * 30, "%d9%a1")
    ),
    *(f"/runs?status={text}" for text in ("", "done", "RUNNING", "running%00", "a" * 5000)),
    *(f"/runs?agent={text}" for text in ("", "a*", "%3E", "a%20b", "x" * 300)),
    *(f"/runs?older_than={text}" for text in ("-1", "soon", "9" * 30, "1.5", "NaN")),
    *("/runs?limit=1&limit=2", "/runs?x=1", "/runs?=1", "/runs?%ff=1", "/runs?limit=%ff"),
    *(f"/runs/idle?wait={text}" for text in ("61s", "-1s", "60001ms", "1h", "s", "", "1e1", "NaN")),
    *(f"/runs/over/journal?from={text}" for text in ("0", "-1", "x", "1.0", "9" * 30, "")),
    *(f"/runs/over/journal?limit={text}" for text in ("0", "501", "x", "")),
    *(f"/runs/over/journal?follow={text}" for text in ("2", "true", "", "1&follow=1")),
    "/runs/over/journal?follow=1&from=999999",
    *(f"/rejected?limit={text}" for text in ("0", "-1", "x", "9" * 30)),
    *("/inbox?x=1", "/workers?wait=1", "/metrics?x=1", "/openapi.json?x"),
    "/runs?" + "&".join(f"a{n}=1" for n in range(100)),
]


def with_bad_queries_and_headers() -> Iterator[Sent]:
    for path in QUERIES:
        yield request("GET", path)
    follow = "/runs/over/journal?follow=1"
    for text in (b"abc", b"-1", b"", b"0", b"1" + b"0" * 30, b"1.0", b"\xd9\xa1", b"99999"):
        yield request("GET", follow, headers=b"Last-Event-ID: %s\r\n" % text)
    for method in ("PUT", "PATCH", "OPTIONS", "TRACE", "BREW"):
        for path in ("/runs", "/runs/ask", "/decisions", "/inbox", "/healthz"):
            yield request(method, path, b"{}", statuses=(405,))
    for path in ("/nowhere", "/runs/ask/signals", "/runs/ask/signals/launch", "/RUNS", "//runs"):
        yield request("POST", path, b"{}", statuses=(404,))
    yield request("POST", "/runs", headers=b"Content-Length: 99999999999\r\n", statuses=(413,))
    yield request("POST", "/runs", headers=b"Content-Length: 1048577\r\n", statuses=(413,))
    run = b'{"agent":"nobody","input":1}'
    nobody = b"POST /runs HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n" % len(
        run
    )
    for header in (
        b"",
        b"Authorization:\r\n",
        b"Authorization: Bearer\r\n",
        b"Authorization: Bearer \r\n",
        b"Authorization: Bearer rf_nobody\r\n",
        b"Authorization: Bearer rf_root rf_root\r\n",
        b"Authorization: Basic cm9vdDpyZl9yb290\r\n",
        b"Authorization: rf_root\r\n",
        b"Authorization: Bearer \xff\xfe\r\n",
        b"Authorization: Bearer " + b"x" * 20_000 + b"\r\n",
        b"Cookie: token=rf_root\r\n",
        b"X-Forwarded-User: root\r\n",
    ):
        yield Sent(f"POST /runs {header[:60]!r}", nobody + header + b"\r\n" + run, (401,))
    yield Sent(
        "POST /runs?token=rf_root",
        nobody.replace(b"/runs", b"/runs?token=rf_root") + b"\r\n" + run,
        (401,),
    )


def below_http(marker: str) -> Iterator[Sent]:
    """What is no HTTP at all: an answer, if any, before the connection is closed."""
    body = b'{"marker":"%s"}' % marker.encode()
    path = b"/runs/ask/signals/approve"
    start = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" % path + ROOT
    length = b"Content-Length: %d\r\n" % len(body)
    for header in (
        b"Content-Length: -1\r\n",
        b"Content-Length: x\r\n",
        b"Content-Length: 1, 2\r\n",
        length + b"Content-Length: 5\r\n",
        b"Transfer-Encoding: gzip\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        length + b"X\0Y: 1\r\n",
        length + b"X: a\0b\r\n",
        length + b" folded\r\n",
        length + b"no colon\r\n",
        length + b"X-Y : 1\r\n",
        b"X: " + b"x" * 100_000 + b"\r\n",
    ):
        yield Sent(f"POST {header[:60]!r}", start + header + b"\r\n" + body, (400, 413, 431, 501))
    for line in (
        b"",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40 + b"\r\n\r\n",
        b"GET /runs\r\n\r\n",
        b"GET /runs HTTP/9.9\r\nConnection: close\r\n\r\n",
        b"GET  /runs HTTP/1.1\r\n\r\n",
        b"GET /ru ns HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /runs/a\0b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /runs/a\nb HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /runs/\xff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + ROOT + b"\r\n",
        b"GET /runs HTTP/1.1\r\nConnection: close\r\n" + ROOT + b"\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ):
        yield Sent(f"{line[:60]!r}", line, (400, 401, 413, 414, 431, 505))


async def answer_of(port: int, sent: Sent) -> tuple[int, dict[str, str], bytes]:
    """(0, {}, b"") where it is none."""
    loop = asyncio.get_running_loop()
    raw = bytearray()
    with socket.create_connection(("127.0.0.1", port)) as wire:
        wire.setblocking(False)

        async def send() -> None:
            with contextlib.suppress(OSError):  # it was refused before all of it was sent
                await loop.sock_sendall(wire, sent.raw)
                if not sent.raw:
                    wire.shutdown(socket.SHUT_WR)

        sending = asyncio.create_task(send())
        try:
            async with asyncio.timeout(WAIT_S):
                with contextlib.suppress(ConnectionResetError):
                    while data := await loop.sock_recv(wire, 65536):
                        raw += data
        finally:
            sending.cancel()
            await asyncio.wait([sending])
    if not raw:
        return 0, {}, b""
    head, _, body = bytes(raw).partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    headers = {n.lower(): v for n, _, v in (one.partition(": ") for one in rest)}
    return int(first.split()[1]), headers, body


async def all_of(
    port: int, sent: Sequence[Sent], judge: Callable[[Sent, int, dict[str, str], bytes], None]
) -> None:
    waiting = iter(sent)
    wrong: list[str] = []

    async def some() -> None:
        for one in waiting:
            status, headers, body = await answer_of(port, one)
            try:
                judge(one, status, headers, body)
            except (AssertionError, LookupError, ValueError) as error:
                said = str(error).partition("\n")[0]
                wrong.append(f"{one.what}: {status} {body[:300]!r}: {said}")

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(some())
    assert not wrong, f"{len(wrong)} of {len(sent)}:\n" + "\n".join(wrong[:40])


def is_a_problem(sent: Sent, status: int, headers: dict[str, str], body: bytes) -> None:
    assert status in sent.statuses
    assert headers["content-type"] == "application/problem+json"
    problem = json.loads(body)
    assert problem["status"] == status and problem["type"] == "about:blank"
    assert problem["code"] and problem["detail"].isprintable()
    assert len(body) < 2500


async def test_malformed_requests_are_refused_and_write_nothing(place: Place) -> None:
    """UR-16, UR-64: each is answered 4xx, problem+json, 413 for its size; no stream has one message
    more, no consumer is made; the run that waits still waits, and a right approval goes through."""
    document = await place.document()
    task = (
        await place.http.post(
            "/tasks/poll", json={"agents": [{"name": "nobody"}]}, headers=bearer("root")
        )
    ).json()["task"]
    before = await place.written()

    sent: list[Sent] = []
    for path, methods in document["paths"].items():
        if "requestBody" in methods.get("post", {}):
            there = path.replace("{id}", "ask").replace("{task}", task)
            sent += [request("POST", there, body, statuses=(status,)) for body, status in BODIES]
    for path, wrong in WRONG.items():
        there = path.replace("TASK", task)
        for text in wrong:
            body = text.replace("MARKER", place.marker).encode()
            sent.append(request("POST", there, body, statuses=(400, 404, 413)))
    sent += with_bad_ids(place.marker)
    sent += with_bad_queries_and_headers()
    print(f"{len(sent)} malformed requests")
    assert len(sent) >= 1000
    await all_of(place.bridge.port, sent, is_a_problem)
    assert await place.written() == before

    assert (await place.http.get("/healthz")).json()["ok"]
    approved = await place.http.post(
        "/decisions", json={"marker": place.marker, "decision": "approve"}, headers=bearer("alice")
    )
    assert approved.json()["result"] == "applied"
    assert "Traceback" not in place.bridge.log


async def test_what_is_no_http_is_refused_and_writes_nothing(place: Place) -> None:
    """Broken framing, forged lengths, NULs, TLS, HTTP/2: 4xx or a closed connection."""
    before = await place.written()

    def judge(sent: Sent, status: int, headers: dict[str, str], body: bytes) -> None:
        assert status == 0 or status in sent.statuses or status == 404
        assert b"Traceback" not in body

    sent = list(below_http(place.marker))
    await all_of(place.bridge.port, sent, judge)
    assert await place.written() == before
    assert (await place.http.get("/healthz")).json()["ok"]
    await eventually(lambda: "Traceback" not in place.bridge.log)
