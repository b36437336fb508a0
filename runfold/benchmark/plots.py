"""Shell: `runfold bench --plots DIR`: what was measured as pictures. Needs matplotlib, an extra."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from journal.errors import RunfoldError

SIZE_INCHES = (6.4, 3.6)
DOTS_PER_INCH = 80
"""Some 30 KB each."""

FLOOR, OURS, LINE = "#b8bec8", "#2f6fde", "#d0662f"


class NoPlots(RunfoldError):
    """matplotlib is not installed."""

    code = "usage"


def library() -> Any:
    """matplotlib's pyplot, drawing into files alone. Raises NoPlots: ask before measuring."""
    try:
        import matplotlib  # pyright: ignore[reportMissingImports, reportMissingTypeStubs]

        matplotlib.use("Agg")  # pyright: ignore[reportUnknownMemberType]
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise NoPlots(f"--plots needs {error.name}", hint="pip install 'runfold[bench]'") from error
    return pyplot


def draw(result: dict[str, Any], folder: Path) -> list[Path]:
    """A file for each workload that the result holds."""
    pyplot = library()
    folder.mkdir(parents=True, exist_ok=True)
    wanted: list[tuple[str, bool, Callable[[Any, dict[str, Any]], None]]] = [
        ("w1-rates", "runs_64" in result, _rates),
        ("w2-resume", "resume" in result, _resume),
        ("w3-takeover", "takeover" in result, _takeover),
        ("w4-latency", "latency" in result, _latency),
        ("w5-parked", "parked" in result, _parked),
        ("w6-memory", "memory_mb" in result.get("leaks", {}), _leaks),
    ]
    made: list[Path] = []
    for name, there, plot in wanted:
        if there:
            figure, axes = pyplot.subplots(figsize=SIZE_INCHES, layout="constrained")
            plot(axes, result)
            axes.spines[["top", "right"]].set_visible(False)
            made.append(folder / f"{name}.png")
            figure.savefig(made[-1], dpi=DOTS_PER_INCH)
            pyplot.close(figure)
    return made


def _rates(axes: Any, result: dict[str, Any]) -> None:
    """Appends a second beside the floor's, by runs at once; one run's from its times."""
    names: list[str] = []
    sides: list[tuple[float, float, float]] = []
    if "one_run" in result:
        one = result["one_run"]
        names.append("1")
        sides.append((2000 / one["floor_ms"], 2000 / one["step_ms"], 1 / one["step_over_floor"]))
    for level in (16, 64, 256):
        if (found := result.get(f"runs_{level}")) is not None:
            names.append(str(level))
            rates = found["floor_appends_s"], found["product_appends_s"]
            sides.append((*rates, found["rate_over_floor"]))
    _bars(axes, names, sides)
    axes.set_title(f"durable steps, fsync on every write, P={result['shards']}")
    axes.set_xlabel("runs at once")
    axes.set_ylabel("appends a second")


def _bars(axes: Any, names: list[str], sides: list[tuple[float, float, float]]) -> None:
    """Of each: the floor, ours, and the ratio that was measured in turns."""
    for index, (floor, ours, ratio) in enumerate(sides):
        axes.bar(index - 0.2, floor, 0.38, color=FLOOR, label="raw nats-py" if not index else None)
        axes.bar(index + 0.2, ours, 0.38, color=OURS, label="Runfold" if not index else None)
        axes.text(index + 0.2, ours, f"{ratio:.2f} ×", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.legend(frameon=False)


def _resume(axes: Any, result: dict[str, Any]) -> None:
    found = result["resume"]
    for kind, color in (("with_commits", OURS), ("without_commits", LINE)):
        sizes = [int(size) for size in found[kind]]
        times = [found[kind][str(size)]["resume_ms"]["p50"] for size in sizes]
        axes.plot(sizes, times, "o-", color=color, label=kind.replace("_", " "))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title("approve → next step, by the steps recorded before")
    axes.set_xlabel("recorded steps")
    axes.set_ylabel("ms, median")
    axes.legend(frameon=False)


def _takeover(axes: Any, result: dict[str, Any]) -> None:
    found = result["takeover"]
    for index, one in enumerate(found.values()):
        axes.barh(index, one["p50"], color=OURS)
        axes.plot([one["low"], one["high"]], [index, index], color=LINE)
        axes.text(one["high"], index, f"  {one['p50']:.2f} s", va="center", fontsize=8)
    names = [f"{name.split('_')[0]}, {one['ack_wait_s']:g} s" for name, one in found.items()]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title("a worker goes → the next one's claim, by its ack wait")
    axes.set_xlabel("seconds: median, lowest to highest")


def _latency(axes: Any, result: dict[str, Any]) -> None:
    for door, one in result["latency"]["approve_to_next_step_ms"].items():
        each = sorted(one["each"])
        parts = [(index + 1) / len(each) for index in range(len(each))]
        axes.plot(each, parts, label=f"{door}, p50 {one['p50']:.1f} ms")
    axes.axvline(3, color=FLOOR, linestyle="--")
    axes.axvline(10, color=FLOOR, linestyle="--")
    axes.set_xlim(left=0)
    axes.set_title("approve → next step begins (targets: p50 3 ms, p99 10 ms)")
    axes.set_xlabel("ms")
    axes.set_ylabel("part of the samples")
    axes.legend(frameon=False)


def _parked(axes: Any, result: dict[str, Any]) -> None:
    found = result["parked"]
    both = [(one["floor_server_bytes"], one["server_bytes"]) for one in found]
    sides = [(floor, ours, ours / floor) for floor, ours in both]
    _bars(axes, [f"{one['runs']}, P={one['shards']}" for one in found], sides)
    axes.set_title("server memory for a parked run, beside as many raw records")
    axes.set_xlabel("parked runs")
    axes.set_ylabel("bytes each")


def _leaks(axes: Any, result: dict[str, Any]) -> None:
    looks = result["leaks"]["looks"]
    axes.plot([one["runs"] for one in looks], [one["memory_mb"] for one in looks], color=OURS)
    axes.set_ylim(0, 1.2 * max(one["memory_mb"] for one in looks))
    axes.set_title("a worker's resident memory over short runs")
    axes.set_xlabel("runs done")
    axes.set_ylabel("MB")
