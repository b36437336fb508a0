"""The nats-server of deploy/nats, with its accounts and roles; clients that know nothing of
Runfold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import nats
from kit.raw_client import ask
from kit.servers import Cluster, NatsServer
from kit.waiting import eventually

from bridge.nats_api import NatsApi
from bridge.signals import SignalDoor
from journal.stores.jetstream import JetStreamStore
from worker.agent import Agent
from worker.service import Worker

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
ROLES = ("worker", "bridge", "ops", "alice", "auditor", "admin")
STREAMS = ("JOURNAL_0", "TASKS", "SIGNALS", "REJECTED")
WAIT_S = 15.0


def password(role: str) -> str:
    return f"secret-of-{role}"


def environ(folder: Path) -> dict[str, str]:
    """What the configuration takes from the environment of nats-server."""
    found = {f"RUNFOLD_{role.upper()}_PASSWORD": password(role) for role in (*ROLES, "sys")}
    return found | {"RUNFOLD_NATS_DATA": str(folder / "data")}


async def guarded_server(folder: Path) -> NatsServer:
    """server.conf as it stands. The environment must be there."""
    for conf in DEPLOY.glob("*.conf"):
        shutil.copy(conf, folder)
    server = NatsServer(folder)
    (folder / "nats-server.conf").write_text('include "server.conf"\n')
    await server._launch()
    return server


async def guarded_cluster(folder: Path) -> Cluster:
    """Three of them, with roles.conf as it stands."""
    cluster = Cluster({})
    await cluster._launch(folder, fsync=False, extra_conf=(DEPLOY / "roles.conf").read_text())
    return cluster


class Guarded:
    """`servers`: whom a role connects to; the roles are spread over them."""

    def __init__(self, *servers: NatsServer) -> None:
        self.servers: Sequence[NatsServer] = servers

    @property
    def server(self) -> NatsServer:
        return self.servers[0]

    def url(self, role: str) -> str:
        server = self.servers[ROLES.index(role) % len(self.servers)]
        return server.url.replace("://", f"://{role}:{password(role)}@")

    @contextlib.asynccontextmanager
    async def store(self, role: str) -> AsyncGenerator[JetStreamStore]:
        async with JetStreamStore(self.url(role)) as store:
            yield store

    @contextlib.asynccontextmanager
    async def plain(self, role: str) -> AsyncGenerator[Plain]:
        plain = Plain(role)
        plain.client = await nats.connect(
            self.url(role), inbox_prefix=f"_INBOX.runfold.{role}", error_cb=plain.on_error
        )
        try:
            yield plain
        finally:
            await plain.client.close()

    @contextlib.asynccontextmanager
    async def bridge(self) -> AsyncGenerator[None]:
        async with self.store("bridge") as store:
            door, api = SignalDoor(store), NatsApi(store)
            tasks = [asyncio.create_task(part.run()) for part in (door, api)]
            try:
                await eventually(lambda: not door.problem() and not api.problem())
                yield
                assert (door.problem(), api.problem()) == ("", "")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncGenerator[None]:
        """Requests are answered, signals left alone."""
        async with self.store("bridge") as store:
            api = NatsApi(store)
            task = asyncio.create_task(api.run())
            try:
                await eventually(lambda: not api.problem())
                yield
            finally:
                task.cancel()
                await asyncio.wait([task])

    @contextlib.asynccontextmanager
    async def worker(self, *agents: Agent) -> AsyncGenerator[None]:
        ready = asyncio.Event()
        made = Worker(self.url("worker"), agents, on_ready=ready.set)
        task = asyncio.create_task(made.serve())
        async with asyncio.timeout(WAIT_S):
            await ready.wait()
        yield
        await made.stop()
        await task

    async def state(self) -> Any:
        """Of all streams: how many messages, and their settings."""
        found: dict[str, Any] = {}
        for name in STREAMS:
            info = await ask(self.url("admin"), f"$JS.API.STREAM.INFO.RUNFOLD_{name}")
            found[name] = (info["state"]["messages"], info["state"]["last_seq"], info["config"])
        return found


class Plain:
    """A client that knows nothing of Runfold."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.client: Any = None
        self.errors: list[str] = []

    async def on_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    async def tell(self, subject: str, payload: bytes = b"", reply: str = "", **rest: Any) -> None:
        """Published, and read by the server."""
        await self.client.publish(subject, payload, reply=reply, **rest)
        await self.client.flush()

    async def denied(self, subject: str, payload: Any = b"", **headers: str) -> None:
        """The server says so. nats-py passes its text on in small letters; what is asked of
        JetStream has the name that the account gives it."""
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self.client.publish(subject, data, headers=headers or None)
        named = f"streams.{subject}" if subject.startswith("$JS.API.") else subject
        await self._said(f'publish to "{named.lower()}"', subject)

    async def deaf(self, subject: str) -> None:
        """It may not listen there."""
        await self.client.subscribe(subject)
        await self._said(f'subscription to "{subject.lower()}"', subject)

    async def _said(self, text: str, subject: str) -> None:
        await self.client.flush()
        await eventually(
            lambda: any(text in error for error in self.errors),
            2,
            what=f"{self.role} is denied {subject}: {self.errors}",
        )
