"""Real nats-servers for tests: one process, a cluster of three, a container, or one that exists."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Protocol

from kit.waiting import eventually
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import StreamConfig

from worker.server import find_nats_server

START_WAIT_S = 20.0
CLUSTER_WAIT_S = 40.0
CLUSTER_TRIES = 3

_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1


class AnyServer(Protocol):
    """What `test_server` gives, whichever kind it picked."""

    @property
    def url(self) -> str: ...
    @property
    def monitor_url(self) -> str | None: ...
    async def stop(self) -> None: ...


def _die_with_pytest() -> None:
    """In the child: killed when the thread that started it (pytest's main thread) ends."""
    if _PRCTL is not None:
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL)


async def monitor(url: str, path: str) -> dict[str, Any]:
    """A page of a server's monitoring port, e.g. `await monitor(server.monitor_url, "varz")`."""

    def get() -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}/{path}", timeout=5) as answer:
            return json.load(answer)

    return await asyncio.to_thread(get)


class NatsServer:
    """One nats-server process with JetStream, its conf, data and log in a directory of its own."""

    def __init__(self, dir: Path) -> None:
        self._dir = dir
        self._process: subprocess.Popen[bytes] | None = None
        self._port = -1
        self._monitor_port = -1

    @classmethod
    async def start(
        cls,
        dir: str | os.PathLike[str],
        *,
        fsync: bool = False,
        max_payload: int | None = None,
        port: int | None = None,
        extra_conf: str = "",
    ) -> NatsServer:
        server = cls(Path(dir))
        server._dir.mkdir(parents=True, exist_ok=True)
        sync = ", sync_interval: always" if fsync else ""
        lines = [
            "host: 127.0.0.1",
            f'jetstream {{ store_dir: "."{sync} }}',
            'logfile: "nats-server.log"',
            f"max_payload: {max_payload}" if max_payload is not None else "",
            extra_conf,
        ]
        (server._dir / "nats-server.conf").write_text("\n".join(lines) + "\n")
        server._port = port if port is not None else -1
        await server._launch()
        return server

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self._port}"

    @property
    def monitor_url(self) -> str:
        return f"http://127.0.0.1:{self._monitor_port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    async def stop(self) -> None:
        """SIGTERM, also for one that is paused; nothing to do for one that has ended."""
        await self._end(signal.SIGTERM)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    def pause(self) -> None:
        """SIGSTOP; returns once every thread has stopped: until then it may still answer."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def restart(self) -> None:
        """The same ports and data. After `kill()` this is a recovery from a crash."""
        await self.stop()
        await self._launch()

    def log(self) -> str:
        path = self._dir / "nats-server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    async def _launch(self) -> None:
        for stale in self._dir.glob("nats-server_*.ports"):
            stale.unlink()
        flags = ["-p", str(self._port), "-m", str(self._monitor_port), "--ports_file_dir", "."]
        # Popen, not a thread or asyncio's own: the death signal is tied to the calling thread.
        self._process = subprocess.Popen(  # noqa: ASYNC220
            ["nats-server", "-c", "nats-server.conf", *flags],
            executable=find_nats_server(),
            cwd=self._dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=_die_with_pytest,
        )
        try:
            await eventually(self._listens, START_WAIT_S, what="nats-server listens")
        except BaseException:
            await self.kill()
            raise

    def _listens(self) -> bool:
        process = self._running()
        if process.poll() is not None:
            raise RuntimeError(
                f"nats-server ended with {process.returncode}:\n{self.log()[-2000:]}"
            )
        path = self._dir / f"nats-server_{process.pid}.ports"
        try:
            ports = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):  # not there, or not complete
            return False
        self._port = int(ports["nats"][0].rsplit(":", 1)[1])
        self._monitor_port = int(ports["monitoring"][0].rsplit(":", 1)[1])
        return True

    async def _end(self, number: signal.Signals) -> None:
        process = self._running()
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
            await eventually(lambda: process.poll() is not None, what="nats-server ends")

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process


class Cluster:
    """Three nats-servers with routes on loopback. `servers[i]` can be killed, paused, restarted."""

    def __init__(self, servers: dict[str, NatsServer]) -> None:
        self._by_name = servers

    @classmethod
    async def start(cls, dir: str | os.PathLike[str], *, fsync: bool = False) -> Cluster:
        """Returns once an R3 stream can be made. A taken route port: other ports, once more."""
        for attempt in range(1, CLUSTER_TRIES + 1):
            cluster = cls({})
            try:
                await cluster._launch(Path(dir) / f"try{attempt}", fsync)
                await eventually(cluster._can_make_stream, CLUSTER_WAIT_S)
                return cluster
            except BaseException as error:
                await cluster.stop()
                if attempt == CLUSTER_TRIES or not isinstance(error, RuntimeError):
                    raise
        raise AssertionError("unreachable")

    @property
    def servers(self) -> list[NatsServer]:
        return list(self._by_name.values())

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    async def leader_of(self, stream: str) -> NatsServer:
        """Waits for an election to end, if one is going on."""
        name = await eventually(
            lambda: self._leader_name(stream), CLUSTER_WAIT_S, what=f"{stream} has a leader"
        )
        return self._by_name[name]

    async def step_down(self, stream: str) -> None:
        """Make the leader resign; `leader_of` tells who follows."""
        await self.leader_of(stream)
        async with self._client() as client:
            answer = await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}", timeout=5)
            assert "error" not in json.loads(answer.data), answer.data

    async def stop(self) -> None:
        for server in self.servers:  # all at once would be no quicker: each takes milliseconds
            await server.stop()

    async def _launch(self, dir: Path, fsync: bool, extra_conf: str = "") -> None:
        ports = dict(zip(("n1", "n2", "n3"), _free_ports(3), strict=True))
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in ports.values())
        for name, port in ports.items():
            conf = (
                f"server_name: {name}\n"
                f'cluster {{ name: test, listen: "127.0.0.1:{port}", routes: [{routes}] }}\n'
                f"{extra_conf}"
            )
            self._by_name[name] = await NatsServer.start(dir / name, fsync=fsync, extra_conf=conf)

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncGenerator[Any]:
        async def quiet(_: Exception) -> None: ...

        client: Any = Client()
        await client.connect(self.urls, connect_timeout=1, max_reconnect_attempts=3, error_cb=quiet)
        try:
            yield client
        finally:
            await client.close()

    async def _can_make_stream(self) -> bool:
        config = StreamConfig(name="KIT_READY", subjects=["kit.ready"], num_replicas=3)
        async with self._client() as client:
            try:
                await client.jetstream(timeout=2).add_stream(config)
                await client.jetstream(timeout=2).publish("kit.ready", b"")
            except (NatsError, TimeoutError):  # no meta leader, or no stream leader yet
                return False
            return await client.jetstream(timeout=5).delete_stream("KIT_READY")

    async def _leader_name(self, stream: str) -> str | None:
        async with self._client() as client:
            try:
                info = await client.jetstream(timeout=2).stream_info(stream)
            except (NatsError, TimeoutError):
                return None
            return info.cluster.leader if info.cluster else None


def _free_ports(count: int) -> list[int]:
    """Below the range from which the system picks: only another test could take one meanwhile."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randint(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return sorted(found)


