"""Store: a request on the way: what it waits for, and what ends the waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeAlias

from msgspec import Struct

STATUS = "Status"
"""nats-py puts the code of a status line (`NATS/1.0 503`) under this name."""


class Reply(Struct, frozen=True):
    """A message: an answer to a request, or a question to a subscription."""

    data: bytes
    headers: Mapping[str, str]


class Incoming(Struct, frozen=True):
    """A message to a subscription. `reply`: where an answer to it goes, "" if none is wanted."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    reply: str


class NoReply(Struct, frozen=True):
    """No answer. `nobody`: the server said that nobody listens to the subject; `lost`: there is no
    connection, or it was lost while waiting."""

    cause: str
    nobody: bool = False
    lost: bool = False


class Denied(Struct, frozen=True):
    """The server refuses the subject to this user."""

    subject: str


Outcome: TypeAlias = Reply | NoReply | Denied

Take: TypeAlias = Callable[[Reply], bool]
"""Takes one of several answers; True: that was the last one wanted. Must not raise."""


class Waiting:
    """Ends after `first_s`, or, where several answers are wanted (`take`), after `idle_s` without
    one. No task and no exception: a timer and a future with a value."""

    __slots__ = ("_idle_s", "_loop", "_progress", "_take", "_timer", "future", "subject")

    def __init__(self, subject: str, take: Take | None, *, first_s: float, idle_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.subject = subject
        self.future: asyncio.Future[Outcome] = self._loop.create_future()
        self._take = take
        self._idle_s = idle_s
        self._progress = False
        self._timer = self._loop.call_later(first_s, self._due)

    def answer(self, reply: Reply) -> None:
        self._progress = True
        if self._take is None or self._take(reply):
            self.end(reply)

    def end(self, outcome: Outcome) -> None:
        if not self.future.done():
            self.future.set_result(outcome)

    def close(self) -> None:
        self._timer.cancel()

    def _due(self) -> None:
        if self._progress:  # not needed for safety: the rest would be asked for again
            self._progress = False
            self._timer = self._loop.call_later(self._idle_s, self._due)
        else:
            self.end(NoReply(f"no answer within {self._idle_s:g} s"))
