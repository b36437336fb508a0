"""What the model server can be made to do wrong, each fault for itself (kit/simulated)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kit.records import Chain, fill, journal_of, raws
from kit.simulated.as_process import ModelProcess
from kit.simulated.client import PROCESS, ModelClient
from kit.simulated.faults import IN_FLIGHT, UNAVAILABLE, Fate, Handing, Policy, What
from kit.simulated.server import ModelServer
from kit.waiting import eventually

from journal.errors import StoreUnavailable
from journal.ids import RunId
from journal.store import Appended, Conflict, Unknown
from journal.stores import jetstream_read
from journal.stores.jetstream import JetStreamStore
from journal.stores.nats_waiting import NoReply
from journal.stores.tasks_message import Task

JOURNAL = "RUNFOLD_JOURNAL_0"
TASKS = "RUNFOLD_TASKS"
RUN = RunId("run-1")


class Told(Policy):
    """Does what it is told to the next message of a kind."""

    def __init__(self) -> None:
        self.fates: list[Fate] = []
        self.handings: list[Handing] = []
        self.lost: list[str] = []  # kinds of what comes back; "to" for what goes there
        self.delays: dict[str, float] = {}
        self.moment: int | None = None

    def to_server(self, client: ModelClient, subject: str, data: bytes) -> float | None:
        return self._way("to")

    def to_client(self, client: ModelClient, what: What, subject: str, data: bytes) -> float | None:
        return self._way(what)

    def _way(self, what: str) -> float | None:
        if what in self.lost:
            self.lost.remove(what)
            return None
        return self.delays.get(what, 0.0)

    def stored(self, client: ModelClient, stream: str, *message: Any) -> Fate | None:
        return self.fates.pop(0) if self.fates else None

    def read(self, client: ModelClient, stream: str, subject: str) -> int | None:
        return self.moment

    def delivered(self, *message: Any) -> Handing:
        return self.handings.pop(0) if self.handings else "once"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What befalls one message is looked at here: no append is more than one."""
    monkeypatch.setenv("RUNFOLD_GROUP_COMMIT", "off")


@pytest.fixture
def simulated(model: ModelProcess) -> ModelServer:
    model.model.provision()
    return model.model


@pytest.fixture
def policy(simulated: ModelServer) -> Told:
    simulated.policy = told = Told()
    return told


@pytest.fixture
async def store(simulated: ModelServer) -> AsyncIterator[JetStreamStore]:
    async with JetStreamStore(simulated.url) as store:
        await store.tasks.ensure("desk", ack_wait_s=600)
        yield store


@pytest.fixture
async def other(simulated: ModelServer) -> AsyncIterator[JetStreamStore]:
    async with JetStreamStore(simulated.url) as other:
        yield other


@pytest.fixture
def got() -> list[Task]:
    return []


def client_of(store: JetStreamStore) -> ModelClient:
    client = store._connection._nc
    assert isinstance(client, ModelClient)
    return client


pytestmark = pytest.mark.usefixtures("short_tries")


# ---- appends -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fate", "there"),
    [
        (Fate(answers=False), True),
        (Fate(lands=False), False),
        (Fate(lands=False, error=IN_FLIGHT), False),
        (Fate(error=UNAVAILABLE), True),
    ],
)
async def test_an_append_may_be_unknown_and_be_there_or_not(
    policy: Told, store: JetStreamStore, fate: Fate, there: bool
) -> None:
    chain = journal_of(2)
    tail = await fill(store, chain)
    entry = chain.completed()
    policy.fates.append(fate)
    assert isinstance(await store.append(RUN, entry, expected=tail), Unknown)
    again = await store.append(RUN, entry, expected=tail)
    assert isinstance(again, Conflict if there else Appended)
    assert raws(await store.load(RUN)) == [entry.raw for entry in chain.entries]


async def test_an_append_may_land_behind_a_later_one(policy: Told, store: JetStreamStore) -> None:
    chain = journal_of(1)
    tail = await fill(store, chain)
    late = chain.rival("b" * 12).step_started("late")
    policy.fates.append(Fate(after_s=0.05))
    landing = asyncio.create_task(store.append(RUN, late, expected=tail))
    await asyncio.sleep(0)
    won = await store.append(RUN, chain.step_started("first"), expected=tail)
    assert isinstance(won, Appended)
    assert await landing == Conflict()


