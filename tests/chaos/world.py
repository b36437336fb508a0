"""The parts of a soak: what it is told, and the processes, wires and connections it has."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cases.zygote import Zygote
from chaos.processes import BridgeSlot, RemoteSlot, Slot, WorkerSlot, rss_mb
from chaos.servers import Servers
from chaos.wires import Wires

from journal.stores.jetstream import JetStreamStore

MEASURE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """`rate`: starts a second. `pace`: of faults; 1 is a few of each kind a minute. `shards`:
    journal streams. `quick`: without what takes half a minute: to make a write again, by a person's
    word or a probe's, once the earlier call has surely ended; and `run()` in processes, whose runs,
    when one is killed, only the sweep finds."""

    seed: int
    topology: str
    seconds: float
    workers: int
    remotes: int
    bridges: int
    rate: float
    pace: float
    kinds: frozenset[str] | None
    keep: Path
    quick: bool = False
    ack_wait_s: float = 3.0
    shards: int = 1


def wired(options: Options) -> int:
    return options.workers // 2 + options.bridges // 2


class World:
    """The parts, while a soak goes on."""

    def __init__(
        self,
        servers: Servers,
        wires: list[Wires],
        store: JetStreamStore,
        behind: JetStreamStore,
        plain: Any,
        zygote: Zygote,
    ) -> None:
        self.servers = servers
        self.wires = wires
        self.store = store
        self.behind = behind
        self.plain = plain
        self.zygote = zygote
        self.workers: list[WorkerSlot] = []
        self.remotes: list[RemoteSlot] = []
        self.bridges: list[BridgeSlot] = []
        self.supervisors: list[asyncio.Task[None]] = []
        self.watching: asyncio.Task[None] | None = None
        self.measuring: asyncio.Task[None] | None = None
        self.server_mb: dict[str, list[float]] = {}

    @property
    def all(self) -> list[Slot]:
        return [*self.workers, *self.remotes, *self.bridges]

    def slots(self, options: Options, folder: Path, logs: Path, ledgers: Path) -> None:
        """Every second process has a wire of its own; the first one is ours."""
        free = iter(self.wires[1:])
        url = self.servers.url
        for number in range(options.workers):
            wires = next(free) if number % 2 else None
            self.workers.append(
                WorkerSlot(
                    f"w{number}",
                    logs,
                    wires,
                    zygote=self.zygote,
                    url=url,
                    ledgers=ledgers,
                    ack_wait_s=options.ack_wait_s,
                )
            )
        for number in range(options.bridges):
            wires = next(free) if number % 2 else None
            self.bridges.append(
                BridgeSlot(
                    f"b{number}",
                    logs,
                    wires,
                    zygote=self.zygote,
                    url=url,
                    folder=folder,
                    ack_wait_s=options.ack_wait_s,
                )
            )
        for number in range(options.remotes):
            at = self.bridges[number % options.bridges].health_url
            self.remotes.append(
                RemoteSlot(f"h{number}", logs, zygote=self.zygote, url=at, ledgers=ledgers)
            )
        self.supervisors = [asyncio.create_task(slot.supervise()) for slot in self.all]
        self.measuring = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        while True:
            await asyncio.sleep(MEASURE_S)
            for slot in self.all:
                slot.measure()
            for number, server in enumerate(self.servers.all):
                mb = rss_mb(server.pid)
                if mb:
                    self.server_mb.setdefault(f"nats-server {number + 1}", []).append(mb)
