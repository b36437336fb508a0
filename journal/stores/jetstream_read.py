"""Store: reading journals from a JetStream stream, without consumers.

The leader names the tail; batched direct gets, which a follower may answer, bring what is before
it; the leader brings what they did not. A pause in delivery is never the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from ..at_once import at_once
from ..codec import Damage, Entry, decode
from ..errors import JournalDamaged, StoreUnavailable
from ..ids import RunId
from ..limits import (
    READ_BATCH,
    READ_BATCH_BYTES,
    READ_BUDGET_S,
    READ_PAUSE_MAX_S,
    READ_PAUSE_S,
    READ_TRY_S,
)
from ..order import trimmed
from ..store import Loaded
from .jetstream_answers import MESSAGE_NOT_FOUND, STREAM_NOT_FOUND, ApiAnswer, ApiError
from .jetstream_headers import EXPECTED, NOT_OURS, TIME, TRACE, commit_of, status_of
from .nats_connection import Connection
from .nats_waiting import STATUS, NoReply, Reply

Answer = TypeVar("Answer")
Found = TypeVar("Found", bound=ApiAnswer)


class _Message(Struct, frozen=True):
    seq: int
    subject: str = ""
    data: bytes = b""  # absent for an empty payload
    hdrs: bytes = b""
    time: str = ""


class _MessageAnswer(Struct, frozen=True):
    message: _Message | None = None
    error: ApiError | None = None


class Stored(Struct, frozen=True):
    """A message in the stream."""

    seq: int
    subject: str
    data: bytes
    headers: Mapping[str, str]


_message = msgspec.json.Decoder(_MessageAnswer)
_encode = msgspec.json.Encoder().encode


class Patience:
    """A bound on waiting without progress."""

    def __init__(self, what: str) -> None:
        self._what = what
        self.renew()

    def renew(self) -> None:
        self._deadline = asyncio.get_running_loop().time() + READ_BUDGET_S
        self._pause_s = READ_PAUSE_S

    async def pause(self, cause: str) -> None:
        """Before another try. Raises StoreUnavailable when the budget is spent."""
        if asyncio.get_running_loop().time() >= self._deadline:
            raise StoreUnavailable(
                f"{self._what}: {cause}; gave up after {READ_BUDGET_S:g} s",
                hint="nothing was changed; try again when the server answers",
            )
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, READ_PAUSE_MAX_S)


def reading(run_id: RunId, stream: str) -> Patience:
    """With a run's journal."""
    return Patience(f"run {run_id} could not be read from stream {stream}")


