"""Observers are told of each record that a process appended, once, though the run was taken over
while its acknowledgement was lost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from simulation import schedule
from simulation.world import World

from journal.log import Log
from journal.records import Record

TAKEN_OVER = (900142, 900354, 900359)
"""Seeds: the heartbeat finds the newer claim while the append before it is still being settled."""


@pytest.mark.parametrize("seed", TAKEN_OVER)
def test_each_record_is_told_once_where_no_process_ends(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    told: Counter[str] = Counter()
    stored: list[str] = []
    tell, look = Log._tell, schedule.violations

    def telling(self: Log, record: Record) -> None:
        told[record.id] += 1
        tell(self, record)

    def looking(world: World) -> Any:
        stored.extend(one.id for run in world.runs() for one in world.records(run))
        return look(world)

    monkeypatch.setattr(Log, "_tell", telling)
    monkeypatch.setattr(schedule, "violations", looking)
    assert not schedule.play(seed).violations
    assert stored and told == Counter(stored)
