"""Store: a journal file, read in pages: the whole lines that were synced when it was opened.

Safe without its lock from then on: an append cuts off only what stands behind the last LF, so whole
lines stay as they are; a trim puts another file in its place, and this one stays open. All blocks.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

from ..codec import Damage, Entry, decode
from ..errors import JournalDamaged
from ..ids import RunId
from ..limits import RECORD_BYTES_MAX
from ..store import Loaded, RawRecord
from .file_lock import shared
from .file_purge import trimmed_since
from .file_raw import Lines

_BLOCK_BYTES = 1024 * 1024


def entry_pages(run_id: RunId, path: Path, after: int) -> Generator[Loaded]:
    """The entries behind the token `after`, at least one page. Raises JournalDamaged with what is
    good of the page; OSError."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        _check_length(run_id, path, 0, after)
        yield Loaded((), 0)
        return
    with file:
        fd = file.fileno()
        after, whole, size = _synced(fd, path, after)
        _check_length(run_id, path, size, after)
        if not after and _is_blank(file, size):
            yield Loaded((), 0, torn=size)
            return
        if not whole:
            _check_torn(run_id, path, os.pread(fd, 1, 0))
        file.seek(after)
        lines, number, end = Lines(file, whole, after=after), 0, after
        page = lines.page()
        while page:
            entries = _entries(run_id, path, page, end, 0 if after else number + 1)
            number, end = number + len(page), page[-1].position
            page = lines.page()
            if page:
                yield Loaded(entries, end)
            else:
                yield Loaded(entries, end, torn=size - whole)
        if not number:
            yield Loaded((), after, torn=size - whole)


def _synced(fd: int, path: Path, after: int) -> tuple[int, int, int]:
    """Where to read from, the end of the last whole line, and of the file."""
    with shared(fd, path):
        size = os.fstat(fd).st_size
        if after and trimmed_since(fd, after):
            after = 0  # the tombstone is what was appended since
        return after, _end_of_lines(fd, after, size), size


def _end_of_lines(fd: int, after: int, size: int) -> int:
    """The offset behind the last LF before `size`; `after` where there is none behind it."""
    end = size
    while end > after:
        start = max(after, end - _BLOCK_BYTES)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return after


def _check_length(run_id: RunId, path: Path, size: int, after: int) -> None:
    if size < after:
        raise JournalDamaged(
            f"run {run_id}: {path} is {size} bytes long; {after} were acknowledged",
            where=f"{path} offset {size}",
            run_id=run_id,
        )


def _is_blank(file: BinaryIO, size: int) -> bool:
    """Whether it holds line ends alone, or nothing."""
    while size:
        block = file.read(min(size, _BLOCK_BYTES))
        if not block or block.strip(b"\n"):
            return not block
        size -= len(block)
    return True


def _check_torn(run_id: RunId, path: Path, begins: bytes) -> None:
    """A file without any LF is the torn first record of a run, unless it is not ours at all."""
    if begins not in (b"{", b"\0"):
        raise JournalDamaged(
            f"run {run_id}: {path} line 1 offset 0: not a journal",
            where=f"{path} line 1 offset 0",
            run_id=run_id,
            hint="nothing was executed or changed",
        )


def _entries(
    run_id: RunId, path: Path, page: list[RawRecord], start: int, number: int
) -> tuple[Entry, ...]:
    """Of lines that begin at offset `start`; the first one is line `number`, 0 if not known."""
    entries: list[Entry] = []
    for index, line in enumerate(page):
        try:
            if line.flaw:
                length = line.position - start - 1
                raise Damage(f"a line of {length} bytes, above {RECORD_BYTES_MAX}")
            entries.append(Entry(decode(line.data), line.data, position=line.position))
        except Damage as damage:
            place = f"{path}{f' line {number + index}' if number else ''} offset {start}"
            raise JournalDamaged(
                f"run {run_id}: {place}: {damage}",
                where=place,
                run_id=run_id,
                hint="nothing was executed or changed; restore the file from a backup",
                good=tuple(entries),
            ) from damage
        start = line.position
    return tuple(entries)
