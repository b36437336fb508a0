"""Store: the process that owns the nats-server of one data directory; `server.py` starts it.

Run as a script in that directory with `python -I -S`: only the standard library, nothing that is
slow to import, one thread. It starts nats-server, says where it listens in `server.json`, starts it
again if it dies, and stops it when no user is left. A user is whoever holds the write end of the
FIFO `users` open: the kernel closes it however a process ends, so a user cannot forget to leave.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Generator

POLL_S = 0.25
"""How late the death of nats-server is noticed; users leaving wake the supervisor at once."""

START_POLL_S = 0.005
LOCK_RETRY_S = 0.02

OWN_WAIT_S = 5.0
"""A server whose supervisor was killed dies with it, but not in the same instant."""

STOP_WAIT_S = 10.0
"""After SIGTERM. With fsync on every write SIGKILL loses nothing that was acknowledged either."""

RESTARTS_MAX = 10
"""A server that keeps dying has a reason that starting it again does not cure."""

PR_SET_PDEATHSIG = 1


def say(text: str) -> None:
    """Standard error is `nats-server.log`: one file tells the whole story, in order."""
    sys.stderr.write(f"[supervisor {os.getpid()}] {text}\n")
    sys.stderr.flush()


def try_flock(path: str | os.PathLike[str]) -> int | None:
    """The descriptor that holds the exclusive lock, or None: somebody else has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def own_data() -> int:
    """The lock that nats-server inherits, so it is held for as long as that process lives.

    Two servers never share the files, even where no parent-death signal exists or it is late.
    """
    deadline = time.monotonic() + OWN_WAIT_S
    while (fd := try_flock("nats-server.lock")) is None:
        if time.monotonic() > deadline:
            sys.exit("a nats-server without a supervisor still runs on this directory: stop it")
        time.sleep(LOCK_RETRY_S)
    os.set_inheritable(fd, True)
    return fd


def no_users(fifo: int) -> bool:
    try:
        return os.read(fifo, 1) == b""
    except BlockingIOError:  # nothing to read, but somebody could still write
        return False


@contextlib.contextmanager
def state_lock(path: str | os.PathLike[str] = "server.json.lock") -> Generator[None]:
    """Of `server.json`: `runfold dev` writes its bridge's address into it. Held for the writing
    alone, and nothing is waited for under it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


class Server:
    """One nats-server process. It keeps its ports over restarts, so that clients reconnect."""

    def __init__(self, executable: str) -> None:
        self.executable = executable
        self.pid = 0
        self.port = "-1"  # nats-server picks a free one itself: no gap between bind and close
        self.monitor_port = "-1"

    def start(self) -> None:
        for stale in glob.glob("nats-server_*.ports"):  # of a killed server; its pid may come again
            os.unlink(stale)
        set_death_signal = death_signal()
        supervisor = os.getpid()
        # Blocked until the child has the default action: our own handler would only note the
        # signal, and exec forget it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            return
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            set_death_signal()
            if os.getppid() == supervisor:  # else it died before the death signal was set
                ports = ["-p", self.port, "-m", self.monitor_port, "--ports_file_dir", "."]
                os.execv(self.executable, ["nats-server", "-c", "nats-server.conf", *ports])
        except OSError as error:
            say(f"cannot run {self.executable}: {error}")
        finally:
            os._exit(127)

    def running(self) -> bool:
        if self.pid and os.waitpid(self.pid, os.WNOHANG)[0]:
            self.pid = 0
        return self.pid != 0

    def announce(self) -> bool:
        """Write `server.json`; False while the server is not ready yet (it may be recovering)."""
        try:
            with open(f"nats-server_{self.pid}.ports", encoding="utf-8") as file:
                ports = json.load(file)
        except (FileNotFoundError, ValueError):  # not there, or not complete
            return False
        url, monitor_url = ports["nats"][0], ports["monitoring"][0]
        self.port, self.monitor_port = url.rsplit(":", 1)[1], monitor_url.rsplit(":", 1)[1]
        state = {
            "url": url,
            "monitor_url": monitor_url,
            "pid": self.pid,
            "supervisor": os.getpid(),
        }
        with state_lock():
            with (
                contextlib.suppress(OSError, ValueError, KeyError),
                open("server.json", encoding="utf-8") as file,
            ):
                state["http"] = json.load(file)["http"]  # a restart: the bridge stays
            with open("server.json.new", "w", encoding="utf-8") as file:
                json.dump(state, file)
            os.replace("server.json.new", "server.json")
        return True

    def stop(self) -> None:
        for number, wait_s in ((signal.SIGTERM, STOP_WAIT_S), (signal.SIGKILL, STOP_WAIT_S)):
            if not self.running():
                return
            os.kill(self.pid, number)
            deadline = time.monotonic() + wait_s
            while self.running() and time.monotonic() < deadline:
                time.sleep(START_POLL_S)


def death_signal() -> Callable[[], object]:
    """Linux: the child is killed when this process dies. Loaded before the fork, called after."""
    if sys.platform != "linux":
        return lambda: None
    import ctypes

    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def supervise(fifo: int, server: Server) -> None:
    """Return when no user is left, holding `server.lock`: nobody can join a server that stops."""
    users = select.poll()
    users.register(fifo, select.POLLIN)
    restarts = 0
    announced = False
    server.start()
    while True:
        if no_users(fifo):
            lock = try_flock("server.lock")
            if lock is None:
                time.sleep(LOCK_RETRY_S)
            elif no_users(fifo):
                return
            else:
                os.close(lock)
        elif not server.running():
            if not announced or restarts == RESTARTS_MAX:
                sys.exit("nats-server ended; not starting it again")
            restarts += 1
            announced = False
            say(f"nats-server died; restart {restarts}")
            server.start()
        elif not announced:
            time.sleep(START_POLL_S)
            announced = server.announce()
        else:
            users.poll(POLL_S * 1000)


def forget_state() -> None:
    """Remove `server.json`, unless the directory was replaced and it is another supervisor's."""
    with contextlib.suppress(OSError, ValueError), state_lock():
        with open("server.json", encoding="utf-8") as file:
            mine = json.load(file)["supervisor"] == os.getpid()
        if mine:
            os.unlink("server.json")


def told_to_stop(number: int, frame: object) -> None:
    sys.exit("told to stop")


def main(fifo: int, executable: str) -> None:
    if os.fork():  # the user that starts the server need not be the one that outlives it and reaps
        os._exit(0)
    os.set_inheritable(fifo, False)  # nats-server must not look like a supervisor that reads it
    own_data()
    server = Server(executable)
    signal.signal(signal.SIGTERM, told_to_stop)
    try:
        supervise(fifo, server)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        server.stop()
        forget_state()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
