"""What a stream keeps, and what JetStream says: bytes and JSON as nats-server 2.15.1 has them."""

from __future__ import annotations

import base64
import functools
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import msgspec

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

encode = msgspec.json.Encoder().encode


class Message:
    """A stored message. `born` and `died`: the moments of its stream (0: it lives)."""

    __slots__ = ("_raw", "_size", "born", "data", "died", "headers", "seq", "stamp", "subject")

    def __init__(
        self, seq: int, subject: str, data: bytes, headers: dict[str, str], stamp: int, born: int
    ) -> None:
        self.seq = seq
        self.subject = subject
        self.data = data
        self.headers = headers
        self.stamp = stamp
        self.born = born
        self.died = 0
        self._raw: bytes | None = None
        self._size = 0

    @property
    def size(self) -> int:
        """As the file store counts it."""
        if not self._size:
            extra = 4 + len(raw_headers(self.headers)) if self.headers else 0
            self._size = 22 + len(self.subject.encode()) + extra + len(self.data) + 8
        return self._size

    def as_json(self) -> bytes:
        """In the answer to MSG.GET; made once, since it is read again and again."""
        if self._raw is None:
            parts = [b'{"subject":', encode(self.subject), b',"seq":%d' % self.seq]
            if self.headers:
                parts += [b',"hdrs":"', base64.b64encode(raw_headers(self.headers)), b'"']
            if self.data:
                parts += [b',"data":"', base64.b64encode(self.data), b'"']
            parts += [b',"time":"', rfc3339(self.stamp).encode(), b'"}']
            self._raw = b"".join(parts)
        return self._raw


class ApiError(NamedTuple):
    """JetStream's error object."""

    code: int
    err_code: int
    description: str

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


def raw_headers(headers: dict[str, str]) -> bytes:
    """As nats-py sends them."""
    lines = "".join(f"{name.strip()}: {value.strip()}\r\n" for name, value in headers.items())
    return f"NATS/1.0\r\n{lines}\r\n".encode()


def rfc3339(stamp: int) -> str:
    """Go's form of an instant in nanoseconds: no zeros at the end."""
    seconds, nanoseconds = divmod(stamp, 10**9)
    fraction = f".{nanoseconds:09}".rstrip("0") if nanoseconds else ""
    return f"{_second(seconds)}{fraction}Z"


@functools.lru_cache(maxsize=1024)
def _second(seconds: int) -> str:
    return (_EPOCH + timedelta(seconds=seconds)).isoformat()[:19]


def read_instant(text: str) -> int | None:
    """Nanoseconds since 1970 of an RFC 3339 instant; None: it is none."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    if at.tzinfo is None:
        return None
    return (at - _EPOCH) // timedelta(microseconds=1) * 1000


def api_answer(kind: str, **fields: Any) -> bytes:
    return encode({"type": f"io.nats.jetstream.api.v1.{kind}_response", **fields})


def api_refusal(kind: str, error: ApiError, **fields: Any) -> bytes:
    return api_answer(kind, error=error.as_dict(), **fields)


BAD_REQUEST = ApiError(400, 10003, "bad request")
NO_MESSAGE = ApiError(404, 10037, "no message found")
NO_STREAM = ApiError(404, 10059, "stream not found")
NO_CONSUMER = ApiError(404, 10014, "consumer not found")
IN_FLIGHT = ApiError(400, 10164, "wrong last sequence")
UNAVAILABLE = ApiError(503, 10008, "JetStream system temporarily unavailable")


def status(code: str, description: str, **more: str) -> dict[str, str]:
    """A status message, as nats-py shows its headers."""
    return {"Status": code, "Description": description, **more}
