"""Many schedules, one after another."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable

from .schedule import Outcome, collecting_later, play

SCHEDULES = 10_000
"""In the default suite; `RUNFOLD_SCHEDULES` for more or fewer."""

FIRST_SEED = 1_000_000

COLLECT_EVERY = 20
"""Schedules leave cycles behind, and are played without collecting."""


def play_all(seeds: Iterable[int]) -> list[Outcome]:
    found: list[Outcome] = []
    gc.collect()
    gc.freeze()  # so that each collection looks at schedules alone
    try:
        with collecting_later():
            for number, seed in enumerate(seeds):
                found.append(play(seed))
                if number % COLLECT_EVERY == 0:
                    gc.collect()
    finally:
        gc.unfreeze()
    return found


def check_schedules(half: int) -> None:
    """Play a half of the suite's schedules; two tests in two files, for two processes."""
    count = int(os.environ.get("RUNFOLD_SCHEDULES", SCHEDULES)) // 2
    first = FIRST_SEED + (half - 1) * count
    broken = [one for one in play_all(range(first, first + count)) if one.violations]
    assert not broken, "\n\n".join(said(one) for one in broken[:3])


def said(outcome: Outcome, *, end: bool = True) -> str:
    """What came of one; where something is wrong, with how to see it again."""
    lines = [f"seed {outcome.seed} ({outcome.plan.profile}): digest {outcome.digest}"]
    if outcome.violations:
        if end:
            lines.append(outcome.end)
        lines += [f"VIOLATION {text}" for text in outcome.violations]
        lines.append(f"again: python -m tests.simulation --seed {outcome.seed} --trace")
    return "\n".join(lines)
