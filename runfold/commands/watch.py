"""Shell: `runfold follow`, `inbox`: what happens, and what waits for a person."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from journal.codec import Entry
from journal.escape import visible, visible_json
from journal.ids import run_id as checked_run_id
from journal.inbox import InboxItem
from journal.waits import instant_text

from ..frame import UsageProblem, execute
from ..options import AnyStoreOption, CredsOption, JsonOption, NamespaceOption, Target
from ..reach import reached
from ..terminal import EXIT_BY_STATUS, emit_json, note, say, say_wait, timeline


def register(app: typer.Typer) -> None:
    app.command("follow")(follow)
    app.command("inbox")(show_inbox)


def follow(
    id: Annotated[str, typer.Argument(help="Run id.")],
    after: Annotated[
        int, typer.Option("--after", help="Only records after this ordinal: to go on.")
    ] = 0,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """A run's records as they come, one a line, until it ends. --json: as they are stored.

    Exit code: 0 completed, 6 failed, 7 cancelled.
    """

    async def body() -> int:
        run = checked_run_id(id)
        if after < 0:
            raise UsageProblem("--after is an ordinal: 0 or more")
        async with reached(Target(store, namespace, creds)) as runs:
            status = await runs.follow(run, after=after, take=lambda one: _print_entry(one, json))
        return EXIT_BY_STATUS.get(status, 1)  # a newer bridge may know more words

    execute(json, body())


def _print_entry(entry: Entry, json: bool) -> None:
    if json:
        sys.stdout.buffer.write(entry.raw + b"\n")
    else:
        say(timeline(entry))
    sys.stdout.flush()


def show_inbox(
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """What waits for a person, over all runs, and the command that settles each."""

    async def body() -> int:
        target = Target(store, namespace, creds)
        async with reached(target) as runs:
            items = await runs.inbox()
        if json:
            emit_json(items)
            return 0
        if not items:
            note("nobody waits for you")
        for item in items:
            _print_item(item, target.option)
        return 0

    execute(json, body())


def _print_item(item: InboxItem, option: str) -> None:
    since = f", {_ago(item.since)}" if item.since else ""
    until = f", until {instant_text(item.until)}" if item.until else ""
    say(f"{item.kind} · run {item.run} · agent {visible(item.agent or '?')}{since}{until}")
    match item.kind:
        case "approval":
            marker = shlex.quote(visible(item.marker or ""))
            say(f"  {visible(item.tool or '')} {visible_json(item.input)}")
            say(f"    {visible(item.text)}")
            say(f"    runfold approve {marker}{option}")
            say(f"    runfold reject {marker} --reason TEXT{option}")
        case "reconcile":
            step = shlex.quote(visible(item.step or ""))
            command = f"runfold reconcile {item.run} {step} --start {item.start}"
            say(f"  {visible(item.tool or '')} {visible_json(item.input)}")
            say(f"    {visible(item.text)}; key {visible(item.key or '')}")
            if item.partial is not None:
                say(f"    it had reported {visible_json(item.partial)}")
            say_wait(item.deadline, "    ")
            say(f"    {command} --done JSON{option}")
            say(f"    {command} --retry{option}")
        case "operator":
            say(f"  {visible(item.text)}")
            command = "resume" if item.status == "paused" else "show"
            say(f"    runfold {command} {item.run}{option}")


def _ago(since: datetime) -> str:
    seconds = int((datetime.now(UTC) - since).total_seconds())
    if seconds < 0:
        return f"since {instant_text(since)}"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"for {seconds // size} {unit}"
    return f"for {seconds} s"
