"""What one worker process holds while 100 000 short runs go through it (R85).

    python bench/leaks.py [--runs 100000] [--fsync] [--json FILE] [--plot docs/plots/leaks.png]

A `runfold worker` of one agent, one step a run, on a server of its own; clients in a closed loop.
Every two seconds: the worker's memory, tasks, Python objects, open files, subscriptions; the
consumers; the server's memory. The server keeps every run, so its memory grows with their number.
The slopes are least squares over what follows the first tenth.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from runfold import (
    SAFE,
    Call,
    Complete,
    Completed,
    Context,
    EmbeddedServer,
    Fleet,
    Next,
    ToolCall,
    connect,
    turn,
)

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

from processes import Child, find, pss_bytes, rss_bytes

AT_ONCE = 64
EVERY_S = 2.0
WARM = 0.1
FLAT = ("rss_mb", "pss_mb", "tasks", "objects", "files", "subscriptions", "consumers")
UNITS = {"rss_mb": "MB", "pss_mb": "MB", "server_pss_mb": "MB"}


# ---- in the worker ---------------------------------------------------------------------------


async def _nothing(call: ToolCall) -> None: ...


@turn("one")
async def one(ctx: Context) -> Next:
    await ctx.tool(Call(name="noop", input=None, fn=_nothing, replay=SAFE))
    return Complete("done")


def _tell(number: int, frame: FrameType | None) -> None:
    found = {"tasks": len(asyncio.all_tasks()), "objects": len(gc.get_objects())}
    os.write(1, f"HOLDS {json.dumps(found, separators=(',', ':'))}\n".encode())


if __name__ != "__main__":  # `runfold worker bench/leaks.py:one`
    signal.signal(signal.SIGUSR1, _tell)


# ---- the measurement -------------------------------------------------------------------------


class Leaks:
    """A server, a worker, a client; `samples` of them, one for each two seconds."""

    def __init__(self, fleet: Fleet, worker: Child, monitor_url: str, server: int) -> None:
        self._fleet = fleet
        self._worker = worker
        self._monitor_url = monitor_url
        self._server = server
        self._done = 0
        self._begun = time.monotonic()
        self.samples: list[dict[str, float]] = []

    async def measure(self, runs: int) -> None:
        left = iter(range(runs))
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(self._client(left)) for _ in range(AT_ONCE)]
            sampling = group.create_task(self._sample())
            await asyncio.wait(clients)
            sampling.cancel()
        self.samples.append(await self._now())

    async def _client(self, left: Any) -> None:
        for number in left:
            started = await self._fleet.start("one", None, run_id=f"run-{number:06}")
            state = await self._fleet.wait(started.run_id, timeout_s=120)
            assert isinstance(state.outcome, Completed), state
            self._done += 1

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.samples.append(await self._now())
            if len(self.samples) % 10 == 0:
                print(json.dumps(self.samples[-1]), file=sys.stderr, flush=True)

    async def _now(self) -> dict[str, float]:
        pid = self._worker.pid
        os.kill(pid, signal.SIGUSR1)
        holds = json.loads((await self._worker.line("HOLDS", within_s=60))[1])
        told = await asyncio.gather(*(asyncio.to_thread(self._ask, what) for what in ASKED))
        connections, streams = told
        return {
            "runs": self._done,
            "seconds": round(time.monotonic() - self._begun, 1),
            "rss_mb": round(rss_bytes(pid) / 1e6, 2),
            "pss_mb": round(pss_bytes(pid) / 1e6, 2),
            **holds,
            "files": len(os.listdir(f"/proc/{pid}/fd")),
            "subscriptions": _oldest(connections)["subscriptions"],  # the worker came first
            "consumers": streams["consumers"],
            "server_pss_mb": round(pss_bytes(self._server) / 1e6, 2),
        }

    def _ask(self, what: str) -> Any:
        with urllib.request.urlopen(f"{self._monitor_url}/{what}", timeout=30) as answer:
            return json.load(answer)


ASKED = ("connz", "jsz")


def _oldest(found: Any) -> Any:
    return min(found["connections"], key=lambda connection: connection["cid"])


def slopes(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Growth for each 10 000 runs, by least squares, after the first tenth, while runs are
    worked: not when the last one has ended."""
    at_work = samples[:-1]
    warm = [one for one in at_work if one["runs"] >= WARM * samples[-1]["runs"]]
    found: dict[str, float] = {}
    for name in (*FLAT, "server_pss_mb"):
        points = [(one["runs"], one[name]) for one in warm]
        at = sum(x for x, _ in points) / len(points)
        mean = sum(y for _, y in points) / len(points)
        spread = sum((x - at) ** 2 for x, _ in points)
        along = sum((x - at) * (y - mean) for x, y in points)
        found[name] = round(10_000 * along / spread, 3) if spread else 0.0
    return found


