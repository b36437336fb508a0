"""Traces of real processes (R73): one a run over its starter, bridge and workers, whatever dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cases.zygote import Child
from kit.fleet import Crew, crew_on, zygote
from kit.http_tasks import bridge_on, http_site
from kit.servers import NatsServer
from kit.spans import Collector, Seen, collector, traced
from kit.waiting import eventually
from nats.aio.client import Client

from journal.ids import RunId
from journal.records import StepCompleted
from journal.spans import parsed
from journal.views import AwaitingApproval

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

WAIT_S = 30.0
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALLER_TRACE, CALLER_SPAN = CALLER[3:35], CALLER[36:52]
PUBLISHER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
PUBLISHED = (PUBLISHER[3:35], PUBLISHER[36:52])


@contextlib.asynccontextmanager
async def plain(url: str) -> AsyncGenerator[Any]:
    client: Any = Client()
    await client.connect(url)
    try:
        yield client
    finally:
        await client.close()


class Process:
    """A command that sends its spans to the collector."""

    def __init__(self, crew: Crew, to: Collector, *words: str, flush_s: float = 20.0) -> None:
        where = ["--store", crew.url, "--namespace", crew.namespace]
        self.child: Child = zygote().call(
            "kit.traced_agents:command",
            args=[*words, *where],
            folder=str(crew.folder),
            environment=to.environment,
            flush_s=flush_s,
        )

    async def says(self, pattern: str) -> str:
        def found() -> str | None:
            assert not self.child.ended.is_set(), self.child.wait()
            path = self.child.scratch / "err"
            said = re.search(pattern, path.read_text() if path.exists() else "")
            return said[1] if said else None

        return await eventually(found, WAIT_S, what=f"it says {pattern}")

    async def end(self, number: signal.Signals) -> int:
        self.child.kill(number)
        await eventually(self.child.ended.is_set, WAIT_S, what="it ends")
        return self.child.wait().code


async def worker(crew: Crew, to: Collector) -> Process:
    words = ("worker", "kit.traced_agents:clerk", "--ack-wait", "1", "--trace")
    found = Process(crew, to, *words)
    await found.says(r"worker (\S+) is ready")
    return found


async def test_one_trace_holds_what_bridge_and_workers_did_and_a_replay_adds_nothing(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        with collector() as sent:
            spans = await the_life_of_a_run(crew, sent)
        entries = await crew.entries("r1")
    assert {span.service for span in spans} == {"runfold-bridge", "runfold-worker"}
    assert {span.trace for span in spans} == {CALLER_TRACE}
    # The first worker's claim was never ended: nobody was there to tell of it.
    assert Counter(span.name for span in spans) == {
        "POST /runs": 1,
        "start clerk": 1,
        "run clerk": 2,
        "tool look": 1,
        "own": 1,
        "tool pay": 1,
        "signal approve": 1,
    }
    by_name = {span.name: span for span in spans}
    server, begun = by_name["POST /runs"], by_name["start clerk"]
    assert (server.parent, server.kind, begun.parent) == (CALLER_SPAN, "SERVER", server.id)
    taken_over, woken = (span for span in spans if span.name == "run clerk")
    assert taken_over["reason"] in ("redelivery", "adopted") and woken["reason"] == "wake"
    assert {one.parent for one in (taken_over, woken)} == {begun.id}
    lost = parsed(entries[1].trace)
    assert lost is not None and by_name["tool look"].parent == f"{lost.span_id:016x}"
    assert by_name["own"].parent == by_name["tool look"].id
    assert by_name["tool pay"].parent == woken.id
    approve = by_name["signal approve"]
    assert (approve.links, approve.parent) == ((PUBLISHED,), begun.id)
    assert woken.links == ((approve.trace, approve.id),)
    # Each call that the journal holds has its span, and the journal says whose each record is.
    completed = [entry.record for entry in entries if isinstance(entry.record, StepCompleted)]
    assert [record.step for record in completed] == ["0/0", "0/1"]
    carried = {entry.type: entry.trace for entry in entries if entry.trace}
    assert carried["run.started"] == f"00-{CALLER_TRACE}-{begun.id}-01"
    assert carried["signal"] == f"00-{CALLER_TRACE}-{approve.id}-01"
    assert set(carried) == {"run.started", "signal", "claim"}


async def the_life_of_a_run(crew: Crew, sent: Collector) -> list[Seen]:
    """Started over HTTP, its worker killed, approved by NATS, completed by another worker."""
    bridge = Process(crew, sent, "bridge", "--no-auth", "--listen", "127.0.0.1:0")
    first = await worker(crew, sent)
    crew.hold("between")
    async with httpx.AsyncClient(base_url=await bridge.says(r"bridge: (http://\S+)")) as http:
        answer = await http.post(
            "/runs",
            json={"agent": "clerk", "input": "go", "run": "r1"},
            headers={"traceparent": CALLER},
        )
        assert answer.status_code == 201, answer.text
    await crew.reaches("between")
    await eventually(lambda: sent.spans.named("tool look") and sent.spans.named("own"), WAIT_S)
    await first.end(signal.SIGKILL)
    second = await worker(crew, sent)
    await crew.until("r1", lambda run: run.status == "running" and run.records >= 5)
    crew.let_go("between")
    waiting = (await crew.status("r1", "awaiting_approval")).outcome
    assert isinstance(waiting, AwaitingApproval)
    async with plain(crew.url) as client:
        await client.publish(
            f"{crew.namespace}.signal.r1.approve",
            json.dumps({"marker": waiting.pending[0].marker}).encode(),
            headers={"Traceparent": PUBLISHER},
        )
        await client.flush()
    await crew.all_completed(["r1"])
    assert [await one.end(signal.SIGTERM) for one in (second, bridge)] == [0, 0]
    return list(sent.spans)


async def test_a_worker_over_http_has_its_steps_in_the_runs_trace_over_whatever_bridge(
    nats_server: NatsServer, namespace: str
) -> None:
    here, seen = traced()
    there, seen_there = traced()
    async with http_site(nats_server, namespace, observer=here) as site:
        await site.start("r1", "go")
        task = await site.poll()
        read = await task.read()
        began = await task.start(0, "look", replay="safe")
        await task.complete(0, began["n"], result="s3cr3t")
        async with bridge_on(site.url, namespace, observer=there) as other:
            moved = task.on(other.address)
            began = await moved.start(1, "act", replay="unsafe")
            await moved.http.aclose()
            task.numbers = moved.numbers
            await task.complete(1, began["n"], error={"message": "s3cr3t"})
        await task.end("complete", message="done")
        await eventually(lambda: here.open_spans == there.open_spans == 0)
    holding = seen.one("run clerk")
    assert read["traceparent"] == f"00-{holding.trace}-{holding.id}-01"
    assert (holding["claim"], holding["status"]) == (read["claim"], "completed")
    assert holding["ended"] == "run.completed"
    look, act = seen.steps()
    assert (look.name, look["outcome"], look.failed) == ("tool look", "result", False)
    assert (act.name, act["outcome"], act.failed) == ("tool act", "error", True)
    assert look.parent == act.parent == holding.id
    assert act.start_ns <= act.end_ns
    assert seen_there.all == []  # what it began, the other one has told
    assert not any("s3cr3t" in span.text for span in seen)


async def test_who_asks_by_nats_finds_its_request_in_its_own_trace(
    nats_server: NatsServer, namespace: str
) -> None:
    observer, seen = traced()
    async with http_site(nats_server, namespace, observer=observer) as site:
        await site.start("r1", "go")
        async with plain(site.url) as client:
            for trace in (PUBLISHER, "not one", PUBLISHER + "-x"):
                request = {"run": "r1", "content": "hurry", "request_id": f"i{len(trace)}"}
                answer = await client.request(
                    f"{namespace}.api.inputs.submit",
                    json.dumps(request).encode(),
                    timeout=10,
                    headers={"traceparent": trace},
                )
                assert json.loads(answer.data)["status"] == "queued"
            get = {"run": "r1", "request_id": f"i{len(PUBLISHER)}"}
            headers = {"traceparent": PUBLISHER}
            await client.request(
                f"{namespace}.api.inputs.get", json.dumps(get).encode(), headers=headers
            )
        loaded = await site.fleet.store.load(RunId("r1"))
    server = seen.one("request inputs-submit")
    assert (server.trace, server.parent, server.kind) == (*PUBLISHED, "SERVER")
    inputs = seen.named("input")
    assert [one.links for one in inputs] == [((server.trace, server.id),), (), ()]
    assert len({one.trace for one in inputs} | {server.trace}) == 2
    stored = [entry.trace for entry in loaded.entries if entry.type == "input"]
    assert stored == [f"00-{one.trace}-{one.id}-01" for one in inputs]


async def test_a_process_ends_though_its_collector_hangs(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    hung = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{hung.sockets[0].getsockname()[1]}"
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        (crew.folder / "agent.py").write_text(AGENT)
        with collector() as unused:
            unused.url = url
            ran = Process(
                crew, unused, "run", "agent.py:agent", "--id", "r1", "--input", "go", flush_s=0.1
            )
            await eventually(ran.child.ended.is_set, WAIT_S, what="the command ends")
        assert ran.child.wait().code == 0
    hung.close()


AGENT = """
from runfold import Agent
from runfold.testing import ScriptedModel, say
agent = Agent("desk", model=ScriptedModel(say("Done.")), tools=[])
"""
