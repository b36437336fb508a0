"""bench/peers: our rows are measured by the real product, and results become a table.

No time is asserted. Peers' own rows need their packages: `bash bench/peers/run.sh` makes them.
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

PEERS = Path(__file__).resolve().parents[2] / "bench" / "peers"
W1 = {
    "at_once",
    "runs",
    "runs_s",
    "run_p50_ms",
    "run_p99_ms",
    "step_p50_ms",
    "first_p50_ms",
    "cpu_ms_per_run",
    "client_cpu_ms_per_run",
    "memory_mb",
    "stored_b_per_run",
    "other_cpu_cores",
}


def results(tmp_path: Path, program: str, *words: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, PEERS / program, *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.split("\n") if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def test_ten_step_runs_through_a_worker_are_measured_at_each_concurrency(tmp_path: Path) -> None:
    found = results(
        tmp_path, "peer_runfold.py", "w1", "always", "--secs", "0.2", "--at-once", "1,8"
    )
    assert [one["at_once"] for one in found] == [1, 8]
    for one in found:
        assert one.keys() == W1 | {"w"} and one["w"] == "w1"
        assert one["runs"] >= one["at_once"]
        assert min(one[name] for name in W1 - {"other_cpu_cores"}) > 0, one
    assert list(tmp_path.iterdir()) == []


def test_an_approval_and_a_resume_on_a_directory_are_measured(tmp_path: Path) -> None:
    (signalled,) = results(tmp_path, "peer_runfold_files.py", "w4", "files", "--count", "2")
    assert signalled["signals"] == 2
    assert 0 < signalled["signal_p50_ms"] <= signalled["signal_max_ms"]
    (resumed,) = results(tmp_path, "peer_runfold_files.py", "w2", "files", "--steps", "4")
    assert (resumed["steps"], resumed["state"]) == (4, "replay")
    assert resumed["replay_ms"] > 0


TABLE = """\
W1: runs of ten steps
system          fsync        runs/s at 1  16  64   256  run p50 ms at 1  CPU ms a run at 64  client's  MB at 64  KB stored a run
nats-always     each append  100          –   200  –    10               1                   –         50        16
runfold-always  each record  50           –   180  –    10               1                   –         50        16

W4: signal → next step
system       fsync        tuned  p50 ms  p99 ms
dbos-sqlite  each commit         12      99.5
"""  # noqa: E501


def test_the_table_has_medians_skips_with_their_reason_and_errors(tmp_path: Path) -> None:
    def w1(row: str, at_once: int, runs_s: float, number: int = 1) -> dict[str, Any]:
        numbers = {"run_p50_ms": 10, "cpu_ms_per_run": 1, "memory_mb": 50}
        more = {"client_cpu_ms_per_run": 0, "stored_b_per_run": 16000, "pass": number}
        return {"row": row, "w": "w1", "at_once": at_once, "runs_s": runs_s, **numbers, **more}

    lines = [
        {"machine": {"at": "today", "commit": "abc", "cpus": 2, "python": "3", "fsync_ms": 0.1}},
        {"row": "restate", "skipped": "npm is not on this machine"},
        *(w1("nats-always", count, 100 * (1 + count // 64)) for count in (1, 64)),
        *(w1("runfold-always", 1, rate, number) for number, rate in enumerate((50, 49, 90))),
        w1("runfold-always", 64, 180),
        {"row": "dbos-sqlite", "w": "w4", "signal_p50_ms": 12, "signal_p99_ms": 99.5},
        {"row": "dbos-sqlite", "w": "w2", "error": "it broke"},
    ]
    lines[0]["machine"] |= {"load": 0, "seconds": 5}
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = tmp_path / "peers.md"
    text.write_text("before\n<!-- results: begin -->what was there<!-- results: end -->\nbehind\n")
    done = subprocess.run(
        [sys.executable, PEERS / "run.py", "--table", file, "--markdown", text],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [line.rstrip() for line in done.stdout.splitlines()]
    assert told[1:-4] == TABLE.splitlines(), done.stdout
    assert told[-2:] == [
        "restate: skipped: npm is not on this machine",
        "dbos-sqlite: failed in w2: it broke",
    ]
    found = json.loads(file.with_suffix(".json").read_text())
    ratios = {one["at_once"]: one["over_floor"] for one in found["results"] if "over_floor" in one}
    assert ratios == {1: 0.5, 64: 0.9}
    assert text.read_text().startswith("before\n<!-- results: begin -->\n\n### W1")
    assert "what was there" not in text.read_text()
    assert text.read_text().endswith("<!-- results: end -->\nbehind\n")
