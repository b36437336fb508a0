"""Shell: the worker of `runfold dev`: a child process, replaced when a source file changes, started
again when it crashes, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from journal.limits import GRACE_S

from .dying import PARENT
from .store import HOME

PAUSE_S, PAUSE_MAX_S = 1.0, 15.0
"""Before a crashed worker is started again: doubled each time, until it has lived for a while."""

LIVED_S = 10.0
OVER_GRACE_S = 10.0
"""A worker that is told to stop leaves within its grace; what blocks its loop does not."""

UNUSABLE = 2
"""The exit code of a worker whose file can't be loaded (R69)."""


class Reloading:
    """`run` until `stop`; each further `stop` hurries the worker."""

    def __init__(
        self, words: Sequence[str], folders: Sequence[Path], tell: Callable[[str], None]
    ) -> None:
        # -P: a worker.py of the user's beside it must not be taken for our package
        self._command = [sys.executable, "-P", "-m", "runfold.cli", *words]
        self._folders = folders
        self._tell = tell
        self._ignored = os.path.abspath(HOME)
        self._child: asyncio.subprocess.Process | None = None
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._what_changed = ""
        self._pause_s = PAUSE_S

    def stop(self) -> None:
        if self._stopping.is_set():
            self._send(signal.SIGTERM)
        self._stopping.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(self._watch())
            try:
                while not self._stopping.is_set():
                    await self._one()
            finally:
                watching.cancel()

    async def _one(self) -> None:
        """One worker, from its start to its end, and what must happen before the next."""
        self._changed.clear()
        loop = asyncio.get_running_loop()
        born = loop.time()
        # A group of its own: Ctrl-C is for us, who pass it on once.
        child = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            env=os.environ | {PARENT: str(os.getpid())},
            process_group=0,
        )
        self._child = child
        try:
            ended = await self._first(child.wait())
            if not ended and not self._stopping.is_set():
                self._tell(f"{self._what_changed} changed: reloading")
        finally:
            code = await self._ended(child)
            self._child = None
        if not ended:
            self._pause_s = PAUSE_S
            return
        if code == UNUSABLE:
            self._tell("there is no worker now: the next change of a file starts it")
            await self._first(None)
            return
        if loop.time() - born > LIVED_S:
            self._pause_s = PAUSE_S
        word = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._tell(f"the worker ended ({word}); starting it again in {self._pause_s:g} s")
        await self._first(asyncio.sleep(self._pause_s))
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    async def _first(self, what: Coroutine[Any, Any, object] | None) -> bool:
        """Until a change, a stop, or `what` (if any); whether it was that."""
        waits: list[asyncio.Task[object]] = [
            asyncio.create_task(self._changed.wait()),
            asyncio.create_task(self._stopping.wait()),
        ]
        if what is not None:
            waits.append(asyncio.create_task(what))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return what is not None and waits[-1].done()
        finally:
            for wait in waits:
                wait.cancel()

    async def _ended(self, child: asyncio.subprocess.Process) -> int:
        """Its exit code, once it is told to stop and has ended."""
        self._send(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE_S + OVER_GRACE_S):
                return await child.wait()
        except TimeoutError:
            self._tell("the worker does not stop: killing it")
            self._send(signal.SIGKILL)
            return await child.wait()
        except asyncio.CancelledError:
            self._send(signal.SIGKILL)
            raise

    def _send(self, number: signal.Signals) -> None:
        if self._child is not None and self._child.returncode is None:
            self._child.send_signal(number)

    async def _watch(self) -> None:
        import watchfiles  # only dev needs it

        ignored = watchfiles.PythonFilter(ignore_paths=[self._ignored])
        awatch: Any = watchfiles.awatch  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        try:
            async for changes in awatch(*self._folders, watch_filter=ignored):
                self._what_changed = _shown(sorted(path for _, path in changes))
                self._changed.set()
        except (OSError, RuntimeError) as error:  # no more inotify watches, say
            self._tell(f"files can't be watched, so nothing reloads: {error}")


def _shown(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{os.path.relpath(paths[0])}{more}"
