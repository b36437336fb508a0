"""Each NATS role of deploy/nats does its work, and nothing else (R66). With that very file, and
with several journal streams; with one, tests/cases/test_ur_bridge_auth.py."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.guarded import (
    DEPLOY,
    JOURNALS,
    SHARDS,
    STREAMS,
    WAIT_S,
    Guarded,
    certificates,
    cluster_node,
    environ,
    free_ports,
    guarded_cluster,
    guarded_server,
)
from kit.raw_client import ask
from kit.servers import Cluster, NatsServer, monitor
from kit.waiting import eventually
from nats.js.errors import BadRequestError

from journal import doors, purging
from journal.errors import PermissionDenied, RunNotFound, StaleSignal, StoreUnavailable
from journal.fleet import Fleet
from journal.ids import RunId, subject_token
from journal.peers import Peer, hello, read_hello
from journal.records import Signal
from journal.shards import shard_of
from journal.stores.jetstream import JetStreamStore
from journal.stores.nats_address import inbox_prefix
from journal.stores.provision import provision
from journal.terms import Complete, Continue, Next
from runfold.diagnosis import diagnose
from worker.agent import turn
from worker.context import Call, Context
from worker.runner import run
from worker.service import Worker
from worker.tools import UNSAFE, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@turn("asker")
async def asker(ctx: Context) -> Next:
    """A turn, an approval, a write; waits for an input at last."""

    async def act(call: ToolCall) -> str:
        return "done"

    if ctx.load_checkpoint() is None:
        await ctx.tool(Call(name="act", input=None, fn=act, replay=UNSAFE, approval="May it?"))
        return Continue(state=1, until_input=True)
    return Complete([one.content for one in await ctx.place_inputs("steer")])


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("guarded")
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ(folder).items():
            patch.setenv(name, value)
        server = loop.run_until_complete(guarded_server(folder))
    yield server
    loop.run_until_complete(server.stop())
    loop.close()


@pytest.fixture
async def guarded(started: NatsServer) -> Guarded:
    found = Guarded(started)
    await provision(found.url("admin"), shards=SHARDS)
    return found


async def until(fleet: Fleet, run: str, status: str) -> Any:
    async def there() -> Any:
        found = await fleet.get(run)
        return found if found.status == status else None

    return await eventually(there, WAIT_S, what=f"{run} is {status}")


@pytest.mark.parametrize(
    ("urls", "prefix"),
    [
        (["nats://bob:pw@h"], "_INBOX.ns.bob"),
        (["nats://bob:pw@h", "bob:other@i:4223"], "_INBOX.ns.bob"),
        (["nats://bob:pw@h", "nats://joe:pw@i"], "_INBOX.ns"),
        (["nats://h:4222"], "_INBOX.ns"),
        (["nats://s3cr3t-token@h"], "_INBOX.ns"),
        (["nats://a.b:pw@h"], "_INBOX.ns"),
        (["nats://%3E:pw@h"], "_INBOX.ns"),
    ],
)
def test_answers_come_to_an_inbox_of_the_users_own_and_no_token_stands_in_it(
    urls: list[str], prefix: str
) -> None:
    assert inbox_prefix(urls, "ns") == prefix


async def test_the_example_syncs_each_write(guarded: Guarded) -> None:
    varz = await monitor(guarded.server.monitor_url, "varz")
    assert varz["jetstream"]["config"]["sync_always"] is True
    log = guarded.server.log()
    assert "Server is ready" in log and "secret" not in log


async def test_each_role_does_its_work(guarded: Guarded) -> None:
    await all_work(guarded)


@pytest.mark.timeout(120)
async def test_each_role_does_its_work_in_a_cluster_and_no_answer_goes_astray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The roles at different servers, three replicas; nodes and clients talk by TLS."""
    cluster = await guarded_cluster(tmp_path, monkeypatch)
    guarded = Guarded(*cluster.servers)
    try:

        async def provisioned() -> bool:
            try:
                return bool(await provision(guarded.url("admin"), shards=SHARDS))
            except StoreUnavailable:  # no leader yet
                return False

        await eventually(provisioned, 60)
        await all_work(guarded)
        for role, asked in TRICKS.items():
            await no_trick_works(guarded, role, asked)
        await no_task_goes_astray(guarded)
        await no_other_node_joins(cluster, tmp_path, monkeypatch)
    finally:
        await cluster.stop()


