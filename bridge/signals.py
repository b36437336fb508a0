"""Shell: applies the signals that the SIGNALS stream keeps (R58-R61): each once, or refused.

A run's signals are applied in the order of the stream, over all bridges: one is applied only when
no earlier one of its run is left in the stream; else it is put off. Runs don't wait for each other.
That none is lost: see settling.py.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable
from typing import Final, TypeAlias

from journal.errors import RunfoldError
from journal.escape import visible
from journal.stores.jetstream import JetStreamStore
from journal.stores.signals_queue import ACK_PENDING_MAX, ACK_WAIT_S, KeptSignal
from journal.stores.tasks_pull import PullEnd

from .settling import Settler

log = logging.getLogger("runfold")

AT_ONCE: Final = 64
"""Runs at a time: enough that their records are worth a batch (journal/grouping.py)."""

HELD_MAX: Final = 256
"""Messages in the hands of this bridge, at 64 KiB."""

LANE_MAX: Final = 128
"""Of one run: a thousand signals for one must leave room for others."""

PULL_S: Final = 30.0
DEAF_S: Final = 2 * PULL_S
PAUSE_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
"""After what did not work: doubled each time in a row."""

SICK_MAX: Final = 4096
"""Runs whose failures in a row are counted."""

Lane: TypeAlias = list[tuple[int, int, KeptSignal]]
"""Of one run, a heap by sequence; the number tells two deliveries of one message apart."""


class SignalDoor:
    """`count(name, result)`: applied, kept, repeated, put_off, or the code of the refusal."""

    def __init__(
        self,
        store: JetStreamStore,
        *,
        count: Callable[[str, str], None] = lambda name, result: None,
    ) -> None:
        self._store = store
        self._queue = store.signals
        self._settler = Settler(store, count)
        self._lanes: dict[str, Lane] = {}
        self._numbers = itertools.count()
        self._held: dict[str, KeptSignal] = {}
        self._failures: dict[str, int] = {}
        self._came: dict[str, float] = {}
        self._room = asyncio.Event()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._group: asyncio.TaskGroup | None = None
        self._problem = ""
        self._heard = 0.0

    async def run(self) -> None:
        """Until it is cancelled. What is in hand then is given back, for another bridge."""
        self._heard = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._keep())
                await self._listen()
        finally:
            self._group = None
            for signal in self._held.values():  # what still lands of it makes that one a repeat
                self._queue.nak(signal, 0)
            self._held.clear()
            self._lanes.clear()

    def problem(self) -> str:
        """Why signals are not applied now; "" where they are. For health."""
        if self._group is None:
            return "signals: not listening"
        if self._problem:
            return self._problem
        if self._settler.trouble:
            return f"signals are put off: {self._settler.trouble}"
        silent_s = asyncio.get_running_loop().time() - self._heard
        if silent_s > DEAF_S and len(self._held) < HELD_MAX:
            return f"signals: no pull was answered for {silent_s:.0f} s"
        return ""

    # ---- taking -----------------------------------------------------------------------------

    async def _listen(self) -> None:
        pause_s = PAUSE_S
        while True:
            try:
                await self._queue.ensure()
                async with self._queue.pulling(self._take) as puller:
                    while True:
                        self._room.clear()
                        free = HELD_MAX - len(self._held)
                        if free <= 0:
                            await self._room.wait()  # ended by a lane: each has its deadline
                            self._hear()
                            continue
                        self._judge(await puller.pull(free, PULL_S))
                        pause_s = PAUSE_S
            except RunfoldError as error:
                self._problem = f"signals: {visible(error.message)}"
            except _Again as again:
                log.warning("signals: a pull ended: %s", visible(str(again)))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _judge(self, end: PullEnd) -> None:
        match end.why:
            case "filled" | "expired":
                self._hear()
            case "silent" | "lost":
                pass  # the next pull waits for the connection
            case "gone" | "other":
                raise _Again(f"{end.why}: {end.text}")

    def _hear(self) -> None:
        self._heard = asyncio.get_running_loop().time()
        self._problem = ""

    def _take(self, signal: KeptSignal) -> None:
        self._hear()
        if self._group is None or len(self._held) >= 2 * HELD_MAX:  # late ones of an ended pull
            self._queue.nak(signal, PAUSE_S)
            return
        try:
            lane_key = signal.address().run
        except (
            Exception
        ):  # no run's id; if it is a bug, `settle` meets it at the edge of one signal
            lane_key = f"~{signal.sequence}"
        if len(self._came) >= ACK_PENDING_MAX:  # what another bridge settled is never taken out
            self._came.clear()
        self._came.setdefault(signal.key, time.monotonic())
        if (left_s := self._settler.doubt_s(lane_key)) and lane_key not in self._lanes:
            self._queue.nak(signal, left_s)  # not needed for safety: `settle` finds the earlier one
            return
        self._held[signal.reply] = signal
        lane = self._lanes.get(lane_key)
        if lane is None:
            lane = self._lanes[lane_key] = []
            self._group.create_task(self._work(lane_key, lane))
        heapq.heappush(lane, (signal.sequence, next(self._numbers), signal))
        if len(lane) > LANE_MAX:  # the last one: an earlier one is what the others wait for
            last = max(lane)
            lane.remove(last)
            heapq.heapify(lane)
            self._put_off(last[2], PAUSE_S)

    async def _keep(self) -> None:
        """What is in hand is not delivered to others."""
        while True:
            await asyncio.sleep(ACK_WAIT_S / 3)
            for signal in self._held.values():
                self._queue.in_progress(signal)

    # ---- working ----------------------------------------------------------------------------

    async def _work(self, key: str, lane: Lane) -> None:
        """A run's signals, one after another, until none is in hand; where one can't be settled
        now, those behind it can't either."""
        settled = 0
        try:
            while lane:
                entry = heapq.heappop(lane)
                signal = entry[2]
                came = self._came.get(signal.key, time.monotonic())
                async with self._slots:
                    what = await self._settler.settle(signal, came, settled, _ahead(lane, signal))
                match what:
                    case "settled":
                        settled = signal.sequence
                        self._failures.pop(key, None)
                        self._came.pop(signal.key, None)
                        self._let_go(signal)
                    case "doubtful":
                        delay_s = self._settler.doubt_s(key)
                        self._put_off(signal, delay_s)
                        self._put_all_off(lane, delay_s)
                    case "earlier":  # it has come meanwhile
                        heapq.heappush(lane, entry)
                    case "gone":  # and if it is not: again
                        self._put_off(signal, PAUSE_S)
                    case "later":
                        self._put_off(signal, PAUSE_S)
                        self._put_all_off(lane, PAUSE_S)
                    case "failed":
                        delay_s = self._delay_s(key)
                        self._put_off(signal, delay_s)
                        self._put_all_off(lane, delay_s)
        finally:
            del self._lanes[key]

    def _delay_s(self, key: str) -> float:
        if len(self._failures) >= SICK_MAX:
            self._failures.clear()
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        return min(PAUSE_S * 2 ** min(failures - 1, 16), PAUSE_MAX_S)

    def _put_all_off(self, lane: Lane, delay_s: float) -> None:
        for _, _, signal in lane:
            self._put_off(signal, delay_s)
        lane.clear()

    def _put_off(self, signal: KeptSignal, delay_s: float) -> None:
        self._queue.nak(signal, delay_s)
        self._let_go(signal)

    def _let_go(self, signal: KeptSignal) -> None:
        self._held.pop(signal.reply, None)
        self._room.set()


class _Again(Exception):
    """The consumer is gone, or the server is at a limit: from the beginning, after a pause."""


def _ahead(lane: Lane, signal: KeptSignal) -> Callable[[], bool]:
    return lambda: bool(lane) and lane[0][0] < signal.sequence
