"""Core: bytes of a stream to Server-Sent Events, by the rules of the HTML standard.

Lines end at line feed and carriage return alone: a record may hold what only Unicode calls one.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")


class Event(NamedTuple):
    """`id`: of this event itself, else empty."""

    name: str
    data: str
    id: str


class Events:
    """`feed` it what comes; it gives the events that are whole."""

    def __init__(self) -> None:
        self._rest = b""
        self._fields: dict[str, list[str]] = {}
        self._fields_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Of the event that is not whole yet."""
        return len(self._rest) + self._fields_bytes

    def feed(self, chunk: bytes) -> list[Event]:
        whole, cut = self._rest + chunk, b""
        if whole.endswith(b"\r"):  # the other half of its end may follow
            whole, cut = whole[:-1], b"\r"
        *lines, rest = _LINE_END.split(whole)
        self._rest = rest + cut
        found = [self._line(line) for line in lines]
        return [event for event in found if event is not None]

    def _line(self, line: bytes) -> Event | None:
        if line:
            name, _, value = line.decode("utf-8", "replace").partition(":")
            if name:  # else a comment
                self._fields.setdefault(name, []).append(value.removeprefix(" "))
                self._fields_bytes += len(line)
            return None
        fields, self._fields, self._fields_bytes = self._fields, {}, 0
        if "data" not in fields:
            return None
        return Event(
            fields.get("event", ["message"])[-1],
            "\n".join(fields["data"]),
            fields.get("id", [""])[-1],
        )
