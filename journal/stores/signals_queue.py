"""Store: the SIGNALS stream: signals from anybody, kept until journalled or refused (PROTOCOL 1).

One durable consumer is shared by all bridges. A message leaves the stream only by an `ack`; so
whoever takes it acks after its record stands in the journal and its task in TASKS, or after its
refusal stands in REJECTED, and nobody else ever does. A delivery that was overtaken by another one
may be acked for the same reason: what it says stands, whoever wrote it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from datetime import datetime

from msgspec import Struct

from ..errors import PermissionDenied
from ..ids import RunId
from ..limits import APPEND_TRY_S, SIGNAL_BYTES_MAX
from ..signal_address import SignalAddress, kept_address, run_filters
from .delivery import ACK, IN_PROGRESS, nak, read_delivery
from .jetstream_read import Patience, Reader
from .jetstream_streams import signals_name
from .nats_connection import Connection
from .nats_waiting import Incoming, NoReply
from .stream_api import ConsumerConfig, StreamApi
from .tasks_pull import Puller

log = logging.getLogger("runfold")

CONSUMER = "bridge"
ACK_WAIT_S = 30.0
ACK_PENDING_MAX = 100_000
"""At the limit the server delivers nothing more, and says nothing; what was put off counts."""

PULLS_MAX = 512
REQUEST_HEADER = "runfold-request"


class KeptSignal(Struct, frozen=True, kw_only=True):
    """A message of the stream, delivered. `subject` without `ns.signal.`; `delivery` from 1;
    `data` is cut where it exceeds what a signal may have, `size` is what it was."""

    subject: str
    data: bytes
    size: int
    headers: Mapping[str, str]
    sequence: int
    delivery: int
    stamp: int
    at: datetime
    reply: str

    def address(self) -> SignalAddress:
        """Raises InvalidId."""
        return kept_address(self.subject)

    @property
    def request_id(self) -> str | None:
        """As the publisher's header gives it; None without one."""
        return header_of(self.headers, REQUEST_HEADER) or None

    @property
    def key(self) -> str:
        """Of this message and no other, also where the stream was made anew."""
        return f"sig:{self.sequence}:{self.stamp}"


class SignalBacklog(Struct, frozen=True, kw_only=True):
    """`waiting`: messages in the stream; of those `in_progress` are at work or put off for a
    moment. `pulls`: requests of bridges for more; 0: no bridge is there."""

    waiting: int
    in_progress: int = 0
    redelivered: int = 0
    pulls: int = 0


def header_of(headers: Mapping[str, str], wanted: str) -> str:
    """The header's value, whatever case its publisher wrote the name in; "" without one."""
    return next((value for name, value in headers.items() if name.lower() == wanted), "")


class SignalQueue:
    """The signals of a namespace. Calls raise as those of StreamApi."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._prefix = f"{namespace}.signal."
        self.stream = signals_name(namespace)
        self._api = StreamApi(connection, namespace, self.stream)
        self._reader = Reader(connection, self.stream)

    async def ensure(self) -> float:
        """The consumer is there; its ack wait in force. `runfold init` makes it; a bridge does
        where it may and it is missing."""
        wanted = ConsumerConfig(
            ack_wait=int(ACK_WAIT_S * 1e9),
            filter_subject=f"{self._prefix}>",
            max_ack_pending=ACK_PENDING_MAX,
            max_waiting=PULLS_MAX,
        )
        return await self._api.ensure(CONSUMER, wanted)

    def pulling(
        self, on_signal: Callable[[KeptSignal], None]
    ) -> AbstractAsyncContextManager[Puller[KeptSignal]]:
        """A puller of the consumer. `on_signal` gets what is delivered as it comes, late ones too;
        it must not block."""

        def warn(text: str) -> None:
            log.warning("not a delivery of stream %s: %s", self.stream, text)

        return Puller(
            self._connection,
            f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{CONSUMER}",
            self._read,
            on_signal,
            warn,
        ).listening()

    def _read(self, message: Incoming) -> KeptSignal:
        delivery = read_delivery(message.reply)
        return KeptSignal(
            subject=message.subject.removeprefix(self._prefix),
            data=message.data[: SIGNAL_BYTES_MAX + 1],
            size=len(message.data),
            headers=message.headers,
            sequence=delivery.sequence,
            delivery=delivery.count,
            stamp=delivery.stamp,
            at=delivery.at,
            reply=message.reply,
        )

    # ---- settling ---------------------------------------------------------------------------

    async def ack(self, signal: KeptSignal) -> bool:
        """It is journalled, or refused and kept so. True: the server has confirmed it."""
        reply = await self._connection.request(signal.reply, ACK, timeout_s=APPEND_TRY_S)
        return not isinstance(reply, NoReply)

    def nak(self, signal: KeptSignal, delay_s: float) -> None:
        """Deliver it again after a while. Fire and forget: else the ack wait does it."""
        self._connection.send(signal.reply, nak(delay_s))

    def in_progress(self, signal: KeptSignal) -> None:
        """The ack wait begins anew. Fire and forget."""
        self._connection.send(signal.reply, IN_PROGRESS)

    # ---- looking ----------------------------------------------------------------------------

    async def first(self, run: RunId, after: int) -> int:
        """The sequence of the run's first signal behind `after` that is still here; 0: none."""
        patience = Patience(f"the signals of run {run} could not be looked up")
        found = [
            await self._reader.first(self._prefix + rest, after, patience)
            for rest in run_filters(run)
        ]
        return min((one.seq for one in found if one is not None), default=0)

    async def backlog(self) -> SignalBacklog:
        waiting = (await self._api.info()).state.messages
        try:
            found = await self._api.look_up(CONSUMER)
        except PermissionDenied:  # how many wait is what one asks for
            found = None
        if found is None:
            return SignalBacklog(waiting=waiting)
        return SignalBacklog(
            waiting=waiting,
            in_progress=found.num_ack_pending,
            redelivered=found.num_redelivered,
            pulls=found.num_waiting,
        )
