"""Which patterns take a subject: a look-up where their only wildcard is a `*` at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a subject is taken by the pattern."""
    tokens = pattern.split(".")
    if "*" not in tokens and tokens[-1] != ">":
        return pattern.__eq__
    if tokens == [">"]:
        return bool
    if ">" not in tokens[:-1] and "*" not in tokens[:-1]:
        prefix = pattern[:-1]
        size = len(prefix)
        if tokens[-1] == ">":
            return lambda subject: subject.startswith(prefix) and len(subject) > size
        return lambda subject: (
            subject.startswith(prefix) and len(subject) > size and "." not in subject[size:]
        )
    return lambda subject: _matches(tokens, subject.split("."))


def _matches(pattern: list[str], tokens: list[str]) -> bool:
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(tokens) <= len(pattern):
            return False
        tokens = tokens[: len(pattern)]
    if len(tokens) != len(pattern):
        return False
    return all(want in ("*", found) for want, found in zip(pattern, tokens, strict=True))


def overlap(one: str, other: str) -> bool:
    """Whether some subject is taken by both patterns."""
    ones, others = one.split("."), other.split(".")
    for left, right in zip(ones, others, strict=False):
        if ">" in (left, right):
            return True
        if "*" not in (left, right) and left != right:
            return False
    return len(ones) == len(others)


class Table(Generic[T]):
    """Things by their pattern, in the order in which they were added."""

    def __init__(self) -> None:
        self._literal: dict[str, list[T]] = {}
        self._last: dict[str, list[T]] = {}  # by what is before `.*`
        self._other: dict[str, tuple[Callable[[str], bool], list[T]]] = {}
        self._found: dict[str, list[T]] = {}  # of other patterns, until they change

    def add(self, pattern: str, thing: T) -> None:
        self._place(pattern).append(thing)

    def remove(self, pattern: str, thing: T) -> None:
        place = self._place(pattern)
        place.remove(thing)
        if not place:
            self._literal.pop(pattern, None)
            self._other.pop(pattern, None)
            if pattern.endswith(".*"):
                self._last.pop(pattern[:-2], None)

    def find(self, subject: str) -> list[T]:
        """Of those that take the subject."""
        found = self._literal.get(subject)
        head, dot, _ = subject.rpartition(".")
        more = self._last.get(head) if dot else None
        if more is not None:
            found = more if found is None else [*found, *more]
        if self._other and not subject.startswith("_INBOX."):
            others = self._found.get(subject)
            if others is None:
                others = self._found[subject] = list(self._others(subject))
            if others:
                found = others if found is None else [*found, *others]
        return found if found is not None else []

    def _others(self, subject: str) -> Iterator[T]:
        for takes, things in self._other.values():
            if takes(subject):
                yield from things

    def _place(self, pattern: str) -> list[T]:
        tokens = pattern.split(".")
        if "*" not in tokens and tokens[-1] != ">":
            return self._literal.setdefault(pattern, [])
        if "*" not in tokens[:-1] and tokens[-1] == "*" and len(tokens) > 1:
            return self._last.setdefault(pattern[:-2], [])
        self._found.clear()
        if pattern not in self._other:
            self._other[pattern] = (matcher(pattern), [])
        return self._other[pattern][1]
