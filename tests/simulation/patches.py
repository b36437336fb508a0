"""Where the product looks at a clock, draws lots, or asks which machine it is on: from the seed,
while a schedule runs. The one place that patches anything."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as clocks
import os
import random
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import bridge.offers
import worker.peers
import worker.service

from .loop import PROCESS, START_S, VirtualLoop

EPOCH = clocks.datetime(2026, 1, 1, tzinfo=clocks.UTC)
EPOCH_NS = int(EPOCH.timestamp()) * 10**9
PACKAGES = ("journal.", "worker.", "bridge.", "kit.simulated", "simulation.")


PULL_SHARE = 0.9
IDLER: tuple[tuple[Any, str, Any], ...] = (
    (worker.peers, "PEER_PROBE_S", 2.0),
    (worker.service, "standing_s", lambda ack_wait_s: ack_wait_s * PULL_SHARE),
    (bridge.offers, "standing_s", lambda ack_wait_s: ack_wait_s * PULL_SHARE),
)
"""In seven schedules of eight peers ask each other less often than they do, and pulls stand longer:
most of what happens would be their questions, and the pulls of who has nothing to do."""


class _AnyDatetime(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, clocks.datetime)


class VirtualDatetime(clocks.datetime, metaclass=_AnyDatetime):
    """Stands for `datetime` in the modules that ask it for the time."""

    loop: VirtualLoop

    @classmethod
    def now(cls, tz: clocks.tzinfo | None = None) -> Any:
        process = PROCESS.get()
        skew_s = process.skew_s if process is not None else 0.0
        found = EPOCH + clocks.timedelta(seconds=cls.loop.time() - START_S + skew_s)
        return found if tz is not None else found.replace(tzinfo=None)

    fromisoformat: Any = staticmethod(clocks.datetime.fromisoformat)
    fromtimestamp: Any = staticmethod(clocks.datetime.fromtimestamp)


class NoWatchdog:
    """Stands for the watchdog, which is a thread, and tells only (R50)."""

    blocked_s = 0.0

    def __init__(self, limit_s: float) -> None:
        pass

    async def __aenter__(self) -> NoWatchdog:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Lots:
    """`random` and `secrets` of one schedule."""

    def __init__(self, seed: int | str) -> None:
        self.random = random.Random(f"lots {seed}")

    def token_hex(self, size: int = 32) -> str:
        return self.random.randbytes(size).hex()

    def choice(self, among: Any) -> Any:
        return self.random.choice(among)


@contextlib.contextmanager
def deterministic(loop: VirtualLoop, seed: int | str) -> Iterator[None]:
    """Everything follows from the seed while inside."""
    lots = Lots(seed)

    def wall() -> float:
        process = PROCESS.get()
        skew_s = process.skew_s if process is not None else 0.0
        return EPOCH.timestamp() + loop.time() - START_S + skew_s

    VirtualDatetime.loop = loop
    wanted: list[tuple[Any, str, Any]] = [
        (time, "monotonic", loop.time),
        (time, "time", wall),
        (time, "time_ns", lambda: int(wall() * 1e9)),
        (random, "uniform", lots.random.uniform),
        (random, "random", lots.random.random),
        (secrets, "token_hex", lots.token_hex),
        (secrets, "choice", lots.choice),
        (os, "getpid", lambda: 1),
        (socket, "gethostname", lambda: "sim"),
        (worker.service, "Watchdog", NoWatchdog),
        *([] if lots.random.random() < 1 / 8 else IDLER),
        *((module, "datetime", VirtualDatetime) for module in _dated()),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in wanted]
    for target, name, value in wanted:
        setattr(target, name, value)
    try:
        yield
    finally:
        for target, name, value in before:
            setattr(target, name, value)


_modules: dict[str, Any] = {}


def _dated() -> list[Any]:
    """Modules in which `datetime` is the class."""
    if len(_modules) != len(sys.modules):  # imported since
        _modules.clear()
        _modules.update(sys.modules)
        _found[:] = [
            module
            for name, module in sorted(_modules.items())
            if name.startswith(PACKAGES) and vars(module).get("datetime") is clocks.datetime
        ]
    return _found


_found: list[Any] = []


def run(loop: VirtualLoop, main: Any) -> Any:
    """As asyncio.run, without threads or sockets to shut down."""
    try:
        asyncio.events.set_event_loop(None)
        return loop.run_until_complete(main)
    finally:
        loop.close()
