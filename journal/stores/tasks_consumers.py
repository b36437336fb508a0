"""Store: an agent's three consumers on the TASKS stream: one for each priority."""

from __future__ import annotations

from .stream_api import Consumer, ConsumerConfig, StreamApi
from .tasks_message import PRIORITIES, Priority, consumer_filter, consumer_name

ACK_PENDING_MAX = 100_000
"""Tasks of an agent at work in the whole fleet. At the limit the server delivers no more and says
nothing (its default is 1 000): so far above what any fleet works on at once."""

PULLS_MAX = 2048
"""Pulls that wait at one consumer: a few for each worker of the fleet (default 512). One too many
is answered with 409, or, mostly, swallowed in silence (nats-server 2.15.1)."""


class Consumers:
    """Of the agents of a namespace."""

    def __init__(self, api: StreamApi, namespace: str) -> None:
        self._api = api
        self._namespace = namespace

    async def ensure(self, agent: str, ack_wait_s: float, *, change: bool) -> float:
        """See TaskQueue.ensure."""
        waits = [
            await self._api.ensure(
                consumer_name(agent, priority),
                ConsumerConfig(
                    ack_wait=int(ack_wait_s * 1e9),
                    filter_subject=consumer_filter(self._namespace, agent, priority),
                    max_ack_pending=ACK_PENDING_MAX,
                    max_waiting=PULLS_MAX,
                ),
                change=change,
            )
            for priority in PRIORITIES
        ]
        return min(waits)

    async def look_up(self, agent: str, priority: Priority) -> Consumer | None:
        return await self._api.look_up(consumer_name(agent, priority))
