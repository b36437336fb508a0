"""A worker with a task message: look, ask, claim, or settle it (journal/taking.py, held.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from journal.claims import (
    AskHolder,
    Delivery,
    Drop,
    Finished,
    Leave,
    Resting,
    Stale,
    Take,
    decide_task,
)

from .bounds import Violation
from .journals import View
from .plots import AFTER, BEFORE
from .processes import Processes
from .states import OFF, Label, Move, Slot

ACCEPTS = ("1",)
RESTARTS = 1000


class Workers(Processes):
    """Processes that take the run by a task message."""

    def moves(self, view: View, slot: Slot, other: int, due: bool) -> Iterator[Move]:
        match slot.pc:
            case "off":  # it begins by a message: see world.py
                return
            case "look":
                yield from self._crash(view, slot)
                yield from self._look(view, slot, other, due)
            case "stale":
                yield from self._crash(view, slot)
                yield from self._look_back(view, slot, due)
            case "pay" | "ack" | "nak":
                yield from self._crash(view, slot)
                yield from self._settle(view, slot)
            case _:
                yield from super().moves(view, slot, other, due)

    def _decision(self, known: View, slot: Slot, due: bool) -> Any:
        task = slot.task
        late = slot.clock > 0 or (known.wait != 0 and task.at == known.wait)
        late = late or (due and slot.clock == 0)
        behind = task.fresh and slot.pc == "stale" and self.rules.causes
        return decide_task(
            known.fold,
            Delivery(sequence=task.id, delivery=1 + task.again, cause=known.n + behind),
            slot.extra,
            agent="helpdesk",
            accepts=ACCEPTS,
            now=AFTER if late else BEFORE,
            ack_wait_s=30.0,
            restart_limit=RESTARTS,
        )

    def _look(self, view: View, slot: Slot, other: int, due: bool) -> Iterator[Move]:
        decision = self._decision(self.views[slot.view], slot, due)
        match decision:
            case Take(reason):
                yield from self.publish(view, slot, ("claim", reason, slot.task.id))
            case AskHolder(claim=claim):
                yield from self.ask(view, slot, other, claim)
            case _:
                yield self._follow(view, slot, decision)

    def _look_back(self, view: View, slot: Slot, due: bool) -> Iterator[Move]:
        """What a deposed leader answered: a claim at it loses, and its loser reads the truth."""
        decision = self._decision(self.views[slot.view], slot, due)
        again = slot._replace(pc="look", view=view.id)
        match decision:
            case Stale() | Take() | AskHolder():
                yield self._move("reads again", view, again)
            case _:
                yield self._follow(view, slot, decision)

    def _follow(self, view: View, slot: Slot, decision: Any) -> Move:
        """The hint leads nowhere: settle it."""
        known = self.views[slot.view]
        match decision:
            case Leave():
                return self._move("leaves the task to the holder", view, OFF, ops=self._lost(slot))
            case Resting(until) if until and self.rules.sets_again:
                rest = Slot("pay", task=slot.task, extra=("", known.wait))
                return self._move(f"sees that the run waits at {known.n}", view, rest)
            case Finished() | Resting() | Drop():
                what = type(decision).__name__.lower()
                return self._move(f"has nothing to do ({what})", view, Slot("ack", task=slot.task))
            case _:
                raise Violation(f"a worker decides {decision}")

    def _settle(self, view: View, slot: Slot) -> Iterator[Move]:
        """Pay what the end of the claim owes, then the message; see lease.py for when not."""
        task = slot.task
        owed = slot.extra[1:]
        if slot.pc == "pay":
            done = slot._replace(pc="ack", extra=slot.extra[:1])
            if not self.rules.pays_first:
                done = OFF
            yield self._move("sets the timer", view, done, ops=(("timer", *owed),))
        elif slot.pc == "nak":
            yield self._move("gives the task back", view, OFF, ops=self._lost(slot))
        else:
            done = OFF
            if owed and not self.rules.pays_first:
                done = slot._replace(pc="pay", task=OFF.task)
            ops: tuple[Label, ...] = (("ack", task.id),)
            held = slot.extra[:1] == ("held",)
            if task.lapsed:
                yield self._move("touches no lapsed task", view, done)
            if not task.lapsed or held:  # renewed: it has read meanwhile that the run was its own
                yield self._move("acknowledges the task", view, done, ops=ops)
