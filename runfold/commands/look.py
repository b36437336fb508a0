"""Shell: `runfold show`, `list`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from journal.codec import Entry
from journal.escape import visible
from journal.ids import RunId
from journal.ids import run_id as checked_run_id
from journal.limits import LIST_PAGE
from journal.listing import Filter
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.views import run_json
from journal.waits import instant_text

from ..frame import UsageProblem, execute
from ..options import (
    AnyStoreOption,
    CredsOption,
    JsonOption,
    NamespaceOption,
    Target,
    opened,
)
from ..reach import ignored, reached
from ..terminal import (
    EXIT_BY_STATUS,
    emit_json,
    note,
    print_run,
    say,
    timeline,
)


def register(app: typer.Typer) -> None:
    app.command("show")(show)
    app.command("list")(list_runs)


def show(
    id: Annotated[str, typer.Argument(help="Run id.")],
    where: Annotated[
        bool, typer.Option("--where", help="Only say in which stream and subject, or file, it is.")
    ] = False,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """A run's timeline, where it stands, and what it waits for. Changes nothing.

    Exit code by status, as `run`; 0 while it is running.
    """

    async def body() -> int:
        run = checked_run_id(id)
        target = Target(store, namespace, creds)
        if where:
            say(await _place(target, run))
            return 0
        async with reached(target) as runs:
            if json and target.bridge is not None:  # which needs no journal here to say it
                shape = await runs.shape(run)
                emit_json(shape)
                return EXIT_BY_STATUS.get(shape["status"], 1)
            seen = await runs.seen(run, ignored if json else _print_line)
        if seen.torn and seen.fold.n:
            note(f"{seen.torn} bytes of a torn last record are ignored: never acknowledged")
        if seen.unusable is not None:
            raise seen.unusable
        fold, held, now = seen.fold, seen.held, instant_text(datetime.now(UTC))
        if json:
            emit_json(run_json(fold, held=held, now=now))
        else:
            print_run(fold, target.option, held=held, now=now)
        return EXIT_BY_STATUS[fold.status(held=held, now=now)]

    execute(json, body())


async def _place(target: Target, run: RunId) -> str:
    if target.bridge is not None:
        raise UsageProblem("a bridge does not tell", hint="ask the nats:// store: --store")
    async with opened(target) as store:
        if isinstance(store, JetStreamStore):
            return store.journal_of(run)
        assert isinstance(store, FileStore)  # what `opened` opens else
        return f"file {store.path(run)}"


def _print_line(entry: Entry) -> None:
    say(timeline(entry))


def list_runs(
    status: Annotated[str | None, typer.Option("--status", help="Only these.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Only of this agent.")] = None,
    after: Annotated[str | None, typer.Option("--after", help="Go on after this id.")] = None,
    limit: Annotated[int, typer.Option("--limit", help="At most so many.")] = LIST_PAGE,
    store: AnyStoreOption = None,
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
        following = None if after is None else checked_run_id(after)
        wanted = Filter(status=status, agent=agent)
        found: list[dict[str, Any]] = []
        async with reached(Target(store, namespace, creds)) as runs:
            while len(found) < limit:  # a page may hold less than there is
                page = await runs.page(wanted, after=following, limit=limit - len(found))
                found += page.runs
                following = page.next
                if following is None:
                    break
        if json:
            emit_json({"runs": found, "next": following})
            return 0
        if not found:
            note("no such runs in this store")
        for run in found:
            what = run["reason"] or run["message"] or ""
            name = run["agent"] or "?"
            shown = visible(str(what))[:60]
            say(f"{run['run']:<24} {run['status']:<18} {name:<16} {shown}".rstrip())
        if following:
            note(f"there are more: --after {following}")
        return 0

    execute(json, body())
