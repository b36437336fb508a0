"""Damage to a journal file: what disks, copies, merges and editors do."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.draw import Draw
from fuzz.honest import file_of, journals


def damaged(draw: Draw) -> bytes:
    """An honest file after one to three mishaps."""
    data = file_of(draw.pick(journals()))
    for _ in range(1 + draw.below(3)):
        data = draw.pick(_MISHAPS)(draw, data)
    return data


def _flip(draw: Draw, data: bytes) -> bytes:
    if not data:
        return data
    at = draw.below(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.below(8)]) + data[at + 1 :]


def _cut(draw: Draw, data: bytes) -> bytes:
    return data[: draw.below(len(data) + 1)]


def _hole(draw: Draw, data: bytes) -> bytes:
    """Blocks that were never written."""
    start = draw.below(len(data) + 1)
    end = min(len(data), start + 1 + draw.below(512))
    return data[:start] + b"\0" * (end - start) + data[end:]


def _lost(draw: Draw, data: bytes) -> bytes:
    start = draw.below(len(data) + 1)
    return data[:start] + data[start + 1 + draw.below(64) :]


def _inserted(draw: Draw, data: bytes) -> bytes:
    at = draw.below(len(data) + 1)
    return data[:at] + draw.take(draw.below(24)) + data[at:]


def _changed(draw: Draw, data: bytes) -> bytes:
    """One byte becomes one that JSON knows."""
    if not data:
        return data
    at = draw.below(len(data))
    return (
        data[:at] + draw.pick([b"0", b"9", b"}", b'"', b"\n", b" ", b"\r", b","]) + data[at + 1 :]
    )


def _dropped(draw: Draw, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        del lines[draw.below(len(lines))]
    return b"".join(lines)


def _doubled(draw: Draw, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        at = draw.below(len(lines))
        lines.insert(draw.below(len(lines) + 1), lines[at])
    return b"".join(lines)


def _swapped(draw: Draw, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    if lines:
        a, b = draw.below(len(lines)), draw.below(len(lines))
        lines[a], lines[b] = lines[b], lines[a]
    return b"".join(lines)


def _spliced(draw: Draw, data: bytes) -> bytes:
    """The beginning of one and the end of another."""
    other = file_of(draw.pick(journals())).splitlines(keepends=True)
    lines = data.splitlines(keepends=True)
    return b"".join(lines[: draw.below(len(lines) + 1)] + other[draw.below(len(other) + 1) :])


_MISHAPS: tuple[Callable[[Draw, bytes], bytes], ...] = (
    _flip,
    _cut,
    _hole,
    _lost,
    _inserted,
    _changed,
    _dropped,
    _doubled,
    _swapped,
    _spliced,
)
