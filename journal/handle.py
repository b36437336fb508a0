"""Shell: the handle of a run that this process works on: owning it, and its durable steps.

Why it is safe: see log.py for appends, steps.py and stepping.py for steps. What is added here is
time: the run stays owned, by lock or claim, from before its first step until no call of it can be
running in this process any more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from . import ids
from .calling import Perform
from .errors import IndeterminateError, JournalDamaged, RunfoldError, TooLarge, ToolError
from .fold import Fold
from .grouped import Job, all_steps, doubt_open, only_reads
from .ids import RunId
from .limits import ACK_WAIT_S, COMMIT_STEPS, PROGRESS_BYTES_MAX
from .log import Body, Log
from .messages import JSON
from .ownership import take
from .records import Claim, Kind, Release, StepCompleted, StepProgress, StepStarted
from .stepping import STICKY, Stop, do_step
from .steps import Call, completed_value, make_call
from .store import Store
from .unknown import NO_WAYS, Ways
from .values import canonical, normalise, recordable

log = logging.getLogger("runfold")


class Journal(Log):
    """One run's journal, owned from `open` until `close`.

    `async with await Journal.open(store, run_id, is_write=…) as journal`, then
    `await journal.run_step(…)` for each durable step, one after another.

    `attempted`: starts whose calls this handle has made. `writing`: unsafe ones that run now;
    `left`: those that ran when an earlier handle ended. `writes`: unsafe calls from before their
    start is appended until their result is; `idle`: there are none. `abandoned`: writes left to
    their threads. `late`: a write of ours whose result came after the run was taken over.
    `early`: reads may run while their starts travel; `starting`: these, by step, until theirs
    stands. `commit_steps`: the built-in loop commits after so many. `result_patience_s`: what
    results of writes are appended with. `stop`: why nothing new may start here.
    (A Log with a lock or claim, so it inherits: delegation would only repeat each name.)
    """

    def __init__(
        self,
        store: Store,
        run_id: RunId,
        *,
        by: str,
        is_write: Callable[[str], bool] = lambda tool: True,
        ack_wait_s: float = ACK_WAIT_S,
    ) -> None:
        super().__init__(store, run_id, by=by)
        self.worker = by
        self.ack_wait_s = ack_wait_s
        self.attempted: set[int] = set()
        self.abandoned: list[Future[Any]] = []
        self.late: tuple[StepStarted, JSON] | None = None
        self.is_write = is_write
        self.stop: Stop | None = None
        self.commit_steps = COMMIT_STEPS
        self.result_patience_s = 0.0
        self.writing: set[int] = set()
        self.left: set[int] = set()
        self.writes = 0
        self.early = False
        self.starting: dict[str, asyncio.Future[None]] = {}
        self.idle = asyncio.Event()
        self.limits: dict[object, float] = {}
        self._given_up = False
        self._inside: asyncio.Task[Any] | None = None
        self._turn = asyncio.Lock()
        self._busy = False
        self._ended_by: RunfoldError | None = None
        self._stack = AsyncExitStack()

    @classmethod
    async def open(
        cls,
        store: Store,
        run_id: str,
        *,
        is_write: Callable[[str], bool],
        revision: str = "",
        ack_wait_s: float = ACK_WAIT_S,
        on_wait: Callable[[str], None] | None = None,
        known: Log | None = None,
    ) -> Self:
        """Own the run: by its lock, or on a shared store by a claim. Close it, or use `async with`.

        Raises RunNotFound, StoreLocked (somebody else holds it), NewerVersion, JournalDamaged.
        Where a person must act first or the run has ended, a shared store's run is not claimed:
        `claim` stays 0. `on_wait` is told, in words, of each wait for an earlier holder. `known` is
        what was read of the run before, so that it is not read twice; it must not be used again.
        """
        nonce = secrets.token_hex(4)
        worker = ids.name(f"{process_name()}-{nonce}", "a worker")
        journal = cls(
            store,
            ids.run_id(run_id),
            by=worker,
            is_write=is_write,
            ack_wait_s=ack_wait_s,
        )
        if known is not None:
            journal._adopt(known)
        try:
            if known is None:
                await journal.refresh()
            journal.check_runnable()
            journal.owner = True
            await journal._stack.enter_async_context(store.hold(journal.run_id))
            await journal._stack.enter_async_context(store.answering(worker, journal.holds))
            await journal.refresh()
            if store.shared:
                await take(journal, revision, on_wait or (lambda text: None))
            elif journal.fold.claim is not None:
                raise JournalDamaged(
                    f"run {journal.run_id} holds a claim, in a store that has none",
                    where=store.where(journal.run_id, journal.fold.claim.n - 1, None),
                    run_id=journal.run_id,
                    hint="a journal exported from a server can be read here, not run",
                )
            journal.check_runnable()  # it may have ended and been purged meanwhile
        except BaseException:
            store.observer.let_go(journal.run_id, journal.claim)
            await journal._stack.aclose()
            raise
        return journal

    @classmethod
    def claimed(
        cls,
        log: Log,
        claim: Claim,
        *,
        is_write: Callable[[str], bool],
        ack_wait_s: float,
    ) -> Self:
        """The handle of a worker that answers questions itself, under the claim that `log` just
        appended; the log must not be used again."""
        journal = cls(
            log.store, log.run_id, by=claim.worker, is_write=is_write, ack_wait_s=ack_wait_s
        )
        journal._adopt(log)
        journal.owner = True
        journal.claim = claim.n
        return journal

    def _adopt(self, log: Log) -> None:
        self.fold, self.tail, self.torn = log.fold, log.tail, log.torn
        self.restart_at, self.trace = log.restart_at, log.trace

    def succeed(self) -> Self:
        """A fresh handle under the same claim, for ending the run when a call can't be stopped:
        nothing that the old one is still asked to append is appended."""
        other = type(self).claimed(
            self,
            self.fold.claims[self.claim],
            is_write=self.is_write,
            ack_wait_s=self.ack_wait_s,
        )
        other.fold = self.fold.copy()  # what is still under way here must not move the other's
        other._sent, other._fences, self._sent = self._sent, self._fences, {}
        other.attempted, other.abandoned = self.attempted, self.abandoned
        other.left = self.left | self.writing
        self.give_up()
        return other

    async def close(self, reason: str = "stopped") -> None:
        """Give the run up: wait for calls that were left to their threads, write a `release` under
        a live claim, free the lock. A cancellation meanwhile is raised again afterwards."""
        cancelled = await self._wait_out()
        try:
            live = self.fold.claim
            if live is not None and live.n == self.claim and not self._stopped:
                # Without it the next holder asks, hears nobody and waits a little: not worth an
                # error on top of whatever ended this run.  # not needed for safety
                with suppress(RunfoldError):
                    await self.append(lambda fold: Release(reason=reason) if fold.claim else None)
        finally:
            self._stopped = True
            self.store.observer.let_go(self.run_id, self.claim)
            await self._stack.aclose()
        if cancelled:
            raise asyncio.CancelledError

    async def _wait_out(self) -> bool:
        """A thread can't be stopped. While one still runs a write of this run, the run stays held,
        so that no permitted retry runs beside it. True: cancelled meanwhile."""
        cancelled = await self._end_writes()
        while running := [call for call in self.abandoned if not call.done()]:
            log.warning(
                "run %s: waiting for a call that is past its time limit",
                self.run_id,
                extra={"run": self.run_id},
            )
            try:
                await asyncio.wait([asyncio.wrap_future(call) for call in running])
            except asyncio.CancelledError:
                cancelled = True
        return cancelled

    async def _end_writes(self) -> bool:
        """A write that nobody awaits any more is cut off, and its end waited for: the lock must not
        be free while it runs. True: cancelled meanwhile."""
        cancelled = False
        while self.writes and self._inside is not None:
            self._inside.cancel()
            try:
                await self.idle.wait()
            except asyncio.CancelledError:
                cancelled = True
        return cancelled

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, t: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def holds(self, run_id: RunId, claim: int) -> bool:
        """The answer to "do you hold it?": yes from before the claim until closing, and while a
        call of it may still run in this process (PROTOCOL 4)."""
        running = self.calls_on() or self.writes > 0
        return run_id == self.run_id and (running or not self._stopped)

    def calls_on(self) -> bool:
        """Whether a write that was left to its thread still runs."""
        return any(not call.done() for call in self.abandoned)

    @property
    def lost(self) -> bool:
        """Whether this handle writes nothing any more."""
        return self._stopped and not self.cut_off

    @property
    def cut_off(self) -> bool:
        """Whether a cancellation met an append of ours: `recover` goes on from there."""
        return self._cut_off and not self._given_up

    def give_up(self) -> None:
        """Write nothing any more: the run is somebody else's, or nobody knows."""
        self._stopped = self._given_up = True

    async def append(
        self, decide: Callable[[Fold], Body | None], *, record_id: str = "", patience_s: float = 0
    ) -> Body | None:
        if self._turn.locked() and not self._busy:
            raise self._concurrent()
        async with self._turn:  # parallel calls, and the progress that calls report
            return await self._append(decide, record_id, patience_s)

    async def refresh(self) -> None:
        async with self._turn:
            await super().refresh()

    # ---- steps --------------------------------------------------------------------------------

    async def run_step(
        self,
        name: str,
        kind: Kind,
        fn: Callable[[], Awaitable[JSON]],
        *,
        tool: str | None = None,
        input: JSON = None,
    ) -> JSON:
        """The recorded result of the step, or `fn` called by the table R20-R26 and recorded.

        `name` is the step's position, unique in the run; `kind` is "model" or "tool"; whether a
        tool is a write says `is_write(tool or name)`; `input` is what makes it the same call.

        An exception of `fn` is never recorded: a safe step runs again when the run is next taken
        up, a write is then unknown. Raises IndeterminateError, ReplayMismatch, Fenced,
        NotEncodable, TooLarge; ToolError where the recorded result is an error.
        """
        unsafe = kind == "tool" and self.is_write(tool or name)
        call = make_call(
            ids.step_name(name),
            kind,
            tool or "",
            normalise(input, f"the input of {name}"),
            unsafe=unsafe,
        )

        async def perform(start: object) -> StepCompleted:
            return StepCompleted(step=name, result=recordable(await fn(), f"the result of {name}"))

        value, error = completed_value(await self.step(call, perform))
        if error is not None:
            raise ToolError(error.message, error.data)
        return value

    async def step(self, call: Call, perform: Perform, ways: Ways = NO_WAYS) -> StepCompleted:
        """As run_step, for the layers above: `perform` is given the start and makes the record;
        `ways` is what settles a write that was cut off, and what an earlier attempt did."""
        (completed,) = await self.steps([(call, perform, ways)])
        return completed

    async def steps(self, jobs: Sequence[Job]) -> list[StepCompleted]:
        """Several steps at once, each with its own start and result (R35); results in the order of
        the jobs. All are let end; then the gravest error is raised."""
        if self._busy:
            raise self._concurrent()
        if self._ended_by is not None:
            raise self._ended_by
        self._busy = True
        self._inside = asyncio.current_task()
        try:
            self.check_runnable()
            # Beside a write all wait for their starts, as it does (R12); in a directory no start
            # travels.
            self.early = self.claim > 0 and not self._stopped and only_reads(self.fold, jobs)
            if len(jobs) == 1:
                return [await do_step(self, *jobs[0])]
            return await all_steps(self, jobs)
        except STICKY as error:
            self._ended_by = error  # raised again at every step: nobody goes on past it (R23)
            if isinstance(error, IndeterminateError):
                await doubt_open(self, jobs)
            raise
        finally:
            self._busy = False
            self._inside = None

    @contextmanager
    def a_write(self) -> Generator[None, None, None]:
        """While inside, an unsafe call is under way: the run is not given up."""
        self.writes += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.writes -= 1
            if not self.writes:
                self.idle.set()

    @contextmanager
    def bounded(self, seconds: float | None) -> Generator[None, None, None]:
        """While inside, the turn or call is to end by then (`limits`: loop times). Who watches this
        handle may give up what ignores its time limit (R56)."""
        key = object()
        if seconds is not None:
            self.limits[key] = asyncio.get_running_loop().time() + seconds
        try:
            yield
        finally:
            self.limits.pop(key, None)

    def begin_turn(self) -> None:
        """What ended the last turn says nothing of the next one."""
        self._ended_by = None

    async def recover(self) -> None:
        """Go on after a cancellation that met an append: read whether it landed. If it lands later
        it finds its sequence spent, or is read then. Raises Fenced where the run is not ours."""
        if self.cut_off:
            self._cut_off = self._stopped = False
            await self.refresh()

    async def progress(self, step: str, output: JSON) -> None:
        """Record the partial output of a call that runs (R27). Raises TooLarge, Fenced."""
        value = normalise(output, f"the progress of {step}")
        if len(canonical(value)) > PROGRESS_BYTES_MAX:
            raise TooLarge(
                f"progress of {step} is at most {PROGRESS_BYTES_MAX} bytes", run_id=self.run_id
            )
        body = StepProgress(step=step, output=value)
        if (starting := self.starting.get(step)) is not None:
            await asyncio.wait([starting])
            if starting.cancelled():
                return
        await self.append(lambda fold: body if step in fold.open else None)


def process_name() -> str:
    """`<host>-<pid>`, as worker ids begin."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32].strip("-") or "host"
    return f"{host}-{os.getpid()}"
