"""Store: appends on their way to one journal stream: each alone, or many in one atomic batch.

Why the order of records stays safe: a record goes with the sequence it expects whichever way it
goes, so it can land only behind the tail its decision was made at, and only once. A batch is stored
whole or not at all. One that was refused says of no record why, so each is appended alone, the same
bytes at the same sequence, and its own answer counts; should the refused batch have been stored all
the same, that answer is a conflict, and the writer finds its record there (`Log`). One without an
answer is unknown to each. nats-server 2.15.1: tests/contract/test_group_commit.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from msgspec import Struct

from ..errors import StoreUnavailable, TooLarge
from ..grouping import GroupCommit, Grouping
from ..ids import RunId
from ..limits import APPEND_TRY_S
from ..store import AppendAnswer, Appended, Unknown
from .jetstream_answers import read_ack, read_batch_ack
from .nats_connection import Connection
from .nats_waiting import NoReply

log = logging.getLogger("runfold")

SWITCH = "RUNFOLD_GROUP_COMMIT"

BATCH_ID = "Nats-Batch-Id"
BATCH_SEQUENCE = "Nats-Batch-Sequence"
BATCH_COMMIT = "Nats-Batch-Commit"

APART_MAX = 1024
"""Runs that nobody goes on with are among them."""

HEADERS_BYTES_MAX = 4096
"""More than a record's headers can have, those of a batch among them: what stays this far below the
server's limit isn't counted."""

# What is written around headers: `NATS/1.0`, CR LF, `name: value` CR LF each, CR LF.
_HEADER_FRAME_BYTES = len(b"NATS/1.0\r\n\r\n")
_HEADER_LINE_BYTES = len(b": \r\n")


def commit_wanted() -> GroupCommit:
    """By the environment. Raises StoreUnavailable for what is no choice."""
    asked = os.environ.get(SWITCH) or "auto"
    for choice in get_args(GroupCommit):
        if asked == choice:
            return choice
    raise StoreUnavailable(f"{SWITCH} is {asked!r}", hint="it is auto, on or off")


def commit_for(config: Mapping[str, Any], wanted: GroupCommit) -> GroupCommit:
    """What the settings of a journal stream allow of it."""
    if wanted == "off" or config.get("allow_atomic"):
        return wanted
    log.warning(
        "stream %s has no allow_atomic: records are stored one by one; `nats stream edit` sets it",
        config.get("name"),
    )
    return "off"


class Outgoing(Struct, frozen=True):
    """A record to be appended, by the sequence of its subject's last one (0: none)."""

    subject: str
    data: bytes
    headers: dict[str, str]
    expected: int


def check_size(run_id: RunId, record: Outgoing, max_payload: int) -> None:
    """Raises TooLarge. nats-server 2.15.1 cuts the connection over a message whose headers and
    payload exceed max_payload, and nats-py 2.16.0 is then closed for good."""
    if len(record.data) + HEADERS_BYTES_MAX <= max_payload:
        return  # not needed for safety
    size = len(record.data) + _HEADER_FRAME_BYTES
    for name, value in record.headers.items():
        size += len(name) + len(value.encode()) + _HEADER_LINE_BYTES
    if size > max_payload:
        raise TooLarge(
            f"a record of {size} bytes with its headers exceeds the server's max_payload of "
            f"{max_payload}",
            run_id=run_id,
            hint="return less, or raise max_payload on every server",
        )


