"""Nothing that is read, from a disk, a server or a person, crashes us or passes for what it is not.

The targets of this folder under hypothesis, some hundred inputs each, the same ones each time.
`python -m tests.fuzz` runs them under a coverage-guided engine for as long as one likes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.draw import Draw
from fuzz.honest import journals
from fuzz.mutations import damaged
from fuzz.sweep import swept
from fuzz.targets import TARGETS, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.build import RUN

from journal.audit import audit

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = 150
MUTANTS = 400
CHANGES_MAX = 4
SWEEP_STRIDE = 23

fixed = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_taken_for_what_it_is_not(name: str) -> None:
    @fixed
    @given(st.binary(max_size=256))
    def holds(data: bytes) -> None:
        TARGETS[name](data)

    holds()


@pytest.mark.parametrize("name", TARGETS)
def test_no_change_of_an_honest_input_is(name: str) -> None:
    """Seeds as they are, and with some bytes changed."""
    choose = random.Random(name)
    kept = list(seeds(name))
    for data in [*kept, *(changed(choose, choose.choice(kept)) for _ in range(MUTANTS))]:
        try:
            TARGETS[name](data)
        except Exception as error:
            error.add_note(f"{name} on {data!r}")
            raise


def changed(choose: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(choose.randint(1, CHANGES_MAX)):
        at = choose.randint(0, len(found))
        found[at : at + choose.randint(0, 2)] = choose.randbytes(choose.randint(0, 2))
    return bytes(found)


def test_no_forged_part_of_a_record_is() -> None:
    """One in some twenty of all that `python -m tests.fuzz` sweeps."""
    assert swept(SWEEP_STRIDE) > 1000


def test_the_journals_that_mutations_begin_with_are_honest() -> None:
    assert [audit(RUN, entries) for entries in journals()] == [()] * 5
    kinds = {entry.type for entries in journals() for entry in entries}
    assert len(kinds) == 14, "every kind of record"


def test_mishaps_are_not_all_alike() -> None:
    made = {damaged(Draw(random.Random(at).randbytes(40))) for at in range(300)}
    assert len(made) > 250


def test_a_finding_is_replayed_by_one_command(tmp_path: Path) -> None:
    kept = tmp_path / "failed-json-1"
    kept.write_bytes(b'{"a": 1}')
    command = [sys.executable, "-m", "tests.fuzz", "--replay", "json", kept]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"json: nothing found in {kept}\n"), done.stderr
