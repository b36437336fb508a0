"""Shell: one step: decide, record the start, call, record the result (R20-R26).

Why the order is safe: see steps.py. What is added here is time: a start whose acknowledgement took
long may belong to a holder that lost the run meanwhile, so the tail is read before a late call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar, assert_never

from .errors import (
    Fenced,
    IndeterminateError,
    NotEncodable,
    ReplayMismatch,
    RunFinished,
    RunfoldError,
    StaleSignal,
    StoreLocked,
    TooLarge,
)
from .fold import Fold
from .limits import APPEND_BUDGET_S
from .log import instant_text
from .messages import JSON
from .records import Park, StepCompleted, StepError, StepStarted
from .steps import Ask, Call, Mismatch, Reuse, Run, Settle, StepDecision, Wait, decide_step
from .values import normalise

if TYPE_CHECKING:
    from .handle import Journal

Refusal = TypeVar("Refusal", NotEncodable, TooLarge)
Perform: TypeAlias = Callable[[StepStarted], Awaitable[StepCompleted]]


class RetryLater(RunfoldError):
    """A permitted retry waits until the earlier call can no longer be running (R22)."""

    code = "waiting"

    def __init__(self, message: str, *, step: str, until: str, run_id: str) -> None:
        super().__init__(message, run_id=run_id)
        self.step = step
        self.until = until


async def do_step(journal: Journal, call: Call, perform: Perform) -> StepCompleted:
    """Bring the step to its recorded result by the step table; raises what the table says."""
    earlier_over = False
    while True:
        _check_open(journal)
        decision = decide_step(
            journal.fold, call, attempted=journal.attempted, earlier_over=earlier_over
        )
        match decision:
            case Reuse(completed):
                return completed
            case Settle():
                _check_claimed(journal)
                body = StepCompleted(step=call.step, result=decision.result, via="reconcile")
                settled = await journal.append(lambda fold, b=body: _if_unresolved(fold, b))
                if settled is not None:
                    return settled
            case Run():
                _check_claimed(journal)
                _refuse_beside_unknown(journal, call)
                try:
                    start = await _start(journal, call, decision, earlier_over)
                    if start is not None:
                        return await _call(journal, start, perform)
                except NotCalled as never:
                    problem = StepError(type="not_called", message=never.why)
                    body = StepCompleted(step=call.step, error=problem, via="not_called")
                    return await _complete(journal, body)
            case Wait():
                await wait_over(journal, decision.start)
                earlier_over = True
            case Ask():
                await doubt(journal, decision.start)
                raise indeterminate(journal, decision.start)
            case Mismatch():
                _mismatch(journal, call, decision)
            case other:
                assert_never(other)


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


async def doubt(journal: Journal, start: StepStarted) -> None:
    """Where the journal alone calls the open step safe and the code of today does not, say so in
    the journal, or nobody could ever reconcile it (R7, R42)."""

    def due(fold: Fold) -> Park | None:
        step = fold.steps[start.step]
        if fold.finished or step.completed is not None or step.unsafe:
            return None
        return Park(why="reconcile", steps=(start.step,))

    if not journal.store.shared or journal.claim:
        await journal.append(due)


def _refuse_beside_unknown(journal: Journal, call: Call) -> None:
    """Nothing new is started while a write's outcome is unknown (R23)."""
    for step in journal.fold.unknown():
        if step.name != call.step:
            raise indeterminate(journal, step.last)


async def _start(
    journal: Journal, call: Call, decision: Run, earlier_over: bool
) -> StepStarted | None:
    """Record the start, unless at a new tail the table no longer says this very Run."""
    deadline = ""
    if decision.unsafe:
        # the call begins once the start is acknowledged, at most the append's budget from now
        until = datetime.now(UTC) + timedelta(seconds=call.timeout_s + APPEND_BUDGET_S)
        deadline = instant_text(until)
    body = StepStarted(
        step=call.step,
        kind=call.kind,
        tool=call.tool,
        input=call.input,
        digest=call.digest,
        replay="unsafe" if decision.unsafe else "safe",
        key=decision.key,
        permit=decision.permit,
        deadline=deadline,
    )

    decided_at = journal.fold.n

    def due(fold: Fold) -> StepStarted | None:
        if fold.n == decided_at:  # not needed for safety: deciding again would say the same
            return body
        if fold.finished:
            return None
        now: StepDecision = decide_step(
            fold, call, attempted=journal.attempted, earlier_over=earlier_over
        )
        return body if now == decision else None

    published = time.monotonic()
    start = await journal.append(due)
    if start is None or not decision.unsafe:
        return start
    journal.attempted.add(start.n)
    took_s = time.monotonic() - published
    if took_s > journal.ack_wait_s / 3:
        await journal.refresh()  # raises Fenced where the run was taken over meanwhile
        took_s = time.monotonic() - published
    if took_s > APPEND_BUDGET_S:  # the recorded deadline would not hold
        raise NotCalled("recording its start took too long")
    return start


