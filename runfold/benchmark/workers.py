"""Shell: W1, runs of ten no-op steps through real worker processes, beside raw appends.

From the first start to the last end, starts included. The floor is measured by one client in blocks
before and after each pass, as many loops at once as the worker works runs at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from time import perf_counter
from typing import Any

from journal.fleet import Fleet
from journal.stores.jetstream import JetStreamStore

from .agents import STEPS
from .blocks import Numbers, block, over, rounded
from .floor import RawLoop, raw_client
from .processes import HAS_PROC, Child, Place, worker
from .scale import Scale
from .steps import Progress, payloads_of
from .watching import all_ended, start_all

RECORDS = 2 * STEPS + 3
"""Of a run: its start, claim and end, and two a step. Its task message is one more write."""

TWO_AT = 64


async def workers_on(
    place: Place, levels: Sequence[int], scale: Scale, how: str, progress: Progress
) -> Numbers:
    """`runs_1`, `runs_16`, …: one worker at that concurrency; `two_workers`: at 64 each."""
    async with JetStreamStore(place.url) as store, raw_client(place.url) as nc:
        passes = _Passes(place, store, nc, await payloads_of(store), scale)
        found: Numbers = {}
        for level in levels:
            progress(f"a worker, {how}, {level} at once")
            found[f"runs_{level}"] = await passes.measure(level, 1)
        if TWO_AT in levels:
            progress(f"two workers, {how}")
            found["two_workers"] = await passes.measure(TWO_AT, 2)
    return found


class _Passes:
    def __init__(
        self,
        place: Place,
        store: JetStreamStore,
        nc: Any,
        payloads: tuple[bytes, bytes],
        scale: Scale,
    ) -> None:
        self._place, self._fleet, self._nc = place, Fleet(store), nc
        self._payloads, self._scale = payloads, scale
        self._names = itertools.count()

    async def measure(self, level: int, workers: int) -> Numbers:
        count = max(self._scale.runs_least, self._scale.runs_per_level * level * workers)
        async with AsyncExitStack() as stack:
            children = [
                await stack.enter_async_context(
                    worker(self._place, ["ten_steps"], concurrency=level)
                )
                for _ in range(workers)
            ]
            await self._through(min(level, count), level)  # warms up
            floor = [await self._floor(level)]
            rates: list[float] = []
            cpu_ms: list[float] = []
            for _ in range(self._scale.passes):
                before = _cpu_s(children)
                rates.append(await self._through(count, level))
                cpu_ms.append(1000 * (_cpu_s(children) - before) / (count * STEPS))
                floor.append(await self._floor(level))
        runs_s = median(rates)
        return rounded(
            runs_s=runs_s,
            steps_s=runs_s * STEPS,
            records_s=runs_s * RECORDS,
            floor_appends_s=median(floor),
            **over("records_over_floor", [rate * RECORDS for rate in rates], floor),
            blocks={"floor": floor, "product": [rate * RECORDS for rate in rates]},
            **({"cpu_ms_per_step": median(cpu_ms)} if HAS_PROC else {}),
        )

    async def _through(self, count: int, level: int) -> float:
        """Runs a second."""
        runs = [f"pass-{next(self._names)}-{index}" for index in range(count)]
        begun = perf_counter()
        if level == 1:  # one after another: the time of a run, not of a queue
            for run in runs:
                await self._fleet.start("bench", run, run_id=run)
                await self._fleet.wait(run, timeout_s=60)
        else:
            await start_all(self._fleet, "bench", runs)
            await all_ended(self._fleet, runs)
        return count / (perf_counter() - begun)

    async def _floor(self, level: int) -> float:
        name = next(self._names)
        loops = [
            RawLoop(self._nc, f"w{name}-{index}", self._payloads, shards=self._place.shards).pair
            for index in range(level)
        ]
        return (await block(loops, 2 * self._scale.block_s)).appends_s


def _cpu_s(children: Sequence[Child]) -> float:
    return sum(child.cpu_s() for child in children) if HAS_PROC else 0.0
