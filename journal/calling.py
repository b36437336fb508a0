"""Shell: one call of a step that may be made, and the record of what it came to (R16, R25, R26).

Why the order is safe: a call is made for a start that is recorded, or of a read beside one on its
way (early.py); a result is due only while its step is open and has none (`if_unresolved`), so none
is stored before its start, and none twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from msgspec import UNSET, structs

from .early import NotDue, Start, called_early
from .errors import Fenced, NotEncodable, TooLarge
from .fold import Fold
from .records import StepCompleted, StepError, StepStarted
from .values import Unrecordable

if TYPE_CHECKING:
    from .handle import Journal

Refusal = TypeVar("Refusal", NotEncodable, TooLarge)
Perform: TypeAlias = Callable[[StepStarted], Coroutine[Any, Any, StepCompleted]]
"""Makes the call of this start. A read's may not be recorded yet: it has no envelope then."""


async def call_it(journal: Journal, start: StepStarted, perform: Perform) -> StepCompleted:
    """Make the call of a recorded start, and record what it came to."""
    if start.replay == "unsafe":
        journal.writing.add(start.n)
    try:
        return await _recorded(journal, start, _called(journal, start, perform))
    finally:
        journal.writing.discard(start.n)


async def _called(journal: Journal, start: StepStarted, perform: Perform) -> StepCompleted:
    with journal.store.observer.calling(journal.run_id, start):
        return await perform(start)


async def _recorded(
    journal: Journal, start: StepStarted, call: Awaitable[StepCompleted]
) -> StepCompleted:
    try:
        body = await call
    except Unrecordable as unrecordable:
        raise await _did_happen(journal, start, unrecordable.error) from unrecordable
    patience_s = journal.result_patience_s if start.replay == "unsafe" else 0.0
    try:
        return await complete(journal, body, patience_s=patience_s)
    except TooLarge as error:
        raise await _did_happen(journal, start, error) from error
    except Fenced:
        if start.replay == "unsafe" and body.result is not UNSET:
            journal.late = (start, body.result)  # its holder may say so (R29)
        raise


async def _did_happen(journal: Journal, start: StepStarted, error: Refusal) -> Refusal:
    """The call returned what can't be recorded. Of a write the journal says so, so that it never
    runs again (R16); a read records nothing. The error to raise."""
    if start.replay == "unsafe":
        problem = StepError(type="not_recordable", message=error.message[:1000])
        body = StepCompleted(step=start.step, error=problem)
        await complete(journal, body, patience_s=journal.result_patience_s)
    error.run_id = journal.run_id
    return error


async def complete(
    journal: Journal, body: StepCompleted, record_id: str = "", patience_s: float = 0.0
) -> StepCompleted:
    """Record a result of this process's own call: a fact, due while the step has none."""
    completed = await journal.append(
        lambda fold: if_unresolved(fold, body), record_id=record_id, patience_s=patience_s
    )
    if completed is None:  # only another holder can have done that
        raise Fenced(f"step {body.step} was completed by somebody else", run_id=journal.run_id)
    return completed


def if_unresolved(fold: Fold, body: StepCompleted) -> StepCompleted | None:
    """The result, while the step has been started and has none."""
    step = fold.steps.get(body.step)
    return body if step is not None and step.completed is None else None


async def read_early(
    journal: Journal, body: StepStarted, perform: Perform, start: Start
) -> StepCompleted | None:
    """Make the call of a read while its start, `body`, travels; None where the start is not due at
    a new tail: the call came to nothing then."""
    begun = structs.replace(body, claim=journal.claim)
    stands = journal.starting[body.step] = asyncio.get_running_loop().create_future()

    async def started() -> StepStarted | None:
        recorded: StepStarted | None = None
        try:
            recorded = await start()
        finally:
            if recorded is None:
                stands.cancel()  # what this call reports counts for nothing
            else:
                stands.set_result(None)
        return recorded

    async def call() -> StepCompleted:
        with journal.store.observer.calling(journal.run_id, begun):
            return await called_early(perform(begun), started)

    try:
        return await _recorded(journal, begun, call())
    except NotDue:
        return None
    finally:
        del journal.starting[body.step]
        stands.cancel()  # where its append never began


async def complete_step(
    journal: Journal, start: StepStarted, body: StepCompleted, record_id: str
) -> StepCompleted:
    """Record the result of a call that was made elsewhere. Raises Fenced; TooLarge: of a write it
    stands in the journal then that it did happen (R16)."""
    try:
        completed = await complete(journal, body, record_id)
    except TooLarge as error:
        raise await _did_happen(journal, start, error) from error
    journal.writing.discard(start.n)
    return completed
