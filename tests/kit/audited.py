"""The audit of whatever journals a test makes: honest parts leave honest journals (R70)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from journal.audit import Auditor, Violation
from journal.codec import Entry
from journal.ids import RunId
from journal.records import Status
from journal.store import AppendAnswer, Appended
from journal.stores.memory import MemoryStore


def violations(run: str, stored: Iterable[tuple[bytes, Status | None]]) -> list[Violation]:
    """Everything that is wrong in a journal, given as bytes and status headers."""
    auditor = Auditor(RunId(run))
    return [found for raw, status in stored for found in auditor.take(raw, status=status)]


def check(run: str, entries: Iterable[Entry]) -> None:
    """Raises AssertionError, with all of it, where a journal breaks a rule."""
    found = violations(run, ((entry.raw, entry.status) for entry in entries))
    assert found == [], f"run {run}: " + "; ".join(f"{v.n} {v.rule}: {v.text}" for v in found)


class Seen:
    """The journals of all memory stores that were made, with the headers their writers gave."""

    def __init__(self) -> None:
        self.stores: list[MemoryStore] = []
        self.headers: dict[tuple[int, RunId, int], Status | None] = {}

    def violations(self) -> list[tuple[RunId, Violation]]:
        books = {id(store._journals): store._journals for store in self.stores}
        return [
            (run, found)
            for book, journals in books.items()
            for run, raws in journals.items()
            for found in violations(
                run, ((raw, self.headers.get((book, run, n))) for n, raw in raws.items())
            )
        ]


@contextmanager
def watching() -> Iterator[Seen]:
    """While inside, every MemoryStore is seen, with what is appended to it."""
    seen = Seen()
    make, append = MemoryStore.__init__, MemoryStore.append

    def made(self: MemoryStore) -> None:
        make(self)
        seen.stores.append(self)

    async def appended(
        self: MemoryStore, run_id: RunId, entry: Entry, *, expected: int
    ) -> AppendAnswer:
        answer = await append(self, run_id, entry, expected=expected)
        if isinstance(answer, Appended):
            seen.headers[id(self._journals), run_id, answer.tail] = entry.status
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "__init__", made)
        patch.setattr(MemoryStore, "append", appended)
        yield seen
