"""A proxy between workers and a bridge that loses requests and answers, holds them, sends twice."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

What = Literal[
    "pass",
    "lose request",
    "lose answer",
    "twice",
    "busy",
    "hold answer",
    "hold request",
    "stale",
    "denied",
]
Match = Callable[["Seen"], bool]


class Seen(NamedTuple):
    """A request: its last path segment, its body."""

    verb: str
    body: Any

    @property
    def record(self) -> str:
        """`step.started 1`; empty for what is no append."""
        record = self.body.get("record", {})
        return f"{record.get('type', '')} {record.get('position', '')}".strip()


class Rule:
    """For the next `count` requests that match. `done` is set once the last was treated so; what is
    held goes on with `go`."""

    def __init__(self, what: What, match: Match, count: int) -> None:
        self.what = what
        self.match = match
        self.count = count
        self.done = asyncio.Event()
        self.go = asyncio.Event()


class HttpProxy:
    """`target` may be changed at any time. `seen`: all requests, in order, as they came."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.seen: list[Seen] = []
        self.chaos: random.Random | None = None
        self._rules: list[Rule] = []
        self._answers: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def next(self, what: What, match: Match, count: int = 1) -> Rule:
        rule = Rule(what, match, count)
        self._rules.append(rule)
        return rule

    def count(self, verb: str) -> int:
        return sum(one.verb == verb for one in self.seen)

    def _what(self, seen: Seen) -> tuple[What, Rule | None]:
        for rule in self._rules:
            if rule.match(seen):
                rule.count -= 1
                if rule.count == 0:
                    self._rules.remove(rule)
                    rule.done.set()
                return rule.what, rule
        if self.chaos is None:
            return "pass", None
        words: list[What] = ["pass", "lose request", "lose answer", "twice", "busy"]
        return self.chaos.choices(words, [5, 1, 2, 1, 1])[0], None

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = b""
        with suppress(OSError, asyncio.IncompleteReadError):
            raw, body = await _message(reader)
            path = raw.split(b" ", 2)[1].decode()
            seen = Seen(path.rpartition("/")[2], json.loads(body or b"{}"))
            self.seen.append(seen)
            answer = await self._answered(seen, raw) if seen.verb != "poll" else b""
            if seen.verb == "poll":
                answer = await self._polled(seen, raw, reader)
        if answer:
            writer.write(answer)
            with suppress(OSError):
                await writer.drain()
            writer.close()
        else:
            writer.transport.abort()

    async def _polled(self, seen: Seen, raw: bytes, reader: asyncio.StreamReader) -> bytes:
        """A poll's connection is given up as soon as the worker's is."""
        asked = asyncio.ensure_future(self._answered(seen, raw))
        gone = asyncio.ensure_future(reader.read(1))
        await asyncio.wait([asked, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not asked.done():
            asked.cancel()
            return b""
        return asked.result()

    async def _answered(self, seen: Seen, raw: bytes) -> bytes:
        """What goes back; empty: the connection is cut."""
        what, rule = self._what(seen)
        match what:
            case "lose request":
                return b""
            case "busy":
                return b"HTTP/1.1 503 Busy\r\nRetry-After: 0\r\nContent-Length: 2\r\n\r\n{}"
            case "denied":
                return b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\n\r\n{}"
            case "stale":  # what was answered to the like of it before
                return self._answers[seen.record]
            case "twice":
                copies = await asyncio.gather(self._forward(raw), self._forward(raw))
                return copies[0]
            case "hold request":
                assert rule is not None
                await rule.go.wait()
        answer = self._answers[seen.record] = await self._forward(raw)
        if what == "hold answer":
            assert rule is not None
            await rule.go.wait()
        return b"" if what == "lose answer" else answer

    async def _forward(self, raw: bytes) -> bytes:
        target = urlsplit(self.target)
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        try:
            writer.write(raw)
            await writer.drain()
            return (await _message(reader))[0]
        finally:
            writer.transport.abort()


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """All of it, and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    size = 0
    for line in head.split(b"\r\n")[1:]:
        name, _, text = line.partition(b":")
        if name.lower() == b"content-length":
            size = int(text)
    body = await reader.readexactly(size)
    return head + body, body


@asynccontextmanager
async def proxy_on(target: str) -> AsyncGenerator[HttpProxy]:
    proxy = HttpProxy(target)
    proxy._server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
    try:
        yield proxy
    finally:
        proxy._server.close()
        for task in list(proxy._tasks):
            task.cancel()
