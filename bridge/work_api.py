"""Shell: the operations of workers over HTTP: /tasks (docs/http-workers.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Final, TypeVar

from msgspec import Meta, Struct
from starlette.responses import Response

from journal import ids
from journal.limits import WAIT_MAX_S
from journal.messages import JSON

from . import remote_turns
from .call import Call, answer
from .offers import RemoteTasks
from .operation import Handler, Operation, Parameter, json_answer
from .remote import RemoteTask
from .remote_calls import append
from .remote_shapes import Appended
from .remote_turns import Claimed, Completes, Continues, Fails, Number, Pauses
from .task_id import TASK_CHARS_MAX, AgentTerms

TASK: Final = Parameter(
    name="task",
    place="path",
    schema={"type": "string", "maxLength": TASK_CHARS_MAX},
    about="As POST /tasks/poll answered it.",
)

S = TypeVar("S", bound=Struct)


class Polls(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`wait_s`: at most so long."""

    agents: Annotated[tuple[AgentTerms, ...], Meta(min_length=1, max_length=64)]
    wait_s: Annotated[float, Meta(ge=0, le=WAIT_MAX_S)] = 30.0


class GivenTask(Struct, frozen=True, kw_only=True):
    """A task for this worker. Nothing is claimed yet."""

    task: str
    run: str
    agent: str
    delivery: int
    ack_wait_s: float


class Reads(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`claim`: as journal.read answered it, if it did."""

    claim: Claimed | None = None


class Appends(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`id`: 1, 2, 3, … in this task; the same for a repeat."""

    id: Number
    record: Appended
    claim: Claimed | None = None


class Beats(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`preview`: a piece of what the model says, for followers."""

    claim: Claimed | None = None
    preview: Annotated[str, Meta(max_length=65536)] = ""


class Turn(Struct, frozen=True, kw_only=True):
    """The turn to play. `traceparent`: of the claim's span; empty where there is none."""

    run: str
    agent: str
    input: JSON
    iteration: int
    attempt: int
    state: JSON
    claim: int
    steps: list[dict[str, JSON]]
    told: list[dict[str, JSON]]
    queued: dict[str, int]
    cancelled: bool
    traceparent: str


class Ended(Struct, frozen=True, kw_only=True):
    """`more`: the next turn is this task's, too."""

    status: str
    more: bool
    claim: int | None


class Checkpoint(Struct, frozen=True, kw_only=True):
    """The state of the last commit, record `n`; `source` is `start` where there is none."""

    state: JSON
    source: str
    n: int
    iteration: int


class Released(Struct, frozen=True, kw_only=True):
    """The task is over; somebody else gets the run at once."""

    released: bool


class Beaten(Struct, frozen=True, kw_only=True):
    """The task is still this worker's."""

    cancelled: bool


def operations(tasks: RemoteTasks) -> list[Operation]:
    """Of scope `work`."""

    return [
        Operation(
            name="poll",
            method="POST",
            path="/tasks/poll",
            scope="work",
            summary="Wait for a task of these agents",
            handle=_poll(tasks),
            answers={
                200: json_answer("A task.", GivenTask),
                204: json_answer("None came in time.", None),
            },
            problems=(400, 413),
            body=Polls,
        ),
        _verb(tasks, "journal.read", Reads, Turn, lambda t, b: remote_turns.read(t, b.claim)),
        _verb(
            tasks,
            "journal.append",
            Appends,
            dict[str, Any],
            lambda t, b: append(t, b.id, b.claim, b.record),
        ),
        _verb(
            tasks,
            "load_checkpoint",
            Reads,
            Checkpoint,
            lambda t, b: remote_turns.checkpoint(t, b.claim),
        ),
        _verb(
            tasks, "heartbeat", Beats, Beaten, lambda t, b: remote_turns.beat(t, b.claim, b.preview)
        ),
        _verb(tasks, "release", Reads, Released, lambda t, b: remote_turns.release(t, b.claim)),
        _verb(tasks, "complete", Completes, Ended, remote_turns.end),
        _verb(tasks, "continue", Continues, Ended, remote_turns.end),
        _verb(tasks, "pause", Pauses, Ended, remote_turns.end),
        _verb(tasks, "fail", Fails, Ended, remote_turns.end),
    ]


def _poll(tasks: RemoteTasks) -> Handler:
    async def poll(call: Call) -> Response:
        asked = await call.body(Polls)
        for agent in asked.agents:
            ids.name(agent.name, "an agent")
        owner = call.by
        found = await call.attended(lambda: tasks.poll(owner, asked.agents, asked.wait_s))
        if found is None:
            return Response(status_code=204)
        text, task = found
        return answer(
            GivenTask(
                task=text,
                run=task.run_id,
                agent=task.terms.name,
                delivery=task.delivery,
                ack_wait_s=task.ack_wait_s,
            )
        )

    return poll


def _verb(
    tasks: RemoteTasks,
    verb: str,
    shape: type[S],
    said: Any,
    do: Callable[[RemoteTask, S], Awaitable[Any]],
) -> Operation:
    async def handle(call: Call) -> Response:
        body = await call.body(shape)
        async with tasks.using(call.path["task"], call.by) as task:
            return answer(await do(task, body))

    return Operation(
        name=f"task_{verb.replace('.', '_')}",
        method="POST",
        path=f"/tasks/{{task}}/{verb}",
        scope="work",
        summary=(shape.__doc__ or verb).split("\n")[0],
        handle=handle,
        answers={200: json_answer("Done, or what was answered the first time.", said)},
        problems=(400, 404, 409, 410, 413),
        parameters=(TASK,),
        body=shape,
    )
