"""`runfold init` makes exactly its streams, and `doctor` says what an ack is worth (R14)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kit.backends import REAL_ONLY
from kit.raw_client import ask
from kit.servers import Cluster, NatsServer

from journal.errors import InvalidId, NotProvisioned, StoreUnavailable
from journal.ids import RunId
from journal.stores import provision as provision_module
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import Difference, inspect, provision, stream_config
from journal.stores.safety import Safety, ServerFacts, assess
from worker.server import EmbeddedServer

STREAM = "RUNFOLD_JOURNAL_0"

SAFE = stream_config("runfold", 1)
ONE = {"leader": "n1"}
THREE = {"leader": "n2", "replicas": [{"name": "n1"}, {"name": "n3"}]}
SYNCED = tuple(
    ServerFacts(name=name, version="2.15.1", sync_always=True) for name in ("n1", "n2", "n3")
)


def judge(
    config: dict[str, Any] = SAFE,
    *,
    cluster: dict[str, Any] = ONE,
    version: str = "2.15.1",
    servers: tuple[ServerFacts, ...] = SYNCED,
) -> Safety:
    return assess("runfold", config, cluster=cluster, version=version, servers=servers)


# ---- init ----------------------------------------------------------------------------------------


async def test_init_makes_exactly_the_settings_of_the_protocol(server: NatsServer) -> None:
    made = await provision(server.url)
    assert made.created and made.stream == STREAM and made.replicas == 1 and not made.differences
    config = (await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}"))["config"]
    metadata = config.pop("metadata")
    assert {key: value for key, value in metadata.items() if not key.startswith("_nats.")} == {
        "runfold.shards": "1",
        "runfold.hash": "blake2b",
    }
    assert config == {
        "name": "RUNFOLD_JOURNAL_0",
        "subjects": ["runfold.journal.0.*"],
        "storage": "file",
        "retention": "limits",
        "discard": "new",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_age": 0,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "num_replicas": 1,
        "duplicate_window": 120_000_000_000,
        "compression": "none",
        "allow_direct": True,
        "mirror_direct": False,
        "allow_atomic": True,
        "allow_msg_ttl": False,
        "allow_rollup_hdrs": False,
        "consumer_limits": {},
        "deny_delete": True,
        "deny_purge": False,
        "sealed": False,
    }


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "RUNFOLD_TASKS",
            {
                "subjects": ["runfold.task.>", "runfold.timer.*"],
                "retention": "workqueue",
                "discard": "old",
                "max_age": 0,
                "allow_rollup_hdrs": True,
                "allow_msg_schedules": True,
            },
        ),
        (
            "RUNFOLD_SIGNALS",
            {
                "subjects": ["runfold.signal.>"],
                "retention": "workqueue",
                "discard": "new",
                "max_age": 0,
                "allow_rollup_hdrs": False,
            },
        ),
        (
            "RUNFOLD_REJECTED",
            {
                "subjects": ["runfold.rejected.>"],
                "retention": "limits",
                "discard": "old",
                "max_age": 30 * 86_400 * 10**9,
                "allow_rollup_hdrs": False,
            },
        ),
    ],
)
async def test_init_makes_the_other_streams_with_the_settings_of_the_protocol(
    server: NatsServer, name: str, wanted: dict[str, Any]
) -> None:
    made = await provision(server.url)
    assert [(each.created, each.differences) for each in made.others] == [(True, ())] * 3
    config = (await ask(server.url, f"$JS.API.STREAM.INFO.{name}"))["config"]
    del config["metadata"]
    assert config == {
        "name": name,
        "storage": "file",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_bytes": -1,
        "max_msgs_per_subject": -1,
        "max_msg_size": -1,
        "num_replicas": 1,
        "duplicate_window": 120_000_000_000,
        "compression": "none",
        "allow_direct": False,
        "mirror_direct": False,
        "allow_msg_ttl": False,
        "consumer_limits": {},
        "deny_delete": False,
        "deny_purge": False,
        "sealed": False,
        **wanted,
    }
    again = await provision(server.url)
    assert [(each.created, each.differences) for each in again.others] == [(False, ())] * 3


async def test_init_adds_what_a_server_with_only_journals_lacks(server: NatsServer) -> None:
    await ask(server.url, f"$JS.API.STREAM.CREATE.{STREAM}", SAFE)
    async with JetStreamStore(server.url) as store:  # that is enough for journals
        with pytest.raises(NotProvisioned, match="RUNFOLD_TASKS"):
            await store.wake(RunId("r"), "a", cause=1)
        made = await provision(server.url)
        assert not made.created
        assert [(each.stream, each.created) for each in made.others] == [
            ("RUNFOLD_TASKS", True),
            ("RUNFOLD_SIGNALS", True),
            ("RUNFOLD_REJECTED", True),
        ]
        await store.wake(RunId("r"), "a", cause=1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("RUNFOLD_TASKS", {"max_msgs": 10}),
        ("RUNFOLD_TASKS", {"max_age": 3_600_000_000_000}),
        ("RUNFOLD_SIGNALS", {"allow_msg_schedules": True, "discard": "old"}),
        ("RUNFOLD_REJECTED", {"max_age": 0}),
    ],
)
async def test_init_reports_other_settings_of_the_other_streams(
    server: NatsServer, name: str, change: dict[str, Any]
) -> None:
    await provision(server.url)
    config = (await ask(server.url, f"$JS.API.STREAM.INFO.{name}"))["config"] | change
    await ask(server.url, f"$JS.API.STREAM.DELETE.{name}")
    assert "error" not in await ask(server.url, f"$JS.API.STREAM.CREATE.{name}", config)
    found = await provision(server.url)
    assert not found.differences
    (differs,) = [each for each in found.others if each.differences]
    named = {difference.setting for difference in differs.differences}
    assert (differs.stream, named - {"allow_rollup_hdrs"}) == (name, set(change))


async def test_init_again_changes_nothing(server: NatsServer) -> None:
    await provision(server.url)
    before = await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}")
    again = await provision(server.url)
    assert not again.created and not again.differences and again.replicas == 1
    after = await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}")
    assert (after["config"], after["created"]) == (before["config"], before["created"])


async def test_two_inits_at_once_make_one_stream(server: NatsServer) -> None:
    made = await asyncio.gather(*(provision(server.url) for _ in range(5)))
    assert not any(each.differences for each in made)
    async with JetStreamStore(server.url):
        pass


async def test_a_different_stream_made_meanwhile_is_reported_too(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = provision_module.look_up
    looked: list[str] = []

    async def one_moment_too_early(connection: Any, stream: str) -> Any:
        looked.append(stream)
        return None if len(looked) == 1 else await real(connection, stream)

    await ask(server.url, f"$JS.API.STREAM.CREATE.{STREAM}", SAFE | {"discard": "old"})
    monkeypatch.setattr(provision_module, "look_up", one_moment_too_early)
    found = await provision(server.url, replicas=1)
    assert not found.created
    assert found.differences == (Difference("discard", "new", "old"),)


async def test_each_namespace_has_its_own_stream(server: NatsServer) -> None:
    for namespace in ("a", "b-1"):
        made = await provision(server.url, namespace=namespace)
        assert made.created and made.stream == f"{namespace.upper()}_JOURNAL_0"
        async with JetStreamStore(server.url, namespace=namespace):
            pass
    with pytest.raises(InvalidId):
        await provision(server.url, namespace="A.b")


@pytest.mark.parametrize(
    "change",
    [
        {"storage": "memory"},
        {"discard": "old"},
        {"max_age": 3_600_000_000_000},
        {"max_msgs": 10},
        {"max_bytes": 1_000_000},
        {"max_msgs_per_subject": 5},
        {"deny_delete": False},
        {"retention": "interest"},
        {"subjects": ["runfold.journal.0.>"]},
        {"allow_direct": False},
        {"allow_atomic": False},
        {"allow_msg_ttl": True},
        {"persist_mode": "async", "allow_atomic": False},
        {"republish": {"src": ">", "dest": "copy.>"}},
        {"metadata": {"runfold.shards": "1", "runfold.hash": "md5"}},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_init_reports_a_different_stream_and_leaves_it_alone(
    server: NatsServer, change: dict[str, Any]
) -> None:
    made = await ask(server.url, f"$JS.API.STREAM.CREATE.{STREAM}", SAFE | change)
    assert "error" not in made
    found = await provision(server.url)
    assert not found.created
    named = {
        difference.setting.removeprefix("metadata runfold.") for difference in found.differences
    }
    assert named == ({"hash"} if "metadata" in change else set(change))
    config = (await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}"))["config"]
    assert config == made["config"]


async def test_three_replicas_asked_of_one_server_are_a_clear_error(server: NatsServer) -> None:
    with pytest.raises(StoreUnavailable, match="replicas") as refused:
        await provision(server.url, replicas=3)
    assert "--replicas 1" in refused.value.hint
    await provision(server.url)
    again = await provision(server.url, replicas=3)
    assert again.differences == (Difference("num_replicas", 3, 1),)


@pytest.mark.cluster
async def test_a_cluster_keeps_three_replicas(cluster: Cluster, namespace: str) -> None:
    made = await provision(",".join(cluster.urls), namespace=namespace)
    assert made.created and made.replicas == 3


# ---- doctor: the judgement -----------------------------------------------------------------------


def test_synced_servers_with_the_settings_of_init_are_safe() -> None:
    assert judge() == Safety(
        level="safe",
        findings=(),
        facts={
            "stream": STREAM,
            "replicas": 1,
            "servers": ["n1"],
            "version": "2.15.1",
            "sync_always": {"n1": True, "n2": True, "n3": True},
        },
    )
    assert judge(stream_config("runfold", 3), cluster=THREE).level == "safe"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("storage", "memory"),
        ("discard", "old"),
        ("retention", "workqueue"),
        ("retention", "interest"),
        ("max_age", 1),
        ("max_msgs", 1_000_000),
        ("max_bytes", 1),
        ("max_msgs_per_subject", 1_000),
        ("deny_delete", False),
        ("deny_delete", None),
        ("persist_mode", "async"),
        ("allow_rollup_hdrs", True),
        ("allow_msg_ttl", True),
        ("allow_msg_schedules", True),
        ("allow_msg_counter", True),
        ("mirror", {"name": "OTHER"}),
        ("sources", [{"name": "OTHER"}]),
        ("republish", {"dest": "x.>"}),
        ("subject_transform", {"src": "a", "dest": "b"}),
        ("subjects", ["runfold.journal.>"]),
        ("subjects", ["runfold.journal.0.*", "more"]),
        ("subjects", ["other.journal.0.*"]),
        ("subjects", []),
    ],
)
def test_each_setting_that_can_lose_an_acknowledged_record_is_degraded(
    setting: str, value: object
) -> None:
    safety = judge(SAFE | {setting: value})
    (finding,) = safety.findings
    assert safety.level == finding.level == "degraded"
    assert f"({setting})" in finding.what
    assert finding.why and finding.fix


@pytest.mark.parametrize("setting", ["max_msgs", "max_bytes", "max_msgs_per_subject"])
@pytest.mark.parametrize("value", [-1, 0, None])
def test_no_limit_is_no_finding(setting: str, value: int | None) -> None:
    assert judge(SAFE | {setting: value}).level == "safe"


def test_a_wildcard_for_more_tokens_is_as_good() -> None:
    assert judge(SAFE | {"subjects": ["runfold.journal.0.>"]}).level == "safe"


@pytest.mark.parametrize("version", ["2.11.9", "2.9.0", "1.4.1"])
def test_an_old_server_is_degraded(version: str) -> None:
    assert [finding.level for finding in judge(version=version).findings] == ["degraded"]
    old = ServerFacts(name="n1", version=version, sync_always=True)
    assert judge(servers=(old,)).level == "degraded"


@pytest.mark.parametrize("version", ["2.12.0", "2.12.0-RC.1", "2.100.0", "3.0.0"])
def test_a_newer_server_is_no_finding(version: str) -> None:
    assert judge(version=version).level == "safe"


def test_a_version_that_is_none_is_unverified() -> None:
    assert judge(version="dev").level == "unverified"


@pytest.mark.parametrize("unsynced", ["n1", "n2", "n3"])
def test_one_replica_without_sync_always_is_degraded(unsynced: str) -> None:
    servers = tuple(
        ServerFacts(name=each.name, version=each.version, sync_always=each.name != unsynced)
        for each in SYNCED
    )
    safety = judge(stream_config("runfold", 3), cluster=THREE, servers=servers)
    (finding,) = safety.findings
    assert safety.level == "degraded" and unsynced in finding.what


def test_replicas_whose_sync_setting_nobody_saw_are_unverified_and_named() -> None:
    safety = judge(stream_config("runfold", 3), cluster=THREE, servers=SYNCED[:1])
    (finding,) = safety.findings
    assert safety.level == finding.level == "unverified"
    assert "n2, n3" in finding.what and "n1" not in finding.what


def test_the_monitoring_port_of_another_server_verifies_nothing() -> None:
    other = ServerFacts(name="elsewhere", version="2.15.1", sync_always=True)
    assert judge(servers=(other,)).level == "unverified"


def test_a_stream_without_a_leader_is_unverified() -> None:
    assert judge(cluster={}).level == "unverified"


def test_degraded_outweighs_unverified_and_both_are_told() -> None:
    safety = judge(SAFE | {"discard": "old"}, servers=())
    assert safety.level == "degraded"
    assert {finding.level for finding in safety.findings} == {"degraded", "unverified"}


# ---- doctor: on servers --------------------------------------------------------------------------


async def test_an_embedded_server_is_safe_once_its_sync_setting_is_seen(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "data") as embedded:
        await provision(embedded.url)
        seen = await inspect(embedded.url, monitor_url=embedded.monitor_url)
        assert (seen.level, seen.findings) == ("safe", ())
        unseen = await inspect(embedded.url)
        assert unseen.level == "unverified"
        assert "--monitor" in unseen.findings[0].fix


@pytest.mark.parametrize("change", [{"max_msgs": 10}, {"retention": "limits"}, None])
async def test_tasks_that_can_be_lost_are_degraded(
    tmp_path: Path, change: dict[str, Any] | None
) -> None:
    async with EmbeddedServer(tmp_path / "data") as embedded:
        await provision(embedded.url)
        name = "RUNFOLD_TASKS"
        config = (await ask(embedded.url, f"$JS.API.STREAM.INFO.{name}"))["config"]
        await ask(embedded.url, f"$JS.API.STREAM.DELETE.{name}")
        if change is not None:
            made = await ask(embedded.url, f"$JS.API.STREAM.CREATE.{name}", config | change)
            assert "error" not in made
        found = await inspect(embedded.url, monitor_url=embedded.monitor_url)
        (finding,) = found.findings
        assert found.level == finding.level == "degraded" and name in finding.what


@REAL_ONLY
async def test_a_server_that_syncs_every_two_minutes_is_degraded(server: NatsServer) -> None:
    await provision(server.url)
    found = await inspect(server.url, monitor_url=server.monitor_url)
    assert found.level == "degraded"
    assert "sync_interval" in found.findings[0].what


@REAL_ONLY
async def test_a_monitoring_port_that_does_not_answer_is_unverified_and_named(
    server: NatsServer,
) -> None:
    await provision(server.url)
    for address in ("http://127.0.0.1:1", "nonsense", server.url.replace("nats", "http")):
        found = await inspect(server.url, monitor_url=address)
        assert found.level == "unverified"
        assert address in found.findings[0].what


async def test_a_server_without_the_stream_is_not_provisioned(server: NatsServer) -> None:
    with pytest.raises(NotProvisioned, match=STREAM):
        await inspect(server.url)


@pytest.mark.cluster
async def test_a_cluster_is_judged_by_all_its_servers(cluster: Cluster, namespace: str) -> None:
    url = ",".join(cluster.urls)
    await provision(url, namespace=namespace)
    monitors = [each.monitor_url for each in cluster.servers]
    one = await inspect(url, namespace=namespace, monitor_url=monitors[0])
    assert {finding.level for finding in one.findings} == {"degraded", "unverified"}
    all_of_them = await inspect(url, namespace=namespace, monitor_url=",".join(monitors))
    assert len(all_of_them.facts["servers"]) == 3
    assert [finding.level for finding in all_of_them.findings] == ["degraded"] * 3
