"""Seeded schedules with purgers beside the workers, bridges and people (R15, R77)."""

from __future__ import annotations

import os

import pytest
from simulation.many import FIRST_SEED, said
from simulation.schedule import play

SCHEDULES = 25
"""In the default suite; `RUNFOLD_PURGE_SCHEDULES` for more or fewer."""


@pytest.mark.timeout(600)
def test_whatever_fails_only_what_has_ended_is_purged_and_nothing_else_is_lost() -> None:
    count = int(os.environ.get("RUNFOLD_PURGE_SCHEDULES", SCHEDULES))
    played = [play(seed, purgers=2) for seed in range(FIRST_SEED, FIRST_SEED + count)]
    broken = [one for one in played if one.violations]
    assert not broken, "\n\n".join(said(one) for one in broken[:3])
    assert sum(one.purged for one in played) > count / 3
