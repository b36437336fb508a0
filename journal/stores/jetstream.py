"""Store: journals in JetStream streams, one subject per run; shared by a fleet (R12, R13, R17)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import Self

import msgspec
from msgspec import Struct

from ..claims import Answer
from ..codec import Entry
from ..errors import RunfoldError
from ..ids import RunId, valid_name
from ..ids import namespace as check_namespace
from ..limits import ASK_TRY_S
from ..observing import UNOBSERVED, Observer
from ..records import Record
from ..shards import shard_of
from ..store import AppendAnswer, Held, Loaded, RawRecord, Stamp
from .jetstream_headers import COMMIT, EXPECTED, PURGED_TYPE, RECORD_TYPE, RUN_STATUS, SELF, TRACE
from .jetstream_hints import Hints
from .jetstream_lane import Outgoing, check_size, commit_for, commit_wanted
from .jetstream_lasts import last_records
from .jetstream_listing import Head, merged
from .jetstream_raw import RawJournals
from .jetstream_read import Patience, Stored, place
from .jetstream_shards import Shard
from .nats_connection import Connection
from .nats_service import Asked, Service
from .nats_waiting import NoReply, Reply
from .rejected import Rejected
from .safety import Safety, assess, joined
from .signals_queue import SignalQueue
from .stream_lookup import StreamInfo, journal_streams
from .tasks import TaskQueue

log = logging.getLogger("runfold")


class _Question(Struct, frozen=True):
    run: str
    claim: int


class _HeldAnswer(Struct, frozen=True):
    held: bool


_decode_question = msgspec.json.Decoder(_Question).decode
_decode_held = msgspec.json.Decoder(_HeldAnswer).decode
_encode = msgspec.json.Encoder().encode


class JetStreamStore:
    """`async with JetStreamStore(url) as store:`; `url` may name several servers, with commas.

    Tokens are stream sequences. Opening raises NotProvisioned where `runfold init` has not been.
    """

    shared = True
    observer: Observer = UNOBSERVED

    def __init__(self, url: str, *, namespace: str = "runfold", creds: str | None = None) -> None:
        self._namespace = check_namespace(namespace)
        self.safety: Safety | None = None
        self._connection = Connection(url, namespace=namespace, creds=creds)
        self._shards = (Shard(self._connection, namespace, 0, 1),)
        self._hints = Hints(self._connection, namespace)
        self._tasks = TaskQueue(self._connection, namespace)
        self.signals = SignalQueue(self._connection, namespace)
        self.rejected = Rejected(self._connection, namespace)

    async def __aenter__(self) -> Self:
        await self._connection.open()
        try:
            await self._find_shards()
        except BaseException:
            await self._connection.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._connection.close()

    async def _find_shards(self) -> None:
        wanted = commit_wanted()
        streams = await journal_streams(self._connection, self._namespace)
        self._shards = tuple(
            Shard(
                self._connection,
                self._namespace,
                index,
                len(streams),
                commit_for(info.config, wanted),
                alone=info.config.get("num_replicas") == 1,
            )
            for index, info in enumerate(streams)
        )
        self._say_degraded(streams)

    def _say_degraded(self, streams: Sequence[StreamInfo]) -> None:
        """R14: where the streams' own settings can lose acknowledged records, whoever opens the
        store is told. The sync setting shows only on monitoring ports: `runfold doctor`."""
        version = self._connection.server_version
        self.safety = joined(
            [
                assess(
                    self._namespace,
                    info.config,
                    shard=index,
                    cluster=info.cluster,
                    version=version,
                    servers=(),
                )
                for index, info in enumerate(streams)
            ]
        )
        for finding in self.safety.findings:
            if finding.level == "degraded":
                log.warning("storage DEGRADED: %s: %s", finding.what, finding.why)

    @property
    def degraded(self) -> tuple[str, ...]:
        """What of that was said."""
        found = self.safety.findings if self.safety else ()
        return tuple(finding.what for finding in found if finding.level == "degraded")

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Each journal stream by itself."""
        return self._shards

    @property
    def journals(self) -> tuple[RawJournals, ...]:
        """All that was appended, of each journal stream."""
        return tuple(shard.journals for shard in self._shards)

    def _shard(self, run_id: RunId) -> Shard:
        return self._shards[shard_of(run_id, len(self._shards))]

    # ---- journals ---------------------------------------------------------------------------

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        shard = self._shard(run_id)
        return await shard.reader.load(shard.subject(run_id), run_id, after)

    def pages(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Loaded, None]:
        shard = self._shard(run_id)
        return shard.reader.entries(shard.subject(run_id), run_id, after)

    async def resume(self, run_id: RunId) -> Loaded | None:
        """With a restart point: the first record, then everything from that commit on, so that
        between the first two entries ordinals and hashes have a gap. Else as `load`."""
        shard = self._shard(run_id)
        return await shard.reader.resume(shard.subject(run_id), run_id)

    def stored(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[Sequence[RawRecord], None]:
        """The run's messages behind the token `after` as they stand, in pages."""
        return self._shard(run_id).journals.of(run_id, after)

    async def tail(self, run_id: RunId) -> int:
        """Of its last record, as the leader, or who takes himself for it, has it; 0 without one."""
        last = await self._last(run_id)
        return last.seq if last is not None else 0

    async def has_tombstone(self, run_id: RunId) -> bool:
        """Whether the run was purged, though records of it may be left."""
        last = await self._last(run_id)
        return last is not None and last.headers.get(RECORD_TYPE) == PURGED_TYPE

    async def _last(self, run_id: RunId) -> Stored | None:
        shard = self._shard(run_id)
        patience = Patience(f"run {run_id} could not be looked up in stream {shard.stream}")
        return await shard.reader.last(shard.subject(run_id), patience)

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        # Fresh each time, and no Nats-Msg-Id: it proves nothing (PROTOCOL 3). The name of EXPECTED
        # in lower case, or an empty value, would be no check at all (nats-server 2.15.1).
        headers = {EXPECTED: str(expected), RECORD_TYPE: entry.type}
        if entry.status is not None:
            headers[RUN_STATUS] = entry.status
        if entry.commit:
            headers[COMMIT] = str(entry.commit) if entry.commit > 0 else SELF
        if entry.trace:
            headers[TRACE] = entry.trace
        shard = self._shard(run_id)
        record = Outgoing(shard.subject(run_id), entry.raw, headers, expected)
        check_size(run_id, record, self._connection.max_payload)
        return await shard.lane.append(record)

    async def runs(self, *, after: RunId | None = None) -> AsyncIterator[RunId]:
        async for run_id in merged([shard.listing.runs(after) for shard in self._shards]):
            yield run_id

    async def heads(
        self, *, status: frozenset[str] | None = None, after: RunId | None = None
    ) -> AsyncIterator[tuple[RunId, str | None]]:
        """Runs in the order of their ids, with the status word of their last record: `purged` of a
        tombstone; None where it has none. `status`: only those, and those without a word."""
        async for run_id, head in self.lasts(status, after):
            yield run_id, head.word

    async def lasts(
        self,
        status: frozenset[str] | None,
        after: RunId | None,
        unread: set[str] | None = None,
    ) -> AsyncIterator[tuple[RunId, Head]]:
        """As `heads`, with all that is known of it; `unread`: as in Listing.heads."""
        listings = [shard.listing.heads(status, after, unread) for shard in self._shards]
        async for head in merged(listings):
            yield head

    async def load_listed(self, run_id: RunId, head: Head) -> Loaded:
        """As `load`, of a run that a listing just named."""
        shard = self._shard(run_id)
        if shard.alone:  # not needed for safety: else what the listing named may be a moment old
            return await shard.reader.listed(shard.subject(run_id), run_id, head.seq)
        return await self.load(run_id)

    async def last_records(self, run_ids: Iterable[RunId]) -> dict[RunId, Record]:
        """Of many runs at once; from a moment ago, and not surely of all: only to be faster."""
        by_shard: dict[str, dict[str, RunId]] = {}
        for run_id in run_ids:
            shard = self._shard(run_id)
            by_shard.setdefault(shard.stream, {})[shard.subject(run_id)] = run_id
        found: dict[RunId, Record] = {}
        for stream, subjects in by_shard.items():
            found |= await last_records(self._connection, stream, subjects)
        return found

    async def stamp(self, run_id: RunId) -> Stamp:
        return await self._shard(run_id).stamp(run_id)

    async def ended(
        self, *, age_s: float, statuses: frozenset[str], after: RunId | None = None
    ) -> AsyncIterator[RunId]:
        async for run_id in merged([shard.ended(age_s, statuses, after) for shard in self._shards]):
            yield run_id

    async def check_trim(self) -> None:
        for shard in self._shards:
            await shard.check_trim()

    async def trim(self, run_id: RunId, *, before: int) -> None:
        await self._shard(run_id).trim(run_id, before)

    def where(self, run_id: RunId, index: int, entry: Entry | None) -> str:
        shard = self._shard(run_id)
        if entry is not None and entry.position:
            return place(shard.stream, shard.subject(run_id), entry.position)
        return f"{self.journal_of(run_id)}, record {index + 1}"

    def journal_of(self, run_id: RunId) -> str:
        """In which stream the run is, or would be, and under which subject; for people."""
        shard = self._shard(run_id)
        return f"stream {shard.stream}, subject {shard.subject(run_id)}"

    # ---- waking and telling -----------------------------------------------------------------

    @property
    def tasks(self) -> TaskQueue:
        return self._tasks

    async def wake(self, run_id: RunId, agent: str, *, cause: int, priority: int = 0) -> None:
        await self._tasks.publish(run_id, agent, cause=cause, priority=priority)

    async def task_cause(self, run_id: RunId, agent: str) -> int:
        return await self._tasks.cause(run_id, agent) or 0

    async def wake_at(
        self, run_id: RunId, agent: str, *, at: datetime, cause: int, priority: int = 0
    ) -> None:
        await self._tasks.schedule(run_id, agent, at=at, cause=cause, priority=priority)

    async def preview(self, run_id: RunId, text: str) -> None:
        """A piece of what the model says, for whoever watches now; cut at 64 KiB."""
        await self._hints.preview(run_id, text)

    def previews(
        self, run_id: RunId, handle: Callable[[str], None]
    ) -> AbstractAsyncContextManager[None]:
        """Hear them."""
        return self._hints.previews(run_id, handle)

    async def notify(self, run_id: RunId, payload: bytes) -> None:
        """Tell whoever holds the run that something happened to it. Only to be faster."""
        await self._hints.notify(run_id, payload)

    def notices(self, handle: Callable[[RunId, bytes], None]) -> AbstractAsyncContextManager[None]:
        """Hear that of all runs. `handle` must not raise, nor block."""
        return self._hints.notices(handle)

    def appended(
        self, run_id: RunId, handle: Callable[[str | None], None]
    ) -> AbstractAsyncContextManager[None]:
        """Hear of appends at once, by status words: hints to load, of those refused, too."""
        subject = self._shard(run_id).subject(run_id)
        return self._connection.listening(subject, lambda it: handle(it.headers.get(RUN_STATUS)))

    def serving(
        self, service: Service, handle: Callable[[Asked], Awaitable[None]]
    ) -> AbstractAsyncContextManager[None]:
        """Answer requests as a NATS service while inside; see Connection.serving."""
        return self._connection.serving(service, handle)

    def reporting(
        self, report: Callable[[bytes], bytes | None], topic: str = "workers"
    ) -> AbstractAsyncContextManager[None]:
        """Answer the question of `ask_workers` about the topic (`key.<digest>`: who holds it) while
        inside; None: nothing to say."""
        return self._hints.reporting(report, topic)

    async def ask_workers(
        self, wait_s: float, topic: str = "workers", question: bytes = b""
    ) -> list[bytes]:
        """The reports of all workers that answer within `wait_s`, which it always waits if one
        does."""
        return await self._hints.ask_workers(wait_s, topic, question)

    @property
    def hints(self) -> Hints:
        """Also for what workers say to each other."""
        return self._hints

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def connected(self) -> bool:
        """Whether the connection stands now; for any thread."""
        return self._connection.connected

    async def closed(self) -> RunfoldError:
        """Wait until the connection is closed for good; the reason."""
        return await self._connection.wait_closed()

    # ---- holders ----------------------------------------------------------------------------

    @asynccontextmanager
    async def hold(self, run_id: RunId) -> AsyncGenerator[None, None]:
        yield

    async def holder(self, run_id: RunId) -> str | None:
        return None

    async def ask(self, worker: str, run_id: RunId, claim: int) -> Answer:
        if not valid_name(worker):  # it stands in a record; no worker can listen under it
            return "nobody"
        reply = await self._connection.request(
            self._worker_subject(worker), _encode(_Question(run_id, claim)), timeout_s=ASK_TRY_S
        )
        if isinstance(reply, NoReply):
            return "nobody" if reply.nobody else "silent"
        try:
            return "yes" if _decode_held(reply.data).held else "no"
        except (msgspec.DecodeError, UnicodeDecodeError):
            return "silent"

    @asynccontextmanager
    async def answering(self, worker: str, held: Held) -> AsyncGenerator[None, None]:
        async def answer(question: Reply) -> bytes | None:
            try:
                asked = _decode_question(question.data)
                holds = False if asked.run == "" else held(RunId(asked.run), asked.claim)
                return None if holds is None else _encode(_HeldAnswer(holds))
            except Exception as error:  # the asker takes it as silence: the holder keeps its run
                return _encode({"error": f"{type(error).__name__}: {error}"})

        async with self._connection.subscribed(self._worker_subject(worker), answer):
            await self._check_answering(worker)
            yield

    async def _check_answering(self, worker: str) -> None:
        """Ask ourselves: the server has the subscription, and allows it, before any claim."""
        patience = Patience(f"questions to worker {worker} do not arrive")
        while (answer := await self.ask(worker, RunId(""), 0)) != "no":
            self._connection.check_denied(self._worker_subject(worker))
            await patience.pause(f"the answer is {answer}")

    def _worker_subject(self, worker: str) -> str:
        return f"{self._namespace}.worker.{worker.replace('.', '~')}"
