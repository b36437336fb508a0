"""Publishes to a stream whose fate is not the usual one: late, lost, unacknowledged, refused."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from .faults import Fate
from .streams import Stream, publish_refusal

if TYPE_CHECKING:
    from .server import ModelServer


class Landing:
    """Those of one server that have not landed yet."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._late: dict[asyncio.TimerHandle, tuple[Stream, Callable[..., None]]] = {}

    def take(
        self,
        stream: Stream,
        subject: str,
        data: bytes,
        headers: dict[str, str],
        reply: str,
        fate: Fate,
    ) -> None:
        if fate.error is not None and reply:
            refusal = publish_refusal(stream.name, fate.error)
            self._server.send(reply, reply, refusal, {}, "", "ack")
        answers = bool(reply) and fate.answers and fate.error is None

        def land(*, acked: bool = True) -> None:
            ack = stream.publish(subject, data, headers)
            if answers and acked:
                self._server.send(reply, reply, ack, {}, "", "ack")

        if not fate.lands:
            return
        if fate.after_s <= 0:
            land()
            return

        def due() -> None:
            if self._late.pop(handle, None) is None:
                return  # it has ended meanwhile
            if self._server.streams.get(stream.name) is stream:
                land()

        def arrive() -> None:
            if self._server.at_work:
                due()
            else:
                self._server.later(due)

        handle = self._server.clock.after(fate.after_s, arrive)
        self._late[handle] = (stream, land)

    def end(self, stream: Stream | None, *, applied: bool) -> None:
        """Those of the stream (None: all) are lost, or land now without an acknowledgement."""
        for handle, (of, land) in list(self._late.items()):
            if stream is None or of is stream:
                handle.cancel()
                del self._late[handle]
                if applied:
                    land(acked=False)
