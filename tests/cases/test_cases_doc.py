"""docs/cases.md is true: all cases, each once, and every test it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "cases.md").read_text("utf-8")
CASES = [
    *(1, 3, 5, 6, 9, 12, 14, 16, 18, 20, 22, 24, 27, 29, 31, 33, 34, 37, 38, 41, 42, 44, 46, 49),
    *(50, 52, 53, 55, 56, 57, 59, 62, 63, 64, 67, 69, 70),
]


def test_every_case_has_one_row_and_a_status() -> None:
    rows = re.findall(r"^\| UR-(\d\d) \| [^|]+ \| (\w+) \| [^|]+ \|$", DOC, re.MULTILINE)
    assert [int(number) for number, _ in rows] == CASES
    assert {status for _, status in rows} <= {"met", "partly", "waits"}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/\w+/test_[^`]+)`", DOC))))
def test_a_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    source = (ROOT / path).read_text("utf-8")
    assert f"def {function}(" in source if function else "def test_" in source


def test_every_group_that_is_named_exists_and_the_other_way_round() -> None:
    named = set(re.findall(r"`(\w+)::(ur\d\d)`", DOC))
    there = {
        (path.stem.removeprefix("test_ur_"), case)
        for path in Path(__file__).parent.glob("test_ur_*.py")
        for case in re.findall(r"def test_(ur\d\d)", path.read_text("utf-8"))
    }
    assert named == there
