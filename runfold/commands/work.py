"""Shell: `runfold worker`: works the runs of agents until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from functools import partial
from signal import SIGINT, SIGTERM
from typing import Annotated

import typer

from journal.counting import Counting
from journal.errors import RunfoldError
from journal.escape import visible
from journal.ids import name as checked_name
from journal.limits import ACK_WAIT_S, CONCURRENCY, GRACE_S, RESTART_LIMIT, RETENTION_MAX_S
from journal.observing import beside
from worker.agent import Agent
from worker.health import serve_health
from worker.opening import embedded, is_url
from worker.service import Worker

from ..durations import seconds
from ..dying import die_with_parent
from ..frame import EXIT_BY_CODE, UsageProblem, execute, report
from ..loading import load_agent
from ..logs import LogFormat, LogOption, mark
from ..options import CredsOption, NamespaceOption, StoreOption, Target
from ..terminal import note
from ..tracing import TraceOption, traced

AgentsArgument = Annotated[
    list[str], typer.Argument(help="FILE.py:NAME or dotted.module:NAME, one or several Agents.")
]

LEAVE_S = 5.0
"""When all is handed over the process has nothing to wait for."""


def register(app: typer.Typer) -> None:
    app.command("worker")(worker)


def worker(
    agents: AgentsArgument,
    concurrency: Annotated[
        int, typer.Option("--concurrency", help="Runs at once (1-4096).")
    ] = CONCURRENCY,
    ack_wait: Annotated[
        float,
        typer.Option("--ack-wait", help="Seconds of silence after which a worker is lost (1-600)."),
    ] = ACK_WAIT_S,
    restart_limit: Annotated[
        int,
        typer.Option("--restart-limit", help="A run that loses so many workers in a row fails."),
    ] = RESTART_LIMIT,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds for calls to end when it is told to stop.")
    ] = GRACE_S,
    name: Annotated[
        str | None, typer.Option("--name", help="Begins its id. Default: the host's name.")
    ] = None,
    health: Annotated[
        str | None,
        typer.Option(
            "--health", help="[HOST:]PORT for GET /healthz, /readyz, /livez, /metrics; on loopback."
        ),
    ] = None,
    retain: Annotated[
        str | None,
        typer.Option(
            "--retain",
            help="Purge runs that ended so long ago (30d). Needs a user who may. Default: never.",
        ),
    ] = None,
    store: StoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    trace: TraceOption = None,
    log_format: LogOption = LogFormat.TEXT,
) -> None:
    """Work the runs of these agents until it is told to stop.

    SIGTERM or Ctrl-C: it takes nothing new, lets calls end for the grace, and hands the rest over;
    a second one ends the grace. Exit code: 0 stopped, 9 the connection is closed for good.
    """
    die_with_parent()

    make = partial(
        Worker,
        name=name,
        namespace=namespace,
        creds=creds,
        concurrency=concurrency,
        ack_wait_s=ack_wait,
        restart_limit=restart_limit,
        grace_s=grace,
    )
    target = Target(store, namespace, creds)
    execute(False, _work(agents, make, name, health, trace, retain, target), log_format)


async def _work(
    agents: Sequence[str],
    make: Callable[..., Worker],
    name: str | None,
    health: str | None,
    trace: bool | None,
    retain: str | None,
    target: Target,
) -> int:
    if name is not None:
        checked_name(name, "a worker")
    where = None if health is None else _address(health)
    retain_s = None if retain is None else seconds(retain, "--retain", most_s=RETENTION_MAX_S)
    found = [load_agent(one) for one in agents]
    _check_names(found)
    async with contextlib.AsyncExitStack() as stack:
        observer = stack.enter_context(traced(trace, "runfold-worker", target.namespace))
        url = await stack.enter_async_context(_server(target))
        counting = Counting(time.monotonic)
        told = observer if where is None else beside(observer, counting)
        try:
            made = make(url, found, retain_s=retain_s, observer=told, on_ready=lambda: _ready(made))
        except ValueError as error:
            raise UsageProblem(str(error)) from error
        mark(worker=made.id)
        if where is not None:
            stack.enter_context(_health(where, made, counting))
        await _serve(made)
    return 0


def _check_names(agents: Sequence[Agent]) -> None:
    names = [agent.name for agent in agents]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UsageProblem(
            f"two agents are named {', '.join(twice)}",
            hint="a worker takes one revision of an agent; start another worker for the other",
        )


def _ready(made: Worker) -> None:
    agents = ", ".join(f"{agent.name} ({agent.revision})" for agent in made.agents.values())
    note(f"worker {made.id} is ready: agents {agents}")


@contextlib.asynccontextmanager
async def _server(target: Target) -> AsyncGenerator[str, None]:
    """The URL of the target's server."""
    if target.store is None:
        async with embedded(target.namespace) as url:
            yield url
    elif is_url(target.store):
        yield target.store
    else:
        raise UsageProblem(
            "a directory has no workers: they need a NATS server",
            hint="use a nats:// store, or `runfold run` on a directory",
        )


async def _serve(made: Worker) -> None:
    """Serve; a signal drains, the next ones force. Where something refuses to end, the process ends
    all the same: asyncio would wait for it for ever."""
    loop = asyncio.get_running_loop()
    told = 0

    def stop() -> None:
        nonlocal told
        told += 1
        if told == 1:
            note(f"worker {made.id} is stopping")
            loop.create_task(made.stop())  # noqa: RUF006 - it only sets a flag
        else:
            made.force()

    for number in (SIGTERM, SIGINT):
        loop.add_signal_handler(number, stop)
    code = 0
    try:
        await made.serve()
    except RunfoldError as error:
        code = EXIT_BY_CODE.get(error.code, 1)
        if not made.stubborn:
            raise
        report(error, json=False)
    finally:
        # Threads of a user's code, or what it makes of being cancelled, may never end.
        timer = threading.Timer(LEAVE_S, _leave, (code,))
        timer.daemon = True
        timer.start()
    if made.stubborn:
        note(f"{len(made.stubborn)} call(s) did not end: they are cut off")
        _leave(code)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise UsageProblem(f"--health is [HOST:]PORT, not {visible(text)}")
    return host.strip("[]") or "127.0.0.1", int(port)


@contextlib.contextmanager
def _health(where: tuple[str, int], made: Worker, counting: Counting) -> Generator[None]:
    host, port = where
    metrics = _metrics(made, counting)
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(serve_health(port, made.health, host, metrics))
        except OSError as error:
            raise UsageProblem(str(error.strerror or error)) from error
        shown = f"[{host}]" if ":" in host else host
        note(f"health: http://{shown}:{server.port}/healthz")
        if metrics is not None:
            note(f"metrics: http://{shown}:{server.port}/metrics")
        yield


def _metrics(made: Worker, counting: Counting) -> Callable[[], bytes] | None:
    """None without the extra `metrics`."""
    try:
        from worker.metrics import WorkerMetrics
    except ImportError:
        return None
    return WorkerMetrics(made, counting).text
