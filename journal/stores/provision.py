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

from ..errors import NotProvisioned, StoreUnavailable
from ..ids import namespace as check_namespace
from ..limits import READ_TRY_S
from .jetstream_answers import NO_JETSTREAM, STREAM_NOT_FOUND, ApiError
from .jetstream_read import Patience, api_answer
from .jetstream_streams import (
    rejected_config,
    signals_config,
    stream_config,
    stream_name,
    task_findings,
    tasks_config,
    tasks_name,
)
from .nats_connection import Connection
from .nats_waiting import NoReply
from .safety import Safety, ServerFacts, assess, level_of
from .signals_queue import SignalQueue

MONITOR_TRY_S = 5.0

# nats-server 2.15.1
_NOT_CLUSTERED = 10074
_NO_PEERS = 10005
_NAME_IN_USE = 10058


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
    """What `init` did: for the journal stream, and for the `others`."""

    others: tuple[Made, ...] = ()


class _Info(Struct, frozen=True):
    config: dict[str, Any] = {}
    state: dict[str, Any] = {}
    cluster: dict[str, Any] = {}
    error: ApiError | None = None


_info = msgspec.json.Decoder(_Info)
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
    url: str, *, namespace: str = "runfold", replicas: int | None = None, creds: str | None = None
) -> Provisioned:
    """Make the namespace's streams unless they exist. `replicas` None: as many as the journal
    stream has; 3 on a cluster, else 1, where there is none yet."""
    check_namespace(namespace)
    connection = Connection(url, namespace=namespace, creds=creds)
    await connection.open()
    try:
        journal = await _ensure(connection, stream_config(namespace, replicas or 3), replicas)
        others: list[Made] = []
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
        others=tuple(others),
    )


async def _ensure(connection: Connection, wanted: dict[str, Any], replicas: int | None) -> Made:
    found = await _look_up(connection, wanted["name"])
    if found is not None:
        return _existing(wanted, found, any_replicas=replicas is None)
    made = await _create(connection, wanted)
    if _failed(made, _NOT_CLUSTERED) and replicas is None:
        wanted["num_replicas"] = 1
        made = await _create(connection, wanted)
    if _failed(made, _NAME_IN_USE):  # somebody else's `init` was quicker
        found = await _look_up(connection, wanted["name"])
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
    stream = stream_name(check_namespace(namespace))
    connection = Connection(url, namespace=namespace, creds=creds)
    await connection.open()
    try:
        found = await _look_up(connection, stream)
        tasks = await _look_up(connection, tasks_name(namespace))
        version = connection.server_version
    finally:
        await connection.close()
    if found is None:
        raise NotProvisioned(
            f"the NATS server at {connection.shown} has no stream {stream}",
            hint=f"run `runfold init --store {connection.shown}` once",
        )
    servers: list[ServerFacts] = []
    unread: list[str] = []
    for address in (monitor_url or "").split(","):
        if address.strip():
            try:
                servers.append(await asyncio.to_thread(_read_varz, address.strip()))
            except (OSError, ValueError, HTTPException, msgspec.MsgspecError) as error:
                unread.append(f"{address.strip()}: {error}")
    journals = assess(
        namespace,
        found.config,
        cluster=found.cluster,
        version=version,
        servers=tuple(servers),
        unread=tuple(unread),
    )
    findings = (*journals.findings, *task_findings(namespace, tasks.config if tasks else None))
    return msgspec.structs.replace(journals, findings=findings, level=level_of(findings))


def _existing(wanted: dict[str, Any], found: _Info, *, any_replicas: bool) -> Made:
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


def _failed(made: _Info, err_code: int) -> bool:
    return made.error is not None and made.error.err_code == err_code


def _refused(shown: str, wanted: dict[str, Any], error: ApiError) -> StoreUnavailable:
    hint = ""
    if error.err_code in (_NOT_CLUSTERED, _NO_PEERS):
        hint = (
            f"{wanted['num_replicas']} servers must be up; or choose: `runfold init --replicas 1`"
        )
    return StoreUnavailable(
        f"the NATS server at {shown} does not make stream {wanted['name']}: {error}", hint=hint
    )


async def _look_up(connection: Connection, stream: str) -> _Info | None:
    """The stream's config and state; None if there is no such stream."""
    found = await _call(connection, f"$JS.API.STREAM.INFO.{stream}", b"")
    if _failed(found, STREAM_NOT_FOUND):
        return None
    if found.error is not None:
        raise StoreUnavailable(f"stream {stream} could not be looked up: {found.error}")
    return found


async def _create(connection: Connection, config: dict[str, Any]) -> _Info:
    return await _call(connection, f"$JS.API.STREAM.CREATE.{config['name']}", _encode(config))


async def _call(connection: Connection, subject: str, payload: bytes) -> _Info:
    """An answer of the API, tried again until one comes: a cluster that starts has no leader."""
    patience = Patience(f"no answer to {subject}")
    while True:
        reply = await connection.request(subject, payload, timeout_s=READ_TRY_S)
        if isinstance(reply, NoReply):
            if reply.nobody:
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
        if answer.error.err_code == _NOT_CLUSTERED:
            return answer
        await patience.pause(str(answer.error))


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
