"""Coverage-guided fuzzing: every target, or some, for so many minutes in all.

    python -m tests.fuzz [TARGET …] [--minutes N] [--seed N] [--cache FOLDER]

Atheris is installed into FOLDER (default ~/.cache/runfold-fuzz) where this Python has none. Corpora
are kept there and grow from run to run; what a target fails on is kept as `failed-*`, and
`python -m tests.fuzz --replay TARGET FILE` runs it once, without atheris. Exit code: 0, or 1 where
something was found, or 2 where atheris can't be had.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from fuzz.sweep import swept  # noqa: E402
from fuzz.targets import TARGETS  # noqa: E402

ATHERIS = "atheris==3.0.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "runfold-fuzz"
INPUT_BYTES_MAX = 16384
GRACE_S = 120
"""For one execution, and for the end of a process, beyond its time."""

_PROGRESS = re.compile(r"^#(\d+)\s+(\w+)\s+cov: (\d+) ft: \d+ corp: (\d+)/", re.MULTILINE)


class Report(NamedTuple):
    """`begun`: what the corpus covered when it was read; `found`: the end of what was said."""

    name: str
    executions: int
    begun: int
    covered: int
    corpus: int
    found: str


def atheris_path(cache: Path) -> str:
    """Where to import it from, "" where this Python has it; raises RuntimeError with the reason."""
    folder = cache / f"{ATHERIS}-{sys.version_info[0]}.{sys.version_info[1]}"
    check = [sys.executable, "-c", "import atheris"]
    for path in ("", str(folder)):
        env = os.environ | ({"PYTHONPATH": path} if path else {})
        if subprocess.run(check, env=env, capture_output=True, check=False).returncode == 0:
            return path
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), ATHERIS]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        said = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise RuntimeError(f"{ATHERIS} can't be installed: {said}")
    return str(folder)


def fuzzed(name: str, seconds: int, seed: int, cache: Path, path: str) -> Report:
    """One target in a process of its own, for so long, or until it fails."""
    corpus = cache / "corpus" / name
    options = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-timeout={GRACE_S}",
        f"-artifact_prefix={cache / 'corpus'}/failed-{name}-",
    ]
    command = [sys.executable, str(HERE / "engine.py"), name, str(corpus), *options]
    env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds + 2 * GRACE_S,
        check=False,
    )
    found = "" if done.returncode == 0 else (done.stdout[-3000:] + done.stderr[-3000:])
    steps = _PROGRESS.findall(done.stderr)
    begun = next((int(covered) for _, what, covered, _ in steps if what == "INITED"), 0)
    executions, _, covered, corpus = steps[-1] if steps else ("0", "", "0", "0")
    return Report(name, int(executions), begun, int(covered), int(corpus), found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=10.0, help="for all of them (10)")
    parser.add_argument("--seed", type=int, default=random.randrange(1, 2**31))
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"default: {CACHE}")
    parser.add_argument("--replay", nargs=2, metavar=("TARGET", "FILE"))
    options = parser.parse_args()
    if options.replay:
        name, file = options.replay
        TARGETS[name](Path(file).read_bytes())
        print(f"{name}: nothing found in {file}")
        return 0
    names = options.targets or list(TARGETS)
    unknown = [name for name in names if name not in TARGETS]
    if unknown:
        parser.error(f"no such target: {', '.join(unknown)}; there are {', '.join(TARGETS)}")
    try:
        path = atheris_path(options.cache.resolve())
    except RuntimeError as error:
        print(f"fuzz: {error}")
        return 2
    if not options.targets:
        print(f"sweep: {swept()} forged records, none taken for what it is not", flush=True)
    seconds = max(1, round(60 * options.minutes / len(names)))
    print(f"fuzz: {len(names)} targets, {seconds} s each, --seed {options.seed}", flush=True)
    reports: list[Report] = []
    for name in names:
        report = fuzzed(name, seconds, options.seed, options.cache.resolve(), path)
        reports.append(report)
        print(
            f"{name:10} {report.executions:>10} executions  coverage {report.begun} -> "
            f"{report.covered}  corpus {report.corpus}{'  FAILED' if report.found else ''}",
            flush=True,
        )
        if report.found:
            print(report.found, flush=True)
    total = sum(report.executions for report in reports)
    failed = [report.name for report in reports if report.found]
    print(f"fuzz: {total} executions, {len(failed)} targets failed {' '.join(failed)}".rstrip())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
