"""Tasks wake workers: kept through crashes, redelivered until done, never silently lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kit.raw_client import ask
from kit.servers import Cluster, NatsServer
from kit.waiting import eventually

from journal.errors import NotProvisioned, PermissionDenied
from journal.ids import RunId
from journal.stores.jetstream_streams import tasks_config
from journal.stores.nats_connection import Connection
from journal.stores.provision import provision
from journal.stores.tasks import Backlog, TaskQueue
from journal.stores.tasks_message import Task

RUN = RunId("Order.7")
AGENT = "desk.v1"
STREAM = "RUNFOLD_TASKS"


@pytest.fixture
async def queue(server: NatsServer) -> AsyncIterator[TaskQueue]:
    """Tasks on a server of the test's own."""
    await provision(server.url)
    connection = Connection(server.url, namespace="runfold")
    await connection.open()
    yield TaskQueue(connection, "runfold")
    await connection.close()


class Inbox:
    """What a puller's callbacks got."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.malformed: list[str] = []

    def pulling(self, queue: TaskQueue, priority: int = 0) -> Any:
        return queue.pulling(AGENT, priority, self.tasks.append, self.malformed.append)

    @property
    def causes(self) -> list[int]:
        return [task.cause for task in self.tasks]


async def drained(queue: TaskQueue, priority: int = 0) -> list[Task]:
    """What can be had at once, acknowledged."""
    inbox = Inbox()
    async with inbox.pulling(queue, priority) as puller:
        await puller.pull(100, 0.3)
    for task in inbox.tasks:
        assert await queue.ack(task)
    return inbox.tasks


# ---- delivery ------------------------------------------------------------------------------------


async def test_a_task_arrives_with_all_that_a_claim_needs(queue: TaskQueue) -> None:
    assert await queue.ensure(AGENT, ack_wait_s=30) == 30
    before = datetime.now(UTC) - timedelta(seconds=5)
    await queue.publish(RUN, AGENT, cause=7)
    await queue.publish(RunId("other"), AGENT, cause=1)
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        ended = await puller.pull(2)
    assert ended.why == "filled"
    first, second = inbox.tasks
    assert (first.run_id, first.agent, first.cause) == (RUN, AGENT, 7)
    assert (first.delivery, first.priority, first.pending, first.sequence) == (1, 0, 1, 1)
    assert (second.run_id, second.pending) == ("other", 0)
    assert before < first.at < before + timedelta(minutes=1)
    assert first.arrived <= second.arrived


@pytest.mark.parametrize("priority", [-1, 0, 1])
async def test_each_priority_is_delivered_to_its_own_consumer(
    queue: TaskQueue, priority: int
) -> None:
    await queue.ensure(AGENT, ack_wait_s=30)
    for each in (-1, 0, 1):
        await queue.publish(RUN, AGENT, cause=each + 5, priority=each)
    (task,) = await drained(queue, priority)
    assert (task.priority, task.cause, task.run_id) == (priority, priority + 5, RUN)


async def test_a_priority_that_is_none_is_refused(queue: TaskQueue) -> None:
    with pytest.raises(ValueError, match="priority"):
        await queue.publish(RUN, AGENT, cause=1, priority=2)


async def test_a_task_that_was_nacked_is_delivered_again_with_a_higher_count(
    queue: TaskQueue,
) -> None:
    await queue.ensure(AGENT, ack_wait_s=600)
    await queue.publish(RUN, AGENT, cause=7)
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        await puller.pull(1)
        queue.nak(inbox.tasks[0])
        await puller.pull(1)
        queue.nak(inbox.tasks[1], delay_s=0.2)
        await puller.pull(1)
    assert [task.delivery for task in inbox.tasks] == [1, 2, 3]


async def test_a_task_in_progress_is_not_delivered_again_and_a_forgotten_one_is(
    queue: TaskQueue,
) -> None:
    await queue.ensure(AGENT, ack_wait_s=1)
    await queue.publish(RunId("held"), AGENT, cause=1)
    await queue.publish(RunId("lost"), AGENT, cause=1)
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        await puller.pull(2)
        held = inbox.tasks[0]
        pull = asyncio.create_task(puller.pull(1))

        async def again() -> bool:
            queue.in_progress(held)
            await asyncio.sleep(0.1)
            return pull.done()

        await eventually(again)
    assert [task.run_id for task in inbox.tasks[2:]] == ["lost"]


async def test_an_ack_is_confirmed_and_ends_the_task(queue: TaskQueue) -> None:
    await queue.ensure(AGENT, ack_wait_s=30)
    await queue.publish(RUN, AGENT, cause=7)
    assert await queue.holds(RUN, AGENT)
    (task,) = await drained(queue)
    assert not await queue.holds(RUN, AGENT)
    assert await queue.ack(task)  # of what is settled: confirmed too
    assert await queue.backlog(AGENT) == Backlog(waiting=0)


async def test_an_ack_without_a_consumer_is_not_confirmed(queue: TaskQueue) -> None:
    await queue.ensure(AGENT, ack_wait_s=30)
    await queue.publish(RUN, AGENT, cause=7)
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        await puller.pull(1)
    await ask(queue._connection.shown, f"$JS.API.CONSUMER.DELETE.{STREAM}.desk~v1")
    assert not await queue.ack(inbox.tasks[0])


@pytest.mark.parametrize("priority", [-1, 0, 1])
async def test_holds_sees_a_task_of_any_priority_and_of_no_other_run_or_agent(
    queue: TaskQueue, priority: int
) -> None:
    await queue.publish(RUN, AGENT, cause=7, priority=priority)
    assert await queue.holds(RUN, AGENT)
    assert not await queue.holds(RunId("Order"), AGENT)
    assert not await queue.holds(RUN, "desk")


async def test_agents_are_those_with_tasks_waiting_or_at_work(queue: TaskQueue) -> None:
    assert await queue.agents() == {}
    for run, agent, priority in (("r1", "a.b", 0), ("r2", "a.b", 1), ("r3", "c", -1)):
        await queue.publish(RunId(run), agent, cause=1, priority=priority)
    await queue.schedule(RunId("r4"), "later", at=datetime(2999, 1, 1, tzinfo=UTC), cause=1)
    assert await queue.agents() == {"a.b": 2, "c": 1}


async def test_backlog_and_timers_count_what_waits(queue: TaskQueue) -> None:
    for priority in (-1, 0, 1):
        await queue.publish(RUN, AGENT, cause=7, priority=priority)
    assert await queue.backlog(AGENT) == Backlog(pending=3)  # no consumer yet
    await queue.ensure(AGENT, ack_wait_s=30)
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        await puller.pull(1)
        assert await queue.backlog(AGENT) == Backlog(pending=2, in_progress=1)
        queue.nak(inbox.tasks[0])
        await puller.pull(1)
        assert await queue.backlog(AGENT) == Backlog(pending=2, in_progress=1, redelivered=1)
    assert await queue.timers() == 0
    for run in ("a", "b"):
        await queue.schedule(RunId(run), AGENT, at=datetime(2100, 1, 1, tzinfo=UTC), cause=1)
    assert await queue.timers() == 2


# ---- timers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("priority", [-1, 0, 1])
async def test_a_timer_fires_to_the_agents_consumer_with_its_cause(
    queue: TaskQueue, priority: int
) -> None:
    await queue.ensure(AGENT, ack_wait_s=30)
    due = datetime.now(UTC) + timedelta(seconds=0.5)
    await queue.schedule(RUN, AGENT, at=due, cause=9, priority=priority)
    inbox = Inbox()
    async with inbox.pulling(queue, priority) as puller:
        await puller.pull(1, 10)
    (task,) = inbox.tasks
    assert (task.run_id, task.cause, task.priority) == (RUN, 9, priority)
    assert task.at >= due  # sub-seconds are kept
    assert await queue.timers() == 0


@pytest.mark.parametrize(
    "at",
    [
        datetime.now(UTC) - timedelta(days=1),
        datetime(1960, 1, 1, tzinfo=UTC),
        datetime.min.replace(tzinfo=UTC),
    ],
)
async def test_a_timer_in_the_past_fires_at_once(queue: TaskQueue, at: datetime) -> None:
    await queue.ensure(AGENT, ack_wait_s=30)
    await queue.schedule(RUN, AGENT, at=at, cause=9)
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        await puller.pull(1, 10)
    assert inbox.causes == [9]


async def test_a_timer_replaces_the_earlier_one_of_its_run(queue: TaskQueue) -> None:
    await queue.ensure(AGENT, ack_wait_s=30)
    now = datetime.now(UTC)
    await queue.schedule(RUN, AGENT, at=now + timedelta(seconds=0.6), cause=1)
    await queue.schedule(RUN, AGENT, at=now + timedelta(seconds=1.2), cause=2)
    await queue.schedule(RunId("last"), AGENT, at=now + timedelta(seconds=1.8), cause=3)
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        await puller.pull(2, 10)
    assert inbox.causes == [2, 3]


@pytest.mark.parametrize("year", [2262, 9999])
async def test_a_timer_far_away_waits_and_outlives_the_server(
    queue: TaskQueue, server: NatsServer, year: int
) -> None:
    """nats-server 2.15.1 by itself fires at once what is later than 2262-04-11."""
    await queue.ensure(AGENT, ack_wait_s=30)
    far = datetime(year, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
    await queue.schedule(RunId("far"), AGENT, at=far, cause=1)
    due = datetime.now(UTC) + timedelta(seconds=0.3)
    await queue.schedule(RUN, AGENT, at=due, cause=2)
    await server.kill()
    await server.restart()
    inbox = Inbox()
    async with inbox.pulling(queue) as puller:
        await eventually(lambda: puller.pull(1, 1) if not inbox.tasks else _true())
    assert inbox.causes == [2]
    assert await queue.timers() == 1


async def _true() -> bool:
    return True


async def test_a_timer_without_a_time_zone_is_refused(queue: TaskQueue) -> None:
    with pytest.raises(ValueError, match="time zone"):
        await queue.schedule(RUN, AGENT, at=datetime(2100, 1, 1), cause=1)


# ---- consumers -----------------------------------------------------------------------------------


async def config_of(url: str, name: str) -> dict[str, Any]:
    return (await ask(url, f"$JS.API.CONSUMER.INFO.{STREAM}.{name}"))["config"]


async def test_ensure_makes_three_consumers_that_never_give_up_a_task(
    queue: TaskQueue, server: NatsServer
) -> None:
    await queue.ensure(AGENT, ack_wait_s=30)
    for name, filter in (
        ("desk~v1", "runfold.task.desk~v1.*"),
        ("desk~v1~high", "runfold.task.desk~v1.*.high"),
        ("desk~v1~low", "runfold.task.desk~v1.*.low"),
    ):
        config = await config_of(server.url, name)
        del config["metadata"]
        assert config == {
            "name": name,
            "durable_name": name,
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": 30_000_000_000,
            "max_deliver": -1,
            "filter_subject": filter,
            "replay_policy": "instant",
            "max_waiting": 2048,
            "max_ack_pending": 100_000,
            "num_replicas": 0,
        }


async def test_ensure_again_changes_nothing_and_another_ack_wait_is_taken_over_loudly(
    queue: TaskQueue, server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    waits = await asyncio.gather(*(queue.ensure(AGENT, ack_wait_s=30) for _ in range(5)))
    assert waits == [30.0] * 5 and not caplog.records
    before = await config_of(server.url, "desk~v1")
    assert await queue.ensure(AGENT, ack_wait_s=30) == 30
    assert await config_of(server.url, "desk~v1") == before and not caplog.records
    assert await queue.ensure(AGENT, ack_wait_s=2.5) == 2.5
    assert (await config_of(server.url, "desk~v1"))["ack_wait"] == 2_500_000_000
    assert "desk~v1" in caplog.text


PERMISSIONS = """
authorization {
  users = [
    { user: admin, password: p }
    { user: worker, password: p, permissions: {
        publish: { deny: ["$JS.API.CONSUMER.CREATE.>"] } } }
    { user: mute, password: p, permissions: {
        publish: { deny: ["runfold.task.>", "runfold.timer.>", "$JS.API.CONSUMER.MSG.NEXT.>"] } } }
    { user: deaf, password: p, permissions: { subscribe: { deny: ["secret.*"] } } }
  ]
}
"""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Any]:
    """A queue as a user."""
    server = await NatsServer.start(tmp_path / "guarded", extra_conf=PERMISSIONS)
    await provision(server.url.replace("nats://", "nats://admin:p@"))
    opened: list[Connection] = []

    async def as_user(user: str) -> TaskQueue:
        url = server.url.replace("nats://", f"nats://{user}:p@")
        connection = Connection(url, namespace="runfold")
        await connection.open()
        opened.append(connection)
        return TaskQueue(connection, "runfold")

    yield as_user
    for connection in opened:
        await connection.close()
    await server.stop()


async def test_who_may_not_make_consumers_uses_those_that_are_there(guarded: Any) -> None:
    worker: TaskQueue = await guarded("worker")
    with pytest.raises(PermissionDenied):
        await worker.ensure(AGENT, ack_wait_s=30)
    admin: TaskQueue = await guarded("admin")
    await admin.ensure(AGENT, ack_wait_s=30)
    assert await worker.ensure(AGENT, ack_wait_s=30) == 30
    assert await worker.ensure(AGENT, ack_wait_s=5) == 30  # the one in force


async def test_a_denied_task_timer_pull_or_subscription_reaches_the_caller(guarded: Any) -> None:
    mute: TaskQueue = await guarded("mute")
    with pytest.raises(PermissionDenied) as denied:
        await mute.publish(RUN, AGENT, cause=1)
    assert denied.value.subject == "runfold.task.desk~v1.Order~7"
    with pytest.raises(PermissionDenied):
        await mute.schedule(RUN, AGENT, at=datetime.now(UTC), cause=1)
    async with Inbox().pulling(mute) as puller:
        with pytest.raises(PermissionDenied):
            await puller.pull(1, 1_000)
    deaf: TaskQueue = await guarded("deaf")
    with pytest.raises(PermissionDenied) as denied:
        async with deaf._connection.listening("secret.*", lambda _: None):
            raise AssertionError("listening")
    assert denied.value.subject == "secret.*"


# ---- what is missing -----------------------------------------------------------------------------


async def test_without_the_stream_every_call_says_to_run_init(
    queue: TaskQueue, server: NatsServer
) -> None:
    await ask(server.url, f"$JS.API.STREAM.DELETE.{STREAM}")
    for call in (
        lambda: queue.publish(RUN, AGENT, cause=1),
        lambda: queue.schedule(RUN, AGENT, at=datetime.now(UTC), cause=1),
        lambda: queue.ensure(AGENT, ack_wait_s=30),
        lambda: queue.holds(RUN, AGENT),
        lambda: queue.backlog(AGENT),
        lambda: queue.timers(),
    ):
        with pytest.raises(NotProvisioned, match=STREAM) as missing:
            await call()
        assert "runfold init" in missing.value.hint


async def test_a_task_is_stored_though_the_server_was_killed_meanwhile(
    queue: TaskQueue, server: NatsServer
) -> None:
    await server.kill()
    publishing = asyncio.create_task(queue.publish(RUN, AGENT, cause=1))
    await server.restart()
    await publishing
    assert await queue.holds(RUN, AGENT)


@pytest.mark.cluster
async def test_tasks_and_timers_survive_a_change_of_leader(
    cluster: Cluster, namespace: str
) -> None:
    url = ",".join(cluster.urls)
    made = await provision(url, namespace=namespace)
    assert [stream.replicas for stream in made.others] == [3, 3, 3]
    connection = Connection(url, namespace=namespace)
    await connection.open()
    try:
        queue = TaskQueue(connection, namespace)
        await queue.ensure(AGENT, ack_wait_s=30)
        due = datetime.now(UTC) + timedelta(seconds=1)
        await queue.schedule(RunId("timed"), AGENT, at=due, cause=1)
        await cluster.step_down(tasks_config(namespace, 3)["name"])
        await queue.publish(RUN, AGENT, cause=2)
        inbox = Inbox()
        async with inbox.pulling(queue) as puller:

            async def both() -> bool:
                await puller.pull(2, 1)
                return {1, 2} <= set(inbox.causes)

            await eventually(both, 40)
    finally:
        await connection.close()
