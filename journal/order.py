"""Core: whether a record may stand next in a journal. Stricter than any writer (PROTOCOL 3).

A record that does not chain, comes from a fenced claim, repeats an id or breaks the order of a
step, an input or an iteration is Damage: what passes here, every reader takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from msgspec import UNSET

from .codec import Damage, Entry
from .ids import valid_run_id
from .messages import JSON
from .records import (
    HOLDER_RECORDS,
    SPAWN,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    NewerRecord,
    Park,
    Record,
    RunCompleted,
    RunPurged,
    RunStarted,
    Signal,
    StepCompleted,
    StepProgress,
    StepStarted,
)
from .step_state import model_reply
from .waits import parse_instant

if TYPE_CHECKING:
    from .fold import Fold


def check(fold: Fold, record: Record) -> None:
    """Raises Damage where the record can't follow this fold."""
    _check_chain(fold, record)
    if fold.newer is not None:  # what follows a record of a newer version can't be understood
        return
    _check_order(fold, record)
    match record:
        case StepStarted():
            _check_start(fold, record)
        case StepProgress():
            if record.step not in fold.open:
                raise Damage(f"record {record.n} is progress of {record.step}, which is not open")
        case StepCompleted():
            _check_complete(fold, record)
        case Park():
            _check_park(fold, record)
        case Commit() | RunCompleted():
            _check_commit(fold, record)
        case Signal():
            _check_signal(fold, record)
        case Input() | InputWithdrawn() | InputPlaced():
            _check_input(fold, record)
        case _:
            pass


def check_run(run_id: str, record: Record) -> None:
    """Raises Damage where it begins the journal of another run: a copy under a new name."""
    if isinstance(record, RunStarted) and record.run != run_id:
        raise Damage(f"it is the journal of run {record.run}")


def _check_chain(fold: Fold, record: Record) -> None:
    """Ordinal, previous hash, writer id. Raises Damage."""
    if isinstance(record, RunPurged) and fold.n == 0:
        return  # a tombstone is the first record left, whatever its ordinal
    if record.n != fold.n + 1:
        first, last = fold.n + 1, record.n - 1
        missing = f"{first} to {last}" if last > first else f"{first}"
        raise Damage(f"record {missing} is missing: record {record.n} follows {fold.n}")
    if record.prev != fold.head:
        raise Damage(f"record {record.n} does not follow record {fold.n}: its hash differs")
    if fold.repeats(record.id):
        raise Damage(f"record {record.n} repeats the writer id {record.id}")


def buried(fold: Fold, record: Record) -> bool:
    """Whether what is read on, behind what was read before, is the tombstone of all of it: the run
    ended and was purged in between. Or that tombstone was read as well: a directory shows it anew
    once what was before it is gone."""
    if not isinstance(record, RunPurged) or not fold.n:
        return False
    return fold.n < record.n - 1 or (fold.purged is not None and fold.n == record.n)


def trimmed(read: int, entries: Sequence[Entry]) -> bool:
    """Whether a purge took records between record `read`, the last that was read before (0: none),
    and its tombstone, the last of these entries that were read on."""
    if not entries or not isinstance(entries[-1].record, RunPurged):
        return False
    return entries[-1].record.n - (read or entries[0].record.n - 1) != len(entries)


def _check_order(fold: Fold, record: Record) -> None:
    """Claims, the end, and the order every writer keeps. Raises Damage."""
    if isinstance(record, NewerRecord):
        return
    if isinstance(record, RunPurged) and fold.n == 0:
        return
    if (fold.n == 0) != isinstance(record, RunStarted):
        raise Damage(
            f"record {record.n} is {type(record).__name__}: a run starts once, at record 1"
        )
    live = fold.claim.n if fold.claim else 0
    if isinstance(record, HOLDER_RECORDS) and record.claim != live:
        raise Damage(f"record {record.n} was written under claim {record.claim}, not {live}")
    reopens = isinstance(record, Signal) and record.name == "resume" and fold.can_reopen
    if fold.purged is not None or (fold.end and not isinstance(record, RunPurged) and not reopens):
        raise Damage(f"record {record.n} stands after the run's end")
    if isinstance(record, RunPurged) and fold.end is None:
        raise Damage(f"record {record.n} purges a run that has not ended")


