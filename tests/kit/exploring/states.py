"""States of an exploration, as tuples of small numbers: each part is interned, see `Table`.

Places of a state: VIEW, the journal (`journals.View`) · A, B, the two processes (`Slot`), smaller
number first, for they are interchangeable · FLIGHT, appends of dead processes that may still land ·
CALLS, the starts under which the write was called: the world's memory · LEFT, what is left of each
fault · DOOR, what a door is about to do · TASKS, messages and timer (`tasks.Tasks`) · QUEUE, the
SIGNALS stream and its bridges (`bridges.Queue`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

Label: TypeAlias = tuple[Any, ...]
"""A record to append, as a hashable word: what `bodies.body_of` makes a body of."""
State: TypeAlias = tuple[int, ...]
Event: TypeAlias = tuple[str, State]
VIEW, A, B, FLIGHT, CALLS, LEFT, DOOR, TASKS, QUEUE = range(9)
FAULTS = ("crashes", "unknowns", "lies", "drains", "skews", "stales", "queued")
CRASHES, UNKNOWNS, LIES, DRAINS, SKEWS, STALES, QUEUED = range(7)

Value = TypeVar("Value", bound=Hashable)


class Table(Generic[Value]):
    """Values by number, each once, from 0 on."""

    def __init__(self, *first: Value) -> None:
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}
        for value in first:
            self.number(value)

    def number(self, value: Value) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.values)
            self.values.append(value)
        return found


class Given(NamedTuple):
    """A task message in the hands of a process, as it was delivered; `id` 0: none. `again`: more
    often than its claim says; `at`: the n of the wait whose instant the server's timestamp on it is
    behind; `fresh`: its cause is newer than what a deposed leader answers; `lapsed`: it may have
    been delivered to somebody else since."""

    id: int = 0
    again: bool = False
    at: int = 0
    fresh: bool = False
    lapsed: bool = False


NO_TASK = Given()


class Slot(NamedTuple):
    """A process. `pc`: look, stale (about to claim, by a task), take (the same, without one), ready
    (to decide), sent (outcome unknown), started (may call the write), result (the call is over, not
    recorded), late (the same, and fenced meanwhile), pay (a timer), ack, nak (the task).

    `view`: what it has read. `extra`: answers, or what was sent, or what is to be paid. `clock`:
    -1 slow, 1 fast. `told`: to stop."""

    pc: str
    view: int = 0
    claim: int = 0
    attempted: tuple[int, ...] = ()
    over: bool = False
    extra: tuple[Any, ...] = ()
    task: Given = NO_TASK
    clock: int = 0
    told: bool = False


OFF = Slot("off")


class Move(NamedTuple):
    """What a process does. An event that begins with "x " is a fault: nobody may have to wait for
    one. `view`, `slot`: the numbers after it; `cost`: the fault it spends, -1 for none; `letter`:
    what stays in flight; `call`: the start under which the write is called; `ops`: on TASKS."""

    event: str
    view: int
    slot: int
    cost: int = -1
    letter: tuple[Any, ...] = ()
    call: int = 0
    ops: tuple[Label, ...] = ()
