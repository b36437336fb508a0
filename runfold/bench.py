"""Shell: `runfold bench`: a durable step beside the raw appends it stands on, as ratios (R81, R86).

Both sides run in this process, on one server, in blocks that take turns (floor, step, floor, …), so
that what else the machine does falls on both; each block begins after a garbage collection. The
floor is nats-py's own `request` with the expected-sequence header: the client the product stands
on, the bytes of the product's own records, the product's own stream, and none of its code.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import platform
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, TypeAlias

from msgspec import Struct
from nats.aio.client import Client

from journal.doors import start
from journal.handle import Journal
from journal.store import Store
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision, stream_config
from worker.server import EmbeddedServer

RUNS = 64
TARGETS = ("≤ 1.15", "≥ 0.9", "≤ 0.35")  # R81, R81, R86
APPENDS_PER_STEP = 2  # its start and its result

Numbers: TypeAlias = dict[str, float]
Op: TypeAlias = Callable[[], Awaitable[object]]


class Block(Struct, frozen=True):
    """A stretch of one side: each operation's time, the rate, this process's CPU for one."""

    each_s: list[float]
    p50_s: float
    appends_s: float
    cpu_ms: float


class Sides(Struct, frozen=True):
    """The blocks in their order. The floor has one more: each of the product's is between two."""

    floor: list[Block]
    product: list[Block]

    def ratios(self, name: str, of: Callable[[Block], float]) -> Numbers:
        """Each product block over the two floor blocks around it: the median, lowest, highest."""
        found = [
            2 * of(block) / (of(self.floor[i]) + of(self.floor[i + 1]))
            for i, block in enumerate(self.product)
        ]
        return {name: median(found), "ratio_low": min(found), "ratio_high": max(found)}


class Bench:
    """One whole measurement. It brings its own servers, in a directory that it removes."""

    def __init__(self, *, quick: bool, progress: Callable[[str], None]) -> None:
        self._quick = quick
        self._progress = progress
        self._server_version = ""
        # Many short blocks: both sides must meet the same moods of a busy machine.
        self._rounds, self._block_s = (6, 0.3) if quick else (20, 0.6)

    async def run(self) -> dict[str, Any]:
        """The result, as `--json` prints it."""
        started = perf_counter()
        with tempfile.TemporaryDirectory(prefix="runfold-bench-") as name:
            folder = Path(name)
            safe = await self._on_server(folder / "fsync", fsync=True)
            unsafe = await self._on_server(folder / "no-fsync", fsync=False)
            file_store = await self._on_files(folder / "files")
            file_system = _file_system(folder)
        return {
            "command": "runfold bench --quick" if self._quick else "runfold bench",
            "quick": self._quick,
            "seconds": round(perf_counter() - started, 1),
            "machine": {
                "cpus": os.cpu_count(),
                "python": platform.python_version(),
                "nats_server": self._server_version,
                "file_system": file_system,
            },
            **safe,
            "no_fsync": unsafe,
            "file_store": file_store,
        }

    async def _on_server(self, data: Path, *, fsync: bool) -> dict[str, Numbers]:
        how = "fsync on" if fsync else "fsync off"
        async with EmbeddedServer(data, fsync=fsync) as server:
            await provision(server.url, replicas=1)
            async with JetStreamStore(server.url) as store, raw_client(server.url) as nc:
                self._server_version = str(nc._server_info["version"])
                payloads = await payloads_of(store)
                one = await self._beside(how, store, [RawLoop(nc, "one", payloads).pair])
                loops = [RawLoop(nc, f"many-{i}", payloads).pair for i in range(RUNS)]
                many = await self._beside(how, store, loops)
        return {"one_run": _latency(one), f"runs_{RUNS}": _rate(many)}

    async def _on_files(self, folder: Path) -> Numbers:
        store = FileStore(folder)
        with closing(_RawFile(folder / "floor", await payloads_of(store))) as loop:
            return _latency(await self._beside("file store", store, [loop.pair]))

    async def _beside(self, how: str, store: Store, floor: Sequence[Op]) -> Sides:
        """Measure the floor's loops beside as many runs on the store."""
        async with AsyncExitStack() as stack:
            steps = [_StepLoop(await _open_run(store, stack)).step for _ in floor]
            for warm in (floor, steps):
                await block(warm, self._block_s / 2)
            sides = Sides([], [])
            for number in range(self._rounds):
                self._progress(f"{how}, {len(floor)} at once: {number + 1} of {self._rounds}")
                sides.floor.append(await block(floor, self._block_s))
                sides.product.append(await block(steps, self._block_s))
            sides.floor.append(await block(floor, self._block_s))
        return sides


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


async def _open_run(store: Store, stack: AsyncExitStack) -> Journal:
    started = await start(store, "bench", None)
    return await stack.enter_async_context(
        await Journal.open(store, started.run_id, is_write=lambda tool: False)
    )