class NotCalled(Exception):
    """The call of the start just recorded was never made and never will be: that is its result."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


async def _call(journal: Journal, start: StepStarted, perform: Perform) -> StepCompleted:
    try:
        body = await perform(start)
    except Unrecordable as unrecordable:
        raise await _did_happen(journal, start, unrecordable.error) from unrecordable
    try:
        return await _complete(journal, body)
    except TooLarge as error:
        raise await _did_happen(journal, start, error) from error


async def _did_happen(journal: Journal, start: StepStarted, error: Refusal) -> Refusal:
    """The call returned what can't be recorded. Of a write the journal says so, so that it never
    runs again (R16); a read records nothing. The error to raise."""
    if start.replay == "unsafe":
        problem = StepError(type="not_recordable", message=error.message[:1000])
        await _complete(journal, StepCompleted(step=start.step, error=problem))
    error.run_id = journal.run_id
    return error


class Unrecordable(Exception):
    """What the call returned is no JSON. Not the same as the call raising NotEncodable."""

    def __init__(self, error: NotEncodable) -> None:
        super().__init__(error.message)
        self.error = error


def recordable(value: object, what: str) -> JSON:
    """The result of a call as JSON; raises Unrecordable."""
    try:
        return normalise(value, what)
    except NotEncodable as error:
        raise Unrecordable(error) from error


async def _complete(journal: Journal, body: StepCompleted) -> StepCompleted:
    """Record a result of this process's own call: a fact, due while the step has none."""
    completed = await journal.append(lambda fold: _if_unresolved(fold, body))
    if completed is None:  # only another holder can have done that
        raise Fenced(f"step {body.step} was completed by somebody else", run_id=journal.run_id)
    return completed


def _if_unresolved(fold: Fold, body: StepCompleted) -> StepCompleted | None:
    step = fold.steps.get(body.step)
    return body if step is not None and step.completed is None else None


async def wait_over(journal: Journal, start: StepStarted) -> None:
    """Raises RetryLater while the call of this start may still be running (R22)."""
    if journal.fold.steps[start.step].unsafe and not await _earlier_over(journal, start):
        raise RetryLater(
            f"the earlier call of {start.step} may still be running",
            step=start.step,
            until=start.deadline,
            run_id=journal.run_id,
        )


async def _earlier_over(journal: Journal, start: StepStarted) -> bool:
    """Whether the call of this start can no longer be running (PROTOCOL 3).

    A lock is held as long as a call under it runs (Journal.close). On a shared store the worker is
    asked, and its yes counts for more than any deadline. Nobody counts as gone when it is said
    twice, the ack wait apart; or once, where a later holder adopted the run and so asked before;
    or once the deadline has passed.
    """
    if not journal.store.shared:
        return True
    late = bool(start.deadline) and datetime.now(UTC) >= datetime.fromisoformat(start.deadline)
    holder = journal.fold.claims.get(start.claim)
    if holder is None:  # no claim to ask about: only the deadline tells
        return late
    answer = await journal.store.ask(holder.worker, journal.run_id, holder.n)
    adopted = any(c.n > holder.n and c.reason == "adopted" for c in journal.fold.claims.values())
    if answer == "nobody" and not late and not adopted:
        await asyncio.sleep(journal.ack_wait_s)
        answer = await journal.store.ask(holder.worker, journal.run_id, holder.n)
    return answer in ("no", "nobody") or (answer == "silent" and late)


def indeterminate(journal: Journal, start: StepStarted) -> IndeterminateError:
    return IndeterminateError(
        f"run {journal.run_id}: step {start.step} was started (record {start.n}) and nobody knows "
        "whether it happened",
        step=start.step,
        run_id=journal.run_id,
        hint=f"find out, then `runfold reconcile {journal.run_id} {start.step} --done JSON` or "
        "`--retry`",
    )


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
