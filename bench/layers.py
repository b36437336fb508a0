"""A durable step's CPU, layer by layer: 64 at once, no profiler, blocks that take turns.

usage: python bench/layers.py [--fsync] [--rounds 8] [--seconds 0.4]

Each row does what a step's two appends need, from one layer down; the difference between rows is
what a layer costs. The last row is the step without any server: its part is hot in the CPU's
caches there, so the sum is less than the whole step.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import AsyncExitStack
from statistics import median
from typing import Any

from journal.codec import Entry, decode
from journal.ids import RunId
from journal.store import Appended
from journal.stores.jetstream import JetStreamStore
from journal.stores.memory import MemoryStore
from journal.stores.provision import provision
from runfold.benchmark import floor
from runfold.benchmark.blocks import Block, Op, block
from runfold.benchmark.steps import StepLoop, open_run, payloads_of
from worker.server import EmbeddedServer

RUNS = 64


class OurConnection(floor.RawLoop):
    """The floor's loop, on the store's connection in place of nats-py's `request`."""

    def __init__(self, store: Any, name: str, payloads: tuple[bytes, bytes]) -> None:
        super().__init__(None, name, payloads)
        self._nc = self
        self._connection = store._connection

    async def request(self, subject: str, payload: bytes, *, timeout: float, headers: Any) -> Any:
        return await self._connection.request(subject, payload, headers, timeout_s=timeout)


class StoreAppend:
    """JetStreamStore.append of records that are ready."""

    def __init__(self, store: JetStreamStore, name: str, payloads: tuple[bytes, bytes]) -> None:
        self._store, self._run = store, RunId(name)
        self._entries = [Entry(decode(payload), payload, "running") for payload in payloads]
        self._tail = 0

    async def pair(self) -> None:
        for entry in self._entries:
            answer = await self._store.append(self._run, entry, expected=self._tail)
            assert isinstance(answer, Appended), answer
            self._tail = answer.tail


async def measure(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="runfold-layers-") as folder:
        async with EmbeddedServer(folder, fsync=options.fsync) as server:
            await provision(server.url, replicas=1, shards=1)
            async with (
                JetStreamStore(server.url) as store,
                floor.raw_client(server.url) as nc,
                AsyncExitStack() as stack,
            ):
                payloads = await payloads_of(store)
                names = [str(i) for i in range(RUNS)]
                memory = MemoryStore()
                layers: dict[str, list[Op]] = {
                    "nats-py request (floor)": [
                        floor.RawLoop(nc, f"raw{name}", payloads).pair for name in names
                    ],
                    "our connection": [
                        OurConnection(store, f"own{name}", payloads).pair for name in names
                    ],
                    "store append": [
                        StoreAppend(store, f"st{name}", payloads).pair for name in names
                    ],
                    "whole step": [StepLoop(await open_run(store, stack)).step for _ in names],
                    "whole step, no server": [
                        StepLoop(await open_run(memory, stack)).step for _ in names
                    ],
                }
                found: dict[str, list[Block]] = {layer: [] for layer in layers}
                for number in range(options.rounds + 1):
                    for layer, loops in layers.items():
                        one = await block(loops, options.seconds)
                        if number:  # the first round warms up
                            found[layer].append(one)
    for layer, blocks in found.items():
        cpu_us = 1000 * median(block.cpu_ms for block in blocks)
        rate = median(block.appends_s for block in blocks)
        print(f"{layer:<26}{cpu_us:>7.1f} µs CPU a step{rate:>9.0f} appends/s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsync", action="store_true")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
