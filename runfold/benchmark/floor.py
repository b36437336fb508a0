"""Store: the floor: raw appends and reads by nats-py, raw writes to a file, none of our code.

nats-py is the client the product stands on. An append is its own `request` with the
expected-sequence header, with the bytes of the product's own records, into the product's own
streams, spread over them as runs are.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from nats.aio.client import Client

from journal.ids import RunId
from journal.shards import shard_of
from journal.stores.jetstream_streams import stream_name, subject_prefix

NAMESPACE = "runfold"
READ_BATCH = 256
READ_WAIT_S = 20.0


@asynccontextmanager
async def raw_client(url: str) -> AsyncGenerator[Any]:
    nc: Any = Client()  # nats-py is partially typed
    servers = url.split(",")
    await nc.connect(servers, ping_interval=5, max_outstanding_pings=2, pending_size=-1)
    try:
        yield nc
    finally:
        await nc.close()


class RawLoop:
    """Appends on one subject of a journal stream, each expecting the one before."""

    def __init__(
        self, nc: Any, name: str, payloads: tuple[bytes, bytes], *, shards: int = 1
    ) -> None:
        token = f"floor-{name}"
        self._nc = nc
        self._subject = subject_prefix(NAMESPACE, shard_of(RunId(token), shards)) + token
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


class RawFile:
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


async def raw_read(nc: Any, run: RunId, shards: int) -> float:
    """All messages of a run by batched direct gets, in messages a second; nothing is decoded."""
    shard = shard_of(run, shards)
    subject = subject_prefix(NAMESPACE, shard) + run
    get = f"$JS.API.DIRECT.GET.{stream_name(NAMESPACE, shard)}"
    inbox = nc.new_inbox()
    seen = last = 0
    over = asyncio.Event()

    async def on_message(message: Any) -> None:
        nonlocal seen, last
        if message.data:
            seen += 1
            last = int(message.headers["Nats-Sequence"])
        else:
            over.set()  # 204 at the end of a batch, 404 behind the last message

    begun = perf_counter()
    subscription = await nc.subscribe(inbox, cb=on_message)
    before = -1
    while seen != before:
        before = seen
        over.clear()
        wanted = {"seq": last + 1, "next_by_subj": subject, "batch": READ_BATCH}
        await nc.publish(get, json.dumps(wanted).encode(), reply=inbox)
        await asyncio.wait_for(over.wait(), READ_WAIT_S)
    seconds = perf_counter() - begun
    await subscription.unsubscribe()
    return seen / seconds
