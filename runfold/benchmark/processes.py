"""Store: the processes of a measurement: nats-servers, workers, a bridge. None outlives it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import re
import signal as signals
import socket
import sys
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from time import perf_counter, time
from typing import Any

from msgspec import Struct

from journal.errors import RunfoldError
from journal.limits import ACK_WAIT_S
from journal.stores.provision import provision
from worker.server import EmbeddedServer, find_nats_server

from ..dying import PARENT

READY_S = 60.0
CLUSTER_S = 60.0
"""An election of three servers on a busy machine."""

AGENTS = "runfold.benchmark.agents"
COMMAND = (sys.executable, "-P", "-c", "from runfold.cli import main; main()")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Place(Struct, frozen=True):
    """Where is measured: the servers' address, their monitoring ports, how it was set up."""

    url: str
    monitor_urls: tuple[str, ...]
    folder: Path
    shards: int
    replicas: int


@asynccontextmanager
async def place(
    folder: Path, *, fsync: bool, replicas: int, shards: int | None = None
) -> AsyncGenerator[Place]:
    """Servers of our own with Runfold's streams. `shards` None: as `runfold init` picks."""
    async with AsyncExitStack() as stack:
        if replicas == 1:
            server = await stack.enter_async_context(EmbeddedServer(folder, fsync=fsync))
            url, monitors = server.url, (server.monitor_url,)
        else:
            url, monitors = await stack.enter_async_context(_cluster(folder, fsync, replicas))
        made = await _provisioned(url, replicas, shards)
        yield Place(url, monitors, folder, made, replicas)


async def _provisioned(url: str, replicas: int, shards: int | None) -> int:
    """Servers of a cluster greet before they have elected who makes streams."""
    deadline = perf_counter() + CLUSTER_S
    while True:
        try:
            return (await provision(url, replicas=replicas, shards=shards)).shards
        except RunfoldError:
            if replicas == 1 or perf_counter() > deadline:
                raise
            await asyncio.sleep(0.2)


@asynccontextmanager
async def _cluster(
    folder: Path, fsync: bool, count: int
) -> AsyncGenerator[tuple[str, tuple[str, ...]]]:
    ports = _free_ports(3 * count)
    routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports[:count])
    clients, monitors = ports[count : 2 * count], ports[2 * count :]
    sync = ", sync_interval: always" if fsync else ""
    async with AsyncExitStack() as stack:
        for index in range(count):
            data = folder / f"n{index}"
            data.mkdir(parents=True)
            (data / "nats-server.conf").write_text(
                f"server_name: n{index}\nhost: 127.0.0.1\n"
                f'jetstream {{ store_dir: "."{sync} }}\nlogfile: "nats-server.log"\n'
                f'cluster {{ name: bench, listen: "127.0.0.1:{ports[index]}"\n'
                f"  routes: [{routes}] }}\n"
            )
            words = ("-p", str(clients[index]), "-m", str(monitors[index]))
            command = (find_nats_server(), "-c", "nats-server.conf", *words)
            await stack.enter_async_context(_process(command, data, stderr=None, dies=_die_too))
        yield (
            ",".join(f"nats://127.0.0.1:{port}" for port in clients),
            tuple(f"http://127.0.0.1:{port}" for port in monitors),
        )


def _die_too() -> None:
    """In a nats-server of a cluster: it has no supervisor that would end it after us."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signals.SIGKILL)  # PR_SET_PDEATHSIG


def _free_ports(count: int) -> list[int]:
    """Below the range from which the system picks."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randint(20_000, 32_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)


async def monitored(place: Place, path: str) -> list[dict[str, Any]]:
    """What each server's monitoring port says."""

    def get(url: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}/{path}", timeout=10) as answer:
            return json.load(answer)

    return [await asyncio.to_thread(get, url) for url in place.monitor_urls]


class Child:
    """A process of ours. `begun`: when it was started, by the wall clock; `told`: the line by which
    it said that it was ready."""

    def __init__(self, process: asyncio.subprocess.Process, begun: float) -> None:
        self.process = process
        self.begun = begun
        self.told = ""

    def cpu_s(self) -> float:
        """Of all its threads, in steps of 10 ms; Linux."""
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) * _TICK_S

    def memory_bytes(self) -> int:
        """Resident; Linux."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * _PAGE_BYTES

    def files(self) -> int:
        """Open ones; Linux."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


HAS_PROC = Path("/proc/self/statm").exists()


@asynccontextmanager
async def worker(
    place: Place,
    agents: Sequence[str],
    *,
    concurrency: int = 64,
    ack_wait_s: float = ACK_WAIT_S,
) -> AsyncGenerator[Child]:
    """A `runfold worker`, once it is ready."""
    words = [f"--store={place.url}", f"--concurrency={concurrency}", f"--ack-wait={ack_wait_s:g}"]
    named = [f"{AGENTS}:{agent}" for agent in agents]
    async with _command(place, "worker", *named, *words) as child:
        yield child


@asynccontextmanager
async def bridge(place: Place) -> AsyncGenerator[str]:
    """A `runfold bridge`; its host and port."""
    words = ["--no-auth", "--listen=127.0.0.1:0", f"--store={place.url}"]
    async with _command(place, "bridge", *words) as child:
        found = re.search(r"http://(\S+)", child.told)
        assert found is not None, child.told
        yield found[1]


@asynccontextmanager
async def _command(place: Place, *words: str) -> AsyncGenerator[Child]:
    async with _process((*COMMAND, *words), place.folder, stderr=asyncio.subprocess.PIPE) as child:
        stderr = child.process.stderr
        assert stderr is not None
        async with asyncio.timeout(READY_S):
            while not child.told:
                line = (await stderr.readline()).decode()
                if not line:
                    raise RuntimeError(f"runfold {words[0]} ended before it was ready")
                if "is ready" in line or "bridge: http" in line:
                    child.told = line
        draining = asyncio.create_task(_drained(stderr))  # a full pipe would stop it
        try:
            yield child
        finally:
            draining.cancel()


async def _drained(stream: asyncio.StreamReader) -> None:
    while await stream.read(65_536):
        pass


@asynccontextmanager
async def _process(
    command: Sequence[str],
    folder: Path,
    *,
    stderr: int | None,
    dies: Callable[[], None] | None = None,
) -> AsyncGenerator[Child]:
    """Killed when we leave; a `runfold` also when we die, and what does as `dies` says."""
    begun = time()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | {PARENT: str(os.getpid())},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=stderr,
        preexec_fn=dies,
        start_new_session=True,  # Ctrl-C in the terminal is for us
    )
    try:
        yield Child(process, begun)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.send_signal(signals.SIGKILL)
        await asyncio.shield(process.wait())
