"""Workers in real processes: started, watched, stopped, killed; what became of their runs.

A `Crew` is a namespace of a server, a folder that its agents (kit.fleet_agents) leave lines in, and
the worker processes on it. `Tap` is a wire to the server that notes what a worker sends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import os
import re
import signal
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from cases.zygote import Child, Done, Zygote
from kit.audited import check
from kit.ledger import Ledger
from kit.waiting import eventually

from journal.codec import Entry
from journal.fleet import Fleet
from journal.fold import Fold
from journal.ids import RunId
from journal.records import Claim, Record
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.stores.tasks_message import consumer_name
from journal.views import RunState

WAIT_S = 40.0


@functools.cache
def zygote() -> Zygote:
    """One for a pytest process."""
    started = Zygote().__enter__()
    atexit.register(started.__exit__, None, None, None)
    return started


class WorkerProcess:
    """A worker that runs."""

    def __init__(self, name: str, folder: Path, child: Child) -> None:
        self.name = name
        self.id = ""
        self._folder = folder
        self._child = child

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def running(self) -> bool:
        return not self._child.ended.is_set()

    @property
    def log(self) -> str:
        return (self._child.scratch / "err").read_text()

    @property
    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    async def ready(self) -> None:
        def there() -> bool:
            assert self.running, self.log
            return (self._folder / f"ready@{self.name}").exists()

        await eventually(there, WAIT_S, what=f"worker {self.name} is ready")
        self.id = json.loads((self._folder / f"ready@{self.name}").read_text())["id"]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def term(self) -> None:
        self.send(signal.SIGTERM)

    async def ended(self) -> Done:
        await eventually(lambda: not self.running, WAIT_S, what=f"worker {self.name} ends")
        return self._child.wait()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.send(signal.SIGKILL)
        await self.ended()

    async def freeze(self) -> None:
        """SIGSTOP; returns once every thread has stopped."""
        self.send(signal.SIGSTOP)

        def stopped() -> bool:
            tasks = Path(f"/proc/{self.pid}/task").iterdir()
            found = [task.joinpath("stat").read_text() for task in tasks]
            return all(text.rpartition(")")[2].split()[0] == "T" for text in found)

        await eventually(stopped, what=f"worker {self.name} stops")

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    async def stats(self) -> dict[str, int]:
        """What it holds in memory now (kit.fleet_agents.stats)."""
        path = self._folder / f"stats@{self.name}"
        path.unlink(missing_ok=True)
        self.send(signal.SIGUSR1)
        await eventually(path.exists, what=f"worker {self.name} tells")
        found: dict[str, int] = json.loads(path.read_text())
        return found


class Crew:
    """`async with crew_on(server.url, namespace, tmp_path) as crew`."""

    def __init__(self, url: str, namespace: str, folder: Path, store: JetStreamStore) -> None:
        self.url = url
        self.namespace = namespace
        self.folder = folder
        self.store = store
        self.fleet = Fleet(store, by="test")
        self.workers: list[WorkerProcess] = []
        (folder / "hold").mkdir(parents=True, exist_ok=True)

    # ---- workers ------------------------------------------------------------------------------

    async def worker(
        self,
        *agents: str,
        url: str = "",
        skew_s: float = 0.0,
        hold_append: str = "",
        **options: Any,
    ) -> WorkerProcess:
        """One more, pulling when this returns."""
        found = self.begin_worker(
            *agents, url=url, skew_s=skew_s, hold_append=hold_append, **options
        )
        await found.ready()
        return found

    def begin_worker(
        self,
        *agents: str,
        url: str = "",
        skew_s: float = 0.0,
        hold_append: str = "",
        **options: Any,
    ) -> WorkerProcess:
        name = f"w{len(self.workers) + 1}"
        child = zygote().call(
            "kit.fleet_agents:work",
            url=url or self.url,
            namespace=self.namespace,
            agents=list(agents),
            folder=str(self.folder),
            name=name,
            options={"ack_wait_s": 1.0, "sweep_s": 5.0} | options,
            skew_s=skew_s,
            hold_append=hold_append,
        )
        found = WorkerProcess(name, self.folder, child)
        self.workers.append(found)
        return found

    async def end(self) -> None:
        """Kill what a test left."""
        for worker in self.workers:
            if worker.running:
                worker._child.started.wait(WAIT_S)
                await worker.kill()

    # ---- what agents left ---------------------------------------------------------------------

    def hold(self, place: str, worker: WorkerProcess | None = None) -> None:
        self._held(place, worker).touch()

    def let_go(self, place: str, worker: WorkerProcess | None = None) -> None:
        self._held(place, worker).unlink()

    def _held(self, place: str, worker: WorkerProcess | None) -> Path:
        return self.folder / "hold" / (f"{place}@{worker.name}" if worker else place)

    def reached(self, place: str, worker: WorkerProcess | None = None) -> int:
        """How often that place was reached, by that worker or any."""
        path = self.folder / "places"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        wanted = f"{place} {worker.name if worker else ''}"
        return sum(line.startswith(wanted) for line in lines)

    async def reaches(self, place: str, worker: WorkerProcess | None = None) -> None:
        who = worker.name if worker else "somebody"
        await eventually(lambda: self.reached(place, worker), WAIT_S, what=f"{who} reaches {place}")

    def effects(self, run_id: str | None = None) -> list[tuple[str, str, Any]]:
        return Ledger(self.folder / "effects").lines(run_id)

    # ---- runs -----------------------------------------------------------------------------------

    async def start(self, agent: str, run_id: str, input: Any = None) -> str:
        await self.fleet.start(agent, input, run_id=run_id)
        return run_id

    async def entries(self, run_id: str) -> tuple[Entry, ...]:
        return (await self.store.load(RunId(run_id))).entries

    async def records(self, run_id: str) -> list[Record]:
        return [entry.record for entry in await self.entries(run_id)]

    async def claims(self, run_id: str) -> list[Claim]:
        return [one for one in await self.records(run_id) if isinstance(one, Claim)]

    async def audit(self) -> None:
        """Whatever became of the workers, no journal that they left breaks a rule (R70)."""
        async for run_id in self.store.runs():
            check(run_id, await self.entries(run_id))

    async def restarts(self, run_id: str) -> int:
        """The highest count of lost workers that the run ever had."""
        fold, most = Fold(), 0
        for entry in await self.entries(run_id):
            fold.apply(entry)
            most = max(most, fold.restarts)
        return most

    async def until(
        self, run_id: str, condition: Callable[[RunState], bool], timeout_s: float = WAIT_S
    ) -> RunState:
        last: list[RunState] = []

        async def met() -> RunState | None:
            last[:] = [await self.fleet.get(run_id)]
            met = condition(last[0])
            assert met or last[0].status not in ("completed", "failed", "cancelled")
            return last[0] if met else None

        try:
            return await eventually(met, timeout_s)
        except AssertionError as error:
            logs = "\n".join(f"-- {one.name}\n{one.log[-1500:]}" for one in self.workers)
            raise AssertionError(f"{run_id} is {last}\n{logs}") from error

    async def status(self, run_id: str, *statuses: str, timeout_s: float = WAIT_S) -> RunState:
        return await self.until(run_id, lambda run: run.status in statuses, timeout_s)

    async def all_completed(self, run_ids: Sequence[str], timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        for run_id in run_ids:
            await self.status(run_id, "completed", timeout_s=deadline - time.monotonic())

    async def claimed_by(self, run_id: str, worker: WorkerProcess) -> Claim:
        """The first claim of the run by this worker, once it is there."""

        async def there() -> Claim | None:
            found = await self.claims(run_id)
            return next((claim for claim in found if claim.worker == worker.id), None)

        return await eventually(there, WAIT_S, what=f"{worker.name} claims {run_id}")

    # ---- the server -----------------------------------------------------------------------------

    async def api(self, subject: str, payload: bytes = b"") -> dict[str, Any]:
        """A question to JetStream."""
        reply: Any = await self.store._connection.request(subject, payload, timeout_s=5)
        return json.loads(reply.data)

    async def consumer(self, agent: str) -> dict[str, Any]:
        stream = f"{self.namespace.upper()}_TASKS"
        return await self.api(f"$JS.API.CONSUMER.INFO.{stream}.{consumer_name(agent, 0)}")

    async def consumers(self) -> int:
        """On the journal and the tasks."""
        found = 0
        for name in ("JOURNAL_0", "TASKS"):
            info = await self.api(f"$JS.API.STREAM.INFO.{self.namespace.upper()}_{name}")
            found += info["state"]["consumer_count"]
        return found

    async def task_left(self, sequence: int) -> bool:
        """Whether the task message is still on the server."""
        stream = f"{self.namespace.upper()}_TASKS"
        request = json.dumps({"seq": sequence}).encode()
        return "error" not in await self.api(f"$JS.API.STREAM.MSG.GET.{stream}", request)


@contextlib.asynccontextmanager
async def crew_on(url: str, namespace: str, folder: Path) -> AsyncGenerator[Crew]:
    await provision(url, namespace=namespace)
    async with JetStreamStore(url, namespace=namespace) as store:
        crew = Crew(url, namespace, folder, store)
        try:
            yield crew
            await crew.audit()
        finally:
            await crew.end()


def instant(record: Record) -> float:
    """When it was written, in seconds."""
    return datetime.fromisoformat(record.at).timestamp()


class Tap:
    """A wire to a server. `sent` is all that clients sent over it."""

    def __init__(self, target_url: str) -> None:
        host, _, port = target_url.removeprefix("nats://").rpartition(":")
        self._target = (host, int(port))
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.sent = bytearray()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def settled(self, since: int = 0) -> list[tuple[str, int, int]]:
        """Each ack, nak, term and in-progress after that many bytes: the word, the sequence of the
        task message, the delivery."""
        pattern = rb"PUB \$JS\.ACK\.[^.]+\.[^.]+\.(\d+)\.(\d+)\.\S+ +\d+\r\n([+-]\w+)"
        found = re.findall(pattern, bytes(self.sent[since:]))
        return [(word.decode(), int(seq), int(delivery)) for delivery, seq, word in found]

    async def _accept(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        server, to_server = await asyncio.open_connection(*self._target)

        async def copy(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: bool
        ) -> None:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    if note:
                        self.sent += data
                    writer.write(data)
                    await writer.drain()
            writer.close()

        for args in ((client, to_server, True), (server, to_client, False)):
            task = asyncio.create_task(copy(*args))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


@contextlib.asynccontextmanager
async def tap_on(target_url: str) -> AsyncGenerator[Tap]:
    tap = Tap(target_url)
    tap._server = await asyncio.start_server(tap._accept, "127.0.0.1", 0)
    try:
        yield tap
    finally:
        tap._server.close()
        for task in tap._tasks:
            task.cancel()