@pytest.mark.parametrize("fault", ["to", "ack"])
async def test_a_message_may_be_lost_on_either_way(
    policy: Told, store: JetStreamStore, fault: str
) -> None:
    entry = Chain().started()
    policy.lost.append(fault)
    assert isinstance(await store.append(RUN, entry, expected=0), Unknown)
    assert len((await store.load(RUN)).entries) == (1 if fault == "ack" else 0)


async def test_messages_of_one_connection_stay_in_order_however_late(
    policy: Told, store: JetStreamStore
) -> None:
    heard: list[str] = []
    async with store.notices(lambda run, payload: heard.append(payload.decode())):
        for number in range(20):
            policy.delays = {"to": (number % 3) / 100, "message": (number % 5) / 100}
            await store.notify(RUN, str(number).encode())
        policy.delays = {}
        await eventually(lambda: len(heard) == 20)
    assert heard == [str(number) for number in range(20)]


# ---- stale reads ---------------------------------------------------------------------------------


async def test_a_read_from_the_past_sees_nothing_of_what_came_since(
    policy: Told, simulated: ModelServer, store: JetStreamStore
) -> None:
    chain = journal_of(3)
    tail = await fill(store, chain)
    policy.moment = simulated.streams[JOURNAL].moment
    await store.append(RUN, chain.completed(), expected=tail)
    await fill(store, journal_of(1, "run-2"))
    assert len((await store.load(RUN)).entries) == 3
    assert await store.tail(RUN) == tail
    assert [run async for run in store.runs()] == [RUN]
    assert [head async for head in store.heads()] == [(RUN, "running")]
    with pytest.raises(StoreUnavailable, match="before"):
        await store.load(RUN, after=tail + 1)
    policy.moment = None
    assert len((await store.load(RUN)).entries) == 4


async def test_a_read_from_the_past_sees_what_was_removed_since(
    policy: Told, simulated: ModelServer, store: JetStreamStore, got: list[Task]
) -> None:
    tail = await fill(store, journal_of(4))
    await store.wake(RUN, "desk", cause=1)
    before = simulated.streams[TASKS].moment
    policy.moment = simulated.streams[JOURNAL].moment
    await store.trim(RUN, before=tail)
    assert len((await store.load(RUN)).entries) == 4
    policy.moment = before
    async with store.tasks.pulling("desk", 0, got.append) as puller:
        await puller.pull(1)
    assert await store.tasks.ack(got[0])
    assert await store.tasks.holds(RUN, "desk")
    policy.moment = None
    assert not await store.tasks.holds(RUN, "desk")
    assert len((await store.load(RUN)).entries) == 1


# ---- deliveries ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("handing", "counts"), [("twice", [1, 2]), ("forgotten", [1, 1])])
async def test_a_task_may_be_delivered_twice(
    policy: Told, store: JetStreamStore, got: list[Task], handing: Handing, counts: list[int]
) -> None:
    await store.wake(RUN, "desk", cause=1)
    policy.handings.append(handing)
    async with store.tasks.pulling("desk", 0, got.append) as puller:
        await puller.pull(2)
    assert [task.delivery for task in got] == counts
    assert await store.tasks.ack(got[1])
    assert not await store.tasks.holds(RUN, "desk")


async def test_an_ack_of_a_forgotten_delivery_settles_nothing(
    policy: Told, store: JetStreamStore, got: list[Task]
) -> None:
    await store.wake(RUN, "desk", cause=1)
    policy.handings.append("forgotten")
    async with store.tasks.pulling("desk", 0, got.append) as puller:
        await puller.pull(1)
        store.tasks.nak(got[0])
        assert await store.tasks.holds(RUN, "desk")
        await puller.pull(1)
    assert [task.delivery for task in got] == [1, 1]


async def test_a_task_may_be_redelivered_early(
    simulated: ModelServer, store: JetStreamStore, got: list[Task]
) -> None:
    await store.wake(RUN, "desk", cause=1)
    async with store.tasks.pulling("desk", 0, got.append) as puller:
        await puller.pull(1)
        simulated.redeliver(TASKS, "desk")
        await puller.pull(1)
    assert [task.delivery for task in got] == [1, 2]


