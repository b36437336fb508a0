"""What a second reading of running for real found in the journal streams (R74)."""

from __future__ import annotations

import pytest
from kit.raw_client import ask
from kit.records import fill, journal_of
from kit.servers import NatsServer

from journal.errors import NotProvisioned
from journal.ids import RunId
from journal.shards import shard_of
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision


@pytest.mark.parametrize("shards", [1, 4])
async def test_the_first_stream_is_not_made_anew_though_no_run_was_in_another(
    server: NatsServer, shards: int
) -> None:
    """The stream of tasks is made behind all of them: where it is, they were."""
    await provision(server.url, shards=shards)
    run = next(f"r{i}" for i in range(99) if shard_of(RunId(f"r{i}"), shards) == 0)
    async with JetStreamStore(server.url) as store:
        await fill(store, journal_of(2, run))
    await ask(server.url, "$JS.API.STREAM.DELETE.RUNFOLD_JOURNAL_0")
    for asked in (None, shards):
        with pytest.raises(NotProvisioned, match="no stream RUNFOLD_JOURNAL_0, "):
            await provision(server.url, shards=asked)
    for stream in ("TASKS", *(f"JOURNAL_{shard}" for shard in range(1, shards))):
        await ask(server.url, f"$JS.API.STREAM.DELETE.RUNFOLD_{stream}")
    assert (await provision(server.url, shards=2)).shards == 2  # to begin with nothing
