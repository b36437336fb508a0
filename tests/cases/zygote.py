"""Real processes, cheaply: one process imports the product and forks a child for each request.

A child is a process like any other: it has its own pid, dies by SIGKILL, leaves its locks and
connections to the kernel. Only the half second of imports is saved. `python zygote.py` is the
server; `Zygote` the client. Children die with the zygote, and the zygote with the tests.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

HERE = Path(__file__).resolve()
WAIT_S = 60.0
_PR_SET_PDEATHSIG = 1


class Done(NamedTuple):
    """`code` is the exit code, or minus the signal that ended the process."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Child:
    """A process of the zygote's. `wait` from threads only (`asyncio.to_thread`) in async tests."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.pid = 0
        self.code = 0
        self.started = threading.Event()
        self.ended = threading.Event()

    def wait(self) -> Done:
        assert self.ended.wait(WAIT_S), f"process {self.pid} did not end within {WAIT_S:g} s"
        return Done(self.code, *((self.scratch / n).read_text("utf-8") for n in ("out", "err")))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.started.wait(WAIT_S)
        os.kill(self.pid, number)


class Zygote:
    """`with Zygote() as zygote: zygote.cli("show", "a1", "--store", "runs").wait()`."""

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="zygote-")
        self._children: list[Child] = []
        self._lock = threading.Lock()
        root = HERE.parents[2]
        paths = os.pathsep.join([str(root), str(HERE.parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, str(HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self._scratch.cleanup()

    def cli(self, *args: str, env: dict[str, str] | None = None, **how: Any) -> Child:
        """`runfold args…`. `how`: cwd, uid."""
        return self._start(args=list(args), env=env or {}, **how)

    def call(self, function: str, **arguments: Any) -> Child:
        """`module:function` with JSON arguments, also async; its result is JSON on `out`."""
        return self._start(function=function, arguments=arguments)

    def _start(self, **request: Any) -> Child:
        assert self._process.stdin is not None
        with self._lock:
            number = len(self._children)
            child = Child(Path(self._scratch.name) / str(number))
            child.scratch.mkdir()
            self._children.append(child)
            line = json.dumps(request | {"number": number, "scratch": str(child.scratch)})
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        return child

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            news = json.loads(line)
            child = self._children[news["number"]]
            if "pid" in news:
                child.pid = news["pid"]
                child.started.set()
            else:
                child.code = news["code"]
                child.ended.set()


# ---- the server -------------------------------------------------------------------------------


def _serve() -> None:
    _die_with_parent()
    import fractions  # noqa: F401  # late imports of the product, of msgspec and of typer: a
    import getpass  # noqa: F401  # child that became nobody may not read the interpreter
    import zoneinfo  # noqa: F401

    import cases.child  # noqa: F401

    import runfold.cli  # noqa: F401

    watched = selectors.DefaultSelector()
    watched.register(0, selectors.EVENT_READ, None)
    buffered = b""
    while True:
        for key, _ in watched.select():
            if key.data is not None:  # a child's pidfd: it has ended
                number, pid = key.data
                watched.unregister(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _tell({"number": number, "code": code})
                continue
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, buffered = (buffered + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _child(request)
                _tell({"number": request["number"], "pid": pid})
                watched.register(os.pidfd_open(pid), selectors.EVENT_READ, (request["number"], pid))


def _tell(news: dict[str, Any]) -> None:
    os.write(1, json.dumps(news).encode() + b"\n")


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _child(request: dict[str, Any]) -> None:
    code = 70
    try:
        _die_with_parent()
        scratch = Path(request["scratch"])
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.closerange(3, 256)
        os.environ.update(request.get("env", {}))
        os.chdir(request.get("cwd", scratch))
        if uid := request.get("uid"):
            os.setgid(uid)
            os.setuid(uid)
        code = _work(request)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _work(request: dict[str, Any]) -> int:
    if "args" in request:
        from runfold.cli import main

        sys.argv = ["runfold", *request["args"]]
        try:
            main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        return 0
    import asyncio
    import importlib
    import inspect

    module, _, name = request["function"].partition(":")
    result = getattr(importlib.import_module(module), name)(**request["arguments"])
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    print(json.dumps(result))
    return 0


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    _serve()
