"""The server's time, and what it has to do later: in its own context, not in who asked for it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any


class Clock:
    """`now`: the wall clock in nanoseconds. The rest is the running loop's."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.now = now
        self._context = contextvars.copy_context()

    @property
    def context(self) -> contextvars.Context:
        return self._context

    def time(self) -> float:
        return asyncio.get_running_loop().time()

    def soon(self, callback: Callable[..., object], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(callback, *args, context=self._context)

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(when, callback, *args, context=self._context)

    def after(
        self, wait_s: float, callback: Callable[..., object], *args: Any
    ) -> asyncio.TimerHandle:
        loop = asyncio.get_running_loop()
        return loop.call_at(loop.time() + wait_s, callback, *args, context=self._context)
