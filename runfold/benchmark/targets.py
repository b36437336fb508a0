"""Core: what was measured, beside what is wanted (R81-R86), for people and for docs/performance.md.

A `Row` holds one measurement. `limit` is a target, `goal` a wish beyond it; a row short of either
says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from msgspec import Struct


class Row(Struct, frozen=True, kw_only=True):
    """`rule`: R81 to R86 · `beside`: it and its floor, in units · `workload`: w1 to w6."""

    rule: str
    workload: str
    what: str
    value: float
    digits: int = 2
    sense: Literal["≤", "≥"] = "≤"
    limit: float | None = None
    goal: float | None = None
    unit: str = ""
    beside: str = ""

    @property
    def short(self) -> bool:
        """Of its target; of its goal, where it has no target."""
        wanted = self.limit if self.limit is not None else self.goal
        return wanted is not None and not _met(self.value, self.sense, wanted)

    @property
    def target(self) -> str:
        """In words: `≥ 0.9, goal 2`; a dash where there is none."""
        words = [] if self.limit is None else [f"{self.sense} {self.limit:g}{self.unit}"]
        words += [] if self.goal is None else [f"goal {self.goal:g}{self.unit}"]
        return ", ".join(words) or "–"

    @property
    def measured(self) -> str:
        """With its unit."""
        return f"{self.value:.{self.digits}f}{self.unit}"


def _met(value: float, sense: Literal["≤", "≥"], wanted: float) -> bool:
    return value <= wanted if sense == "≤" else value >= wanted


def rows(result: dict[str, Any]) -> list[Row]:
    """All that the result holds."""
    found: list[Row] = []
    picked = result["shards"]
    for how, part in _setups(result):
        found += _steps(f"{how}P={part.get('shards', picked)}", part)
    if "file_store" in result:
        files = result["file_store"]
        found.append(_one_run("file store, one run", files))
    found += _resume(result.get("resume"))
    found += _latency(result.get("latency"))
    found += _takeover(result.get("takeover"))
    for parked in result.get("parked", []):
        found += _parked(parked)
    found += _leaks(result.get("leaks"))
    return sorted(found, key=lambda row: (row.workload, row.rule))


def _setups(result: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "fsync on, ", result
    for name, part in result.items():
        if name.startswith("shards_"):
            yield "fsync on, ", part
    if "no_fsync" in result:
        yield "fsync off, ", result["no_fsync"]


def _one_run(what: str, one: dict[str, Any]) -> Row:
    return Row(
        rule="R81",
        workload="w1",
        what=f"{what}: step / floor",
        value=one["step_over_floor"],
        limit=None if what.startswith("file") else 1.15,
        beside=f"{one['step_ms']:.3f} and {one['floor_ms']:.3f} ms",
    )


def _steps(how: str, part: dict[str, Any]) -> Iterator[Row]:
    if "one_run" in part:
        yield _one_run(f"{how}, one run", part["one_run"])
    for level in (16, 64, 256):
        if f"runs_{level}" in part:
            yield from _many(how, level, part[f"runs_{level}"])
    for name, found in part.get("workers", {}).items():
        level = 64 if name == "two_workers" else int(name.removeprefix("runs_"))
        who = "2 workers" if name == "two_workers" else "worker"
        yield Row(
            rule="R81",
            workload="w1",
            what=f"{how}, {who} at {level}: records / floor",
            value=found["records_over_floor"],
            sense="≥",
            limit=0.9 if name == "runs_64" else None,
            beside=f"{found['runs_s']:.0f} runs/s, {found['records_s']:.0f} records/s and "
            f"{found['floor_appends_s']:.0f} appends/s",
        )
        if name == "runs_64" and "cpu_ms_per_step" in found:
            yield _cpu(
                f"{how}, worker at {level}", found["cpu_ms_per_step"], "its runs' start, end"
            )


def _many(how: str, level: int, many: dict[str, Any]) -> Iterator[Row]:
    limit = 0.9 if level == 64 else None
    goal = {64: 2.0, 256: 4.0}.get(level) if how.startswith("fsync on") else None

    def row(what: str, name: str, goal: float | None) -> Row:
        return Row(
            rule="R81",
            workload="w1",
            what=f"{how}, {level} runs: rate / {what}",
            value=many[f"rate_over_{name}"],
            sense="≥",
            limit=limit,
            goal=goal,
            beside=f"{many['product_appends_s']:.0f} and {many[f'{name}_appends_s']:.0f} appends/s",
        )

    spread = "rate_over_one_stream" in many  # then that is the floor the goals are about
    yield row("floor", "floor", None if spread else goal)
    if spread:
        yield row("floor in one stream", "one_stream", goal)
    if level == 64:
        floor = f"floor {many['cpu_ms_per_floor_pair']:.3f} ms"
        yield _cpu(f"{how}, {level} runs", many["cpu_ms_per_step"], floor)


def _cpu(what: str, value: float, beside: str) -> Row:
    return Row(
        rule="R86",
        workload="w1",
        what=f"{what}: CPU a step",
        value=value,
        digits=3,
        limit=0.35,
        unit=" ms",
        beside=beside,
    )


def _resume(found: dict[str, Any] | None) -> Iterator[Row]:
    if found is None:
        return
    least, most = found["flat_steps"]
    flat = found["with_commits"]
    yield Row(
        rule="R82",
        workload="w2",
        what=f"approve → next step, {most} recorded steps / {least}, with commits",
        value=found["flat"],
        limit=1.5,
        beside=f"{_p50(flat, most, 'resume_ms'):.1f} and {_p50(flat, least, 'resume_ms'):.1f} ms",
    )
    yield Row(
        rule="R82",
        workload="w2",
        what=f"the same without commits: {most} / {least} (a full replay)",
        value=_p50(found["without_commits"], most, "resume_ms")
        / _p50(found["without_commits"], least, "resume_ms"),
        beside=f"{_p50(found['without_commits'], most, 'resume_ms'):.0f} and "
        f"{_p50(found['without_commits'], least, 'resume_ms'):.1f} ms",
    )
    fold = found["full_fold"]
    yield Row(
        rule="R82",
        workload="w2",
        what=f"full fold of {fold['records']} records",
        value=fold["records_s"],
        digits=0,
        sense="≥",
        limit=50_000,
        unit="/s",
        beside=f"nats-py reads them raw at {fold['floor_records_s']:.0f}/s",
    )


def _p50(by_size: dict[str, Any], steps: int, name: str) -> float:
    return by_size[str(steps)][name]["p50"]


def _latency(found: dict[str, Any] | None) -> Iterator[Row]:
    if found is None:
        return
    floor = f"{found['floor_appends']} raw appends: {found['floor_ms']:.2f} ms"
    for door, one in found["approve_to_next_step_ms"].items():
        what = f"approve → next step, {door}"
        yield _ms(f"{what}: p50", one["p50"], 3, floor)
        yield _ms(f"{what}: p99", one["p99"], 10, f"of {one['of']}")
    start = found["start_to_first_step_ms"]
    yield _ms("start → first step: p50", start["p50"], None, f"p99 {start['p99']:.1f} ms")
    claim = found["worker_start_to_claim_s"]
    yield _seconds("w4", "worker process start → first claim", claim, 1.0)


def _ms(what: str, value: float, limit: float | None, beside: str) -> Row:
    return Row(
        rule="R83",
        workload="w4",
        what=what,
        value=value,
        digits=1,
        limit=limit,
        unit=" ms",
        beside=beside,
    )


def _seconds(workload: str, what: str, found: dict[str, Any], limit: float) -> Row:
    return Row(
        rule="R83",
        workload=workload,
        what=what,
        value=found["p50"],
        limit=limit,
        unit=" s",
        beside=f"{found['low']:.2f} to {found['high']:.2f} s, of {found['of']}",
    )


def _takeover(found: dict[str, Any] | None) -> Iterator[Row]:
    for name, one in (found or {}).items():
        wait_s = one["ack_wait_s"]
        how, _, _ = name.partition("_")
        limit = {"killed": 1.0, "silent": wait_s + 0.5, "drained": 0.1}[how]
        words = {
            "killed": "takeover after SIGKILL",
            "silent": "takeover from a silent worker",
            "drained": "hand-over on SIGTERM, release → claim",
        }
        yield _seconds("w3", f"{words[how]}, ack wait {wait_s:g} s", one, limit)


def _parked(found: dict[str, Any]) -> Iterator[Row]:
    def row(what: str, value: float, **more: Any) -> Row:
        at = f"{found['runs']} parked, P={found['shards']}"
        return Row(rule="R84", workload="w5", what=f"{at}: {what}", value=value, digits=0, **more)

    cpu = f"{found['start_cpu_ms']} ms of the starter's CPU each"
    yield row("started", found["start_runs_s"], sense="≥", limit=1000, unit="/s", beside=cpu)
    yield row(
        "server memory each, beyond its records",
        found["server_beyond_records_bytes"],
        limit=1024,
        unit=" B",
        beside=f"{found['server_bytes']} and {found['floor_server_bytes']} B",
    )
    pages = f"pages of p50 {found['list_page_ms']['p50']} ms"
    yield row("listed", found["list_runs_s"], sense="≥", limit=5000, unit="/s", beside=pages)
    grew = f"to {found['worker_mb']} MB"
    yield row("the worker grew by, each", found["worker_bytes"], unit=" B", beside=grew)
    done = f"approved at {found['approve_runs_s']:.0f}/s"
    yield row("all woken until done", found["wake_runs_s"], unit="/s", beside=done)


def _leaks(found: dict[str, Any] | None) -> Iterator[Row]:
    if found is None:
        return
    names = [name for name in ("consumers", "subscriptions", "files") if name in found]
    beside = ", ".join(f"{name} {_both(found[name])}" for name in names)
    if "memory_over_warm" in found:
        yield Row(
            rule="R85",
            workload="w6",
            what=f"{found['runs']} short runs, worker memory: end / after the first fifth",
            value=found["memory_over_warm"],
            limit=1.05,
            beside=f"{_both(found['memory_mb'])} MB; {beside}",
        )


def _both(one: dict[str, float]) -> str:
    return f"{one['warm']:g} → {one['end']:g}"
