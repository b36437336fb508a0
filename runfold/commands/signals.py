"""Shell: `runfold signals`: what was published to runs and waits, and what was refused (R59)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from journal.errors import InvalidId
from journal.escape import visible
from journal.stores.jetstream import JetStreamStore
from journal.stores.rejected import REJECTED_PAGE, Refusal
from journal.stores.signals_queue import SignalBacklog

from ..frame import UsageProblem, execute
from ..options import AnyStoreOption, CredsOption, JsonOption, NamespaceOption, Target, opened
from ..reach import reached
from ..terminal import emit_json, note, say


def register(app: typer.Typer) -> None:
    app.command("signals")(signals)


def signals(
    rejected: Annotated[
        bool, typer.Option("--rejected", help="Those that were refused, newest first, with why.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", help="At most so many.")] = 100,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Signals sent with `nats pub`: how many wait for a bridge; what was refused in 30 days."""

    async def body() -> int:
        if not 1 <= limit <= REJECTED_PAGE:
            raise UsageProblem(f"--limit is 1 to {REJECTED_PAGE}")
        target = Target(store, namespace, creds)
        if rejected:
            async with reached(target) as runs:
                _print_rejected(await runs.rejected(limit), json)
            return 0
        if target.bridge is not None:
            raise UsageProblem(
                "what waits for a bridge stands on the server", hint="use a nats:// store"
            )
        async with opened(target) as opened_store:
            if not isinstance(opened_store, JetStreamStore):
                raise InvalidId(
                    "nobody publishes signals to a directory", hint="use a nats:// store"
                )
            _print_backlog(await opened_store.signals.backlog(), json)
        return 0

    execute(json, body())


def _print_rejected(refusals: Sequence[Refusal], json: bool) -> None:
    if json:
        emit_json({"rejected": refusals})
        return
    if not refusals:
        note("no signal was refused in the last 30 days")
    for one in refusals:  # escaped when they were written; whoever wrote them
        what = f"{one.name or '?'} for {one.run or '?'} by {one.by}"
        say(f"{visible(one.at)}  {visible(what)}: {visible(one.code)}: {visible(one.reason)}")
        say(f"    {visible(one.subject)} {visible(one.payload)}")


def _print_backlog(found: SignalBacklog, json: bool) -> None:
    if json:
        emit_json(found)
        return
    say(f"{found.waiting} waiting, {found.in_progress} of them at work or put off")
    if found.waiting and not found.pulls:
        note("no bridge is asking for them: `runfold bridge` applies them")
