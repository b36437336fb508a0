"""Shell: `runfold check`: journals judged from what is stored, once or as they grow (R70)."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from journal.audit import Violation
from journal.auditing import Audited, audit_each, audit_pages, audit_run
from journal.codec import Damage, decode
from journal.errors import RunNotFound, StoreUnavailable
from journal.escape import visible
from journal.ids import RunId, from_file_stem, shown, valid_run_id
from journal.ids import run_id as checked_run_id
from journal.records import RunStarted
from journal.store import RawRecord
from journal.stores.file_raw import SUFFIX, Lines

from ..audit_follow import counted, follow_store
from ..frame import UsageProblem, execute
from ..options import AnyStoreOption, CredsOption, JsonOption, NamespaceOption, Target
from ..reach import journals
from ..terminal import emit_json, note, say

STDIN = "-"
LISTED_MAX = 10_000
"""Violations in one JSON object; further ones are counted in `unlisted`."""

TELL_S = 5.0


def register(app: typer.Typer) -> None:
    app.command("check")(check)


def check(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN|FILE...",
            help="Run ids of the store; exported files (an existing file, *.jsonl), - for stdin.",
            show_default=False,
        ),
    ] = None,
    all_runs: Annotated[bool, typer.Option("--all", help="Every run of the store.")] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Every run, then what is appended, until it is stopped."),
    ] = False,
    metrics_port: Annotated[
        str | None,
        typer.Option(
            "--metrics-port", help="[HOST:]PORT for Prometheus while it follows; on loopback."
        ),
    ] = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Audit journals from what is stored alone: each violation with its record and rule
    (docs/check.md). Changes nothing.

    Exit code: 0 nothing was found, 1 a violation, or a run that a newer version wrote.
    """

    async def body() -> int:
        words = what or []
        if bool(words) == (all_runs or follow):
            raise UsageProblem(
                "nothing to check" if not words else "--all and --follow take all runs, no names",
                hint="name runs or exported files; or --all",
            )
        if metrics_port is not None and not follow:
            raise UsageProblem("--metrics-port goes with --follow")
        target = Target(store, namespace, creds)
        if not words:
            _check_there(target)
        if follow:
            where = None if metrics_port is None else _address(metrics_port)
            return 1 if await follow_store(target, where, _say_json if json else _say) else 0
        tally = Tally(json)
        if all_runs:
            await _check_all(target, tally)
        else:
            await _check_named(target, words, tally)
        return tally.finish(rate=all_runs)

    execute(json, body())


def _check_there(target: Target) -> None:
    """A directory may be made by its first run; an audit of none is a slip."""
    if target.store and not target.shared and not Path(target.store).exists():
        raise StoreUnavailable(f"there is no directory {shown(target.store, 300)}")


async def _check_all(target: Target, tally: Tally) -> None:
    async with journals(target) as source:
        await audit_each(source, source.runs(), tally.take)
    _note_bridge(target)


async def _check_named(target: Target, words: Sequence[str], tally: Tally) -> None:
    files = [word for word in words if is_file(word)]
    if files.count(STDIN) > 1:
        raise UsageProblem("standard input can be read once")
    runs = [checked_run_id(word) for word in words if word not in files]
    for word in files:
        tally.take(await audit_file(word))
    if not runs:
        return
    async with journals(target) as source:
        for run in runs:
            audited = await audit_run(source, run)
            if not audited.records and not audited.violations:
                hint = "`runfold list` shows the runs"
                raise RunNotFound(f"run {run} does not exist", run_id=run, hint=hint)
            tally.take(audited)
    _note_bridge(target)


def _note_bridge(target: Target) -> None:
    if target.bridge is not None:
        note("a bridge shows no headers: they were not checked (--store nats://… checks them)")


# ---- files --------------------------------------------------------------------------------------


def is_file(word: str) -> bool:
    """Whether the word means a file and no run."""
    return word == STDIN or word.endswith(SUFFIX) or "/" in word or Path(word).is_file()


