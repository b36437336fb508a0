"""Shell: `runfold workers`, `queue`, `sweep`: who works, and what there is to do."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from journal.escape import visible
from journal.fleet import WORKERS_WAIT_S, Fleet, agents_of
from journal.ids import run_id as checked_run_id
from journal.limits import SWEEP_RUNS
from journal.sweep import sweep

from ..frame import execute
from ..options import (
    AnyStoreOption,
    CredsOption,
    JsonOption,
    NamespaceOption,
    StoreOption,
    Target,
    opened,
)
from ..reach import reached, server
from ..terminal import emit_json, note, say

WaitOption = Annotated[
    float, typer.Option("--wait", min=0.05, max=60.0, help="Seconds for workers to answer.")
]


def register(app: typer.Typer) -> None:
    app.command("workers")(workers)
    app.command("queue")(queue)
    app.command("sweep")(sweep_once)


def workers(
    wait: WaitOption = WORKERS_WAIT_S,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """The connected workers: their agents and the runs they hold. (A bridge waits a second.)"""

    async def body() -> int:
        async with reached(Target(store, namespace, creds)) as runs:
            found = await runs.workers(wait_s=wait)
        if json:
            emit_json({"workers": found})
            return 0
        if not found:
            note("no worker answers")
        for report_ in found:
            _print_worker(report_)
        return 0

    execute(json, body())


def _print_worker(report_: dict[str, Any]) -> None:
    agents = ", ".join(f"{name} ({revision})" for name, revision in agents_of(report_).items())
    active: list[dict[str, Any]] = msgspec.convert(
        report_.get("active", []), list[dict[str, Any]], strict=False
    )
    words = [f"agents {agents}", f"{len(active)} of {report_.get('concurrency', '?')} runs"]
    words += [f"Runfold {report_['runfold']}"] if "runfold" in report_ else []
    words += ["draining"] if report_.get("draining") else []
    words += [str(report_["error"])] if "error" in report_ else []
    say(visible(f"{report_.get('worker', '?')}: {'; '.join(words)}"))
    for one in active:
        say(visible(f"  run {one.get('run')} under claim {one.get('claim')}"))


def queue(
    wait: WaitOption = WORKERS_WAIT_S,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Of each agent: tasks that wait, are at work, were delivered again; and its workers."""

    async def body() -> int:
        async with opened(Target(store, namespace, creds)) as opened_store:
            found_store = server(opened_store)
            found = await Fleet(found_store).queue(wait_s=wait)
            timers = await found_store.tasks.timers()
        if json:
            emit_json({"agents": found, "timers": timers})
            return 0
        if not found:
            note("no agent has a worker or an unfinished run")
        for load in found:
            say(
                f"{load.agent:<24} {load.pending} waiting, {load.in_progress} at work, "
                f"{load.redelivered} redelivered; {load.workers} worker(s)"
            )
        say(f"timers: {timers}")
        return 0

    execute(json, body())


def sweep_once(
    runs_max: Annotated[
        int, typer.Option("--runs", min=1, max=100_000, help="Look at so many runs at most.")
    ] = SWEEP_RUNS,
    after: Annotated[str | None, typer.Option("--after", help="Go on after this id.")] = None,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Wake runs that nothing would move on. Workers do it by themselves every 30 s."""

    async def body() -> int:
        start = None if after is None else checked_run_id(after)
        async with opened(Target(store, namespace, creds)) as opened_store:
            done = await sweep(server(opened_store), runs_max=runs_max, after=start)
        if json:
            emit_json(
                {"dispatched": done.dispatched, "looked_at": done.looked_at, "next": done.cursor}
            )
            return 0
        for run in done.dispatched:
            say(f"run {run}: woken")
        note(f"{done.looked_at} unfinished run(s) looked at, {len(done.dispatched)} woken")
        if done.cursor is not None:
            note(f"there are more: --after {done.cursor}")
        return 0

    execute(json, body())
