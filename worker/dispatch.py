"""Shell: what a worker does about one task message: load, decide, ask, claim, work (PROTOCOL 4).

claims.py decides; see there for why it is safe. Messages are hints: each path ends by following
the hint (ack), giving it to others (nak), or leaving it to redelivery.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import assert_never
from weakref import WeakValueDictionary

from journal.claims import (
    Answer,
    AskHolder,
    Delivery,
    Drop,
    Finished,
    Leave,
    NotMine,
    Resting,
    Stale,
    Take,
    TaskDecision,
    decide_task,
    live_claim,
)
from journal.errors import JournalDamaged, RunfoldError
from journal.fold import Fold
from journal.handle import Journal
from journal.ids import RunId
from journal.keys import Keys
from journal.lease import Lease
from journal.limits import REVISIT_S, STALE_PAUSE_S, STALE_READS
from journal.log import Log
from journal.owed import pay
from journal.records import Claim
from journal.stores.jetstream import JetStreamStore
from journal.stores.tasks import Task
from journal.waits import instant_text

from .agent import Agent
from .ends import Clock
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
        self.draining = False
        self.ack_wait_s = ack_wait_s
        self._agents = agents
        self._restart_limit = restart_limit
        self._grace_s = grace_s
        self._stubborn = stubborn
        self._lingering: list[Held] = []
        self._claiming: dict[RunId, int] = {}
        self._turns: WeakValueDictionary[RunId, asyncio.Lock] = WeakValueDictionary()
        self._keys = Keys(store)

    def holds(self, run_id: RunId, claim: int) -> bool:
        """The answer to "do you hold it?": yes from before the claim is published until the last
        settle, from the running work itself."""
        held = self.held.get(run_id)
        if held is not None and held.holds(run_id, claim):
            return True
        self._lingering = [one for one in self._lingering if one.lingers]
        if any(one.holds(run_id, claim) for one in self._lingering):
            return True
        about = self._claiming.get(run_id)
        return about is not None and claim > about

    async def look(self, task: Task) -> None:
        """Follow one task message. Raises nothing but a cancellation."""
        lease = Lease(self.store.tasks, task, self.ack_wait_s)
        try:
            held = await self._taken(task, lease)
        except JournalDamaged as damage:
            log.error("%s", damage.message)
            await lease.ack()  # doctor and inbox show it
            return
        except RunfoldError as error:
            log.warning("run %s is left to redelivery: %s", task.run_id, error.message)
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
        is followed must see what that one leads to."""
        turn = self._turns.setdefault(task.run_id, asyncio.Lock())
        try:
            async with turn:
                return await self._decide(task, lease)
        finally:
            self._claiming.pop(task.run_id, None)

    async def _decide(self, task: Task, lease: Lease) -> Held | None:
        """Settle the hint, or claim the run: then it is in `held`."""
        run = await Log.resumed(self.store, task.run_id, by=self.worker)
        answers: list[Answer] = []
        stale = 0
        while True:
            decision = self._decision(run.fold, task, answers)
            match decision:
                case Stale():
                    stale += 1
                    if stale > STALE_READS:
                        lease.nak(REVISIT_S)
                        return None
                    await asyncio.sleep(STALE_PAUSE_S * stale)
                    await run.refresh()
                case AskHolder(worker, claim, after_s):
                    await asyncio.sleep(after_s)
                    answers.append(await self.store.ask(worker, run.run_id, claim))
                    await run.refresh()
                    if live_claim(run.fold) != claim:
                        answers = []
                case Take():
                    held = await self._take(run, task, lease, answers)
                    if held is not None:
                        return held
                    answers = []
                case _:
                    await self._settle(run, decision, lease)
                    return None

    def _decision(self, fold: Fold, task: Task, answers: list[Answer]) -> TaskDecision:
        """At this fold. A wait is due by the later of our clock and the server's word of when the
        message was published (PROTOCOL 5): a slow clock delays nothing."""
        now = _clock(task)()
        return decide_task(
            fold,
            Delivery(sequence=task.sequence, delivery=task.delivery, cause=task.cause),
            answers,
            agent=task.agent,
            accepts=self._agents[task.agent].accepts,
            now=instant_text(now),
            ack_wait_s=self.ack_wait_s,
            restart_limit=self._restart_limit,
        )

    async def _settle(self, run: Log, decision: TaskDecision, lease: Lease) -> None:
        match decision:
            case Resting(until) if not until:
                await lease.ack()
            case Finished() | Resting():
                await pay(run)
                await lease.ack()
            case NotMine(why):
                log.debug("run %s is not for this worker: %s", run.run_id, why)
                # soon at first: in a mixed fleet the next worker may be the right one
                lease.nak(min(REVISIT_S, 0.05 * 2 ** min(lease.task.delivery, 10)))
            case Leave():
                lease.leave()
            case Drop():
                await lease.ack()
            case Stale() | AskHolder() | Take():
                raise AssertionError(decision)
            case other:
                assert_never(other)

    async def _take(self, run: Log, task: Task, lease: Lease, answers: list[Answer]) -> Held | None:
        """Claim the run; None where at a new tail that is not due any more."""
        agent = self._agents[task.agent]
        if self.draining:
            lease.nak()
            raise RunfoldError("this worker is being stopped", run_id=run.run_id)
        started = run.fold.started
        assert started is not None
        key = await self._keys.take(started.key, run.run_id)
        if key is None:
            lease.nak(min(1.0, 0.1 * task.delivery))
            raise RunfoldError(f"another run of key {started.key} is active", run_id=run.run_id)
        about = live_claim(run.fold)
        restarts: list[int] = []

        def due(fold: Fold) -> Claim | None:
            now = self._decision(fold, task, answers if live_claim(fold) == about else [])
            if not isinstance(now, Take):
                return None
            restarts[:] = [fold.restarts + (fold.claim is not None)] if now.lost else [0]
            return Claim(
                worker=self.worker,
                revision=agent.revision,
                reason=now.reason,
                attempt=fold.attempt,
                task=task.sequence,
                delivery=task.delivery,
            )

        self._claiming[run.run_id] = run.fold.n
        try:
            claim = await run.append(due)
        except BaseException:
            key()
            raise
        if claim is None or live_claim(run.fold) != claim.n:
            key()
            return None
        journal = Journal.claimed(run, claim, is_write=agent.is_unsafe, ack_wait_s=self.ack_wait_s)
        held = Held(
            journal,
            agent,
            lease,
            lost=restarts[0],
            ack_wait_s=self.ack_wait_s,
            grace_s=self._grace_s,
            clock=_clock(task),
            stubborn=self._stubborn,
            ended=key,
        )
        if (earlier := self.held.get(run.run_id)) is not None:
            self._lingering.append(earlier)  # its write may still run in a thread
        self.held[run.run_id] = held
        if self.draining:
            held.drain()
        return held


def _clock(task: Task) -> Clock:
    """Our clock; if it is behind the server's word of when the task was published, put forward by
    that much, so that a slow one delays nothing."""
    behind = max(task.at - datetime.now(UTC), timedelta())
    return lambda: datetime.now(UTC) + behind
