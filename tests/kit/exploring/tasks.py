"""The TASKS stream and the run's timer: messages that say "look at the run" (PROTOCOL 4, 5).

A message is in the stream until it is acknowledged, in somebody's hands or not. At most
so many wait at a time (`Bounds.waiting`): one more is merged into one that says the same, and that
nobody has seen. Delivery counts are
kept relative to the live claim's, message ids are used again, and an instant is known by the wait
it ends: nothing that the product decides can tell the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .journals import View
from .states import Label

OLD = -1
"""A timer of a wait that has ended: it fires some time."""


class Message(NamedTuple):
    """`held`: it is in somebody's hands. The rest as in `states.Given`."""

    id: int
    again: bool = False
    at: int = 0
    fresh: bool = False
    held: bool = False


class Tasks(NamedTuple):
    """`timer`: the n of the wait it was set for, OLD, or 0 for none; `came`: the wait whose instant
    has come, by the server's clock; `stale`: the view that a deposed leader answers, or -1; `owed`:
    a door has appended what ends a wait, and is about to publish a task."""

    messages: tuple[Message, ...] = ()
    timer: int = 0
    came: int = 0
    stale: int = -1
    owed: bool = False

    def fitted(self, view: View) -> Tasks:
        """As it is at this journal: what is about another wait, or another claim, is forgotten."""
        wait = view.wait
        messages = tuple(
            message._replace(
                at=message.at if message.at == wait else 0,
                again=message.again and message.id == view.task,
            )
            for message in self.messages
        )
        return self._replace(
            messages=tuple(sorted(messages)),
            timer=self.timer if self.timer in (0, wait) else OLD,
            came=self.came if self.came == wait else 0,
        )

    def after(self, ops: Iterable[Label]) -> Tasks:
        """After these, one after another."""
        tasks = self
        for op in ops:
            tasks = tasks._after(op)
        return tasks

    def _after(self, op: Label) -> Tasks:
        match op:
            case ("take", id):
                return self._with(id, held=True)
            case ("ack", id):
                left = tuple(message for message in self.messages if message.id != id)
                return self._replace(messages=left)
            case ("leave", id):
                return self._with(id, held=False, again=True)
            case ("claimed", id):
                return self._with(id, again=False)
            case ("timer", n):
                return self._replace(timer=n)
            case ("owe",):
                return self._replace(owed=True)
            case _:
                raise AssertionError(op)

    def _with(self, id: int, **fields: bool) -> Tasks:
        messages = tuple(
            message._replace(**fields) if message.id == id else message for message in self.messages
        )
        return self._replace(messages=messages)

    def published(self, used: frozenset[int], *, at: int, fresh: bool, waiting_max: int) -> Tasks:
        """With one more message; `used`: ids that mean something to somebody."""
        waiting = [one for one in self.messages if not one.held and one.id not in used]
        if len(waiting) >= waiting_max:
            one = waiting[0]
            merged = one._replace(at=max(one.at, at), fresh=one.fresh or fresh)
            rest = tuple(message for message in self.messages if message is not one)
            return self._replace(messages=(*rest, merged))
        taken = used | {message.id for message in self.messages}
        id = next(id for id in range(1, 99) if id not in taken)
        return self._replace(messages=(*self.messages, Message(id, at=at, fresh=fresh)))
