"""`python -m tests.chaos`: the chaos soak (R78): real servers, workers and bridges, under faults.

The seed, which is printed, draws all faults (what, when, on whom, for how long: see the file
`schedule`) and all runs; what is said to the runs depends on how they go. Each topology ends with
a quiet time and a last look. Exit 1 where anything was wrong; the folder then has the journals,
the logs, and `events.log`, what was done when.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.faults import RATES
from chaos.report import table
from chaos.soak import Result, Soak
from chaos.world import Options


def main() -> int:
    options = _options()
    topologies = ["single", "cluster"] if options.topology == "both" else [options.topology]
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    keep = Path(options.keep or tempfile.mkdtemp(prefix="chaos-"))
    print(f"seed {seed}; what is kept: {keep}", flush=True)
    results: list[Result] = []
    for topology in topologies:
        made = Options(
            seed=seed,
            topology=topology,
            seconds=options.minutes * 60,
            workers=options.workers,
            remotes=options.remotes,
            bridges=options.bridges,
            rate=options.rate,
            pace=options.pace,
            shards=options.shards,
            kinds=frozenset(options.faults.split(",")) if options.faults else None,
            keep=keep,
        )
        results.append(asyncio.run(Soak(made).run()))
        print(table(results), flush=True)
    (keep / "summary.txt").write_text(table(results) + "\n")
    return 1 if any(result.wrong for result in results) else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of faults, each topology")
    parser.add_argument("--seed", type=int, help="default: a random one, printed")
    parser.add_argument("--topology", choices=("single", "cluster", "both"), default="both")
    parser.add_argument("--shards", type=int, default=1, help="journal streams")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--remotes", type=int, default=3, help="workers over HTTP")
    parser.add_argument("--bridges", type=int, default=2)
    parser.add_argument("--rate", type=float, default=5.0, help="runs started a second")
    parser.add_argument("--pace", type=float, default=1.0, help="of faults")
    parser.add_argument("--faults", help=f"only these, with commas: {', '.join(RATES)}")
    parser.add_argument("--keep", help="a folder for logs and journals; default: a new one")
    found = parser.parse_args()
    if found.faults and (unknown := set(found.faults.split(",")) - RATES.keys()):
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")
    return found


if __name__ == "__main__":
    sys.exit(main())
