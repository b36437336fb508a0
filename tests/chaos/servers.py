"""The servers of a soak: one with fsync, or three in a cluster; each on a small file system of its
own where that can be had, so that it can be filled up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kit.servers import CLUSTER_TRIES, Cluster, NatsServer, _free_ports
from kit.waiting import eventually

DISK_MB = 768
FILL_TRIES = 20
LEFT_BYTES = 64 * 1024
"""So much is left free when a disk is filled: what is written next meets the end."""

API_S = 3.0


class Servers:
    """`await Servers.start(folder, cluster=…)`; `all[i]` can be killed, paused, restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[NatsServer] = []
        self.cluster: Cluster | None = None
        self.mounted: list[Path] = []

    @classmethod
    async def start(cls, folder: Path, *, cluster: bool, disks: bool) -> Servers:
        """`disks`: mount small ones, if we may; `mounted` tells."""
        servers = cls(folder)
        for attempt in range(1, CLUSTER_TRIES + 1):
            home = folder / f"servers{attempt}"
            homes = [home / f"n{number}" for number in (1, 2, 3)] if cluster else [home]
            for one in homes:
                one.mkdir(parents=True)
                if disks and _mount(one):
                    servers.mounted.append(one)
            try:
                await servers._start(home, cluster)
                return servers
            except BaseException as error:
                await servers.stop()
                if attempt == CLUSTER_TRIES or not isinstance(error, RuntimeError):
                    raise
        raise AssertionError("unreachable")

    async def _start(self, home: Path, cluster: bool) -> None:
        if not cluster:
            self.all = [await _launched(home, "")]
            return
        routes = dict(zip(("n1", "n2", "n3"), _free_ports(3), strict=True))
        listed = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes.values())
        by_name: dict[str, NatsServer] = {}
        for name, port in routes.items():
            conf = (
                f"server_name: {name}\n"
                f'cluster {{ name: chaos, listen: "127.0.0.1:{port}", routes: [{listed}] }}\n'
            )
            by_name[name] = await _launched(home / name, conf)
            self.all = list(by_name.values())
        self.cluster = Cluster(by_name)
        await eventually(self.cluster._can_make_stream, 40)

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.all]

    @property
    def url(self) -> str:
        return ",".join(self.urls)

    def disk_of(self, number: int) -> Path | None:
        """Of that server; None where it shares one with us."""
        home = self.all[number]._dir
        return home if home in self.mounted else None

    async def stop(self) -> None:
        for server in self.all:
            await server.stop()
        for disk in self.mounted:
            await asyncio.to_thread(_unmount, disk)
        self.all, self.mounted = [], []

    def keep_logs(self, folder: Path) -> None:
        """With their data on a disk that will be gone, the logs are copied."""
        for number, server in enumerate(self.all):
            (folder / f"nats-server-{number + 1}.log").write_text(server.log())


async def _launched(home: Path, conf: str) -> NatsServer:
    """With ports below the range of clients' own: else a client that tries to reach a server that
    is down can take its port."""
    server = NatsServer(home)
    server._port, server._monitor_port = _free_ports(2)
    lines = [
        "host: 127.0.0.1",
        'jetstream { store_dir: ".", sync_interval: always }',
        'logfile: "nats-server.log"',
        conf,
    ]
    (home / "nats-server.conf").write_text("\n".join(lines) + "\n")
    await server._launch()
    return server


def _mount(folder: Path) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


def fill(disk: Path) -> Path:
    """The file that takes (nearly) all that is free, while the server goes on writing."""
    filler = disk / "filler"
    with filler.open("wb") as file:
        for _ in range(FILL_TRIES):
            free = os.statvfs(disk)
            size = free.f_bavail * free.f_frsize - LEFT_BYTES
            with contextlib.suppress(OSError):  # it has become less meanwhile
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
                break
    return filler


async def api(client: Any, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    """A question to JetStream; {} where no answer came."""
    payload = b"" if request is None else json.dumps(request).encode()
    try:
        answer = await client.request(subject, payload, timeout=API_S)
    except Exception:  # no server, no leader, no responder: asked again by who needs it
        await asyncio.sleep(0.1)
        return {}
    found: dict[str, Any] = json.loads(answer.data)
    return found
