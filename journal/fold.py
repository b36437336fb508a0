"""Core: a run's state as a fold over its records. Nothing else is stored that could disagree.

`Fold.apply` takes the entries in order and is stricter than any writer (order.py): an entry that
does not chain, comes from a fenced claim, repeats an id or breaks the order of a step is Damage.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET

from . import attempts, order, waits
from .codec import Entry, record_hash
from .heard import forget_before, hear, newer_text
from .messages import JSON
from .records import (
    SPAWN,
    ZERO_HASH,
    Asked,
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputStatus,
    InputWithdrawn,
    Known,
    NewerRecord,
    Park,
    Record,
    Release,
    RunCompleted,
    RunPurged,
    RunStarted,
    Signal,
    Status,
    StepCompleted,
    StepProgress,
    StepStarted,
    Submitted,
    VerdictAsk,
)
from .step_state import ModelReply, StepState, model_reply
from .values import call_digest
from .waits import Wait, wait_of

End: TypeAlias = RunCompleted | Commit


class Fold:
    """The state of one run. Mutable, one writer; `copy` is for what-if and for the explorer.

    Steps, replies and asks are those of the iteration; what is older stands in the checkpoint
    `state`, or in what Summary lists. `honoured`: unsafe steps of earlier attempts, by tool and
    digest. `offered`: step and digest of a handler's calls that a person is asked about, by marker.
    `revision`: what the run is bound to, empty until it is claimed. `restarts`: holders in a row
    that were lost without moving the run on (R52). `mismatched`: revisions whose code is not the
    one that recorded this iteration (R43).
    """

    __slots__ = (
        "_counters",
        "asks",
        "attempt",
        "cancel",
        "children",
        "claim",
        "claims",
        "committed",
        "decisions",
        "end",
        "failures",
        "head",
        "head_at",
        "honoured",
        "inputs",
        "interrupted",
        "iteration",
        "keys",
        "last_placed",
        "mismatched",
        "model_calls",
        "n",
        "newer",
        "offered",
        "open",
        "purged",
        "reply",
        "requests",
        "restarts",
        "resumed",
        "revision",
        "started",
        "state",
        "steps",
        "wait",
    )

    def __init__(self) -> None:
        self.n = 0
        self.head = ZERO_HASH
        self.head_at = ""
        self.started: RunStarted | None = None
        self.revision = ""
        self.claim: Claim | None = None
        self.claims: dict[int, Claim] = {}
        self.iteration = 0
        self.attempt = 1
        self.failures = 0
        self.restarts = 0
        self.state: JSON = None
        self.committed = 0
        self.steps: dict[str, StepState] = {}
        self.open: dict[str, StepState] = {}
        self.offered: dict[str, tuple[str, str]] = {}
        self.honoured: dict[tuple[str, str], list[StepState]] = {}
        self.keys: dict[tuple[str, str], tuple[str, ...]] = {}
        self.interrupted: set[str] = set()
        self.reply: ModelReply | None = None
        self.asks: tuple[Asked, ...] = ()
        self.decisions: dict[str, Known] = {}
        self.requests: dict[str, Known] = {}
        self.inputs: dict[str, Submitted] = {}
        self.last_placed: tuple[str, ...] = ()
        self.children: dict[str, JSON] = {}
        self.wait: Wait | None = None
        self.mismatched: set[str] = set()
        self.cancel: Known | None = None
        self.resumed = 0
        self.end: End | None = None
        self.purged: RunPurged | None = None
        self.newer: str | None = None
        self.model_calls = 0
        self._counters: dict[str, int] = {}

    # ---- reading ----------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.end is not None or self.purged is not None

    @property
    def can_reopen(self) -> bool:
        """Whether `resume` gives the failed run another try (R52)."""
        end = self.end if self.purged is None else None
        return isinstance(end, Commit) and end.action == "fail" and end.retriable

    def unknown(self) -> list[StepState]:
        """Writes whose outcome nobody knows, oldest first."""
        return sorted((s for s in self.open.values() if s.unknown), key=lambda step: step.last.n)

    def find(self, name: str, start: int) -> StepState | None:
        """The step with this start, of this attempt or an honoured one of an earlier."""
        earlier = [step for steps in self.honoured.values() for step in steps]
        for step in [*(s for s in [self.steps.get(name)] if s is not None), *earlier]:
            if step.name == name and any(start == known.n for known in step.starts):
                return step
        return None

    def pending(self) -> list[tuple[int, VerdictAsk]]:
        """Calls of the last reply that wait for a decision: their index and verdict."""
        if self.reply is None:
            return []
        return [
            (index, verdict)
            for index, verdict in enumerate(self.reply.completed.verdicts)
            if isinstance(verdict, VerdictAsk)
            and verdict.marker not in self.decisions
            and self.reply.steps[index] not in self.steps
        ]

    def asked(self) -> list[Asked]:
        """All calls that wait for a decision, of a reply or of a turn handler."""
        return waits.asked(self)

    def queued(self, *modes: str) -> list[Submitted]:
        """Inputs that are queued, of these modes (all where none is named), oldest first."""
        found = [known for known in self.inputs.values() if known.status == "queued"]
        wanted = [known for known in found if not modes or known.mode in modes]
        return sorted(wanted, key=lambda known: known.n)

    def placed_at(self, position: str) -> list[Submitted]:
        """Inputs that stand at this position, in the order of their placing. None: those that an
        earlier attempt was told."""
        return [
            known
            for known in self.inputs.values()
            if known.placed_at == position and known.status in ("placed", "done")
        ]

    def runnable(self, now: str = "") -> bool:
        """Whether a holder would have something to do (waits.py)."""
        return waits.runnable(self, now)

    def done(self, step: str) -> bool:
        state = self.steps.get(step)
        return state is not None and state.completed is not None

    def status(self, *, held: bool = False, now: str = "") -> Status:
        """The run's status word (R6). `held`: a lock or answer says that somebody runs it now."""
        return waits.status(self, held=held, now=now)

    def repeats(self, record_id: str) -> bool:
        """Whether a record with this id, or a later one of its writer, was folded."""
        nonce, _, counter = record_id.partition("-")
        return int(counter) <= self._counters.get(nonce, -1)

    # ---- folding ----------------------------------------------------------------------------

    def copy(self) -> Fold:
        """An independent copy; the records in it are shared, being frozen."""
        other = Fold()
        for name in Fold.__slots__:
            value: Any = getattr(self, name)
            if isinstance(value, dict | set):
                value = value.copy()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
            setattr(other, name, value)
        other.steps = {name: step.copy() for name, step in self.steps.items()}
        other.open = {name: other.steps[name] for name in self.open}
        other.honoured = attempts.copied(self, other)
        return other

    def apply(self, entry: Entry) -> None:
        """Take the next entry; raises Damage, and is then unchanged."""
        self.check(entry.record)
        self.take(entry)

    def check(self, record: Record) -> None:
        """Whether the record may stand next; raises Damage."""
        order.check(self, record)

    def take(self, entry: Entry) -> None:
        """Take an entry that passed `check` at this very state."""
        record = entry.record
        assert self.n in (0, record.n - 1)
        if self.newer is None:
            self._take(record)
        self.mark(entry)

    def mark(self, entry: Entry) -> None:
        """Note that this entry is the last one."""
        nonce, _, counter = entry.record.id.partition("-")
        self._counters[nonce] = int(counter)
        self.n = entry.record.n
        self.head = record_hash(entry.raw)
        self.head_at = entry.record.at

    def _take(self, record: Record) -> None:
        match record:
            case RunStarted():
                self.started = record
                self.revision = record.revision
            case StepStarted():
                self._start(record)
            case StepProgress():
                self.steps[record.step].partial = record.output
            case StepCompleted():
                self._complete(record)
            case Claim():
                if self.claim is not None:
                    self.restarts += 1
                self.claim = self.claims[record.n] = record
                self.revision = self.revision or record.revision  # the first worker's binds (R8)
                self._goes_on()
            case Release():
                self.claim = None
            case Park():
                self.park(record)
            case Signal():
                hear(self, record)
            case Input():
                self.inputs[record.request_id] = Submitted(
                    request_id=record.request_id,
                    mode=record.mode,
                    content=record.content,
                    n=record.n,
                    at=record.at,
                )
            case InputWithdrawn():
                self._input(record.request_id, "withdrawn")
            case InputPlaced():
                self._input(record.request_id, "placed", record.position)
                self.restarts = 0
                self._goes_on()
            case RunCompleted():
                self._end(record)
            case Commit():
                self.commit(record)
            case RunPurged():
                self.purged = record
            case NewerRecord():
                self.newer = newer_text(self, record, record.type_, record.why)
            case _:
                raise AssertionError(f"record without a fold: {type(record).__name__}")

    def _goes_on(self) -> None:
        """A holder is at work: whatever it waited for has ended."""
        self.wait = None
        self.asks = ()

    def _start(self, record: StepStarted) -> None:
        if record.step not in self.steps:
            self.restarts = 0
            self.steps[record.step] = StepState(record.step)
            attempts.spend(self, record)
        step = self.steps[record.step]
        step.starts.append(record)
        step.partial = None
        self.open[record.step] = step
        self._goes_on()
        if record.kind == "model":
            self.model_calls += 1
        elif record.tool == SPAWN:
            self.children.setdefault(str(record.input["run"]), None)

    def _complete(self, record: StepCompleted) -> None:
        name = record.step
        step = self.steps.get(name) or self.steps.setdefault(name, StepState(name))
        step.completed = record
        self.open.pop(name, None)
        self.restarts = self.failures = 0
        self._goes_on()
        if not step.starts:
            return
        if record.interrupted is not UNSET:
            self.interrupted.add(step.last.digest)
        if step.last.kind == "model":
            self.reply = model_reply(record) if record.verdicts else None

    def park(self, record: Park) -> None:
        """What a park does to the state."""
        if record.why == "pause" and self.claim is not None:
            self.mismatched.add(self.claim.revision)
        self.claim = None
        self.wait = wait_of(record)
        self.asks = record.asks
        self.offered |= {a.marker: (a.step, call_digest(a.tool, a.input)) for a in record.asks}
        if record.why == "reconcile":
            for name in record.steps:
                self.steps[name].doubted = record.n
            for step in self.open.values():
                step.asked = record.n
        if record.why == "retry" and not record.steps:
            self.attempt += 1
            self.failures += 1
            self.restarts = 0
            if record.afresh:
                attempts.begin_afresh(self)

    def _end(self, record: End) -> None:
        self.end = record
        self.claim = None
        self._goes_on()
        self.last_placed = tuple(
            known.request_id for known in self.inputs.values() if known.status == "placed"
        )
        self._answer_placed()
        for known in self.queued():
            self._input(known.request_id, "unanswered")

    def commit(self, record: Commit) -> None:
        """What a commit does to the state; for the summary in it, too."""
        if record.action != "continue":
            self._end(record)
            return
        self.state = record.state
        self.committed = record.n
        self.next_iteration()
        self.wait = wait_of(record)
        if self.wait is not None:
            self.claim = None
        forget_before(self, record.at)

    def next_iteration(self) -> None:
        """Begin the next iteration; what was placed has been answered."""
        self.iteration += 1
        self.attempt = 1
        self.restarts = self.failures = 0
        self.mismatched = set()
        self.offered = {}
        self.last_placed = ()
        self.steps = {}
        self.open = {}
        self.honoured = {}
        self.keys = {}
        self.reply = None
        self._goes_on()
        self._answer_placed()

    def _answer_placed(self) -> None:
        for known in list(self.inputs.values()):
            if known.status == "placed":
                self._input(known.request_id, "done")

    def _input(self, request_id: str, status: InputStatus, position: str = "") -> None:
        known = self.inputs.pop(request_id)  # behind the others: in the order of their placing
        self.inputs[request_id] = msgspec.structs.replace(
            known, status=status, placed_at=position or known.placed_at
        )