# ---- servers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["lost", "applied"])
async def test_a_change_of_leader_loses_or_applies_what_is_in_flight(
    policy: Told, simulated: ModelServer, store: JetStreamStore, in_flight: Any
) -> None:
    policy.fates.append(Fate(after_s=0.2))
    appending = asyncio.create_task(store.append(RUN, Chain().started(), expected=0))
    await asyncio.sleep(0)
    simulated.change_leader(JOURNAL, away_s=0.1, in_flight=in_flight)
    assert isinstance(await appending, Unknown)
    found = await store.load(RUN)  # waits for the new leader
    assert len(found.entries) == (1 if in_flight == "applied" else 0)


@pytest.mark.parametrize("silent", [False, True])
async def test_a_change_of_leader_ends_pulls_and_may_forget_deliveries(
    simulated: ModelServer,
    store: JetStreamStore,
    got: list[Task],
    silent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jetstream_read, "READ_BUDGET_S", 5)
    monkeypatch.setattr("journal.stores.tasks_pull.HEARTBEAT_S", 0.1)
    await store.wake(RUN, "desk", cause=1)
    async with store.tasks.pulling("desk", 0, got.append) as puller:
        await puller.pull(1)
        pull = asyncio.create_task(puller.pull(1))
        await asyncio.sleep(0)
        simulated.change_leader(TASKS, away_s=0.2, silent=silent, forgets=1)
        assert (await pull).why == ("silent" if silent else "lost")
        await eventually(lambda: not simulated.streams[TASKS].away)
        assert (await puller.pull(1)).why == "filled"
    assert [task.delivery for task in got] == [1, 1]


@pytest.mark.parametrize(
    ("how", "publish", "api"),
    [
        ({}, "nobody", "nothing"),  # as three servers do while they elect one
        ({"unavailable": True}, "nobody", "10008"),
        ({"silent": True}, "nothing", "nothing"),
    ],
)
async def test_without_a_leader_a_stream_is_answered_for_by_followers_alone(
    simulated: ModelServer,
    store: JetStreamStore,
    how: dict[str, bool],
    publish: str,
    api: str,
) -> None:
    await fill(store, journal_of(1))
    simulated.change_leader(JOURNAL, away_s=60, **how)

    async def asked(subject: str, data: bytes = b"") -> str:
        reply = await store._connection.request(subject, data, timeout_s=0.05)
        if isinstance(reply, NoReply):
            return "nobody" if reply.nobody else "nothing"
        return "10008" if b"10008" in reply.data else "stored"

    last = b'{"last_by_subj":"runfold.journal.0.run-1"}'
    assert await asked("runfold.journal.0.run-1", b"x") == publish
    assert await asked(f"$JS.API.STREAM.MSG.GET.{JOURNAL}", last) == api
    assert await asked(f"$JS.API.STREAM.INFO.{JOURNAL}") == api
    assert await asked(f"$JS.API.DIRECT.GET.{JOURNAL}", last) == "stored"


async def test_a_restart_keeps_what_is_stored_and_cuts_all_connections(
    simulated: ModelServer, store: JetStreamStore, got: list[Task]
) -> None:
    await fill(store, journal_of(2))
    await store.wake(RUN, "desk", cause=1)
    async with store.tasks.pulling("desk", 0, got.append) as puller:
        await puller.pull(1)
        pull = asyncio.create_task(puller.pull(1))
        await asyncio.sleep(0)
        simulated.restart(down_s=0.1)
        assert (await pull).why == "lost"
        assert await store.tasks.ack(got[0]) or await store.tasks.ack(got[0])
        assert not await store.tasks.holds(RUN, "desk")
    assert len((await store.load(RUN)).entries) == 2
    assert client_of(store).stats["reconnects"] == 1


async def test_what_lands_while_the_server_is_paused_lands_when_it_goes_on(
    policy: Told, simulated: ModelServer, store: JetStreamStore
) -> None:
    policy.fates.append(Fate(after_s=0.02))
    appending = asyncio.create_task(store.append(RUN, Chain().started(), expected=0))
    await asyncio.sleep(0)
    simulated.pause()
    assert isinstance(await appending, Unknown)
    assert simulated.streams[JOURNAL].last_seq == 0
    simulated.resume()
    assert (await store.load(RUN)).tail == 1


