"""Core: whether what a journal says of itself, in summaries and status headers, is what its records
make (R70). The only part of the audit that asks the fold, for that is what both are promised to be.
"""

from __future__ import annotations

from msgspec import UNSET

from .audit_book import Findings
from .codec import Damage, Entry
from .fold import Fold
from .records import Commit, RunPurged, Status, Summary
from .summary import is_restart_point, restored, summary_after


class Shadow:
    """The full fold beside the audit. Once a record broke a rule it is worth nothing, until a
    commit that sums up what was before it."""

    def __init__(self) -> None:
        self._fold: Fold | None = Fold()
        self._first: Entry | None = None

    def lose(self) -> None:
        """A record broke a rule: what the fold makes of it says nothing."""
        self._fold = None

    def take(self, entry: Entry, status: Status | None) -> Findings:
        """What the record says wrongly of the run."""
        record = entry.record
        if self._first is None and isinstance(record, RunPurged):
            if status not in (None, "completed", "failed", "cancelled"):
                yield "purge", f"its header says {status}: a run was purged that had not ended"
            return
        self._first = self._first or entry
        if self._fold is None:
            self._restore(entry)
            return
        if isinstance(record, Commit) and record.summary is not UNSET:
            yield from _summed_up(self._fold, record, record.summary)
        try:
            self._fold.take(entry)
            found = self._fold.status() if status is not None else None
        except (Damage, LookupError, ValueError, TypeError, AttributeError, AssertionError):
            self._fold = None  # a fault that this audit has no rule for: the fold's own matter
            return
        if status != found:
            yield "status", f"its header says {status}, and the run is {found}"

    def _restore(self, entry: Entry) -> None:
        if self._first is not None and is_restart_point(entry.record):
            try:
                self._fold = restored(self._first, entry)
            except Damage:
                self._fold = None


def _summed_up(fold: Fold, record: Commit, summary: Summary) -> Findings:
    wanted = summary_after(fold, record)
    wrong = [
        name
        for name in Summary.__struct_fields__
        if getattr(summary, name) != getattr(wanted, name)
    ]
    if wrong:
        yield "summary", f"its summary differs from the records before it: {', '.join(wrong)}"
