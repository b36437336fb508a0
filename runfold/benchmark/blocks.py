"""Shell: two sides that take turns in short blocks, and their ratio.

Both run in this process, in blocks that take turns (floor, product, floor, …), so that what else
the machine does falls on both; each block begins after a garbage collection.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeAlias

from msgspec import Struct

APPENDS_PER_STEP = 2  # its start and its result

Numbers: TypeAlias = dict[str, Any]
Op: TypeAlias = Callable[[], Awaitable[object]]


class Block(Struct, frozen=True):
    """A stretch of one side: each operation's time, the rate, this process's CPU for one."""

    each_s: list[float]
    p50_s: float
    appends_s: float
    cpu_ms: float


class Sides(Struct, frozen=True):
    """The blocks in their order. The floor has one more: each of the product's is between two.
    `one_stream`: the floor in a single stream, where runs are spread over several; one behind each
    of the product's blocks."""

    floor: list[Block]
    product: list[Block]
    one_stream: list[Block]

    def ratios(self, name: str, of: Callable[[Block], float]) -> Numbers:
        """Each product block over the two floor blocks around it: the median, lowest, highest."""
        floor = [of(block) for block in self.floor]
        return over(name, [of(block) for block in self.product], floor)


def over(name: str, product: Sequence[float], floor: Sequence[float]) -> Numbers:
    """As `Sides.ratios`, of the blocks' numbers."""
    found = [2 * one / (floor[i] + floor[i + 1]) for i, one in enumerate(product)]
    return {name: median(found), "ratio_low": min(found), "ratio_high": max(found)}


async def block(loops: Sequence[Op], seconds: float) -> Block:
    """Each loop over and over for so many seconds, all at once."""
    gc.collect()
    each_s: list[float] = []
    cpu, begun = process_time(), perf_counter()

    async def repeat(op: Op) -> None:
        now = perf_counter()
        while not each_s or now - begun < seconds:
            await op()
            before, now = now, perf_counter()
            each_s.append(now - before)

    async with asyncio.TaskGroup() as group:
        for op in loops:
            group.create_task(repeat(op))
    wall_s, cpu_s, count = perf_counter() - begun, process_time() - cpu, len(each_s)
    return Block(each_s, median(each_s), APPENDS_PER_STEP * count / wall_s, 1000 * cpu_s / count)


def latency(sides: Sides) -> Numbers:
    """Of one run alone: a step's time over its two raw appends'."""
    return rounded(
        **sides.ratios("step_over_floor", lambda block: block.p50_s),
        floor_ms=1000 * median(block.p50_s for block in sides.floor),
        floor_p99_ms=1000 * _p99(sides.floor),
        step_ms=1000 * median(block.p50_s for block in sides.product),
        step_p99_ms=1000 * _p99(sides.product),
        blocks=_blocks(sides, lambda block: 1000 * block.p50_s),
    )


def rate(sides: Sides) -> Numbers:
    """Of many runs at once: appends a second over the raw ones, and CPU."""
    found: Numbers = {}
    if sides.one_stream:
        pairs = zip(sides.product, sides.one_stream, strict=True)
        found["rate_over_one_stream"] = median(our.appends_s / one.appends_s for our, one in pairs)
        found["one_stream_appends_s"] = median(one.appends_s for one in sides.one_stream)
    return rounded(
        **found,
        **sides.ratios("rate_over_floor", lambda block: block.appends_s),
        floor_appends_s=median(block.appends_s for block in sides.floor),
        product_appends_s=median(block.appends_s for block in sides.product),
        cpu_ms_per_step=median(block.cpu_ms for block in sides.product),
        cpu_ms_per_floor_pair=median(block.cpu_ms for block in sides.floor),
        blocks=_blocks(sides, lambda block: block.appends_s),
    )


def _blocks(sides: Sides, of: Callable[[Block], float]) -> Numbers:
    return {
        "floor": [of(block) for block in sides.floor],
        "product": [of(block) for block in sides.product],
        "one_stream": [of(block) for block in sides.one_stream],
    }


def _p99(blocks: Sequence[Block]) -> float:
    return percentile([s for block in blocks for s in block.each_s], 99)


def percentile(each: Sequence[float], part: int) -> float:
    ordered = sorted(each)
    return ordered[min(len(ordered) - 1, len(ordered) * part // 100)]


def spread(each: Sequence[float]) -> Numbers:
    """Of single measurements: median, 99th percentile, lowest, highest, how many."""
    return rounded(
        p50=median(each), p99=percentile(each, 99), low=min(each), high=max(each), of=len(each)
    )


def rounded(**numbers: Any) -> Numbers:
    """To four digits, whatever is a float, at any depth."""
    return {name: _short(value) for name, value in numbers.items()}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_short(one) for one in value]  # pyright: ignore[reportUnknownVariableType]
    return rounded(**value) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]
