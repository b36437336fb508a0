"""Core: an observer that counts the durable work done through a store, for metrics (R73).

What is counted are records that this process appended, and beside them only replays and fences. So
the sum over all processes is what the journals say, whatever was killed, replayed or repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import datetime
from typing import Final, NamedTuple, get_args

from msgspec import UNSET

from .codec import tag
from .families import Counter, Family, Histogram, Words
from .fold import Fold
from .ids import RunId
from .observing import Trace
from .records import (
    Claim,
    Commit,
    Input,
    Park,
    Policy,
    Record,
    RunCompleted,
    RunStarted,
    Signal,
    StepCompleted,
    StepStarted,
)
from .step_state import StepState
from .waits import Why, parse_instant, wait_of

CALL_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
DELAY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
OPEN_MAX: Final = 10_000
"""Calls whose begin is kept: more than run in a process at once. Some never have a result: when
these are so many all are forgotten, and a few durations with them."""

_REASONS: Final = ("new", "redelivery", "wake", "retry", "adopted")
_PROBED: Final = "probe:"
"""Begins the request id of a permit that a probe gave (unknown.py)."""

_OPEN: Final = nullcontext()


class _Arrival(NamedTuple):
    """Of what came through a door: when it came, by the clock, and when it was stored before."""

    came: float
    stored: datetime | None


_arrived: ContextVar[_Arrival | None] = ContextVar("arrived", default=None)


class Counting:
    """The counts of one process; `store.observer = beside(store.observer, counting)`. `clock`:
    seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._agents = Words()
        self._starts = 0
        self._began: dict[str, float] = {}
        self._records = Counter("runfold_records", "Records appended by this process", ("type",))
        self._claims = Counter("runfold_claims", "Runs claimed", ("reason",), _each(_REASONS))
        self._steps = Counter(
            "runfold_steps",
            "Results of steps; outcome: result or error of a call, else where it came from",
            ("kind", "replay", "outcome"),
        )
        self._seconds = Histogram(
            "runfold_step_seconds",
            "From the record of a call's start to that of its result",
            CALL_S,
            ("kind",),
        )
        self._replayed = Counter(
            "runfold_steps_replayed", "Steps answered from the journal, without a call"
        )
        self._fenced = Counter(
            "runfold_fenced", "Claims of this process that another worker's ended"
        )
        self._started = Counter("runfold_runs_started", "Runs started", ("agent",))
        self._ended = Counter("runfold_runs_ended", "Runs ended", ("agent", "status"))
        self._parks = Counter(
            "runfold_parks",
            "Waits begun: parks inside a turn, and turns that ended with a wait",
            ("why",),
            _each(get_args(Why)),
        )
        self._wakes = Histogram(
            "runfold_wake_seconds",
            "From the record that ended a run's wait, or the instant it waited for, to the claim",
            DELAY_S,
        )
        self._unknown = Counter(
            "runfold_unknown_writes",
            "Writes that were cut off so that nobody knew whether they happened, each once",
            ("policy",),
            _each(get_args(Policy)),
        )
        self._heard_in = Histogram(
            "runfold_signal_seconds",
            "From a signal's or input's arrival, in SIGNALS or at a door, to its record",
            DELAY_S,
        )

    def families(self) -> list[Family]:
        """All of it, now; from any thread. The two records of each step are not counted one by one:
        they come far more often than the others."""
        self._records.put(self._starts, "step.started")
        self._records.put(self._steps.total(), "step.completed")
        counters = (
            self._records,
            self._claims,
            self._steps,
            self._seconds,
            self._replayed,
            self._fenced,
            self._started,
            self._ended,
            self._parks,
            self._wakes,
            self._unknown,
            self._heard_in,
        )
        return [one.family() for one in counters]

    # ---- the observer -----------------------------------------------------------------------

    @contextmanager
    def door(self, what: str, trace: str, at: datetime | None = None) -> Generator[None]:
        token = _arrived.set(_Arrival(self._clock(), at))
        try:
            yield
        finally:
            _arrived.reset(token)

    def carry(self, run_id: RunId, record: Record, trace: Trace) -> str:
        return ""

    def calling(self, run_id: RunId, start: StepStarted) -> AbstractContextManager[object]:
        return _OPEN

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: Trace) -> None:
        if type(record) is StepStarted:
            self._starts += 1
            self._began[record.id] = self._clock()
            if len(self._began) > OPEN_MAX:
                self._began.clear()
        elif isinstance(record, StepCompleted):
            self._completed(fold, record)
        else:
            self._records.add(tag(record))
            self._other(fold, record)

    def _other(self, fold: Fold, record: Record) -> None:
        """What does not come with every step."""
        match record:
            case Claim():
                self._claims.add(record.reason)
            case Park() | Commit():
                if (wait := wait_of(record)) is not None:
                    self._parks.add(wait.why)
            case Signal() | Input():
                self._heard(record)
            case RunStarted():
                self._started.add(self._agents.of(record.agent))
            case _:
                pass
        if (status := _end_of(record)) and fold.started is not None:
            self._ended.add(self._agents.of(fold.started.agent), status)
        for start in _newly_unknown(fold, record):
            self._unknown.add(start.policy)

    def replayed(self, run_id: RunId, step: str) -> None:
        self._replayed.add()

    def woken(self, run_id: RunId, claim: Claim, since: str) -> None:
        """By the clocks of who wrote the two records, or set the time and wrote the claim: where
        these differ, so does this."""
        try:
            waited = parse_instant(claim.at) - parse_instant(since)
        except ValueError:  # another writer's word for when
            return
        self._wakes.observe(waited.total_seconds())

    def fenced(self, run_id: RunId, claim: int) -> None:
        self._fenced.add()

    def let_go(self, run_id: RunId, claim: int) -> None:
        pass

    def _heard(self, record: Signal | Input) -> None:
        """Of a kept one by the longer of two clocks: the server's since it was stored, which a step
        of ours can shorten, and our monotonic one since it came here."""
        arrival = _arrived.get()
        if arrival is None or _by_worker(record):
            return
        seconds = self._clock() - arrival.came
        if arrival.stored is not None:
            stored_for = parse_instant(record.at) - arrival.stored
            seconds = max(seconds, stored_for.total_seconds())
        self._heard_in.observe(seconds)

    def _completed(self, fold: Fold, record: StepCompleted) -> None:
        step = fold.steps.get(record.step)
        if step is None or not step.starts:  # refused before it was ever started
            self._steps.add("tool", "none", record.via)
            return
        start = step.starts[-1]
        began_at = self._began.pop(start.id, None)
        if record.via != "run":
            self._steps.add(start.kind, start.replay, record.via)
            for one in _newly_unknown(fold, record):
                self._unknown.add(one.policy)
            return
        outcome = "result" if record.error is UNSET else "error"
        self._steps.add(start.kind, start.replay, outcome)
        if began_at is not None:
            self._seconds.observe(self._clock() - began_at, start.kind)