class Reader:
    """Reads one stream over one connection."""

    def __init__(self, connection: Connection, stream: str) -> None:
        self._connection = connection
        self._stream = stream
        self._get = f"$JS.API.STREAM.MSG.GET.{stream}"
        self._direct_get = f"$JS.API.DIRECT.GET.{stream}"

    # ---- one journal ------------------------------------------------------------------------

    async def load(self, subject: str, run_id: RunId, after: int) -> Loaded:
        """Everything on the subject after sequence `after`, up to the last the leader names."""
        again = False
        while True:
            found: list[Stored] = []
            async for page in self.whole(subject, after, reading(run_id, self._stream)):
                found += page
            entries = self._entries(found, subject, run_id)
            if again or not trimmed(0, entries):
                return Loaded(entries, found[-1].seq if found else after)
            again = True  # what is still missing then was missing before

    async def listed(self, subject: str, run_id: RunId, tail: int) -> Loaded:
        """As `load`, up to a tail that a listing just named."""
        pages = self.pages(subject, 0, tail, reading(run_id, self._stream))
        found = [one async for page in pages for one in page]
        if found and found[-1].seq == tail:
            entries = self._entries(found, subject, run_id)
            if not trimmed(0, entries):
                return Loaded(entries, tail)
        return await self.load(subject, run_id, 0)

    async def entries(
        self, subject: str, run_id: RunId, after: int
    ) -> AsyncGenerator[Loaded, None]:
        """As `load`, in pages (Store.pages)."""
        tail = after
        async for page in self.whole(subject, after, reading(run_id, self._stream)):
            tail = page[-1].seq
            yield Loaded(self._entries(page, subject, run_id), tail)
        if tail == after:
            yield Loaded((), tail)

    async def resume(self, subject: str, run_id: RunId) -> Loaded | None:
        """The first record and everything from the restart point that the last one names; all of
        it, or None, where it names none, or one that is not there.

        The leader names both ends at once; what is between them is read as in `load`, so that it is
        whole, and the fold checks that it chains from the point on."""
        first, last = await self._ends(subject, run_id)
        if last is None:
            return Loaded((), 0)
        if first is None or first.seq > last.seq:  # it began, or was purged, between the two
            return None
        point = commit_of(last.headers)
        if point < 0:
            point = last.seq
        after = point - 1 if first.seq < point <= last.seq else first.seq
        if after == first.seq and self._entries([last], subject, run_id)[0].record.n > READ_BATCH:
            return None
        rest = await self._rest(subject, run_id, after, last)
        entries = self._entries([first, *rest], subject, run_id)
        if entries[-1].position == last.seq:  # else it was purged, and something follows that
            if after == first.seq and not trimmed(0, entries):
                return Loaded(entries, last.seq)
            named = len(entries) > 1 and entries[1].position == point and entries[0].record.n == 1
            if after != first.seq and named and not trimmed(0, entries[1:]):
                return Loaded(entries, last.seq)
        return None

    async def _rest(self, subject: str, run_id: RunId, after: int, last: Stored) -> list[Stored]:
        """What is after sequence `after`, up to the last message."""
        if last.seq - after <= 1:  # nothing can be between
            return [last] if last.seq > after else []
        pages = self.pages(subject, after, last.seq, reading(run_id, self._stream))
        return [one async for page in pages for one in page]

    async def _ends(self, subject: str, run_id: RunId) -> tuple[Stored | None, Stored | None]:
        """The first message and the last, of the leader, asked for at once."""
        what = reading(run_id, self._stream), reading(run_id, self._stream)
        async with at_once() as group:
            first = group.create_task(self.first(subject, 0, what[0]))
            last = group.create_task(self.last(subject, what[1]))
        return first.result(), last.result()

    async def last(self, subject: str, patience: Patience) -> Stored | None:
        """The leader's last message on the subject."""
        return await self._patiently({"last_by_subj": subject}, patience)

    async def first(self, subjects: str, after: int, patience: Patience) -> Stored | None:
        """The leader's first message behind sequence `after` whose subject the filter matches."""
        return await self._patiently({"seq": after + 1, "next_by_subj": subjects}, patience)

    async def at(self, sequence: int, patience: Patience) -> Stored | None:
        """The leader's message at the sequence."""
        return await self._patiently({"seq": sequence}, patience)

    async def _patiently(self, request: dict[str, str | int], patience: Patience) -> Stored | None:
        while isinstance(found := await self._from_leader(request), str):
            await patience.pause(found)
        return found

    async def tail(self, subject: str, after: int, patience: Patience) -> int:
        """The last sequence, at least `after`. nats-server 2.15.1: a leader that was paused and
        deposed answers with an old one; what ends before what is known already is stale."""
        while True:
            last = await self.last(subject, patience)
            tail = last.seq if last is not None else 0
            if tail >= after:
                return tail
            await patience.pause(f"the leader names {tail} as its last, before {after}")

    async def whole(
        self, subject: str, after: int, patience: Patience
    ) -> AsyncGenerator[list[Stored], None]:
        """The messages after sequence `after`, in pages without a gap, up to the last that the
        leader names. A purge meanwhile leaves a gap before its tombstone."""
        while True:
            tail = await self.tail(subject, after, patience)
            async for page in self.pages(subject, after, tail, patience):
                after = page[-1].seq
                yield page
            if after >= tail:
                return
            await patience.pause("its tail was removed while it was read")

    async def pages(
        self, subject: str, after: int, tail: int, patience: Patience
    ) -> AsyncGenerator[list[Stored], None]:
        """The messages in (after, tail], in order and without a gap; they end before `tail` where
        that is no longer there. The subject may have a wildcard."""
        last = after
        while last < tail:
            more = await self._batch(subject, last, tail)
            if not more:
                match await self._from_leader({"seq": last + 1, "next_by_subj": subject}):
                    case str(cause):
                        await patience.pause(cause)
                        continue
                    case None:
                        await patience.pause(f"nothing follows sequence {last}")
                        continue
                    case one:
                        more = [one]
            if more[-1].seq > tail:
                return
            patience.renew()
            last = more[-1].seq
            yield more

    async def _batch(self, subject: str, last: int, tail: int) -> list[Stored]:
        """Messages that follow `last` without a gap, none beyond `tail`; maybe none at all.

        nats-server 2.15.1 puts into each answer the sequence of the one before it in the batch
        (0 in the first) and ends with a status: 204, or 404 where nothing follows.
        """
        found: list[Stored] = []

        def take(reply: Reply) -> bool:
            headers = reply.headers
            number = headers.get("Nats-Sequence", "")
            seq = int(number) if number.isdecimal() and STATUS not in headers else 0
            before = headers.get("Nats-Last-Sequence")
            if not last < seq <= tail or before != str(found[-1].seq if found else 0):
                return True
            found.append(Stored(seq, headers.get("Nats-Subject", ""), reply.data, headers))
            return seq == tail  # not needed for safety: the status ends it too

        request = {
            "seq": last + 1,
            "next_by_subj": subject,
            "batch": READ_BATCH,
            "max_bytes": READ_BATCH_BYTES,
        }
        await self._connection.collect(self._direct_get, _encode(request), take, idle_s=READ_TRY_S)
        return found

    async def _from_leader(self, request: dict[str, str | int]) -> Stored | str | None:
        """A message; None: there is none; or why there is no answer."""
        reply = await self._connection.request(self._get, _encode(request), timeout_s=READ_TRY_S)
        if isinstance(reply, NoReply):
            return reply.cause
        answer = api_answer(_message, reply)
        if answer.message is not None:
            message = answer.message
            headers = _headers(message.hdrs)
            headers[TIME] = message.time  # as in a direct get
            return Stored(message.seq, message.subject, message.data, headers)
        error = answer.error or ApiError()
        if error.err_code == MESSAGE_NOT_FOUND:
            return None
        raise_if_gone(error, self._stream)
        return str(error)

    def _entries(self, stored: list[Stored], subject: str, run_id: RunId) -> tuple[Entry, ...]:
        entries: list[Entry] = []
        try:
            entries.extend(self._entry(found, subject, run_id) for found in stored)
        except JournalDamaged as damage:
            damage.good = tuple(entries)
            raise
        return tuple(entries)

    def _entry(self, stored: Stored, subject: str, run_id: RunId) -> Entry:
        where = place(self._stream, subject, stored.seq)
        try:
            if not stored.data:
                raise Damage("an empty message")
            if EXPECTED not in stored.headers:  # the server stores the header with the message
                raise Damage(NOT_OURS)
            return Entry(
                decode(stored.data),
                stored.data,
                status=status_of(stored.headers),
                position=stored.seq,
                commit=commit_of(stored.headers),
                trace=stored.headers.get(TRACE, ""),
            )
        except Damage as damage:
            raise JournalDamaged(
                f"run {run_id}: {damage} ({where})", where=where, run_id=run_id
            ) from damage


