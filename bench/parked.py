"""Many parked runs: `python bench/parked.py N [--shards P]`; see runfold/benchmark/parked.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from runfold.benchmark.parked import measure, render


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=int, help="at least 100")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    told = sys.stderr
    found = asyncio.run(
        measure(options.runs, options.shards, lambda text: print(text, file=told, flush=True))
    )
    print(json.dumps(found) if options.json else "\n".join(render(found)))


if __name__ == "__main__":
    main()
