"""All targets by name, and the bytes that both engines begin with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from cases.mutate import mutants
from fuzz import targets_doors as doors
from fuzz import targets_journal as stored
from fuzz import targets_wire as wire
from fuzz.honest import MARKER, file_of, journals

SHARED = Path(__file__).resolve().parents[3] / "shared" / "cases" / "files"
"""Journals of other formats, damaged in known ways: seeds where they are at hand."""

TARGETS: dict[str, Callable[[bytes], None]] = {
    "codec": stored.codec,
    "record": stored.record,
    "file": stored.file,
    "journal": stored.journal,
    "lines": stored.lines,
    "forgery": stored.forgery,
    "summary": stored.summary,
    "ids": doors.ids_of,
    "values": doors.values,
    "json": doors.json,
    "payload": doors.payload,
    "address": doors.address,
    "door": doors.door,
    "body": doors.body,
    "http": doors.http,
    "answer": wire.answer,
    "task": wire.task,
    "task_name": wire.task_name,
    "headers": wire.headers,
    "protocol": wire.protocol,
}

_TEXTS = (
    b"a1",
    b"order.7",
    b"order~7",
    b"As~3",
    b"nul~0.x",
    b"as.alice.order~7.approve",
    b"order.7.approve",
    MARKER.encode(),
    b"as.x.cancel",
)
_JSON = (
    b'{"a": 1, "b": [1e400, -0.0, 1180591620717411303424]}',
    b'{"a": 1, "a": 2}',
    b'"\\ud83d"',
    b"NaN",
    b'{"agent": "helpdesk", "input": null, "priority": 1, "key": "k"}',
    b'{"decision": "approve", "marker": "m"}',
    b'{"content": "hurry", "mode": "steer", "request_id": "i1"}',
    b"[" * 300 + b"]" * 300,
    b"1" * 5000,
)


def seeds(name: str) -> Iterator[bytes]:
    """Where a target's fuzzing begins."""
    yield b""
    match name:
        case "codec":
            for entries in journals():
                yield from (entry.raw for entry in entries)
            for big in (b"9" * 5000, b"1e400", b"[" * 2000):
                yield b'{"type":"x","v":1,"n":%b}' % big
        case "file":
            for entries in journals():
                yield file_of(entries)
                if len(entries) >= 5:
                    yield from (mutant.data for mutant in mutants(file_of(entries)))
            if SHARED.is_dir():
                yield from (path.read_bytes() for path in sorted(SHARED.glob("*.jsonl")))
        case "ids" | "address":
            yield from _TEXTS
        case "json":
            yield from _JSON
        case "body":
            yield from (bytes([at]) + text for at in range(12) for text in _JSON)
        case "headers":
            yield b"\x01NATS/1.0\r\nRunfold-Status: running\r\nRunfold-Commit: self\r\n\r\n"
        case "answer":
            yield from (b"\x00" + _encode(one) for one in wire.ANSWERS)
        case _:  # choices: any bytes are
            yield from (bytes(range(start, 256, step)) for start in (0, 1) for step in (1, 3, 7))


_encode = msgspec.json.Encoder().encode
