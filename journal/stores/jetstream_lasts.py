"""Store: the last records of many runs, in few requests. By any server of the stream, from a moment
ago, and not surely all: only to be faster than to read each run."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from ..codec import Damage, decode
from ..ids import RunId
from ..limits import READ_TRY_S
from ..records import Record
from .nats_connection import Connection
from .nats_waiting import STATUS, Reply

PAGE = 256
"""Runs a request; nats-server 2.15.1 takes 1 024, and sends whole messages."""

_encode = msgspec.json.Encoder().encode


async def last_records(
    connection: Connection, stream: str, subjects: Mapping[str, RunId]
) -> dict[RunId, Record]:
    """By run; `subjects` name the runs. What does not come, or can't be read, is left out."""
    found: dict[RunId, Record] = {}

    def take(reply: Reply) -> bool:
        if STATUS in reply.headers:
            return True
        run_id = subjects.get(reply.headers.get("Nats-Subject", ""))
        if run_id is not None:
            with contextlib.suppress(Damage):  # who reads the run finds it
                found[run_id] = decode(reply.data)
        return False

    ordered: Sequence[str] = list(subjects)
    for start in range(0, len(ordered), PAGE):
        request = _encode({"multi_last": ordered[start : start + PAGE]})
        await connection.collect(f"$JS.API.DIRECT.GET.{stream}", request, take, idle_s=READ_TRY_S)
    return found
