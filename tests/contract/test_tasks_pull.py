"""A pull ends with a reason, and what is delivered reaches its callback, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from kit.backends import REAL_ONLY
from kit.proxy import Proxy
from kit.raw_client import ask
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.errors import StoreUnavailable
from journal.ids import RunId
from journal.stores import tasks_pull
from journal.stores.nats_connection import Connection
from journal.stores.nats_waiting import STATUS, Incoming
from journal.stores.provision import provision
from journal.stores.tasks import TaskQueue
from journal.stores.tasks_message import Malformed, Task, read_task, task_subject
from journal.stores.tasks_pull import PullEnd

RUN = RunId("Order.7")
AGENT = "desk.v1"
STREAM = "RUNFOLD_TASKS"
CONSUMER = "desk~v1"
DELIVERY = "$JS.ACK.RUNFOLD_TASKS.desk~v1.1.12.99.1795982946161673432.0"


@pytest.fixture
async def queue(server: NatsServer) -> AsyncIterator[TaskQueue]:
    await provision(server.url)
    connection = Connection(server.url, namespace="runfold")
    await connection.open()
    queue = TaskQueue(connection, "runfold")
    await queue.ensure(AGENT, ack_wait_s=600)
    yield queue
    await connection.close()


@pytest.fixture
def got() -> list[Task]:
    return []


async def pulls_wait(queue: TaskQueue, count: int = 1) -> None:
    async def waits() -> bool:
        return (await queue.backlog(AGENT)).waiting == count

    await eventually(waits)


async def test_a_pull_brings_what_comes_while_it_waits(queue: TaskQueue, got: list[Task]) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(2))
        await pulls_wait(queue)
        await queue.publish(RUN, AGENT, cause=1)
        await eventually(lambda: got)
        assert not pull.done()
        await queue.publish(RUN, AGENT, cause=2)
        assert await pull == PullEnd("filled")
    assert [task.cause for task in got] == [1, 2]


async def test_a_pull_without_tasks_expires_and_heartbeats_keep_it(
    queue: TaskQueue, got: list[Task], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_pull, "HEARTBEAT_S", 0.2)
    async with queue.pulling(AGENT, 0, got.append) as puller:
        assert await puller.pull(1, 1.5) == PullEnd("expired")


async def test_a_deleted_consumer_ends_the_pull_and_the_next(
    queue: TaskQueue, server: NatsServer, got: list[Task]
) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await pulls_wait(queue)
        await ask(server.url, f"$JS.API.CONSUMER.DELETE.{STREAM}.{CONSUMER}")
        assert await pull == PullEnd("gone", "Consumer Deleted")
        assert (await puller.pull(1)).why == "gone"  # 503
        await queue.ensure(AGENT, ack_wait_s=600)
        await queue.publish(RUN, AGENT, cause=1)
        assert await puller.pull(1) == PullEnd("filled")


async def test_a_pull_too_many_ends_too(
    queue: TaskQueue, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nats-server 2.15.1 answers it with 409 Exceeded MaxWaiting, or, mostly, not at all."""
    monkeypatch.setattr(tasks_pull, "HEARTBEAT_S", 0.2)
    name, filter = "tight", "runfold.task.tight.*"
    config = {
        "durable_name": name,
        "ack_policy": "explicit",
        "max_waiting": 1,
        "filter_subject": filter,
    }
    subject = f"$JS.API.CONSUMER.CREATE.{STREAM}.{name}.{filter}"
    await ask(server.url, subject, {"stream_name": STREAM, "config": config})
    got: list[Task] = []
    async with (
        queue.pulling("tight", 0, got.append) as one,
        queue.pulling("tight", 0, got.append) as other,
    ):
        pull = asyncio.create_task(one.pull(1))

        async def waits() -> bool:
            return (await queue.backlog("tight")).waiting == 1

        await eventually(waits)
        assert (await other.pull(1)).why in ("other", "silent")
        pull.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pull


async def test_a_pull_is_ended_by_a_killed_server_and_the_next_one_goes_on(
    queue: TaskQueue, server: NatsServer, got: list[Task]
) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await pulls_wait(queue)
        await server.kill()
        assert (await pull).why == "lost"
        assert (await puller.pull(1, 0.2)).why == "lost"  # nobody there
        pull = asyncio.create_task(puller.pull(1, 30))
        await server.restart()
        await queue.publish(RUN, AGENT, cause=1)

        async def filled() -> bool:
            nonlocal pull
            ended = await pull
            pull = asyncio.create_task(puller.pull(1, 1))
            return ended.why == "filled"

        await eventually(filled)
        await pull
    assert [task.cause for task in got] == [1]


