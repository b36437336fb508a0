"""Results as one table: medians over the passes; text, JSON, GitHub's kind of table.

A table of a workload has a line for each row and setting, and a column for each concurrency or
length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from jobs import ROWS

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
KEYS = {
    "w1": ("at_once",),
    "w2": ("state", "steps"),
    "w3": ("tuned",),
    "w4": ("tuned",),
    "w5": (),
}
TITLES = {
    "w1": "W1: runs of ten steps",
    "w4": "W4: signal → next step",
    "w2": "W2: a long run is taken up again",
    "w3": "W3: its process is killed → its step again",
    "w5": "W5: parked runs",
}
AT_ONCE = (1, 16, 64, 256)
LENGTHS = (100, 1000, 10000)
FLOORS = {"runfold-always": "nats-always", "runfold-default": "nats-default"}

Found = dict[str, Any]


def load(path: Path) -> list[Found]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def summarised(lines: Sequence[Found]) -> Found:
    """`machine`; `results`, one for each row, workload and setting: the median of each number, with
    `passes` and the lowest and highest `runs_s`; `skipped` and `errors`."""
    groups: dict[tuple[Any, ...], list[Found]] = {}
    for line in lines:
        if "w" in line and "error" not in line:
            setting = tuple(line.get(key, "") for key in KEYS[line["w"]])
            groups.setdefault((line["w"], line["row"], *setting), []).append(line)
    results = [_middle(group) for group in groups.values()]
    floors = {(one["row"], one["at_once"]): one["runs_s"] for one in results if one["w"] == "w1"}
    for one in results:
        floor = floors.get((FLOORS.get(one["row"], ""), one.get("at_once")))
        if one["w"] == "w1" and floor:
            one["over_floor"] = round(one["runs_s"] / floor, 3)
    return {
        "machine": next((line["machine"] for line in lines if "machine" in line), {}),
        "results": results,
        "skipped": [line for line in lines if "skipped" in line],
        "errors": [line for line in lines if "error" in line],
    }


def _middle(group: Sequence[Found]) -> Found:
    found: Found = {"passes": len(group)}
    for key, value in group[0].items():
        values = [one.get(key) for one in group]
        if key == "pass":
            continue
        if all(isinstance(one, int | float) for one in values):
            found[key] = round(median(values), 3)  # pyright: ignore[reportArgumentType]
        else:
            found[key] = value
    if "runs_s" in found:
        rates = [one["runs_s"] for one in group]
        found["runs_s_low"], found["runs_s_high"] = min(rates), max(rates)
    return found


# ---- tables --------------------------------------------------------------------------------


def tables(found: Found) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, head, lines; of the workloads that were measured."""
    made: list[tuple[str, list[str], list[list[str]]]] = []
    for workload, title in TITLES.items():
        of_it = [one for one in found["results"] if one["w"] == workload]
        if of_it:
            head, lines = LAYOUTS[workload](of_it)
            made.append((title, head, lines))
    return made


def _ordered(results: Sequence[Found]) -> list[tuple[Any, list[Found]]]:
    """The results of each row, in the order of the rows."""
    found: list[tuple[Any, list[Found]]] = []
    for row in ROWS:
        of_it = [one for one in results if one["row"] == row.name]
        if of_it:
            found.append((row, of_it))
    return found


def _w1(results: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    head = ["system", "fsync", "runs/s at 1", "16", "64", "256", "run p50 ms at 1"]
    head += ["CPU ms a run at 64", "client's", "MB at 64", "KB stored a run"]
    lines: list[list[str]] = []
    for row, of_it in _ordered(results):
        at = {one["at_once"]: one for one in of_it}
        rates = [_number(at.get(count, {}).get("runs_s")) for count in AT_ONCE]
        many = at.get(64, {})
        stored = many.get("stored_b_per_run")
        more = [_number(at.get(1, {}).get("run_p50_ms")), _number(many.get("cpu_ms_per_run"))]
        more += [_number(many.get("client_cpu_ms_per_run") or None), _number(many.get("memory_mb"))]
        more.append(_number(stored / 1000 if stored is not None else None))
        lines.append([row.name, row.fsync, *rates, *more])
    return head, lines


def _w2(results: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    head = ["system", "state", "ms at 100 steps", "1 000", "10 000"]
    lines: list[list[str]] = []
    for row, of_it in _ordered(results):
        for state in dict.fromkeys(one["state"] for one in of_it):
            at = {one["steps"]: one["replay_ms"] for one in of_it if one["state"] == state}
            lines.append([row.name, state, *(_number(at.get(length)) for length in LENGTHS)])
    return head, lines


def _w3(results: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    return ["system", "tuned", "ms"], [
        [row.name, one.get("tuned", ""), _number(one["takeover_ms"])]
        for row, of_it in _ordered(results)
        for one in of_it
    ]


def _w4(results: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    return ["system", "fsync", "tuned", "p50 ms", "p99 ms"], [
        [
            row.name,
            row.fsync,
            one.get("tuned", ""),
            _number(one["signal_p50_ms"]),
            _number(one["signal_p99_ms"]),
        ]
        for row, of_it in _ordered(results)
        for one in of_it
    ]


def _w5(results: Sequence[Found]) -> tuple[list[str], list[list[str]]]:
    head = ["system", "parked", "started in s", "parked in s", "MB before", "MB", "idle cores"]
    keys = ("parked", "started_s", "parked_s", "memory_before_mb", "memory_mb", "idle_cores")
    return head, [
        [row.name, *(_number(one[key]) for key in keys)]
        for row, of_it in _ordered(results)
        for one in of_it
    ]


LAYOUTS: dict[str, Callable[[Sequence[Found]], tuple[list[str], list[list[str]]]]] = {
    "w1": _w1,
    "w2": _w2,
    "w3": _w3,
    "w4": _w4,
    "w5": _w5,
}


def _number(value: float | None) -> str:
    """Three digits; thousands apart."""
    if value is None:
        return "–"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _footer(found: Found) -> list[str]:
    machine = found["machine"]
    lines = [
        f"{machine['at']}, commit {machine['commit'] or '?'}, {machine['cpus']} CPUs, Python "
        f"{machine['python']}, an fsync {machine['fsync_ms']} ms, load {machine['load']} at the "
        f"beginning, {machine['seconds']:g} s each."
    ]
    told = [(one["row"], "skipped", one["skipped"]) for one in found["skipped"]]
    told += [(one["row"], f"failed in {one['w']}", one["error"]) for one in found["errors"]]
    return lines + [f"{row}: {what}: {why}" for row, what, why in told]


def render(found: Found) -> list[str]:
    """For a terminal."""
    printed: list[str] = []
    for title, head, lines in tables(found):
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        printed += ["", title]
        printed += [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *lines)
        ]
    return [*printed, "", *_footer(found)]


def write_markdown(path: Path, found: Found) -> None:
    """Put the tables between the markers. Raises ValueError where they are missing."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    made: list[str] = []
    for title, head, lines in tables(found):
        made += ["", f"### {title}", ""]
        made += [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]
    made += ["", *(f"{line}  " for line in _footer(found)), ""]
    path.write_text(before + BEGIN + "\n" + "\n".join(made) + END + behind)
