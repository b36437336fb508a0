"""The crash matrix: what is done in a cell, and checked after it (R76).

Two real worker processes on one real server work one run: safe tool, unsafe tool, safe tool,
answer. Whoever first reaches the cell's place meets its fault there; the other one goes on.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
from cases.zygote import Child, Zygote
from kit.audited import check
from kit.ledger import Ledger
from kit.matrix_cells import ANSWER, BOOK, PERSON, STEPS, Cell
from kit.waiting import eventually

from journal import doors
from journal.errors import RunFinished, StaleSignal
from journal.fold import Fold
from journal.ids import RunId
from journal.log import Log
from journal.records import (
    Claim,
    Park,
    Record,
    Release,
    RunCompleted,
    Signal,
    StepCompleted,
    StepStarted,
)
from journal.step_state import StepState
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_streams import tasks_name
from journal.stores.nats_waiting import Incoming
from journal.sweep import FRESH_S

WAIT_S = 30.0


class Taken(NamedTuple):
    """Who met the fault, and which delivery of the task it followed."""

    pid: int
    worker: str
    delivery: str


class Ack(NamedTuple):
    """What somebody told the server about a delivery (`<sequence>/<delivery>`) of a task."""

    stream: str
    delivery: str
    word: bytes


_ACK = re.compile(r"\$JS\.ACK\.(?:[^.]+\.[^.]+\.)?([^.]+)\.[^.]+\.(\d+)\.(\d+)\.\d+\.\d+\.\d+")


class Ground:
    """What many cells share: the server, the processes' zygote, one namespace and connection."""

    def __init__(self, url: str, namespace: str, zygote: Zygote, folder: Path) -> None:
        self.url = url
        self.namespace = namespace
        self.zygote = zygote
        self.folder = folder
        self.acks: list[Ack] = []
        self.store = JetStreamStore(url, namespace=namespace)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Ground:
        await self._stack.enter_async_context(self.store)
        connection = self.store._connection  # pyright: ignore[reportPrivateUsage]
        subject = f"$JS.ACK.{tasks_name(self.namespace)}.>"
        await self._stack.enter_async_context(connection.listening(subject, self._on_ack))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def _on_ack(self, message: Incoming) -> None:
        if (found := _ACK.fullmatch(message.subject)) is not None:
            self.acks.append(Ack(found[1], f"{found[3]}/{found[2]}", message.data[:4]))


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
        self.signallers: list[Child] = []
        self.taken: Taken | None = None
        self.thawed = False
        self.told: list[str] = []
        self._log: Log | None = None
        self._hinted = 0.0
        self._read_at = 0.0

    async def play(self) -> None:
        """Raises AssertionError with what was wrong."""
        try:
            async with self.store.appended(self.run, self._hint):
                await self._play()
        except Exception as error:
            raise AssertionError(await self._story(error)) from error
        finally:
            for child in self.children + self.signallers:
                await asyncio.to_thread(child.started.wait, WAIT_S)
                if not child.ended.is_set():
                    child.kill()

    async def _play(self) -> None:
        if self.cell.fault == "zombie-beside":
            self._touch("hold")
        self.children = [self._worker() for _ in range(2)]
        await eventually(lambda: len(self._lines("ready")) == 2, WAIT_S, what="two workers serve")
        await doors.start(self.store, self.agent, self.cell.id, run_id=self.run, revision="")
        await self.store.wake(self.run, self.agent, cause=1)
        if self.cell.seam not in ("unwoken", "none"):
            await self._struck(self.children)
            if self.cell.zombie and self.cell.rests:
                await eventually(self._followed, WAIT_S, what="its message is followed by another")
        while not (await self._log_now()).fold.finished:
            await self._step()
        if self.taken is not None and self.cell.zombie and not self.thawed:
            await self._thaw()
        await self._check()

    def _followed(self) -> bool:
        """Whether somebody else has followed a later delivery of the victim's message."""
        assert self.taken is not None
        sequence = self.taken.delivery.partition("/")[0]
        followed = (line.split() for line in self._lines("looked"))
        return any(
            int(pid) != self.taken.pid and d.startswith(f"{sequence}/") for pid, d in followed
        )

    async def _struck(self, among: list[Child]) -> None:
        """Wait until one of these processes has met the fault."""
        await eventually((self.folder / "taken").exists, WAIT_S, what="somebody is at the place")
        pid, worker, delivery = (self.folder / "taken").read_text().split()
        self.taken = Taken(int(pid), worker, delivery)
        await eventually(lambda: all(child.pid for child in among), what="their ids are known")
        (victim,) = (child for child in among if child.pid == self.taken.pid)
        if not self.cell.zombie:
            await eventually(victim.ended.is_set, what="it is dead")
            assert victim.code == -signal.SIGKILL
        else:
            await eventually(lambda: _stopped(victim.pid), what="it is stopped")

    # ---- going on ---------------------------------------------------------------------------

    async def _step(self) -> None:
        """Wait for what asks something of the test, and do it."""
        what = await eventually(self._what, WAIT_S, what="the run ends or asks for something")
        assert self._log is not None
        fold = self._log.fold  # as `_what` saw it
        match what:
            case "finished":
                return
            case "held":
                await self._thaw_beside()
            case "parked":
                await self._thaw()
            case "approve":
                (ask,) = fold.asked()
                await self._tell("approve", {"marker": ask.marker})
            case _:
                assert what == "reconcile"
                assert self.cell.asks, "a person is asked, where the policy is another"
                (unknown,) = fold.unknown()
                said: dict[str, Any] = {"outcome": "done", "result": PERSON}
                if self.cell.seam == "lingers":
                    said = {"outcome": "retry"}
                said |= {"step": unknown.name, "start": unknown.last.n}
                await self._tell("reconcile", said)

    async def _what(self) -> str:
        fold = (await self._log_now()).fold
        if fold.finished:
            return "finished"
        if not self.thawed and self._lines("held"):
            return "held"
        why = fold.wait.why if fold.wait is not None else ""
        parked = self.cell.fault == "zombie-parked" and self.taken is not None and not self.thawed
        lingers = self.cell.seam == "lingers"
        if parked and why in (("retry",) if lingers else ("reconcile", "approval", "retry")):
            return "parked"
        status = fold.status()
        if status == "awaiting_approval" and "approve" not in self.told:
            return "approve"
        if why == "reconcile" and status == "indeterminate" and "reconcile" not in self.told:
            return "reconcile"
        return ""

    async def _tell(self, name: str, payload: dict[str, Any]) -> None:
        self.told.append(name)
        if self.cell.seam == "unwoken":
            await self._tell_and_fail(name, payload)
            return
        try:
            await doors.signal(self.store, self.run, name, payload, by="person")
        except (StaleSignal, RunFinished):
            if not self.thawed:  # else the zombie's own word may have come first
                raise

    async def _tell_and_fail(self, name: str, payload: dict[str, Any]) -> None:
        """A signaller is lost between its record and its task."""
        cell, ground = self.cell, self.ground
        await self._no_task()
        how = {"run_id": self.run, "name": name, "payload": payload, "request_id": "q1"}
        child = ground.zygote.call(
            "kit.matrix_worker:tell",
            url=ground.url,
            namespace=ground.namespace,
            folder=str(self.folder),
            fault="kill" if cell.fault.startswith("kill") else "stop",
            **how,
        )
        self.signallers.append(child)
        await self._struck(self.signallers)
        log = await self._read()
        assert log.fold.runnable(), "the record ended the wait"
        assert not await self.store.tasks.holds(self.run, self.agent), "nobody was woken"
        if cell.fault == "kill-repeat":
            again = await doors.signal(self.store, self.run, name, payload, request_id="q1")
            assert again.result == "repeated"

    async def _thaw_beside(self) -> None:
        """The zombie goes on while its successor works: the successor's message stays its own."""
        log = await self._read()
        assert self.taken is not None
        claim = log.fold.claim
        assert claim is not None
        assert claim.worker != self.taken.worker
        n = log.fold.n
        await self._thaw()
        log = await self._read()
        assert log.fold.claim == claim, "the successor still holds the run"
        entries = (await self.store.load(self.run)).entries
        after = [entry.record for entry in entries if entry.record.n > n]
        # the one read that the successor is in: its start may have been on its way (R25)
        late = [record for record in after if not _starts_read(record, claim.worker)]
        assert not late and len(after) <= 1, f"the zombie wrote beside its successor: {after}"
        assert await self._stands(claim.task), "the message of the successor is gone"
        (self.folder / "hold").unlink()

    async def _thaw(self) -> None:
        """Let the zombie go on, and wait until it has done what it would."""
        assert self.taken is not None
        self.thawed = True
        spent, acks = self.taken.delivery, len(self.ground.acks)
        self._touch("go")
        os.kill(self.taken.pid, signal.SIGCONT)
        if self.cell.seam == "unwoken":
            (signaller,) = self.signallers
            await eventually(signaller.ended.is_set, what="the signaller ends")
            assert signaller.code == 0
            return
        if self.cell.seam == "lingers":
            await self._linger()
        word = f"{self.taken.pid} {spent}"
        await eventually(
            lambda: word in self._lines("looked"), WAIT_S, what="the zombie has given up"
        )
        sent = [ack for ack in self.ground.acks[acks:] if ack.delivery == spent]
        if self.cell.seam != "unacked":  # that one was past its last check
            assert not sent, f"the zombie touched its message: {sent}"

    async def _linger(self) -> None:
        """The zombie knows that it lost the run, and its write still runs: no other start."""
        assert self.taken is not None
        n = (await self._read()).fold.n

        async def again() -> bool:
            """Both workers, the zombie too, have taken the run up past the deadline, and left
            it: the zombie says that it still calls."""
            entries = (await self.store.load(self.run)).entries
            news = [entry.record for entry in entries if entry.record.n > n]
            parked = {record.by for record in news if isinstance(record, Park)}
            return len(parked) == 2 or len(self._starts()[BOOK]) > 1

        await eventually(again, WAIT_S, what="both workers look again")
        self._touch("land")

    # ---- checking ---------------------------------------------------------------------------

    async def _check(self) -> None:
        cell = self.cell
        await self._no_task()
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
                by_claim[record.n] = record.by
        end = entries[-1].record
        assert isinstance(end, RunCompleted), f"it ended with {end}"
        assert end.message["content"] == ANSWER
        assert fold.status() == "completed"
        assert not fold.open, fold.open
        await self._check_restart(fold)
        await self._check_heads()
        self._check_book([entry.record for entry in entries])
        # a sweep that meets a wait as it ends, long after its record, may be faster than the timer
        sweeps = cell.seam == "unwoken" and cell.fault in ("kill-sweep", "zombie")
        if not sweeps and cell.deadline_s <= FRESH_S:
            assert not self._lines("swept"), "a wake-up was lost, only the sweep brought it"
        if cell.seam == "none":
            assert len(by_claim) == 1 + cell.approval
        elif cell.taken_over:
            assert self.taken is not None
            assert any(by != self.taken.worker for by in by_claim.values()), "it was taken over"

    async def _check_restart(self, fold: Fold) -> None:
        """What a holder reads, from the last commit on, is the state that all records make."""
        restarted = (await Log.resumed(self.store, self.run, by="check")).fold
        commit = fold.committed
        assert restarted.committed == commit
        assert bool(commit) == (self.cell.seam == "committed" and self.cell.at in STEPS)
        full, other = _deciding(fold, commit), _deciding(restarted, commit)
        assert full == other

    async def _check_heads(self) -> None:
        async for run, status in self.store.heads():
            if run == self.run:
                assert status == "completed"
                return
        raise AssertionError("the run is not listed")

    def _check_book(self, records: list[Any]) -> None:
        """Starts and effects, as the journal says and as the world saw them."""
        starts, effects = self._starts(), self._effects()
        lost = _lost(records)
        for step in STEPS.values():
            written = [r for r in records if isinstance(r, StepStarted) and r.step == step]
            allowed = Counter(_pid(record.by) for record in written)
            if step != BOOK:  # of a read the start was on its way when its holder was lost (R25)
                allowed += lost
            for pid, count in Counter(starts[step]).items():
                assert count <= allowed[pid], f"{step}: {pid} called it beside the journal"
            assert len(effects[step]) <= len(starts[step])
            done = [r for r in records if isinstance(r, StepCompleted) and r.step == step]
            assert len(done) == 1, f"{step} has {len(done)} results"
        written = [r for r in records if isinstance(r, StepStarted) and r.step == BOOK]
        assert all(start.replay == "unsafe" for start in written)
        permits = {
            r.n
            for r in records
            if isinstance(r, Signal) and r.name == "reconcile" and r.payload["outcome"] == "retry"
        }
        for again in written[1:]:
            assert again.permit in permits, f"start {again.n} has no permit"
            permits.remove(again.permit)
            if self.cell.fault == "kill":  # nobody can say that the call of the dead has ended
                assert again.at >= written[0].deadline, f"start {again.n} did not wait"
        late = any(isinstance(r, Signal) and r.name == "late" for r in records)
        (done,) = (r for r in records if isinstance(r, StepCompleted) and r.step == BOOK)
        self._check_outcome(done, late, len(written), len(starts[BOOK]), len(effects[BOOK]))
        self._check_apart()

    def _check_outcome(
        self, done: StepCompleted, late: bool, written: int, starts: int, effects: int
    ) -> None:
        cell = self.cell
        called = cell.seam != "intent"
        happened = cell.seam in ("in-after", "unrecorded", "lingers") or (
            cell.seam == "in-before" and cell.zombie
        )
        seen = (done.via, written, starts, effects)
        if late and (cell.asks or cell.policy == "probe"):  # the zombie's word came first
            expected = ("late", 1, 1, 1)
        elif cell.person:
            expected = ("reconcile", 1, int(called), int(cell.unknown and happened))
        elif cell.seam == "lingers" and cell.policy == "reconcile":
            expected = ("run", 2, 2, 2)  # a person said `retry`; the earlier call took effect later
        elif not cell.unknown and cell.seam != "lingers":
            expected = ("run", 1, 1, 1)
        elif cell.policy == "interrupt":
            expected = ("interrupted", 1, int(called), int(happened))
        elif happened:
            expected = ("probe", 1, 1, 1)
        else:
            expected = ("run", 2, 1 + int(called), 1)
        assert seen == expected, f"(via, starts written, starts, effects) {seen}, not {expected}"
        if done.via == "reconcile":
            assert done.result == PERSON
        elif done.via != "interrupted":
            assert done.result == "booked"

    def _check_apart(self) -> None:
        """No permitted retry began while an earlier call of the unsafe tool still ran."""
        lines = [(kind, args[1]) for _, kind, args in self._ledger() if args[0] == BOOK]
        if self.cell.fault == "kill" or [kind for kind, _ in lines].count("start") < 2:
            return
        kinds = [kind for kind, _ in lines]
        if self.cell.seam in ("in-before", "lingers"):
            assert kinds == ["start", "effect", "start", "effect"], f"a retry beside: {lines}"

    # ---- looking ----------------------------------------------------------------------------

    def _ledger(self) -> list[tuple[str, str, Any]]:
        return Ledger(self.folder / "ledger").lines()

    def _starts(self) -> dict[str, list[int]]:
        return self._called("start")

    def _effects(self) -> dict[str, list[int]]:
        return self._called("effect")

    def _called(self, what: str) -> dict[str, list[int]]:
        """The processes in which it happened, by step."""
        found: dict[str, list[int]] = {step: [] for step in STEPS.values()}
        for _, kind, args in self._ledger():
            if kind == what:
                found[args[0]].append(args[1])
        return found

    def _lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def _touch(self, name: str) -> None:
        (self.folder / name).touch()

    def _hint(self, _: str | None) -> None:
        self._hinted = asyncio.get_running_loop().time()

    async def _log_now(self) -> Log:
        """The run as of not long ago: read again where something was heard, or after a while."""
        now = asyncio.get_running_loop().time()
        if now - self._hinted > 0.1 and now - self._read_at < 0.5 and self._log is not None:
            return self._log
        return await self._read()

    async def _read(self) -> Log:
        self._read_at = asyncio.get_running_loop().time()
        if self._log is None:
            self._log = await Log.read(self.store, self.run)
        else:
            await self._log.refresh()
        return self._log

    async def _no_task(self) -> None:
        async def none() -> bool:
            return not await self.store.tasks.holds(self.run, self.agent)

        await eventually(none, WAIT_S, what="no task of the run is left")

    async def _stands(self, sequence: int) -> bool:
        connection = self.store._connection  # pyright: ignore[reportPrivateUsage]
        stream = tasks_name(self.ground.namespace)
        request = msgspec.json.encode({"seq": sequence})
        answer: Any = await connection.request(
            f"$JS.API.STREAM.MSG.GET.{stream}", request, timeout_s=5.0
        )
        return "error" not in msgspec.json.decode(answer.data)

    def _worker(self) -> Child:
        cell, ground = self.cell, self.ground
        return ground.zygote.call(
            "kit.matrix_worker:work",
            url=ground.url,
            namespace=ground.namespace,
            agent=self.agent,
            folder=str(self.folder),
            place=cell.place,
            fault="kill" if cell.fault == "kill" else "stop",
            policy=cell.policy,
            trigger=cell.trigger,
            approval=cell.approval,
            commit_each=cell.seam == "committed" and cell.at in STEPS,
            lingers=cell.seam == "lingers",
            backoff_s=2.0 if cell.seam == "parked" else 0.1,
            timeout_s=cell.deadline_s / 2 or 20.0,
            append_budget_s=cell.deadline_s / 2 or 30.0,
        )

    async def _story(self, error: BaseException) -> str:
        """What happened, for who must find out why."""
        told = [f"cell {self.cell.id}: {type(error).__name__}: {error}", f"taken: {self.taken}"]
        try:
            for entry in (await self.store.load(self.run)).entries:
                told.append(f"  {entry.raw.decode()[:400]}")
        except Exception as problem:
            told.append(f"the journal can't be read: {problem}")
        told += [f"ledger: {line}" for line in self._ledger()]
        for name in ("looked", "swept", "held"):
            told.append(f"{name}: {self._lines(name)}")
        for child in self.children + self.signallers:
            err = (child.scratch / "err").read_text("utf-8", "replace")
            told.append(f"process {child.pid}, code {child.code}:\n{err[-3000:]}")
        return "\n".join(told)


