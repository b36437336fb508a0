"""Store: the API of the TASKS stream, and an agent's three consumers on it: one for each priority.

Made here and nowhere else: nats-server 2.15.1 keeps one that it rejected as overlapping assigned in
a cluster (#8123).
"""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
from msgspec import Struct

from ..errors import NotProvisioned, PermissionDenied, StoreUnavailable
from ..limits import READ_TRY_S
from .jetstream_answers import STREAM_NOT_FOUND, ApiError
from .jetstream_read import Patience, api_answer
from .jetstream_streams import tasks_name
from .nats_connection import Connection
from .nats_waiting import NoReply
from .tasks_message import PRIORITIES, Priority, consumer_filter, consumer_name

log = logging.getLogger("runfold")

ACK_PENDING_MAX = 100_000
"""Tasks of an agent at work in the whole fleet. At the limit the server delivers no more and says
nothing (its default is 1 000): so far above what any fleet works on at once."""

PULLS_MAX = 2048
"""Pulls that wait at one consumer: a few for each worker of the fleet (default 512). One too many
is answered with 409, or, mostly, swallowed in silence (nats-server 2.15.1)."""

# nats-server 2.15.1
_CONSUMER_NOT_FOUND = 10014
_CONSUMER_EXISTS = 10148


class ApiAnswer(Struct, frozen=True):
    """What every answer of JetStream's API may hold."""

    error: ApiError | None = None


class _Config(Struct, frozen=True):
    ack_wait: int = 0
    filter_subject: str = ""
    ack_policy: str = ""
    max_deliver: int = 0
    max_ack_pending: int = 0
    max_waiting: int = 0
    inactive_threshold: int = 0


class Consumer(ApiAnswer, frozen=True):
    config: _Config = _Config()
    num_pending: int = 0
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0


_consumer = msgspec.json.Decoder(Consumer)
_encode = msgspec.json.Encoder().encode

Found = TypeVar("Found", bound=ApiAnswer)


class Consumers:
    """Of the agents of a namespace."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._stream = tasks_name(namespace)

    async def ensure(self, agent: str, ack_wait_s: float) -> float:
        """See TaskQueue.ensure."""
        waits = [await self._ensure(agent, priority, ack_wait_s) for priority in PRIORITIES]
        return min(waits)

    async def _ensure(self, agent: str, priority: Priority, ack_wait_s: float) -> float:
        name = consumer_name(agent, priority)
        wanted = _Config(
            ack_wait=int(ack_wait_s * 1e9),
            filter_subject=consumer_filter(self._namespace, agent, priority),
            ack_policy="explicit",
            max_deliver=-1,
            max_ack_pending=ACK_PENDING_MAX,
            max_waiting=PULLS_MAX,
        )
        patience = Patience(f"consumer {name} could not be made on stream {self._stream}")
        while True:
            found, seen = await self._seen(name)
            if found == wanted:
                return ack_wait_s
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
                        "consumer %s was changed to what this worker is set to: its ack wait is "
                        "%g s, before %g s",
                        name,
                        now_s,
                        before_s,
                    )
                return made.config.ack_wait / 1e9
            if made.error.err_code not in (_CONSUMER_EXISTS, _CONSUMER_NOT_FOUND):
                raise StoreUnavailable(
                    f"stream {self._stream} does not make consumer {name}: {made.error}",
                    hint="`nats consumer ls` shows who else reads the stream",
                )
            await patience.pause(str(made.error))  # somebody else was quicker

    async def _seen(self, name: str) -> tuple[_Config | None, bool]:
        """What there is, and whether that could be seen."""
        try:
            found = await self.look_up(name)
        except PermissionDenied:
            return None, False
        return (found.config if found else None), True

    async def _put(self, name: str, config: _Config, action: str, seen: bool) -> Consumer:
        request = {
            "stream_name": self._stream,
            "action": action if seen else "",  # nats-server 2.15.1: make or change
            "config": {
                "durable_name": name,
                "deliver_policy": "all",
                "replay_policy": "instant",
                **msgspec.structs.asdict(config),
            },
        }
        subject = f"$JS.API.CONSUMER.CREATE.{self._stream}.{name}.{config.filter_subject}"
        return await self.call(_consumer, subject, _encode(request))

    async def look_up(self, name: str) -> Consumer | None:
        found = await self.call(_consumer, f"$JS.API.CONSUMER.INFO.{self._stream}.{name}", b"")
        if found.error is None:
            return found
        if found.error.err_code == _CONSUMER_NOT_FOUND:
            return None
        raise StoreUnavailable(f"consumer {name} could not be looked up: {found.error}")

    async def call(
        self, decoder: msgspec.json.Decoder[Found], subject: str, request: bytes
    ) -> Found:
        """An answer of the API, tried again until there is one that no retry changes. Raises
        NotProvisioned, PermissionDenied, StoreUnavailable."""
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

    def _not_provisioned(self) -> NotProvisioned:
        url = self._connection.shown
        option = "" if self._namespace == "runfold" else f" --namespace {self._namespace}"
        return NotProvisioned(
            f"the NATS server at {url} has no stream {self._stream}",
            hint=f"run `runfold init --store {url}{option}` again: it adds what is missing",
        )
