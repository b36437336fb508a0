"""Store: requests on the way: what they wait for, and what ends the waiting."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from msgspec import Struct

from .nats_headers import STATUS, parsed

Headers: TypeAlias = Mapping[str, str] | bytes
"""Bytes: as they came, not looked at yet."""

SWEEP_S: Final = 0.01
"""Between two looks at what is due: a look takes all that waits, and thousands may be due at once,
each at a time of its own."""


class Reply:
    """A message: an answer to a request, or a question to a subscription. Its headers are read when
    they are asked for: acknowledgements have some that nobody wants."""

    __slots__ = ("_headers", "data")

    def __init__(self, data: bytes, headers: Headers) -> None:
        self.data = data
        self._headers = headers

    @property
    def headers(self) -> Mapping[str, str]:
        headers = self._headers
        if isinstance(headers, bytes):
            headers = self._headers = parsed(headers)
        return headers

    @property
    def nobody(self) -> bool:
        """The server's word that nobody listens to the subject."""
        return not self.data and self.headers.get(STATUS) == "503"


class Incoming(Struct, frozen=True):
    """A message to a subscription. `reply`: where an answer to it goes, "" if none is wanted."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    reply: str


def incoming(subject: bytes, reply: bytes, data: bytes, headers: Headers) -> Incoming:
    """Of what was heard. Not every subject that a server takes is UTF-8."""
    return Incoming(
        subject=subject.decode("utf-8", "backslashreplace"),
        data=data,
        headers=parsed(headers) if isinstance(headers, bytes) else headers,
        reply=reply.decode("utf-8", "backslashreplace"),
    )


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
    """Ends at `due` (of the loop's clock), or, where several answers are wanted (`take`), after
    `idle_s` without one. No task, no timer and no exception: a future with a value."""

    __slots__ = ("_idle_s", "_progress", "_take", "due", "future", "subject")

    def __init__(
        self,
        subject: str,
        take: Take | None,
        future: asyncio.Future[Outcome],
        *,
        due: float,
        idle_s: float,
    ) -> None:
        self.subject = subject
        self.future = future
        self.due = due
        self._take = take
        self._idle_s = idle_s
        self._progress = False

    def answer(self, reply: Reply) -> None:
        if self._take is None:
            self.end(reply)
            return
        self._progress = True
        if self._take(reply):
            self.end(reply)

    def end(self, outcome: Outcome) -> None:
        if not self.future.done():
            self.future.set_result(outcome)

    def look(self, now: float) -> float:
        """When to look again."""
        if self.due > now:
            return self.due
        if self._progress:  # not needed for safety: the rest would be asked for again
            self._progress = False
            self.due = now + self._idle_s
            return self.due
        self.end(NoReply(f"no answer within {self._idle_s:g} s"))
        return float("inf")


class Waitings:
    """All that waits on one connection, each under the subject that its answers come to, with one
    timer: it is set for what is due first, and what was answered long before leaves it standing.
    So a thousand requests a second cost a timer every few seconds."""

    def __init__(self) -> None:
        self._by_subject: dict[bytes, Waiting] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._inbox = b""

    def __len__(self) -> int:
        return len(self._by_subject)

    def answers_to(self, inbox: str) -> None:
        """Those of what is added from now on come to subjects under this one."""
        self._inbox = inbox.encode()

    def add(
        self, subject: str, take: Take | None, *, first_s: float, idle_s: float
    ) -> tuple[bytes, Waiting]:
        """Ends after `first_s` without an answer, then as Waiting has it; and the subject that
        answers come to. To be removed."""
        loop = asyncio.get_running_loop()
        due = loop.time() + first_s
        waiting = Waiting(subject, take, loop.create_future(), due=due, idle_s=idle_s)
        reply = b"%b%x" % (self._inbox, next(self._numbers))
        self._by_subject[reply] = waiting
        timer = self._timer
        if timer is None or due < timer.when():
            self._set(loop, due)
        return reply, waiting

    def remove(self, reply: bytes) -> None:
        del self._by_subject[reply]

    def answer(self, subject: bytes, reply: bytes, data: bytes, headers: Headers) -> None:
        """What came to one of their subjects."""
        waiting = self._by_subject.get(subject)
        if waiting is not None:  # else it comes too late
            waiting.answer(Reply(data, headers))

    def end_all(self, outcome: NoReply) -> None:
        for waiting in self._by_subject.values():
            waiting.end(outcome)

    def end_denied(self, subject: str) -> None:
        """What was sent to the subject, in lower case."""
        for waiting in self._by_subject.values():
            if waiting.subject.lower() == subject:
                waiting.end(Denied(waiting.subject))

    def end_unheard(self, inbox: str) -> None:
        """The server denies the subject that all answers would come to."""
        for waiting in self._by_subject.values():
            waiting.end(Denied(inbox))

    def stop(self) -> None:
        """Nothing is due any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        first = min((one.look(now) for one in self._by_subject.values()), default=float("inf"))
        if first < float("inf"):
            self._set(loop, max(first, now + SWEEP_S))
