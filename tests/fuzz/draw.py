"""A fuzzer's bytes as choices: the same bytes always make the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class Draw:
    """At the end of its bytes every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def below(self, bound: int) -> int:
        """A number from 0 to `bound` - 1."""
        size = max(1, ((bound - 1).bit_length() + 7) // 8)
        return int.from_bytes(self.take(size), "big") % bound

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]

    def text(self) -> str:
        """Up to 255 characters of Latin-1, or any code points, half surrogates too."""
        size = self.below(256)
        if self.below(4):
            return self.take(size).decode("latin-1")
        return "".join(chr(self.below(0x110000)) for _ in range(min(size, 16)))

    def value(self, depth: int = 3) -> Any:
        """Any Python value that somebody may hand in as JSON, wrongly or not."""
        match self.below(12 if depth else 8):
            case 0:
                return None
            case 1:
                return bool(self.below(2))
            case 2:
                return int.from_bytes(self.take(self.below(12)), "big", signed=True)
            case 3:
                return self.pick([0.0, -0.0, 1.5, 1e308, float("inf"), float("nan"), 5e-324])
            case 4 | 5:
                return self.text()
            case 6:
                return self.take(self.below(8))
            case 7:
                return self.pick([object(), {1, 2}, 1j, (), range(2), 10**400, {1: 2, "1": 3}])
            case 8 | 9:
                return [self.value(depth - 1) for _ in range(self.below(5))]
            case 10:
                return tuple(self.value(depth - 1) for _ in range(self.below(3)))
            case _:
                return {self.text(): self.value(depth - 1) for _ in range(self.below(5))}


WORDS: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    -1,
    2**63,
    2**64,
    10**30,
    1.5,
    1e308,
    "",
    "a1",
    "pay",
    "done",
    "retry",
    "tool/1/0/pay",
    "1/1",
    "i1",
    "r-done",
    "continue",
    "approve",
    "reconcile",
    "late",
    "child",
    "a1.child",
    "0001-01-01T00:00:00.000Z",
    "9999-12-31T23:59:59.999Z",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00",
    "2026-01-02",
    "2026-W01-1",
    "run.started",
    "commit",
    "0" * 32,
    "a\x00b",
    [],
    {},
    [[]],
    [1],
    {"run": "a1.child"},
    {"status": "completed"},
)
"""Values that mean something somewhere in a record, and those that clocks and numbers end at."""


def forged(draw: Draw, value: Any, depth: int = 0) -> Any:
    """The JSON value with one part of it replaced, removed, or put where it does not belong."""
    if depth < 4 and isinstance(value, dict) and value and draw.below(8):
        key = draw.pick(sorted(value))
        if not draw.below(6):
            return {name: part for name, part in value.items() if name != key}
        return value | {key: forged(draw, value[key], depth + 1)}
    if depth < 4 and isinstance(value, list) and value and draw.below(8):
        at = draw.below(len(value))
        match draw.below(4):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return [*value, value[at]]
            case _:
                return [*value[:at], forged(draw, value[at], depth + 1), *value[at + 1 :]]
    if isinstance(value, dict) and draw.below(2):
        return value | {draw.pick(["start", "result", "marker", "x", "run"]): draw.pick(WORDS)}
    return draw.pick(WORDS)
