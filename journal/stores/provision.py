"""Store: makes the streams of a namespace, and inspects what it and its servers promise (R14).

Workers never make a stream as a side effect: `runfold init` does. A stream that exists is never
changed here; what differs is reported.
"""

from __future__ import annotations

import asyncio
import urllib.request
from http.client import HTTPException
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import PermissionDenied, StoreUnavailable
from ..ids import namespace as check_namespace
from ..limits import READ_TRY_S
from ..shards import shards_for
from .account import AccountInfo, account_findings, read_account
from .jetstream_answers import ApiError
from .jetstream_streams import (
    rejected_config,
    signals_config,
    stream_config,
    task_findings,
    tasks_config,
    tasks_name,
)
from .nats_connection import Connection
from .nats_waiting import NoReply
from .safety import Safety, ServerFacts, assess, joined, level_of
from .signals_queue import SignalQueue
from .stream_lookup import (
    NOT_CLUSTERED,
    StreamInfo,
    call,
    check_whole,
    journal_streams,
    journals_there,
    look_up,
    shards_to_make,
)

MONITOR_TRY_S = 5.0

# nats-server 2.15.1
_NO_PEERS = 10005
_NAME_IN_USE = 10058
_NO_MORE_STREAMS = 10027


class Difference(Struct, frozen=True):
    """A setting of an existing stream that is not what `init` would have chosen."""

    setting: str
    wanted: Any
    found: Any


class Made(Struct, frozen=True, kw_only=True):
    """What `init` did for a stream. With differences, nothing."""

    stream: str
    created: bool
    replicas: int
    differences: tuple[Difference, ...] = ()


class Provisioned(Made, frozen=True, kw_only=True):
    """What `init` did: for the journal stream, the first where there are several (`shards`), and
    for the `others`."""

    shards: int = 1
    others: tuple[Made, ...] = ()


_encode = msgspec.json.Encoder().encode


FORBIDDEN = (
    "mirror",
    "sources",
    "republish",
    "subject_transform",
    "persist_mode",
    "sealed",
    "allow_msg_schedules",
    "allow_msg_counter",
)
"""Settings that `init` leaves out, and that make a difference where they are set."""


async def provision(
    url: str,
    *,
    namespace: str = "runfold",
    replicas: int | None = None,
    shards: int | None = None,
    creds: str | None = None,
) -> Provisioned:
    """Make the namespace's streams unless they exist. `replicas` None: as many as the journal
    stream has; 3 on a cluster, else 1, where there is none yet. `shards`: over how many journal
    streams runs are spread; None: as many as there are, `shards_for` the replicas where there is
    none yet.

    Raises ShardsFixed where there are others than asked for; NotProvisioned where one is missing
    that runs were in."""
    check_namespace(namespace)
    connection = Connection(url, namespace=namespace, creds=creds)
    await connection.open()
    try:
        # That of tasks is made behind them: where it was there before, all of them were.
        complete = await look_up(connection, tasks_name(namespace)) is not None
        there = await journals_there(connection, namespace)
        each = replicas or (3 if connection.clustered else 1)
        count = shards_to_make(namespace, there, shards, shards_for(each))
        if complete:
            check_whole(namespace, there, count)
        journals: list[Made] = []
        # The first one comes last: it is what says, to whoever opens a store, that all are there.
        for shard in reversed(range(count)):
            wanted = stream_config(namespace, replicas or 3, shard, count)
            journals.insert(0, await _ensure(connection, wanted, replicas))
        journal, *others = journals
        for config in (tasks_config, signals_config, rejected_config):
            wanted = config(namespace, replicas or journal.replicas)
            others.append(await _ensure(connection, wanted, replicas))
        # Here, since bridges need not have the permission to make it.
        await SignalQueue(connection, namespace).ensure()
    finally:
        await connection.close()
    return Provisioned(
        stream=journal.stream,
        created=journal.created,
        replicas=journal.replicas,
        differences=journal.differences,
        shards=count,
        others=tuple(others),
    )


async def _ensure(connection: Connection, wanted: dict[str, Any], replicas: int | None) -> Made:
    found = await look_up(connection, wanted["name"])
    if found is not None:
        return _existing(wanted, found, any_replicas=replicas is None)
    made = await _create(connection, wanted)
    if _failed(made, NOT_CLUSTERED) and replicas is None:
        wanted["num_replicas"] = 1
        made = await _create(connection, wanted)
    if _failed(made, _NAME_IN_USE):  # somebody else's `init` was quicker
        found = await look_up(connection, wanted["name"])
        if found is not None:
            return _existing(wanted, found, any_replicas=replicas is None)
    if made.error is not None:
        raise _refused(connection.shown, wanted, made.error)
    return Made(stream=wanted["name"], created=True, replicas=int(made.config["num_replicas"]))


