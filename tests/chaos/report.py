"""The summary of soaks, for people."""

from __future__ import annotations

from collections import Counter

from chaos.soak import Result

SHOWN = 60


def table(results: list[Result]) -> str:
    """One column a topology."""
    rows: list[tuple[str, list[str]]] = []

    def row(name: str, *values: object) -> None:
        rows.append((name, [str(value) for value in values]))

    def section(title: str, counters: list[Counter[str]]) -> None:
        row(f"-- {title}", *("" for _ in results))
        for key in sorted({key for counter in counters for key in counter}):
            row(f"   {key[:SHOWN]}", *(counter[key] for counter in counters))

    row("", *(result.options.topology for result in results))
    row("seed", *(result.options.seed for result in results))
    row("seconds of faults", *(f"{result.seconds:.0f}" for result in results))
    row("workers, over HTTP, bridges", *(_processes(result) for result in results))
    row("disks that can be full", *("yes" if result.disks else "no mount" for result in results))
    row("runs", *(result.ended.total() for result in results))
    section("runs ended", [result.ended for result in results])
    row("faults", *(result.faults.total() for result in results))
    section("faults injected", [result.faults for result in results])
    section("faults skipped (target down)", [result.skipped for result in results])
    section("counted", [result.counts for result in results])
    row("   publish acks through proxies", *(result.acks_seen for result in results))
    section("answers that were none", [result.refused for result in results])
    section("ends of workers", [_ends(result, "w") for result in results])
    section("ends of workers over HTTP", [_ends(result, "h") for result in results])
    section("ends of bridges", [_ends(result, "b") for result in results])
    row("-- memory, MB: first, highest, last", *("" for _ in results))
    for name in sorted({name for result in results for name in result.memory}):
        row(f"   {name}", *(_memory(result, name) for result in results))
    row("VIOLATIONS", *(len(result.wrong) for result in results))
    widths = [max(len(values[k]) for _, values in rows) for k in range(len(results))]
    lines = [
        f"{name:<64}" + "  ".join(f"{value:>{w}}" for value, w in zip(values, widths, strict=True))
        for name, values in rows
    ]
    for result in results:
        for wrong in result.wrong:
            lines.append(f"VIOLATION {result.options.topology} {wrong.run} {wrong.what}")
            lines.append(f"    {wrong.text[:400]}")
    return "\n".join(lines)


def _processes(result: Result) -> str:
    options = result.options
    return f"{options.workers}, {options.remotes}, {options.bridges}"


def _ends(result: Result, letter: str) -> Counter[str]:
    return sum((c for name, c in result.ends.items() if name[0] == letter), Counter[str]())


def _memory(result: Result, name: str) -> str:
    found = result.memory.get(name)
    return "" if found is None else " ".join(f"{one:.0f}" for one in found)
