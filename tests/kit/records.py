"""Real records in a chain, as a writer would make them: right ordinals, hashes, ids."""

from __future__ import annotations

from typing import Any

from journal.codec import Entry, record_hash, seal
from journal.ids import RunId
from journal.limits import RECORD_BYTES_MAX
from journal.records import (
    ZERO_HASH,
    Claim,
    Record,
    RunCompleted,
    RunPurged,
    RunStarted,
    Status,
    StepCompleted,
    StepStarted,
)
from journal.steps import input_digest
from journal.store import Appended, Loaded, Store

AT = "2026-01-02T03:04:05.678Z"


class Chain:
    """The journal of one run as its writer sees it. Each method makes the next entry.

    `nonce` is the writer's; a second chain with another nonce is a rival for the same run.
    """

    def __init__(self, run_id: str = "run-1", *, nonce: str = "0123456789ab") -> None:
        self.run_id = RunId(run_id)
        self.entries: list[Entry] = []
        self._nonce = nonce
        self._counter = 0
        self._head = ZERO_HASH

    def rival(self, nonce: str = "ba9876543210") -> Chain:
        """Another writer that has read the same journal."""
        other = Chain(self.run_id, nonce=nonce)
        other.entries = list(self.entries)
        other._head = self._head
        return other

    def add(self, body: Record, *, claim: int = 0, status: Status | None = "running") -> Entry:
        record, raw = seal(
            body,
            n=len(self.entries) + 1,
            id=f"{self._nonce}-{self._counter}",
            at=AT,
            by="test",
            prev=self._head,
            claim=claim,
        )
        return self.add_raw(record, raw, status=status)

    def add_raw(self, record: Record, raw: bytes, *, status: Status | None = None) -> Entry:
        assert len(raw) <= RECORD_BYTES_MAX
        entry = Entry(record, raw, status=status)
        self._counter += 1
        self._head = record_hash(raw)
        self.entries.append(entry)
        return entry

    def started(self, input: Any = "hello") -> Entry:
        return self.add(
            RunStarted(
                run=self.run_id,
                agent="a",
                revision="r",
                input=input,
                digest=input_digest("a", input),
            )
        )

    def step_started(self, step: str = "model/0", *, key: str = "k") -> Entry:
        return self.add(
            StepStarted(step=step, kind="model", digest="0" * 16, replay="safe", key=key)
        )

    def step_completed(self, step: str = "model/0", *, result: Any = "ok") -> Entry:
        return self.add(StepCompleted(step=step, result=result))

    def claimed(self, worker: str = "w1") -> Entry:
        return self.add(Claim(worker=worker, revision="r", reason="new"))

    def completed(self) -> Entry:
        return self.add(RunCompleted(message="done"), status="completed")

    def purged(self) -> Entry:
        return self.add(RunPurged(), status="completed")

    def steps(self, records: int) -> list[Entry]:
        """`records` more entries: starts and completions of steps, in turn."""
        made: list[Entry] = []
        first = len(self.entries)
        while len(made) < records:
            name = f"work/{first + len(made) // 2 * 2}"
            start = len(made) % 2 == 0
            made.append(self.step_started(name) if start else self.step_completed(name))
        return made


def journal_of(records: int, run_id: str = "run-1") -> Chain:
    """A started run with steps."""
    chain = Chain(run_id)
    chain.started()
    chain.steps(records - 1)
    return chain


async def fill(store: Store, chain: Chain) -> int:
    """Append the whole chain to an empty run, where nothing disturbs it; the last token."""
    tail = 0
    for entry in chain.entries:
        answer = await store.append(chain.run_id, entry, expected=tail)
        assert isinstance(answer, Appended), answer
        tail = answer.tail
    return tail


def raws(loaded: Loaded) -> list[bytes]:
    return [entry.raw for entry in loaded.entries]
