"""Builders for the core tests: an honest journal record by record, a store that fails on demand.

`Log` is what honest writers would have left; `FaultyStore` is a MemoryStore whose appends lose
their acknowledgement, land late or meet somebody else's record: one fault each, told beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from journal.claims import Answer
from journal.codec import Entry, decode, seal
from journal.fold import Fold
from journal.ids import RunId
from journal.messages import JSON, Reply, ToolRequest
from journal.records import (
    HOLDER_RECORDS,
    SPAWN,
    Asked,
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    Interrupted,
    Mode,
    Park,
    Policy,
    Record,
    Release,
    RunCompleted,
    RunPurged,
    RunStarted,
    Signal,
    StepCompleted,
    StepError,
    StepProgress,
    StepStarted,
    Verdict,
    VerdictAllow,
    VerdictAsk,
    VerdictDeny,
    Waits,
)
from journal.step_state import call_step
from journal.steps import input_digest, make_call, step_key
from journal.store import AppendAnswer, Appended, Loaded, Unknown
from journal.stores.memory import MemoryStore
from journal.values import canonical, normalise

RUN = RunId("a1")
AGENT = "helpdesk"
AT = "2026-01-02T03:04:05.678Z"
NONCE = "0123456789ab"
DEADLINE = "2100-01-01T00:00:00.000Z"
"""Of a write's start: nobody may say that its call is over."""
ALLOW = VerdictAllow()


# ---- bodies -----------------------------------------------------------------------------------


def started(
    input: JSON = "VPN is down", *, run: str = RUN, agent: str = AGENT, revision: str = "1"
) -> RunStarted:
    digest = input_digest(agent, input)
    return RunStarted(run=run, agent=agent, revision=revision, input=input, digest=digest)


def claimed(worker: str = "w1", **fields: Any) -> Claim:
    return Claim(**({"worker": worker, "revision": "1", "reason": "new"} | fields))


def start_of(
    step: str,
    tool: str = "pay",
    input: JSON = None,
    *,
    unsafe: bool = True,
    permit: int = 0,
    key: str = "",
    policy: Policy = "reconcile",
    deadline: str = DEADLINE,
) -> StepStarted:
    """The start of a tool step; its digest and key are those of the call."""
    call = make_call(step, "tool", tool, input, unsafe=unsafe)
    return StepStarted(
        step=step,
        kind="tool",
        tool=tool,
        input=input,
        digest=call.digest,
        replay="unsafe" if unsafe else "safe",
        key=key or step_key(RUN, call),
        permit=permit,
        policy=policy,
        deadline=deadline if unsafe else "",
    )


def model_start(n: int = 1) -> StepStarted:
    call = make_call(f"llm/{n}", "model", "", None, unsafe=False)
    key = step_key(RUN, call)
    return StepStarted(step=call.step, kind="model", digest=call.digest, replay="safe", key=key)


def result_of(step: str, result: JSON = "ok", **fields: Any) -> StepCompleted:
    return StepCompleted(step=step, result=result, **fields)


def error_of(step: str, type: str = "denied", message: str = "no", **fields: Any) -> StepCompleted:
    return StepCompleted(step=step, error=StepError(type=type, message=message), **fields)


def request(tool: str, arguments: Mapping[str, JSON] | str | None = None, id: str = "") -> Any:
    """A tool call as a model makes it; text as `arguments` is taken as it is."""
    text = arguments if isinstance(arguments, str) else canonical(dict(arguments or {})).decode()
    return ToolRequest(id=id or f"id-{tool}-{text}", name=tool, arguments=text)


def asks(*requests: ToolRequest, text: str = "") -> Reply:
    return Reply(text=text, calls=requests, finish="tool_calls")


def reply_of(n: int, reply: Reply, *verdicts: Verdict) -> StepCompleted:
    result = normalise(msgspec.to_builtins(reply), "the reply")
    return StepCompleted(step=f"llm/{n}", result=result, verdicts=verdicts)


def asking(n: int, index: int, tool: str, digest: str = "0123456789abcdef") -> VerdictAsk:
    """The verdict "ask a person" with a marker of that place."""
    return VerdictAsk(marker=f"{RUN}/{call_step(n, index, tool)}@1.{digest}", text="Pay?")


def denying(type: str = "denied", reason: str = "not here") -> VerdictDeny:
    return VerdictDeny(type=type, reason=reason)


def approved(marker: str, request_id: str = "r-approve") -> Signal:
    return Signal(name="approve", request_id=request_id, payload={"marker": marker})


def rejected(marker: str, reason: str = "no", request_id: str = "r-reject") -> Signal:
    payload = {"marker": marker, "reason": reason}
    return Signal(name="reject", request_id=request_id, payload=payload)


