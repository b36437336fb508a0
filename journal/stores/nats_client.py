"""Store: nats-py's client, mended where a lost connection would hang it or send what is given up.

A subclass, against house style: nats-py has no other place for this. Of nats-py 2.16.0.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import nats.errors
import nats.protocol.parser
from nats.aio.client import Client as _Client
from nats.aio.subscription import Subscription

from ..limits import CLOSE_WAIT_S, UNSENT_BYTES_MAX
from .nats_feed import Feed, Take
from .nats_headers import block_of
from .nats_quorum import Quorum

# nats-server 2.15.1, lower-cased by nats-py's parser (2.16.0).
_FOR_GOOD = (
    "authorization violation",
    "authentication expired",
    "authentication revoked",
    "maximum payload",
)
_HARMLESS = ("maximum subscriptions exceeded", "invalid subject", "invalid publish subject")
"""The server leaves the connection open."""


# nats-py 2.16.0 splits a message's line at all that `\s` matches; nats-server 2.15.1 at space and
# tab alone, and takes subjects with a vertical tab in them: that line matched nothing, the client
# called it a protocol error and reconnected, and a stream delivered it again, for ever.
_WORD = rb"([^ \t\r\n]+)"
nats.protocol.parser.MSG_RE = re.compile(
    rb"\AMSG[ \t]+%b[ \t]+%b[ \t]+(%b[ \t]+)?(\d+)\r\n" % (_WORD, _WORD, _WORD)
)
nats.protocol.parser.HMSG_RE = re.compile(
    rb"\AHMSG[ \t]+%b[ \t]+%b[ \t]+(%b[ \t]+)?(\d+)[ \t]+(\d+)\r\n" % (_WORD, _WORD, _WORD)
)


class Client(_Client):
    """Reconnects away from a server that is frozen or cut off, too."""

    def __init__(self) -> None:
        super().__init__()
        self._takers: dict[int, Take] = {}
        self._quorum = Quorum()
        self._writing = False  # at the end of this turn of the loop
        self._unsent = 0  # bytes that the socket did not take, when last seen

    # ---- messages ---------------------------------------------------------------------------

    async def listen(self, subject: str, take: Take) -> Subscription:
        """Subscribe; `take` gets the messages as they are parsed and must not raise: not through
        nats-py's queue and task, which cost a turn of the loop and a fifth of the CPU of an append,
        and drop what exceeds their limits."""
        sid = self._sid + 1  # `subscribe` takes it before its first await
        self._takers[sid] = take
        try:
            return await self.subscribe(subject)  # pyright: ignore[reportUnknownMemberType]
        except BaseException:
            del self._takers[sid]
            raise

    def forget(self, subscription: Subscription) -> None:
        """After its `unsubscribe`: messages that were on the way went to its taker until now."""
        self._takers.pop(subscription._id, None)  # pyright: ignore[reportPrivateUsage]

    async def leave(self, subscriptions: Sequence[Subscription], timeout_s: float) -> None:
        """Unsubscribe from what was subscribed with callbacks. What is on the way is still handled,
        if the server answers in time; nats-py's `drain` waits for it, and subscribes again at the
        reconnect what it was cut off in."""
        try:
            with contextlib.suppress(TimeoutError, nats.errors.Error):
                async with asyncio.timeout(timeout_s):
                    for one in subscriptions:
                        await self._send_unsubscribe(one._id)  # pyright: ignore[reportPrivateUsage]
                    if self.is_connected and await self.round_trip(timeout_s):
                        for one in subscriptions:
                            await one._pending_queue.join()  # pyright: ignore[reportPrivateUsage]
        finally:
            for one in subscriptions:
                with contextlib.suppress(nats.errors.Error):  # closed: nothing to unsubscribe
                    await one.unsubscribe()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        take = self._takers.get(sid)
        if take is None:
            # What is raised here ends the task that reads, in silence (nats-py 2.16.0): over a
            # subject or a header that is not UTF-8, which the server lets anybody send.
            try:
                await super()._process_msg(sid, subject, reply, data, headers)
            except (UnicodeError, IndexError) as error:
                await self._error_cb(nats.errors.Error(f"nats: a message was dropped: {error}"))  # pyright: ignore[reportUnknownMemberType]
            return
        take(subject, reply, data, headers or b"")

    # ---- sending ----------------------------------------------------------------------------

    def post(
        self,
        subject: str,
        payload: bytes,
        reply: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        """Publish without waiting for anything, in the order of all else that is sent; False: it is
        dropped, there is no connection, or one that takes nothing. Raises MaxPayloadError.

        What is posted in one turn of the loop is written in one go at its end (the first of them at
        once was measured: no sooner for one run alone, and dearer for many). It waits among what
        nats-py has to send, so a lost connection takes it, too, and nothing of it goes out after a
        reconnect, when who asked has given up."""
        if self._status != _Client.CONNECTED or self._is_clogged():
            return False
        self._add(subject, payload, reply, headers)
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().call_soon(self._end_turn)
        return True

    def send(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """As `post`, and at once, however much is unsent: a process that is stopped before the
        turn's end would send it when it goes on, about a delivery that is another's by then."""
        if self._status != _Client.CONNECTED:
            return False
        self._add(subject, payload, reply.encode(), None)
        self._write()
        return True

    def _add(
        self, subject: str, payload: bytes, reply: bytes, headers: Mapping[str, str] | None
    ) -> None:
        if headers is None:
            size = len(payload)
            frame = b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), reply, size, payload)
        else:
            block = block_of(headers)
            size = len(block) + len(payload)
            parts = (subject.encode(), reply, len(block), size, block, payload)
            frame = b"HPUB %b %b %d %d\r\n%b%b\r\n" % parts
        if size > self._max_payload:  # the server would cut the connection
            raise nats.errors.MaxPayloadError
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += len(payload)
        self._pending.append(frame)
        self._pending_data_size += len(frame)

    def _end_turn(self) -> None:
        self._writing = False
        if self._pending:
            self._write()

    def _write(self) -> None:
        """All that waits to be sent."""
        transport: Any = self._transport
        writer = getattr(transport, "_io_writer", None)  # None: a websocket
        if writer is None:
            if self._flush_queue is not None and self._flush_queue.empty():
                self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        if self._status != _Client.CONNECTED or writer.is_closing():
            return  # what was lost is noticed by who reads, and forgets it
        pending, self._pending = self._pending, []
        self._pending_data_size = 0
        writer.write(pending[0] if len(pending) == 1 else b"".join(pending))
        self._unsent = writer.transport.get_write_buffer_size()

    def _is_clogged(self) -> bool:
        """Whether the server has stopped to read: it is left when it does not answer pings, and
        until then nothing may fill the memory."""
        if self._unsent + self._pending_data_size <= UNSENT_BYTES_MAX:
            return False
        writer: Any = getattr(self._transport, "_io_writer", None)
        self._unsent = writer.transport.get_write_buffer_size() if writer is not None else 0
        return self._unsent + self._pending_data_size > UNSENT_BYTES_MAX

    # ---- round trips ------------------------------------------------------------------------

    async def round_trip(self, timeout_s: float) -> bool:
        """True: the server has read everything that was sent before, and what it had to say to
        that was taken. nats-py's `flush` sends its ping ahead of what is pending, and one that
        times out lets the late pong end the task that reads."""
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        await self._send_ping(pong)
        done, _ = await asyncio.wait({pong}, timeout=timeout_s)  # cancels nothing
        return bool(done)

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """All pings in the order of what else is sent: pongs are told apart by their order."""
        pong = future or asyncio.get_running_loop().create_future()
        self._pongs.append(pong)  # pyright: ignore[reportUnknownMemberType]
        await self._send_command(b"PING\r\n")
        await self._flush_pending()  # pyright: ignore[reportUnknownMemberType]

    # ---- lost connections -------------------------------------------------------------------

    async def _process_connect_init(self) -> None:
        """A server that has no room says so and closes; nats-py 2.16.0 writes first, and only tells
        that the connection was lost."""
        try:
            await super()._process_connect_init()  # pyright: ignore[reportUnknownMemberType]
            self._know_tls()
            self._feed()
        except ConnectionError as error:
            # A reader that failed keeps what came before, and gives it to nobody.
            reader: Any = getattr(self._transport, "_io_reader", None)  # None: a websocket
            said = bytes(reader._buffer) if reader is not None else b""
            if said.startswith(b"-ERR "):
                text = said[5:].decode("utf-8", "replace").strip()
                raise nats.errors.Error(f"nats: {text}") from error
            raise

    def _know_tls(self) -> None:
        """As asyncio's own StreamWriter.start_tls does (3.11); nats-py 2.16.0 makes a plain
        connection a TLS one without it, and asyncio then warns at the end of each."""
        writer: Any = getattr(self._transport, "_io_writer", None)  # None: a websocket
        if writer is not None and writer.get_extra_info("sslcontext") is not None:
            writer.transport.get_protocol()._over_ssl = True

    def _feed(self) -> None:
        reader: Any = getattr(self._transport, "_io_reader", None)  # None: a websocket
        if reader is not None:
            reader.feed_data = Feed(self, reader, self._takers)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        """The servers of the cluster that a server tells of are the same user's, too: nats-py
        2.16.0 connects to them as nobody, and what they refuse closes the connection for good. And
        it goes on without TLS where tls:// asked for it: a password would follow."""
        insisted = any(server.uri.scheme == "tls" for server in self._server_pool)
        if initial_connection and insisted and not info.get("tls_required"):
            raise nats.errors.Error("nats: tls:// is asked for, and the server has no TLS")
        login, found, _ = self._current_server.uri.netloc.rpartition("@")  # pyright: ignore[reportOptionalMemberAccess]
        if found:
            others = [f"{login}@{address}" for address in info.get("connect_urls") or ()]
            info = info | {"connect_urls": others}
        await super()._process_info(info, initial_connection)  # pyright: ignore[reportUnknownMemberType]

    async def _process_err(self, err_msg: str) -> None:
        """nats-py closes for good over any error of the server but two. Only what a new connection
        meets again at once is left to that: refused credentials, and a message too large."""
        if any(text in err_msg for text in _FOR_GOOD) or "permissions violation" in err_msg:
            await super()._process_err(err_msg)
        elif any(text in err_msg for text in _HARMLESS):
            await self._error_cb(nats.errors.Error(f"nats: {err_msg}"))  # pyright: ignore[reportUnknownMemberType]
        else:  # stale, too many connections, authentication timeout, shutting down…
            await self._process_op_err(nats.errors.Error(f"nats: {err_msg}"))

    async def heard(self, subject: str, answer: bytes) -> None:
        """An answer, by which it may be seen that this server is cut off from the others; then
        another one of the cluster is connected to, where one is known."""
        now = asyncio.get_running_loop().time()
        if self._quorum.lost(subject, answer, now) and len(self._server_pool) > 1:
            await self._process_op_err(nats.errors.Error("nats: this server is cut off"))

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
