"""Over how many journal streams runs are spread is decided once, and never guessed (R74)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kit.backends import REAL_ONLY
from kit.raw_client import ask
from kit.records import Chain, fill, journal_of, raws
from kit.servers import Cluster, NatsServer

from journal.errors import NotProvisioned, ShardsFixed
from journal.ids import RunId
from journal.shards import shard_of, shards_for, shards_metadata
from journal.stores import provision as provision_module
from journal.stores import stream_lookup
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_headers import EXPECTED
from journal.stores.jetstream_streams import stream_config
from journal.stores.provision import inspect, provision

JOURNALS = [f"RUNFOLD_JOURNAL_{shard}" for shard in range(4)]


async def config_of(server: NatsServer, stream: str) -> dict[str, Any]:
    config: dict[str, Any] = (await ask(server.url, f"$JS.API.STREAM.INFO.{stream}"))["config"]
    return config


async def names(server: NatsServer) -> list[str]:
    found: list[str] = (await ask(server.url, "$JS.API.STREAM.NAMES"))["streams"] or []
    return sorted(name for name in found if "_JOURNAL_" in name)


async def describe(server: NatsServer, stream: str, metadata: dict[str, str]) -> None:
    """Put other metadata on the stream, as somebody with `nats stream edit`."""
    config = await config_of(server, stream)
    kept = {key: value for key, value in config["metadata"].items() if key.startswith("_nats")}
    answer = await ask(
        server.url, f"$JS.API.STREAM.UPDATE.{stream}", config | {"metadata": kept | metadata}
    )
    assert "error" not in answer, answer


async def test_init_makes_the_streams_that_were_asked_for(server: NatsServer) -> None:
    made = await provision(server.url, shards=4)
    assert (made.stream, made.created, made.shards) == (JOURNALS[0], True, 4)
    assert [other.stream for other in made.others[:3]] == JOURNALS[1:]
    assert await names(server) == JOURNALS
    for shard, stream in enumerate(JOURNALS):
        wanted = stream_config("runfold", 1, shard, 4)
        config = await config_of(server, stream)
        assert wanted.items() <= (config | {"metadata": wanted["metadata"]}).items()
        assert wanted["metadata"].items() <= config["metadata"].items()
        assert config["subjects"] == [f"runfold.journal.{shard}.*"]


@pytest.mark.parametrize("first", [1, 4])
async def test_how_many_there_are_can_not_be_changed(server: NatsServer, first: int) -> None:
    await provision(server.url, shards=first)
    before = await names(server)
    for other in {1, 2, 4, 8} - {first}:
        with pytest.raises(ShardsFixed, match=f"RUNFOLD_JOURNAL_0 of {first}"):
            await provision(server.url, shards=other)
    assert await names(server) == before
    for again in (None, first):
        made = await provision(server.url, shards=again)
        assert (made.created, made.shards, made.differences) == (False, first, ())


async def test_each_run_is_in_the_stream_of_its_id(server: NatsServer) -> None:
    await provision(server.url, shards=4)
    async with JetStreamStore(server.url) as store:
        for i in range(12):
            await fill(store, journal_of(2, f"run.{i}"))
    for shard, stream in enumerate(JOURNALS):
        about = {"subjects_filter": ">"}
        info = await ask(server.url, f"$JS.API.STREAM.INFO.{stream}", about)
        ids = [f"run.{i}" for i in range(12) if shard_of(RunId(f"run.{i}"), 4) == shard]
        subjects = {f"runfold.journal.{shard}.{run.replace('.', '~')}": 2 for run in ids}
        assert subjects and info["state"]["subjects"] == subjects


async def test_runs_are_listed_in_the_order_of_their_ids_over_all_streams(
    server: NatsServer,
) -> None:
    await provision(server.url, shards=4)
    async with JetStreamStore(server.url) as store:
        runs = [f"r{i:02}" for i in range(20)]
        for i, run in enumerate(runs):
            chain = Chain(run)
            entry = chain.started()
            status = "waiting" if i % 2 else "running"
            chain.entries[0] = msgspec.structs.replace(entry, status=status)
            await fill(store, chain)
        assert [run async for run in store.runs()] == runs
        assert [run async for run in store.runs(after=RunId("r07"))] == runs[8:]
        heads = [head async for head in store.heads(status=frozenset({"waiting"}))]
        assert heads == [(run, "waiting") for run in runs[1::2]]


async def test_a_message_in_the_stream_of_another_run_is_no_journal(server: NatsServer) -> None:
    """Nobody here puts one there; were it listed, its run would be there twice."""
    await provision(server.url, shards=4)
    run = "run-1"
    other = (shard_of(RunId(run), 4) + 1) % 4
    chain = journal_of(3, run)
    async with JetStreamStore(server.url) as store:
        await fill(store, chain)
        stray = f"runfold.journal.{other}.{run}"
        await ask(server.url, stray, chain.entries[0].raw, {EXPECTED: "0"})
        assert [found async for found in store.runs()] == [run]
        assert raws(await store.load(RunId(run))) == [entry.raw for entry in chain.entries]
        pages = [page async for page in store.journals[other].grown(0)]
        assert [[named for named, _ in page] for page in pages] == [[None]]


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        shards_metadata(2),
        shards_metadata(4) | {"runfold.hash": "md5"},
        {"runfold.shards": "4"},
        {"runfold.shards": "0", "runfold.hash": "blake2b"},
    ],
)
@pytest.mark.parametrize("stream", [JOURNALS[0], JOURNALS[2]])
@REAL_ONLY
async def test_streams_that_do_not_agree_are_not_opened(
    server: NatsServer, stream: str, metadata: dict[str, str]
) -> None:
    await provision(server.url, shards=4)
    await describe(server, stream, metadata)
    with pytest.raises(NotProvisioned, match=r"runfold\.shards is"):
        async with JetStreamStore(server.url):
            pass
    with pytest.raises(NotProvisioned, match=r"runfold\.shards is"):
        await inspect(server.url)
    await describe(server, stream, shards_metadata(4))
    async with JetStreamStore(server.url) as store:
        assert len(store.journals) == 4


async def test_a_stream_that_runs_were_in_is_not_replaced_by_an_empty_one(
    server: NatsServer,
) -> None:
    """Its runs would start anew, and their writes be made again."""
    await provision(server.url, shards=4)
    await ask(server.url, f"$JS.API.STREAM.DELETE.{JOURNALS[3]}")
    with pytest.raises(NotProvisioned, match=f"no stream {JOURNALS[3]}, one of the 4"):
        await provision(server.url)
    with pytest.raises(NotProvisioned, match=f"no stream {JOURNALS[3]}, one of the 4"):
        async with JetStreamStore(server.url):
            pass
    assert await names(server) == JOURNALS[:3]


async def test_nor_is_the_first_one_where_another_was_used(server: NatsServer) -> None:
    await provision(server.url, shards=4)
    run = next(f"r{i}" for i in range(99) if shard_of(RunId(f"r{i}"), 4) == 2)
    async with JetStreamStore(server.url) as store:
        await fill(store, journal_of(2, run))
    for stream in (JOURNALS[0], "RUNFOLD_TASKS"):  # which would tell, too
        await ask(server.url, f"$JS.API.STREAM.DELETE.{stream}")
    for asked in (None, 4):
        with pytest.raises(NotProvisioned, match=f"no stream {JOURNALS[0]}, one of the 4"):
            await provision(server.url, shards=asked)
    assert await names(server) == JOURNALS[1:]


async def test_an_init_that_was_cut_off_is_finished_by_the_next(server: NatsServer) -> None:
    """The first stream is made last: until it is there nobody opens the store."""
    for shard in (3, 2):
        wanted = stream_config("runfold", 1, shard, 4)
        await ask(server.url, f"$JS.API.STREAM.CREATE.{JOURNALS[shard]}", wanted)
    with pytest.raises(NotProvisioned, match="has no stream RUNFOLD_JOURNAL_0"):
        async with JetStreamStore(server.url):
            pass
    with pytest.raises(ShardsFixed, match="RUNFOLD_JOURNAL_2 of 4"):
        await provision(server.url, shards=2)
    made = await provision(server.url)
    assert (made.created, made.shards) == (True, 4)
    assert await names(server) == JOURNALS


async def test_the_stream_that_says_that_all_are_there_is_made_last(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So an init that is cut off leaves nothing that a store opens."""
    made: list[str] = []
    real = provision_module.call

    async def noted(connection: Any, subject: str, payload: bytes) -> Any:
        made.append(subject.removeprefix("$JS.API.STREAM.CREATE."))
        return await real(connection, subject, payload)

    monkeypatch.setattr(provision_module, "call", noted)
    await provision(server.url, replicas=1, shards=4)
    assert [name for name in made if "JOURNAL" in name] == JOURNALS[::-1]


