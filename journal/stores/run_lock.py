"""Store: the lock that makes one process the only holder of a run in a directory.

POSIX record locks, not flock: a forked child of the holder must not keep the run after the holder
was killed (UR-62). They don't exclude tasks or threads of one process, so a set does that, by the
file's identity (a directory has many names); and closing any descriptor of the file would drop the
lock, so under `_guard` a held file is never opened a second time here.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from ..errors import PermissionDenied, StoreLocked, StoreUnavailable
from ..ids import RunId

_guard = threading.Lock()
_held_here: set[tuple[int, int, int]] = set()
"""(process, device, inode): a forked child inherits the set, and holds nothing."""
_PROBES = 20
_PROBE_S = 0.01
"""A `holder_of` of another process may have the lock for an instant: try for 0.2 s."""


@asynccontextmanager
async def run_lock(path: Path, run_id: RunId) -> AsyncGenerator[None, None]:
    """Hold the lock; raises StoreLocked naming the holder, or why locking is impossible."""
    tries = 1
    while isinstance(taken := _try_lock(path, run_id), str):
        if tries == _PROBES:
            raise _locked(run_id, taken)
        tries += 1
        await asyncio.sleep(_PROBE_S)
    fd, key = taken
    try:
        yield
    finally:
        with _guard:
            os.close(fd)
            _held_here.discard(key)


def _try_lock(path: Path, run_id: RunId) -> tuple[int, tuple[int, int, int]] | str:
    """The locked descriptor and its key, or who holds the lock."""
    with _guard:
        if _identity(path) in _held_here:
            raise _locked(run_id, "this process")
        fd = _open(path, run_id)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            name = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
            os.ftruncate(fd, 0)
            os.pwrite(fd, name, 0)
        except OSError as error:
            holder = _name(fd)
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return holder
            raise StoreUnavailable(
                f"{path} can't be locked ({error.strerror}), and nothing runs without a lock",
                run_id=run_id,
                hint="keep the store on a local disk",
            ) from error
        key = _identity(path)
        _held_here.add(key)
        return fd, key


def holder_of(path: Path) -> str | None:
    """Who holds the lock, or None. Never changes a file, works in a read-only directory."""
    with _guard:
        if _identity(path) in _held_here:
            return "this process"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return _name(fd)
        finally:
            os.close(fd)
        return None


def _identity(path: Path) -> tuple[int, int, int]:
    """Which file this is, in this process, without opening it; zeros for one that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return (os.getpid(), 0, 0)
    return (os.getpid(), found.st_dev, found.st_ino)


def _open(path: Path, run_id: RunId) -> int:
    try:
        path.parent.mkdir(exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        what = f"{path}: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionDenied(what, subject=str(path), run_id=run_id) from error
        raise StoreUnavailable(what, run_id=run_id) from error


def _locked(run_id: RunId, holder: str) -> StoreLocked:
    return StoreLocked(
        f"run {run_id} is being worked on by {holder}",
        holder=holder,
        run_id=run_id,
        hint="wait for it to end, or stop that process; then run again",
    )


def _name(fd: int) -> str:
    return os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
