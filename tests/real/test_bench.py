"""`runfold bench` measures, prints one object, and leaves nothing behind. No time is asserted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runfold.bench import render
from runfold.bench_fleet import render_fleet

pytestmark = pytest.mark.real

LATENCY = {"step_over_floor", "floor_ms", "floor_p99_ms", "step_ms", "step_p99_ms"}
RATE = {"rate_over_floor", "floor_appends_s", "product_appends_s", "cpu_ms_per_step"}
RANGE = {"ratio_low", "ratio_high"}


def measured(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [Path(sys.executable).with_name("runfold"), "bench", *words, "--json"],
        capture_output=True,
        timeout=200,
        check=False,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """What `runfold bench --quick --json` printed, its progress, and where it kept its files."""
    folder = tmp_path_factory.mktemp("bench")
    done = measured(folder, "--quick")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr, folder


def test_the_object_holds_every_key(bench: tuple[dict[str, Any], str, Path]) -> None:
    result, _, _ = bench
    assert result["command"] == "runfold bench --quick"
    assert result["quick"] is True
    assert set(result["machine"]) == {"cpus", "python", "nats_server", "file_system"}
    for found in (result, result["no_fsync"]):
        assert found["one_run"].keys() == LATENCY | RANGE
        assert found["runs_64"].keys() == RATE | RANGE | {"cpu_ms_per_floor_pair"}
    assert result["file_store"].keys() == LATENCY | RANGE


def test_every_number_is_positive_and_finite(bench: tuple[dict[str, Any], str, Path]) -> None:
    result, _, _ = bench
    found = dict(numbers(result))
    assert "no_fsync.runs_64.cpu_ms_per_step" in found
    assert [name for name, value in found.items() if not (0 < value < math.inf)] == []


def test_progress_goes_to_stderr_and_the_table_names_each_measurement(
    bench: tuple[dict[str, Any], str, Path],
) -> None:
    result, progress, _ = bench
    assert "fsync off, 64 at once" in progress
    table = "\n".join(render(result))
    for what in ("fsync on, one run", "fsync off, 64 runs", "file store", "≤ 1.15", "≥ 0.9"):
        assert what in table


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
def test_no_server_and_no_file_is_left(bench: tuple[dict[str, Any], str, Path]) -> None:
    _, _, folder = bench
    assert list(folder.iterdir()) == []
    assert [pid for pid in processes() if str(folder) in working_directory(pid)] == []


def numbers(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from numbers(item, f"{prefix}{name}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield prefix + name, item


def processes() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def working_directory(pid: str) -> str:
    """nats-server and its supervisor run in their data directory; also once that is removed."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # ended meanwhile, or another account's
        return ""


def test_the_fleet_is_measured_beside_the_raw_floor(tmp_path: Path) -> None:
    done = measured(tmp_path, "fleet", "--quick")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rates = {"runs_s", "steps_s", "records_s", "floor_appends_s", "records_over_floor"}
    assert found["workers_1"].keys() == found["workers_2"].keys() == rates
    for name in ("start_to_first_step_ms", "approve_to_next_step_ms"):
        assert 0 < found[name]["p50"] <= found[name]["p99"]
    for name in ("takeover_s", "hand_over_s"):
        assert 0 <= found[name]["p50"] <= found[name]["max"]
    assert len(render_fleet(found)) == 7
    assert list(tmp_path.iterdir()) == []
