"""Shell: `runfold bench fleet`: a fleet's rates beside the raw appends, and its latencies (R83).

Worker processes on a server of the bench's own. Rates: runs of ten no-op steps through 1 and 2
worker processes at concurrency 64, beside raw appends by one client in blocks around them.
Latencies come from the clocks of one machine: ours at the call, the workers' in the ledger.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal as signals
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, time
from typing import Any

from journal.fleet import Fleet
from journal.ids import RunId
from journal.records import Claim, Release, RunCompleted
from journal.store import Store
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.terms import Complete, Next
from journal.views import AwaitingApproval, Completed, instant
from worker.agent import turn
from worker.context import Call, Context
from worker.server import EmbeddedServer
from worker.service import Worker
from worker.tools import SAFE, UNSAFE, ToolCall

from .bench import RUNS, RawLoop, block, payloads_of, raw_client

STEPS = 10
ACK_WAIT_S = 2.0


# ---- the agents, in the worker processes -------------------------------------------------------


async def _nothing(call: ToolCall) -> None: ...


@turn("bench")
async def steps_agent(ctx: Context) -> Next:
    """Ten durable no-op steps."""
    for _ in range(STEPS):
        await ctx.tool(Call(name="noop", input=None, fn=_nothing, replay=SAFE))
    return Complete("done")


async def _stamp(call: ToolCall) -> float:
    return time()


@turn("gated")
async def gated_agent(ctx: Context) -> Next:
    """A step, an approval, a step: each returns when it was called."""
    first = await ctx.tool(Call(name="stamp", input=1, fn=_stamp, replay=SAFE))
    gated = Call(name="stamp", input=2, fn=_stamp, replay=UNSAFE, approval="go on?")
    second = await ctx.tool(gated)
    return Complete([first.output, second.output])


async def _slow(call: ToolCall) -> None:
    await asyncio.sleep(0.05)


@turn("slow")
async def slow_agent(ctx: Context) -> Next:
    """Two hundred steps of 50 ms: something to take over."""
    for _ in range(200):
        await ctx.tool(Call(name="slow", input=None, fn=_slow, replay=SAFE))
    return Complete("done")


def serve(url: str) -> None:
    """A worker process; it says `ready` on stdout."""

    async def body() -> None:
        worker = Worker(
            url,
            [steps_agent, gated_agent, slow_agent],
            concurrency=RUNS,
            ack_wait_s=ACK_WAIT_S,
            on_ready=lambda: os.write(1, b"ready\n"),  # pyright: ignore[reportArgumentType]
        )
        loop = asyncio.get_running_loop()
        stops: set[asyncio.Task[None]] = set()

        def stop() -> None:
            stops.add(asyncio.ensure_future(worker.stop()))

        loop.add_signal_handler(signals.SIGTERM, stop)
        await worker.serve()

    asyncio.run(body())


# ---- the measurement -----------------------------------------------------------------------


class FleetBench:
    """One whole measurement, with servers and workers of its own."""

    def __init__(self, *, quick: bool, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._runs = 128 if quick else 640
        self._samples = 20 if quick else 100
        self._takeovers = 2 if quick else 5

    async def run(self) -> dict[str, Any]:
        """The result, as `--json` prints it."""
        started = perf_counter()
        with tempfile.TemporaryDirectory(prefix="runfold-bench-") as name:
            async with EmbeddedServer(Path(name), fsync=True) as server:
                await provision(server.url, replicas=1)
                async with JetStreamStore(server.url) as store:
                    found = await self._measure(server.url, store)
        return {
            "command": "runfold bench fleet",
            "seconds": round(perf_counter() - started, 1),
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
            **found,
        }

    async def _measure(self, url: str, store: JetStreamStore) -> dict[str, Any]:
        fleet = Fleet(store)
        found: dict[str, Any] = {}
        async with _worker(url) as first:
            found["worker_start_s"] = first.ready_s
            self._progress("warming up")
            await self._throughput(fleet, "warm", RUNS)
            before = await _floor(url, store)
            self._progress("rates, 1 worker")
            one = await self._throughput(fleet, "one", self._runs)
            after = await _floor(url, store)
            found["workers_1"] = _beside(one, (before + after) / 2)
            self._progress("latencies")
            found |= await self._latencies(fleet)
            async with _worker(url):
                self._progress("rates, 2 workers")
                before = await _floor(url, store)
                two = await self._throughput(fleet, "two", self._runs)
                after = await _floor(url, store)
                found["workers_2"] = _beside(two, (before + after) / 2)
        self._progress("takeover, hand-over")
        found["takeover_s"] = await self._handed(url, fleet, "kill", signals.SIGKILL)
        found["hand_over_s"] = await self._handed(url, fleet, "term", signals.SIGTERM)
        return found

    async def _throughput(self, fleet: Fleet, name: str, runs: int) -> float:
        """Runs a second, from the first start to the last end."""
        begun = perf_counter()
        ids = [f"{name}-{index}" for index in range(runs)]
        gate = asyncio.Semaphore(32)

        async def one(run: str) -> None:
            async with gate:
                await fleet.start("bench", run, run_id=run)

        async with asyncio.TaskGroup() as group:
            for run in ids:
                group.create_task(one(run))
        left = set(ids)
        while left:
            for run in list(left):
                if (await fleet.get(run)).outcome is None:
                    await asyncio.sleep(0.02)
                    break
                left.discard(run)
        return runs / (perf_counter() - begun)

    async def _latencies(self, fleet: Fleet) -> dict[str, Any]:
        start_ms: list[float] = []
        approve_ms: list[float] = []
        for index in range(self._samples):
            run = f"gated-{index}"
            called = time()
            await fleet.start("gated", index, run_id=run)
            waiting = (await fleet.wait(run, timeout_s=20)).outcome
            assert isinstance(waiting, AwaitingApproval)
            said = time()
            await fleet.signal(run, "approve", {"marker": waiting.pending[0].marker})
            done = (await fleet.wait(run, timeout_s=20)).outcome
            assert isinstance(done, Completed)
            first, second = done.message.content
            start_ms.append(1000 * (first - called))
            approve_ms.append(1000 * (second - said))
        return {
            "start_to_first_step_ms": _spread(start_ms),
            "approve_to_next_step_ms": _spread(approve_ms),
        }

    async def _handed(
        self, url: str, fleet: Fleet, name: str, how: signals.Signals
    ) -> dict[str, float]:
        """From the signal to the next claim, by the records' times."""
        each: list[float] = []
        for index in range(self._takeovers):
            run = f"{name}-{index}"
            async with _worker(url) as holder:
                await fleet.start("slow", index, run_id=run)
                await _claims(fleet.store, run, 1)
                async with _worker(url):
                    sent = time()
                    holder.process.send_signal(how)
                    claims = await _claims(fleet.store, run, 2)
                    given = [r for r in await _records(fleet.store, run) if isinstance(r, Release)]
                    begun = _at(given[-1]) if given else sent
                    each.append(_at(claims[1]) - begun)
                    await fleet.cancel(run)
                    await fleet.wait(run, timeout_s=20)
        return {"p50": round(median(each), 3), "max": round(max(each), 3), "of": len(each)}


