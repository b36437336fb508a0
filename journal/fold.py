"""Core: a run's state as a fold over its records. Nothing else is stored that could disagree.

`Fold.apply` takes the entries in order and is stricter than any writer: an entry that does not
chain, comes from a fenced claim, repeats an id or breaks the order of a step is Damage.
"""

from __future__ import annotations

from typing import Any, TypeAlias, assert_never

from msgspec import UNSET

from .codec import Damage, Entry, record_hash
from .messages import JSON
from .records import (
    HOLDER_RECORDS,
    ZERO_HASH,
    Claim,
    Commit,
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
    StepStarted,
    VerdictAsk,
)
from .step_state import ModelReply, StepState, model_reply

End: TypeAlias = RunCompleted | Commit


class Fold:
    """The state of one run. Mutable, one writer; `copy` is for what-if and for the explorer."""

    __slots__ = (
        "_counters",
        "claim",
        "claims",
        "decisions",
        "end",
        "head",
        "head_at",
        "model_calls",
        "n",
        "newer",
        "open",
        "purged",
        "reply",
        "requests",
        "started",
        "steps",
    )

    def __init__(self) -> None:
        self.n = 0
        self.head = ZERO_HASH
        self.head_at = ""
        self.started: RunStarted | None = None
        self.claim: Claim | None = None
        self.claims: dict[int, Claim] = {}
        self.steps: dict[str, StepState] = {}
        self.open: dict[str, StepState] = {}
        self.reply: ModelReply | None = None
        self.decisions: dict[str, Signal] = {}
        self.requests: dict[str, Signal] = {}
        self.end: End | None = None
        self.purged: RunPurged | None = None
        self.newer: str | None = None
        self.model_calls = 0
        self._counters: dict[str, int] = {}

    # ---- reading ----------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.end is not None or self.purged is not None

    def unknown(self) -> list[StepState]:
        """Writes whose outcome nobody knows, oldest first."""
        found = [step for step in self.open.values() if step.unknown]
        return sorted(found, key=lambda step: step.last.n)

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

    def runnable(self) -> bool:
        """Whether a holder would have something to do: false only where a person must act first."""
        if self.unknown():
            return False
        if self.reply is None or not self.reply.steps:
            return True
        waiting = {index for index, _ in self.pending()}
        if not waiting:
            return True
        return any(
            index not in waiting and not self._done(step)
            for index, step in enumerate(self.reply.steps)
        )

    def _done(self, step: str) -> bool:
        state = self.steps.get(step)
        return state is not None and state.completed is not None

    def status(self, *, held: bool = False) -> Status:
        """The run's status word (R6). `held`: a lock or answer says that somebody runs it now."""
        if self.newer is not None:
            return "newer"
        match self.end:
            case RunCompleted():
                return "completed"
            case Commit(action="fail"):
                return "failed"
            case Commit():
                return "cancelled"
            case None:
                pass
        if held or self.claim is not None or self.runnable():
            return "running"
        return "indeterminate" if self.unknown() else "awaiting_approval"

    # ---- folding ----------------------------------------------------------------------------

    def copy(self) -> Fold:
        """An independent copy; the records in it are shared, being frozen."""
        other = Fold()
        for name in Fold.__slots__:
            value: Any = getattr(self, name)
            setattr(other, name, dict(value) if isinstance(value, dict) else value)  # type: ignore[arg-type]
        other.steps = {name: step.copy() for name, step in self.steps.items()}
        other.open = {name: other.steps[name] for name in self.open}
        return other

    def apply(self, entry: Entry) -> None:
        """Take the next entry; raises Damage, and is then unchanged."""
        self.check(entry.record)
        self.take(entry)

    def take(self, entry: Entry) -> None:
        """Take an entry that passed `check` at this very state."""
        record = entry.record
        assert self.n in (0, record.n - 1)
        if self.newer is None:
            self._take(record)
        nonce, _, counter = record.id.partition("-")
        self._counters[nonce] = int(counter)
        self.n = record.n
        self.head = record_hash(entry.raw)
        self.head_at = record.at

    def _take(self, record: Record) -> None:
        match record:
            case RunStarted():
                self.started = record
            case StepStarted():
                self._start(record)
            case StepCompleted():
                self._complete(record)
            case Claim():
                self.claim = record
                self.claims[record.n] = record
            case Release():
                self.claim = None
            case Park():
                self.claim = None
                for name in record.steps:
                    self.steps[name].doubted = record.n
            case Signal():
                self._signal(record)
            case RunCompleted() | Commit():
                self.end = record
                self.claim = None
            case RunPurged():
                self.purged = record
            case NewerRecord():
                self.newer = record.type_
            case _:
                raise AssertionError(f"record without a fold: {type(record).__name__}")

    def check(self, record: Record) -> None:
        """Whether the record may stand next; raises Damage. What passes, every reader takes."""
        self._check_chain(record)
        if self.newer is None:  # what follows a record of a newer version can't be understood
            self._check_order(record)
            match record:
                case StepStarted():
                    self._check_start(record)
                case StepCompleted():
                    self._check_complete(record)
                case Park():
                    if any(name not in self.open for name in record.steps):
                        raise Damage(f"record {record.n} parks for a step that is not open")
                case Signal():
                    self._check_signal(record)
                case _:
                    pass

    def _check_chain(self, record: Record) -> None:
        """Ordinal, previous hash, writer id. Raises Damage."""
        if isinstance(record, RunPurged) and self.n == 0:
            return  # a tombstone is the first record left, whatever its ordinal
        if record.n != self.n + 1:
            first, last = self.n + 1, record.n - 1
            missing = f"{first} to {last}" if last > first else f"{first}"
            raise Damage(f"record {missing} is missing: record {record.n} follows {self.n}")
        if record.prev != self.head:
            raise Damage(f"record {record.n} does not follow record {self.n}: its hash differs")
        nonce, _, counter = record.id.partition("-")
        if int(counter) <= self._counters.get(nonce, -1):
            raise Damage(f"record {record.n} repeats the writer id {record.id}")

    def _check_order(self, record: Record) -> None:
        """Claims, the end, and the order every writer keeps. Raises Damage."""
        if isinstance(record, NewerRecord):
            return
        if isinstance(record, RunPurged) and self.n == 0:
            return
        if (self.n == 0) != isinstance(record, RunStarted):
            raise Damage(
                f"record {record.n} is {type(record).__name__}: a run starts once, at record 1"
            )
        live = self.claim.n if self.claim else 0
        if isinstance(record, HOLDER_RECORDS) and record.claim != live:
            raise Damage(f"record {record.n} was written under claim {record.claim}, not {live}")
        if self.purged is not None or (self.end and not isinstance(record, RunPurged)):
            raise Damage(f"record {record.n} stands after the run's end")
        if isinstance(record, RunPurged) and self.end is None:
            raise Damage(f"record {record.n} purges a run that has not ended")

    def _check_start(self, record: StepStarted) -> None:
        step = self.steps.get(record.step)
        if step is None:
            return
        if step.completed is not None:
            raise Damage(f"record {record.n} starts {record.step} again after its result")
        if step.unsafe:
            permit = step.reconciled.get(step.last.n)
            retry = permit is not None and permit.payload["outcome"] == "retry"
            if permit is None or not retry or permit.n != record.permit:
                raise Damage(f"record {record.n} starts {record.step} again without a permit")

    def _start(self, record: StepStarted) -> None:
        step = self.steps.setdefault(record.step, StepState(record.step))
        step.starts.append(record)
        self.open[record.step] = step
        if record.kind == "model":
            self.model_calls += 1

    def _check_complete(self, record: StepCompleted) -> None:
        step = self.steps.get(record.step)
        if (record.result is UNSET) == (record.error is UNSET):
            raise Damage(f"record {record.n} holds not exactly one of result and error")
        if step is None and record.via != "refused":
            raise Damage(f"record {record.n} completes {record.step}, which never started")
        if step is not None and step.completed is not None:
            raise Damage(f"record {record.n} completes {record.step} a second time")
        if record.verdicts:
            model_reply(record)

    def _complete(self, record: StepCompleted) -> None:
        step = self.steps.setdefault(record.step, StepState(record.step))
        step.completed = record
        self.open.pop(record.step, None)
        if step.starts and step.last.kind == "model":
            self.reply = model_reply(record) if record.verdicts else None

    def _check_signal(self, record: Signal) -> None:
        key = "step" if record.name == "reconcile" else "marker"
        about: JSON = record.payload.get(key)
        if not isinstance(about, str):
            raise Damage(f"record {record.n} is a {record.name} without a {key}")
        if record.name != "reconcile":
            return
        step = self.steps.get(about)
        start: JSON = record.payload.get("start")
        if step is None or not any(start == known.n for known in step.starts):
            raise Damage(f"record {record.n} reconciles a start that is not there")

    def _signal(self, record: Signal) -> None:
        self.requests.setdefault(record.request_id, record)
        match record.name:
            case "approve" | "reject":
                self.decisions.setdefault(record.payload["marker"], record)
            case "reconcile":
                outcome, has_result = record.payload.get("outcome"), "result" in record.payload
                if (outcome, has_result) not in (("done", True), ("retry", False)):
                    self.newer = f"signal: reconcile {outcome!r}"  # never taken for a permit
                    return
                step = self.steps[record.payload["step"]]
                step.reconciled.setdefault(record.payload["start"], record)
            case other:
                assert_never(other)
