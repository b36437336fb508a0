"""Between a client and the server: what is on its way, and what may happen to it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .faults import What
from .sessions import Line, Session

if TYPE_CHECKING:
    from .client import ModelClient
    from .server import ModelServer


class Wire:
    """Of one client; `session`: the connection that it has, if it has one. What arrives does so in
    the context of whoever connected."""

    def __init__(self, client: ModelClient, server: ModelServer) -> None:
        self._client = client
        self._server = server
        self.session: Session | None = None
        self.killed = False
        self.context: contextvars.Context | None = None
        self._up, self._down = Line(), Line()
        self._mute = self._deaf = False
        self._stale: asyncio.TimerHandle | None = None
        self._kept: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None

    @property
    def reachable(self) -> bool:
        """Whether a connection can be made."""
        return self._server.at_work and not (self._mute or self._deaf or self.killed)

    def connect(self) -> None:
        self.session = Session(self._client)
        self._up, self._down = Line(), Line()

    # ---- to the server ----------------------------------------------------------------------

    def emit(self, subject: str, data: bytes, reply: str, headers: dict[str, str]) -> None:
        """A message, of a client that is connected."""
        server, session = self._server, self.session
        assert session is not None
        if self._kept is not None:
            self._kept.append((self._emit_late, (session, subject, data, reply, headers)))
            return
        policy = server.policy
        if policy is None and not self._up.busy and not self._mute:
            server.receive(session, subject, data, reply, headers)
            return
        delay_s = 0.0 if policy is None else policy.to_server(self._client, subject, data)
        if delay_s is None or self._mute:
            return
        if delay_s <= 0 and not self._up.busy:
            server.receive(session, subject, data, reply, headers)
        else:
            late = (session, subject, data, reply, headers)
            self._up.put(delay_s, server.clock.context, server.receive, *late)

    def _emit_late(
        self, session: Session, subject: str, data: bytes, reply: str, headers: dict[str, str]
    ) -> None:
        if self.session is session:
            self.emit(subject, data, reply, headers)

    def tell(self, call: Callable[..., None], *args: Any) -> None:
        """A line of the protocol that is no message."""
        if self._kept is not None:
            self._kept.append((self.tell, (call, *args)))
        elif self._mute or self.killed:
            return
        elif self._up.busy:
            self._up.put(0.0, self._server.clock.context, call, *args)
        else:
            call(*args)

    # ---- from the server --------------------------------------------------------------------

    def push(
        self,
        session: Session,
        sid: int,
        subject: str,
        reply: str,
        data: bytes,
        headers: dict[str, str],
        what: What,
    ) -> None:
        if self.session is not session:
            return  # into a connection that the client has left
        server = self._server
        if server.trace is not None:
            server.trace(("to", self._client.process, what, subject, data))
        policy = server.policy
        delay_s = 0.0 if policy is None else policy.to_client(self._client, what, subject, data)
        if delay_s is not None and not self._deaf:
            self._down.put(
                delay_s, self.context, self._arrive, session, sid, subject, reply, data, headers
            )

    def _arrive(self, session: Session, *message: Any) -> None:
        if self.session is not session:
            return
        if self._kept is not None:
            self._kept.append((self._arrive, (session, *message)))
            return
        self._client.take(*message)

    def pong(self, session: Session, pong: Callable[[], None]) -> None:
        if self.session is session and not self._deaf:
            self._down.put(0.0, self.context, self._pong, session, pong)

    def _pong(self, session: Session, pong: Callable[[], None]) -> None:
        if self._kept is not None:
            self._kept.append((self._pong, (session, pong)))
        elif self.session is session:
            pong()

    # ---- faults -----------------------------------------------------------------------------

    def cut(self, wait_s: float, half_open_s: float, *, loses: bool) -> None:
        if self.session is None:
            return
        self.end(half_open_s, loses=loses)
        if self._kept is not None:  # the process finds out when it goes on
            self._kept.append((self._client.lost, (wait_s,)))
        else:
            self._client.lost(wait_s)

    def end(self, half_open_s: float = 0.0, *, loses: bool = True) -> None:
        session, self.session = self.session, None
        if session is None:
            return
        session.read = not loses
        if half_open_s > 0:
            self._server.clock.after(half_open_s, self._server.end_session, session)
        else:
            self._server.leave(session)

    def partition(self, to_server: bool, from_server: bool, half_open_s: float) -> None:
        self._mute |= to_server
        self._deaf |= from_server
        self.watch(half_open_s, loses=True)

    def stall(self) -> None:
        self._down.hold()
        self.watch(0.0, loses=False)

    def watch(self, half_open_s: float, *, loses: bool) -> None:
        """Nothing is heard from the server: the client gives the connection up in a while."""
        if self._stale is None:
            due = self._server.clock.time() + self._client.stale_s
            loop = asyncio.get_running_loop()
            self._stale = loop.call_at(due, self._give_up, half_open_s, loses, context=self.context)

    def _give_up(self, half_open_s: float, loses: bool) -> None:
        self._stale = None
        self._client.cut(half_open_s=half_open_s, loses=loses)

    def heal(self) -> None:
        self._mute = self._deaf = False
        self._down.release()
        self.heard()

    def heard(self) -> None:
        """The server is there again."""
        if self._stale is not None and not (self._mute or self._deaf):
            self._stale.cancel()
            self._stale = None

    def freeze(self) -> None:
        if self._kept is None:
            self._kept = []

    def thaw(self) -> None:
        kept, self._kept = self._kept or [], None
        for callback, args in kept:
            callback(*args)

    def kill(self) -> None:
        self.killed = True
        self.end(loses=False)
