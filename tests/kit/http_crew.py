"""Workers over HTTP and native ones in real processes, a bridge in this one, a proxy between."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from kit.fleet import Crew, WorkerProcess, crew_on, zygote
from kit.http_proxy import HttpProxy, proxy_on
from kit.http_tasks import HttpTask, Refused, bridge_on

ACK_WAIT_S = 1.0
APPEND_BUDGET_S = 0.5
"""Instead of 30 s, where a deadline has to pass; see `quick_deadlines` in the tests."""


class HttpCrew:
    """What a test of workers over HTTP needs; see kit.fleet.Crew for the rest."""

    def __init__(self, crew: Crew, proxy: HttpProxy, url: str) -> None:
        self.crew = crew
        self.proxy = proxy
        self.url = url
        self.http = httpx.AsyncClient(base_url=url, timeout=70)

    async def worker(self, *agents: str, url: str = "", **options: Any) -> WorkerProcess:
        """Over HTTP, through the proxy."""
        return await self._begin(
            "kit.http_agents:work",
            url=url or self.proxy.url,
            agents=agents or ("clerk",),
            **options,
        )

    async def native(self, *agents: str, **options: Any) -> WorkerProcess:
        return await self._begin(
            "kit.http_agents:native",
            url=self.crew.url,
            namespace=self.crew.namespace,
            agents=agents or ("clerk",),
            append_budget_s=APPEND_BUDGET_S,
            options={"ack_wait_s": ACK_WAIT_S, "sweep_s": 5.0} | options,
            skew_s=0,
            hold_append="",
        )

    async def _begin(self, function: str, **how: Any) -> WorkerProcess:
        crew = self.crew
        name = f"w{len(crew.workers) + 1}"
        how["agents"] = list(how["agents"])
        child = zygote().call(function, folder=str(crew.folder), name=name, **how)
        found = WorkerProcess(name, crew.folder, child)
        crew.workers.append(found)
        await found.ready()
        return found

    async def poll(self, agent: str = "clerk", **terms: Any) -> HttpTask:
        """A task, for a worker that is this test."""
        body = {"agents": [{"name": agent, **terms}], "wait_s": 20}
        answer = await self.http.post("/tasks/poll", json=body)
        assert answer.status_code == 200, answer.text
        return HttpTask(self.http, answer.json())

    async def answer(self, run: str) -> Any:
        """What the run completed with."""
        await self.crew.status(run, "completed")
        end: Any = (await self.crew.records(run))[-1]
        return end.message["content"]

    async def types(self, run: str) -> list[str]:
        return [entry.type for entry in await self.crew.entries(run)]


@asynccontextmanager
async def http_crew_on(
    url: str, namespace: str, folder: Path, **options: Any
) -> AsyncGenerator[HttpCrew]:
    async with (
        crew_on(url, namespace, folder) as crew,
        bridge_on(url, namespace, ack_wait_s=ACK_WAIT_S, **options) as bridge,
        proxy_on(bridge.address) as proxy,
    ):
        made = HttpCrew(crew, proxy, bridge.address)
        async with made.http:
            yield made


__all__ = ["ACK_WAIT_S", "APPEND_BUDGET_S", "HttpCrew", "Refused", "http_crew_on"]
