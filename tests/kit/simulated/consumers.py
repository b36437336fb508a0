"""A durable pull consumer: who waits, what was delivered and not yet settled, what comes again."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from .messages import Message, rfc3339
from .pulls import Pulls
from .subjects import matcher

if TYPE_CHECKING:
    from .streams import Stream

_DEFAULTS: dict[str, Any] = {
    "durable_name": "",
    "name": "",
    "deliver_policy": "all",
    "ack_policy": "explicit",
    "ack_wait": 30_000_000_000,
    "max_deliver": -1,
    "filter_subject": "",
    "replay_policy": "instant",
    "max_waiting": 512,
    "max_ack_pending": 1000,
    "num_replicas": 0,
}
_NATS = {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1"}
_DELAY = re.compile(rb'"delay"\s*:\s*(\d+)')


def full_config(given: dict[str, Any]) -> dict[str, Any]:
    """With the settings that are left out."""
    config = {**_DEFAULTS, **{name: value for name, value in given.items() if value}}
    config["name"] = config["durable_name"] = given.get("durable_name") or given.get("name", "")
    if not config["filter_subject"]:
        del config["filter_subject"]
    config["metadata"] = {**_NATS, **given.get("metadata", {})}
    return config


class Pending:
    """A message that was delivered `count` times and is not settled."""

    __slots__ = ("again", "count", "due", "message", "number")

    def __init__(self, message: Message) -> None:
        self.message = message
        self.count = 0
        self.number = 0
        self.due = 0.0
        self.again = False  # it waits to be delivered once more


class Consumer:
    """`queue`: what was never delivered; `pending`: by sequence."""

    def __init__(self, stream: Stream, config: dict[str, Any]) -> None:
        self.stream = stream
        self.server = stream.server
        self.name: str = config["name"]
        self.created = self.server.clock.now()
        self.pulls = Pulls(self)
        self.pending: dict[int, Pending] = {}
        self.delivered = 0
        self.sequence = 0
        self._last_delivered: deque[Pending] = deque(maxlen=64)
        self._again: deque[Pending] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False
        self.queue: deque[Message] = deque()
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.ack_wait_s: float = config["ack_wait"] / 1e9
        self.takes = matcher(config.get("filter_subject", ">"))
        self._prefix = f"$JS.ACK.{self.stream.name}.{self.name}."
        self.queue = deque(
            message
            for message in self.stream.messages.values()
            if message.seq > self.sequence and self.takes(message.subject)
        )
        self.serve()

    # ---- delivering -------------------------------------------------------------------------

    def offer(self, message: Message) -> None:
        """It has just been stored."""
        self.queue.append(message)
        if self.pulls and not self._woken:  # the publisher's acknowledgement goes first
            self._woken = True
            self.server.clock.soon(self.serve)

    def serve(self) -> None:
        """As many as there are pulls for: first what comes again."""
        self._woken = False
        if self.stream.away or not self.server.at_work:
            return
        while self.pulls:
            if not self._again and not (
                self.queue and len(self.pending) < self.config["max_ack_pending"]
            ):
                return
            reply = self.pulls.next()
            if reply is None:
                return
            if self._again:
                pending = self._again.popleft()
                pending.again = False
            else:
                message = self.queue.popleft()
                self.sequence = message.seq
                pending = self.pending[message.seq] = Pending(message)
            self._deliver(pending, reply)

    def _deliver(self, pending: Pending, reply: str) -> None:
        message = pending.message
        policy = self.server.policy
        self.delivered += 1
        pending.count += 1
        pending.number = self.delivered
        self._watch(pending, self.ack_wait_s)
        ack = (
            f"{self._prefix}{pending.count}.{message.seq}.{self.delivered}."
            f"{message.stamp}.{len(self.queue)}"
        )
        self.server.send(reply, message.subject, message.data, message.headers, ack, "delivery")
        self._last_delivered.append(pending)
        if policy is not None:
            handing = policy.delivered(
                self.stream.name, self.name, message.subject, message.seq, pending.count
            )
            if handing == "forgotten":
                self._forget_delivery(pending)
            elif handing == "twice":
                self._queue_again(pending)

    def _watch(self, pending: Pending, wait_s: float) -> None:
        clock = self.server.clock
        pending.due = clock.time() + wait_s
        if self._timer is None or pending.due < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = clock.at(pending.due, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if not self.server.at_work or self.stream.away:
            self.server.later(self._expire)
            return
        now = self.server.clock.time()
        waiting = [pending for pending in self.pending.values() if not pending.again]
        for pending in waiting:
            if pending.due <= now:
                self._queue_again(pending)
        self.serve()
        left = [pending.due for pending in self.pending.values() if not pending.again]
        if left and (self._timer is None or min(left) < self._timer.when()):
            if self._timer is not None:  # of what was just delivered
                self._timer.cancel()
            self._timer = self.server.clock.at(min(left), self._expire)

    def _queue_again(self, pending: Pending) -> None:
        if not pending.again:
            pending.again = True
            self._again.append(pending)

    # ---- settling ---------------------------------------------------------------------------

    def settle(self, sequence: int, word: bytes) -> bool:
        """Whether the server confirms it: also what is settled, or of a delivery long overtaken."""
        if sequence > self.sequence:
            return False
        pending = self.pending.get(sequence)
        if pending is None:
            return self.stream.messages.get(sequence) not in self.queue
        if word in (b"", b"+ACK") or word.startswith(b"+TERM"):
            self.forget(pending.message)
            if self.stream.work_queue:
                self.stream.remove(pending.message)
            self.serve()  # it may have been at its limit
        elif word == b"+WPI":
            self._watch(pending, self.ack_wait_s)
        elif word.startswith(b"-NAK"):
            delay = _DELAY.search(word)
            if delay is None:
                self._queue_again(pending)
                self.serve()
            else:
                self._watch(pending, int(delay[1]) / 1e9)
        return True

    def forget(self, message: Message) -> None:
        """It is settled, or no longer in the stream."""
        pending = self.pending.pop(message.seq, None)
        if pending is None:
            if message in self.queue:
                self.queue.remove(message)
        elif pending.again:
            self._again.remove(pending)

    # ---- faults -----------------------------------------------------------------------------

    def redeliver(self, sequence: int | None) -> None:
        """The ack wait of that one, or of all that were delivered, is over."""
        for pending in list(self.pending.values()):
            if sequence in (None, pending.message.seq):
                self._queue_again(pending)
        self.serve()

    def forget_deliveries(self, count: int) -> None:
        """Of the last ones no other server knows."""
        for pending in list(self._last_delivered)[::-1][:count]:
            if self.pending.get(pending.message.seq) is pending:
                self._forget_delivery(pending)

    def _forget_delivery(self, pending: Pending) -> None:
        pending.count -= 1
        self.delivered -= 1
        if pending.count:
            self._queue_again(pending)
            return
        self.forget(pending.message)
        self.queue.appendleft(pending.message)

    def end(self) -> None:
        """It was deleted."""
        if self._timer is not None:
            self._timer.cancel()
        self.pulls.end_all("409", "Consumer Deleted")

    # ---- looking ----------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        floor = min((one.number for one in self.pending.values()), default=self.delivered + 1) - 1
        floor_seq = min(self.pending, default=self.sequence + 1) - 1
        return {
            "stream_name": self.stream.name,
            "name": self.name,
            "created": rfc3339(self.created),
            "config": self.config,
            "delivered": {"consumer_seq": self.delivered, "stream_seq": self.sequence},
            "ack_floor": {"consumer_seq": max(floor, 0), "stream_seq": max(floor_seq, 0)},
            "num_ack_pending": len(self.pending),
            "num_redelivered": sum(one.count > 1 for one in self.pending.values()),
            "num_waiting": self.pulls.count(),
            "num_pending": len(self.queue),
            "ts": rfc3339(self.server.clock.now()),
        }


class Next(msgspec.Struct, frozen=True):
    """A request for messages. Times in nanoseconds."""

    batch: int = 1
    expires: int = 0
    idle_heartbeat: int = 0
    no_wait: bool = False
