"""Atomic batches of a stream, as nats-server 2.15.1 has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .messages import ApiError

if TYPE_CHECKING:
    from .streams import Stream

BATCH_ID = "Nats-Batch-Id"
_SEQUENCE = "Nats-Batch-Sequence"
_COMMIT = "Nats-Batch-Commit"

OPEN_MAX = 50
OPEN_NS = 10_000_000_000
"""One that nothing was added to for so long is given up."""

DISABLED = ApiError(400, 10174, "atomic publish is disabled")
NO_SEQUENCE = ApiError(400, 10175, "atomic publish sequence is missing")
INCOMPLETE = ApiError(400, 10176, "atomic publish batch is incomplete")
WRONG_ID = ApiError(400, 10179, "atomic publish batch ID is invalid")
WRONG_COMMIT = ApiError(400, 10200, "atomic publish batch commit is invalid")
TOO_MANY = ApiError(429, 10210, "atomic publish too many inflight")


class Member(NamedTuple):
    subject: str
    data: bytes
    headers: dict[str, str]


class Batches:
    """Those that are open."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._open: dict[str, tuple[int, list[Member]]] = {}

    def forget(self) -> None:
        """As a server that ends, or leads no more."""
        self._open.clear()

    def take(self, subject: str, data: bytes, headers: dict[str, str]) -> bytes | ApiError:
        """The answer to a message of a batch: nothing, but for the one that commits it."""
        batch, sequence = headers[BATCH_ID], headers.get(_SEQUENCE, "")
        if not self._stream.config.get("allow_atomic"):
            return DISABLED
        if not 0 < len(batch) <= 64:
            return WRONG_ID
        if not sequence.isdecimal():
            return NO_SEQUENCE
        now = self._stream.server.clock.now()
        self._open = {key: one for key, one in self._open.items() if now - one[0] < OPEN_NS}
        _, members = self._open.pop(batch, (0, []))
        if int(sequence) != len(members) + 1:
            return INCOMPLETE
        if not members and len(self._open) == OPEN_MAX:
            return TOO_MANY
        members.append(Member(subject, data, headers))
        match headers.get(_COMMIT):
            case None:
                self._open[batch] = now, members
                return b""
            case "1":
                return self._stream.publish_all(batch, members)
            case "eob":
                return self._stream.publish_all(batch, members[:-1])
            case _:
                return WRONG_COMMIT
