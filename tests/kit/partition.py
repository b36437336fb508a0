"""Three nats-servers whose routes run over wires of ours, so that one can be cut off the others.

A node that is cut off is alive and answers its clients. One that was stopped (SIGSTOP) does not:
its clients leave it by themselves.
"""

from __future__ import annotations

import asyncio
import json
from itertools import permutations
from pathlib import Path
from typing import Any

from kit.servers import CLUSTER_TRIES, CLUSTER_WAIT_S, Cluster, NatsServer, _free_ports
from kit.waiting import eventually
from nats.errors import Error as NatsError

NAMES = ("n1", "n2", "n3")
NOWHERE = "127.0.0.1:9"
"""What a node tells others of itself: they know it by their own wire alone."""


class Wire:
    """A way to one port. Cut, it carries nothing; healed, all that was sent meanwhile, as TCP over
    a network that lost the packets."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> int:
        """The port that leads there."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self) -> None:
        self._whole.clear()

    def heal(self) -> None:
        self._whole.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        ends = [to_near]
        try:
            await self._whole.wait()
            far, to_far = await asyncio.open_connection("127.0.0.1", self._port)
            ends.append(to_far)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(near, to_far))
                group.create_task(self._copy(far, to_near))
        except* OSError:  # one of the nodes is gone
            pass
        finally:
            for end in ends:
                end.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._whole.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


class SplitCluster:
    """`await SplitCluster.start(dir)`, with fsync; `cut_off` one node, `heal`, `stop`."""

    def __init__(self) -> None:
        self._by_name: dict[str, NatsServer] = {}
        self._wires: dict[tuple[str, str], Wire] = {}
        self.cluster = Cluster(self._by_name)

    @classmethod
    async def start(cls, dir: Path) -> SplitCluster:
        """Returns once an R3 stream can be made. A taken port: other ports, once more."""
        for attempt in range(1, CLUSTER_TRIES + 1):
            made = cls()
            try:
                await made._launch(dir / f"try{attempt}")
                await eventually(made.cluster._can_make_stream, CLUSTER_WAIT_S)
                return made
            except BaseException as error:
                await made.stop()
                if attempt == CLUSTER_TRIES or not isinstance(error, RuntimeError):
                    raise
        raise AssertionError("unreachable")

    async def _launch(self, dir: Path) -> None:
        ports = dict(zip(NAMES, _free_ports(3), strict=True))
        ways: dict[str, list[str]] = {name: [] for name in NAMES}
        for near, far in permutations(NAMES, 2):
            wire = self._wires[near, far] = Wire(ports[far])
            ways[near].append(f'"nats://127.0.0.1:{await wire.open()}"')
        for name, port in ports.items():
            conf = (
                f"server_name: {name}\n"
                f'cluster {{ name: split, listen: "127.0.0.1:{port}", advertise: "{NOWHERE}", '
                f"routes: [{', '.join(ways[name])}], "
                # So a way that carries nothing is given up after 3 s, not after a minute or more.
                f'ping_interval: "1s", ping_max: 2 }}\n'
            )
            # Below the range of clients' own ports: one that looks for a server that is down could
            # else be given that port.
            client_port = _free_ports(1)[0]
            self._by_name[name] = await NatsServer.start(
                dir / name, fsync=True, port=client_port, extra_conf=conf
            )

    @property
    def servers(self) -> list[NatsServer]:
        return self.cluster.servers

    def cut_off(self, server: NatsServer) -> None:
        """From the other nodes; its clients keep it."""
        for pair, wire in self._wires.items():
            if server in (self._by_name[pair[0]], self._by_name[pair[1]]):
                wire.cut()

    def heal(self) -> None:
        for wire in self._wires.values():
            wire.heal()

    async def stream_info(self, stream: str) -> dict[str, Any]:
        """{} where no leader answers."""
        async with self.cluster._client() as client:
            try:
                answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=2)
            except (NatsError, TimeoutError):
                return {}
            found: dict[str, Any] = json.loads(answer.data)
            return found

    async def stop(self) -> None:
        self.heal()
        await self.cluster.stop()
        for wire in self._wires.values():
            await wire.close()
