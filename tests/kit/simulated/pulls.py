"""The pulls that wait at a consumer: taken in turn, with heartbeats, until they expire."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from .messages import status

if TYPE_CHECKING:
    from .consumers import Consumer, Next


class Pull:
    """Wants `left` more messages; `ends` and `beats` are times of the loop (0: never)."""

    __slots__ = ("beat_s", "beats", "ends", "left", "reply", "timer")

    def __init__(self, reply: str, left: int, ends: float, beat_s: float) -> None:
        self.reply = reply
        self.left = left
        self.ends = ends
        self.beat_s = beat_s
        self.beats = 0.0
        self.timer: asyncio.TimerHandle | None = None


class Pulls:
    """In the order in which they are served: one that got a message goes behind the others."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._waiting: deque[Pull] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def count(self) -> int:
        """Of those whose asker still listens."""
        self._leave_the_gone()
        return len(self._waiting)

    def add(self, asked: Next, reply: str) -> None:
        """Answered at once where it can't wait; else the consumer serves it."""
        consumer = self._consumer
        if asked.idle_heartbeat * 2 > asked.expires > 0 or (
            asked.idle_heartbeat and not asked.expires
        ):
            self._say(reply, "400", "Bad Request - heartbeat value too large")
            return
        if len(self._waiting) >= consumer.config["max_waiting"]:
            self._leave_the_gone()
            if len(self._waiting) >= consumer.config["max_waiting"]:
                self._say(reply, "409", "Exceeded MaxWaiting")
                return
        now = consumer.server.clock.time()
        ends = now + asked.expires / 1e9 if asked.expires else 0.0
        pull = Pull(reply, max(asked.batch, 1), ends, asked.idle_heartbeat / 1e9)
        self._waiting.append(pull)
        consumer.serve()
        if pull.left and asked.no_wait and not asked.expires:
            self._remove(pull)
            self._say(reply, "404", "No Messages")
        elif pull.left:
            pull.beats = now + pull.beat_s
            self._set(pull)

    def next(self) -> str | None:
        """Where the next message goes; None: nobody waits."""
        server = self._consumer.server
        while self._waiting:
            pull = self._waiting.popleft()
            if not server.listens(pull.reply):
                self._stop(pull)
                continue
            pull.left -= 1
            if pull.left:
                self._waiting.append(pull)
                if pull.beat_s:
                    pull.beats = server.clock.time() + pull.beat_s
            else:
                self._stop(pull)
            return pull.reply
        return None

    def end_all(self, code: str = "", text: str = "") -> None:
        """Told, or, without a code, in silence."""
        for pull in self._waiting:
            self._stop(pull)
            if code:
                self._say(pull.reply, code, text)
        self._waiting.clear()

    def _set(self, pull: Pull) -> None:
        due = pull.ends
        if pull.beat_s and (not due or pull.beats < due):
            due = pull.beats
        if due:
            pull.timer = self._consumer.server.clock.at(due, self._tick, pull)

    def _tick(self, pull: Pull) -> None:
        server = self._consumer.server
        if not server.at_work:
            server.later(self._tick, pull)
            return
        now = server.clock.time()
        if not server.listens(pull.reply):
            self._remove(pull)
            return
        if pull.ends and now >= pull.ends:
            self._remove(pull)
            left = {"Nats-Pending-Messages": str(pull.left), "Nats-Pending-Bytes": "0"}
            self._say(pull.reply, "408", "Request Timeout", left)
            return
        if pull.beat_s and now >= pull.beats:
            consumer = self._consumer
            seen = {
                "Nats-Last-Consumer": str(consumer.delivered),
                "Nats-Last-Stream": str(consumer.sequence),
            }
            self._say(pull.reply, "100", "Idle Heartbeat", seen)
            pull.beats = now + pull.beat_s
        self._set(pull)

    def _leave_the_gone(self) -> None:
        for pull in list(self._waiting):
            if not self._consumer.server.listens(pull.reply):
                self._remove(pull)

    def _remove(self, pull: Pull) -> None:
        self._stop(pull)
        if pull in self._waiting:
            self._waiting.remove(pull)

    def _stop(self, pull: Pull) -> None:
        if pull.timer is not None:
            pull.timer.cancel()
            pull.timer = None

    def _say(self, reply: str, code: str, text: str, more: dict[str, str] | None = None) -> None:
        headers = status(code, text, **(more or {}))
        self._consumer.server.send(reply, reply, b"", headers, "", "status")
