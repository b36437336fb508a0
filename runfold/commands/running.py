"""Shell: `runfold run`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any

import typer

from journal.errors import RunfoldError
from journal.ids import new_run_id, shown
from journal.ids import run_id as checked_run_id
from journal.limits import ACK_WAIT_S
from journal.log import Log
from journal.values import BadJSON, parse_strict
from journal.views import Waiting, run_json
from worker.agent import Agent
from worker.runner import run

from ..frame import UsageProblem, execute
from ..options import (
    CredsOption,
    JsonOption,
    MonitorOption,
    NamespaceOption,
    StoreOption,
    Target,
    note_safety,
    opened,
)
from ..terminal import EXIT_BY_STATUS, emit_json, note, options, print_run


def register(app: typer.Typer) -> None:
    app.command("run")(run_command)


def run_command(
    agent: Annotated[str, typer.Argument(help="FILE.py:NAME or dotted.module:NAME, an Agent.")],
    id: Annotated[str | None, typer.Option("--id", help="Run id. Default: a random one.")] = None,
    input: Annotated[
        str | None,
        typer.Option("--input", help="TEXT, @FILE, or - for stdin. Left out: only resume."),
    ] = None,
    input_json: Annotated[
        str | None, typer.Option("--input-json", help="The input as JSON.")
    ] = None,
    ack_wait: Annotated[
        float,
        typer.Option("--ack-wait", help="Seconds to wait for a silent earlier holder (1-600)."),
    ] = ACK_WAIT_S,
    monitor: MonitorOption = None,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run, or go on with it, as far as it goes.

    Exit code: 0 completed, 3 awaiting approval, 4 indeterminate, 5 waiting, 6 failed.
    """

    async def body() -> int:
        run_id = None if id is None else checked_run_id(id)
        value = _input(input, input_json)
        if run_id is None and value is None:
            raise UsageProblem("say --input to start a run, --id to resume one, or both")
        if not 1 <= ack_wait <= 600:
            raise UsageProblem("--ack-wait is 1 to 600 seconds")
        with _agents_output(json):
            found = load_agent(agent)
        target = Target(store, namespace, creds)
        async with opened(target) as opened_store:
            await note_safety(target, monitor, opened_store)
            if run_id is None and value is not None:
                run_id = new_run_id()
            with _agents_output(json):
                end = await run(
                    opened_store, found, run_id, value, ack_wait_s=ack_wait, on_wait=note
                )
            assert run_id is not None
            journal = await Log.read(opened_store, run_id)
        return _print(journal, end, json, options(store, namespace))

    execute(json, body())


@contextmanager
def _agents_output(json: bool) -> Generator[None]:
    """With --json, stdout holds one object: what the agent's code prints goes to stderr."""
    if not json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # what its child processes print, too
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _print(journal: Log, end: object, json: bool, option: str) -> int:
    if journal.torn:
        note(f"{journal.torn} bytes of a torn last record are ignored: never acknowledged")
    shape: dict[str, Any] = run_json(journal.fold)
    if isinstance(end, Waiting):
        shape["status"] = "waiting"
        shape["waiting_on"] = end.on
    if json:
        emit_json(shape)
    elif isinstance(end, Waiting):
        for wait in end.on:
            note(f"run {journal.run_id} waits until {wait.until} for {wait.ended_by}")
    else:
        print_run(journal.fold, option)
    return EXIT_BY_STATUS[shape["status"]]


def _input(text: str | None, json_text: str | None) -> Any:
    if text is not None and json_text is not None:
        raise UsageProblem("--input and --input-json exclude each other")
    if json_text is not None:
        try:
            value = parse_strict(json_text)
        except BadJSON as error:
            raise UsageProblem(f"--input-json is not JSON: {error}") from error
        if value is None:
            raise UsageProblem("--input-json null is no input")
        return value
    if text == "-":
        return _decoded(sys.stdin.buffer.read(), "standard input")
    if text is not None and text.startswith("@"):
        path = Path(text[1:])
        try:
            return _decoded(path.read_bytes(), str(path))
        except OSError as error:
            raise UsageProblem(
                f"--input {shown(text, 300)}: {error.strerror}",
                hint="a text that starts with @ goes through --input-json",
            ) from error
    return text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{where} is not UTF-8") from error


def load_agent(where: str) -> Agent:
    """The Agent that FILE.py:NAME or dotted.module:NAME names; raises UsageProblem."""
    source, colon, attribute = where.rpartition(":")
    if not colon or not source or not attribute.isidentifier():
        raise UsageProblem(
            f"{shown(where, 300)} names no agent", hint="write FILE.py:NAME or dotted.module:NAME"
        )
    try:
        module = _module(source)
    except RunfoldError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        line = next(
            (
                f" line {f.lineno}"
                for f in reversed(extract_tb(error.__traceback__))
                if f.filename.endswith(Path(source).name)
            ),
            "",
        )
        raise UsageProblem(
            f"{shown(source, 300)}{line} can't be loaded: {what}", hint="RUNFOLD_DEBUG=1 shows more"
        ) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Agent):
        what = "is not there" if found is None else f"is a {type(found).__name__}, not an Agent"
        raise UsageProblem(f"{attribute} in {shown(source, 300)} {what}")
    return found


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(source)
    path = Path(source).resolve()
    if not path.is_file():
        raise UsageProblem(f"{shown(source, 300)}: no such file")
    spec = importlib.util.spec_from_file_location(f"_runfold_agent_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
