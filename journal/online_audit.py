"""Shell: a store under audit as it grows: all that is in it first, then what is appended (R70).

Each record is taken once, in the order of its run, and what it breaks is reported once. Nothing
hangs on being told of appends: a look asks the store itself how far it goes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from msgspec import Struct

from .audit import Violation
from .auditing import Journals, RunAudit
from .errors import RunfoldError
from .ids import RunId
from .store import RawRecord
from .stores.file import FileStore
from .stores.file_raw import Mark
from .stores.jetstream import JetStreamStore
from .stores.jetstream_headers import EXPECTED
from .stores.jetstream_raw import RawJournals

KEPT_RECORDS_MAX = 200_000
"""Of unfinished runs whose audits are kept, records taken: what they hold grows with these. A run
whose audit was dropped is read again from its start when it grows."""

_AUDIT_WEIGHT = 50
"""What an audit weighs without any record, in records."""

LOST_AFTER_S = 30.0
"""A leader that was deposed names an old end for some seconds (NATS.md)."""

Report = Callable[[RunId | None, Violation], None]
"""What breaks a rule; None: the store itself does."""


class OnlineAudit(Protocol):
    """`look` audits what is there and was not yet. `runs`, `records`: taken so far; `behind`: how
    much of what the store holds is known not to be, in records or files."""

    @property
    def runs(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def behind(self) -> int: ...
    async def look(self) -> None:
        """Raises StoreUnavailable, StoreLocked, PermissionDenied; the next look goes on."""
        ...


def online_audit(store: JetStreamStore | FileStore, report: Report) -> OnlineAudit:
    """Of all runs of the store, those to come as well."""
    if isinstance(store, JetStreamStore):
        kept = Kept()
        return StreamsAudit(
            [StreamAudit(store, journals, report, kept) for journals in store.journals]
        )
    return DirectoryAudit(store, report)


class Kept:
    """Audits of runs that go on; those that were longest untouched are dropped."""

    def __init__(self) -> None:
        self._audits: OrderedDict[RunId, RunAudit] = OrderedDict()
        self._weight = 0

    def take(self, run: RunId) -> RunAudit | None:
        audit = self._audits.pop(run, None)
        if audit is not None:
            self._weight -= audit.records + _AUDIT_WEIGHT
        return audit

    def put(self, audit: RunAudit) -> None:
        if audit.ended or not audit.records:
            return
        self._audits[audit.run_id] = audit
        self._weight += audit.records + _AUDIT_WEIGHT
        while self._weight > KEPT_RECORDS_MAX:
            _, oldest = self._audits.popitem(last=False)
            self._weight -= oldest.records + _AUDIT_WEIGHT

    def clear(self) -> None:
        self._audits.clear()
        self._weight = 0


async def read_again(
    journals: Journals, run: RunId, *, until: int
) -> tuple[RunAudit, tuple[Violation, ...]]:
    """A fresh audit of the run's records up to the position `until`, and what the last of them
    breaks."""
    audit, found = RunAudit(run), tuple[Violation, ...]()
    async with aclosing(journals.stored(run)) as pages:
        async for page in pages:
            for record in page:
                if record.position > until:
                    return audit, found
                found = judged(audit, record)
    return audit, found


def judged(audit: RunAudit, record: RawRecord) -> tuple[Violation, ...]:
    """What the next record breaks; that the audit can't judge what follows is one more."""
    before = audit.newer
    found = audit.take(record)
    if before is None and audit.newer is not None:
        what = f"{audit.newer}: from here on only the chain is checked: update this installation"
        found += (Violation(audit.n, "newer", what),)
    return found


class StreamsAudit:
    """Of all journal streams of a store."""

    def __init__(self, audits: Sequence[StreamAudit]) -> None:
        self._audits = audits

    @property
    def runs(self) -> int:
        return sum(audit.runs for audit in self._audits)

    @property
    def records(self) -> int:
        return sum(audit.records for audit in self._audits)

    @property
    def behind(self) -> int:
        return sum(audit.behind for audit in self._audits)

    async def look(self) -> None:
        """One that can't be read keeps none of the others from being audited."""
        errors: list[RunfoldError] = []
        for audit in self._audits:
            try:
                await audit.look()
            except RunfoldError as error:
                errors.append(error)
        if errors:
            raise errors[0]