def done(step: str, start: int, result: JSON = "D", request_id: str = "r-done") -> Signal:
    payload = {"step": step, "outcome": "done", "result": result, "start": start}
    return Signal(name="reconcile", request_id=request_id, payload=payload)


def retry(step: str, start: int, request_id: str = "r-retry") -> Signal:
    payload = {"step": step, "outcome": "retry", "start": start}
    return Signal(name="reconcile", request_id=request_id, payload=payload)


def answered(text: str = "Done.") -> RunCompleted:
    return RunCompleted(message={"role": "assistant", "content": text})


def failed(reason: str = "iterations", **fields: Any) -> Commit:
    return Commit(action="fail", reason=reason, **fields)


def cancelled_end(reason: str = "asked to") -> Commit:
    return Commit(action="cancel", reason=reason)


def goes_on(state: JSON = None, **waits: Any) -> Commit:
    """The end of an iteration that is not the last one; with what it waits for."""
    return Commit(action="continue", state=state, waits=Waits(**waits))


def parked(
    why: Literal["approval", "reconcile", "retry", "pause"] = "approval", **fields: Any
) -> Park:
    return Park(why=why, **fields)


def asked_for(step: str, tool: str = "pay", digest: str = "0123456789abcdef") -> Asked:
    """A turn handler's call that waits for a decision."""
    return Asked(marker=f"{RUN}/{step}@1.{digest}", step=step, tool=tool, input=None, text="Pay?")


def progress_of(step: str, output: JSON = "half") -> StepProgress:
    return StepProgress(step=step, output=output)


def interrupted_of(step: str, partial: JSON = None) -> StepCompleted:
    return StepCompleted(step=step, interrupted=Interrupted(partial=partial), via="interrupted")


def spawned(step: str, child: str) -> StepStarted:
    """The start of a step that starts a child run."""
    return start_of(step, SPAWN, {"run": child}, unsafe=False)


def cancel(reason: str = "enough", request_id: str = "r-cancel") -> Signal:
    return Signal(name="cancel", request_id=request_id, payload={"reason": reason})


def resume(request_id: str = "r-resume") -> Signal:
    return Signal(name="resume", request_id=request_id, payload={})


def late(step: str, start: int, result: JSON = "L", request_id: str = "r-late") -> Signal:
    payload = {"step": step, "start": start, "result": result}
    return Signal(name="late", request_id=request_id, payload=payload)


def child_ended(child: str, outcome: JSON = None) -> Signal:
    payload = {"run": child, "outcome": outcome or {"status": "completed"}}
    return Signal(name="child", request_id=child, payload=payload)


def submitted(request_id: str = "i1", mode: Mode = "steer", content: JSON = "hurry") -> Input:
    return Input(request_id=request_id, mode=mode, content=content)


def placed(request_id: str = "i1", position: str = "llm/1") -> InputPlaced:
    return InputPlaced(request_id=request_id, position=position)


def withdrawn(request_id: str = "i1") -> InputWithdrawn:
    return InputWithdrawn(request_id=request_id)


def released() -> Release:
    return Release(reason="stopped")


# ---- a journal --------------------------------------------------------------------------------


class Log:
    """An honest journal: each record is sealed at the tail, under the live claim, in the iteration
    and attempt that the run is in, and folded."""

    def __init__(self, *bodies: Record) -> None:
        self.fold = Fold()
        self.at = AT
        self.entries: list[Entry] = []
        for body in bodies:
            self.add(body)

    def add(self, body: Record, *, nonce: str = NONCE, by: str = "test") -> int:
        """Append the body; its ordinal."""
        entry = self.sealed(self.here(body), nonce=nonce, by=by)
        self.fold.apply(entry)
        self.entries.append(entry)
        return entry.record.n

    def here(self, body: Record) -> Record:
        """The body as a holder of this iteration and attempt writes it."""
        replace = msgspec.structs.replace
        match body:
            case Park():
                return replace(body, iteration=self.fold.iteration, attempt=self.fold.attempt)
            case Commit() | RunCompleted() | InputPlaced():
                return replace(body, iteration=self.fold.iteration)
            case StepStarted():
                return replace(body, attempt=self.fold.attempt)
            case _:
                return body

    def sealed(
        self, body: Record, *, nonce: str = NONCE, by: str = "test", claim: int | None = None
    ) -> Entry:
        """The body as the next record, not appended."""
        n = self.fold.n + 1
        live = self.fold.claim.n if self.fold.claim else 0
        if claim is None:
            claim = live if isinstance(body, HOLDER_RECORDS) else 0
        record, raw = seal(
            body, n=n, id=f"{nonce}-{n}", at=self.at, by=by, prev=self.fold.head, claim=claim
        )
        return Entry(record, raw, position=n)

    def raw(self, text: bytes) -> Entry:
        """Bytes that some other version wrote, as an entry."""
        return Entry(decode(text), text, position=self.fold.n + 1)

    async def store(self, store: MemoryStore | None = None) -> MemoryStore:
        """A store that holds this journal as run a1."""
        store = store or MemoryStore()
        for position, entry in enumerate(self.entries):
            await store.append(RUN, entry, expected=position)
        return store