async def inspect(
    url: str,
    *,
    namespace: str = "runfold",
    monitor_url: str | None = None,
    creds: str | None = None,
) -> Safety:
    """What an acknowledgement is worth here. `monitor_url`: the servers' monitoring addresses, with
    commas; the sync setting shows nowhere else (nats-server 2.15.1)."""
    check_namespace(namespace)
    connection = Connection(url, namespace=namespace, creds=creds)
    await connection.open()
    try:
        streams = await journal_streams(connection, namespace)
        tasks = await look_up(connection, tasks_name(namespace))
        account = await _account(connection)
        version = connection.server_version
    finally:
        await connection.close()
    servers: list[ServerFacts] = []
    unread: list[str] = []
    for address in (monitor_url or "").split(","):
        if address.strip():
            try:
                servers.append(await asyncio.to_thread(_read_varz, address.strip()))
            except (OSError, ValueError, HTTPException, msgspec.MsgspecError) as error:
                unread.append(f"{address.strip()}: {error}")
    journals = joined(
        [
            assess(
                namespace,
                found.config,
                shard=shard,
                cluster=found.cluster,
                version=version,
                servers=tuple(servers),
                unread=tuple(unread),
            )
            for shard, found in enumerate(streams)
        ]
    )
    findings = (
        *journals.findings,
        *task_findings(namespace, tasks.config if tasks else None),
        *account_findings(account),
    )
    return msgspec.structs.replace(journals, findings=findings, level=level_of(findings))


async def _account(connection: Connection) -> AccountInfo:
    """What is used of the account's limits; nothing known where this user may not ask."""
    try:
        reply = await connection.request("$JS.API.INFO", b"", timeout_s=READ_TRY_S)
        return AccountInfo() if isinstance(reply, NoReply) else read_account(reply.data)
    except (PermissionDenied, msgspec.MsgspecError):
        return AccountInfo()


def _existing(wanted: dict[str, Any], found: StreamInfo, *, any_replicas: bool) -> Made:
    differences = [
        Difference(setting, want, found.config.get(setting))
        for setting, want in wanted.items()
        if setting not in ("metadata", "num_replicas") and found.config.get(setting) != want
    ]
    replicas = int(found.config.get("num_replicas", 1))
    if replicas != wanted["num_replicas"] and not any_replicas:
        differences.append(Difference("num_replicas", wanted["num_replicas"], replicas))
    metadata: dict[str, str] = found.config.get("metadata") or {}  # the server adds its own
    for key, want in wanted.get("metadata", {}).items():
        if metadata.get(key) != want:
            differences.append(Difference(f"metadata {key}", want, metadata.get(key)))
    for setting in FORBIDDEN:
        if setting not in wanted and found.config.get(setting):
            differences.append(Difference(setting, None, found.config[setting]))
    return Made(
        stream=wanted["name"], created=False, replicas=replicas, differences=tuple(differences)
    )


def _failed(made: StreamInfo, err_code: int) -> bool:
    return made.error is not None and made.error.err_code == err_code


def _refused(shown: str, wanted: dict[str, Any], error: ApiError) -> StoreUnavailable:
    hint = ""
    if error.err_code in (NOT_CLUSTERED, _NO_PEERS):
        hint = (
            f"{wanted['num_replicas']} servers must be up; or choose: `runfold init --replicas 1`"
        )
    elif error.err_code == _NO_MORE_STREAMS:
        hint = "max_streams of the account must allow one for each shard and three more"
    return StoreUnavailable(
        f"the NATS server at {shown} does not make stream {wanted['name']}: {error}", hint=hint
    )


async def _create(connection: Connection, config: dict[str, Any]) -> StreamInfo:
    return await call(connection, f"$JS.API.STREAM.CREATE.{config['name']}", _encode(config))


class _JetStreamConfig(Struct, frozen=True):
    sync_always: bool = False  # absent where it is not set (nats-server 2.15.1)


class _JetStreamVarz(Struct, frozen=True):
    config: _JetStreamConfig


class _Varz(Struct, frozen=True):
    server_name: str
    version: str
    jetstream: _JetStreamVarz


_varz = msgspec.json.Decoder(_Varz)


def _read_varz(address: str) -> ServerFacts:
    """From a thread: it blocks. Raises OSError, ValueError, HTTPException, MsgspecError."""
    url = f"{address.rstrip('/')}/varz"
    with urllib.request.urlopen(url, timeout=MONITOR_TRY_S) as answer:
        varz = _varz.decode(answer.read())
    return ServerFacts(
        name=varz.server_name,
        version=varz.version,
        sync_always=varz.jetstream.config.sync_always,
    )
