"""The crash matrix for workers over HTTP: what is done in a cell, and checked after it (R76).

Two worker processes work one run: safe tool, unsafe tool, safe tool, answer. Where the worker meets
the fault, they share a bridge; where the bridge does, the first worker has one of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from cases.zygote import Child, Zygote
from kit.audited import check
from kit.ledger import Ledger
from kit.matrix_http_cells import ANSWER, PERSON, Cell
from kit.matrix_http_worker import TIMEOUT_S
from kit.waiting import eventually

from journal import doors
from journal.errors import RunFinished, StaleSignal
from journal.fold import Fold
from journal.ids import RunId
from journal.log import Log
from journal.records import Claim, RunCompleted, Signal, StepCompleted, StepStarted
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_streams import tasks_name

WAIT_S = 30.0


class Ground:
    """What many cells share: the server, a namespace, a connection, a bridge process."""

    def __init__(self, url: str, namespace: str, zygote: Zygote, folder: Path) -> None:
        self.url = url
        self.namespace = namespace
        self.zygote = zygote
        self.folder = folder
        self.store = JetStreamStore(url, namespace=namespace)
        self.bridge_url = ""
        self._bridge: Child | None = None

    async def __aenter__(self) -> Ground:
        await self.store.__aenter__()
        self._bridge = self.bridge(self.folder)
        self.bridge_url = (await address(self.folder))[0]
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._bridge is not None:
            self._bridge.kill()
        await self.store.__aexit__(*error)

    def bridge(self, folder: Path, **how: Any) -> Child:
        return self.zygote.call(
            "kit.matrix_http_worker:bridge",
            url=self.url,
            namespace=self.namespace,
            folder=str(folder),
            **how,
        )


async def address(folder: Path) -> tuple[str, int]:
    """Of the bridge that says in this folder that it is ready: its address, its process."""
    await eventually((folder / "bridge").exists, WAIT_S, what="a bridge is ready")
    found = json.loads((folder / "bridge").read_text())
    return found["url"], found["pid"]


class Play:
    """One cell, played."""

    def __init__(self, ground: Ground, cell: Cell) -> None:
        self.ground = ground
        self.cell = cell
        self.store = ground.store
        self.run = RunId(f"r-{cell.id}")
        self.agent = f"a-{cell.id}"
        self.folder = ground.folder / cell.id
        self.folder.mkdir()
        self.children: list[Child] = []
        self.taken = 0
        self.first = 0
        self.thawed = False
        self.asked = False

    async def play(self) -> None:
        """Raises AssertionError with what was wrong."""
        try:
            await self._play()
        except Exception as error:
            raise AssertionError(await self._story(error)) from error
        finally:
            for child in self.children:
                await asyncio.to_thread(child.started.wait, WAIT_S)
                if not child.ended.is_set():
                    child.kill()

    async def _play(self) -> None:
        cell = self.cell
        if cell.fault == "zombie-beside":
            (self.folder / "hold").touch()
        if cell.who in ("bridge", "tool"):
            await self._begin_at_own_bridge()
        else:
            self.children = [self._worker(self.ground.bridge_url) for _ in range(2)]
            await self._until(lambda: len(self._lines("ready")) == 2, "two workers serve")
        await doors.start(self.store, self.agent, None, run_id=self.run, revision="")
        await self.store.wake(self.run, self.agent, cause=1)
        if cell.who != "none":
            await self._struck()
        while not (await self._fold()).finished:
            await self._step()
        if cell.zombie and not self.thawed:
            await self._thaw()
        await self._check()

    async def _begin_at_own_bridge(self) -> None:
        cell = self.cell
        how: dict[str, Any] = {}
        if cell.who == "bridge":
            how = {"place": cell.place, "fault": "kill" if cell.fault == "kill" else "stop"}
        if not cell.zombie:  # its call goes on, however long the next bridge takes
            how["append_budget_s"] = 30.0
        self.children.append(self.ground.bridge(self.folder, **how))
        url, _ = await address(self.folder)
        self.children.append(self._worker(url, stays=False))
        await self._until(lambda: len(self._lines("ready")) == 1, "a worker serves")
        self.first = int(self._lines("ready")[0])

    async def _struck(self) -> None:
        """Wait until somebody has met the fault, and give the others what they need."""
        cell = self.cell
        await self._until((self.folder / "taken").exists, "somebody is at the place")
        self.taken = int((self.folder / "taken").read_text().split()[0])
        (victim,) = [child for child in self.children if child.pid == self.taken]
        if cell.zombie:
            await self._until(lambda: _stopped(self.taken), "it is stopped")
        else:
            await self._until(victim.ended.is_set, "it is dead")
            assert victim.code == -signal.SIGKILL
        if cell.who == "worker":
            self.first = self.taken
        elif cell.zombie:  # another worker, at another bridge
            self.children.append(self._worker(self.ground.bridge_url))
        else:  # another bridge at the address of the dead one
            url, _ = await address(self.folder)
            (self.folder / "bridge").unlink()
            port = int(url.rpartition(":")[2])
            again = self.ground.bridge(self.folder, port=port, append_budget_s=30.0)
            self.children.append(again)

    # ---- going on ---------------------------------------------------------------------------

    async def _step(self) -> None:
        """Wait for what asks something of the test, and do it."""
        what = await eventually(self._what, WAIT_S, what="the run ends or asks for something")
        if what == "held":
            await self._thaw_beside()
        elif what == "parked":
            await self._thaw()
        elif what == "reconcile":
            await self._reconcile()

    async def _what(self) -> str:
        fold = await self._fold()
        if fold.finished:
            return "finished"
        if not self.thawed and self._lines("held"):
            return "held"
        parked = self.cell.fault == "zombie-parked" and not self.thawed
        if self.cell.lingers and fold.wait is not None and fold.wait.why == "retry":
            return "parked" if parked else ""
        if fold.status() == "indeterminate" and not self.asked:
            return "parked" if parked and not self.cell.lingers else "reconcile"
        return ""

    async def _reconcile(self) -> None:
        assert self.cell.policy == "reconcile", "a person is asked, where the policy is another"
        unknown = (await self._fold()).unknown()
        if not unknown:  # the zombie's word came first
            return
        self.asked = True
        said: dict[str, Any] = {"outcome": "done", "result": PERSON}
        if self.cell.lingers:
            said = {"outcome": "retry"}
        said |= {"step": unknown[0].name, "start": unknown[0].last.n}
        try:
            await doors.signal(self.store, self.run, "reconcile", said, by="person")
        except (StaleSignal, RunFinished):
            assert self.thawed, "nobody else could say it"

    async def _thaw_beside(self) -> None:
        """The zombie goes on while its successor works: what the successor has stays its own."""
        before = await self._fold()
        assert before.claim is not None
        await self._thaw()
        after = await self._fold()
        assert after.claim == before.claim, "the successor still holds the run"
        entries = (await self.store.load(self.run)).entries
        news = [entry.record for entry in entries if entry.record.n > before.n]
        assert all(isinstance(record, Signal) for record in news), f"beside its successor: {news}"
        assert await self._stands(before.claim.task), "the message of the successor is gone"
        (self.folder / "hold").unlink()

    async def _thaw(self) -> None:
        """Let the zombie go on, and wait until its worker has done what it would."""
        self.thawed = True
        word = str(self.first)
        played = self._lines("played").count(word)
        (self.folder / "go").touch()
        os.kill(self.taken, signal.SIGCONT)
        await self._until(lambda: self._lines("played").count(word) > played, "it has given up")

    # ---- checking ---------------------------------------------------------------------------

    async def _check(self) -> None:
        cell = self.cell

        async def no_task() -> bool:
            return not await self.store.tasks.holds(self.run, self.agent)

        await self._until(no_task, "no task of the run is left")
        entries = (await self.store.load(self.run)).entries
        check(self.run, entries)
        fold = Fold()
        by_claim: dict[int, str] = {}
        for entry in entries:
            record = entry.record
            if record.claim:
                assert fold.claim is not None, f"record {record.n} has no live claim"
                assert fold.claim.n == record.claim, f"record {record.n} is of a fenced claim"
                assert record.by == by_claim[record.claim], f"record {record.n}"
            fold.apply(entry)
            if isinstance(record, Claim):
                assert record.worker not in by_claim.values(), "a task is claimed once"
                by_claim[record.n] = record.by
        end = entries[-1].record
        assert isinstance(end, RunCompleted), f"it ended with {end}"
        assert end.message["content"] == ANSWER
        assert not fold.open, fold.open
        restarted = (await Log.resumed(self.store, self.run, by="check")).fold
        assert restarted.status() == "completed"
        if cell.who in ("none", "tool") or (cell.who == "bridge" and not cell.zombie):
            assert len(by_claim) == 1, "nobody else needed to take it"
        self._check_calls([entry.record for entry in entries])

    def _check_calls(self, records: list[Any]) -> None:
        """Starts and effects, as the journal says and as the world saw them."""
        workers = {
            f"http-dev-{nonce}": int(pid) for pid, nonce in map(str.split, self._lines("tasks"))
        }
        starts = [r for r in records if isinstance(r, StepStarted)]
        called = self._called("start")
        allowed = Counter((r.tool, workers[r.by]) for r in starts)
        for who, count in Counter(called).items():
            assert count <= allowed[who], f"{who} called beside the journal"
        done = Counter(r.step for r in records if isinstance(r, StepCompleted))
        assert len(done) == 3 and set(done.values()) == {1}, done
        book = [r for r in starts if r.tool == "book"]
        assert all(start.replay == "unsafe" for start in book)
        assert len({start.key for start in book}) == 1
        permits = [
            r.n
            for r in records
            if isinstance(r, Signal) and r.name == "reconcile" and r.payload["outcome"] == "retry"
        ]
        for again in book[1:]:
            assert again.permit in permits, f"start {again.n} has no permit"
            permits.remove(again.permit)
        (result,) = [r for r in records if isinstance(r, StepCompleted) and r.step == book[0].step]
        calls = [what for what, _ in called].count("book")
        effects = [what for what, _ in self._called("effect")].count("book")
        seen = (result.via, len(book), calls, effects)
        expected = self.cell.expected()
        assert seen == expected, f"(via, starts written, calls, effects) {seen}, not {expected}"
        if self.cell.lingers:  # no retry beside it
            lines = Ledger(self.folder / "ledger").lines()
            kinds = [kind for _, kind, args in lines if args[0] == "book"]
            assert kinds == ["start", "effect"] * calls, kinds
        if result.via == "reconcile":
            assert result.result == PERSON
        elif result.via != "interrupted":
            assert result.result == "booked"

    # ---- looking ----------------------------------------------------------------------------

    def _called(self, what: str) -> list[tuple[str, int]]:
        lines = Ledger(self.folder / "ledger").lines()
        return [(args[0], args[1]) for _, kind, args in lines if kind == what]

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    async def _until(self, condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
        await eventually(condition, WAIT_S, what=what)

    async def _fold(self) -> Fold:
        await asyncio.sleep(0.1)  # many cells poll at once
        return (await Log.read(self.store, self.run)).fold

    async def _stands(self, sequence: int) -> bool:
        connection = self.store._connection  # pyright: ignore[reportPrivateUsage]
        subject = f"$JS.API.STREAM.MSG.GET.{tasks_name(self.ground.namespace)}"
        request = msgspec.json.encode({"seq": sequence})
        answer: Any = await connection.request(subject, request, timeout_s=5.0)
        return "error" not in msgspec.json.decode(answer.data)

    def _worker(self, url: str, *, stays: bool = True) -> Child:
        cell = self.cell
        meets = cell.who in ("worker", "tool")
        return self.ground.zygote.call(
            "kit.matrix_http_worker:work",
            url=url,
            agent=self.agent,
            folder=str(self.folder),
            place=cell.place if meets else "nowhere",
            fault="bridge" if cell.who == "tool" else "kill" if cell.fault == "kill" else "stop",
            policy=cell.policy,
            commits=cell.commits,
            stays=stays,
            timeout_s=3.0 if cell.lingers else TIMEOUT_S,
        )

    async def _story(self, error: BaseException) -> str:
        """What happened, for who must find out why."""
        told = [f"cell {self.cell.id}: {type(error).__name__}: {error}", f"taken: {self.taken}"]
        try:
            for entry in (await self.store.load(self.run)).entries:
                told.append(f"  {entry.raw.decode()[:400]}")
        except Exception as problem:
            told.append(f"the journal can't be read: {problem}")
        told += [f"ledger: {line}" for line in Ledger(self.folder / "ledger").lines()]
        told += [f"{name}: {self._lines(name)}" for name in ("ready", "tasks", "played", "held")]
        for child in self.children:
            err = (child.scratch / "err").read_text("utf-8", "replace")
            told.append(f"process {child.pid}, code {child.code}:\n{err[-3000:]}")
        return "\n".join(told)


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
