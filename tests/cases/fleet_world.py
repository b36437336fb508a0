"""A fleet in a test: workers as processes, runs, and what must hold of both afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cases.world import strict
from cases.zygote import Child, Done, Zygote
from kit.audited import check
from kit.ledger import Ledger
from kit.waiting import eventually

from journal.codec import Entry, decode
from journal.fold import Fold
from journal.ids import RunId
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from runfold import Fleet, RunState

FLEET = ({"name": "fleet"},)
ENDED = {"completed", "failed", "cancelled"}
RESTS = {"awaiting_approval", "waiting", "paused", "indeterminate"}


class Workers:
    """Worker processes on one namespace of one server, and the runs they work."""

    def __init__(self, home: Path, zygote: Zygote, url: str, namespace: str, fleet: Fleet) -> None:
        self.home = home
        self.url = url
        self.namespace = namespace
        self.fleet = fleet
        self.store: JetStreamStore = fleet.store  # type: ignore[assignment]
        self.ledger = Ledger(home / "ledger")
        self.reads = Ledger(home / "reads")
        self.asked = Ledger(home / "asked")
        self.children: list[Child] = []
        self._zygote = zygote
        (home / "hold").mkdir(exist_ok=True)

    # ---- processes --------------------------------------------------------------------------

    async def worker(
        self,
        agents: Sequence[dict[str, Any]] = FLEET,
        *,
        crash: str = "",
        zone: str = "",
        ready: bool = True,
        long_after: bool = False,
        **options: Any,
    ) -> Child:
        """One more worker; `options` are Worker's, by default an ack wait of 1 s and a grace of
        2 s. Returns when it serves."""
        tag = str(len(self.children))
        given = {"ack_wait_s": 1, "grace_s": 2, "sweep_s": 1} | options
        child = self._zygote.call(
            "cases.fleet_child:work",
            home=str(self.home),
            url=self.url,
            namespace=self.namespace,
            agents=list(agents),
            options=given,
            tag=tag,
            crash=crash,
            zone=zone,
            long_after=long_after,
        )
        self.children.append(child)
        if ready:
            await eventually(
                lambda: (self.home / f"ready-{tag}").exists() or child.ended.is_set(), 20
            )
        return child

    async def ended(self, child: Child, timeout: float = 20) -> Done:
        await eventually(child.ended.is_set, timeout, what=f"worker {child.pid} ends")
        return child.wait()

    async def kill(self, child: Child, number: signal.Signals = signal.SIGKILL) -> Done:
        child.kill(number)
        return await self.ended(child)

    async def stop(self, child: Child, timeout: float = 20) -> Done:
        """In order: SIGTERM, exit 0."""
        done = await self.kill(child, signal.SIGTERM)
        assert done.code == 0, done
        return done

    @property
    def alive(self) -> list[Child]:
        return [child for child in self.children if not child.ended.is_set()]

    @asynccontextmanager
    async def supervised(
        self, count: int, agents: Sequence[dict[str, Any]] = FLEET, **options: Any
    ) -> AsyncIterator[None]:
        """`count` workers; one that ends is replaced."""
        for _ in range(count):
            await self.worker(agents, **options)

        async def replace() -> None:
            while True:
                if len(self.alive) < count:
                    await self.worker(agents, ready=False, **options)
                await asyncio.sleep(0.05)

        replacing = asyncio.create_task(replace())
        try:
            yield
        finally:
            replacing.cancel()
            await asyncio.wait([replacing])
            if not replacing.cancelled() and (error := replacing.exception()):
                raise error

    # ---- holding ----------------------------------------------------------------------------

    def hold(self, name: str) -> None:
        (self.home / "hold" / name).touch()

    def go(self, name: str) -> None:
        (self.home / "hold" / name).unlink()

    # ---- runs -------------------------------------------------------------------------------

    async def start(self, run_id: str, input: Any, agent: str = "fleet") -> None:
        await self.fleet.start(agent, input, run_id=run_id)

    async def starts(self, inputs: dict[str, Any], agent: str = "fleet", at_once: int = 20) -> None:
        limit = asyncio.Semaphore(at_once)

        async def one(run_id: str, input: Any) -> None:
            async with limit:
                await self.start(run_id, input, agent)

        await asyncio.gather(*(one(*item) for item in inputs.items()))

    async def statuses(self) -> dict[str, str]:
        """Of all runs, by the header of their last record: cheap, and enough for polling."""
        return {run: status async for run, status in self.store.heads()}

    async def reaches(self, runs: Sequence[str], wanted: set[str], timeout: float = 30) -> None:
        """Each of the runs has one of these statuses."""
        left: dict[str, str] = {}

        async def there() -> bool:
            known = await self.statuses()
            left.clear()
            left.update({r: known.get(r, "?") for r in runs if known.get(r) not in wanted})
            await asyncio.sleep(0.05)
            return not left

        try:
            await eventually(there, timeout)
        except AssertionError:
            logs = "\n".join(self.log(child)[-1500:] for child in self.children[-4:])
            raise AssertionError(f"not {wanted} in {timeout} s: {left}\n{logs}") from None

    async def end(self, run_id: str, timeout: float = 30) -> RunState:
        """The run, ended or waiting for a person."""
        await self.reaches([run_id], ENDED | RESTS, timeout)
        return await self.fleet.get(run_id)

    async def records(self, run_id: str, type: str = "") -> list[dict[str, Any]]:
        found = await self._sound(run_id)
        return [record for record in found if type in ("", record["type"])]

    async def approve(self, run_id: str) -> None:
        (ask,) = (await self.fleet.get(run_id)).outcome.pending  # type: ignore[union-attr]
        await self.fleet.signal(run_id, "approve", {"marker": ask.marker})

    def log(self, child: Child) -> str:
        return (child.scratch / "err").read_text("utf-8") if child.started.is_set() else ""

    # ---- what must hold of every case -------------------------------------------------------

    async def check(self, *, running: Sequence[str] = ()) -> dict[str, list[dict[str, Any]]]:
        """All journals are sound, no run is running without an owner, no effect happened twice."""
        journals: dict[str, list[dict[str, Any]]] = {}
        for run_id, status in (await self.statuses()).items():
            journals[run_id] = records = await self._sound(run_id)
            assert _ends(records[-1]) == (status in ENDED), (run_id, status)
            if status == "running" and run_id not in running:
                holder = await self.store.ask(*_holder(records), _claim(records))
                assert holder == "yes", f"{run_id} is running and its holder says {holder}"
        effects = [(run, step) for run, step, _ in self.ledger.lines()]
        assert len(effects) == len(set(effects)), "an effect happened twice"
        return journals

    async def _sound(self, run_id: str) -> list[dict[str, Any]]:
        """The run's records: strict JSON, no gap, chained, nothing after the end; they fold, and
        break no rule of the audit."""
        fold, records, head = Fold(), list[dict[str, Any]](), "0" * 32
        entries = (await self.store.load(RunId(run_id))).entries
        for n, entry in enumerate(entries, 1):
            assert not records or not _ends(records[-1]), f"record {n} stands after the end"
            record = strict(entry.raw)
            assert (record["n"], record["prev"]) == (n, head), f"record {n} does not chain"
            head = blake2b(entry.raw, digest_size=16).hexdigest()
            records.append(record)
            fold.apply(Entry(decode(entry.raw), entry.raw))
        assert fold.newer is None
        check(run_id, entries)
        return records

    async def close(self) -> None:
        for child in self.alive:
            child.kill(signal.SIGCONT)
            child.kill()
        for child in self.children:
            await self.ended(child)
        assert not [child.pid for child in self.children if _exists(child.pid)]


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _ends(record: dict[str, Any]) -> bool:
    if record["type"] == "commit":
        return record["action"] != "continue"
    return record["type"] in ("run.completed", "run.purged")


def _claim(records: list[dict[str, Any]]) -> int:
    return max((r["n"] for r in records if r["type"] == "claim"), default=0)


def _holder(records: list[dict[str, Any]]) -> tuple[str, RunId]:
    claim = _claim(records)
    assert claim, f"run {records[0]['run']} is running and was never claimed"
    return records[claim - 1]["worker"], RunId(records[0]["run"])


@asynccontextmanager
async def fleet_on(
    home: Path, zygote: Zygote, url: str, namespace: str = "runfold"
) -> AsyncIterator[Workers]:
    """Workers on a namespace that is set up here; all of them are gone afterwards."""
    await provision(url, namespace=namespace)
    async with JetStreamStore(url, namespace=namespace) as store:
        workers = Workers(home, zygote, url, namespace, Fleet(store, by="test"))
        try:
            yield workers
        finally:
            await workers.close()


def rss(child: Child) -> int:
    """Bytes."""
    pages = int(Path(f"/proc/{child.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def fds(child: Child) -> int:
    return len(os.listdir(f"/proc/{child.pid}/fd"))
