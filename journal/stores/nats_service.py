"""Store: a NATS service (`nats micro ls`): nats-py's `micro`, with what it lets slip mended.

nats-py 2.16.0 runs one endpoint's handlers one after another, and answers with the text of what
they raise: so a handler here takes the request, hands it on and raises nothing; and what became of
it is counted here, for the STATS that others read.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import nats.errors
import nats.micro.service
from msgspec import Struct
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER, Request
from nats.micro.service import ServiceConfig

from ..limits import CLOSE_WAIT_S


class Service(Struct, frozen=True):
    """`endpoints`: the subject of each, by its name. Instances share a queue group: each request
    reaches one of them."""

    name: str
    version: str
    description: str
    endpoints: Mapping[str, str]


class Asked:
    """A request to one of the endpoints."""

    def __init__(self, request: Any, endpoint: str, counts: _Counts) -> None:
        self._request = request
        self._counts = counts
        self.endpoint = endpoint
        self.subject: str = request.subject
        self.reply: str = request._msg.reply  # nats-py 2.16.0 has no other name for it
        self.data: bytes = request.data
        self.headers: Mapping[str, str] = request.headers or {}

    async def answer(self, data: bytes) -> None:
        await self._respond(data, None)

    async def refuse(self, status: int, code: str, text: str, data: bytes) -> None:
        """An error as services say it: headers, and whatever is in the answer. `text` is ASCII on
        one line: it stands in a header."""
        self.drop(code)
        headers = {ERROR_HEADER: f"{code}: {text}", ERROR_CODE_HEADER: str(status)}
        await self._respond(data, headers)

    def drop(self, code: str) -> None:
        """Counted as an error, and no more. The code alone: everybody reads the statistics, and
        the text is for who asked."""
        self._counts.errors += 1
        self._counts.last = code

    async def _respond(self, data: bytes, headers: dict[str, str] | None) -> None:
        # No reply subject: published, not requested. No connection: who asked hears nothing and
        # asks again.
        with contextlib.suppress(ValueError, nats.errors.Error):
            await self._request.respond(data, headers)


class _Counts:
    """Of one endpoint."""

    def __init__(self) -> None:
        self.errors = 0
        self.last = ""


@contextlib.asynccontextmanager
async def serving(
    client: Any, service: Service, handle: Callable[[Asked], Awaitable[None]]
) -> AsyncGenerator[None, None]:
    """See Connection.serving."""
    counts = {name: _Counts() for name in service.endpoints}

    def stats(endpoint: Any) -> dict[str, Any]:
        found = counts[endpoint.name]
        return {"errors": found.errors, "last_error": found.last}

    def handler(name: str) -> Callable[[Request], Awaitable[None]]:
        return lambda request: handle(Asked(request, name, counts[name]))

    config = ServiceConfig(
        name=service.name,
        version=service.version,
        description=service.description,
        queue_group=service.name,
        stats_handler=stats,
    )
    made: Any = nats.micro.service.Service(client, config)
    try:
        # It flushes: a server that is silent, or a connection that is lost meanwhile, ends in an
        # error after 10 s, with the subscriptions made.
        await made.start()
        for name, subject in service.endpoints.items():
            await made.add_endpoint(name=name, subject=subject, handler=handler(name), metadata={})
        yield
    finally:
        # Not its `stop`: that waits for a server that may be gone.
        endpoints = [endpoint._subscription for endpoint in made._endpoints]
        await client.leave([*endpoints, *made._subscriptions.values()], CLOSE_WAIT_S)
