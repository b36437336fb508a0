"""What is published or requested by NATS is applied once, or refused with a reason (R58-R62)."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import nats
import nats.errors
import pytest
from kit.cli import Cli
from kit.servers import NatsServer
from kit.waiting import eventually

from bridge import nats_api, saying, settling, signals
from bridge.nats_api import NatsApi
from bridge.signals import SignalDoor
from journal.errors import StoreUnavailable
from journal.fleet import Fleet
from journal.ids import RunId
from journal.records import Input, Signal
from journal.stores import signals_queue
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.stores.rejected import Refusal
from journal.terms import Complete, Next
from journal.views import Completed
from worker.agent import Agent, turn
from worker.context import Call, Context
from worker.service import Worker
from worker.tools import UNSAFE, ToolCall

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

WAIT_S = 15.0
HEADER = {"Runfold-Request": "h"}


class Site:
    """A namespace of the server; bridges and workers in this process; a plain nats-py client."""

    def __init__(self, url: str, namespace: str, store: JetStreamStore, plain: Any) -> None:
        self.url, self.namespace, self.store, self.plain = url, namespace, store, plain
        self.fleet = Fleet(store, by="test")
        self.counted: list[tuple[str, str]] = []
        self.acted: list[str] = []
        self.stack = AsyncExitStack()

    def count(self, name: str, result: str) -> None:
        self.counted.append((name, result))

    # ---- who works --------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def bridge(self) -> AsyncGenerator[SignalDoor]:
        """With a connection of its own, as a process of its own would have."""
        async with JetStreamStore(self.url, namespace=self.namespace) as store:
            door = SignalDoor(store, count=self.count)
            task = asyncio.create_task(door.run())
            try:
                await eventually(lambda: task.done() or not door.problem())
                yield door
            finally:
                await ended(task)

    @contextlib.asynccontextmanager
    async def api(self) -> AsyncGenerator[NatsApi]:
        async with JetStreamStore(self.url, namespace=self.namespace) as store:
            api = NatsApi(store, count=self.count)
            task = asyncio.create_task(api.run())
            try:
                await eventually(lambda: task.done() or not api.problem())
                yield api
            finally:
                await ended(task)

    async def worker(self, *agents: Agent) -> None:
        ready = asyncio.Event()
        made = Worker(self.url, agents, namespace=self.namespace, on_ready=ready.set, sweep_s=60)
        task = asyncio.create_task(made.serve())

        async def stop() -> None:
            await made.stop()
            await task

        self.stack.push_async_callback(stop)
        async with asyncio.timeout(WAIT_S):
            await ready.wait()

    def asker(self) -> Agent:
        """Asks for one write, then makes it."""

        @turn("asker")
        async def asker(ctx: Context) -> Next:
            async def act(call: ToolCall) -> str:
                self.acted.append(call.run_id)
                return "done"

            call = Call(name="act", input=None, fn=act, replay=UNSAFE, approval="May it?")
            return Complete((await ctx.tool(call)).output)

        return asker

    def loser(self) -> Agent:
        """Makes a write whose outcome is unknown."""

        @turn("loser")
        async def loser(ctx: Context) -> Next:
            async def act(call: ToolCall) -> str:
                self.acted.append(call.run_id)
                await asyncio.Event().wait()
                return "never"

            call = Call(name="act", input=None, fn=act, replay=UNSAFE, timeout_s=0.2)
            return Complete((await ctx.tool(call)).output)

        return loser

    # ---- what is there ----------------------------------------------------------------------

    async def until(self, run: str, status: str) -> Any:
        async def there() -> Any:
            found = await self.fleet.get(run)
            return found if found.status == status else None

        return await eventually(there, WAIT_S, what=f"{run} is {status}")

    async def asked(self, run: str) -> str:
        """The marker of a run that asks."""
        await self.fleet.start("asker", None, run_id=run)
        found = await self.until(run, "awaiting_approval")
        return found.outcome.pending[0].marker

    async def said(self, run: str) -> list[Any]:
        """The run's signals and inputs."""
        entries = (await self.store.load(RunId(run))).entries
        return [one.record for one in entries if isinstance(one.record, Signal | Input)]

    async def publish(self, rest: str, payload: Any, **headers: str) -> None:
        """By a client that knows nothing of Runfold."""
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        subject = f"{self.namespace}.signal.{rest}"
        await self.plain.jetstream().publish(subject, data, headers=headers or None)

    async def request(self, rest: str, payload: Any, **headers: str) -> Any:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        subject = f"{self.namespace}.api.{rest}"
        return await self.plain.request(subject, data, timeout=10, headers=headers or None)

    async def settled(self) -> None:
        async def empty() -> bool:
            return (await self.store.signals.backlog()).waiting == 0

        await eventually(empty, 4 * WAIT_S, what="all signals are settled")

    async def rejected(self) -> list[Refusal]:
        return await self.store.rejected.latest()


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncIterator[Site]:
    await provision(nats_server.url, namespace=namespace)
    plain = await nats.connect(nats_server.url)
    async with JetStreamStore(nats_server.url, namespace=namespace) as store:
        site = Site(nats_server.url, namespace, store, plain)
        async with site.stack:
            yield site
    await plain.close()


