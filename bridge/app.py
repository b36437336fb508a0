"""Shell: how a request reaches its operation, and how its answer leaves: the ASGI application.

Not Starlette's router: it matches the decoded path, where `%2F` in a parameter can't be told from
a slash between two.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from journal.errors import RunfoldError
from journal.escape import visible
from journal.stores.jetstream_headers import TRACE

from .auth import Identity
from .call import Call
from .desk import Desk, Place
from .operation import Operation, Table
from .problems import (
    PROBLEM_TYPE,
    RETRY_AFTER_S,
    Forbidden,
    Internal,
    MethodNotAllowed,
    NotFound,
    PayloadTooLarge,
    TwoLengths,
    Unauthorized,
    problem,
)

log = logging.getLogger("runfold")
access = logging.getLogger("runfold.access")

PATH_CHARS_MAX: Final = 500

SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""Of every answer that doesn't say otherwise."""


class App:
    """The application of these operations."""

    def __init__(self, desk: Desk, operations: Sequence[Operation]) -> None:
        self._desk = desk
        self._table = Table(operations)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "uvicorn is told to do nothing else"
        request = Request(scope, receive)
        began = time.perf_counter()
        operation: Operation | None = None

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = operation.name if operation else ""
                method = operation.method if operation else ""
                seconds = time.perf_counter() - began
                self._desk.metrics.request(name, method, message["status"], seconds)
                if operation is None or operation.scope is not None:  # probes say nothing
                    _log_access(request, message["status"], seconds)
            await send(message)

        try:
            _check_length(request)
            operation, path = self._find(request)
            response = await self._answered(request, operation, path)
        except ClientDisconnect:
            return
        except RunfoldError as error:
            response = _refusal(error)
        except Exception as error:
            _log_bug(operation, error)
            response = _refusal(Internal())
        for name, text in HEADERS.items():
            response.headers.setdefault(name, text)
        try:
            await response(scope, receive, sending)
        except Exception as error:  # the answer has begun: what is left is to cut it off
            _log_bug(operation, error)

    def _find(self, request: Request) -> tuple[Operation, dict[str, str]]:
        found = self._table.find(request.scope["raw_path"])
        if found is None:
            raise NotFound("there is nothing at this address", hint="GET /openapi.json lists all")
        place, path = found
        method = "GET" if request.method == "HEAD" else request.method
        operation = place.by_method.get(method)
        if operation is None:
            raise MethodNotAllowed(f"{place.path} takes {place.allow}", allow=place.allow)
        return operation, path

    async def _answered(
        self, request: Request, operation: Operation, path: dict[str, str]
    ) -> Response:
        identity = self._admitted(request, operation)
        if operation.scope is None:  # a busy bridge still says that it is well
            return await operation.handle(Call(self._desk, operation, request, path))
        body, place = await self._begun(request, operation)
        try:
            call = Call(self._desk, operation, request, path, identity, place, body)
            with self._door(operation, request):
                return await operation.handle(call)
        finally:
            place.leave()

    def _door(
        self, operation: Operation, request: Request
    ) -> contextlib.AbstractContextManager[object]:
        """Where it may append something in its caller's name, the observer is told whose it is."""
        if operation.scope != "signal":
            return contextlib.nullcontext()
        named = request.headers.getlist(TRACE)
        what = f"{operation.method} {operation.path}"
        return self._desk.store.observer.door(what, named[0] if len(named) == 1 else "")

    async def _begun(self, request: Request, operation: Operation) -> tuple[bytes, Place]:
        """The body, and then a place: who sends slowly holds none."""
        if operation.body is None:
            return b"", await self._desk.take_request()
        async with self._desk.bodies.coming() as body:
            found = await body.read(request)
            return found, await self._desk.take_request()

    def _admitted(self, request: Request, operation: Operation) -> Identity | None:
        auth = self._desk.auth
        if auth.open:
            _check_local(request)
        if operation.scope is None:
            return None
        identity = auth.identify(request.headers.get("authorization"))
        if identity is None:
            raise Unauthorized(
                "this needs a token that the bridge knows", hint="Authorization: Bearer <token>"
            )
        if not identity.may(operation.scope):
            raise Forbidden(f"the token of {identity.name} has not the scope {operation.scope}")
        return identity


def _log_access(request: Request, status: int, seconds: float) -> None:
    """At a level that only JSON lines have."""
    if not access.isEnabledFor(logging.INFO):
        return
    path = str(request.scope["path"])[:PATH_CHARS_MAX]
    told = {"method": request.method, "path": path, "status": status, "seconds": round(seconds, 6)}
    access.info("%s %s %d", request.method, visible(path), status, extra=told)


def _check_length(request: Request) -> None:
    """RFC 9112, 6.1: a body of two lengths may hide a request from a proxy before us."""
    if "content-length" in request.headers and "transfer-encoding" in request.headers:
        raise TwoLengths("a request has a Content-Length or a Transfer-Encoding, not both")


def _check_local(request: Request) -> None:
    """Without auth a web page must not reach the bridge through its visitor's browser: under a name
    of its own that leads to this machine (DNS rebinding), or with a request it may not read."""
    host = request.headers.get("host", "")
    if not is_loopback(_host_name(host)):
        raise Forbidden("without auth the bridge is asked as localhost only")
    origin = request.headers.get("origin")
    own = origin is None or origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")
    if request.method not in SAFE_METHODS and not own:
        raise Forbidden("a page of another origin may change nothing here")


def _host_name(authority: str) -> str:
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether this name or address is the machine itself."""
    if host in ("localhost", "localhost."):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _refusal(error: RunfoldError) -> Response:
    found = problem(error)
    if found.code == "internal" and not isinstance(error, Internal):
        log.error("an error without a status: %s: %s", error.code, error.message)
    headers: dict[str, str] = {}
    if found.status == 503:
        headers["retry-after"] = str(RETRY_AFTER_S)
    elif found.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["allow"] = error.allow
    elif isinstance(error, PayloadTooLarge | TwoLengths):
        headers["connection"] = "close"
    return Response(msgspec.json.encode(found), found.status, headers, PROBLEM_TYPE)


def _log_bug(operation: Operation | None, error: Exception) -> None:
    where = operation.name if operation else "a request"
    text = visible(f"{type(error).__name__}: {str(error)[:500]}")
    log.error("%s failed: %s", where, text, exc_info=error)
