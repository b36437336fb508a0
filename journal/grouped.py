"""Shell: several steps of one run at once (R35): each with its own start and result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from .records import StepCompleted
from .stepping import STICKY, Perform, do_step
from .steps import Call
from .unknown import Ways

if TYPE_CHECKING:
    from .handle import Journal

Job: TypeAlias = tuple[Call, Perform, Ways]
"""A step to make: the call, who performs it, what settles it otherwise."""


async def all_steps(journal: Journal, jobs: Sequence[Job]) -> list[StepCompleted]:
    """The results in the order of the jobs. All are let end; then the gravest error is raised."""
    tasks = [asyncio.ensure_future(do_step(journal, *job)) for job in jobs]
    try:
        await asyncio.wait(tasks)
    finally:
        await _cancelled(tasks)
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for kind in (*STICKY, Exception):
        for error in errors:
            if isinstance(error, kind):
                raise error
    return [task.result() for task in tasks]


async def _cancelled(tasks: Sequence[asyncio.Future[StepCompleted]]) -> None:
    """Cancel what still runs and wait for its end: no call outlives the step it belongs to."""
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            continue  # raised again by who waits for this