def _check_start(fold: Fold, record: StepStarted) -> None:
    if record.tool == SPAWN and not _names_run(record.input):
        raise Damage(f"record {record.n} starts no child run")
    check_instant(record.n, record.deadline)
    step = fold.steps.get(record.step)
    if step is None:
        return
    if step.completed is not None:
        raise Damage(f"record {record.n} starts {record.step} again after its result")
    if step.unsafe:
        permit = step.reconciled.get(step.last.n)
        retry = permit is not None and permit.payload["outcome"] == "retry"
        retry = retry and step.last.n not in step.late  # the truth beats the permit
        if permit is None or not retry or permit.n != record.permit:
            raise Damage(f"record {record.n} starts {record.step} again without a permit")


def _names_run(input: JSON) -> bool:
    if not isinstance(input, dict):
        return False
    run: JSON = cast("dict[str, JSON]", input).get("run")
    return isinstance(run, str) and valid_run_id(run)


def _check_complete(fold: Fold, record: StepCompleted) -> None:
    check_result(record)
    step = fold.steps.get(record.step)
    if step is None and record.via != "refused":
        raise Damage(f"record {record.n} completes {record.step}, which never started")
    if step is not None and step.completed is not None:
        raise Damage(f"record {record.n} completes {record.step} a second time")


def check_result(record: StepCompleted) -> None:
    """Whether it is a result by itself, whatever stands before it. Raises Damage."""
    has = record.result is not UNSET, record.error is not UNSET, record.interrupted is not UNSET
    if sum(has) != 1:
        raise Damage(f"record {record.n} holds not exactly one of result, error, interrupted")
    if record.verdicts:
        model_reply(record)


def _check_park(fold: Fold, record: Park) -> None:
    earlier = {step.name for steps in fold.honoured.values() for step in steps}
    may_wait = earlier if record.why == "retry" else set[str]()
    if any(name not in fold.open and name not in may_wait for name in record.steps):
        raise Damage(f"record {record.n} parks for a step that is not open")
    if (record.iteration, record.attempt) != (fold.iteration, fold.attempt):
        raise Damage(
            f"record {record.n} parks attempt {record.attempt} of iteration {record.iteration}, "
            f"not {fold.attempt} of {fold.iteration}"
        )
    if record.why == "retry" and not record.steps and fold.unknown():
        raise Damage(f"record {record.n} ends an attempt while a write is unknown")
    check_instant(record.n, record.until)


def _check_commit(fold: Fold, record: Commit | RunCompleted) -> None:
    if record.iteration != fold.iteration:
        raise Damage(
            f"record {record.n} commits iteration {record.iteration}, not {fold.iteration}"
        )
    if fold.unknown():
        raise Damage(f"record {record.n} ends an iteration while a write is unknown")
    if isinstance(record, Commit):
        check_instant(record.n, record.waits.until)


def check_instant(n: int, until: str) -> None:
    """Whether what record `n` names is an instant, or nothing. Raises Damage."""
    try:
        if until:
            parse_instant(until)
    except ValueError as error:
        raise Damage(f"record {n} names {until[:40]!r}, which is no instant") from error


def _check_signal(fold: Fold, record: Signal) -> None:
    match record.name:
        case "approve" | "reject":
            _text_of(record, "marker")
        case "reconcile" | "late":
            name, start = _text_of(record, "step"), record.payload.get("start")
            step = fold.find(name, start) if isinstance(start, int) else None
            if step is None or (record.name == "reconcile" and fold.steps.get(name) is not step):
                raise Damage(f"record {record.n} reconciles a start that is not there")
            if record.name == "late" and "result" not in record.payload:
                raise Damage(f"record {record.n} is a late result without one")
        case "child":
            _text_of(record, "run")
            if not isinstance(record.payload.get("outcome"), dict):
                raise Damage(f"record {record.n} is a child without an outcome")
        case "cancel" | "resume":
            pass


def _text_of(record: Signal, key: str) -> str:
    found: JSON = record.payload.get(key)
    if not isinstance(found, str):
        raise Damage(f"record {record.n} is a {record.name} without a {key}")
    return found


def _check_input(fold: Fold, record: Input | InputWithdrawn | InputPlaced) -> None:
    known = fold.inputs.get(record.request_id)
    if isinstance(record, Input):
        if known is not None:
            raise Damage(f"record {record.n} repeats the input {record.request_id}")
    elif isinstance(record, InputPlaced) and record.iteration != fold.iteration:
        raise Damage(
            f"record {record.n} places in iteration {record.iteration}, not {fold.iteration}"
        )
    elif known is None or known.status != "queued":
        was = known.status if known else "not there"
        raise Damage(f"record {record.n}: input {record.request_id} is not queued but {was}")
