"""Purgers of the simulated world: they remove what has ended beside all that goes on, and die in
the middle of it. And what must hold of what they did."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from journal.errors import RunfoldError
from journal.purging import Purger
from journal.records import Commit, RunCompleted, RunPurged, RunStarted
from journal.retention import Retention
from journal.stores.jetstream import JetStreamStore

from .members import Member

if TYPE_CHECKING:
    from .world import World

KEEP_S: Final = 0.5
"""In virtual seconds: runs of one schedule end, are resumed and purged beside one another."""

PASS_S: Final = (0.05, 0.6)
DEATHS: Final = 6
DEATH_S: Final = (0.5, 8.0)


class PurgerProcess(Member):
    """Killed some times, and started again."""

    role = "purger"

    def start(self) -> None:
        first = self._life == 0
        super().start()
        if first:
            for _ in range(DEATHS):
                self.world.later(self.world.rng.uniform(*DEATH_S), self._die)

    def _die(self) -> None:
        if self.up and not self.world.chaos.quiet:
            self.kill()

    async def body(self) -> None:
        async with JetStreamStore(self.world.server.url) as store:
            wanted = Retention(keep_s=KEEP_S, resumable_s=KEEP_S)
            purger = Purger(store, wanted, by=self.process.name)
            while True:
                await asyncio.sleep(self.world.rng.uniform(*PASS_S))
                try:
                    async with aclosing(purger.purge_ended()) as outcomes:
                        async for done in outcomes:
                            self.world.trace.note("purge", done.run, done.what, done.why)
                except RunfoldError as error:
                    self.world.trace.note("purge", error.code)


def purge_violations(world: World) -> Iterator[str]:
    """Of all runs: what stands before a tombstone ended so long ago, by the server's clock, and is
    nobody's child; nothing stands behind it; and nothing went without it."""
    journals = {str(run): world.records(run) for run in world.runs()}
    for run, records in journals.items():
        stamps = world.stamps_s(run)
        if [record.n for record in records] != list(range(1, len(records) + 1)):
            yield f"run {run}: something of it is gone"
        for index, record in enumerate(records):
            if not isinstance(record, RunPurged):
                continue
            end, started = records[index - 1], records[0]
            if record is not records[-1]:
                yield f"run {run}: record {record.n + 1} stands behind its tombstone"
            if not isinstance(end, RunCompleted | Commit):
                yield f"run {run}: it was purged behind {type(end).__name__}"
            if stamps[index] - stamps[index - 1] < KEEP_S:
                yield f"run {run}: purged {stamps[index] - stamps[index - 1]:.3f} s after its end"
            parent = started.parent if isinstance(started, RunStarted) else ""
            if parent and not (world.purged(parent) and world.buried_s(parent) <= stamps[index]):
                yield f"run {run}: it was purged before its parent {parent}"
        if world.removed(run) and not world.purged(run):
            yield f"run {run}: records of it were removed, and it has no tombstone"
