"""Shell: the options that every command shares, and what they open."""

from __future__ import annotations

import getpass
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, NamedTuple

import typer

from journal.escape import visible
from journal.store import Store
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import inspect

from .store import open_store
from .terminal import note

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="RUNFOLD_STORE",
        help="A directory, or nats://host:port. Default: an embedded server, data in .runfold/",
        show_default=False,
    ),
]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", envvar="RUNFOLD_NAMESPACE", help="Tenant or environment.")
]
CredsOption = Annotated[
    str | None,
    typer.Option("--creds", envvar="RUNFOLD_CREDS", help="NATS credentials file."),
]
MonitorOption = Annotated[
    str | None,
    typer.Option(
        "--monitor",
        envvar="RUNFOLD_MONITOR",
        help="The server's monitoring URL (http://host:8222): shows whether it syncs every write.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


class Target(NamedTuple):
    """Which store: the shared options, as one."""

    store: str | None
    namespace: str
    creds: str | None


@asynccontextmanager
async def opened(target: Target) -> AsyncGenerator[Store, None]:
    """The target's store."""
    async with open_store(target.store, namespace=target.namespace, creds=target.creds) as store:
        yield store


async def note_safety(target: Target, monitor: str | None, store: Store) -> None:
    """Say on stderr what the store could not see or say itself when it was opened (R14): whether
    the servers sync every write. The embedded server does; so do directories."""
    if target.store is None or not isinstance(store, JetStreamStore):
        return
    found = store.safety
    if monitor is not None:
        found = await inspect(
            target.store, namespace=target.namespace, monitor_url=monitor, creds=target.creds
        )
    assert found is not None  # an open store has judged its stream
    unsaid = [finding.what for finding in found.findings if finding.what not in store.degraded]
    if unsaid:
        note(f"storage {found.level.upper()}: {'; '.join(unsaid)} (`runfold doctor` says more)")


def user() -> str:
    """Who decides, for `by`: whoever owns the store may sign for it (R66)."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):
        name = "unknown"
    return f"cli:{visible(name)[:64]}"
