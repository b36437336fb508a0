"""Shell: one step: decide, record the start, call, record the result (R20-R26).

Why the order is safe: see steps.py. What is added here is time: a start whose acknowledgement took
long may belong to a holder that lost the run meanwhile, so the tail is read before a late call.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias, TypeVar, assert_never

from .calling import Perform, call_it, complete, if_unresolved, read_early
from .errors import (
    ConcurrentUse,
    Fenced,
    IndeterminateError,
    ReplayMismatch,
    RunCancelled,
    RunFinished,
    RunfoldError,
    StaleSignal,
    StoreLocked,
)
from .fold import Fold
from .limits import APPEND_BUDGET_S
from .records import StepCompleted, StepError, StepStarted
from .steps import Ask, Call, Mismatch, Reuse, Run, Settle, StepDecision, Wait, decide_step
from .unknown import (
    NO_WAYS,
    RetryLater,
    Superseded,
    Ways,
    indeterminate,
    settle,
    wait_over,
)
from .waits import instant_text

if TYPE_CHECKING:
    from .handle import Journal

Outcome = TypeVar("Outcome")
_NO_WRITE = nullcontext()
Due: TypeAlias = Callable[[Fold], StepStarted | None]


class Draining(RunfoldError):
    """The worker is being stopped: the run is given up between two steps, in order (R51)."""

    code = "draining"


STICKY = (Fenced, RunCancelled, IndeterminateError, ReplayMismatch, Draining, RetryLater)
"""What ends a holder's turn, gravest first: raised again at every later call of it."""

Stop: TypeAlias = Literal["cancel", "drain"]


async def do_step(
    journal: Journal, call: Call, perform: Perform, ways: Ways = NO_WAYS
) -> StepCompleted:
    """Bring the step to its recorded result by the step table; raises what the table says."""

    def run(decision: Run, earlier_over: bool) -> Awaitable[StepCompleted | None]:
        return _run(journal, call, decision, perform, earlier_over, ways)

    return await _decided(journal, call, ways, run)


async def start_step(
    journal: Journal, call: Call, ways: Ways = NO_WAYS
) -> StepStarted | StepCompleted:
    """As do_step, for who makes the call elsewhere: its recorded start, or the result that the
    step has without a call. `complete_step` records what the call came to."""

    async def run(decision: Run, earlier_over: bool) -> StepStarted | StepCompleted | None:
        body = _start_of(journal, call, decision)
        try:
            due = _due(journal, call, decision, body, earlier_over, ways)
            start = await _start(journal, due, body, ways)
        except NotCalled as never:
            return await _not_called(journal, call, never)
        if start is not None and start.replay == "unsafe":
            journal.writing.add(start.n)
        return start

    return await _decided(journal, call, ways, run)


async def _decided(
    journal: Journal,
    call: Call,
    ways: Ways,
    run: Callable[[Run, bool], Awaitable[Outcome | None]],
) -> Outcome | StepCompleted:
    earlier_over = False
    turn = journal.fold.iteration, journal.fold.attempt
    while True:
        _check_open(journal)
        if (journal.fold.iteration, journal.fold.attempt) != turn:
            what = f"the turn that called {call.step} has ended"
            raise ConcurrentUse(what, run_id=journal.run_id)
        decision = _decision(journal, journal.fold, call, earlier_over, ways)
        match decision:
            case Reuse(completed):
                journal.store.observer.replayed(journal.run_id, call.step)
                return completed
            case Settle():
                _check_claimed(journal)
                body = StepCompleted(step=call.step, result=decision.result, via=decision.via)
                if call.step not in journal.fold.steps:
                    return body  # an earlier attempt's: what was said of it stands in the journal
                settled = await journal.append(lambda fold, b=body: if_unresolved(fold, b))
                if settled is not None:
                    return settled
            case Run():
                _check_claimed(journal)
                check_stop(journal)
                if (other := _beside_unknown(journal, journal.fold, call)) is not None:
                    raise indeterminate(journal, other)
                if ways.superseded(journal.fold):
                    raise Superseded
                outcome = await run(decision, earlier_over)
                if outcome is not None:
                    return outcome
                earlier_over = False
            case Wait():
                await wait_over(journal, decision.start)
                earlier_over = True
            case Ask():
                if not await settle(journal, call, decision, ways.probe):
                    raise indeterminate(journal, decision.start)
            case Mismatch():
                _mismatch(journal, call, decision)
            case other:
                assert_never(other)


async def _run(
    journal: Journal,
    call: Call,
    decision: Run,
    perform: Perform,
    earlier_over: bool,
    ways: Ways,
) -> StepCompleted | None:
    """Record the start and make the call; None where the table must be asked again."""
    body = _start_of(journal, call, decision)
    due = _due(journal, call, decision, body, earlier_over, ways)
    if journal.early and not decision.unsafe:
        return await read_early(journal, body, perform, lambda: _start(journal, due, body, ways))
    try:
        with journal.a_write() if decision.unsafe else _NO_WRITE:
            try:
                start = await _start(journal, due, body, ways)
                return None if start is None else await call_it(journal, start, perform)
            except NotCalled as never:  # cut off now, it would be unknown
                return await _not_called(journal, call, never)
    except IndeterminateError:
        if call.policy == "reconcile":
            raise
        return None  # the table says Ask now, and the policy settles it


