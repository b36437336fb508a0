"""Shell: many parked runs, measured: `bench/parked.py`, W5 of `runfold bench` (R74, R84).

For `runfold bench`: `await measure(runs, shards, progress)` gives one dict of plain numbers, on a
server of its own with fsync, and `render(found)` its lines for people. Each run is a turn that asks
for an approval at once: three records and a task until it is parked, five more when it is approved.
Memory of the server is its resident size after a restart, when nothing is left in it but what it
must have; beside a server with as many raw subjects of as many messages of those sizes.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from nats.aio.client import Client

from journal.fleet import Fleet
from journal.ids import RunId
from journal.listing import Filter
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision, stream_config
from journal.terms import Complete, Next
from worker.agent import turn
from worker.context import Call, Context
from worker.server import EmbeddedServer
from worker.service import Worker
from worker.tools import UNSAFE, ToolCall

from .watching import AT_ONCE, each

SAMPLES = 50
SETTLE_S = 0.2
"""Between two looks at how far the worker is."""


async def _nothing(call: ToolCall) -> None: ...


@turn("parked")
async def parked_agent(ctx: Context) -> Next:
    """A write that a person must approve first: parked at once, as nearly all of a fleet is."""
    await ctx.tool(Call(name="pay", input=1, fn=_nothing, replay=UNSAFE, approval="go on?"))
    return Complete("done")


def serve(url: str) -> None:
    """A worker process; it says `ready` on stdout, and ends with its parent's pipe."""

    async def body() -> None:
        worker = Worker(
            url,
            [parked_agent],
            concurrency=AT_ONCE,
            on_ready=lambda: os.write(1, b"ready\n"),  # pyright: ignore[reportArgumentType]
        )
        await worker.serve()

    asyncio.run(body())


