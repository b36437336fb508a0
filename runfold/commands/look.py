"""Shell: `runfold show`, `list`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from journal.codec import Entry
from journal.errors import JournalDamaged
from journal.escape import visible
from journal.ids import RunId
from journal.ids import run_id as checked_run_id
from journal.inbox import candidates
from journal.limits import LIST_PAGE
from journal.log import Log
from journal.store import Store
from journal.views import run_json
from journal.waits import instant_text

from ..frame import UsageProblem, execute
from ..options import CredsOption, JsonOption, NamespaceOption, StoreOption, Target, opened
from ..terminal import (
    EXIT_BY_STATUS,
    emit_json,
    note,
    options,
    print_run,
    say,
    timeline,
)


def register(app: typer.Typer) -> None:
    app.command("show")(show)
    app.command("list")(list_runs)


def show(
    id: Annotated[str, typer.Argument(help="Run id.")],
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """A run's timeline, where it stands, and what it waits for. Changes nothing.

    Exit code by status, as `run`; 0 while it is running.
    """

    async def body() -> int:
        run = checked_run_id(id)
        try:
            async with opened(Target(store, namespace, creds)) as opened_store:
                loaded = await opened_store.load(run)
                journal = Log.of(opened_store, run, loaded)
                held = await opened_store.holder(run) is not None
        except JournalDamaged as damage:
            _print_timeline(damage.good, json)
            raise
        if journal.fold.started is None:
            _print_timeline(loaded.entries, json)
            journal.check_runnable()
        if journal.torn:
            note(f"{journal.torn} bytes of a torn last record are ignored: never acknowledged")
        _print_timeline(loaded.entries, json)
        now = instant_text(datetime.now(UTC))
        if json:
            emit_json(run_json(journal.fold, held=held, now=now))
        else:
            print_run(journal.fold, options(store, namespace), held=held, now=now)
        return EXIT_BY_STATUS[journal.fold.status(held=held, now=now)]

    execute(json, body())


def _print_timeline(entries: Sequence[Entry], json: bool) -> None:
    if not json:
        for entry in entries:
            say(timeline(entry))


def list_runs(
    status: Annotated[str | None, typer.Option("--status", help="Only these.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Only of this agent.")] = None,
    after: Annotated[str | None, typer.Option("--after", help="Go on after this id.")] = None,
    limit: Annotated[int, typer.Option("--limit", help="At most so many.")] = LIST_PAGE,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """The runs, by id, with their status."""

    async def body() -> int:
        if status is not None and status not in EXIT_BY_STATUS:
            raise UsageProblem(f"--status is one of {', '.join(EXIT_BY_STATUS)}")
        if not 1 <= limit <= LIST_PAGE:
            raise UsageProblem(f"--limit is 1 to {LIST_PAGE}")
        start = None if after is None else checked_run_id(after)
        async with opened(Target(store, namespace, creds)) as opened_store:
            runs, following = await _page(opened_store, status, agent, start, limit)
        if json:
            emit_json({"runs": runs, "next": following})
            return 0
        if not runs:
            note("no such runs in this store")
        for run in runs:
            what = run["reason"] or run["message"] or ""
            name = run["agent"] or "?"
            shown = visible(str(what))[:60]
            say(f"{run['run']:<24} {run['status']:<18} {name:<16} {shown}".rstrip())
        if following:
            note(f"there are more: --after {following}")
        return 0

    execute(json, body())


async def _page(
    store: Store, status: str | None, agent: str | None, after: RunId | None, limit: int
) -> tuple[list[dict[str, Any]], RunId | None]:
    found: list[dict[str, Any]] = []
    async for run in candidates(store, status):
        if after is not None and run <= after:
            continue
        if len(found) == limit:
            return found, RunId(found[-1]["run"])
        shape = await _summary(store, run)
        if shape is None or (status is not None and shape["status"] != status):
            continue
        if agent is None or shape["agent"] == agent:
            found.append(shape)
    return found, None


async def _summary(store: Store, run: RunId) -> dict[str, Any] | None:
    """The run object; for a damaged journal its status and reason; None for a purged run."""
    try:
        journal = await Log.read(store, run)
    except JournalDamaged as damage:
        return _unreadable(run, "damaged", damage.message)
    if journal.fold.started is None:
        newer = journal.fold.newer
        return _unreadable(run, "newer", newer) if newer is not None else None
    now = instant_text(datetime.now(UTC))
    return run_json(journal.fold, held=await store.holder(run) is not None, now=now)


def _unreadable(run: RunId, status: str, reason: str) -> dict[str, Any]:
    return {
        "run": run,
        "agent": None,
        "status": status,
        "message": None,
        "pending": [],
        "unknown": [],
        "waiting_on": [
            {
                "what": "operator",
                "since": None,
                "until": None,
                "ended_by": "`runfold show` says where",
            }
        ],
        "reason": reason,
        "detail": None,
        "records": None,
        "model_calls": None,
    }
