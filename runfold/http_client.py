"""Store: a bridge's HTTP: one question and its answer, or a stream of events.

httpx, not the standard library: a wait must end with Ctrl-C, and a thread that sits in
`http.client` does not. Redirects are not followed: the token would go with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator
from ipaddress import ip_address
from typing import Any, Final, NamedTuple, Self

import msgspec

try:
    import httpx
except ImportError as _missing:
    raise ImportError("an http:// store needs httpx: pip install 'runfold[http]'") from _missing

from journal.errors import RunfoldError, StoreUnavailable, TooLarge
from journal.escape import visible
from journal.limits import WAIT_MAX_S

from .events import Event, Events
from .remote_errors import (
    BridgeLost,
    Forbidden,
    NoBridge,
    NotFound,
    Unauthorized,
    passing,
    problem_error,
)

CONNECT_S: Final = 5.0
SILENT_S: Final = 30.0
"""Longer than the bridge needs for anything but a wait, which is added."""

EVENTS_SILENT_S: Final = 45.0
"""A stream has a comment every 15 s: three that are missing, and it is dead."""

REPEAT_S: Final = 15.0
"""A question whose answer was lost is asked again for so long: a restart takes some seconds."""

PAUSE_S, PAUSE_MAX_S = 0.1, 2.0
REQUEST_BYTES_MAX: Final = 1024 * 1024
"""As the bridge has it. It closes the connection over a larger one, and its answer may be lost."""

HUNG_UP_MAX: Final = 4
"""So often in a row a bridge that crashes is refusing connections by then; a server of another
protocol is not."""

BODY_BYTES_MAX: Final = 256 * 1024 * 1024
EVENT_BYTES_MAX: Final = 64 * 1024 * 1024


class Answer(NamedTuple):
    """`again`: it was asked more than once, and an earlier time may have been heard."""

    status: int
    body: bytes
    again: bool


class HttpClient:
    """`async with HttpClient(address, token) as client:`; `address` as `http://host:port`."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address = address
        self._token = token
        self.met = False  # whether anybody was ever reached there
        self._spoke = False  # whether it was somebody who speaks HTTP
        headers = {"accept-encoding": "identity", "user-agent": "runfold"}
        if token is not None:
            headers["authorization"] = f"Bearer {token}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(SILENT_S, connect=CONNECT_S),
            # A proxy for the world outside does not know this machine's own bridge.
            trust_env=not _is_local(address),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    # ---- a question and its answer ------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str | int] | None = None,
        body: Any = None,
        wait_s: float = 0.0,
        patience_s: float = REPEAT_S,
    ) -> Answer:
        """The answer, asked for again where none came: so the question carries an id, or changes
        nothing. Raises what the bridge refuses with; StoreUnavailable, at once where nobody ever
        listened."""
        loop = asyncio.get_running_loop()
        pause_s, heard, deadline = PAUSE_S, False, loop.time() + patience_s
        hung_up = 0
        while True:
            try:
                return await self._ask(method, path, query, body, wait_s, heard)
            except RunfoldError as error:
                unheard = isinstance(error, BridgeLost) and error.unheard
                heard = heard or not unheard
                if isinstance(error, BridgeLost):
                    error.unheard = not heard
                self.met = self.met or heard
                if not passing(error) or not self.met or loop.time() > deadline:
                    raise
                hung_up += isinstance(error.__cause__, httpx.RemoteProtocolError)
                if hung_up == HUNG_UP_MAX and not self._spoke:
                    raise self._no_bridge("it closes connections without a word") from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str | int] | None,
        body: Any,
        wait_s: float,
        again: bool,
    ) -> Answer:
        content = None if body is None else msgspec.json.encode(body)
        if content is not None and len(content) > REQUEST_BYTES_MAX:
            raise TooLarge(f"a request to a bridge is at most {REQUEST_BYTES_MAX} bytes")
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(WAIT_MAX_S + 2 * SILENT_S),
                self._http.stream(
                    method,
                    self.address + path,
                    params=query,
                    content=content,
                    headers=headers,
                    timeout=httpx.Timeout(SILENT_S + wait_s, connect=CONNECT_S),
                ) as response,
            ):
                self._spoke = True
                found = await _read(response)
        except (httpx.HTTPError, TimeoutError) as error:
            raise self._lost(error) from error
        if response.is_success:
            self.met = True
            return Answer(response.status_code, found, again)
        raise self._refused(response, found)

    # ---- events -------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def events(
        self, path: str, query: dict[str, str | int], headers: dict[str, str]
    ) -> AsyncGenerator[AsyncIterator[Event] | None, None]:
        """The stream's events, or None where it says that nothing follows (204). Whatever ends it
        before its time is a BridgeLost, of who reads it, too. Raises as `ask`, but asks once."""
        timeout = httpx.Timeout(SILENT_S, connect=CONNECT_S, read=EVENTS_SILENT_S)
        try:
            async with self._http.stream(
                "GET",
                self.address + path,
                params=query,
                headers={"accept": "text/event-stream", **headers},
                timeout=timeout,
            ) as response:
                if not response.is_success:
                    raise self._refused(response, await _read(response))
                self.met = True
                if response.status_code == 204:
                    yield None
                    return
                if not response.headers.get("content-type", "").startswith("text/event-stream"):
                    raise self._no_bridge(f"it answers {response.status_code} without events")
                async with contextlib.aclosing(_events(response.aiter_bytes())) as found:
                    yield found
        except httpx.HTTPError as error:
            raise self._lost(error) from error

    # ---- what goes wrong ----------------------------------------------------------------------

    def _lost(self, error: Exception) -> StoreUnavailable:
        unheard = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        text = visible(_reason(error))[:300]
        if unheard:
            return BridgeLost(
                f"no bridge answers at {self.address}: {text}",
                unheard=True,
                hint="is `runfold bridge` running, and the address right?",
            )
        if isinstance(error, httpx.RemoteProtocolError) and "illegal" in text:
            return self._no_bridge("it does not speak HTTP")
        silent = isinstance(error, httpx.TimeoutException | TimeoutError)
        what = "it does not answer in time" if silent else f"the answer was cut off: {text}"
        return BridgeLost(
            f"the bridge at {self.address}: {what}",
            hint="repeat the command with the same ids: nothing is done twice",
        )

    def _refused(self, response: httpx.Response, body: bytes) -> RunfoldError:
        error = problem_error(body)
        if isinstance(error, Unauthorized):
            return self._unauthorized()
        if isinstance(error, Forbidden):
            hint = "who keeps the bridge's tokens makes one: `runfold token NAME --scope SCOPE`"
            return Forbidden(error.message, run_id=error.run_id, hint=error.hint or hint)
        if isinstance(error, NotFound) and error.run_id is None:
            what = f"the bridge at {self.address} has no {visible(response.url.path)}"
            return NotFound(what, hint="is the address right, and is it of this version?")
        if error is not None:
            return error
        status = response.status_code
        if status in (502, 503, 504):  # of a proxy, while the bridge behind it is away
            return BridgeLost(
                f"the bridge at {self.address} is not there: {status} of what stands before it"
            )
        if status == 401:
            return self._unauthorized()
        if response.is_redirect:
            where = visible(response.headers.get("location", "?"))[:300]
            return self._no_bridge(f"it leads to {where}")
        return self._no_bridge(f"it answers {status} without a reason")

    def _unauthorized(self) -> Unauthorized:
        if self._token is None:
            what, hint = "asks for a token", "set RUNFOLD_TOKEN; `runfold token` makes one"
        else:
            what = "does not know the token in RUNFOLD_TOKEN"
            hint = "`runfold token NAME --scope SCOPE --tokens FILE` makes one, for that bridge"
        return Unauthorized(f"the bridge at {self.address} {what}", hint=hint)

    def _no_bridge(self, why: str) -> NoBridge:
        return NoBridge(
            f"{self.address} is not the address of a bridge: {why}",
            hint="`runfold bridge` says its address when it starts",
        )


