"""Store: which streams are there: any one, and the journal streams of a namespace (R14, R74)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import NotProvisioned, ShardsFixed, StoreUnavailable
from ..limits import READ_TRY_S
from ..shards import known_hash, named, named_shards
from .jetstream_answers import NO_JETSTREAM, STREAM_NOT_FOUND, ApiError
from .jetstream_read import Patience, api_answer
from .jetstream_streams import stream_name
from .nats_connection import Connection
from .nats_waiting import NoReply

NOT_CLUSTERED = 10074
"""nats-server 2.15.1, for more than one replica."""


class StreamState(Struct, frozen=True):
    """`last_seq`: as many records as were ever stored."""

    last_seq: int = 0


class StreamInfo(Struct, frozen=True):
    """Of STREAM.INFO, STREAM.CREATE and STREAM.NAMES what is used here."""

    config: dict[str, Any] = {}
    cluster: dict[str, Any] = {}
    state: StreamState = StreamState()
    streams: tuple[str, ...] | None = None
    error: ApiError | None = None


_info = msgspec.json.Decoder(StreamInfo)
_encode = msgspec.json.Encoder().encode


async def call(connection: Connection, subject: str, payload: bytes) -> StreamInfo:
    """An answer of the API, tried again until one comes: a cluster that starts has no leader."""
    patience = Patience(f"no answer to {subject}")
    while True:
        reply = await connection.request(subject, payload, timeout_s=READ_TRY_S)
        if isinstance(reply, NoReply):
            if reply.nobody:  # nats-server 2.15.1 without JetStream has no $JS.API at all
                raise NotProvisioned(
                    f"the NATS server at {connection.shown} has no JetStream",
                    hint="start it with -js, or a `jetstream` block in its configuration",
                )
            await patience.pause(reply.cause)
            continue
        answer = api_answer(_info, reply)
        if answer.error is None or answer.error.code < 500:
            return answer
        if answer.error.err_code in NO_JETSTREAM:
            raise NotProvisioned(
                f"the NATS server at {connection.shown} has no JetStream for this account",
                hint="enable JetStream for the account",
            )
        if answer.error.err_code == NOT_CLUSTERED:
            return answer
        await patience.pause(str(answer.error))


async def look_up(connection: Connection, stream: str) -> StreamInfo | None:
    """The stream's config and state; None if there is no such stream."""
    found = await call(connection, f"$JS.API.STREAM.INFO.{stream}", b"")
    if found.error is not None and found.error.err_code == STREAM_NOT_FOUND:
        return None
    if found.error is not None:
        raise StoreUnavailable(f"stream {stream} could not be looked up: {found.error}")
    return found


async def journal_streams(connection: Connection, namespace: str) -> tuple[StreamInfo, ...]:
    """All journal streams of the namespace, in order. Raises NotProvisioned where one is missing,
    or they do not agree on how runs are spread over them."""
    first = await look_up(connection, stream_name(namespace))
    if first is None:
        option = "" if namespace == "runfold" else f" --namespace {namespace}"
        raise NotProvisioned(
            f"the NATS server at {connection.shown} has no stream {stream_name(namespace)}",
            hint=f"run `runfold init --store {connection.shown}{option}` once",
        )
    shards = named_shards(first.config)
    if shards is None or not known_hash(first.config):
        raise NotProvisioned(
            f"stream {stream_name(namespace)} does not say how runs are spread over journal "
            f"streams in a way that this version knows: in its metadata {named(first.config)}",
            hint="use the version of Runfold that made it, or put the metadata back",
        )
    found = [first]
    for index in range(1, shards):
        stream = stream_name(namespace, index)
        one = await look_up(connection, stream)
        if one is None:
            raise _gone(stream, shards)
        if named_shards(one.config) != shards or not known_hash(one.config):
            raise NotProvisioned(
                f"stream {stream} is not one of the {shards} that {stream_name(namespace)} speaks "
                f"of: in its metadata {named(one.config)}",
                hint="how many there are is fixed by `runfold init`: put the metadata back",
            )
        found.append(one)
    return tuple(found)


async def journals_there(connection: Connection, namespace: str) -> dict[int, StreamInfo]:
    """What there is of them, by index, before `init`."""
    request = _encode({"subject": f"{namespace}.journal.>"})
    names = await call(connection, "$JS.API.STREAM.NAMES", request)
    if names.error is not None:
        raise StoreUnavailable(f"the streams could not be listed: {names.error}")
    found: dict[int, StreamInfo] = {}
    pattern = re.compile(re.escape(namespace.upper()) + r"_JOURNAL_(0|[1-9][0-9]{0,3})")
    for name in names.streams or ():
        match = pattern.fullmatch(name)
        if match is not None and (one := await look_up(connection, name)) is not None:
            found[int(match[1])] = one
    return found


def shards_to_make(
    namespace: str, there: Mapping[int, StreamInfo], asked: int | None, picked: int
) -> int:
    """P, for `init`: what the streams that are there say, else what was asked for, else `picked`.

    The first stream is made last, so with it all were there once; and what a run was ever in has a
    sequence. Raises ShardsFixed for another number than theirs; NotProvisioned where one is missing
    beside such streams: an empty one in its place would let its runs start anew.
    """
    named_by = {index: named_shards(one.config) for index, one in there.items()}
    counts = {count for count in named_by.values() if count is not None}
    if not counts:
        return asked or picked
    if len(counts) > 1 or asked not in (None, *counts):
        told = ", ".join(f"{stream_name(namespace, i)} of {named_by[i]}" for i in sorted(there))
        raise ShardsFixed(
            f"namespace {namespace} has journal streams already: {told}; "
            "how many of them runs are spread over can't be changed",
            hint="leave --shards out; or take another namespace; or delete them, if all are unused",
        )
    (count,) = counts
    if 0 in there or any(one.state.last_seq for one in there.values()):
        check_whole(namespace, there, count)
    return count


def check_whole(namespace: str, there: Mapping[int, StreamInfo], shards: int) -> None:
    """Raises NotProvisioned where one is missing, of those that were all there once."""
    missing = [index for index in range(shards) if index not in there]
    if missing:
        raise _gone(stream_name(namespace, missing[0]), shards)


def _gone(stream: str, shards: int) -> NotProvisioned:
    of = f"one of the {shards} that runs are spread over" if shards > 1 else "and there was one"
    return NotProvisioned(
        f"there is no stream {stream}, {of}",
        hint="restore it from a backup: runs are in it, and an empty one would start them anew; "
        "to begin with nothing, delete the other streams of the namespace as well",
    )
