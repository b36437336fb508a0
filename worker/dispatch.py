"""Shell: what a worker does about one task message: take the run (journal/taking.py), work it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from weakref import WeakValueDictionary

from journal.errors import JournalDamaged, RunfoldError
from journal.handle import Journal
from journal.ids import RunId
from journal.lease import Lease
from journal.limits import RESULT_PATIENCE_S
from journal.stores.jetstream import JetStreamStore
from journal.stores.tasks import Task
from journal.taking import Taken, Taking, clock_of

from .agent import Agent
from .held import Held

log = logging.getLogger("runfold")


class Dispatcher:
    """Claims runs for one worker and works them. `held` are those it holds now."""

    def __init__(
        self,
        store: JetStreamStore,
        worker: str,
        agents: Mapping[str, Agent],
        *,
        ack_wait_s: float,
        restart_limit: int,
        grace_s: float,
        stubborn: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.store = store
        self.worker = worker
        self.held: dict[RunId, Held] = {}
        self.ack_wait_s = ack_wait_s
        self._agents = agents
        self._grace_s = grace_s
        self._stubborn = stubborn
        self._lingering: list[Held] = []
        self._turns: WeakValueDictionary[RunId, asyncio.Lock] = WeakValueDictionary()
        self._taking = Taking(store, worker, ack_wait_s=ack_wait_s, restart_limit=restart_limit)

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new."""
        return self._taking.closed

    def drain(self) -> None:
        """Take nothing new; each run is given up at its next step."""
        self._taking.closed = True
        for held in self.held.values():
            held.drain()

    def holds(self, run_id: RunId, claim: int) -> bool:
        """The answer to "do you hold it?": yes from before the claim is published until the last
        settle, from the running work itself."""
        held = self.held.get(run_id)
        if held is not None and held.holds(run_id, claim):
            return True
        self._lingering = [one for one in self._lingering if one.lingers]
        if any(one.holds(run_id, claim) for one in self._lingering):
            return True
        about = self._taking.claiming.get(run_id)
        return about is not None and claim > about

    async def look(self, task: Task) -> None:
        """Follow one task message. Raises nothing but a cancellation."""
        lease = Lease(self.store.tasks, task, self.ack_wait_s)
        try:
            held = await self._taken(task, lease)
        except JournalDamaged as damage:
            log.error("%s", damage.message, extra={"run": task.run_id})
            await lease.ack()  # doctor and inbox show it
            return
        except RunfoldError as error:
            log.warning(
                "run %s is left to redelivery: %s",
                task.run_id,
                error.message,
                extra={"run": task.run_id},
            )
            lease.leave()
            return
        if held is not None:
            try:
                await held.work()
            finally:
                if held.lingers:
                    self._lingering.append(held)
            if self.held.get(task.run_id) is held:
                del self.held[task.run_id]

    async def _taken(self, task: Task, lease: Lease) -> Held | None:
        """The decisions about one run are made one after another: a hint that comes while another
        is followed must see what that one leads to. A run that was claimed is in `held`."""
        turn = self._turns.setdefault(task.run_id, asyncio.Lock())
        agent = self._agents[task.agent]
        try:
            async with turn:
                taken = await self._taking.take(task, lease, agent)
                return None if taken is None else self._hold(taken, task, lease, agent)
        finally:
            self._taking.claiming.pop(task.run_id, None)

    def _hold(self, taken: Taken, task: Task, lease: Lease, agent: Agent) -> Held:
        run = taken.run
        journal = Journal.claimed(
            run, taken.claim, is_write=agent.is_unsafe, ack_wait_s=self.ack_wait_s
        )
        journal.result_patience_s = RESULT_PATIENCE_S
        held = Held(
            journal,
            agent,
            lease,
            lost=taken.lost,
            ack_wait_s=self.ack_wait_s,
            grace_s=self._grace_s,
            clock=clock_of(task),
            stubborn=self._stubborn,
            ended=taken.give,
        )
        if (earlier := self.held.get(run.run_id)) is not None:
            self._lingering.append(earlier)  # its write may still run in a thread
        self.held[run.run_id] = held
        if self.draining:
            held.drain()
        return held
