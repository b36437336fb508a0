"""Store: the TASKS stream: hints that somebody is to look at a run, now or at a time (PROTOCOL 1).

A task carries no state and may come late, twice or for nothing. Timers are message schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from ..errors import StoreUnavailable
from ..ids import RunId, subject_token
from ..limits import APPEND_TRY_S
from .delivery import ACK, IN_PROGRESS, nak
from .jetstream_answers import MESSAGE_NOT_FOUND, ApiAnswer
from .jetstream_read import Reader
from .jetstream_streams import tasks_name
from .nats_connection import Connection
from .nats_waiting import NoReply
from .stream_api import Consumer, StreamApi
from .tasks_consumers import Consumers
from .tasks_flight import Flight
from .tasks_message import (
    PRIORITIES,
    Priority,
    Task,
    agent_of,
    cause_of,
    consumer_filter,
    consumer_name,
    encode_payload,
    read_task,
    task_subject,
)
from .tasks_pull import Puller

__all__ = ["PRIORITIES", "Backlog", "Priority", "Task", "TaskQueue"]

log = logging.getLogger("runfold")

# nats-server 2.15.1 counts nanoseconds in 64 bits: what is later than 2262-04-11 fires at once, and
# the year 1 never. A timer that fires early is set again by whoever meets it (PROTOCOL 5).
_LATEST = datetime(2262, 4, 1, tzinfo=UTC)
_EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)


class Backlog(Struct, frozen=True):
    """Of an agent: tasks that wait, are at work, were delivered again; and pulls that wait."""

    pending: int = 0
    in_progress: int = 0
    redelivered: int = 0
    waiting: int = 0


class _Stored(Struct, frozen=True):
    data: bytes = b""


class _Read(ApiAnswer, frozen=True):
    message: _Stored = _Stored()


_message = msgspec.json.Decoder(_Read)
_encode = msgspec.json.Encoder().encode


class TaskQueue:
    """The tasks of a namespace. Every call raises NotProvisioned where there is no TASKS stream,
    PermissionDenied, and StoreUnavailable when no answer comes within a bound."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self._connection = connection
        self._namespace = namespace
        self._stream = tasks_name(namespace)
        self._api = StreamApi(connection, namespace, self._stream)
        self._consumers = Consumers(self._api, namespace)
        self.flight = Flight(Reader(connection, self._stream), self._consumers, namespace)

    # ---- telling ----------------------------------------------------------------------------

    async def publish(
        self, run_id: RunId, agent: str, *, cause: int, priority: Priority = 0
    ) -> None:
        """Stored when it returns, perhaps twice."""
        subject = task_subject(self._namespace, agent, run_id, priority)
        await self._store(subject, encode_payload(cause), None)

    async def schedule(
        self, run_id: RunId, agent: str, *, at: datetime, cause: int, priority: Priority = 0
    ) -> None:
        """A task at the instant `at`, at once if that is past; it replaces the run's other timer.
        The furthest is 2262-04-01: later ones fire then."""
        if at.tzinfo is None:
            raise ValueError("a timer needs an instant: a datetime with a time zone")
        due = min(max(at, _EARLIEST), _LATEST).astimezone(UTC)
        headers = {
            "Nats-Schedule": f"@at {due.isoformat(timespec='microseconds')}",
            "Nats-Schedule-Target": task_subject(self._namespace, agent, run_id, priority),
        }
        subject = f"{self._namespace}.timer.{subject_token(run_id)}"
        await self._store(subject, encode_payload(cause), headers)

    async def _store(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> None:
        # No Nats-Msg-Id: a repeat is harmless, and within the window it would be swallowed though
        # the first was done and removed (nats-server 2.15.1).
        await self._api.store(subject, payload, headers, "a task")

    # ---- consumers --------------------------------------------------------------------------

    async def ensure(self, agent: str, *, ack_wait_s: float, change: bool = True) -> float:
        """The agent's three consumers are there; the ack wait in force, in seconds. A different one
        is changed, if `change` and where that is permitted."""
        return await self._consumers.ensure(agent, ack_wait_s, change=change)

    # ---- working ----------------------------------------------------------------------------

    def pulling(
        self,
        agent: str,
        priority: Priority,
        on_task: Callable[[Task], None],
        on_malformed: Callable[[str], None] | None = None,
    ) -> AbstractAsyncContextManager[Puller[Task]]:
        """A puller of one of the agent's consumers (see `ensure`). `on_task` gets what is delivered
        as it comes, late ones too, also while it is being left; it must not block. What is no task
        is removed, and reported to `on_malformed`, else logged."""

        def warn(text: str) -> None:
            log.warning("removed from stream %s: %s", self._stream, text)

        return Puller(
            self._connection,
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{consumer_name(agent, priority)}",
            lambda message: read_task(message, agent),
            on_task,
            on_malformed or warn,
        ).listening()

    async def ack(self, task: Task) -> bool:
        """Done. True: the server has confirmed it; it also does for what was settled before. Only
        for a current delivery: that of a superseded one settles its successor's."""
        reply = await self._connection.request(task.reply, ACK, timeout_s=APPEND_TRY_S)
        return not isinstance(reply, NoReply)

    def nak(self, task: Task, delay_s: float = 0.0) -> None:
        """Deliver it again, after `delay_s`. Fire and forget: else the ack wait does it."""
        self._connection.send(task.reply, nak(delay_s))

    def in_progress(self, task: Task) -> None:
        """The ack wait begins anew. Fire and forget."""
        self._connection.send(task.reply, IN_PROGRESS)

    # ---- looking ----------------------------------------------------------------------------

    async def holds(self, run_id: RunId, agent: str) -> bool:
        """Whether a task of the run waits or is at work. By the leader, which may be stale."""
        return await self.cause(run_id, agent) is not None

    async def cause(self, run_id: RunId, agent: str) -> int | None:
        """Of a task of the run that waits or is at work: the record it is about; None where there
        is no task. By the leader, which may be stale."""
        for priority in PRIORITIES:
            request = {"last_by_subj": task_subject(self._namespace, agent, run_id, priority)}
            answer = await self._api.call(
                _message, f"$JS.API.STREAM.MSG.GET.{self._stream}", _encode(request)
            )
            if answer.error is None:
                return cause_of(answer.message.data)
            if answer.error.err_code != MESSAGE_NOT_FOUND:
                raise StoreUnavailable(f"stream {self._stream} refuses to be read: {answer.error}")
        return None

    async def backlog(self, agent: str) -> Backlog:
        """Without consumers (no worker was ever there) what waits is counted in the stream."""
        total = Backlog()
        for priority in PRIORITIES:
            found = await self._consumers.look_up(agent, priority)
            if found is None:
                subjects = await self._api.info(consumer_filter(self._namespace, agent, priority))
                found = Consumer(num_pending=sum(subjects.state.subjects.values()))
            total = Backlog(
                total.pending + found.num_pending,
                total.in_progress + found.num_ack_pending,
                total.redelivered + found.num_redelivered,
                total.waiting + found.num_waiting,
            )
        return total

    async def agents(self) -> dict[str, int]:
        """Agents with tasks in the stream, waiting or at work, and how many; by the first 100 000
        tasks' subjects (a page of nats-server 2.15.1)."""
        found: dict[str, int] = {}
        there = await self._api.info(f"{self._namespace}.task.>")
        for subject, count in there.state.subjects.items():
            tokens = subject.split(".")  # ns.task.<agent>.<run>[.high|.low]
            if len(tokens) in (4, 5):
                agent = agent_of(tokens[2])
                found[agent] = found.get(agent, 0) + count
        return found

    async def timers(self) -> int:
        """How many runs have a timer."""
        # nats-server 2.15.1: a page beyond the end names no subjects, but counts them all.
        return (await self._api.info(f"{self._namespace}.timer.*", offset=10**9)).total
