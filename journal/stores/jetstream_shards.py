"""Store: one of a namespace's journal streams, with the runs whose ids put them there (R74)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime, timedelta

import msgspec

from ..grouping import GroupCommit
from ..ids import RunId, subject_token
from ..limits import APPEND_TRY_S
from ..shards import shard_of
from ..store import Stamp
from .jetstream_answers import ApiAnswer
from .jetstream_headers import TIME, server_time
from .jetstream_lane import Lane
from .jetstream_listing import HEADS_PAGE, Listing
from .jetstream_raw import RawJournals
from .jetstream_read import Patience, Reader, asked_of
from .jetstream_streams import stream_name, subject_prefix
from .nats_connection import Connection


class _Purged(ApiAnswer, frozen=True):
    success: bool = False


class _Clock(ApiAnswer, frozen=True):
    """Of STREAM.INFO: the time on the server's clock as it answered."""

    ts: str = ""


_clock = msgspec.json.Decoder(_Clock)
_purged = msgspec.json.Decoder(_Purged)
_encode = msgspec.json.Encoder().encode


class Shard:
    """One journal stream: the runs whose ids hash to `index`. `alone`: it has one replica."""

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        index: int,
        shards: int,
        commit: GroupCommit = "off",
        *,
        alone: bool = False,
    ) -> None:
        def owns(run_id: RunId) -> bool:
            return shard_of(run_id, shards) == index

        self._connection = connection
        self.stream = stream_name(namespace, index)
        self.prefix = subject_prefix(namespace, index)
        self.reader = Reader(connection, self.stream)
        self.alone = alone
        # A page of a list takes its share of each, more or less.
        page = HEADS_PAGE if shards == 1 else max(1, HEADS_PAGE * 5 // 4 // shards)
        self.listing = Listing(connection, self.stream, self.prefix, owns, page)
        self.journals = RawJournals(connection, self.stream, self.prefix, owns)
        self.lane = Lane(connection, self.stream, commit)

    def subject(self, run_id: RunId) -> str:
        return self.prefix + subject_token(run_id)

    # ---- purging ----------------------------------------------------------------------------

    async def stamp(self, run_id: RunId) -> Stamp:
        """When the run's last message was stored, and now, as the servers' clocks have it."""
        patience = Patience(f"run {run_id} could not be looked up in stream {self.stream}")
        last = await self.reader.last(self.subject(run_id), patience)
        now = await self._now()
        stored = server_time(last.headers.get(TIME, "")) if last is not None else None
        return Stamp(stored or now, now)

    async def ended(
        self, age_s: float, statuses: frozenset[str], after: RunId | None
    ) -> AsyncGenerator[RunId, None]:
        """See Listing."""
        before = await self._now() - timedelta(seconds=age_s)
        async for run_id in self.listing.ended(statuses, before, after):
            yield run_id

    async def _now(self) -> datetime:
        patience = Patience(f"stream {self.stream} could not be asked for the time")
        subject = f"$JS.API.STREAM.INFO.{self.stream}"
        while True:
            clock = await asked_of(self._connection, self.stream, _clock, subject, b"", patience)
            if (now := server_time(clock.ts)) is not None:
                return now
            await patience.pause("it does not say")

    async def check_trim(self) -> None:
        """A purge of nothing: of a subject that no run has, up to the first sequence."""
        await self._purge(f"{self.prefix}~", 1, f"stream {self.stream} could not be asked to purge")

    async def trim(self, run_id: RunId, before: int) -> None:
        # nats-server 2.15.1: a purge with `seq` keeps the message at that sequence. One that comes
        # late takes nothing more: sequences only grow.
        await self._purge(self.subject(run_id), before, f"run {run_id} could not be trimmed")

    async def _purge(self, subject: str, before: int, problem: str) -> None:
        assert before > 0  # 0 is no bound to the server: all of the subject would go
        request = _encode({"filter": subject, "seq": before})
        patience = Patience(problem)
        while True:
            purged = await asked_of(
                self._connection,
                self.stream,
                _purged,
                f"$JS.API.STREAM.PURGE.{self.stream}",
                request,
                patience,
                timeout_s=APPEND_TRY_S,
            )
            if purged.success:
                return
            await patience.pause("no success")
