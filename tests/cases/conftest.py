"""Worlds, processes and servers for the acceptance cases."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cases.world import World
from cases.zygote import Zygote
from kit.servers import NatsServer

from journal.store import Store
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.memory import MemoryStore
from journal.stores.provision import provision

T = TypeVar("T")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


@pytest.fixture(scope="session")
def run_sync() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """For fixtures of the session, which outlive each test's loop and bind nothing to one."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory, run_sync: Any) -> Iterator[NatsServer]:
    """One server for the cases that do it no harm; each test has its own namespace."""
    server = run_sync(NatsServer.start(tmp_path_factory.mktemp("nats")))
    yield server
    run_sync(server.stop())


@pytest.fixture
def nats_url(nats: NatsServer) -> str:
    return nats.url


@pytest.fixture
def namespace() -> str:
    return f"t{uuid.uuid4().hex[:16]}"


@pytest.fixture(params=["file", "jetstream"])
def place(request: pytest.FixtureRequest, world: World, namespace: str, run_sync: Any) -> str:
    """What `--store` is given: a directory, or a server with `namespace` set up."""
    if request.param == "file":
        return str(world.runs)
    server: NatsServer = request.getfixturevalue("nats")
    run_sync(provision(server.url, namespace=namespace))
    return server.url


@pytest.fixture(params=["memory", "file", "jetstream"])
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A kind of store and its server; not async, so that the server starts outside any loop."""
    server = request.getfixturevalue("nats").url if request.param == "jetstream" else ""
    return request.param, server


@pytest.fixture
async def store(kind: tuple[str, str], world: World, namespace: str) -> AsyncIterator[Store]:
    match kind:
        case "memory", _:
            yield MemoryStore()
        case "file", _:
            yield FileStore(world.runs)
        case _, url:
            await provision(url, namespace=namespace)
            async with JetStreamStore(url, namespace=namespace) as jetstream:
                yield jetstream
