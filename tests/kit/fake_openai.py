"""A Chat Completions server on this machine that plays a script and writes down what it is asked.

    async with FakeOpenAI([speaks("Hello."), refuses(429, "slow down")]) as server:
        model = OpenAIModel("m", base_url=server.url, api_key="k")

The n-th request gets the n-th answer; one request too many gets a 500.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a request gets. `body` goes out in pieces of `piece` bytes, the first `cut` of it, and
    then the connection ends. Without `chunked` only the end of the connection ends the body, so
    that a cut can't be told from the end. `hold` keeps what comes after `cut` back for good."""

    body: bytes
    status: int = 200
    kind: str = "text/event-stream"
    piece: int = 1 << 16
    cut: int | None = None
    chunked: bool = True
    hold: bool = False

    def but(self, **changes: Any) -> Answer:
        return replace(self, **changes)


@dataclass(frozen=True)
class Asked:
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class FakeOpenAI:
    script: Sequence[Answer]
    asked: list[Asked] = field(default_factory=list[Asked])
    connections: int = 0
    gone: int = 0
    """Connections that ended."""

    url: str = ""

    async def __aenter__(self) -> FakeOpenAI:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()  # connections that are still open end with their clients

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while asked := await read_request(reader):
                self.asked.append(asked)
                n = len(self.asked)
                last = Answer(body=b"the script is over", status=500)
                answer = self.script[n - 1] if n <= len(self.script) else last
                if not await play(writer, answer):
                    break
                if answer.hold:
                    await reader.read()
        except ConnectionError:
            pass  # the client went away in the middle, as some tests want
        finally:
            self.gone += 1
            writer.close()


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers["content-length"]))
    return Asked(first.split(" ")[1], headers, json.loads(body))


async def play(writer: asyncio.StreamWriter, answer: Answer) -> bool:
    """True where the connection can be used again."""
    how = "transfer-encoding: chunked" if answer.chunked else "connection: close"
    head = f"HTTP/1.1 {answer.status} Whatever\r\ncontent-type: {answer.kind}\r\n{how}\r\n\r\n"
    writer.write(head.encode())
    body = answer.body[: answer.cut]
    for start in range(0, len(body), answer.piece):
        piece = body[start : start + answer.piece]
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if answer.chunked else piece)
        await writer.drain()
        if answer.piece < 100:
            await asyncio.sleep(0)  # so that small pieces arrive as such, most of them
    if answer.chunked and answer.cut is None:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return answer.hold or (answer.chunked and answer.cut is None)


# ---- scripts ----------------------------------------------------------------------------------


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(value, ensure_ascii=False).encode()


def chunk(finish: str | None = None, /, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


def usage(asked: int, answered: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": asked, "completion_tokens": answered}}


def stream(*chunks: dict[str, Any], done: bytes = DONE, **options: Any) -> Answer:
    """Any chunks, in order."""
    return Answer(body=b"".join(event(value) for value in chunks) + done, **options)


def speaks(*pieces: str, finish: str = "stop", **options: Any) -> Answer:
    """A reply of text."""
    deltas = [chunk(content=piece) for piece in pieces]
    return stream(chunk(role="assistant", content=""), *deltas, chunk(finish), **options)


def calls(*wanted: tuple[str, str, str], size: int = 5, **options: Any) -> Answer:
    """A reply of tool calls (id, name, arguments), the arguments in fragments of `size`."""
    chunks = [chunk(role="assistant", content=None)]
    for index, (id, name, arguments) in enumerate(wanted):
        first = {"index": index, "id": id, "type": "function"}
        chunks.append(chunk(tool_calls=[{**first, "function": {"name": name, "arguments": ""}}]))
        for part in parts(arguments, size):
            chunks.append(chunk(tool_calls=[{"index": index, "function": {"arguments": part}}]))
    return stream(*chunks, chunk("tool_calls"), **options)


def refuses(status: int, words: str, **options: Any) -> Answer:
    body = json.dumps({"error": {"message": words}}).encode()
    return Answer(body=body, status=status, kind="application/json", **options)


def parts(text: str, size: int) -> Iterator[str]:
    return (text[start : start + size] for start in range(0, len(text), size))