async def measure(runs: int, shards: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """One whole measurement; rates in runs/s, memory in bytes a run, times in ms."""
    found: dict[str, Any] = {"runs": runs, "shards": shards}
    with tempfile.TemporaryDirectory(prefix="runfold-parked-") as name:
        data = Path(name) / "product"
        async with EmbeddedServer(data, fsync=True) as server:
            await provision(server.url, replicas=1, shards=shards)
            empty = _resident(_pid(data))
            async with JetStreamStore(server.url) as store:
                found |= await _parked(server.url, store, runs, data, progress)
        async with EmbeddedServer(data, fsync=True) as server:
            found["server_bytes"] = round((_resident(_pid(data)) - empty) / runs)
            async with JetStreamStore(server.url) as store:
                progress(f"P={shards}: looking at them")
                found |= await _looked_at(store, runs)
                sizes = await _sizes(store)
                found["records_a_run"] = len(sizes)
                found["record_bytes"] = sum(sizes)
                progress(f"P={shards}: waking all")
                found |= await _woken(server.url, store, runs)
        progress(f"P={shards}: the raw floor")
        floor = await _floor(Path(name) / "raw", runs, shards, sizes)
        found["floor_server_bytes"] = floor
        found["server_beyond_records_bytes"] = found["server_bytes"] - floor
    return found


async def _parked(
    url: str, store: JetStreamStore, runs: int, data: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Start all, while no worker is there; then let one park them."""
    fleet = Fleet(store)
    ids = _ids(runs)
    progress(f"P={_streams(store)}: starting {runs} runs")
    began, cpu = perf_counter(), process_time()
    await each(ids, lambda run: fleet.start("parked", 1, run_id=run))
    took_s = perf_counter() - began
    found: dict[str, Any] = {
        "start_runs_s": round(runs / took_s),
        "start_cpu_ms": round(1000 * (process_time() - cpu) / runs, 3),
    }
    progress(f"P={_streams(store)}: parking them")
    async with _worker(url) as pid:
        before, began = _resident(pid), perf_counter()
        await _tasks_gone(store)
        found["park_runs_s"] = round(runs / (perf_counter() - began))
        found["worker_bytes"] = round((_resident(pid) - before) / runs)
        found["worker_mb"] = round(_resident(pid) / 1e6, 1)
    found["server_at_work_mb"] = round(_resident(_pid(data)) / 1e6, 1)
    return found


async def _looked_at(store: JetStreamStore, runs: int) -> dict[str, Any]:
    """Every page of the list and of the inbox, by cursor, as `GET /runs` and `/inbox` have them."""
    fleet = Fleet(store)
    found: dict[str, Any] = {}
    pages: list[float] = []
    seen, after, began = 0, None, perf_counter()
    while True:
        start = perf_counter()
        page = await fleet.page(Filter(), after=after)
        pages.append(1000 * (perf_counter() - start))
        seen += len(page.runs)
        if (after := page.next) is None:
            break
    found["list_runs_s"] = round(seen / (perf_counter() - began))
    found["list_page_ms"] = _spread(pages)
    assert seen == runs, (seen, runs)
    began = perf_counter()
    seen = sum([1 async for _ in _items(fleet)])
    found["inbox_runs_s"] = round(seen / (perf_counter() - began))
    assert seen == runs, (seen, runs)
    return found


async def _woken(url: str, store: JetStreamStore, runs: int) -> dict[str, Any]:
    """Approve a few one by one, each until its run is done; then all others at once."""
    fleet = Fleet(store)
    ids = list(_ids(runs))
    took_ms: list[float] = []
    cost: dict[str, Any] = {}
    async with _worker(url):
        for run in ids[:SAMPLES]:
            marker = await _marker(fleet, run)
            began = perf_counter()
            await fleet.signal(run, "approve", {"marker": marker})
            await fleet.wait(run, timeout_s=20)
            took_ms.append(1000 * (perf_counter() - began))

        async def approve(run: str) -> None:
            await fleet.signal(run, "approve", {"marker": markers[run]})

        markers = {item.run: item.marker async for item in _items(fleet)}
        began = perf_counter()
        await each(ids[SAMPLES:], approve)
        cost["approve_runs_s"] = round((runs - SAMPLES) / (perf_counter() - began))
        await _tasks_gone(store)
        cost["wake_runs_s"] = round((runs - SAMPLES) / (perf_counter() - began))
    done = sum([1 async for _, word in store.heads() if word == "completed"])
    assert done == runs, (done, runs)
    return {"approve_to_done_ms": _spread(took_ms), **cost}


async def _items(fleet: Fleet) -> AsyncGenerator[Any, None]:
    after = None
    while True:
        page = await fleet.inbox_page(after=after)
        for item in page.items:
            yield item
        if (after := page.next) is None:
            return


async def _marker(fleet: Fleet, run: str) -> str:
    pending = (await fleet.shown(run))["pending"]
    return str(pending[0]["marker"])


async def _tasks_gone(store: JetStreamStore) -> None:
    while (await store.tasks.agents()).get("parked", 0):  # noqa: ASYNC110
        await asyncio.sleep(SETTLE_S)


async def _sizes(store: JetStreamStore) -> list[int]:
    """Bytes of each record of one parked run."""
    loaded = await store.load(RunId(next(iter(_ids(1)))))
    return [len(entry.raw) for entry in loaded.entries]


async def _floor(data: Path, runs: int, shards: int, sizes: list[int]) -> int:
    """Bytes of server memory for a subject with such messages, and nothing else of the product."""
    async with EmbeddedServer(data, fsync=False) as server:
        empty = _resident(_pid(data))
        nc: Any = Client()  # partially typed
        await nc.connect(server.url)
        for shard in range(shards):
            config = stream_config("runfold", 1, shard, shards)
            await nc.jetstream().add_stream(
                name=config["name"], subjects=config["subjects"], allow_direct=True
            )

        async def put(index: int) -> None:
            subject = f"runfold.journal.{index % shards}.parked-{index:07d}"
            for size in sizes:
                await nc.request(subject, b"x" * size, timeout=10)

        await each(range(runs), put)
        await nc.close()
    async with EmbeddedServer(data, fsync=False):
        return round((_resident(_pid(data)) - empty) / runs)


# ---- parts -------------------------------------------------------------------------------------


def _ids(runs: int) -> Iterable[str]:
    return (f"parked-{index:07d}" for index in range(runs))


def _streams(store: JetStreamStore) -> int:
    return len(store.journals)


@asynccontextmanager
async def _worker(url: str) -> AsyncGenerator[int]:
    """A worker process, from when it pulls until it is killed; its pid."""
    code = f"from runfold.benchmark.parked import serve; serve({url!r})"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            await process.stdout.readline()
        yield process.pid
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def _pid(data: Path) -> int:
    """Of the nats-server on this directory."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
                here = (folder / "cwd").resolve() == data.resolve()
            except OSError:
                continue
            if here and Path(os.fsdecode(words[0])).name == "nats-server":
                return int(folder.name)
    raise RuntimeError(f"no nats-server runs on {data}")


def _resident(pid: int) -> int:
    """Bytes of memory of its own that a process has now."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return 1024 * int(found[1])


def _spread(each: list[float]) -> dict[str, float]:
    ordered = sorted(each)
    return {
        "p50": round(median(ordered), 2),
        "p99": round(ordered[len(ordered) * 99 // 100], 2),
        "of": len(ordered),
    }


def render(found: dict[str, Any]) -> list[str]:
    """The result for people."""
    page, wake = found["list_page_ms"], found["approve_to_done_ms"]
    return [
        f"{found['runs']} parked runs, P={found['shards']}: {found['records_a_run']} records, "
        f"{found['record_bytes']} bytes each",
        f"started: {found['start_runs_s']} runs/s by one process, {found['start_cpu_ms']} ms of its"
        " CPU each (goal: 1000 runs/s)",
        f"parked by one worker: {found['park_runs_s']} runs/s; its memory grew by "
        f"{found['worker_bytes']} bytes a run, to {found['worker_mb']} MB",
        f"server memory: {found['server_bytes']} bytes a run, raw floor "
        f"{found['floor_server_bytes']}: {found['server_beyond_records_bytes']} beyond (goal: 1024)"
        f"; {found['server_at_work_mb']} MB at work",
        f"list: {found['list_runs_s']} runs/s in pages of p50 {page['p50']} ms (goal: 5000 runs/s);"
        f" inbox: {found['inbox_runs_s']} runs/s",
        f"approve → done with all parked: p50 {wake['p50']} ms, p99 {wake['p99']} ms",
        f"wake of all: approved {found['approve_runs_s']} runs/s, done {found['wake_runs_s']}/s",
    ]