def _pid(worker: str) -> int:
    """Of a worker's id: <host>-<pid>-<8 hex>."""
    return int(worker.rsplit("-", 2)[1])


def _starts_read(record: Record, worker: str) -> bool:
    return isinstance(record, StepStarted) and record.replay == "safe" and record.by == worker


def _lost(records: list[Any]) -> Counter[int]:
    """How many claims of each process another claim ended."""
    live, found = None, Counter[int]()
    for record in records:
        match record:
            case Claim():
                found.update([_pid(live.worker)] if live is not None else [])
                live = record
            case Release() | Park():
                live = None
            case _:
                pass
    return found


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# What of a fold decides anything after record `commit`; see core/test_summary.py for the reasons.


def _plain(value: Any) -> Any:
    if isinstance(value, StepState):
        return {name: _plain(getattr(value, name)) for name in StepState.__slots__}
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return [(key, _plain(item)) for key, item in cast("dict[Any, Any]", value).items()]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in cast("list[Any]", value)]
    if type(value).__name__ == "ModelReply":
        return _plain(value.completed)
    return value


def _deciding(fold: Fold, commit: int) -> dict[str, Any]:
    left_out = ("_counters", "claims", "claim", "resumed", "inputs")
    found = {name: _plain(getattr(fold, name)) for name in Fold.__slots__ if name not in left_out}
    found["claims"] = [n for n in fold.claims if n > commit]
    found["claim"] = fold.claim.n if fold.claim else 0
    return found
