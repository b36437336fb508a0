"""Shell: `runfold init`, `doctor`: setting up, and what an acknowledgement is worth."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from journal.escape import visible
from journal.fleet import Fleet
from journal.ids import RunId
from journal.ids import run_id as checked_run_id
from journal.shards import SHARDS_MAX
from journal.stores.file import FileStore
from journal.stores.provision import Provisioned, inspect, provision
from journal.stores.safety import Safety
from worker.server import EmbeddedServer

from ..diagnosis import Diagnosis, diagnose
from ..frame import UsageProblem, execute
from ..options import (
    CredsOption,
    JsonOption,
    MonitorOption,
    NamespaceOption,
    StoreOption,
    Target,
    opened,
)
from ..store import HOME, is_url
from ..terminal import emit_json, note, say


def register(app: typer.Typer) -> None:
    app.command("init")(init)
    app.command("doctor")(doctor)


def init(
    replicas: Annotated[
        int | None,
        typer.Option("--replicas", min=1, max=5, help="Default: 3 on a cluster, 1 on one server."),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards",
            min=1,
            max=SHARDS_MAX,
            help="Journal streams that runs are spread over, for good. Default: by the replicas.",
        ),
    ] = None,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Make the streams on a server, once. Repeating it changes nothing.

    A directory needs no init. Exit code 1 where a stream with other settings is there.
    """

    async def body() -> int:
        if store is not None and not is_url(store):
            raise UsageProblem("a directory needs no init", hint="init is for nats:// stores")
        if store is None:
            async with EmbeddedServer(HOME) as server:
                made = await provision(
                    server.url, namespace=namespace, replicas=replicas, shards=shards
                )
        else:
            made = await provision(
                store, namespace=namespace, replicas=replicas, shards=shards, creds=creds
            )
        if json:
            emit_json(made)
        streams = (made, *made.others)
        for stream in streams:
            if not json:
                what = "made" if stream.created else "is there"
                say(f"stream {stream.stream} {what}, {stream.replicas} replica(s)")
            for found in stream.differences:
                note(
                    f"{found.setting} of {stream.stream} is {found.found}, not {found.wanted}: "
                    "nothing was changed; see `runfold doctor`"
                )
        if made.created and not json:
            say(spread_text(made, asked=shards is not None))
        return 1 if any(stream.differences for stream in streams) else 0

    execute(json, body())


def spread_text(made: Provisioned, *, asked: bool) -> str:
    """Over how many journal streams runs are spread, and why."""
    if asked:
        why = "as asked for"
    elif made.replicas == 1:
        why = "for one server, which syncs a stream's records one after the other"
    else:
        why = "for servers that sync many records at once"
    return f"runs are spread over {made.shards} journal stream(s), for good: {why} (--shards)"


def doctor(
    monitor: MonitorOption = None,
    after: Annotated[
        str | None, typer.Option("--after", help="Of the runs, only those after this id.")
    ] = None,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Whether an acknowledged record can be lost here, why, and what to do about it; and which runs
    nobody would move on.

    Exit code, by the storage alone: 0 safe or unverified, 1 degraded.
    """

    async def body() -> int:
        target = Target(store, namespace, creds)
        start = None if after is None else checked_run_id(after)
        if store is None:
            async with EmbeddedServer(HOME) as server:
                await provision(server.url, namespace=namespace)
                found = await inspect(
                    server.url, namespace=namespace, monitor_url=server.monitor_url
                )
                runs = await _diagnose(target._replace(store=server.url), start)
        elif is_url(store):
            found = await inspect(store, namespace=namespace, monitor_url=monitor, creds=creds)
            runs = await _diagnose(target, start)
        else:
            runs = await _diagnose(target, start)
            damaged = [one.run for one in runs.found if one.problem == "damaged"]
            async with opened(target) as opened_store:
                assert isinstance(opened_store, FileStore)
                found = await opened_store.inspect(damaged)
        if json:
            emit_json(msgspec.structs.asdict(found) | {"runs": runs.found, "next": runs.next})
        else:
            _print_safety(found)
            _print_runs(runs)
        return 1 if found.level == "degraded" else 0

    execute(json, body())


async def _diagnose(target: Target, after: RunId | None) -> Diagnosis:
    async with opened(target) as store:
        workers = await Fleet(store).workers() if store.shared else []
        return await diagnose(store, workers, note, after)


def _print_runs(runs: Diagnosis) -> None:
    say(f"runs: {runs.looked_at} unfinished, {len(runs.found)} that nobody would move on")
    for one in runs.found:
        say(f"  run {one.run}: {visible(one.what)}")
        say(f"    fix: {visible(one.fix)}")
    if runs.next is not None:
        say(f"  there are more: --after {runs.next}")


def _print_safety(found: Safety) -> None:
    say(found.level.upper())
    for finding in found.findings:
        say(f"  {finding.level}: {finding.what}")
        say(f"    why: {finding.why}")
        say(f"    fix: {finding.fix}")
    for name, value in found.facts.items():
        say(f"  {name}: {msgspec.json.encode(value).decode()}")
