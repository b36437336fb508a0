"""Every part of every record of the honest journals, forged in each of a list of ways: what no
random choice has to hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from fuzz.draw import WORDS
from fuzz.honest import journals
from fuzz.targets_journal import Forged, check_forged, check_restored

_ENVELOPE = ("v", "n", "id", "prev")
_DEPTH = 4
_DROPPED = object()
Path = tuple[str | int, ...]


def swept(stride: int = 1, offset: int = 0) -> int:
    """Each `stride`-th of all forgeries, from this one on; how many that were."""
    count = 0
    for at, (values, changed) in enumerate(_forgeries()):
        if at % stride == offset:
            check_forged(Forged(values, changed))
            if values[changed].get("type") == "commit" and changed:
                check_restored(values, changed)
            count += 1
    return count


def _forgeries() -> Iterator[tuple[list[Any], int]]:
    for entries in journals():
        values: list[Any] = [msgspec.json.decode(entry.raw) for entry in entries]
        for at, value in enumerate(values):
            for path in _paths(value):
                if not path or path[0] not in _ENVELOPE:
                    for word in (*WORDS, _DROPPED):
                        forged = _put(value, path, word)
                        if isinstance(forged, dict):
                            yield [*values[:at], forged, *values[at + 1 :]], at


def _paths(value: Any, depth: int = 0) -> Iterator[Path]:
    yield ()
    parts: Sequence[tuple[str | int, Any]] = ()
    if depth < _DEPTH and isinstance(value, dict):
        parts = list(value.items())
    elif depth < _DEPTH and isinstance(value, list):
        parts = list(enumerate(value))
    for key, part in parts:
        for path in _paths(part, depth + 1):
            yield (key, *path)


def _put(value: Any, path: Path, word: Any) -> Any:
    if not path:
        return word
    key, *rest = path
    changed: Any = dict(value) if isinstance(value, dict) else list(value)
    if word is _DROPPED and not rest:
        del changed[key]
    else:
        changed[key] = _put(value[key], tuple(rest), word)
    return changed
