"""Shell: `runfold run`, `runfold start`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from journal.doors import Started
from journal.ids import name as checked_name
from journal.ids import new_run_id
from journal.ids import run_id as checked_run_id
from journal.limits import ACK_WAIT_S
from journal.log import Log
from journal.observing import beside
from journal.views import Waiting, run_json
from journal.waits import instant_text
from worker.runner import run

from ..frame import UsageProblem, execute
from ..loading import agents_output, load_agent, read_input
from ..options import (
    AnyStoreOption,
    CredsOption,
    JsonOption,
    MonitorOption,
    NamespaceOption,
    StoreOption,
    Target,
    note_safety,
    opened,
)
from ..reach import Runs, reached
from ..terminal import EXIT_BY_STATUS, emit_json, note, options, print_run, say
from ..tracing import TraceOption, traced

WAIT_S_MAX = 86400.0


def register(app: typer.Typer) -> None:
    app.command("run")(run_command)
    app.command("start")(start)


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
    trace: TraceOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run, or go on with it, as far as it goes.

    Exit code: 0 completed, 3 awaiting approval, 4 indeterminate, 5 waiting, 6 failed.
    """

    async def body() -> int:
        run_id = None if id is None else checked_run_id(id)
        value = read_input(input, input_json)
        if run_id is None and value is None:
            raise UsageProblem("say --input to start a run, --id to resume one, or both")
        if not 1 <= ack_wait <= 600:
            raise UsageProblem("--ack-wait is 1 to 600 seconds")
        with agents_output(json):
            found = load_agent(agent)
        target = Target(store, namespace, creds)
        async with AsyncExitStack() as stack:
            observer = stack.enter_context(traced(trace, "runfold", namespace))
            opened_store = await stack.enter_async_context(opened(target))
            opened_store.observer = beside(opened_store.observer, observer)
            await note_safety(target, monitor, opened_store)
            if run_id is None and value is not None:
                run_id = new_run_id()
            with agents_output(json):
                end = await run(
                    opened_store, found, run_id, value, ack_wait_s=ack_wait, on_wait=note
                )
            assert run_id is not None
            journal = await Log.read(opened_store, run_id)
        return _print(journal, end, json, options(store, namespace))

    execute(json, body())


def _print(journal: Log, end: object, json: bool, option: str) -> int:
    if journal.torn:
        note(f"{journal.torn} bytes of a torn last record are ignored: never acknowledged")
    shape: dict[str, Any] = run_json(journal.fold)
    if isinstance(end, Waiting) and shape["status"] not in ("waiting", "paused"):
        shape["status"] = "waiting"  # for the end of an earlier call: nothing is recorded of it
        shape["waiting_on"] = end.on
    if json:
        emit_json(shape)
    elif isinstance(end, Waiting):
        for wait in end.on:
            until = f" until {instant_text(wait.until)}" if wait.until else ""
            note(f"run {journal.run_id} waits for {wait.what}{until}: {wait.ended_by}")
    else:
        print_run(journal.fold, option)
    return EXIT_BY_STATUS[shape["status"]]


def start(
    agent: Annotated[
        str, typer.Argument(help="The agent's name; or FILE.py:NAME, which binds its revision too.")
    ],
    input: Annotated[
        str | None, typer.Option("--input", help="TEXT, @FILE, or - for stdin.")
    ] = None,
    input_json: Annotated[
        str | None, typer.Option("--input-json", help="The input as JSON.")
    ] = None,
    id: Annotated[str | None, typer.Option("--id", help="Run id. Default: a random one.")] = None,
    priority: Annotated[int, typer.Option("--priority", help="1, 0 or -1.")] = 0,
    key: Annotated[
        str | None, typer.Option("--key", help="Runs with one key go one at a time.")
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option("--wait", help="Wait so many seconds for it to end or to need somebody."),
    ] = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Start a run for the workers of an agent. Repeating it with the same id and input changes
    nothing.

    Exit code: 0; with --wait as `run`, and 0 while it still runs.
    """

    async def body() -> int:
        value = read_input(input, input_json)
        if value is None:
            raise UsageProblem("a run needs an input: --input TEXT or --input-json JSON")
        if wait is not None and not 0 <= wait <= WAIT_S_MAX:
            raise UsageProblem(f"--wait is 0 to {WAIT_S_MAX:g} seconds")
        name, revision = agent, ""
        if ":" in agent:
            with agents_output(json):
                found = load_agent(agent)
            name, revision = found.name, found.revision
        run = None if id is None else checked_run_id(id)
        checked_name(name, "an agent")
        target = Target(store, namespace, creds)
        async with reached(target) as runs:
            started = await runs.start(
                name, value, run_id=run, priority=priority, key=key, revision=revision
            )
            return await _print_started(runs, started, wait, target, json)

    execute(json, body())


async def _print_started(
    runs: Runs, started: Started, wait: float | None, target: Target, json: bool
) -> int:
    """Print the run, once it was waited for; the exit code."""
    run = started.run_id
    if not json:
        what = "started" if started.created else "is there already"
        note(f"run {run} {what}{_how_to_go_on(target, run)}")
    if wait is not None:
        await runs.wait(run, timeout_s=wait)
    if json:
        shape = await runs.shape(run)
        emit_json(shape | {"created": started.created})
        return 0 if wait is None else EXIT_BY_STATUS.get(shape["status"], 1)
    if wait is None:
        say(run)
        return 0
    seen = await runs.seen(run)
    if seen.unusable is not None:
        raise seen.unusable
    now = instant_text(datetime.now(UTC))
    print_run(seen.fold, target.option, held=seen.held, now=now)
    return EXIT_BY_STATUS[seen.fold.status(held=seen.held, now=now)]


def _how_to_go_on(target: Target, run: str) -> str:
    if target.shared:
        return f" (`runfold follow {run}`)"
    return f"; a directory has no workers: `runfold run FILE.py:NAME --id {run}` takes it up"
