"""Core: what a store's user may be told of the work done through it: for metrics and traces (R73).

All of it is about records that this process appended, so a step that a replay answers from the
journal is told as `replayed` and in no other way: nothing is counted or traced twice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from .fold import Fold
from .ids import RunId
from .records import Record, StepStarted


class Observer(Protocol):
    """Called on the event loop, between two awaits: it must not raise, nor block.

    `trace` is the W3C traceparent stored with the run's first record, "" where there is none.
    """

    def carry(self, run_id: RunId, record: Record, trace: str) -> str:
        """The traceparent to store with a record that is about to be appended; "" for none. Asked
        for each record once, whatever becomes of it."""
        ...

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: str) -> None:
        """A record of ours is in the journal; `fold` has it. Told once for each."""
        ...

    def calling(self, run_id: RunId, start: StepStarted) -> AbstractContextManager[object]:
        """Entered around the call that was started by this record."""
        ...

    def replayed(self, run_id: RunId, step: str) -> None:
        """A recorded result was given in place of a call."""
        ...

    def fenced(self, run_id: RunId, claim: int) -> None:
        """A holder of ours found its run taken over. Told once for each claim."""
        ...

    def let_go(self, run_id: RunId, claim: int) -> None:
        """Nothing more comes from here under the claim, whether or not a record ended it."""
        ...


class Unobserved:
    """Nobody is told."""

    def carry(self, run_id: RunId, record: Record, trace: str) -> str:
        return ""

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: str) -> None:
        pass

    def calling(self, run_id: RunId, start: StepStarted) -> AbstractContextManager[object]:
        return nullcontext()

    def replayed(self, run_id: RunId, step: str) -> None:
        pass

    def fenced(self, run_id: RunId, claim: int) -> None:
        pass

    def let_go(self, run_id: RunId, claim: int) -> None:
        pass


UNOBSERVED = Unobserved()
