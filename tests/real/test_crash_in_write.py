"""bench/crash_in_write (R80): killed in the write, Runfold has charged once and asks a person.

The peers' rows need their packages, which are no dependency of ours: they run where RUNFOLD_PEERS
names the folder that `python bench/crash_in_write/run.py --cache FOLDER` installed them into.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real

RUN = Path(__file__).resolve().parents[2] / "bench" / "crash_in_write" / "run.py"
CACHE = os.environ.get("RUNFOLD_PEERS", "")
PEERS = {
    "dbos": 2,
    "dbos-no-recovery": 1,
    "pydantic-ai-dbos": 2,
    "langgraph": 2,
    "restate": 2,
    "restate-once": 1,
    "temporal": 2,
    "temporal-once": 1,
}


def measured(*arguments: str) -> dict[str, Any]:
    """The one row that the suite prints for one name."""
    done = subprocess.run(
        [sys.executable, RUN, *arguments, "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    row: dict[str, Any] = json.loads(done.stdout)
    return row


@pytest.mark.parametrize("name", ["runfold-directory", "runfold-server", "runfold-fleet"])
def test_a_crash_in_the_write_charges_once_and_a_person_is_asked(name: str) -> None:
    row = measured(name)
    assert (row["charges"], row["state"]) == (1, "indeterminate"), row
    assert "may or may not have happened" in row["seen"]
    assert (row["charges_in_the_end"], row["state_in_the_end"]) == (1, "completed"), row


@pytest.mark.parametrize("name", PEERS)
def test_a_peers_row_is_what_the_readme_tells(name: str) -> None:
    """Each peer ends with two charges: by itself, or once a person lets it go on."""
    if not CACHE:
        pytest.skip("RUNFOLD_PEERS names no folder with the peers' packages")
    row = measured(name, "--no-install", "--cache", CACHE)
    if "skipped" in row:
        pytest.skip(row["skipped"])
    assert (row.get("charges"), row.get("charges_in_the_end")) == (PEERS[name], 2), row


def test_what_is_not_installed_is_skipped_with_the_reason(tmp_path: Path) -> None:
    row = measured("restate", "--no-install", "--cache", str(tmp_path))
    assert row == {"name": "restate", "skipped": f"not installed in {tmp_path / 'restate'}"}
