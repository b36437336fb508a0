"""Many at once, and who behaves badly: followers that never read, polls that vanish, long lists.

UR-33: what a bridge held for them it gives back: memory, descriptors, subscriptions. Numbers are
printed, none of them is a promise of speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.bridge_process import BridgeProcess, Events, bearer, bridge_process
from kit.fleet import zygote
from kit.servers import NatsServer, monitor
from kit.waiting import eventually

from journal.fleet import Fleet
from journal.handle import Journal
from journal.ids import RunId
from journal.records import RunCompleted
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

LISTED = int(os.environ.get("RUNFOLD_TEST_LISTED", "3000"))
"""R84 asks for more: `RUNFOLD_TEST_LISTED=10000`."""

FOLLOWERS = 200
RUNS = 4
RECORDS, RECORD_BYTES = 20, 50_000
"""Of each of the runs that are followed: 1 MB."""

SEND_S = 2.0
"""The product waits 30 s before it cuts off a follower that reads nothing."""

SEND_BUFFER = 16_384
"""On loopback the kernel would take 3 MB for a follower that reads nothing."""

POLLS = 500
GROWTH_MB_MAX = 150.0
"""While 100 followers read nothing. Each may hold its queue and the buffers of its connection."""

LEFT_MB_MAX = 50.0
WAIT_S = 60.0
ROOT = b"Authorization: Bearer rf_root\r\n"


class Site:
    """A bridge process on a namespace, and what its server says of it."""

    def __init__(self, server: NatsServer, bridge: BridgeProcess, store: JetStreamStore) -> None:
        self.server = server
        self.bridge = bridge
        self.store = store
        self.fleet = Fleet(store, by="test")
        self.http = httpx.AsyncClient(
            base_url=bridge.address, headers=bearer("root"), timeout=WAIT_S
        )

    async def held(self) -> dict[str, int]:
        """Descriptors of the bridge; on the server: subscriptions of all clients, consumers."""
        subscriptions = (await monitor(self.server.monitor_url, "subsz"))["num_subscriptions"]
        streams = await monitor(self.server.monitor_url, "jsz?streams=1")
        return {
            "fds": self.bridge.fds,
            "subscriptions": subscriptions,
            "consumers": streams["consumers"],
        }

    async def followers(self) -> int:
        """Streams and waiting requests, as the bridge counts them."""
        text = (await self.http.get("/metrics")).text
        (line,) = [one for one in text.split("\n") if one.startswith("runfold_bridge_followers ")]
        return int(float(line.split()[1]))

    async def reaches(self, count: int, timeout_s: float = WAIT_S) -> None:
        async def there() -> bool:
            return await self.followers() == count

        await eventually(there, timeout_s, what=f"{count} followers")

    async def gives_back(self, before: dict[str, int]) -> None:
        now: dict[str, int] = {}

        async def there() -> bool:
            now.clear()
            now.update(await self.held())
            return all(now[name] <= before[name] for name in before)

        try:
            await eventually(there, 20)
        finally:
            print(f"held before: {before}, after: {now}")


@contextlib.asynccontextmanager
async def site_on(
    server: NatsServer, namespace: str, folder: Path, **options: Any
) -> AsyncGenerator[Site]:
    await provision(server.url, namespace=namespace)
    async with (
        JetStreamStore(server.url, namespace=namespace) as store,
        bridge_process(zygote(), server.url, namespace, folder, **options) as bridge,
    ):
        site = Site(server, bridge, store)
        async with site.http:
            yield site


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Site]:
    async with site_on(nats_server, namespace, tmp_path / "bridge") as site:
        yield site


# ---- followers ----------------------------------------------------------------------------------


class Reader:
    """Keeps of each record its ordinal and digest."""

    def __init__(self) -> None:
        self.records: list[tuple[str, bytes]] = []
        self.ended = False

    async def read(self, port: int, run: str, after: int = 0) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(follow_request(run, after))
        events = Events()
        await reader.readuntil(b"\r\n\r\n")
        while not self.ended:
            size = int(await reader.readuntil(b"\r\n"), 16)
            data = await reader.readexactly(size + 2)
            assert size, "it ended without a word"
            for event in events.feed(data[:-2]):
                if event.event == "record":
                    self.records.append((event.id, hashlib.sha256(event.data).digest()))
                self.ended = self.ended or event.event == "end"
        writer.close()


def follow_request(run: str, after: int = 0) -> bytes:
    path = f"/runs/{run}/journal?follow=1&from={after + 1}"
    return b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path.encode(), ROOT)


async def stalled(port: int, run: str) -> socket.socket:
    """It asks, and reads nothing, ever."""
    return await _opened(port, follow_request(run), SO_RCVBUF=4096)


async def test_stalled_followers_are_cut_off_and_the_others_miss_nothing(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    """200 followers, half of which never read, of runs of 1 MB each: the readers get each record
    once; the stalled ones are cut off; meanwhile other requests are answered and the
    memory stays bounded; afterwards nothing is left."""
    options = {"knobs": {"bridge.sse:SEND_S": SEND_S}, "send_buffer": SEND_BUFFER}
    async with site_on(nats_server, namespace, tmp_path / "bridge", **options) as site:
        runs = [f"r{number}" for number in range(RUNS)]
        for run in runs:
            await site.fleet.start("writer", None, run_id=run)
        warm = Reader()
        await site.fleet.start("writer", None, run_id="warm")
        warming = asyncio.create_task(warm.read(site.bridge.port, "warm"))
        await _write(site.store, "warm", 2)
        await warming
        before, mb = await site.held(), site.bridge.rss_mb

        readers = [Reader() for _ in range(FOLLOWERS // 2)]
        reading = [
            asyncio.create_task(one.read(site.bridge.port, runs[number % RUNS]))
            for number, one in enumerate(readers)
        ]
        deaf = [
            await stalled(site.bridge.port, runs[number % RUNS]) for number in range(FOLLOWERS // 2)
        ]
        await site.reaches(FOLLOWERS)

        asked: list[float] = []
        peak = 0.0

        async def ask_others() -> None:
            nonlocal peak
            for number in range(1_000_000):
                began = time.monotonic()
                found = await site.http.get(f"/runs/{runs[number % RUNS]}")
                assert found.json()["status"] == "running"
                asked.append(time.monotonic() - began)
                peak = max(peak, site.bridge.rss_mb)
                await asyncio.sleep(0.05)

        asking = asyncio.create_task(ask_others())
        began = time.monotonic()
        go_on = asyncio.Event()
        writing = [asyncio.create_task(_write(site.store, run, RECORDS, go_on)) for run in runs]
        await site.reaches(FOLLOWERS // 2)  # all that read nothing are gone; who reads is not
        took = time.monotonic() - began
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        assert len(asked) > 10
        go_on.set()
        await asyncio.gather(*writing)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*reading)

        stored = {
            run: [
                (str(n), hashlib.sha256(entry.raw).digest())
                for n, entry in enumerate((await site.store.load(RunId(run))).entries, 1)
            ]
            for run in runs
        }
        size = sum(len(entry.raw) for entry in (await site.store.load(RunId(runs[0]))).entries)
        for number, one in enumerate(readers):
            assert one.records == stored[runs[number % RUNS]]
        await site.reaches(0)
        for one in deaf:
            one.close()
        asked.sort()
        print(
            f"{FOLLOWERS} followers of {RUNS} runs of {size / 1e6:.1f} MB: rss {mb:.0f} MB before,"
            f" {peak:.0f} at most, {site.bridge.rss_mb:.0f} after; stalled ones cut off within"
            f" {took:.1f} s; {len(asked)} other requests meanwhile, median"
            f" {asked[len(asked) // 2] * 1000:.0f} ms, worst {asked[-1] * 1000:.0f} ms"
        )
        await site.gives_back(before)
        assert peak - mb < GROWTH_MB_MAX
        assert "Traceback" not in site.bridge.log


async def test_a_journal_of_thousands_of_records_is_streamed_and_paged(site: Site) -> None:
    """UR-31: 5 000 records: each once from the beginning, from the middle, and by pages of 500, the
    same bytes; the bridge keeps little of it."""
    await site.fleet.start("writer", None, run_id="long")
    began = time.monotonic()
    await _write(site.store, "long", 2_500, size=200)
    wrote = time.monotonic() - began
    entries = (await site.store.load(RunId("long"))).entries
    stored = [(str(n), hashlib.sha256(entry.raw).digest()) for n, entry in enumerate(entries, 1)]
    assert len(stored) > 5_000
    mb, began = site.bridge.rss_mb, time.monotonic()
    for after in (0, 2_500, len(stored) - 1):
        reader = Reader()
        await reader.read(site.bridge.port, "long", after)
        assert reader.records == stored[after:]
    streamed = time.monotonic() - began
    paged: list[Any] = []
    following: int | None = 1
    while following is not None:
        query = {"from": str(following), "limit": "500"}
        page = (await site.http.get("/runs/long/journal", params=query)).json()
        paged += page["records"]
        following = page["next"]
    assert paged == [json.loads(entry.raw) for entry in entries]
    print(
        f"{len(stored)} records written in {wrote:.1f} s, streamed one and a half times in"
        f" {streamed:.1f} s; rss {mb:.0f} MB before, {site.bridge.rss_mb:.0f} after"
    )
    assert site.bridge.rss_mb - mb < LEFT_MB_MAX


async def _write(
    store: JetStreamStore,
    run: str,
    count: int,
    go_on: asyncio.Event | None = None,
    size: int = RECORD_BYTES,
) -> None:
    """Work the run here: `count` calls with results of that size; its end after `go_on`."""
    async with await Journal.open(store, run, is_write=lambda tool: False) as journal:
        for number in range(count):

            async def fetch(number: int = number) -> str:
                return str(number % 10) * size

            await journal.run_step(f"step-{number}", "tool", fetch, tool="fetch")
        if go_on is not None:
            await go_on.wait()
        message = {"role": "assistant", "content": "done"}
        await journal.append(lambda fold: RunCompleted(message=message, iteration=fold.iteration))


# ---- polls --------------------------------------------------------------------------------------


async def _poll(port: int, wait_s: float) -> socket.socket:
    body = json.dumps({"agents": [{"name": "clerk"}], "wait_s": wait_s}).encode()
    head = b"POST /tasks/poll HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    return await _opened(port, head % (ROOT, len(body)) + body)


async def test_polls_that_vanish_leave_nothing_and_hide_no_task(site: Site) -> None:
    """UR-33: 500 polls, all of whose clients vanish: no subscription, descriptor, or consumer of
    theirs is left; the next run's task goes to the next poll at once."""
    first = await site.http.post("/tasks/poll", json={"agents": [{"name": "clerk"}], "wait_s": 0.1})
    assert first.status_code == 204  # the agent has its consumers now
    before, mb = await site.held(), site.bridge.rss_mb
    polls = [await _poll(site.bridge.port, 60) for _ in range(POLLS)]
    await site.reaches(POLLS)
    held = await site.held()
    for one in polls:
        one.close()
    await site.reaches(0)
    print(f"{POLLS} polls: held {held}, rss {mb:.0f} MB before, {site.bridge.rss_mb:.0f} after")
    await site.gives_back(before)
    assert site.bridge.rss_mb - mb < LEFT_MB_MAX
    await site.fleet.start("clerk", 1, run_id="next")
    found = await site.http.post("/tasks/poll", json={"agents": [{"name": "clerk"}], "wait_s": 10})
    assert (found.status_code, found.json()["run"], found.json()["delivery"]) == (200, "next", 1)


