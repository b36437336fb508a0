"""A pytest session that stops once it has collected, and forks a child for each run of some tests.

A child has nothing left to import: it changes the code of the functions that a mutation touches,
runs the tests it is told, and ends. So a mutant costs what its tests cost. What runs at import
(constants, defaults, classes) can't be changed so: see nursery.py.

`Session` is the client; `python session.py TEST …`, in a copy of the tree, the server.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import select
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation.nursery import PYTEST, NoShrinking, Server, die_with_parent
from mutation.operators import mutated

WAIT_S = 60.0
FOLLOWED = 12
NOT_IN_PLACE = "the function can't be changed in place"


class Ended(NamedTuple):
    """How a run ended: `failed` names the first test that failed, if any; `seconds` of CPU time.
    `seen`: of a run that was traced, by test its CPU seconds and the lines it ran, by file."""

    failed: str
    seconds: float
    seen: dict[str, tuple[float, dict[str, list[int]]]]


class Session(Server):
    """`tests`: what pytest collects."""

    def __init__(self, tree: Path, tests: Sequence[str]) -> None:
        super().__init__(__file__, tree, tests)

    def seen(self) -> Ended:
        """All tests, traced."""
        return Ended(**self.ask(file="", number=0, tests=[], cpu_s=1200))

    def run(self, file: str, number: int, tests: Sequence[str], cpu_s: int = 10) -> Ended:
        """These tests, in this order, on the mutant; no file: on the untouched product."""
        return Ended(**self.ask(file=file, number=number, tests=list(tests), cpu_s=cpu_s))


# ---- the server, a plugin of its own pytest ---------------------------------------------------


class _Server:
    def __init__(self, requests: Any, answers: int) -> None:
        self.requests, self.answers = requests, answers
        self.tree = Path.cwd()
        self.failed = ""
        self.spent: dict[str, float] = defaultdict(float)
        self.lines: dict[str, set[tuple[str, int]]] = defaultdict(set)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """No server is started here."""
        items[:] = [item for item in items if not _needs_a_server(item)]

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed:
            raise RuntimeError("not all tests can be collected")
        self.functions = _functions(self.tree)
        self.items: dict[str, list[Any]] = {}
        for item in session.items:
            self.items.setdefault(_test(item), []).append(item)
        gc.collect()
        gc.freeze()
        for line in self.requests:
            os.write(self.answers, json.dumps(self._forked(session, json.loads(line))).encode())
            os.write(self.answers, b"\n")
        os._exit(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid.partition("[")[0]

    def _forked(self, session: Any, request: dict[str, Any]) -> dict[str, Any]:
        tests = request["tests"] or list(self.items)
        items = [item for test in tests for item in self.items[test]]
        fresh = self._mutant(request["file"], request["number"]) if request["file"] else []
        if any(len(f.__code__.co_freevars) != len(code.co_freevars) for f, code in fresh):
            return Ended(NOT_IN_PLACE, 0.0, {})._asdict()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            for function, code in fresh:
                function.__code__ = code
            self._child(session, items, writing, request["cpu_s"], traced=not request["tests"])
        os.close(writing)
        told = _told(reading, time.monotonic() + request["cpu_s"] * 10 + WAIT_S)
        _kill_group(child)
        _, _, usage = os.wait4(child, 0)
        seconds = usage.ru_utime + usage.ru_stime
        if told is None:
            return Ended("hung, or crashed", seconds, {})._asdict()
        return Ended(told["failed"], seconds, told["seen"])._asdict()

    def _child(
        self, session: Any, items: list[Any], writing: int, cpu_s: int, *, traced: bool
    ) -> NoReturn:
        try:
            os.setpgid(0, 0)
            die_with_parent()
            spent_s = int(sum(os.times()[:2]))
            limit = resource.getrlimit(resource.RLIMIT_CPU)[1]
            resource.setrlimit(resource.RLIMIT_CPU, (spent_s + cpu_s, limit))
            random.seed(0)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(nowhere, number)
            self._run(session, items, traced=traced)
            with os.fdopen(writing, "w") as pipe:
                json.dump({"failed": self.failed, "seen": self._seen()}, pipe)
        finally:
            os._exit(0)

    def _run(self, session: Any, items: list[Any], *, traced: bool) -> None:
        session.config.option.maxfail = 0 if traced else 1
        for item, following in zip(items, [*items[1:], None], strict=True):
            began = time.process_time()
            if traced:
                self._trace(_test(item))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if traced:
                sys.settrace(None)
            self.spent[_test(item)] += time.process_time() - began
            if session.shouldfail or session.shouldstop:
                return

    def _mutant(self, file: str, number: int) -> list[tuple[FunctionType, CodeType]]:
        """The functions that the mutation changes, each with its code then."""
        path = self.tree / file
        code = compile(mutated(path.read_text(encoding="utf-8"), number), str(path), "exec")
        changed = [
            (function, fresh)
            for fresh in _codes(code)
            for function in self.functions.get((str(path), *_place(fresh)), ())
            if function.__code__ != fresh
        ]
        if not changed:
            raise RuntimeError(f"mutation {number} of {file} changes no function")
        return changed

    # ---- which lines a test runs

    def _trace(self, test: str) -> None:
        """Of what a test calls often only the first calls are followed: the rest is alike."""
        prefix, lines = str(self.tree / "journal") + os.sep, self.lines[test]
        calls: Counter[CodeType] = Counter()

        def line(frame: FrameType, event: str, arg: object) -> Any:
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def call(frame: FrameType, event: str, arg: object) -> Any:
            code = frame.f_code
            calls[code] += 1
            if calls[code] > FOLLOWED or not code.co_filename.startswith(prefix):
                return None
            return line(frame, event, arg)

        threading.settrace(call)
        sys.settrace(call)

    def _seen(self) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for test, lines in self.lines.items():
            by_file: dict[str, list[int]] = defaultdict(list)
            for file, line in lines:
                by_file[str(Path(file).relative_to(self.tree))].append(line)
            seen[test] = (self.spent[test], by_file)
        return seen


def _test(item: Any) -> str:
    return item.nodeid.partition("[")[0]


def _needs_a_server(item: Any) -> bool:
    params = getattr(item, "callspec", None)
    kinds = set(params.id.split("-")) if params is not None else set[str]()
    return bool(
        {"jetstream", "cluster"} & kinds or {"server", "any_server"} & set(item.fixturenames)
    )


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _codes(code: CodeType) -> list[CodeType]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return [code, *(found for one in inner for found in _codes(one))]


def _functions(tree: Path) -> dict[tuple[str, str, int], list[FunctionType]]:
    """All functions of the product there are, by the place of their code."""
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(str(tree)):
            found[thing.__code__.co_filename, *_place(thing.__code__)].append(thing)
    return found


def _told(reading: int, deadline: float) -> dict[str, Any] | None:
    """What the child says, None where it dies or hangs first."""
    said = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                return None
            piece = pipe.read(1 << 20)
            if not piece:
                break
            said += piece
    return json.loads(said) if said else None


def _kill_group(child: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _serve(tests: Sequence[str]) -> None:
    import pytest

    die_with_parent()
    requests = os.fdopen(os.dup(0), "r")
    server = _Server(requests, os.dup(1))
    os.dup2(2, 1)
    args = [*PYTEST, "-s", "-o", f"timeout={WAIT_S}", f"--basetemp={os.getcwd()}/tmp", *tests]
    pytest.main(args, plugins=[server, NoShrinking()])


if __name__ == "__main__":
    _serve(sys.argv[1:])
