"""One system under test: a folder, the ledger of charges in it, and the processes it needs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Self

PROGRAMS = Path(__file__).with_name("programs")
DIED = 9
"""The exit code of a process that died in the write (programs/ledger.py)."""
DEADLINE_S = 90.0
"""For each single step of an adapter: a command, a wait."""
POLL_S = 0.1


class Wrong(Exception):
    """The system did not go the way its adapter expects: no figure can be told."""


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Scene:
    """`with Scene() as scene`: everything it started has ended at the end."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="crash-in-write-"))
        self.ledger = self.folder / "charges"
        self._running: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + 3
        for process in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def charges(self) -> int:
        return self.ledger.read_bytes().count(b"\n") if self.ledger.exists() else 0

    def start(self, *command: str | Path) -> subprocess.Popen[bytes]:
        """In the background; what it says goes to a file."""
        with self._log(len(self._running)).open("wb") as log:
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running.append(process)
        return process

    def run(self, *command: str | Path, code: int | None = 0) -> Done:
        """To its end. `code`: the exit code it must have."""
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Wrong(f"{command}: not done after {DEADLINE_S:.0f} s") from error
        if code is not None and done.returncode != code:
            said = f"{done.stdout[-500:]} {done.stderr[-1500:]}"
            raise Wrong(f"{command}: exit code {done.returncode}, not {code}: {said}")
        return Done(done.returncode, done.stdout, done.stderr)

    def say(self, *command: str | Path) -> dict[str, Any]:
        """A program that prints one JSON object as its last line: state, seen."""
        found: dict[str, Any] = json.loads(self.run(*command).out.splitlines()[-1])
        return found

    def until(self, what: str, ready: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE_S
        while not ready():
            if time.monotonic() > end:
                logs = [self._log(at).read_bytes()[-800:] for at in range(len(self._running))]
                raise Wrong(f"not after {DEADLINE_S:.0f} s: {what}; {logs}")
            time.sleep(POLL_S)

    def until_dead(self, process: subprocess.Popen[bytes]) -> None:
        """It died in the write, by itself, after its line."""
        self.until("the process dies in the write", lambda: process.poll() is not None)
        if process.returncode != DIED or self.charges != 1:
            raise Wrong(f"died with {process.returncode}, {self.charges} charges")

    def said_by(self, process: subprocess.Popen[bytes]) -> str:
        """What a process in the background has said until now."""
        return self._log(self._running.index(process)).read_text(errors="replace")

    def _log(self, at: int) -> Path:
        return self.folder / f"process-{at}.log"

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RUNFOLD")}
        return kept | {
            "CHARGES": str(self.ledger),
            "PYTHONPATH": str(PROGRAMS),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DO_NOT_TRACK": "1",
        }


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def http(method: str, url: str, body: object = None) -> tuple[int, Any]:
    """Status and JSON; (0, None) where nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Accept": "application/json"}
    if data is not None:
        headers["Content-Type"] = "application/json"
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            status, said = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, said = error.code, error.read()
    except OSError:
        return 0, None
    try:
        return status, json.loads(said)
    except ValueError:
        return status, said.decode(errors="replace")


def here(name: str) -> Path:
    """A program of the environment that this suite runs in."""
    return Path(sys.executable).with_name(name)
