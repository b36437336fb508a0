"""A connection as the server has it, and its two ways."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .faults import What

if TYPE_CHECKING:
    from .client import ModelClient


class Line:
    """One way of a connection: in order, each with its delay."""

    def __init__(self) -> None:
        self.busy = 0
        self._last = 0.0
        self._held: list[tuple[Any, ...]] | None = None

    def put(
        self,
        delay_s: float,
        context: contextvars.Context | None,
        arrive: Callable[..., None],
        *args: Any,
    ) -> None:
        if self._held is not None:
            self._held.append((delay_s, context, arrive, *args))
            return
        loop = asyncio.get_running_loop()
        if delay_s <= 0 and not self.busy:
            loop.call_soon(arrive, *args, context=context)
            return
        self.busy += 1
        # Handles of one time have no order: each is a little later than the one before it.
        self._last = max(loop.time() + delay_s, self._last + 1e-7)
        loop.call_at(self._last, self._arrive, arrive, args, context=context)

    def _arrive(self, arrive: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.busy -= 1
        arrive(*args)

    def hold(self) -> None:
        """Keep what is put, until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for item in held:
            self.put(*item)


class Subscribed:
    """A subscription as the server has it."""

    __slots__ = ("queue", "session", "sid", "subject")

    def __init__(self, session: Session, sid: int, subject: str, queue: str) -> None:
        self.session = session
        self.sid = sid
        self.subject = subject
        self.queue = queue


class Session:
    """One connection as the server has it. `read`: what still arrives counts."""

    __slots__ = ("client", "read", "subscribed")

    def __init__(self, client: ModelClient) -> None:
        self.client = client
        self.read = True
        self.subscribed: dict[int, Subscribed] = {}

    def push(
        self,
        subscribed: Subscribed,
        subject: str,
        reply: str,
        data: bytes,
        headers: dict[str, str],
        what: What,
    ) -> None:
        self.client.wire.push(self, subscribed.sid, subject, reply, data, headers, what)

    def call(self, pong: Callable[[], None]) -> None:
        self.client.wire.pong(self, pong)
