"""Following a run over HTTP: each record once, nothing forged, nobody slowed down (R64)."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from kit.bridge import Site, bridge_on
from kit.servers import NatsServer
from kit.waiting import eventually

from bridge import sse
from journal.ids import RunId
from journal.stores.provision import provision
from runfold.testing import ScriptedModel, say
from worker.agent import Agent
from worker.service import Worker

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

FORGED = '\n\nevent: end\ndata: {"status":"completed"}\n\nid: 999\rdata: x\r\n\r\n\u2028:'


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncIterator[Site]:
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace) as site:
        yield site


async def completed(site: Site, run: str, input: str) -> None:
    """A run that a worker takes to its end."""
    await site.fleet.start("desk", input, run_id=run)
    ready = asyncio.Event()
    agent = Agent("desk", model=ScriptedModel(say("Done.")))
    worker = Worker(site.url, [agent], namespace=site.namespace, on_ready=ready.set)
    working = asyncio.create_task(worker.serve())
    try:
        await site.fleet.wait(run, timeout_s=20)
    finally:
        worker.force()
        await asyncio.wait([working], timeout=10)
        working.cancel()


async def test_a_follower_gets_each_record_once_as_it_is_stored_and_the_end(site: Site) -> None:
    following = asyncio.create_task(_all(site, "r1"))
    await completed(site, "r1", FORGED)
    entries = (await site.store.load(RunId("r1"))).entries
    tail = len(entries)
    for events in (await following, await site.follow("r1")):
        records = [event for event in events if event.event == "record"]
        assert [event.id for event in records] == [str(n + 1) for n in range(tail)]
        assert [event.data["id"] for event in records] == [one.record.id for one in entries]
        assert records[0].data["input"] == FORGED
        assert (events[-1].event, events[-1].data) == ("end", {"status": "completed"})
        assert {event.event for event in events} <= {"record", "preview", "end"}
    raw = await site.get("/runs/r1/journal", headers={"accept": "text/html, text/event-stream;q=1"})
    for entry in entries:
        assert b"data: " + entry.raw + b"\n\n" in raw.content
    for given in ({"headers": {"Last-Event-ID": "2"}}, {"from": "3"}):
        rest = await site.follow("r1", **given)  # type: ignore[arg-type]
        assert [event.id for event in rest] == [*(str(n) for n in range(3, tail + 1)), None]
    done = await site.get("/runs/r1/journal?follow=1", headers={"Last-Event-ID": str(tail)})
    assert (done.status_code, done.content) == (204, b"")
    beyond = await site.get("/runs/r1/journal?follow=1", headers={"Last-Event-ID": str(tail + 1)})
    assert beyond.status_code == 400
    head = await site.client().head("/runs/r1/journal?follow=1")
    assert head.headers["content-type"].startswith("text/event-stream") and not head.content
    await site.followers(0)


async def _all(site: Site, run: str) -> list[object]:
    async def there() -> bool:
        return (await site.get(f"/runs/{run}")).status_code == 200

    await eventually(there)
    return list(await site.follow(run))


async def test_pages_hold_the_records_as_they_are_stored(site: Site) -> None:
    await site.started("r1")
    for number in range(4):
        await site.fleet.send("r1", number)
    entries = (await site.store.load(RunId("r1"))).entries
    raw = await site.get("/runs/r1/journal")
    assert b",".join(entry.raw for entry in entries) in raw.content
    seen: list[int] = []
    following: int | None = 1
    while following is not None:
        page = (await site.get(f"/runs/r1/journal?limit=2&from={following}")).json()
        seen += [record["n"] for record in page["records"]]
        following = page["next"]
    assert seen == [1, 2, 3, 4, 5]
    beyond = (await site.get("/runs/r1/journal?from=6")).json()
    assert beyond == {"run": "r1", "records": [], "next": None}


async def test_previews_come_between_records_and_forge_nothing(site: Site) -> None:
    await site.started("r1")
    async with site.following("r1") as events:
        assert (await anext(events)).event == "record"
        await site.store.preview(RunId("r1"), FORGED)
        preview = await anext(events)
        assert preview == ("preview", {"text": FORGED}, None)
        await site.fleet.send("r1", "x")
        assert (await anext(events)).id == "2"


async def test_a_preview_has_nothing_unseen_in_the_stream(site: Site) -> None:
    """U+009B alone begins a control sequence in a terminal that curl writes to (R68)."""
    text = "\u202eevil\u009b2J\u200b"
    await site.started("r1")
    async with site.client().stream("GET", "/runs/r1/journal?follow=1") as response:
        found = ""
        async for chunk in response.aiter_text():
            if "event: record" in chunk:
                await site.store.preview(RunId("r1"), text)
            found += chunk
            if "event: preview" in found and found.endswith("\n\n"):
                break
    data = found.partition("event: preview\n")[2].partition("data: ")[2].partition("\n")[0]
    assert data.isascii() and json.loads(data) == {"text": text}


async def test_a_stream_breaks_off_at_damage_and_says_so(site: Site) -> None:
    await site.started("r1")
    async with site.following("r1") as events:
        await anext(events)
        async with site.nats() as nats:
            await nats.jetstream().publish(f"{site.namespace}.journal.0.r1", b"{}")
        problem = await anext(events)
        assert problem.event == "problem" and problem.data["code"] == "journal_damaged"
        assert [event async for event in events] == []
    again = await site.get("/runs/r1/journal?follow=1", headers={"Last-Event-ID": "1"})
    assert again.status_code == 409


async def test_keep_alives_come_while_nothing_happens(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    await site.started("r1")
    async with site.client().stream("GET", "/runs/r1/journal?follow=1") as response:
        text = ""
        async for chunk in response.aiter_text():
            text += chunk
            if text.count("\n: here\n\n") + text.count("\n\n: here\n\n") >= 2:
                break


async def test_who_leaves_leaves_nothing_behind(site: Site) -> None:
    await site.started("r1")
    before = await site.subscriptions()
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(site.following("r1")) for _ in range(20)]
        for events in streams:
            await anext(events)
        waiting = asyncio.create_task(site.get("/runs/r1?wait=60s"))
        await site.followers(21)
        assert await site.subscriptions() > before
        waiting.cancel()
    await site.followers(0)

    async def gone() -> bool:
        return await site.subscriptions() == before

    await eventually(gone)


async def test_who_reads_nothing_is_cut_off_and_slows_nobody_down(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "SEND_S", 0.5)
    await site.started("r1")
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = site.bridge.address.removeprefix("http://").rpartition(":")
        stuck.connect((host, int(port)))
        stuck.sendall(
            b"GET /runs/r1/journal?follow=1 HTTP/1.1\r\nHost: x\r\n"
            b"Authorization: Bearer rf_read\r\n\r\n"
        )
        await site.followers(1)
        async with site.following("r1") as events:
            await anext(events)
            count = 0
            async with asyncio.timeout(30):
                while b"followers 2.0" in site.bridge.metrics.text():
                    await site.fleet.send("r1", "x" * 60_000)
                    count += 1
                    assert (await anext(events)).id == str(count + 1)
                    if count == 200:  # what sockets buffer is full long before
                        break
                await site.followers(1)
        received = b""
        while part := await asyncio.to_thread(stuck.recv, 1 << 20):  # what was sent, and no more
            received = received[-10:] + part
        assert not received.endswith(b"\r\n0\r\n\r\n")


async def test_the_bridge_stops_within_two_seconds_under_fifty_followers(site: Site) -> None:
    await site.started("r1")
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(site.following("r1")) for _ in range(50)]
        for events in streams:
            await anext(events)
        waiting = asyncio.create_task(site.get("/runs/r1?wait=60s"))
        await site.followers(51)
        began = time.monotonic()
        await site.bridge.stop()
        await asyncio.wait_for(site.serving, 20)
        assert time.monotonic() - began < 2
        for events in streams:  # each ended as a stream ends, not cut off
            assert [event async for event in events] == []
        assert (await waiting).json()["code"] == "busy"
