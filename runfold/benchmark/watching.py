"""Shell: what the workloads ask of runs as they go on: records, claims, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import TypeVar

from journal.errors import RunfoldError
from journal.fleet import Fleet
from journal.ids import RunId
from journal.records import Claim, Record
from journal.store import Store
from journal.views import AwaitingApproval, instant

Item = TypeVar("Item")

LOOK_S = 0.01
AT_ONCE = 64
WAIT_S = 120.0


async def each(items: Iterable[Item], call: Callable[[Item], Awaitable[object]]) -> None:
    """Call it with all of them, `AT_ONCE` at once."""
    left = iter(items)

    async def some() -> None:
        for item in left:
            await call(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())


async def start_all(fleet: Fleet, agent: str, runs: Collection[str]) -> None:
    """Start the runs, many at once."""
    await each(runs, lambda run: fleet.start(agent, run, run_id=run))


async def all_ended(fleet: Fleet, runs: Collection[str]) -> None:
    """Wait until each has come to something; the looks are few."""
    for run in runs:
        while (await fleet.get(run)).outcome is None:  # noqa: ASYNC110 (in other processes)
            await asyncio.sleep(LOOK_S)


async def records(store: Store, run: str, after: int = 0) -> Sequence[Record]:
    """Those behind the token."""
    return [entry.record for entry in (await store.load(RunId(run), after=after)).entries]


async def nth_claim(store: Store, run: str, count: int, within_s: float) -> Claim:
    """The run's claim of that number, once it is there."""
    deadline = monotonic() + within_s
    found: list[Claim] = []
    tail = 0
    while True:
        fresh = await store.load(RunId(run), after=tail)
        tail = fresh.tail
        found += [record for record in fresh.records if isinstance(record, Claim)]
        if len(found) >= count:
            return found[count - 1]
        if monotonic() > deadline:
            raise RunfoldError(f"run {run} was not claimed within {within_s:g} s", run_id=run)
        await asyncio.sleep(LOOK_S)


async def marker_of(fleet: Fleet, run: str) -> str:
    """The approval that the run waits for, once it does."""
    waiting = (await fleet.wait(run, timeout_s=WAIT_S)).outcome
    if not isinstance(waiting, AwaitingApproval):
        raise RunfoldError(f"run {run} waits for no approval, but: {waiting}", run_id=run)
    return waiting.pending[0].marker


def at(record: Record) -> float:
    """When it was made, by its writer's wall clock, in whole milliseconds."""
    return instant(record.at).timestamp()
