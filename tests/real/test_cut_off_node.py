"""A server of the cluster that reaches no other one, and answers its clients all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.partition import SplitCluster
from kit.waiting import eventually

from journal.errors import StoreUnavailable
from journal.fleet import Fleet
from journal.stores import jetstream_read
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

pytestmark = [pytest.mark.real, pytest.mark.cluster]


@pytest.fixture
async def split(tmp_path: Path) -> AsyncIterator[SplitCluster]:
    split = await SplitCluster.start(tmp_path)
    yield split
    await split.stop()


async def test_a_leader_that_was_cut_off_lists_no_runs_rather_than_old_ones(
    split: SplitCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check --all` through it passed over a run that the others had begun (found by the demo)."""
    made = await provision(",".join(split.cluster.urls))
    leader = await split.cluster.leader_of(made.stream)
    others = ",".join(server.url for server in split.servers if server is not leader)
    async with JetStreamStore(leader.url) as cut_off, JetStreamStore(others) as store:
        fleet = Fleet(store, by="test")
        await fleet.start("desk", None, run_id="before")
        split.cut_off(leader)

        async def begun() -> bool:
            try:
                await fleet.start("desk", None, run_id="meanwhile")
            except StoreUnavailable:  # an election goes on
                return False
            return True

        await eventually(begun, 60)
        monkeypatch.setattr(jetstream_read, "READ_BUDGET_S", 1.0)
        with pytest.raises(StoreUnavailable, match="cut off from the others"):
            [run async for run in cut_off.runs()]
        assert [run async for run in store.runs()] == ["before", "meanwhile"]
