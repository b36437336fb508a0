"""Shell: one task of a worker over HTTP: the claim, the lease, and what ends them (R65).

Why it is safe: what a native worker's process knows by itself is known here from the journal, at
each request. The run is read up to now first; the claim under it is the task's own (its worker id
is new with the task and holds its owner's name) and the one the worker says, or nothing is written.
So a bridge that was restarted, or another one, goes on where this one was; a worker that lost it
meets a newer claim, and no task is given a second one. A repeated request has its record's id
in the fold, or its record can still land only under that id. The lease is touched only after the
read that says the run is ours.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from journal.doors import signal
from journal.ends import Ends
from journal.errors import (
    Fenced,
    JournalDamaged,
    RunCancelled,
    RunfoldError,
    StoreUnavailable,
)
from journal.handle import Journal
from journal.ids import RunId
from journal.lease import Lease
from journal.log import Log
from journal.messages import JSON
from journal.owed import pay
from journal.records import StepStarted
from journal.stops import unplayed
from journal.stores.jetstream import JetStreamStore
from journal.stores.tasks import Task
from journal.taking import Taking, Wanted, clock_of

from .problems import BadRequest
from .task_id import TaskName

log = logging.getLogger("runfold")


class Committed(RunfoldError):
    """This task has ended its turn, or was parked: there is nothing more to do under it."""

    code = "committed"


class Repeated(Exception):
    """The request is a repeat: its record is in `run`, and the claim under it has ended."""

    def __init__(self, run: Log) -> None:
        super().__init__(run.run_id)
        self.run = run


class StaleTask(RunfoldError):
    """The task came to nothing: the run needs nobody now, or somebody else has it."""

    code = "stale"


class StepOpen(RunfoldError):
    """The turn can't end or stop while a write of it is open."""

    code = "step_open"


class AwaitingApproval(RunfoldError):
    """The run was parked: a person must decide on the call behind `marker` first."""

    code = "awaiting_approval"

    def __init__(self, message: str, *, marker: str, run_id: str, hint: str) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.marker = marker


