"""The `runfold` command in real processes: run, held at a place, killed, stopped, at once.

A `Cli` is a folder to work in and a store to use. Its commands get the store from the environment,
so a test reads like what a person types.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kit.servers import _die_with_pytest  # pyright: ignore[reportPrivateUsage]
from kit.waiting import eventually
from nats.aio.client import Client

from journal.codec import Entry, record_hash
from journal.ids import run_id
from journal.records import Record
from journal.store import Appended, Store
from runfold import open_store

RUNFOLD = str(Path(sys.executable).with_name("runfold"))
AGENTS = Path(__file__).with_name("agents.py")
END_WAIT_S = 60.0
LINE_CHARS_MAX = 1200


class Zygote:
    """A process that has everything imported and forks one for each command (kit.agents): 15 ms
    instead of 250. One for a pytest process; what it has to say stands in files, which outlive the
    event loops of single tests."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="runfold-cli-"))
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(AGENTS)],
            stdin=subprocess.PIPE,
            preexec_fn=_die_with_pytest,
        )

    def fork(self, requests: Sequence[dict[str, Any]]) -> list[str]:
        """Start one process for each, together; where each one's files are."""
        found: list[str] = []
        lines: list[str] = []
        for request in requests:
            self._count += 1
            found.append(str(self._folder / str(self._count)))
            lines.append(json.dumps(request | {"to": found[-1]}) + "\n")
        assert self._process.stdin is not None
        self._process.stdin.write("".join(lines).encode())
        self._process.stdin.flush()
        return found


@functools.cache
def zygote() -> Zygote:
    return Zygote()


class Done(NamedTuple):
    """How a command ended. `code` is negative for a signal, as subprocess has it."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one object on stdout."""
        assert self.out.endswith("\n") and self.out.count("\n") == 1, self
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """The one line on stderr, beside the note on what a server's storage is worth (R14)."""
        assert self.err.endswith("\n") and "Traceback" not in self.err, self
        lines = self.err.split("\n")[:-1]
        found = [line for line in lines if not line.startswith("runfold: storage ")]
        assert len(found) == 1 and found[0].startswith("runfold: "), self
        return found[0]


def is_refused(done: Done, exit_code: int, code: str) -> None:
    """PROTOCOL 8's error object on stdout, the same in one line on stderr."""
    assert done.code == exit_code, done
    assert done.json.keys() == {"error"}, done
    error = done.json["error"]
    assert error.keys() == {"code", "message", "run", "hint"}, done
    assert error["code"] == code, done
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["hint"], str)
    assert error["run"] is None or isinstance(error["run"], str)
    assert len(done.line) < LINE_CHARS_MAX and "internal error" not in done.line, done
    assert done.line.isprintable(), done


class Child:
    """A command that runs."""

    pid: int

    @property
    def running(self) -> bool:
        raise NotImplementedError

    async def done(self) -> Done:
        raise NotImplementedError

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def stop(self) -> None:
        """SIGSTOP; returns once every thread has stopped."""
        self.send(signal.SIGSTOP)
        await eventually(self._stopped, what=f"process {self.pid} stops")

    def go_on(self) -> None:
        self.send(signal.SIGCONT)

    async def kill(self) -> Done:
        self.send(signal.SIGKILL)
        return await self.done()

    def _stopped(self) -> bool:
        states = [
            task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{self.pid}/task").iterdir()
        ]
        return all(state == "T" for state in states)


class Forked(Child):
    """A child of the zygote."""

    def __init__(self, pid: int, to: str) -> None:
        self.pid = pid
        self._to = to

    @property
    def running(self) -> bool:
        return not os.path.exists(f"{self._to}.code")

    async def done(self) -> Done:
        await eventually(lambda: not self.running, END_WAIT_S, what=f"process {self.pid} ends")
        return Done(
            int(_text(f"{self._to}.code")), *(_text(f"{self._to}.{x}") for x in ("out", "err"))
        )


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


