"""Shell: `runfold bench`: the workloads one after another, each on servers of its own."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias

from msgspec.structs import replace

from .blocks import Numbers
from .floor import raw_client
from .latency import latency_on
from .leaks import leaks_on
from .parked import measure as measure_parked
from .processes import Place, place
from .resume import resume_on
from .scale import Scale, Workload
from .steps import Progress, steps_in_files, steps_on
from .takeover import takeover_on
from .workers import workers_on

Measure: TypeAlias = Callable[[Place, Scale, Progress], Awaitable[Numbers]]

WHOLE: dict[Workload, tuple[str, Measure]] = {
    Workload.W2: ("resume", resume_on),
    Workload.W3: ("takeover", takeover_on),
    Workload.W4: ("latency", latency_on),
    Workload.W6: ("leaks", leaks_on),
}
"""Those that are one function on one server, with fsync."""

BUSY = (64, 256)
"""At so many runs at once it matters over how many streams they are spread."""


class Bench:
    """One whole measurement, in a directory that it removes."""

    def __init__(
        self,
        scale: Scale,
        *,
        workloads: Sequence[Workload] = tuple(Workload),
        replicas: int = 1,
        runs: int | None = None,
        progress: Progress,
    ) -> None:
        """`runs`: parked ones, and short ones, in place of the scale's."""
        self._scale = scale if runs is None else replace(scale, parked=(runs,), short=runs)
        self._runs = runs
        self._workloads = sorted(set(workloads))
        self._replicas = replicas
        self._progress = progress

    async def run(self) -> dict[str, Any]:
        """The result, as `--json` prints it."""
        started = perf_counter()
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="runfold-bench-") as name:
            folder = Path(name)
            machine, shards = await self._machine(folder, load)
            found: Numbers = {}
            took_s: dict[str, float] = {}
            for workload in self._workloads:
                begun = perf_counter()
                found |= await self._measured(workload, folder, shards)
                took_s[workload] = round(perf_counter() - begun, 1)
        return {
            "command": self._command(),
            "quick": self._scale.name == "quick",
            "seconds": round(perf_counter() - started, 1),
            "workload_seconds": took_s,
            "machine": machine,
            "replicas": self._replicas,
            "shards": shards,
            **found,
        }

    async def _measured(self, workload: Workload, folder: Path, shards: int) -> Numbers:
        if workload is Workload.W1:
            return await self._steps(folder, shards)
        if workload is Workload.W5:
            parked = [
                await measure_parked(runs, shards, self._progress) for runs in self._scale.parked
            ]
            return {"parked": parked}
        name, measure = WHOLE[workload]
        async with self._place(folder / workload) as at:
            return {name: await measure(at, self._scale, self._progress)}

    def _command(self) -> str:
        words = ["runfold bench"]
        words += [] if len(self._workloads) == len(Workload) else self._workloads
        words += [] if self._scale.name == "full" else [f"--{self._scale.name}"]
        words += [] if self._replicas == 1 else [f"--replicas {self._replicas}"]
        words += [] if self._runs is None else [f"--runs {self._runs}"]
        return " ".join(words)

    def _place(self, folder: Path, *, fsync: bool = True, shards: int | None = None) -> Any:
        return place(folder, fsync=fsync, replicas=self._replicas, shards=shards)

    async def _steps(self, folder: Path, shards: int) -> Numbers:
        """W1 with fsync and without; where there is one server, also with the other P."""
        found: Numbers = {}
        for fsync in (True, False):
            how = "fsync on" if fsync else "fsync off"
            async with self._place(folder / f"w1-{fsync}", fsync=fsync) as at:
                part = await steps_on(at, self._scale.levels, self._scale, how, self._progress)
                part["workers"] = await workers_on(
                    at, self._scale.levels, self._scale, how, self._progress
                )
            found |= part if fsync else {"no_fsync": part}
        if self._replicas > 1:
            return found
        other = 1 if shards > 1 else 4
        levels = [level for level in BUSY if level in self._scale.levels]
        how = f"fsync on, P={other}"
        async with self._place(folder / "w1-shards", shards=other) as at:
            part = await steps_on(at, levels, self._scale, how, self._progress)
        found[f"shards_{other}"] = {"shards": other, **part}
        found["file_store"] = await steps_in_files(folder / "files", self._scale, self._progress)
        return found

    async def _machine(self, folder: Path, load: float) -> tuple[dict[str, Any], int]:
        """What this is measured on, and over how many streams `init` spreads runs here."""
        async with self._place(folder / "look") as at, raw_client(at.url) as nc:
            server = str(nc._server_info["version"])
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        return {
            "cpus": os.cpu_count(),
            "cpu": _cpu_model(),
            "load": round(load, 2),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "event_loop": loop,
            "runfold": version("runfold"),
            "nats_py": version("nats-py"),
            "nats_server": server,
            "file_system": _file_system(folder),
        }, at.shards


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the file system that holds the folder; `unknown` where /proc does not say."""
    mounts = Path("/proc/mounts")
    found = [line.split()[1:3] for line in mounts.open()] if mounts.exists() else []
    holding = [(len(at), kind) for at, kind in found if folder.resolve().is_relative_to(at)]
    return max(holding)[1] if holding else "unknown"
