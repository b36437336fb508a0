"""Shell: what a worker over HTTP appends in its turn: calls, their results, placed inputs (R65).

Why it is safe: the step table decides about each call, as for a native worker; the worker calls
only on the answer to its own `step.started`, whose record has the id that the worker gave. A repeat
of that id finds the same start and gets the same answer; another id for the same position says that
the worker does not know what became of its call: then its policy or a person decides.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never

from msgspec import UNSET, structs, to_builtins

from journal import ids, limits
from journal.codec import Damage
from journal.errors import (
    BadPayload,
    Fenced,
    IndeterminateError,
    InvalidId,
    RunCancelled,
    RunFinished,
    RunfoldError,
    StaleSignal,
    TooLarge,
)
from journal.fold import Fold
from journal.messages import JSON
from journal.positions import decided, earlier_call, later, moved, placing, step_at
from journal.records import (
    Asked,
    InputPlaced,
    StepCompleted,
    StepError,
    StepProgress,
    StepStarted,
    Submitted,
)
from journal.step_state import StepState
from journal.stepping import complete_step, start_step
from journal.steps import (
    Ask,
    Call,
    CannotTell,
    Probed,
    decide_step,
    make_call,
)
from journal.stops import NOT_THE_TURNS, AwaitDecisions, BoundReached, stopped
from journal.unknown import Ways, doubt, wait_over
from journal.values import canonical, normalise
from journal.waits import parse_instant

from .remote import AwaitingApproval, Committed, RemoteTask, StepOpen
from .remote_shapes import Appended, Completed, Placed, Progress, Started


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
                return _said_before(fold, record_id, record)
            return await _start(task, record_id, record)
        case Completed():
            return {"n": await _complete(task, record_id, record, repeated)}
        case Progress():
            return {"n": await _progress(task, record_id, record, repeated)}
        case Placed():
            return await _place(task, record_id, record, repeated)
        case other:
            assert_never(other)


# ---- calls -------------------------------------------------------------------------------------


def _said_before(fold: Fold, record_id: str, record: Started) -> dict[str, Any]:
    """The first answer again: an id is repeated only by who did not get it. Not where a call that
    is made only now would outlast its recorded deadline, or the run is cancelled: then the worker
    says what became of it."""
    step = fold.steps.get(step_at(fold.iteration, record.position))
    if step is None or (step.completed is None and step.last.id != record_id):
        raise used()
    if step.completed is not None:
        return recorded(step.completed)
    start = step.last
    if start.replay == "unsafe" and (fold.cancel is not None or _too_late(start, record)):
        return {"decision": "withdrawn", "n": start.n, "key": start.key}
    return _call(start)


def _too_late(start: StepStarted, record: Started) -> bool:
    latest = parse_instant(start.deadline) - timedelta(seconds=record.timeout_s)
    return datetime.now(UTC) > latest


def used() -> BadPayload:
    return BadPayload("this id was used for another record", hint="ids go up in a task")


def _call(start: StepStarted) -> dict[str, Any]:
    return {"decision": "call", "n": start.n, "key": start.key, "deadline": start.deadline}


def recorded(completed: StepCompleted) -> dict[str, Any]:
    """A step's result, as workers see it."""
    answer: dict[str, Any] = {"decision": "recorded", "n": completed.n, "via": completed.via}
    if completed.error is not UNSET:
        answer["error"] = completed.error
    elif completed.interrupted is not UNSET:
        answer["interrupted"] = completed.interrupted
    else:
        answer["result"] = completed.result
    return answer


async def _start(task: RemoteTask, record_id: str, record: Started) -> dict[str, Any]:
    at = -1
    while at < task.journal.fold.n:  # what came meanwhile ends the wait that would have begun
        at = task.journal.fold.n
        call, key, honoured = _made(task, record)
        try:
            return await _decided(task, record_id, record, call, key, honoured)
        except (RunfoldError, AwaitDecisions, BoundReached) as error:
            await _stop(task, call.step, error, unsafe=call.unsafe)
    raise StepOpen(f"run {task.run_id} can neither go on nor stop here", run_id=task.run_id)


def _made(task: RemoteTask, record: Started) -> tuple[Call, str, StepState | None]:
    """The call, and the key or the unsafe step of the same call in an earlier attempt."""
    fold = task.journal.fold
    is_tool = record.kind == "tool"
    if not is_tool and (record.tool or record.input is not None or record.approval is not None):
        raise BadPayload("a model call has no tool and no input, and needs no approval")
    call = make_call(
        step_at(fold.iteration, record.position),
        record.kind,
        ids.tool_name(record.tool) if is_tool else "",
        normalise(record.input, "the input"),
        unsafe=is_tool and record.replay == "unsafe",
        timeout_s=record.timeout_s,
        policy=record.on_unknown,
    )
    # a safe call looks at the first unsafe one, as it spends none
    earlier = earlier_call(fold, call, record.occurrence if call.unsafe else 0, record.occurrence)
    return call, *earlier