# ---- kept signals --------------------------------------------------------------------------------


async def test_what_was_published_while_no_bridge_ran_is_applied_once_when_one_comes(
    site: Site,
) -> None:
    """Must be shown (R58): the client's part is plain nats-py."""
    await site.worker(site.asker(), site.loser())
    marker = await site.asked("order.7")
    await site.fleet.start("loser", None, run_id="lost")
    unknown = (await site.until("lost", "indeterminate")).outcome.unknown[0]

    await site.publish("order.7.approve", {"marker": marker})
    done = {"step": unknown.step, "outcome": "done", "result": "by hand", "start": unknown.start}
    await site.publish("lost.reconcile", done)
    await site.publish("order.7.approve", b'{"marker": "half')

    async with site.bridge():
        await site.until("order.7", "completed")
        found = (await site.until("lost", "completed")).outcome
        assert isinstance(found, Completed) and found.message.content == "by hand"
        await site.settled()
    (approve,), (reconcile,) = await site.said("order.7"), await site.said("lost")
    assert (approve.name, approve.by) == ("approve", "nats")
    assert approve.request_id.startswith("sig:1:")
    assert (reconcile.name, reconcile.by) == ("reconcile", "nats")
    assert sorted(site.acted) == ["lost", "order.7"]
    (refusal,) = await site.rejected()
    assert (refusal.run, refusal.name, refusal.code) == ("order.7", "approve", "bad_payload")
    assert refusal.payload == '{"marker": "half' and "not JSON" in refusal.reason
    assert refusal.subject == f"{site.namespace}.signal.order.7.approve"


async def test_who_may_say_as_whom_is_in_the_record(site: Site) -> None:
    await site.fleet.start("nobody", None, run_id="as.x")
    await site.publish("as.alice.as.x.cancel", {"reason": "enough"})
    await site.fleet.start("nobody", None, run_id="r")
    await site.publish("as.bob.r.input", {"content": "hi"})
    await site.publish("as.x.cancel", {})  # a run of that name is written as~x
    await site.publish("as.Bob.r.cancel", {})
    await site.publish("r.input", {"content": 1, "request_id": "mine"}, **{"Runfold-Request": "h"})
    await site.publish("r.input", {"content": 2}, **{"Runfold-Request": "h"})
    async with site.bridge():
        await site.settled()
    (cancel,) = await site.said("as.x")
    assert (cancel.name, cancel.by, cancel.payload) == ("cancel", "alice", {"reason": "enough"})
    inputs = await site.said("r")
    assert inputs[0].request_id.startswith("sig:2:")
    assert [(one.request_id, one.by, one.content) for one in inputs] == [
        (inputs[0].request_id, "bob", "hi"),
        ("mine", "nats", 1),
        ("h", "nats", 2),
    ]
    refused = await site.rejected()
    assert [(one.code, one.run) for one in refused] == [("invalid_id", None)] * 2
    assert "as~" in refused[1].reason


