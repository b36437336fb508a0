"""Shell: a read that runs while its start travels to the journal (R25).

Why the order is safe: only a read comes here, and one that was called twice, or whose start was
never stored, has done no harm (R24). What it came to leaves here only once its start is
acknowledged, so a result is never stored before its start; and nothing leaves here while the
start's append goes on, so nothing unsafe begins beside one that is in doubt (R12).

The call runs in the task that asked for it, as every call does: what it makes of its task
(`asyncio.timeout`, a cancellation) is what it would be without any of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeAlias

from .records import StepCompleted, StepStarted

Calling: TypeAlias = Coroutine[Any, Any, StepCompleted]
Start: TypeAlias = Callable[[], Coroutine[Any, Any, StepStarted | None]]


class NotDue(Exception):
    """The start is not due any more, so what the call came to counts for nothing."""


async def called_early(call: Calling, start: Start) -> StepCompleted:
    """What the call came to, with the start that `start` records. Raises what `start` raises, or
    NotDue where it answers None: the call is cut off then, and ended. Else what the call raises.

    A call that returns at once has nothing to travel beside: its start is recorded after it.
    """
    try:
        waits = call.send(None)
    except StopIteration as returned:
        _check_due(await start())
        return returned.value
    except Exception:
        _check_due(await start())
        raise
    return await _Beside(asyncio.ensure_future(start())).go_on(call, waits)


async def ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what still runs and wait for its end, whatever happens meanwhile."""
    for task in tasks:
        task.cancel()
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError:
            continue  # raised again by who waits for this


def _check_due(start: StepStarted | None) -> None:
    if start is None:
        raise NotDue


class _Beside:
    """A start on its way, beside the call that this task makes."""

    def __init__(self, sending: asyncio.Future[StepStarted | None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._sending = sending
        self._calling = True
        self._cut_off = False
        sending.add_done_callback(self._sent)

    def _sent(self, sending: asyncio.Future[StepStarted | None]) -> None:
        stands = not sending.cancelled() and not sending.exception() and sending.result()
        if self._calling and not stands:
            self._cut_off = True
            self._task.cancel()

    async def go_on(self, call: Calling, waits: object) -> StepCompleted:
        """Await the call, of which the first step is done: it waits for `waits`."""
        cancelled_before = self._task.cancelling()
        try:
            completed, error = await _Rest(call, waits), None
        except Exception as raised:
            completed, error = None, raised
        except GeneratorExit:  # nobody awaits this any more
            raise
        except BaseException as raised:
            if not self._cut_off or not isinstance(raised, asyncio.CancelledError):
                self._calling = False
                await ended([self._sending])  # an append that was cut off: see Journal.recover
                if self._cut_off:
                    self._task.uncancel()
                raise
            completed, error = None, None
        finally:
            self._calling = False  # what becomes of the start is no matter of the task's any more
        if self._cut_off and self._task.uncancel() > cancelled_before:
            raise asyncio.CancelledError  # by another, too
        _check_due(await self._sending)
        if error is not None:
            raise error
        assert completed is not None
        return completed


class _Rest(Generator[object, None, StepCompleted]):
    """A coroutine driven on from where it waits: `await` takes none whose first step is done.

    `cr_await` as a coroutine has it: who looks where a task is looks through this at the call.
    """

    def __init__(self, call: Calling, waits: object) -> None:
        self.cr_await = call
        self._waits = waits
        self._waiting = False

    def __await__(self) -> Generator[object, None, StepCompleted]:
        return self

    def send(self, value: None) -> object:
        if self._waiting:
            return self.cr_await.send(value)
        self._waiting = True
        return self._waits

    def throw(self, *error: Any) -> object:
        return self.cr_await.throw(*error)
