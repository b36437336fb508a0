"""A process that has imported what the tests need and forks a child for each run of some tests.

Of the half second of a pytest run of one small test most is the start of the interpreter, pytest
and the packages of others. The nursery pays for them once. What stands in its tree (the product,
the tests) it never imports, so each child sees the tree as it is on disk at that moment. Its
children are processes like any other: they may hang or crash, and leave nothing behind.

`Nursery` is the client; `python nursery.py TEST …`, in the tree, the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

PYTEST = [
    *("-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider"),
    *("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"),
    *("-o", "addopts=--import-mode=importlib"),
]
BARE = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Without the plugins that no test here needs, pytest starts in less than half the time."""
_PR_SET_PDEATHSIG = 1


class Ran(NamedTuple):
    """`code` is pytest's exit code, or minus the signal that ended the child; None: it hung.
    `failed` names the first test that failed. `cpu_s` counts the child's own children, too."""

    code: int | None
    failed: str
    out: str
    cpu_s: float


class Server:
    """A process in a copy of the tree that answers a line with a line. For one thread at a time."""

    def __init__(self, script: str, tree: Path, tests: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(script).resolve()), *tests],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env=os.environ | BARE | {"PYTHONPATH": str(tree)},
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self._process.args} has died")
        found: dict[str, Any] = json.loads(answer)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Nursery(Server):
    """`with Nursery(tree, tests) as nursery: nursery.run(tests)`."""

    def __init__(self, tree: Path, tests: Sequence[str]) -> None:
        """`tests`: what they import from outside the tree is what is imported beforehand."""
        super().__init__(__file__, tree, tests)

    def run(
        self, tests: Sequence[str], *, wait_s: float = 60.0, cpu_s: int = 10, keep: bool = False
    ) -> Ran:
        """It hangs when one test takes `wait_s`, or all of them `cpu_s` of CPU time: most that hang
        go round in circles. `keep`: the bytecode of what they import stays for later children."""
        return Ran(**self.ask(tests=list(tests), wait_s=wait_s, cpu_s=cpu_s, keep=keep))


# ---- the server -------------------------------------------------------------------------------


def _serve(tests: Sequence[str]) -> None:
    die_with_parent()
    tree = os.getcwd() + os.sep
    _preload(tests, tree)
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        ran = _forked(**json.loads(line))
        os.write(answers, json.dumps(ran._asdict()).encode() + b"\n")


def _preload(tests: Sequence[str], tree: str) -> None:
    """Imports what collecting the tests imports, but for what stands in the tree."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = _pytest(["--collect-only", *tests], os.devnull)
        names = [n for n, m in list(sys.modules.items()) if _is_elsewhere(m, tree)]
        with os.fdopen(writing, "w") as pipe:
            json.dump(names, pipe)
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = json.load(pipe)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit("the tests can't be collected")
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:  # made by another import, not to be imported by name
            continue
    gc.collect()
    gc.freeze()


def _is_elsewhere(module: Any, tree: str) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not file.startswith(tree)


def _forked(tests: Sequence[str], wait_s: float, cpu_s: int, keep: bool) -> Ran:
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as out:
        child = os.fork()
        if child == 0:
            _child(tests, wait_s, cpu_s, keep, out.name)
        hung = not _ends_within(child, wait_s * (len(tests) + 1))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # it itself, or what it left behind
        _, status, usage = os.wait4(child, 0)
        text = out.read()
    code = os.waitstatus_to_exitcode(status)
    hung = hung or code == -signal.SIGXCPU
    found = re.search(r"^FAILED (\S+?)(\[| |$)", text, re.M)
    used_s = usage.ru_utime + usage.ru_stime
    return Ran(None if hung else code, found[1] if found else "", text, used_s)


def _ends_within(child: int, wait_s: float) -> bool:
    """Whether it has ended by then; it is not reaped."""
    fd = os.pidfd_open(child)
    try:
        return bool(select.select([fd], [], [], wait_s)[0])
    finally:
        os.close(fd)


def _child(tests: Sequence[str], wait_s: float, cpu_s: int, keep: bool, out: str) -> NoReturn:
    code = 70
    try:
        os.setpgid(0, 0)
        die_with_parent()
        spent_s = int(sum(os.times()[:2]))
        _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (spent_s + cpu_s, most_s))
        random.seed()
        sys.dont_write_bytecode = not keep
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = _pytest([f"--basetemp={os.getcwd()}/tmp", "-o", f"timeout={wait_s}", *tests], out)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _pytest(args: list[str], out: str) -> int:
    import pytest

    file = os.open(out, os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = pytest.main([*PYTEST, *args], plugins=[NoShrinking()])
    sys.stdout.flush()
    return int(code)


class NoShrinking:
    """That a property fails is all that is asked: no smaller example is looked for."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            if getattr(item.obj, "is_hypothesis_test", False):
                from hypothesis import Phase, settings

                had = item.obj._hypothesis_internal_use_settings
                item.obj._hypothesis_internal_use_settings = settings(
                    had, phases=(Phase.explicit, Phase.generate), database=None
                )


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _serve(sys.argv[1:])
