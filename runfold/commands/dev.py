"""Shell: `runfold dev`: a server, a worker and a bridge for one project, in one process tree."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Annotated

import typer

from journal.ids import namespace as checked_namespace
from journal.limits import CONCURRENCY
from journal.stores.provision import provision
from worker.server import EmbeddedServer

from ..dev_bridge import PORT, DevBridge, missing
from ..frame import UsageProblem, execute
from ..loading import agent_file, agent_name
from ..logs import LogFormat, LogOption
from ..options import NamespaceOption
from ..reloading import Reloading
from ..store import HOME
from ..terminal import note, options, say
from .work import AgentsArgument

DEV_ACK_WAIT_S = 5.0
DEV_GRACE_S = 5.0


def register(app: typer.Typer) -> None:
    app.command("dev")(dev)


def dev(
    agents: AgentsArgument,
    concurrency: Annotated[
        int, typer.Option("--concurrency", help="Runs at once (1-4096).")
    ] = CONCURRENCY,
    ack_wait: Annotated[
        float,
        typer.Option("--ack-wait", help="Seconds of silence after which a worker is lost (1-600)."),
    ] = DEV_ACK_WAIT_S,
    grace: Annotated[
        float, typer.Option("--grace", min=0, max=25, help="Seconds for calls to end at a reload.")
    ] = DEV_GRACE_S,
    health: Annotated[
        str | None, typer.Option("--health", help="[HOST:]PORT of the worker's GET /healthz.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            help=f"[HOST:]PORT of the bridge, on this machine. Default: {PORT}, or the next free.",
            show_default=False,
        ),
    ] = None,
    no_bridge: Annotated[
        bool, typer.Option("--no-bridge", help="Without HTTP and the page.")
    ] = False,
    namespace: NamespaceOption = "runfold",
    log_format: LogOption = LogFormat.TEXT,
) -> None:
    """A server on .runfold/, a worker that reloads when a Python file beside its agents changes,
    and a bridge with the page, for this machine alone.

    Every write is synced. Other terminals in this folder find the server by themselves. Ctrl-C ends
    it all; again: without grace.
    """

    async def body() -> int:
        checked_namespace(namespace)
        if no_bridge and listen is not None:
            raise UsageProblem("--no-bridge and --listen exclude each other")
        folders = _folders(agents)
        # A server that dev's user may have exported is not what dev works on.
        for name in ("RUNFOLD_STORE", "RUNFOLD_CREDS"):
            os.environ.pop(name, None)
        os.environ["RUNFOLD_LOG"] = log_format  # of the worker and the bridge, too
        async with EmbeddedServer(HOME) as server:
            await provision(server.url, namespace=namespace)
            words = [
                *("worker", *agents, "--store", server.url, "--namespace", namespace),
                *("--concurrency", str(concurrency), "--ack-wait", str(ack_wait)),
                *("--grace", str(grace)),
                *(() if health is None else ("--health", health)),
            ]
            reloading = Reloading(words, folders, note)
            bridge = None if no_bridge else _bridge(server.url, namespace, listen)
            await _run(server, reloading, bridge, namespace)
        return 0

    execute(False, body(), log_format, fast=False)


def _bridge(url: str, namespace: str, listen: str | None) -> DevBridge | None:
    lacking = missing()
    if lacking is None:
        return DevBridge(["--store", url, "--namespace", namespace], listen, note)
    note(f"no bridge, so no page: it needs {lacking} (pip install 'runfold[bridge]')")
    return None


async def _run(
    server: EmbeddedServer, reloading: Reloading, bridge: DevBridge | None, namespace: str
) -> None:
    """Until a signal. The bridge is there before the worker and after it: what happens is seen."""
    if bridge is None:
        _take_signals(reloading.stop)
        _greet(server.url, namespace, "")
        await reloading.run()
        return

    def stop() -> None:
        reloading.stop()
        bridge.hurry()

    try:
        await bridge.start()  # until then Ctrl-C cancels, as in any command
        server.add_bridge(bridge.address)
        _take_signals(stop)
        _greet(server.url, namespace, bridge.address)
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(bridge.watch())
            await reloading.run()
            await bridge.stop()
            watching.cancel()
    finally:
        await bridge.stop()
        server.remove_bridge(bridge.address)


def _take_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (SIGINT, SIGTERM):
        loop.add_signal_handler(number, stop)


def _folders(agents: list[str]) -> list[Path]:
    """Where the agents' files are: what to watch."""
    found: set[Path] = set()
    for agent in agents:
        source, _ = agent_name(agent)
        found.add(agent_file(source).parent if source.endswith(".py") else Path.cwd())
    return sorted(folder for folder in found if not found & set(folder.parents))


def _greet(url: str, namespace: str, http: str) -> None:
    option = options(None, namespace)
    say(f"runfold dev: {url}, data in {shlex.quote(HOME)}/, every write synced")
    if http:
        say(f"open {http} to watch, approve, reconcile")
    say("in another terminal, in this folder:")
    say(f"  runfold start AGENT --input TEXT{option}    start a run")
    say(f"  runfold inbox{option}                       what waits for you")
    say(f"  runfold follow ID{option}                   watch a run")
    sys.stdout.flush()
