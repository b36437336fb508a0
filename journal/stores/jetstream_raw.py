"""Store: the journals of a stream as they stand, undecoded: one run's, or all that was appended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from ..ids import RunId, subject_token
from ..store import RawRecord
from .jetstream_answers import ApiAnswer
from .jetstream_headers import server_time
from .jetstream_read import Patience, Reader, Stored, asked_of, reading
from .nats_connection import Connection
from .run_index import run_of


class _State(Struct, frozen=True):
    last_seq: int = 0
    num_subjects: int = 0


class _Info(ApiAnswer, frozen=True):
    created: str = ""
    ts: str = ""
    state: _State = _State()


_info = msgspec.json.Decoder(_Info)


class StreamEnd(Struct, frozen=True):
    """The last sequence a stream gave, which a purge does not lower; when it was made; how many
    subjects it has; and the time on the server's clock."""

    last: int
    created: str
    subjects: int = 0
    now: datetime = datetime.fromtimestamp(0, UTC)


class RawJournals:
    """All journals in one stream. Raises StoreUnavailable, PermissionDenied."""

    def __init__(
        self, connection: Connection, stream: str, prefix: str, owns: Callable[[RunId], bool]
    ) -> None:
        self._connection = connection
        self._reader = Reader(connection, stream)
        self.stream = stream
        self._prefix = prefix
        self._owns = owns

    async def probe(self) -> None:
        """Its leader answers a small question, about a run that never is: no id begins so."""
        patience = Patience(f"stream {self.stream} could not be read")
        await self._reader.last(f"{self._prefix}_health", patience)

    async def of(self, run_id: RunId, after: int) -> AsyncGenerator[Sequence[RawRecord], None]:
        """The run's records behind sequence `after`, in pages, up to a tail that was current
        during the call. A purge meanwhile leaves a gap before its tombstone."""
        subject = self._prefix + subject_token(run_id)
        async for page in self._reader.whole(subject, after, reading(run_id, self.stream)):
            yield [_raw(one) for one in page]

    async def grown(
        self, after: int
    ) -> AsyncGenerator[Sequence[tuple[RunId | None, RawRecord]], None]:
        """Every run's records behind sequence `after` in the stream's order, in pages; of no run
        where the subject is none's. They end at the last one of now, or before it."""
        patience = Patience(f"stream {self.stream} could not be read")
        subjects = f"{self._prefix}*"
        last = await self._reader.last(subjects, patience)
        if last is None:
            return
        async for page in self._reader.pages(subjects, after, last.seq, patience):
            yield [(run_of(one.subject, self._owns), _raw(one)) for one in page]

    async def end(self) -> StreamEnd:
        """As the stream's leader, or who takes himself for it, has it."""
        patience = Patience(f"stream {self.stream} could not be looked up")
        subject = f"$JS.API.STREAM.INFO.{self.stream}"
        info = await asked_of(self._connection, self.stream, _info, subject, b"", patience)
        now = server_time(info.ts) or datetime.now(UTC)
        return StreamEnd(info.state.last_seq, info.created, info.state.num_subjects, now)


def _raw(stored: Stored) -> RawRecord:
    return RawRecord(stored.data, stored.seq, stored.headers)
