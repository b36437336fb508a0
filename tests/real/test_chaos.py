"""A short chaos soak by a fixed seed (R78). The long ones: `python -m tests.chaos`, .ci/nightly."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.faults import schedule
from chaos.soak import Soak
from chaos.world import Options

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

SEED = 3475
SECONDS = 5.5
PACE = 8.0
KINDS = frozenset(
    {"worker_kill", "worker_stop", "bridge_term", "server_kill", "cut", "stall_out", "drop_acks"}
    | {"duplicate_task"}
)


def test_the_same_seed_draws_the_same_faults_and_leaving_a_kind_out_changes_no_other():
    one = schedule(SEED, 600, kinds=None, cluster=True, pace=1)
    assert one == schedule(SEED, 600, kinds=None, cluster=True, pace=1)
    fewer = schedule(SEED, 600, kinds=KINDS, cluster=True, pace=1)
    assert fewer == [fault for fault in one if fault.kind in KINDS]
    assert {fault.kind for fault in fewer} == KINDS


async def test_runs_end_as_decided_and_nothing_acknowledged_is_lost_under_faults(tmp_path: Path):
    options = Options(
        seed=SEED,
        topology="single",
        seconds=SECONDS,
        workers=3,
        remotes=0,
        bridges=2,
        rate=2.5,
        pace=PACE,
        kinds=KINDS,
        keep=tmp_path,
        quick=True,
        ack_wait_s=1.0,
    )
    result = await Soak(options).run()
    assert result.wrong == []
    assert result.faults.total() >= 15
    assert result.faults["server_kill"] and result.faults["worker_kill"]
    assert result.ended["completed"] >= 5
    assert result.ended["unfinished"] == 0
    assert result.counts["records"] > 100