class ExistingServer:
    """The one of RUNFOLD_TEST_NATS_URL. Not ours to stop, nor empty: use fresh namespaces."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.monitor_url: str | None = None

    async def stop(self) -> None: ...


class ContainerServer:
    """The official image, removed again by `stop` (or by testcontainers' reaper)."""

    def __init__(self, container: Any, url: str, monitor_url: str) -> None:
        self._container = container
        self.url = url
        self.monitor_url: str | None = monitor_url

    @classmethod
    async def start(cls) -> ContainerServer:
        from testcontainers.core.config import testcontainers_config  # only where an engine runs
        from testcontainers.core.container import DockerContainer

        # The reaper is a second image to pull; `stop` removes the container.
        testcontainers_config.ryuk_disabled = True
        container = DockerContainer("nats:2.15-alpine").with_command("-js -m 8222")
        container = container.with_exposed_ports(4222, 8222)
        await asyncio.to_thread(container.start)
        host = container.get_container_host_ip()
        url = f"nats://{host}:{container.get_exposed_port(4222)}"
        server = cls(container, url, f"http://{host}:{container.get_exposed_port(8222)}")
        try:
            await eventually(server._healthy, START_WAIT_S)
        except BaseException:
            await server.stop()
            raise
        return server

    async def stop(self) -> None:
        await asyncio.to_thread(self._container.stop)

    async def _healthy(self) -> bool:
        try:
            assert self.monitor_url is not None
            return (await monitor(self.monitor_url, "healthz"))["status"] == "ok"
        except OSError:
            return False


async def test_server(dir: str | os.PathLike[str]) -> AnyServer:
    """R75: the server tests run on. Import it in conftest.py only: pytest collects `test_*`."""
    if url := os.environ.get("RUNFOLD_TEST_NATS_URL"):
        _say_once(f"tests use the nats-server of RUNFOLD_TEST_NATS_URL, {url}")
        return ExistingServer(url)
    if os.environ.get("RUNFOLD_TEST_DOCKER") != "0" and docker_answers():
        _say_once("tests use nats:2.15-alpine in a container (RUNFOLD_TEST_DOCKER=0: a process)")
        try:
            return await ContainerServer.start()
        except Exception as error:  # an engine that can't have the image: no reason not to test
            _say_once(f"the engine starts no nats:2.15-alpine ({str(error)[:200]})")
    _say_once(f"tests use {find_nats_server()}")
    return await NatsServer.start(dir)


@functools.cache
def docker_answers() -> bool:
    """Whether something listens where the Docker engine would; asked once, at most 1 s."""
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    scheme, _, rest = address.partition("://")
    if scheme == "unix":
        family, target = socket.AF_UNIX, rest
    elif scheme in ("tcp", "http", "https"):
        host, _, port = rest.rstrip("/").rpartition(":")
        family, target = socket.AF_INET, (host, int(port))
    else:
        return False
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(target) == 0


@functools.cache
def _say_once(text: str) -> None:
    print(text, file=sys.__stderr__, flush=True)
