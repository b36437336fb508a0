"""Shell: `runfold purge`: journals of runs that have ended are removed, with a copy or without."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import typer

from journal.escape import visible
from journal.ids import run_id as checked_run_id
from journal.limits import RETENTION_MAX_S, RETENTION_S
from journal.purging import Purged, Purger, named, purge_named, refusal
from journal.retaining import FOR_PEOPLE
from journal.retention import FINISHED, Retention
from journal.stores.archive import Archive

from ..durations import seconds
from ..frame import UsageProblem, execute
from ..options import CredsOption, JsonOption, NamespaceOption, StoreOption, Target, opened, user
from ..terminal import emit_json, note, say

NAMED = FOR_PEOPLE | {"newer", "archive"}
"""Kept until a person has done something about it: exit code 1."""

LISTED_MAX = 10_000
"""Runs in one JSON object; further ones are counted in `unlisted`."""

TELL_S = 5.0
DEFAULT_AGE = f"{RETENTION_S / 86400:g}d"

RunArgument = Annotated[
    str | None, typer.Argument(help="Run id. Or --finished.", show_default=False)
]
FinishedOption = Annotated[
    bool, typer.Option("--finished", help="All runs that ended --older-than ago.")
]
AgeOption = Annotated[
    str | None,
    typer.Option("--older-than", help=f"Since the end, like 36h. Default: {DEFAULT_AGE}."),
]
StatusOption = Annotated[
    str | None, typer.Option("--status", help="Only these, with commas: failed,cancelled.")
]
ExportOption = Annotated[
    Path | None,
    typer.Option("--export", help="Purge a run only once its copy is in this folder."),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Also what an audit finds fault with; RUN: also a failure that resume could reopen.",
    ),
]


def register(app: typer.Typer) -> None:
    app.command("purge")(purge)


def purge(
    run: RunArgument = None,
    finished: FinishedOption = False,
    older_than: AgeOption = None,
    status: StatusOption = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Only of this agent.")] = None,
    after: Annotated[str | None, typer.Option("--after", help="Go on after this id.")] = None,
    export: ExportOption = None,
    force: ForceOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be purged; change nothing.")
    ] = False,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Remove the journals of runs that have ended; a tombstone stays, and the id stays used.

    Exit code: 0; 1 a run whose time is over is kept for a person to look at; 8 RUN is kept.
    """

    async def body() -> int:
        if finished == (run is not None):
            raise UsageProblem("name a run, or --finished", hint="`runfold purge --help`")
        wanted = _wanted(finished, older_than, status, agent, after, force=force)
        archive = None if export is None else Archive(export)
        async with opened(Target(store, namespace, creds)) as opened_store:
            purger = Purger(opened_store, wanted, by=user(), archive=archive, dry=dry_run)
            if not dry_run:
                await opened_store.check_trim()
            tally = Tally(json)
            if run is not None:
                done = await purge_named(purger, run)
                if done.what == "kept" and done.why not in NAMED:
                    raise refusal(done)
                tally.take(done)
            else:
                start = None if after is None else checked_run_id(after)
                async with aclosing(purger.purge_ended(after=start)) as outcomes:
                    async for done in outcomes:
                        tally.take(done)
        return tally.finish()

    execute(json, body())


def _wanted(
    finished: bool,
    older_than: str | None,
    status: str | None,
    agent: str | None,
    after: str | None,
    *,
    force: bool,
) -> Retention:
    if not finished:
        if (older_than, status, agent, after) != (None, None, None, None):
            raise UsageProblem(
                "--older-than, --status, --agent and --after go with --finished, not with a run"
            )
        return named(force=force)
    words = FINISHED if status is None else frozenset(status.split(","))
    if not words <= FINISHED:
        raise UsageProblem(f"--status is some of {','.join(sorted(FINISHED))}")
    keep_s = seconds(older_than or DEFAULT_AGE, "--older-than", most_s=RETENTION_MAX_S)
    return Retention(keep_s=keep_s, resumable_s=keep_s, statuses=words, agent=agent, flawed=force)


class Tally:
    """Says what became of each run, or keeps it for one JSON object."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._told = time.monotonic()
        self._counts: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._listed: list[Purged] = []
        self._unlisted = 0

    def take(self, done: Purged) -> None:
        self._counts[done.what] += 1
        if done.why is not None:
            self._kept[done.why] += 1
        if done.what != "kept" or done.why in NAMED:
            self._list(done)
        if time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            note(f"{self._said()} so far; the last one looked at is {done.run}")

    def _list(self, done: Purged) -> None:
        if not self._json:
            what = {"due": "would be purged", "finished": "purged, as was begun before"}
            text = f": {visible(done.text)}" if done.text else ""
            say(f"run {done.run}: {what.get(done.what, done.what)}{text}")
        elif len(self._listed) < LISTED_MAX:
            self._listed.append(done)
        else:
            self._unlisted += 1

    def finish(self) -> int:
        """The last line, or the object; the exit code."""
        if self._json:
            emit_json(
                {
                    "purged": self._counts["purged"] + self._counts["finished"],
                    "due": self._counts["due"],
                    "kept": dict(sorted(self._kept.items())),
                    "runs": self._listed,
                    "unlisted": self._unlisted,
                }
            )
        else:
            note(self._said())
        return 1 if any(self._kept[why] for why in NAMED) else 0

    def _said(self) -> str:
        purged = self._counts["purged"] + self._counts["finished"]
        words = [f"{purged} purged"]
        words += [f"{self._counts['due']} would be purged"] if self._counts["due"] else []
        words += [f"{count} kept ({why})" for why, count in sorted(self._kept.items())]
        return ", ".join(words)
