"""Shell: W4, from a person's word to the run's next step, through each door, and from a start.

One run at a time, a worker and a bridge in processes of their own on this machine, one clock. The
floor is what can't be done with less: four appends one after another (signal, task, claim, the
step's start), raw.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from statistics import median
from time import time
from typing import Any, TypeAlias
from urllib.parse import quote

from journal.errors import RunfoldError
from journal.fleet import Fleet
from journal.ids import RunId, subject_token
from journal.stores.jetstream import JetStreamStore
from journal.views import Completed

from .blocks import Numbers, block, rounded, spread
from .floor import NAMESPACE, RawLoop, raw_client
from .processes import Place, bridge, worker
from .scale import Scale
from .steps import Progress, payloads_of
from .watching import WAIT_S, at, marker_of, nth_claim

FLOOR_APPENDS = 4

Say: TypeAlias = Callable[[str, str], Awaitable[object]]
"""Approve a run's marker."""


async def latency_on(place: Place, scale: Scale, progress: Progress) -> Numbers:
    """`approve_to_next_step_ms` by door, `start_to_first_step_ms`, a worker's start."""
    async with JetStreamStore(place.url) as store, raw_client(place.url) as nc:
        fleet = Fleet(store)
        raw = RawLoop(nc, "latency", await payloads_of(store), shards=place.shards)
        progress("worker start")
        found: Numbers = {
            "worker_start_to_claim_s": await _worker_start(place, fleet, scale.takeovers)
        }
        async with worker(place, ["gated"]), bridge(place) as address:
            http = await _Http.connected(address)
            doors: dict[str, Say] = {
                "library": lambda run, marker: fleet.signal(run, "approve", {"marker": marker}),
                "nats": _by_nats(nc),
                "http": http.approve,
            }
            samples = _Samples(fleet, raw)
            for door, say in doors.items():
                progress(f"approve → next step, {door}")
                await samples.take(door, say, scale.samples)
            http.close()
        found |= samples.numbers()
    return found


class _Samples:
    """The doors' blocks, with one of the floor before each and behind the last."""

    def __init__(self, fleet: Fleet, raw: RawLoop) -> None:
        self._fleet = fleet
        self._raw = raw
        self._start_ms: list[float] = []
        self._approve_ms: dict[str, list[float]] = {}
        self._floor_ms: list[float] = []

    async def take(self, door: str, say: Say, count: int) -> None:
        self._approve_ms[door] = []
        for number in range(-2, count):  # two to warm up
            if number % 20 == 0:
                pair_s = (await block([self._raw.pair], 0.05)).p50_s
                self._floor_ms.append(1000 * pair_s * FLOOR_APPENDS / 2)
            run = f"{door}-{number + 2}"
            called = time()
            await self._fleet.start("gated", number, run_id=run)
            marker = await marker_of(self._fleet, run)
            said = time()
            await say(run, marker)
            first, second = await _stamps(self._fleet, run)
            if number >= 0:
                self._start_ms.append(1000 * (first - called))
                self._approve_ms[door].append(1000 * (second - said))

    def numbers(self) -> Numbers:
        floor = median(self._floor_ms)
        approve = {
            door: spread(each) | rounded(over_floor=median(each) / floor, each=each)
            for door, each in self._approve_ms.items()
        }
        return {
            "approve_to_next_step_ms": approve,
            "start_to_first_step_ms": spread(self._start_ms),
            **rounded(floor_ms=floor, floor_appends=FLOOR_APPENDS),
        }


async def _stamps(fleet: Fleet, run: str) -> tuple[float, float]:
    """When the run's two steps were called. A signal that is on its way ends no wait yet, so it is
    looked at until the run is done."""
    async with asyncio.timeout(WAIT_S):
        while True:
            outcome = (await fleet.wait(run, timeout_s=20)).outcome
            if isinstance(outcome, Completed):
                content: Any = outcome.message.content
                return content[0], content[1]
            await asyncio.sleep(0.002)


async def _worker_start(place: Place, fleet: Fleet, times: int) -> Numbers:
    """From the start of the process to its first claim, of a run that waits for it."""
    each: list[float] = []
    for number in range(times):
        run = f"first-{number}"
        await fleet.start("bench", number, run_id=run)
        async with worker(place, ["ten_steps"]) as child:
            claim = await nth_claim(fleet.store, run, 1, WAIT_S)
            each.append(at(claim) - child.begun)
            await fleet.wait(run, timeout_s=20)
    return spread(each)


def _by_nats(nc: Any) -> Say:
    """As `nats pub` does it: no answer is waited for."""

    async def say(run: str, marker: str) -> None:
        subject = f"{NAMESPACE}.signal.{subject_token(RunId(run))}.approve"
        await nc.publish(subject, json.dumps({"marker": marker}).encode())
        await nc.flush()

    return say


class _Http:
    """One connection that is kept; no client library in what is measured."""

    def __init__(
        self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._address, self._reader, self._writer = address, reader, writer

    @classmethod
    async def connected(cls, address: str) -> _Http:
        host, _, port = address.rpartition(":")
        return cls(address, *await asyncio.open_connection(host, int(port)))

    async def approve(self, run: str, marker: str) -> None:
        body = json.dumps({"marker": marker}).encode()
        self._writer.write(
            f"POST /runs/{quote(run)}/signals/approve HTTP/1.1\r\nHost: {self._address}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        status, _, fields = head.partition("\r\n")
        lengths = [
            int(line.partition(":")[2])
            for line in fields.lower().splitlines()
            if line.startswith("content-length:")
        ]
        answer = await self._reader.readexactly(lengths[0] if lengths else 0)
        if status.split()[1] not in ("200", "202"):
            raise RunfoldError(f"the bridge answered {status}: {answer.decode()[:200]}")

    def close(self) -> None:
        self._writer.close()
