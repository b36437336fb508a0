"""Core: what a store is: one journal a run, appended by compare-and-swap, with three answers (R10).

`journal/stores/memory.py` is the executable meaning of this protocol; one conformance suite
(tests/contract) runs on all stores.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

from msgspec import Struct

from .claims import Answer
from .codec import Entry
from .errors import JournalDamaged
from .ids import RunId
from .observing import Observer
from .records import Record


class Appended(Struct, frozen=True):
    """Stored and durable. `tail` is the store's token of this record."""

    tail: int


class Conflict(Struct, frozen=True):
    """Not stored: the journal's tail was not the one expected."""


class Unknown(Struct, frozen=True):
    """Stored, not stored, or stored later: only a read of what follows the expected tail tells."""

    cause: str


AppendAnswer: TypeAlias = Appended | Conflict | Unknown


class Loaded(Struct, frozen=True):
    """Entries in order, and the token of the last one (0: no run). `torn`: bytes of a last line
    that was never acknowledged and is ignored (file store)."""

    entries: tuple[Entry, ...]
    tail: int
    torn: int = 0

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(entry.record for entry in self.entries)


def joined(pages: Iterable[Loaded]) -> Loaded:
    """The pages, of which there is at least one, as one. JournalDamaged, which reading them raises,
    then names all that is good."""
    entries: list[Entry] = []
    last = Loaded((), 0)
    try:
        for page in pages:
            entries += page.entries
            last = page
    except JournalDamaged as damage:
        damage.good = (*entries, *damage.good)
        raise
    return Loaded(tuple(entries), last.tail, last.torn)


class RawRecord(Struct, frozen=True):
    """A record as it stands in the store, whatever it is: what audits and exports read.

    `position`: as in Entry; `headers` where the store keeps them. `flaw`: `torn`, the bytes behind
    the last whole line of a file, never acknowledged; `cut`, the beginning of a line that is longer
    than any record.
    """

    data: bytes
    position: int = 0
    headers: Mapping[str, str] | None = None
    flaw: Literal["", "torn", "cut"] = ""


class Stamp(Struct, frozen=True):
    """By the store's own clock, no writer's: when a run's last record was stored, and what time it
    is now."""

    stored: datetime
    now: datetime


Held: TypeAlias = Callable[[RunId, int], bool | None]
"""Does this process hold the run under the claim with this n?"""


class Store(Protocol):
    """One journal per run. Raises RunfoldError subclasses only for what no retry settles:
    JournalDamaged, TooLarge, StoreUnavailable, PermissionDenied, StoreLocked."""

    observer: Observer
    """Told of the work that is done through this store; `UNOBSERVED` unless somebody sets it."""

    @property
    def shared(self) -> bool:
        """True: holders claim (JetStream). False: `hold` makes the holder the only one."""
        ...

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        """Everything after the token `after`, complete up to a tail that was current during the
        call. Never a shortened journal: what can't be read is an error. Checks that each record
        decodes; that they chain is the fold's to say."""
        ...

    def pages(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Loaded, None]:
        """As `load`, in pages, so that nobody holds a long journal whole; the last one has what is
        torn. At least one, perhaps empty. A purge meanwhile leaves a gap before its tombstone."""
        ...

    async def resume(self, run_id: RunId) -> Loaded | None:
        """What a holder needs: the first record and everything from the last commit with a summary,
        where the store can tell which that is (R41); else all of it, or None: read it as `pages`
        has it."""
        ...

    async def wake(self, run_id: RunId, agent: str, *, cause: int, priority: int = 0) -> None:
        """Tell the agent's workers to look at the run because of record `cause`: a hint, perhaps
        repeated. Does nothing on a store without a fleet. Raises StoreUnavailable."""
        ...

    async def task_cause(self, run_id: RunId, agent: str) -> int:
        """The record that a task of the run is about, which waits or is at work; 0 without one.
        Raises StoreUnavailable."""
        ...

    async def wake_at(
        self, run_id: RunId, agent: str, *, at: datetime, cause: int, priority: int = 0
    ) -> None:
        """As wake, at an instant; it replaces the run's earlier one."""
        ...

    async def notify(self, run_id: RunId, payload: bytes) -> None:
        """Tell the run's holder at once what it would read later; lost without harm."""
        ...

    async def preview(self, run_id: RunId, text: str) -> None:
        """Show followers the model's words as they come; lost without harm (R38)."""
        ...

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        """Store the entry's bytes if the tail is `expected`. Durable when it answers Appended.

        Raises TooLarge before anything is sent."""
        ...

    def runs(self, *, after: RunId | None = None) -> AsyncIterator[RunId]:
        """Ids of all runs with a journal, purged ones too, in the order of their text."""
        ...

    def stored(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Sequence[RawRecord], None]:
        """The run's records behind the token `after` as they stand, undecoded, in pages."""
        ...

    async def stamp(self, run_id: RunId) -> Stamp:
        """Not before any record that was read of the run before; now, where it has none."""
        ...

    def ended(
        self, *, age_s: float, statuses: frozenset[str], after: RunId | None = None
    ) -> AsyncIterator[RunId]:
        """Runs behind `after` that may be to purge, in the order of their ids: as far as can be
        told without reading them, they ended with one of these statuses so long ago, or have a
        tombstone with records before it. To read them tells."""
        ...

    async def check_trim(self) -> None:
        """Raises PermissionDenied where `trim` would: before a tombstone that would hide a run and
        free nothing."""
        ...

    async def trim(self, run_id: RunId, *, before: int) -> None:
        """Remove every record whose token is below `before`: what purge does behind a tombstone."""
        ...

    def hold(self, run_id: RunId) -> AbstractAsyncContextManager[object]:
        """Be the only holder of the run; raises StoreLocked. On a shared store this does nothing:
        claims do it."""
        ...

    async def holder(self, run_id: RunId) -> str | None:
        """Who holds the run's lock now, or None. Always None on a shared store."""
        ...

    async def ask(self, worker: str, run_id: RunId, claim: int) -> Answer:
        """Ask a worker whether it holds the run under this claim (shared stores)."""
        ...

    def answering(self, worker: str, held: Held) -> AbstractAsyncContextManager[None]:
        """Answer such questions as `worker` while inside (shared stores)."""
        ...

    def where(self, run_id: RunId, index: int, entry: Entry | None) -> str:
        """The place of the index-th entry (from 0) of a load from the start, for people."""
        ...