async def test_a_server_that_shuts_down_ends_the_pull(
    queue: TaskQueue, server: NatsServer, got: list[Task]
) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await pulls_wait(queue)
        await server.stop()
        assert (await pull).why == "lost"
        await server.restart()


async def test_a_pull_whose_request_was_lost_ends_when_heartbeats_are_missed(
    queue: TaskQueue, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, got: list[Task]
) -> None:
    monkeypatch.setattr(tasks_pull, "HEARTBEAT_S", 0.2)
    connection = Connection(proxy.url, namespace="runfold")
    await connection.open()
    try:
        proxied = TaskQueue(connection, "runfold")
        async with proxied.pulling(AGENT, 0, got.append) as puller:
            # As nats-server 2.15.1 does with one that meets the deletion of its consumer.
            puller._next = f"_INBOX.{puller._inbox.split('.')[1]}.swallowed"
            async with connection.listening(puller._next, lambda _: None):
                assert (await puller.pull(1, 1_000)).why == "silent"
    finally:
        await connection.close()


async def test_a_task_that_comes_after_its_pull_still_reaches_the_callback(
    queue: TaskQueue, got: list[Task]
) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await pulls_wait(queue)
        pull.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pull
        await queue.publish(RUN, AGENT, cause=1)
        await eventually(lambda: got)
    assert (await queue.backlog(AGENT)).in_progress == 1


async def test_a_puller_that_was_left_gets_no_more_tasks(queue: TaskQueue, got: list[Task]) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await pulls_wait(queue)
        pull.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pull
    await queue.publish(RUN, AGENT, cause=1)
    later: list[Task] = []
    async with queue.pulling(AGENT, 0, later.append) as puller:
        assert await puller.pull(1) == PullEnd("filled")
    assert not got and later[0].delivery == 1  # nothing was delivered to nobody


async def test_two_pulls_at_once_are_refused(queue: TaskQueue, got: list[Task]) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await pulls_wait(queue)
        with pytest.raises(RuntimeError):
            await puller.pull(1)
        await queue.publish(RUN, AGENT, cause=1)
        await pull


async def test_what_is_no_task_is_removed_and_reported(
    queue: TaskQueue, server: NatsServer, got: list[Task], caplog: pytest.LogCaptureFixture
) -> None:
    bad: list[str] = []
    prefix = f"runfold.task.{CONSUMER}"
    for subject, payload in (
        (f"{prefix}.r1", b""),
        (f"{prefix}.r2", b"hello"),
        (f"{prefix}.r3", b'{"cause":"1"}'),
        (f"{prefix}.no~~+id", b'{"cause":1}'),
    ):
        assert "error" not in await ask(server.url, subject, payload)
    async with queue.pulling(AGENT, 0, got.append, bad.append) as puller:
        await puller.pull(4)
        assert len(bad) == 4 and not got

        async def removed() -> bool:
            info = await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}")
            return info["state"]["messages"] == 0

        await eventually(removed)
    await ask(server.url, f"{prefix}.r1", b"again")
    async with queue.pulling(AGENT, 0, got.append) as puller:
        await puller.pull(1)
    assert "r1" in caplog.text


async def test_a_callback_that_raises_ends_its_pull_and_not_the_connection(
    queue: TaskQueue, got: list[Task]
) -> None:
    def bug(task: Task) -> None:
        raise KeyError("bug")

    await queue.publish(RUN, AGENT, cause=1)
    async with queue.pulling(AGENT, 0, bug) as puller:
        with pytest.raises(KeyError):
            await puller.pull(5)
        await queue.publish(RUN, AGENT, cause=2)
        with pytest.raises(KeyError):
            await puller.pull(5)
    assert (await queue.backlog(AGENT)).in_progress == 2


@pytest.mark.parametrize(
    ("status", "text", "end"),
    [
        ("409", "Leadership Change", PullEnd("lost", "Leadership Change")),
        ("503", "", PullEnd("gone", "nobody answers for the consumer")),
        ("408", "Request Timeout", PullEnd("expired")),
    ],
)
async def test_a_pull_that_has_ended_stays_so_whatever_comes_with_its_end(
    queue: TaskQueue, got: list[Task], status: str, text: str, end: PullEnd
) -> None:
    """A process that stood still reads all at once: the end, and a heartbeat of another leader."""
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(2))
        await pulls_wait(queue)
        reply = puller._reply
        for headers in ({STATUS: status, "Description": text}, {STATUS: "100"}):
            puller._take(Incoming(reply, b"", headers, ""))
        assert await pull == end
        await queue.publish(RUN, AGENT, cause=1)
        await eventually(lambda: got)