class RemoteTask:
    """One task that was given away. `heard_at`: the last request (monotonic) · `users`: requests at
    work or waiting · `matched`: how many unsafe calls of an attempt were those of an earlier one
    (iteration, attempt, tool, digest) · one request at a time: `entered`, then what it does to
    `journal`, then perhaps `settle`."""

    def __init__(
        self,
        store: JetStreamStore,
        name: TaskName,
        task: Task,
        *,
        restart_limit: int,
        wanted: Wanted | None = None,
    ) -> None:
        self.store = store
        self.name = name
        self.terms = name.terms
        self.ack_wait_s = ack_wait_s = name.ack_wait_s
        self.heard_at = time.monotonic()
        self._restart_limit = restart_limit
        self.over = False
        self.users = 0
        self.matched: Counter[tuple[int, int, str, str]] = Counter()
        self.lock = asyncio.Lock()
        self._task = task
        self._lease = Lease(store.tasks, task, ack_wait_s)
        self._wanted = wanted
        if wanted is not None:
            wanted.run.by = name.worker
        self._taking = Taking(
            store, name.worker, ack_wait_s=ack_wait_s, restart_limit=restart_limit, remote=True
        )
        self._journal: Journal | None = None
        self._claim_n = 0
        self._answers = False
        self._stack = AsyncExitStack()

    @property
    def run_id(self) -> RunId:
        return self._task.run_id

    @property
    def delivery(self) -> int:
        """How often the task message was delivered."""
        return self._task.delivery

    @property
    def journal(self) -> Journal:
        """The handle; only while entered."""
        assert self._journal is not None
        return self._journal

    def ends(self, record_id: str = "", *, unless_queued: bool = False) -> Ends:
        """What records the end of the turn."""
        return Ends(
            self.journal,
            self.terms,
            clock_of(self._task),
            record_id=record_id,
            unless_queued=unless_queued,
        )

    def open_writes(self) -> list[StepStarted]:
        """Writes that the worker makes now, as far as the journal knows: they are not unknown."""
        claim = self.journal.claim
        return [step.last for step in self.journal.fold.unknown() if step.last.claim == claim]

    def check_none_open(self, what: str) -> None:
        """Raises StepOpen where the worker makes a write now: `what` would cut it off."""
        if open_ := self.open_writes():
            raise StepOpen(
                f"run {self.run_id}: {what} while {open_[0].step} is open",
                run_id=self.run_id,
                hint="append its result; if you don't know it, ask for its step again",
            )

    # ---- a request --------------------------------------------------------------------------

    @asynccontextmanager
    async def entered(
        self, claim: int | None, *, takes: bool, record_id: str = ""
    ) -> AsyncGenerator[None, None]:
        """While inside, the run is held under the claim that the worker says (None: it knows none
        yet; `takes`: the task is claimed then) and the lease is kept. Raises Fenced, Committed,
        StaleTask, RunCancelled, BadRequest, StoreUnavailable; Repeated for a record that ended it.
        """
        async with self.lock:
            self.heard_at = asked_at = time.monotonic()
            try:
                await self._read(claim, takes, record_id)
                self._lease.renew(asked_at)
                self._lease.hold()
                if not (record_id and self.journal.fold.repeats(record_id)):
                    await self._check_played()
                yield
            except (StoreUnavailable, asyncio.CancelledError):
                self._forget()  # an append of ours may land late: the journal is asked anew
                raise
            except (Fenced, Committed, StaleTask, JournalDamaged):
                await self.close()
                raise
            finally:
                self.heard_at = time.monotonic()

    @property
    def held(self) -> bool:
        """Whether the run is held here, under this task's claim."""
        return self._journal is not None and not self.over

    @property
    def heard(self) -> bool:
        """Whether the worker said something within the ack wait; a request may itself take long."""
        lately = time.monotonic() - self.heard_at < self.ack_wait_s
        return not self.over and (lately or self.lock.locked())

    async def _read(self, claim: int | None, takes: bool, record_id: str) -> None:
        if self._journal is not None and (self._journal.lost or self._journal.cut_off):
            self._forget()
        if self._journal is None:
            await self._open(claim, takes, record_id)
        else:
            await self._journal.refresh()
        journal = self.journal
        live = journal.fold.claim
        if live is None or live.n != journal.claim:
            if record_id and journal.fold.repeats(record_id):
                raise Repeated(journal)
            raise self._ended()
        if claim is not None and claim != journal.claim:
            raise BadRequest(f"the claim of this task is {journal.claim}, not {claim}")

    async def _open(self, claim: int | None, takes: bool, record_id: str) -> None:
        """Find this task's claim in the journal, or make it: once, for a second one would begin
        its record ids anew. So it is looked for where a claim of it can't have been left out."""
        run = await self._run(claim)
        mine = [one for one in run.fold.claims.values() if one.worker == self.name.worker]
        if mine and run.fold.claim is mine[-1]:
            await self._answer()
            self._hold(run, mine[-1].n)
        elif mine or claim is not None:
            after = claim or mine[-1].n
            if record_id and run.fold.repeats(record_id):
                raise Repeated(run)
            if any(n > after for n in run.fold.claims):
                raise Fenced(
                    f"run {self.run_id} was taken over",
                    run_id=self.run_id,
                    hint="stop this task and poll for another; start nothing of it",
                )
            raise self._ended()
        elif not takes:
            raise BadRequest("this task is not claimed yet", hint="journal.read claims it")
        else:
            await self._claim(run)

    async def _run(self, claim: int | None) -> Log:
        if self._wanted is not None:  # from when the task was made on
            await self._wanted.run.refresh()
            return self._wanted.run
        if claim is not None:
            return await Log.resumed(self.store, self.run_id, by=self.name.worker)
        return await Log.read(self.store, self.run_id, by=self.name.worker)

    def _hold(self, run: Log, claim: int) -> None:
        self._claim_n = claim
        self._journal = journal = Journal.claimed(
            run, run.fold.claims[claim], is_write=lambda tool: True, ack_wait_s=self.ack_wait_s
        )
        # The worker made these calls; under this very claim, so they are running, not unknown.
        journal.attempted = {start.n for start in self.open_writes()}
        journal.writing = set(journal.attempted)

    async def _claim(self, run: Log) -> None:
        wanted, self._wanted = self._wanted or Wanted(run, []), None
        await self._answer()
        try:
            taken = await self._taking.take(self._task, self._lease, self.terms, wanted)
        except JournalDamaged:
            await self._lease.ack()  # doctor and inbox show it
            raise
        except (StoreUnavailable, Fenced):
            raise
        except RunfoldError as error:  # its key is another run's just now
            raise StaleTask(error.message, run_id=self.run_id, hint="poll again") from error
        if taken is None:
            raise StaleTask(
                f"run {self.run_id} needs nobody now", run_id=self.run_id, hint="poll again"
            )
        self._stack.callback(taken.give)
        self._hold(taken.run, taken.claim.n)

    async def _answer(self) -> None:
        """From before the claim on, "do you hold it?" is answered yes for the ack wait after each
        request. Never no: another bridge may have heard of the worker since."""

        def held(run_id: RunId, claim: int) -> bool | None:
            return True if self.heard and run_id == self.run_id else None

        if not self._answers:
            await self._stack.enter_async_context(self.store.answering(self.name.worker, held))
            self._answers = True

    # ---- ends -------------------------------------------------------------------------------

    async def _check_played(self) -> None:
        """Whether the turn is one to be played (any more), asked while no write of it is open."""
        fold = self.journal.fold
        if self.open_writes():
            return
        if fold.cancel is not None:
            await self.cancelled()
        at = 0
        while at < fold.n:  # what was not due met a record that it did not know
            at = fold.n
            lost = fold.restarts if fold.restarts >= self._restart_limit else 0
            if not await unplayed(self.ends(), lost=lost):
                return
            if fold.claim is None:
                await self.settle()
                raise StaleTask(
                    f"run {self.run_id} is {fold.status()}: no turn is to be played",
                    run_id=self.run_id,
                    hint="poll again",
                )

    async def cancelled(self) -> None:
        """End the cancelled run: no write of the worker is open. Raises RunCancelled."""
        await self.ends().cancelled()
        await self.settle()
        raise self._cancelled()

    def _cancelled(self) -> RunCancelled:
        return RunCancelled(
            f"run {self.run_id} was cancelled",
            run_id=self.run_id,
            hint="start nothing new; the task is over",
        )

    async def settle(self) -> None:
        """Where the claim has ended in order: pay what that owes, then the message; forget it."""
        if self.journal.fold.claim is not None:
            return
        await pay(self.journal)
        await self._lease.ack()
        await self.close()

    async def give_back(self) -> None:
        """Somebody else may take the message."""
        self._lease.nak()
        await self.close()

    async def late(self, start: int, result: JSON) -> None:
        """Tell the run, by now somebody else's, what a write of this task came to (R29)."""
        journal = await Log.resumed(self.store, self.run_id, by=self.name.worker)
        fold = journal.fold
        steps = [*fold.steps.values(), *(one for all_ in fold.honoured.values() for one in all_)]
        for step in steps:
            if any(one.n == start and one.by == self.name.worker for one in step.starts):
                await signal(
                    self.store,
                    self.run_id,
                    "late",
                    {"step": step.name, "start": start, "result": result},
                    request_id=f"late:{start}",
                    by=self.name.worker,
                    worker=True,
                )
                return

    def _ended(self) -> RunfoldError:
        return Committed(
            f"this task of run {self.run_id} has ended",
            run_id=self.run_id,
            hint="poll for another; start nothing of it",
        )

    def _forget(self) -> None:
        if self._journal is not None:
            self._journal.give_up()
            self._journal = None

    async def close(self) -> None:
        """Know it no more; what may still be done with it says the journal."""
        if self._claim_n and not self.over:
            self.store.observer.let_go(self.run_id, self._claim_n)
        self.over = True
        self._lease.leave()
        await self._stack.aclose()
