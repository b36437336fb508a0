"""Store: the API of one stream: asked until it answers; its durable consumers; messages stored.

Consumers are made here and nowhere else: nats-server 2.15.1 keeps one that it rejected as
overlapping assigned in a cluster (#8123).
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
from msgspec import Struct

from ..errors import NotProvisioned, PermissionDenied, StoreUnavailable
from ..limits import APPEND_TRY_S, READ_TRY_S
from ..store import Unknown
from .jetstream_answers import STREAM_NOT_FOUND, ApiAnswer, read_ack
from .jetstream_read import Patience, api_answer
from .nats_connection import Connection
from .nats_waiting import NoReply

log = logging.getLogger("runfold")

# nats-server 2.15.1
_CONSUMER_NOT_FOUND = 10014
_CONSUMER_EXISTS = 10148


class ConsumerConfig(Struct, frozen=True):
    """What we ask for, and compare with what is there."""

    ack_wait: int = 0
    filter_subject: str = ""
    ack_policy: str = "explicit"
    max_deliver: int = -1
    max_ack_pending: int = 0
    max_waiting: int = 0
    inactive_threshold: int = 0


class Position(Struct, frozen=True):
    stream_seq: int = 0


class Consumer(ApiAnswer, frozen=True):
    """`delivered`: up to which message; `ack_floor`: up to which all are settled."""

    config: ConsumerConfig = ConsumerConfig()
    delivered: Position = Position()
    ack_floor: Position = Position()
    num_pending: int = 0
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0


class StreamState(Struct, frozen=True):
    messages: int = 0
    first_seq: int = 0
    last_seq: int = 0
    subjects: dict[str, int] = {}


class StreamInfo(ApiAnswer, frozen=True):
    total: int = 0
    state: StreamState = StreamState()


_consumer = msgspec.json.Decoder(Consumer)
_stream = msgspec.json.Decoder(StreamInfo)
_encode = msgspec.json.Encoder().encode

Found = TypeVar("Found", bound=ApiAnswer)


class StreamApi:
    """Every call raises NotProvisioned where there is no such stream, PermissionDenied, and
    StoreUnavailable when no answer comes within a bound."""

    def __init__(self, connection: Connection, namespace: str, stream: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self.stream = stream

    # ---- asking -----------------------------------------------------------------------------

    async def call(
        self, decoder: msgspec.json.Decoder[Found], subject: str, request: bytes
    ) -> Found:
        """An answer of the API, tried again until there is one that no retry changes."""
        patience = Patience(f"no answer to {subject}")
        while True:
            reply = await self._connection.request(subject, request, timeout_s=READ_TRY_S)
            if isinstance(reply, NoReply):
                await patience.pause(reply.cause)
                continue
            answer = api_answer(decoder, reply)
            error = answer.error
            if error is None or (error.code < 500 and error.code != 429):
                if error is not None and error.err_code == STREAM_NOT_FOUND:
                    raise self._not_provisioned()
                return answer
            await patience.pause(str(error))

    async def info(self, subjects: str = "", offset: int = 0) -> StreamInfo:
        """The stream; `subjects`: a filter for those that are to be counted."""
        request = _encode({"subjects_filter": subjects, "offset": offset}) if subjects else b""
        found = await self.call(_stream, f"$JS.API.STREAM.INFO.{self.stream}", request)
        if found.error is not None:
            raise StoreUnavailable(f"stream {self.stream} could not be looked up: {found.error}")
        return found

    def _not_provisioned(self) -> NotProvisioned:
        url = self._connection.shown
        option = "" if self._namespace == "runfold" else f" --namespace {self._namespace}"
        return NotProvisioned(
            f"the NATS server at {url} has no stream {self.stream}",
            hint=f"run `runfold init --store {url}{option}` again: it adds what is missing",
        )

    # ---- storing ----------------------------------------------------------------------------

    async def store(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, what: str
    ) -> None:
        """Stored when it returns, perhaps twice. `what` it is, for the error."""
        patience = Patience(f"{what} could not be stored in stream {self.stream}")
        while True:
            reply = await self._connection.request(
                subject, payload, dict(headers) if headers else None, timeout_s=APPEND_TRY_S
            )
            if isinstance(reply, NoReply):
                if reply.nobody:
                    await self._check_provisioned()
                await patience.pause(reply.cause)
                continue
            answer = read_ack(reply.data, stream=self.stream, expected=0)
            if not isinstance(answer, Unknown):
                return
            await patience.pause(answer.cause)

    async def _check_provisioned(self) -> None:
        try:
            await self.info()
        except PermissionDenied:
            return  # not this user's to see: the caller goes on trying

    # ---- consumers --------------------------------------------------------------------------

    async def ensure(self, name: str, wanted: ConsumerConfig, *, change: bool = True) -> float:
        """The durable consumer is there; the ack wait in force, in seconds. A different one is
        changed, if `change` and where that is permitted."""
        patience = Patience(f"consumer {name} could not be made on stream {self.stream}")
        while True:
            found, seen = await self._seen(name)
            if found is not None and (found == wanted or not change):
                return found.ack_wait / 1e9
            try:
                made = await self._put(name, wanted, "create" if found is None else "update", seen)
            except PermissionDenied:
                if found is None:
                    raise
                return found.ack_wait / 1e9
            if made.error is None:
                if found is not None:
                    before_s, now_s = found.ack_wait / 1e9, wanted.ack_wait / 1e9
                    log.warning(
                        "consumer %s was changed to what this process is set to: its ack wait is "
                        "%g s, before %g s",
                        name,
                        now_s,
                        before_s,
                    )
                return made.config.ack_wait / 1e9
            if made.error.err_code not in (_CONSUMER_EXISTS, _CONSUMER_NOT_FOUND):
                raise StoreUnavailable(
                    f"stream {self.stream} does not make consumer {name}: {made.error}",
                    hint="`nats consumer ls` shows who else reads the stream",
                )
            await patience.pause(str(made.error))  # somebody else was quicker

    async def _seen(self, name: str) -> tuple[ConsumerConfig | None, bool]:
        """What there is, and whether that could be seen."""
        try:
            found = await self.look_up(name)
        except PermissionDenied:
            return None, False
        return (found.config if found else None), True

    async def _put(self, name: str, config: ConsumerConfig, action: str, seen: bool) -> Consumer:
        request = {
            "stream_name": self.stream,
            "action": action if seen else "",  # nats-server 2.15.1: make or change
            "config": {
                "durable_name": name,
                "deliver_policy": "all",
                "replay_policy": "instant",
                **msgspec.structs.asdict(config),
            },
        }
        subject = f"$JS.API.CONSUMER.CREATE.{self.stream}.{name}.{config.filter_subject}"
        return await self.call(_consumer, subject, _encode(request))

    async def look_up(self, name: str) -> Consumer | None:
        found = await self.call(_consumer, f"$JS.API.CONSUMER.INFO.{self.stream}.{name}", b"")
        if found.error is None:
            return found
        if found.error.err_code == _CONSUMER_NOT_FOUND:
            return None
        raise StoreUnavailable(f"consumer {name} could not be looked up: {found.error}")
