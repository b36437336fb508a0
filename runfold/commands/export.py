"""Shell: `runfold export`: a run's records as they are stored, to keep or to check elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from msgspec import Struct

from journal.auditing import Journals, RunAudit
from journal.errors import JournalDamaged, RunNotFound
from journal.ids import RunId, file_stem, shown
from journal.ids import run_id as checked_run_id
from journal.stores.file_raw import SUFFIX

from ..frame import UsageProblem, execute
from ..options import AnyStoreOption, CredsOption, JsonOption, NamespaceOption, Target
from ..reach import journals
from ..terminal import emit_json, note

LIST = "`runfold list` shows the runs"


def register(app: typer.Typer) -> None:
    app.command("export")(export)


def export(
    id: Annotated[str, typer.Argument(help="Run id.")],
    to: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="A file, or a folder for ID.jsonl. Default: standard output."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """A run's records, one a line, the very bytes that are stored: a journal of a directory store,
    which `runfold check FILE` audits. --json: what was written, with -o.

    A damaged journal is taken out as it stands. Exit code: 0 all of it, 1 a bridge gives no more.
    """

    async def body() -> int:
        run = checked_run_id(id)
        path = to / f"{file_stem(run)}{SUFFIX}" if to is not None and to.is_dir() else to
        async with journals(Target(store, namespace, creds)) as source:
            if path is None:
                written = await _write_out(source, run)
            else:
                with _new_file(path, force) as file:
                    written = await _write(source, run, file)
        if json and path is not None:
            emit_json(
                {
                    "run": run,
                    "path": str(path),
                    "records": written.records,
                    "bytes": written.size,
                    "complete": written.complete,
                }
            )
        return 0 if written.complete else 1

    execute(json, body())


class Written(Struct):
    """What was written, and whether it is all that is stored."""

    records: int = 0
    size: int = 0
    complete: bool = True


async def _write(source: Journals, run: RunId, file: BinaryIO) -> Written:
    """Raises RunNotFound before anything is written."""
    written, audit = Written(), RunAudit(run)
    first = ""
    try:
        async with aclosing(source.stored(run)) as pages:
            async for page in pages:
                for record in page:
                    found = audit.take(record)
                    if audit.purged and audit.records == 1:
                        raise RunNotFound(f"run {run} was purged", run_id=run, hint=LIST)
                    if found and not first:
                        first = f"record {found[0].n}: {found[0].rule}: {found[0].text}"
                    if record.flaw == "cut":
                        written.complete = False
                        note(f"the export ends before line {audit.records}, which is no record")
                        return written
                    if not record.flaw:
                        written.size += file.write(record.data + b"\n")
                        written.records += 1
    except JournalDamaged as damage:
        written.complete = False
        note(f"the export ends before record {audit.n + 1}: {damage.message}")
    if not audit.records:
        raise RunNotFound(f"run {run} does not exist", run_id=run, hint=LIST)
    if audit.torn:
        note(f"{audit.torn} bytes of a torn last record are left out: never acknowledged")
    if first:
        note(f"the journal is not sound, and exported as it stands ({first}): `runfold check`")
    return written


async def _write_out(source: Journals, run: RunId) -> Written:
    try:
        written = await _write(source, run, sys.stdout.buffer)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageProblem(f"standard output: {error.strerror or error}") from error
    return written


@contextmanager
def _new_file(path: Path, force: bool) -> Generator[BinaryIO]:
    """A file at the path once all is written and synced; what fails leaves the path as it was."""
    if path.exists() and not path.is_file():  # a device, or a pipe: never replaced
        hint = "leave -o out to write to standard output"
        raise UsageProblem(f"{shown(str(path), 300)} is no file", hint=hint)
    part = path.with_name(f"{path.name}.part") if force else path
    try:
        with part.open("wb" if force else "xb") as file:
            try:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if force:
                    os.replace(part, path)
            except BaseException:
                part.unlink()
                raise
    except FileExistsError as error:
        name = shown(str(path), 300)
        raise UsageProblem(f"{name} is there", hint="--force replaces it") from error
    except OSError as error:
        name = shown(str(path), 300)
        raise UsageProblem(f"{name}: {error.strerror or error}") from error
