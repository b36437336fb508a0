"""Shell: several steps of one run at once (R35): each with its own start and result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from .calling import Perform
from .early import ended
from .fold import Fold
from .records import StepCompleted
from .stepping import STICKY, do_step
from .steps import Call
from .unknown import Ways, doubt

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
        await ended(tasks)  # no call outlives the step it belongs to
    errors = [error for task in tasks if (error := task.exception()) is not None]
    for kind in (*STICKY, Exception):
        for error in errors:
            if isinstance(error, kind):
                raise error
    return [task.result() for task in tasks]


def only_reads(fold: Fold, jobs: Sequence[Job]) -> bool:
    """Whether each was declared a read, and the journal knows none of them as anything else."""
    states = [fold.steps.get(call.step) for call, _, _ in jobs if call.read]
    return len(states) == len(jobs) and not any(state and state.unsafe for state in states)


async def doubt_open(journal: Journal, jobs: Sequence[Job]) -> None:
    """Once all calls have ended: a park would end the claim under them."""
    starts = [
        step.last
        for call, _, _ in jobs
        if call.unsafe
        and (step := journal.fold.steps.get(call.step)) is not None
        and step.starts
        and step.completed is None
    ]
    if starts:
        await doubt(journal, *starts)
