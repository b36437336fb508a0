"""What the bridge and its NATS roles promise and do not keep. Each test fails now."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from kit.bridge import bridge_on
from kit.servers import NatsServer

from journal.stores.provision import provision

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


# ---- health, HTTP --------------------------------------------------------------------------------


async def test_a_request_of_two_lengths_is_the_last_one_of_its_connection(
    nats_server: NatsServer, namespace: str
) -> None:
    """RFC 9112, 6.1: with Transfer-Encoding and Content-Length the server must close, or a proxy
    that counts by the other one lets the rest through as a request that it has not seen."""
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.bridge._port)
        head = "POST /runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer rf_signal\r\n"
        both = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        hidden = "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write((head + both + hidden).encode())
        found = b""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                while more := await reader.read(4096):
                    found += more
        writer.close()
        assert found.count(b"HTTP/1.1 ") == 1
