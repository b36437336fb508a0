"""Shell: whether a worker over HTTP may make a call: the step table's answer (R65).

Why it is safe: the worker calls only on the answer to its own `step.started`, whose record has the
id that the worker gave. A repeat of that id finds the same start and gets the same answer; another
id for the same position says that the worker does not know what became of its call: then its policy
or a person decides.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec import UNSET, structs

from journal import ids
from journal.errors import (
    BadPayload,
    Fenced,
    IndeterminateError,
    InvalidId,
    RunCancelled,
    RunFinished,
    RunfoldError,
)
from journal.fold import Fold
from journal.positions import decided, earlier_call, later, moved, step_at
from journal.records import (
    Asked,
    StepCompleted,
    StepError,
    StepStarted,
)
from journal.step_state import StepState
from journal.stepping import start_step
from journal.steps import (
    Ask,
    Call,
    CannotTell,
    Probed,
    decide_step,
    make_call,
)
from journal.stops import NOT_THE_TURNS, AwaitDecisions, BoundReached, stopped
from journal.unknown import Ways, doubt, may_probe, wait_over
from journal.values import normalise
from journal.waits import parse_instant

from .remote import AwaitingApproval, RemoteTask, StepOpen
from .remote_shapes import Started


def said_before(task: RemoteTask, record_id: str, record: Started) -> dict[str, Any]:
    """The first answer again: an id is repeated only by who did not get it. Not where a call that
    is made only now would outlast its recorded deadline, or the run is cancelled: then the worker
    says what became of it."""
    fold = task.journal.fold
    call, _, _ = _made(task, record)
    step = fold.steps.get(call.step)
    if step is None or (step.completed is None and step.last.id != record_id):
        raise used()
    if step.starts and (step.last.kind, step.last.digest) != (call.kind, call.digest):
        raise used()
    if step.completed is not None:
        return recorded(step.completed)
    start = step.last
    if start.replay == "unsafe" and (fold.cancel is not None or _too_late(start, record)):
        return {"decision": "withdrawn", "n": start.n, "key": start.key}
    return _call(start)


def _too_late(start: StepStarted, record: Started) -> bool:
    if not start.deadline:  # no writer of ours leaves it out
        return True
    ends_at = datetime.now(UTC) + timedelta(seconds=record.timeout_s)
    return ends_at > parse_instant(start.deadline)


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


async def start(task: RemoteTask, record_id: str, record: Started) -> dict[str, Any]:
    at = -1
    while at < task.journal.fold.n:  # what came meanwhile ends the wait that would have begun
        at = task.journal.fold.n
        call, key, honoured = _made(task, record)
        try:
            return await _decided(task, record_id, record, call, key, honoured)
        except (RunfoldError, AwaitDecisions, BoundReached) as error:
            await stop(task, call.step, error, unsafe=call.unsafe)
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
    # A safe call is none of the unsafe ones that this turn has asked for already. What a bridge
    # that was restarted has forgotten of that only makes it answer what is recorded.
    what = (fold.iteration, fold.attempt, call.tool, call.digest)
    unsafe_seen = record.occurrence if call.unsafe else task.matched[what]
    key, honoured = earlier_call(fold, call, unsafe_seen, record.occurrence)
    if call.unsafe and honoured is not None:
        task.matched[what] = max(task.matched[what], record.occurrence + 1)
    return call, key, honoured


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
        case Ask() as ask if may_probe(journal.fold, call, ask):
            return ask.start
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


async def stop(task: RemoteTask, name: str, error: Exception, *, unsafe: bool = False) -> None:
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
