"""Shell: W6, many short runs through one worker: does anything of it grow (R85)?

Between slices of runs we look at the worker's resident memory and open files, and at the server's
subscriptions, connections and consumers. The first fifth warms up: it fills caches and pools.
"""

from __future__ import annotations

from statistics import median

from journal.fleet import Fleet
from journal.stores.jetstream import JetStreamStore

from .blocks import Numbers, rounded
from .processes import HAS_PROC, Child, Place, monitored, worker
from .scale import Scale
from .steps import Progress
from .watching import all_ended, start_all


async def leaks_on(place: Place, scale: Scale, progress: Progress) -> Numbers:
    """What each look saw, and memory at the end over memory after the first fifth."""
    looks: list[Numbers] = []
    slice_runs = max(1, scale.short // scale.looks)
    async with JetStreamStore(place.url) as store, worker(place, ["ten_steps"]) as child:
        fleet = Fleet(store)
        for number in range(scale.looks):
            progress(f"short runs: {number * slice_runs} of {scale.short}")
            runs = [f"short-{number}-{index}" for index in range(slice_runs)]
            await start_all(fleet, "bench", runs)
            await all_ended(fleet, runs)
            looks.append(await _look(place, child, (number + 1) * slice_runs))
    warm = looks[len(looks) // 5]
    found: Numbers = {"runs": looks[-1]["runs"], "looks": looks}
    for name in looks[0].keys() - {"runs"}:
        end = median(look[name] for look in looks[-3:])
        found[name] = {"warm": warm[name], "end": end}
    if HAS_PROC:
        found["memory_over_warm"] = found["memory_mb"]["end"] / found["memory_mb"]["warm"]
    return rounded(**found)


async def _look(place: Place, child: Child, runs: int) -> Numbers:
    served = await monitored(place, "varz")
    stored = await monitored(place, "jsz")
    seen: Numbers = {
        "runs": runs,
        "subscriptions": sum(one["subscriptions"] for one in served),
        "connections": sum(one["connections"] for one in served),
        "consumers": sum(one["consumers"] for one in stored),
        "server_memory_mb": sum(one["mem"] for one in served) / 1e6,
    }
    if HAS_PROC:
        seen |= {"memory_mb": child.memory_bytes() / 1e6, "files": child.files()}
    return seen
