"""Shell: what waits for a person, over all runs (PROTOCOL 8)."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Literal, TypeAlias

from msgspec import Struct

from .errors import JournalDamaged
from .fold import Fold
from .ids import RunId
from .limits import LIST_PAGE
from .looks import Looks
from .messages import JSON
from .ordered import ordered
from .store import Store
from .views import (
    Pending,
    UnknownStep,
    pending_calls,
    unknown_steps,
    waiting_since,
    waiting_until,
)
from .waits import instant_text

FOR_PEOPLE = frozenset({"awaiting_approval", "indeterminate", "paused", "damaged", "newer"})

Kind: TypeAlias = Literal["approval", "reconcile", "operator"]


class InboxItem(Struct, frozen=True, kw_only=True):
    """One thing for a person to do. `since`: None where the journal can't be read.

    - `approval`: approve or reject `marker`; `input` is what will run, exactly
    - `reconcile`: `step` may or may not have happened; `start` is the record of its start; a retry
      waits until `deadline` (see views.may_run_until)
    - `operator`: a run that paused, is damaged, or that a newer version wrote; `text` says why
    """

    kind: Kind
    run: str
    agent: str | None = None
    marker: str | None = None
    step: str | None = None
    text: str
    since: datetime | None = None
    until: datetime | None = None
    status: str
    tool: str | None = None
    input: JSON = None
    start: int | None = None
    key: str | None = None
    partial: JSON = None
    deadline: datetime | None = None


class InboxPage(Struct, frozen=True):
    """Items by run id; those of one run stand on one page. `next`: the id to go on after; None at
    the end. A page may hold less than was asked for where few of many runs wait. `unread`: journal
    streams that could not be read; what waits in them is not here."""

    items: list[InboxItem]
    next: RunId | None
    unread: tuple[str, ...] = ()


async def inbox(store: Store) -> list[InboxItem]:
    """By run id. Reads the journals only of runs whose last record says that a person is waited
    for, or says nothing (directories: of all)."""
    looks = Looks(store)
    found, _ = await ordered(looks.told(FOR_PEOPLE), partial(_items, looks))
    return found


async def inbox_page(
    store: Store, *, after: RunId | None = None, limit: int = LIST_PAGE
) -> InboxPage:
    """Of that, what the runs behind the id `after` wait for: up to the run that makes it `limit`
    items or more."""
    looks = Looks(store, sparing=True)
    runs = looks.told(FOR_PEOPLE, after)
    found, following = await ordered(runs, partial(_items, looks), after=after, limit=limit)
    return InboxPage(found, following, tuple(sorted(looks.unread or ())))


async def _items(looks: Looks, run: RunId) -> list[InboxItem]:
    try:
        log = await looks.log(run)
    except JournalDamaged as damage:
        return [InboxItem(kind="operator", run=run, text=damage.message, status="damaged")]
    held = await looks.store.holder(run) is not None
    return items_of(run, log.fold, held=held, now=instant_text(datetime.now(UTC)))


def items_of(run: RunId, fold: Fold, *, held: bool, now: str) -> list[InboxItem]:
    """What the run waits for, of people, at this fold; as RunState has `held` and `now`."""
    since = waiting_since(fold)
    if fold.newer is not None:
        text = f"a newer version wrote to it: {fold.newer}; update this installation"
        return [InboxItem(kind="operator", run=run, text=text, since=since, status="newer")]
    if fold.started is None or fold.purged is not None:
        return []
    status = fold.status(held=held, now=now)
    if status not in FOR_PEOPLE:
        return []
    found = [_unknown(fold, step, status) for step in unknown_steps(fold)]
    found += [_pending(fold, call, status) for call in pending_calls(fold)]
    if status == "paused":
        assert fold.wait is not None
        found.append(
            InboxItem(
                kind="operator",
                run=run,
                agent=fold.started.agent,
                text=fold.wait.reason,
                since=since,
                until=waiting_until(fold),
                status=status,
            )
        )
    return found


def _unknown(fold: Fold, step: UnknownStep, status: str) -> InboxItem:
    assert fold.started is not None
    return InboxItem(
        kind="reconcile",
        run=fold.started.run,
        agent=fold.started.agent,
        step=step.step,
        text="it may or may not have happened",
        since=waiting_since(fold),
        status=status,
        tool=step.tool,
        input=step.input,
        start=step.start,
        key=step.key,
        partial=step.partial,
        deadline=step.deadline,
    )


def _pending(fold: Fold, call: Pending, status: str) -> InboxItem:
    assert fold.started is not None
    return InboxItem(
        kind="approval",
        run=fold.started.run,
        agent=fold.started.agent,
        marker=call.marker,
        step=call.step,
        text=call.text,
        since=waiting_since(fold),
        until=waiting_until(fold),
        status=status,
        tool=call.tool,
        input=call.input,
    )
