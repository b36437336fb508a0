"""Wait for a condition, never for a time."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

T = TypeVar("T")


async def eventually(
    condition: Callable[[], T | Awaitable[T | None] | None],
    timeout: float = 10.0,
    *,
    what: str = "",
) -> T:
    """The first true value of `condition`; an AssertionError if none comes within `timeout` s.

    The condition may be async. What it raises is raised: catch what is only "not yet".
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await cast("Awaitable[T | None]", found)
        if found:
            return cast("T", found)
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or inspect.getsource(condition)}")
        await asyncio.sleep(0.01)
