"""Core: what people and programs are shown of a run: outcome, waits, JSON (R6, PROTOCOL 8)."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from .fold import Fold
from .ids import Marker, RunId
from .messages import JSON, Message
from .records import Commit, RunCompleted, Status, StepStarted
from .waits import asked, parse_instant


class Pending(Struct, frozen=True, kw_only=True):
    """A call that waits for approval. `input` is what will run, exactly."""

    marker: Marker
    step: str
    tool: str
    input: JSON
    text: str


class UnknownStep(Struct, frozen=True, kw_only=True):
    """A write whose outcome nobody knows. `start`: the n of its start; a reconcile names it.
    `deadline`: see `may_run_until`."""

    step: str
    start: int
    tool: str
    input: JSON
    key: str
    partial: JSON = None
    deadline: datetime | None = None


class WaitingOn(Struct, frozen=True, kw_only=True):
    """What an unfinished run waits for, since when, until when, and what ends it (R7)."""

    what: Literal["worker", "approval", "reconcile", "input", "timer", "child", "operator"]
    since: datetime
    until: datetime | None = None
    ended_by: str = ""


class Completed(Struct, frozen=True, tag="completed"):
    """The run's answer."""

    message: Message


class AwaitingApproval(Struct, frozen=True, tag="awaiting_approval"):
    """A person must approve or reject these calls; nothing of them was started."""

    pending: tuple[Pending, ...]


class Indeterminate(Struct, frozen=True, tag="indeterminate"):
    """`step` is the first unknown one; approvals may be pending besides."""

    step: str
    unknown: tuple[UnknownStep, ...]
    pending: tuple[Pending, ...] = ()


class Waiting(Struct, frozen=True, tag="waiting"):
    """The run goes on by itself once these waits have ended."""

    on: tuple[WaitingOn, ...]


class Failed(Struct, frozen=True, tag="failed"):
    """The run ended; `reason` is a stable word, `detail` is for people."""

    reason: str
    detail: str = ""


class Cancelled(Struct, frozen=True, tag="cancelled"):
    """The run was ended by a person."""

    reason: str = ""


Outcome: TypeAlias = Completed | AwaitingApproval | Indeterminate | Waiting | Failed | Cancelled


class RunState(Struct, frozen=True, kw_only=True):
    """A run as of one record. `outcome` is None while it is running."""

    run_id: RunId
    agent: str
    revision: str
    status: Status
    outcome: Outcome | None
    waiting_on: tuple[WaitingOn, ...]
    iteration: int
    attempt: int
    records: int
    model_calls: int


def run_state(fold: Fold, *, held: bool = False, now: str = "") -> RunState:
    """The state of a run that has started. `held`: somebody runs it now under a lock; `now`: the
    instant for which waits for a time are judged."""
    assert fold.started is not None
    return RunState(
        run_id=RunId(fold.started.run),
        agent=fold.started.agent,
        revision=fold.revision,
        status=fold.status(held=held, now=now),
        outcome=outcome(fold, held=held, now=now),
        waiting_on=waiting_on(fold, held=held, now=now),
        iteration=fold.iteration,
        attempt=fold.attempt,
        records=fold.n,
        model_calls=fold.model_calls,
    )


def outcome(fold: Fold, *, held: bool = False, now: str = "") -> Outcome | None:
    """How the run ended or why it stopped; None while it is running, or can't be read."""
    match fold.end:
        case RunCompleted(message=message):
            return Completed(final_message(message))
        case Commit(action="fail", reason=reason, detail=detail):
            return Failed(reason, detail)
        case Commit(reason=reason):
            return Cancelled(reason)
        case None:
            pass
    match fold.status(held=held, now=now):
        case "indeterminate":
            unknown = unknown_steps(fold)
            return Indeterminate(unknown[0].step, unknown, pending_calls(fold))
        case "awaiting_approval":
            return AwaitingApproval(pending_calls(fold))
        case "waiting" | "paused":
            return Waiting(waiting_on(fold, held=held, now=now))
        case _:
            return None


def pending_calls(fold: Fold) -> tuple[Pending, ...]:
    """Calls that wait for approval, in their order."""
    return tuple(
        Pending(
            marker=Marker(ask.marker), step=ask.step, tool=ask.tool, input=ask.input, text=ask.text
        )
        for ask in asked(fold)
    )


def unknown_steps(fold: Fold) -> tuple[UnknownStep, ...]:
    """Writes that a person must settle, oldest first."""
    return tuple(
        UnknownStep(
            step=step.name,
            start=step.last.n,
            tool=step.last.tool,
            input=step.last.input,
            key=step.last.key,
            partial=step.partial,
            deadline=may_run_until(step.last),
        )
        for step in fold.unknown()
    )


def may_run_until(start: StepStarted) -> datetime | None:
    """Until when the call of a write that was cut off may still be running, and a retry waits for
    it, unless its worker says before that it has ended (R22). None where a lock tells."""
    return instant(start.deadline) if start.claim and start.deadline else None