BAD: list[tuple[str, bytes, str]] = [
    ("r.approve", b"", "bad_payload"),
    ("r.approve", b"\xff\xfe{}", "bad_payload"),
    ("r.approve", gzip.compress(b'{"marker": "m"}'), "bad_payload"),
    ("r.approve", b"[" * 30_000, "bad_payload"),
    ("r.approve", b'{"marker": NaN}', "bad_payload"),
    ("r.approve", b'{"marker": "a", "marker": "b"}', "bad_payload"),
    ("r.approve", b'{"marker": "a", "extra": 1}', "bad_payload"),
    ("r.approve", b'{"marker": 1}', "bad_payload"),
    ("r.approve", b'{"marker": "no marker"}', "bad_payload"),
    ("r.approve", b'{"marker": "r/x@1.0123456789abcdef", "request_id": "\\n"}', "bad_payload"),
    ("r.cancel", b'{"reason": "%s"}' % (b"x" * 70_000), "too_large"),
    ("r.cancel", b"1" * 5000, "bad_payload"),
    ("r.cancel", b'"\\ud800"', "bad_payload"),
    ("r.reconcile", b'{"step": "x", "outcome": "maybe"}', "bad_payload"),
    ("r.reconcile", b'{"step": "x", "outcome": "retry"}', "stale_signal"),
    ("r.late", b'{"step": "x", "start": 1, "result": 1}', "bad_payload"),
    ("r.child", b'{"run": "x", "outcome": {}}', "bad_payload"),
    ("r.shout", b"{}", "bad_payload"),
    ("r.input", b"{}", "bad_payload"),
    ("r.input", b'{"content": 1, "mode": "loud"}', "bad_payload"),
    ("r.input", b'{"content": "%s"}' % (b"x" * 70_000), "too_large"),
    ("r.input", b'{"content": 1, "request_id": "%s"}' % (b"x" * 200), "bad_payload"),
    ("no.such.run.cancel", b"{}", "run_not_found"),
    ("r!.cancel", b"{}", "invalid_id"),
    ("cancel", b"{}", "invalid_id"),
    ("as", b"{}", "invalid_id"),
    (f"{'x' * 200}.cancel", b"{}", "invalid_id"),
]


async def test_whatever_is_malformed_is_refused_with_its_reason_and_changes_nothing(
    site: Site,
) -> None:
    await site.fleet.start("nobody", None, run_id="r")
    for rest, payload, _ in BAD:
        await site.publish(rest, payload)
    await site.publish("r.cancel", {})
    async with site.bridge():
        await site.settled()
    assert [one.name for one in await site.said("r")] == ["cancel"]
    refused = await site.rejected()
    assert len(refused) == len(BAD)
    expected = sorted((f"{site.namespace}.signal.{rest}", code) for rest, _, code in BAD)
    assert sorted((one.subject, one.code) for one in refused) == expected
    for one in refused:
        text = one.reason + one.payload + one.subject
        assert text.isprintable() and len(one.reason) < 4000 and len(one.payload) < 21_000
        assert one.by == "nats" and one.at
    assert ("approve", "bad_payload") in site.counted