async def audit_file(word: str) -> Audited:
    """Raises UsageProblem for a file that can't be read, RunNotFound for one without a record."""
    name = "standard input" if word == STDIN else shown(word, 300)
    try:
        with _open(word) as file:
            lines = Lines(file)
            first = lines.page()
            audited = await audit_pages(_run_in(first, word), _pages(first, lines))
    except OSError as error:
        raise UsageProblem(f"{name}: {error.strerror or error}") from error
    if not audited.records:
        raise RunNotFound(f"{name} holds no whole record: no run has started in it")
    return audited


def _open(word: str) -> BinaryIO:
    return open(0 if word == STDIN else word, "rb", closefd=word != STDIN)


async def _pages(
    first: Sequence[RawRecord], lines: Lines
) -> AsyncGenerator[Sequence[RawRecord], None]:
    page = first
    while page:
        yield page
        page = lines.page()


def _run_in(page: Sequence[RawRecord], word: str) -> RunId:
    """The run whose journal a file is: its first record says it; else the file's name; else a word
    that stands for it."""
    try:
        record = decode(page[0].data) if page else None
    except Damage:
        record = None
    if isinstance(record, RunStarted) and valid_run_id(record.run):
        return RunId(record.run)
    return from_file_stem(Path(word).name.removesuffix(SUFFIX)) or RunId("unknown")


# ---- what was found -----------------------------------------------------------------------------


class Tally:
    """Says what is found, or keeps it for one JSON object."""

    def __init__(self, json: bool) -> None:
        self._json = json
        self._began = self._told = time.monotonic()
        self._runs = self._records = self._violations = self._unlisted = 0
        self._listed: list[dict[str, Any]] = []
        self._newer: list[str] = []

    def take(self, audited: Audited) -> None:
        if not audited.records and not audited.violations:
            return  # no run
        self._runs += 1
        self._records += audited.records
        self._violations += len(audited.violations) + audited.unlisted
        self._unlisted += audited.unlisted
        for violation in audited.violations:
            if not self._json:
                _say(audited.run, violation)
            elif len(self._listed) < LISTED_MAX:
                self._listed.append(_shape(audited.run, violation))
            else:
                self._unlisted += 1
        if audited.unlisted and not self._json:
            say(f"run {audited.run}: {audited.unlisted} more violations")
        if audited.torn:
            note(
                f"run {audited.run}: {audited.torn} bytes of a torn last record are ignored: "
                "never acknowledged"
            )
        if audited.newer is not None:
            self._newer.append(audited.run)
            note(
                f"run {audited.run}: from a record of a newer version on, {audited.newer}, only "
                "the chain was checked: update this installation"
            )
        if time.monotonic() - self._told > TELL_S:
            self._told = time.monotonic()
            note(f"{self._said(rate=True)} so far")

    def finish(self, *, rate: bool) -> int:
        """The last line, or the object; the exit code."""
        if self._json:
            emit_json(
                {
                    "runs": self._runs,
                    "records": self._records,
                    "violations": self._listed,
                    "unlisted": self._unlisted,
                    "newer": self._newer,
                }
            )
        else:
            say(self._said(rate=rate))
        return 1 if self._violations or self._newer else 0

    def _said(self, *, rate: bool) -> str:
        said = counted(self._runs, self._records, self._violations)
        if not rate:
            return said
        return f"{said}, {self._records / (time.monotonic() - self._began):.0f} records/s"


def _say(run: RunId | None, violation: Violation) -> None:
    who = "the store" if run is None else f"run {run} record {violation.n}"
    say(f"{who}: {violation.rule}: {visible(violation.text)}")
    sys.stdout.flush()


def _say_json(run: RunId | None, violation: Violation) -> None:
    emit_json(_shape(run, violation))


def _shape(run: RunId | None, violation: Violation) -> dict[str, Any]:
    return {"run": run, "n": violation.n, "rule": violation.rule, "text": violation.text}


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise UsageProblem(f"--metrics-port is [HOST:]PORT, not {visible(text)}")
    return host.strip("[]") or "127.0.0.1", int(port)
