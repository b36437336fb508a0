"""What `runfold bench` says about a result: short of a target, of a goal, or of neither."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from runfold.benchmark.tables import markdown, render
from runfold.benchmark.targets import Row, rows

ROOT = Path(__file__).resolve().parents[2]

MACHINE = {
    "cpus": 2,
    "cpu": "a cpu",
    "load": 0.1,
    "system": "Linux",
    "python": "3.11",
    "event_loop": "asyncio",
    "runfold": "1",
    "nats_py": "2",
    "nats_server": "2.15.1",
    "file_system": "ext4",
}

MANY = {
    "rate_over_floor": 1.5,
    "floor_appends_s": 1000.0,
    "product_appends_s": 1500.0,
    "cpu_ms_per_step": 0.4,
    "cpu_ms_per_floor_pair": 0.1,
}


def result(**parts: Any) -> dict[str, Any]:
    said = {"command": "runfold bench", "seconds": 1.0, "machine": MACHINE}
    return {**said, "replicas": 1, "shards": 1, **parts}


def row(value: float, **more: Any) -> Row:
    return Row(rule="R81", workload="w1", what="a thing", value=value, **more)


@pytest.mark.parametrize(
    ("measured", "short"),
    [
        (row(1.15, limit=1.15), False),
        (row(1.16, limit=1.15), True),
        (row(0.9, sense="≥", limit=0.9), False),
        (row(0.89, sense="≥", limit=0.9), True),
        (row(1.0, sense="≥", limit=0.9, goal=2.0), False),  # a goal is a wish beyond the target
        (row(1.0, sense="≥", goal=2.0), True),
        (row(1e9), False),
    ],
)
def test_a_row_is_short_of_its_target_or_of_its_goal_where_it_has_no_target(
    measured: Row, short: bool
) -> None:
    assert measured.short is short


def test_one_run_and_many_are_judged_by_their_rules() -> None:
    one = {"step_over_floor": 1.2, "step_ms": 1.2, "floor_ms": 1.0}
    found = {row.what: row for row in rows(result(one_run=one, runs_64=MANY, runs_256=MANY))}
    assert found["fsync on, P=1, one run: step / floor"].short
    assert not found["fsync on, P=1, 64 runs: rate / floor"].short
    assert found["fsync on, P=1, 256 runs: rate / floor"].target == "goal 4"
    assert found["fsync on, P=1, 64 runs: CPU a step"].short


def test_over_several_streams_the_goal_is_about_the_floor_in_one() -> None:
    many = MANY | {"rate_over_one_stream": 2.5, "one_stream_appends_s": 600.0}
    found = {row.what: row.target for row in rows(result(shards=4, runs_64=many))}
    assert found["fsync on, P=4, 64 runs: rate / floor"] == "≥ 0.9"
    assert found["fsync on, P=4, 64 runs: rate / floor in one stream"] == "≥ 0.9, goal 2"


def test_without_fsync_there_is_no_goal() -> None:
    found = {row.what: row.target for row in rows(result(no_fsync={"runs_64": MANY}))}
    assert found["fsync off, P=1, 64 runs: rate / floor"] == "≥ 0.9"


def test_a_terminal_marks_what_is_short() -> None:
    lines = render(result(runs_64=MANY | {"rate_over_floor": 0.5}, runs_256=MANY))
    (short,) = [line for line in lines if "64 runs: rate" in line]
    (wish,) = [line for line in lines if "256 runs: rate" in line]
    (met,) = [line for line in render(result(runs_64=MANY)) if "64 runs: rate" in line]
    assert (short[0], wish[0], met[0]) == ("!", "·", " ")


def test_memory_in_place_of_a_disk_is_said() -> None:
    assert "TMPDIR" in render(result(machine=MACHINE | {"file_system": "tmpfs"}))[-1]


def test_markdown_is_bold_where_it_is_short() -> None:
    lines = markdown([row(2.0, limit=1.0), row(0.5, limit=1.0), row(1.0, sense="≥", goal=2.0)])
    assert [line.split(" | ")[3] for line in lines[2:]] == ["**2.00**", "0.50", "*1.00*"]


def test_the_report_writes_between_its_markers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("report", ROOT / "bench" / "report.py")
    assert spec is not None and spec.loader is not None
    report: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    page = tmp_path / "page.md"
    behind = "<!-- end -->\nb\n<!-- measured R3 -->\nkept\n<!-- end -->\n"
    page.write_text(f"a\n<!-- measured R1 -->\nbefore\n{behind}")
    monkeypatch.setattr(report, "PAGE", page)
    (tmp_path / "out.json").write_text(json.dumps(result(runs_64=MANY)))
    for _ in range(2):
        report.main([str(tmp_path / "out.json")])
    text = page.read_text()
    assert text.startswith("a\n<!-- measured R1 -->\n- `runfold bench`: 2 CPUs, a cpu")
    assert text.endswith(f"|\n{behind}")
    assert text.count("64 runs: rate / floor") == 1 and "before" not in text


def test_the_page_has_the_markers() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert page.count("<!-- measured R1 -->\n") == page.count("<!-- measured R3 -->\n") == 1
