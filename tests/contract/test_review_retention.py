"""R15 on every store: what a review of purging found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from contract.test_purging import cut_off, done, put, to_purge, types

from journal.ids import RunId
from journal.log import Log
from journal.purging import purge
from journal.retention import FINISHED
from journal.store import Store
from journal.stores.jetstream_listing import Head, Listing

pytestmark = pytest.mark.timeout(60)

each_store = pytest.mark.parametrize(
    "backend", ["memory", "file", "jetstream", "sharded", "model"], indirect=True
)


@each_store
async def test_who_read_a_tombstone_with_what_is_before_it_reads_on_when_that_is_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory shows it anew then, and the run was called damaged."""
    await put(store, "a1", *done("a1"))
    await cut_off(store, monkeypatch)
    log = await Log.read(store, "a1")
    await purge(store, "a1")
    await log.refresh()
    assert log.gone and await types(store) == ["run.purged"]


@each_store
async def test_a_pass_goes_on_behind_a_run(store: Store) -> None:
    for run in ("a1", "b1", "c1"):
        await put(store, run, *done(run))
    assert [run async for run in store.ended(age_s=0, statuses=FINISHED, after=RunId("a1"))] == [
        "b1",
        "c1",
    ]


@pytest.mark.parametrize("backend", ["jetstream", "sharded", "model"], indirect=True)
async def test_of_tombstones_that_are_done_a_pass_reads_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay for ever: each pass of each worker read all of them, 1 GB of two million."""
    read: list[RunId] = []
    page = Listing._page  # pyright: ignore[reportPrivateUsage]

    async def noted(self: Listing, run_ids: Sequence[RunId]) -> dict[RunId, Head]:
        read.extend(run_ids)
        return await page(self, run_ids)

    for run in ("a1", "b1", "c1"):
        await put(store, run, *done(run))
    await purge(store, "b1")
    await cut_off(store, monkeypatch, RunId("c1"))
    monkeypatch.setattr(Listing, "_page", noted)
    assert await to_purge(store) == ["a1", "c1"] and sorted(read) == ["a1", "c1"]
