"""Journals that no writer makes: well sealed and chained, and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from journal.audit import Violation, audit
from journal.codec import Damage, Entry
from journal.records import Record, Status

from .build import RUN, Log


class Forged(Log):
    """A journal whose further records are written whatever the fold says of them."""

    def forge(self, body: Record, *, status: Status | None = None, **envelope: Any) -> int:
        """Append the body exactly as it is; its ordinal."""
        entry = msgspec.structs.replace(self.sealed(body, **envelope), status=status)
        try:
            self.fold.take(entry)
        except (Damage, AssertionError, AttributeError, LookupError, TypeError, ValueError):
            self.fold.mark(entry)  # its fold is beyond repair; the chain goes on
        self.entries.append(entry)
        return entry.record.n

    def wrong(self) -> list[tuple[int, str]]:
        """What the audit says, as ordinals and rules."""
        return told(self.entries)


def told(entries: Sequence[Entry]) -> list[tuple[int, str]]:
    """What the audit says of run a1, as ordinals and rules."""
    return [(found.n, found.rule) for found in said(entries)]


def said(entries: Sequence[Entry]) -> tuple[Violation, ...]:
    return audit(RUN, entries)
