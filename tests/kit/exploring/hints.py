"""What moves tasks: deliveries, timers, doors that publish, the sweep (PROTOCOL 4, 5).

What depends on the journal, on TASKS and on the ids in use alone is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .journals import View
from .states import (
    CRASHES,
    FLIGHT,
    LEFT,
    LIES,
    QUEUE,
    SKEWS,
    STALES,
    TASKS,
    VIEW,
    A,
    B,
    Event,
    Given,
    Slot,
    State,
)
from .tasks import OLD, Tasks

if TYPE_CHECKING:
    from .world import World

CLOCKS = {0: "", -1: " with a slow clock", 1: " with a fast clock"}


class Turn(NamedTuple):
    """An event: the number of TASKS after it, the fault it spends (-1: none), the process that
    begins by it (0: none)."""

    event: str
    tasks: int
    cost: int = -1
    slot: int = 0


class Hints:
    """The events around TASKS."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bounds = world.bounds
        self._turns: dict[tuple[int, ...], tuple[Turn, ...]] = {}

    def events(self, state: State) -> Iterator[Event]:
        world = self.world
        view, a, b, flight, calls, left, door, tasks, queue = state
        key = (view, tasks, a == 0, world.task(a), world.task(b), flight)
        turns = self._turns.get(key)
        if turns is None:
            turns = self._turns[key] = tuple(self._worked_out(state))
        for event, after, cost, slot in turns:
            still = left if cost < 0 else world.spend(left, cost)
            if still < 0:
                continue
            if not slot:
                yield event, (view, a, b, flight, calls, still, door, after, queue)
            elif slot < b:
                yield event, (view, slot, b, flight, calls, still, door, after, queue)
            else:
                yield event, (view, b, slot, flight, calls, still, door, after, queue)
        if self.bounds.lies and world.spend(left, LIES) >= 0:
            yield from self._again(state)
        if self.bounds.sweep and not world.tasks.values[tasks].messages and self.stranded(state):
            yield "the sweep finds the run", self.published(state)

    def _worked_out(self, state: State) -> Iterator[Turn]:
        tasks = self.world.tasks.values[state[TASKS]]
        view = self.world.journals.views[state[VIEW]]
        if state[A] == 0:
            yield from self._delivered(view, tasks)
        yield from self._time(state, view, tasks)
        if tasks.owed:
            unowed = tasks._replace(owed=False)
            yield Turn("the door publishes its task", self._more(state, unowed))
            yield Turn("x the door dies before its task", self._number(view, unowed), CRASHES)
        if self.bounds.stales and tasks.stale < 0:
            deposed = self._number(view, tasks._replace(stale=view.id))
            yield Turn("x a leader is deposed and answers on", deposed, STALES)
        elif self.bounds.stales:
            messages = tuple(one._replace(fresh=False) for one in tasks.messages)
            heard = tasks._replace(stale=-1, messages=messages)
            yield Turn("the deposed leader hears of it", self._number(view, heard))

    def _number(self, view: View, tasks: Tasks) -> int:
        return self.world.tasks.number(tasks.fitted(view))

    def published(self, state: State) -> State:
        """With one more message, from now: by the server's clock, and the tail's cause."""
        more = self._more(state, self.world.tasks.values[state[TASKS]])
        return (*state[:TASKS], more, state[QUEUE])

    def _more(self, state: State, tasks: Tasks) -> int:
        world = self.world
        view = world.journals.views[state[VIEW]]
        fresh = tasks.stale >= 0 and view.n > world.journals.views[tasks.stale].n
        used = {world.task(state[A]), world.task(state[B]), view.task}
        used |= {
            letter[0][2]
            for letter in world.flights.values[state[FLIGHT]]
            if letter[0][0] == "claim"
        }
        waiting = self.bounds.waiting
        after = tasks.published(frozenset(used), at=tasks.came, fresh=fresh, waiting_max=waiting)
        return self._number(view, after)

    def _delivered(self, view: View, tasks: Tasks) -> Iterator[Turn]:
        number = self.world.slots.number
        for message in tasks.messages:
            if message.held:
                continue
            held = self._number(view, tasks.after([("take", message.id)]))
            task = Given(message.id, message.again, message.at, message.fresh)
            for clock, name in CLOCKS.items():
                slot = number(Slot("look", view.id, task=task, clock=clock))
                event = f"a worker{name} looks, by task {message.id}"
                if not clock:
                    yield Turn(event, held, slot=slot)
                elif self.bounds.skews and view.wait:  # else a clock makes no difference
                    yield Turn(f"x {event}", held, SKEWS, slot)
            if tasks.stale >= 0:
                slot = number(Slot("stale", tasks.stale, task=task))
                yield Turn("x a worker is answered by a deposed leader", held, slot=slot)

    def _again(self, state: State) -> Iterator[Event]:
        """A task whose holder is alive is delivered again: its heartbeats were lost."""
        world = self.world
        tasks = world.tasks.values[state[TASKS]]
        left = world.spend(state[LEFT], LIES)
        for place, other in ((A, B), (B, A)):
            slot = world.slots.values[state[place]]
            id = slot.task.id
            if not id or slot.task.lapsed:
                continue
            if not any(one.id == id and one.held for one in tasks.messages):
                continue
            lapsed = world.slots.number(slot._replace(task=slot.task._replace(lapsed=True)))
            after = world.tasks_after(state[TASKS], state[VIEW], (("leave", id),))
            pair = sorted((lapsed, state[other]))
            again = (state[VIEW], *pair, *state[FLIGHT:LEFT], left, *state[LEFT + 1 : TASKS], after)
            yield f"x task {id} is delivered again", (*again, state[QUEUE])

    def _time(self, state: State, view: View, tasks: Tasks) -> Iterator[Turn]:
        if view.wait and tasks.came != view.wait:
            yield Turn("time passes", self._number(view, tasks._replace(came=view.wait)))
        if not tasks.timer:
            return
        unset = tasks._replace(timer=0)
        came = tasks.came == tasks.timer
        if tasks.timer == OLD or came:
            yield Turn("the timer fires", self._more(state, unset))
        for how in self.bounds.timers if tasks.timer != OLD else ():
            if how == "early" and not came:
                yield Turn("x the timer fires early", self._more(state, unset))
            elif how == "twice" and came:
                yield Turn("x the timer fires twice", self._more(state, tasks))
            elif how == "lost":
                yield Turn("x the timer is lost", self._number(view, unset))

    # ---- who would move the run on ------------------------------------------------------------

    def stranded(self, state: State) -> bool:
        """The sweep's predicate (journal/sweep.py), at the time of now."""
        view = self.world.journals.views[state[VIEW]]
        if view.finished:
            return False
        if view.live:
            return view.live not in (self.world.held(state[A]), self.world.held(state[B]))
        came = self.world.tasks.values[state[TASKS]].came
        return view.runnable_late if came and came == view.wait else view.runnable

    def acts(self, state: State) -> bool:
        """Whether somebody other than a person is about to move the run on."""
        tasks = self.world.tasks.values[state[TASKS]]
        queue = self.world.queues.values[state[QUEUE]]
        return bool(
            state[B] or tasks.messages or tasks.owed or tasks.timer or queue.stream or queue.bridges
        )
