"""The `runfold` command in real processes: run, held at a place, killed, stopped, at once.

A `Cli` is a folder to work in and a store to use. Its commands get the store from the environment,
so a test reads like what a person types.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kit.servers import _die_with_pytest
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

FORKS = """
import gc, json, os, sys, traceback
import typer, runfold.cli

def run(argv):
    sys.argv = ["runfold", *argv]
    try:
        runfold.cli.main()
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 99
    return 0

def send(fd, path):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)

def fork(number, argv):
    pid = os.fork()
    if pid == 0:
        for fd, end in ((1, "out"), (2, "err")):
            send(fd, f"{folder}/{number}.{end}")
        code = run(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid

folder, at_once = sys.argv[1], int(sys.argv[2])
lines = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
send(1, os.devnull)
send(2, os.devnull)
run(["show", "a bad id"])  # imports what is imported late; starts no thread
command = typer.main.get_command(runfold.cli.app)
typer.main.get_command = lambda app: command
gc.freeze()
codes = []
for first in range(0, len(lines), at_once):
    part = range(first, min(first + at_once, len(lines)))
    pids = [fork(number, lines[number]) for number in part]
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
os.write(answer, json.dumps(codes).encode())
"""
"""Forks a process for each command line, once everything is imported: 10 ms instead of 200."""


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


class Child:
    """A command that runs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._done: Done | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def stop(self) -> None:
        """SIGSTOP; returns once every thread has stopped."""
        self.send(signal.SIGSTOP)
        await eventually(self._stopped, what=f"process {self.pid} stops")

    def go_on(self) -> None:
        self.send(signal.SIGCONT)

    async def kill(self) -> Done:
        self.send(signal.SIGKILL)
        return await self.done()

    async def done(self) -> Done:
        if self._done is None:
            async with asyncio.timeout(END_WAIT_S):
                out, err = await self._process.communicate()
            code = self._process.returncode
            assert code is not None
            self._done = Done(code, out.decode(), err.decode())
        return self._done

    def _stopped(self) -> bool:
        states = [
            task.joinpath("stat").read_text().rpartition(")")[2].split()[0]
            for task in Path(f"/proc/{self.pid}/task").iterdir()
        ]
        return all(state == "T" for state in states)


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

    async def __call__(self, *args: str | bytes, stdin: bytes = b"") -> Done:
        async with asyncio.timeout(END_WAIT_S):
            child = await self.start(*args, stdin=asyncio.subprocess.PIPE)
            out, err = await child._process.communicate(stdin)
        code = child._process.returncode
        assert code is not None
        return Done(code, out.decode(), err.decode())

    async def start(self, *args: str | bytes, stdin: int = asyncio.subprocess.DEVNULL) -> Child:
        return await self.execute(RUNFOLD, *args, stdin=stdin)

    async def execute(
        self, program: str, *args: str | bytes, stdin: int = asyncio.subprocess.DEVNULL
    ) -> Child:
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
        child = Child(process)
        self._children.append(child)
        return child

    async def forked(self, lines: Sequence[Sequence[str]], *, at_once: int) -> list[Done]:
        """Each command line in a process of its own, `at_once` of them starting together."""
        folder = self.folder / ".forked"
        folder.mkdir(exist_ok=True)
        child = await self.execute(
            sys.executable,
            *("-c", FORKS, str(folder), str(at_once)),
            stdin=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(END_WAIT_S):
            out, err = await child._process.communicate(json.dumps(lines).encode())
        assert child._process.returncode == 0, err
        found = [
            Done(code, *(folder.joinpath(f"{n}.{end}").read_text() for end in ("out", "err")))
            for n, code in enumerate(json.loads(out))
        ]
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        return found

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
                await child._process.wait()

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

    # -- what is in the store -----------------------------------------------------------------------

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
            assert isinstance(
                await store.append(run_id(id), entry, expected=loaded.tail), Appended
            )

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
