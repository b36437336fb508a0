"""Core: bytes to records and back, and the hash chain."""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from .records import VERSION, AnyRecord, NewerRecord, Record, Status

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyRecord).decode
_decode_any = msgspec.json.Decoder().decode
_ID = re.compile(r"[0-9a-f]{12}-[0-9]{1,18}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)

Body = TypeVar("Body", bound=Record)


class Damage(Exception):
    """A stored record is not one, or does not follow its predecessor. Stores add the place."""


class Entry(Struct, frozen=True):
    """A record with its stored bytes: what stores keep. `raw` is hashed, exported, never rewritten.

    `status` is the run's status after it, where the store keeps headers; `position` is the store's
    token of this record (the offset behind it, its sequence), 0 until stored; `commit` the token of
    the last commit to restart at, 0 without one, -1 where this record is one; `trace` the W3C
    traceparent stored with it, "" without one.
    """

    record: Record
    raw: bytes
    status: Status | None = None
    position: int = 0
    commit: int = 0
    trace: str = ""

    @property
    def type(self) -> str:
        """The record's tag, also of one that this version can't read."""
        record = self.record
        return record.type_ if isinstance(record, NewerRecord) else tag(record)


def tag(record: Record) -> str:
    """The record's `type` on the wire."""
    return cast("str", type(record).__struct_config__.tag)


def seal(
    body: Body, *, n: int, id: str, at: str, by: str, prev: str, claim: int = 0
) -> tuple[Body, bytes]:
    """The body with its envelope, and its bytes."""
    record = msgspec.structs.replace(
        body, v=VERSION, n=n, id=id, at=at, by=by, prev=prev, claim=claim
    )
    return record, _encode(record)


def record_hash(raw: bytes) -> str:
    """BLAKE2b-128 of a record's stored bytes, hex: the next record's `prev`."""
    return blake2b(raw, digest_size=16).hexdigest()


def decode(raw: bytes) -> Record:
    """The record in these bytes; NewerRecord where it is well formed but not of this version.

    Raises Damage with the reason for anything that no version writes: text that is not JSON, an
    envelope that is missing or misshapen, blanks around the object.
    """
    if not raw.startswith(b"{") or not raw.endswith(b"}"):
        raise Damage(_not_an_object(raw))
    try:
        record = _decode(raw)
    except msgspec.ValidationError as error:
        return _newer(raw, _readable(str(error)))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damage(f"not a JSON record ({error})") from error
    if record.v > VERSION:
        return _newer(raw, f"its format is version {record.v}, and this one reads {VERSION}")
    _check_envelope(record.v, record.n, record.id, record.prev, record.claim)
    return record


def unreadable(raw: bytes, id: str) -> str:
    """Why no reader would take a record of our own, sealed under this id: "" where all do. As
    `decode`, for bytes of which the rest of the envelope is known to be whole."""
    try:
        _decode(raw)
    except msgspec.ValidationError as error:
        return _readable(str(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"not a JSON record ({error})"
    return "" if _ID.fullmatch(id) else "it has no writer id"


def _not_an_object(raw: bytes) -> str:
    if raw.startswith(b"\xef\xbb\xbf"):
        return "a UTF-8 byte order mark stands before the record"
    if raw.startswith(b"\x1f\x8b"):
        return "gzip data, not a journal"
    if not raw.strip():
        return "a blank line"
    if raw.endswith(b"}\r"):
        return "the line ends in CR LF; records end in LF alone"
    return "not a JSON object"


def _readable(why: str) -> str:
    """What msgspec 0.23 found, in words: `Invalid value 'step.paused' - at `$.type``."""
    what, _, place = why.partition(" - at `$")
    place = place.rstrip("`").removeprefix(".")
    if place == "type":
        return "this version knows no such type"
    return f"this version can't read its {place}: {what}" if place else what


def _newer(raw: bytes, why: str) -> NewerRecord:
    try:
        found: Any = _decode_any(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damage(f"not a JSON record ({error})") from error
    v, n, type_, id, prev, claim, at, by = (
        found.get(key) for key in ("v", "n", "type", "id", "prev", "claim", "at", "by")
    )
    if not isinstance(type_, str):
        raise Damage("a record without a type")
    _check_envelope(v, n, id, prev, claim or 0)
    return NewerRecord(
        v=v,
        n=n,
        id=id,
        prev=prev,
        claim=claim or 0,
        at=str(at),
        by=str(by),
        type_=type_,
        why=why,
    )


def _check_envelope(v: Any, n: Any, id: Any, prev: Any, claim: Any) -> None:
    if type(v) is not int or v < 1:
        raise Damage("a record without a version")
    if type(n) is not int or n < 1 or type(claim) is not int or claim < 0:
        raise Damage("a record without an ordinal")
    if not isinstance(id, str) or _ID.fullmatch(id) is None:
        raise Damage(f"record {n} has no writer id")
    if not isinstance(prev, str) or _HASH.fullmatch(prev) is None:
        raise Damage(f"record {n} has no hash of its predecessor")
