"""The model server's client: what journal.stores.nats_client.Client is to a real one."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import nats.errors
from nats.aio.msg import Msg

from journal.stores.nats_headers import block_of

from .sessions import Subscribed
from .subscriptions import Handle, Subscription
from .wire import Wire

if TYPE_CHECKING:
    from .server import ModelServer

PROCESS: contextvars.ContextVar[str] = contextvars.ContextVar("PROCESS", default="")
"""Of a simulation: which process a client belongs to."""

Take: TypeAlias = Callable[[bytes, bytes, bytes, dict[str, str]], None]


class _Numbers:
    """In place of nats-py's NUID."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server

    def next(self) -> bytearray:
        return bytearray(b"%022d" % self._server.number())


class ModelClient:
    """The surface that journal/stores/ uses, and what a simulation does to it."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self.wire = Wire(self, server)
        self.process = PROCESS.get()
        self.name = ""
        self.urls: list[str] = []
        self.is_closed = False
        self.last_error: Exception | None = None
        self.stats = {"reconnects": 0, "in_msgs": 0, "out_msgs": 0}
        self.max_payload = server.max_payload
        self._server_info = {"version": "2.15.1"}
        self._nuid = _Numbers(server)
        self._options: dict[str, Any] = {}
        self._sid = 0
        self._subs: dict[int, Subscription] = {}
        self._takers: dict[int, Take] = {}
        self._task: asyncio.Task[None] | None = None

    # ---- connecting -------------------------------------------------------------------------

    async def connect(self, servers: list[str], **options: Any) -> None:
        self._options = options
        self.name = options.get("name", "")
        self.urls = servers
        await asyncio.sleep(0)
        if not self.wire.reachable or self._server.refuses(self):
            raise nats.errors.NoServersError
        self.wire.context = contextvars.copy_context()
        self.client_id = self._server.number()
        self.wire.connect()
        self._server.clients.append(self)

    @property
    def is_connected(self) -> bool:
        return self.wire.session is not None

    @property
    def is_reconnecting(self) -> bool:
        return self.wire.session is None and not self.is_closed

    async def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._leave()
        for subscription in self._subs.values():
            subscription.stop()
        self._subs.clear()
        for name in ("disconnected_cb", "closed_cb"):
            await self._tell(name)

    def _leave(self) -> None:
        self.wire.end(loses=False)
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        if self in self._server.clients:
            self._server.clients.remove(self)

    async def _tell(self, name: str) -> None:
        callback = self._options.get(name)
        if callback is not None and not self.wire.killed:
            await callback()

    async def complain(self, error: Exception) -> None:
        callback = self._options.get("error_cb")
        if callback is not None:
            await callback(error)

    def check_open(self) -> None:
        if self.is_closed:
            raise nats.errors.ConnectionClosedError

    async def heard(self, subject: str, answer: bytes) -> None:
        """There is no other server."""

    def forget_unsent(self) -> None:
        """Nothing is kept while there is no connection."""

    def lost(self, wait_s: float) -> None:
        """The connection is; the wire says so."""
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(self._reconnect(wait_s), context=self.wire.context)

    async def _reconnect(self, wait_s: float) -> None:
        await self._tell("disconnected_cb")
        while True:
            await asyncio.sleep(wait_s)
            if self.wire.reachable and not self._server.refuses(self):
                break
            wait_s = self._wait_s
        self.wire.connect()
        self.stats["reconnects"] += 1
        for subscription in self._subs.values():
            self._send_subscription(subscription)
        self._task = None
        await self._tell("reconnected_cb")

    @property
    def stale_s(self) -> float:
        """After which a silent server is left: nats-py's pings were not answered."""
        pings = self._options.get("max_outstanding_pings", 2) + 1
        return self._options.get("ping_interval", 120) * pings

    @property
    def _wait_s(self) -> float:
        return self._options.get("reconnect_time_wait", 2.0)

    # ---- sending ----------------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        payload: bytes = b"",
        reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:
        self.check_open()
        if self.wire.session is None:
            raise nats.errors.OutboundBufferLimitError
        if len(payload) > self.max_payload:
            raise nats.errors.MaxPayloadError
        own = {name.strip(): text.strip() for name, text in headers.items()} if headers else {}
        if own and len(payload) + 65_536 > self.max_payload:
            lines = sum(len(f"{name}: {text}\r\n".encode()) for name, text in own.items())
            if len(payload) + lines + len(b"NATS/1.0\r\n\r\n") > self.max_payload:
                self._close_for_good(nats.errors.Error("nats: 'maximum payload violation'"))
                return
        self.wire.emit(subject, payload, reply, own)

    def post(
        self,
        subject: str,
        payload: bytes,
        reply: bytes = b"",
        headers: Mapping[str, str] | None = None,
    ) -> bool:
        if self.wire.session is None:
            return False
        own = dict(headers) if headers else {}
        if len(payload) + 65_536 > self.max_payload:
            block = b"" if headers is None else block_of(headers)
            if len(block) + len(payload) > self.max_payload:
                raise nats.errors.MaxPayloadError
        self.wire.emit(subject, payload, reply.decode(), own)
        return True

    def send(self, subject: str, payload: bytes, reply: str = "") -> bool:
        return self.post(subject, payload, reply.encode())

    def _close_for_good(self, error: Exception) -> None:
        self.last_error = error
        self._task = asyncio.get_running_loop().create_task(self._complain_and_close(error))

    async def _complain_and_close(self, error: Exception) -> None:
        await self.complain(error)
        await self.close()

    # ---- subscribing ------------------------------------------------------------------------

    def new_inbox(self) -> str:
        return f"{self._options.get('inbox_prefix', '_INBOX')}.{self._nuid.next().decode()}"

    async def listen(self, subject: str, take: Take) -> Subscription:
        self._takers[self._sid + 1] = take
        try:
            return await self.subscribe(subject)
        except BaseException:
            del self._takers[self._sid + 1]
            raise

    def forget(self, subscription: Subscription) -> None:
        self._takers.pop(subscription.sid, None)

    async def subscribe(
        self, subject: str, queue: str = "", cb: Handle | None = None
    ) -> Subscription:
        self.check_open()
        self._sid += 1
        subscription = Subscription(self, self._sid, subject, queue, cb)
        self._subs[self._sid] = subscription
        self._send_subscription(subscription)
        return subscription

    def _send_subscription(self, subscription: Subscription) -> None:
        if self.wire.session is not None:
            subscribed = Subscribed(
                self.wire.session, subscription.sid, subscription.subject, subscription.queue
            )
            self.wire.tell(self._server.subscribe, subscribed)

    def unsubscribe(self, sid: int, *, keep: bool = False) -> None:
        if not keep:
            self.remove(sid)
        if self.wire.session is not None:
            self.wire.tell(self._server.unsubscribe, self.wire.session, sid)

    def remove(self, sid: int) -> None:
        self._subs.pop(sid, None)

    async def leave(self, subscriptions: list[Subscription], timeout_s: float) -> None:
        for one in subscriptions:
            self.unsubscribe(one.sid, keep=True)
        if await self.round_trip(timeout_s):
            await asyncio.gather(*(one.handled() for one in subscriptions))
        for one in subscriptions:
            with contextlib.suppress(nats.errors.Error):
                await one.unsubscribe()

    async def round_trip(self, timeout_s: float) -> bool:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[bool] = loop.create_future()
        if self.wire.session is not None:
            self.wire.tell(self._server.ping, self.wire.session, lambda: _set(done, True))
        timer = loop.call_later(timeout_s, _set, done, False)
        try:
            return await done
        finally:
            timer.cancel()

    async def flush(self, timeout: float = 10.0) -> None:
        self.check_open()
        if not await self.round_trip(timeout):
            raise nats.errors.TimeoutError

    def take(
        self, sid: int, subject: str, reply: str, data: bytes, headers: dict[str, str]
    ) -> None:
        """A message for a subscription."""
        self.stats["in_msgs"] += 1
        take = self._takers.get(sid)
        if take is not None:
            take(subject.encode(), reply.encode(), data, headers)
            return
        subscription = self._subs.get(sid)
        if subscription is not None:
            subscription.got(Msg(self, subject, reply, data, headers or None))  # pyright: ignore[reportArgumentType]

    # ---- faults -----------------------------------------------------------------------------

    def cut(
        self, reconnect_s: float | None = None, half_open_s: float = 0.0, *, loses: bool = True
    ) -> None:
        """The connection is lost; connected again after `reconnect_s` (None: nats-py's wait), or
        when that is possible. `half_open_s`: so long the server takes it for alive, and delivers
        into it. `loses`: what is on its way to the server is lost too."""
        wait_s = self._wait_s if reconnect_s is None else reconnect_s
        self.wire.cut(wait_s, half_open_s, loses=loses)

    def partition(
        self,
        *,
        to_server: bool = True,
        from_server: bool = True,
        for_s: float | None = None,
        half_open_s: float = 10.0,
    ) -> None:
        """What goes there, or comes, vanishes, until `heal` or after `for_s`. After `stale_s` the
        client gives the connection up, as nats-py's pings make it."""
        self.wire.partition(to_server, from_server, half_open_s)
        if for_s is not None:
            self._server.clock.after(for_s, self.heal)

    def stall(self) -> None:
        """What comes from the server is kept, in order, until `heal`, or lost when the client gives
        the connection up."""
        self.wire.stall()

    def heal(self) -> None:
        self.wire.heal()

    def freeze(self) -> None:
        """SIGSTOP of the process: nothing out or in, kept in order. Its tasks are the caller's."""
        self.wire.freeze()

    def thaw(self) -> None:
        self.wire.thaw()

    def kill(self) -> None:
        """SIGKILL of the process: what was sent still arrives; nothing more, and no callbacks. Its
        tasks are the caller's."""
        self.wire.kill()
        self._leave()


def _set(done: asyncio.Future[bool], value: bool) -> None:
    if not done.done():
        done.set_result(value)