async def no_other_node_joins(cluster: Cluster, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Without TLS, with another password, with a certificate of another authority."""
    routes = os.environ["RUNFOLD_NATS_ROUTES"]
    strangers = [await cluster_node(folder, "n4", free_ports(1)[0], patch, tls=False)]
    try:
        patch.setenv("RUNFOLD_NATS_ROUTES", routes.replace("secret", "guess"))
        strangers.append(await cluster_node(folder, "n5", free_ports(1)[0], patch))
        patch.setenv("RUNFOLD_NATS_ROUTES", routes)
        for name, value in certificates(folder / "others").items():
            patch.setenv(name, value)
        patch.setenv("RUNFOLD_TLS_CA", str(folder / "certs" / "ca.pem"))
        strangers.append(await cluster_node(folder, "n6", free_ports(1)[0], patch))
        member = cluster.servers[0]
        for reason in (
            "not look like a TLS handshake",
            "authentication error",
            "unknown authority",
        ):
            await eventually(lambda reason=reason: reason in member.log(), what=reason)
        for stranger in strangers:
            assert (await monitor(stranger.monitor_url, "routez"))["num_routes"] == 0
        found = await monitor(member.monitor_url, "routez")
        assert {route["remote_name"] for route in found["routes"]} == {"n2", "n3"}
    finally:
        for stranger in strangers:
            await stranger.stop()


async def test_another_namespace_is_the_same_file_with_another_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name.replace("RUNFOLD", "ACME"), value)
    conf = (DEPLOY / "roles.conf").read_text().replace("runfold", "acme")
    server = await NatsServer.start(tmp_path, extra_conf=conf.replace("RUNFOLD", "ACME"))
    try:
        urls = {role: Guarded(server).url(role) for role in ("admin", "worker", "auditor")}
        await provision(urls["admin"], namespace="acme")
        async with JetStreamStore(urls["worker"], namespace="acme") as store:
            await doors.start(store, "nobody", None, run_id="r")
        async with JetStreamStore(urls["auditor"], namespace="acme") as store:
            assert (await doors.state(store, "r")).status == "running"
    finally:
        await server.stop()


async def all_work(guarded: Guarded) -> None:
    """A run is started by the bridge, worked by the worker, approved by alice, told something by
    ops, and watched by the auditor."""
    async with guarded.worker(asker), guarded.bridge(), guarded.store("auditor") as looking:
        auditor = Fleet(looking)
        async with guarded.store("bridge") as store:
            assert (await Fleet(store, by="alice").start("asker", None, run_id="o.1")).created
            assert len(await Fleet(store).workers()) == 1
        followed = asyncio.create_task(collected(auditor, "o.1"))
        marker = (await until(auditor, "o.1", "awaiting_approval")).outcome.pending[0].marker
        assert [one.marker for one in await auditor.inbox()] == [marker]
        workers = await auditor.workers()
        assert [one["agents"][0]["name"] for one in workers] == ["asker"]
        assert (await diagnose(looking, workers, print)).found == ()
        async with guarded.plain("alice") as alice, guarded.plain("ops") as ops:
            subject = "runfold.api.as.alice.signals.o.1.approve"
            reply = await alice.client.request(subject, json.dumps({"marker": marker}).encode(), 5)
            assert json.loads(reply.data)["result"] == "applied"
            await until(auditor, "o.1", "waiting")
            await ops.client.publish("runfold.signal.o.1.input", b'{"content": "hi"}')
            await ops.client.publish("runfold.signal.o.1.input", b"{")
            await ops.client.flush()
            await until(auditor, "o.1", "completed")
            reply = await ops.client.request("$SRV.PING.runfold-api-runfold", b"", 5)
            assert json.loads(reply.data)["name"] == "runfold-api-runfold"
            assert alice.errors == ops.errors == []
        records = await asyncio.wait_for(followed, WAIT_S)
        said = {one.name: one.by for one in records if isinstance(one, Signal)}
        assert said == {"approve": "alice"}
        assert [run.run_id async for run in auditor.list()] == ["o.1"]
        await eventually(looking.rejected.latest)
        assert [one.code for one in await looking.rejected.latest()] == ["bad_payload"]
        assert (await looking.signals.backlog()).waiting == 0
    await keeper_keeps(guarded)


async def keeper_keeps(guarded: Guarded) -> None:
    """The finished run is removed; one that goes on is not, and that is the product's doing, not
    the server's: the role may purge whatever it likes of a journal stream."""
    async with guarded.store("keeper") as store:
        assert (await doors.state(store, "o.1")).status == "completed"
        await purging.purge(store, "o.1")
        with pytest.raises(RunNotFound, match="purged"):
            await doors.state(store, "o.1")
        await doors.start(store, "nobody", None, run_id="o.2")
        with pytest.raises(StaleSignal):
            await purging.purge(store, "o.2")
        subject = f"runfold.journal.{shard_of(RunId('o.2'), SHARDS)}.o~2"
    async with guarded.plain("keeper") as keeper:
        request = json.dumps({"filter": subject}).encode()
        purge = f"$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_{shard_of(RunId('o.2'), SHARDS)}"
        answer = await keeper.client.request(purge, request, 5)
        assert json.loads(answer.data)["purged"] == 1
        assert keeper.errors == []


async def test_each_role_does_its_work_with_a_client_that_knows_nothing_of_accounts(
    guarded: Guarded,
) -> None:
    """nats-py as it comes: what a role asks of JetStream and hears of others goes as it would in
    one account."""
    expecting = {"Nats-Expected-Last-Subject-Sequence": "0"}
    async with (
        guarded.worker(asker),
        guarded.plain("worker") as worker,
        guarded.plain("bridge") as bridge,
        guarded.plain("auditor") as auditor,
        guarded.plain("ops") as ops,
        guarded.store("admin") as admin,
    ):
        heard = [await auditor.client.subscribe(f"runfold.{kind}.*") for kind in HEARD]
        await auditor.client.flush()
        js = worker.client.jetstream()
        ack = await js.publish("runfold.journal.0.plain", b"{}", headers=expecting)
        with pytest.raises(BadRequestError):
            await js.publish("runfold.journal.0.plain", b"{}", headers=expecting)
        await js.publish("runfold.task.asker.plain", b"no task")
        await worker.client.publish("runfold.live.plain", b"He")
        assert [(await one.next_msg(5)).data for one in heard] == [b"{}", b"He"]
        found = await auditor.client.jetstream().get_msg("RUNFOLD_JOURNAL_0", ack.seq, direct=True)
        assert found.data == b"{}"
        assert (await auditor.client.jetstream().stream_info("RUNFOLD_TASKS")).state.consumer_count
        await ops.client.jetstream().publish("runfold.signal.plain.cancel", b"{}")
        pull = await bridge.client.jetstream().pull_subscribe_bind("bridge", "RUNFOLD_SIGNALS")
        (signal,) = await pull.fetch(1, timeout=5)
        assert signal.subject == "runfold.signal.plain.cancel"
        await signal.ack_sync()
        await bridge.client.jetstream().publish("runfold.rejected.plain.cancel", b"{}")
        assert len(await Fleet(admin).workers()) == 1
        assert [one.errors for one in (worker, bridge, auditor, ops)] == [[]] * 4
    await ask(guarded.url("admin"), "$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_0")
    await ask(guarded.url("admin"), "$JS.API.STREAM.PURGE.RUNFOLD_REJECTED")


HEARD = ("journal.0", "live")


async def collected(fleet: Fleet, run: str) -> list[Any]:
    return [record async for record in fleet.follow(run)]


PURGES = tuple(f"$JS.API.STREAM.PURGE.RUNFOLD_{name}" for name in JOURNALS)
HARM = (
    "$JS.API.STREAM.DELETE.RUNFOLD_JOURNAL_0",
    "streams.$JS.API.STREAM.DELETE.RUNFOLD_JOURNAL_3",
    "$JS.API.STREAM.UPDATE.RUNFOLD_JOURNAL_0",
    "$JS.API.STREAM.CREATE.OTHER",
    "$JS.API.STREAM.MSG.DELETE.RUNFOLD_JOURNAL_0",
    "$JS.API.STREAM.PURGE.RUNFOLD_TASKS",
    "$JS.API.STREAM.PURGE.RUNFOLD_SIGNALS",
    "$JS.API.STREAM.PURGE.RUNFOLD_REJECTED",
    "$JS.API.STREAM.RESTORE.RUNFOLD_JOURNAL_0",
    "$JS.API.STREAM.LEADER.STEPDOWN.RUNFOLD_JOURNAL_0",
    "$JS.API.CONSUMER.CREATE.RUNFOLD_JOURNAL_0.x",
    "$JS.API.CONSUMER.CREATE.RUNFOLD_JOURNAL_0",
    "$JS.API.CONSUMER.DURABLE.CREATE.RUNFOLD_JOURNAL_0.x",
    "$JS.API.CONSUMER.CREATE.RUNFOLD_SIGNALS.x",
    "$JS.API.CONSUMER.DELETE.RUNFOLD_SIGNALS.bridge",
    "$JS.API.CONSUMER.DELETE.RUNFOLD_TASKS.asker",
    "$JS.API.META.LEADER.STEPDOWN",
)
WRITES = ("runfold.journal.0.r", "runfold.task.asker.r", "runfold.timer.r", "runfold.rejected.r.x")
READS = (
    "$JS.API.STREAM.MSG.GET.RUNFOLD_JOURNAL_0",
    "$JS.API.DIRECT.GET.RUNFOLD_JOURNAL_0",
    "$JS.API.STREAM.INFO.RUNFOLD_JOURNAL_0",
    "$JS.API.STREAM.SNAPSHOT.RUNFOLD_JOURNAL_0",
    "$JS.API.CONSUMER.MSG.NEXT.RUNFOLD_TASKS.asker",
    "$JS.API.CONSUMER.MSG.NEXT.RUNFOLD_SIGNALS.bridge",
    "$JS.ACK.RUNFOLD_SIGNALS.bridge.1.1.1.1.0",
)
OTHERS = (
    "$JS.API.STREAM.INFO.RUNFOLD_SIGNALS",
    "$JS.API.STREAM.MSG.GET.RUNFOLD_SIGNALS",
    "$JS.API.DIRECT.GET.RUNFOLD_SIGNALS",
    "$JS.API.STREAM.MSG.GET.RUNFOLD_REJECTED",
    "$JS.API.DIRECT.GET.RUNFOLD_REJECTED",
)
SIGNAL, REQUEST = "runfold.signal.r.approve", "runfold.api.signals.r.approve"
SIGNAL_AS, REQUEST_AS = "runfold.signal.as.bob.r.approve", "runfold.api.as.bob.signals.r.approve"
PEER = "runfold.peer"
"""Where workers say hello: a forged one costs questions."""

PRIVATE = (
    "runfold.journal.0.>",
    "runfold.journal.*.*",
    "runfold.signal.>",
    "runfold.api.>",
    "_INBOX.>",
    ">",
)
FORBIDDEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "worker": (
        (
            *(*PURGES, *HARM, SIGNAL, SIGNAL_AS, REQUEST_AS, "runfold.rejected.r.x"),
            *(*READS[3:4], *READS[5:], *OTHERS, "_INBOX.runfold.alice.x", "_INBOX.runfold.admin.x"),
        ),
        ("runfold.signal.>", "runfold.api.>", "_INBOX.runfold.alice.>", ">"),
    ),
    "bridge": (
        (*PURGES, *HARM, SIGNAL, SIGNAL_AS, REQUEST_AS, READS[3], PEER, "_INBOX.runfold.alice.x"),
        ("runfold.signal.>", PEER, "_INBOX.runfold.alice.>", "_INBOX.>", ">"),
    ),
    "ops": (
        (
            *(*PURGES, *HARM, *WRITES, *READS, SIGNAL_AS, REQUEST_AS),
            *("runfold.notice.r", "runfold.workers", PEER),
        ),
        (*PRIVATE, "_INBOX.runfold.alice.>", "runfold.live.r", PEER),
    ),
    "alice": (
        (
            *(*PURGES, *HARM, *WRITES, *READS, SIGNAL, REQUEST, SIGNAL_AS, REQUEST_AS),
            *("runfold.notice.r", PEER),
        ),
        (*PRIVATE, "_INBOX.runfold.ops.>", PEER),
    ),
    "auditor": (
        (
            *(*PURGES, *HARM, *WRITES, *READS[3:], SIGNAL, SIGNAL_AS, REQUEST, REQUEST_AS),
            *("runfold.live.r", "runfold.notice.r", "runfold.key.k", PEER, "_INBOX.runfold.ops.x"),
        ),
        ("runfold.signal.>", "runfold.api.>", PEER, "_INBOX.runfold.ops.>", ">"),
    ),
    "keeper": (
        (
            *(*HARM, *WRITES[2:], *READS[3:], *OTHERS, SIGNAL, SIGNAL_AS, REQUEST, REQUEST_AS),
            *("runfold.live.r", "runfold.worker.w", "runfold.workers", "runfold.key.k", PEER),
            "_INBOX.runfold.worker.x",
        ),
        (*PRIVATE, "runfold.worker.*", "runfold.workers", "_INBOX.runfold.worker.>", "$SRV.>"),
    ),
}


