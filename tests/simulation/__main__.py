"""`python -m tests.simulation --schedules 10000 [--from N] [--jobs 2]` plays schedules and counts;
`--seed N --trace` plays one and prints all that happens in it, up to the violation."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import secrets
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from simulation.many import play_all, said
from simulation.plans import PROFILES
from simulation.schedule import Outcome, play, totals

CHUNK = 50
SHOWN_MAX = 5


def main() -> int:
    options = _options()
    if options.seed is not None:
        outcome = play(options.seed, profile=options.profile, show=options.trace)
        print(said(outcome, end=not options.trace))
        return 1 if outcome.violations else 0
    first = secrets.randbelow(10**9) if options.first == "random" else int(options.first)
    print(f"schedules {first} to {first + options.schedules - 1}", flush=True)
    seeds = range(first, first + options.schedules)
    chunks = [seeds[at : at + CHUNK] for at in range(0, len(seeds), CHUNK)]
    began = time.perf_counter()
    found: list[Outcome] = []
    with multiprocessing.get_context("fork").Pool(options.jobs) as pool:
        for outcomes in pool.imap_unordered(play_all, chunks):
            found += outcomes
        pool.close()
        pool.join()
    took_s = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    for outcome in sorted((one for one in found if one.violations), key=lambda one: one.seed)[
        :SHOWN_MAX
    ]:
        print(said(outcome))
    counted = {**totals(found), "seconds": round(took_s, 1)}
    counted["schedules/s"] = round(len(found) / took_s, 1)
    counted["CPU ms a schedule"] = round((used.ru_utime + used.ru_stime) / len(found) * 1000, 1)
    print(json.dumps(counted, indent=1))
    return 1 if counted["violations"] else 0


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=_positive, default=1000, metavar="N")
    parser.add_argument("--from", dest="first", default="1", help="the first seed, or `random`")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--trace", action="store_true", help="print what happens")
    parser.add_argument("--profile", choices=list(PROFILES), help="instead of the one drawn")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
