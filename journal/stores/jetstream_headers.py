"""Core: the headers of a journal's messages: their names, and whether they say what it says.

They are for who doesn't read the journal: a listing goes by the status, a claimer by the commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import cast, get_args

from ..codec import Damage, decode
from ..records import Status
from ..store import RawRecord
from ..summary import is_restart_point
from ..waits import parse_instant

EXPECTED = "Nats-Expected-Last-Subject-Sequence"
RECORD_TYPE = "Runfold-Type"
RUN_STATUS = "Runfold-Status"
COMMIT = "Runfold-Commit"
TRACE = "traceparent"
SELF = "self"
"""In place of a sequence: this record is the commit to restart at."""

TIME = "Nats-Time-Stamp"
"""The server's, in what it answers; nats-server 2.15.1 puts its own in place of a message's."""

PURGED_TYPE = "run.purged"
PURGED = "purged"
"""What listings say of a tombstone in place of a status: the run it left has none any more."""

NOT_OURS = "published without the sequence it follows: not by Runfold"
_STATUSES = frozenset(get_args(Status))
_TYPE = re.compile(rb'\{"type":"([a-z.]+)"')


def status_of(headers: Mapping[str, str]) -> Status | None:
    """None where there is none, or a word that is no status."""
    status = headers.get(RUN_STATUS)
    return cast("Status", status) if status in _STATUSES else None


def server_time(text: str) -> datetime | None:
    """None for what is no instant."""
    try:
        return parse_instant(text)
    except ValueError:
        return None


def commit_of(headers: Mapping[str, str]) -> int:
    """As Entry.commit has it. What is no number names no restart point."""
    value = headers.get(COMMIT, "")
    if value == SELF:
        return -1
    return int(value) if value.isascii() and value.isdecimal() else 0


class HeaderCheck:
    """The headers of one run's messages, in order. Whether a status is the right one is the
    audit's to say."""

    def __init__(self) -> None:
        self._restart_at = -1  # before the first message: unknown

    def broken(self, record: RawRecord) -> Iterator[str]:
        """What the next message's headers say wrongly."""
        headers = record.headers or {}
        if EXPECTED not in headers:  # the server stores the header with the message
            yield NOT_OURS
            return
        if self._restart_at < 0 and headers[EXPECTED] == "0":
            self._restart_at = 0
        word = headers.get(RUN_STATUS)
        if word not in _STATUSES:
            yield f"{RUN_STATUS} is missing" if word is None else f"{RUN_STATUS} is {word[:40]!r}"
        named, there = headers.get(RECORD_TYPE, ""), _TYPE.match(record.data)
        if there is not None and named != there[1].decode():
            yield f"{RECORD_TYPE} is {named[:40]!r} on a {there[1].decode()}"
        yield from self._commit(record, commit_of(headers))

    def _commit(self, record: RawRecord, named: int) -> Iterator[str]:
        if _restarts(record.data):
            self._restart_at = record.position
            if named != -1:
                yield f"{COMMIT} does not say that one can restart at this commit"
        elif 0 <= self._restart_at != named:
            yield f"{COMMIT} names {named}; the last commit to restart at is {self._restart_at}"


def _restarts(data: bytes) -> bool:
    if not data.startswith(b'{"type":"commit"'):
        return False
    try:
        return is_restart_point(decode(data))
    except Damage:
        return False