def _beside(runs_s: float, floor_appends_s: float) -> dict[str, float]:
    """A run is its start, claim, end and two records a step."""
    records = runs_s * (2 * STEPS + 3)
    return {
        "runs_s": round(runs_s, 1),
        "steps_s": round(runs_s * STEPS, 1),
        "records_s": round(records, 1),
        "floor_appends_s": round(floor_appends_s, 1),
        "records_over_floor": round(records / floor_appends_s, 3),
    }


async def _floor(url: str, store: JetStreamStore) -> float:
    payloads = await payloads_of(store)
    async with raw_client(url) as nc:
        name = os.urandom(4).hex()
        loops = [RawLoop(nc, f"{name}-{index}", payloads).pair for index in range(RUNS)]
        return (await block(loops, 2.0)).appends_s


async def _records(store: Store, run: str) -> Sequence[Any]:
    return (await store.load(RunId(run))).records


async def _claims(store: Store, run: str, count: int) -> list[Claim]:
    while True:
        records = await _records(store, run)
        found = [record for record in records if isinstance(record, Claim)]
        if len(found) >= count:
            return found
        if any(isinstance(record, RunCompleted) for record in records):
            raise RuntimeError(f"run {run} ended before it was handed over")
        await asyncio.sleep(0.01)


def _at(record: Any) -> float:
    return instant(record.at).timestamp()


def _spread(each: list[float]) -> dict[str, float]:
    ordered = sorted(each)
    return {
        "p50": round(median(ordered), 2),
        "p99": round(ordered[len(ordered) * 99 // 100], 2),
        "of": len(ordered),
    }


class _Process:
    def __init__(self, process: asyncio.subprocess.Process, ready_s: float) -> None:
        self.process = process
        self.ready_s = ready_s


@asynccontextmanager
async def _worker(url: str) -> AsyncGenerator[_Process]:
    """A worker process, from the moment it pulls until it is killed."""
    begun = perf_counter()
    code = f"from runfold.bench_fleet import serve; serve({url!r})"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            await process.stdout.readline()
        yield _Process(process, round(perf_counter() - begun, 2))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def render_fleet(result: dict[str, Any]) -> list[str]:
    """The result for people."""
    lines: list[str] = []
    for workers in (1, 2):
        found = result[f"workers_{workers}"]
        lines.append(
            f"{workers} worker(s), {RUNS} at once: {found['runs_s']:.0f} runs/s, "
            f"{found['steps_s']:.0f} steps/s; {found['records_s']:.0f} records/s beside "
            f"{found['floor_appends_s']:.0f} raw appends/s: {found['records_over_floor']:.2f}"
        )
    for what, name, target in (
        ("start → first step", "start_to_first_step_ms", ""),
        ("approve → next step", "approve_to_next_step_ms", " (goal: 3, 10)"),
    ):
        found = result[name]
        lines.append(f"{what}: p50 {found['p50']} ms, p99 {found['p99']} ms{target}")
    takeover, handed = result["takeover_s"], result["hand_over_s"]
    lines.append(f"takeover after SIGKILL: {takeover['p50']} s (ack wait {ACK_WAIT_S:g} s)")
    lines.append(f"hand-over on SIGTERM, from the release: {handed['p50']} s (goal: 0.1)")
    lines.append(f"worker process to first pull: {result['worker_start_s']} s (goal: 1)")
    return lines
