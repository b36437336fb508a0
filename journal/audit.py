"""Core: the audit of a journal: what must hold, judged from the log alone (R70).

A second opinion: what it demands is written from PROTOCOL.md, not from the fold's own checks. It
goes on behind a violation, and names each with its ordinal and its rule. The chain is judged here;
what the records say by audit_steps.py, audit_turns.py, audit_signals.py and audit_fold.py, over the
books of audit_book.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from msgspec import UNSET, Struct

from .audit_book import Book, Findings
from .audit_fold import Shadow
from .audit_signals import known_words, signalled
from .audit_steps import completed, progressed, started
from .audit_turns import (
    claimed,
    committed,
    ended,
    held,
    parked,
    placed,
    purged,
    released,
    run_started,
    submitted,
    withdrawn,
)
from .codec import Damage, Entry, decode, record_hash
from .ids import RunId
from .records import (
    ZERO_HASH,
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    NewerRecord,
    Park,
    Record,
    Release,
    RunCompleted,
    RunPurged,
    RunStarted,
    Signal,
    Status,
    StepCompleted,
    StepProgress,
    StepStarted,
)

RULES: Mapping[str, str] = MappingProxyType(
    {
        "undecodable": "Each record is one JSON object with a whole envelope.",
        "ordinal": "Ordinals count from 1 without a gap; only a tombstone may stand first alone.",
        "hash": "Each record names the hash of the one before it.",
        "record_id": "A writer's record ids only go up: none comes twice.",
        "run_id": "The first record names the run whose journal it is.",
        "first": "A run is started once, by its first record.",
        "claim": "Who claimed the run writes, under that claim, until another one fences it.",
        "after_end": "Only a purge, or the resume of a retriable failure, follows the end.",
        "purge": "Only a run that has ended is purged.",
        "iteration": "Each iteration has one commit, and they are counted.",
        "attempt": "Attempts are counted: a new one begins only with a park that ends the last.",
        "unknown_write": "No attempt and no iteration ends while a write is unknown.",
        "instant": "A wait's instant is one.",
        "wake": "No wait begins while what would end it is there.",
        "idle": "A run that waits is claimed only after something has ended the wait.",
        "park": "A park for steps names steps that are open.",
        "unfinished": "A turn ends well only when each of its calls has a result.",
        "cancel": "A run ends as cancelled after a cancel, and only then.",
        "cancelled": "No write starts after a cancel.",
        "deadline": "A write's start names the instant at which its call is over.",
        "digest": "A digest is that of what stands beside it.",
        "key": "A call's key is its own, and a repeated call keeps it.",
        "same_call": "A step is the call that was made before, and that the model made.",
        "stale_call": "A model is asked again only when each call of its reply has a result.",
        "repeated_step": "A step with a result is not started again.",
        "permit": "A write is made again only under the retry of its very start, in any attempt.",
        "approval": "What was asked about, interrupted or rejected starts only under its approval.",
        "spent": "A permit is used once.",
        "denied": "A call that the gate denied never starts.",
        "refusal": "A call is refused as its verdict has it, or a person who rejected it.",
        "beside_unknown": "Nothing starts beside an earlier holder's write that is unknown.",
        "child": "Child runs are named, and only those that were started end or are waited for.",
        "progress": "Only an open step reports progress.",
        "result": "A result is exactly one of result, error, interrupted.",
        "second_result": "Every step has one result.",
        "unstarted": "A step has a result only after a start, or a refusal.",
        "via": "A result came the way it says: by its own holder, a person, a probe, its policy.",
        "model": "A model call calls no tool; one that failed records nothing.",
        "verdicts": "A model's reply has one verdict on each of its calls.",
        "marker": "A marker is of this run, step and attempt, and of one call.",
        "payload": "A signal's payload has its shape.",
        "repeat": "What was said under a request id is recorded once.",
        "decision": "A marker is decided once, and while something waits for it.",
        "reconcile": "A reconcile is about the last start of a write that is unknown.",
        "late": "A late result is about the last start of a step without a result.",
        "resume": "A resume ends a pause or a wait for a retry, or reopens a retriable failure.",
        "input": "An input is submitted once, and placed or withdrawn once.",
        "queued": "The built-in loop does not finish while an input is queued.",
        "input_order": "Inputs are placed in their order, in front of what was not called yet.",
        "summary": "A commit's summary is what the records before it make.",
        "status": "A status header is what the records up to it make.",
    }
)
"""Every rule by its word."""


class Violation(Struct, frozen=True):
    """`n`: ordinal of the record that breaks the rule; `rule`: its word, see RULES."""

    n: int
    rule: str
    text: str


class Auditor:
    """Takes the stored records of one run in order, from its first one on.

    `newer`: what the first record of a newer version is, else None: from there on only the chain
    is judged. So it is behind a gap and an unreadable record, until a commit sums up what was lost.
    """

    def __init__(self, run_id: RunId) -> None:
        self.run_id = run_id
        self.newer: str | None = None
        self._n = 0
        self._head = ZERO_HASH
        self._odd: tuple[int, str] | None = None  # where the chain was before an odd record
        self._unchained = self._stray = False
        self._counters: dict[str, int] = {}
        self._blind = False
        self._book = Book(run_id)
        self._shadow = Shadow()

    @property
    def n(self) -> int:
        """The ordinal of the last record."""
        return self._n

    @property
    def ended(self) -> bool:
        """Whether the last record is the run's end, as far as it can be told."""
        return self._book.end is not None or self._book.purged

    @property
    def purged(self) -> bool:
        return self._book.purged

    def take(
        self, raw: bytes, *, status: Status | None = None, shared: bool = False
    ) -> tuple[Violation, ...]:
        """What the next record breaks. `status`: its header, where the store keeps one; `shared`:
        every holder claims there."""
        self._book.shared = shared
        try:
            record = decode(raw)
        except Damage as damage:
            self._odd = (self._n, self._head)
            self._n += 1
            self._head = record_hash(raw)
            self._unchained = True  # it may have been another one when the next record named it
            self._lose_sight()
            return (Violation(self._n, "undecodable", str(damage)),)
        first = not self._n
        found = list(self._chain(record, raw))
        if not self._stray:
            found += self._content(Entry(record, raw), status, first)
        return tuple(Violation(record.n, rule, text) for rule, text in found)

    # ---- the chain --------------------------------------------------------------------------

    def _chain(self, record: Record, raw: bytes) -> Findings:
        """Ordinal, previous hash, writer id. The record becomes the head, unless it is a stray."""
        n, expected, chained = record.n, self._n + 1, record.prev == self._head
        odd, self._odd, self._stray = self._odd, None, False
        if n == expected:
            if not chained and not self._unchained:
                yield "hash", f"it does not follow record {self._n} as that is stored"
        elif isinstance(record, RunPurged) and not self._n and n > 1:
            pass  # what was before a tombstone was removed
        elif odd is not None and (n, record.prev) == (odd[0] + 1, odd[1]):
            pass  # the odd one was in between, and was named
        elif chained and self._n:
            yield "ordinal", f"record {n} follows record {self._n}"
            self._odd = (expected, record_hash(raw))
            self._lose_sight()
        elif n < expected:
            yield "ordinal", f"record {n} stands behind record {self._n}"
            self._odd, self._stray = odd, True
            return
        else:
            missing = f"{expected} to {n - 1}" if n - 1 > expected else f"{expected}"
            yield "ordinal", f"record {missing} is missing"
            self._odd = (self._n, self._head)
            self._lose_sight()
        nonce, _, counter = record.id.partition("-")
        last = self._counters.get(nonce, -1)
        if int(counter) <= last:
            yield "record_id", f"its id {record.id} is not above its writer's last"
        self._counters[nonce] = max(int(counter), last)
        self._n, self._head, self._unchained = n, record_hash(raw), False

    def _lose_sight(self) -> None:
        """What is missing could have been anything."""
        self._blind = True
        self._shadow.lose()

    # ---- what it says -----------------------------------------------------------------------

    def _content(self, entry: Entry, status: Status | None, first: bool) -> Findings:
        record = entry.record
        if self.newer is not None:
            return
        if isinstance(record, NewerRecord) or (
            isinstance(record, Signal) and not known_words(record)
        ):
            self.newer = entry.type
            return
        found = list(self._judged(record, first))
        yield from found
        if found:
            self._shadow.lose()
        yield from self._shadow.take(entry, status)

    def _judged(self, record: Record, first: bool) -> Findings:
        book = self._book
        if self._blind:
            if isinstance(record, Commit) and record.summary is not UNSET:
                self._book = book.restored(record, record.summary)
                self._blind = False
        elif first and isinstance(record, RunPurged) and record.n > 1:
            book.purged = True
        elif first != isinstance(record, RunStarted):
            yield "first", "a run starts once, with its first record"
        elif ended(book, record):
            yield "after_end", "it stands behind the run's end"
        else:
            yield from held(book, record)
            yield from _body(book, record)


def _body(book: Book, record: Record) -> Findings:
    match record:
        case RunStarted():
            return run_started(book, record)
        case Claim():
            return claimed(book, record)
        case Release():
            return released(book, record)
        case StepStarted():
            return started(book, record)
        case StepProgress():
            return progressed(book, record)
        case StepCompleted():
            return completed(book, record)
        case Park():
            return parked(book, record)
        case Commit() | RunCompleted():
            return committed(book, record)
        case Signal():
            return signalled(book, record)
        case Input():
            return submitted(book, record)
        case InputWithdrawn():
            return withdrawn(book, record)
        case InputPlaced():
            return placed(book, record)
        case RunPurged():
            return purged(book)
        case _:
            raise AssertionError(f"record without a rule: {type(record).__name__}")


def audit(run_id: RunId, entries: Iterable[Entry]) -> tuple[Violation, ...]:
    """Everything that is wrong in a journal; empty for an honest one, also one that still runs."""
    auditor = Auditor(run_id)
    return tuple(
        found for entry in entries for found in auditor.take(entry.raw, status=entry.status)
    )
