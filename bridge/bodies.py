"""Shell: request bodies on their way in. Who sends one slowly keeps nobody else out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from starlette.requests import Request

from .problems import BadRequest, Busy, PayloadTooLarge

BODY_BYTES_MAX: Final = 1024 * 1024
"""Far above a run's honest input; several at once must fit the memory."""

BODY_WAIT_S: Final = 30.0
"""Who sends slower than that is given up."""

BODIES_MAX: Final = 1000
BODIES_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of all bodies that are being read, or wait for a place. Beyond it the one that began first is
given up, not the one that comes: those that stall can only be in each other's way."""


class Body:
    """One that is being read."""

    def __init__(self, bodies: Bodies, limit: asyncio.Timeout) -> None:
        self._bodies = bodies
        self._limit = limit
        self.size = 0

    async def read(self, request: Request) -> bytes:
        """All of it. Raises PayloadTooLarge, BadRequest where it does not come in time, and what
        Starlette says of a client that is gone."""
        declared = request.headers.get("content-length")
        if declared is not None and (len(declared) > 9 or int(declared) > BODY_BYTES_MAX):
            raise _too_large()
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                async for chunk in request.stream():
                    found += chunk
                    if len(found) > BODY_BYTES_MAX:
                        raise _too_large()
                    self._bodies.grew(self, len(chunk))
        except TimeoutError as error:
            raise BadRequest(f"the body did not come within {BODY_WAIT_S:g} s") from error
        return bytes(found)

    def give_up(self) -> None:
        self._limit.reschedule(asyncio.get_running_loop().time())


class Bodies:
    """Those of a bridge, in the order they began in."""

    def __init__(self) -> None:
        self._bodies: dict[Body, None] = {}
        self._bytes = 0

    @asynccontextmanager
    async def coming(self) -> AsyncGenerator[Body]:
        """While inside, the body that is read counts. Raises Busy when it is given up."""
        given_up = asyncio.timeout(None)
        try:
            async with given_up:
                body = Body(self, given_up)
                self._bodies[body] = None
                self._make_room()
                try:
                    yield body
                finally:
                    self._forget(body)
        except TimeoutError:
            if not given_up.expired():
                raise
            raise Busy("others send more than the bridge can hold", hint="ask again") from None

    def grew(self, body: Body, size: int) -> None:
        """So much more of it has come."""
        if body in self._bodies:  # else it is being given up
            body.size += size
            self._bytes += size
            self._make_room()

    def _make_room(self) -> None:
        while self._bytes > BODIES_BYTES_MAX or len(self._bodies) > BODIES_MAX:
            first = next(iter(self._bodies))
            self._forget(first)
            first.give_up()

    def _forget(self, body: Body) -> None:
        if body in self._bodies:
            del self._bodies[body]
            self._bytes -= body.size


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"a request's body is at most {BODY_BYTES_MAX} bytes")