async def types_of(store: MemoryStore, run: str = RUN) -> list[str]:
    """The types of the run's records, in order."""
    return [entry.type for entry in (await store.load(RunId(run))).entries]


async def folded(store: MemoryStore, run: str = RUN) -> Fold:
    """The fold of what the store holds; raises Damage where that is not an honest journal."""
    fold = Fold()
    for entry in (await MemoryStore.load(store, RunId(run))).entries:
        fold.apply(entry)
    return fold


async def write_as_other(store: MemoryStore, body: Record, run: str = RUN) -> None:
    """Append the body at the store's tail as somebody else, past every fault: a holder's record
    under the live claim, a signal as a door writes it."""
    log = Log()
    for entry in (await MemoryStore.load(store, RunId(run))).entries:
        log.fold.apply(entry)
    holder = log.fold.claim if isinstance(body, HOLDER_RECORDS) else None
    by = holder.by if holder is not None else "other"
    entry = log.sealed(log.here(body), nonce="fedcba987654", by=by)
    log.fold.apply(entry)
    answer = await MemoryStore.append(store, RunId(run), entry, expected=log.fold.n - 1)
    assert isinstance(answer, Appended)


# ---- stores that fail -------------------------------------------------------------------------


class Killed(BaseException):
    """The process dies here: nothing of it runs on, not even an `except Exception`."""


Fault: TypeAlias = (
    Literal[
        "ack lost",  # stored, the acknowledgement never came
        "lost",  # never stored, no acknowledgement
        "lands in the read-back",  # stored as the writer begins to read back
        "lands before the next append",  # stored between the read-back and the next append
        "killed before",  # the process dies before the store has it
        "killed after",  # the process dies after the store has it
    ]
    | Callable[[], Awaitable[None]]  # happens first; then the append goes on as usual
)


class FaultyStore(MemoryStore):
    """A MemoryStore with `faults[k]` at its k-th append (from 1), and with `shared` to choose.

    `stale_reads` is how many of the next loads see nothing new. `answers` says what asking a worker
    answers, `otherwise` what asking any other one does, `asked` who was asked.
    """

    def __init__(self, faults: Mapping[int, Fault] | None = None, *, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.faults = dict(faults or {})
        self.every: Fault | None = None
        self.appends = 0
        self.stale_reads = 0
        self.answers: dict[str, Answer] = {}
        self.otherwise: Answer = "nobody"
        self.asked: list[str] = []
        self._late: tuple[str, RunId, Entry, int] | None = None

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        await self._land("lands before the next append")
        self.appends += 1
        fault = self.faults.pop(self.appends, self.every)
        if callable(fault):
            await fault()
            fault = None
        match fault:
            case None:
                return await super().append(run_id, entry, expected=expected)
            case "killed before":
                raise Killed
            case "ack lost" | "killed after":
                answer = await super().append(run_id, entry, expected=expected)
                if fault == "killed after":
                    raise Killed
                return Unknown(f"no acknowledgement, though {answer}")
            case "lost":
                return Unknown("no acknowledgement")
            case late:
                self._late = (late, run_id, entry, expected)
                return Unknown("no acknowledgement yet")

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        if self.stale_reads:
            self.stale_reads -= 1
            return Loaded((), after)
        await self._land("lands in the read-back")
        return await super().load(run_id, after=after)

    async def ask(self, worker: str, run_id: RunId, claim: int) -> Answer:
        self.asked.append(worker)
        return self.answers.get(worker, self.otherwise)

    async def _land(self, when: str) -> None:
        if self._late is not None and self._late[0] == when:
            _, run_id, entry, expected = self._late
            self._late = None
            await super().append(run_id, entry, expected=expected)


class BridgedStore(MemoryStore):
    """A MemoryStore with what pages of a bridge ask besides, as JetStreamStore answers it."""

    async def has_tombstone(self, run_id: RunId) -> bool:
        records = (await self.load(run_id)).records
        return bool(records) and isinstance(records[-1], RunPurged)


class PlainView(MemoryStore):
    """Another process's way to the same journals: none of the faults are its own."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__()
        self.shared = store.shared
        self._journals = store._journals
        self._stamps = store._stamps


class VirtualTime:
    """Stands for `asyncio` and `time` in a module under test: waiting only moves a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []
        self.on_sleep: list[Callable[[], Awaitable[None]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept.append(seconds)
        for hook in self.on_sleep:
            await hook()
