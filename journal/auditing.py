"""Shell: journals under audit, each read once and in pages, with its headers (R70)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct

from .at_once import at_once
from .audit import Auditor, Violation
from .errors import JournalDamaged
from .ids import RunId
from .limits import RECORD_BYTES_MAX
from .store import RawRecord
from .stores.jetstream_headers import NOT_OURS, HeaderCheck, status_of

AT_ONCE = 8
"""Journals read at once: enough to hide the server's answer time; each holds a page."""

STORE_RULES: Mapping[str, str] = MappingProxyType(
    {
        "header": "A message's headers say what its journal says, and what it was appended behind.",
        "size": "No line is longer than a record may be.",
        "unreadable": "All of a journal can be had.",
        "lost": "What was read once is still there (only an audit that goes on sees that).",
        "newer": "This version can judge it all (a rule for an audit that goes on; else a note).",
    }
)
"""Rules beside those of `audit.RULES`: what a store has to keep."""

VIOLATIONS_LISTED = 100
"""Of one run; further ones are counted: a file of garbage says nothing new with each line."""


class Journals(Protocol):
    """Where journals are read as they stand: a store, a bridge, a file."""

    def stored(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Sequence[RawRecord], None]:
        """Raises JournalDamaged where no more can be had of it (a bridge)."""
        ...

    def runs(self, *, after: RunId | None = None) -> AsyncIterator[RunId]: ...


class Audited(Struct, frozen=True, kw_only=True):
    """What became of one run. `records`: how many were read; `unlisted`: violations beside those
    listed; `newer`: what the first record is that this version can't judge; `torn`: bytes at a
    file's end that were never acknowledged."""

    run: RunId
    records: int
    violations: tuple[Violation, ...] = ()
    unlisted: int = 0
    newer: str | None = None
    torn: int = 0


class RunAudit:
    """One run's journal, record by record. `position`: as in RawRecord, of the last one."""

    def __init__(self, run_id: RunId) -> None:
        self.run_id = run_id
        self.records = 0
        self.position = 0
        self.torn = 0
        self._blank = 0
        self._auditor = Auditor(run_id)
        self._headers = HeaderCheck()

    @property
    def n(self) -> int:
        """The last record's ordinal."""
        return self._auditor.n

    @property
    def newer(self) -> str | None:
        """What the first record is that this version can't judge."""
        return self._auditor.newer

    @property
    def ended(self) -> bool:
        """Whether the run has ended, as far as it can be told."""
        return self._auditor.ended

    @property
    def purged(self) -> bool:
        return self._auditor.purged

    def take(self, record: RawRecord) -> tuple[Violation, ...]:
        """What the next record breaks."""
        self.torn = 0
        if record.flaw == "torn" and (self.records or record.data[:1] in (b"{", b"\0")):
            self.torn = len(record.data)  # of a record that nobody was told is stored
            return ()
        if not record.data and not self.records and record.headers is None:
            self._blank += 1  # a file of line ends alone is no journal yet
            return ()
        blank, self._blank = self._blank, 0
        found = tuple(one for _ in range(blank) for one in self._take(RawRecord(b"")))
        return found + self._take(record)

    def _take(self, record: RawRecord) -> tuple[Violation, ...]:
        self.records += 1
        self.position = record.position
        if record.headers is None:
            found = self._auditor.take(record.data)
        else:
            status = status_of(record.headers)
            found = self._auditor.take(record.data, status=status, shared=True)
            for text in self._headers.broken(record):
                if self.newer is None or text == NOT_OURS:  # a newer version has other words
                    found += (Violation(self.n, "header", text),)
        if record.flaw == "cut":
            text = f"it is longer than a record may be ({RECORD_BYTES_MAX} bytes)"
            found += (Violation(self.n, "size", text),)
        return found


async def audit_pages(run: RunId, pages: AsyncGenerator[Sequence[RawRecord], None]) -> Audited:
    """The journal in these pages, from its first record on."""
    audit, listed, unlisted = RunAudit(run), list[Violation](), 0
    try:
        async with aclosing(pages):
            async for page in pages:
                for record in page:
                    found = audit.take(record)
                    listed += found[: VIOLATIONS_LISTED - len(listed)]
                    unlisted += len(found)
    except JournalDamaged as damage:
        unlisted += 1
        listed.append(Violation(audit.n + 1, "unreadable", damage.message))
    return Audited(
        run=run,
        records=audit.records,
        violations=tuple(listed),
        unlisted=unlisted - len(listed),
        newer=audit.newer,
        torn=audit.torn,
    )


async def audit_run(journals: Journals, run: RunId) -> Audited:
    """The run's journal as it is now. What is found is found twice: a purge may have taken records
    away in front of its tombstone while they were read."""
    audited = await audit_pages(run, journals.stored(run))
    return await audit_pages(run, journals.stored(run)) if audited.violations else audited


async def audit_each(
    journals: Journals, runs: AsyncIterator[RunId], take: Callable[[Audited], None]
) -> None:
    """Audit these runs, several at once; `take` gets them in their order."""
    reading: deque[asyncio.Task[Audited]] = deque()
    async with at_once() as group:
        async for run in runs:
            if len(reading) == AT_ONCE:
                take(await reading.popleft())
            reading.append(group.create_task(audit_run(journals, run)))
        while reading:
            take(await reading.popleft())