async def test_subjects_that_are_no_text_are_refused_and_block_nothing(site: Site) -> None:
    host, _, port = site.url.removeprefix("nats://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n')
    prefix = f"{site.namespace}.signal.".encode()
    for token in (b"a\x0bb", b"\xff\xfe", b"r\x00", b"\x1b[2J"):
        writer.write(b"PUB %b%b.cancel 2\r\n{}\r\n" % (prefix, token))
    writer.write(b"HPUB %br.cancel 15 17\r\nNATS/1.0 \xff\xff\r\n\r\n{}\r\nPING\r\n" % prefix)
    async with asyncio.timeout(5):
        assert b"PONG" in await reader.readline()
    writer.close()
    await site.fleet.start("nobody", None, run_id="r")
    async with site.bridge():
        await site.settled()
    assert [one.name for one in await site.said("r")] == ["cancel"]
    refused = await site.rejected()
    assert [one.code for one in refused] == ["invalid_id"] * 4
    assert all(one.subject.isascii() and one.subject.isprintable() for one in refused)


# ---- crashes, several bridges, order -------------------------------------------------------------


async def test_several_bridges_apply_a_runs_signals_once_and_in_order(site: Site) -> None:
    runs = ["a", "b.c", "d"]
    for run in runs:
        await site.fleet.start("nobody", None, run_id=run)
    for number in range(40):
        for run in runs:
            spelled = run if number % 2 else run.replace(".", "~")
            as_user = "as.joe." if number % 3 == 0 else ""
            await site.publish(f"{as_user}{spelled}.input", {"content": number})
    async with site.bridge(), site.bridge(), site.bridge():
        await site.settled()
    for run in runs:
        assert [one.content for one in await site.said(run)] == list(range(40))
    assert await site.rejected() == []
    assert site.counted.count(("input", "applied")) == 120


async def test_a_bridge_waits_with_a_signal_while_another_has_the_runs_earlier_one(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    await site.fleet.start("nobody", None, run_id="r")
    say, nak = settling.say, signals_queue.SignalQueue.nak
    frozen, thaw, put_off = asyncio.Event(), asyncio.Event(), list[int]()

    async def stays(store: Any, address: Any, data: bytes, **rest: Any) -> Any:
        if json.loads(data)["content"] == 0:
            frozen.set()
            await thaw.wait()
        return await say(store, address, data, **rest)

    def puts_off(self: Any, signal: Any, delay_s: float) -> None:
        put_off.append(signal.sequence)
        nak(self, signal, delay_s)

    monkeypatch.setattr(settling, "say", stays)
    monkeypatch.setattr(settling, "EARLIER_S", 0.1)
    monkeypatch.setattr(signals_queue.SignalQueue, "nak", puts_off)
    await site.publish("r.input", {"content": 0})
    async with site.bridge():
        await asyncio.wait_for(frozen.wait(), WAIT_S)
        async with site.bridge():
            for number in range(1, 20):
                await site.publish("r.input", {"content": number})

            async def seen() -> bool:
                return bool(put_off or await site.said("r"))

            await eventually(seen, WAIT_S)
            thaw.set()
            await site.settled()
    assert [one.content for one in await site.said("r")] == list(range(20))


async def test_a_bridge_that_dies_after_the_record_applies_nothing_twice(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off between the record and its task, so before the ack: the next delivery is a
    repeat, and wakes the worker."""
    await site.worker(site.asker())
    marker = await site.asked("r")
    wake = JetStreamStore.wake
    cut: list[str] = []

    async def dies(self: JetStreamStore, run_id: RunId, *args: Any, **rest: Any) -> None:
        if not cut:
            cut.append(run_id)
            await asyncio.Event().wait()
        await wake(self, run_id, *args, **rest)

    monkeypatch.setattr(JetStreamStore, "wake", dies)
    await site.publish("r.approve", {"marker": marker})
    async with site.bridge():
        await eventually(lambda: cut, WAIT_S)
    assert len(await site.said("r")) == 1 and site.acted == []
    async with site.bridge():
        await site.until("r", "completed")
        await site.settled()
    assert site.acted == ["r"] and len(await site.said("r")) == 1
    assert ("approve", "repeated") in site.counted


async def test_a_bridge_that_was_frozen_meanwhile_applies_nothing_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message is delivered to another one, which applies it; then it goes on."""
    monkeypatch.setattr(signals_queue, "ACK_WAIT_S", 1.0)  # what it is kept by comes every 10 s
    await site.fleet.start("nobody", None, run_id="r")
    say, frozen, thaw = settling.say, asyncio.Event(), asyncio.Event()

    async def stays(*args: Any, **rest: Any) -> Any:
        if not frozen.is_set():
            frozen.set()
            await thaw.wait()
        return await say(*args, **rest)

    monkeypatch.setattr(settling, "say", stays)
    await site.publish("r.input", {"content": 1})
    async with site.bridge():
        await asyncio.wait_for(frozen.wait(), WAIT_S)
        async with site.bridge():
            await site.settled()
            await site.publish("r.input", {"content": 2})
            await site.settled()
            thaw.set()
            await eventually(lambda: ("input", "repeated") in site.counted, WAIT_S)
    assert [one.content for one in await site.said("r")] == [1, 2]
    assert await site.rejected() == []


async def test_a_refusal_whose_ack_was_lost_is_one_entry_and_stands(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    ack = signals_queue.SignalQueue.ack
    lost: list[int] = []

    async def loses(self: Any, signal: Any) -> bool:
        if len(lost) < 2:  # it asks for the acknowledgement twice
            lost.append(signal.sequence)
            if len(lost) == 2:  # by the next delivery it could be applied
                await site.fleet.start("nobody", None, run_id="r")
            return False
        return await ack(self, signal)

    monkeypatch.setattr(signals_queue.SignalQueue, "ack", loses)
    await site.publish("r.input", {"content": 1})
    async with site.bridge():
        await site.settled()
    (refusal,) = await site.rejected()
    assert refusal.code == "run_not_found"
    assert await site.said("r") == []


async def test_what_fails_for_a_while_is_neither_lost_nor_refused_and_blocks_no_other_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "PAUSE_S", 0.05)
    say, failures = settling.say, list[str]()

    async def fails(store: Any, address: Any, data: bytes, **rest: Any) -> Any:
        if address.run == "sick" and len(failures) < 3:
            failures.append(address.name)
            raise StoreUnavailable("an election")
        return await say(store, address, data, **rest)

    monkeypatch.setattr(settling, "say", fails)
    for run in ("sick", "well"):
        await site.fleet.start("nobody", None, run_id=run)
    for number in range(50):
        await site.publish("sick.input", {"content": number})
    await site.publish("well.input", {"content": "x"})
    async with site.bridge() as door:
        await eventually(lambda: failures, WAIT_S)
        await site.settled()
        assert door.problem() == ""
    assert [one.content for one in await site.said("sick")] == list(range(50))
    assert len(await site.said("well")) == 1
    assert await site.rejected() == [] and ("input", "put_off") in site.counted


async def test_a_signal_that_the_bridge_itself_fails_at_is_refused_in_the_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "PAUSE_S", 0.02)

    async def fails(store: Any, address: Any, data: bytes, **rest: Any) -> Any:
        if b"poison" in data:
            raise ZeroDivisionError("secret")
        return await saying.say(store, address, data, **rest)

    monkeypatch.setattr(settling, "say", fails)
    await site.fleet.start("nobody", None, run_id="r")
    await site.publish("r.input", {"content": "poison"})
    await site.publish("r.input", {"content": "good"})
    async with site.bridge():
        await site.settled()
    (refusal,) = await site.rejected()
    assert refusal.code == "internal" and "secret" not in refusal.reason
    assert [one.content for one in await site.said("r")] == ["good"]


async def test_a_server_that_is_killed_meanwhile_costs_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (signals, signals_queue):  # what was on the wire then comes again after it
        monkeypatch.setattr(module, "ACK_WAIT_S", 2.0)
    server = await NatsServer.start(tmp_path / "server")
    await provision(server.url)
    plain = await nats.connect(server.url, reconnect_time_wait=0.1, max_reconnect_attempts=-1)
    async with JetStreamStore(server.url) as store:
        site = Site(server.url, "runfold", store, plain)
        await site.fleet.start("nobody", None, run_id="r")
        for number in range(200):
            await site.publish("r.input", {"content": number})
        async with site.bridge(), site.bridge():
            await eventually(lambda: site.counted)
            await server.kill()
            await server.restart()
            await eventually(lambda: plain.is_connected)
            await site.publish("r.input", {"content": 200})
            await site.settled()
        assert [one.content for one in await site.said("r")] == list(range(201))
        assert await site.rejected() == []
    await plain.close()
    await server.stop()


async def test_a_flood_for_one_run_leaves_room_for_others(site: Site) -> None:
    for run in ("flooded", "other"):
        await site.fleet.start("nobody", None, run_id=run)
    await site.publish("flooded.input", {"content": "first"})
    for _ in range(600):  # the queue of inputs is full at 256: the rest is refused
        await site.publish("flooded.input", {"content": "x"})
    await site.publish("other.cancel", {})
    async with site.bridge():

        async def served() -> bool:
            return bool(await site.said("other"))

        await eventually(served, WAIT_S)
        assert (await site.store.signals.backlog()).waiting > 0
        await site.settled()
    assert len(await site.said("flooded")) == 256
    assert len(await site.store.rejected.latest(500)) == 601 - 256


async def test_a_bridge_whose_consumer_was_deleted_makes_it_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "PAUSE_S", 0.05)
    await site.fleet.start("nobody", None, run_id="r")
    async with site.bridge():

        async def pulls() -> bool:
            return (await site.store.signals.backlog()).pulls == 1

        await eventually(pulls)
        stream = f"{site.namespace.upper()}_SIGNALS"
        await site.plain.request(f"$JS.API.CONSUMER.DELETE.{stream}.bridge", b"", timeout=5)
        await site.publish("r.cancel", {})
        await site.settled()
    assert len(await site.said("r")) == 1


async def test_health_says_what_keeps_a_bridge_from_its_signals(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site.bridge() as door:
        assert door.problem() == ""
        monkeypatch.setattr(signals, "DEAF_S", -1.0)
        assert "no pull was answered" in door.problem()
        monkeypatch.undo()
        stream = f"{site.namespace.upper()}_SIGNALS"
        await site.plain.request(f"$JS.API.STREAM.DELETE.{stream}", b"", timeout=5)
        await eventually(lambda: stream in door.problem())
    assert "not listening" in door.problem()


async def test_the_command_shows_what_waits_and_what_was_refused(
    on_jetstream: Cli, site: Site
) -> None:
    await site.publish("r.cancel", b"\x1b[2J not JSON")
    found = await on_jetstream("signals", "--json")
    assert (found.code, found.json["waiting"], found.json["pulls"]) == (0, 1, 0)
    plain = await on_jetstream("signals")
    assert plain.out.startswith("1 waiting") and "runfold bridge" in plain.err
    async with site.bridge():
        await site.settled()
    found = await on_jetstream("signals", "--rejected", "--json")
    (one,) = found.json["rejected"]
    assert list(one) == ["at", "subject", "run", "name", "code", "reason", "payload", "by"]
    assert (one["run"], one["name"], one["code"]) == ("r", "cancel", "bad_payload")
    plain = await on_jetstream("signals", "--rejected", "--limit", "1")
    assert "\x1b" not in plain.out and "\\x1b[2J not JSON" in plain.out
    assert (await on_jetstream("signals", "--rejected", "--limit", "0")).code == 2


# ---- requests ------------------------------------------------------------------------------------


async def test_a_request_is_answered_with_what_became_of_it(site: Site) -> None:
    await site.worker(site.asker())
    marker = await site.asked("order.7")
    async with site.api():
        reply = await site.request("signals.order.7.approve", {"marker": marker, "request_id": "q"})
        receipt = json.loads(reply.data)
        assert receipt | {"n": 0} == {
            "run": "order.7",
            "request_id": "q",
            "result": "applied",
            "n": 0,
        }
        reply = await site.request("as.joe.signals.order~7.approve", {"marker": marker})
        assert json.loads(reply.data)["result"] == "repeated"
        await site.until("order.7", "completed")
        reply = await site.request("signals.order.7.cancel", {})
    error = json.loads(reply.data)["error"]
    assert (error["code"], error["run"]) == ("run_finished", "order.7")
    assert reply.headers["Nats-Service-Error-Code"] == "409"
    assert reply.headers["Nats-Service-Error"].startswith("run_finished: ")
    assert ("approve", "applied") in site.counted and ("cancel", "run_finished") in site.counted
    assert await site.rejected() == []  # who asked was told


async def test_inputs_are_submitted_read_waited_for_and_withdrawn(site: Site) -> None:
    await site.fleet.start("waiter", None, run_id="r")
    wanted = {"run": "r", "request_id": "i"}
    async with site.api(), site.api():
        reply = await site.request("as.joe.inputs.submit", wanted | {"content": {"a": 1}})
        state = {"mode": "steer", "content": {"a": 1}, "status": "queued"}
        assert json.loads(reply.data) == wanted | state
        reply = await site.request("inputs.submit", {"run": "r", "content": 2}, **HEADER)
        assert json.loads(reply.data)["request_id"] == "h"
        waiting = asyncio.create_task(site.request("inputs.get", wanted | {"wait": 30}))
        reply = await site.request("inputs.withdraw", wanted)
        assert json.loads(reply.data)["status"] == "withdrawn"
        assert json.loads((await waiting).data)["status"] == "withdrawn"
        for action, payload, code in (
            ("get", {"run": "r", "request_id": "none"}, "stale_signal"),
            ("get", wanted | {"wait": 61}, "bad_payload"),
            ("get", wanted | {"wait": "1"}, "bad_payload"),
            ("get", {"run": "r", "request_id": ""}, "bad_payload"),
            ("withdraw", {"run": "none", "request_id": "i"}, "run_not_found"),
            ("submit", {"run": "r"}, "bad_payload"),
            ("submit", {"run": "../r", "content": 1}, "invalid_id"),
            ("submit", {"run": "r", "content": 1, "mode": "loud"}, "bad_payload"),
            ("submit", b"\xff", "bad_payload"),
            ("submit", {"run": "r", "content": "x" * 70_000}, "too_large"),
            ("submit", {"run": "r", "content": "x" * 300_000}, "too_large"),
        ):
            reply = await site.request(f"inputs.{action}", payload)
            assert json.loads(reply.data)["error"]["code"] == code, (action, payload)
    assert [(one.by, one.request_id) for one in await site.said("r")] == [
        ("joe", "i"),
        ("nats", "h"),
    ]


async def test_a_bug_or_too_much_at_once_tells_nothing_and_ends_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, asked = asyncio.Event(), list[str]()

    async def stays(store: Any, address: Any, data: bytes, **rest: Any) -> Any:
        asked.append(address.name)
        await go.wait()
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(nats_api, "say", stays)
    monkeypatch.setattr(nats_api, "AT_ONCE", 1)
    async with site.api():
        first = asyncio.create_task(site.request("signals.r.cancel", {}))
        await eventually(lambda: asked)
        busy = await site.request("signals.r.cancel", {})
        assert json.loads(busy.data)["error"]["code"] == "busy"
        assert busy.headers["Nats-Service-Error-Code"] == "503"
        go.set()
        reply = await first
    assert json.loads(reply.data)["error"]["code"] == "internal"
    assert reply.headers["Nats-Service-Error-Code"] == "500"
    assert b"secret" not in reply.data and b"ZeroDivision" not in reply.data


async def test_requests_that_are_no_text_end_nothing_and_a_stopping_bridge_still_answers(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    say, go, asked = nats_api.say, asyncio.Event(), list[str]()

    async def stays(*args: Any, **rest: Any) -> Any:
        asked.append("")
        await go.wait()
        return await say(*args, **rest)

    await site.fleet.start("nobody", None, run_id="r")
    host, _, port = site.url.removeprefix("nats://").rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n')
    prefix = f"{site.namespace}.api.signals.".encode()
    async with site.api():
        for token in (b"a\x0bb", b"\xff\xfe", b"r\x00"):
            writer.write(b"PUB %b%b.cancel x 2\r\n{}\r\n" % (prefix, token))
        writer.write(b"HPUB %br.cancel x 15 17\r\nNATS/1.0 \xff\xff\r\n\r\n{}\r\n" % prefix)
        await writer.drain()
        reply = await site.request("signals.r.shout", {})
        assert json.loads(reply.data)["error"]["code"] == "bad_payload"
        monkeypatch.setattr(nats_api, "say", stays)
        last = asyncio.create_task(site.request("signals.r.cancel", {"request_id": "last"}))
        await eventually(lambda: asked)
        asyncio.get_running_loop().call_later(0.1, go.set)
    assert json.loads((await last).data)["result"] == "applied"
    writer.close()


async def test_the_service_is_found_by_who_looks_for_services(site: Site) -> None:
    name = f"runfold-api-{site.namespace}"
    async with site.api(), site.api():
        await site.request("signals.none.cancel", {})
        for verb in ("PING", "INFO", "STATS"):
            found: list[dict[str, Any]] = []
            inbox = site.plain.new_inbox()
            subscription = await site.plain.subscribe(inbox)
            await site.plain.publish(f"$SRV.{verb}.{name}", b"", reply=inbox)
            for _ in range(2):
                found.append(json.loads((await subscription.next_msg(5)).data))
            await subscription.unsubscribe()
            assert {one["name"] for one in found} == {name} and len(
                {one["id"] for one in found}
            ) == 2
            assert all(one["type"].endswith(f"{verb.lower()}_response") for one in found)
            if verb == "INFO":
                subjects = {one["subject"] for one in found[0]["endpoints"]}
                assert f"{site.namespace}.api.signals.>" in subjects
                assert f"{site.namespace}.api.as.*.inputs.submit" in subjects
            if verb == "STATS":
                rows = [
                    row for one in found for row in one["endpoints"] if row["name"] == "signals"
                ]
                assert sum(row["num_requests"] for row in rows) == 1
                assert sum(row["data"]["errors"] for row in rows) == 1
    with pytest.raises(nats.errors.NoRespondersError):
        await site.request("signals.none.cancel", {})
