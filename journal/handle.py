"""Shell: the journal handle: the append rule (PROTOCOL 3), `run_step`, and owning a run.

Why it is safe: every append names the tail its decision was made at, so whatever moved the tail
(a signal, a claim, the own record landing late) makes it lose, re-read and decide again. A holder
that reads a newer claim stops there. A write is called only between its acknowledged start and its
result; anything that leaves that order leaves the start open, which the step table reads as Ask.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from . import ids
from .codec import Damage, Entry, seal
from .errors import (
    ConcurrentUse,
    Fenced,
    JournalDamaged,
    NewerVersion,
    RunfoldError,
    RunNotFound,
    StoreUnavailable,
    TooLarge,
    ToolError,
)
from .fold import Fold
from .ids import RunId
from .limits import ACK_WAIT_S, APPEND_BUDGET_S
from .messages import JSON
from .ownership import take
from .records import (
    HOLDER_RECORDS,
    Commit,
    Kind,
    Park,
    Record,
    Release,
    RunCompleted,
    RunStarted,
    Status,
    StepCompleted,
)
from .stepping import Perform, do_step, recordable
from .steps import Call, completed_value, make_call
from .store import Appended, Loaded, Store, Unknown
from .values import normalise
from .views import RunState, run_state

Body = TypeVar("Body", bound=Record)
log = logging.getLogger("runfold")


class Journal:
    """One run's journal, opened by one task. `fold` is the state up to `tail`.

    `open` owns the run (lock or claim) until `close`; `read` only looks, and appends for doors.
    One task at a time: concurrent use raises ConcurrentUse (R46).
    """

    def __init__(
        self,
        store: Store,
        run_id: RunId,
        *,
        is_write: Callable[[str], bool],
        by: str,
        worker: str = "",
        ack_wait_s: float = ACK_WAIT_S,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self.fold = Fold()
        self.tail = 0
        self.torn = 0
        self.worker = worker
        self.ack_wait_s = ack_wait_s
        self.claim = 0
        self.attempted: set[int] = set()
        self.owner = False
        self.abandoned: list[Future[Any]] = []
        self.is_write = is_write
        self._by = by
        self._nonce = secrets.token_hex(6)
        self._counter = 0
        self._busy = False
        self._appending = False
        self._stopped = False
        self._stack = AsyncExitStack()

    @property
    def state(self) -> RunState:
        """The run as of `tail`; only where it has started."""
        return run_state(self.fold)

    # ---- opening and closing ------------------------------------------------------------------

    @classmethod
    async def read(cls, store: Store, run_id: str, *, by: str = "") -> Self:
        """The journal as it is, without owning the run; `fold.n` is 0 where there is none."""
        journal = cls(store, ids.run_id(run_id), is_write=_every, by=by or "library")
        await journal.refresh()
        return journal

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
    ) -> Self:
        """Own the run: by its lock, or on a shared store by a claim. Close it, or use `async with`.

        Raises RunNotFound, StoreLocked (somebody else holds it), NewerVersion, JournalDamaged.
        Where a person must act first or the run has ended, a shared store's run is not claimed:
        `claim` stays 0. `on_wait` is told, in words, of each wait for an earlier holder.
        """
        nonce = secrets.token_hex(4)
        worker = ids.name(f"{_host()}-{nonce}", "a worker")
        journal = cls(
            store,
            ids.run_id(run_id),
            is_write=is_write,
            by=worker,
            worker=worker,
            ack_wait_s=ack_wait_s,
        )
        try:
            await journal.refresh()
            journal.check_runnable()
            journal.owner = True
            await journal._stack.enter_async_context(store.hold(journal.run_id))
            await journal._stack.enter_async_context(store.answering(worker, journal.holds))
            await journal.refresh()
            if store.shared:
                await take(journal, revision, on_wait or _ignore)
            elif journal.fold.claim is not None:
                raise JournalDamaged(
                    f"run {journal.run_id} holds a claim, in a store that has none",
                    where=store.where(journal.run_id, journal.fold.claim.n - 1, None),
                    run_id=journal.run_id,
                    hint="a journal exported from a server can be read here, not run",
                )
        except BaseException:
            await journal._stack.aclose()
            raise
        return journal

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
            await self._stack.aclose()
        if cancelled:
            raise asyncio.CancelledError

    async def _wait_out(self) -> bool:
        """A thread can't be stopped. While one still runs a write of this run, the run stays held,
        so that no permitted retry runs beside it. True: cancelled meanwhile."""
        cancelled = False
        while running := [call for call in self.abandoned if not call.done()]:
            log.warning("run %s: waiting for a call that is past its time limit", self.run_id)
            try:
                await asyncio.wait([asyncio.wrap_future(call) for call in running])
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
        running = any(not call.done() for call in self.abandoned)
        return run_id == self.run_id and (running or not self._stopped)

    def check_runnable(self) -> None:
        """Raises RunNotFound or NewerVersion where this version can't run it."""
        if self.fold.started is None and self.fold.newer is None:
            what = "was purged" if self.fold.purged else "does not exist"
            raise RunNotFound(
                f"run {self.run_id} {what}",
                run_id=self.run_id,
                hint="`runfold list` shows the runs",
            )
        self._check_newer()

    # ---- reading ------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Fold what was appended since. An owner raises Fenced where somebody else claimed the run,
        NewerVersion where a newer Runfold wrote to it."""
        self._take(await self.store.load(self.run_id, after=self.tail), "")
        if self.owner:
            self._check_newer()

    def _take(self, loaded: Loaded, record_id: str) -> Record | None:
        """Fold new entries; the one with our id, if it is among them. Raises Fenced first."""
        landed: Record | None = None
        fresh = self.fold.n == 0
        for index, entry in enumerate(loaded.entries):
            try:
                self._check_id(entry.record)
                self.fold.apply(entry)
            except Damage as damage:
                at = self.store.where(self.run_id, index if fresh else self.fold.n, entry)
                raise JournalDamaged(
                    f"run {self.run_id}: {at}: {damage}",
                    where=at,
                    run_id=self.run_id,
                    hint="nothing was executed; restore the journal from a backup or export",
                    good=loaded.entries[:index],
                ) from damage
            self.tail = entry.position
            if entry.record.id == record_id:
                landed = entry.record
        self.torn = self.torn or loaded.torn
        newest = next(reversed(self.fold.claims), 0)
        if self.claim and newest > self.claim:
            self._stopped = True
            raise Fenced(
                f"run {self.run_id} was taken over by worker {self.fold.claims[newest].worker}, "
                f"record {newest}",
                run_id=self.run_id,
                hint="this process stopped the run; the other one goes on with it",
            )
        return landed

    def _check_newer(self) -> None:
        """A record of a newer version may mean anything, a claim or a cancel: nothing is written
        after it (R18)."""
        if self.fold.newer is not None:
            self._stopped = True
            raise NewerVersion(
                f"run {self.run_id} holds a record this version can't read: {self.fold.newer}",
                run_id=self.run_id,
                hint="update this installation",
            )

    def _check_id(self, record: Record) -> None:
        if isinstance(record, RunStarted) and record.run != self.run_id:
            raise Damage(f"it is the journal of run {record.run}")

    # ---- appending ----------------------------------------------------------------------------

    async def append(self, decide: Callable[[Fold], Body | None]) -> Body | None:
        """Append what `decide` asks for at the tail; None where it says nothing is due any more.

        `decide` is pure and is asked again at every new tail. Raises what it raises; Fenced;
        TooLarge (nothing was sent); StoreUnavailable when the outcome stays unknown for the budget:
        then this handle is over, because the record may land later.
        """
        if self._appending:
            raise self._concurrent()
        self._appending = True
        try:
            return await self._append(decide)
        finally:
            self._appending = False

    async def _append(self, decide: Callable[[Fold], Body | None]) -> Body | None:
        if self._stopped:
            raise Fenced(f"run {self.run_id} is no longer held here", run_id=self.run_id)
        self._check_newer()
        body = decide(self.fold)
        if body is None:
            return None
        self._counter += 1
        record_id = f"{self._nonce}-{self._counter}"
        deadline = time.monotonic() + APPEND_BUDGET_S
        pause_s = 0.01
        record, entry = self._seal(body, record_id)
        while True:
            before = self.tail
            landed, cause = await self._try(entry, record_id)
            if landed:
                return record
            if self.tail != before:  # the sequence it expected is spent: it can't land any more
                body = decide(self.fold)
                if body is None:
                    return None
                record, entry = self._seal(body, record_id)
                continue
            if time.monotonic() > deadline:
                self._stopped = True
                raise StoreUnavailable(
                    f"run {self.run_id}: whether record {record.n} was stored is unknown: {cause}",
                    run_id=self.run_id,
                    hint="run or send it again: the journal will tell",
                )
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, 1.0)

    async def _try(self, entry: Entry, record_id: str) -> tuple[bool, str]:
        """One try and, where its answer is not Appended, the read that settles it: whether it
        landed, and why that was in doubt. Whatever is raised here but TooLarge leaves it unknown
        whether the record will land, so this handle is over then."""
        try:
            answer = await self.store.append(self.run_id, entry, expected=self.tail)
            if isinstance(answer, Appended):
                self.fold.apply(msgspec.structs.replace(entry, position=answer.tail))
                self.tail = answer.tail
                return True, ""
            landed = self._take(await self.store.load(self.run_id, after=self.tail), record_id)
            self._check_newer()
        except TooLarge:
            raise  # nothing was sent
        except BaseException:
            self._stopped = True
            raise
        cause = answer.cause if isinstance(answer, Unknown) else "the tail can't be read"
        return landed is not None, cause

    async def _pause(self, pause_s: float) -> None:
        try:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        except asyncio.CancelledError:
            self._stopped = True  # what was published may still land
            raise

    def _seal(self, body: Body, record_id: str) -> tuple[Body, Entry]:
        claim = self.claim if isinstance(body, HOLDER_RECORDS) else 0
        record, raw = seal(
            body,
            n=self.fold.n + 1,
            id=record_id,
            at=now_text(),
            by=self._by,
            prev=self.fold.head,
            claim=claim,
        )
        self.fold.check(record)  # our own record must be one that every reader takes
        entry = Entry(record, raw)
        if self.store.shared:
            entry = Entry(record, raw, self._status_after(entry))
        return record, entry

    def _status_after(self, entry: Entry) -> Status:
        """The status this record leaves. Under a live claim all but its ends leave it running: no
        fold needed, which keeps a step's cost flat."""
        ends = isinstance(entry.record, Release | Park | RunCompleted | Commit)
        if self.fold.claim is not None and not ends:
            return "running"
        after = self.fold.copy()
        after.apply(entry)
        return after.status()

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

    async def step(self, call: Call, perform: Perform) -> StepCompleted:
        """As run_step, for the layers above: `perform` is given the start and makes the record."""
        with self._exclusive():
            self.check_runnable()
            return await do_step(self, call, perform)

    @contextmanager
    def _exclusive(self) -> Generator[None]:
        if self._busy:
            raise self._concurrent()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _concurrent(self) -> ConcurrentUse:
        return ConcurrentUse(
            f"run {self.run_id}: two tasks use one journal handle at once",
            run_id=self.run_id,
            hint="await one step before the next",
        )


def now_text() -> str:
    """RFC 3339 UTC with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _every(tool: str) -> bool:
    return True


def _ignore(text: str) -> None:
    pass


def _host() -> str:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32].strip("-") or "host"
    return f"{host}-{os.getpid()}"
