"""Store: a folder of exported journals: what a run was, kept before its journal is removed.

A copy is there once it is whole, synced, and reads back as it was written. Nothing that is no
beginning of it is ever replaced: two stores may have runs of one id.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from ..errors import InvalidId, PermissionDenied, StoreUnavailable
from ..ids import RunId, file_stem
from .file_purge import TOMBSTONE, make_directory, sync_directory
from .file_raw import SUFFIX

_CHUNK_BYTES = 1024 * 1024
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Of file systems that have none."""


class Archive:
    """The folder, made with its first copy. Errors: PermissionDenied, StoreUnavailable."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def check_apart(self, store: Path) -> None:
        """Raises InvalidId where the folder is the store's own: there each copy would be the very
        file that is then cut down to its tombstone."""
        if self.directory.resolve() == store.resolve() or _same(self.directory, store):
            raise InvalidId(f"{store} is the store itself", hint="keep copies in another folder")

    @asynccontextmanager
    async def copying(self, run_id: RunId) -> AsyncGenerator[Copy, None]:
        """A copy to write; what is not kept is gone behind this."""
        path = self.directory / f"{file_stem(run_id)}{SUFFIX}"
        part = self.directory / f"{file_stem(run_id)}.{secrets.token_hex(6)}.part"
        with _errors(part):
            make_directory(self.directory)
            file = part.open("xb")
        try:
            yield Copy(path, part, file)
        finally:
            with _errors(part):
                file.close()
                part.unlink(missing_ok=True)


class Copy:
    """Of one run, record by record."""

    def __init__(self, path: Path, part: Path, file: BinaryIO) -> None:
        self.path = path
        self._part = part
        self._file = file
        self._hash = blake2b()

    def write(self, record: bytes) -> None:
        """The next line. A tombstone, of a purge that was cut off, is none: to a store the copy
        would be a purged run, whose records are to be removed."""
        if record.startswith(TOMBSTONE):
            return
        with _errors(self._part):
            self._file.write(record + b"\n")
        self._hash.update(record + b"\n")

    async def keep(self) -> str:
        """It is in its place, and will be after a power cut; or why it is not."""
        return await asyncio.to_thread(self._keep)

    def _keep(self) -> str:
        with _errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            if self._read_back() != self._hash.digest():
                return f"{self._part} does not read back as it was written"
            if not self._place():
                return f"{self.path} is there, and is no copy of this run: nothing was replaced"
            sync_directory(self.path.parent)
        return ""

    def _place(self) -> bool:
        """Whether it is in its place. A link is refused where there is a file, also one that
        another store's purge has put there this very moment; a replace would take its place."""
        try:
            os.link(self._part, self.path)
            return True
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        if self.path.exists() and not _begins(self.path, self._part):
            return False
        os.replace(self._part, self.path)
        return True

    def _read_back(self) -> bytes:
        """The hash of what the disk has: not what is still in memory of it."""
        found = blake2b()
        with self._part.open("rb") as file:
            if sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while chunk := file.read(_CHUNK_BYTES):
                found.update(chunk)
        return found.digest()


def _begins(path: Path, whole: Path) -> bool:
    """Whether the file is the other one, or a beginning of it."""
    with path.open("rb") as some, whole.open("rb") as all_:
        while chunk := some.read(_CHUNK_BYTES):
            if all_.read(len(chunk)) != chunk:
                return False
    return True


def _same(one: Path, other: Path) -> bool:
    """Under two names: a mount, a file system for which capital letters are the same."""
    try:
        return one.samefile(other)
    except OSError:  # one is not there, then
        return False


@contextmanager
def _errors(path: Path) -> Generator[None]:
    """OSError as an error for people."""
    try:
        yield
    except PermissionError as error:
        where = str(error.filename or path)
        raise PermissionDenied(f"{where}: {error.strerror}", subject=where) from error
    except OSError as error:
        raise StoreUnavailable(
            f"{error.filename or path}: {error.strerror or error}", hint="nothing was purged then"
        ) from error