@pytest.mark.parametrize("role", list(FORBIDDEN))
async def test_a_role_does_nothing_else(guarded: Guarded, role: str) -> None:
    before = await guarded.state()
    publish, subscribe = FORBIDDEN[role]
    async with guarded.plain(role) as plain:
        for subject in publish:
            await plain.denied(subject, {})
        for subject in subscribe:
            await plain.deaf(subject)
    assert await guarded.state() == before


async def test_workers_hear_of_each_other_and_nobody_else_says_hello(guarded: Guarded) -> None:
    async with guarded.plain("worker") as other:
        heard = await other.client.subscribe(PEER)
        await other.client.flush()
        async with guarded.worker(asker):
            greeted = read_hello((await heard.next_msg(5)).data)
            assert greeted is not None and greeted.agents == ("asker",)
            answer = await other.client.request(PEER, hello(Peer("other", ("asker",))), 5)
            assert read_hello(answer.data) == greeted
        assert other.errors == []


async def test_a_worker_with_the_permissions_of_before_works_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    server = await guarded_server(tmp_path, edits={f', "{PEER}"': ""})
    try:
        guarded = Guarded(server)
        await provision(guarded.url("admin"))
        async with guarded.worker(asker), guarded.store("bridge") as store:
            await Fleet(store).start("asker", None, run_id="r")
            await until(Fleet(store), "r", "awaiting_approval")
            await eventually(lambda: "runfold.peer" in caplog.text)
        assert "wait for the ack wait" in caplog.text
    finally:
        await server.stop()


