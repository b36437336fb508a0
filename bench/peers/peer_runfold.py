"""Runfold on a nats-server: `runfold worker` processes, and a client that starts and waits.

usage: peer_runfold.py w1|w2|w3|w4|w5 always|default [options]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from load import INPUT, emit, measure_w1, measure_w5, now, options, signal_summary
from processes import Child, blocks, find, nats_server
from runfold_agents import GATES

from runfold import AwaitingApproval, Completed, Fleet, connect

HERE = Path(__file__).resolve().parent
AGENTS = ("ten", "long", "slow", "waiter")
LONG_S = 400.0
TAKEOVERS = 3


class System:
    """A server, set up by `runfold init` as it is by default, and a client of it."""

    def __init__(self, folder: Path, url: str, server: int, fleet: Fleet) -> None:
        self.folder = folder
        self.fleet = fleet
        self._url = url
        self._server = server

    @asynccontextmanager
    async def worker(self, *worker_options: object) -> AsyncIterator[Child]:
        """A worker process that pulls; killed at the end of the block."""
        agents = [f"{HERE / 'runfold_agents.py'}:{name}" for name in AGENTS]
        command = [find("runfold"), "worker", *agents, "--store", self._url]
        env = {"PYTHONPATH": str(HERE)}
        async with Child(*command, *map(str, worker_options), env=env) as child:
            await child.line("runfold:", within_s=60)  # worker … is ready
            yield child

    def pids(self, *workers: Child) -> list[int]:
        return [self._server, *(worker.pid for worker in workers)]

    async def run(self, number: int) -> list[int]:
        """One run of ten steps, from its start to its answer."""
        started = await self.fleet.start("ten", INPUT, run_id=f"ten-{number}")
        state = await self.fleet.wait(started.run_id, timeout_s=600)
        assert isinstance(state.outcome, Completed), state
        answer: Any = state.outcome.message.content
        return answer

    async def marker(self, run: str, *, within_s: float = 60) -> str:
        """What it is that the run waits for a person for."""
        state = await self.fleet.wait(run, timeout_s=within_s)
        assert isinstance(state.outcome, AwaitingApproval), state
        return state.outcome.pending[0].marker

    async def approve(self, run: str, marker: str) -> None:
        await self.fleet.signal(run, "approve", {"marker": marker})


@asynccontextmanager
async def system(variant: str) -> AsyncIterator[System]:
    with tempfile.TemporaryDirectory(prefix="peer-runfold-") as name:
        folder = Path(name) / "nats"
        async with nats_server(folder, fsync=variant == "always") as (url, server):
            async with Child(find("runfold"), "init", "--store", url) as init:
                await init.ended()
            async with connect(url) as fleet:
                yield System(folder, url, server, fleet)


async def w1(on: System, asked: argparse.Namespace) -> None:
    """Ten steps a run. The worker takes as many runs at once as there are clients."""
    concurrency = max(64, *asked.at_once)
    async with on.worker("--concurrency", concurrency) as worker:
        pids = on.pids(worker)
        async for found in measure_w1(on.run, lambda: pids, asked, lambda: blocks(on.folder)):
            emit("w1", **found)


async def w2(on: System, asked: argparse.Namespace) -> None:
    """A long run waits for a person; the worker is killed; a new one is told to go on with it.
    From the approval to the call of the next step."""
    state = asked.state or "replay"
    for steps in asked.steps:
        run = f"long-{steps}"
        begun = time.monotonic()
        async with on.worker():
            await on.fleet.start("long", {"steps": steps, "state": state}, run_id=run)
            marker = await on.marker(run, within_s=LONG_S)
        built_s = time.monotonic() - begun
        each: list[float] = []
        for number in range(GATES):
            async with on.worker() as worker:
                said = now()
                await on.approve(run, marker)
                each.append((int((await worker.line("AT", within_s=60))[2]) - said) / 1e6)
                if number + 1 < GATES:
                    marker = await on.marker(run)
        replay_ms = round(statistics.median(each), 2)
        emit("w2", state=state, steps=steps, replay_ms=replay_ms, build_s=round(built_s, 1))


async def w3(on: System, asked: argparse.Namespace) -> None:
    """The worker is killed in a step that may be made again, with another one there."""
    tuned = ["--ack-wait", asked.tuned] if asked.tuned else []
    each: list[float] = []
    for number in range(TAKEOVERS):
        async with on.worker(*tuned) as holder:
            await on.fleet.start("slow", None, run_id=f"slow-{number}")
            await holder.line("AT", within_s=60)
            async with on.worker(*tuned) as other:
                await holder.kill()
                killed = now()
                each.append((int((await other.line("AT", within_s=90))[2]) - killed) / 1e6)
                await on.fleet.cancel(f"slow-{number}")
    emit("w3", tuned=asked.tuned, takeover_ms=round(statistics.median(each), 1), all_ms=each)


async def w4(on: System, asked: argparse.Namespace) -> None:
    """From an approval to the call of the step behind it."""
    async with on.worker() as worker:
        runs = [f"waiter-{number}" for number in range(asked.count)]
        for run in runs:
            await on.fleet.start("waiter", INPUT, run_id=run)
        markers = {run: await on.marker(run) for run in runs}
        said: dict[str, int] = {}

        async def approve() -> None:
            for run in runs:
                said[run] = now()
                await on.approve(run, markers[run])
                await asyncio.sleep(random.uniform(0.01, 0.03))

        approving = asyncio.create_task(approve())
        told = [await worker.line("AT", within_s=60) for _ in runs]
        await approving
    each = [(int(at) - said[run]) / 1e6 for _, run, at in told]
    emit("w4", **signal_summary(each))


async def w5(on: System, asked: argparse.Namespace) -> None:
    """So many runs wait for a person."""

    async def start(number: int) -> None:
        await on.fleet.start("waiter", INPUT, run_id=f"parked-{number}")

    async def parked() -> int:
        asking = frozenset({"awaiting_approval"})
        return len([run async for run, _ in on.fleet.store.heads(status=asking)])

    async def all_parked() -> None:
        async with asyncio.timeout(LONG_S):
            while await parked() < asked.count:  # noqa: ASYNC110
                await asyncio.sleep(0.5)

    async with on.worker() as worker:
        pids = on.pids(worker)
        found = await measure_w5(
            asked, start, all_parked, pids, lambda: blocks(on.folder), settle_s=3
        )
        emit("w5", **found)


WORKLOADS = {"w1": w1, "w2": w2, "w3": w3, "w4": w4, "w5": w5}


async def main() -> None:
    asked = options("Runfold on a nats-server.", ["always", "default"])
    async with system(asked.variant) as on:
        await WORKLOADS[asked.workload](on, asked)


if __name__ == "__main__":
    asyncio.run(main())
