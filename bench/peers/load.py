"""What all peers share: values, the closed loop, what is printed. Standard library only.

One clock for all processes of the machine: CLOCK_MONOTONIC in nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from processes import Track, cpu_s, pss_bytes, tree

STEPS = 10
VALUE_BYTES = 512
_POOL_BYTES = 80_000
_POOL = base64.b64encode(os.urandom(_POOL_BYTES)).decode()
"""Random text: no store's compression makes nothing of it."""

now = time.monotonic_ns


def step_value(index: int) -> dict[str, Any]:
    """What each step returns: 512 bytes as compact JSON, with the instant it was called at."""
    value = {"i": index, "t": now(), "pad": ""}
    begin = value["t"] // 1000 % _POOL_BYTES
    missing = VALUE_BYTES - len(json.dumps(value, separators=(",", ":")))
    return value | {"pad": _POOL[begin : begin + missing]}


INPUT = {"kind": "run", "pad": _POOL[: VALUE_BYTES - len('{"kind":"run","pad":""}')]}


@dataclass
class Ran:
    """One run, as its client saw it: instants in ns."""

    begun: int
    ended: int
    steps: Sequence[int]


RunOne = Callable[[int], Awaitable[Sequence[int]]]
"""Takes a number that no other run has; returns when each step was called, once all is done."""


async def closed_loop(
    run_one: RunOne, at_once: int, seconds: float, first: int
) -> tuple[list[Ran], float]:
    """So many clients, each beginning its next run when its last is done, until time is up; then
    what they are at is waited for. Returns the runs and the wall seconds of it all."""
    ran: list[Ran] = []
    number = first
    end = time.monotonic() + seconds

    async def client() -> None:
        nonlocal number
        while time.monotonic() < end:
            mine, number = number, number + 1
            begun = now()
            steps = await run_one(mine)
            ran.append(Ran(begun, now(), steps))

    begun = time.monotonic()
    await asyncio.gather(*(client() for _ in range(at_once)))
    return ran, time.monotonic() - begun


async def measure_w1(
    run_one: RunOne,
    pids: Callable[[], Sequence[int]],
    asked: argparse.Namespace,
    stored_bytes: Callable[[], int],
) -> AsyncIterator[dict[str, Any]]:
    """W1, one result for each concurrency. `pids`: the processes that the system consists of, by
    which CPU and memory are counted; this one is among them where it does the system's work."""
    await closed_loop(run_one, 4, min(0.7, asked.secs), 0)
    for index, at_once in enumerate(asked.at_once):
        before, ours = stored_bytes(), time.process_time()
        with Track(pids()) as track:
            ran, wall_s = await closed_loop(run_one, at_once, asked.secs, 1_000_000 * (index + 1))
        ours = time.process_time() - ours
        client_s = 0.0 if os.getpid() in pids() else ours
        yield {
            "at_once": at_once,
            **summary(ran, wall_s),
            "cpu_ms_per_run": round(1000 * track.cpu_s / len(ran), 3),
            "client_cpu_ms_per_run": round(1000 * client_s / len(ran), 3),
            "memory_mb": round(track.peak_bytes / 1e6, 1),
            "stored_b_per_run": round((stored_bytes() - before) / len(ran)),
            "other_cpu_cores": track.others(client_s),
        }


async def measure_w5(
    asked: argparse.Namespace,
    start: Callable[[int], Awaitable[object]],
    all_parked: Callable[[], Awaitable[object]],
    roots: Sequence[int],
    stored_bytes: Callable[[], int],
    settle_s: float,
) -> dict[str, Any]:
    """W5: `start` takes the number of a run; `all_parked` is over once all of them wait, and
    nothing is left to do for them `settle_s` later. `roots`: whose processes are the system."""

    def of_all(one: Callable[[int], float]) -> float:
        return sum(one(pid) for root in roots for pid in tree(root))

    left = iter(range(asked.count))

    async def client() -> None:
        for number in left:
            await start(number)

    before, stored, begun = of_all(pss_bytes), stored_bytes(), time.monotonic()
    await asyncio.gather(*(client() for _ in range(64)))
    started_s = time.monotonic() - begun
    await all_parked()
    parked_s = time.monotonic() - begun
    await asyncio.sleep(settle_s)
    used = of_all(cpu_s)
    await asyncio.sleep(5)
    return {
        "parked": asked.count,
        "started_s": round(started_s, 1),
        "parked_s": round(parked_s, 1),
        "memory_mb": round(of_all(pss_bytes) / 1e6, 1),
        "memory_before_mb": round(before / 1e6, 1),
        "idle_cores": round((of_all(cpu_s) - used) / 5, 3),
        "stored_b_per_run": round((stored_bytes() - stored) / asked.count),
    }


def summary(ran: Sequence[Ran], wall_s: float) -> dict[str, Any]:
    """Rates and latencies of these runs."""
    whole = [(one.ended - one.begun) / 1e6 for one in ran]
    first = [(one.steps[0] - one.begun) / 1e6 for one in ran]
    gaps = [
        (later - earlier) / 1e6
        for one in ran
        for earlier, later in zip(one.steps, one.steps[1:], strict=False)
    ]
    return {
        "runs": len(ran),
        "runs_s": round(len(ran) / wall_s, 2),
        "run_p50_ms": part(whole, 0.5),
        "run_p99_ms": part(whole, 0.99),
        "step_p50_ms": part(gaps, 0.5),
        "first_p50_ms": part(first, 0.5),
    }


def signal_summary(each_ms: Sequence[float]) -> dict[str, Any]:
    """Of the times from a signal to the call of the next step."""
    return {
        "signals": len(each_ms),
        "signal_p50_ms": part(each_ms, 0.5),
        "signal_p99_ms": part(each_ms, 0.99),
        "signal_max_ms": part(each_ms, 1),
    }


def part(numbers: Sequence[float], share: float) -> float | None:
    """The quantile, rounded; None of none."""
    ordered = sorted(numbers)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else None


def emit(workload: str, **result: Any) -> None:
    """One result, on a line that run.py finds."""
    print("RESULT " + json.dumps({"w": workload, **result}), flush=True)


def say(word: str, *parts: object) -> None:
    """A line to the program that watches this one."""
    print(word, *parts, flush=True)


def options(description: str, variants: Sequence[str]) -> argparse.Namespace:
    """The command line that all peers have. From here on SIGTERM ends what was started, too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("workload")
    parser.add_argument("variant", choices=variants)
    parser.add_argument("--secs", type=float, default=5.0, help="W1: of each concurrency")
    parser.add_argument("--at-once", type=numbers, default=[1, 16, 64], help="W1: concurrencies")
    parser.add_argument("--steps", type=numbers, default=[100, 1000], help="W2: lengths")
    parser.add_argument("--state", default="", help="W2: how a long run is written, see peers.md")
    parser.add_argument("--count", type=int, default=100, help="W3, W4, W5: how many")
    parser.add_argument("--tuned", default="", help="W3, W4: another setting, see peers.md")
    parser.add_argument("--child", default="", help="the folder of a program that calls itself")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]
