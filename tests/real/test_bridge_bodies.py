"""Request bodies: those that come slowly keep nobody out; whoever sends too much reads why."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from kit.bridge import Site, bridge_on
from kit.servers import NatsServer
from kit.waiting import eventually

from bridge import bodies, desk, http_server
from journal.stores.provision import provision

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncIterator[Site]:
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace) as site:
        yield site


@pytest.fixture
async def begin(site: Site) -> AsyncIterator[Callable[..., Any]]:
    """Open a connection and send of a request whose body is still to come."""
    async with contextlib.AsyncExitStack() as stack:

        async def opened(*headers: str, token: str = "rf_signal", path: str = "/runs") -> Streams:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(site))
            stack.callback(writer.close)
            lines = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {token}", *headers]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
            return reader, writer

        yield opened


def port_of(site: Site) -> int:
    return int(site.bridge.address.rpartition(":")[2])


START = b'{"agent":"a","input":1}'


async def slow(begin: Callable[..., Any], sent: bytes = b"", size: int = len(START)) -> Streams:
    """A body that is being read, and of which `sent` has come."""
    reader, writer = await begin("Expect: 100-continue", f"Content-Length: {size}")
    assert b" 100 " in await reader.readline()  # the bridge waits for it now
    await reader.readline()
    writer.write(sent)
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode().lower()
    size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), json.loads(await reader.readexactly(size))


# ---- slow ---------------------------------------------------------------------------------------


async def test_bodies_that_do_not_come_keep_nobody_else_out(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "REQUESTS_MAX", 2)
    monkeypatch.setattr(desk, "REQUEST_WAIT_S", 1.0)
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace) as site, contextlib.AsyncExitStack() as stack:
        connections: list[Streams] = []
        for _ in range(8):
            connection = await asyncio.open_connection("127.0.0.1", port_of(site))
            stack.callback(connection[1].close)
            head = "POST /runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer rf_signal\r\n"
            head += f"Expect: 100-continue\r\nContent-Length: {len(START)}\r\n\r\n"
            connection[1].write(head.encode())
            assert b" 100 " in await connection[0].readline()
            await connection[0].readline()
            connections.append(connection)
        assert (await site.client("read").get("/runs")).status_code == 200
        assert (await site.post("/runs", json.loads(START))).status_code == 201
        for reader, writer in connections:  # they still may, when they come
            writer.write(START)
            assert (await answer(reader))[0] == 201


async def test_of_too_many_slow_bodies_the_first_is_given_up(
    begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODIES_MAX", 2)
    first, second, third = [await slow(begin) for _ in range(3)]
    status, problem = await answer(first[0])
    assert (status, problem["code"]) == (503, "busy")
    for reader, writer in (second, third):
        writer.write(START)
        assert (await answer(reader))[0] == 201


async def test_bodies_together_are_bounded_and_the_last_one_is_served(
    site: Site, begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODIES_BYTES_MAX", 1000)
    first = await slow(begin, b" " * 600, 700)
    second = await slow(begin, b" " * 600, 600 + len(START))
    status, problem = await answer(first[0])
    assert (status, problem["code"]) == (503, "busy")
    assert (await site.post("/runs", json.loads(START))).status_code == 201
    second[1].write(START)
    assert (await answer(second[0]))[0] == 201


async def test_a_body_that_does_not_come_in_time_is_answered(
    begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_WAIT_S", 0.1)
    reader, _ = await slow(begin, b"{")
    status, problem = await answer(reader)
    assert (status, problem["code"]) == (400, "bad_request")


# ---- too large, unread --------------------------------------------------------------------------


async def test_who_sends_too_much_can_read_that_it_is_too_much(site: Site) -> None:
    """A connection that is closed over bytes that nobody read is reset: the answer is lost."""
    for size in (bodies.BODY_BYTES_MAX + 1, 3_000_000, 7_000_000):
        response = await site.post("/runs", content=b"x" * size)
        assert (response.status_code, response.json()["code"]) == (413, "too_large")
        assert response.headers["connection"] == "close"

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(48):
            yield b"x" * 65536

    response = await site.post("/runs", content=pieces())
    assert (response.status_code, response.json()["code"]) == (413, "too_large")


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [("/runs", "no", 401), ("/runs", "read", 403), ("/nothing", "signal", 404)],
)
async def test_who_is_refused_before_the_body_is_read_can_read_why(
    site: Site, path: str, token: str, status: int
) -> None:
    """Also where the client itself says that it will close."""
    headers = {"connection": "close", "authorization": f"Bearer rf_{token}"}
    async with httpx.AsyncClient(base_url=site.bridge.address, headers=headers) as client:
        response = await client.post(path, content=b"x" * 3_000_000)
    assert response.status_code == status


async def test_what_is_no_request_is_told_so_whatever_follows_it(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(site))
    writer.write(b"\x00" * 2_000_000)
    assert b" 400 " in await asyncio.wait_for(reader.readline(), 10)
    assert b"Invalid HTTP request" in await asyncio.wait_for(reader.read(), 10)
    writer.close()


@pytest.mark.parametrize(("name", "value"), [("REST_S", 0.2), ("REST_BYTES_MAX", 100_000)])
async def test_who_sends_on_and_on_is_cut_off(
    begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    monkeypatch.setattr(http_server, name, value)
    reader, writer = await begin("Content-Length: 99999999999")
    assert (await answer(reader))[0] == 413
    assert await reader.read() == b""  # nothing more is said, at once

    async def cut_off() -> bool:
        try:
            writer.write(b"x" * 10_000)
            await writer.drain()
        except ConnectionError:
            return True
        return False

    await eventually(cut_off)


async def test_a_bridge_stops_though_connections_are_still_read_away(
    site: Site, begin: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REST_S", 30.0)
    large, _ = await begin("Content-Length: 99999999999")
    assert (await answer(large))[0] == 413
    junk, writer = await asyncio.open_connection("127.0.0.1", port_of(site))
    writer.write(b"\x00" * 100_000)
    assert b" 400 " in await asyncio.wait_for(junk.readline(), 10)
    await site.bridge.stop()
    async with asyncio.timeout(5):
        await site.serving
    writer.close()
