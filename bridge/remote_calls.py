"""Shell: what a worker over HTTP appends besides starts: results, progress, placed inputs (R65).

Why it is safe: a result is a fact about one start of this very claim; an input is placed by its
position. See remote_starts.py for calls, remote.py for the claim and repeated requests.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, assert_never

from msgspec import UNSET, to_builtins

from journal import limits
from journal.calling import complete_step
from journal.codec import Damage
from journal.errors import (
    BadPayload,
    Fenced,
    RunfoldError,
    StaleSignal,
    TooLarge,
)
from journal.fold import Fold
from journal.messages import JSON
from journal.positions import Furthest, moved, placing, step_at
from journal.records import (
    InputPlaced,
    StepCompleted,
    StepError,
    StepProgress,
    Submitted,
)
from journal.values import canonical, normalise

from .remote import Committed, RemoteTask
from .remote_shapes import Appended, Completed, Placed, Progress, Started
from .remote_starts import said_before, start, stop, used


async def append(
    task: RemoteTask, number: int, claim: int | None, record: Appended
) -> dict[str, Any]:
    """Append the record under the worker's own number; what it may do now."""
    record_id = task.name.record_id(number)
    try:
        async with task.entered(claim, takes=True):
            try:
                answer = await _appended(task, number, record_id, record)
            except Damage as damage:  # of what we would write ourselves: the id is used
                raise used() from damage
            claimed = task.journal.claim
            if isinstance(record, Completed):
                answer["cancelled"] = task.journal.fold.cancel is not None
            return {"claim": claimed, **answer}
    except (Fenced, Committed):
        if isinstance(record, Completed) and record.result is not UNSET:
            with suppress(RunfoldError):  # it was told before, or is known already
                await task.late(record.start, normalise(record.result, "the result"))
        raise


async def _appended(
    task: RemoteTask, number: int, record_id: str, record: Appended
) -> dict[str, Any]:
    fold = task.journal.fold
    repeated = fold.repeats(record_id)
    if fold.repeats(task.name.end_id(number)):
        raise used()  # a copy, from before the end of an earlier turn
    match record:
        case Started():
            if repeated:
                return said_before(task, record_id, record)
            return await start(task, record_id, record)
        case Completed():
            return {"n": await _complete(task, record_id, record, repeated)}
        case Progress():
            return {"n": await _progress(task, record_id, record, repeated)}
        case Placed():
            return await _place(task, record_id, record, repeated)
        case other:
            assert_never(other)


# ---- results -----------------------------------------------------------------------------------


async def _complete(task: RemoteTask, record_id: str, record: Completed, repeated: bool) -> int:
    """A result is a fact about one start: calls that are made at once may end in any order."""
    journal, fold = task.journal, task.journal.fold
    name = step_at(fold.iteration, record.position)
    step = fold.steps.get(name)
    if (
        step is None
        or not step.starts
        or (step.last.n, step.last.claim) != (record.start, journal.claim)
    ):
        raise StaleSignal(
            f"record {record.start} is no start of this task at {name}", run_id=task.run_id
        )
    if step.last.kind == "model" and record.error is not UNSET:
        raise BadPayload("a failed model request is not recorded", hint="end the turn with `fail`")
    body = _result(name, record)
    if step.completed is not None:
        if _told(step.completed) == _told(body):
            return step.completed.n
        raise StaleSignal(f"{name} has a result, record {step.completed.n}", run_id=task.run_id)
    try:
        own = "" if repeated else record_id
        completed = await complete_step(journal, step.last, body, own)
    except TooLarge as error:
        await stop(task, name, error)
        raise
    if fold.cancel is not None and not task.open_writes():
        await task.ends().cancelled()
        await task.settle()
    return completed.n


def _told(completed: StepCompleted) -> bytes:
    """What two reports of one call are the same by."""
    fields = {"result": completed.result, "error": completed.error, "via": completed.via}
    return canonical(to_builtins({k: v for k, v in fields.items() if v is not UNSET}))


def _result(name: str, record: Completed) -> StepCompleted:
    given = [record.result, record.error, record.not_called]
    if sum(one is not UNSET for one in given) != 1:
        raise BadPayload("a step is completed with one of result, error, not_called")
    if record.not_called is not UNSET:
        problem = StepError(type="not_called", message=record.not_called)
        return StepCompleted(step=name, error=problem, via="not_called")
    if record.error is not UNSET:
        message = record.error.message[: limits.REASON_CHARS_MAX]
        data = normalise(record.error.data, "the data of an error")
        problem = StepError(type="tool_error", message=message, data=data)
        return StepCompleted(step=name, error=problem)
    return StepCompleted(step=name, result=normalise(record.result, f"the result of {name}"))


async def _progress(task: RemoteTask, record_id: str, record: Progress, repeated: bool) -> int:
    name = step_at(task.journal.fold.iteration, record.position)
    output = normalise(record.output, f"the progress of {name}")
    if len(canonical(output)) > limits.PROGRESS_BYTES_MAX:
        raise TooLarge(
            f"progress of {name} is at most {limits.PROGRESS_BYTES_MAX} bytes", run_id=task.run_id
        )
    body = StepProgress(step=name, output=output)
    if not repeated:  # a copy that comes late must not hide what was reported since
        await task.journal.append(
            lambda fold: body if name in fold.open else None, record_id=record_id
        )
    return task.journal.fold.n


# ---- inputs ------------------------------------------------------------------------------------


async def _place(
    task: RemoteTask, record_id: str, record: Placed, repeated: bool
) -> dict[str, Any]:
    """Placing goes by position: a repeat finds what was placed. The first one has the request's id;
    what a crash leaves queued behind it has a later position."""
    journal = task.journal
    iteration, position = journal.fold.iteration, record.position
    name = step_at(iteration, position)
    if name in journal.fold.steps:
        error = moved(journal.fold, name, "place_inputs")
        await stop(task, name, error)
        raise error

    def due(fold: Fold) -> InputPlaced | None:
        return placing(fold, iteration, position, record.mode, Furthest())

    while not repeated and await journal.append(due, record_id=record_id) is not None:
        record_id = ""
    inputs = [one for one in journal.fold.placed_at(name) if one.mode == record.mode]
    return {"inputs": [input_json(one) for one in inputs]}


def input_json(known: Submitted) -> dict[str, JSON]:
    """A placed input, as workers see it."""
    return {"request_id": known.request_id, "mode": known.mode, "content": known.content}
