"""Store: the REJECTED stream: refused signals with their reason, for 30 days (R59)."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from ..errors import InvalidId
from ..escape import visible
from ..ids import RunId, subject_token, valid_run_id
from ..waits import instant_text
from .jetstream_read import Patience, Reader
from .jetstream_streams import rejected_name
from .nats_connection import Connection
from .stream_api import StreamApi

REASON_CHARS_MAX = 600
PAYLOAD_BYTES_MAX = 2048
SUBJECT_CHARS_MAX = 300
REJECTED_PAGE = 500

_MESSAGE_ID = "Nats-Msg-Id"
_HEADERS_BYTES_MAX = 1024
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


class Refusal(Struct, frozen=True, kw_only=True):
    """Why a signal had no effect. All of it is bounded, and visible as it stands. `run` and `name`
    are None where the subject names none; `payload` is the beginning of what was sent."""

    at: str
    subject: str
    run: str | None
    name: str | None
    code: str
    reason: str
    payload: str
    by: str


_decode = msgspec.json.Decoder(Refusal).decode
_encode = msgspec.json.Encoder().encode


def refusal(
    *,
    subject: str,
    run: str | None,
    name: str | None,
    code: str,
    reason: str,
    data: bytes,
    by: str,
    size: int | None = None,
) -> Refusal:
    """Of what was received, cut and escaped. `size`: of the data, where that is cut already."""
    return Refusal(
        at=instant_text(datetime.now(UTC)),
        subject=_cut(subject, SUBJECT_CHARS_MAX),
        run=run if run is not None and valid_run_id(run) else None,
        name=None if name is None else _cut(name, 64),
        code=code,
        reason=_cut(reason, REASON_CHARS_MAX),
        payload=shown_payload(data, size),
        by=_cut(by, 64),
    )


def shown_payload(data: bytes, size: int | None = None) -> str:
    """The beginning as text; what is no text, or can't be seen, as escapes."""
    text = visible(data[:PAYLOAD_BYTES_MAX].decode("utf-8", "backslashreplace"))
    return text if len(data) <= PAYLOAD_BYTES_MAX else f"{text}… ({size or len(data)} bytes)"


def _cut(text: str, chars_max: int) -> str:
    shown = visible(text[:chars_max])
    return shown if len(text) <= chars_max else f"{shown}…"


class Rejected:
    """The refusals of a namespace. Calls raise as those of StreamApi."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._prefix = f"{namespace}.rejected."
        self._stream = rejected_name(namespace)
        self._api = StreamApi(connection, namespace, self._stream)
        self._reader = Reader(connection, self._stream)

    async def put(self, refused: Refusal, key: str) -> None:
        """Kept when it returns. `key`: of the message that was refused. Here a message id is no
        danger: a repeat within the stream's window (2 minutes, nats-server 2.15.1) is dropped, and
        the first one is still there; later ones are told by `holds`."""
        raw = _encode(refused)
        if len(raw) + _HEADERS_BYTES_MAX > self._connection.max_payload:
            refused = msgspec.structs.replace(refused, payload="…", reason=refused.reason[:80])
            raw = _encode(refused)
        await self._api.store(self._subject(refused), raw, {_MESSAGE_ID: key}, "a refused signal")

    async def holds(self, refused: Refusal, key: str) -> bool:
        """Whether the last refusal of this run and name is the one of that message."""
        patience = Patience(f"stream {self._stream} could not be read")
        last = await self._reader.last(self._subject(refused), patience)
        return last is not None and last.headers.get(_MESSAGE_ID) == key

    async def latest(self, limit: int = 100) -> list[Refusal]:
        """At most so many (500), newest first. One by one from the end: no consumer is left."""
        if not 1 <= limit <= REJECTED_PAGE:
            raise InvalidId(f"a limit is 1 to {REJECTED_PAGE}, not {limit}")
        state = (await self._api.info()).state
        patience = Patience(f"stream {self._stream} could not be read")
        found: list[Refusal] = []
        sequence = state.last_seq
        while sequence >= max(state.first_seq, 1) and len(found) < limit:
            stored = await self._reader.at(sequence, patience)
            if stored is not None:  # else it was removed, or has aged out
                found.append(_read(stored.data))
            patience.renew()
            sequence -= 1
        return found

    def _subject(self, refused: Refusal) -> str:
        run = subject_token(RunId(refused.run)) if refused.run else "_"
        name = refused.name if refused.name and _NAME.fullmatch(refused.name) else "_"
        return f"{self._prefix}{run}.{name}"


def _read(data: bytes) -> Refusal:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return Refusal(
            at="",
            subject="",
            run=None,
            name=None,
            code="unreadable",
            reason=visible(f"an entry that this version can't read: {error}"[:REASON_CHARS_MAX]),
            payload=shown_payload(data),
            by="",
        )
