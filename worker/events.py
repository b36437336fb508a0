"""Shell: waiting for the first of several things to happen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def first_of(
    *events: asyncio.Event,
    timeout_s: float | None,
    tasks: Iterable[asyncio.Task[Any]] = (),
) -> None:
    """Until one of the events is set, one of the tasks has ended, or the time is over. The tasks go
    on."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait([*tasks, *waits], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
