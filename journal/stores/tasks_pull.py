"""Store: pulling from one consumer. Not nats-py's `fetch`: it stalls and misses heartbeats.

A delivered message always reaches its callback, also one that comes after its pull has ended: one
that reaches nobody is lost to everybody for the ack wait.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from .delivery import TERM, Malformed
from .nats_connection import Connection
from .nats_errors import denied
from .nats_headers import DESCRIPTION, STATUS
from .nats_waiting import Denied, Incoming, NoReply, Reply, Waiting

log = logging.getLogger("runfold")

HEARTBEAT_S = 5.0
"""A server that is silent for two of them has forgotten the pull."""

PULL_S = 30.0


def standing_s(ack_wait_s: float) -> float:
    """How long a pull for tasks may stand: a third of the ack wait, at most `PULL_S`.

    The tasks of a worker that stands still come again two thirds of the ack wait later, or later
    still; its own pulls have lapsed by then. They would be served first (nats-server 2.15.1), and
    the tasks be gone for a second ack wait.
    """
    return min(PULL_S, ack_wait_s / 3)


Why: TypeAlias = Literal["filled", "expired", "silent", "gone", "lost", "other"]


class PullEnd(Struct, frozen=True):
    """Why a pull ended. Pull again at once after `filled` and `expired`; after `silent` (heartbeats
    missed) and `lost` (connection lost, server shutting down, other leader), too: `pull` waits for
    the connection. `gone`: no such consumer, or no leader: `ensure`, with a pause between. `other`:
    `text` says what the server said; with a pause."""

    why: Why
    text: str = ""


Delivered = TypeVar("Delivered")


class Puller(Generic[Delivered]):
    """One long-lived inbox. Used by one task at a time; see TaskQueue.pulling."""

    def __init__(
        self,
        connection: Connection,
        next_subject: str,
        read: Callable[[Incoming], Delivered],
        on_delivery: Callable[[Delivered], None],
        on_malformed: Callable[[str], None],
    ) -> None:
        self._connection = connection
        self._next = next_subject
        self._read = read
        self._on_delivery = on_delivery
        self._on_malformed = on_malformed
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._reply = ""
        self._left = 0
        self._end: PullEnd | None = None
        self._failure: Exception | None = None
        self._waiting: Waiting | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[Puller[Delivered], None]:
        self._inbox = self._connection.new_inbox()
        async with self._connection.listening(f"{self._inbox}.*", self._take):
            yield self

    async def pull(self, batch: int, expires_s: float = PULL_S) -> PullEnd:
        """Ask for up to `batch` messages, and wait until they are there or the request has ended. A
        pull that was cancelled, or ended `silent` or `lost`, may still bring its messages later.

        Raises PermissionDenied, StoreUnavailable once closed for good, what `on_delivery` raised.
        """
        if self._waiting is not None:
            raise RuntimeError("one pull at a time")
        self._raise_failure()  # of what came between two pulls
        heartbeat_s = min(HEARTBEAT_S, expires_s / 2)  # nats-server 2.15.1: 400 above the half
        request = msgspec.json.encode(
            {
                "batch": batch,
                "expires": int(expires_s * 1e9),
                "idle_heartbeat": int(heartbeat_s * 1e9),
            }
        )
        if not await self._connection.connected_within(expires_s):
            return PullEnd("lost", f"not connected to {self._connection.shown}")
        self._reply = f"{self._inbox}.{next(self._numbers)}"
        self._left, self._end = batch, None
        silence_s = 2 * heartbeat_s
        with self._connection.waiting(
            self._next, lambda _: self._end is not None, first_s=silence_s, idle_s=silence_s
        ) as waiting:
            self._waiting = waiting
            try:
                if not self._connection.send(self._next, request, self._reply):
                    return PullEnd("lost", f"not connected to {self._connection.shown}")
                outcome = await waiting.future
            finally:
                self._waiting = None
                self._reply = ""
        return self._ended(outcome)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _ended(self, outcome: Reply | NoReply | Denied) -> PullEnd:
        self._raise_failure()
        match outcome:
            case Denied(subject):
                raise denied(subject)
            case NoReply():
                return PullEnd("lost" if outcome.lost else "silent", outcome.cause)
            case Reply():
                assert self._end is not None
                return self._end

    # ---- what the connection calls ----------------------------------------------------------

    def _take(self, message: Incoming) -> None:
        # nats-server 2.15.1: a task comes under its own subject, a status under the reply's, which
        # tells whose it is. So a late task counts for the present pull.
        if not message.subject.startswith(self._inbox):
            self._deliver(message)
            self._left -= 1
            if self._left <= 0:
                self._end = PullEnd("filled")
        elif message.subject == self._reply and self._end is None:
            # Only then: a process that stood still reads an end, and a heartbeat behind it, at
            # once, and `pull` looks when all of it was read.
            self._end = _read_status(
                message.headers.get(STATUS, ""), message.headers.get(DESCRIPTION, "")
            )
        else:
            return
        if self._waiting is not None:
            self._waiting.answer(Reply(message.data, message.headers))

    def _deliver(self, message: Incoming) -> None:
        try:
            found = self._read(message)
        except Malformed as error:
            if message.reply:
                self._connection.send(message.reply, TERM)
            self._on_malformed(str(error))
            return
        try:
            self._on_delivery(found)
        except Exception as error:  # nats-py's reading task would end over it: `pull` raises it
            self._failure = error
            self._left = 0


def _read_status(status: str, text: str) -> PullEnd | None:
    """None: a heartbeat. nats-server 2.15.1: see tests/contract/test_tasks_pull.py."""
    lower = text.lower()
    match status:
        case "100":
            return None
        case "408":
            return PullEnd("expired")
        case "404":
            return PullEnd("gone", text)
        case "503":
            return PullEnd("gone", "nobody answers for the consumer")
        case "409" if "consumer deleted" in lower:
            return PullEnd("gone", text)
        case "409" if "batch completed" in lower:
            return PullEnd("filled")
        case "409" if "leadership change" in lower or "server shutdown" in lower:
            return PullEnd("lost", text)
        case _:  # 400; 409: Exceeded MaxWaiting, MaxRequestBatch…, Consumer is push based
            return PullEnd("other", f"{status} {text}".strip())