class _StepLoop:
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
        journal = await _open_run(store, stack)
        await _StepLoop(journal).step()
        *_, begun, completed = (await store.load(journal.run_id)).entries
    return begun.raw, completed.raw


@asynccontextmanager
async def raw_client(url: str) -> AsyncGenerator[Any]:
    nc: Any = Client()  # nats-py is partially typed
    await nc.connect(url, ping_interval=5, max_outstanding_pings=2, pending_size=-1)
    try:
        yield nc
    finally:
        await nc.close()


class RawLoop:
    """Appends on one subject of the journal stream, each expecting the one before."""

    def __init__(self, nc: Any, name: str, payloads: tuple[bytes, bytes]) -> None:
        (subjects,) = stream_config("runfold", 1)["subjects"]
        self._nc = nc
        self._subject = subjects.replace("*", f"floor-{name}")
        self._payloads = payloads
        self._last = 0

    async def pair(self) -> None:
        for payload in self._payloads:
            expected = {"Nats-Expected-Last-Subject-Sequence": str(self._last)}
            answer = await self._nc.request(self._subject, payload, timeout=10, headers=expected)
            ack = json.loads(answer.data)
            if "error" in ack:
                raise RuntimeError(f"the raw append was refused: {ack['error']}")
            self._last = ack["seq"]


class _RawFile:
    """Lines at the end of one file, each written and synced."""

    def __init__(self, path: Path, payloads: tuple[bytes, bytes]) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._lines = [payload + b"\n" for payload in payloads]

    async def pair(self) -> None:
        for line in self._lines:
            os.write(self._fd, line)
            os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


def _latency(sides: Sides) -> Numbers:
    return _rounded(
        **sides.ratios("step_over_floor", lambda block: block.p50_s),
        floor_ms=1000 * median(block.p50_s for block in sides.floor),
        floor_p99_ms=1000 * _p99(sides.floor),
        step_ms=1000 * median(block.p50_s for block in sides.product),
        step_p99_ms=1000 * _p99(sides.product),
    )


def _rate(sides: Sides) -> Numbers:
    return _rounded(
        **sides.ratios("rate_over_floor", lambda block: block.appends_s),
        floor_appends_s=median(block.appends_s for block in sides.floor),
        product_appends_s=median(block.appends_s for block in sides.product),
        cpu_ms_per_step=median(block.cpu_ms for block in sides.product),
        cpu_ms_per_floor_pair=median(block.cpu_ms for block in sides.floor),
    )


def _p99(blocks: Sequence[Block]) -> float:
    each_s = sorted(s for block in blocks for s in block.each_s)
    return each_s[len(each_s) * 99 // 100]


def _rounded(**numbers: float) -> Numbers:
    return {name: float(f"{number:.4g}") for name, number in numbers.items()}


def _file_system(folder: Path) -> str:
    """The type of the file system that holds the folder; `unknown` where /proc does not say."""
    mounts = Path("/proc/mounts")
    found = [line.split()[1:3] for line in mounts.open()] if mounts.exists() else []
    holding = [(len(at), kind) for at, kind in found if folder.resolve().is_relative_to(at)]
    return max(holding)[1] if holding else "unknown"


def render(result: dict[str, Any]) -> list[str]:
    """The result as a small table for people."""
    machine, files = result["machine"], result["file_store"]
    lines = [
        f"{'':<42}{'measured':>9}{'target':>8}  it and the floor",
        *_rows("fsync on", result),
        *_rows("fsync off", result["no_fsync"]),
        _row("file store, one run: step / floor", files["step_over_floor"], "", _times(files)),
        f"{machine['cpus']} CPUs, Python {machine['python']}, nats-server "
        f"{machine['nats_server']}, {machine['file_system']}; {result['seconds']:.0f} s",
    ]
    if machine["file_system"] in ("tmpfs", "ramfs"):
        lines.append("This was memory, where fsync costs nothing: name a disk's folder in TMPDIR.")
    return lines


def _rows(how: str, found: dict[str, Numbers]) -> list[str]:
    one, many = found["one_run"], found[f"runs_{RUNS}"]
    rates = f"{many['product_appends_s']:.0f} and {many['floor_appends_s']:.0f} appends/s"
    cpu, cpu_floor = many["cpu_ms_per_step"], many["cpu_ms_per_floor_pair"]
    at = f"{how}, {RUNS} runs"
    return [
        _row(f"{how}, one run: step / floor", one["step_over_floor"], TARGETS[0], _times(one)),
        _row(f"{at}: rate / floor", many["rate_over_floor"], TARGETS[1], rates),
        _row(f"{at}: CPU ms a step", cpu, TARGETS[2], f"{cpu:.3f} and {cpu_floor:.3f} ms"),
    ]


def _row(what: str, measured: float, target: str, beside: str) -> str:
    return f"{what:<42}{measured:>9.2f}{target:>8}  {beside}"


def _times(found: Numbers) -> str:
    return f"{found['step_ms']:.2f} and {found['floor_ms']:.2f} ms"
