"""Shell: W3, how long a run stands still when its worker goes, with another worker there.

`killed`: SIGKILL, from the signal to the next claim. `silent`: stopped, the same: what a host that
vanishes looks like, once its connection is given up. `drained`: SIGTERM, from the release that the
worker writes to the next claim. Times of records are whole milliseconds.
"""

from __future__ import annotations

import signal as signals
from time import time

from journal.fleet import Fleet
from journal.limits import ACK_WAIT_S
from journal.records import Release
from journal.stores.jetstream import JetStreamStore

from .blocks import Numbers, spread
from .processes import Place, worker
from .scale import Scale
from .steps import Progress
from .watching import at, nth_claim, records

SHORT_ACK_WAIT_S = 2.0
PATIENCE_S = 30.0


async def takeover_on(place: Place, scale: Scale, progress: Progress) -> Numbers:
    """By how the worker went and, where it counts, by its ack wait."""
    async with JetStreamStore(place.url) as store:
        hand = _Hand(place, Fleet(store), progress)
        found: Numbers = {
            "killed": await hand.over("SIGKILL", ACK_WAIT_S, scale.takeovers),
            "killed_short": await hand.over("SIGKILL", SHORT_ACK_WAIT_S, scale.takeovers),
            "silent_short": await hand.over("SIGSTOP", SHORT_ACK_WAIT_S, scale.takeovers),
            "drained": await hand.over("SIGTERM", ACK_WAIT_S, scale.takeovers),
        }
        if scale.silent_default:
            found["silent"] = await hand.over("SIGSTOP", ACK_WAIT_S, 1)
    return found


class _Hand:
    def __init__(self, place: Place, fleet: Fleet, progress: Progress) -> None:
        self._place, self._fleet, self._progress = place, fleet, progress

    async def over(self, how: str, ack_wait_s: float, times: int) -> Numbers:
        """Seconds from that signal (or the release after it) to the next worker's claim."""
        each: list[float] = []
        for number in range(times):
            self._progress(f"{how}, ack wait {ack_wait_s:g} s: {number + 1} of {times}")
            each.append(await self._once(f"{how}-{ack_wait_s:g}-{number}", how, ack_wait_s))
        return spread(each) | {"ack_wait_s": ack_wait_s}

    async def _once(self, run: str, how: str, ack_wait_s: float) -> float:
        store = self._fleet.store
        async with worker(self._place, ["slow"], ack_wait_s=ack_wait_s) as holder:
            await self._fleet.start("slow", None, run_id=run)
            await nth_claim(store, run, 1, PATIENCE_S)
            async with worker(self._place, ["slow"], ack_wait_s=ack_wait_s):
                sent = time()
                holder.process.send_signal(signals.Signals[how])
                claim = await nth_claim(store, run, 2, ack_wait_s + PATIENCE_S)
                given = [r for r in await records(store, run) if isinstance(r, Release)]
                await self._fleet.cancel(run)
                await self._fleet.wait(run, timeout_s=20)
        return at(claim) - (at(given[-1]) if given else sent)
