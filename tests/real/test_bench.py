"""`runfold bench` measures, prints one object, and leaves nothing behind. No time is asserted."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from runfold.benchmark.plots import draw
from runfold.benchmark.run import Bench
from runfold.benchmark.scale import QUICK, Workload
from runfold.benchmark.tables import render

pytestmark = pytest.mark.real

TINY = replace(
    QUICK,
    name="tiny",
    levels=(1, 64),
    rounds=1,
    block_s=0.05,
    runs_per_level=1,
    runs_least=4,
    journals=(2, 40),
    resumes=2,
    takeovers=1,
    samples=2,
    parked=(100,),
    short=20,
    looks=5,
)
"""Says nothing about speed: each part is done once."""

LATENCY = {"step_over_floor", "floor_ms", "floor_p99_ms", "step_ms", "step_p99_ms"}
RATE = {"rate_over_floor", "floor_appends_s", "product_appends_s", "cpu_ms_per_step"}
RANGE = {"ratio_low", "ratio_high", "blocks"}
ONE_STREAM = {"rate_over_one_stream", "one_stream_appends_s"}
WORKER = {"runs_s", "steps_s", "records_s", "floor_appends_s", "records_over_floor"}
SPREAD = {"p50", "p99", "low", "high", "of"}

Measured = dict[Workload, dict[str, Any]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the benches keep their files while they measure."""
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def measured(kept: Path) -> Measured:
    """Each workload alone, as `runfold bench w1` has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(kept))
        return {
            workload: asyncio.run(
                Bench(TINY, workloads=[workload], progress=lambda text: None).run()
            )
            for workload in Workload
        }


def test_the_object_says_on_what_it_was_measured(measured: Measured) -> None:
    for workload, result in measured.items():
        assert result["command"] == f"runfold bench {workload} --tiny"
        assert result["quick"] is False
        assert result["workload_seconds"].keys() == {workload}
        machine = {"cpus", "cpu", "load", "system", "python", "event_loop", "file_system"}
        assert result["machine"].keys() == machine | {"runfold", "nats_py", "nats_server"}


def test_w1_has_the_names_of_protocol_8(measured: Measured) -> None:
    result = measured[Workload.W1]
    for found in (result, result["no_fsync"]):
        assert found["one_run"].keys() == LATENCY | RANGE
        assert found["runs_64"].keys() - ONE_STREAM == RATE | RANGE | {"cpu_ms_per_floor_pair"}
        for one in found["workers"].values():
            assert one.keys() >= WORKER | RANGE
        assert found["workers"].keys() == {"runs_1", "runs_64", "two_workers"}
    assert result["file_store"].keys() == LATENCY | RANGE
    (other,) = [name for name in result if name.startswith("shards_")]
    assert result[other]["runs_64"].keys() - ONE_STREAM == RATE | RANGE | {"cpu_ms_per_floor_pair"}


def test_where_runs_are_spread_a_second_floor_is_in_one_stream(measured: Measured) -> None:
    result = measured[Workload.W1]
    for name, part in result.items():
        if name == "no_fsync" or name.startswith("shards_"):
            spread = part.get("shards", result["shards"]) > 1
            assert part["runs_64"].keys() & ONE_STREAM == (ONE_STREAM if spread else set())


def test_a_ratio_lies_between_those_of_its_blocks(measured: Measured) -> None:
    many = measured[Workload.W1]["runs_64"]
    assert len(many["blocks"]["floor"]) == len(many["blocks"]["product"]) + 1
    assert len(many["blocks"]["one_stream"]) in (0, len(many["blocks"]["product"]))
    assert many["ratio_low"] <= many["rate_over_floor"] <= many["ratio_high"]


def test_w2_has_each_length_with_commits_and_without(measured: Measured) -> None:
    found = measured[Workload.W2]["resume"]
    for kind in ("with_commits", "without_commits"):
        assert found[kind].keys() == {"2", "40"}
        for one in found[kind].values():
            assert one["resume_ms"].keys() == one["log_ms"].keys() == SPREAD
    assert found["flat_steps"] == [2, 40]
    assert found["full_fold"]["records"] > 80  # two a step


def test_w3_has_each_way_to_go(measured: Measured) -> None:
    found = measured[Workload.W3]["takeover"]
    assert found.keys() == {"killed", "killed_short", "silent_short", "drained"}
    assert all(one.keys() == SPREAD | {"ack_wait_s"} for one in found.values())


def test_w4_has_each_door(measured: Measured) -> None:
    found = measured[Workload.W4]["latency"]
    doors = found["approve_to_next_step_ms"]
    assert doors.keys() == {"library", "nats", "http"}
    assert all(one.keys() == SPREAD | {"each", "over_floor"} for one in doors.values())


def test_w5_and_w6_have_their_runs(measured: Measured) -> None:
    (parked,) = measured[Workload.W5]["parked"]
    assert parked["runs"] == 100
    leaks = measured[Workload.W6]["leaks"]
    assert leaks["runs"] == 20
    assert [look["runs"] for look in leaks["looks"]] == [4, 8, 12, 16, 20]


def test_every_number_is_positive_and_finite(measured: Measured) -> None:
    bad = [
        name
        for workload in (Workload.W1, Workload.W2, Workload.W4)
        for name, value in numbers(measured[workload])
        if not (0 <= value < math.inf) or (name.endswith("over_floor") and value == 0)
    ]
    assert bad == []


def test_the_table_names_each_rule(measured: Measured) -> None:
    found = "\n".join(line for result in measured.values() for line in render(result))
    for what in ("fsync on, P=", "fsync off, P=", "file store", "≤ 1.15", "≥ 0.9"):
        assert what in found
    for rule in ("R81", "R82", "R83", "R84", "R85", "R86"):
        assert f" {rule} " in found


def test_each_plot_is_a_small_file(measured: Measured, tmp_path: Path) -> None:
    every: dict[str, Any] = {}
    for result in measured.values():
        every |= result
    made = draw(every, tmp_path / "plots")
    assert len(made) == len(Workload)
    assert all(0 < file.stat().st_size < 60_000 for file in made)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
def test_no_server_no_worker_and_no_file_is_left(measured: Measured, kept: Path) -> None:
    assert measured
    assert list(kept.iterdir()) == []
    assert processes_in(kept) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes in /proc")
def test_ctrl_c_leaves_no_server_no_worker_and_no_file(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [runfold(), "bench", "w4", "--quick", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "library" in line:  # a server, a worker and a bridge are there
            break
    assert len(processes_in(tmp_path)) >= 3
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 130
    assert json.loads(out)["error"]["code"] == "interrupted"
    assert processes_in(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_w5_on_three_servers_is_refused() -> None:
    done = subprocess.run(
        [runfold(), "bench", "w5", "--replicas", "3"],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
    )
    assert done.returncode == 2
    assert "w5 looks into one server's memory" in done.stderr


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text(
        "raise ImportError('not installed', name='matplotlib')\n"
    )
    done = subprocess.run(
        [runfold(), "bench", "--plots", tmp_path / "plots"],
        capture_output=True,
        timeout=60,
        check=False,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "--plots needs matplotlib" in done.stderr
    assert "runfold[bench]" in done.stderr
    assert not re.search("of 4", done.stderr)


def runfold() -> Path:
    return Path(sys.executable).with_name("runfold")


def numbers(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from numbers(item, f"{prefix}{name}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield prefix + name, item


def processes_in(folder: Path) -> list[str]:
    """Servers and their supervisors run in their data directory, workers beside it; also once that
    is removed."""
    found = [name for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in found if str(folder) in working_directory(pid)]


def working_directory(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:  # ended meanwhile, or another account's
        return ""
