"""The floor: a run is 20 appends of 512 bytes by expected sequence on a subject of its own, by
nats-py, in this process. Nothing is promised of the calls between.

usage: peer_nats.py w1|w2|w4 always|default [options]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import nats
from load import STEPS, emit, measure_w1, now, options, signal_summary, step_value
from nats.js.api import DeliverPolicy, StorageType, StreamConfig
from processes import blocks, nats_server

BODY = json.dumps(step_value(0)).encode()
REPEATS = 5
EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class System:
    def __init__(self, folder: Path, url: str, server: int, jetstream: Any) -> None:
        self.folder = folder
        self.url = url
        self.server = server
        self.jetstream = jetstream

    async def run(self, number: int) -> list[int]:
        """Each step's instant is that of its first append."""
        last, begun = 0, []
        for append in range(2 * STEPS):
            if append % 2 == 0:
                begun.append(now())
            expected = {EXPECTED: str(last)}
            last = (await self.jetstream.publish(f"r.{number}", BODY, headers=expected)).seq
        return begun


async def w1(on: System, asked: argparse.Namespace) -> None:
    pids = [on.server, os.getpid()]
    async for found in measure_w1(on.run, lambda: pids, asked, lambda: blocks(on.folder)):
        emit("w1", **found)


async def w2(on: System, asked: argparse.Namespace) -> None:
    """Reading a run's records back, two a step, by an ordered consumer, and parsing them."""
    for steps in asked.steps:
        subject, records = f"r.long-{steps}", 2 * steps
        for begin in range(0, records, 250):
            publishing = (
                on.jetstream.publish(subject, BODY) for _ in range(min(250, records - begin))
            )
            await asyncio.gather(*publishing)
        each = [await _read(on.jetstream, subject, records) for _ in range(REPEATS)]
        emit("w2", state="read", steps=steps, replay_ms=round(statistics.median(each), 2))


async def _read(jetstream: Any, subject: str, records: int) -> float:
    """Milliseconds."""
    begun, got, all_there = now(), 0, asyncio.Event()

    async def take(message: Any) -> None:
        nonlocal got
        got += 1
        json.loads(message.data)
        if got == records:
            all_there.set()

    reading = await jetstream.subscribe(
        subject, cb=take, ordered_consumer=True, pending_msgs_limit=10**6, pending_bytes_limit=-1
    )
    await asyncio.wait_for(all_there.wait(), 60)
    took_ms = (now() - begun) / 1e6
    await reading.unsubscribe()
    return took_ms


async def w4(on: System, asked: argparse.Namespace) -> None:
    """An append, until a consumer on another connection has it."""
    other = await nats.connect(on.url)
    each: list[float] = []
    heard = asyncio.Event()

    async def take(message: Any) -> None:
        each.append((now() - json.loads(message.data)["t"]) / 1e6)
        heard.set()

    await other.jetstream().subscribe(
        "r.signal", cb=take, ordered_consumer=True, deliver_policy=DeliverPolicy.NEW
    )
    for _ in range(asked.count):
        heard.clear()
        await on.jetstream.publish("r.signal", json.dumps(step_value(0)).encode())
        await asyncio.wait_for(heard.wait(), 10)
        await asyncio.sleep(random.uniform(0.01, 0.03))
    await other.close()
    emit("w4", **signal_summary(each))


WORKLOADS = {"w1": w1, "w2": w2, "w4": w4}


async def main() -> None:
    asked = options("Raw appends to JetStream.", ["always", "default"])
    with tempfile.TemporaryDirectory(prefix="peer-nats-") as name:
        folder = Path(name) / "nats"
        async with nats_server(folder, fsync=asked.variant == "always") as (url, server):
            client = await nats.connect(url)
            jetstream = client.jetstream(timeout=30)
            await jetstream.add_stream(
                StreamConfig(name="R", subjects=["r.>"], storage=StorageType.FILE)
            )
            await WORKLOADS[asked.workload](System(folder, url, server, jetstream), asked)
            await client.close()


if __name__ == "__main__":
    asyncio.run(main())
