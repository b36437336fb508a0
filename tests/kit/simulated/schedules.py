"""Message schedules of a stream: `Nats-Schedule: @at <instant>`, by subject."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .messages import ApiError, Message, read_instant

if TYPE_CHECKING:
    from .streams import Stream

_OWN = ("Nats-Schedule", "Nats-Schedule-Target", "Nats-Rollup")


class Schedules:
    """One a subject. A plain message on the subject ends it too, and stays beside it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._timers: dict[str, tuple[Message, asyncio.TimerHandle]] = {}

    def wrong(self, subject: str, headers: dict[str, str]) -> ApiError | None:
        """Why the server does not take it."""
        if not self._stream.config.get("allow_msg_schedules"):
            return ApiError(400, 10188, "message schedules is disabled")
        if _due(headers["Nats-Schedule"]) is None:
            return ApiError(400, 10189, "message schedules pattern is invalid")
        target = headers.get("Nats-Schedule-Target", "")
        wild = "*" in target.split(".") or target.endswith(">")
        if not target or wild or target == subject or not self._stream.takes(target):
            return ApiError(400, 10190, "message schedules target is invalid")
        return None

    def drop(self, subject: str, *, replaced: bool) -> None:
        """Something is about to be stored on the subject."""
        timer = self._timers.pop(subject, None)
        if timer is not None:
            timer[1].cancel()
        if replaced:  # a schedule rolls the subject up
            for message in list(self._stream.by_subject.get(subject, ())):
                self._stream.drop(message)

    def add(self, message: Message) -> None:
        due = _due(message.headers["Nats-Schedule"])
        assert due is not None
        self._set(message, max(0.0, (due - self._stream.server.clock.now()) / 1e9))

    def forget(self, message: Message) -> None:
        timer = self._timers.get(message.subject)
        if timer is not None and timer[0] is message:
            timer[1].cancel()
            del self._timers[message.subject]

    def _set(self, message: Message, wait_s: float) -> None:
        timer = self._stream.server.clock.after(wait_s, self._fire, message)
        self._timers[message.subject] = (message, timer)

    def _fire(self, message: Message) -> None:
        server = self._stream.server
        if not server.at_work or self._stream.away:
            server.later(self._fire, message)
            return
        self.forget(message)
        if message.died:
            return
        self._stream.drop(message)
        headers = {name: text for name, text in message.headers.items() if name not in _OWN}
        headers |= {"Nats-Scheduler": message.subject, "Nats-Schedule-Next": "purge"}
        self._stream.store(message.headers["Nats-Schedule-Target"], message.data, headers)


def _due(schedule: str) -> int | None:
    return read_instant(schedule.removeprefix("@at ")) if schedule.startswith("@at ") else None
