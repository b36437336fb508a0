"""Shell: `runfold bench`: what durability costs here (R81-R86)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from ..benchmark.scale import FULL, QUICK, Scale, Workload
from ..frame import UsageProblem, execute
from ..options import JsonOption
from ..terminal import emit_json, note, say


def register(app: typer.Typer) -> None:
    app.command("bench")(bench)


def bench(
    workloads: Annotated[
        list[Workload] | None,
        typer.Argument(
            help="w1 steps, w2 resume, w3 takeover, w4 latency, w5 parked runs, w6 leaks. "
            "Default: all.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three minutes in place of fifteen, rougher.")
    ] = False,
    replicas: Annotated[
        Literal["1", "3"],
        typer.Option("--replicas", help="3: on three servers of its own, and R3 streams."),
    ] = "1",
    runs: Annotated[
        int | None,
        typer.Option("--runs", min=100, help="So many in w5 and w6; 100000: 15 minutes each."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the JSON into this file.")
    ] = None,
    plots: Annotated[
        Path | None, typer.Option("--plots", help="Also draw PNG files into this directory.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Runfold beside the raw appends it stands on, on this machine, as ratios (R81-R86).

    It brings its own servers and workers, in a directory in TMPDIR that it removes again.
    """
    scale = QUICK if quick else FULL
    execute(json, _bench(workloads, scale, int(replicas), runs, out, plots, json))


async def _bench(
    wanted: Sequence[Workload] | None,
    scale: Scale,
    replicas: int,
    runs: int | None,
    out: Path | None,
    plots: Path | None,
    json: bool,
) -> int:
    # Here, since they would cost each command and each worker its time to start.
    from ..benchmark.plots import library
    from ..benchmark.run import Bench
    from ..benchmark.tables import render

    if replicas > 1 and Workload.W5 in (wanted or ()):
        raise UsageProblem("w5 looks into one server's memory: it has no --replicas")
    if plots is not None:
        library()  # missing: said now, not after a quarter of an hour
    every = [one for one in Workload if replicas == 1 or one is not Workload.W5]
    bench = Bench(scale, workloads=wanted or every, replicas=replicas, runs=runs, progress=note)
    result = await bench.run()
    _keep(result, out, plots)
    if json:
        emit_json(result)
    else:
        for line in render(result):
            say(line)
    return 0


def _keep(result: dict[str, Any], out: Path | None, plots: Path | None) -> None:
    from ..benchmark.plots import draw

    if out is not None:
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    if plots is not None:
        for file in draw(result, plots):
            note(f"drawn: {file}")
