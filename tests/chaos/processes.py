"""Worker and bridge processes of a soak: the product's own commands, begun again when they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from cases.zygote import Child, Zygote
from chaos.wires import Wires
from kit.bridge_process import BridgeProcess
from kit.servers import _free_ports
from kit.waiting import eventually

START_S = 60.0
END_S = 60.0
GRACE_S = 3.0
RESTART_LIMIT = 8
STRANGE = re.compile(
    r"^Traceback|: a bug|ERROR|never awaited|never retrieved|internal error", re.MULTILINE
)
AGENTS = ("chaos.agents:desk", "chaos.agents:clerk", "chaos.agents:small")


class Slot:
    """A place for one process after another. `busy`: a fault is at work on it."""

    health_url = ""

    def __init__(self, name: str, logs: Path, wires: Wires | None) -> None:
        self.name = name
        self.wires = wires
        self.busy = False
        self.pause_s = 0.2
        self.starts = 0
        self.ends: Counter[str] = Counter()
        self.rss_mb: list[float] = []
        self._logs = logs
        self._ordered = False
        self._stopping = False
        self._up = False
        self._child: Child | None = None

    # ---- what a kind of process is ------------------------------------------------------------

    async def _start(self) -> None:
        """Started when it returns; may raise AssertionError: then it is tried again."""
        raise NotImplementedError

    # ---- the supervisor -----------------------------------------------------------------------

    async def supervise(self) -> None:
        """Until `end`: it runs, and after its end runs again `pause_s` later."""
        while not self._stopping:
            self.starts += 1
            self._ordered = self._up = False
            try:
                await self._start()
                self._up = True
            except AssertionError:  # no server there yet, as a rule, or it was killed already
                self.send(signal.SIGKILL)
                await self._over()
                await asyncio.sleep(0.5)
                continue
            await self._over()
            await asyncio.sleep(self.pause_s)

    async def _over(self) -> None:
        child = self._child
        if child is None:
            return
        while not await until(child.ended.is_set, END_S):
            pass
        begun = "by itself" if self._up else "before it was ready"
        word = "ordered" if self._ordered else begun
        self.ends[f"{word}: {_ended(child.code)}"] += 1
        text = self.log
        if text:
            (self._logs / f"{self.name}-{self.starts:03}.log").write_text(text)

    @property
    def running(self) -> bool:
        return self._child is not None and not self._child.ended.is_set()

    @property
    def up(self) -> bool:
        """Started, and not ended."""
        return self.running and self._up

    def strange(self) -> list[str]:
        """Lines of all its logs that no process in order writes."""
        found: list[str] = []
        texts = [path.read_text() for path in sorted(self._logs.glob(f"{self.name}-*.log"))]
        for text in [*texts, self.log]:
            for block in re.split(r"\n(?=\S)", text):
                if STRANGE.search(block):
                    found.append(block[:600])
        return found

    @property
    def log(self) -> str:
        path = self._child.scratch / "err" if self._child else None
        return path.read_text("utf-8", "replace") if path and path.exists() else ""

    def send(self, number: signal.Signals) -> bool:
        """Whether there was somebody to send it to."""
        if self._child is None or not self.running or not self._child.started.is_set():
            return False
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._ordered = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child.pid, number)
            return True
        return False

    async def drain(self) -> None:
        """SIGTERM, and wait; one that does not end is counted, and killed."""
        child = self._child
        if child is None or not self.send(signal.SIGTERM):
            return
        if not await until(child.ended.is_set, END_S):
            self.ends[f"no end within {END_S:g} s of SIGTERM"] += 1
            self.send(signal.SIGKILL)
            await until(child.ended.is_set, END_S)

    async def end(self) -> None:
        """For good, in order."""
        self._stopping = True
        self.send(signal.SIGCONT)
        await self.drain()

    def measure(self) -> None:
        mb = rss_mb(self._child.pid) if self.running and self._child is not None else 0.0
        if mb:
            self.rss_mb.append(mb)


class WorkerSlot(Slot):
    """`runfold worker`."""

    def __init__(
        self,
        name: str,
        logs: Path,
        wires: Wires | None,
        *,
        zygote: Zygote,
        url: str,
        ledgers: Path,
        ack_wait_s: float,
    ) -> None:
        super().__init__(name, logs, wires)
        self._zygote = zygote
        self._url = wires.url if wires else url
        self._ledgers = ledgers
        self._ack_wait_s = ack_wait_s

    async def _start(self) -> None:
        self.health_url = ""
        options = {
            "--store": self._url,
            "--ack-wait": self._ack_wait_s,
            "--grace": GRACE_S,
            "--restart-limit": RESTART_LIMIT,
            "--name": self.name,
            "--health": "127.0.0.1:0",
        }
        words = [str(word) for option in options.items() for word in option]
        env = {"CHAOS_LEDGERS": str(self._ledgers)}
        self._child = child = self._zygote.cli("worker", *AGENTS, *words, env=env)

        def ready() -> bool:
            assert not child.ended.is_set(), self.log[-300:]
            return "is ready" in self.log

        await eventually(ready, START_S, what=f"{self.name} is ready")
        found = re.search(r"health: (http://\S+)/healthz", self.log)
        self.health_url = found[1] if found else ""


class RemoteSlot(Slot):
    """A worker over HTTP, at one bridge."""

    def __init__(self, name: str, logs: Path, *, zygote: Zygote, url: str, ledgers: Path) -> None:
        super().__init__(name, logs, None)
        self._zygote = zygote
        self._how = {"url": url, "token": "rf_wanda", "ledgers": str(ledgers)}

    async def _start(self) -> None:
        self._child = child = self._zygote.call("chaos.remote:work", **self._how)

        def ready() -> bool:
            assert not child.ended.is_set(), self.log[-300:]
            return "is ready" in self.log

        await eventually(ready, START_S, what=f"{self.name} is ready")


class BridgeSlot(Slot):
    """`runfold bridge`, always at the same address."""

    def __init__(
        self,
        name: str,
        logs: Path,
        wires: Wires | None,
        *,
        zygote: Zygote,
        url: str,
        folder: Path,
        ack_wait_s: float,
    ) -> None:
        super().__init__(name, logs, wires)
        used = wires.url if wires else url
        self._bridge = BridgeProcess(zygote, used, "runfold", folder / name)
        self._bridge._args += ["--ack-wait", str(ack_wait_s)]
        listen = f"127.0.0.1:{_free_ports(1)[0]}"
        self._bridge._listen = listen
        self.health_url = f"http://{listen}"

    async def _start(self) -> None:
        starting = asyncio.create_task(self._bridge.start())
        begun = self._child
        await until(lambda: self._bridge._child is not begun or starting.done(), START_S)
        self._child = self._bridge._child  # it may be killed while it starts
        await starting


def rss_mb(pid: int) -> float:
    """Resident memory; 0 of a process that is gone."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return 0.0


def _ended(code: int) -> str:
    return f"exit {code}" if code >= 0 else signal.Signals(-code).name


async def until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