async def test_forged_schedules_and_rollups_of_a_signal_do_nothing(guarded: Guarded) -> None:
    """A message schedule ignores publish permissions (nats-server 2.15.1): so none on SIGNALS."""
    before = await guarded.state()
    async with guarded.plain("ops") as ops:
        for headers in (
            {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": SIGNAL_AS},
            {"Nats-Rollup": "all"},
        ):
            reply = await ops.client.request(SIGNAL, b"{}", 5, headers=headers)
            assert "error" in json.loads(reply.data), reply.data
    assert await guarded.state() == before


async def test_the_product_says_what_a_role_may_not(guarded: Guarded) -> None:
    for role in ("ops", "alice"):
        with pytest.raises(PermissionDenied):
            async with guarded.store(role):
                raise AssertionError("opened")
    async with guarded.store("auditor") as store:
        with pytest.raises(PermissionDenied):
            await Fleet(store).start("asker", None, run_id="by.auditor")
    for role in ("worker", "bridge"):
        async with guarded.store(role) as store:
            await Fleet(store).start("other", None, run_id=f"by.{role}")
            await doors.signal(store, f"by.{role}", "cancel", {})
            await store.load((await doors.state(store, f"by.{role}")).run_id)
            with pytest.raises(PermissionDenied):
                await store.trim((await doors.state(store, f"by.{role}")).run_id, before=2)


async def test_an_admin_works_no_runs_for_workers_could_not_hear_that_it_does(
    guarded: Guarded,
) -> None:
    """They ask who holds a run in their own account; who does not answer is taken for gone."""
    with pytest.raises(PermissionDenied, match=r"runfold\.worker\."):
        await Worker(guarded.url("admin"), [asker]).serve()
    async with guarded.store("admin") as store:
        with pytest.raises(PermissionDenied, match=r"runfold\.worker\."):
            await run(store, asker, "by.admin", "hi")


# ---- answers that are sent elsewhere -------------------------------------------------------------

JOURNAL_READ = ("$JS.API.DIRECT.GET.RUNFOLD_JOURNAL_0", b'{"seq": 999999}')  # an empty answer
JOURNAL_INFO = ("$JS.API.STREAM.INFO.RUNFOLD_JOURNAL_0", b"")
PULL = ("$JS.API.CONSUMER.MSG.NEXT.RUNFOLD_TASKS.asker", b'{"no_wait": true}')  # an empty answer
TRICKS: dict[str, tuple[tuple[str, bytes], ...]] = {
    "ops": (
        ("runfold.signal.x.cancel", b"{}"),
        ("runfold.api.signals.x.cancel", b"{}"),
        ("$SRV.PING", b""),
    ),
    "alice": (
        ("runfold.signal.as.alice.x.cancel", b"{}"),
        ("runfold.api.as.alice.signals.x.cancel", b"{}"),
        ("$SRV.PING", b""),
    ),
    "auditor": (JOURNAL_READ, JOURNAL_INFO, ("runfold.workers", b"")),
    "worker": (JOURNAL_READ, JOURNAL_INFO, PULL, ("runfold.task.nobody.x", b"")),
    "bridge": (JOURNAL_READ, JOURNAL_INFO, PULL, ("runfold.rejected.x.cancel", b"")),
    "keeper": (JOURNAL_READ, JOURNAL_INFO, ("runfold.task.nobody.x", b"")),
}
"""What each role may ask. nats-server 2.15.1 checks no permission on where it wants the answer."""

STORED = {"task": "TASKS", "rejected": "REJECTED", "signal": "SIGNALS"}

ASTRAY = (
    "runfold.journal.SHARD.victim",
    "runfold.task.nobody.victim",
    "runfold.rejected.victim.cancel",
    "runfold.signal.victim.cancel",
    "runfold.signal.as.bob.victim.cancel",
    "runfold.api.as.bob.signals.victim.cancel",
    "$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_SHARD",
    "$JS.API.STREAM.DELETE.RUNFOLD_TASKS",
    "$JS.API.CONSUMER.DELETE.RUNFOLD_SIGNALS.bridge",
    "streams.$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_SHARD",
    "$JS.ACK.RUNFOLD_SIGNALS.bridge.1.1.1.1.0",
)


@pytest.mark.parametrize("role", list(TRICKS))
async def test_no_answer_is_stored_or_obeyed_wherever_it_is_sent(
    guarded: Guarded, role: str
) -> None:
    await no_trick_works(guarded, role, TRICKS[role])


async def no_trick_works(guarded: Guarded, role: str, asked: tuple[tuple[str, bytes], ...]) -> None:
    """What is asked for is there afterwards, and nothing that an answer did. A worker answers."""
    run = RunId(f"victim.{role}")
    shard = str(shard_of(run, SHARDS))
    async with (
        guarded.worker(asker),
        guarded.answering(),
        guarded.store("bridge") as store,
        guarded.plain(role) as plain,
    ):
        await doors.start(store, "nobody", None, run_id=run)
        before = await guarded.state()
        expected = {name: before[name][1] for name in STREAMS}
        for reply in ASTRAY:
            target = reply.replace("victim", subject_token(run)).replace("SHARD", shard)
            for subject, payload in asked:
                await plain.tell(subject, payload, target)
        for subject, payload in asked:  # all of it has been done when these are answered
            await plain.client.request(subject, payload, timeout=5)
            if stream := STORED.get(subject.split(".")[1]):
                # nats-server 2.15.1 itself refuses a client's $JS.ACK as a reply subject.
                expected[stream] += len(ASTRAY)
        after = await guarded.state()
        assert {name: after[name][1] for name in STREAMS} == expected
        assert {name: after[name] for name in JOURNALS} == {name: before[name] for name in JOURNALS}
        assert (await doors.state(store, run)).status == "running"
        assert all("publish with reply of" in error for error in plain.errors), plain.errors
    for stream in ("SIGNALS", "REJECTED"):
        await ask(guarded.url("admin"), f"$JS.API.STREAM.PURGE.RUNFOLD_{stream}")


@pytest.mark.parametrize("role", ["worker", "bridge"])
async def test_who_asks_himself_can_say_nothing_more_in_the_answer(
    guarded: Guarded, role: str
) -> None:
    """With `allow_responses` a user who hears what he asks publishes wherever he likes: the server
    lets him answer (nats-server 2.15.1)."""
    run = RunId(f"own.{role}")
    async with guarded.answering(), guarded.store("bridge") as store, guarded.plain(role) as plain:
        await doors.start(store, "nobody", None, run_id=run)
        before = await guarded.state()
        targets = (
            "runfold.api.as.bob.signals.own.cancel",
            "runfold.signal.as.bob.own.cancel",
            f"streams.$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_{shard_of(run, SHARDS)}",
            *(["runfold.rejected.own.cancel"] if role == "worker" else []),
        )
        asked = await plain.client.subscribe("runfold.worker.own")
        for target in targets:
            target = target.replace("own", subject_token(run))
            await plain.tell("runfold.worker.own", b"", target)
            heard = await asked.next_msg(5)
            assert heard.reply == target
            inbox = plain.client.new_inbox()
            await plain.denied(heard.reply, {}, reply=inbox)
        assert await guarded.state() == before
        assert (await doors.state(store, run)).status == "running"


async def test_what_a_worker_makes_of_the_tasks_stream_reaches_no_other_stream(
    guarded: Guarded,
) -> None:
    """A consumer pushes to whatever subject it was made with, in the streams' account, but only
    where somebody listens to exactly that one; a schedule targets its own stream's subjects alone
    (nats-server 2.15.1)."""
    await no_task_goes_astray(guarded)


async def no_task_goes_astray(guarded: Guarded) -> None:
    targets = (
        "$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_0",
        "runfold.journal.0.victim",
        "runfold.signal.as.bob.victim.cancel",
        "runfold.rejected.victim.cancel",
    )
    before = await guarded.state()
    async with guarded.plain("worker") as plain:
        for number, target in enumerate(targets):
            due = {"Nats-Schedule": "@at 2020-01-01T00:00:00Z", "Nats-Schedule-Target": target}
            reply = await plain.client.request("runfold.timer.victim", b"{}", 5, headers=due)
            assert json.loads(reply.data)["error"]["err_code"] == 10190  # the target is invalid
            name, filter = f"evil{number}", f"runfold.task.evil{number}.>"
            config = {"durable_name": name, "filter_subject": filter, "deliver_subject": target}
            config |= {"ack_policy": "explicit", "deliver_policy": "all"}
            reply = await plain.client.request(
                f"$JS.API.CONSUMER.CREATE.RUNFOLD_TASKS.{name}.{filter}",
                json.dumps({"stream_name": "RUNFOLD_TASKS", "config": config}).encode(),
            )
            assert "error" not in json.loads(reply.data)
            await plain.client.request(f"runfold.task.{name}.victim", b"", timeout=5)
        for number in range(len(targets)):

            async def pending(name: str = f"evil{number}") -> bool:  # counted a little later
                info = await plain.client.request(f"$JS.API.CONSUMER.INFO.RUNFOLD_TASKS.{name}")
                found = json.loads(info.data)
                assert found["delivered"]["consumer_seq"] == 0
                return found["num_pending"] == 1

            await eventually(pending)
    after = await guarded.state()
    for name in (*JOURNALS, "SIGNALS", "REJECTED"):
        assert after[name] == before[name]
