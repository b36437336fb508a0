"""Core: what a store's user may be told of the work done through it: for metrics and traces (R73).

All of it is about records that this process appended, so a step that a replay answers from the
journal is told as `replayed` and in no other way: nothing is counted or traced twice.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from .codec import Entry
from .fold import Fold
from .ids import RunId
from .records import Claim, Record, StepStarted


class Trace(Struct, frozen=True):
    """The W3C traceparents stored with a run's records, as they stand there, "" where there is
    none: its first record's, its last claim's, and that of the last signal or input since. `first`
    is the id of the first record.

    A claim is not known where the journal was read from a later commit on."""

    run: str = ""
    claim: str = ""
    heard: str = ""
    first: str = ""

    def behind(self, entry: Entry) -> Trace:
        """With the next record."""
        if entry.record.n == 1:
            return Trace(run=entry.trace, first=entry.record.id)
        if isinstance(entry.record, Claim):
            return Trace(self.run, entry.trace, "", self.first)
        return Trace(self.run, self.claim, entry.trace, self.first) if entry.trace else self


class Observer(Protocol):
    """Called on the event loop, between two awaits: it must not raise, nor block."""

    def door(
        self, what: str, trace: str, at: datetime | None = None
    ) -> AbstractContextManager[object]:
        """Entered around what came from outside and may append records: `what` names it, as few
        words as there are kinds of it; `trace` is the traceparent it came with, unchecked. `at`:
        when it was stored, of what was kept; None where somebody waits for the answer."""
        ...

    def carry(self, run_id: RunId, record: Record, trace: Trace) -> str:
        """The traceparent to store with a record that is about to be appended; "" for none. Asked
        for each record once, whatever becomes of it, by the task that appends it."""
        ...

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: Trace) -> None:
        """A record of ours is in the journal; `fold` and `trace` have it. Told once for each, by
        the task that asked for `carry`."""
        ...

    def calling(self, run_id: RunId, start: StepStarted) -> AbstractContextManager[object]:
        """Entered around the call that is started by this record. A read's may be on its way: it
        has no ordinal yet, and `appended` is told of it, or of none, before this is left."""
        ...

    def replayed(self, run_id: RunId, step: str) -> None:
        """A recorded result was given in place of a call."""
        ...

    def woken(self, run_id: RunId, claim: Claim, since: str) -> None:
        """This claim of ours, just told of, took up a run whose wait was over at the instant
        `since`, as records write them: that of the first record after which a holder had something
        to do, or the one that was waited for. What wrote it may be no instant."""
        ...

    def fenced(self, run_id: RunId, claim: int) -> None:
        """A holder of ours found its run taken over. Told once for each claim."""
        ...

    def let_go(self, run_id: RunId, claim: int) -> None:
        """Nothing more comes from here under the claim, whether or not a record ended it."""
        ...


_NOTHING = nullcontext()


class Unobserved:
    """Nobody is told."""

    def door(
        self, what: str, trace: str, at: datetime | None = None
    ) -> AbstractContextManager[object]:
        return nullcontext()

    def carry(self, run_id: RunId, record: Record, trace: Trace) -> str:
        return ""

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: Trace) -> None:
        pass

    def calling(self, run_id: RunId, start: StepStarted) -> AbstractContextManager[object]:
        return _NOTHING

    def replayed(self, run_id: RunId, step: str) -> None:
        pass

    def woken(self, run_id: RunId, claim: Claim, since: str) -> None:
        pass

    def fenced(self, run_id: RunId, claim: int) -> None:
        pass

    def let_go(self, run_id: RunId, claim: int) -> None:
        pass


UNOBSERVED = Unobserved()


class Several:
    """Tells each of them, in order. Of the traceparents to carry the first one that is none of ""
    counts."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    @contextmanager
    def door(self, what: str, trace: str, at: datetime | None = None) -> Generator[None]:
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.door(what, trace, at))
            yield

    def carry(self, run_id: RunId, record: Record, trace: Trace) -> str:
        carried = [observer.carry(run_id, record, trace) for observer in self._observers]
        return next(filter(None, carried), "")

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: Trace) -> None:
        for observer in self._observers:
            observer.appended(run_id, fold, record, trace)

    @contextmanager
    def calling(self, run_id: RunId, start: StepStarted) -> Generator[None]:
        with ExitStack() as stack:
            for observer in self._observers:
                stack.enter_context(observer.calling(run_id, start))
            yield

    def replayed(self, run_id: RunId, step: str) -> None:
        for observer in self._observers:
            observer.replayed(run_id, step)

    def woken(self, run_id: RunId, claim: Claim, since: str) -> None:
        for observer in self._observers:
            observer.woken(run_id, claim, since)

    def fenced(self, run_id: RunId, claim: int) -> None:
        for observer in self._observers:
            observer.fenced(run_id, claim)

    def let_go(self, run_id: RunId, claim: int) -> None:
        for observer in self._observers:
            observer.let_go(run_id, claim)


def beside(present: Observer, further: Observer) -> Observer:
    """Both: `store.observer = beside(store.observer, mine)`."""
    if further is UNOBSERVED:
        return present
    return further if present is UNOBSERVED else Several(present, further)
