"""Store: which runs have a journal, and the header of each one's last record."""

from __future__ import annotations

import heapq
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..errors import InvalidId
from ..ids import RunId, from_subject_token, subject_token
from ..limits import READ_BUDGET_S, READ_TRY_S
from .jetstream_answers import ApiAnswer, Group
from .jetstream_headers import PURGED, PURGED_TYPE, RECORD_TYPE, RUN_STATUS, TIME, server_time
from .jetstream_read import Patience, Reader, asked_of
from .nats_connection import Connection
from .nats_waiting import STATUS, Reply

HEADS_PAGE = 512
"""Subjects a request: nats-server 2.15.1 takes 1 024, and answers with their whole last messages,
one after another, ahead of other answers on the connection."""


class _State(Struct, frozen=True):
    subjects: dict[str, int] = {}


class _Page(ApiAnswer, frozen=True):
    total: int = 0
    state: _State = _State()
    cluster: Group | None = None


_page = msgspec.json.Decoder(_Page)
_encode = msgspec.json.Encoder().encode


class Head(Struct, frozen=True):
    """What a run's last message tells: the status word it left, `purged` of a tombstone, None where
    it has none; and when the server stored it."""

    word: str | None
    stored: datetime | None


Item = TypeVar("Item", bound=RunId | tuple[RunId, Any])


class Listing:
    """All journals in one stream."""

    def __init__(
        self, connection: Connection, stream: str, prefix: str, owns: Callable[[RunId], bool]
    ) -> None:
        self._connection = connection
        self._reader = Reader(connection, stream)
        self._stream = stream
        self._prefix = prefix
        self._owns = owns

    async def runs(self) -> AsyncGenerator[RunId, None]:
        """As the stream has them now, in order of their text."""
        for run_id in sorted(await self._all()):
            yield run_id

    async def _all(self) -> dict[RunId, int]:
        """Every run with a message, and how many it has. Ids sort unlike their subjects (`.` is
        `~` there), so all pages come first; nats-server 2.15.1 sends 100 000 a page, sorted."""
        patience = Patience(f"the runs in stream {self._stream} could not be listed")
        found: dict[RunId, int] = {}
        offset = 0
        while True:
            request = {"subjects_filter": f"{self._prefix}>", "offset": offset}
            page = await asked_of(
                self._connection,
                self._stream,
                _page,
                f"$JS.API.STREAM.INFO.{self._stream}",
                _encode(request),
                patience,
                timeout_s=READ_BUDGET_S,
            )
            if page.cluster is not None and not page.cluster.led:
                await patience.pause("the server that answers is cut off from the others")
                continue
            patience.renew()
            for subject, messages in page.state.subjects.items():
                run_id = run_of(subject, self._owns)
                if run_id is not None:
                    found[run_id] = messages
            offset += len(page.state.subjects)
            if not page.state.subjects or offset >= page.total:
                return found

    async def heads(
        self, status: frozenset[str] | None
    ) -> AsyncGenerator[tuple[RunId, str | None], None]:
        async for run_id, head in self._heads(sorted(await self._all())):
            if status is None or head.word is None or head.word in status:
                yield run_id, head.word

    async def ended(
        self, statuses: frozenset[str], before: datetime, after: RunId | None
    ) -> AsyncGenerator[RunId, None]:
        """Runs behind `after` whose last message left one of these statuses, or tells none, and was
        stored before the instant; and those with a tombstone that stands behind other messages. A
        message alone is a tombstone that is done, or a run's start: not looked at, be there
        millions."""
        several = [
            run_id
            for run_id, messages in (await self._all()).items()
            if messages > 1 and (after is None or run_id > after)
        ]
        async for run_id, head in self._heads(sorted(several)):
            old = head.stored is None or head.stored <= before
            if head.word == PURGED or (old and (head.word is None or head.word in statuses)):
                yield run_id

    async def _heads(self, run_ids: Sequence[RunId]) -> AsyncGenerator[tuple[RunId, Head], None]:
        for start in range(0, len(run_ids), HEADS_PAGE):
            page = run_ids[start : start + HEADS_PAGE]
            found = await self._page(page)
            for run_id in page:
                if run_id in found:  # else its journal was removed meanwhile
                    yield run_id, found[run_id]

    async def _page(self, run_ids: Sequence[RunId]) -> dict[RunId, Head]:
        """A follower may answer, from a moment ago. What does not come is asked for again."""
        patience = Patience(f"the runs in stream {self._stream} could not be listed")
        by_subject = {self._prefix + subject_token(run_id): run_id for run_id in run_ids}
        found: dict[RunId, Head] = {}
        while by_subject:
            complete = False

            def take(reply: Reply) -> bool:
                nonlocal complete
                headers = reply.headers
                if STATUS in headers:  # nats-server 2.15.1: 204 at the end, 404 where none has any
                    complete = headers[STATUS] in ("204", "404")
                    return True
                run_id = by_subject.pop(headers.get("Nats-Subject", ""), None)
                if run_id is not None:
                    found[run_id] = _head(headers)
                return False

            request = _encode({"multi_last": list(by_subject)})
            before = len(found)
            await self._connection.collect(
                f"$JS.API.DIRECT.GET.{self._stream}", request, take, idle_s=READ_TRY_S
            )
            if complete and len(found) == before:  # not there, or not yet where this came from
                for subject, run_id in by_subject.items():
                    last = await self._reader.last(subject, patience)
                    if last is not None:
                        found[run_id] = _head(last.headers)
                return found
            if len(found) > before:
                patience.renew()
            if by_subject:
                await patience.pause("some did not come")
        return found


def _head(headers: Mapping[str, str]) -> Head:
    word = PURGED if headers.get(RECORD_TYPE) == PURGED_TYPE else headers.get(RUN_STATUS)
    return Head(word, server_time(headers.get(TIME, "")))


async def merged(listings: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """What several list, each in the order of ids, as one in that order."""
    async with AsyncExitStack() as stack:
        heap: list[tuple[str, int, Item]] = []
        for index, listing in enumerate(listings):
            await stack.enter_async_context(aclosing(listing))
            if (first := await anext(listing, None)) is not None:
                heap.append((_id(first), index, first))
        heapq.heapify(heap)
        while heap:
            _, index, item = heap[0]
            yield item
            following = await anext(listings[index], None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (_id(following), index, following))


def _id(item: RunId | tuple[RunId, Any]) -> str:
    return item if isinstance(item, str) else item[0]


def run_of(subject: str, owns: Callable[[RunId], bool]) -> RunId | None:
    """None for a subject that no run of the stream has: a stray message is no run's journal."""
    try:
        run_id = from_subject_token(subject.rpartition(".")[2])
    except InvalidId:
        return None
    return run_id if owns(run_id) else None
