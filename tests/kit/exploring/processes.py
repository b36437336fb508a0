"""What a process does between two awaits: claim, decide, publish, read back, call, stop, die.

Everything that decides is the product's own; here is only what a shell does. A process's moves
depend on the journal, on what it is in the middle of, and on which claim the other one holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from journal.claims import Answer, AskHolder, HeldBy, Rest, Take, decide_claim

from .bounds import Bounds, Rules, Violation
from .journals import REPEAT, Journals, View
from .states import (
    CRASHES,
    DRAINS,
    LIES,
    OFF,
    UNKNOWNS,
    Label,
    Move,
    Slot,
    Table,
)

NOBODY = -1
"""In place of the claim that the other process holds: it is off. 0: it holds none."""
ENDS = frozenset({"park", "failed", "release", "completed"})
VALUES = {"lookup": "R", "pay": "W"}


class Processes:
    """`shortcut`: a process whose next append must lose has already lost and read back: nothing
    that it could do in between is seen by anybody. Holds for the product's rules alone."""

    def __init__(
        self, journals: Journals, slots: Table[Slot], bounds: Bounds, rules: Rules, shortcut: bool
    ) -> None:
        self.journals = journals
        self.views = journals.views
        self.slots = slots
        self.bounds = bounds
        self.rules = rules
        self.shortcut = shortcut
        self.write = journals.plot.write

    def moves(self, view: View, slot: Slot, other: int, due: bool) -> Iterator[Move]:
        """What the process can do. `other`: the claim that the other one holds, 0, or NOBODY;
        `due`: the instant of the journal's time wait has come."""
        if slot.pc in ("off", "take"):
            yield from self._begin(view, slot, other)
            return
        yield from self._crash(view, slot)
        match slot.pc:
            case "ready":
                yield from self._ready(view, slot, other)
            case "sent":
                yield from self._sent(view, slot)
            case "started":
                yield self._call(view, slot)
            case "result":
                yield from self._result(view, slot)
            case "late":
                yield from self._report(view, slot)
            case _:
                raise AssertionError(slot)

    # ---- taking the run without a task: run() -------------------------------------------------

    def _begin(self, view: View, slot: Slot, other: int) -> Iterator[Move]:
        if slot.pc == "take":
            yield from self._take(view, slot, other)
        elif view.finished:
            return
        elif self.bounds.shared:
            if not isinstance(self._claim_decision(view, ()), Rest):
                yield self._move("a process begins", view, Slot("take", view.id))
        elif other == NOBODY:
            new = Slot("ready", view.id)
            if self.journals.action(view, new) != ("stop",):
                yield self._move("a process takes the lock", view, new)

    def _claim_decision(self, view: View, answers: tuple[Answer, ...]) -> Any:
        return decide_claim(view.fold, answers, ack_wait_s=30.0)

    def _take(self, view: View, slot: Slot, other: int) -> Iterator[Move]:
        known = self.views[slot.view]
        match self._claim_decision(known, slot.extra):
            case Rest() | HeldBy():
                yield self._move("leaves the run to others", view, OFF)
            case Take(reason):
                yield from self.publish(view, slot, ("claim", reason, 0))
            case AskHolder(claim=claim):
                yield from self.ask(view, slot, other, claim)
            case unexpected:
                raise AssertionError(unexpected)

    def ask(self, view: View, slot: Slot, other: int, claim: int) -> Iterator[Move]:
        """Ask the holder of this claim; it answers truly, unless it is cut off."""
        alive = other == claim
        same = view.live == claim
        for answer in ("yes", "nobody") if alive else ("no", "nobody"):
            heard = (*slot.extra, answer) if same else ()
            asked = slot._replace(view=view.id, extra=heard)
            what = f"asks the holder of claim {claim}: {answer}"
            if not alive or answer == "yes":
                yield self._move(what, view, asked)
            elif "nobody" in slot.extra:  # still cut off
                yield self._move(f"x {what}", view, asked)
            else:
                yield self._move(f"x {what}", view, asked, cost=LIES)

    # ---- holding it ---------------------------------------------------------------------------

    def _ready(self, view: View, slot: Slot, other: int) -> Iterator[Move]:
        if self.bounds.drains and self.bounds.shared and not slot.told:
            told = slot._replace(told=True)
            yield self._move("x is told to stop", view, told, cost=DRAINS)
        known = self.views[slot.view]
        if slot.told:
            yield from self.publish(view, slot, ("release",))
            return
        match self.journals.action(known, slot):
            case ("stop",):
                yield self._move("stops", view, OFF)
            case ("append", ("start", index, *_)) if (
                index == self.write and not self.rules.start_first
            ):
                yield self._call(view, slot)
            case ("append", label):
                yield from self.publish(view, slot, label)
            case ("over?", claim):
                yield from self._earlier(view, slot, other, claim)
            case unexpected:
                raise AssertionError(unexpected)

    def _earlier(self, view: View, slot: Slot, other: int, claim: int) -> Iterator[Move]:
        """Before a permitted retry: whether the call under this earlier claim is over (R22).
        That of a holder that lives may be by its deadline; that of one that is gone is, always."""
        over = slot._replace(over=True)
        later = ("park", "retry") if self.bounds.hints else ("release",)
        if self.bounds.shared and other == claim:
            yield from self.publish(view, slot, later)
            yield self._move("x the earlier call is past its deadline", view, over, cost=LIES)
            return
        yield self._move("hears that the earlier call is over", view, over)
        if self.bounds.lies and self.shortcut and self.bounds.shared and claim != slot.claim:
            # by one that has not read yet that it was fenced, and so is off already
            for move in self.publish(view, slot, later):
                if move.cost < 0:
                    event = f"x hears that it runs: {move.event}"
                    yield move._replace(event=event, cost=LIES)

    def publish(self, view: View, slot: Slot, label: Label) -> Iterator[Move]:
        known = self.views[slot.view]
        what = " ".join(str(part) for part in label[:3])
        if slot.claim and known.claimed > slot.claim:
            raise Violation(f"a holder that knows it is fenced goes on: {what}")
        if self.rules.cas and view.n != known.n:
            yield self._reread(f"loses {what}, reads back", view, slot)
            return
        if view.n >= self.bounds.records:
            return
        after = self.journals.append(view, label, slot.claim)
        mine = after if self.rules.cas else self.journals.append(known, label, slot.claim)
        yield self._move(what, after, self.acknowledged(slot, mine, label))
        if self.bounds.unknowns:
            sent = slot._replace(pc="sent", extra=(slot.pc, slot.extra, label, after.n))
            yield self._move(f"x {what}, acknowledgement lost", after, sent, cost=UNKNOWNS)
            flying = sent._replace(extra=(slot.pc, slot.extra, label, 0))
            yield self._move(f"x {what}, in flight", view, flying, cost=UNKNOWNS)

    def _sent(self, view: View, slot: Slot) -> Iterator[Move]:
        pc, extra, label, landed = slot.extra
        before = slot._replace(pc=pc, extra=extra)
        what = " ".join(str(part) for part in label[:3])
        known = self.views[slot.view]
        if not self.rules.reads_back and view.n != known.n:
            if view.n < self.bounds.records:
                after = self.journals.append(view, label, slot.claim)
                again = self.acknowledged(before, after, label)
                yield self._move(f"{what}, published at the new tail", after, again)
        elif not landed and (view.n == known.n or not self.rules.cas):
            if view.n >= self.bounds.records:
                return
            after = self.journals.append(view, label, slot.claim)
            there = slot._replace(extra=(pc, extra, label, after.n))
            yield self._move(f"x {what} lands late", after, there)
            again = self.acknowledged(before, after, label)
            # a blind store takes the first copy too, whenever it comes
            letter = () if self.rules.cas else (label, known.n, slot.claim)
            yield self._move(f"{what}, published again", after, again, letter=letter)
        elif landed and not self._fenced(view, slot):
            mine = self.acknowledged(before, view, label, n=landed)
            yield self._move(f"{what}, found by reading back", view, mine)
        else:
            yield self._reread(f"{what} did not land, reads back", view, before)

    def acknowledged(self, slot: Slot, view: View, label: Label, n: int | None = None) -> Slot:
        """The process once it knows that its record `n` is stored; `view` is what it knows now."""
        n = view.n if n is None else n
        match label[0]:
            case "claim":
                if view.claimed != n:  # somebody else came right after
                    return slot._replace(view=view.id, extra=())
                return slot._replace(pc="ready", view=view.id, claim=n, extra=())
            case "start" if label[1] == self.write:
                attempted = (*slot.attempted, n)
                return slot._replace(pc="started", view=view.id, attempted=attempted, extra=())
            case "start":
                return slot._replace(pc="result", view=view.id, extra=(label[1],))
            case "release":
                return Slot("nak", task=slot.task) if slot.task.id else OFF
            case _ if self._over(label, view):
                return self._ended(slot, view)
            case _:
                return slot._replace(pc="ready", view=view.id, over=False, extra=())

    def _over(self, label: Label, view: View) -> bool:
        """Whether this record ended the claim."""
        if label[0] == "cancelled":
            return self.bounds.hints
        if label[0] == "commit":
            return self.bounds.shared and view.live == 0
        return label[0] in ENDS

    def _ended(self, slot: Slot, view: View) -> Slot:
        """The claim has ended in order: what that owes is paid, then the task is acknowledged."""
        if not slot.task.id:
            return OFF
        owed = (view.wait,) if view.wait else ()
        pc = "pay" if owed and self.rules.pays_first else "ack"
        return Slot(pc, task=slot.task, extra=("held", *owed))

    # ---- losing it ----------------------------------------------------------------------------

    def _fenced(self, view: View, slot: Slot) -> bool:
        return bool(self.rules.stops_when_fenced and slot.claim and view.claimed > slot.claim)

    def _lost(self, slot: Slot) -> tuple[Label, ...]:
        """Its task is left to redelivery; a lapsed one is, or may be, somebody else's."""
        if not slot.task.id or slot.task.lapsed:
            return ()
        return (("leave", slot.task.id),)

    def reread(self, view: View, slot: Slot) -> tuple[Slot, tuple[Label, ...]]:
        """The process once it knows this journal, and what becomes of its task."""
        if self._fenced(view, slot):
            ops = self._lost(slot)
            if self.bounds.late and slot.pc == "result" and slot.extra == (self.write,):
                return Slot("late", attempted=slot.attempted), ops
            return OFF, ops
        if slot.pc in ("take", "look") and view.live != self.views[slot.view].live:
            slot = slot._replace(extra=())
        return slot._replace(view=view.id), ()

    def settled(self, view: View, slot: Slot) -> tuple[Slot, tuple[Label, ...]]:
        """The process after it has read back, if its append can only lose."""
        if slot.pc == "off" or not self.shortcut:
            return slot, ()
        if slot.pc in ("started", "late", "pay", "ack", "nak"):  # what it does next asks nobody
            return (slot._replace(view=0) if slot.view else slot), ()
        if slot.view == view.id or slot.pc == "stale":
            return slot, ()
        if slot.pc == "sent":
            pc, extra, _, landed = slot.extra
            if not landed:  # its expected sequence is spent
                if not self.rules.reads_back:
                    return slot, ()
                return self.reread(view, slot._replace(pc=pc, extra=extra))
            if self._fenced(view, slot):
                return OFF, self._lost(slot)
            return (slot._replace(view=view.id) if self.rules.reads_back else slot), ()
        return self.reread(view, slot)

    def _reread(self, event: str, view: View, slot: Slot) -> Move:
        after, ops = self.reread(view, slot)
        return self._move(event, view, after, ops=ops)

    def _crash(self, view: View, slot: Slot) -> Iterator[Move]:
        if not self.bounds.crashes:
            return
        letter: tuple[Any, ...] = ()
        if slot.pc == "sent" and not slot.extra[3]:
            letter = (slot.extra[2], self.views[slot.view].n, slot.claim)
        event = f"x dies ({slot.pc})"
        yield self._move(event, view, OFF, cost=CRASHES, letter=letter, ops=self._lost(slot))

    # ---- the write ----------------------------------------------------------------------------

    def _call(self, view: View, slot: Slot) -> Move:
        """The write begins: the world remembers it, whatever becomes of everybody here."""
        n = slot.attempted[-1] if slot.pc == "started" else 0
        if n not in view.past.starts:
            raise Violation("the write is called without an acknowledged start")
        if slot.claim and self.views[slot.view].claimed > slot.claim:
            raise Violation("the write is called by a holder that knows it is fenced")
        if len(slot.attempted) > 1:
            raise Violation("a process calls the write again that it called before")
        called = slot._replace(pc="result", extra=(self.write,))
        return self._move(f"CALLS THE WRITE under start {n}", view, called, call=n)

    def _result(self, view: View, slot: Slot) -> Iterator[Move]:
        which: int = slot.extra[0]
        value = VALUES[self.journals.plot.calls[which].tool]
        yield from self.publish(view, slot, ("done", which, value, "run"))
        if which == self.write:  # the write raised: nobody knows, and this process knows least
            yield self._move("the write raises", view, slot._replace(pc="ready", extra=()))

    def _report(self, view: View, slot: Slot) -> Iterator[Move]:
        """The fenced process tells what its write returned, or is told that it need not (R29)."""
        label = self.journals.signal(view, ("late", slot.attempted[-1]), held=False)
        told = bool(label) and label != REPEAT
        if told and view.n >= self.bounds.records:
            return
        after = self.journals.append(view, label, 0) if told else view
        what = "reports its result" if told else "reports in vain"
        ops = (("owe",),) if told and self.bounds.hints else ()
        yield self._move(f"a fenced process {what}", after, OFF, ops=ops)

    def _move(self, event: str, view: View, slot: Slot, **more: Any) -> Move:
        slot, ops = self.settled(view, slot)
        if ops:
            more["ops"] = (*more.get("ops", ()), *ops)
        return Move(event, view.id, self.slots.number(slot), **more)


def held_by(slot: Slot) -> int:
    """The claim that this process believes it holds, or that it has sent and may hold."""
    if slot.pc == "off":
        return NOBODY
    if slot.pc == "sent" and slot.extra[2][0] == "claim" and slot.extra[3]:
        return int(slot.extra[3])
    return slot.claim
