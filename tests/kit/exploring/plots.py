"""The run that is explored: what its code asks for, by the product's own decisions.

A plot is a holder's program: from the fold and the process's memory to one Label: append …, ask
whether the earlier call is over, or stop. `ReplyPlot` is worker/loop.py for one reply of a model;
`turning.py` has turn handlers.
"""

from __future__ import annotations

from typing import Any, Protocol, assert_never

from journal.fold import Fold
from journal.records import Park, Record, StepCompleted
from journal.signals import AnySignal, Approve, Cancel, Late, Reconcile, Reject, Resume
from journal.step_state import call_step
from journal.steps import (
    Ask,
    Call,
    Mismatch,
    Reuse,
    Run,
    Settle,
    StepDecision,
    Wait,
    completed_value,
    decide_step,
    make_call,
)
from journal.waits import would_go_on
from runfold.testing import ScriptedModel
from worker.agent import Agent
from worker.replies import Answered, AwaitDecision, Execute, Refuse, decide_call, judge_reply
from worker.tools import read, write

from ..build import RUN, asks, model_start, reply_of, request, started
from .bounds import Bounds, Rules, Violation
from .states import Label, Slot

BEFORE, AT = "2026-01-02T03:04:05.678Z", "2026-01-02T03:04:05.678Z"
UNTIL, AFTER = "2026-01-02T04:00:00.000Z", "2026-01-02T05:00:00.000Z"
"""All records are made AT; all waits for a time end UNTIL."""


class Plot(Protocol):
    """`calls` by index, `write` the index of the one that must not repeat."""

    calls: tuple[Call, ...]
    write: int
    rules: Rules

    def first(self) -> list[Record]:
        """The records that are there at the beginning."""
        ...

    def decide(self, fold: Fold, slot: Slot) -> Label:
        """What a holder does next at this fold."""
        ...

    def sayings(self, fold: Fold, starts: tuple[int, ...]) -> list[Label]:
        """Everything a person could say now; `starts` of the write."""
        ...

    def signal(self, said: Label) -> AnySignal:
        """What a saying is, for the product."""
        ...


class Holding:
    """What every holder does: about a step, a cancellation, and where it can't go on."""

    write = 0
    calls: tuple[Call, ...] = ()

    def __init__(self, bounds: Bounds, rules: Rules) -> None:
        self.bounds = bounds
        self.rules = rules

    def cancelled(self, fold: Fold) -> Label:
        """End the run; a write that nobody knows of is settled first (PROTOCOL 4)."""
        for step in fold.unknown():
            if step.needs_person:
                return self.stop(fold, "reconcile")
            return ("append", ("interrupted", step.name))
        return ("append", ("cancelled",))

    def table(self, fold: Fold, call: Call, slot: Slot, **ways: Any) -> StepDecision:
        attempted = frozenset(slot.attempted if self.rules.remembers else ())
        return self.rules.decide_step(
            fold, call, attempted=attempted, earlier_over=slot.over, **ways
        )

    def step(self, fold: Fold, index: int, decision: StepDecision) -> Label:
        match decision:
            case Settle(result, _, via):
                return ("append", ("done", index, result, via))
            case Run(permit, key, unsafe):
                return ("append", ("start", index, permit, unsafe, key))
            case Wait(start):
                return ("over?", start.claim)
            case Ask(start, "interrupt"):
                return ("append", ("interrupted", start.step))
            case Ask():
                return self.stop(fold, "reconcile")
            case Reuse() | Mismatch():
                raise Violation(f"the step table says {decision} of an open step")
            case other:
                assert_never(other)

    def stop(self, fold: Fold, why: Any) -> Label:
        if not self.bounds.shared:
            return ("stop",)
        park = Park(why=why, iteration=fold.iteration, attempt=fold.attempt)
        if would_go_on(fold, park):
            if self.rules.decide_step is not decide_step:
                return ("append", ("release",))
            raise Violation("a holder can neither go on nor park")
        return ("append", ("park", why))

    def sayings(self, fold: Fold, starts: tuple[int, ...]) -> list[Label]:
        return [
            *(("reconcile", outcome, n) for n in starts for outcome in ("done", "retry")),
            *([("cancel",)] if self.bounds.cancels else []),
        ]

    def signal(self, said: Label) -> AnySignal:
        step = self.calls[self.write].step
        match said:
            case ("cancel",):
                return Cancel()
            case ("resume", _):
                return Resume()
            case ("late", n):
                return Late(step=step, start=n, result="W")
            case ("reconcile", "done", n):
                return Reconcile(step=step, outcome="done", result="D", start=n)
            case ("reconcile", "retry", n):
                return Reconcile(step=step, outcome="retry", start=n)
            case _:
                raise AssertionError(said)


def value_of(completed: StepCompleted) -> Any:
    """What the code is told of a recorded step: its result, or the type of its error."""
    value, error = completed_value(completed)
    return error.type if error else value


# ---- a model that asked for a read and for a write that needs approval --------------------------


def _lookup() -> str:
    """A read."""
    return "R"


def _pay() -> str:
    """A write that needs approval."""
    return "W"


AGENT = Agent(
    "helpdesk",
    model=ScriptedModel(),
    tools=[read(name="lookup")(_lookup), write(name="pay")(_pay)],
)
REPLY = asks(request("lookup", id="c0"), request("pay", id="c1"))
VERDICTS = judge_reply(AGENT, RUN, 1, REPLY)
READ, WRITE = call_step(1, 0, "lookup"), call_step(1, 1, "pay")
MARKER: str = VERDICTS[1].marker  # type: ignore[union-attr]


class ReplyPlot(Holding):
    """A run whose model has asked for a read and for a gated write."""

    write = 1
    calls = (
        make_call(READ, "tool", "lookup", {}, unsafe=False),
        make_call(WRITE, "tool", "pay", {}, unsafe=True),
    )

    def first(self) -> list[Record]:
        return [started(), model_start(), reply_of(1, REPLY, *VERDICTS)]

    def decide(self, fold: Fold, slot: Slot) -> Label:
        if fold.finished:
            return ("stop",)
        if fold.cancel is not None and self.rules.heeds_cancel:
            return self.cancelled(fold)
        answers: list[str] = []
        awaited = False
        for index, (call, verdict) in enumerate(zip(REPLY.calls, VERDICTS, strict=True)):
            match decide_call(fold, AGENT, 1, index, call, verdict):
                case Answered(completed):
                    answers.append(value_of(completed))
                case AwaitDecision():
                    awaited = True
                case Refuse(_, error):
                    return ("append", ("refused", index, error.type, error.message))
                case Execute(wanted):
                    return self.step(fold, index, self.table(fold, wanted, slot))
                case other:
                    raise AssertionError(other)
        if awaited:
            return self.stop(fold, "approval")
        placing = self.rules.decide_placing(fold, "llm/2", ())
        if placing is not None:
            return ("append", ("placed", placing.position))
        return ("append", ("completed", tuple(answers)))

    def sayings(self, fold: Fold, starts: tuple[int, ...]) -> list[Label]:
        return [("approve",), ("reject",), *super().sayings(fold, starts)]

    def signal(self, said: Label) -> AnySignal:
        match said:
            case ("approve",):
                return Approve(marker=MARKER)
            case ("reject",):
                return Reject(marker=MARKER)
            case _:
                return super().signal(said)