class StreamAudit:
    """Of a journal stream, by its sequences: all up to `seen` were taken."""

    def __init__(
        self, store: JetStreamStore, journals: RawJournals, report: Report, kept: Kept
    ) -> None:
        self.runs = self.records = self.behind = self.seen = 0
        self._store = store
        self._journals = journals
        self._report = report
        self._kept = kept
        self._shorter_since: float | None = None
        self._created = ""

    async def look(self) -> None:
        end = await self._journals.end()
        last = end.last
        if self._created not in ("", end.created):
            self._lose(f"it was made anew, and was read up to sequence {self.seen}", 0)
        self._created = end.created
        if last < self.seen:
            self._shorter(last)
            return
        self._shorter_since = None
        self.behind = last - self.seen
        if not self.behind:
            return
        async with aclosing(self._journals.grown(self.seen)) as pages:
            async for page in pages:
                for run, record in page:
                    if run is not None:
                        await self._take(run, record)
                    self.seen = record.position
                self.behind = max(last - self.seen, 0)
        self.behind = 0

    async def _take(self, run: RunId, record: RawRecord) -> None:
        """Nothing is awaited between what is found and what is said of it."""
        first = record.headers is not None and record.headers.get(EXPECTED) == "0"
        kept = self._kept.take(run)
        audit = RunAudit(run) if kept is None and first else kept
        found = judged(audit, record) if audit is not None else ()
        if audit is None or found:  # dropped; or a purge took what is before its tombstone
            audit, found = await read_again(self._store, run, until=record.position)
        self.runs += first
        self.records += 1
        for violation in found:
            self._report(run, violation)
        if kept is not None and audit.records < kept.records and not audit.purged:
            what = f"{kept.records - 1} records were there, and {audit.records - 1} are left"
            self._report(run, Violation(audit.n, "lost", f"{what}: acknowledged ones are gone"))
        self._kept.put(audit)

    def _shorter(self, last: int) -> None:
        """The stream ends before what was read of it: a deposed leader, or a loss."""
        now = time.monotonic()
        if self._shorter_since is None:
            self._shorter_since = now
        elif now - self._shorter_since > LOST_AFTER_S:
            self._lose(f"it ends at sequence {last}, and was read up to {self.seen}", last)

    def _lose(self, what: str, seen: int) -> None:
        text = f"stream {self._journals.stream}: {what}: acknowledged records are gone"
        self._report(None, Violation(0, "lost", text))
        self._shorter_since, self.seen = None, seen
        self._kept.clear()


class _File(Struct, frozen=True):
    """A file's part up to `position` broke `found` rules."""

    mark: Mark
    position: int
    found: int


class DirectoryAudit:
    """Of a directory, by its files' marks. What was taken is read again only where a file's
    change was no append."""

    def __init__(self, store: FileStore, report: Report) -> None:
        self.runs = self.records = self.behind = 0
        self._store = store
        self._report = report
        self._kept = Kept()
        self._files: dict[RunId, _File] = {}

    async def look(self) -> None:
        marks = await self._store.marks()
        for run in self._files.keys() - marks.keys():
            gone = self._files.pop(run)
            self._kept.take(run)
            self._lost(run, gone.position, 0)
        changed = [run for run, mark in marks.items() if not self._known(run, mark)]
        for left, run in enumerate(sorted(changed)):
            self.behind = len(changed) - left
            await self._read(run, marks[run])
        self.behind = 0

    def _known(self, run: RunId, mark: Mark) -> bool:
        known = self._files.get(run)
        return known is not None and known.mark == mark

    async def _read(self, run: RunId, mark: Mark) -> None:
        before = self._files.get(run)
        audit = self._kept.take(run)
        known = before if before is not None and _grown(before.mark, mark) else None
        if known is None or audit is None or not await self._go_on(audit, known, mark):
            audit = await self._start(run, known, mark)
        if before is None or not before.position:
            self.runs += audit.records > 0
        elif not audit.purged:
            self._lost(run, before.position, audit.position)
        self._kept.put(audit)

    async def _go_on(self, audit: RunAudit, known: _File, mark: Mark) -> bool:
        """Take what was appended; False where something is wrong with it: read it all, then."""
        taken = audit.records
        async with aclosing(self._store.stored(audit.run_id, after=known.position)) as pages:
            async for page in pages:
                for record in page:
                    if judged(audit, record):
                        return False
        self.records += audit.records - taken
        self._files[audit.run_id] = _File(mark, audit.position, known.found)
        return True

    async def _start(self, run: RunId, known: _File | None, mark: Mark) -> RunAudit:
        """Read it all. What breaks rules in the known part was reported, if it did so then."""
        audit, early, late = RunAudit(run), list[Violation](), 0
        try:
            async with aclosing(self._store.stored(run)) as pages:
                async for page in pages:
                    for record in page:
                        found = judged(audit, record)
                        if known is not None and record.position <= known.position:
                            early += found
                            continue
                        self.records += record.flaw != "torn"
                        late += len(found)
                        for violation in found:
                            self._report(run, violation)
        except BaseException:  # of what was reported the next look says nothing
            read = Mark(audit.position, mark.inode, mark.changed_ns)
            self._files[run] = _File(read, audit.position, len(early) + late)
            raise
        if known is not None and len(early) != known.found:  # changed in place
            for violation in early:
                self._report(run, violation)
        self._files[run] = _File(mark, audit.position, len(early) + late)
        return audit

    def _lost(self, run: RunId, before: int, now: int) -> None:
        if now < before:
            what = f"its file is {now} bytes long, and was read up to {before}"
            self._report(run, Violation(0, "lost", f"{what}: acknowledged records are gone"))


def _grown(before: Mark, now: Mark) -> bool:
    """Whether the change may have been an append."""
    return before.inode == now.inode and now.size > before.size
