"""Store: the lock that makes one holder of a run in a directory, of all processes and tasks.

flock on a descriptor that is kept open: it goes with the process, also by SIGKILL, and nothing else
that opens the file (a tool that searches the folder, say) takes it away, as it would a POSIX record
lock. A forked child closes its copy, so that it does not keep the run after its parent (UR-62).
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import PermissionDenied, StoreLocked, StoreUnavailable
from ..ids import RunId

_held: set[int] = set()
_PROBES = 20
_PROBE_S = 0.01
"""A `holder_of` of another process may have the lock for an instant: try for 0.2 s."""


def _forget_in_child() -> None:
    for fd in _held:
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class RunLock:
    """`async with RunLock(path, run_id)`: the only holder. Raises StoreLocked naming the other,
    PermissionDenied, StoreUnavailable where the file system has no locks."""

    def __init__(self, path: Path, run_id: RunId) -> None:
        self._path = path
        self._run_id = run_id
        self._fd = -1

    async def __aenter__(self) -> Self:
        self._fd = _open(self._path, self._run_id)
        _held.add(self._fd)
        try:
            await self._acquire()
            name = f"process {os.getpid()} on {socket.gethostname()}\n".encode()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, name, 0)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._close()

    async def _acquire(self) -> None:
        for _ in range(_PROBES):
            try:
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(_PROBE_S)
            except OSError as error:
                raise StoreUnavailable(
                    f"{self._path} can't be locked ({error.strerror}), and nothing runs without",
                    run_id=self._run_id,
                    hint="keep the store on a local disk",
                ) from error
        holder = _name(self._fd)
        raise StoreLocked(
            f"run {self._run_id} is being worked on by {holder}",
            holder=holder,
            run_id=self._run_id,
            hint="wait for it to end, or stop that process; then run again",
        )

    def _close(self) -> None:
        _held.discard(self._fd)
        os.close(self._fd)


def holder_of(path: Path) -> str | None:
    """Who holds the lock, or None. Never changes a file, works in a read-only directory."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _name(fd)
    except OSError:  # no locks here: nobody can hold one
        return None
    finally:
        os.close(fd)
    return None


def _open(path: Path, run_id: RunId) -> int:
    try:
        path.parent.mkdir(exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        what = f"{path}: {error.strerror}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionDenied(what, subject=str(path), run_id=run_id) from error
        raise StoreUnavailable(what, run_id=run_id) from error


def _name(fd: int) -> str:
    """What the holder wrote of itself; this process is named as such."""
    text = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
    return "this process" if text.startswith(f"process {os.getpid()} on ") else text
