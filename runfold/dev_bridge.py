"""Shell: the bridge of `runfold dev`: a child process, started again when it crashes, untouched by
reloads, and never left behind."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from .dying import PARENT
from .frame import UsageProblem
from .reloading import LIVED_S, PAUSE_MAX_S, PAUSE_S, UNUSABLE

HOST: Final = "127.0.0.1"
PORT: Final = 8787
PORTS: Final = 20
"""So many are tried before any free one is taken: a page that was open finds its bridge again."""

READY_S: Final = 30.0
STOP_S: Final = 15.0
"""Longer than the bridge lets requests end."""

LINE_BYTES_MAX: Final = 64 * 1024
NEEDS: Final = ("prometheus_client", "sse_starlette", "starlette", "uvicorn")
_READY: Final = re.compile(rb'^(?:runfold: |\{.*"message":")bridge: (http://[^\s"]+)')
"""As text, or as JSON (logs.py)."""


def missing() -> str | None:
    """What the bridge needs and is not installed."""
    for name in NEEDS:
        try:
            if importlib.util.find_spec(name) is None:
                return name
        except (ImportError, ValueError):
            return name
    return None


class DevBridge:
    """`await start()`, then `watch()` in a task, until `stop()`. `address` once it is ready."""

    def __init__(
        self, words: Sequence[str], listen: str | None, tell: Callable[[str], None]
    ) -> None:
        # -P: a bridge.py of the user's must not be taken for our package
        self._command = [sys.executable, "-P", "-m", "runfold.cli", "bridge", "--no-auth", *words]
        self._listen = listen
        self._tell = tell
        self._child: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._stopping = False
        self.address = ""

    async def start(self) -> None:
        """Until it listens. Raises UsageProblem where it can't: why stands on stderr."""
        for listen in [self._listen] if self._listen else _candidates():
            ended = await self._begin(listen)
            if ended is None:
                return
            if self._listen is None and ended == UNUSABLE and not _free(listen):
                continue  # somebody was quicker
            break
        raise UsageProblem(
            "the bridge did not start", hint="--no-bridge goes on without, --listen elsewhere"
        )

    async def watch(self) -> None:
        """Start it again when it ends, at the same address, until `stop`."""
        loop = asyncio.get_running_loop()
        born, pause_s = loop.time(), PAUSE_S
        while True:
            assert self._child is not None
            code = await self._ended()
            if self._stopping:
                return
            pause_s = PAUSE_S if loop.time() - born > LIVED_S else pause_s
            word = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self._tell(f"the bridge ended ({word}); starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            if self._stopping:
                return
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
            born = loop.time()
            if await self._begin(self.address.removeprefix("http://")) is None:
                self._tell(f"the bridge is back at {self.address}")

    async def stop(self) -> None:
        """It ends what was begun. Idempotent."""
        self._stopping = True
        if self._child is None:
            return
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_S):
                await self._ended()
        except TimeoutError:
            self._tell("the bridge does not stop: killing it")
            self._send(signal.SIGKILL)
            await self._ended()
        except asyncio.CancelledError:
            self._send(signal.SIGKILL)
            raise

    def hurry(self) -> None:
        """If it is stopping: at once."""
        if self._stopping:
            self._send(signal.SIGTERM)

    async def _begin(self, listen: str) -> int | None:
        """None once it is ready; its exit code if it ends before."""
        self._ready.clear()
        gone = ("RUNFOLD_TOKENS", "RUNFOLD_TOKENS_FILE", "RUNFOLD_STORE", "RUNFOLD_CREDS")
        env = {name: value for name, value in os.environ.items() if name not in gone}
        # A group of its own: Ctrl-C is for us, who pass it on when the worker has ended.
        self._child = child = await asyncio.create_subprocess_exec(
            *self._command,
            *("--listen", listen),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=env | {PARENT: str(os.getpid())},
            process_group=0,
        )
        assert child.stderr is not None
        self._reading = asyncio.create_task(self._pass_on(child.stderr))
        ready = asyncio.create_task(self._ready.wait())
        try:
            await asyncio.wait(
                [ready, self._reading], timeout=READY_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            ready.cancel()
        if self._ready.is_set():
            return None
        if not self._reading.done():
            self._tell(f"the bridge is not ready within {READY_S:g} s: killing it")
            self._send(signal.SIGKILL)
        return await self._ended()

    async def _ended(self) -> int:
        assert self._child is not None
        assert self._reading is not None
        code = await self._child.wait()
        await asyncio.wait([self._reading])  # what it said at last comes before what we say
        return code

    async def _pass_on(self, stderr: asyncio.StreamReader) -> None:
        """What it says goes on to our stderr, but for its address, which is for us."""
        rest = b""
        while chunk := await stderr.read(LINE_BYTES_MAX):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if address := _address(line):
                    self.address = address
                    self._ready.set()
                else:
                    _say(line + b"\n")
            if len(rest) > LINE_BYTES_MAX:
                _say(rest)
                rest = b""
        if rest:
            _say(rest)

    def _send(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(number)


def _address(line: bytes) -> str:
    """The bridge's, where the line says that it is ready."""
    found = _READY.match(line)
    return found[1].decode() if found else ""


def _say(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.flush()


def _candidates() -> list[str]:
    near = [f"{HOST}:{port}" for port in range(PORT, PORT + PORTS)]
    return [*(listen for listen in near if _free(listen)), f"{HOST}:0"]


def _free(listen: str) -> bool:
    host, _, port = listen.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            return True
    except OSError:
        return False