def place(stream: str, subject: str, sequence: int) -> str:
    """Where a record is, as `nats stream get` wants it."""
    return f"stream {stream}, subject {subject}, sequence {sequence}"


def api_answer(decoder: msgspec.json.Decoder[Answer], reply: Reply) -> Answer:
    """JetStream's answer to an API call. Raises StoreUnavailable if somebody else gave it."""
    try:
        return decoder.decode(reply.data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"an answer that is not JetStream's: {error}") from error


async def asked_of(
    connection: Connection,
    stream: str,
    decoder: msgspec.json.Decoder[Found],
    subject: str,
    request: bytes,
    patience: Patience,
    *,
    timeout_s: float = READ_TRY_S,
) -> Found:
    """What the API says of the stream, asked again until it is no error. Raises StoreUnavailable
    where that stays so, and for what no retry settles; PermissionDenied."""
    while True:
        reply = await connection.request(subject, request, timeout_s=timeout_s)
        if isinstance(reply, NoReply):
            await patience.pause(reply.cause)
            continue
        answer = api_answer(decoder, reply)
        if answer.error is None:
            return answer
        raise_if_gone(answer.error, stream)
        await patience.pause(str(answer.error))


def raise_if_gone(error: ApiError, stream: str) -> None:
    """Raises StoreUnavailable for what no retry of a read settles."""
    if error.err_code == STREAM_NOT_FOUND:
        raise StoreUnavailable(
            f"stream {stream} is gone",
            hint="restore it from a backup; `runfold init` puts no empty one in its place",
        )
    if 400 <= error.code < 500 and error.code != 429:
        raise StoreUnavailable(f"stream {stream} refuses to be read: {error}")


def _headers(raw: bytes) -> dict[str, str]:
    """`NATS/1.0`, then a `name: value` each line."""
    found: dict[str, str] = {}
    for line in raw.decode("utf-8", "replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found
