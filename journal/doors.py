"""Shell: what may be done to a run without owning it: start it, signal it, look at it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from . import ids
from .fold import Fold
from .ids import RunId
from .inputs import (
    InputState,
    Queue,
    decide_input,
    decide_withdrawal,
    input_body,
    input_state,
)
from .log import Log
from .messages import JSON
from .records import Input, InputWithdrawn, RunStarted
from .signal_rules import Append, Repeated, decide_signal
from .signals import AnySignal, Reconcile, given_request_id, parse_signal
from .steps import decide_start, input_digest
from .store import Store
from .values import normalise
from .views import RunState, may_run_until, run_state
from .waits import instant_text


class Started(Struct, frozen=True, kw_only=True):
    """`created` is False where the run was there already, with the same input and agent (R3)."""

    run_id: RunId
    created: bool


class Receipt(Struct, frozen=True, kw_only=True):
    """What became of a signal. `n`: ordinal of its record, or of the one it repeats. `kept`: the
    call it is about is not there yet; it counts when the run's gate reaches it (R60). `deadline`:
    of the call that a retry waits for (views.may_run_until)."""

    request_id: str
    result: Literal["applied", "kept", "repeated"]
    n: int
    deadline: datetime | None = None


async def start(
    store: Store,
    agent: str,
    input: JSON,
    *,
    run_id: str | None = None,
    revision: str = "1",
    by: str = "library",
) -> Started:
    """Start a run, idempotently (R3); a random id where none is given.

    Raises InvalidId, NotEncodable, TooLarge, InputMismatch; nothing was written then."""
    run = ids.new_run_id() if run_id is None else ids.run_id(run_id)
    body = started_body(run, agent, start_value(agent, input), revision=revision)
    created = await start_in(Log(store, run, by=by), body)
    return Started(run_id=run, created=created)


def start_value(agent: str, input: JSON) -> JSON:
    """The input as it will be recorded; raises InvalidId for the agent's name, NotEncodable."""
    ids.name(agent, "an agent")
    return normalise(input, "the input")


def started_body(
    run_id: RunId,
    agent: str,
    value: JSON,
    *,
    revision: str = "",
    parent: str = "",
    depth: int = 0,
    priority: int = 0,
    key: str = "",
) -> RunStarted:
    """The first record of a run. Without a revision the first worker's binds it (R8)."""
    return RunStarted(
        run=run_id,
        agent=agent,
        revision=revision,
        input=value,
        digest=input_digest(agent, value),
        parent=parent,
        depth=depth,
        priority=priority,
        key=key,
    )


async def start_in(journal: Log, body: RunStarted) -> bool:
    """Start the run of this log, unless it has; whether it did. Raises as `start`. The log may be
    one that was not read: then the append expects that there is nothing, and loses else."""
    written = await journal.append(lambda fold: body if decide_start(fold, body) else None)
    return written is not None


async def signal(
    store: Store,
    run_id: str,
    name: str,
    payload: AnySignal | Mapping[str, Any] | bytes | str,
    *,
    request_id: str | None = None,
    kept_id: str | None = None,
    known: int = 0,
    by: str = "library",
    worker: bool = False,
) -> Receipt:
    """Approve, reject, reconcile, cancel or resume; a `worker` may also send late and child.

    `payload` as in PROTOCOL 8; bytes and text are strict JSON. Raises BadPayload, RunNotFound,
    RunFinished, StaleSignal, DecisionConflict; nothing was written then. StoreUnavailable: unknown;
    repeat it with the same request id. `kept_id`: where none is given, of a kept signal; `known`:
    a tail that was read before.
    """
    wanted = parse_signal(name, payload, worker=worker)
    given = given_request_id(request_id if request_id is not None else wanted.request_id or None)
    request = given or kept_id or f"{name}:{secrets.token_hex(8)}"
    journal = await Log.resumed(store, ids.run_id(run_id), by=by, known=known)
    journal.check_runnable()
    # Not asked again at a new tail: a holder that comes later can't be inside a start made before
    # it came, and a start it makes is not the one this signal is then about.
    held = await store.holder(journal.run_id) is not None
    repeated: list[Repeated] = []
    kept: list[bool] = []

    def due(fold: Fold) -> Any:
        journal.check_runnable()  # it may end and be purged as the record is on its way
        match decide_signal(fold, wanted, request, held=held):
            case Append(body, keep):
                kept[:] = [keep]
                return body
            case Repeated() as repeat:
                repeated[:] = [repeat]
                return None

    record = await journal.append(due)
    await announce(journal, name)
    if record is None:
        return Receipt(request_id=request, result="repeated", n=repeated[0].n)
    return Receipt(
        request_id=request,
        result="kept" if kept[0] else "applied",
        n=record.n,
        deadline=_retried(journal.fold, wanted),
    )


