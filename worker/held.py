"""Shell: one run under this worker's claim: the work, its heartbeat, its end (R49-R51, R56).

Why it is safe: the work appends under the claim, so a newer claim stops it whatever happens here.
The heartbeat touches the task message only while the run is ours (lease.py); what is owed is paid
and the message acknowledged only after the record that ended the claim was. Whoever finds the run
lost touches nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from journal.doors import signal
from journal.ends import Clock
from journal.errors import Fenced, JournalDamaged, NewerVersion, RunfoldError, StoreUnavailable
from journal.handle import Journal
from journal.ids import RunId
from journal.lease import Lease
from journal.owed import pay
from journal.records import Claim, Release, Signal
from journal.stepping import Draining

from .agent import Agent
from .events import first_of
from .turns import carry_on

log = logging.getLogger("runfold")
DEAF_S = 1.0
"""A call that has not ended so long after its time limit ignores it."""

REFRESHES = 5


class Held:
    """A run that this worker has claimed. `work` returns when the claim has ended or was lost.

    `forced`: set when the time for stopping in order is over.
    """

    def __init__(
        self,
        journal: Journal,
        agent: Agent,
        lease: Lease,
        *,
        lost: int,
        ack_wait_s: float,
        grace_s: float,
        clock: Clock,
        stubborn: Callable[[asyncio.Task[None]], None],
        ended: Callable[[], None],
    ) -> None:
        self.claim = journal.claim
        self.journal = journal
        self.agent = agent
        self._lease = lease
        self._lost = lost
        self._ack_wait_s = ack_wait_s
        self._grace_s = grace_s
        self._clock = clock
        self._stubborn = stubborn
        self._ended = ended
        self._first = journal
        self._deaf = False
        self._over = False
        self._told = asyncio.Event()
        self.forced = asyncio.Event()

    @property
    def run_id(self) -> RunId:
        return self.journal.run_id

    @property
    def _extra(self) -> dict[str, str | int]:
        """Of a log line."""
        return {"run": self.run_id, "claim": self.claim, "agent": self.agent.name}

    def holds(self, run_id: RunId, claim: int) -> bool:
        """The answer to "do you hold it under this claim?": also while a write that was begun under
        it may still run here."""
        if (run_id, claim) != (self.run_id, self.claim):
            return False
        return self.journal.holds(run_id, claim) or self.lingers

    @property
    def lingers(self) -> bool:
        """Whether a write of ours may still run, though the work has ended; or has ended, and what
        it came to is not told yet: a retry that is permitted would be made all the same."""
        untold = self.journal.late is not None and not self._over
        return self.journal.calls_on() or self.writes or untold

    @property
    def writes(self) -> bool:
        """Whether an unsafe call is under way, of the turn or left by it."""
        return self._first.writes > 0 or self.journal.writes > 0

    def look(self) -> None:
        """Something was appended that the holder should know of: read it now."""
        self._told.set()

    def drain(self) -> None:
        """Give the run up at its next step."""
        if self.journal.stop is None:
            self.journal.stop = "drain"

    # ---- the work ---------------------------------------------------------------------------

    async def work(self) -> None:
        """Carry the run on under the claim, and settle. Raises nothing but a cancellation."""
        try:
            await self._work()
        finally:
            self._over = True
            self.journal.give_up()
            self.journal.store.observer.let_go(self.run_id, self.claim)
            self._ended()

    async def _work(self) -> None:
        turn = asyncio.create_task(self._carried(), name=f"run {self.run_id}")
        watch = asyncio.create_task(self._watch(turn), name=f"heartbeat of run {self.run_id}")
        try:
            await asyncio.wait([turn, watch], return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():  # the heartbeat ended: lost, cancelled, or out of grace
                turn.cancel()
                await self._let_end(turn)
        except asyncio.CancelledError:
            self.journal.give_up()
            self._lease.leave()
            turn.cancel()
            self._stubborn(turn)
            raise
        finally:
            watch.cancel()
            if turn.done() and not turn.cancelled():
                turn.exception()  # looked at, though we be cancelled before `_end` looks
            await asyncio.wait([watch])
        if not watch.cancelled() and (bug := watch.exception()) is not None:
            log.error(
                "run %s: its heartbeat failed: this is a bug",
                self.run_id,
                exc_info=bug,
                extra=self._extra,
            )
        if not turn.done():
            self._name_stubborn(turn)
        await self._end(turn)

    async def _carried(self) -> None:
        await carry_on(self.journal, self.agent, attended=False, lost=self._lost, clock=self._clock)

    async def _let_end(self, turn: asyncio.Task[None]) -> None:
        """Wait for a cancelled turn, within the grace; a write in a thread is waited out by it."""
        grace_s = DEAF_S if self._deaf else self._grace_s
        await first_of(self.forced, timeout_s=grace_s, tasks=[turn])
        if not turn.done():
            turn.cancel()
            await asyncio.wait([turn], timeout=1.0)

    def _name_stubborn(self, turn: asyncio.Task[None]) -> None:
        where = _place(turn)
        log.error(
            "run %s: its task ignores that it was cancelled, in %s",
            self.run_id,
            where,
            extra=self._extra,
        )
        self._stubborn(turn)

    async def _end(self, turn: asyncio.Task[None]) -> None:
        """Settle by how the turn ended. Whoever is not sure of the run touches nothing."""
        journal = self.journal
        error = None if not turn.done() or turn.cancelled() else turn.exception()
        try:
            if (journal.stop == "cancel" or self._deaf) and (not turn.done() or turn.cancelled()):
                await self._go_on_without(turn)
                return
            match error:
                case None if turn.done() and not turn.cancelled():
                    await self._settle()
                case Draining():
                    await self._release()
                case None if journal.stop == "drain":  # the grace is over
                    await self._cut(turn)
                case None | Fenced():
                    await self._fenced()
                case StoreUnavailable() | NewerVersion() | JournalDamaged():
                    log.warning(
                        "run %s is left as it is: %s", self.run_id, error, extra=self._extra
                    )
                    self._leave()
                case _:
                    log.error(
                        "run %s: this is a bug", self.run_id, exc_info=error, extra=self._extra
                    )
                    self._leave()
        except RunfoldError as problem:  # the next delivery, or the sweep, finds out
            log.warning("run %s is left as it is: %s", self.run_id, problem, extra=self._extra)
            self._leave()

    async def _settle(self) -> None:
        """The claim has ended in order: pay what that owes, then the message."""
        await pay(self.journal)
        self.journal.give_up()
        await self._lease.ack()

    async def _release(self) -> None:
        """Hand the run over: the release counts as no crash. By a fresh handle: the old one may
        have been stopped in the middle of an append."""
        self.journal = journal = self.journal.succeed()
        await journal.refresh()
        await journal.append(lambda fold: Release(reason="drain") if fold.claim else None)
        journal.give_up()
        self._lease.nak()

    async def _cut(self, turn: asyncio.Task[None]) -> None:
        """The grace is over. While a write of ours may still run, the run is not given up: whoever
        takes it over must wait for the end of this process."""
        journal = self.journal
        if journal.calls_on() or self.writes or not turn.done():
            self._leave()
            return
        await self._release()

    async def _go_on_without(self, turn: asyncio.Task[None]) -> None:
        """End a run that was cancelled, or whose turn ignored its time limit. Nothing that the old
        turn still returns is recorded: its handle has ended."""
        writing = self.writes
        self.journal = self.journal.succeed()
        await self._refreshed()
        if self.journal.fold.cancel is None and not self._deaf:  # a stale read
            self._leave()
            return
        await carry_on(self.journal, self.agent, attended=False, deaf=self._deaf, clock=self._clock)
        if writing:
            log.warning(
                "run %s: a write of its cancelled turn still runs", self.run_id, extra=self._extra
            )
        await self._settle()

    async def _refreshed(self) -> None:
        """Read the tail, with patience: nobody else ends the run while a write of it runs here."""
        for _ in range(REFRESHES):
            with suppress(StoreUnavailable):
                return await self.journal.refresh()
            await asyncio.sleep(self._ack_wait_s / 3)
        return await self.journal.refresh()

    async def _fenced(self) -> None:
        """The run is somebody else's. A write of ours that did finish is told (R29)."""
        self._leave()
        if self.journal.in_doubt:  # cut off in an append: what landed of it is told to observers
            with suppress(RunfoldError):
                await self.journal.refresh()
        late = self.journal.late
        if late is None:
            return
        start, result = late
        with suppress(RunfoldError):
            await signal(
                self.journal.store,
                self.run_id,
                "late",
                {"step": start.step, "start": start.n, "result": result},
                request_id=f"late:{start.n}",
                by=self.journal.worker,
                worker=True,
            )
            log.info(
                "run %s: told its holder what %s returned",
                self.run_id,
                start.step,
                extra=self._extra,
            )

    def _leave(self) -> None:
        self.journal.give_up()
        self._lease.leave()

    # ---- the heartbeat ----------------------------------------------------------------------

    async def _watch(self, turn: asyncio.Task[None]) -> None:
        """Hold the message and read the tail, every third of the ack wait or when told, until the
        run is lost, cancelled or the grace over; then the turn is cancelled."""
        while not self.journal.lost:
            if await self._pause():
                break
            if self._past_limit():
                self._deaf = True
                break
            asked_at = time.monotonic()
            match await self._still_ours():
                case True:
                    self._lease.renew(asked_at)
                    self._lease.hold()
                case False:
                    self._lease.leave()
                    break  # what a running write comes to is told (R29)
                case None:  # not known: the message is not held meanwhile
                    continue
            if self.journal.stop == "cancel":
                break
        await self._until_idle()  # cut off, nobody would know what became of a write
        turn.cancel()

    async def _pause(self) -> bool:
        """Until the next beat; True when the grace is over."""
        await first_of(self._told, self.forced, timeout_s=self._beat_s())
        self._told.clear()
        return self.forced.is_set()

    def _limit_in_s(self) -> float:
        """How long until what runs must have ended, with a little time to do so."""
        limits = self.journal.limits.values()
        ends_at = min(limits, default=math.inf) + DEAF_S
        return max(0.0, ends_at - asyncio.get_running_loop().time())

    def _beat_s(self) -> float:
        """Until the next heartbeat, or a time limit before it."""
        return min(self._ack_wait_s / 3, self._limit_in_s())

    def _past_limit(self) -> bool:
        return self._limit_in_s() <= 0

    async def _still_ours(self) -> bool | None:
        """Read what was appended since; a cancellation among it is noted. None: can't be read."""
        journal = self.journal
        if journal.fold.cancel is not None:  # the turn has read it, and a long call goes on
            journal.stop = "cancel"
            return True
        try:
            news = await journal.store.load(journal.run_id, after=journal.tail)
        except (StoreUnavailable, JournalDamaged) as error:
            log.warning("run %s: its tail can't be read: %s", self.run_id, error, extra=self._extra)
            return None
        for entry in news.entries:
            record = entry.record
            if isinstance(record, Claim) and record.n > journal.claim:
                journal.lose()
                journal.give_up()
                return False
            if isinstance(record, Signal) and record.name == "cancel":
                journal.stop = "cancel"
        return True

    async def _until_idle(self) -> None:
        """A write that runs is let end, within its time limit and the grace."""
        while self.writes and not self.forced.is_set() and not self._past_limit():
            if await self._still_ours() is False:
                self._lease.leave()
            self._lease.hold()
            await first_of(self.journal.idle, self.forced, timeout_s=self._beat_s())


def _place(task: asyncio.Task[None]) -> str:
    """Where a suspended task is, innermost first (Task.get_stack knows only the outermost)."""
    at, places = task.get_coro(), list[str]()
    while at is not None:
        frame = getattr(at, "cr_frame", None)
        if frame is not None:
            code = frame.f_code
            places.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        at = getattr(at, "cr_await", None)
    return " < ".join(places[::-1][:4]) or "a place that can't be seen"
