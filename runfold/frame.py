"""Shell: the frame of every command: run it, and turn what goes wrong into one line and a code."""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from signal import SIGINT, SIGTERM, Signals
from typing import Any, cast

import typer

from journal.errors import RunfoldError

from .logs import LogFormat, complain, note, set_up
from .terminal import emit_json

EXIT_BY_CODE = {
    "invalid_id": 2,
    "bad_payload": 2,
    "not_encodable": 2,
    "too_large": 2,
    "bad_request": 2,
    "usage": 2,
    "indeterminate": 4,
    "waiting": 5,
    "cancelled": 7,
    "run_not_found": 8,
    "input_mismatch": 8,
    "run_finished": 8,
    "decision_conflict": 8,
    "stale_signal": 8,
    "fenced": 8,
    "store_locked": 8,
    "replay_mismatch": 8,
    "shards_fixed": 8,
    "not_provisioned": 9,
    "store_unavailable": 9,
    "permission_denied": 9,
    "unauthorized": 9,
    "forbidden": 9,
    "not_found": 9,
    "busy": 9,
}
"""R69; every other code exits with 1."""


class UsageProblem(RunfoldError):
    """The command line, or a file it names, is not usable."""

    code = "usage"


class Interrupted(RunfoldError):
    """A signal ended the command."""

    code = "interrupted"


def execute(
    json: bool,
    command: Coroutine[Any, Any, int],
    log_format: LogFormat = LogFormat.TEXT,
    *,
    fast: bool = True,
) -> None:
    """Run a command's body; its result is the exit code. `fast`: on uvloop's event loop where it is
    installed, which has no process groups (uvloop 0.23)."""
    set_up(log_format)
    told: list[Signals] = []
    try:
        with asyncio.Runner(loop_factory=_fast_loop() if fast else None) as runner:
            code = runner.run(_until_told(command, told))
    except asyncio.CancelledError:
        word = "interrupted" if told[:1] == [SIGINT] else "terminated"
        report(Interrupted(f"{word}; the run can be taken up again"), json)
        code = 128 + (told[0] if told else SIGTERM)
    except RunfoldError as error:
        code = report(error, json)
    except ExceptionGroup as group:  # out of a task group
        errors = _flat(group)
        if len(errors) != 1:
            raise
        code = report(errors[0], json)
    raise typer.Exit(code)


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's: a third less CPU a request to the server, half alone (bench/layers.py)."""
    if os.environ.get("RUNFOLD_UVLOOP") == "0":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _until_told(command: Coroutine[Any, Any, int], told: list[Signals]) -> int:
    """Ctrl-C and SIGTERM cancel, as often as they come, so that locks, claims and servers are given
    up in order; a KeyboardInterrupt would give them up beside a call that still runs."""
    task = asyncio.current_task()
    assert task is not None

    loop = asyncio.get_running_loop()
    still = "stopping: a call that can't be stopped is waited for (kill -9 waits for nothing)"

    def stop(number: Signals) -> None:
        if not told:
            loop.call_later(1.0, note, still)
        told.append(number)
        task.cancel()

    for number in (SIGINT, SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return await command


def _flat(group: BaseException) -> list[RunfoldError]:
    """The RunfoldErrors in a task group's failure."""
    if isinstance(group, RunfoldError):
        return [group]
    inner = cast("ExceptionGroup[Exception]", group)
    parts = inner.exceptions if isinstance(group, ExceptionGroup) else ()
    return [error for part in parts for error in _flat(part)]


def report(error: RunfoldError, json: bool) -> int:
    """One line on stderr; with --json also the error object on stdout. Returns the exit code."""
    complain(error.message, error.hint, error.code, error.run_id)
    if json:
        body = {
            "code": error.code,
            "message": error.message,
            "run": error.run_id,
            "hint": error.hint,
        }
        emit_json({"error": body})
    if os.environ.get("RUNFOLD_DEBUG", "0") not in ("", "0"):
        traceback.print_exception(error)
    return EXIT_BY_CODE.get(error.code, 1)


def report_bug(error: BaseException, json: bool) -> int:
    """An exception that is no RunfoldError: still one line, which says what it was and where, also
    of one out of task groups; RUNFOLD_DEBUG=1 shows the rest."""
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", inner).exceptions[0]
    frames = traceback.extract_tb(inner.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    what = f"internal error: {type(inner).__name__}: {str(inner)[:500]}{where}"
    bug = RunfoldError(what, hint="RUNFOLD_DEBUG=1 shows where; please report it")
    bug.__cause__ = error
    return report(bug, json)
