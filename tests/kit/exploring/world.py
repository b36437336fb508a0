"""Every next state of a state: the two processes, the network, people at doors, tasks and bridges.

What a process can do is worked out once for each journal it meets (`Processes.moves`); here that is
put together with everything else in the state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from journal.errors import RunfoldError
from journal.inputs import Queue as QueueInput
from journal.inputs import decide_input, decide_withdrawal, input_body

from .bodies import INPUT
from .bounds import Bounds, Rules
from .bridges import Bridges, Queue, Step
from .hints import Hints
from .journals import REPEAT, Journals, View
from .plots import Plot, ReplyPlot
from .processes import Processes, held_by
from .states import (
    DOOR,
    FAULTS,
    FLIGHT,
    LEFT,
    OFF,
    QUEUE,
    QUEUED,
    TASKS,
    VIEW,
    A,
    B,
    Event,
    Label,
    Move,
    Slot,
    State,
    Table,
)
from .tasks import Tasks
from .turning import AttemptsPlot, TurnsPlot
from .workers import Workers

PLOTS: dict[str, Any] = {"reply": ReplyPlot, "turns": TurnsPlot, "attempts": AttemptsPlot}


Said = tuple[Label, View]
QueueStep = tuple[Step, int]


class World:
    """All states within the bounds, and what they are made of."""

    def __init__(self, bounds: Bounds, rules: Rules, *, shortcut: bool) -> None:
        self.bounds = bounds
        self.rules = rules
        self.shortcut = shortcut
        self.plot: Plot = PLOTS[bounds.plot](bounds, rules)
        self.journals = Journals(self.plot, bounds, rules)
        self.slots: Table[Slot] = Table(OFF)
        self.flights: Table[tuple[Any, ...]] = Table(())
        self.calls: Table[tuple[int, ...]] = Table(())
        self.left: Table[tuple[int, ...]] = Table(tuple(getattr(bounds, one) for one in FAULTS))
        self.doors: Table[Label] = Table(())
        self.tasks: Table[Tasks] = Table(Tasks(owed=bounds.hints))
        self.queues: Table[Queue] = Table(Queue())
        kind = Workers if bounds.hints else Processes
        self.processes = kind(self.journals, self.slots, bounds, rules, shortcut)
        self.bridges = Bridges(self.journals, bounds, rules)
        self.hints = Hints(self)
        self._moves: dict[tuple[int, int, int, bool], tuple[Move, ...]] = {}
        self._settled: dict[tuple[int, int], tuple[int, tuple[Label, ...]]] = {}
        self._tasks: dict[Any, int] = {}
        self._flights: dict[tuple[int, int], int] = {}
        self._spent: dict[tuple[int, int], int] = {}
        self._held: list[int] = []
        self._task: list[int] = []
        self._said: dict[int, tuple[Said, ...]] = {}
        self._steps: dict[tuple[int, int, bool], tuple[QueueStep, ...]] = {}

    def first(self) -> State:
        return (self.journals.first().id, 0, 0, 0, 0, 0, 0, 0, 0)

    # ---- events -------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[Event]:
        """Every next state, with the event that leads there. An event that begins with "x " is a
        fault: nobody may have to wait for one."""
        a, b = state[A], state[B]
        yield from self._process(state, a, b)
        if a != b:
            yield from self._process(state, b, a)
        if state[FLIGHT]:
            yield from self._network(state)
        if self.bounds.hints:
            yield from self.hints.events(state)
        if self.bounds.queued:
            yield from self._queue(state)
        else:
            yield from self._person(state)
        if self.bounds.inputs:
            yield from self._sender(state)

    def _process(self, state: State, slot: int, other: int) -> Iterator[Event]:
        due = self.bounds.hints and self.tasks.values[state[TASKS]].came != 0
        key = (state[VIEW], slot, self.held(other), due)
        moves = self._moves.get(key)
        if moves is None:
            view = self.journals.views[state[VIEW]]
            found = self.processes.moves(view, self.slots.values[slot], key[2], due)
            moves = self._moves[key] = tuple(found)
        for move in moves:
            left = state[LEFT]
            if move.cost >= 0:
                left = self.spend(left, move.cost)
                if left < 0:
                    continue
            yield move.event, self._moved(state, move, other, left)

    def _moved(self, state: State, move: Move, other: int, left: int) -> State:
        view, _, _, flight, calls, _, door, tasks, queue = state
        after, slot, ops = move.view, move.slot, move.ops
        if after != view:
            if other:
                other, more = self.settled(after, other)
                if more:
                    ops += more
            if flight:
                flight = self._flight(after, flight)
        if move.letter:
            letters = (*self.flights.values[flight], move.letter)
            flight = self.flights.number(tuple(sorted(letters)))
        if move.call:
            calls = self.calls.number((*self.calls.values[calls], move.call))
        if self.bounds.hints and (ops or after != view):
            tasks = self.tasks_after(tasks, after, ops)
        if slot > other:
            slot, other = other, slot
        return (after, slot, other, flight, calls, left, door, tasks, queue)

    def appended(self, state: State, after: View) -> State:
        """The state after somebody who is no process appended a record."""
        _, a, b, flight, calls, left, door, tasks, queue = state
        ops: tuple[Label, ...] = ()
        if a:
            a, more = self.settled(after.id, a)
            ops += more
        if b:
            b, more = self.settled(after.id, b)
            ops += more
        if flight:
            flight = self._flight(after.id, flight)
        if self.bounds.hints:
            tasks = self.tasks_after(tasks, after.id, ops)
        if a > b:
            a, b = b, a
        return (after.id, a, b, flight, calls, left, door, tasks, queue)

    # ---- parts --------------------------------------------------------------------------------

    def held(self, slot: int) -> int:
        """The claim that the process with this number holds."""
        held = self._held
        while slot >= len(held):
            held.append(held_by(self.slots.values[len(held)]))
        return held[slot]

    def task(self, slot: int) -> int:
        """The id of the task that the process with this number has; 0 for none."""
        task = self._task
        while slot >= len(task):
            task.append(self.slots.values[len(task)].task.id)
        return task[slot]

    def spend(self, left: int, cost: int) -> int:
        """What is left then; -1 where nothing was."""
        found = self._spent.get((left, cost))
        if found is None:
            before = self.left.values[left]
            found = -1
            if before[cost]:
                after = (*before[:cost], before[cost] - 1, *before[cost + 1 :])
                found = self.left.number(after)
            self._spent[left, cost] = found
        return found

    def settled(self, view: int, slot: int) -> tuple[int, tuple[Label, ...]]:
        """A process that reads this journal back where its append could only lose."""
        found = self._settled.get((view, slot))
        if found is None:
            process = self.slots.values[slot]
            after, ops = self.processes.settled(self.journals.views[view], process)
            found = self._settled[view, slot] = (self.slots.number(after), ops)
        return found

    def tasks_after(self, tasks: int, view: int, ops: tuple[Label, ...]) -> int:
        key = (tasks, view, ops)
        found = self._tasks.get(key)
        if found is None:
            after = self.tasks.values[tasks].after(ops).fitted(self.journals.views[view])
            found = self._tasks[key] = self.tasks.number(after)
        return found

    def _flight(self, view: int, flight: int) -> int:
        """What can still land there: else its expected sequence is spent."""
        if not self.shortcut:
            return flight
        found = self._flights.get((view, flight))
        if found is None:
            n = self.journals.views[view].n
            letters = tuple(one for one in self.flights.values[flight] if one[1] == n)
            found = self._flights[view, flight] = self.flights.number(letters)
        return found

    # ---- everybody else -----------------------------------------------------------------------

    def _network(self, state: State) -> Iterator[Event]:
        view = self.journals.views[state[VIEW]]
        letters = self.flights.values[state[FLIGHT]]
        for letter in letters:
            label, expected, claim = letter
            rest = self.flights.number(tuple(other for other in letters if other is not letter))
            without = (*state[:FLIGHT], rest, *state[FLIGHT + 1 :])
            if self.rules.cas and view.n != expected:  # its expected sequence is spent
                yield "x a dead holder's append is refused", without
            elif view.n < self.bounds.records:
                after = self.journals.append(view, label, claim)
                yield f"x {label[:3]} of a dead holder lands", self.appended(without, after)

    def _person(self, state: State) -> Iterator[Event]:
        """Whatever a person can say; what was said before must change nothing."""
        if not self.bounds.shared:
            yield from self._person_of_a_lock(state)
            return
        said = self._said.get(state[VIEW])
        if said is None:
            view = self.journals.views[state[VIEW]]
            found = self._sayings(view, held=False) if view.n < self.bounds.records else ()
            said = self._said[state[VIEW]] = tuple(found)
        for words, after in said:
            yield f"person: {words}", self.said(state, after)

    def _sayings(self, view: View, *, held: bool) -> Iterator[Said]:
        for said in self.journals.sayings(view):
            label = self.journals.signal(view, said, held=held)
            if label and label != REPEAT:
                yield said, self.journals.append(view, label, 0)

    def _person_of_a_lock(self, state: State) -> Iterator[Event]:
        """A door looks first whether the run is held, and appends some time later."""
        view = self.journals.views[state[VIEW]]
        if view.n >= self.bounds.records:
            return
        waiting = self.doors.values[state[DOOR]]
        for said, after in self._sayings(view, held=state[B] != 0):
            if said[0] != "reconcile":
                yield f"person: {said}", self.appended(state, after)
            elif not waiting:
                door = self.doors.number(said)
                yield f"a door looks for {said}", (*state[:DOOR], door, *state[DOOR + 1 :])
        if waiting:
            label = self.journals.signal(view, waiting, held=False)
            done = (*state[:DOOR], 0, *state[DOOR + 1 :])
            if label and label != REPEAT:
                done = self.appended(done, self.journals.append(view, label, 0))
            yield f"the door appends {waiting}", done

    def said(self, state: State, after: View) -> State:
        """After a door's record: it owes a task where a holder has something to do and there is
        none (doors.announce)."""
        done = self.appended(state, after)
        if self.bounds.hints and self.rules.wakes and after.runnable and not after.live:
            tasks = self.tasks_after(done[TASKS], after.id, (("owe",),))
            done = (*done[:TASKS], tasks, *done[TASKS + 1 :])
        return done

    def _sender(self, state: State) -> Iterator[Event]:
        """Somebody sends an input, and perhaps takes it back."""
        view = self.journals.views[state[VIEW]]
        if view.n >= self.bounds.records:
            return
        for label in _inputs(view):
            after = self.journals.append(view, label, 0)
            done = self.said(state, after) if label[0] == "input" else self.appended(state, after)
            yield f"somebody: {label[0]}", done

    def _queue(self, state: State) -> Iterator[Event]:
        left = self.spend(state[LEFT], QUEUED)
        key = (state[VIEW], state[QUEUE], left >= 0)
        steps = self._steps.get(key)
        if steps is None:
            view, queue = self.journals.views[state[VIEW]], self.queues.values[state[QUEUE]]
            steps = self._steps[key] = tuple(
                (step, self.queues.number(step.queue))
                for step in self.bridges.steps(view, queue, may_send=left >= 0)
            )
        for step, queue in steps:
            done = self.appended(state, step.view) if step.view.id != state[VIEW] else state
            still = left if step.sends else state[LEFT]
            done = (*done[:LEFT], still, *done[LEFT + 1 : QUEUE], queue)
            if step.wakes and self.bounds.hints:
                done = self.hints.published(done)
            yield step.event, done


def _inputs(view: View) -> list[Label]:
    body = input_body(INPUT, "follow_up", "and?")
    labels: list[Label] = []
    try:
        if isinstance(decide_input(view.fold, body), QueueInput):
            labels.append(("input", body.mode, body.content))
    except RunfoldError:
        pass
    try:
        if decide_withdrawal(view.fold, INPUT) is not None:
            labels.append(("withdrawn",))
    except RunfoldError:
        pass
    return labels
