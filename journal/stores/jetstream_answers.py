"""Core: what JetStream's answers to an append mean. Never by their text, only by their codes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from ..errors import StoreUnavailable
from ..store import AppendAnswer, Appended, Conflict, Unknown

# nats-server 2.15.1: see tests/contract/test_jetstream_faults.py.
WRONG_LAST_SEQUENCE = 10071
STREAM_NOT_FOUND = 10059
MESSAGE_NOT_FOUND = 10037
NO_JETSTREAM = frozenset([10076, 10039])

# 10164 "wrong last sequence" without a number is no lost race: R>1 gives it while any append of the
# subject is in flight, and the mark outlives the ack, so a writer gets it for its own next append.
# 10158 "duplicate message id is in process".
_UNSETTLED = frozenset([10164, 10158])

# 503 like a passing failure, but a limit of the stream: it stays until somebody changes that.
_STORE_FAILED = 10077


class ApiError(Struct, frozen=True):
    """JetStream's error object."""

    code: int = 0
    err_code: int = 0
    description: str = ""

    def __str__(self) -> str:
        return f"{self.description} ({self.code}, {self.err_code})"


class ApiAnswer(Struct, frozen=True):
    """What every answer of JetStream's API may hold."""

    error: ApiError | None = None


HEARD_MAX_NS = 3_000_000_000
"""The leader hears of each other replica every second; none stands for election before 4 s."""


class Replica(Struct, frozen=True):
    """One that does not answer. `active`: nanoseconds since the one that does heard of it."""

    active: int = 0


class Group(Struct, frozen=True):
    """Who keeps a stream, as the server that answers sees it."""

    leader: str = ""
    replicas: tuple[Replica, ...] = ()

    @property
    def led(self) -> bool:
        """Whether the leader it names can be one: it has heard of a majority lately. nats-server
        2.15.1: a leader that is cut off answers STREAM.INFO for 20 s as if it were one still, and
        another 2 s as nobody, while the others have a leader and go on."""
        heard = 1 + sum(0 <= one.active < HEARD_MAX_NS for one in self.replicas)
        return bool(self.leader) and 2 * heard > 1 + len(self.replicas)


class _Ack(Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    count: int = 0
    error: ApiError | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode


def read_ack(data: bytes, *, stream: str, expected: int) -> AppendAnswer:
    """The answer to an append to `stream`. Raises StoreUnavailable for what no retry settles."""
    try:
        ack = _decode_ack(data)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a subscriber that should not be there
        return Unknown("an answer that is no acknowledgement")
    if ack.error is not None:
        return _refused(ack.error, stream)
    _check_stream(ack, stream)
    if ack.seq <= expected:
        return Unknown(f"an acknowledgement of sequence {ack.seq}, not above {expected}")
    return Appended(ack.seq)


def read_batch_ack(
    data: bytes, *, stream: str, expected: Sequence[int]
) -> Sequence[AppendAnswer | None]:
    """The answer to each record of a batch, in their order; None to each: it was refused, which
    says of none of them why. Raises as `read_ack`.

    nats-server 2.15.1 names the last record's sequence, and how many there are; the others have
    those before it (tests/contract/test_group_commit.py, R1 and R3).
    """
    count = len(expected)
    try:
        ack = _decode_ack(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [Unknown("an answer that is no acknowledgement")] * count
    if ack.error is not None:
        return [None] * count
    _check_stream(ack, stream)
    first = ack.seq - count + 1
    if ack.count != count or any(first + place <= one for place, one in enumerate(expected)):
        return [Unknown(f"{ack.count} records up to {ack.seq}, for a batch of {count}")] * count
    return [Appended(first + place) for place in range(count)]


def _check_stream(ack: _Ack, stream: str) -> None:
    if ack.stream != stream:
        raise StoreUnavailable(
            f"stream {ack.stream or '(unnamed)'} took a record meant for {stream}",
            hint=f"only {stream} may capture its subjects: `nats stream ls --subjects`",
        )


def _refused(error: ApiError, stream: str) -> AppendAnswer:
    if error.err_code == WRONG_LAST_SEQUENCE:
        return Conflict()
    passing = error.code >= 500 or error.code == 429 or error.err_code in _UNSETTLED
    if passing and error.err_code != _STORE_FAILED:
        return Unknown(str(error))
    raise StoreUnavailable(
        f"stream {stream} refuses records: {error}", hint="`runfold doctor` checks its settings"
    )