async def measured(asked: argparse.Namespace) -> dict[str, Any]:
    agent = f"{__file__}:one"
    with tempfile.TemporaryDirectory(prefix="runfold-leaks-") as name:
        async with EmbeddedServer(name, fsync=asked.fsync) as server:
            pid = json.loads((Path(name) / "server.json").read_text())["pid"]
            async with Child(find("runfold"), "init", "--store", server.url) as init:
                await init.ended()
            command = [find("runfold"), "worker", agent, "--store", server.url]
            async with Child(*command) as worker:
                await worker.line("runfold:", within_s=60)
                async with connect(server.url) as fleet:
                    leaks = Leaks(fleet, worker, server.monitor_url, pid)
                    await leaks.measure(asked.runs)
    last = leaks.samples[-1]
    return {
        "command": f"python bench/leaks.py --runs {asked.runs}",
        "runs_s": round(last["runs"] / last["seconds"], 1),
        "fsync": asked.fsync,
        "first": leaks.samples[0],
        "last": last,
        "growth_per_10000_runs": slopes(leaks.samples),
        "samples": leaks.samples,
    }


# ---- what is shown ---------------------------------------------------------------------------


def rendered(found: dict[str, Any]) -> list[str]:
    growth, last = found["growth_per_10000_runs"], found["last"]
    samples = found["samples"]
    warm = next(one for one in samples if one["runs"] >= WARM * last["runs"])
    lines = [f"{last['runs']:.0f} runs, {found['runs_s']} a second", ""]
    lines.append(f"{'':<16}{'at a tenth':>12}{'at the end':>12}{'a 10 000 runs':>16}")
    for name, slope in growth.items():
        what = name.removesuffix("_mb") + (" (MB)" if name in UNITS else "")
        lines.append(f"{what:<16}{warm[name]:>12g}{last[name]:>12g}{slope:>+16g}")
    return lines


def plot(found: dict[str, Any], path: Path) -> None:
    """The chart of docs/performance.md."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = found["samples"]
    runs = [one["runs"] for one in samples]
    figure, (memory, counts) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    for name, label in (("rss_mb", "worker, RSS"), ("pss_mb", "worker, PSS")):
        memory.plot(runs, [one[name] for one in samples], label=label)
    kept = "server, PSS (it keeps every run)"
    memory.plot(runs, [one["server_pss_mb"] for one in samples], label=kept, color="0.7")
    for name in ("tasks", "files", "consumers"):
        counts.plot(runs, [one[name] for one in samples], label=name)
    memory.set_ylabel("MB")
    memory.set_title("One worker process, runs of one step")
    counts.set_xlabel("runs that have ended")
    for axes in (memory, counts):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a worker holds over many short runs.")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--fsync", action="store_true", help="slower, and nothing else")
    parser.add_argument("--json", type=Path, help="where the samples go")
    parser.add_argument("--plot", type=Path, help="where the chart goes; needs matplotlib")
    asked = parser.parse_args()
    found = asyncio.run(measured(asked))
    if asked.json:
        asked.json.write_text(json.dumps(found) + "\n")
    print("\n".join(rendered(found)))
    if asked.plot:
        plot(found, asked.plot)


if __name__ == "__main__":
    main()
