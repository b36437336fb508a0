"""Shell: the options that every command shares, and what they open."""

from __future__ import annotations

import getpass
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import typer
from typer.exceptions import TyperException

from journal.errors import InvalidId
from journal.escape import visible
from journal.ids import shown
from journal.store import Store
from journal.stores.jetstream import JetStreamStore
from journal.stores.nats_address import without_password
from journal.stores.provision import inspect
from journal.stores.safety import Safety

from .frame import UsageProblem
from .store import is_url, open_store
from .terminal import note, options

BRIDGE_SCHEMES = ("http://", "https://")
TOKEN = "RUNFOLD_TOKEN"
"""Where the token for a bridge stands: all on the machine can read a command line."""


def _no_bridge(context: typer.Context, store: str | None) -> str | None:
    if store is not None and store.startswith(BRIDGE_SCHEMES):
        raise TyperException(
            f"`runfold {context.info_name}` needs the NATS server itself, not a bridge: give "
            "--store nats://host:port, or a directory"
        )
    return store


StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="RUNFOLD_STORE",
        help="A directory, or nats://host:port. Default: an embedded server, data in .runfold/",
        show_default=False,
        callback=_no_bridge,
    ),
]
AnyStoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar="RUNFOLD_STORE",
        help="A directory, nats://host:port, or a bridge's http://host:port (its token in "
        f"{TOKEN}). Default: an embedded server, data in .runfold/",
        show_default=False,
    ),
]
"""Of a command that a bridge can do, too."""

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
JsonOption = Annotated[
    bool, typer.Option("--json", help="JSON on standard output, and nothing else.")
]


class Target(NamedTuple):
    """Which store: the shared options, as one."""

    store: str | None
    namespace: str
    creds: str | None

    @property
    def bridge(self) -> str | None:
        """The bridge's address, where the target is one; raises InvalidId, UsageProblem."""
        if self.store is None or not self.store.startswith(BRIDGE_SCHEMES):
            return None
        return _bridge_address(self.store)

    @property
    def server(self) -> str | None:
        """The URL of a NATS server that is not this folder's own."""
        return self.store if self.store is not None and is_url(self.store) else None

    @property
    def shared(self) -> bool:
        """Whether workers may be there to go on with a run."""
        return self.store is None or "://" in self.store

    @property
    def option(self) -> str:
        """The options that a printed command needs to mean the same runs."""
        return options(self.store, self.namespace if self.bridge is None else "runfold")


@asynccontextmanager
async def opened(target: Target) -> AsyncGenerator[Store, None]:
    """The target's store; a bridge has none to open."""
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
    note_unsaid(store, found)


def note_unsaid(store: JetStreamStore, found: Safety | None) -> None:
    """What was found of the store's safety and not said when it was opened."""
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


def bridge_token() -> str | None:
    """The token for a bridge; raises UsageProblem. It is never shown."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        return None
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageProblem(f"{TOKEN} holds no token: a token is printable ASCII without blanks")
    return token


def _bridge_address(text: str) -> str:
    try:
        parts = urlsplit(text)
        known = parts.hostname and parts.port != 0 and text.isprintable() and " " not in text
    except ValueError:
        parts, known = None, False
    if parts is None or not known or parts.query or parts.fragment:
        raise InvalidId(
            f"{shown(without_password(text))} is not the address of a bridge",
            hint="it looks like http://host:port",
        )
    if parts.username is not None or parts.password is not None:
        raise UsageProblem("a bridge's address holds no secret", hint=f"put its token into {TOKEN}")
    return text.rstrip("/")
