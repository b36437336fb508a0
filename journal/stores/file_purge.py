"""Store: a purged run's file: its tombstone alone, in a new file in place of the old one.

Tokens are offsets, and those of the old file mean nothing in the new one. So nothing is appended
behind a first line that is a tombstone, and whoever read the old file is shown it.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ..codec import decode
from ..ids import RunId
from ..records import RunPurged
from ..store import Stamp
from .file_raw import marks_of

TOMBSTONE = b'{"type":"run.purged"'
"""How one begins: the type is a record's first field (codec.py)."""

_LAST_BYTES = 8192
"""More than a tombstone has."""


def trim_file(fd: int, path: Path, before: int) -> None:
    """Leave the tombstone that ends at `before`, and what is behind it. The file is locked."""
    told = os.fstat(fd)
    if told.st_size < before:
        return  # trimmed before: its tokens were other ones
    window = max(0, before - _LAST_BYTES)
    data = os.pread(fd, told.st_size - window, window)
    start = data.rfind(b"\n", 0, max(before - 1 - window, 0)) + 1
    assert isinstance(decode(data[start:].split(b"\n", 1)[0]), RunPurged)
    fresh = path.with_suffix(".trim")
    with fresh.open("wb") as file:
        _like(file.fileno(), told)
        file.write(data[start:])
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_directory(path.parent)


def _like(fd: int, told: os.stat_result) -> None:
    """Whoever could read the run's file can read what takes its place, though another user purges
    it, with another umask."""
    for owner in (told.st_uid, -1):
        with suppress(PermissionError):
            os.fchown(fd, owner, told.st_gid)
            break
    os.fchmod(fd, stat.S_IMODE(told.st_mode))


def is_tombstone(fd: int) -> bool:
    """Whether a tombstone stands first."""
    return os.pread(fd, len(TOMBSTONE), 0) == TOMBSTONE


def ends_a_record(fd: int, expected: int) -> bool:
    """A token is the offset behind a record, or 0. One of a file that was replaced meanwhile
    (trimmed, restored) may be any offset: nothing is written into a line, or behind a tombstone."""
    if expected == 0:
        return True
    if is_tombstone(fd):
        return False
    return expected > 1 and os.pread(fd, 2, expected - 2) == b"}\n"


def trimmed_since(fd: int, after: int) -> bool:
    """Whether the file was trimmed since something was read of it up to `after`. Where the
    tombstone ends at just that offset it is taken as read: then nothing seems to have changed, and
    nothing can be appended."""
    return is_tombstone(fd) and os.pread(fd, 1, after - 1) != b"\n"


def stamp_of(path: Path) -> Stamp:
    """Blocks."""
    now = time.time()
    try:
        changed = path.stat().st_mtime
    except FileNotFoundError:
        changed = now
    return Stamp(datetime.fromtimestamp(changed, UTC), datetime.fromtimestamp(now, UTC))


def to_purge(directory: Path, age_s: float, after: RunId | None) -> list[RunId]:
    """Runs behind `after` whose files were not changed for so long, or end in a tombstone that is
    not alone; in the order of their ids. Blocks."""
    before_ns = (time.time() - age_s) * 1e9
    return sorted(
        run
        for path, run, mark in marks_of(directory)
        if mark.size
        and (after is None or run > after)
        and _is_to_purge(path, mark.size, old=mark.changed_ns <= before_ns)
    )


def _is_to_purge(path: Path, size: int, *, old: bool) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # removed since
        return False
    try:
        if is_tombstone(fd):
            return False
        last = os.pread(fd, _LAST_BYTES, max(0, size - _LAST_BYTES))
        return old or last[last.rfind(b"\n", 0, -1) + 1 :].startswith(TOMBSTONE)
    finally:
        os.close(fd)


def check_writable(directory: Path) -> None:
    """Raises PermissionError. Blocks."""
    if directory.exists() and not os.access(directory, os.W_OK):
        raise PermissionError(errno.EACCES, "nothing may be changed here", str(directory))


def make_directory(directory: Path) -> None:
    """With those above it, each named for good in the one above. Blocks."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """What was named in it is there after a power cut, too. Blocks."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
