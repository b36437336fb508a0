"""Store: one file a run, `<dir>/<id>.jsonl`, one record a line (R11).

What makes it safe: an append holds the file's lock, compares the end of the file with the expected
token (the offset after the last whole record), writes one line and syncs before it answers. Bytes
after the last LF were never acknowledged: load ignores them, the next append cuts them off first.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from .. import ids
from ..claims import Answer
from ..codec import Entry
from ..errors import (
    PermissionDenied,
    RunfoldError,
    StoreUnavailable,
    TooLarge,
)
from ..ids import RunId
from ..limits import RECORD_BYTES_MAX
from ..observing import UNOBSERVED, Observer
from ..store import AppendAnswer, Appended, Conflict, Held, Loaded, RawRecord, Stamp, joined
from . import file_purge
from .file_check import inspect_directory
from .file_lock import NO_LOCKS, lock, shared
from .file_raw import SUFFIX, Lines, Mark, marks
from .file_read import entry_pages
from .run_lock import RunLock, holder_of
from .safety import Safety

log = logging.getLogger("runfold")
T = TypeVar("T")


class FileStore:
    """Journals in a directory, shared by the processes of one machine.

    The directory is made by the first append. Errors: PermissionDenied (path), StoreUnavailable
    (disk full, I/O error, no locks on this file system), JournalDamaged (file, line, offset).
    """

    shared = False
    observer: Observer = UNOBSERVED

    def __init__(self, directory: str | PathLike[str]) -> None:
        self.directory = Path(directory)
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        """In threads of our own: what hangs in the loop's shared ones must not keep a record
        waiting. A forked child makes its own: it inherits the pool, and not its threads."""
        if self._threads is None or self._process != os.getpid():
            self._threads = ThreadPoolExecutor(4, thread_name_prefix="runfold-file")
            self._process = os.getpid()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def path(self, run_id: RunId) -> Path:
        return self.directory / f"{ids.file_stem(run_id)}{SUFFIX}"

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        return await self._in_thread(self._load, run_id, after)

    async def pages(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Loaded, None]:
        path = self.path(run_id)
        reading = entry_pages(run_id, path, after)
        with _errors(run_id, path):
            try:
                while (page := await self._in_thread(_next, reading)) is not None:
                    yield page
            finally:
                with suppress(ValueError):  # cut off: the thread that still reads closes it
                    reading.close()

    async def resume(self, run_id: RunId) -> None:
        """All of it is needed: nothing tells where the last commit is."""

    async def stored(
        self, run_id: RunId, *, after: int = 0
    ) -> AsyncGenerator[Sequence[RawRecord], None]:
        """The file's lines behind the token `after` as they stand, in pages."""
        with _errors(run_id, self.path(run_id)):
            lines = await self._in_thread(_lines, self.path(run_id), after)
            if lines is None:
                return
            with lines:
                while page := await self._in_thread(lines.page):
                    yield page

    async def marks(self) -> dict[RunId, Mark]:
        """Every run's, empty files too."""
        with _errors(None, self.directory):
            return await self._in_thread(marks, self.directory)

    async def wake(self, run_id: RunId, agent: str, *, cause: int, priority: int = 0) -> None:
        """Nobody waits for work here: a run goes on when it is run."""

    async def task_cause(self, run_id: RunId, agent: str) -> int:
        """As wake."""
        return 0

    async def wake_at(
        self, run_id: RunId, agent: str, *, at: datetime, cause: int, priority: int = 0
    ) -> None:
        """As wake."""

    async def notify(self, run_id: RunId, payload: bytes) -> None:
        """As wake."""

    async def preview(self, run_id: RunId, text: str) -> None:
        """Nobody follows here."""

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        if len(entry.raw) > RECORD_BYTES_MAX:
            raise TooLarge(
                f"a record of {len(entry.raw)} bytes exceeds the file store's {RECORD_BYTES_MAX}",
                run_id=run_id,
            )
        assert b"\n" not in entry.raw
        return await self._in_thread(self._append, run_id, entry.raw, expected)

    async def runs(self, *, after: RunId | None = None) -> AsyncIterator[RunId]:
        for run_id in await self._in_thread(self._runs):
            if after is None or run_id > after:
                yield run_id

    async def stamp(self, run_id: RunId) -> Stamp:
        """When the file was changed last: by the clock that the process here has, too."""
        with _errors(run_id, self.path(run_id)):
            return await self._in_thread(file_purge.stamp_of, self.path(run_id))

    async def ended(
        self, *, age_s: float, statuses: frozenset[str], after: RunId | None = None
    ) -> AsyncIterator[RunId]:
        """All files that were not changed for so long: what they hold is not looked at."""
        with _errors(None, self.directory):
            found = await self._in_thread(file_purge.to_purge, self.directory, age_s, after)
        for run_id in found:
            yield run_id

    async def check_trim(self) -> None:
        with _errors(None, self.directory):
            await self._in_thread(file_purge.check_writable, self.directory)

    async def trim(self, run_id: RunId, *, before: int) -> None:
        await self._in_thread(self._trim, run_id, before)

    def hold(self, run_id: RunId) -> RunLock:
        with _errors(run_id, self.path(run_id)):
            file_purge.make_directory(self.directory)
        return RunLock(self._lock_path(run_id), run_id)

    async def holder(self, run_id: RunId) -> str | None:
        return holder_of(self._lock_path(run_id))

    async def ask(self, worker: str, run_id: RunId, claim: int) -> Answer:
        return "nobody"

    @asynccontextmanager
    async def answering(self, worker: str, held: Held) -> AsyncGenerator[None, None]:
        yield

    async def inspect(self, damaged: list[str]) -> Safety:
        """What an acknowledgement is worth here, for `runfold doctor` (R14). `damaged`: ids of the
        runs whose journals are refused."""
        return await self._in_thread(inspect_directory, self.directory, damaged)

    def where(self, run_id: RunId, index: int, entry: Entry | None) -> str:
        path = self.path(run_id)
        offset = "" if entry is None else f" offset {entry.position - len(entry.raw) - 1}"
        return f"{path} line {index + 1}{offset}"

    def _lock_path(self, run_id: RunId) -> Path:
        return self.directory / ".locks" / ids.file_stem(run_id)

    # ---- blocking halves, run in threads ------------------------------------------------------

    def _load(self, run_id: RunId, after: int) -> Loaded:
        path = self.path(run_id)
        with _errors(run_id, path):
            return joined(entry_pages(run_id, path, after))

    def _append(self, run_id: RunId, raw: bytes, expected: int) -> AppendAnswer:
        path = self.path(run_id)
        with _errors(run_id, path):
            if expected == 0:
                file_purge.make_directory(self.directory)
            elif not path.exists():
                return Conflict()
            with _locked(path, create=expected == 0) as fd:
                size = os.fstat(fd).st_size
                if size < expected or not file_purge.ends_a_record(fd, expected):
                    return Conflict()
                if size > expected:
                    behind = os.pread(fd, size - expected, expected)
                    if not expected:
                        behind = behind.lstrip(b"\n")  # of a run that never started
                    if b"\n" in behind:
                        return Conflict()  # somebody's whole line, or a blank one: damage
                    os.ftruncate(fd, expected)
                    log.warning(
                        "run %s: %d bytes of a torn last record were cut off: never acknowledged",
                        run_id,
                        size - expected,
                    )
                if expected == 0:  # before the line: a synced line must not hang on a lost entry
                    file_purge.sync_directory(self.directory)
                _write_line(fd, raw, expected)
        return Appended(expected + len(raw) + 1)

    def _runs(self) -> list[RunId]:
        with _errors(None, self.directory):
            try:
                names = os.listdir(self.directory)
            except FileNotFoundError:
                return []
            stems = [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]
            found = [(stem, ids.from_file_stem(stem)) for stem in stems]
            return sorted(
                run_id
                for stem, run_id in found
                if run_id is not None and (self.directory / f"{stem}{SUFFIX}").stat().st_size
            )

    def _trim(self, run_id: RunId, before: int) -> None:
        path = self.path(run_id)
        with _errors(run_id, path), _locked(path, create=False) as fd:
            file_purge.trim_file(fd, path, before)