# ---- silence ------------------------------------------------------------------------------------


async def test_who_connects_and_asks_nothing_is_cut_off(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    """300 connections that bring nothing, half a head, or a head whose body never comes: cut off,
    their descriptors given back; others are answered meanwhile. (30 s; here 0.5 s.)"""
    knobs = {"bridge.http_server:REQUEST_S": 0.5, "bridge.bodies:BODY_WAIT_S": 0.5}
    async with site_on(nats_server, namespace, tmp_path / "bridge", knobs=knobs) as site:
        assert (await site.http.get("/healthz")).is_success
        before = await site.held()
        head = (
            b"POST /runs HTTP/1.1\r\nConnection: close\r\n%sHost: x\r\nContent-Length: 20\r\n\r\n{"
            % ROOT
        )
        silent = [await _opened(site.bridge.port, b"") for _ in range(100)]
        silent += [await _opened(site.bridge.port, head[:30]) for _ in range(100)]
        silent += [await _opened(site.bridge.port, head) for _ in range(100)]
        assert (await site.http.get("/healthz")).json()["ok"]
        await site.gives_back(before)
        for one in silent:
            one.close()


async def _opened(port: int, data: bytes, **options: int) -> socket.socket:
    made = socket.socket()
    for name, value in options.items():
        made.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
    await asyncio.get_running_loop().sock_sendall(made, data)
    return made


# ---- a long list --------------------------------------------------------------------------------


async def test_a_long_list_is_paged_and_each_run_listed_once(site: Site) -> None:
    """Each run that was there from first to last stands in exactly one page, in order, while others
    are started meanwhile."""
    began = time.monotonic()
    runs = [f"run-{number:05}" for number in range(LISTED)]
    await _start(site.fleet, runs)
    started = time.monotonic()
    mb = site.bridge.rss_mb

    found: list[str] = []
    after: str | None = ""
    more = iter(range(1_000_000))
    while after is not None:
        query = {"limit": "500"} | ({"after": after} if after else {})
        page = (await site.http.get("/runs", params=query)).json()
        found += [run["run"] for run in page["runs"]]
        assert len(page["runs"]) <= 500
        assert {run["status"] for run in page["runs"]} == {"running"}
        after = page["next"]
        await _start(site.fleet, [f"a-{next(more)}", f"run-{LISTED // 2:05}.{next(more)}"])
    took = time.monotonic() - started
    first = set(runs)
    assert [run for run in found if run in first] == runs
    assert found == sorted(set(found))
    print(
        f"{LISTED} runs started in {started - began:.1f} s, listed by pages of 500 in {took:.1f} s:"
        f" {LISTED / took:.0f}/s; rss {mb:.0f} MB before, {site.bridge.rss_mb:.0f} after"
    )


async def _start(fleet: Fleet, runs: list[str]) -> None:
    waiting = iter(runs)

    async def some() -> None:
        for run in waiting:
            await fleet.start("nobody", {"n": 1}, run_id=run)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(100, len(runs))):
            group.create_task(some())
