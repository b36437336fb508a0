"""The search: breadth first through every state within the bounds (R77).

Two holder processes, people at doors and the network act on one journal. Everything that decides is
the product's own. What is modelled here is only what a shell does between two awaits: read, publish
at the tail that was read, read back, call, stop, die; and the streams for tasks and signals.

States are hashed by what the fold means, not by the list of records; the two processes are
interchangeable; and a process whose next append must lose has already lost and read back. Each cuts
the search many times over. A violation comes with a shortest way to it.
"""

from __future__ import annotations

import gc
import re
from array import array
from typing import Any

from .bounds import Bounds, Found, Rules, Violation
from .invariants import Invariants
from .states import VIEW, State
from .world import World


class Explorer:
    """One exploration: `run` goes through every state within the bounds, or raises Violation.
    `collects`: states that nobody moves on for want of a sweep are noted, and it goes on."""

    def __init__(
        self,
        bounds: Bounds,
        rules: Rules | None = None,
        *,
        shortcut: bool = True,
        collects: bool = False,
    ) -> None:
        rules = rules or Rules()
        self.bounds = bounds
        self._collects = collects
        self.world = World(
            bounds, rules, shortcut=shortcut and rules.cas and rules.stops_when_fenced
        )
        self.found = Found()
        self._invariants = Invariants(self.world, self.found)
        self._order: list[State] = []
        self._parents = array("q")
        self._from = array("q")
        self._to = array("q")

    @property
    def journals(self) -> set[Any]:
        """What all journals that were reached mean."""
        return set(self.world.journals.meanings)

    def run(self) -> Found:
        """Every state within the bounds. Raises Violation with a shortest way to it."""
        collecting = gc.isenabled()
        gc.disable()  # millions of tuples and no cycle among them
        try:
            return self._run()
        finally:
            if collecting:
                gc.enable()

    def _run(self) -> Found:
        here, event = -1, ""
        try:
            first = self.world.first()
            number = {first: 0}
            order = self._order = [first]
            parents = self._parents = array("q", [-1])
            append, successors = order.append, self.world.successors
            check = self._invariants.check
            sources, targets = self._from, self._to
            for here, state in enumerate(order):
                event = ""
                check(state)
                moves = False
                for event, after in successors(state):
                    known = number.get(after)
                    if known is None:
                        known = number[after] = len(order)
                        append(after)
                        parents.append(here)
                    self.found.transitions += 1
                    if event[:2] != "x ":
                        moves = True
                        sources.append(here)
                        targets.append(known)
                event = ""
                self._check_moves(here, state, moves)
            self._finish()
        except Violation as violation:
            if not violation.way:
                violation.way = [*self.way(here), *([event] if event else [])]
            raise
        return self.found

    def _check_moves(self, here: int, state: State, moves: bool) -> None:
        view = self.world.journals.views[state[VIEW]]
        if view.finished or view.n >= self.bounds.records:
            return
        if self.bounds.hints and not self._invariants.moved_on(state):
            if not self._collects:
                raise Violation("nobody is about to move the run on")
            self.found.stuck.setdefault(self._last_fault(here), here)
        elif not moves and not self._invariants.may_be_cut_off(state):
            raise Violation("nobody can do anything")

    def _finish(self) -> None:
        found, world = self.found, self.world
        found.states = len(self._order)
        found.journals = len(world.journals.views)
        if self.bounds.sweep:
            here = self._out_of_reach()
            if here >= 0:
                raise self._violation("the run can never end from here", here)
        audited = world.journals.audit()
        if audited is not None:
            view, text = audited
            here = next(at for at, state in enumerate(self._order) if state[VIEW] == view.id)
            raise self._violation(f"the audit says: {text}", here)

    def _violation(self, what: str, here: int) -> Violation:
        violation = Violation(what)
        violation.way = self.way(here)
        return violation

    def _out_of_reach(self) -> int:
        """A state, well within the bounds, from which no end is in reach without another fault; -1
        for none."""
        order, views = self._order, self.world.journals.views
        count = len(order)
        starts = array("q", bytes(8 * (count + 1)))
        for target in self._to:
            starts[target + 1] += 1
        for index in range(count):
            starts[index + 1] += starts[index]
        place = array("q", starts)
        before = array("q", bytes(8 * len(self._from)))
        for source, target in zip(self._from, self._to, strict=True):
            before[place[target]] = source
            place[target] += 1
        good = bytearray(count)
        queue = [index for index, state in enumerate(order) if views[state[VIEW]].finished]
        for index in queue:
            good[index] = 1
        while queue:
            index = queue.pop()
            for source in before[starts[index] : starts[index + 1]]:
                if not good[source]:
                    good[source] = 1
                    queue.append(source)
        cut_off = self._invariants.may_be_cut_off
        for index, state in enumerate(order):
            if not good[index] and not cut_off(state):
                return index
        return -1

    def way(self, here: int) -> list[str]:
        """The events of a shortest way to the state with this number."""
        way: list[str] = []
        while here > 0:
            parent = self._parents[here]
            state = self._order[here]
            for event, after in self.world.successors(self._order[parent]):
                if after == state:
                    way.append(event)
                    break
            here = parent
        return way[::-1]

    def _last_fault(self, here: int) -> str:
        faults = [event for event in self.way(here) if event.startswith("x ")]
        return re.sub(r"[0-9]+", "…", faults[-1]) if faults else "no fault"
