"""Shell: what waits for a person, over all runs (PROTOCOL 8)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from msgspec import Struct

from journal.errors import JournalDamaged
from journal.ids import RunId
from journal.log import Log
from journal.messages import JSON
from journal.store import Store
from journal.stores.jetstream import JetStreamStore
from journal.views import instant, pending_calls, unknown_steps
from journal.waits import instant_text

FOR_PEOPLE = frozenset({"awaiting_approval", "indeterminate", "paused", "damaged", "newer"})

Kind: TypeAlias = Literal["approval", "reconcile", "operator"]


class InboxItem(Struct, frozen=True, kw_only=True):
    """One thing for a person to do. `since`: None where the journal can't be read.

    - `approval`: approve or reject `marker`; `input` is what will run, exactly
    - `reconcile`: `step` may or may not have happened; `start` is the record of its start
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


async def inbox(store: Store) -> list[InboxItem]:
    """By run id. Reads the journals only of runs whose last record says that a person is waited
    for, or says nothing (directories: of all)."""
    return [item async for run in candidates(store) for item in await _items(store, run)]


async def candidates(store: Store, status: frozenset[str] = FOR_PEOPLE) -> AsyncIterator[RunId]:
    """Runs that may have one of these statuses, as far as can be told without reading them."""
    if isinstance(store, JetStreamStore):
        async for run, _ in store.heads(status=status):
            yield run
    else:
        async for run in store.runs():
            yield run


async def _items(store: Store, run: RunId) -> list[InboxItem]:
    try:
        log = await Log.read(store, run)
    except JournalDamaged as damage:
        return [InboxItem(kind="operator", run=run, text=damage.message, status="damaged")]
    fold = log.fold
    since = instant(fold.wait.at if fold.wait else fold.head_at)
    if fold.newer is not None:
        text = f"a newer version wrote to it: {fold.newer}; update this installation"
        return [InboxItem(kind="operator", run=run, text=text, since=since, status="newer")]
    if fold.started is None:  # purged
        return []
    held = await store.holder(run) is not None
    status = fold.status(held=held, now=instant_text(datetime.now(UTC)))
    if status not in FOR_PEOPLE:
        return []
    agent = fold.started.agent
    until = instant(fold.wait.until) if fold.wait and fold.wait.until else None
    found = [
        InboxItem(
            kind="reconcile",
            run=run,
            agent=agent,
            step=step.step,
            text="it may or may not have happened",
            since=since,
            status=status,
            tool=step.tool,
            input=step.input,
            start=step.start,
            key=step.key,
            partial=step.partial,
        )
        for step in unknown_steps(fold)
    ]
    found += [
        InboxItem(
            kind="approval",
            run=run,
            agent=agent,
            marker=call.marker,
            step=call.step,
            text=call.text,
            since=since,
            until=until,
            status=status,
            tool=call.tool,
            input=call.input,
        )
        for call in pending_calls(fold)
    ]
    if status == "paused":
        assert fold.wait is not None
        text = fold.wait.reason
        found.append(
            InboxItem(
                kind="operator",
                run=run,
                agent=agent,
                text=text,
                since=since,
                until=until,
                status=status,
            )
        )
    return found
