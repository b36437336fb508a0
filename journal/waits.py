"""Core: what a run waits for, what ends a wait, and who acts next (R7, R63).

A run is runnable where a holder would have something to do. Times enter as an argument: a wait for
an instant is over for whoever can name a later one; a clock that is wrong makes a wake-up early or
late, never unsafe, because every claim and step is decided by the journal alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct, structs

from .records import NO_WAITS, Asked, Commit, Park, Release, RunCompleted, Status

if TYPE_CHECKING:
    from .codec import Entry
    from .fold import Fold

Why: TypeAlias = Literal["approval", "reconcile", "retry", "pause", "turn"]


_ENDS = (Release, Park, RunCompleted, Commit)


class Wait(Struct, frozen=True, kw_only=True):
    """What a park or a waiting commit, record `n`, left the run waiting for."""

    n: int
    at: str
    why: Why
    until: str = ""
    for_input: bool = False
    child: str = ""
    resume: bool = False
    reason: str = ""
    steps: tuple[str, ...] = ()


def wait_of(record: Park | Commit) -> Wait | None:
    """The wait that this record begins; None for a commit that goes on at once."""
    if isinstance(record, Park):
        return Wait(
            n=record.n,
            at=record.at,
            why=record.why,
            until=record.until,
            resume=record.why == "pause",
            reason=record.reason,
            steps=record.steps,
        )
    waits = record.waits
    if waits == NO_WAITS:
        return None
    return Wait(
        n=record.n,
        at=record.at,
        why="turn",
        until=waits.until,
        for_input=waits.until_input,
        child=waits.until_child,
        resume=waits.resume,
        reason=record.reason,
    )


def runnable(fold: Fold, now: str = "") -> bool:
    """Whether a holder would have something to do. `now`: an instant, as records write it; without
    one no wait for a time is over."""
    if needs_person(fold):
        return False
    if fold.cancel is not None:
        return True
    wait = fold.wait
    if wait is not None:
        if due(wait.until, now):
            return True
        match wait.why:
            case "retry":
                late = any(fold.steps[name].late for name in wait.steps if name in fold.steps)
                return late or fold.resumed > wait.n
            case "pause":
                return fold.resumed > wait.n
            case "turn":
                return _turn_goes_on(fold, wait)
            case "approval" | "reconcile":
                pass
    if fold.unknown():  # its policy settles it
        return True
    return _calls_to_make(fold)


def needs_person(fold: Fold) -> bool:
    """Whether a write is unknown that only a person can settle."""
    return any(step.needs_person for step in fold.open.values())


def asked(fold: Fold) -> list[Asked]:
    """All calls that wait for a decision, of a reply or of a turn handler."""
    reply = fold.reply
    found = [
        Asked(
            marker=verdict.marker,
            step=reply.steps[index],
            tool=reply.reply.calls[index].name,
            input=reply.arguments(index),
            text=verdict.text,
        )
        for index, verdict in fold.pending()
        if reply is not None
    ]
    return found + [ask for ask in fold.asks if ask.marker not in fold.decisions]


def other_code_may(fold: Fold, revision: str) -> bool:
    """Whether a run that is paused because the code changed may be tried with this revision's: it
    has not been yet (R43)."""
    wait = fold.wait
    return (
        wait is not None
        and wait.why == "pause"
        and bool(fold.mismatched)
        and revision not in fold.mismatched
        and not needs_person(fold)
    )


def _turn_goes_on(fold: Fold, wait: Wait) -> bool:
    return (
        (wait.resume and fold.resumed > wait.n)
        or (wait.for_input and bool(fold.queued()))
        or (bool(wait.child) and fold.children.get(wait.child) is not None)
    )


def _calls_to_make(fold: Fold) -> bool:
    """False only where every call that is left waits for a person's decision."""
    if fold.asks:
        return any(ask.marker in fold.decisions for ask in fold.asks)
    if fold.reply is None or not fold.reply.steps:
        return True
    waiting = {index for index, _ in fold.pending()}
    if not waiting:
        return True
    return any(
        index not in waiting and not fold.done(step) for index, step in enumerate(fold.reply.steps)
    )


def would_go_on(fold: Fold, record: Park | Commit) -> bool:
    """Whether something that ends the wait this record would begin is there already."""
    after = fold.copy()
    record = structs.replace(record, n=fold.n + 1)
    if isinstance(record, Park):
        after.park(record)
    else:
        after.commit(record)
    return runnable(after)


def status(fold: Fold, *, held: bool = False, now: str = "") -> Status:
    """The run's status word (R6). `held`: a lock or answer says that somebody runs it now."""
    if fold.newer is not None:
        return "newer"
    match fold.end:
        case RunCompleted():
            return "completed"
        case Commit(action="fail"):
            return "failed"
        case Commit():
            return "cancelled"
        case None:
            pass
    if held or fold.claim is not None or runnable(fold, now):
        return "running"
    if needs_person(fold):
        return "indeterminate"
    if fold.wait is not None and fold.wait.resume:
        return "paused"
    if fold.wait is not None and fold.wait.why in ("retry", "turn"):
        return "waiting"
    return "awaiting_approval"


def status_after(fold: Fold, entry: Entry) -> Status:
    """The status that the next record leaves. Under a live claim all but its ends leave it running:
    no fold needed, which keeps a step's cost flat."""
    if fold.claim is not None and not isinstance(entry.record, _ENDS):
        return "running"
    after = fold.copy()
    after.apply(entry)
    return after.status()


def wakes_at(fold: Fold) -> str:
    """The instant at which the wait ends by itself; empty where none does, or somebody holds it."""
    return fold.wait.until if fold.wait is not None and fold.claim is None else ""


def due(until: str, now: str) -> bool:
    """Whether the instant `until` has come at `now`; both as records write them."""
    return bool(until) and bool(now) and parse_instant(until) <= parse_instant(now)


def parse_instant(text: str) -> datetime:
    """An instant as records write it (RFC 3339 UTC). Raises ValueError for what is none, also for
    one that has no date in UTC (9999-12-31T23:59-14:00)."""
    found = datetime.fromisoformat(text)
    try:
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except OverflowError as error:
        raise ValueError(f"{text!r} is no instant in UTC") from error


def instant_text(when: datetime) -> str:
    """RFC 3339 UTC with milliseconds, of an aware instant."""
    return when.astimezone(UTC).isoformat("T", "milliseconds")[: -len("+00:00")] + "Z"
