"""docs/guarantees.md is true as far as a test can tell: its promises name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "guarantees.md").read_text("utf-8")


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)?)`", DOC))))
def test_a_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert not function or f"def {function}(" in (ROOT / path).read_text("utf-8")


def test_every_promise_names_tests() -> None:
    promises = re.findall(r"^\| (G\d+) \|(.+)$", DOC, re.MULTILINE)
    assert [name for name, _ in promises] == [f"G{n}" for n in range(1, len(promises) + 1)]
    assert all("`tests/" in text for _, text in promises)


def test_every_fault_that_was_found_names_its_test() -> None:
    faults = DOC.partition("## Found by these methods")[2]
    rows = re.findall(r"^\| (?!what|---)(.+) \|$", faults, re.MULTILINE)
    assert rows
    assert all("`tests/" in row for row in rows)
