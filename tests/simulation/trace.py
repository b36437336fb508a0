"""What happened in a schedule, as lines: hashed, and printed where asked for."""

from __future__ import annotations

import hashlib
import marshal
from typing import Any

from .loop import START_S, VirtualLoop

KEPT = 60
HASHED = 256
"""Lines at a time."""


class Trace:
    """`digest` is over every line. `show`: print them as they come."""

    def __init__(self, loop: VirtualLoop, *, show: bool = False) -> None:
        self.time = loop.time
        self._show = show
        self._hash = hashlib.blake2b(digest_size=8)
        self._before: list[tuple[float, tuple[Any, ...]]] = []
        self._last: list[tuple[float, tuple[Any, ...]]] = []
        self.lines = 0
        self.over = False

    def note(self, *parts: Any) -> None:
        if self.over:
            return
        now = self.time() - START_S
        self.lines += 1
        self._last.append((now, parts))
        if len(self._last) == HASHED:
            self._take()
        if self._show:
            print(line(now, parts))

    def _take(self) -> None:
        self._hash.update(marshal.dumps(self._last, 0))  # the oldest form knows no references
        self._before, self._last = self._last, []

    @property
    def digest(self) -> str:
        self._take()
        return self._hash.hexdigest()

    def last(self) -> str:
        """The end of it."""
        kept = [*self._before, *self._last][-KEPT:]
        return "\n".join(line(now, parts) for now, parts in kept)


def line(now: float, parts: tuple[Any, ...]) -> str:
    return f"{now:10.4f}  " + " ".join(shown(part) for part in parts)


def shown(part: Any) -> str:
    text = part.decode("utf-8", "backslashreplace") if isinstance(part, bytes) else str(part)
    return text if len(text) <= 300 else f"{text[:300]}…"
