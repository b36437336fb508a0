"""Store: the ids of all runs in a journal stream, kept for a moment: so that each page of a list
need not ask for all of them again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct

from ..errors import InvalidId
from ..ids import RunId, from_subject_token
from ..limits import READ_BUDGET_S
from .jetstream_answers import ApiAnswer, Group
from .jetstream_read import Patience, Reader, asked_of
from .nats_connection import Connection

KEPT_S = 60.0
"""After its last use: some 90 bytes an id are held, in a process that lists runs (a bridge). A
worker's sweep and retention list without it."""

FOLLOWED_SHARE = 8
"""Fewer records than this share of the runs are read to see what came; with more of them, all is
asked for anew: a record costs as much as some eight subjects of a listing."""


class _State(Struct, frozen=True):
    subjects: dict[str, int] = {}
    last_seq: int = 0
    num_subjects: int = 0


class _Info(ApiAnswer, frozen=True):
    total: int = 0
    created: str = ""
    state: _State = _State()
    cluster: Group | None = None


_info = msgspec.json.Decoder(_Info)
_encode = msgspec.json.Encoder().encode


class _Kept(Struct, frozen=True):
    """All ids up to `last`, in their order; and the subjects that are no run's."""

    created: str
    last: int
    ids: Sequence[RunId]
    strays: frozenset[str]

    def is_of(self, end: _Info) -> bool:
        """No record came since, and no subject was removed: the stream has as many of them."""
        return (
            self.created == end.created
            and self.last == end.state.last_seq
            and len(self.ids) + len(self.strays) == end.state.num_subjects
        )


class RunIndex:
    """Of one stream. What is kept is checked by each use: see `_Kept.is_of`."""

    def __init__(
        self, connection: Connection, stream: str, prefix: str, owns: Callable[[RunId], bool]
    ) -> None:
        self._connection = connection
        self._reader = Reader(connection, stream)
        self._stream = stream
        self._prefix = prefix
        self._owns = owns
        self._kept: _Kept | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def counts(self) -> tuple[dict[RunId, int], int]:
        """Every run with a message, and how many it has, as the leader, or who takes himself for
        it, has them now; and the sequence up to which none is missing."""
        found, last = await self._all()
        runs, _ = self._split(found)
        return runs, last

    async def ids(self) -> Sequence[RunId]:
        """Of every run with a message, as the leader has them now, in the order of their text: ids
        sort unlike their subjects (`.` is `~` there)."""
        end = await self._asked(b"", self._patience())
        kept = self._kept
        if kept is not None and not kept.is_of(end):
            kept = await self._followed(kept, end)
        if kept is None:
            found, last = await self._all()
            runs, strays = self._split(found)
            # Asked for behind `end`: it has all that was there then, if one server answered both.
            kept = _Kept(end.created, min(end.state.last_seq, last), sorted(runs), strays)
        self._keep(kept)
        return kept.ids

    async def _followed(self, kept: _Kept, end: _Info) -> _Kept | None:
        """With what came since; None where all are to be asked for."""
        last = end.state.last_seq
        few = 0 <= last - kept.last <= len(kept.ids) // FOLLOWED_SHARE
        if kept.created != end.created or not few:
            return None
        subjects: dict[str, int] = {}
        patience = self._patience()
        async for page in self._reader.pages(f"{self._prefix}*", kept.last, last, patience):
            subjects |= {message.subject: 1 for message in page}
        runs, strays = self._split(subjects)
        new = runs.keys() - set(kept.ids)
        ids = sorted([*kept.ids, *new]) if new else kept.ids
        followed = _Kept(end.created, last, ids, kept.strays | strays)
        return followed if followed.is_of(end) else None

    async def _all(self) -> tuple[dict[str, int], int]:
        """Every subject and how many messages it has, and the last sequence before that was looked
        up; nats-server 2.15.1 sends 100 000 a page, sorted."""
        patience = self._patience()
        found: dict[str, int] = {}
        last: int | None = None
        while True:
            request = _encode({"subjects_filter": f"{self._prefix}>", "offset": len(found)})
            page = await self._asked(request, patience)
            patience.renew()
            found |= page.state.subjects
            last = page.state.last_seq if last is None else min(last, page.state.last_seq)
            if not page.state.subjects or len(found) >= page.total:
                return found, last

    async def _asked(self, request: bytes, patience: Patience) -> _Info:
        subject = f"$JS.API.STREAM.INFO.{self._stream}"
        while True:
            info = await asked_of(
                self._connection,
                self._stream,
                _info,
                subject,
                request,
                patience,
                timeout_s=READ_BUDGET_S,
            )
            if info.cluster is None or info.cluster.led:
                return info
            await patience.pause("the server that answers is cut off from the others")

    def _split(self, subjects: dict[str, int]) -> tuple[dict[RunId, int], frozenset[str]]:
        """The runs, and the subjects that are no run's."""
        runs: dict[RunId, int] = {}
        strays: set[str] = set()
        for subject, messages in subjects.items():
            run_id = run_of(subject, self._owns)
            if run_id is None:
                strays.add(subject)
            else:
                runs[run_id] = messages
        return runs, frozenset(strays)

    def _patience(self) -> Patience:
        return Patience(f"the runs in stream {self._stream} could not be listed")

    def _keep(self, kept: _Kept) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kept = kept
        self._timer = asyncio.get_running_loop().call_later(KEPT_S, self._forget)

    def _forget(self) -> None:
        self._kept = self._timer = None


def run_of(subject: str, owns: Callable[[RunId], bool]) -> RunId | None:
    """None for a subject that no run of the stream has: a stray message is no run's journal."""
    try:
        run_id = from_subject_token(subject.rpartition(".")[2])
    except InvalidId:
        return None
    return run_id if owns(run_id) else None
