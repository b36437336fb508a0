"""A bridge in the test's own process, and clients that hold it to its own description.

Every answer must be one that /openapi.json documents: the status and the content type.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

import httpx
from kit.waiting import eventually
from nats.aio.client import Client

from bridge.auth import Auth, Tokens, digest_of, parse_tokens
from bridge.openapi import openapi
from bridge.operation import Operation, Table
from bridge.service import Bridge, operations
from journal.fleet import Fleet
from journal.stores.jetstream import JetStreamStore

SCOPES = ("read", "signal", "work", "admin")


def tokens() -> Tokens:
    """One of each scope, named like it."""
    listed = [
        {"name": f"{scope}er", "scopes": [scope], "sha256": digest_of(f"rf_{scope}")}
        for scope in SCOPES
    ]
    return Tokens(parse_tokens(json.dumps({"tokens": listed})))


def bearer(scope: str) -> dict[str, str]:
    return {"authorization": f"Bearer rf_{scope}"}


class Event(NamedTuple):
    """One server-sent event."""

    event: str
    data: Any
    id: str | None


class Site:
    """`get`, `post`, `delete` as somebody who may signal; `client(scope)` as others."""

    def __init__(
        self, url: str, namespace: str, bridge: Bridge, store: JetStreamStore, serving: Any
    ) -> None:
        self.url, self.namespace = url, namespace
        self.bridge, self.store = bridge, store
        self.serving: asyncio.Task[None] = serving
        self.fleet = Fleet(store, by="test")
        self.table: tuple[Operation, ...] = tuple(operations(None, None))  # type: ignore[arg-type]
        self.document = openapi(self.table)
        self._routes = Table(self.table)
        self._clients: dict[str | None, httpx.AsyncClient] = {}

    def client(self, scope: str | None = "signal") -> httpx.AsyncClient:
        if scope not in self._clients:
            self._clients[scope] = httpx.AsyncClient(
                base_url=self.bridge.address,
                headers=bearer(scope) if scope else {},
                timeout=30,
                event_hooks={"response": [self._documented]},
            )
        return self._clients[scope]

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client().get(path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        if body is not None:
            options["json"] = body
        return await self.client().post(path, **options)

    async def delete(self, path: str, **options: Any) -> httpx.Response:
        return await self.client().delete(path, **options)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _documented(self, response: httpx.Response) -> None:
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.status_code != 500, await response.aread()
        found = self._routes.find(response.request.url.raw_path.partition(b"?")[0])
        if found is None:
            assert response.status_code == 404
            return
        method = response.request.method
        operation = found[0].by_method.get("GET" if method == "HEAD" else method)
        if operation is None:
            assert response.status_code == 405
            assert response.headers["allow"] == found[0].allow
            return
        said = self.document["paths"][operation.path][operation.method.lower()]["responses"]
        assert str(response.status_code) in said, (operation.name, response.status_code)
        content = [_bare(kind) for kind in said[str(response.status_code)].get("content", {})]
        kind = _bare(response.headers.get("content-type", ""))
        assert kind in (content or [""]), (operation.name, kind)
        if kind == "application/problem+json" and method != "HEAD":
            problem = json.loads(await response.aread())
            assert problem["status"] == response.status_code
            assert problem["type"] == "about:blank" and problem["detail"].isprintable()

    # ---- what tests wait for ------------------------------------------------------------------

    async def started(self, run: str, agent: str = "nobody") -> str:
        await self.fleet.start(agent, None, run_id=run)
        return run

    async def follow(
        self, run: str, *, headers: dict[str, str] | None = None, **params: Any
    ) -> list[Event]:
        """All events until the stream ends."""
        async with self.following(run, headers=headers, **params) as events:
            return [event async for event in events]

    @contextlib.asynccontextmanager
    async def following(
        self, run: str, *, headers: dict[str, str] | None = None, **params: Any
    ) -> AsyncGenerator[AsyncGenerator[Event]]:
        path = f"/runs/{run}/journal"
        options = {"headers": headers or {}, "params": {"follow": "1"} | params}
        async with self.client().stream("GET", path, **options) as response:
            assert response.status_code == 200, await response.aread()
            yield _events(response)

    async def subscriptions(self) -> int:
        """Of the bridge's connection, as its client counts them."""
        store = self.bridge._store
        assert store is not None
        return len(store._connection._nc._subs)

    async def followers(self, count: int) -> None:
        """Wait until the bridge counts so many."""
        wanted = f"runfold_bridge_followers {float(count)}".encode()
        await eventually(lambda: wanted in self.bridge.metrics.text(), what=f"{count} followers")

    @contextlib.asynccontextmanager
    async def nats(self) -> AsyncGenerator[Any]:
        """A plain client on the server."""
        client: Any = Client()
        await client.connect(self.url)
        try:
            yield client
        finally:
            await client.close()


def _bare(kind: str) -> str:
    return kind.partition(";")[0]


async def _events(response: httpx.Response) -> AsyncGenerator[Event]:
    """As a browser reads them (the HTML standard, 9.2.6)."""
    name, data, id = "", list[str](), None
    text = ""
    async for chunk in response.aiter_text():
        text += chunk
        while (end := text.find("\n")) >= 0:
            line, text = text[:end], text[end + 1 :]
            assert "\r" not in line
            if line == "":
                if data:
                    yield Event(name, json.loads("\n".join(data)), id)
                name, data, id = "", [], None
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            match field:
                case "event":
                    name = value
                case "data":
                    data.append(value)
                case "id":
                    id = value
                case _:
                    assert field in ("", "retry")


@contextlib.asynccontextmanager
async def bridge_on(
    url: str, namespace: str, auth: Auth | None = None, **options: Any
) -> AsyncGenerator[Site]:
    """A bridge on a namespace that is there, and whoever asks it."""
    ready = asyncio.Event()
    made = Bridge(
        url, auth=auth or tokens(), namespace=namespace, port=0, on_ready=ready.set, **options
    )
    async with JetStreamStore(url, namespace=namespace) as store:
        serving = asyncio.create_task(made.serve())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([serving, waiting], return_when="FIRST_COMPLETED")
        waiting.cancel()
        if serving.done():
            await serving
        site = Site(url, namespace, made, store, serving)
        try:
            yield site
        finally:
            await site.close()
            await made.stop()
            await asyncio.wait([serving], timeout=20)
            serving.cancel()


def ids(runs: Sequence[dict[str, Any]]) -> list[str]:
    return [run["run"] for run in runs]