def _by_worker(record: Signal | Input) -> bool:
    """What holders say themselves, perhaps within a request of theirs."""
    if isinstance(record, Input):
        return False
    return record.name in ("late", "child") or record.request_id.startswith(_PROBED)


def _each(words: Iterable[str]) -> list[tuple[str]]:
    return [(word,) for word in words]


def _end_of(record: Record) -> str:
    """The status of a run that this record ends; "" where it ends none."""
    match record:
        case RunCompleted():
            return "completed"
        case Commit(action="fail"):
            return "failed"
        case Commit(action="cancel"):
            return "cancelled"
        case _:
            return ""


def _newly_unknown(fold: Fold, record: Record) -> list[StepStarted]:
    """Starts that this record, the last one folded, is the first to find cut off: the first claim
    after them; or what their own holder makes of them: a park, their policy's result or permit."""
    match record:
        case Claim():
            return [
                step.last
                for step in fold.unknown()
                if not step.asked and not any(step.last.n < n < record.n for n in fold.claims)
            ]
        case Park(why="reconcile"):
            return [step.last for step in fold.unknown() if step.last.claim == record.claim]
        case StepCompleted(via="interrupted" | "probe"):
            return _own(fold.steps.get(record.step), record.claim)
        case Signal(name="reconcile", request_id=request) if request.startswith(_PROBED):
            claim = fold.claim.n if fold.claim is not None else 0
            return _own(fold.steps.get(str(record.payload.get("step"))), claim)
        case _:
            return []


def _own(step: StepState | None, claim: int) -> list[StepStarted]:
    return [step.last] if step is not None and step.starts and step.last.claim == claim else []
