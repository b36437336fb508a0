"""The order of the whole suite; over how many journal streams it runs, and on which event loop."""

from __future__ import annotations

import os
from typing import Any

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


SHARDS = int(os.environ.get("RUNFOLD_TEST_SHARDS", "1"))
"""Where a test asks for no number: tests that name a stream, or count them, are for one."""


def pytest_sessionstart() -> None:
    from journal.stores import provision, stream_lookup  # not before: mutants replace the product

    def shards_to_make(namespace: str, there: Any, asked: int | None, picked: int) -> int:
        return stream_lookup.shards_to_make(namespace, there, asked, SHARDS)

    provision.shards_to_make = shards_to_make


if os.environ.get("RUNFOLD_TEST_UVLOOP", "0") not in ("", "0"):
    # Tests of this process as well: commands use it anyhow, where it is installed.
    import asyncio

    import uvloop

    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def turn(item: pytest.Item) -> int:
        name = item.path.name
        return LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=turn)
