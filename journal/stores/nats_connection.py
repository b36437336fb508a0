"""Store: one NATS connection, and the only place that touches nats-py (partially typed).

A request has a reply or a cause, never a silent wait: a lost connection and a refused permission
reach the waiting call at once. nats-py's own `request` can tell neither, and its `wait_for` loses
a cancellation that meets an answer (Python 3.11).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from typing import Any

import nats.errors
from nats.aio.client import RawCredentials
from nats.aio.msg import Msg

from ..errors import StoreUnavailable
from ..limits import (
    CONNECT_BUDGET_S,
    CONNECT_TRY_S,
    PING_INTERVAL_S,
    READ_BUDGET_S,
    READ_TRY_S,
    RECONNECT_WAIT_S,
)
from .nats_address import check_url, inbox_prefix, read_creds, without_password
from .nats_client import Client
from .nats_errors import Refused, cannot_connect, closed, denied, denied_subject
from .nats_quorum import TELLING
from .nats_service import Asked, Service, serving
from .nats_waiting import (
    Denied,
    Headers,
    Incoming,
    NoReply,
    Reply,
    Take,
    Waiting,
    Waitings,
    incoming,
)

# Else logging's last resort prints nats-py's tracebacks; what they say reaches the waiting call.
logging.getLogger("nats").addHandler(logging.NullHandler())


class Connection:
    """Connected between `open` and `close`; reconnects for ever by itself in between.

    Once closed, by its owner or for good by nats-py, every call raises StoreUnavailable until the
    owner closes it and opens it again.
    """

    def __init__(self, url: str, *, namespace: str, creds: str | None = None) -> None:
        self._urls = [part.strip() for part in url.split(",")]
        self._shown = ",".join(without_password(part) for part in self._urls)
        self._namespace = namespace
        self._creds = creds
        self._nc: Any = Client()  # partially typed; what it gives is annotated here
        self._open = False
        self._opening = False
        self._gone: asyncio.Event = asyncio.Event()
        self._refusals = 0
        self._up = asyncio.Event()
        self._waiting = Waitings()
        self._denied: deque[str] = deque(maxlen=32)
        self._inbox = ""
        self._inbox_denied = False

    @property
    def shown(self) -> str:
        """The server's address without credentials, for messages."""
        return self._shown

    @property
    def max_payload(self) -> int:
        """Of the server connected to now, which may not be the first one."""
        size: int = self._nc.max_payload
        return size

    @property
    def server_version(self) -> str:
        return str(self._nc._server_info.get("version", ""))

    @property
    def clustered(self) -> bool:
        """Whether the server connected to now is one of several."""
        return bool(self._nc._server_info.get("cluster"))

    # ---- opening and closing ----------------------------------------------------------------

    async def open(self) -> None:
        """Connect, once to each server named. Raises StoreUnavailable, PermissionDenied."""
        if self._open:
            raise RuntimeError("this store is open already")
        self._nc = Client()  # one that was closed can't be used again
        self._gone = asyncio.Event()
        self._refusals = 0
        for url in self._urls:
            check_url(url)
        credentials = None if self._creds is None else await read_creds(self._creds)
        self._opening = True
        try:
            async with asyncio.timeout(CONNECT_BUDGET_S):
                await self._connect(credentials)
        except BaseException as error:
            self._opening = False
            await self.close()
            if isinstance(error, (OSError, nats.errors.Error)):  # TimeoutError is an OSError
                said = self._nc.last_error if isinstance(error, TimeoutError) else None
                raise cannot_connect(self._shown, said or error) from error
            raise

    async def _connect(self, credentials: RawCredentials | None) -> None:
        await self._nc.connect(
            self._urls,
            name=f"runfold {self._namespace}",
            # Permissions may name it, and those that name nats-py's default allow it too.
            inbox_prefix=inbox_prefix(self._urls, self._namespace),
            user_credentials=credentials,
            error_cb=self._on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            connect_timeout=CONNECT_TRY_S,
            reconnect_time_wait=RECONNECT_WAIT_S,
            max_reconnect_attempts=-1,  # the default gives up for good after 60
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=2,
            skip_subject_validation=True,  # ids.py and doors check what subjects are made of
            pending_size=-1,  # else what is published while disconnected lands after a reconnect
        )
        self._inbox = self._nc.new_inbox() + "."
        self._waiting.answers_to(self._inbox)
        await self._nc.listen(f"{self._inbox}*", self._waiting.answer)
        self._opening = False
        self._open = True
        self._up.set()

    async def close(self) -> None:
        """Idempotent. What still waits gets NoReply."""
        self._open = False
        await self._nc.close()
        self._waiting.end_all(NoReply("the connection was closed", lost=True))
        self._waiting.stop()

    # ---- asking -----------------------------------------------------------------------------

    async def request(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> Reply | NoReply:
        """One answer. Raises PermissionDenied, and StoreUnavailable once closed for good."""
        outcome = await self._ask(subject, payload, headers, timeout_s, None)
        if isinstance(outcome, NoReply):
            return outcome
        if outcome.nobody:
            return NoReply(f"nobody answers on {subject}", nobody=True)
        if subject.startswith(TELLING):
            await self._nc.heard(subject, outcome.data)
        return outcome

    async def collect(self, subject: str, payload: bytes, take: Take, *, idle_s: float) -> None:
        """Several answers, until `take` says enough, none came for `idle_s`, or the connection was
        lost (the rest of them may then come with a gap)."""
        await self._ask(subject, payload, None, idle_s, take)

    async def _ask(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None,
        timeout_s: float,
        take: Take | None,
    ) -> Reply | NoReply:
        left_s = timeout_s
        if not self._nc.is_connected:
            loop = asyncio.get_running_loop()
            started = loop.time()
            if not await self.connected_within(timeout_s):
                return NoReply(f"not connected to {self._shown}", lost=True)
            left_s -= loop.time() - started
        if self._inbox_denied:  # no answer could come
            raise denied(self._inbox)
        reply, waiting = self._waiting.add(subject, take, first_s=left_s, idle_s=timeout_s)
        try:
            # Dropped where the server reads nothing: it then ends by its time, as if sent.
            self._nc.post(subject, payload, reply, headers)
            outcome = await waiting.future
        finally:
            self._waiting.remove(reply)
        if isinstance(outcome, Denied):
            raise denied(outcome.subject)
        return outcome

    async def connected_within(self, timeout_s: float) -> bool:
        if self._nc.is_closed or not self._open:
            raise self._closed()
        if not self._nc.is_connected:  # nats-py says so turns of the loop before it calls back
            self._up.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._up.wait()
        if self._nc.is_closed:
            raise self._closed()
        connected: bool = self._nc.is_connected
        return connected

    def _closed(self) -> StoreUnavailable:
        return closed(self._shown, self._nc.last_error)

    # ---- telling and listening --------------------------------------------------------------

    async def publish(
        self, subject: str, payload: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Fire and forget: dropped while there is no connection, or one whose server reads nothing.
        Raises StoreUnavailable once closed for good."""
        if self._nc.is_closed or not self._open:
            raise self._closed()
        self._nc.post(subject, payload, b"", headers)

    def post(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> bool:
        """Like `publish`, from where nothing can be awaited; False: it was dropped. What is posted,
        and requested, in one turn of the loop is sent in that order and together."""
        return bool(self._nc.post(subject, payload, b"", headers))

    def send(self, subject: str, payload: bytes, reply: str = "") -> bool:
        """Like `post`, at once: also if the process is stopped before the turn of the loop ends."""
        return bool(self._nc.send(subject, payload, reply))

    def new_inbox(self) -> str:
        """A subject of this role's own, for answers that a subscription of its own takes."""
        return str(self._nc.new_inbox())

    @contextlib.contextmanager
    def waiting(
        self, subject: str, take: Take, *, first_s: float, idle_s: float
    ) -> Generator[Waiting, None, None]:
        """Something that waits for the caller's own subscription, and ends as well when the
        connection is lost, or `subject`, which it is about to publish on, is denied."""
        reply, waiting = self._waiting.add(subject, take, first_s=first_s, idle_s=idle_s)
        try:
            yield waiting
        finally:
            self._waiting.remove(reply)

    @contextlib.asynccontextmanager
    async def listening(
        self, subject: str, handle: Callable[[Incoming], None]
    ) -> AsyncGenerator[None, None]:
        """Messages on the subject go to `handle`, which must not raise, nor block. In force when
        entered; what was on its way when it is left still comes. Raises PermissionDenied."""

        def take(subject: bytes, reply: bytes, data: bytes, headers: Headers) -> None:
            handle(incoming(subject, reply, data, headers))

        self._forgive(subject)
        try:
            subscription = await self._nc.listen(subject, take)
        except nats.errors.ConnectionClosedError as error:
            raise self._closed() from error
        try:
            await self.confirm(subject)
            yield
        finally:
            try:
                with contextlib.suppress(nats.errors.Error):  # closed: nothing to unsubscribe
                    await subscription.unsubscribe()
                    if self._nc.is_connected:
                        await self._nc.round_trip(RECONNECT_WAIT_S)
            finally:
                self._nc.forget(subscription)

    async def confirm(self, subject: str) -> None:
        """A subscription to the subject, sent before, is in force: the server has read it and
        denies nothing. Raises PermissionDenied, StoreUnavailable."""
        deadline = asyncio.get_running_loop().time() + READ_BUDGET_S
        while True:
            if await self.connected_within(READ_TRY_S) and await self._nc.round_trip(READ_TRY_S):
                self.check_denied(subject)
                return
            if asyncio.get_running_loop().time() > deadline:
                raise StoreUnavailable(f"{self._shown} does not answer a ping")

    @property
    def connected(self) -> bool:
        """Whether it is now; for any thread."""
        return self._open and bool(self._nc.is_connected)

    @property
    def closed_for_good(self) -> bool:
        """nats-py closed, not the owner: only the owner's `close` and `open` mend it."""
        return self._open and bool(self._nc.is_closed)

    async def wait_closed(self) -> StoreUnavailable:
        """Until nats-py has closed for good; the reason. Not ended by the owner's `close`: whoever
        waits is cancelled by the owner."""
        await self._gone.wait()
        return self._closed()

    @contextlib.asynccontextmanager
    async def subscribed(
        self, subject: str, handle: Callable[[Reply], Awaitable[bytes | None]]
    ) -> AsyncGenerator[None, None]:
        """Answer each question on the subject with what `handle` returns; None: not at all. It must
        not raise."""
        self._forgive(subject)

        async def answer(message: Msg) -> None:
            data = await handle(_reply(message))
            if data is None:
                return
            with contextlib.suppress(nats.errors.Error):  # the asker sees silence and asks again
                await message.respond(data)

        try:
            subscription = await self._nc.subscribe(subject, cb=answer)
        except nats.errors.ConnectionClosedError as error:
            raise self._closed() from error
        try:
            yield
        finally:
            with contextlib.suppress(nats.errors.Error):  # closed: there is nothing to unsubscribe
                await subscription.unsubscribe()

    @contextlib.asynccontextmanager
    async def serving(
        self, service: Service, handle: Callable[[Asked], Awaitable[None]]
    ) -> AsyncGenerator[None, None]:
        """Be an instance of a NATS service: `handle` gets each request to an endpoint, one after
        another, and must not raise, nor take long. Raises PermissionDenied, StoreUnavailable."""
        for subject in service.endpoints.values():
            self._forgive(subject)
        try:
            async with serving(self._nc, service, handle):
                for subject in service.endpoints.values():
                    await self.confirm(subject)
                yield
        except nats.errors.ConnectionClosedError as error:
            raise self._closed() from error
        except nats.errors.Error as error:
            raise StoreUnavailable(f"{self._shown} does not answer: {error}") from error

    # ---- what nats-py calls -----------------------------------------------------------------

    async def _on_error(self, error: Exception) -> None:
        if self._opening and not self._nc.is_connected:
            # nats-py would go on for ever; what is raised here comes out of its `connect`.
            self._refusals += 1
            if self._refusals >= len(self._urls):
                raise Refused(str(error) or type(error).__name__) from error
        elif found := denied_subject(error):
            self._denied.append(found)
            self._inbox_denied |= found.startswith(self._inbox.lower())
            if self._inbox_denied:
                self._waiting.end_unheard(self._inbox)
            else:
                self._waiting.end_denied(found)

    async def _on_disconnected(self) -> None:
        self._up.clear()
        self._inbox_denied = False  # the next server says it again
        self._nc.forget_unsent()
        self._waiting.end_all(NoReply(f"the connection to {self._shown} was lost", lost=True))

    async def _on_reconnected(self) -> None:
        self._up.set()

    async def _on_closed(self) -> None:
        self._up.set()  # who waits for it finds the connection closed
        cause = f"the connection to {self._shown} was closed for good"
        self._waiting.end_all(NoReply(cause, lost=True))
        if self._open:  # not the owner's doing
            self._gone.set()

    def _forgive(self, subject: str) -> None:
        """Forget old denials of it: permissions may have changed."""
        while subject.lower() in self._denied:
            self._denied.remove(subject.lower())

    def check_denied(self, subject: str) -> None:
        """Raises PermissionDenied if the server lately refused a subscription to the subject."""
        if subject.lower() in self._denied:
            raise denied(subject)


def _reply(message: Msg) -> Reply:
    return Reply(message.data, message.headers or {})
