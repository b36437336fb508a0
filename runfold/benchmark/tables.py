"""Core: the rows as a table: on a terminal, and in Markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .targets import Row, rows


def render(result: dict[str, Any]) -> list[str]:
    """The result as a table for people; `!` before what is short of its target, `·` of its goal."""
    found = rows(result)
    wide = max((len(row.what) for row in found), default=0)
    lines = [f"{'':<6}{'':<{wide}}{'measured':>13}  {'target':<16}  it and what is beside it"]
    for row in found:
        mark = " " if not row.short else "!" if row.limit is not None else "·"
        lines.append(
            f"{mark} {row.rule} {row.what:<{wide}}{row.measured:>12}  {row.target:<16}"
            f"  {row.beside}"
        )
    lines.append(machine_line(result))
    if result["machine"]["file_system"] in ("tmpfs", "ramfs"):
        lines.append("This was memory, where fsync costs nothing: name a disk's folder in TMPDIR.")
    return lines


def machine_line(result: dict[str, Any]) -> str:
    """Where it was measured."""
    machine = result["machine"]
    return (
        f"{machine['cpus']} CPUs, {machine['cpu']}, load {machine['load']:g} at the start; "
        f"Python {machine['python']}, {machine['event_loop']}, nats-py {machine['nats_py']}, "
        f"nats-server {machine['nats_server']} (R{result['replicas']}, P={result['shards']}), "
        f"{machine['file_system']}; {result['seconds']:.0f} s"
    )


def markdown(found: Sequence[Row]) -> list[str]:
    """A table; what is short of its target in bold, of its goal alone in italics. Each row is made
    by `runfold bench` and its workload."""
    lines = [
        "| rule | what | target | measured | it and what is beside it | by |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        mark = "" if not row.short else "**" if row.limit is not None else "*"
        cells = (
            row.rule,
            row.what,
            row.target,
            f"{mark}{row.measured}{mark}",
            row.beside,
            row.workload,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines
