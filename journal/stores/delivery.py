"""Store: what JetStream says of a message it delivers, and the words that settle one."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from msgspec import Struct

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# nats-server 2.15.1 sends `$JS.ACK.<stream>.<consumer>.<delivery>.<sequence>.<consumer's
# sequence>.<nanoseconds>.<pending>`; the form of nats-architecture ADR-15 has the domain and the
# account's hash before the stream, and may have a token at the end.
_TOKEN = r"[!-\-/-~]+"  # no dot, no blank: it may be a client's word, and is written as a subject
_NUMBERS = (
    r"\.([0-9]{1,18})\.([0-9]{1,18})\.[0-9]{1,18}\.([0-9]{1,18}|[1-9][0-9]{18})\.([0-9]{1,18})"
)
_SHORT = re.compile(rf"\$JS\.ACK\.({_TOKEN})\.({_TOKEN}){_NUMBERS}", re.ASCII)
_LONG = re.compile(
    rf"\$JS\.ACK\.{_TOKEN}\.{_TOKEN}\.({_TOKEN})\.({_TOKEN}){_NUMBERS}(?:\.{_TOKEN})?", re.ASCII
)

ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
TERM = b"+TERM"


class Malformed(Exception):
    """A message that is not what its stream holds; the text says why."""


class Delivery(Struct, frozen=True):
    """`count` from 1; `stamp`: when it was published (fired, if scheduled), by the server, in
    nanoseconds; `pending`: how many more wait behind it."""

    stream: str
    consumer: str
    count: int
    sequence: int
    stamp: int
    pending: int

    @property
    def at(self) -> datetime:
        return _EPOCH + timedelta(microseconds=self.stamp // 1000)


def read_delivery(reply: str) -> Delivery:
    """From the subject that takes the acknowledgement. Raises Malformed."""
    found = _SHORT.fullmatch(reply) or _LONG.fullmatch(reply)
    if found is None:
        raise Malformed(f"{reply!r} is no delivery")
    numbers = (int(text) for text in found.groups()[2:])
    return Delivery(found[1], found[2], *numbers)


def nak(delay_s: float) -> bytes:
    """Deliver it again, after a delay."""
    return b"-NAK" + (b' {"delay": %d}' % int(delay_s * 1e9) if delay_s > 0 else b"")
