"""Everything works over P journal streams as over one: workers, bridge, CLI, audit (R74)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.cli import Cli
from kit.servers import NatsServer

from journal import doors
from journal.ids import RunId
from journal.shards import shard_of
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.sweep import sweep

RUNS = [f"c{i}" for i in range(6)]


@pytest.fixture
async def sharded(tmp_path: Path, nats_server: NatsServer, namespace: str) -> AsyncIterator[Cli]:
    made = await provision(nats_server.url, namespace=namespace, shards=4)
    assert made.shards == 4
    cli = Cli(tmp_path / "work", nats_server.url, namespace)
    yield cli
    await cli.end()


async def test_runs_of_all_streams_are_run_decided_listed_checked_and_exported(
    sharded: Cli,
) -> None:
    assert {shard_of(RunId(run), 4) for run in RUNS} == {0, 1, 2, 3}
    waiting = [(await sharded.run(run)).json for run in RUNS]
    inbox = (await sharded("inbox", "--json")).json
    assert sorted(ask["run"] for ask in inbox) == RUNS
    for one in waiting:
        assert (await sharded("approve", one["pending"][0]["marker"])).code == 0
    assert [(await sharded.run(run)).code for run in RUNS] == [0] * len(RUNS)
    listed = (await sharded("list", "--json")).json["runs"]
    assert [run["run"] for run in listed] == RUNS
    assert {run["status"] for run in listed} == {"completed"}
    audit = await sharded("check", "--all", "--json")
    assert audit.code == 0, audit
    for run in RUNS:
        shard = shard_of(RunId(run), 4)
        told = await sharded("show", run, "--where")
        prefix, name = sharded.namespace.upper(), sharded.namespace
        wanted = f"stream {prefix}_JOURNAL_{shard}, subject {name}.journal.{shard}.{run}\n"
        assert (told.code, told.out) == (0, wanted)
    for run in RUNS[:3]:
        exported = await sharded("export", run)
        assert exported.code == 0 and f'"run":"{run}"' in exported.out
    assert (await sharded("doctor", "--json")).json["facts"]["stream"] == [
        f"{sharded.namespace.upper()}_JOURNAL_{shard}" for shard in range(4)
    ]


async def test_the_sweep_wakes_runs_of_all_streams_page_after_page(sharded: Cli) -> None:
    async with JetStreamStore(str(sharded.store), namespace=sharded.namespace) as store:
        for run in RUNS:
            await doors.start(store, "clock", "x", run_id=run)  # and no task
        cursor, woken = None, list[RunId]()
        while True:
            done = await sweep(store, after=cursor, runs_max=3, fresh_s=0)
            woken += done.dispatched
            if (cursor := done.cursor) is None:
                break
        assert woken == RUNS


async def test_init_says_that_the_number_is_fixed(sharded: Cli) -> None:
    again = await sharded("init", "--shards", "2", "--json")
    assert (again.code, again.json["error"]["code"]) == (8, "shards_fixed")
    assert (await sharded("init", "--json")).json["shards"] == 4


async def test_init_says_over_how_many_streams_it_spreads_runs_and_why(sharded: Cli) -> None:
    sharded.env["RUNFOLD_NAMESPACE"] = f"{sharded.namespace[:20]}-new"
    made = await sharded("init")
    assert "spread over 4 journal stream(s), for good: for one server" in made.out
    assert "spread" not in (await sharded("init")).out
    sharded.env["RUNFOLD_NAMESPACE"] = f"{sharded.namespace[:20]}-two"
    made = await sharded("init", "--shards", "2")
    assert "spread over 2 journal stream(s), for good: as asked for" in made.out
