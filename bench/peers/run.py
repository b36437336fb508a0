"""Runfold among its peers: every row in turn, over and over, in one table.

    bash bench/peers/run.sh [WORKLOADS [PASSES]] [--only NAME,…] [--markdown FILE]

WORKLOADS: w1,w4,w2 (default), or any of w1 to w5 · PASSES (3) of w1 and w4; the others, which take
their medians themselves, are in the first one only. See bench/peers.md.
Exit code 1 where one of Runfold's rows gave no result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from installing import NotHere, commit, installed, restate_server
from jobs import ROWS, WORKLOADS, Row, chosen
from table import load, render, summarised, write_markdown

HERE = Path(__file__).resolve().parent
ROOT = Path(os.environ.get("BENCH_ROOT", "/tmp/runfold-peers"))
SECONDS = os.environ.get("BENCH_SECS", "5")
PASSES_OF = ("w1", "w4")
CALL_S = 600
LEAVE_S = 20


def machine(folder: Path) -> dict[str, Any]:
    """Where this is measured; `fsync_ms`: of 512 bytes behind a file, the median of 200."""
    each: list[float] = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(200):
            os.write(file.fileno(), bytes(512))
            begun = time.perf_counter()
            os.fsync(file.fileno())
            each.append(1000 * (time.perf_counter() - begun))
    return {
        "at": time.strftime("%Y-%m-%d %H:%M"),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "fsync_ms": round(median(each), 3),
        "load": round(os.getloadavg()[0], 2),
        "commit": commit(),
        "seconds": float(SECONDS),
    }


class Measuring:
    """Calls of peers; each result is a line of `out`."""

    def __init__(self, out: Path, environments: dict[str, dict[str, str]]) -> None:
        self._out = out
        self._environments = environments
        self._data = ROOT / "data"

    def note(self, found: dict[str, Any]) -> None:
        with self._out.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def call(self, row: Row, workload: str, options: list[str], number: int) -> None:
        """One program, to its end."""
        self._data.mkdir(parents=True, exist_ok=True)
        paths = self._environments[row.environment]
        env = os.environ | paths | {"TMPDIR": str(self._data)}
        seconds = ["--secs", SECONDS] if workload == "w1" else []
        command = [paths["PEER_PYTHON"], str(HERE / row.program), workload, row.variant]
        begun = time.monotonic()
        process = subprocess.Popen(
            [*command, *options, *seconds],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            said, error = process.communicate(timeout=CALL_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # it ends what it has started
            said, error = self._left(process)
            error += f"\nit took more than {CALL_S} s"
        finally:
            if process.poll() is None:
                process.terminate()
                self._left(process)
            shutil.rmtree(self._data, ignore_errors=True)
        results = [json.loads(line[7:]) for line in said.split("\n") if line.startswith("RESULT ")]
        common = {"row": row.name, "w": workload, "pass": number}
        for result in results:
            self.note(common | result)
        if not results:
            last = (error.strip() or "it said nothing").splitlines()[-1]
            self.note(common | {"error": last[:400]})
        told = f"{len(results)} results" if results else f"FAILED: {error.strip()[-400:]}"
        took_s = time.monotonic() - begun
        print(
            f"{time.strftime('%H:%M:%S')} pass {number} {workload} {row.name} {' '.join(options)}: "
            f"{took_s:.0f} s, {told}",
            file=sys.stderr,
            flush=True,
        )

    def _left(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        try:
            return process.communicate(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.communicate()


def prepared(rows: list[Row], *, install: bool) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The environments that are there, as variables for their programs; and why others are not."""
    there: dict[str, dict[str, str]] = {}
    missing: dict[str, str] = {}
    for name in dict.fromkeys(row.environment for row in rows):
        print(f"environment {name} …", file=sys.stderr, flush=True)
        try:
            found = installed(name, ROOT, install=install)
            there[name] = {"PEER_PYTHON": str(found.python)}
            if name == "restate":
                there[name]["RESTATE_SERVER"] = str(restate_server(found))
        except NotHere as error:
            missing[name] = str(error)
    return there, missing


def measured(rows: list[Row], workloads: list[str], passes: int, *, install: bool) -> Path:
    """The file of the results."""
    ROOT.mkdir(parents=True, exist_ok=True)
    (ROOT / "results").mkdir(exist_ok=True)
    out = ROOT / "results" / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    environments, missing = prepared(rows, install=install)
    measuring = Measuring(out, environments)
    measuring.note({"machine": machine(ROOT)})
    for row in rows:
        if row.environment in missing:
            measuring.note({"row": row.name, "skipped": missing[row.environment]})
    here = [row for row in rows if row.environment not in missing]
    for number in range(1, passes + 1):
        for workload in workloads:
            if number > 1 and workload not in PASSES_OF:
                continue
            for row in here:
                for options in row.asked.get(workload, []):
                    measuring.call(row, workload, options, number)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description="Runfold among its peers.")
    parser.add_argument("workloads", nargs="?", default="w1,w4,w2")
    parser.add_argument("passes", nargs="?", type=int, default=3)
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("--only", default="", help=f"rows, or how their names begin: {names}")
    parser.add_argument("--markdown", type=Path, help="put the table between its markers")
    parser.add_argument("--no-install", action="store_true", help="skip what is not there yet")
    parser.add_argument("--table", type=Path, help="of these results; measure nothing")
    asked = parser.parse_args()
    workloads = list(WORKLOADS) if asked.workloads == "all" else asked.workloads.split(",")
    rows = chosen([word for word in asked.only.split(",") if word])
    if not rows or set(workloads) - set(WORKLOADS):
        parser.error(f"rows: {names}; workloads: {', '.join(WORKLOADS)}, or all")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended too
    out = asked.table or measured(rows, workloads, asked.passes, install=not asked.no_install)
    found = summarised(load(out))
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(render(found)))
    print(f"results: {out}, {out.with_suffix('.json')}", file=sys.stderr)
    if asked.markdown:
        write_markdown(asked.markdown, found)
    wrong = [one for one in found["errors"] if one["row"].startswith("runfold")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
