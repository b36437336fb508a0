"""Shell: what runs while `runfold bridge` does: a store, an HTTP server, the parts on NATS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from journal import ids, limits
from journal.errors import RunfoldError
from journal.observing import UNOBSERVED, Observer, beside
from journal.stores.jetstream import JetStreamStore

from . import looking, page, runs, talking, work_api
from .app import App, is_loopback
from .auth import Auth
from .call import Call, answer
from .desk import Desk, Health
from .fleet_metrics import FleetLook
from .http_server import HttpServer, bound
from .metrics import Metrics
from .nats_api import NatsApi
from .offers import RemoteTasks
from .openapi import openapi
from .operation import Operation, json_answer
from .pulse import HealthLog, Pulse
from .signals import SignalDoor

TOKENS: Final = "tokens"

READY_S: Final = 5.0
"""What it does on NATS is in force within some ten round trips."""

READY_LOOK_S: Final = 0.02


class Part(Protocol):
    """What works beside the HTTP server, on NATS. `run` ends when it is cancelled; `problem` says
    why it does not do its work now, and is empty where it does."""

    async def run(self) -> None: ...
    def problem(self) -> str: ...


def parts(store: JetStreamStore, metrics: Metrics) -> Sequence[Part]:
    """The streams' pulse, and doors on NATS. A further part is a line here."""
    fleet = FleetLook(store)
    metrics.show(fleet.families)
    return (
        Pulse(store),
        SignalDoor(store, count=metrics.signal),
        NatsApi(store, count=metrics.signal),
        fleet,
    )


class OpenBridge(RunfoldError):
    """Without auth the bridge binds to loopback only (R66)."""

    code = "open_bridge"


class Bridge:
    """`await Bridge(url, auth=…).serve()` until `stop` or the connection is closed for good."""

    def __init__(
        self,
        url: str,
        *,
        auth: Auth,
        namespace: str = "runfold",
        creds: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8787,
        ack_wait_s: float = limits.ACK_WAIT_S,
        restart_limit: int = limits.RESTART_LIMIT,
        on_ready: Callable[[], None] | None = None,
        observer: Observer = UNOBSERVED,
    ) -> None:
        """Port 0 is any free one: see `address` when ready. Raises InvalidId, OpenBridge."""
        ids.namespace(namespace)
        if auth.open and not is_loopback(host):
            raise OpenBridge(f"without auth a bridge listens on this machine only, not on {host}")
        self._url = url
        self._namespace = namespace
        self._creds = creds
        self._auth = auth
        self._host = host
        self._port = port
        self._ack_wait_s = ack_wait_s
        self._restart_limit = restart_limit
        self._on_ready = on_ready or (lambda: None)
        self._observer = observer
        self._stopping = asyncio.Event()
        self._ready = False
        self._store: JetStreamStore | None = None
        self._parts: Sequence[Part] = ()
        self.metrics = Metrics()
        self.metrics.connected_by(lambda: self._store is not None and self._store.connected)

    @property
    def address(self) -> str:
        """`http://host:port`."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    @property
    def store(self) -> JetStreamStore | None:
        """What it stands on, while it is open."""
        return self._store

    async def stop(self) -> None:
        """Tell it to stop; idempotent. `serve` returns when it has."""
        self._stopping.set()

    def health(self) -> Health:
        """Red where a request would find nobody home, or tokens are not what the file says."""
        return _judged(self._problems())

    def ready(self) -> Health:
        """Red where a request would find nobody home. Not for tokens: those before are in force,
        and a proxy that goes by this would lock everybody out, as one slip is at all bridges."""
        found = self._problems()
        del found[TOKENS]
        return _judged(found)

    def _problems(self) -> dict[str, str]:
        """By source; "" where there is none."""
        state = ""
        if self._store is None or not self._store.connected:
            state = "not connected to the NATS server"
        elif self._stopping.is_set():
            state = "it is stopping"
        elif not self._ready:
            state = "it is starting"
        found = {type(part).__name__: part.problem() for part in self._parts}
        return {"state": state, **found, TOKENS: self._auth.problem() or ""}

    def _to_log(self) -> dict[str, str]:
        """Without what auth.py says there itself, with more of it than is for everybody."""
        if not self._ready:  # until then somebody waits for it to be
            return {}
        found = self._problems()
        del found[TOKENS]
        return found

    async def serve(self) -> None:
        """Until `stop`. Raises OSError where the address can't be had, NotProvisioned,
        StoreUnavailable, and what the store says when its connection is closed for good."""
        with bound(self._host, self._port) as listening:
            self._port = listening.getsockname()[1]
            async with JetStreamStore(
                self._url, namespace=self._namespace, creds=self._creds
            ) as store:
                store.observer = beside(self._observer, self.metrics.counting)
                self._store = store
                try:
                    await self._work(store, listening)
                except ExceptionGroup as group:
                    if len(group.exceptions) == 1:
                        raise group.exceptions[0] from None
                    raise
                finally:
                    self._ready = False
                    self._store = None

    async def _work(self, store: JetStreamStore, listening: socket.socket) -> None:
        desk = Desk(store, self._auth, self.metrics, self.health, self.ready)
        remote = RemoteTasks(store, ack_wait_s=self._ack_wait_s, restart_limit=self._restart_limit)
        server = HttpServer(App(desk, operations(desk, remote)))
        self._parts = (remote, *parts(store, self.metrics))
        async with asyncio.TaskGroup() as group:
            working = [group.create_task(part.run()) for part in self._parts]
            working.append(group.create_task(_closed(store)))
            telling = group.create_task(HealthLog(self._to_log).run())
            serving = group.create_task(server.serve_until_cancelled(listening))
            try:
                await self._begun()
                self._ready = True
                self._on_ready()
                await self._stopping.wait()
            finally:  # also when it is cancelled: the server waits for streams to end
                telling.cancel()
                desk.stopping.set()
            server.should_exit = True
            await serving
            for task in working:
                task.cancel()

    async def _begun(self) -> None:
        """What it does is in force; or it takes long, and health says why; or it is stopped."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + READY_S
        while any(part.problem() for part in self._parts) and loop.time() < deadline:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READY_LOOK_S):
                    await self._stopping.wait()
                    return


def operations(desk: Desk, remote: RemoteTasks) -> list[Operation]:
    """The table. A further list of operations is a line here."""
    found = [
        *runs.operations(desk),
        *talking.operations(desk),
        *looking.operations(desk),
        *work_api.operations(remote),
        *page.operations(desk),
    ]
    document: dict[str, Any] = {}

    async def describe(_: Call) -> Any:
        return answer(document)

    found.append(
        Operation(
            name="openapi",
            method="GET",
            path="/openapi.json",
            scope="read",
            summary="This document",
            handle=describe,
            answers={200: json_answer("OpenAPI 3.1.", dict[str, Any])},
            problems=(400,),
        )
    )
    document.update(openapi(found))
    return found


def _judged(found: Mapping[str, str]) -> Health:
    problems = tuple(said for said in found.values() if said)
    return Health(ok=not problems, problems=problems)


async def _closed(store: JetStreamStore) -> None:
    raise await store.closed()
