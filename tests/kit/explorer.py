"""Explicit-state exploration of the pure core (R77): every interleaving of a small run.

Two holder processes, people at doors and the network act on one journal. Everything that decides
is the product's own: `Fold`, `decide_claim`, `decide_call`, `decide_step`, `decide_signal`,
`decide_input`, `decide_withdrawal`, `decide_placing`. What is modelled here is only what a shell
does between two awaits: read, publish at the tail that was read, read back, call, stop, die.

States are hashed by what the fold means, not by the list of records; the two processes are
interchangeable; and a process whose next append must lose has already lost and read back (nothing
that it could do in between is seen by anybody). Each cuts the search many times over. It goes
breadth first, so a violation comes with a shortest way to it.

A state is a tuple: (view, slots, flight, calls, crashes left, unknowns left, lies left, door).

- view: the journal, as an interned fold (`View`)
- slots: one tuple for each process, see `Slot`
- flight: appends of dead processes that may still land, as (label, expected, claim)
- calls: the starts under which the write was called, oldest first: the world's memory
- door: a signal whose door has looked whether the run is held, and has not appended yet
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, assert_never

from journal.claims import Answer, AskHolder, HeldBy, Rest, Take, decide_claim
from journal.codec import Damage, Entry, seal
from journal.errors import RunfoldError
from journal.fold import Fold
from journal.inputs import Queue, decide_input, decide_placing, decide_withdrawal, input_body
from journal.records import (
    HOLDER_RECORDS,
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    Interrupted,
    Park,
    Policy,
    Record,
    Release,
    RunCompleted,
    Signal,
    StepCompleted,
    StepError,
    StepStarted,
)
from journal.signal_rules import Append, Repeated, decide_signal
from journal.signals import AnySignal, Approve, Cancel, Late, Reconcile, Reject
from journal.step_state import call_step
from journal.steps import (
    Ask,
    Mismatch,
    Reuse,
    Run,
    Settle,
    StepDecision,
    Wait,
    completed_value,
    decide_step,
    make_call,
    step_key,
)
from runfold.testing import ScriptedModel
from worker.agent import Agent
from worker.replies import Answered, AwaitDecision, Execute, Refuse, decide_call, judge_reply
from worker.tools import read, write

from .build import AT, NONCE, RUN, asks, model_start, reply_of, request, started

Label: TypeAlias = tuple[Any, ...]
"""A record to append, as a hashable word: what `Explorer.body` makes a body of."""


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
    decide_step: Callable[..., StepDecision] = decide_step
    decide_signal: Callable[..., Append | Repeated] = decide_signal
    decide_placing: Callable[..., InputPlaced | None] = decide_placing


@dataclass(frozen=True)
class Bounds:
    """How far to look. `unknowns`: appends whose acknowledgement is lost, or that land late.
    `lies`: a live process that is asked and does not answer, because it is cut off or stalled.

    Who else takes part: `cancels`, a person who cancels; `inputs`, one who sends an input and may
    withdraw it; `late`, a fenced process that reports what its write returned. `policy` of the
    write (R27)."""

    shared: bool
    records: int
    crashes: int = 2
    unknowns: int = 1
    lies: int = 1
    cancels: bool = False
    inputs: bool = False
    late: bool = False
    policy: Policy = "reconcile"


@dataclass
class Found:
    """What an exploration saw."""

    states: int = 0
    transitions: int = 0
    ends: set[Any] = field(default_factory=set[Any])
    inputs: set[str] = field(default_factory=set[str])
    lates: int = 0
    deepest: int = 0
    calls_max: int = 0


class View:
    """An interned fold: two views are the same object if no decision can tell them apart."""

    __slots__ = ("claimed", "fold", "id", "n", "retries")

    def __init__(self, fold: Fold, id: int) -> None:
        self.fold = fold
        self.id = id
        self.n = fold.n
        self.claimed = next(reversed(fold.claims), 0)
        self.retries = outcomes(fold).count("retry")


class Slot(NamedTuple):
    """A process. `pc`: take (a claim), ready (to decide), sent (outcome unknown), started (may call
    the write), result (the call is over, not recorded), late (the same, and fenced meanwhile).
    `extra`: answers, or what was sent."""

    pc: str
    view: int
    claim: int = 0
    attempted: tuple[int, ...] = ()
    over: bool = False
    extra: tuple[Any, ...] = ()


OFF = Slot("off", 0)
CRASHES, UNKNOWNS, LIES = 4, 5, 6  # what is left of each, by its place in a state
State: TypeAlias = tuple[
    int, tuple[Slot, ...], tuple[Any, ...], tuple[int, ...], int, int, int, tuple[Any, ...]
]


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
STEPS = (READ, WRITE)
CALLS = (
    make_call(READ, "tool", "lookup", {}, unsafe=False),
    make_call(WRITE, "tool", "pay", {}, unsafe=True),
)
MARKER: str = VERDICTS[1].marker  # type: ignore[union-attr]
VALUES = ("R", "W")
DECISIONS = ("approve", "reject")
INPUT = "i1"


def meaning(fold: Fold) -> tuple[Any, ...]:
    """All of a fold that a decision can depend on."""
    return (
        fold.n,
        fold.claim.n if fold.claim else 0,
        next(reversed(fold.claims), 0),
        tuple(
            (
                name,
                tuple((start.n, start.claim, start.permit, start.replay) for start in step.starts),
                _result(step.completed),
                tuple((n, said.n, said.payload["outcome"]) for n, said in step.reconciled.items()),
                tuple(step.late),
                step.unsafe,
                step.needs_person,
            )
            for name, step in sorted(fold.steps.items())
        ),
        tuple((marker, said.name, said.n) for marker, said in fold.decisions.items()),
        tuple(sorted((id, said.n) for id, said in fold.requests.items())),
        tuple((known.request_id, known.status) for known in fold.inputs.values()),
        fold.cancel.n if fold.cancel else 0,
        fold.reply is not None,
        fold.end is not None,
        str(fold.end.message) if isinstance(fold.end, RunCompleted) else "",
    )


def _result(completed: StepCompleted | None) -> str:
    return "" if completed is None else f"{completed.via} {completed_value(completed)}"


class Explorer:
    """One exploration: `run` goes through every state within the bounds, or raises Violation."""

    def __init__(
        self, bounds: Bounds, rules: Rules | None = None, *, settling: bool = True
    ) -> None:
        self.bounds = bounds
        self.rules = rules or Rules()
        self.settling = settling and self.rules.cas and self.rules.stops_when_fenced
        self.views: list[View] = []
        self._by_meaning: dict[tuple[Any, ...], View] = {}
        self._appended: dict[Any, View] = {}
        self._actions: dict[Any, Label] = {}
        self._signals: dict[Any, Label] = {}

    @property
    def journals(self) -> set[tuple[Any, ...]]:
        """What all journals that were reached mean."""
        return set(self._by_meaning)

    # ---- the journal --------------------------------------------------------------------------

    def view_of(self, fold: Fold) -> View:
        key = meaning(fold)
        view = self._by_meaning.get(key)
        if view is None:
            view = View(fold, len(self.views))
            self.views.append(view)
            self._by_meaning[key] = view
        return view

    def append(self, view: View, label: Label, claim: int) -> View:
        """The journal after this record; Damage is a violation: no honest writer makes it."""
        key = (view.id, label, claim)
        after = self._appended.get(key)
        if after is None:
            body = self.body(label)
            if label[0] == "start" and view.fold.cancel is not None:
                raise Violation("a step is started on a cancelled run")
            n = view.n + 1
            held = claim if isinstance(body, HOLDER_RECORDS) else 0
            record, raw = seal(
                body, n=n, id=f"{NONCE}-{n}", at=AT, by="w", prev=view.fold.head, claim=held
            )
            fold = view.fold.copy()
            try:
                fold.apply(Entry(record, raw))
            except Damage as damage:
                raise Violation(f"the log does not fold: {damage}") from damage
            after = self._appended[key] = self.view_of(fold)
        return after

    def body(self, label: Label) -> Record:
        match label:
            case ("claim", reason):
                return Claim(worker="w", revision="1", reason=reason)
            case ("release",):
                return Release(reason="stopped")
            case ("park", why):
                return Park(why=why)
            case ("start", index, permit, unsafe):
                return _start(index, permit, unsafe, self.bounds.policy)
            case ("interrupted", index):
                body = Interrupted()
                return StepCompleted(step=STEPS[index], interrupted=body, via="interrupted")
            case ("cancelled",):
                return Commit(action="cancel", reason="asked to")
            case ("input", mode, content):
                return Input(request_id=INPUT, mode=mode, content=content)
            case ("withdrawn",):
                return InputWithdrawn(request_id=INPUT)
            case ("placed", position):
                return InputPlaced(request_id=INPUT, position=position)
            case ("done", index, value, via):
                return StepCompleted(step=STEPS[index], result=value, via=via)
            case ("refused", index, type_, message):
                error = StepError(type=type_, message=message)
                return StepCompleted(step=STEPS[index], error=error, via="refused")
            case ("completed", answer):
                return RunCompleted(message={"role": "assistant", "content": list(answer)})
            case ("signal", name, request_id, *payload):
                return Signal(name=name, request_id=request_id, payload=dict(payload))
            case _:
                raise AssertionError(label)

    def first(self) -> State:
        """A run whose model has asked for a read and for a gated write."""
        fold = Fold()
        for n, body in enumerate((started(), model_start(), reply_of(1, REPLY, *VERDICTS)), 1):
            record, raw = seal(body, n=n, id=f"{NONCE}-{n}", at=AT, by="w", prev=fold.head)
            fold.apply(Entry(record, raw))
        view = self.view_of(fold)
        bounds = self.bounds
        left = (bounds.crashes, bounds.unknowns, bounds.lies)
        return (view.id, (OFF, OFF), (), (), *left, ())

    # ---- the holder's program: worker/loop.py over the same decisions ---------------------------

    def action(self, view: View, slot: Slot) -> Label:
        """What a holder does next at this view: append …, ask whether the earlier call is over,
        or stop."""
        key = (view.id, slot.attempted, slot.over)
        found = self._actions.get(key)
        if found is None:
            found = self._actions[key] = self._decide(view.fold, slot)
        return found

    def _decide(self, fold: Fold, slot: Slot) -> Label:
        if fold.finished:
            return ("stop",)
        if fold.cancel is not None and self.rules.heeds_cancel:
            return self._cancelled(fold)
        answers: list[str] = []
        awaited = False
        for index, (call, verdict) in enumerate(zip(REPLY.calls, VERDICTS, strict=True)):
            match decide_call(fold, AGENT, 1, index, call, verdict):
                case Answered(completed):
                    value, error = completed_value(completed)
                    answers.append(error.type if error else value)
                case AwaitDecision():
                    awaited = True
                case Refuse(_, error):
                    return ("append", ("refused", index, error.type, error.message))
                case Execute(wanted):
                    attempted = frozenset(slot.attempted if self.rules.remembers else ())
                    decision = self.rules.decide_step(
                        fold, wanted, attempted=attempted, earlier_over=slot.over
                    )
                    return self._step(fold, index, decision)
                case other:
                    assert_never(other)
        if awaited:
            return self._stop(fold, "approval")
        placing = self.rules.decide_placing(fold, "llm/2", ())
        if placing is not None:
            return ("append", ("placed", placing.position))
        return ("append", ("completed", tuple(answers)))

    def _cancelled(self, fold: Fold) -> Label:
        """End the run; a write that nobody knows of is settled first (PROTOCOL 4)."""
        for step in fold.unknown():
            if step.needs_person:
                return self._stop(fold, "reconcile")
            return ("append", ("interrupted", STEPS.index(step.name)))
        return ("append", ("cancelled",))

    def _step(self, fold: Fold, index: int, decision: StepDecision) -> Label:
        match decision:
            case Settle(result, _, via):
                return ("append", ("done", index, result, via))
            case Run(permit, _, unsafe):
                return ("append", ("start", index, permit, unsafe))
            case Wait(start):
                return ("over?", start.claim)
            case Ask(_, "interrupt"):
                return ("append", ("interrupted", index))
            case Ask():
                return self._stop(fold, "reconcile")
            case Reuse() | Mismatch():
                raise Violation(f"the step table says {decision} of an open step")
            case other:
                assert_never(other)

    def _stop(self, fold: Fold, why: str) -> Label:
        if not self.bounds.shared:
            return ("stop",)
        return ("append", ("release",) if fold.runnable() else ("park", why))

    # ---- events -------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Every next state, with the event that leads there. An event that begins with "x " is a
        fault: nobody may have to wait for one."""
        view = self.views[state[0]]
        for index, slot in enumerate(state[1]):
            yield from self._process(state, view, index, slot)
        yield from self._network(state, view)
        yield from self._person(state, view)
        if self.bounds.inputs and view.n < self.bounds.records:
            yield from self._sender(state, view)

    def _process(
        self, state: State, view: View, index: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        match slot.pc:
            case "off":
                yield from self._begin(state, view, index)
            case "take":
                yield from self._take(state, view, index, slot)
            case "ready":
                yield from self._crash(state, view, index, slot)
                yield from self._ready(state, view, index, slot)
            case "sent":
                yield from self._crash(state, view, index, slot)
                yield from self._sent(state, view, index, slot)
            case "started":
                yield from self._crash(state, view, index, slot)
                yield self._call(state, view, index, slot)
            case "result":
                yield from self._crash(state, view, index, slot)
                (which,) = slot.extra
                yield from self._publish(
                    state, view, index, slot, ("done", which, VALUES[which], "run")
                )
                if which == 1:  # the write raised: nobody knows, and this process knows least
                    ready = slot._replace(pc="ready", extra=())
                    yield ("the write raises", with_slot(state, index, ready))
            case "late":
                yield from self._crash(state, view, index, slot)
                yield from self._report(state, view, index, slot)

    def _begin(self, state: State, view: View, index: int) -> Iterator[tuple[str, State]]:
        if view.fold.finished:
            return
        if self.bounds.shared:
            new = Slot("take", view.id)
            if not isinstance(self._claim_decision(view, ()), Rest):
                yield ("a process begins", with_slot(state, index, new))
        elif state[1][1 - index] is OFF or state[1][1 - index].pc == "off":
            new = Slot("ready", view.id)
            if self.action(view, new) != ("stop",):
                yield ("a process takes the lock", with_slot(state, index, new))

    def _claim_decision(self, view: View, answers: tuple[Answer, ...]) -> Any:
        return decide_claim(view.fold, answers, ack_wait_s=30.0)

    def _take(
        self, state: State, view: View, index: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        known = self.views[slot.view]
        match self._claim_decision(known, slot.extra):
            case Rest() | HeldBy():
                yield ("leaves the run to others", with_slot(state, index, OFF))
            case Take(reason):
                yield from self._publish(state, view, index, slot, ("claim", reason))
            case AskHolder(claim=claim):
                alive = holds(state[1], claim)
                same = view.fold.claim is not None and view.fold.claim.n == claim
                for answer in ("yes", "nobody") if alive else ("no", "nobody"):
                    heard = (*slot.extra, answer) if same else ()
                    asked = with_slot(state, index, slot._replace(view=view.id, extra=heard))
                    what = f"asks the holder of claim {claim}: {answer}"
                    if not alive or answer == "yes":
                        yield (what, asked)
                    elif "nobody" in slot.extra:  # still cut off
                        yield (f"x {what}", asked)
                    elif state[LIES]:
                        yield (f"x {what}", spend(asked, LIES))
            case other:
                raise AssertionError(other)

    def _ready(
        self, state: State, view: View, index: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        known = self.views[slot.view]
        match self.action(known, slot):
            case ("stop",):
                yield ("stops", with_slot(state, index, OFF))
            case ("append", ("start", 1, *_)) if not self.rules.start_first:
                yield self._call(state, view, index, slot)
            case ("append", label):
                yield from self._publish(state, view, index, slot, label)
            case ("over?", claim):
                alive = self.bounds.shared and holds(state[1], claim)
                over = with_slot(state, index, slot._replace(over=True))
                if not alive:
                    yield ("hears that the earlier call is over", over)
                    return
                # RetryLater: give the run up until then
                yield from self._publish(state, view, index, slot, ("release",))
                if state[LIES]:
                    yield ("x hears that the earlier call is over", spend(over, LIES))
            case other:
                raise AssertionError(other)

    def _publish(
        self, state: State, view: View, index: int, slot: Slot, label: Label
    ) -> Iterator[tuple[str, State]]:
        known = self.views[slot.view]
        what = " ".join(str(part) for part in label[:3])
        if slot.claim and known.claimed > slot.claim:
            raise Violation(f"a holder that knows it is fenced goes on: {what}")
        if self.rules.cas and view.n != known.n:
            yield (f"loses {what}, reads back", with_slot(state, index, self._reread(view, slot)))
            return
        if view.n >= self.bounds.records:
            return
        after = self.append(view, label, slot.claim)
        mine = after if self.rules.cas else self.append(known, label, slot.claim)
        landed = (after.id, *state[1:])
        yield (what, with_slot(landed, index, acknowledged(slot, mine, label)))
        if state[UNKNOWNS]:
            sent = slot._replace(pc="sent", extra=(slot.pc, slot.extra, label, after.n))
            yield (
                f"x {what}, acknowledgement lost",
                spend(with_slot(landed, index, sent), UNKNOWNS),
            )
            late = sent._replace(extra=(slot.pc, slot.extra, label, 0))
            yield (f"x {what}, in flight", spend(with_slot(state, index, late), UNKNOWNS))

    def _sent(
        self, state: State, view: View, index: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        pc, extra, label, landed = slot.extra
        before = slot._replace(pc=pc, extra=extra)
        what = " ".join(str(part) for part in label[:3])
        known = self.views[slot.view]
        if not landed and (view.n == known.n or not self.rules.cas):
            if view.n >= self.bounds.records:
                return
            after = self.append(view, label, slot.claim)
            stored = (after.id, *state[1:])
            there = slot._replace(extra=(pc, extra, label, after.n))
            yield (f"x {what} lands late", with_slot(stored, index, there))
            again = acknowledged(before, after, label)
            if not self.rules.cas:  # a blind store takes the first copy too, whenever it comes
                stored = (*stored[:2], (*state[2], (label, known.n, slot.claim)), *stored[3:])
            yield (f"{what}, published again", with_slot(stored, index, again))
            return
        if landed and not self._fenced(view, slot):
            mine = acknowledged(before, view, label, n=landed)
            yield (f"{what}, found by reading back", with_slot(state, index, mine))
        else:
            yield (
                f"{what} did not land, reads back",
                with_slot(state, index, self._reread(view, before)),
            )

    def _fenced(self, view: View, slot: Slot) -> bool:
        return bool(self.rules.stops_when_fenced and slot.claim and view.claimed > slot.claim)

    def _reread(self, view: View, slot: Slot) -> Slot:
        if self._fenced(view, slot):
            if self.bounds.late and slot.pc == "result" and slot.extra == (1,):
                return Slot("late", 0, attempted=slot.attempted)
            return OFF
        if slot.pc == "take":
            live, was = view.fold.claim, self.views[slot.view].fold.claim
            if (live.n if live else 0) != (was.n if was else 0):
                slot = slot._replace(extra=())
        return slot._replace(view=view.id)

    def _call(self, state: State, view: View, index: int, slot: Slot) -> tuple[str, State]:
        """The write begins: the world remembers it, whatever becomes of everybody here."""
        n = slot.attempted[-1] if slot.pc == "started" else 0
        step = view.fold.steps.get(WRITE)
        if step is None or all(start.n != n for start in step.starts):
            raise Violation("the write is called without an acknowledged start")
        if slot.claim and self.views[slot.view].claimed > slot.claim:
            raise Violation("the write is called by a holder that knows it is fenced")
        if len(slot.attempted) > 1:
            raise Violation("a process calls the write again that it called before")
        called = slot._replace(pc="result", extra=(1,))
        after = with_slot(state, index, called)
        return (f"CALLS THE WRITE under start {n}", (*after[:3], (*after[3], n), *after[4:]))

    def _crash(
        self, state: State, view: View, index: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        if not state[CRASHES]:
            return
        flight = state[2]
        if slot.pc == "sent" and not slot.extra[3]:
            flight = tuple(sorted((*flight, (slot.extra[2], self.views[slot.view].n, slot.claim))))
        dead = with_slot(state, index, OFF)
        yield (f"x dies ({slot.pc})", spend((*dead[:2], flight, *dead[3:]), CRASHES))

    def _network(self, state: State, view: View) -> Iterator[tuple[str, State]]:
        for letter in state[2]:
            label, expected, claim = letter
            rest = tuple(other for other in state[2] if other is not letter)
            if self.rules.cas and view.n != expected:  # its expected sequence is spent
                yield ("x a dead holder's append is refused", (*state[:2], rest, *state[3:]))
            elif view.n < self.bounds.records:
                after = self.append(view, label, claim)
                yield (
                    f"x {label[:3]} of a dead holder lands",
                    (after.id, state[1], rest, *state[3:]),
                )

    def _person(self, state: State, view: View) -> Iterator[tuple[str, State]]:
        """Approve, reject, reconcile; each also again after it was said, which must change nothing.
        Under a lock a door looks first whether the run is held, and appends some time later."""
        idle = all(slot.pc == "off" for slot in state[1])
        for said in self.sayings(view):
            two_steps = not self.bounds.shared and said[0] == "reconcile"
            if two_steps and state[7]:
                continue
            label = self.decide_signal(view, said, held=not self.bounds.shared and not idle)
            if not label or view.n >= self.bounds.records:
                continue
            if two_steps:
                yield (f"a door looks for {said}", (*state[:7], said))
            else:
                after = self.append(view, label, 0)
                yield (f"person: {said}", (after.id, *state[1:]))
        if state[7] and view.n < self.bounds.records:
            label = self.decide_signal(view, state[7], held=False)
            after = self.append(view, label, 0) if label else view
            yield (f"the door appends {state[7]}", (after.id, *state[1:7], ()))

    def _report(
        self, state: State, view: View, index: int, slot: Slot
    ) -> Iterator[tuple[str, State]]:
        """The fenced process tells what its write returned, or is told that it need not (R29)."""
        said = ("late", slot.attempted[-1])
        label = self.decide_signal(view, said, held=False)
        if label and view.n >= self.bounds.records:
            return
        after = self.append(view, label, 0) if label else view
        landed = (after.id, *state[1:])
        what = "reports its result" if label else "reports in vain"
        yield (f"a fenced process {what}", with_slot(landed, index, OFF))

    def _sender(self, state: State, view: View) -> Iterator[tuple[str, State]]:
        """Somebody sends an input, and perhaps takes it back."""
        body = input_body(INPUT, "follow_up", "and?")
        labels: list[Label] = []
        try:
            if isinstance(decide_input(view.fold, body), Queue):
                labels.append(("input", body.mode, body.content))
        except RunfoldError:
            pass
        try:
            if decide_withdrawal(view.fold, INPUT) is not None:
                labels.append(("withdrawn",))
        except RunfoldError:
            pass
        for label in labels:
            after = self.append(view, label, 0)
            yield (f"somebody: {label[0]}", (after.id, *state[1:]))

    def sayings(self, view: View) -> list[tuple[Any, ...]]:
        """Everything a person could say now; each with a request id of its own."""
        step = view.fold.steps.get(WRITE)
        starts = [start.n for start in step.starts] if step else []
        return [
            ("approve",),
            ("reject",),
            *(("reconcile", outcome, n) for n in starts for outcome in ("done", "retry")),
            *([("cancel",)] if self.bounds.cancels else []),
        ]

    def decide_signal(self, view: View, said: tuple[Any, ...], *, held: bool) -> Label:
        """The record to append, as a label; empty where the signal is refused or a repeat."""
        key = (view.id, said, held)
        label = self._signals.get(key)
        if label is None:
            label = self._signals[key] = self._decide_signal(view, said, held)
        return label

    def _decide_signal(self, view: View, said: tuple[Any, ...], held: bool) -> Label:
        request_id = "-".join(str(part) for part in said)
        recorded = view.fold.requests.get(request_id)
        try:
            decision = self.rules.decide_signal(view.fold, signal_of(said), request_id, held=held)
        except RunfoldError as refused:
            if recorded is not None:
                raise Violation(f"a repeated request is refused: {refused}") from refused
            return ()
        match decision:
            case Repeated():
                return ()
            case Append(body):
                if recorded is not None:
                    raise Violation(f"the request {request_id} is recorded twice")
                return ("signal", body.name, body.request_id, *body.payload.items())
            case other:
                assert_never(other)

    def settled(self, state: State) -> State:
        """The state after everybody whose append can only lose has read back, so that all know the
        same journal. Holds for the product's rules alone."""
        view = self.views[state[0]]
        slots = tuple(sorted(self._settled(view, slot) for slot in state[1]))
        flight = tuple(letter for letter in state[2] if letter[1] == view.n)
        return (state[0], slots, flight, *state[3:])

    def _settled(self, view: View, slot: Slot) -> Slot:
        if slot.pc == "off":
            return OFF
        if slot.pc in ("started", "late"):  # what it does next asks nobody
            return slot._replace(view=0)
        if slot.view == view.id:
            return slot
        if slot.pc == "sent":
            pc, extra, _, landed = slot.extra
            if not landed:  # its expected sequence is spent
                return self._reread(view, slot._replace(pc=pc, extra=extra))
            return OFF if self._fenced(view, slot) else slot._replace(view=view.id)
        return self._reread(view, slot)

    # ---- the search ---------------------------------------------------------------------------

    def run(self) -> Found:
        """Every state within the bounds. Raises Violation with a shortest way to it."""
        found = Found()
        first = self.first()
        number: dict[State, int] = {first: 0}
        order = [first]
        parents: list[tuple[int, str]] = [(-1, "")]
        before: list[list[int]] = [[]]
        queue = deque([first])
        here = 0
        event = ""
        try:
            while queue:
                state = queue.popleft()
                here = number[state]
                event = ""
                self.check(state, found)
                moves = False
                for event, after in self.successors(state):
                    found.transitions += 1
                    if self.settling:
                        after = self.settled(after)
                    moves = moves or not event.startswith("x ")
                    known = number.get(after)
                    if known is None:
                        known = number[after] = len(order)
                        order.append(after)
                        parents.append((here, event))
                        before.append([])
                        queue.append(after)
                    before[known].append(here)
                    event = ""
                view = self.views[state[0]]
                if not moves and not view.fold.finished and view.n < self.bounds.records:
                    raise Violation("nobody can do anything")
            found.states = len(order)
            here = self._check_ends_in_reach(order, before)
            if here >= 0:
                raise Violation("the run can never end from here")
        except Violation as violation:
            way = [event] if event else []
            while here > 0:
                here, event = parents[here]
                way.append(event)
            violation.way = way[::-1]
            raise
        return found

    def _check_ends_in_reach(self, order: list[State], before: list[list[int]]) -> int:
        """A state, well within the bounds, from which no end is in reach; -1 for none."""
        good = {index for index, state in enumerate(order) if self.views[state[0]].fold.finished}
        queue = deque(good)
        while queue:
            for index in before[queue.popleft()]:
                if index not in good:
                    good.add(index)
                    queue.append(index)
        room = self.bounds.records - RECORDS_TO_THE_END
        for index, state in enumerate(order):
            if index not in good and self.views[state[0]].n <= room:
                return index
        return -1

    def check(self, state: State, found: Found) -> None:
        """The invariants of a state."""
        view, calls = self.views[state[0]], state[3]
        fold = view.fold
        found.deepest = max(found.deepest, view.n)
        found.calls_max = max(found.calls_max, len(calls))
        found.lates += any(step.late for step in fold.steps.values())
        if len(set(calls)) < len(calls):
            raise Violation("one start let the write be called twice")
        if len(calls) > 1 + view.retries:
            raise Violation(
                f"{len(calls)} calls of the write with {view.retries} retries permitted"
            )
        decided = [said.name for said in fold.requests.values() if said.name in DECISIONS]
        if len(decided) > 1:
            raise Violation(f"two decisions on one marker are recorded: {decided}")
        if calls and decided != ["approve"]:
            raise Violation(f"the write was called, and the decision is {decided}")
        if isinstance(fold.end, Commit):
            found.ends.add("cancelled")
            if fold.cancel is None:
                raise Violation("the run ends as cancelled, and nobody cancelled it")
        for known in fold.inputs.values():
            found.inputs.add(known.status)
            if fold.end is not None and known.status in ("queued", "placed"):
                raise Violation(f"the run has ended and its input is {known.status}")
        if isinstance(fold.end, RunCompleted):
            if fold.cancel is not None:
                raise Violation("the run was cancelled, and completes all the same")
            answer = tuple(fold.end.message["content"])
            found.ends.add(answer)
            self._check_answer(fold, answer, calls)

    def _check_answer(self, fold: Fold, answer: tuple[str, ...], calls: tuple[int, ...]) -> None:
        said = outcomes(fold)
        rejected = any(record.name == "reject" for record in fold.requests.values())
        allowed = {"rejected"} if rejected else {"W"} | ({"D"} if "done" in said else set())
        if self.bounds.policy == "interrupt" and calls_started(fold):
            allowed.add("interrupted")
        if answer[0] != "R" or answer[1] not in allowed:
            raise Violation(f"the answer is {answer}; allowed are {sorted(allowed)}")
        if answer[1] == "W" and not calls:
            raise Violation("the answer holds a result of a write that was never called")


RECORDS_TO_THE_END = 10
"""A read and an unknown write from their claims to the answer, a person included."""


# ---- values -----------------------------------------------------------------------------------


def with_slot(state: Any, index: int, slot: Slot) -> State:
    """The state with this process changed; processes in order, for they are interchangeable."""
    other = state[1][1 - index]
    slots = (slot, other) if slot <= other else (other, slot)
    return (state[0], slots, *state[2:])


def spend(state: Any, place: int) -> State:
    return (*state[:place], state[place] - 1, *state[place + 1 :])


def acknowledged(slot: Slot, view: View, label: Label, n: int | None = None) -> Slot:
    """The process once it knows that its record `n` is stored; `view` is what it knows now."""
    n = view.n if n is None else n
    match label:
        case ("claim", _):
            if view.claimed != n:  # somebody else came right after
                return Slot("take", view.id)
            return Slot("ready", view.id, claim=n)
        case ("park" | "release" | "completed", *_):
            return OFF
        case ("start", 1, *_):
            attempted = (*slot.attempted, n)
            return slot._replace(pc="started", view=view.id, attempted=attempted, extra=())
        case ("start", 0, *_):
            return slot._replace(pc="result", view=view.id, extra=(0,))
        case _:
            return slot._replace(pc="ready", view=view.id, over=False, extra=())


def holds(slots: tuple[Slot, ...], claim: int) -> bool:
    """Whether the process that made this claim is alive and believes it holds the run."""
    return any(
        slot.claim == claim
        or (slot.pc == "sent" and slot.extra[2][0] == "claim" and slot.extra[3] == claim)
        for slot in slots
        if slot.pc != "off"
    )


def calls_started(fold: Fold) -> bool:
    return WRITE in fold.steps and bool(fold.steps[WRITE].starts)


def outcomes(fold: Fold) -> list[str]:
    """What a person said of unknown writes, in all."""
    return [
        said.payload["outcome"] for step in fold.steps.values() for said in step.reconciled.values()
    ]


def signal_of(said: tuple[Any, ...]) -> AnySignal:
    match said:
        case ("approve",):
            return Approve(marker=MARKER)
        case ("reject",):
            return Reject(marker=MARKER)
        case ("cancel",):
            return Cancel()
        case ("late", n):
            return Late(step=WRITE, start=n, result="W")
        case ("reconcile", "done", n):
            return Reconcile(step=WRITE, outcome="done", result="D", start=n)
        case ("reconcile", "retry", n):
            return Reconcile(step=WRITE, outcome="retry", start=n)
        case _:
            raise AssertionError(said)


def _start(index: int, permit: int, unsafe: bool, policy: Policy) -> StepStarted:
    call = CALLS[index]
    return StepStarted(
        step=call.step,
        kind="tool",
        tool=call.tool,
        input=call.input,
        digest=call.digest,
        replay="unsafe" if unsafe else "safe",
        key=step_key(RUN, call),
        permit=permit,
        policy=policy,
    )
