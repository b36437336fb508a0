"""Core: whether the journal of a run that has ended may be removed now (R15).

Why it is safe, in the order of what is done (purging.py):

1. The journal is read; then the store's stamp on its last record. `decide_purge` says Purge only of
   a run that has ended, whose time is over by every clock there is, that nothing waits for, and
   that an audit finds nothing wrong with.
2. What its end owes is paid; where it is to be kept, a copy of it is synced.
3. A tombstone is appended by compare-and-swap at the very record that was judged. A `resume`, or
   whatever else came in between, makes it lose, and the run is kept. Behind a tombstone nothing may
   stand: no resume, no claim, no start under the same id (order.py, steps.py).
4. Only then the records before the tombstone are removed. A crash between leaves a tombstone with
   records before it: purged for every reader; whoever purges next removes them.

A child goes after its parent's tombstone, never before. A parent that goes on, or that `resume`
could reopen, may read a child's answer, and must be told of its end (owed.py); one with a tombstone
never will again, so no race is left.

Time: a run ended at the later of what its record says and what the store stamped; it is now the
earlier of the store's time and ours. So any one clock that is wrong makes a purge late, not early.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal, TypeAlias, assert_never

from msgspec import Struct

from .fold import Fold
from .limits import RETENTION_S
from .store import Stamp
from .views import instant
from .waits import instant_text

FINISHED = frozenset({"completed", "failed", "cancelled"})

Parent: TypeAlias = Literal["none", "purged", "there", "missing"]
"""Of a child run: `missing` has no journal at all here."""

Why: TypeAlias = Literal[
    "missing",
    "damaged",
    "newer",
    "running",
    "other",
    "young",
    "resumable",
    "child",
    "orphan",
    "flawed",
    "changed",
    "archive",
]
"""Why a run is kept; `flawed`: an audit finds something wrong with it."""


class Retention(Struct, frozen=True, kw_only=True):
    """What may go: runs that ended with one of these statuses, of this agent (any where None),
    `keep_s` ago; a failure that `resume` could reopen `resumable_s` ago. `flawed`: also what an
    audit finds fault with."""

    keep_s: float = RETENTION_S
    resumable_s: float = RETENTION_S
    statuses: frozenset[str] = FINISHED
    agent: str | None = None
    flawed: bool = False


class Evidence(Struct, frozen=True, kw_only=True):
    """What was found out beside the fold, as of its record `n`. `now`: by our own clock; `flaw`:
    the first that the audit found, "" where there is none."""

    n: int
    stamp: Stamp
    now: datetime
    parent: Parent
    flaw: str = ""


class Purge(Struct, frozen=True):
    """Append the tombstone here, then remove what is before it."""


class Finish(Struct, frozen=True):
    """There is a tombstone: remove what is before it."""


class Keep(Struct, frozen=True):
    """Not now. `text` is for people."""

    why: Why
    text: str


PurgeDecision: TypeAlias = Purge | Finish | Keep


def decide_purge(fold: Fold, wanted: Retention, found: Evidence) -> PurgeDecision:
    """What to do about the run at this fold. A damaged journal never gets here."""
    if fold.newer is not None:  # it may mean anything, also that the run goes on
        return Keep("newer", f"a newer version wrote to it: {fold.newer}")
    if found.flaw and not wanted.flawed:
        return Keep("flawed", f"an audit finds fault with it: {found.flaw}")
    if fold.purged is not None:
        return Finish()
    if fold.started is None:
        return Keep("missing", "it does not exist")
    if fold.end is None:
        return Keep("running", f"it is {fold.status()}; only finished runs are purged")
    if fold.n != found.n:
        return Keep("changed", "it went on and ended anew while it was looked at")
    return _by_parent(fold, found) or _by_time(fold, wanted, found) or _by_choice(fold, wanted)


def _by_parent(fold: Fold, found: Evidence) -> Keep | None:
    assert fold.started is not None
    parent = fold.started.parent
    match found.parent:
        case "none" | "purged":
            return None
        case "there":
            return Keep("child", f"its parent {parent} is there, and may ask for its answer")
        case "missing":
            return Keep("orphan", f"its parent {parent} has no journal here, and no tombstone")
        case other:
            assert_never(other)


def _by_time(fold: Fold, wanted: Retention, found: Evidence) -> Keep | None:
    ended = max(found.stamp.stored, instant(fold.head_at))
    age = min(found.stamp.now, found.now) - ended
    if _too_young(age, wanted.keep_s):
        return Keep("young", f"it ended at {instant_text(ended)}")
    if fold.can_reopen and _too_young(age, wanted.resumable_s):
        return Keep("resumable", f"it failed at {instant_text(ended)}, and resume can reopen it")
    return None


def _too_young(age: timedelta, keep_s: float) -> bool:
    """0: whatever its age, also where by one of the clocks it ends only later."""
    return keep_s > 0 and age < timedelta(seconds=keep_s)


def _by_choice(fold: Fold, wanted: Retention) -> PurgeDecision:
    assert fold.started is not None
    agent, status = fold.started.agent, fold.status()
    if status not in wanted.statuses or wanted.agent not in (None, agent):
        return Keep("other", f"it is {status}, of agent {agent}")
    return Purge()