def _next(reading: Generator[Loaded]) -> Loaded | None:
    return next(reading, None)


def _lines(path: Path, after: int) -> Lines | None:
    """Those that are synced now; None where there is no file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    try:
        with shared(file.fileno(), path):
            size = os.fstat(file.fileno()).st_size
        file.seek(after)
    except BaseException:
        file.close()
        raise
    return Lines(file, size, after=after)


def _write_line(fd: int, raw: bytes, expected: int) -> None:
    """Write and sync one line at the end. On failure what was written is cut off again: it was not
    acknowledged, and a page that failed to sync must not be read back as if it were stored."""
    try:
        line = memoryview(raw + b"\n")
        done = 0
        while done < len(line):
            done += os.pwrite(fd, line[done:], expected + done)
        os.fsync(fd)
    except OSError:
        os.ftruncate(fd, expected)
        raise


@contextmanager
def _locked(path: Path, *, create: bool) -> Generator[int]:
    """The file, open and locked; the lock (flock) goes with the descriptor, also by SIGKILL."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o644)
        try:
            lock(fd, fcntl.LOCK_EX, path)
            if os.fstat(fd).st_ino == os.stat(path).st_ino:  # else trimmed meanwhile: open the new
                yield fd
                return
        finally:
            # explicitly: a child forked meanwhile shares the lock until it is unlocked or dies
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


@contextmanager
def _errors(run_id: RunId | None, path: Path) -> Generator[None]:
    """OSError as an error for people: what, which file, what to do."""
    try:
        yield
    except RunfoldError:
        raise
    except OSError as error:
        where = error.filename or path
        what = f"{where}: {error.strerror or error}"
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionDenied(what, subject=str(where), run_id=run_id) from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            hint = "a store is a directory or nats://host:port"
            raise StoreUnavailable(
                f"{where} is not a directory", run_id=run_id, hint=hint
            ) from error
        if error.errno in NO_LOCKS:
            raise StoreUnavailable(
                f"{what}: this file system has no locks, and nothing runs without",
                run_id=run_id,
                hint="keep the store on a local disk",
            ) from error
        raise StoreUnavailable(
            f"{what}; nothing was acknowledged",
            run_id=run_id,
            hint="see the disk, run again",
        ) from error
