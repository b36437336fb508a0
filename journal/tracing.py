"""Shell: what was done through a store, as spans: an observer for OpenTelemetry (docs/tracing.md).

One trace a run: its first record keeps the context of who started it, and whoever works on it goes
on from there. A claim is a span from its record to the one that ends it, a step one from its start
to its result, a signal one from its arrival to its record. What is waited for is no span. A replay
appends nothing, so it has none. No inputs, results or error texts: a trace is read by others.

Needs opentelemetry-api (the extra `otel`); where the spans go says the program's TracerProvider.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import datetime
from typing import Final, NamedTuple

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, set_span_in_context

from .codec import tag
from .errors import RunfoldError
from .fold import Fold
from .ids import RunId
from .limits import CONCURRENCY_MAX
from .observing import Trace
from .records import (
    Claim,
    Commit,
    Input,
    InputWithdrawn,
    Park,
    Record,
    Release,
    RunCompleted,
    RunStarted,
    Signal,
    StepCompleted,
    StepStarted,
)
from .spans import (
    below,
    context_of,
    current,
    end_step,
    fail,
    inside,
    parsed,
    step_attributes,
    step_name,
    written,
)
from .values import Unrecordable
from .waits import parse_instant

HOLDING_MAX: Final = 2 * CONCURRENCY_MAX
"""More than a process holds; what nobody lets go of makes room."""


class _Came(NamedTuple):
    """What the door that this task is in knows: whose caller it is, and since when."""

    caller: SpanContext | None
    at_ns: int
    kept: bool


class _Holding:
    """A claim's span, and those of its steps that are open, by name; `early`: whose start is on its
    way."""

    def __init__(self, span: Span) -> None:
        self.span = span
        self.steps: dict[str, Span] = {}
        self.early: set[str] = set()


_came: ContextVar[_Came | None] = ContextVar("runfold_came", default=None)
_made: ContextVar[Span | None] = ContextVar("runfold_made", default=None)
"""The span of the record that this task is about to append: never ended where it is not stored, and
then nobody hears of it."""


class Tracing:
    """`store.observer = Tracing()`. `provider`: else the program's own (set_tracer_provider)."""

    def __init__(self, provider: otel.TracerProvider | None = None) -> None:
        self._provider = provider or otel.get_tracer_provider()
        self._tracer = self._provider.get_tracer("runfold")
        self._holding: dict[tuple[RunId, int], _Holding] = {}

    @property
    def open_spans(self) -> int:
        """Of claims and steps that are held now."""
        return sum(1 + len(holding.steps) for holding in self._holding.values())

    # ---- from outside -----------------------------------------------------------------------

    def door(
        self, what: str, trace: str, at: datetime | None = None
    ) -> AbstractContextManager[object]:
        return self._door(what, parsed(trace), at)

    @contextmanager
    def _door(
        self, what: str, caller: SpanContext | None, at: datetime | None
    ) -> Generator[None, None, None]:
        """Who waits for an answer sees a server's span in the own trace."""
        at_ns = _past(at) if at is not None else time.time_ns()
        span = None
        if caller is not None and at is None and current() is None:
            span = self._tracer.start_span(what, below(caller), SpanKind.SERVER, start_time=at_ns)
        token = _came.set(_Came(caller, at_ns, at is not None))
        try:
            with inside(span) if span is not None else nullcontext():
                yield
        except RunfoldError as refusal:  # no failure of ours
            if span is not None:
                span.set_attribute("error.type", refusal.code)
            raise
        except Exception as error:
            if span is not None:
                fail(span, type(error).__name__)
            raise
        finally:
            _came.reset(token)
            if span is not None:
                span.end()

    # ---- records ----------------------------------------------------------------------------

    def carry(self, run_id: RunId, record: Record, trace: Trace) -> str:
        match record:
            case RunStarted(agent=agent):
                span = self._starting(run_id, agent)
            case Claim():
                span = self._span("run", run_id, trace, parsed(trace.heard), SpanKind.CONSUMER)
            case Signal(name=name):
                span = self._arriving(f"signal {name}", run_id, trace)
                span.set_attribute("runfold.signal", name)
            case Input():
                span = self._arriving("input", run_id, trace)
            case InputWithdrawn():
                span = self._arriving("input withdrawn", run_id, trace)
            case _:
                return ""
        _made.set(span)
        return written(span)

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: Trace) -> None:
        match record:
            case StepStarted():
                self._started(run_id, fold, record, trace)
            case StepCompleted():
                self._completed(run_id, fold, record, trace)
            case Claim():
                self._claimed(run_id, fold, record)
            case RunStarted() | Signal() | Input() | InputWithdrawn():
                if (span := _take_made()) is not None:
                    span.set_attribute("runfold.record", record.n)
                    span.end()
            case Park() | Commit() | Release() | RunCompleted():
                if fold.finished or (record.claim and fold.claim is None):
                    self._end(run_id, record.claim, tag(record), fold)
            case _:
                pass

    def _starting(self, run_id: RunId, agent: str) -> Span:
        """The run's first span: below what the starter is doing, or the root of a trace."""
        came = _came.get()
        return self._tracer.start_span(
            f"start {agent}",
            below(current()),
            SpanKind.PRODUCER,
            {"runfold.run": run_id, "runfold.agent": agent},
            start_time=came.at_ns if came is not None else None,
        )

    def _arriving(self, name: str, run_id: RunId, trace: Trace) -> Span:
        """In the run's trace, since it is part of the run's story; what the caller is doing is
        linked, since a trace is not to end days later in somebody else's approval."""
        came = _came.get()
        if came is None:
            return self._span(name, run_id, trace, None, SpanKind.INTERNAL)
        caller = came.caller if current() is None else None  # else a server's span is below it
        kind = SpanKind.CONSUMER if came.kept else SpanKind.INTERNAL
        return self._span(name, run_id, trace, caller, kind, start_ns=came.at_ns)

    def _span(
        self,
        name: str,
        run_id: RunId,
        trace: Trace,
        cause: SpanContext | None,
        kind: SpanKind,
        start_ns: int | None = None,
    ) -> Span:
        """A span right below the run's first, linked with its cause. The span this task is in is
        its parent if it is of the same trace, and else is linked, too."""
        parent = context_of(run_id, trace, self._provider)
        here = current()
        if here is not None and here.trace_id == parent.trace_id:
            parent = here
        others = {one.span_id: one for one in (here, cause) if one is not None}
        links = [Link(one) for span_id, one in others.items() if span_id != parent.span_id]
        attributes = {"runfold.run": run_id}
        return self._tracer.start_span(
            name, below(parent), kind, attributes, links, start_time=start_ns
        )

    # ---- claims -----------------------------------------------------------------------------

    def _claimed(self, run_id: RunId, fold: Fold, claim: Claim) -> None:
        span = _take_made()
        if span is None:  # told by another task than the one that asked, so nobody holds it
            return
        assert fold.started is not None
        span.update_name(f"run {fold.started.agent}")
        span.set_attributes(
            {
                "runfold.agent": fold.started.agent,
                "runfold.claim": claim.n,
                "runfold.reason": claim.reason,
                "runfold.attempt": claim.attempt,
                "runfold.worker": claim.worker,
                "runfold.revision": claim.revision,
            }
        )
        self._hold(run_id, claim.n, span)

    def _hold(self, run_id: RunId, claim: int, span: Span) -> _Holding:
        if len(self._holding) >= HOLDING_MAX:
            self._end(*next(iter(self._holding)), "let_go")
        holding = self._holding[run_id, claim] = _Holding(span)
        return holding

    def fenced(self, run_id: RunId, claim: int) -> None:
        self._end(run_id, claim, "fenced")

    def let_go(self, run_id: RunId, claim: int) -> None:
        self._end(run_id, claim, "let_go")

    def _end(self, run_id: RunId, claim: int, how: str, fold: Fold | None = None) -> None:
        """`fold`: as of the record that ended it; None where no record of ours did."""
        holding = self._holding.pop((run_id, claim), None)
        if holding is None:
            return
        for span in holding.steps.values():
            fail(span, "cut_off")
            span.end()
        holding.span.set_attribute("runfold.ended", how)
        if fold is not None:
            status = fold.status()
            holding.span.set_attribute("runfold.status", status)
            if status == "failed":
                fail(holding.span, status)
        elif claim:  # without one it is how a directory's runs are left
            fail(holding.span, how)
        holding.span.end()

    # ---- steps ------------------------------------------------------------------------------

    def _started(self, run_id: RunId, fold: Fold, start: StepStarted, trace: Trace) -> None:
        holding = self._held(run_id, start.claim, fold, trace)
        if holding is None or _is_remote(fold, start.claim):
            return
        if start.step in holding.early:
            holding.early.discard(start.step)
            holding.steps[start.step].set_attribute("runfold.start", start.n)
        else:
            self._begun(run_id, start, holding)

    def _begun(self, run_id: RunId, start: StepStarted, holding: _Holding) -> None:
        if (left := holding.steps.pop(start.step, None)) is not None:
            fail(left, "cut_off")
            left.end()
        under = set_span_in_context(holding.span)
        holding.steps[start.step] = self._step(run_id, start, under)

    def _held(self, run_id: RunId, claim: int, fold: Fold, trace: Trace) -> _Holding | None:
        """On a store without claims: from the first step until the run is closed."""
        found = self._holding.get((run_id, claim))
        if found is not None or claim:
            return found
        span = self._span("run", run_id, trace, None, SpanKind.INTERNAL)
        assert fold.started is not None
        span.update_name(f"run {fold.started.agent}")
        span.set_attribute("runfold.agent", fold.started.agent)
        return self._hold(run_id, 0, span)

    def _step(
        self, run_id: RunId, start: StepStarted, under: Context, start_ns: int | None = None
    ) -> Span:
        attributes = step_attributes(run_id, start)
        return self._tracer.start_span(
            step_name(start), under, SpanKind.INTERNAL, attributes, start_time=start_ns
        )

    def _completed(self, run_id: RunId, fold: Fold, record: StepCompleted, trace: Trace) -> None:
        holding = self._held(run_id, record.claim, fold, trace)
        span = holding.steps.pop(record.step, None) if holding is not None else None
        if span is None and record.via in ("run", "not_called") and _is_remote(fold, record.claim):
            span = self._remote_step(run_id, fold, record, trace)
        if span is not None:
            end_step(span, record)
        elif holding is not None:  # refused, or settled by a policy, a person, a late word
            holding.span.add_event(
                "step settled",
                {"runfold.step": record.step, "runfold.via": record.via, "runfold.n": record.n},
            )

    def _remote_step(self, run_id: RunId, fold: Fold, record: StepCompleted, trace: Trace) -> Span:
        """Of a worker over HTTP: another bridge may have recorded its start, or its claim, so the
        span is made when it ends, and begins when the start says."""
        start = fold.steps[record.step].last
        holding = self._holding.get((run_id, record.claim))
        if holding is not None:
            under = set_span_in_context(holding.span)
        else:
            under = below(parsed(trace.claim) or context_of(run_id, trace, self._provider))
        return self._step(run_id, start, under, _written_at(start))

    def calling(self, run_id: RunId, start: StepStarted) -> AbstractContextManager[object]:
        holding = self._holding.get((run_id, start.claim))
        if holding is not None and not start.n:
            self._begun(run_id, start, holding)
            holding.early.add(start.step)
        span = holding.steps.get(start.step) if holding is not None else None
        return nullcontext() if span is None else self._calling(run_id, start, span)

    @contextmanager
    def _calling(self, run_id: RunId, start: StepStarted, span: Span) -> Generator[None]:
        """What the call itself traces hangs below."""
        try:
            with inside(span):
                yield
        except BaseException as error:
            # Of a write that returned what can't be recorded, the result that says so ends it.
            if not isinstance(error, Unrecordable) or start.replay == "safe":
                self._raised(run_id, start, span, error)
            raise

    def _raised(self, run_id: RunId, start: StepStarted, span: Span, error: BaseException) -> None:
        """Nothing is recorded of it. Another may hold the run by now, or the claim have ended."""
        holding = self._holding.get((run_id, start.claim))
        if holding is not None and holding.steps.get(start.step) is span:
            del holding.steps[start.step]
            holding.early.discard(start.step)
            own = error.__cause__ if isinstance(error, RunfoldError | Unrecordable) else None
            fail(span, type(own or error).__name__)
            span.end()

    def replayed(self, run_id: RunId, step: str) -> None:
        pass

    def woken(self, run_id: RunId, claim: Claim, since: str) -> None:
        pass


def _past(when: datetime) -> int:
    """In nanoseconds; by whatever clock it was written, not later than now by ours."""
    return min(int(when.timestamp() * 1e9), time.time_ns())


def _written_at(start: StepStarted) -> int | None:
    try:
        return _past(parse_instant(start.at))
    except (ValueError, OverflowError):  # `at` is informative only
        return None


def _take_made() -> Span | None:
    span = _made.get()
    _made.set(None)
    return span


def _is_remote(fold: Fold, claim: int) -> bool:
    found = fold.claims.get(claim)
    return found is not None and found.remote
