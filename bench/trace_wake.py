"""Where the time from an approval to the approved call goes (R83): each stage's median, one worker.

usage: python bench/trace_wake.py [--no-fsync] [--samples 100]

Door and worker are two processes on one machine and say by its clock when each has done what.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import time
from typing import Any

from journal.fleet import Fleet
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.stores.tasks import TaskQueue
from journal.terms import Complete, Next
from journal.views import AwaitingApproval
from worker.agent import turn
from worker.context import Call, Context
from worker.dispatch import Dispatcher
from worker.server import EmbeddedServer
from worker.service import Worker
from worker.tools import UNSAFE, ToolCall

STAGES = (
    *("door read", "signal stored", "task stored"),
    *("worker has task", "worker read", "claim stored", "start stored", "called"),
)
STORED = {"signal": "signal stored", "claim": "claim stored", "step.started": "start stored"}
said: list[tuple[str, str, float]] = []  # run, stage, when


async def _stamp(call: ToolCall) -> None:
    said.append((call.run_id, "called", time()))


@turn("gated")
async def gated(ctx: Context) -> Next:
    """One approved call."""
    await ctx.tool(Call(name="stamp", input=1, fn=_stamp, replay=UNSAFE, approval="go on?"))
    return Complete("done")


def watch(kind: type[Any], method: str, stage: Callable[..., str], *, before: bool = False) -> None:
    """Note when the method was called, or has returned."""
    inner: Callable[..., Awaitable[Any]] = getattr(kind, method)

    async def outer(self: Any, run: Any, *args: Any, **options: Any) -> Any:
        if before:
            said.append((run.run_id, stage(), time()))
        found = await inner(self, run, *args, **options)
        if not before:
            said.append((run, stage(*args), time()))
        return found

    setattr(kind, method, outer)


def watch_store(reader: str) -> None:
    watch(JetStreamStore, "resume", lambda: reader)
    watch(JetStreamStore, "append", lambda entry: STORED.get(entry.type, ""))


def serve(url: str, into: str) -> None:
    watch_store("worker read")
    watch(Dispatcher, "look", lambda: "worker has task", before=True)

    async def body() -> None:
        ready: Any = lambda: os.write(1, b"ready\n")  # noqa: E731
        worker = Worker(url, [gated], concurrency=64, on_ready=ready)
        stops: set[Any] = set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGTERM, lambda: stops.add(asyncio.ensure_future(worker.stop()))
        )
        await worker.serve()

    asyncio.run(body())
    Path(into).write_text(json.dumps(said))


async def measure(folder: str, into: Path, *, fsync: bool, samples: int) -> list[float]:
    watch_store("door read")
    watch(TaskQueue, "publish", lambda *_: "task stored")
    async with EmbeddedServer(folder, fsync=fsync) as server:
        await provision(server.url, replicas=1)
        async with JetStreamStore(server.url) as store:
            command = [sys.executable, __file__, "--serve", server.url, str(into)]
            worker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            assert worker.stdout is not None
            await worker.stdout.readline()
            began = [await approve(Fleet(store), f"r{n}") for n in range(samples)]
            worker.terminate()
            await worker.wait()
    return began


async def approve(fleet: Fleet, run: str) -> float:
    await fleet.start("gated", None, run_id=run)
    waiting = (await fleet.wait(run, timeout_s=20)).outcome
    assert isinstance(waiting, AwaitingApproval)
    began = time()
    await fleet.signal(run, "approve", {"marker": waiting.pending[0].marker})
    await fleet.wait(run, timeout_s=20)
    return began


def show(began: list[float]) -> None:
    each: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for number, since in enumerate(began):
        first: dict[str, float] = {}
        for run, stage, when in sorted(said, key=lambda one: one[2]):
            if run == f"r{number}" and when > since:
                first.setdefault(stage, when)
        for stage in STAGES:
            each[stage].append(1000 * (first[stage] - since))
    before = low_before = 0.0
    print(f"{'':<18}{'median ms':>16}{'fast ones':>16}")
    for stage in STAGES:
        at, low = median(each[stage]), sorted(each[stage])[len(began) // 10]
        print(f"{stage:<18}{at:>9.2f}{at - before:>+7.2f}{low:>9.2f}{low - low_before:>+7.2f}")
        before, low_before = at, low
    total = sorted(each["called"])
    print(f"p50 {median(total):.2f} ms, p99 {total[len(total) * 99 // 100]:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-fsync", action="store_true")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--serve", nargs=2)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    with tempfile.TemporaryDirectory(prefix="runfold-wake-") as folder:
        into = Path(folder) / "worker.json"
        began = asyncio.run(
            measure(folder, into, fsync=not options.no_fsync, samples=options.samples)
        )
        said.extend(json.loads(into.read_text()))
    show(began)


if __name__ == "__main__":
    main()
