"""Processes of the simulated world: real workers, the real parts of a bridge, a program that calls
`run()`. They are started, killed, stalled and drained."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kit.simulated.client import PROCESS as CLIENT_OF

from bridge.nats_api import NatsApi
from bridge.offers import RemoteTasks
from bridge.signals import SignalDoor
from journal.errors import RunfoldError
from journal.stores.jetstream import JetStreamStore
from worker.runner import run
from worker.service import Worker

from .agents import AGENTS
from .loop import Process, Task
from .plans import RunPlan

if TYPE_CHECKING:
    from .world import World

SWEEP_S = 8.0
GRACE_S = 2.0
BACK_S = (0.05, 1.5)
"""A process that is gone is started again after this."""


class Member:
    """`up`: it runs, though perhaps stalled. `main`: the task of its life."""

    role = ""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.up = False
        self.process = Process("")
        self.main: Task
        self._life = 0

    def start(self) -> None:
        if self.up or self.world.ending:
            return
        self._life += 1
        skews_s = self.world.plan.skews_s
        self.process = Process(
            f"{self.role}{self.index}-{self._life}", skew_s=skews_s[self.index % len(skews_s)]
        )
        self.up = True
        self.main = self.process.run(self._live())
        self.main.add_done_callback(self._gone, context=self.world.context)

    async def _live(self) -> None:
        CLIENT_OF.set(self.process.name)
        await self.body()

    async def body(self) -> None:
        raise NotImplementedError

    def _gone(self, main: Task) -> None:
        self.up = False
        if not main.cancelled() and (error := main.exception()) is not None:
            self.world.trace.note("ended", self.process.name, type(error).__name__)
            if not isinstance(error, RunfoldError):
                self.world.loop.failures.append(f"{self.process.name} ended with {error!r}")
        if self.comes_back():
            self.world.later(self.world.rng.uniform(*BACK_S), self.start)

    def comes_back(self) -> bool:
        return not self.world.ending

    # ---- what happens to it ---------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.up = False
        for client in list(self.world.server.clients):
            if client.process == self.process.name:
                client.kill()
        for task in self.world.loop.pending():
            if task.process is self.process:
                task.forget()
        if self.comes_back():
            self.world.later(self.world.rng.uniform(*BACK_S), self.start)

    def stall(self, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after `for_s`."""
        self.world.stalls += 1
        self.process.stop()
        self.world.later(for_s, self.process.go_on)

    def calm_down(self) -> None:
        """Nothing happens to it any more."""
        self.process.fuse = 0
        self.process.go_on()

    def drain(self) -> None:
        """SIGTERM."""
        self.finish()

    def finish(self) -> None:
        """End in order."""
        if self.up:
            self.main.cancel()


class WorkerProcess(Member):
    role = "worker"
    worker: Worker | None = None
    ready = False

    async def body(self) -> None:
        plan = self.world.plan
        self.worker = Worker(
            self.world.server.url,
            self.world.agents,
            name=self.process.name,
            ack_wait_s=plan.ack_wait_s,
            restart_limit=plan.restart_limit,
            grace_s=GRACE_S,
            sweep_s=SWEEP_S,
            on_ready=self._on_ready,
        )
        self.ready = False
        await self.worker.serve()

    def _on_ready(self) -> None:
        self.ready = True

    def finish(self) -> None:
        if self.up and self.worker is not None:
            self.process.run(self.worker.stop(), "SIGTERM")


class BridgeProcess(Member):
    """`tasks`: for workers over HTTP, where there are any."""

    role = "bridge"
    tasks: RemoteTasks | None = None

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, index)
        self.serving: list[Task] = []

    async def body(self) -> None:
        plan = self.world.plan
        async with JetStreamStore(self.world.server.url) as store, asyncio.TaskGroup() as group:
            for part in (SignalDoor(store), NatsApi(store)):
                group.create_task(part.run())
            if plan.remotes:
                self.tasks = RemoteTasks(
                    store, ack_wait_s=plan.ack_wait_s, restart_limit=plan.restart_limit
                )
                group.create_task(self.tasks.run())

    def finish(self) -> None:
        for request in self.serving:
            request.cancel()
        super().finish()

    def kill(self) -> None:
        super().kill()
        self.tasks = None
        self.world.http.cut(self.process.name)

    def _gone(self, main: Task) -> None:
        self.tasks = None
        self.world.http.cut(self.process.name)
        super()._gone(main)


class Alone(Member):
    """A program that calls `run()`."""

    role = "alone"

    def __init__(self, world: World, index: int, wanted: RunPlan) -> None:
        super().__init__(world, index)
        self._wanted = wanted

    async def body(self) -> None:
        plan = self._wanted
        await asyncio.sleep(plan.at_s)
        async with JetStreamStore(self.world.server.url) as store:
            found: Any = await run(
                store,
                AGENTS[plan.agent],
                plan.run,
                plan.agent,
                ack_wait_s=self.world.plan.ack_wait_s,
            )
            self.world.trace.note("alone", plan.run, type(found).__name__)

    def comes_back(self) -> bool:
        return False