def _retried(fold: Fold, said: AnySignal) -> datetime | None:
    if not isinstance(said, Reconcile) or said.outcome != "retry":
        return None
    step = fold.find(said.step, said.start) if said.start else fold.steps.get(said.step)
    return may_run_until(step.last) if step is not None and step.starts else None


async def announce(log: Log, what: str) -> None:
    """After a record that may end a wait: a task where a holder has something to do, and word to
    the holder there is (PROTOCOL 5). Repeated with the record's own repeat, so that no crash
    between the two loses a wake-up."""
    if log.fold.claim is not None:
        await log.store.notify(log.run_id, what.encode())
    else:
        await wake(log)


async def records_lost(log: Log) -> bool:
    """Whether a task of the run is about a record behind its journal's end: acknowledged records
    are gone (a disk, a restore), perhaps a write's start. Workers leave the run alone for such a
    task, and would follow one about what is left: without a person's doing it gets none."""
    started = log.fold.started
    return started is not None and log.fold.n < await log.store.task_cause(
        log.run_id, started.agent
    )


async def wake(log: Log, *, again: bool = False) -> None:
    """A task, where a holder would have something to do and there is none. `again`: because of a
    record that was announced before, perhaps."""
    fold = log.fold
    started = fold.started
    if started and fold.claim is None and not fold.finished and fold.runnable():
        if again and await records_lost(log):
            return
        await log.store.wake(log.run_id, started.agent, cause=fold.n, priority=started.priority)


async def submit(
    store: Store,
    run_id: str,
    content: JSON,
    *,
    mode: str = "steer",
    request_id: str | None = None,
    kept_id: str | None = None,
    known: int = 0,
    by: str = "library",
) -> InputState:
    """Send the running agent a message (R62). A repeat of the request id gets the original.
    `kept_id`, `known` as in `signal`.

    Raises BadPayload, TooLarge, NotEncodable, RunNotFound, RunFinished, StaleSignal (queue full).
    """
    request = given_request_id(request_id) or kept_id or f"input:{secrets.token_hex(8)}"
    body = input_body(request, mode, normalise(content, "the input"))
    log = await Log.resumed(store, ids.run_id(run_id), by=by, known=known)

    def due(fold: Fold) -> Input | None:
        log.check_runnable()  # at a new tail, too: as in signal
        match decide_input(fold, body):
            case Queue(record):
                return record
            case _:
                return None

    written = await log.append(due)
    await announce(log, "input")
    if written is None:  # what an old one said stands only in the whole journal
        log = await Log.read(store, run_id)
        log.check_runnable()
    return input_state(log.fold.inputs[request], created=written is not None)


async def withdraw(
    store: Store, run_id: str, request_id: str, *, by: str = "library"
) -> InputState:
    """Take a queued input back; one that was withdrawn stays so. Raises RunNotFound, StaleSignal
    (it was placed, or is not there)."""
    log = await Log.read(store, run_id, by=by)

    def due(fold: Fold) -> InputWithdrawn | None:
        log.check_runnable()  # at a new tail, too: as in signal
        return decide_withdrawal(fold, request_id)

    await log.append(due)
    return input_state(log.fold.inputs[request_id])


async def state(store: Store, run_id: str) -> RunState:
    """The run as it is now. Raises RunNotFound, JournalDamaged."""
    journal = await Log.read(store, run_id)
    if journal.gone:
        journal.check_runnable()
    held = await store.holder(journal.run_id) is not None
    return run_state(journal.fold, held=held, now=instant_text(datetime.now(UTC)))
