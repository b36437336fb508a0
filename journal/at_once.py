"""Shell: several things at once, as one call: it ends when all have, and raises as one would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


@asynccontextmanager
async def at_once() -> AsyncGenerator[asyncio.TaskGroup, None]:
    """A task group whose first error, which cancelled the others, is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
