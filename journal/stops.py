"""Shell: a turn that can't be played, or stopped in the middle: the record that says so (R41-R47).

Why it is safe: ends.py writes each record only at a tail where nothing has come that would end the
wait, no write is unknown, and the run goes on; what comes first wins the sequence.
"""

from __future__ import annotations

from .ends import Ends
from .errors import (
    ChildFailed,
    Fenced,
    IndeterminateError,
    JournalDamaged,
    NewerVersion,
    NotEncodable,
    NotProvisioned,
    PermissionDenied,
    ReplayMismatch,
    RunCancelled,
    RunfoldError,
    StoreUnavailable,
    TooLarge,
)
from .limits import REASON_CHARS_MAX
from .records import Asked
from .stepping import Draining
from .unknown import RetryLater
from .values import Unrecordable
from .waits import needs_person

NOT_THE_TURNS = (
    Fenced,
    Draining,
    StoreUnavailable,
    NotProvisioned,
    PermissionDenied,
    JournalDamaged,
    NewerVersion,
)
"""What says nothing of the turn: whoever holds the run next goes on from the journal."""


class AwaitDecisions(Exception):
    """The turn can't go on before a person has decided. `asks`: a turn handler's calls."""

    def __init__(self, asks: tuple[Asked, ...] = ()) -> None:
        super().__init__("calls wait for approval")
        self.asks = asks


class BoundReached(Exception):
    """The turn reached a bound: the run fails with this reason (R47)."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


async def unplayed(ends: Ends, *, lost: int = 0, deaf: bool = False) -> bool:
    """Where no turn may be played now, write the record that says so: True. Else False.

    `lost`: so many holders in a row were lost (R52). `deaf`: the turn ignored its time limit.
    """
    fold, bounds = ends.journal.fold, ends.terms.bounds
    if fold.cancel is not None:
        await ends.cancelled()
    elif needs_person(fold):
        await ends.park("reconcile")
    elif lost:
        detail = f"{lost} workers in a row were lost without moving the run on"
        await ends.failed_untried("restart_limit", detail)
    elif ends.over():
        await ends.fail("duration", f"the run's {bounds.duration_s:g} s are over")
    elif deaf:
        detail = "the turn ignored its time limit and its cancellation"
        await ends.failed_untried("step_failed", detail)
    elif not ends.terms.loop and fold.iteration >= bounds.iterations:
        await ends.fail("iterations", f"{fold.iteration} turns made")
    else:
        return False
    return True


async def stopped(ends: Ends, error: Exception, *, attended: bool = False) -> None:
    """Record what `error`, which ended the turn, makes of the run; raises it again where it says
    nothing of the turn, or where somebody attends who runs it again."""
    journal = ends.journal
    match error:
        case AwaitDecisions():
            await ends.park("approval", asks=error.asks)
        case IndeterminateError():
            await ends.park("reconcile")
        case RetryLater() if not attended:
            await ends.retry_later(error)
        case RunCancelled():
            await journal.refresh()  # it is in the journal, if not yet in our fold
            if journal.fold.cancel is None and journal.stop == "cancel":
                journal.stop = None  # announced, and not there
        case ReplayMismatch() if not attended:
            await ends.park("pause", reason=error.message)
        case BoundReached():
            await ends.fail(error.reason, error.detail)
        case Unrecordable():
            await ends.fail("not_recordable", error.error.message[:REASON_CHARS_MAX])
        case NotEncodable() | TooLarge():
            await ends.fail("not_recordable", error.message[:REASON_CHARS_MAX])
        case ChildFailed():
            await ends.fail(error.code, error.message)
        case RunfoldError() if not attended and not isinstance(error, NOT_THE_TURNS):
            # a step failed, or the handler asked for what can't be
            await ends.failed_attempt(error.code, error.message)
        case _:
            raise error