async def _not_called(journal: Journal, call: Call, never: NotCalled) -> StepCompleted:
    problem = StepError(type="not_called", message=never.why)
    body = StepCompleted(step=call.step, error=problem, via="not_called")
    return await complete(journal, body)


def _decision(
    journal: Journal, fold: Fold, call: Call, earlier_over: bool, ways: Ways
) -> StepDecision:
    return decide_step(
        fold,
        call,
        attempted=journal.attempted,
        earlier_over=earlier_over,
        honoured=ways.honoured,
        key=ways.key,
    )


def _check_open(journal: Journal) -> None:
    fold = journal.fold
    if fold.finished:
        raise RunFinished(f"run {journal.run_id} is {fold.status()}", run_id=journal.run_id)
    if not journal.owner:
        raise StoreLocked(
            f"run {journal.run_id} was opened for reading: a step needs Journal.open",
            holder="nobody",
            run_id=journal.run_id,
        )


def _check_claimed(journal: Journal) -> None:
    """On a shared store a run that waits for a person is not claimed: its recorded steps answer,
    nothing new is written."""
    if journal.store.shared and not journal.claim:
        raise StaleSignal(
            f"run {journal.run_id} waits for a person and was not claimed",
            run_id=journal.run_id,
            hint="`runfold show` says for what; then open it again",
        )


def check_stop(journal: Journal) -> None:
    """Nothing new is started on a run that is cancelled, or that this worker gives up."""
    if journal.fold.cancel is not None or journal.stop == "cancel":
        raise RunCancelled(f"run {journal.run_id} was cancelled", run_id=journal.run_id)
    if journal.stop == "drain":
        raise Draining(f"run {journal.run_id} is handed over", run_id=journal.run_id)


def _beside_unknown(journal: Journal, fold: Fold, call: Call) -> StepStarted | None:
    """Another write whose outcome is unknown: nothing new is started beside it (R23). One that
    this very process is making is not unknown."""
    for step in fold.unknown() if fold.open else ():
        if step.name != call.step and step.last.n not in journal.writing:
            return step.last
    return None


def _start_of(journal: Journal, call: Call, decision: Run) -> StepStarted:
    deadline = ""
    if decision.unsafe:
        # the call begins once the start is acknowledged, at most the append's budget from now
        until = datetime.now(UTC) + timedelta(seconds=call.timeout_s + APPEND_BUDGET_S)
        deadline = instant_text(until)
    return StepStarted(
        step=call.step,
        kind=call.kind,
        tool=call.tool,
        input=call.input,
        digest=call.digest,
        replay="unsafe" if decision.unsafe else "safe",
        key=decision.key,
        policy=call.policy,
        permit=decision.permit,
        deadline=deadline,
        attempt=journal.fold.attempt,
    )


def _due(
    journal: Journal,
    call: Call,
    decision: Run,
    body: StepStarted,
    earlier_over: bool,
    ways: Ways,
) -> Due:
    """The start, of what was decided just now, unless at a new tail the table no longer says this
    very Run."""
    decided_at = journal.fold.n
    turn = journal.fold.iteration, journal.fold.attempt

    def due(fold: Fold) -> StepStarted | None:
        if fold.n == decided_at:  # not needed for safety: deciding again would say the same
            return body
        if fold.finished or fold.cancel is not None or ways.superseded(fold):
            return None
        if (fold.iteration, fold.attempt) != turn or _beside_unknown(journal, fold, call):
            return None
        now = _decision(journal, fold, call, earlier_over, ways)
        return body if now == decision else None

    return due


async def _start(journal: Journal, due: Due, body: StepStarted, ways: Ways) -> StepStarted | None:
    """Record the start; None where it is not due at a new tail. Raises NotCalled."""
    published = time.monotonic()
    start = await journal.append(due, record_id=ways.record_id)
    if start is None or body.replay == "safe":
        return start
    journal.attempted.add(start.n)
    took_s = time.monotonic() - published
    if took_s > journal.ack_wait_s / 3:
        await journal.refresh()  # raises Fenced where the run was taken over meanwhile
        if journal.fold.cancel is not None:
            raise NotCalled("the run was cancelled meanwhile")
        took_s = time.monotonic() - published
    if journal.lost:  # given up while the start was on its way: another may have it
        raise Fenced(f"run {journal.run_id} is no longer held here", run_id=journal.run_id)
    if took_s > APPEND_BUDGET_S:  # the recorded deadline would not hold
        raise NotCalled("recording its start took too long")
    return start


class NotCalled(Exception):
    """The call of the start just recorded was never made and never will be: that is its result."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def _mismatch(journal: Journal, call: Call, decision: Mismatch) -> NoReturn:
    raise ReplayMismatch(
        f"run {journal.run_id}: at {call.step} the journal holds {decision.recorded}; "
        f"the code asks for {decision.attempted}",
        position=call.step,
        recorded=decision.recorded,
        attempted=decision.attempted,
        run_id=journal.run_id,
        hint="the code changed under the run: bring the old code back to finish it",
    )
