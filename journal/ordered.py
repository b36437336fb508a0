"""Shell: a page of what many runs say: several journals are read at once, and taken in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from .at_once import at_once
from .ids import RunId
from .limits import LIST_PAGE

T = TypeVar("T")

AT_ONCE = 16
"""Journals read at once for a page: enough to hide the server's answer time."""

LOOKED_AT_MAX = 20 * LIST_PAGE
"""A filter that finds nothing must not read all journals of a large store in one request."""


async def ordered(
    runs: AsyncIterator[RunId],
    read: Callable[[RunId], Awaitable[Sequence[T]]],
    *,
    after: RunId | None = None,
    limit: int | None = None,
) -> tuple[list[T], RunId | None]:
    """What `read` finds in the runs behind the id `after`, in their order, up to the run that makes
    it `limit` or more; and the id to go on after, None at the end. Less is found where few of
    many runs have something. Without a limit: all."""
    async with at_once() as group:
        return await _Page(read, limit, group).page(runs, after)


class _Page(Generic[T]):
    """One page in the making."""

    def __init__(
        self,
        read: Callable[[RunId], Awaitable[Sequence[T]]],
        limit: int | None,
        group: asyncio.TaskGroup,
    ) -> None:
        self._read = read
        self._limit = limit
        self._group = group
        self._found: list[T] = []
        self._reading: deque[tuple[RunId, asyncio.Task[Sequence[T]]]] = deque()
        self._taken: RunId | None = None

    async def page(
        self, runs: AsyncIterator[RunId], after: RunId | None
    ) -> tuple[list[T], RunId | None]:
        begun = 0
        async for run in runs:
            if after is not None and run <= after:
                continue
            # What is being read may be on the page: no more of it is begun than fits.
            while self._reading and (len(self._reading) == AT_ONCE or self._full(ahead=True)):
                await self._take()
                if self._full():
                    break
            if self._full() or (self._limit is not None and begun == LOOKED_AT_MAX):
                return await self._rest(), self._taken
            begun += 1
            self._reading.append((run, self._group.create_task(self._one(run))))
        found = await self._rest()
        return found, self._taken if self._reading else None

    def _full(self, *, ahead: bool = False) -> bool:
        """`ahead`: where each journal that is being read has one thing to say."""
        if self._limit is None:
            return False
        return len(self._found) + (len(self._reading) if ahead else 0) >= self._limit

    async def _rest(self) -> list[T]:
        """What is being read, as far as it belongs to this page."""
        while self._reading and not self._full():
            await self._take()
        for _, task in self._reading:
            task.cancel()
        return self._found

    async def _one(self, run: RunId) -> Sequence[T]:
        return await self._read(run)

    async def _take(self) -> None:
        self._taken, task = self._reading.popleft()
        self._found += await task