class Executed(Child):
    """A program of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self._process = process
        self._done: Done | None = None

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def done(self, stdin: bytes | None = None) -> Done:
        if self._done is None:
            async with asyncio.timeout(END_WAIT_S):
                out, err = await self._process.communicate(stdin)
            code = self._process.returncode
            assert code is not None
            self._done = Done(code, out.decode(), err.decode())
        return self._done


class Cli:
    """`await cli("show", "a1")`. `store`: a directory, a URL, or None for the embedded server."""

    def __init__(self, folder: Path, store: str | None, namespace: str = "runfold") -> None:
        self.folder = folder
        self.store = store
        self.namespace = namespace
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if "RUNFOLD" not in name}
        self.env = kept | {"RUNFOLD_NAMESPACE": namespace}
        if store is not None:
            self.env["RUNFOLD_STORE"] = store
        self._children: list[Child] = []

    @property
    def kind(self) -> str:
        if self.store is None:
            return "embedded"
        return "jetstream" if "://" in self.store else "file"

    def on(self, store: str | None) -> Cli:
        """The same folder and namespace, another way to a store."""
        other = Cli(self.folder, store, self.namespace)
        other._children = self._children
        return other

    async def __call__(self, *args: str) -> Done:
        return await (await self.start(*args)).done()

    async def start(self, *args: str) -> Child:
        return (await self._fork([args]))[0]

    async def forked(self, lines: Sequence[Sequence[str]], *, at_once: int) -> list[Done]:
        """Each command line in a process of its own, `at_once` of them starting together."""
        found: list[Done] = []
        for first in range(0, len(lines), at_once):
            part = await self._fork(lines[first : first + at_once])
            found += [await child.done() for child in part]
        return found

    async def _fork(self, lines: Sequence[Sequence[str]]) -> list[Child]:
        about = {"cwd": str(self.folder), "env": self.env}
        places = zygote().fork([about | {"words": list(line)} for line in lines])
        found: list[Child] = []
        for place in places:
            pid = f"{place}.pid"
            await eventually(lambda pid=pid: os.path.exists(pid), END_WAIT_S, what="it is forked")
            found.append(Forked(int(_text(pid)), place))
        self._children += found
        return found

    async def typed(self, *args: str, stdin: bytes = b"") -> Done:
        """As in a terminal: the installed command, from nothing."""
        child = await self.execute(RUNFOLD, *args, stdin=asyncio.subprocess.PIPE)
        return await child.done(stdin)

    async def execute(
        self, program: str, *args: str, stdin: int = asyncio.subprocess.DEVNULL
    ) -> Executed:
        process = await asyncio.create_subprocess_exec(
            program,
            *args,
            cwd=self.folder,
            env=self.env,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=_die_with_pytest,
        )
        child = Executed(process)
        self._children.append(child)
        return child

    async def run(self, id: str, agent: str = "desk", *args: str, input: str = "hello") -> Done:
        """`runfold run` with an agent of kit.agents, `--json`."""
        return await self(*run_line(id, agent, *args, input=input))

    async def begin(self, id: str, agent: str = "desk", *args: str, input: str = "hello") -> Child:
        """The same, not waited for."""
        return await self.start(*run_line(id, agent, *args, input=input))

    async def end(self) -> None:
        """Kill what a failing test left."""
        for child in self._children:
            if child.running:
                with contextlib.suppress(ProcessLookupError):
                    child.send(signal.SIGKILL)
                await child.done()

    # -- what agents left in the folder (kit.agents) ----------------------------------------------

    def hold(self, place: str) -> None:
        """From now on agents stop at this place of theirs."""
        self.folder.joinpath("hold").mkdir(exist_ok=True)
        self.folder.joinpath("hold", place).touch()

    def let_go(self, place: str) -> None:
        self.folder.joinpath("hold", place).unlink()

    async def reached(self, place: str, times: int = 1) -> None:
        """Wait until agents were at this place that often."""
        await eventually(
            lambda: self.lines("places").count(place) >= times,
            END_WAIT_S,
            what=f"{place} is reached {times} times",
        )

    def lines(self, name: str) -> list[str]:
        """The whole lines of a ledger; a last one that is being written is not there yet."""
        path = self.folder / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def effects(self, tool: str) -> list[str]:
        """The keys under which this tool was called, once for each call."""
        found = [line.split(" ", 1) for line in self.lines("effects")]
        return [key for name, key in found if name == tool]

    def requests(self) -> list[list[dict[str, Any]]]:
        """The conversation in each model request, over all processes."""
        return [json.loads(line) for line in self.lines("requests")]

    # -- what is in the store --------------------------------------------------------------------

    async def entries(self, id: str) -> tuple[Entry, ...]:
        async with self._opened() as store:
            return (await store.load(run_id(id))).entries

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncGenerator[Store]:
        assert self.store is not None
        where = self.store if "://" in self.store else str(self.folder / self.store)
        async with open_store(where, namespace=self.namespace) as store:
            yield store

    async def records(self, id: str) -> list[Record]:
        return [entry.record for entry in await self.entries(id)]

    async def append_raw(self, id: str, raw: bytes) -> None:
        """Bytes that no writer of this version would write, as the run's next record."""
        async with self._opened() as store:
            loaded = await store.load(run_id(id))
            entry = Entry(loaded.entries[0].record, raw)
            assert isinstance(await store.append(run_id(id), entry, expected=loaded.tail), Appended)

    async def append_chained(self, id: str, type: str, **fields: object) -> None:
        """A record of any type and fields that follows the last one rightly."""
        last = (await self.entries(id))[-1]
        envelope = {
            "type": type,
            "v": 1,
            "n": last.record.n + 1,
            "id": "0123456789ab-1",
            "at": "2027-01-01T00:00:00.000Z",
            "by": "somebody else",
            "prev": record_hash(last.raw),
        }
        await self.append_raw(id, json.dumps(envelope | fields).encode())

    async def contents(self) -> object:
        """All that is stored, to compare: files with their bytes, or the stream's last sequence."""
        if self.kind == "jetstream":
            async with self.client() as client:
                info = await client.jetstream().stream_info(f"{self.namespace.upper()}_JOURNAL_0")
                return info.state.messages, info.state.last_seq
        where = self.folder / (self.store or ".runfold")
        paths = where.rglob("*") if where.exists() else ()
        return {str(path): path.read_bytes() for path in paths if path.is_file()}

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncGenerator[Any]:
        """A plain NATS client on the store's server."""
        client: Any = Client()
        await client.connect(self.store)
        try:
            yield client
        finally:
            await client.close()


def run_line(id: str, agent: str, *args: str, input: str) -> tuple[str, ...]:
    """The words of a `runfold run --json` with an agent of kit.agents."""
    return ("run", f"{AGENTS}:{agent}", "--id", id, "--input", input, "--json", *args)


def names(records: Sequence[Record]) -> list[str]:
    """Records as `step.started tool/1/0/lookup`: the type, and the step where it has one."""
    found: list[str] = []
    for record in records:
        type_ = Entry(record, b"").type
        step = getattr(record, "step", None)
        found.append(f"{type_} {step}" if step else type_)
    return found


async def nothing_runs_in(folder: Path) -> None:
    """No process works in this folder: of `.runfold`, the supervisor and its nats-server."""

    def gone() -> bool:
        for process in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if process.name.isdigit() and process.joinpath("cwd").readlink() == folder:
                    return False
        return True

    await eventually(gone, 20, what=f"nothing runs in {folder}")
