"""Processes of a system that is measured: started, listened to, ended; their CPU and memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

HOST = "127.0.0.1"
_TICKS_S = os.sysconf("SC_CLK_TCK")
_SAMPLE_S = 0.5


# ---- CPU and memory ------------------------------------------------------------------------


def tree(pid: int) -> list[int]:
    """The process and its descendants."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{one}/task"):
                left += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """User and system time of the process; 0 of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_S


def pss_bytes(pid: int) -> int:
    """Memory; what is shared counts by its share."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    return 0


def rss_bytes(pid: int) -> int:
    """Memory, with all that is shared."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _busy_s() -> float:
    """Of all CPUs since the machine began."""
    fields = [int(one) for one in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS_S


class Track:
    """CPU and peak memory of these processes and their descendants while the block runs. This
    process is counted, where it is one of them, without what it has started."""

    def __init__(self, roots: Sequence[int]) -> None:
        self._roots = roots
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.peak_bytes = 0
        self.cpu_s = 0.0

    def _pids(self) -> set[int]:
        me = os.getpid()
        return {pid for root in self._roots for pid in ([me] if root == me else tree(root))}

    def _look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(pss_bytes(pid) for pid in self._pids()))

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_S):
            self._look()

    def __enter__(self) -> Track:
        self._look()
        self._before = {pid: cpu_s(pid) for pid in self._pids()}
        self._busy_before, self._begun = _busy_s(), time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self._look()
        self.cpu_s = sum(cpu_s(pid) - self._before.get(pid, 0.0) for pid in self._pids())
        self._busy_s = _busy_s() - self._busy_before
        self._wall_s = time.monotonic() - self._begun

    def others(self, client_s: float) -> float:
        """How many cores something else kept busy meanwhile."""
        return round(max(0.0, self._busy_s - self.cpu_s - client_s) / self._wall_s, 2)


def lengths(folder: Path) -> int:
    """The sum of the files' lengths: stores may allocate blocks ahead."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found += path.lstat().st_size if path.is_file() else 0
    return found


def blocks(folder: Path) -> int:
    """Bytes that the files take on the disk."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            found += 512 * path.lstat().st_blocks
    return found


# ---- starting, listening, ending -----------------------------------------------------------


class Child:
    """A process whose lines are read. `async with Child(…)`: killed at the end."""

    def __init__(self, *command: str | Path, env: dict[str, str] | None = None) -> None:
        self._command = [str(part) for part in command]
        self._env = os.environ | (env or {})
        self._said: list[str] = []

    async def __aenter__(self) -> Child:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._env,
            limit=1 << 22,
            start_new_session=True,
        )
        self.pid = self._process.pid
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def line(self, *words: str, within_s: float) -> list[str]:
        """The parts of the next line that begins with one of the words.

        Raises RuntimeError with its last lines where it ends, TimeoutError where none comes."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                while line := (await self._process.stdout.readline()).decode():
                    if line.split(" ")[0].strip() in words:
                        return line.split()
                    self._said = [*self._said[-19:], line]
        except TimeoutError:
            said = "".join(self._said)
            raise TimeoutError(f"no {words} within {within_s:g} s; it said: {said}") from None
        await self._process.wait()
        raise RuntimeError(f"{self._command[:3]} ended: {''.join(self._said)}")

    async def ended(self) -> None:
        """Returns once it has. Raises RuntimeError with what it said where it failed."""
        said, _ = await self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"{self._command[:3]} failed: {said.decode()}")

    async def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            await self._process.communicate()  # `wait` would wait for what is unread


def itself(*arguments: object) -> list[str]:
    """The command line of another process of this program."""
    return [sys.executable, sys.argv[0], *map(str, arguments)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        return found.getsockname()[1]


async def listens(port: int, within_s: float = 60) -> None:
    """Returns once somebody accepts on the port."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                _, writer = await asyncio.open_connection(HOST, port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return


NATS_CONFIG = """\
listen: "127.0.0.1:{port}"
jetstream {{ store_dir: "{folder}"{sync} }}
ping_interval: "5s"
ping_max: 2
"""


@contextlib.asynccontextmanager
async def nats_server(folder: Path, *, fsync: bool) -> AsyncIterator[tuple[str, int]]:
    """URL and pid of a server of its own; `fsync`: of every write, before it is acknowledged."""
    os.makedirs(folder)
    port = free_port()
    config = folder / "nats.conf"
    sync = ", sync_interval: always" if fsync else ""
    config.write_text(NATS_CONFIG.format(port=port, folder=folder, sync=sync))
    async with Child(find("nats-server"), "-c", config, "-l", folder / "log") as server:
        await listens(port)
        yield f"nats://{HOST}:{port}", server.pid


def find(program: str) -> Path:
    """A console program: of this environment, before one on PATH."""
    found = shutil.which(program, path=str(Path(sys.executable).parent)) or shutil.which(program)
    if found is None:
        raise FileNotFoundError(f"there is no {program} beside {sys.executable} or on PATH")
    return Path(found)
