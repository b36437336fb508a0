"""Turn handlers of two iterations (R40-R44): a write, a commit that waits, a read, the answer.

As worker/context.py plays them: each call by its position, matched to the one of an earlier attempt
by `earlier_call`; the turn's outcome by ends.py.
"""

from __future__ import annotations

from typing import Any

from msgspec import structs

from journal.fold import Fold
from journal.positions import earlier_call, step_at
from journal.records import Record
from journal.steps import Call, Reuse, Settle, make_call
from journal.waits import needs_person

from ..build import started
from .plots import Holding, value_of
from .states import Label, Slot


class TurnsPlot(Holding):
    """Turn 0 makes the write and waits for an input or an instant; turn 1 reads and answers."""

    write = 0
    calls = (
        make_call(step_at(0, 0), "tool", "pay", {}, unsafe=True),
        make_call(step_at(1, 0), "tool", "lookup", {}, unsafe=False),
    )

    def first(self) -> list[Record]:
        return [started()]

    def decide(self, fold: Fold, slot: Slot) -> Label:
        if fold.finished:
            return ("stop",)
        if fold.cancel is not None and self.rules.heeds_cancel:
            return self.cancelled(fold)
        if needs_person(fold):
            return self.stop(fold, "reconcile")
        index = fold.iteration
        call: Call = structs.replace(self.calls[index], policy=self.bounds.policy)
        key, honoured = earlier_call(fold, call, 0, 0)
        ways = {"key": key} if key else {"honoured": honoured}
        match self.table(fold, call, slot, **ways):
            case Reuse(completed):
                return self.end(fold, index, value_of(completed))
            case Settle(result) if call.step not in fold.steps:
                return self.end(fold, index, result)
            case decision:
                return self.step(fold, index, decision)

    def end(self, fold: Fold, index: int, value: Any) -> Label:
        if index == 0:
            return ("append", ("commit", value, True))
        return ("append", ("completed", (fold.state, value)))

    def sayings(self, fold: Fold, starts: tuple[int, ...]) -> list[Label]:
        wait = fold.wait
        resumable = wait is not None and wait.why == "retry" and fold.resumed < wait.n
        return [
            *super().sayings(fold, starts),
            *([("resume", wait.n)] if wait is not None and resumable else []),
        ]


class AttemptsPlot(TurnsPlot):
    """Turn 0 fails behind its write at the first attempt; the second one honours the write. Its
    commit goes on at once."""

    def end(self, fold: Fold, index: int, value: Any) -> Label:
        if index == 0 and fold.attempt == 1:
            return ("append", ("failed",))
        if index == 0:
            return ("append", ("commit", value, False))
        return super().end(fold, index, value)
