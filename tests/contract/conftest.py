"""Servers and stores for the contract tests: one server and one cluster a session."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from kit.proxy import Proxy
from kit.servers import AnyServer, Cluster, NatsServer, test_server
from kit.simulated.as_process import ModelProcess, ModelProxy

from journal.store import Store
from journal.stores import jetstream, jetstream_lane, jetstream_read, nats_connection
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.memory import MemoryStore
from journal.stores.provision import provision

test_server.__test__ = False

T = TypeVar("T")


@dataclass(frozen=True)
class Backend:
    """A store to open for one test: a kind, and where its journals are."""

    kind: str
    namespace: str
    directory: Path
    url: str = ""
    replicas: int = 1
    shards: int = 1


@pytest.fixture(scope="session")
def run_sync() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """For fixtures of the session, which outlive each test's loop and bind nothing to one."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="session")
def any_server(tmp_path_factory: pytest.TempPathFactory, run_sync: Any) -> Iterator[AnyServer]:
    """The server of RUNFOLD_TEST_NATS_URL, a container or a process (R75)."""
    server = run_sync(test_server(tmp_path_factory.mktemp("r1")))
    yield server
    run_sync(server.stop())


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, run_sync: Any) -> Iterator[Cluster]:
    cluster = run_sync(Cluster.start(tmp_path_factory.mktemp("r3")))
    yield cluster
    run_sync(cluster.stop())


@pytest.fixture
def namespace() -> str:
    """One to a test: tests on one server don't meet."""
    return f"t{uuid.uuid4().hex[:16]}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each test of a server runs on the model as well (kit/simulated), unless it is REAL_ONLY."""
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "server" in metafunc.fixturenames and "server" not in chosen:
        metafunc.parametrize("server", ["nats-server", "model"], indirect=True)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModelProcess:
    """All connections of the test are to this one, whatever their address."""
    process = ModelProcess()
    monkeypatch.setattr(nats_connection, "Client", process.model.client)
    return process


@pytest.fixture(
    params=[
        "memory",
        "file",
        "jetstream",
        "sharded",
        "model",
        pytest.param("cluster", marks=pytest.mark.cluster),
    ]
)
def backend(request: pytest.FixtureRequest, namespace: str, tmp_path: Path) -> Backend:
    kind: str = request.param
    match kind:
        case "model":
            return Backend(kind, namespace, tmp_path, request.getfixturevalue("model").url)
        case "jetstream" | "sharded":
            url = request.getfixturevalue("any_server").url
            shards = 4 if kind == "sharded" else 1
            return Backend(kind, namespace, tmp_path, url, shards=shards)
        case "cluster":
            urls = request.getfixturevalue("cluster").urls
            return Backend(kind, namespace, tmp_path, ",".join(urls), replicas=3)
        case _:
            return Backend(kind, namespace, tmp_path / "journals")


@pytest.fixture
async def store(backend: Backend) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    match backend.kind:
        case "memory":
            yield MemoryStore()
        case "file":
            yield FileStore(backend.directory)
        case _:
            made = await provision(
                backend.url,
                namespace=backend.namespace,
                replicas=backend.replicas,
                shards=backend.shards,
            )
            assert (made.created, made.replicas) == (True, backend.replicas)
            assert made.shards == backend.shards
            async with JetStreamStore(backend.url, namespace=backend.namespace) as jetstream:
                yield jetstream


@pytest.fixture
def short_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience, where a test waits for it to end."""
    monkeypatch.setattr(jetstream_lane, "APPEND_TRY_S", 0.3)
    monkeypatch.setattr(jetstream, "ASK_TRY_S", 0.3)
    monkeypatch.setattr(jetstream_read, "READ_TRY_S", 0.3)
    monkeypatch.setattr(jetstream_read, "READ_BUDGET_S", 0.6)


@pytest.fixture
async def server(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[NatsServer | ModelProcess]:
    """A server of the test's own, to be killed, paused, filled."""
    if request.param == "model":
        yield request.getfixturevalue("model")
        return
    server = await NatsServer.start(tmp_path / "server")
    yield server
    await server.stop()


@pytest.fixture
async def proxy(server: NatsServer | ModelProcess) -> AsyncIterator[Proxy | ModelProxy]:
    if isinstance(server, ModelProcess):
        proxy = ModelProxy(server.model)
    else:
        proxy = await Proxy.start(server.url)
    yield proxy
    await proxy.stop()


@pytest.fixture
async def direct(server: NatsServer) -> AsyncIterator[JetStreamStore]:
    """A store on the test's own server; makes the stream."""
    await provision(server.url)
    async with JetStreamStore(server.url) as store:
        yield store


@pytest.fixture
async def proxied(direct: JetStreamStore, proxy: Proxy) -> AsyncIterator[JetStreamStore]:
    """A store on the same stream, with the proxy between."""
    async with JetStreamStore(proxy.url) as store:
        yield store
