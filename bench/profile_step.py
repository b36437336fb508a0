"""Where a durable step's CPU goes: 64 runs at once under cProfile, by module and by function.

usage: python bench/profile_step.py [--fsync] [--floor] [--seconds 4] [--top 30]

cProfile makes small functions look dearer than they are: trust the order, and the totals without
it that `runfold bench` prints (`cpu_ms_per_step`).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from runfold.benchmark import floor
from runfold.benchmark.blocks import block
from runfold.benchmark.steps import StepLoop, open_run, payloads_of
from worker.server import EmbeddedServer

RUNS = 64
ROOT = Path(__file__).parent.parent


async def measure(options: argparse.Namespace) -> tuple[cProfile.Profile, int]:
    with tempfile.TemporaryDirectory(prefix="runfold-profile-") as folder:
        async with EmbeddedServer(folder, fsync=options.fsync) as server:
            await provision(server.url, replicas=1, shards=1)
            async with (
                JetStreamStore(server.url) as store,
                floor.raw_client(server.url) as nc,
                AsyncExitStack() as stack,
            ):
                if options.floor:
                    payloads = await payloads_of(store)
                    loops = [floor.RawLoop(nc, f"{i}", payloads).pair for i in range(RUNS)]
                else:
                    loops = [StepLoop(await open_run(store, stack)).step for _ in range(RUNS)]
                await block(loops, 0.5)
                profile = cProfile.Profile()
                profile.enable()
                one = await block(loops, options.seconds)
                profile.disable()
    return profile, len(one.each_s)


def package(place: tuple[str, int, str]) -> str:
    file, _, function = place
    if file.startswith(str(ROOT / ".venv")) or "site-packages" in file:
        return "nats-py" if "/nats/" in file else "other libraries"
    if Path(file).is_relative_to(ROOT):
        return Path(file).relative_to(ROOT).as_posix()
    if file == "~":
        return f"built in: {function.strip('<>')[:60]}"
    return f"stdlib: {Path(file).parent.name}/{Path(file).name}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--floor", action="store_true")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--top", type=int, default=30)
    options = parser.parse_args()
    profile, steps = asyncio.run(measure(options))
    stats: Any = pstats.Stats(profile)
    own: Counter[str] = Counter()
    for place, (_, _, own_s, _, _) in stats.stats.items():
        if "epoll" not in place[2]:
            own[package(place)] += own_s
    total = sum(own.values())
    print(f"{steps} steps; {1e6 * total / steps:.0f} µs each under the profiler, of which")
    for where, seconds in own.most_common(24):
        print(f"{100 * seconds / total:5.1f} %  {where}")
    stats.sort_stats("tottime").print_stats(options.top)


if __name__ == "__main__":
    main()
