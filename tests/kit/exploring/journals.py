"""The journals that are reached, as interned folds: appending, signals, what a holder decides.

Two journals are the same View if no decision can tell them apart, now or later, and nothing that an
invariant looks at differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from journal.audit import audit
from journal.codec import Damage, Entry, seal
from journal.errors import RunfoldError
from journal.fold import Fold
from journal.records import (
    HOLDER_RECORDS,
    Record,
    RunCompleted,
    Signal,
    StepCompleted,
    StepStarted,
)
from journal.signal_rules import Append, Repeated
from journal.step_state import StepState
from journal.steps import completed_value
from journal.summary import is_restart_point, restored
from journal.waits import wakes_at

from ..build import NONCE, RUN
from .bodies import body_of
from .bounds import Bounds, Rules, Violation
from .plots import AFTER, AT, BEFORE, Plot
from .states import Label, Slot

REPEAT: Label = ("repeated",)


class Past(NamedTuple):
    """`starts` of the write, by whomever and whenever; `permits`: how often it may begin; `done`: a
    person said that it happened."""

    starts: tuple[int, ...] = ()
    permits: int = 1
    done: bool = False

    def after(self, record: Record, write: str) -> Past:
        match record:
            case StepStarted(step=step) if step == write:
                return self._replace(starts=(*self.starts, record.n))
            case Signal(name="reconcile", payload=payload):
                retry = payload["outcome"] == "retry"
                return self._replace(permits=self.permits + retry, done=self.done or not retry)
            case _:
                return self


class View:
    """An interned journal. `before`, `entry`: one way to it, for the audit. `claimed`: the newest
    claim; `live`: the live one; `task`: its message; `wait`: the n of the wait that ends at an
    instant, where nobody holds the run; `past`: what the fold may have forgotten; `runnable`: by
    the fold, without a clock; `runnable_late`: once every instant has come."""

    __slots__ = (
        "before",
        "claimed",
        "entry",
        "finished",
        "fold",
        "id",
        "live",
        "n",
        "past",
        "runnable",
        "runnable_late",
        "task",
        "wait",
    )

    def __init__(self, fold: Fold, id: int, before: View | None, entry: Entry, past: Past) -> None:
        self.fold = fold
        self.id = id
        self.before = before
        self.entry = entry
        self.past = past
        self.n = fold.n
        self.finished = fold.finished
        self.claimed = next(reversed(fold.claims), 0)
        self.live = fold.claim.n if fold.claim else 0
        self.task = fold.claim.task if fold.claim else 0
        self.wait = fold.wait.n if fold.wait is not None and wakes_at(fold) else 0
        self.runnable = not fold.finished and fold.runnable(BEFORE)
        self.runnable_late = not fold.finished and fold.runnable(AFTER)

    def entries(self) -> list[Entry]:
        """The records of one way to this journal."""
        found: list[Entry] = []
        view: View | None = self
        while view is not None:
            found.append(view.entry)
            view = view.before
        return found[::-1]


def meaning(fold: Fold) -> tuple[Any, ...]:
    """All of a fold that a decision can depend on."""
    wait = fold.wait
    return (
        fold.n,
        (fold.claim.n, fold.claim.task) if fold.claim else 0,
        next(reversed(fold.claims), 0),
        tuple(_step(step) for _, step in sorted(fold.steps.items())),
        tuple(
            (what, tuple(_step(step) for step in steps))
            for what, steps in sorted(fold.honoured.items())
        ),
        tuple((marker, said.name, said.n) for marker, said in fold.decisions.items()),
        tuple(sorted((id, said.n) for id, said in fold.requests.items())),
        tuple((known.request_id, known.status) for known in fold.inputs.values()),
        (wait.n, wait.why, wait.until, wait.for_input, wait.steps) if wait else 0,
        (fold.iteration, fold.attempt, fold.committed, fold.state),
        wait is not None and fold.resumed > wait.n,
        frozenset(fold.interrupted),
        fold.cancel.n if fold.cancel else 0,
        fold.reply is not None,
        fold.end is not None,
        str(fold.end.message) if isinstance(fold.end, RunCompleted) else "",
    )


def _step(step: StepState) -> tuple[Any, ...]:
    return (
        step.name,
        tuple((start.n, start.claim, start.permit, start.replay) for start in step.starts),
        result_of(step.completed),
        tuple((n, said.n, said.payload["outcome"]) for n, said in step.reconciled.items()),
        tuple(step.late),
        step.unsafe,
        step.needs_person,
    )


def result_of(completed: StepCompleted | None) -> str:
    return "" if completed is None else f"{completed.via} {completed_value(completed)}"


class Journals:
    """All journals of one exploration."""

    def __init__(self, plot: Plot, bounds: Bounds, rules: Rules) -> None:
        self.plot = plot
        self.bounds = bounds
        self.rules = rules
        self.views: list[View] = []
        self.meanings: dict[tuple[Any, ...], View] = {}
        self._appended: dict[Any, View] = {}
        self._actions: dict[Any, Label] = {}
        self._signals: dict[Any, Label] = {}

    def first(self) -> View:
        """The run at its beginning."""
        view = None
        for body in self.plot.first():
            view = self._add(view, body, 0)
        assert view is not None
        return view

    def append(self, view: View, label: Label, claim: int) -> View:
        """The journal after this record; Damage is a violation: no honest writer makes it."""
        key = (view.id, label, claim)
        after = self._appended.get(key)
        if after is None:
            if label[0] == "start" and view.fold.cancel is not None:
                raise Violation("a step is started on a cancelled run")
            body = body_of(label, view.fold, self.plot, self.bounds)
            held = claim if isinstance(body, HOLDER_RECORDS) else 0
            after = self._appended[key] = self._add(view, body, held)
        return after

    def _add(self, before: View | None, body: Record, claim: int) -> View:
        fold = before.fold.copy() if before else Fold()
        n = fold.n + 1
        record, raw = seal(body, n=n, id=f"{NONCE}-{n}", at=AT, by="w", prev=fold.head, claim=claim)
        entry = Entry(record, raw)
        try:
            fold.apply(entry)
        except Damage as damage:
            raise Violation(f"the log does not fold: {damage}") from damage
        write = self.plot.calls[self.plot.write].step
        past = (before.past if before else Past()).after(record, write)
        key = (meaning(fold), past)
        view = self.meanings.get(key)
        if view is None:
            view = View(fold, len(self.views), before, entry, past)
            self.views.append(view)
            self.meanings[key] = view
            if is_restart_point(record):
                self._check_restart(view)
        return view

    def _check_restart(self, view: View) -> None:
        """Who reads from the commit on knows what who reads all does (R41)."""
        first = view.entries()[0]
        one, other = meaning(restored(first, view.entry)), meaning(view.fold)
        if (one[:2], one[3:]) != (other[:2], other[3:]):  # claims that have ended fence nobody
            raise Violation("the fold from the commit on is another than the whole one")

    def audit(self) -> tuple[View, str] | None:
        """The first journal in which the audit finds something, and what; one way to each is
        looked at. It goes record by record, so a journal is audited with those behind it."""
        gone_on = {view.before.id for view in self.views if view.before}
        for view in self.views:
            if view.id not in gone_on:
                for found in audit(RUN, view.entries()):
                    while view.before is not None and view.n > found.n:
                        view = view.before
                    return view, f"record {found.n}: {found.rule}: {found.text}"
        return None

    # ---- decisions ----------------------------------------------------------------------------

    def action(self, view: View, slot: Slot) -> Label:
        """What a holder does next at this journal."""
        key = (view.id, slot.attempted, slot.over)
        found = self._actions.get(key)
        if found is None:
            found = self._actions[key] = self.plot.decide(view.fold, slot)
        return found

    def sayings(self, view: View) -> list[Label]:
        """Everything a person could say now."""
        return self.plot.sayings(view.fold, view.past.starts)

    def signal(self, view: View, said: Label, *, held: bool, request_id: str = "") -> Label:
        """The record to append, as a label; empty where the signal is refused, REPEAT where it was
        said before."""
        key = (view.id, said, held, request_id)
        label = self._signals.get(key)
        if label is None:
            label = self._signals[key] = self._decide(view, said, held, request_id)
        return label

    def _decide(self, view: View, said: Label, held: bool, request_id: str) -> Label:
        request_id = request_id or "-".join(str(part) for part in said)
        wanted = self.plot.signal(said)
        known = view.fold.requests
        recorded = request_id in known or f"late\0{request_id}" in known
        try:
            decision = self.rules.decide_signal(view.fold, wanted, request_id, held=held)
        except RunfoldError as refused:
            if recorded:
                raise Violation(f"a repeated request is refused: {refused}") from refused
            return ()
        match decision:
            case Repeated():
                return REPEAT
            case Append(body):
                if recorded:
                    raise Violation(f"the request {request_id} is recorded twice")
                return ("signal", body.name, body.request_id, *body.payload.items())
            case other:
                raise AssertionError(other)
