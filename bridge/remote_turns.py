"""Shell: a turn of a worker over HTTP: what it is to play, and the record it ends with (R65)."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

from msgspec import Meta, Struct

from journal import ids
from journal.codec import Damage
from journal.errors import RunfoldError
from journal.fold import Fold
from journal.ids import RunId
from journal.log import Log
from journal.messages import JSON
from journal.owed import pay
from journal.positions import ended_before, later, told
from journal.records import Release, StepCompleted
from journal.step_state import StepState
from journal.stops import stopped
from journal.terms import Complete, Continue, Fail, Next, Pause
from journal.unknown import indeterminate

from .problems import NotFound
from .remote import RemoteTask, Repeated, StepOpen
from .remote_calls import input_json
from .remote_starts import recorded, used

Calls = Annotated[int, Meta(ge=0, le=100_000)]
Number = Annotated[int, Meta(ge=1, le=10**17)]
Claimed = Annotated[int, Meta(ge=1)]
Reason = Annotated[str, Meta(max_length=4000)]


class InputsQueued(RunfoldError):
    """The run can't complete: inputs came that it has not been told (R62)."""

    code = "inputs_queued"


class End(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`calls`: how many positions the turn used; recorded calls behind them are a mismatch."""

    id: Number
    claim: Claimed | None = None
    calls: Calls | None = None


class Completes(End, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run's answer."""

    message: JSON
    leave_inputs: bool = False


class Continues(End, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another turn from `state`: at once, or when the first of these waits ends."""

    state: JSON = None
    delay_s: Annotated[float, Meta(ge=0, le=1e10)] | None = None
    until: datetime | None = None
    until_input: bool = False
    until_child: str = ""


class Pauses(End, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator must act."""

    reason: Reason
    state: JSON = None
    until: datetime | None = None


class Fails(End, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The run fails; `retriable`: the retry policy applies first."""

    reason: Annotated[str, Meta(min_length=1, max_length=200)]
    detail: Reason = ""
    retriable: bool = False


# ---- what is to be played ------------------------------------------------------------------


async def read(task: RemoteTask, claim: int | None) -> dict[str, Any]:
    """The turn to play; claims the run, if it is not claimed yet."""
    async with task.entered(claim, takes=True):
        fold = task.journal.fold
        assert fold.started is not None
        steps = sorted(fold.steps.values(), key=_position)
        before = [*told(fold, "steer"), *told(fold, "follow_up")]
        return {
            "run": task.run_id,
            "agent": fold.started.agent,
            "input": fold.started.input,
            "iteration": fold.iteration,
            "attempt": fold.attempt,
            "state": fold.state,
            "claim": task.journal.claim,
            "steps": [_step(step) for step in steps],
            "told": [input_json(known) for known in before],
            "queued": {mode: len(fold.queued(mode)) for mode in ("steer", "follow_up")},
            "cancelled": fold.cancel is not None,
            "traceparent": task.journal.trace.claim,
        }


def _position(step: StepState) -> int:
    place = step.name.rpartition("/")[2]
    return int(place) if place.isdecimal() else -1


def _step(step: StepState) -> dict[str, Any]:
    shown: dict[str, Any] = {"position": _position(step), "status": "open"}
    if step.starts:
        shown |= {"kind": step.last.kind, "tool": step.last.tool, "input": step.last.input}
    if isinstance(step.completed, StepCompleted):
        result = recorded(step.completed)
        del result["decision"]
        shown |= {**result, "status": "completed"}
    return shown


async def checkpoint(task: RemoteTask, claim: int | None) -> dict[str, Any]:
    """The state of the last commit; claims nothing, and keeps the lease of what is claimed."""
    if claim is not None or task.held:
        async with task.entered(claim, takes=False):
            return _checkpoint(task.journal.fold)
    log = await Log.read(task.store, task.run_id)
    fold = log.fold
    if log.gone or fold.started is None or fold.started.agent != task.terms.name:
        raise NotFound("there is no such task", hint="poll for one")
    return _checkpoint(fold)


def _checkpoint(fold: Fold) -> dict[str, Any]:
    source = "commit" if fold.committed else "start"
    return {
        "state": fold.state,
        "source": source,
        "n": fold.committed or 1,
        "iteration": fold.iteration,
    }


async def beat(task: RemoteTask, claim: int | None, preview: str) -> dict[str, Any]:
    """Keep the lease."""
    async with task.entered(claim, takes=False):
        if preview:
            await task.store.preview(task.run_id, preview)
        return {"cancelled": task.journal.fold.cancel is not None}


async def release(task: RemoteTask, claim: int | None) -> dict[str, Any]:
    """Give the task back, as a native worker does that is stopped: it counts as no crash (R51)."""
    if claim is None and not task.held:
        await task.give_back()
        return {"released": True}
    async with task.entered(claim, takes=False):
        task.check_none_open("it is not given up")
        await task.journal.append(lambda fold: Release(reason="drain") if fold.claim else None)
        task.journal.give_up()
        await task.give_back()
        return {"released": True}


# ---- how it ends ---------------------------------------------------------------------------


async def end(task: RemoteTask, asked: End) -> dict[str, Any]:
    """Commit the end of the turn; whether the next one is this task's, too."""
    record_id = task.name.end_id(asked.id)
    try:
        async with task.entered(asked.claim, takes=True, record_id=record_id):
            if not task.journal.fold.repeats(record_id):
                if task.journal.fold.repeats(task.name.record_id(asked.id)):
                    raise used()  # a copy: the turn has gone on since
                try:
                    await _commit(task, record_id, asked)
                except Damage as damage:
                    raise used() from damage
            fold = task.journal.fold
            more = fold.claim is not None
            await task.settle()
            return {"status": fold.status(), "more": more, "claim": task.journal.claim}
    except Repeated as repeated:
        await pay(repeated.run)  # the first time it may not have come to that
        fold = repeated.run.fold
        return {"status": fold.status(), "more": False, "claim": asked.claim}


async def _commit(task: RemoteTask, record_id: str, asked: End) -> None:
    """Raises StepOpen, InputsQueued, ReplayMismatch, RunCancelled; nothing was committed then."""
    journal = task.journal
    outcome = _outcome(asked)
    task.check_none_open("the turn can't end")
    if task.ends().over():
        await task.ends(record_id).fail("duration", "the run's time is over")
        return
    keep = isinstance(asked, Completes) and not asked.leave_inputs
    ends = task.ends(record_id, unless_queued=keep)
    try:
        if asked.calls is not None:
            left = later(journal.fold, journal.fold.iteration, asked.calls)
            if left is not None:
                raise ended_before(journal.fold, left, type(outcome).__name__)
        await ends.commit(outcome)
    except RunfoldError as error:
        await stopped(task.ends(), error)
        await task.settle()
        raise
    fold = journal.fold
    if fold.repeats(record_id):
        return
    if fold.cancel is not None and not fold.finished:
        await task.cancelled()
    if fold.claim is None:  # parked over a write of an earlier claim: a person is asked first
        unknown = indeterminate(journal, fold.unknown()[0].last)
        await task.settle()
        raise unknown
    if keep and fold.queued():
        raise InputsQueued(
            f"run {task.run_id} has {len(fold.queued())} input(s) queued",
            run_id=task.run_id,
            hint="place them and go on, or say leave_inputs",
        )
    raise StepOpen(f"run {task.run_id}: the turn can't end now", run_id=task.run_id)


def _outcome(asked: End) -> Next:
    match asked:
        case Completes(message=message):
            return Complete(message)
        case Continues():
            child = ids.run_id(asked.until_child) if asked.until_child else None
            return Continue(
                state=asked.state,
                delay=None if asked.delay_s is None else timedelta(seconds=asked.delay_s),
                until=asked.until,
                until_input=asked.until_input,
                until_child=None if child is None else RunId(child),
            )
        case Pauses(reason=reason, state=state, until=until):
            return Pause(reason=reason, state=state, until=until)
        case Fails(reason=reason, detail=detail, retriable=retriable):
            return Fail(reason=reason, detail=detail, retriable=retriable)
        case _:
            raise AssertionError(type(asked).__name__)
