"""A bridge in this process, and a client of its task API that says what it means."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from kit.servers import NatsServer

from bridge.auth import NoAuth
from bridge.service import Bridge
from journal.fleet import Fleet
from journal.ids import RunId
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.views import RunState

AGENT = "clerk"


class Refused(AssertionError):
    """A problem+json answer that the test did not ask for."""

    def __init__(self, status: int, problem: dict[str, Any]) -> None:
        super().__init__(f"{status} {problem}")
        self.status = status
        self.code: str = problem.get("code", "")
        self.problem = problem


class HttpTask:
    """A task, as a worker holds it: numbers its records, says its claim."""

    def __init__(self, http: httpx.AsyncClient, given: dict[str, Any]) -> None:
        self.http = http
        self.given = given
        self.name: str = given["task"]
        self.claim: int | None = None
        self.numbers = 0

    def on(self, address: str) -> HttpTask:
        """The same task, through another bridge."""
        other = HttpTask(httpx.AsyncClient(base_url=address, timeout=70), self.given)
        other.claim, other.numbers = self.claim, self.numbers
        return other

    async def post(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        if self.claim is not None and verb != "load_checkpoint":
            body = {"claim": self.claim, **body}
        answer = await self.http.post(f"/tasks/{self.name}/{verb}", json=body)
        found = answer.json()
        if answer.status_code != 200:
            raise Refused(answer.status_code, found)
        self.claim = found.get("claim", self.claim)
        return found

    async def read(self) -> dict[str, Any]:
        return await self.post("journal.read", {})

    async def append(self, type_: str, *, id: int | None = None, **fields: Any) -> dict[str, Any]:
        self.numbers += id is None
        body = {"id": id or self.numbers, "record": {"type": type_, **fields}}
        return await self.post("journal.append", body)

    async def start(
        self, position: int, tool: str, input: Any = None, **fields: Any
    ) -> dict[str, Any]:
        fields = {"kind": "tool", "tool": tool, "input": input} | fields
        return await self.append("step.started", position=position, **fields)

    async def complete(self, position: int, start: int, **fields: Any) -> dict[str, Any]:
        return await self.append("step.completed", position=position, start=start, **fields)

    async def end(self, verb: str, *, id: int | None = None, **fields: Any) -> dict[str, Any]:
        self.numbers += id is None
        return await self.post(verb, {"id": id or self.numbers, **fields})


class HttpSite:
    """A server, a bridge on it, a fleet to start runs with."""

    def __init__(self, url: str, namespace: str, fleet: Fleet, bridge: Bridge) -> None:
        self.url, self.namespace, self.fleet, self.bridge = url, namespace, fleet, bridge
        self.http = httpx.AsyncClient(base_url=bridge.address, timeout=70)

    async def poll(self, wait_s: float = 10, **terms: Any) -> HttpTask:
        body = {"agents": [{"name": AGENT, **terms}], "wait_s": wait_s}
        answer = await self.http.post("/tasks/poll", json=body)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return HttpTask(self.http, answer.json())

    async def nothing(self, wait_s: float = 0.3, **terms: Any) -> None:
        body = {"agents": [{"name": AGENT, **terms}], "wait_s": wait_s}
        answer = await self.http.post("/tasks/poll", json=body)
        assert answer.status_code == 204, answer.text

    async def start(self, run: str, input: Any = None) -> None:
        await self.fleet.start(AGENT, input, run_id=run)

    async def state(self, run: str) -> RunState:
        return await self.fleet.get(run)

    async def types(self, run: str) -> list[str]:
        loaded = await self.fleet.store.load(RunId(run))
        return [entry.type for entry in loaded.entries]


@asynccontextmanager
async def bridge_on(
    url: str, namespace: str, *, ack_wait_s: float = 2.0, **options: Any
) -> AsyncGenerator[Bridge, None]:
    """A bridge without auth, in this process."""
    ready = asyncio.Event()
    made = Bridge(
        url,
        auth=NoAuth(),
        namespace=namespace,
        port=0,
        ack_wait_s=ack_wait_s,
        on_ready=ready.set,
        **options,
    )
    serving = asyncio.create_task(made.serve())
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([serving, waiting], return_when="FIRST_COMPLETED")
    waiting.cancel()
    try:
        assert not serving.done() or serving.result() is None
        yield made
    finally:
        await made.stop()
        await asyncio.wait([serving], timeout=15)
        serving.cancel()


@asynccontextmanager
async def http_site(
    server: NatsServer, namespace: str, **options: Any
) -> AsyncGenerator[HttpSite, None]:
    """Everything, on this server."""
    await provision(server.url, namespace=namespace)
    async with (
        JetStreamStore(server.url, namespace=namespace) as store,
        bridge_on(server.url, namespace, **options) as bridge,
    ):
        site = HttpSite(server.url, namespace, Fleet(store), bridge)
        async with site.http:
            yield site
