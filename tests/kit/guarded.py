"""The nats-server of deploy/nats, with its accounts and roles; clients that know nothing of
Runfold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nats
import pytest
from kit.raw_client import ask
from kit.servers import Cluster, NatsServer
from kit.servers import _free_ports as free_ports
from kit.waiting import eventually

from bridge.nats_api import NatsApi
from bridge.signals import SignalDoor
from journal.stores.jetstream import JetStreamStore
from worker.agent import Agent
from worker.service import Worker

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
ROLES = ("worker", "bridge", "ops", "alice", "auditor", "keeper", "admin")
SHARDS = 4
JOURNALS = tuple(f"JOURNAL_{shard}" for shard in range(SHARDS))
STREAMS = (*JOURNALS, "TASKS", "SIGNALS", "REJECTED")
WAIT_S = 15.0


def password(role: str) -> str:
    return f"secret-of-{role}"


def environ(folder: Path) -> dict[str, str]:
    """What the configuration takes from the environment of nats-server."""
    found = {f"RUNFOLD_{role.upper()}_PASSWORD": password(role) for role in (*ROLES, "sys")}
    return found | {"RUNFOLD_NATS_DATA": str(folder / "data")}


def copied(folder: Path, edits: Mapping[str, str]) -> None:
    """The files of deploy/nats; each edit must meet something."""
    folder.mkdir(exist_ok=True)
    texts = {conf.name: conf.read_text() for conf in DEPLOY.glob("*.conf")}
    for old, new in edits.items():
        assert any(old in text for text in texts.values()), old
        texts = {name: text.replace(old, new) for name, text in texts.items()}
    for name, text in texts.items():
        (folder / name).write_text(text)


async def guarded_server(
    folder: Path, *, edits: Mapping[str, str] | None = None, below: str = ""
) -> NatsServer:
    """server.conf as it stands, but for the edits, included in a file with what is to be `below`
    it. The environment must be there."""
    copied(folder, edits or {})
    return await _launched(folder, "server.conf", below)


async def _launched(folder: Path, main: str, below: str = "") -> NatsServer:
    server = NatsServer(folder)
    (folder / "nats-server.conf").write_text(
        f'include "{main}"\nlogfile: "nats-server.log"\n{below}\n'
    )
    await server._launch()
    return server


WITH_TLS = {'# include "tls.conf"': 'include "tls.conf"'}
ROUTES_PASSWORD = "secret-of-routes"


def certificates(folder: Path, *names: str) -> dict[str, str]:
    """Made by make-certs.sh; what the configuration takes from the environment of nats-server."""
    made = ["sh", str(DEPLOY / "make-certs.sh"), str(folder), *names]
    subprocess.run(made, check=True, capture_output=True)
    files = {"CERT": "server.pem", "KEY": "server-key.pem", "CA": "ca.pem"}
    return {f"RUNFOLD_TLS_{name}": str(folder / file) for name, file in files.items()}


async def guarded_cluster(folder: Path, patch: pytest.MonkeyPatch) -> Cluster:
    """Three of cluster.conf, each with a port of its own and the name n<i>; with TLS. Sets the
    environment, also for clients."""
    for name, value in (environ(folder) | certificates(folder / "certs")).items():
        patch.setenv(name, value)
    patch.setenv("SSL_CERT_FILE", str(folder / "certs" / "ca.pem"))
    patch.setenv("RUNFOLD_ROUTES_PASSWORD", ROUTES_PASSWORD)
    ports = free_ports(3)
    routes = [f"nats://routes:{ROUTES_PASSWORD}@127.0.0.1:{port}" for port in ports]
    patch.setenv("RUNFOLD_NATS_ROUTES", json.dumps(routes))
    servers: dict[str, NatsServer] = {}
    cluster = Cluster(servers)
    try:
        for number, port in enumerate(ports, 1):
            servers[f"n{number}"] = await cluster_node(folder, f"n{number}", port, patch)
    except BaseException:
        await cluster.stop()
        raise
    return cluster


async def cluster_node(
    folder: Path, name: str, port: int, patch: pytest.MonkeyPatch, *, tls: bool = True
) -> NatsServer:
    """One more, with what the environment has."""
    patch.setenv("RUNFOLD_NATS_NAME", name)
    patch.setenv("RUNFOLD_NATS_DATA", str(folder / name / "data"))
    listen = {"0.0.0.0:6222": f"127.0.0.1:{port}"}
    copied(folder / name, listen | WITH_TLS if tls else listen)
    return await _launched(folder / name, "cluster.conf")


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
        """Of all streams (there are SHARDS journals): how many messages, the last one's sequence,
        and their settings."""
        listed = await ask(self.url("admin"), "$JS.API.STREAM.LIST")
        found: dict[str, Any] = {}
        for info in listed["streams"]:
            name = info["config"]["name"].removeprefix("RUNFOLD_")
            found[name] = (info["state"]["messages"], info["state"]["last_seq"], info["config"])
        assert sorted(found) == sorted(STREAMS)
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

    async def denied(self, subject: str, payload: Any = b"", reply: str = "") -> None:
        """The server says so. nats-py passes its text on in small letters; what is asked of
        JetStream has the name that the account gives it."""
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self.client.publish(subject, data, reply=reply)
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
