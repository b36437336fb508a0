"""Runs are spread over P journal streams by a hash that never changes (R74)."""

from __future__ import annotations

from collections import Counter

import pytest

from journal.ids import RunId
from journal.shards import known_hash, named_shards, shard_of, shards_metadata
from journal.stores.jetstream_streams import stream_config
from journal.stores.safety import ServerFacts, assess, joined

SERVERS = (ServerFacts(name="n1", version="2.15.1", sync_always=True),)


@pytest.mark.parametrize(
    ("run", "of_4", "of_16", "of_64"),
    [("order.7", 3, 3, 35), ("a", 3, 15, 47), ("A", 2, 6, 6), ("run-1", 3, 7, 7)],
)
def test_a_run_is_in_the_same_stream_in_every_version(
    run: str, of_4: int, of_16: int, of_64: int
) -> None:
    """The numbers are of coreutils: `printf order.7 | b2sum -l 64`, big-endian, modulo P."""
    found = [shard_of(RunId(run), shards) for shards in (1, 4, 16, 64)]
    assert found == [0, of_4, of_16, of_64]


def test_runs_are_spread_evenly() -> None:
    counts = Counter(shard_of(RunId(f"order-{i}"), 8) for i in range(8_000))
    assert sorted(counts) == list(range(8))
    assert 850 < min(counts.values()) <= max(counts.values()) < 1_150


@pytest.mark.parametrize("text", ["0", "65", "-1", "4.0", " 4", "four", "", "٤", "1" * 5000])
def test_a_number_of_streams_that_is_none_is_not_taken(text: str) -> None:
    assert named_shards({"metadata": {"runfold.shards": text}}) is None


def test_what_a_stream_says_of_itself_is_read_back() -> None:
    for shards in (1, 4, 64):
        config = {"metadata": shards_metadata(shards) | {"_nats.level": "1"}}
        assert (named_shards(config), known_hash(config)) == (shards, True)
    assert named_shards({}) is None and not known_hash({"metadata": None})


def test_what_is_wrong_with_one_journal_stream_is_said_of_it_alone() -> None:
    configs = [stream_config("runfold", 1, shard, 3) for shard in range(3)]
    configs[1]["max_age"] = 5
    for config in configs:
        config["allow_msg_ttl"] = True
    found = joined(
        [
            assess(
                "runfold",
                config,
                shard=shard,
                cluster={"leader": "n1"},
                version="2.15.1",
                servers=SERVERS,
            )
            for shard, config in enumerate(configs)
        ]
    )
    texts = [finding.what for finding in found.findings]
    assert sorted(texts) == [
        "RUNFOLD_JOURNAL_1: records are removed after 5 ns (max_age)",
        "records may carry a time to live (allow_msg_ttl)",
    ]
    assert (found.level, found.facts["servers"]) == ("degraded", ["n1"])
    assert found.facts["stream"] == [f"RUNFOLD_JOURNAL_{shard}" for shard in range(3)]
