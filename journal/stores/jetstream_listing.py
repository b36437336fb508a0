"""Store: which runs have a journal, and the header of each one's last record."""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..at_once import at_once
from ..errors import StoreUnavailable
from ..ids import RunId, subject_token
from ..limits import READ_TRY_S
from .jetstream_headers import PURGED, PURGED_TYPE, RECORD_TYPE, RUN_STATUS, TIME, server_time
from .jetstream_read import Patience, Reader
from .nats_connection import Connection
from .nats_waiting import STATUS, Reply
from .run_index import RunIndex

HEADS_PAGE = 512
"""Subjects a request: nats-server 2.15.1 takes 1 024, and answers with their whole last messages,
one after another, ahead of other answers on the connection."""


_encode = msgspec.json.Encoder().encode


class Head(Struct, frozen=True):
    """What a run's last message tells: the status word it left, `purged` of a tombstone, None where
    it has none; when the server stored it; its sequence, and its payload."""

    word: str | None
    stored: datetime | None
    seq: int
    data: bytes


Item = TypeVar("Item", bound=RunId | tuple[RunId, Any])


class Listing:
    """All journals in one stream."""

    def __init__(
        self,
        connection: Connection,
        stream: str,
        prefix: str,
        owns: Callable[[RunId], bool],
        page: int = HEADS_PAGE,
    ) -> None:
        """`page`: heads asked for at once."""
        self._connection = connection
        self._reader = Reader(connection, stream)
        self._index = RunIndex(connection, stream, prefix, owns)
        self._stream = stream
        self._prefix = prefix
        self._page_runs = page

    async def runs(self, after: RunId | None) -> AsyncGenerator[RunId, None]:
        """As the stream has them now, behind the id `after`, in order of their text."""
        for run_id in await self._behind(after):
            yield run_id

    async def _behind(self, after: RunId | None) -> Sequence[RunId]:
        ids = await self._index.ids()
        return ids if after is None else ids[bisect_right(ids, after) :]

    async def heads(
        self,
        status: frozenset[str] | None,
        after: RunId | None,
        unread: set[str] | None = None,
    ) -> AsyncGenerator[tuple[RunId, Head], None]:
        """Of the runs behind the id `after` whose last message left one of these statuses, or tells
        none; of all where it is None. Where it can't be read and `unread` is given, the stream's
        name goes there, and nothing is raised."""
        try:
            async for run_id, head in self._heads(await self._behind(after)):
                if status is None or head.word is None or head.word in status:
                    yield run_id, head
        except StoreUnavailable:
            if unread is None:
                raise
            unread.add(self._stream)

    async def ended(
        self, statuses: frozenset[str], before: datetime, after: RunId | None
    ) -> AsyncGenerator[RunId, None]:
        """Runs behind `after` whose last message left one of these statuses, or tells none, and was
        stored before the instant; and those with a tombstone that stands behind other messages. A
        message alone is a tombstone that is done, or a run's start: not looked at, be there
        millions."""
        counts, _ = await self._index.counts()
        several = [
            run_id
            for run_id, messages in counts.items()
            if messages > 1 and (after is None or run_id > after)
        ]
        async for run_id, head in self._heads(sorted(several)):
            old = head.stored is None or head.stored <= before
            if head.word == PURGED or (old and (head.word is None or head.word in statuses)):
                yield run_id

    async def pages(self) -> AsyncGenerator[tuple[dict[RunId, Head], int], None]:
        """Of all runs, in any order, each page with the sequence up to which it is known: what was
        stored behind it may be missing."""
        counts, last = await self._index.counts()
        run_ids = list(counts)
        yield {}, last
        for start in range(0, len(run_ids), HEADS_PAGE):
            yield await self._page(run_ids[start : start + HEADS_PAGE])

    async def _heads(self, run_ids: Sequence[RunId]) -> AsyncGenerator[tuple[RunId, Head], None]:
        for start in range(0, len(run_ids), self._page_runs):
            page = run_ids[start : start + self._page_runs]
            found, _ = await self._page(page)
            for run_id in page:
                if run_id in found:  # else its journal was removed meanwhile
                    yield run_id, found[run_id]

    async def _page(self, run_ids: Sequence[RunId]) -> tuple[dict[RunId, Head], int]:
        """A follower may answer, from a moment ago: the least sequence that any had. What does not
        come is asked for again."""
        patience = Patience(f"the runs in stream {self._stream} could not be listed")
        by_subject = {self._prefix + subject_token(run_id): run_id for run_id in run_ids}
        found: dict[RunId, Head] = {}
        known = sys.maxsize
        while by_subject:
            complete = False
            up_to = 0

            def take(reply: Reply) -> bool:
                nonlocal complete, up_to
                headers = reply.headers
                if STATUS in headers:  # nats-server 2.15.1: 204 at the end, 404 where none has any
                    complete = headers[STATUS] in ("204", "404")
                    up_to = int(headers.get("Nats-UpTo-Sequence", "0"))
                    return True
                run_id = by_subject.pop(headers.get("Nats-Subject", ""), None)
                if run_id is not None:
                    seq = int(headers["Nats-Sequence"])
                    found[run_id] = head_of(headers, seq, reply.data)
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
                        found[run_id] = head_of(last.headers, last.seq, last.data)
                return found, known
            if len(found) > before:
                known = min(known, up_to)
                patience.renew()
            if by_subject:
                await patience.pause("some did not come")
        return found, known


def head_of(headers: Mapping[str, str], seq: int, data: bytes) -> Head:
    """What a run's last message tells."""
    word = PURGED if headers.get(RECORD_TYPE) == PURGED_TYPE else headers.get(RUN_STATUS)
    return Head(word, server_time(headers.get(TIME, "")), seq, data)


async def merged(listings: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """What several list, each in the order of ids, as one in that order."""
    async with AsyncExitStack() as stack:
        heap: list[tuple[str, int, Item]] = []
        for listing in listings:
            await stack.enter_async_context(aclosing(listing))
        for index, first in enumerate(await _firsts(listings)):
            if first is not None:
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


async def _firsts(listings: Sequence[AsyncGenerator[Item, None]]) -> Sequence[Item | None]:
    """The first of each, asked for side by side. Whatever happens, none is still asked for when
    this ends: a generator that runs can't be closed."""

    async def first(listing: AsyncGenerator[Item, None]) -> Item | None:
        return await anext(listing, None)

    async with at_once() as group:
        tasks = [group.create_task(first(listing)) for listing in listings]
    return [task.result() for task in tasks]


def _id(item: RunId | tuple[RunId, Any]) -> str:
    return item if isinstance(item, str) else item[0]
