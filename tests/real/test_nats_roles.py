"""Each NATS role of deploy/nats does its work, and nothing else (R66). With that very file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from kit.raw_client import ask
from kit.servers import NatsServer, monitor
from kit.waiting import eventually

from bridge.nats_api import NatsApi
from bridge.signals import SignalDoor
from journal import doors
from journal.errors import PermissionDenied
from journal.fleet import Fleet
from journal.records import Signal
from journal.stores.jetstream import JetStreamStore
from journal.stores.nats_address import inbox_prefix
from journal.stores.provision import provision
from journal.terms import Complete, Continue, Next
from worker.agent import turn
from worker.context import Call, Context
from worker.service import Worker
from worker.tools import UNSAFE, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
ROLES = ("worker", "bridge", "ops", "alice", "auditor", "admin")
WAIT_S = 15.0


class Guarded:
    """The server of deploy/nats, with its streams and a run."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server

    def url(self, role: str) -> str:
        return self.server.url.replace("://", f"://{role}:{password(role)}@")

    @contextlib.asynccontextmanager
    async def store(self, role: str) -> AsyncGenerator[JetStreamStore]:
        async with JetStreamStore(self.url(role)) as store:
            yield store

    @contextlib.asynccontextmanager
    async def plain(self, role: str) -> AsyncGenerator[Plain]:
        plain = Plain(role)
        plain.client = await nats.connect(
            self.url(role), inbox_prefix=f"_INBOX.runfold.{role}", error_cb=plain.on_error
        )
        try:
            yield plain
        finally:
            await plain.client.close()

    @contextlib.asynccontextmanager
    async def bridge(self) -> AsyncGenerator[None]:
        async with self.store("bridge") as store:
            door, api = SignalDoor(store), NatsApi(store)
            tasks = [asyncio.create_task(part.run()) for part in (door, api)]
            try:
                await eventually(lambda: not door.problem() and not api.problem())
                yield
                assert (door.problem(), api.problem()) == ("", "")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncGenerator[None]:
        ready = asyncio.Event()
        made = Worker(self.url("worker"), [asker], on_ready=ready.set)
        task = asyncio.create_task(made.serve())
        async with asyncio.timeout(WAIT_S):
            await ready.wait()
        yield
        await made.stop()
        await task

    async def state(self) -> Any:
        """Of all streams: how many messages, and their settings."""
        found: dict[str, Any] = {}
        for name in ("JOURNAL_0", "TASKS", "SIGNALS", "REJECTED"):
            info = await ask(self.url("admin"), f"$JS.API.STREAM.INFO.RUNFOLD_{name}")
            found[name] = (info["state"]["messages"], info["state"]["last_seq"], info["config"])
        return found


class Plain:
    """A client that knows nothing of Runfold."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.client: Any = None
        self.errors: list[str] = []

    async def on_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    async def denied(self, subject: str, payload: Any = b"", **headers: str) -> None:
        """The server says so. nats-py passes its text on in small letters."""
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        await self.client.publish(subject, data, headers=headers or None)
        await self._said(f'publish to "{subject.lower()}"', subject)

    async def deaf(self, subject: str) -> None:
        """It may not listen there."""
        await self.client.subscribe(subject)
        await self._said(f'subscription to "{subject.lower()}"', subject)

    async def _said(self, text: str, subject: str) -> None:
        await self.client.flush()
        await eventually(
            lambda: any(text in error for error in self.errors),
            2,
            what=f"{self.role} is denied {subject}: {self.errors}",
        )


def password(role: str) -> str:
    return f"secret-of-{role}"


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
    for conf in DEPLOY.glob("*.conf"):
        shutil.copy(conf, folder)
    environ = {f"RUNFOLD_{role.upper()}_PASSWORD": password(role) for role in (*ROLES, "sys")}
    environ["RUNFOLD_NATS_DATA"] = str(folder / "data")
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setitem(os.environ, name, value)
        server = NatsServer(folder)
        (folder / "nats-server.conf").write_text('include "server.conf"\n')
        loop.run_until_complete(server._launch())
    yield server
    loop.run_until_complete(server.stop())
    loop.close()


@pytest.fixture
async def guarded(started: NatsServer) -> Guarded:
    found = Guarded(started)
    await provision(found.url("admin"))
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
    assert "secret" not in log


async def test_each_role_does_its_work(guarded: Guarded) -> None:
    """A run is started by the bridge, worked by the worker, approved by alice, told something by
    ops, and watched by the auditor."""
    async with guarded.worker(), guarded.bridge(), guarded.store("auditor") as looking:
        auditor = Fleet(looking)
        async with guarded.store("bridge") as store:
            assert (await Fleet(store, by="alice").start("asker", None, run_id="o.1")).created
            assert len(await Fleet(store).workers()) == 1
        followed = asyncio.create_task(collected(auditor, "o.1"))
        marker = (await until(auditor, "o.1", "awaiting_approval")).outcome.pending[0].marker
        assert [one.marker for one in await auditor.inbox()] == [marker]
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
    async with guarded.store("admin") as store:
        await doors.purge(store, "o.1")


async def collected(fleet: Fleet, run: str) -> list[Any]:
    return [record async for record in fleet.follow(run)]


HARM = (
    "$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_0",
    "$JS.API.STREAM.DELETE.RUNFOLD_JOURNAL_0",
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
SIGNAL, REQUEST = "runfold.signal.r.approve", "runfold.api.signals.r.approve"
SIGNAL_AS, REQUEST_AS = "runfold.signal.as.bob.r.approve", "runfold.api.as.bob.signals.r.approve"
PRIVATE = ("runfold.journal.0.>", "runfold.signal.>", "runfold.api.>", "_INBOX.>", ">")
FORBIDDEN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "worker": (
        (*HARM, SIGNAL, SIGNAL_AS, REQUEST_AS, "runfold.rejected.r.x", *READS[3:4], *READS[5:]),
        ("runfold.signal.>", "runfold.api.>", "_INBOX.runfold.alice.>", ">"),
    ),
    "bridge": (
        (*HARM, SIGNAL, SIGNAL_AS, READS[3], "_INBOX.runfold.alice.x"),
        ("runfold.signal.>", "_INBOX.runfold.alice.>", "_INBOX.>", ">"),
    ),
    "ops": (
        (*HARM, *WRITES, *READS, SIGNAL_AS, REQUEST_AS, "runfold.notice.r", "runfold.workers"),
        (*PRIVATE, "_INBOX.runfold.alice.>", "runfold.live.r"),
    ),
    "alice": (
        (*HARM, *WRITES, *READS, SIGNAL, REQUEST, SIGNAL_AS, REQUEST_AS, "runfold.notice.r"),
        (*PRIVATE, "_INBOX.runfold.ops.>"),
    ),
    "auditor": (
        (
            *(*HARM, *WRITES, *READS[3:], SIGNAL, SIGNAL_AS, REQUEST, REQUEST_AS),
            *("runfold.live.r", "runfold.notice.r", "runfold.worker.w", "runfold.workers"),
            "_INBOX.runfold.ops.x",
        ),
        ("runfold.signal.>", "runfold.api.>", "_INBOX.runfold.ops.>", ">"),
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
