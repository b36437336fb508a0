"""Shell: W1, a durable step of an open run beside its two raw appends: one run, and many at once.

The step is `Journal.run_step` of a function that does nothing, on a claimed run in this process:
start recorded, function called, result recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from pathlib import Path

from journal.doors import start
from journal.handle import Journal
from journal.store import Store
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore

from .blocks import Numbers, Op, Sides, block, latency, rate
from .floor import RawFile, RawLoop, raw_client
from .processes import Place
from .scale import Scale

Progress = Callable[[str], None]


async def steps_on(
    place: Place, levels: Sequence[int], scale: Scale, how: str, progress: Progress
) -> Numbers:
    """`one_run`, `runs_16`, …: each level's numbers on this server."""
    found: Numbers = {}
    async with JetStreamStore(place.url) as store, raw_client(place.url) as nc:
        payloads = await payloads_of(store)
        for level in levels:
            loops = [
                RawLoop(nc, f"{level}-{index}", payloads, shards=place.shards).pair
                for index in range(level)
            ]
            ones = [
                RawLoop(nc, f"one-{level}-{index}", payloads).pair
                for index in range(level)
                if place.shards > 1 and level > 1
            ]
            sides = await _beside(f"steps, {how}", store, loops, scale, progress, ones)
            name = "one_run" if level == 1 else f"runs_{level}"
            found[name] = latency(sides) if level == 1 else rate(sides)
    return found


async def steps_in_files(folder: Path, scale: Scale, progress: Progress) -> Numbers:
    """One run in a directory, beside two raw writes that are each synced."""
    store = FileStore(folder)
    with closing(RawFile(folder / "floor", await payloads_of(store))) as loop:
        return latency(await _beside("steps, file store", store, [loop.pair], scale, progress))


async def _beside(
    how: str,
    store: Store,
    floor: Sequence[Op],
    scale: Scale,
    progress: Progress,
    one_stream: Sequence[Op] = (),
) -> Sides:
    """Measure the floor's loops beside as many runs on the store."""
    async with AsyncExitStack() as stack:
        steps = [StepLoop(await open_run(store, stack)).step for _ in floor]
        for warm in filter(None, (floor, steps, one_stream)):
            await block(warm, scale.block_s / 2)
        sides = Sides([], [], [])
        for number in range(scale.rounds):
            progress(f"{how}, {len(floor)} at once: {number + 1} of {scale.rounds}")
            sides.floor.append(await block(floor, scale.block_s))
            sides.product.append(await block(steps, scale.block_s))
            if one_stream:
                sides.one_stream.append(await block(one_stream, scale.block_s))
        sides.floor.append(await block(floor, scale.block_s))
    return sides


async def open_run(store: Store, stack: AsyncExitStack) -> Journal:
    """A new run, claimed here until the stack is left."""
    started = await start(store, "bench", None)
    return await stack.enter_async_context(
        await Journal.open(store, started.run_id, is_write=lambda tool: False)
    )


class StepLoop:
    """Durable no-op steps of one run."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._count = 0

    async def step(self) -> None:
        self._count += 1
        await self._journal.run_step(f"step/{self._count}", "tool", _nothing, tool="noop")


async def _nothing() -> None: ...


async def payloads_of(store: Store) -> tuple[bytes, bytes]:
    """The stored bytes of a step's two records."""
    async with AsyncExitStack() as stack:
        journal = await open_run(store, stack)
        await StepLoop(journal).step()
        *_, begun, completed = (await store.load(journal.run_id)).entries
    return begun.raw, completed.raw
