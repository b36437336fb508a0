"""Shell: following a task message to a claim, or settling it: look, ask, claim (PROTOCOL 4).

claims.py decides; see there for why it is safe. Messages are hints: each path ends by following
the hint (ack), giving it to others (nak), or leaving it to redelivery.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import assert_never

from msgspec import Struct

from .claims import (
    Answer,
    AskHolder,
    Delivery,
    Drop,
    Finished,
    HeldBack,
    Leave,
    NotMine,
    Resting,
    Stale,
    Take,
    TaskDecision,
    decide_task,
    live_claim,
    on_last_chance,
)
from .ends import Clock
from .errors import RunfoldError
from .fold import Fold
from .ids import RunId
from .keys import Keys
from .lease import Lease
from .limits import REVISIT_S, STALE_PAUSE_S, STALE_READS
from .log import Log
from .owed import pay
from .records import RELEASE, Claim
from .stores.jetstream import JetStreamStore
from .stores.tasks import Task
from .terms import Terms
from .waits import instant_text

log = logging.getLogger("runfold")


class Wanted(Struct, frozen=True):
    """A run to claim, as it was read, and what was answered about its live claim."""

    run: Log
    answers: list[Answer]


class Taken(Struct, frozen=True):
    """A run that was claimed. `lost`: the restart limit's holders in a row, or 0; `give` gives up
    its key and its place."""

    run: Log
    claim: Claim
    lost: int
    give: Callable[[], None]


class Taking:
    """Takes runs for one worker. `closed`: it takes no more. `claiming`: runs it is about to claim,
    with the record before the claim. `remote`: see records.Claim.

    One run on its last chance at a time, until it has moved on or is given back; over HTTP each
    run has a `Taking` of its own: its worker decides what it polls for."""

    def __init__(
        self,
        store: JetStreamStore,
        worker: str,
        *,
        ack_wait_s: float,
        restart_limit: int,
        remote: bool = False,
    ) -> None:
        self.worker = worker
        self.closed = False
        self.claiming: dict[RunId, int] = {}
        self._store = store
        self._ack_wait_s = ack_wait_s
        self._restart_limit = restart_limit
        self._remote = remote
        self._keys = Keys(store)
        self._last_chances: dict[Log, int] = {}

    async def take(
        self, task: Task, lease: Lease, terms: Terms, wanted: Wanted | None = None
    ) -> Taken | None:
        """Claim the run; None where the hint was settled. `wanted`: what was found before. Remove
        the run from `claiming` when somebody else answers for it. Raises RunfoldError."""
        while True:
            wanted = await self.look(task, lease, terms, wanted)
            if wanted is None:
                return None
            taken = await self._claim(wanted, task, lease, terms)
            if taken is not None:
                return taken
            wanted.answers.clear()

    async def look(
        self, task: Task, lease: Lease, terms: Terms, wanted: Wanted | None = None
    ) -> Wanted | None:
        """Ask until it is known whether the run is to be claimed; None: the hint is settled."""
        if wanted is None:
            run = await Log.resumed(self._store, task.run_id, by=self.worker)
            wanted = Wanted(run, [])
        run, answers = wanted.run, wanted.answers
        stale = 0
        while True:
            decision = self._decision(run.fold, task, terms, answers)
            match decision:
                case Stale():
                    stale += 1
                    if stale > STALE_READS:
                        log.warning(
                            "run %s is left: a task is about record %d, and its journal ends at %d",
                            run.run_id,
                            task.cause,
                            run.fold.n,
                        )
                        lease.nak(REVISIT_S)
                        return None
                    await asyncio.sleep(STALE_PAUSE_S * stale)
                    await run.refresh()
                case AskHolder(worker, claim, after_s):
                    await asyncio.sleep(after_s)
                    answers.append(await self._store.ask(worker, run.run_id, claim))
                    await run.refresh()
                    if live_claim(run.fold) != claim:
                        answers.clear()
                case Take():
                    return wanted
                case _:
                    await _settle(run, decision, lease)
                    return None

    def _decision(
        self, fold: Fold, task: Task, terms: Terms, answers: list[Answer]
    ) -> TaskDecision:
        """At this fold. A wait is due by the later of our clock and the server's word of when the
        message was published (PROTOCOL 5): a slow clock delays nothing."""
        return decide_task(
            fold,
            Delivery(sequence=task.sequence, delivery=task.delivery, cause=task.cause),
            answers,
            agent=task.agent,
            accepts=terms.accepts,
            now=instant_text(clock_of(task)()),
            ack_wait_s=self._ack_wait_s,
            restart_limit=self._restart_limit,
            crowded=self._crowded(fold),
        )

    def _crowded(self, by: Fold) -> bool:
        """Whether a run on its last chance is here that has not moved on since it was taken."""
        return any(
            run.fold is not by and (run.fold.n <= at or run.fold.restarts)
            for run, at in self._last_chances.items()
        )

    async def _claim(self, wanted: Wanted, task: Task, lease: Lease, terms: Terms) -> Taken | None:
        """Claim the run; None where at a new tail that is not due any more."""
        run, answers = wanted.run, wanted.answers
        if self.closed:
            lease.nak()
            raise RunfoldError("this worker is being stopped", run_id=run.run_id)
        started = run.fold.started
        assert started is not None
        give_key = await self._keys.take(started.key, run.run_id)
        if give_key is None:
            lease.nak(_soon(task))
            raise RunfoldError(f"another run of key {started.key} is active", run_id=run.run_id)

        def give() -> None:
            give_key()
            self._last_chances.pop(run, None)

        about = live_claim(run.fold)
        restarts: list[int] = []
        over_at: list[str] = []

        def due(fold: Fold) -> Claim | None:
            now = self._decision(fold, task, terms, answers if live_claim(fold) == about else [])
            if not isinstance(now, Take):
                return None
            before = fold.restarts + (fold.claim is not None)
            restarts[:] = [before] if now.lost else [0]
            if on_last_chance(before, self._restart_limit):
                self._last_chances[run] = fold.n
            over_at[:] = [run.over_at]
            return Claim(
                worker=self.worker,
                revision=terms.revision,
                reason=now.reason,
                attempt=fold.attempt,
                task=task.sequence,
                delivery=task.delivery,
                remote=self._remote,
                runfold=RELEASE,
            )

        self.claiming[run.run_id] = run.fold.n
        try:
            claim = await run.append(due)
        except BaseException:
            give()
            raise
        if claim is None or live_claim(run.fold) != claim.n:
            give()
            if claim is not None:
                self._store.observer.let_go(run.run_id, claim.n)
            return None
        if over_at[0]:
            self._store.observer.woken(run.run_id, claim, over_at[0])
        return Taken(run, claim, restarts[0], give)


async def _settle(run: Log, decision: TaskDecision, lease: Lease) -> None:
    match decision:
        case Resting(until) if not until:
            await lease.ack()
        case Finished() | Resting():
            await pay(run)
            await lease.ack()
        case NotMine(why):
            log.debug(
                "run %s is not for this worker: %s", run.run_id, why, extra={"run": run.run_id}
            )
            # soon at first: in a mixed fleet the next worker may be the right one
            lease.nak(min(REVISIT_S, 0.05 * 2 ** min(lease.task.delivery, 10)))
        case HeldBack():
            log.debug("run %s waits: it is on its last chance, and another is here", run.run_id)
            lease.nak(_soon(lease.task) * random.uniform(0.5, 1.0))
        case Leave():
            lease.leave()
        case Drop():
            await lease.ack()
        case Stale() | AskHolder() | Take():
            raise AssertionError(decision)
        case other:
            assert_never(other)


def _soon(task: Task) -> float:
    return min(1.0, 0.1 * task.delivery)


def clock_of(task: Task) -> Clock:
    """Our clock; if it is behind the server's word of when the task was published, put forward by
    that much, so that a slow one delays nothing."""
    behind = max(task.at - datetime.now(UTC), timedelta())
    return lambda: datetime.now(UTC) + behind
