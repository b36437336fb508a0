"""Seeded schedules of real workers and bridges over a model server (R77), the first half."""

from __future__ import annotations

import pytest
from simulation.many import check_schedules


@pytest.mark.timeout(900)  # of a machine that has much else to do
def test_whatever_fails_nothing_is_repeated_guessed_or_lost():
    check_schedules(half=1)
