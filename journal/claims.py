"""Core: who may take a run on a shared store (PROTOCOL 4).

Why it is safe: a claim is an append at the tail at which this module said Take, so of two takers
one loses and reads the other's claim; the holder before loses its next append and reads a newer
claim. Asking the holder only keeps a live holder from losing its run; no answer makes it unsafe.
Task messages are hints: what they say never decides more than whom to ask and what to settle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from .fold import Fold
from .limits import HELD_BACK_DELIVERIES, HOLDER_GRACE_S
from .waits import due, other_code_may, wakes_at

Answer: TypeAlias = Literal["yes", "no", "nobody", "silent"]
Reason: TypeAlias = Literal["new", "redelivery", "wake", "retry", "adopted"]


class Take(Struct, frozen=True):
    """Append a claim with this reason. `lost`: it would be the restart limit's: end the run."""

    reason: Reason
    lost: bool = False


class AskHolder(Struct, frozen=True):
    """Ask `worker` whether it holds the run under claim `claim`, `after_s` seconds from now."""

    worker: str
    claim: int
    after_s: float


class HeldBy(Struct, frozen=True):
    """Leave it: `worker` holds the run, or (`silent`) does not answer but is connected."""

    worker: str
    silent: bool


class Rest(Struct, frozen=True):
    """Nothing to do for a holder: the run has ended, or a person must act first."""


ClaimDecision: TypeAlias = Take | AskHolder | HeldBy | Rest


def decide_claim(
    fold: Fold, answers: Sequence[Answer], *, ack_wait_s: float, now: str = ""
) -> ClaimDecision:
    """What a would-be holder does at this fold; `answers` are those about the live claim, in order.

    No responder twice means gone, because clients reconnect within the grace between; with an open
    write the second ask comes after the ack wait: nothing is gained by asking a person sooner.
    """
    assert fold.newer is None
    if fold.finished:
        return Rest()
    if fold.claim is None:
        if not fold.runnable(now):
            return Rest()
        return Take(_reason(fold))
    live = fold.claim
    match list(answers):
        case []:
            return AskHolder(live.worker, live.n, 0.0)
        case [*_, "yes"]:
            return HeldBy(live.worker, silent=False)
        case [*_, "silent"]:
            return HeldBy(live.worker, silent=True)
        case [*_, "no"] | [*_, "nobody", "nobody"]:
            return Take("adopted")
        case _:
            after = ack_wait_s if fold.unknown() else HOLDER_GRACE_S
            return AskHolder(live.worker, live.n, after)


def live_claim(fold: Fold) -> int:
    """The n of the live claim, 0 without one: what answers are about."""
    return fold.claim.n if fold.claim else 0


def _reason(fold: Fold) -> Reason:
    if not fold.claims and not fold.committed:  # a restored fold lacks the claims before its commit
        return "new"
    return "retry" if fold.wait is not None and fold.wait.why == "retry" else "wake"


# ---- a worker with a task message ------------------------------------------------------------


class Delivery(Struct, frozen=True, kw_only=True):
    """The task message that says "look at the run": `sequence` of the message, how often it was
    delivered, and the `cause`, the n of a record that a current read must hold."""

    sequence: int
    delivery: int
    cause: int


class Finished(Struct, frozen=True):
    """The run has ended: do what its end owes, ack."""


class Resting(Struct, frozen=True):
    """It waits: publish its schedule again where it has one (`until`), ack."""

    until: str


class NotMine(Struct, frozen=True):
    """Not for this worker: nak with a delay; somebody else may take it."""

    why: str


class HeldBack(Struct, frozen=True):
    """It is on its last chance, and so is a run that this worker holds: nak, soon again."""


class Stale(Struct, frozen=True):
    """The read ends before the record that caused the task: read again, settle nothing."""


class Leave(Struct, frozen=True):
    """The owner's in-progress holds this very message: touch nothing."""


class Drop(Struct, frozen=True):
    """Somebody holds the run, or will be dispatched anew: ack this hint."""


TaskDecision: TypeAlias = (
    Take | AskHolder | Finished | Resting | NotMine | HeldBack | Stale | Leave | Drop
)


def on_last_chance(restarts: int, restart_limit: int) -> bool:
    """Whether a run that lost so many workers in a row fails with the next one. What kills its
    workers takes other runs with it each time, and all of them come back together: those with so
    many losses as this go one at a time on a worker, so that it kills none of them for good."""
    return max(1, restart_limit - 1) <= restarts < restart_limit


def decide_task(
    fold: Fold,
    task: Delivery,
    answers: Sequence[Answer],
    *,
    agent: str,
    accepts: Sequence[str],
    now: str,
    ack_wait_s: float,
    restart_limit: int,
    crowded: bool = False,
) -> TaskDecision:
    """What a worker does about a task at this fold. `accepts`: the revisions it may run, its own
    first; `answers` about the live claim, in order; `crowded`: it holds a run on its last chance.
    A damaged journal never gets here."""

    def take(reason: Reason, restarts: int) -> Take | HeldBack:
        waited = task.delivery > HELD_BACK_DELIVERIES or fold.cancel is not None
        if crowded and not waited and on_last_chance(restarts, restart_limit):
            return HeldBack()
        return Take(reason, lost=restarts >= restart_limit)

    if fold.n < task.cause:
        return Stale()
    if fold.purged is not None:
        return Drop()
    if fold.newer is not None:
        return NotMine(f"it holds a record of a newer version: {fold.newer}")
    if fold.started is None or fold.started.agent != agent:
        return Drop()  # of another agent: its own task is elsewhere
    if fold.finished:
        return Finished()
    if fold.revision and fold.revision not in accepts:
        return NotMine(f"it is bound to revision {fold.revision}")
    if fold.claim is None:
        if not fold.runnable(now) and not other_code_may(fold, accepts[0]):
            until = wakes_at(fold)  # a time that has come woke nobody: a person must act first
            return Resting("" if due(until, now) else until)
        return take(_reason(fold), fold.restarts)
    live = fold.claim
    same = live.task == task.sequence
    # A message that comes again was not held for the ack wait.
    came_again = same and task.delivery > live.delivery
    restarts = fold.restarts + 1  # with the holder that is gone
    match list(answers):
        case []:
            return AskHolder(live.worker, live.n, 0.0)
        case [*_, "yes"]:
            return Leave() if same else Drop()
        case [*_, "silent"]:
            if came_again:
                return take("redelivery", restarts)
            return Leave() if same else Drop()
        case [*_, "no"] | [*_, "nobody", "nobody"]:
            return take("adopted", restarts)  # it was asked: what "redelivery" can't say
        case _:
            after = ack_wait_s if fold.unknown() and not came_again else HOLDER_GRACE_S
            return AskHolder(live.worker, live.n, after)