async def test_doctor_judges_all_of_them(server: NatsServer) -> None:
    await provision(server.url, shards=4)
    found = await inspect(server.url)
    assert found.facts["stream"] == JOURNALS
    config = await config_of(server, JOURNALS[1])
    await ask(server.url, f"$JS.API.STREAM.UPDATE.{JOURNALS[1]}", config | {"max_age": 10**12})
    found = await inspect(server.url)
    assert found.level == "degraded"
    assert any(finding.what.startswith("RUNFOLD_JOURNAL_1: ") for finding in found.findings)


async def test_init_picks_more_streams_where_a_record_has_one_replica(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests run over one stream (conftest.py); here `init` picks."""
    monkeypatch.setattr(provision_module, "shards_to_make", stream_lookup.shards_to_make)
    assert (await provision(server.url)).shards == shards_for(1) == 4
    assert (await provision(server.url, replicas=1)).shards == 4
    assert (await provision(server.url, namespace="asked", shards=1)).shards == 1
    assert (await provision(server.url, namespace="asked")).shards == 1, "it keeps what there is"


@pytest.mark.cluster
async def test_init_picks_one_stream_on_a_cluster(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provision_module, "shards_to_make", stream_lookup.shards_to_make)
    made = await provision(cluster.urls[0], namespace=namespace)
    assert (made.replicas, made.shards) == (3, shards_for(3)) == (3, 1)
    alone = await provision(cluster.urls[1], namespace=f"{namespace}-r1", replicas=1)
    assert (alone.replicas, alone.shards) == (1, 4)
