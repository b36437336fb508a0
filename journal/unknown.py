"""Shell: what becomes of a write that was cut off: its policy, its retry, a person (R22, R27).

Why it is safe: nothing here calls a write. It records what settles one (a result, `interrupted`, a
permit), each only while its start is still the unknown one at the tail; and it says when the call
of that start can no longer be running.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from msgspec import Struct

from .errors import IndeterminateError, RunfoldError
from .fold import Fold
from .limits import PROBE_RETRIES_MAX, PROBE_TIMEOUT_S
from .records import Interrupted, Park, Signal, StepCompleted, StepStarted
from .step_state import StepState
from .steps import Ask, Call, CannotTell, DidNotHappen, Happened, Probe, Probed
from .values import recordable
from .waits import parse_instant

if TYPE_CHECKING:
    from .handle import Journal

log = logging.getLogger("runfold")


class RetryLater(RunfoldError):
    """A permitted retry waits until the earlier call can no longer be running (R22)."""

    code = "waiting"

    def __init__(self, message: str, *, step: str, until: str, run_id: str) -> None:
        super().__init__(message, run_id=run_id)
        self.step = step
        self.until = until


class Ways(Struct, frozen=True):
    """Beside the journal: the `key` of the same safe call in an earlier attempt; the tool's
    `probe`; `honoured`, the unsafe step of an earlier attempt that this call is matched to (R44);
    `unless`: where it is true of the fold nothing is started; `record_id`: that of the start.
    """

    key: str = ""
    record_id: str = ""
    probe: Probe | None = None
    honoured: StepState | None = None
    unless: Callable[[Fold], bool] | None = None

    def superseded(self, fold: Fold) -> bool:
        return self.unless is not None and self.unless(fold)


class Superseded(Exception):
    """`unless` came true before the step was started."""


NO_WAYS = Ways()


async def settle(journal: Journal, call: Call, ask: Ask, probe: Probe | None) -> bool:
    """What the write's policy makes of an unknown outcome (R27); False: a person is asked.

    The journal's word for the policy and today's must agree: a tool that says otherwise by now has
    not promised what the start relied on.
    """
    start = ask.start
    if ask.policy == "reconcile" or call.policy != ask.policy:
        return False
    if journal.store.shared and not journal.claim:  # opened for looking at
        return False
    if ask.policy == "interrupt":
        await _interrupt(journal, start)
        return True
    if probe is None or not may_probe(journal.fold, call, ask):
        return False
    await wait_over(journal, start)  # else the probe's word is not the last
    match await _probed(probe, start):
        case Happened(result):
            value = recordable(result, f"the probe's result of {start.step}")
            happened = StepCompleted(step=start.step, result=value, via="probe")
            await journal.append(lambda fold: happened if _still_unknown(fold, start) else None)
            return True
        case DidNotHappen():
            permit = Signal(
                name="reconcile",
                request_id=f"probe:{start.n}",
                payload={"step": start.step, "outcome": "retry", "start": start.n},
            )
            # the call did end here without a result, or was another process's
            journal.attempted.discard(start.n)
            await journal.append(lambda fold: permit if _still_unknown(fold, start) else None)
            return True
        case CannotTell():
            return False


def may_probe(fold: Fold, call: Call, ask: Ask) -> bool:
    """Whether a probe would settle it: its word counts for both, and so often only."""
    probes = ask.policy == call.policy == "probe"
    return probes and len(fold.steps[ask.start.step].starts) <= PROBE_RETRIES_MAX


async def settle_without_code(journal: Journal, step: StepState) -> bool:
    """Settle an unknown write whose recorded policy needs no tool; False: a person is asked."""
    start = step.last
    if step.needs_person or start.policy != "interrupt":
        return False
    await _interrupt(journal, start)
    return True


async def _interrupt(journal: Journal, start: StepStarted) -> None:
    partial = journal.fold.steps[start.step].partial
    body = StepCompleted(
        step=start.step, interrupted=Interrupted(partial=partial), via="interrupted"
    )
    await journal.append(lambda fold: body if _still_unknown(fold, start) else None)


def _still_unknown(fold: Fold, start: StepStarted) -> bool:
    step = fold.steps.get(start.step)
    return not fold.finished and step is not None and step.unknown and step.last.n == start.n


async def _probed(probe: Probe, start: StepStarted) -> Probed:
    """The probe's answer; one that fails, or takes long, can't tell."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            answer = await probe(start.key)
    except Exception as error:
        log.warning(
            "the probe of %s failed: %s: %s",
            start.step,
            type(error).__name__,
            error,
            extra={"step": start.step},
        )
        return CannotTell(type(error).__name__)
    if isinstance(answer, Happened | DidNotHappen | CannotTell):  # pyright: ignore[reportUnnecessaryIsInstance]
        return answer
    log.warning(
        "the probe of %s answered %r, which is no answer",
        start.step,
        answer,
        extra={"step": start.step},
    )
    return CannotTell("no answer")


async def doubt(journal: Journal, *starts: StepStarted) -> None:
    """Where the journal alone calls open steps safe and the code of today does not, say so in the
    journal, or nobody could ever reconcile them (R7, R42)."""

    def due(fold: Fold) -> Park | None:
        doubted = [
            start.step
            for start in starts
            if (step := fold.steps.get(start.step)) is not None
            and step.completed is None
            and not step.unsafe
        ]
        if fold.finished or not doubted:
            return None
        return Park(
            why="reconcile",
            steps=tuple(doubted),
            iteration=fold.iteration,
            attempt=fold.attempt,
        )

    if not journal.store.shared or journal.claim:
        await journal.append(due)


async def wait_over(journal: Journal, start: StepStarted) -> None:
    """Raises RetryLater while the call of this start may still be running (R22)."""
    step = journal.fold.find(start.step, start.n)
    if (step is None or step.unsafe) and not await _earlier_over(journal, start):
        raise RetryLater(
            f"the earlier call of {start.step} may still be running",
            step=start.step,
            until=start.deadline,
            run_id=journal.run_id,
        )


async def _earlier_over(journal: Journal, start: StepStarted) -> bool:
    """Whether the call of this start can no longer be running (PROTOCOL 3).

    A lock is held as long as a call under it runs (Journal.close). On a shared store the worker is
    asked, and its yes counts for more than any deadline, its no for as much; but not that of who
    answers for a remote one. That nobody answers proves nothing: a worker that is cut off lives,
    and calls. So then, and in silence, only the deadline tells.
    """
    if journal.calls_on() or start.n in journal.left:
        return False
    if not journal.store.shared or start.claim == journal.claim:
        return True
    late = bool(start.deadline) and datetime.now(UTC) >= parse_instant(start.deadline)
    holder = journal.fold.claims.get(start.claim)
    if holder is None:  # no claim to ask about: only the deadline tells
        return late
    answer = await journal.store.ask(holder.worker, journal.run_id, holder.n)
    if answer == "no" and not holder.remote:
        return True
    return late and answer != "yes"


def indeterminate(journal: Journal, start: StepStarted) -> IndeterminateError:
    return IndeterminateError(
        f"run {journal.run_id}: step {start.step} was started (record {start.n}) and nobody knows "
        "whether it happened",
        step=start.step,
        run_id=journal.run_id,
        hint=f"find out, then `runfold reconcile {journal.run_id} {start.step} --start {start.n} "
        "--done JSON` or `--retry`",
    )