# ---- connections ---------------------------------------------------------------------------------


async def test_a_task_delivered_into_a_half_open_connection_is_lost_until_its_ack_wait(
    simulated: ModelServer, store: JetStreamStore, other: JetStreamStore, got: list[Task]
) -> None:
    async with store.tasks.pulling("desk", 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await asyncio.sleep(0)
        client_of(store).cut(half_open_s=60)
        await other.wake(RUN, "desk", cause=1)
        assert (await pull).why == "lost"
        await eventually(lambda: store.connected)
        assert not got and (await other.tasks.backlog("desk")).in_progress == 1
        simulated.redeliver(TASKS, "desk")
        await puller.pull(1)
    assert [task.delivery for task in got] == [2]


@pytest.mark.parametrize("way", ["to_server", "from_server"])
async def test_a_partition_swallows_one_way(
    simulated: ModelServer, store: JetStreamStore, other: JetStreamStore, way: str
) -> None:
    ways = {"to_server": False, "from_server": False, way: True}
    client_of(store).partition(**ways)
    assert isinstance(await store.append(RUN, Chain().started(), expected=0), Unknown)
    assert len((await other.load(RUN)).entries) == (1 if way == "from_server" else 0)
    client_of(store).heal()
    assert (await store.load(RUN)).tail == (await other.load(RUN)).tail


async def test_a_partition_that_lasts_ends_the_connection(
    simulated: ModelServer, store: JetStreamStore
) -> None:
    client = client_of(store)
    client._options["ping_interval"] = 0.05
    client.partition()
    await eventually(lambda: not client.is_connected)
    await asyncio.sleep(client._wait_s + 0.05)
    assert not client.is_connected
    client.heal()
    await eventually(lambda: store.connected)


async def test_a_frozen_process_finds_everything_when_it_goes_on(
    store: JetStreamStore, other: JetStreamStore
) -> None:
    heard: list[bytes] = []
    async with store.notices(lambda run, payload: heard.append(payload)):
        client_of(store).freeze()
        for number in range(3):
            await other.notify(RUN, b"%d" % number)
        await other.tail(RUN)
        assert not heard
        client_of(store).thaw()
        await store.tail(RUN)
    assert heard == [b"0", b"1", b"2"]


async def test_a_killed_process_is_gone_and_what_it_had_sent_arrives(
    policy: Told, simulated: ModelServer, store: JetStreamStore, other: JetStreamStore
) -> None:
    entry = Chain().started()
    async with store.answering("w", lambda run_id, claim: True):
        assert await other.ask("w", RUN, 1) == "yes"
        policy.delays = {"to": 0.02}
        appending = asyncio.create_task(store.append(RUN, entry, expected=0))
        await asyncio.sleep(0)
        policy.delays = {}
        client = client_of(store)
        client.kill()
        assert client not in simulated.clients
        assert await other.ask("w", RUN, 1) == "nobody"
    assert isinstance(await appending, Unknown)
    assert raws(await other.load(RUN)) == [entry.raw]


async def test_what_arrives_runs_in_the_process_that_connected(simulated: ModelServer) -> None:
    seen: list[tuple[str, str]] = []

    async def listen(name: str, ready: asyncio.Event, done: asyncio.Event) -> None:
        PROCESS.set(name)
        async with (
            JetStreamStore(simulated.url) as store,
            store.notices(lambda run, payload: seen.append((name, PROCESS.get()))),
            store.reporting(lambda _: PROCESS.get().encode()),
        ):
            ready.set()
            await done.wait()

    done = asyncio.Event()
    events = [asyncio.Event(), asyncio.Event()]
    listening = [
        asyncio.create_task(listen(name, ready, done))
        for name, ready in zip(("one", "two"), events, strict=True)
    ]
    for ready in events:
        await ready.wait()
    PROCESS.set("three")
    async with JetStreamStore(simulated.url) as store:
        assert [client.process for client in simulated.clients] == ["one", "two", "three"]
        await store.notify(RUN, b"")
        assert await store.ask_workers(0.05) == [b"one", b"two"]
    assert seen == [("one", "one"), ("two", "two")]
    done.set()
    await asyncio.gather(*listening)
    assert simulated.subscriptions() == [] and simulated.clients == []
