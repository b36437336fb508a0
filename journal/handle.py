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
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Any, Self

from . import ids
from .errors import (
    Fenced,
    IndeterminateError,
    JournalDamaged,
    ReplayMismatch,
    RunfoldError,
    ToolError,
)
from .ids import RunId
from .limits import ACK_WAIT_S
from .log import Log
from .messages import JSON
from .ownership import take
from .records import Kind, Release, StepCompleted
from .stepping import Perform, do_step, recordable
from .steps import Call, completed_value, make_call
from .store import Store
from .values import normalise

log = logging.getLogger("runfold")


class Journal(Log):
    """One run's journal, owned from `open` until `close`.

    `async with await Journal.open(store, run_id, is_write=…) as journal`, then
    `await journal.run_step(…)` for each durable step, one after another.

    `attempted`: starts whose calls this handle has made. `abandoned`: writes left to their threads.
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
        self.is_write = is_write
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
        worker = ids.name(f"{_host()}-{nonce}", "a worker")
        journal = cls(
            store,
            ids.run_id(run_id),
            by=worker,
            is_write=is_write,
            ack_wait_s=ack_wait_s,
        )
        if known is not None:
            journal.fold, journal.tail, journal.torn = known.fold, known.tail, known.torn
        try:
            if known is None:
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

    async def step(self, call: Call, perform: Perform) -> StepCompleted:
        """As run_step, for the layers above: `perform` is given the start and makes the record."""
        if self._busy:
            raise self._concurrent()
        if self._ended_by is not None:
            raise self._ended_by
        self._busy = True
        try:
            self.check_runnable()
            return await do_step(self, call, perform)
        except (IndeterminateError, ReplayMismatch, Fenced) as error:
            self._ended_by = error  # raised again at every step: nobody goes on past it (R23)
            raise
        finally:
            self._busy = False


def _ignore(text: str) -> None:
    pass


def _host() -> str:
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:32].strip("-") or "host"
    return f"{host}-{os.getpid()}"
