"""What tests of early reads share: a store whose append waits, and functions that do (R25)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kit.build import RUN, FaultyStore, PlainView

from journal.doors import start
from journal.grouped import Job
from journal.handle import Journal
from journal.messages import JSON
from journal.records import StepCompleted, StepStarted
from journal.steps import Call, make_call
from journal.unknown import NO_WAYS

LOOK, PAY = "tool/1/0/look", "tool/1/1/pay"
LONG_S = 5.0


class Gate:
    """A fault of a store: the append waits here, once it `came`, until `open` is set."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self) -> None:
        self._reached.set()
        await self.open.wait()

    async def came(self) -> None:
        async with asyncio.timeout(LONG_S):
            await self._reached.wait()


class Function:
    """What a call does: it begins, waits until it is let on, and ends."""

    def __init__(self, *, at_once: bool = False, raises: BaseException | None = None) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.ended = ""
        self.raises = raises
        if at_once:
            self.go_on.set()

    async def __call__(self) -> JSON:
        self.begun.set()
        try:
            if not self.go_on.is_set():
                async with asyncio.timeout(LONG_S):
                    await self.go_on.wait()
        except asyncio.CancelledError:
            self.ended = "cut off"
            raise
        self.ended = "by itself"
        if self.raises is not None:
            raise self.raises
        return "seen"


def call_of(step: str = LOOK, *, read: bool = True, unsafe: bool = False) -> Call:
    return make_call(step, "tool", "look", None, unsafe=unsafe, read=read)


def job(call: Call, function: Callable[[], Any]) -> Job:
    async def perform(start: StepStarted) -> StepCompleted:
        return StepCompleted(step=call.step, result=await function())

    return call, perform, NO_WAYS


async def opened(*, shared: bool = True) -> tuple[FaultyStore, Journal]:
    store = FaultyStore(shared=shared)
    await start(PlainView(store), "desk", "go", run_id=RUN)
    return store, await Journal.open(store, RUN, is_write=lambda tool: tool == "pay")


def gated(store: FaultyStore) -> Gate:
    """At the next append."""
    gate = store.faults[store.appends + 1] = Gate()
    return gate


async def types_of(store: FaultyStore) -> list[str]:
    entries = (await PlainView(store).load(RUN)).entries
    return [entry.type for entry in entries if entry.type not in ("claim", "release")]


async def until(says: Callable[[], bool]) -> None:
    """Some turns of the loop; all of 1000 where it never says so."""
    for _ in range(1000):
        if says():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def begin(journal: Journal, *jobs: Job) -> asyncio.Task[list[StepCompleted]]:
    return asyncio.ensure_future(journal.steps(jobs))
