"""Shell: the runs of workers that are gone are looked at at once, not after the ack wait (R51).

Why it is safe: all that is done here is to publish tasks, and a task only says "look at this run".
Whoever follows one asks the holder himself, twice and a grace apart, before he claims (claims.py);
a holder that was cut off for a moment says yes by then, and the task is dropped. A run of which
records are lost gets none (doors.records_lost). So that false alarms stay cheap, a run with a newer
task gets another one only if it still stands a grace later.

Some runs are left to the redelivery, after the ack wait: see peers.hurried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from .at_once import at_once
from .errors import RunfoldError
from .ids import RunId
from .limits import ADOPTED_AT_ONCE, PEER_PROBE_S
from .log import Log
from .peers import holder_after, hurried
from .stores.jetstream import JetStreamStore
from .stores.tasks_flight import InFlight


class Looked(Struct, frozen=True):
    """What a look came to. `woken`: runs that got a task. `left`: runs with a task in flight that
    somebody may be about to follow, with the n of their last record: if the next look finds them
    so, whoever had the task did not live to claim, or to settle it. `there`: holders that were
    asked and are not gone."""

    woken: tuple[RunId, ...]
    left: Mapping[RunId, int]
    there: frozenset[str] = frozenset()


async def wake_abandoned(
    store: JetStreamStore,
    agents: Iterable[str],
    before: Mapping[RunId, int],
    gone: Collection[str] | None = None,
) -> Looked:
    """Publish a task for each run at work of these agents whose holder is in `gone`, or, where that
    is None, is not there when asked; and for those `left` then (`before`) and now.

    Raises StoreUnavailable, PermissionDenied."""
    look = _Look(store, before, gone)
    flight = await store.tasks.flight.of(agents)
    lasts = await store.last_records(flight)
    holders = {run_id: holder_after(record) for run_id, record in lasts.items()}
    if gone is None:
        await look.ask_all(dict.fromkeys(filter(None, holders.values())))
    wanted = [
        one
        for run_id, one in flight.items()
        if not (holder := holders.get(run_id, "")) or await look.is_gone(holder)
    ]
    left = iter(wanted)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(ADOPTED_AT_ONCE, len(wanted))):
            group.create_task(look.follow(left))
    return Looked(tuple(look.woken), look.left, look.there)


async def nobody_there(store: JetStreamStore, worker: str) -> bool:
    """Whether nobody listens for the worker. Silence is no such answer: it may stand still, or we
    be cut off. It is not waited out: a question that was under way when the worker was killed has
    no answer either. Raises StoreUnavailable, PermissionDenied."""
    try:
        async with asyncio.timeout(PEER_PROBE_S):
            return await store.ask(worker, RunId(""), 0) == "nobody"
    except TimeoutError:
        return False


class _Look:
    def __init__(
        self, store: JetStreamStore, before: Mapping[RunId, int], gone: Collection[str] | None
    ) -> None:
        self._store = store
        self._before = before
        self._gone = gone
        self._asked: dict[str, bool] = {}
        self.woken: list[RunId] = []
        self.left: dict[RunId, int] = {}

    async def is_gone(self, worker: str) -> bool:
        if self._gone is not None:
            return worker in self._gone
        if worker not in self._asked:
            self._asked[worker] = await nobody_there(self._store, worker)
        return self._asked[worker]

    @property
    def there(self) -> frozenset[str]:
        return frozenset(worker for worker, gone in self._asked.items() if not gone)

    async def ask_all(self, workers: Iterable[str]) -> None:
        """Side by side: one of them may be silent."""
        async with at_once() as group:
            for worker in workers:
                group.create_task(self.is_gone(worker))

    async def follow(self, left: Iterator[InFlight]) -> None:
        for one in left:
            try:
                if await self._abandoned(one):
                    self.woken.append(one.run_id)
            except RunfoldError:
                continue  # one run is not to keep the look from the others: its redelivery comes

    async def _abandoned(self, one: InFlight) -> bool:
        fold = (await Log.resumed(self._store, one.run_id, by="peers")).fold
        if fold.started is None or fold.newer is not None or one.cause > fold.n:
            return False
        task = one.first - 1  # nobody is known to have followed it
        if fold.claim is not None:
            if not hurried(fold) or not await self.is_gone(fold.claim.worker):
                return False
            task = fold.claim.task
        priority = fold.started.priority
        newest = await self._store.tasks.flight.newest(one.run_id, one.agent, priority)
        if newest > one.last:
            return False  # it waits for a worker
        if newest > task and self._before.get(one.run_id) != fold.n:
            self.left[one.run_id] = fold.n
            return False
        await self._store.wake(one.run_id, one.agent, cause=fold.n, priority=priority)
        return True
