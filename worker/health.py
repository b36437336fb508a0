"""Shell: the health endpoints of a worker. They answer from a thread, so also while the event loop
is blocked or busy, which is when they are needed."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final

import msgspec
from msgspec import Struct

from journal.escape import visible
from journal.messages import JSON

log = logging.getLogger("runfold")

ALIVE: Final = "/livez"
PATHS: Final = ("/healthz", "/readyz", ALIVE)

METRICS: Final = "/metrics"
NO_METRICS: Final = b"metrics need prometheus_client: pip install 'runfold[metrics]'\n"
JSON_TYPE: Final = "application/json"
TEXT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

REQUEST_S_MAX: Final = 5.0
"""Silence within a request: a client that says nothing holds a thread no longer."""

REQUESTS_AT_ONCE_MAX: Final = 32
"""Each has a thread; further ones are hung up on, and ask again."""

TEXT_MAX: Final = 500


class Health(Struct, frozen=True, kw_only=True):
    """What a worker says of itself; `details` are further fields of the answer. `hopeless`: only a
    new process can be well again, and this one holds nothing that a kill would cut off."""

    ok: bool
    hopeless: bool = False
    problems: tuple[str, ...] = ()
    details: dict[str, JSON] = {}


class Load(Struct, frozen=True):
    """How much a worker has to do. `backlog`: by agent, tasks that were said to wait."""

    active: int
    concurrency: int
    connected: bool
    stubborn: int
    backlog: dict[str, int]


@contextmanager
def serve_health(
    port: int,
    report: Callable[[], Health],
    host: str = "127.0.0.1",
    metrics: Callable[[], bytes] | None = None,
) -> Generator[HealthServer, None, None]:
    """While entered, GET /healthz and /readyz answer 200 or, where `report` says not ok, 503; GET
    /livez answers 503 only where it says hopeless.

    GET /metrics answers what `metrics` makes for Prometheus; without it 501.

    Port 0 takes a free one: see the `port` of what this gives. Both are called in other threads,
    several at once; where it raises, the answer is 503 (/livez: 200) with the exception's text.
    Raises OSError where the port can't be had.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"a port is 0 to 65535, not {port}")
    try:
        server = HealthServer(host, port, report, metrics)
    except OSError as error:
        why = error.strerror or str(error)
        what = f"health can't be served at {host} port {port}: {why}; choose another port"
        raise OSError(error.errno, what) from error
    wake, woken = socket.socketpair()
    thread = threading.Thread(
        target=_serve, args=(server, woken), name="runfold-health", daemon=True
    )
    try:
        thread.start()
        yield server
    finally:
        wake.close()  # makes `woken` readable
        thread.join()
        woken.close()
        server.server_close()


def _serve(server: HealthServer, woken: socket.socket) -> None:
    # Not serve_forever, which wakes up twice a second to see whether it should end.
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while all(key.fileobj is not woken for key, _ in selector.select()):
            server.handle_request()


class HealthServer(ThreadingHTTPServer):
    """Serves at `host` and `port`."""

    timeout = 0  # handle_request is called when there is one, and must not wait if it went away
    daemon_threads = True  # a report that hangs keeps no process from ending
    block_on_close = False

    def __init__(
        self,
        host: str,
        port: int,
        report: Callable[[], Health],
        metrics: Callable[[], bytes] | None,
    ) -> None:
        self.report = report
        self.metrics = metrics
        self._places = threading.BoundedSemaphore(REQUESTS_AT_ONCE_MAX)
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)
        self.host = host
        self.port: int = self.socket.getsockname()[1]

    def server_bind(self) -> None:
        # Not HTTPServer's, which asks the resolver for the host's full name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.exception("a health request failed")


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version: ClassVar[str] = "runfold"  # pyright: ignore[reportIncompatibleVariableOverride]
    sys_version = ""
    timeout = REQUEST_S_MAX

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # who asked is gone
            super().handle()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in PATHS:
            self._answer(*_judged(self.server.report, path == ALIVE))
        elif path == METRICS:
            self._answer(*_measured(self.server.metrics))
        else:
            self._no_such()

    def _no_such(self) -> None:
        text = f"GET {' or '.join((*PATHS, METRICS))}"
        self._answer(404, msgspec.json.encode({"ok": False, "problems": [text]}))

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _no_such

    def _answer(self, status: int, body: bytes, kind: str = JSON_TYPE) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: probes come every few seconds."""


def _judged(report: Callable[[], Health], alive: bool) -> tuple[int, bytes]:
    try:
        health = report()
        well = not health.hopeless if alive else health.ok
        told = {"ok": well, "problems": health.problems}
        body = msgspec.json.encode(told | health.details | told)  # details can't hide a problem
    except Exception as error:  # not known to be well is not well; nor is it hopeless
        text = visible(f"the health report failed: {type(error).__name__}: {str(error)[:TEXT_MAX]}")
        body = msgspec.json.encode({"ok": alive, "problems": [text]})
        return (200 if alive else 503), body
    return (200 if well else 503), body


def _measured(metrics: Callable[[], bytes] | None) -> tuple[int, bytes, str]:
    if metrics is None:
        return 501, NO_METRICS, TEXT_TYPE
    try:
        return 200, metrics(), TEXT_TYPE
    except Exception as error:
        text = visible(f"the metrics failed: {type(error).__name__}: {str(error)[:TEXT_MAX]}")
        return 500, f"{text}\n".encode(), TEXT_TYPE
