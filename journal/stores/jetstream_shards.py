"""Store: one of a namespace's journal streams, with the runs whose ids put them there (R74)."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ..ids import RunId, subject_token
from ..limits import APPEND_TRY_S
from ..shards import shard_of
from .jetstream_answers import ApiError
from .jetstream_listing import Listing
from .jetstream_raw import RawJournals
from .jetstream_read import Patience, Reader, api_answer, raise_if_gone
from .jetstream_streams import stream_name, subject_prefix
from .nats_connection import Connection
from .nats_waiting import NoReply


class _Purged(Struct, frozen=True):
    success: bool = False
    error: ApiError | None = None


_purged = msgspec.json.Decoder(_Purged)
_encode = msgspec.json.Encoder().encode


class Shard:
    """One journal stream: the runs whose ids hash to `index`."""

    def __init__(self, connection: Connection, namespace: str, index: int, shards: int) -> None:
        def owns(run_id: RunId) -> bool:
            return shard_of(run_id, shards) == index

        self._connection = connection
        self.stream = stream_name(namespace, index)
        self.prefix = subject_prefix(namespace, index)
        self.reader = Reader(connection, self.stream)
        self.listing = Listing(connection, self.stream, self.prefix, owns)
        self.journals = RawJournals(connection, self.stream, self.prefix, owns)

    def subject(self, run_id: RunId) -> str:
        return self.prefix + subject_token(run_id)

    async def trim(self, run_id: RunId, before: int) -> None:
        # nats-server 2.15.1: a purge with `seq` keeps the message at that sequence.
        request = _encode({"filter": self.subject(run_id), "seq": before})
        patience = Patience(f"run {run_id} could not be trimmed")
        while True:
            reply = await self._connection.request(
                f"$JS.API.STREAM.PURGE.{self.stream}", request, timeout_s=APPEND_TRY_S
            )
            if isinstance(reply, NoReply):
                await patience.pause(reply.cause)
                continue
            purged = api_answer(_purged, reply)
            if purged.error is None and purged.success:
                return
            error = purged.error or ApiError(description="no success")
            raise_if_gone(error, self.stream)
            await patience.pause(str(error))
