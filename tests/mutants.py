"""Remove each guard once and show which test notices (R79).

    python tests/mutants.py             all; exit code 1 if one survives
    python tests/mutants.py NAME …      these
    python tests/mutants.py --table     the tables of docs/guards.md

A mutant is one piece of text in one file, replaced in a copy of the tree. Its test passes on the
untouched copy and must fail on the mutant, or hang. The guards stand in mutation/guards.py.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from mutation.guards import MUTANTS, Mutant, tables
from mutation.nursery import Nursery
from mutation.tree import copied_tree, written

AT_ONCE = 2
"""So many copies are worked on at once."""


class Bench(NamedTuple):
    """A copy of the tree, and the process that runs tests in it."""

    tree: Path
    nursery: Nursery


def failing(bench: Bench, tests: Sequence[str], *, untouched: bool = False) -> str:
    """The first test that fails, empty if none; SystemExit where none ran at all."""
    cpu_s = 240 if untouched else 10
    ran = bench.nursery.run(tests, cpu_s=cpu_s, keep=untouched)
    match ran.code:
        case 0:
            return ""
        case 1:
            return ran.failed or "?"
        case None:
            return f"{tests[0]} (hung)"
        case _:
            raise SystemExit(f"{' '.join(tests)} did not run:\n{ran.out}")


def killer(bench: Bench, mutant: Mutant) -> str:
    """The test that fails on the mutant, empty if it survives."""
    path = bench.tree / mutant.file
    with written(path, path.read_text(encoding="utf-8").replace(mutant.old, mutant.new)):
        return failing(bench, [mutant.test])


def check_texts(mutants: Sequence[Mutant], tree: Path) -> None:
    counts = {m: (tree / m.file).read_text(encoding="utf-8").count(m.old) for m in mutants}
    wrong = [f"{m.name}: {n} × in {m.file}" for m, n in counts.items() if n != 1]
    if wrong:
        raise SystemExit("a text must stand once:\n" + "\n".join(wrong))


def check_untouched(benches: Sequence[Bench], tests: Sequence[str]) -> None:
    """Each bench runs its share: what it compiles for that it need not compile again."""
    shares = [tests[n :: len(benches)] for n in range(len(benches))]

    def failed(bench: Bench, share: Sequence[str]) -> str:
        return failing(bench, share, untouched=True) if share else ""

    with ThreadPoolExecutor(len(benches)) as pool:
        for test in pool.map(failed, benches, shares):
            if test:
                raise SystemExit(f"{test} fails without any mutation")


def survivors_of(mutants: Sequence[Mutant], benches: Sequence[Bench]) -> list[str]:
    free: SimpleQueue[Bench] = SimpleQueue()
    for bench in benches:
        free.put(bench)

    def tried(mutant: Mutant) -> str:
        bench = free.get()
        try:
            return killer(bench, mutant)
        finally:
            free.put(bench)

    survivors: list[str] = []
    with ThreadPoolExecutor(len(benches)) as pool:
        for mutant, test in zip(mutants, pool.map(tried, mutants), strict=True):
            print(f"{'killed  ' if test else 'SURVIVED'} {mutant.name:<28} {test}", flush=True)
            if not test:
                survivors.append(mutant.name)
    return survivors


def main() -> int:
    if "--table" in sys.argv:
        print(tables())
        return 0
    names = set(sys.argv[1:])
    if unknown := names - {mutant.name for mutant in MUTANTS}:
        raise SystemExit(f"no such guard: {', '.join(sorted(unknown))}\n{__doc__}")
    wanted = [m for m in MUTANTS if not names or m.name in names]
    tests = list(dict.fromkeys(m.test for m in wanted))
    with ExitStack() as stack:
        trees = [stack.enter_context(copied_tree()) for _ in range(AT_ONCE)]
        check_texts(wanted, trees[0])
        benches = [Bench(tree, stack.enter_context(Nursery(tree, tests))) for tree in trees]
        check_untouched(benches, tests)
        survivors = survivors_of(wanted, benches)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu_s = sum(usage.ru_utime + usage.ru_stime for usage in used)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} guards: their removal is noticed")
    print(f"{cpu_s:.0f} s of CPU time")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
