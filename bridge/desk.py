"""Shell: what every operation has at hand, and how much may go on at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from journal.stores.jetstream import JetStreamStore

from .auth import Auth
from .bodies import Bodies
from .feed import Feeds
from .metrics import Metrics
from .pages import Pages
from .problems import Busy

FOLLOWERS_MAX: Final = 1000
"""Streams and waiting requests: each has a subscription and a connection of its own."""

REQUESTS_MAX: Final = 64
"""Others at once: each may hold a request body and a folded journal. A body is read before."""

REQUEST_WAIT_S: Final = 10.0
"""After a restart all followers ask at once: a request waits so long for its place."""


class Health(Struct, frozen=True, kw_only=True):
    """Well or not, and why not."""

    ok: bool
    problems: tuple[str, ...] = ()


class Desk:
    """One for a bridge. `health`: of all that is its work; `ready`: of what requests need.
    `stopping` is set when it is told to stop: streams and waits end then."""

    def __init__(
        self,
        store: JetStreamStore,
        auth: Auth,
        metrics: Metrics,
        health: Callable[[], Health],
        ready: Callable[[], Health],
    ) -> None:
        self.store = store
        self.auth = auth
        self.metrics = metrics
        self.health = health
        self.ready = ready
        self.feeds = Feeds(store)
        self.pages = Pages(store)
        self.bodies = Bodies()
        self.stopping = asyncio.Event()
        self._followers = 0
        self._requests = asyncio.Semaphore(REQUESTS_MAX)

    async def take_request(self) -> Place:
        """A place among the requests, to be given back; raises Busy."""
        try:
            async with asyncio.timeout(REQUEST_WAIT_S):
                await self._requests.acquire()
        except TimeoutError:
            raise Busy(f"the bridge answers {REQUESTS_MAX} requests at once") from None
        return Place(self._requests.release)

    def take_place(self) -> Place:
        """A place among the followers, to be given back; raises Busy."""
        if self.stopping.is_set():
            raise Busy("the bridge is stopping")
        if self._followers >= FOLLOWERS_MAX:
            raise Busy(f"the bridge has {FOLLOWERS_MAX} followers")
        self._move(1)
        return Place(lambda: self._move(-1))

    def _move(self, by: int) -> None:
        self._followers += by
        self.metrics.followers(self._followers)


class Place:
    """Leaving it twice is leaving it once."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave: Callable[[], None] | None = leave

    def leave(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()
