"""Store: which runs have a task in flight: delivered to some worker, and not settled.

Read from the stream's leader one by one: as many reads as the fleet has runs at work, whatever
waits in the queue or is parked. Only a hint: what is settled meanwhile is named all the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from ..at_once import at_once
from ..errors import InvalidId
from ..ids import RunId, from_subject_token
from ..limits import FLIGHT_MAX
from .jetstream_read import Patience, Reader
from .tasks_consumers import Consumers
from .tasks_message import PRIORITIES, Priority, cause_of, consumer_filter, task_subject


class InFlight(Struct, frozen=True):
    """A run with tasks in flight: the sequences of the `first` and the `last` of them, and the
    latest record that one is about."""

    run_id: RunId
    agent: str
    first: int
    last: int
    cause: int


class Flight:
    """The tasks in flight of a namespace's agents."""

    def __init__(self, reader: Reader, consumers: Consumers, namespace: str) -> None:
        self._reader = reader
        self._consumers = consumers
        self._namespace = namespace

    async def of(self, agents: Iterable[str]) -> dict[RunId, InFlight]:
        """By run. Raises StoreUnavailable."""
        found: dict[RunId, InFlight] = {}
        async with at_once() as group:
            for agent in agents:
                for priority in PRIORITIES:
                    group.create_task(self._collect(agent, priority, found))
        return found

    async def _collect(self, agent: str, priority: Priority, found: dict[RunId, InFlight]) -> None:
        consumer = await self._consumers.look_up(agent, priority)
        if consumer is None or not consumer.num_ack_pending:
            return
        last, end = consumer.ack_floor.stream_seq, consumer.delivered.stream_seq
        subjects = consumer_filter(self._namespace, agent, priority)
        patience = Patience(f"the tasks of agent {agent} could not be read")
        while last < end and len(found) < FLIGHT_MAX:
            stored = await self._reader.first(subjects, last, patience)
            if stored is None or stored.seq > end:
                return
            last = stored.seq
            try:
                run_id = from_subject_token(stored.subject.split(".")[3])
            except InvalidId:  # no task: whoever it is delivered to removes it
                continue
            cause, before = cause_of(stored.data), found.get(run_id)
            first = before.first if before else last
            cause = max(cause, before.cause) if before else cause
            found[run_id] = InFlight(run_id, agent, first, last, cause)

    async def newest(self, run_id: RunId, agent: str, priority: Priority) -> int:
        """The sequence of the run's last task that waits or is in flight; 0 without one."""
        subject = task_subject(self._namespace, agent, run_id, priority)
        patience = Patience(f"the tasks of run {run_id} could not be read")
        stored = await self._reader.last(subject, patience)
        return stored.seq if stored is not None else 0
