"""One soak: a topology, its processes, load and faults; then quiet, the last look, the result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import nats
from cases.zygote import Zygote
from chaos.books import Books
from chaos.check import Checker
from chaos.doors import Doors
from chaos.faults import Fault, schedule
from chaos.inject import Injector
from chaos.load import DOORS, QUICK_DOORS, Load
from chaos.people import People
from chaos.processes import until
from chaos.servers import Servers
from chaos.settle import Settling
from chaos.watch import Watch
from chaos.wires import Wires
from chaos.world import Options, World, wired

from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

QUIET_S = 150.0
"""The last runs have this long to end: the sweep comes every 30 s."""

UP_S = 60.0
NATIVE = ("desk", "clerk")
MIXED = (*NATIVE, *NATIVE, "remote")
"""One of these at random. A worker over HTTP works one run at a time."""


@dataclass
class Result:
    """What is reported."""

    options: Options
    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    acks_seen: int = 0
    ends: dict[str, Counter[str]] = field(default_factory=dict)
    memory: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    disks: bool = False
    wrong: list[Any] = field(default_factory=list)


class Soak:
    """`await Soak(options).run()`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.books = Books()
        self.folder = options.keep / options.topology
        self.logs = self.folder / "logs"
        self.ledgers = self.folder / "ledgers"
        for folder in (self.logs, self.ledgers):
            folder.mkdir(parents=True, exist_ok=True)
        os.environ["CHAOS_LEDGERS"] = str(self.ledgers)
        self._began = time.monotonic()

    def log(self, text: str) -> None:
        with (self.folder / "events.log").open("a") as file:
            file.write(f"{time.monotonic() - self._began:8.2f} {text}\n")

    async def run(self) -> Result:
        options, result = self.options, Result(self.options)
        faults = schedule(
            options.seed,
            options.seconds,
            kinds=options.kinds,
            cluster=options.topology == "cluster",
            pace=options.pace,
        )
        (self.folder / "schedule").write_text("".join(f"{fault}\n" for fault in faults))
        async with contextlib.AsyncExitStack() as stack:
            world = await stack.enter_async_context(self._world())
            began = time.monotonic()
            await self._storm(world, faults)
            result.seconds = time.monotonic() - began
            await self._quiet(world)
            self._fill_in(result, world)
        return result

    # ---- what there is ------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _world(self) -> AsyncGenerator[World]:
        options = self.options
        disks = options.kinds is None or "disk_full" in options.kinds
        async with contextlib.AsyncExitStack() as stack:
            zygote = stack.enter_context(Zygote())
            cluster = options.topology == "cluster"
            servers = await Servers.start(self.folder, cluster=cluster, disks=disks)
            stack.push_async_callback(servers.stop)
            stack.callback(servers.keep_logs, self.logs)
            await provision(servers.url, shards=options.shards)
            wires = [await Wires.to(servers.urls) for _ in range(wired(options) + 1)]
            for one in wires:
                stack.push_async_callback(one.stop)
            store = await stack.enter_async_context(JetStreamStore(servers.url))
            behind = await stack.enter_async_context(JetStreamStore(wires[0].url))
            plain: Any = await nats.connect(
                servers.urls,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,
                ping_interval=5,
                max_outstanding_pings=2,
                error_cb=_quiet,
            )
            stack.push_async_callback(plain.close)
            world = World(servers, wires, store, behind, plain, zygote)
            world.slots(options, self.folder, self.logs, self.ledgers)
            try:
                yield world
            finally:
                world.measuring.cancel() if world.measuring else None
                await asyncio.gather(*(slot.end() for slot in world.all), return_exceptions=True)
                await asyncio.wait(world.supervisors, timeout=UP_S)

    # ---- the storm and the quiet ---------------------------------------------------------------

    async def _storm(self, world: World, faults: list[Fault]) -> None:
        options, books = self.options, self.books
        stores = [world.store, world.behind]
        rng = random.Random(f"{options.seed}/people")
        self.doors = Doors(world.bridges, stores, world.plain)
        people = People(books, self.doors, rng, retries=not options.quick)
        self.checker = Checker(books, world.store, self.folder)
        self.watch = Watch(books, people, self.checker, world.store, world.plain, rng, self.log)
        world.watching = asyncio.create_task(self.watch.run())
        self.load = Load(
            books,
            random.Random(f"{options.seed}/load"),
            rate=options.rate,
            agents=MIXED if options.remotes else NATIVE,
            doors=QUICK_DOORS if options.quick else DOORS,
            without=frozenset({"book"}) if options.quick else frozenset(),
            bridges=world.bridges,
            stores=stores,
            zygote=world.zygote,
            url=world.servers.url,
            ledgers=str(self.ledgers),
            ack_wait_s=options.ack_wait_s,
        )
        up = await until(lambda: all(slot.up for slot in world.all), UP_S)
        assert up, [slot.log[-300:] for slot in world.all if not slot.up]
        loading = asyncio.create_task(self.load.run())
        telling = asyncio.create_task(self._tell())
        injector = Injector(
            world.servers,
            world.workers,
            world.remotes,
            world.bridges,
            world.wires,
            world.plain,
            self.watch.tasks,
            self.log,
            options.shards,
        )
        self.injector = injector
        injecting = asyncio.create_task(injector.run(faults))
        parts = [loading, injecting, telling, world.watching]
        ended, _ = await asyncio.wait(
            parts, timeout=options.seconds, return_when=asyncio.FIRST_EXCEPTION
        )
        for part in ended:
            part.result()  # a soak whose own parts fail is over
        loading.cancel()
        await injecting
        telling.cancel()
        for one in (loading, telling):
            with contextlib.suppress(asyncio.CancelledError):
                await one

    async def _tell(self) -> None:
        """How it goes, for who watches."""
        while True:
            await asyncio.sleep(30)
            books = self.books
            ended = Counter(book.ended for book in books.runs.values())
            print(
                f"{self.options.topology} {time.monotonic() - self._began:6.0f} s: "
                f"{len(books.runs)} runs, {len(books.active)} active, ended {dict(ended)}, "
                f"{self.injector.done.total()} faults, {len(books.wrong)} violations",
                flush=True,
            )

    async def _quiet(self, world: World) -> None:
        """Faults are over: everything ends, and everything that was acknowledged is there."""
        self.log("quiet")
        self.watch.talking = False
        for wires in world.wires:
            wires.calm()
        await self.load.close()
        await until(lambda: not self.books.active, QUIET_S)
        self.log(f"{len(self.books.active)} runs are left")
        settling = Settling(self.books, self.checker, world.store, world.plain, self.options.shards)
        for stream in ("TASKS", "SIGNALS"):
            left, deadline = -1, time.monotonic() + QUIET_S
            while left and time.monotonic() < deadline:
                await asyncio.sleep(0.5)
                left = await settling.left(stream)
            self.log(f"{stream} has {left} left")
            if left:
                found = await settling.subjects(stream, "runfold.>")
                self.books.violation("", f"{left} left in {stream}", str(found)[:500])
        self.log("the streams are empty, or never will be")
        await settling.runs()
        await settling.acknowledged()
        await settling.audited(world.zygote, world.servers.url)
        await settling.lost_acks([lost for one in world.wires for lost in one.dropped])
        await until(lambda: all(slot.up for slot in world.all), UP_S)
        problems: list[str] = ["?"]
        deadline = time.monotonic() + UP_S
        while problems and time.monotonic() < deadline:
            problems = await settling.healthy([*world.workers, *world.bridges])
            await asyncio.sleep(0.5)
        for problem in problems:
            self.books.violation("", "not well", problem)
        self.log("all was looked at")
        assert world.watching is not None
        world.watching.cancel()
        await self.doors.close()

    def _fill_in(self, result: Result, world: World) -> None:
        result.ended = Counter(book.ended or "unfinished" for book in self.books.runs.values())
        result.faults, result.skipped = self.injector.done, self.injector.skipped
        result.counts, result.refused = self.books.counts, self.books.refused
        result.acks_seen = sum(one.acks_seen for one in world.wires)
        result.disks = bool(world.servers.mounted)
        measured = {slot.name: slot.rss_mb for slot in world.all} | world.server_mb
        for name, found in measured.items():
            if found:
                result.memory[name] = (found[0], max(found), found[-1])
        for slot in world.all:
            result.ends[slot.name] = slot.ends
        for slot in (*world.workers, *world.bridges):
            for end in slot.ends:
                if end.startswith("by itself"):
                    self.books.violation("", f"{slot.name} ended {end}", "nobody told it to")
            for line in slot.strange():
                self.books.violation("", f"in the log of {slot.name}", line)
        result.wrong = self.books.wrong


async def _quiet(_: Exception) -> None: ...