async def test_a_pull_that_late_tasks_have_filled_outlives_the_next_heartbeat(
    queue: TaskQueue, got: list[Task]
) -> None:
    async with queue.pulling(AGENT, 0, got.append) as puller:
        pull = asyncio.create_task(puller.pull(1))
        await pulls_wait(queue)
        late = Incoming(task_subject("runfold", AGENT, RUN, 0), b'{"cause":1}', {}, DELIVERY)
        puller._take(late)
        puller._take(Incoming(puller._reply, b"", {STATUS: "100"}, ""))
        assert await pull == PullEnd("filled")
    assert [task.cause for task in got] == [1]


# ---- the connection ------------------------------------------------------------------------------


async def test_a_connection_closed_for_good_says_so_and_why(queue: TaskQueue) -> None:
    connection = queue._connection
    assert not connection.closed_for_good
    waiting = asyncio.create_task(connection.wait_closed())
    client = connection._nc
    await client.publish("runfold.x", b"x" * client.max_payload, headers={"One": "too many"})
    reason = await waiting
    assert isinstance(reason, StoreUnavailable) and "maximum payload" in str(reason).lower()
    assert connection.closed_for_good
    with pytest.raises(StoreUnavailable):
        await connection.publish("runfold.x", b"")
    with pytest.raises(StoreUnavailable):
        async with queue.pulling(AGENT, 0, lambda _: None):
            raise AssertionError("pulling")


async def test_the_owners_close_is_not_for_good(server: NatsServer) -> None:
    connection = Connection(server.url, namespace="runfold")
    await connection.open()
    waiting = asyncio.create_task(connection.wait_closed())
    await connection.close()
    assert not connection.closed_for_good and not waiting.done()
    waiting.cancel()


@REAL_ONLY
@pytest.mark.parametrize(
    "text", ["maximum connections exceeded", "authentication timeout", "stale connection"]
)
async def test_an_error_that_a_new_connection_mends_does_not_close_for_good(
    queue: TaskQueue, text: str
) -> None:
    connection = queue._connection
    before = connection._nc.stats["reconnects"]
    await connection._nc._process_err(f"'{text}'")
    await eventually(lambda: connection._nc.stats["reconnects"] > before)
    assert not await queue.holds(RUN, AGENT) and not connection.closed_for_good


async def test_published_while_there_is_no_connection_is_dropped(
    queue: TaskQueue, server: NatsServer
) -> None:
    heard: list[Incoming] = []
    connection = queue._connection
    async with connection.listening("some.*", heard.append):
        await server.kill()
        await eventually(lambda: not connection._nc.is_connected)
        await connection.publish("some.early", b"1")
        await server.restart()
        await eventually(lambda: connection._nc.is_connected)
        await connection.confirm("some.*")
        await connection.publish("some.late", b"2", {"A": "b"})
        await eventually(lambda: heard)
    assert heard == [Incoming("some.late", b"2", {"A": "b"}, "")]


# ---- the form of a delivery ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.ACK.S.c.3.12.99.1795982946161673432.4",
        "$JS.ACK.domain.hash.S.c.3.12.99.1795982946161673432.4",
        "$JS.ACK._.hash.S.c.3.12.99.1795982946161673432.4.token",
    ],
)
def test_deliveries_of_both_forms_are_read(reply: str) -> None:
    task = read_task(Incoming("ns.task.a.r~1.high", b'{"cause":5,"new":1}', {}, reply), "a")
    assert (task.delivery, task.sequence, task.pending, task.priority) == (3, 12, 4, 1)
    assert task.at.isoformat() == "2026-11-29T20:09:06.161673+00:00" and task.run_id == "r.1"


@pytest.mark.parametrize("reply", ["", "_INBOX.x", "$JS.ACK.S.c.3.12", "$JS.ACK.S.c.a.b.c.d.e"])
def test_what_is_no_delivery_is_malformed(reply: str) -> None:
    with pytest.raises(Malformed):
        read_task(Incoming("ns.task.a.r", b'{"cause":5}', {}, reply), "a")