class Lane:
    """Of one stream and one loop. What waits in it when the connection is closed is told so."""

    def __init__(self, connection: Connection, stream: str, commit: GroupCommit) -> None:
        self._connection = connection
        self._stream = stream
        self._grouping = None if commit == "off" else Grouping(commit)
        self._numbers = itertools.count(1)
        self._nonce = secrets.token_hex(6)  # the server joins what two clients send under one id
        self._batches = itertools.count(1)
        self._held: dict[int, tuple[Outgoing, asyncio.Future[AppendAnswer | None]]] = {}
        self._apart: set[str] = set()
        self._stirred = False
        self._timer: asyncio.TimerHandle | None = None
        self._committing: set[asyncio.Task[None]] = set()

    async def append(self, record: Outgoing) -> AppendAnswer:
        """Raises as Connection.request, and StoreUnavailable for what no retry settles."""
        grouping = self._grouping
        size = len(record.data) + HEADERS_BYTES_MAX
        # Too large with a batch's headers, it would only spoil the batch.  # not needed for safety
        if grouping is None or size > self._connection.max_payload:
            return await self._alone(record)
        if record.subject in self._apart:
            answer = await self._alone(record)
        else:
            answer = await self._with_others(grouping, record)
        if isinstance(answer, Appended):
            self._apart.discard(record.subject)
        else:  # goes alone the next time: it would have batch after batch refused
            self._apart.add(record.subject)
            if len(self._apart) > APART_MAX:
                self._apart.clear()
        return answer

    async def _with_others(self, grouping: Grouping, record: Outgoing) -> AppendAnswer:
        number, loop = next(self._numbers), asyncio.get_running_loop()
        try:
            if not grouping.arrive(number, record.subject, len(record.data), loop.time()):
                answer = await self._in_group(number, record)
                if answer is not None:
                    return answer
            answer = await self._alone(record)
            if not isinstance(answer, Unknown):  # how long silence took says nothing
                grouping.answered(number, loop.time())
            return answer
        finally:
            grouping.leave(number)
            if self._held:
                self._stir()

    async def _alone(self, record: Outgoing) -> AppendAnswer:
        reply = await self._connection.request(
            record.subject, record.data, record.headers, timeout_s=APPEND_TRY_S
        )
        if isinstance(reply, NoReply):
            return Unknown(reply.cause)
        return read_ack(reply.data, stream=self._stream, expected=record.expected)

    # ---- groups -----------------------------------------------------------------------------

    async def _in_group(self, number: int, record: Outgoing) -> AppendAnswer | None:
        """None: it goes alone, after all."""
        future: asyncio.Future[AppendAnswer | None] = asyncio.get_running_loop().create_future()
        self._held[number] = record, future
        self._stir()
        try:
            return await future
        finally:
            self._held.pop(number, None)  # one that is cancelled while it waits is never sent

    def _stir(self) -> None:
        """See at the end of this turn of the loop what is to be sent: with all that came in it."""
        if not self._stirred:
            self._stirred = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        grouping = self._grouping
        assert grouping is not None
        self._stirred = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        sends = grouping.take(loop.time())
        for number in sends.alone:
            _settle(self._held.pop(number)[1], None)
        if sends.batch:
            members = [self._held.pop(number) for number in sends.batch]
            task = loop.create_task(self._commit(grouping, members), name="batch of appends")
            self._committing.add(task)
            task.add_done_callback(self._committing.discard)
        due = grouping.due()
        if due is not None:
            self._timer = loop.call_at(due, self._send)

    async def _commit(
        self,
        grouping: Grouping,
        members: Sequence[tuple[Outgoing, asyncio.Future[AppendAnswer | None]]],
    ) -> None:
        """Send a batch and tell each member what came of it."""
        loop = asyncio.get_running_loop()
        try:
            answers = await self._batch([record for record, _ in members])
        except Exception:  # it may be the fault of one: alone, each meets its own
            answers = [None] * len(members)
        if answers[0] is None:
            grouping.refused(loop.time())
        elif isinstance(answers[0], Unknown):
            grouping.unknown(loop.time())
        else:
            grouping.stored(loop.time())
        for (_, future), answer in zip(members, answers, strict=True):
            _settle(future, answer)
        if self._held:
            self._stir()

    async def _batch(self, records: Sequence[Outgoing]) -> Sequence[AppendAnswer | None]:
        """As read_batch_ack."""
        batch = f"{self._nonce}-{next(self._batches)}"
        *others, last = [
            (record, {**record.headers, BATCH_ID: batch, BATCH_SEQUENCE: str(place)})
            for place, record in enumerate(records, 1)
        ]
        for record, headers in others:
            if not self._connection.post(record.subject, record.data, headers):
                return [None] * len(records)  # without its commit no batch is ever stored
        record, headers = last
        reply = await self._connection.request(
            record.subject, record.data, headers | {BATCH_COMMIT: "1"}, timeout_s=APPEND_TRY_S
        )
        if isinstance(reply, NoReply):
            return [Unknown(reply.cause)] * len(records)
        expected = [record.expected for record in records]
        return read_batch_ack(reply.data, stream=self._stream, expected=expected)


def _settle(future: asyncio.Future[AppendAnswer | None], answer: AppendAnswer | None) -> None:
    if not future.done():  # else it was cancelled
        future.set_result(answer)
