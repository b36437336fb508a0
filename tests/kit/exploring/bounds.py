"""How far an exploration looks, which of the product's rules it plays by, what it saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from journal.inputs import decide_placing
from journal.records import InputPlaced, Policy
from journal.signal_rules import Append, Repeated, decide_signal
from journal.steps import StepDecision, decide_step

PlotName: TypeAlias = Literal["reply", "turns", "attempts"]


class Violation(Exception):
    """An invariant does not hold; `way` is a shortest sequence of events that leads there."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.way: list[str] = []

    def __str__(self) -> str:
        return "\n  ".join([self.what, *self.way])


@dataclass(frozen=True)
class Rules:
    """The product's rules. A test removes one to show that the explorer sees its absence."""

    cas: bool = True
    """An append lands only at the tail it names."""
    start_first: bool = True
    """A write is called only after its start was acknowledged."""
    remembers: bool = True
    """A process tells the step table what it attempted itself."""
    stops_when_fenced: bool = True
    """A holder that reads a newer claim goes on with nothing."""
    heeds_cancel: bool = True
    """A holder that reads a cancel starts nothing more."""
    reads_back: bool = True
    """An append of unknown outcome is looked for by its id before it is published at a new tail."""
    pays_first: bool = True
    """A holder sets the timer of its wait before it acknowledges the task."""
    sets_again: bool = True
    """Whoever meets a time wait that is not due sets its timer again before it acknowledges."""
    wakes: bool = True
    """Whoever appends what ends a wait publishes a task."""
    wakes_again: bool = True
    """A repeat of a signal publishes the task again."""
    waits_for_nothing_there: bool = True
    """A turn does not wait for what is there already."""
    acks_last: bool = True
    """A bridge acknowledges a signal after its record and task, or its refusal."""
    in_order: bool = True
    """A bridge takes up a signal only when no earlier one of the run is left."""
    causes: bool = True
    """A read that ends before the record that caused the task settles nothing."""
    decide_step: Callable[..., StepDecision] = decide_step
    decide_signal: Callable[..., Append | Repeated] = decide_signal
    decide_placing: Callable[..., InputPlaced | None] = decide_placing


@dataclass(frozen=True)
class Bounds:
    """How far to look: `records` in the journal, and how often each fault strikes.

    `unknowns`: appends whose acknowledgement is lost, or that land late. `lies`: a live process
    that is asked and does not answer, because it is cut off or stalled; with `hints` also: its task
    is delivered again. `drains`: a holder is told to stop. `skews`: processes with a clock that is
    slow or fast. `stales`: a deposed leader answers reads from before.

    `hints`: workers take a run only by a task message (TASKS, timers); without it anybody begins at
    any time, as `run()` does. `waiting`: messages that wait at a time; `timers`: how they fail:
    fire early, twice, never. `sweep`: there is one. `queued`: so many signals come through SIGNALS,
    to so many `bridges`, and none to a door directly.

    Who else takes part: `cancels`, a person who cancels; `inputs`, one who sends an input and may
    withdraw it; `late`, a fenced process that reports what its write returned. `policy` of the
    write (R27). `room`: states with so many records left to the bound must reach an end.
    """

    shared: bool
    records: int
    crashes: int = 2
    unknowns: int = 1
    lies: int = 1
    drains: int = 0
    skews: int = 0
    stales: int = 0
    queued: int = 0
    waiting: int = 1
    bridges: int = 2
    hints: bool = False
    timers: tuple[Literal["early", "twice", "lost"], ...] = ()
    sweep: bool = True
    cancels: bool = False
    inputs: bool = False
    late: bool = False
    policy: Policy = "reconcile"
    plot: PlotName = "reply"
    room: int = 10

    def name(self) -> str:
        how = "tasks" if self.hints else "claims" if self.shared else "lock"
        plot = [self.plot] if self.plot != "reply" else []
        numbers = ("crashes", "unknowns", "lies", "drains", "skews", "stales", "queued")
        faults = [f"{getattr(self, one)} {one}" for one in numbers if getattr(self, one)]
        faults += [f"timers {one}" for one in self.timers]
        flags = ("cancels", "inputs", "late")
        with_ = [one for one in flags if getattr(self, one)]
        with_ += [self.policy] if self.policy != "reconcile" else []
        without = [] if self.sweep or not self.hints else ["no sweep"]
        return ", ".join([how, *plot, f"{self.records} records", *faults, *with_, *without])


@dataclass
class Found:
    """What an exploration saw. `stuck`: without a sweep, the last fault on a shortest way to each
    state where nobody would move the run on, and the first such state."""

    states: int = 0
    transitions: int = 0
    journals: int = 0
    deepest: int = 0
    ends: set[Any] = field(default_factory=set[Any])
    inputs: set[str] = field(default_factory=set[str])
    lates: int = 0
    calls_max: int = 0
    restarts: int = 0
    signals: set[str] = field(default_factory=set[str])
    stuck: dict[str, int] = field(default_factory=dict[str, int])
