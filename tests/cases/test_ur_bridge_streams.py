"""UR-27, 64, 67: what comes through HTTP and SSE, and what is let in, over two bridge processes.

Random moments and places come from a seed that is printed: RUNFOLD_TEST_SEED repeats one.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from cases.bridge_world import House, at_once, followed, house_on
from cases.fleet_agents import plan
from cases.fleet_world import Workers, fleet_on
from cases.test_ur_starts import BAD, GOOD
from cases.test_ur_values import REFUSED, TEXTS
from cases.world import World
from cases.zygote import Zygote
from kit.bridge_process import CuttingWire, Event, Events

from journal.handle import Journal
from journal.ids import RunId
from journal.records import RunCompleted

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


# ---- UR-27 ------------------------------------------------------------------------------------

FRAMES = {
    "frames": "a\n\nevent: end\ndata: {}\n\nid: 99\n\nb",
    "carriage": "a\r\revent: record\rdata: {}\r\r",
    "comment": ": here\n: there\nretry: 1\n",
}


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
        said = await next(doors)("POST", "/runs", {"agent": "fleet", "input": given, "run": run_id})
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
        found = [
            json.loads(event.data.decode("utf-8")) for event in records if event.event == "record"
        ]
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


def can_be_a_subject(text: str) -> bool:
    """What a server takes: tokens that are not empty, without white space; and no wildcards."""
    tokens = text.split(".")
    return all(tokens) and not set(text) & set(" \t\r\n\0*>") and len(text) < 1000


async def test_ur64_bad_ids_at_every_door_of_the_bridge(house: House) -> None:
    """UR-64: paths, devices, wildcards, too long ones: the same answer at HTTP, SSE, `nats req`; by
    `nats pub` as far as they can be a subject at all; nothing is written but what was refused."""
    fleet = house.fleet
    before = await house.written()
    doors = house.any_door
    published = 0
    for bad in BAD:
        if bad == "\ud83d":  # no bytes say that
            continue
        raw = "".join(f"%{byte:02X}" for byte in bad.encode())
        for method, path, body in (
            ("GET", f"/runs/{raw}", None),
            ("GET", f"/runs/{raw}/journal?follow=1", None),
            ("POST", f"/runs/{raw}/signals/cancel", {}),
            ("POST", f"/runs/{raw}/inputs", {"content": 1}),
            ("DELETE", f"/runs/{raw}/inputs/i1", None),
        ):
            said = await next(doors)(method, path, body)
            assert said.status_code == 400 and said.json()["code"] == "invalid_id", (bad, said.text)
        said = await next(doors)("POST", "/runs", {"agent": "pay", "input": 1, "run": bad})
        assert (said.status_code, said.json()["code"]) == (400, "invalid_id"), bad
        for action, payload in (
            ("submit", {"content": 1}),
            ("get", {"request_id": "i1"}),
            ("withdraw", {"request_id": "i1"}),
        ):
            answer = await house.request(f"inputs.{action}", payload | {"run": bad})
            assert answer["error"]["code"] == "invalid_id", (bad, answer)
        if can_be_a_subject(bad):
            await house.publish(f"{bad}.cancel", {})
            published += 1
            answer = await house.request(f"signals.{bad}.cancel", {})
            wanted = "run_not_found" if bad == "a~b" else "invalid_id"  # a subject's `~` is a dot
            assert answer["error"]["code"] == wanted, (bad, answer)
    assert published > 10
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
        spelt = good if can_be_a_subject(good) else good.replace(".", "~")
        answer = await house.request(f"signals.{spelt}.cancel", {})
        assert (answer.get("run"), answer.get("result")) == (good, "applied"), (spelt, answer)
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
    cuts = [rng.randrange(1, size // 40) for _ in range(28)] + [1, 200]
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
    assert (wire.cut, restarted) == (30, 2)
    *records, end = got
    assert end.json == {"status": "completed"}
    assert [event.data for event in records] == stored
    assert [event.id for event in records] == [str(n + 1) for n in range(len(stored))]


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


async def test_ur67_an_idle_stream_is_kept_alive_by_comments(house: House, zygote: Zygote) -> None:
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
