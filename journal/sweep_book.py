"""Core: which runs of one journal stream a sweep has to look at, by what it read of their records.

A pass costs what changed since the last one, and what is due: not what there is. A run is either

- `open`: something may have to be done for it now; looked at again and again, in turn;
- `due`: it rests until an instant that its wait names, looked at then;
- or it is not kept at all: it has ended, or its last record begins a wait that no time and no child
  ends. Only a record moves such a run on, and every record behind `seen` is still to be noted.

So no run is lost: what was listed is known up to `seen`, and what comes is noted in the stream's
order, without a gap. Memory is bounded: where there are more than KEPT_MAX of either, some are let
go, and all are listed again once those kept have had their turn, or the first let go is due.
"""

from __future__ import annotations

import heapq
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from .codec import Damage, decode
from .fold import Fold
from .ids import RunId
from .records import Commit, Park
from .waits import Wait, needs_person, other_code_may, parse_instant, wait_of

KEPT_MAX: Final = 10_000
"""Of either; some 250 bytes each, so at most 5 MB for a journal stream."""

FOLLOWED_MIN: Final = 2_000
FOLLOWED_RUNS: Final = 2
"""More records than so many, and than so many for each run, cost more than to list all anew."""

RESTING = frozenset({"waiting", "paused", "awaiting_approval", "indeterminate"})
"""By the header of a run's last record, which knows no time: these may be overdue."""

OVER = frozenset({"completed", "failed", "cancelled", "purged"})

Rest: TypeAlias = Literal["open", "ended"] | float
"""Of a run: to be looked at; that it rests until a record comes; or an instant (seconds since
1970)."""


class Mark(Struct, frozen=True, gc=False):
    """Of a run that is kept: its last record's sequence, and when that was stored, by the server's
    clock; of one in `due` when its wait is over. In seconds since 1970."""

    seq: int
    stored: float
    until: float = 0.0


class Book:
    """Of one stream. `seen`: the sequence up to which all is noted; None: nothing is."""

    def __init__(self) -> None:
        self.seen: int | None = None
        self.open: dict[RunId, Mark] = {}  # who had no turn for longest comes first
        self.due: dict[RunId, Mark] = {}
        self._created = ""
        self._let_go = False  # of `open`
        self._turns_left = 0
        self._cursor = ""
        self._horizon = float("inf")

    # ---- what was read ----------------------------------------------------------------------

    def must_list(self, created: str, last: int, runs: int, now: float) -> bool:
        """Whether all runs are to be noted anew, for a stream made at `created` that has `last` as
        its last sequence."""
        if self.seen is None or created != self._created or last < self.seen:
            return True  # never, or it was put back from a backup
        if last - self.seen > max(FOLLOWED_MIN, FOLLOWED_RUNS * runs):
            return True  # not needed for safety
        if now >= self._horizon and all(mark.until > now for mark in self.due.values()):
            return True
        return self._let_go and self._turns_left <= 0

    def begin(self, created: str) -> None:
        """All runs are noted now."""
        self.open, self.due = {}, {}
        self.seen, self._created = None, created
        self._let_go, self._horizon = False, float("inf")

    def listed(self, up_to: int) -> None:
        """All were noted, each as of this sequence or a later one; 0: of none that is known."""
        self.seen = up_to or None
        self._trim()
        self._turns_left = len(self.open)
        self._cursor = max(self.open, key=self._order) if self._let_go else ""

    def note(self, run: RunId, word: str | None, mark: Mark, data: bytes) -> None:
        """The run's last record as of now, with the status word it left."""
        self.open.pop(run, None)
        self.due.pop(run, None)
        if word not in OVER:
            rest = _rests(data) if word in RESTING else "open"
            self._keep(run, mark, rest)

    # ---- whose turn it is -------------------------------------------------------------------

    def turn(self, now: float, stored_before: float, runs_max: int) -> list[tuple[RunId, Mark]]:
        """Up to so many runs that are due, and so many that are open since; they are open again,
        behind all others, until `looked` says what became of them."""
        over = [one for one in self.due.items() if one[1].until <= now][:runs_max]
        old = [one for one in self.open.items() if one[1].stored <= stored_before][:runs_max]
        for run, mark in (*over, *old):
            self.due.pop(run, None)
            self.open.pop(run, None)
            self.open[run] = mark
        self._turns_left -= len(old)
        return [*over, *old]

    def looked(self, run: RunId, rest: Rest) -> None:
        """What the run's journal told, up to its mark or behind it."""
        if run in self.open:
            self._keep(run, self.open.pop(run), rest)

    def _keep(self, run: RunId, mark: Mark, rest: Rest) -> None:
        match rest:
            case "ended":
                return
            case "open":
                self.open[run] = mark
            case instant:
                self.due[run] = Mark(mark.seq, mark.stored, instant)
        if max(len(self.open), len(self.due)) >= 2 * KEPT_MAX:
            self._trim()

    def _trim(self) -> None:
        if len(self.due) > KEPT_MAX:
            kept = heapq.nsmallest(KEPT_MAX + 1, self.due.items(), key=lambda one: one[1].until)
            self._horizon = min(self._horizon, kept.pop()[1].until)
            self.due = dict(kept)
        if len(self.open) > KEPT_MAX:
            self._let_go = True
            ids = heapq.nsmallest(KEPT_MAX, self.open, key=self._order)
            self.open = {run: self.open[run] for run in ids}

    def _order(self, run: RunId) -> tuple[bool, str]:
        """Behind those kept the last time, so that each has its turn."""
        return run <= self._cursor, run


def rest_of(fold: Fold, revision: str | None = None) -> Rest:
    """Of a run whose journal was read. `revision`: of the worker that asks."""
    if fold.newer is not None or fold.finished:
        return "ended"
    if fold.claim is not None:
        return "open"
    if needs_person(fold):
        return "ended"
    wait = fold.wait
    if fold.runnable() or wait is None:
        return "open"
    if revision is not None and other_code_may(fold, revision):
        return "open"
    return _rest_in(wait)


def _rests(data: bytes) -> Rest:
    """Of a run whose last record left it resting. Where that record began the wait, nothing that
    ends it was there (PROTOCOL 3), and it tells all."""
    try:
        record = decode(data)
    except Damage:
        return "open"
    wait = wait_of(record) if isinstance(record, Park | Commit) else None
    if wait is None or wait.resume:  # other code may take it up: its journal tells
        return "open"
    return _rest_in(wait)


def _rest_in(wait: Wait) -> Rest:
    if wait.child:
        return "open"
    return parse_instant(wait.until).timestamp() if wait.until else "ended"
