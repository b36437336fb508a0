"""Shell: a blocked event loop is detected and named (R50). It only tells; safety never needs it."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final

from journal.escape import visible

log = logging.getLogger("runfold")

FRAMES_MAX: Final = 20
"""The innermost ones name what blocks."""

_LOOPS: Final = ((asyncio.events.__file__, "_run"), (asyncio.runners.__file__, "run"))
"""What calls the code of a loop: asyncio's own, and uvloop, which has no frames."""

EXIT_S_MAX: Final = 1.0
"""`on_blocked` may hang, and an exit must not."""


class Watchdog:
    """While entered, warns when the loop has not come round for `limit_s`, once per blockage with
    the place that blocks, and once more when the loop goes on. `on_blocked`, in the watchdog's
    thread, gets the first of the two texts."""

    def __init__(self, limit_s: float, on_blocked: Callable[[str], None] | None = None) -> None:
        if not 0 < limit_s < math.inf:
            raise ValueError(f"limit_s is above 0 and finite, not {limit_s}")
        self.limit_s = limit_s
        self._on_blocked = on_blocked
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._asked_at: float | None = None  # while an answer of the loop is awaited

    @property
    def blocked_s(self) -> float:
        """How long the loop has been blocked, at least; 0 when it is fine. For any thread."""
        asked_at = self._asked_at
        waited = 0.0 if asked_at is None else time.monotonic() - asked_at
        return waited if waited >= self.limit_s else 0.0

    async def __aenter__(self) -> Watchdog:
        assert self._thread is None or self._stopping, "one watchdog is entered once at a time"
        self._stopping = False
        loop, watched = asyncio.get_running_loop(), threading.get_ident()
        self._thread = threading.Thread(
            target=self._watch, args=(loop, watched), name="runfold-watchdog", daemon=True
        )
        self._thread.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(EXIT_S_MAX)  # it is woken, so this takes no time

    def _watch(self, loop: asyncio.AbstractEventLoop, watched: int) -> None:
        while not self._wait(lambda: self._stopping, self.limit_s / 2):
            asked_at = self._asked_at = time.monotonic()
            try:
                loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed: whoever entered never left
                self._asked_at = None
                return
            if self._wait(self._answered, self.limit_s):
                continue
            self._tell(time.monotonic() - asked_at, watched)
            self._wait(self._answered, None)
            if not self._stopping:
                log.warning("the event loop goes on after %.1f s", time.monotonic() - asked_at)
        self._asked_at = None

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        with self._changed:
            return self._changed.wait_for(condition, timeout)

    def _answer(self) -> None:
        with self._changed:
            self._asked_at = None
            self._changed.notify_all()

    def _answered(self) -> bool:
        return self._stopping or self._asked_at is None

    def _tell(self, waited_s: float, watched: int) -> None:
        frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]  # documented
        stack = _stack(frames.get(watched))
        text = f"the event loop is blocked for {waited_s:.1f} s or more, at {stack}"
        log.warning("%s", text)
        if self._on_blocked is not None:
            try:
                self._on_blocked(text)
            except Exception:  # it was told in the log already, and the watch must go on
                log.exception("on_blocked of the watchdog failed")


def _stack(frame: FrameType | None) -> str:
    """Where a thread is, innermost first, down to what the loop called; one line."""
    places: list[str] = []
    while frame is not None and len(places) < FRAMES_MAX:
        code = frame.f_code
        if (code.co_filename, code.co_name) in _LOOPS:
            break  # below are the loop's own frames
        places.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}")
        frame = frame.f_back
    return visible(" < ".join(places)) or "a place that can't be seen"
