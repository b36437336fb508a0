"""Store: nats-py's client, mended where a lost connection would hang it or send what is given up.

A subclass, against house style: nats-py has no other place for this. Of nats-py 2.16.0.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import nats.errors
from nats.aio.client import Client as _Client

from ..limits import CLOSE_WAIT_S


class Client(_Client):
    """Reconnects away from a server that is frozen or cut off, too."""

    answers: tuple[int, Callable[[bytes, bytes, dict[str, str]], None]] | None = None
    """A subscription's id, and who takes its messages as they are parsed: not through nats-py's
    queue and task, which cost a turn of the loop and a fifth of the CPU of an append."""

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if self.answers is None or self.answers[0] != sid:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        found: dict[str, str] | None = None
        if headers:
            found = await self._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]
        self.answers[1](subject, data, found or {})

    async def _process_op_err(self, e: Exception) -> None:
        """nats-py closes the socket politely before it connects elsewhere: with bytes unsent that
        waits for the frozen server, or for TCP to give up (a quarter of an hour)."""
        self._abort()
        await super()._process_op_err(e)

    def forget_unsent(self) -> None:
        """nats-py would send it after the reconnect, when nobody waits for the answer any more."""
        self._pending = []
        self._pending_data_size = 0

    async def close(self) -> None:
        """Ends within CLOSE_WAIT_S, whatever the server does; raises nothing but a cancellation."""
        try:
            async with asyncio.timeout(CLOSE_WAIT_S):
                with contextlib.suppress(OSError, nats.errors.Error):
                    await super().close()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            # nats-py cancels its own wait for the socket's end, and asyncio gives that cancelled
            # future to whoever waits next. Ours is only a cancellation that this task was sent.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
        finally:
            self._abort()

    def _abort(self) -> None:
        transport: Any = self._transport
        writer = getattr(transport, "_io_writer", None)  # WebSocket has none
        if writer is not None:
            writer.transport.abort()
