"""Shell: W2, taking up a run with many recorded steps: by a worker, and by the library alone.

The runs are made by a worker: with a commit after every 32 steps, as the built-in loop makes them,
and without any (one turn of a handler, which is replayed from its first step). Then each waits for
an approval, again and again. `resume_ms` is what a person sees: from `approve` until the next step
begins. `claim_to_step_ms` is the part of it behind the claim: the replay. `log_ms` is reading and
folding alone, as a holder does it. `fold_records_s` is a full fold from the first record, beside
nats-py reading the same messages by the same requests and doing nothing with them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from statistics import median
from time import perf_counter, time
from typing import Any

from journal.fleet import Fleet
from journal.ids import RunId
from journal.limits import COMMIT_STEPS
from journal.log import Log
from journal.records import Claim, StepCompleted
from journal.stores.jetstream import JetStreamStore

from .blocks import Numbers, over, rounded, spread
from .floor import raw_client, raw_read
from .processes import Place, worker
from .scale import Scale
from .steps import Progress
from .watching import at, marker_of, records

FOLDS = 4


async def resume_on(place: Place, scale: Scale, progress: Progress) -> Numbers:
    """`with_commits` and `without_commits`: by the number of recorded steps."""
    async with (
        JetStreamStore(place.url) as store,
        raw_client(place.url) as nc,
        worker(place, ["long"]),
    ):
        fleet = Fleet(store)
        progress("resume: making the runs")
        kinds = {"with_commits": COMMIT_STEPS, "without_commits": max(scale.journals)}
        runs = {
            (kind, steps): RunId(f"{kind}-{steps}") for kind in kinds for steps in scale.journals
        }
        for (kind, steps), run in runs.items():
            await fleet.start("long", {"steps": steps, "every": kinds[kind]}, run_id=run)
        await asyncio.gather(*(marker_of(fleet, run) for run in runs.values()))
        found: Numbers = {kind: {} for kind in kinds}
        for (kind, steps), run in runs.items():
            progress(f"resume {kind.replace('_', ' ')}, {steps} steps")
            times = scale.resumes if kind == "with_commits" else 1 + scale.resumes // 3
            found[kind][str(steps)] = await _resumed(store, run, times)
        longest = runs["without_commits", max(scale.journals)]
        found["full_fold"] = await _folds(store, nc, longest, place.shards)
        for run in runs.values():
            await fleet.cancel(run)
    least, most = min(scale.journals), max(scale.journals)
    flat = found["with_commits"]
    by_size = {steps: flat[str(steps)]["resume_ms"]["p50"] for steps in (least, most)}
    found["flat"] = by_size[most] / by_size[least]
    found["flat_steps"] = [least, most]
    return rounded(**found)


async def _resumed(store: JetStreamStore, run: RunId, times: int) -> Numbers:
    """Each approval is one resume; the first warms up."""
    fleet = Fleet(store)
    resume_ms: list[float] = []
    claim_ms: list[float] = []
    for _ in range(times + 1):
        marker = await marker_of(fleet, run)
        tail = await store.tail(run)
        said = time()
        await fleet.signal(run, "approve", {"marker": marker})
        await marker_of(fleet, run)
        fresh = await records(store, run, tail)
        began = _stamped(fresh)
        claim = next(record for record in fresh if isinstance(record, Claim))
        resume_ms.append(1000 * (began - said))
        claim_ms.append(1000 * (began - at(claim)))
    log_ms: list[float] = []
    for _ in range(times + 1):
        begun = perf_counter()
        await Log.resumed(store, run, by="bench")
        log_ms.append(1000 * (perf_counter() - begun))
    return {
        "resume_ms": spread(resume_ms[1:]),
        "claim_to_step_ms": spread(claim_ms[1:]),
        "log_ms": spread(log_ms[1:]),
    }


def _stamped(fresh: Sequence[Any]) -> float:
    """When the approved step was called, by its own result."""
    (result,) = [
        record.result
        for record in fresh
        if isinstance(record, StepCompleted) and isinstance(record.result, float)
    ]
    return result


async def _folds(store: JetStreamStore, nc: Any, run: RunId, shards: int) -> Numbers:
    """Full folds of the longest journal, between raw reads of it; the first of each warms up."""
    floor: list[float] = [await raw_read(nc, run, shards)]
    product: list[float] = []
    count = 0
    for number in range(FOLDS + 1):
        gc.collect()
        begun = perf_counter()
        count = (await Log.read(store, run)).fold.n
        if number:
            product.append(count / (perf_counter() - begun))
            floor.append(await raw_read(nc, run, shards))
    return {
        "records": count,
        "records_s": median(product),
        "floor_records_s": median(floor),
        **over("rate_over_floor", product, floor),
        "blocks": {"floor": floor, "product": product},
    }
