"""The stores that the real-process tests run on: a directory, or a server one module long."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
from kit.cli import Cli, is_refused
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
    cli = Cli(tmp_path / "work", None)
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


Case = tuple[list[str], int, str]
AllRefused = Callable[..., Awaitable[None]]


@pytest.fixture
def all_refused() -> AllRefused:
    """`await all_refused(cli, cases)`; a case: a command line without --json, the exit code, the
    error's code."""
    return _all_refused


async def _all_refused(cli: Cli, cases: Sequence[Case], at_once: int = 8) -> None:
    """Each case with --json, some without, and nothing is written by any."""
    before = await _everything(cli)
    plainly = cases[::5]
    lines = [[args[0], "--json", *args[1:]] for args, _, _ in cases]
    found = await cli.forked(lines + [args for args, _, _ in plainly], at_once=at_once)
    for (args, exit_code, code), told in zip(cases, found, strict=False):
        try:
            is_refused(told, exit_code, code)
        except AssertionError as error:
            raise AssertionError(f"{args}: {error}") from error
    for (args, exit_code, _), plain in zip(plainly, found[len(cases) :], strict=True):
        assert (plain.code, plain.out) == (exit_code, ""), (args, plain)
        assert plain.line.isprintable(), (args, plain)
    assert await _everything(cli) == before


async def _everything(cli: Cli) -> object:
    """The store, and all files of the folder."""
    files = {path: path.read_bytes() for path in cli.folder.rglob("*") if path.is_file()}
    folders = {path for path in cli.folder.rglob("*") if path.is_dir()}
    return files, folders, await cli.contents()
