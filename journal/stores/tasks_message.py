"""Store: a task as it stands in the TASKS stream: its subjects, its payload, its delivery."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TypeAlias

import msgspec
from msgspec import Struct

from ..errors import InvalidId
from ..ids import RunId, from_subject_token, subject_token
from .delivery import Malformed, read_delivery
from .nats_waiting import Incoming

Priority: TypeAlias = int
"""1, 0 or -1."""

PRIORITIES: tuple[Priority, ...] = (1, 0, -1)
_WORDS: dict[Priority, str] = {1: "high", 0: "", -1: "low"}
_PRIORITIES: dict[str, Priority] = {word: priority for priority, word in _WORDS.items()}


class Task(Struct, frozen=True, kw_only=True):
    """ "Look at this run, because of record `cause`", delivered. `delivery` counts from 1; `at` is
    the server's time of publishing (firing, if it was scheduled); `arrived` is time.monotonic();
    `pending`: how many more wait behind it."""

    run_id: RunId
    agent: str
    cause: int
    sequence: int
    delivery: int
    priority: Priority
    pending: int
    at: datetime
    reply: str
    arrived: float


class _Payload(Struct, frozen=True):
    cause: int


_decode = msgspec.json.Decoder(_Payload).decode
_encode = msgspec.json.Encoder().encode


def agent_token(agent: str) -> str:
    """The name as one subject token, like a run's id."""
    return agent.replace(".", "~")


def agent_of(token: str) -> str:
    return token.replace("~", ".")


def task_subject(namespace: str, agent: str, run_id: RunId, priority: Priority) -> str:
    if priority not in _WORDS:
        raise ValueError(f"a priority is 1, 0 or -1, not {priority}")
    word = _WORDS[priority]
    subject = f"{namespace}.task.{agent_token(agent)}.{subject_token(run_id)}"
    return f"{subject}.{word}" if word else subject


def consumer_name(agent: str, priority: Priority) -> str:
    """`~` stands in no agent's name, so `a~high` is no agent's."""
    word = _WORDS[priority]
    return f"{agent_token(agent)}~{word}" if word else agent_token(agent)


def consumer_filter(namespace: str, agent: str, priority: Priority) -> str:
    """What the consumer gets. Consumers of a work queue must not overlap (nats-server 2.15.1:
    10100): a task of another priority than 0 has one token more."""
    word = _WORDS[priority]
    subject = f"{namespace}.task.{agent_token(agent)}.*"
    return f"{subject}.{word}" if word else subject


def encode_payload(cause: int) -> bytes:
    return _encode(_Payload(cause))


def cause_of(payload: bytes) -> int:
    """0 where it says none: what is no task is removed by who is given it."""
    try:
        return _decode(payload).cause
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0


def read_task(message: Incoming, agent: str) -> Task:
    """The task that was delivered. Raises Malformed."""
    delivery = read_delivery(message.reply)
    tokens = message.subject.split(".")  # ns.task.<agent>.<run>[.high|.low]
    priority = _PRIORITIES.get(tokens[4] if len(tokens) == 5 else "")
    if priority is None or len(tokens) not in (4, 5):
        raise Malformed(f"{message.subject} is no task's subject")
    try:
        run_id = from_subject_token(tokens[3])
        cause = _decode(message.data).cause
    except InvalidId as error:
        raise Malformed(f"{message.subject} names no run") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"a task on {message.subject} without a cause: {error}") from error
    return Task(
        run_id=run_id,
        agent=agent,
        cause=cause,
        sequence=delivery.sequence,
        delivery=delivery.count,
        priority=priority,
        pending=delivery.pending,
        at=delivery.at,
        reply=message.reply,
        arrived=time.monotonic(),
    )
