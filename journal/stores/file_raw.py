"""Store: a journal file line by line, as it stands, undecoded; and which files have changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Self

from msgspec import Struct

from .. import ids
from ..ids import RunId
from ..limits import READ_BATCH, READ_BATCH_BYTES, RECORD_BYTES_MAX
from ..store import RawRecord

SUFFIX = ".jsonl"
CUT_BYTES = 1024
"""What is kept of a line that is longer than any record."""


class Mark(Struct, frozen=True):
    """What tells whether a file has changed."""

    size: int
    inode: int
    changed_ns: int


class Lines:
    """What an open file holds from where it stands up to `size` bytes, or to its end."""

    def __init__(self, file: BinaryIO, size: int | None = None, *, after: int = 0) -> None:
        self._file = file
        self._size = size
        self._offset = after

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def page(self) -> list[RawRecord]:
        """The next lines; none at the end. Blocks."""
        found: list[RawRecord] = []
        size = 0
        while len(found) < READ_BATCH and size < READ_BATCH_BYTES:
            line = self._line(RECORD_BYTES_MAX + 1)
            if not line:
                break
            size += len(line)
            if line.endswith(b"\n"):
                found.append(RawRecord(line[:-1], self._offset))
            elif len(line) <= RECORD_BYTES_MAX:
                found.append(RawRecord(line, self._offset - len(line), flaw="torn"))
            else:
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = self._line(READ_BATCH_BYTES)
                found.append(RawRecord(line[:CUT_BYTES], self._offset, flaw="cut"))
        return found

    def _line(self, limit: int) -> bytes:
        left = limit if self._size is None else min(limit, self._size - self._offset)
        line = self._file.readline(left) if left > 0 else b""
        self._offset += len(line)
        return line


def marks(directory: Path) -> dict[RunId, Mark]:
    """The journals in a directory; none where there is no directory. Blocks."""
    return {run: mark for _, run, mark in marks_of(directory)}


def marks_of(directory: Path) -> Iterator[tuple[Path, RunId, Mark]]:
    """With their paths. Blocks."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        run = _run_of(name)
        if run is not None:
            path = directory / name
            with suppress(FileNotFoundError):  # removed since
                told = os.stat(path)
                yield path, run, Mark(told.st_size, told.st_ino, told.st_mtime_ns)


def _run_of(name: str) -> RunId | None:
    return ids.from_file_stem(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