async def _decided(
    task: RemoteTask,
    record_id: str,
    record: Started,
    call: Call,
    key: str,
    honoured: StepState | None,
) -> dict[str, Any]:
    journal, fold = task.journal, task.journal.fold
    if task.ends().over():
        raise BoundReached("duration", "the run's time is over")
    if record.position >= task.terms.bounds.calls_per_iteration:
        raise BoundReached("calls_per_iteration", f"position {record.position} of a turn")
    if call.step not in fold.steps and honoured is None:
        _check_known(task)
        if later(fold, fold.iteration, record.position) is not None:
            raise moved(fold, call.step, "a new call, in front of a recorded one")
        match decided(fold, call, record.approval):
            case Asked() as asked:
                raise AwaitDecisions((asked,))
            case StepError() as refusal:
                return recorded(await _refuse(task, record_id, call, refusal))
            case permit:
                call = structs.replace(call, permit=permit)
    probe = record.probe
    asking = _to_probe(task, call, key, honoured)
    said: Probed = CannotTell()
    if asking is not None:
        if probe is None or probe.n != asking.n:  # of an earlier start it says nothing
            await wait_over(journal, asking)
            return {"decision": "probe", "n": asking.n, "key": asking.key}
        said = probe.said()

    async def answered(key: str) -> Probed:
        return said

    ways = Ways(key=key, honoured=honoured, probe=answered, record_id=record_id)
    outcome = await start_step(journal, call, ways)
    return _call(outcome) if isinstance(outcome, StepStarted) else recorded(outcome)


def _check_known(task: RemoteTask) -> None:
    """Nothing new begins beside a write that was cut off (R23). Raises StepOpen."""
    for other in task.journal.fold.unknown():
        if other.last.n not in task.journal.writing:
            raise StepOpen(
                f"run {task.run_id}: {other.name} was cut off, and nobody knows what became of it",
                run_id=task.run_id,
                hint="ask for that step first",
            )


def _to_probe(
    task: RemoteTask, call: Call, key: str, honoured: StepState | None
) -> StepStarted | None:
    """The start that the worker is to ask the outside system about, before anything is decided."""
    journal = task.journal
    decision = decide_step(
        journal.fold, call, attempted=journal.attempted, honoured=honoured, key=key
    )
    match decision:
        case Ask(start=start, policy="probe") if call.policy == "probe":
            return start
        case _:
            return None


async def _refuse(
    task: RemoteTask, record_id: str, call: Call, refusal: StepError
) -> StepCompleted:
    body = StepCompleted(step=call.step, error=refusal, via="refused")

    def due(fold: Fold) -> StepCompleted | None:
        return None if fold.finished or call.step in fold.steps else body

    refused = await task.journal.append(due, record_id=record_id)
    if refused is None:
        raise Fenced(f"step {call.step} was completed by somebody else", run_id=task.run_id)
    return refused


async def _stop(task: RemoteTask, name: str, error: Exception, *, unsafe: bool = False) -> None:
    """What the error makes of the run, as for a native turn; then it is raised, as words. Returns
    where nothing stopped, because what would have ended the wait had come."""
    if isinstance(error, (BadPayload, InvalidId, StepOpen, *NOT_THE_TURNS)):
        raise error
    open_ = [start.step for start in task.open_writes() if start.step != name]
    if isinstance(error, RunCancelled) and task.open_writes():
        raise error
    if open_:  # a park would end the claim under them
        raise StepOpen(
            f"run {task.run_id}: the turn stops at {name}, and {open_[0]} is still open",
            run_id=task.run_id,
            hint="append its result, then ask again",
        ) from error
    journal = task.journal
    step = journal.fold.steps.get(name)
    if isinstance(error, IndeterminateError) and unsafe and step is not None and step.starts:
        await doubt(journal, step.last)
    await stopped(task.ends(), error)
    if journal.fold.cancel is not None and not journal.fold.finished:
        await task.cancelled()
    if journal.fold.claim is not None:
        return
    await task.settle()
    raise words(task, error) from error


def words(task: RemoteTask, error: Exception) -> RunfoldError:
    """The error as it is answered."""
    run = task.run_id
    match error:
        case AwaitDecisions(asks=asks):
            return AwaitingApproval(
                f"run {run} waits for a decision on {asks[0].tool}",
                run_id=run,
                marker=asks[0].marker,
                hint="the task is over; poll on",
            )
        case BoundReached():
            return RunFinished(f"run {run} has failed: {error}", run_id=run)
        case RunfoldError():
            return error
        case _:
            raise error


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
        await _stop(task, name, error)
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
        await _stop(task, name, error)
        raise error

    def due(fold: Fold) -> InputPlaced | None:
        return placing(fold, iteration, position, record.mode)

    while not repeated and await journal.append(due, record_id=record_id) is not None:
        record_id = ""
    inputs = [one for one in journal.fold.placed_at(name) if one.mode == record.mode]
    return {"inputs": [input_json(one) for one in inputs]}


def input_json(known: Submitted) -> dict[str, JSON]:
    """A placed input, as workers see it."""
    return {"request_id": known.request_id, "mode": known.mode, "content": known.content}
