"""Shell: uvicorn as the bridge runs it: no signals, no log of its own, and an end to every wait."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .app import App

DRAIN_S: Final = 10
"""Requests that were begun may end within this when the bridge stops. Streams and waits end at
once."""

REQUEST_S: Final = 30.0
"""A connection that brings no whole request head within this is cut off; uvicorn would wait."""

UNREAD_MS: Final = 60_000
"""An answer of which the client takes nothing for so long is given up, and its memory with it."""

REST_S: Final = 2.0
REST_BYTES_MAX: Final = 8 * 1024 * 1024
"""Of a request whose answer closes the connection so much is still read and dropped. What comes to
a closed socket is answered with a reset, over which the client's system forgets the answer, too."""

BACKLOG: Final = 1024


@contextlib.contextmanager
def bound(host: str, port: int) -> Generator[socket.socket]:
    """A socket that listens there; raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not socket.create_server: asyncio 3.11 sets TCP_NODELAY only where the protocol is named;
    # without it an answer, being sent in two pieces, waits 40 ms for the client's ack.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted sockets inherit it
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
        found.bind((host, port))
        found.listen(BACKLOG)
        found.setblocking(False)
        yield found


class HttpServer(uvicorn.Server):
    """Serves the application on a socket. Signals are the command's."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                lifespan="off",
                loop="asyncio",
                log_config=None,
                log_level="critical",  # what matters is said by app.py
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=DRAIN_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def serve_until_cancelled(self, listening: socket.socket) -> None:
        """Until `should_exit`; cancelled, it ends its connections in order, too."""
        try:
            await self.serve(sockets=[listening])
        except asyncio.CancelledError:
            # uvicorn would leave its connections and the tasks behind them as they are.
            for task in self.server_state.tasks:
                task.cancel()
            if self.started:
                await self.shutdown(sockets=[listening])
            raise


class _Connection(H11Protocol):
    """Says by which connection a request came: sse.py cuts off who reads nothing. Cuts off who
    connects and asks nothing, or asks byte by byte."""

    _deadline: asyncio.TimerHandle | None = None
    _parting: _Parting

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self._parting = _Parting(transport, self._unread)
        super().connection_made(self._parting)
        self.app_state = {**self.app_state, "transport": transport}
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._parting.is_closing():
            self._parting.drop(len(data))
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._parting.over()
        super().connection_lost(exc)

    def _unread(self) -> bool:
        """Whether more may come of the request; also of what is none."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _watch(self) -> None:
        """One deadline for each request head, from the byte that was the first to be waited for."""
        if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_S, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Parting(asyncio.Transport):
    """A transport that closes in two steps while a request is still being sent: it ends what we
    say, and reads on for a while."""

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool]) -> None:
        super().__init__()
        self._transport = transport
        self._unread = unread
        self._last: asyncio.TimerHandle | None = None
        self._dropped = 0

    def close(self) -> None:
        if self._last is not None or self._transport.is_closing() or not self._unread():
            self._transport.close()
            return
        self._last = asyncio.get_running_loop().call_later(REST_S, self._transport.close)
        self._transport.write_eof()
        self._transport.resume_reading()

    def drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > REST_BYTES_MAX:
            self._transport.close()

    def over(self) -> None:
        """The connection is lost."""
        if self._last is not None:
            self._last.cancel()

    def is_closing(self) -> bool:
        return self._last is not None or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._transport.write(data)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
