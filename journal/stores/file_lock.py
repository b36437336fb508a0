"""Store: the lock of a journal's file, for an append or a look at what was synced; both block."""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import StoreLocked
from ..limits import LOCK_WAIT_S

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system without locks answers."""


@contextmanager
def shared(fd: int, path: Path) -> Generator[None]:
    """Beside no append while inside: what is there then was synced; a slow reader reads on behind
    it, and no append waits for that. Where a file system has no locks, it can still be looked at:
    nothing is run there."""
    try:
        lock(fd, fcntl.LOCK_SH, path)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    yield
    with suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_UN)


def lock(fd: int, kind: int, path: Path) -> None:
    """Raises StoreLocked where somebody holds it for too long."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreLocked(
                    f"{path} has been locked for {LOCK_WAIT_S:g} s",
                    holder="another process in the middle of an append",
                    hint="find it with `fuser` or `lsof` and stop it",
                ) from None
            time.sleep(0.002)
