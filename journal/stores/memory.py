"""Store: journals in a dictionary, for tests and as the executable meaning of the Store protocol.

Durable for as long as the object lives; several handles on one object see one another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from ..claims import Answer
from ..codec import Damage, Entry, decode
from ..errors import JournalDamaged, StoreLocked, TooLarge
from ..ids import RunId
from ..limits import RECORD_BYTES_MAX
from ..observing import UNOBSERVED, Observer
from ..store import AppendAnswer, Appended, Conflict, Held, Loaded, RawRecord, Stamp


class MemoryStore:
    """Tokens count appends to the run, so that they stay comparable after a trim."""

    shared = False
    observer: Observer = UNOBSERVED

    def __init__(self) -> None:
        self._journals: dict[RunId, dict[int, bytes]] = {}
        self._stamps: dict[RunId, datetime] = {}
        self._held: set[RunId] = set()

    def clock(self) -> datetime:
        """The store's."""
        return datetime.now(UTC)

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        journal = self._journals.get(run_id, {})
        entries: list[Entry] = []
        for index, (position, raw) in enumerate(journal.items()):
            if position <= after:
                continue
            try:
                entries.append(Entry(decode(raw), raw, position=position))
            except Damage as damage:
                raise JournalDamaged(
                    f"run {run_id}: {damage}", where=self.where(run_id, index, None), run_id=run_id
                ) from damage
        return Loaded(tuple(entries), _tail(journal))

    async def pages(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Loaded, None]:
        yield await self.load(run_id, after=after)

    async def resume(self, run_id: RunId) -> Loaded:
        return await self.load(run_id)

    async def wake(self, run_id: RunId, agent: str, *, cause: int, priority: int = 0) -> None:
        """Nobody waits for work here: a run goes on when it is run."""

    async def task_cause(self, run_id: RunId, agent: str) -> int:
        """As wake."""
        return 0

    async def wake_at(
        self, run_id: RunId, agent: str, *, at: datetime, cause: int, priority: int = 0
    ) -> None:
        """As wake."""

    async def notify(self, run_id: RunId, payload: bytes) -> None:
        """As wake."""

    async def preview(self, run_id: RunId, text: str) -> None:
        """Nobody follows here."""

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        if len(entry.raw) > RECORD_BYTES_MAX:
            raise TooLarge(
                f"a record of {len(entry.raw)} bytes exceeds {RECORD_BYTES_MAX}", run_id=run_id
            )
        journal = self._journals.setdefault(run_id, {})
        if _tail(journal) != expected:
            return Conflict()
        journal[expected + 1] = entry.raw
        self._stamps[run_id] = self.clock()
        return Appended(expected + 1)

    async def runs(self, *, after: RunId | None = None) -> AsyncIterator[RunId]:
        for run_id in sorted(self._journals):
            if self._journals[run_id] and (after is None or run_id > after):
                yield run_id

    async def stored(
        self, run_id: RunId, *, after: int = 0
    ) -> AsyncGenerator[Sequence[RawRecord], None]:
        journal = self._journals.get(run_id, {})
        yield [RawRecord(raw, position) for position, raw in journal.items() if position > after]

    async def stamp(self, run_id: RunId) -> Stamp:
        now = self.clock()
        return Stamp(self._stamps.get(run_id, now), now)

    async def ended(
        self, *, age_s: float, statuses: frozenset[str], after: RunId | None = None
    ) -> AsyncIterator[RunId]:
        """All: there are no headers."""
        async for run_id in self.runs(after=after):
            yield run_id

    async def check_trim(self) -> None:
        """Nothing is denied here."""

    async def trim(self, run_id: RunId, *, before: int) -> None:
        journal = self._journals.get(run_id, {})
        for position in [position for position in journal if position < before]:
            del journal[position]

    @asynccontextmanager
    async def hold(self, run_id: RunId) -> AsyncGenerator[None, None]:
        if run_id in self._held:
            raise StoreLocked(
                f"run {run_id} is held by another task of this process",
                holder="this process",
                run_id=run_id,
            )
        self._held.add(run_id)
        try:
            yield
        finally:
            self._held.discard(run_id)

    async def holder(self, run_id: RunId) -> str | None:
        return "this process" if run_id in self._held else None

    async def ask(self, worker: str, run_id: RunId, claim: int) -> Answer:
        return "nobody"

    @asynccontextmanager
    async def answering(self, worker: str, held: Held) -> AsyncGenerator[None, None]:
        yield

    def where(self, run_id: RunId, index: int, entry: Entry | None) -> str:
        return f"memory, run {run_id}, record {index + 1}"


def _tail(journal: dict[int, bytes]) -> int:
    return next(reversed(journal)) if journal else 0
