"""A worker that can't listen to the others."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from journal.errors import StoreUnavailable
from worker.peers import PeerWatch


class Closed:
    """Of a connection that is closed for good: it refuses without a turn of the loop."""

    connected = False

    def __init__(self) -> None:
        self.asked = 0
        self.hints = self

    def peers(self, *_: Any) -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def refused() -> Any:
            self.asked += 1
            if self.asked > 100:  # else a loop that never waits would hang the test as well
                raise RuntimeError("asked over and over, without a pause")
            raise StoreUnavailable("closed for good")
            yield

        return refused()

    @property
    def tasks(self) -> Any:
        raise StoreUnavailable("closed for good")


async def test_a_watch_that_cannot_listen_leaves_the_loop_to_others() -> None:
    """The worker must come to notice that its connection is closed, and end."""
    store = Closed()
    watch = asyncio.ensure_future(PeerWatch(store, "w1", ["desk"]).run())  # type: ignore[arg-type]
    for _ in range(20):
        await asyncio.sleep(0)
    assert store.asked == 1
    watch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watch
