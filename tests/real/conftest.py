"""The stores that the real-process tests run on: a directory, or a server one module long."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from kit.cli import Cli
from kit.servers import NatsServer

from journal.stores.provision import provision


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Without fsync: these tests kill clients, not the server."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(NatsServer.start(tmp_path_factory.mktemp("nats")))
    yield server
    loop.run_until_complete(server.stop())
    loop.close()


@pytest.fixture
def namespace() -> str:
    """One to a test: tests on one server don't meet."""
    return f"t{uuid.uuid4().hex[:16]}"


@pytest.fixture
async def on_file(tmp_path: Path) -> AsyncIterator[Cli]:
    cli = Cli(tmp_path / "work", "runs")
    yield cli
    await cli.end()


@pytest.fixture
async def on_jetstream(
    tmp_path: Path, nats_server: NatsServer, namespace: str
) -> AsyncIterator[Cli]:
    await provision(nats_server.url, namespace=namespace)
    cli = Cli(tmp_path / "work", nats_server.url, namespace)
    yield cli
    await cli.end()


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[Cli]:
    """No --store: a server that the commands start and stop, data in `.runfold/`."""
    cli = Cli(tmp_path.resolve() / "work", None)
    yield cli
    await cli.end()


@pytest.fixture(params=["on_file", "on_jetstream"])
def cli(request: pytest.FixtureRequest) -> Cli:
    """Both stores, in turn."""
    found: Cli = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=["on_file", "on_jetstream", "embedded"])
def any_cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.getfixturevalue(request.param)
    return found
