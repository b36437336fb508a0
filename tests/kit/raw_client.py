"""A client of the server that keeps no rules: it publishes, purges and updates what it likes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from journal.stores.nats_connection import Connection
from journal.stores.nats_waiting import Reply


@asynccontextmanager
async def connected(url: str) -> AsyncGenerator[Connection]:
    connection = Connection(url, namespace="test")
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


async def ask(
    url: str,
    subject: str,
    request: dict[str, Any] | bytes = b"",
    headers: dict[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON answer, whatever it says."""
    payload = request if isinstance(request, bytes) else json.dumps(request).encode()
    async with connected(url) as connection:
        reply = await connection.request(subject, payload, headers, timeout_s=5)
    assert isinstance(reply, Reply), reply
    return json.loads(reply.data)
