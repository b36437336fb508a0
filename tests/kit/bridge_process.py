"""`runfold bridge` in a process of its own, at an address it keeps when it is killed and restarted;
its event streams as a browser reads them; a wire to it that cuts, or answers for it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cases.zygote import Child, Done, Zygote
from kit.waiting import eventually

from bridge.auth import digest_of

WAIT_S = 30.0
PEOPLE: dict[str, str] = {"rita": "read", "alice": "signal", "wanda": "work", "root": "admin"}
"""Whose tokens the bridge knows, and the scope of each; the token is `rf_<name>`."""


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer rf_{name}"}


def serve(args: list[str], knobs: dict[str, Any], send_buffer: int = 0) -> NoReturn:
    """In the child: the command itself. `knobs`: constants of the product, `module:NAME`.
    `send_buffer`: bytes that the kernel takes from it for each connection; else megabytes."""
    from runfold.cli import main

    for place, value in knobs.items():
        module, _, name = place.partition(":")
        found = importlib.import_module(module)
        assert hasattr(found, name), place
        setattr(found, name, value)
    if send_buffer:
        limit_send_buffer(send_buffer)
    sys.argv = ["runfold", "bridge", *args]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def limit_send_buffer(size: int) -> None:
    """Of each connection that is accepted from now on."""
    listen = socket.socket.listen

    def listening(self: socket.socket, *args: int) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        listen(self, *args)

    socket.socket.listen = listening  # type: ignore[method-assign]


class BridgeProcess:
    """`await bridge.start()`; `kill`, `restart` at the same address, `stop`."""

    def __init__(
        self,
        zygote: Zygote,
        url: str,
        namespace: str,
        folder: Path,
        *,
        people: Mapping[str, str] | None = PEOPLE,
        knobs: Mapping[str, Any] | None = None,
        send_buffer: int = 0,
    ) -> None:
        """`people` None: without auth."""
        folder.mkdir(parents=True, exist_ok=True)
        self._zygote = zygote
        self._how = {"knobs": dict(knobs or {}), "send_buffer": send_buffer}
        self._args = ["--store", url, "--namespace", namespace]
        if people is None:
            self._args += ["--no-auth"]
        else:
            listed = [
                {"name": name, "scopes": [scope], "sha256": digest_of(f"rf_{name}")}
                for name, scope in people.items()
            ]
            file = folder / "tokens.json"
            file.write_text(json.dumps({"tokens": listed}))
            self._args += ["--tokens", str(file)]
        self._listen = "127.0.0.1:0"
        self._child: Child | None = None
        self.address = ""

    async def start(self) -> None:
        args = [*self._args, "--listen", self._listen]
        self._child = self._zygote.call("kit.bridge_process:serve", args=args, **self._how)
        found = await eventually(self._said, WAIT_S, what="the bridge listens")
        self.address = found
        self._listen = found.removeprefix("http://")

    def _said(self) -> str:
        assert not self.child.ended.is_set(), self.child.wait()
        found = re.search(r"bridge: (http://\S+)\n", self.log)
        return found[1] if found else ""

    @property
    def child(self) -> Child:
        assert self._child is not None
        return self._child

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def running(self) -> bool:
        return not self.child.ended.is_set()

    @property
    def log(self) -> str:
        path = self.child.scratch / "err"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> Done:
        if self.running:
            self.child.kill(number)
        await eventually(self.child.ended.is_set, WAIT_S, what="the bridge ends")
        return self.child.wait()

    async def restart(self) -> None:
        """After kill -9, at the same address."""
        await self.kill()
        await self.start()

    async def stop(self) -> None:
        """In order: SIGTERM, exit 0."""
        done = await self.kill(signal.SIGTERM)
        assert done.code == 0, done

    # ---- what the process holds ---------------------------------------------------------------

    @property
    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.child.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    @property
    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.child.pid}/fd"))


@contextlib.asynccontextmanager
async def bridge_process(
    zygote: Zygote, url: str, namespace: str, folder: Path, **options: Any
) -> AsyncGenerator[BridgeProcess]:
    made = BridgeProcess(zygote, url, namespace, folder, **options)
    await made.start()
    try:
        yield made
    finally:
        await made.kill()


# ---- event streams ------------------------------------------------------------------------------


class Event(NamedTuple):
    """`data` as it came: of a record, its stored bytes."""

    event: str
    id: str
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)


class Events:
    """Bytes in, events out (the HTML standard, 9.2.6). An event that was cut off is none."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self.comments = 0

    def feed(self, data: bytes) -> list[Event]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[Event] = []
        for line in lines:
            assert b"\r" not in line
            if line:
                self._lines.append(line)
                continue
            event = self._event()
            self._lines.clear()
            if event is not None:
                found.append(event)
        return found

    def _event(self) -> Event | None:
        fields: dict[bytes, list[bytes]] = {}
        for line in self._lines:
            name, _, value = line.partition(b":")
            fields.setdefault(name, []).append(value.removeprefix(b" "))
        self.comments += len(fields.pop(b"", []))
        if not fields:
            return None
        assert fields.keys() <= {b"event", b"id", b"data", b"retry"}, fields
        (event,) = fields[b"event"]
        (id,) = fields.get(b"id", [b""])
        return Event(event.decode(), id.decode(), b"\n".join(fields[b"data"]))


# ---- wires --------------------------------------------------------------------------------------


class CuttingWire:
    """A TCP proxy before a bridge. `cuts`: after how many bytes of the answer each connection is
    cut, first to last; those after them go through."""

    def __init__(self, port: int, cuts: list[int]) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.cuts = cuts
        self.cut = 0

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> CuttingWire:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        writers = [writer]
        try:
            bridge, to_bridge = await asyncio.open_connection("127.0.0.1", self._port)
            writers.append(to_bridge)
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(_copied(reader, to_bridge))
                await self._answer(bridge, writer)
                asking.cancel()
        except* OSError:  # one of the sides is gone
            pass
        finally:
            for one in writers:
                one.transport.abort()

    async def _answer(self, bridge: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        left = self.cuts.pop(0) if self.cuts else None
        while data := await bridge.read(65536):
            if left is not None and len(data) >= left:
                writer.write(data[:left])
                await writer.drain()
                self.cut += 1
                return
            left = None if left is None else left - len(data)
            writer.write(data)
            await writer.drain()
        with contextlib.suppress(OSError):  # it has ended: let what was sent arrive
            writer.close()
            await writer.wait_closed()


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
