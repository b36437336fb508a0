"""Shell: a delivered task message, and who may still touch it (PROTOCOL 4).

Why it is safe: an ack, nak or in-progress of a superseded delivery hits the message its successor
works on (NATS.md). So nothing is sent once the run is lost, nor once the delivery may have been
superseded: it is current for half the ack wait after it came or was last held. A lapsed one is
left to redelivery.
"""

from __future__ import annotations

import time

from .stores.tasks import Task, TaskQueue


class Lease:
    """One delivery. Every method does nothing where it may not touch the message any more."""

    def __init__(self, tasks: TaskQueue, task: Task, ack_wait_s: float) -> None:
        self.task = task
        self._tasks = tasks
        self._ack_wait_s = ack_wait_s
        self._held_at = task.arrived
        self._over = False

    @property
    def current(self) -> bool:
        """Whether the message is surely still ours to touch."""
        return not self._over and time.monotonic() - self._held_at < self._ack_wait_s / 2

    def renew(self, asked_at: float) -> None:
        """The tail that was asked for then (monotonic) said the run is ours: a lapsed delivery
        counts again from there. The server takes the in-progress of any delivery of the message."""
        if not self._over:
            self._held_at = max(self._held_at, asked_at)

    def hold(self) -> None:
        """Tell the server that the work goes on."""
        if self.current:
            self._held_at = time.monotonic()
            self._tasks.in_progress(self.task)

    async def ack(self) -> None:
        """The hint has been followed."""
        if self.current:
            self._over = True
            await self._tasks.ack(self.task)

    def nak(self, delay_s: float = 0.0) -> None:
        """Somebody else may follow the hint."""
        if self.current:
            self._over = True
            self._tasks.nak(self.task, delay_s)

    def leave(self) -> None:
        """The message is, or may be, somebody else's: it is never touched again."""
        self._over = True
