"""Core: the name of a task that was given to a worker over HTTP: all that must outlive a bridge.

It is no secret and no proof: it says which delivery the worker was given, on which terms, and under
which worker id. Whose it is says the id itself, which holds the name of the token's owner; what it
may still do says the journal.
"""

from __future__ import annotations

import math
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from journal import ids, limits
from journal.errors import InvalidId
from journal.stores.delivery import Malformed, read_delivery
from journal.stores.jetstream_streams import tasks_name
from journal.stores.tasks_message import PRIORITIES, Task, consumer_name
from journal.terms import Bounds, Retry

from .problems import NotFound

TASK_CHARS_MAX: Final = 4096

_NONCE: Final = re.compile(r"[0-9a-f]{16}", re.ASCII)

Revision = Annotated[str, Meta(max_length=100, pattern="^[ -~]*$")]
AckWait = Annotated[float, Meta(ge=limits.ACK_WAIT_MIN_S, le=limits.ACK_WAIT_MAX_S)]
Seconds = Annotated[float, Meta(ge=0, le=365 * 86400.0)]


class AgentBounds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See journal.terms.Bounds."""

    iterations: Annotated[int, Meta(ge=1, le=1_000_000)] = limits.ITERATIONS_MAX
    calls_per_iteration: Annotated[int, Meta(ge=1, le=100_000)] = limits.CALLS_PER_ITERATION_MAX
    duration_s: Seconds | None = None


class AgentRetry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See journal.terms.Retry."""

    attempts: Annotated[int, Meta(ge=1, le=1000)] = limits.RETRY_ATTEMPTS
    backoff_s: Seconds = limits.RETRY_BACKOFF_S
    backoff_max_s: Seconds = limits.RETRY_BACKOFF_MAX_S


class AgentTerms(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker over HTTP says of an agent it works for (journal.terms.Terms)."""

    name: Annotated[str, Meta(max_length=limits.NAME_CHARS_MAX)]
    revision: Revision = "1"
    compatible: Annotated[tuple[Revision, ...], Meta(max_length=8)] = ()
    bounds_: AgentBounds = msgspec.field(default=AgentBounds(), name="bounds")
    retry_: AgentRetry = msgspec.field(default=AgentRetry(), name="retry")

    @property
    def accepts(self) -> tuple[str, ...]:
        return (self.revision, *self.compatible)

    @property
    def bounds(self) -> Bounds:
        return Bounds(**msgspec.structs.asdict(self.bounds_))

    @property
    def retry(self) -> Retry:
        return Retry(**msgspec.structs.asdict(self.retry_))

    @property
    def loop(self) -> bool:
        return False


class TaskName(Struct, frozen=True, array_like=True):
    """`nonce`: new for each task; it ends the worker id, and begins the ids of its records.
    `ack_wait_s`: the one in force when it was delivered."""

    run: str
    priority: int
    cause: int
    reply: str
    nonce: str
    owner: str
    terms: AgentTerms
    ack_wait_s: AckWait

    @property
    def worker(self) -> str:
        """The id in claims and records. It has the owner's name, who alone may use the task."""
        return f"http-{self.owner}-{self.nonce}"

    def record_id(self, number: int) -> str:
        """The id of the worker's record with this number: the same for every repeat of it."""
        return f"{self.nonce[:12]}-{number}"

    def end_id(self, number: int) -> str:
        """As record_id, for records that end turns: of those alone a later one says that the turn
        has ended."""
        return f"{self.nonce[4:]}-{number}"


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TaskName).decode


def named(task: Task, owner: str, terms: AgentTerms, nonce: str, ack_wait_s: float) -> TaskName:
    """The name of this delivery to this owner; `nonce`: 16 fresh hex digits."""
    run, reply = task.run_id, task.reply
    return TaskName(run, task.priority, task.cause, reply, nonce, owner, terms, ack_wait_s)


def encode_name(name: TaskName) -> str:
    """As it stands in paths."""
    return urlsafe_b64encode(_encode(name)).decode().rstrip("=")


def decode_name(text: str, owner: str, namespace: str) -> tuple[TaskName, Task]:
    """The name, and the delivery as far as it is known: not when it came. Raises NotFound for what
    is no task of this owner."""
    unknown = NotFound("there is no such task", hint="poll for one")
    if len(text) > TASK_CHARS_MAX or not text.isascii():
        raise unknown
    try:
        name = _decode(urlsafe_b64decode(text + "=" * (-len(text) % 4)))
        run, agent = ids.run_id(name.run), ids.name(name.terms.name, "an agent")
        delivery = read_delivery(name.reply)
        at = delivery.at
    except (
        ValueError,
        msgspec.MsgspecError,
        RecursionError,
        InvalidId,
        Malformed,
        OverflowError,
    ) as error:
        raise unknown from error
    if name.owner != owner or name.priority not in PRIORITIES:
        raise unknown
    # Acknowledgements go there: to a consumer of this agent's tasks, and to no other subject.
    consumer = (tasks_name(namespace), consumer_name(agent, name.priority))
    if (delivery.stream, delivery.consumer) != consumer or _NONCE.fullmatch(name.nonce) is None:
        raise unknown
    return name, Task(
        run_id=run,
        agent=agent,
        cause=name.cause,
        sequence=delivery.sequence,
        delivery=delivery.count,
        priority=name.priority,
        pending=delivery.pending,
        at=at,
        reply=name.reply,
        arrived=-math.inf,
    )
