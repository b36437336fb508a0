"""Every guard is needed: with it removed, a named test fails (R79)."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def mutants(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "mutants.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


@pytest.mark.timeout(820)
def test_no_guard_can_be_removed_unnoticed() -> None:
    done = mutants()
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SURVIVED" not in done.stdout


def test_the_guards_are_documented_as_they_are() -> None:
    table = mutants("--table").stdout
    assert table and table in (TESTS.parent / "docs" / "guards.md").read_text()
