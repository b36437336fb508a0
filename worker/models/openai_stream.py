"""Core: what the stream of events of a Chat Completions answer adds up to.

It becomes a Reply only if it is whole: a finish_reason, then `[DONE]`. Whatever else it is
raises ModelFailed, and so is never recorded (R36, R45).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from journal.escape import visible
from journal.messages import Reply, ToolRequest, Usage

REPLY_BYTES_MAX: Final = 8 * 1024 * 1024
"""Text, and the ids, names and arguments of its calls: half of what any store's record may hold."""

EVENT_BYTES_MAX: Final = 2 * REPLY_BYTES_MAX
"""One event of a stream; a server may send a reply in one piece, escaped."""

ERROR_CHARS_MAX: Final = 500
"""What is shown of a server's own words about a failure."""

_Finish: TypeAlias = Literal["stop", "tool_calls", "length", "refusal"]
_FINISH: dict[str, _Finish] = {
    "stop": "stop",
    "tool_calls": "tool_calls",
    "length": "length",
    "content_filter": "refusal",
}


class ModelFailed(Exception):
    """A model call that gave no reply. `status` is the HTTP status, where there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def shown(text: str, secret: str) -> str:
    """A server's words, fit for a message: without the key, on one line, cut."""
    if secret:  # some servers quote the key they refuse; JSON may escape its slashes
        text = text.replace(secret, "[key]").replace(secret.replace("/", "\\/"), "[key]")
    short = text if len(text) <= ERROR_CHARS_MAX else f"{text[:ERROR_CHARS_MAX]}…"
    return visible(short)


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(Struct):
    index: int
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(Struct):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Failure(Struct):
    error: Any = None


_chunk = msgspec.json.Decoder(_Chunk).decode  # refuses what is no UTF-8, and half surrogates
_failure = msgspec.json.Decoder(_Failure).decode


class Events:
    """Bytes in, the data of each whole server-sent event out.

    Not httpx's lines: those also end at U+2028, which stands unescaped in JSON texts.
    """

    def __init__(self) -> None:
        self._part = bytearray()
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes."""
        held = self._part.endswith(b"\r")
        self._part += piece
        if len(self._part) + sum(map(len, self._data)) > EVENT_BYTES_MAX:
            raise ModelFailed(f"an event of the stream has more than {EVENT_BYTES_MAX} bytes")
        if not held and b"\n" not in piece and b"\r" not in piece:
            return []
        lines = bytes(self._part).splitlines(keepends=True)
        # A \r at the end may be half of a \r\n.
        self._part = bytearray() if lines[-1].endswith(b"\n") else bytearray(lines.pop())
        found: list[bytes] = []
        for line in lines:
            if event := self._line(line.rstrip(b"\r\n")):
                found.append(event)
        return found

    def end(self) -> bytes:
        """What stands there at the end of the stream without the blank line that completes it."""
        if rest := bytes(self._part).rstrip(b"\r\n"):
            self._line(rest)
        return self._line(b"")

    def _line(self, line: bytes) -> bytes:
        if not line:
            data, self._data = b"\n".join(self._data), []
            return data
        field, _, value = line.partition(b":")
        if field == b"data":  # comments, ids and names of events mean nothing here
            self._data.append(value.removeprefix(b" "))
        return b""


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str]


class Assembly:
    """What the events of one stream add up to.

    `names` are the tools' on the wire, to be undone; `secret` is kept out of what is raised.
    """

    def __init__(self, names: Mapping[str, str], secret: str) -> None:
        self.done = False
        self._names = {wire: name for name, wire in names.items()}
        self._secret = secret
        self._text: list[str] = []
        self._refusal: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._finish: str | None = None
        self._usage: Usage | None = None
        self._size = 0

    def add(self, event: bytes) -> str:
        """Take in one event; the text it adds, for a preview."""
        if event.strip() == b"[DONE]":
            self.done = True
            return ""
        try:
            # An error is looked for first: what comes with one need not look like a chunk.
            error = _failure(event).error
            if error is not None:
                raise self._broken("the server ended the stream with an error", event)
            chunk = _chunk(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
            raise self._broken(f"an event of the stream is no chunk ({problem})", event) from None
        if chunk.usage is not None:
            self._usage = Usage(
                input_tokens=chunk.usage.prompt_tokens or 0,
                output_tokens=chunk.usage.completion_tokens or 0,
            )
        return "".join([self._choice(choice, event) for choice in chunk.choices])

    def reply(self) -> Reply:
        """The whole reply; raises ModelFailed where the stream ended before it was whole."""
        if not self.done or self._finish is None:
            missing = "a finish_reason" if self._finish is None else "[DONE]"
            raise ModelFailed(f"the stream ended without {missing}: the reply was cut off")
        if self._finish not in _FINISH:
            raise ModelFailed(f"unknown finish_reason {shown(repr(self._finish), self._secret)}")
        finish = _FINISH[self._finish]
        calls = tuple(
            ToolRequest(
                id=call.id,
                name=self._names.get(call.name, call.name),
                arguments="".join(call.arguments),
            )
            for _, call in sorted(self._calls.items())
        )
        text = "".join(self._text)
        if self._refusal:
            text, finish = "".join(self._refusal), "refusal"
        return Reply(text=text, calls=calls, finish=finish, usage=self._usage)

    def _choice(self, choice: _Choice, event: bytes) -> str:
        if choice.index != 0:
            raise self._broken("the server sent a second choice", event)
        if choice.finish_reason:
            if self._finish not in (None, choice.finish_reason):
                raise self._broken(f"finish_reason changed from {self._finish!r}", event)
            self._finish = choice.finish_reason
        delta = choice.delta
        if delta is None:
            return ""
        for part in delta.tool_calls or ():
            self._call(part, event)
        if delta.refusal:
            self._grow(delta.refusal)
            self._refusal.append(delta.refusal)
        if not delta.content:
            return ""
        self._grow(delta.content)
        self._text.append(delta.content)
        return delta.content

    def _call(self, part: _CallDelta, event: bytes) -> None:
        call = self._calls.setdefault(part.index, _Call("", "", []))
        function = part.function or _Function()
        # Some servers repeat id and name in each fragment; another one under the same index would
        # be another call, and whose arguments are whose could only be guessed.
        for found, known in ((part.id, call.id), (function.name, call.name)):
            if found and known not in ("", found):
                raise self._broken(f"call {part.index} changed from {known!a}", event)
        self._grow("" if call.id else part.id or "")
        self._grow("" if call.name else function.name or "")
        self._grow(function.arguments or "")
        call.id = call.id or part.id or ""
        call.name = call.name or function.name or ""
        if function.arguments:
            call.arguments.append(function.arguments)

    def _grow(self, text: str) -> None:
        self._size += len(text.encode())
        if self._size > REPLY_BYTES_MAX:
            raise ModelFailed(f"the reply has more than {REPLY_BYTES_MAX} bytes")

    def _broken(self, what: str, event: bytes) -> ModelFailed:
        words = event.decode("utf-8", "replace")
        return ModelFailed(shown(f"{what[:200]}: {words}", self._secret))
