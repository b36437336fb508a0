"""The order of the whole suite."""

from __future__ import annotations

import pytest

LONG = (
    "test_mutants.py",
    "test_schedules_1.py",
    "test_schedules_2.py",
    "test_http_worker.py",
    "test_crash_matrix.py",
    "test_explorer.py",
    "test_explorer_tasks.py",
    "test_bench.py",
)
"""Files that take a minute or more: begun last, one would have a process to itself."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        name = item.path.name
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=turn)
