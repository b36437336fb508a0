"""Several journal streams listed as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from journal.errors import StoreUnavailable
from journal.ids import RunId
from journal.stores.jetstream_listing import merged


class Stream:
    """Lists `runs`, and counts those that are being asked."""

    asked = 0

    def __init__(self, *runs: str, dead: bool = False, stuck: bool = False) -> None:
        self._runs = runs
        self._dead = dead
        self._stuck = stuck

    async def listing(self) -> AsyncGenerator[RunId, None]:
        Stream.asked += 1
        try:
            await asyncio.sleep(0)
            if self._stuck:
                await asyncio.Event().wait()
            if self._dead:
                raise StoreUnavailable("it can't be read")
        finally:
            Stream.asked -= 1
        for run in self._runs:
            yield RunId(run)


async def test_runs_of_several_streams_come_in_the_order_of_their_ids() -> None:
    streams = [Stream("b", "c", "x"), Stream(), Stream("a", "y")]
    assert [run async for run in merged([one.listing() for one in streams])] == [*"abcxy"]


async def test_a_stream_that_cannot_be_read_is_told_and_no_other_is_left_asked() -> None:
    """Found by simulation seed 1006044: a generator that was still asked could not be closed."""
    streams = [Stream("a"), Stream(dead=True), Stream(stuck=True)]
    with pytest.raises(StoreUnavailable, match="can't be read"):
        _ = [run async for run in merged([one.listing() for one in streams])]
    assert Stream.asked == 0


async def test_who_stops_listing_leaves_none_asked() -> None:
    streams = [Stream("a"), Stream(stuck=True)]
    task = asyncio.ensure_future(anext(merged([one.listing() for one in streams])))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert Stream.asked == 0
