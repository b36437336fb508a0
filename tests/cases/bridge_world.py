"""A fleet and its bridges in a test: who knocks at which door, and what is written meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import nats
from cases.fleet_agents import build, plan
from cases.fleet_world import Workers
from cases.zygote import Child, Zygote
from kit.bridge_process import BridgeProcess, Event, Events, bearer, bridge_process
from kit.raw_client import ask
from kit.waiting import eventually

from journal.stores.memory import MemoryStore
from runfold import AwaitingApproval, run

Name = Literal["rita", "alice", "wanda", "root", "nobody"]
STEP = "tool/1/0/gated"
WAIT_S = 30.0
KEPT_S = 75.0
"""A signal that a bridge took and did not settle comes again after 30 s."""

LARGE = 500_000
"""A body above is sent by a blocking client: where the bridge refuses it unread, asyncio drops the
answer together with the connection."""


class Door:
    """A bridge as somebody with a token finds it."""

    def __init__(self, bridge: BridgeProcess, name: Name = "alice") -> None:
        self.bridge = bridge
        self.http = httpx.AsyncClient(headers=bearer(name), timeout=WAIT_S)

    async def __call__(self, method: str, path: str, body: Any = None) -> httpx.Response:
        url, given = self.bridge.address + path, dict[str, Any]()
        if body is not None:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            given = {"content": raw}
            if len(raw) > LARGE:
                headers = dict(self.http.headers)
                return await asyncio.to_thread(
                    httpx.request, method, url, headers=headers, timeout=WAIT_S, **given
                )
        return await self.http.request(method, url, **given)

    def command(self, zygote: Zygote, *args: str, token: str = "rf_alice") -> Child:
        """`runfold … --store http://…`."""
        where = ("--store", self.bridge.address, "--json")
        return zygote.cli(*args, *where, env={"RUNFOLD_TOKEN": token})

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

        began = time.monotonic()
        await eventually(empty, KEPT_S, what="all signals are settled")
        print(f"all signals were settled within {time.monotonic() - began:.1f} s")

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
        """Runs whose charge was cut off by the death of their worker, long ago."""
        fleet = self.fleet
        fleet.hold("pay")
        worker = await fleet.worker(concurrency=100)
        await fleet.starts(dict.fromkeys(runs, plan([("charge", {"hold": "pay"})])))
        await eventually(lambda: len(fleet.ledger.lines()) == len(runs), WAIT_S)
        await fleet.kill(worker)
        fleet.go("pay")
        await fleet.worker(concurrency=100, long_after=True)
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


async def followed(door: Door, run: str, **headers: str) -> list[Event]:
    """All events of a stream that ends."""
    events, found = Events(), list[Event]()
    url = f"{door.bridge.address}/runs/{run}/journal?follow=1"
    async with door.http.stream("GET", url, headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for data in answer.aiter_raw():
            found += events.feed(data)
    return found


async def learnt(home: Path, run_id: str, given: Any) -> str:
    """The marker that the run will ask for, from the same run elsewhere: it binds run and call."""
    end = await run(MemoryStore(), build(home), run_id, given)
    assert isinstance(end, AwaitingApproval)
    return end.pending[0].marker


async def at_once(*all: Awaitable[Any]) -> list[Any]:
    return await asyncio.gather(*all)
