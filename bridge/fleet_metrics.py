"""Shell: the fleet in numbers, for Prometheus: looked up in the background, again and again.

Each bridge does so by itself; of several, any one's numbers are right. A look that fails is no
problem of the bridge: then `runfold_fleet_looked_at_seconds` stands still, and the numbers with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from datetime import UTC, datetime
from typing import Final, get_args

from msgspec import Struct

from journal.errors import JournalDamaged, RunfoldError
from journal.families import OTHER, Family, Words, gauge, gauges
from journal.ids import RunId
from journal.inbox import FOR_PEOPLE, Kind, items_of
from journal.log import Log
from journal.records import Status
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_headers import PURGED
from journal.views import waiting_since
from journal.waits import instant_text

log = logging.getLogger("runfold")

LOOK_S: Final = 30.0
SHARE: Final = 0.1
"""Of the time at most: a look that takes long is followed by a pause nine times as long."""

PAGE_RUNS: Final = 512
PAGE_PAUSE_S: Final = 0.02
"""After so many runs others have the connection to themselves for a moment."""

READS_MAX: Final = 200
"""Journals read in a look, of runs that wait for people. Of more the others keep what was read of
them before: each has its turn."""

_OPERATOR: Final[frozenset[Kind]] = frozenset({"operator"})
_SAFETY: Final = {"safe": 1, "degraded": 0, "unverified": -1}


class Waiting(Struct, frozen=True):
    """What a run waits for, of people, and since when."""

    kinds: frozenset[Kind]
    since: datetime


class FleetLook:
    """A part of the bridge: `run` until it is cancelled."""

    def __init__(self, store: JetStreamStore) -> None:
        self._store = store
        self._statuses: dict[str, float] = {}
        self._waiting: dict[RunId, Waiting] = {}
        self._agents = Words()
        self._tasks: dict[str, float] = {}
        self._signals: float | None = None
        self._looked_at = 0.0

    def problem(self) -> str:
        """None that is the bridge's."""
        return ""

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            try:
                await self.look()
            except RunfoldError as error:  # the gauge stands still
                log.debug("the fleet could not be looked up: %s", error.message)
            except Exception:  # the edge of one look: it must not end the bridge
                log.exception("the fleet could not be looked up: a bug")
            took_s = time.monotonic() - began
            await asyncio.sleep(max(LOOK_S, took_s * (1 / SHARE - 1)) * random.uniform(0.75, 1.25))

    async def look(self) -> None:
        """Raises RunfoldError; what was looked up before that counts."""
        self._signals = (await self._store.signals.backlog()).waiting
        await self._look_at_tasks()
        await self._look_at_runs()
        self._looked_at = time.time()

    def families(self) -> list[Family]:
        """As of the last look; waits up to now. Nothing is shown that was not looked up yet."""
        safety = self._store.safety
        return [
            gauges(
                "runfold_runs",
                "Runs by the status their last record left",
                "status",
                self._statuses,
            ),
            gauges(
                "runfold_waiting_oldest_seconds",
                "For how long the run that waits longest for a person has waited; 0: none waits",
                "kind",
                self._oldest() if self._statuses else {},
            ),
            gauges("runfold_tasks_waiting", "Tasks that no worker has yet", "agent", self._tasks),
            gauge("runfold_signals_waiting", "Signals kept and not settled yet", self._signals),
            gauge(
                "runfold_storage_safe",
                "1 safe, 0 degraded, -1 unverified, as found when the bridge opened the store",
                None if safety is None else _SAFETY[safety.level],
            ),
            gauge(
                "runfold_fleet_looked_at_seconds",
                "When the last look at the whole fleet ended, in seconds since 1970; 0: none yet",
                self._looked_at,
            ),
        ]

    def _oldest(self) -> dict[str, float]:
        found: dict[str, float] = dict.fromkeys(get_args(Kind), 0.0)
        now = datetime.now(UTC)
        for waiting in self._waiting.copy().values():
            for kind in waiting.kinds:
                found[kind] = max(found[kind], (now - waiting.since).total_seconds())
        return found

    async def _look_at_tasks(self) -> None:
        counts = await self._store.tasks.agents()
        found = dict.fromkeys(self._tasks, 0.0)
        for agent in sorted(counts, key=lambda agent: -counts[agent]):
            word = self._agents.of(agent)
            if word == OTHER:  # its tasks at work, too: not worth a question
                found[word] = found.get(word, 0.0) + counts[agent]
            else:
                found[word] = (await self._store.tasks.backlog(agent)).pending
        self._tasks = found

    async def _look_at_runs(self) -> None:
        """By the headers; those that may wait for people are read, the ones not known yet first."""
        statuses: dict[str, float] = dict.fromkeys(get_args(Status), 0.0)
        wait: list[RunId] = []
        looked_at = 0
        async for run, word in self._store.heads():
            looked_at += 1
            if looked_at % PAGE_RUNS == 0:
                await asyncio.sleep(PAGE_PAUSE_S)
            if word == PURGED:
                continue
            if word in statuses:
                statuses[word] += 1
            if word not in statuses or word in FOR_PEOPLE:
                wait.append(run)
        waiting = set(wait)
        known = {run: one for run, one in self._waiting.items() if run in waiting}
        for run in [*(run for run in wait if run not in known), *known][:READS_MAX]:
            known[run] = await _read(self._store, run, known.pop(run, None))
        self._waiting, self._statuses = known, statuses


async def _read(store: JetStreamStore, run: RunId, before: Waiting | None) -> Waiting:
    """A journal that can't be read waits since that was seen first."""
    now = datetime.now(UTC)
    try:
        fold = (await Log.resumed(store, run, by="metrics")).fold
    except JournalDamaged:
        seen = before.since if before and before.kinds == _OPERATOR else now
        return Waiting(_OPERATOR, seen)
    items = items_of(run, fold, held=False, now=instant_text(now))
    return Waiting(frozenset(item.kind for item in items), waiting_since(fold))
