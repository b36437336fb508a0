"""An event loop in virtual time, on which several simulated processes run and can be killed.

When nothing is ready the clock jumps to the next timer. Whatever runs for a process has it in its
context (`PROCESS`), and a handle whose process is dead or stopped is dropped or kept: SIGKILL and
SIGSTOP at an await point, without a word to the code that runs there.

No set here is ordered by addresses: tasks hash by their number in the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import io
import itertools
from asyncio.events import Handle, TimerHandle
from collections.abc import Callable, Coroutine
from typing import Any

START_S = 1000.0
"""What the monotonic clock says at first."""

CALLBACK_S = 2e-6
"""What each callback takes: time goes on also where nobody waits for it to."""

HANDLES_MAX = 60_000
"""A schedule that has run so many callbacks does not come to rest."""

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Process:
    """A simulated operating system process. `skew_s`: how far its wall clock is off. `fuse`: `blow`
    is called before its callback of that number."""

    __slots__ = ("_kept", "blow", "dead", "fuse", "halted", "handles", "name", "skew_s")

    def __init__(self, name: str, *, skew_s: float = 0.0) -> None:
        self.name = name
        self.skew_s = skew_s
        self.dead = False
        self.halted = False
        self.handles = 0
        self.fuse = 0
        self.blow: Callable[[], None] = lambda: None
        self._kept: list[Handle] = []

    def light(self, callbacks: int, blow: Callable[[], None]) -> None:
        """Call `blow` when it has run so many callbacks more: at any of its await points."""
        self.fuse, self.blow = self.handles + callbacks, blow

    def run(self, coro: Coroutine[Any, Any, Any], what: str = "main") -> Task:
        """Start a task of this process."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        context = contextvars.copy_context()
        context.run(PROCESS.set, self)
        return loop.create_task(coro, name=f"{self.name}: {what}", context=context)

    def kill(self) -> None:
        """Nothing of it runs any more, nor do its `finally` blocks."""
        self.dead = self.halted = True
        self._kept.clear()

    def stop(self) -> None:
        """What becomes due waits until `go_on`."""
        self.halted = True

    def go_on(self) -> None:
        if not self.dead:
            self.halted = False
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            loop.again(self._kept)
            self._kept = []

    def keep(self, handle: Handle) -> None:
        """Of a handle that is due while the process is halted."""
        if not self.dead:
            self._kept.append(handle)


class Deadlock(Exception):
    """Nothing is ready, and no timer will make it so."""


class Restless(Exception):
    """The schedule goes on and on."""


class Task(asyncio.Task[Any]):
    """Hashes by its number in the loop. `process`: whose it is."""

    def __init__(self, coro: Any, *, number: int, loop: VirtualLoop, name: Any, context: Any):
        self._number = number  # first: asyncio puts the task into a set at once
        self.process = PROCESS.get() if context is None else context.get(PROCESS)
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number

    def forget(self) -> None:
        """It will never end, and that is meant."""
        self._log_destroy_pending = False


class _Lean:
    """asyncio's handles without their debugging, a tenth of a schedule's time."""

    __slots__ = ()

    def cancel(self: Any) -> None:
        self._cancelled = True
        self._callback = self._args = None


class LeanHandle(_Lean, Handle):
    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None


class LeanTimer(_Lean, TimerHandle):
    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: Any, context: Any) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = self._source_traceback = None
        self._when = when
        self._scheduled = True


class VirtualLoop(asyncio.BaseEventLoop):
    """`failures`: what reached the loop's exception handler. `outside`: modules whose callbacks
    belong to no process, whoever schedules them: the server's."""

    def __init__(self) -> None:
        super().__init__()
        self._now = START_S
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._numbers = itertools.count(1)
        self.handles = 0
        self.handles_max = HANDLES_MAX
        self.tasks: list[Task] = []
        self.failures: list[str] = []
        self.outside: frozenset[str] = frozenset()
        self._nobodys = contextvars.Context()

    def __del__(self, *_: Any) -> None:
        pass  # asyncio would say that it was not closed

    def time(self) -> float:
        return self._now

    # ---- what asyncio asks of a loop ------------------------------------------------------------

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Task:
        number = next(self._numbers)
        made = Task(coro, number=number, loop=self, name=name or f"task {number}", context=context)
        self.tasks.append(made)
        if len(self.tasks) > 512:
            self.tasks = [task for task in self.tasks if not task.done()]
        return made

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        if context is None and getattr(callback, "__module__", None) in self.outside:
            context = self._nobodys
        handle = LeanHandle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self,
        when: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> TimerHandle:
        if context is None and getattr(callback, "__module__", None) in self.outside:
            context = self._nobodys
        timer = LeanTimer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self,
        delay: float,
        callback: Callable[..., Any],
        *args: Any,
        context: contextvars.Context | None = None,
    ) -> TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        return self.call_soon(callback, *args, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context['message']}: {error!r}")

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        pass  # it is dropped when it is due

    def _process_events(self, event_list: Any) -> None:
        raise NotImplementedError

    def _write_to_self(self) -> None:
        pass

    # ---- running --------------------------------------------------------------------------------

    def again(self, handles: list[Handle]) -> None:
        """They are ready, in this order, behind what is."""
        self._ready.extend(handles)

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            self._advance()
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            self._now += CALLBACK_S
            process = handle._context.get(PROCESS)
            if process is not None:
                process.handles += 1
                if process.handles == process.fuse:
                    process.blow()
                if process.halted:
                    process.keep(handle)
                    continue
            self.handles += 1
            handle._run()
        if self.handles > self.handles_max:
            raise Restless(f"{self.handles} callbacks\n{self.stacks()}")

    def _advance(self) -> None:
        """To the next timer."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise Deadlock(f"nothing will ever happen again\n{self.stacks()}")
        self._now = max(self._now, timers[0][0])

    def stacks(self) -> str:
        """Where every task waits."""
        out = io.StringIO()
        for task in self.tasks:
            if not task.done() and (task.process is None or not task.process.dead):
                out.write(f"-- {task.get_name()}: {place(task)}\n")
        return out.getvalue()

    def pending(self) -> list[Task]:
        """Tasks that have not ended, in their order."""
        return [task for task in self.tasks if not task.done()]


def place(task: asyncio.Task[Any]) -> str:
    """Where a suspended task is, outermost first."""
    at: Any = task.get_coro()
    places = list[str]()
    while at is not None:
        frame = getattr(at, "cr_frame", None) or getattr(at, "ag_frame", None)
        if frame is not None:
            code = frame.f_code
            places.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}")
        at = getattr(at, "cr_await", None) or getattr(at, "ag_await", None)
    return " > ".join(places) or "a place that can't be seen"
