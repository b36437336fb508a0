"""A TCP proxy before a nats-server: loses acknowledgements, delays, pauses, cuts connections.

It reads the server's side of the NATS protocol, so that it can lose one message and nothing else.
What the client sends passes as it is: a lost ack means the server has stored the record.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LINE_BYTES_MAX = 1024 * 1024
QUEUED_MESSAGES_MAX = 10_000


class _Closed(Exception):
    """One side ended: the connection ends."""


@dataclass
class _Drop:
    match: Callable[[bytes], bool]
    remaining: int
    dropped: asyncio.Event


@dataclass(frozen=True)
class _Message:
    raw: bytes
    payload: bytes | None  # None: a line of the protocol, not a message


def is_publish_ack(payload: bytes) -> bool:
    """JetStream's answer to a publish that it stored. API answers have a "type"."""
    if not payload.startswith(b"{"):
        return False
    try:
        answer: Any = json.loads(payload)
    except ValueError:
        return False
    return "stream" in answer and "seq" in answer and "type" not in answer


class Proxy:
    """`await Proxy.start(server.url)`, give clients `.url`, `await proxy.stop()`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._drops: list[_Drop] = []
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._ack_delay_s = 0.0
        self._refusing = False
        self.acks_seen = 0
        """Publish acks that the server sent, also those that were dropped."""

    @classmethod
    async def start(cls, target_url: str) -> Proxy:
        host, port = target_url.removeprefix("nats://").rsplit(":", 1)
        proxy = cls(host, int(port))
        proxy._server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
        return proxy

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        ending = list(self._connections)
        self.cut()
        await asyncio.gather(*ending, return_exceptions=True)

    # -- faults ---------------------------------------------------------------------------------

    def drop_next_ack(self, match: Callable[[bytes], bool] | None = None) -> asyncio.Event:
        """Lose the next message whose payload matches (default: a publish ack).

        The event is set once it was lost. Called twice, the next two are lost.
        """
        return self._drop(match or is_publish_ack, 1)

    def drop_nth_ack(self, n: int) -> asyncio.Event:
        """Lose the n-th publish ack from now on; 1 is the next."""
        assert n >= 1
        return self._drop(is_publish_ack, n)

    def delay_acks(self, seconds: float) -> None:
        """Each ack comes this much later, and what is behind it in its connection."""
        self._ack_delay_s = seconds

    def pause(self) -> None:
        """Forward nothing from the server to clients; it is kept for `resume`."""
        self._flowing.clear()

    def resume(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Close all connections, losing what is on the way. New ones are welcome."""
        for connection in self._connections:
            connection.cancel()

    def refuse(self, refusing: bool) -> None:
        """Reset every new connection at once. Those that exist go on."""
        self._refusing = refusing

    # -- forwarding -----------------------------------------------------------------------------

    def _drop(self, match: Callable[[bytes], bool], n: int) -> asyncio.Event:
        drop = _Drop(match, n, asyncio.Event())
        self._drops.append(drop)
        return drop.dropped

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        connection = asyncio.get_running_loop().create_task(self._connect(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _connect(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        writers = [to_client]
        queue: asyncio.Queue[tuple[float, bytes] | None] = asyncio.Queue(QUEUED_MESSAGES_MAX)
        try:
            server, to_server = await asyncio.open_connection(*self._target, limit=LINE_BYTES_MAX)
            writers.append(to_server)
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(client, to_server))
                group.create_task(self._read_messages(server, queue))
                group.create_task(self._write_messages(queue, to_client))
        except* (_Closed, OSError):
            for writer in writers:
                writer.close()  # flushes: what a client sent before it left reaches the server
        finally:
            for writer in writers:
                if not writer.is_closing():  # cut
                    writer.transport.abort()

    async def _read_messages(
        self, server: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes] | None]
    ) -> None:
        loop = asyncio.get_running_loop()
        while (message := await _next_message(server)) is not None:
            due = loop.time()
            if message.payload is not None:
                if is_publish_ack(message.payload):
                    self.acks_seen += 1
                    due += self._ack_delay_s
                if self._is_lost(message.payload):
                    continue
            await queue.put((due, message.raw))
        await queue.put(None)

    def _is_lost(self, payload: bytes) -> bool:
        for drop in self._drops:
            if drop.match(payload):
                drop.remaining -= 1
                if drop.remaining == 0:
                    self._drops.remove(drop)
                    drop.dropped.set()
                    return True
        return False

    async def _write_messages(
        self,
        queue: asyncio.Queue[tuple[float, bytes] | None],
        to_client: asyncio.StreamWriter,
    ) -> None:
        loop = asyncio.get_running_loop()
        while (item := await queue.get()) is not None:
            due, raw = item
            if (wait_s := due - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            await self._flowing.wait()
            to_client.write(raw)
            await to_client.drain()
        raise _Closed


async def _copy(client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
    while data := await client.read(65536):
        to_server.write(data)
        await to_server.drain()
    raise _Closed


async def _next_message(server: asyncio.StreamReader) -> _Message | None:
    """`MSG subject sid [reply] bytes`, `HMSG subject sid [reply] header_bytes bytes`, or a line."""
    try:
        line = await server.readuntil(b"\r\n")
        words = line.split()
        operation = words[0].upper() if words else b""
        if operation == b"INFO":
            return _Message(_without_other_addresses(line), None)
        if operation not in (b"MSG", b"HMSG"):
            return _Message(line, None)
        body = await server.readexactly(int(words[-1]) + 2)
    except asyncio.IncompleteReadError:  # the server ended: half a message is no message
        return None
    header_bytes = int(words[-2]) if operation == b"HMSG" else 0
    return _Message(line + body, body[header_bytes:-2])


def _without_other_addresses(line: bytes) -> bytes:
    """A cluster tells clients its other servers; they would go round the proxy."""
    info: dict[str, Any] = json.loads(line.split(maxsplit=1)[1])
    info.pop("connect_urls", None)
    return b"INFO " + json.dumps(info).encode() + b"\r\n"