def decoded(answer: Answer | bytes, shape: type[Any]) -> Any:
    """An answer's JSON in the shape, which msgspec knows; raises NoBridge."""
    body = answer if isinstance(answer, bytes) else answer.body
    try:
        return msgspec.json.decode(body, type=shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NoBridge(
            f"the bridge's answer can't be read: {visible(str(error))[:300]}",
            hint="is it a bridge, and of this version?",
        ) from error


async def _read(response: httpx.Response) -> bytes:
    found = bytearray()
    async for chunk in response.aiter_bytes():
        found += chunk
        if len(found) > BODY_BYTES_MAX:
            raise NoBridge(f"an answer of more than {BODY_BYTES_MAX} bytes is none of a bridge")
    return bytes(found)


async def _events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Event, None]:
    events = Events()
    async for chunk in chunks:
        for event in events.feed(chunk):
            yield event
        if events.kept_bytes > EVENT_BYTES_MAX:
            raise NoBridge(f"an event of more than {EVENT_BYTES_MAX} bytes is none of a bridge")


def _reason(error: BaseException) -> str:
    """What the system says, where httpx only says that it failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError) and cause.errno:
            return os.strerror(cause.errno)  # asyncio says "Connect call failed"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        # A group: one failure for each address of a name.
        several: Any = getattr(cause, "exceptions", None)
        cause = several[0] if several else cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _is_local(address: str) -> bool:
    host = httpx.URL(address).host
    with contextlib.suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"
