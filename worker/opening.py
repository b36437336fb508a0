"""Shell: opening a store by what a user writes: a directory, `nats://host:port`, or nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from journal import ids
from journal.errors import InvalidId
from journal.fleet import Fleet
from journal.store import Store
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

from .server import EmbeddedServer

HOME = ".runfold"
SCHEMES = ("nats://", "tls://")


def is_url(where: str) -> bool:
    return where.startswith(SCHEMES)


@asynccontextmanager
async def open_store(
    where: str | None = None, *, namespace: str = "runfold", creds: str | None = None
) -> AsyncGenerator[Store, None]:
    """The store at `where`.

    - a directory: one JSONL file a run; a folder in it for each namespace but the default one
    - a `nats://` URL: a server, set up once by `runfold init`
    - None: an embedded nats-server with its data in `.runfold/`, started if no process of yours
      runs it, stopped when the last one leaves

    Raises InvalidId (namespace, or no store at all), NotProvisioned, StoreUnavailable.
    """
    ids.namespace(namespace)
    if where is None:
        async with (
            embedded(namespace) as url,
            JetStreamStore(url, namespace=namespace) as store,
        ):
            yield store
    elif is_url(where):
        async with JetStreamStore(where, namespace=namespace, creds=creds) as store:
            yield store
    elif "://" in where or not where:
        raise InvalidId(
            f"{ids.shown(where)} is no store", hint="a store is a directory or nats://host:port"
        )
    else:  # the default namespace's journals stand in the directory itself
        yield FileStore(where if namespace == "runfold" else Path(where) / namespace)


@asynccontextmanager
async def embedded(namespace: str) -> AsyncGenerator[str, None]:
    """The URL of the embedded server of `.runfold/`, with this namespace's streams."""
    async with EmbeddedServer(HOME) as server:
        await provision(server.url, namespace=namespace)
        yield server.url


@asynccontextmanager
async def connect(
    url: str | None = None, *, namespace: str = "runfold", creds: str | None = None
) -> AsyncGenerator[Fleet, None]:
    """The fleet at `url`, as `open_store` takes it: without one, the embedded server of
    `.runfold/`. Raises InvalidId, NotProvisioned, StoreUnavailable."""
    async with open_store(url, namespace=namespace, creds=creds) as store:
        yield Fleet(store)
