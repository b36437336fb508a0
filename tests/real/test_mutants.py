"""Every guard is needed: with it removed, a named test fails (R79)."""

import subprocess
import sys
from pathlib import Path

import pytest
from mutation.guards import MUTANTS, NAMED

TESTS = Path(__file__).resolve().parents[1]
IN_R79 = """
expected-sequence header, claim check, read-back after unknown, no-ack-when-fenced, restart limit,
both replay rules, completed steps replay, unrecorded read is not a write, `done` never runs the
write, approve is applied and consumed once, permit covers its start only, task acceptance,
start-before-write, marker digest, input compare, torn-tail rules, id validation, wait re-check
"""


def mutants(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TESTS / "mutants.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


@pytest.mark.timeout(820)
def test_no_guard_can_be_removed_unnoticed() -> None:
    done = mutants()
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SURVIVED" not in done.stdout


def test_each_guard_that_the_product_names_has_a_mutant() -> None:
    assert list(NAMED) == [" ".join(word.split()) for word in IN_R79.split(",")]
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert all(found and set(found) <= set(names) for found in NAMED.values())


def test_the_guards_are_documented_as_they_are() -> None:
    tables = mutants("--table").stdout
    assert tables
    assert tables in (TESTS.parent / "docs" / "guards.md").read_text()
