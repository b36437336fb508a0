"""Several things at once, as one call."""

from __future__ import annotations

import asyncio

import pytest

from journal.at_once import at_once
from journal.errors import StoreUnavailable


async def test_the_first_error_is_raised_as_it_is_and_the_others_are_cut_off() -> None:
    ended: list[str] = []

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cut off")

    async def fails() -> None:
        raise StoreUnavailable("it is gone")

    async def both() -> None:
        async with at_once() as group:
            group.create_task(waits())
            await asyncio.sleep(0)
            group.create_task(fails())

    with pytest.raises(StoreUnavailable, match="it is gone"):
        await both()
    assert ended == ["cut off"]


async def test_it_ends_when_all_have() -> None:
    async def told(word: str) -> str:
        await asyncio.sleep(0)
        return word

    async with at_once() as group:
        tasks = [group.create_task(told(word)) for word in "ab"]
    assert [task.result() for task in tasks] == ["a", "b"]


async def test_a_cancellation_goes_through() -> None:
    async def body() -> None:
        async with at_once() as group:
            group.create_task(asyncio.Event().wait())

    task = asyncio.ensure_future(body())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
