"""Shell: following a run over HTTP as Server-Sent Events (R64).

One task puts what there is into a bounded queue, sse-starlette sends what is in it. Who doesn't
read stops that task, never the bridge; previews that don't fit are dropped, records never.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Final

import msgspec
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from journal.errors import RunfoldError
from journal.escape import escaped_json
from journal.following import Watch, watching
from journal.ids import RunId

from .desk import Desk
from .feed import Feed
from .problems import problem

EVENTS_TYPE: Final = "text/event-stream"
KEEP_ALIVE_S: Final = 15
SEND_S: Final = 30.0
"""A follower that reads nothing for so long is cut off."""

LAST_WORD_S: Final = 0.5
"""When the bridge stops, a stream may end in order within this."""

QUEUE_MAX: Final = 32
PREVIEWS_MAX: Final = 8
"""Of the queue: a record always finds a place soon."""

RETRY_MS: Final = 60_000
"""After a problem that stays, asking again at once shows nothing new."""


class Follow(EventSourceResponse):
    """The run's records behind ordinal `after`, as they come. It has a place among the followers
    from the start, and gives it back when it ends."""

    def __init__(self, desk: Desk, run: RunId, after: int) -> None:
        self._desk = desk
        self._run = run
        self._last = after
        self._queue: asyncio.Queue[ServerSentEvent | Callable[[], ServerSentEvent] | None] = (
            asyncio.Queue(QUEUE_MAX)
        )
        self._place = desk.take_place()
        self._own: Feed | None = None
        self._over = False
        super().__init__(  # pyright: ignore[reportUnknownMemberType]
            self._events(), ping=KEEP_ALIVE_S, sep="\n", ping_message_factory=_keep_alive
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sending(message: Message) -> None:
            async with asyncio.timeout(SEND_S):
                await send(message)
            self._over = self._over or not message.get("more_body", True)

        try:
            if scope["method"] == "HEAD":
                await super().__call__(scope, receive, sending)
            else:
                async with asyncio.TaskGroup() as group:
                    feeding = group.create_task(self._feed())
                    try:
                        await super().__call__(scope, receive, sending)
                    finally:
                        feeding.cancel()
        except* TimeoutError:  # it reads nothing
            pass
        finally:
            self._place.leave()
            if not self._over:
                # Closing would first wait until what was sent is read.
                scope["state"]["transport"].abort()

    # ---- what is sent -------------------------------------------------------------------------

    async def _events(self) -> AsyncGenerator[ServerSentEvent]:
        while (event := await self._queue.get()) is not None:
            yield event if isinstance(event, ServerSentEvent) else event()

    async def _feed(self) -> None:
        """Put into the queue what there is to send, and None at the end."""
        desk = self._desk
        try:
            with desk.feeds.of(self._run) as feed:
                async with (
                    desk.store.previews(self._run, self._preview),
                    watching(desk.store, self._run) as watch,
                ):
                    await self._records(feed, watch)
        except RunfoldError as error:
            found = problem(error)
            data = msgspec.json.encode(found).decode()
            retry = RETRY_MS if found.status < 500 else None
            await self._queue.put(ServerSentEvent(data, event="problem", retry=retry, sep="\n"))
        await self._queue.put(None)

    async def _records(self, feed: Feed, watch: Watch) -> None:
        while True:
            await feed.read(self._last)
            if self._last < feed.last:
                for raw in await self._behind(feed):
                    self._last += 1
                    await self._queue.put(partial(_record, raw, self._last))
                continue
            feed.check()
            if (status := feed.ended) is not None:
                data = msgspec.json.encode({"status": status}).decode()
                await self._queue.put(ServerSentEvent(data, event="end", sep="\n"))
                return
            await watch.changed()

    async def _behind(self, feed: Feed) -> list[bytes]:
        """The next records, though the feed may no longer have them."""
        found = feed.behind(self._last)
        if found:
            self._own = None
            return found
        self._own = self._own or self._desk.feeds.own(self._run)
        await self._own.read(self._last)
        if self._own.last <= self._last:
            self._own.check()
        return self._own.behind(self._last)

    def _preview(self, text: str) -> None:
        if self._queue.qsize() < PREVIEWS_MAX:
            # No record that anybody checks: nothing of it need reach a terminal as it is.
            data = escaped_json(msgspec.json.encode({"text": text}))
            self._queue.put_nowait(ServerSentEvent(data, event="preview", sep="\n"))

    # ---- the end of the bridge ----------------------------------------------------------------

    async def _listen_for_exit_signal_with_grace(self) -> None:
        """In place of sse-starlette's own, which looks every half second, in a task that nobody
        owns, for a signal handler of uvicorn's."""
        await self._desk.stopping.wait()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)
        await asyncio.sleep(LAST_WORD_S)


def _record(raw: bytes, n: int) -> ServerSentEvent:
    """Made when it is sent: what waits in a queue is no copy. Line breaks in a record, which no
    writer of ours writes, make several `data` lines: it can't begin an event of its own."""
    return ServerSentEvent(raw.decode(), id=str(n), event="record", sep="\n")


def _keep_alive() -> ServerSentEvent:
    return ServerSentEvent(comment="here", sep="\n")