def waiting_on(fold: Fold, *, held: bool = False, now: str = "") -> tuple[WaitingOn, ...]:
    """Who acts next (R7); empty where the run has ended."""
    since = waiting_since(fold)
    run = fold.started.run if fold.started else ""
    match fold.status(held=held, now=now):
        case "running" if held or fold.claim is not None:
            holder = "the process that runs it"
            if fold.claim is not None:
                holder = (
                    f"worker {fold.claim.worker}; if that is gone, another worker or "
                    f"`runfold run … --id {run}` takes the run over"
                )
            return (WaitingOn(what="worker", since=since, ended_by=holder),)
        case "running":
            assert fold.started is not None
            bound = f", revision {fold.revision}," if fold.revision else ""
            ended_by = (
                f"a worker of agent {fold.started.agent}{bound} or `runfold run … --id {run}` "
                "takes it up"
            )
            return (WaitingOn(what="worker", since=since, ended_by=ended_by),)
        case "awaiting_approval" | "indeterminate":
            return _on_people(fold, run, since)
        case "waiting" | "paused":
            return _on_wait(fold, run, since)
        case "newer":
            return (WaitingOn(what="operator", since=since, ended_by="update this installation"),)
        case _:
            return ()


def waiting_since(fold: Fold) -> datetime:
    """Since when the run is as it is."""
    return instant(fold.wait.at if fold.wait else fold.head_at)


def waiting_until(fold: Fold) -> datetime | None:
    """When its wait ends by itself."""
    return instant(fold.wait.until) if fold.wait and fold.wait.until else None


def _on_people(fold: Fold, run: str, since: datetime) -> tuple[WaitingOn, ...]:
    until = waiting_until(fold)
    unknown = tuple(
        WaitingOn(what="reconcile", since=since, ended_by=f"`runfold reconcile {run} {step.step}`")
        for step in unknown_steps(fold)
    )
    pending = tuple(
        WaitingOn(
            what="approval", since=since, until=until, ended_by=f"`runfold approve {call.marker}`"
        )
        for call in pending_calls(fold)
    )
    return unknown + pending


def _on_wait(fold: Fold, run: str, since: datetime) -> tuple[WaitingOn, ...]:
    wait = fold.wait
    assert wait is not None
    until = waiting_until(fold)
    found: list[WaitingOn] = []
    if wait.resume or (wait.why == "retry" and not wait.until):
        ended_by = f"`runfold resume {run}`; it stopped because: {wait.reason}"
        found.append(WaitingOn(what="operator", since=since, until=until, ended_by=ended_by))
    if wait.until:
        ended_by = "the time" if wait.why == "turn" else f"the next attempt, after: {wait.reason}"
        found.append(WaitingOn(what="timer", since=since, until=until, ended_by=ended_by))
    if wait.for_input:
        ended_by = f"`runfold send {run} TEXT` (`--mode follow-up` for a follow-up)"
        found.append(WaitingOn(what="input", since=since, until=until, ended_by=ended_by))
    if wait.child:
        ended_by = f"the end of run {wait.child}"
        found.append(WaitingOn(what="child", since=since, until=until, ended_by=ended_by))
    return tuple(found)


def end_json(fold: Fold) -> dict[str, JSON]:
    """How a run ended, as its parent's `child` signal says it."""
    match fold.end:
        case RunCompleted(message=message):
            return {"status": "completed", "message": final_message(message).content}
        case Commit(action=action, reason=reason):
            word = "failed" if action == "fail" else "cancelled"
            return {"status": word, "reason": reason[:1000]}
        case None:
            return {}


def final_message(message: JSON) -> Message:
    """The final message; any other JSON, which this version's loop never writes, as its content."""
    try:
        return msgspec.convert(message, Message)
    except msgspec.ValidationError:
        return Message(role="assistant", content=message)


def instant(text: str) -> datetime:
    """A record's `at`, which is informative only: one that is no time must not hide the run."""
    try:
        return parse_instant(text)
    except ValueError:
        return datetime.fromtimestamp(0, UTC)


def run_json(fold: Fold, *, held: bool = False, now: str = "") -> dict[str, Any]:
    """The run object of every `--json` (PROTOCOL 8)."""
    assert fold.started is not None
    end = outcome(fold, held=held, now=now)
    return {
        "run": fold.started.run,
        "agent": fold.started.agent,
        "status": fold.status(held=held, now=now),
        "message": end.message.content if isinstance(end, Completed) else None,
        "pending": msgspec.to_builtins(pending_calls(fold) if not fold.finished else ()),
        "unknown": msgspec.to_builtins(unknown_steps(fold) if _shows_unknown(end) else ()),
        "waiting_on": msgspec.to_builtins(waiting_on(fold, held=held, now=now)),
        "reason": end.reason if isinstance(end, Failed | Cancelled) else None,
        "detail": end.detail if isinstance(end, Failed) else None,
        "iteration": fold.iteration,
        "attempt": fold.attempt,
        "records": fold.n,
        "model_calls": fold.model_calls,
    }


def _shows_unknown(end: Outcome | None) -> bool:
    return isinstance(end, Indeterminate)
