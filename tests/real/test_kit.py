"""The test kit does what the other tests lean on: real servers, and faults of exactly one kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from kit import servers
from kit.proxy import Proxy
from kit.servers import Cluster, ExistingServer, NatsServer, monitor
from kit.waiting import eventually
from nats.aio.client import Client

pytestmark = pytest.mark.real


@contextlib.asynccontextmanager
async def client(url: str | list[str], **options: Any) -> AsyncGenerator[Any]:
    async def quiet(_: Exception) -> None: ...

    connected: Any = Client()
    await connected.connect(url, reconnect_time_wait=0.05, error_cb=quiet, **options)
    try:
        yield connected
    finally:
        await connected.close()


async def greeting(url: str) -> bytes:
    """What a server says first; empty if it hangs up."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("nats://").split(":"))
    try:
        return await reader.readline()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def make_stream(nc: Any, replicas: int = 1) -> Any:
    js = nc.jetstream(timeout=5)
    await js.add_stream(name="S", subjects=["s.>"], num_replicas=replicas)
    return js


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[NatsServer]:
    running = await NatsServer.start(tmp_path / "nats")
    yield running
    await running.stop()


@pytest.fixture
async def proxy(server: NatsServer) -> AsyncGenerator[Proxy]:
    between = await Proxy.start(server.url)
    yield between
    await between.stop()


# -- one server ---------------------------------------------------------------------------------


async def test_a_paused_server_is_silent_and_goes_on_when_resumed(server: NatsServer) -> None:
    async with client(server.url) as nc:
        js = await make_stream(nc)
        server.pause()
        with pytest.raises(TimeoutError):
            await js.publish("s.a", b"late", timeout=0.3)
        server.resume()
        assert (await js.publish("s.b", b"next")).seq == 2  # the first landed after all
        assert (await js.get_msg("S", seq=1)).data == b"late"


async def test_a_killed_server_restarts_on_its_port_with_its_data(server: NatsServer) -> None:
    url, pid = server.url, server.pid
    async with client(server.url) as nc:
        js = await make_stream(nc)
        await js.publish("s.a", b"kept")
    await server.kill()
    await server.restart()
    assert (server.url, server.pid != pid) == (url, True)
    async with client(server.url) as nc:
        assert (await nc.jetstream().get_msg("S", seq=1)).data == b"kept"


async def test_a_paused_server_can_be_stopped(server: NatsServer) -> None:
    pid = server.pid
    server.pause()
    await server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_options_reach_the_server(tmp_path: Path) -> None:
    server = await NatsServer.start(
        tmp_path, fsync=True, max_payload=2048, extra_conf="server_name: x"
    )
    try:
        varz = await monitor(server.monitor_url, "varz")
        assert (varz["max_payload"], varz["server_name"]) == (2048, "x")
        assert varz["jetstream"]["config"]["sync_always"] is True
    finally:
        await server.stop()


async def test_a_server_that_ends_at_start_shows_its_log(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("")
    with pytest.raises(RuntimeError, match="not a directory"):
        await NatsServer.start(tmp_path)


async def test_an_existing_server_is_used_and_not_stopped(
    server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNFOLD_TEST_NATS_URL", server.url)
    chosen = await servers.test_server(tmp_path / "unused")
    assert isinstance(chosen, ExistingServer)
    await chosen.stop()
    async with client(chosen.url) as nc:
        await make_stream(nc)
    assert not (tmp_path / "unused").exists()


async def test_without_docker_the_wheel_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNFOLD_TEST_NATS_URL", raising=False)
    monkeypatch.setenv("RUNFOLD_TEST_DOCKER", "0")
    chosen = await servers.test_server(tmp_path)
    assert isinstance(chosen, NatsServer)
    await chosen.stop()


# -- three servers ------------------------------------------------------------------------------


async def test_a_cluster_keeps_a_stream_when_its_leader_is_killed(tmp_path: Path) -> None:
    cluster = await Cluster.start(tmp_path)
    try:
        async with client(cluster.urls) as nc:
            js = await make_stream(nc, replicas=3)
            await js.publish("s.a", b"kept")
        first = await cluster.leader_of("S")
        await cluster.step_down("S")

        async def other_leader() -> bool:
            return await cluster.leader_of("S") is not first

        await eventually(other_leader, 30)
        killed = await cluster.leader_of("S")
        await killed.kill()
        await eventually(other_leader_than(cluster, killed), 60)
        async with client((await cluster.leader_of("S")).url) as nc:
            assert (await nc.jetstream(timeout=10).get_msg("S", seq=1)).data == b"kept"
        await killed.restart()
    finally:
        await cluster.stop()


def other_leader_than(cluster: Cluster, server: NatsServer) -> Any:
    async def check() -> bool:
        return await cluster.leader_of("S") is not server

    return check


# -- the proxy ----------------------------------------------------------------------------------


async def test_the_proxy_loses_exactly_one_ack(proxy: Proxy) -> None:
    async with client(proxy.url) as nc:
        js = await make_stream(nc)
        dropped = proxy.drop_next_ack()
        with pytest.raises(TimeoutError):
            await js.publish("s.a", b"stored", timeout=0.5)
        assert dropped.is_set()
        assert (await js.get_msg("S", seq=1)).data == b"stored"
        assert (await js.publish("s.b", b"x")).seq == 2
        assert proxy.acks_seen == 2


async def test_the_proxy_loses_the_nth_ack(proxy: Proxy) -> None:
    async with client(proxy.url) as nc:
        js = await make_stream(nc)
        dropped = proxy.drop_nth_ack(3)
        assert [(await js.publish("s.a", b"")).seq for _ in range(2)] == [1, 2]
        assert not dropped.is_set()
        with pytest.raises(TimeoutError):
            await js.publish("s.a", b"", timeout=0.5)
        assert dropped.is_set()
        assert (await js.publish("s.a", b"")).seq == 4


async def test_two_armed_drops_lose_two_acks(proxy: Proxy) -> None:
    async with client(proxy.url) as nc:
        js = await make_stream(nc)
        first, second = proxy.drop_next_ack(), proxy.drop_next_ack()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await js.publish("s.a", b"", timeout=0.5)
        assert first.is_set()
        assert second.is_set()
        assert (await js.publish("s.a", b"")).seq == 3


async def test_the_proxy_loses_the_message_that_matches(proxy: Proxy) -> None:
    """Also one with headers: the payload is what is behind them."""
    async with client(proxy.url) as nc:
        inbox = await nc.subscribe("t")
        dropped = proxy.drop_next_ack(lambda payload: payload == b"two")
        for payload in (b"one", b"two", b"three\r\nMSG x 1 5"):
            await nc.publish("t", payload, headers={"K": "v"})
        got = [await inbox.next_msg(timeout=5) for _ in range(2)]
        assert [msg.data for msg in got] == [b"one", b"three\r\nMSG x 1 5"]
        assert got[1].headers == {"K": "v"}
        assert dropped.is_set()


async def test_large_messages_pass_whole(proxy: Proxy) -> None:
    async with client(proxy.url) as nc:
        inbox = await nc.subscribe("t")
        payload = os.urandom(1_000_000)
        await nc.publish("t", payload)
        assert (await inbox.next_msg(timeout=5)).data == payload


async def test_acks_are_late_in_order_and_complete(proxy: Proxy) -> None:
    async with client(proxy.url) as nc:
        js = await make_stream(nc)
        proxy.delay_acks(0.5)
        with pytest.raises(TimeoutError):
            await js.publish("s.a", b"", timeout=0.1)
        acks = await asyncio.gather(*(js.publish("s.a", b"", timeout=10) for _ in range(20)))
        assert sorted(ack.seq for ack in acks) == list(range(2, 22))


async def test_a_paused_proxy_keeps_what_the_server_says(proxy: Proxy) -> None:
    async with client(proxy.url) as nc:
        js = await make_stream(nc)
        proxy.pause()
        publishing = asyncio.ensure_future(js.publish("s.a", b"", timeout=30))
        await eventually(lambda: proxy.acks_seen == 1)
        assert not publishing.done()
        proxy.resume()
        assert (await publishing).seq == 1


async def test_a_cut_connection_is_made_again_by_the_client(proxy: Proxy) -> None:
    reconnected = asyncio.Event()

    async def on_reconnect() -> None:
        reconnected.set()

    async with client(proxy.url, reconnected_cb=on_reconnect) as nc:
        js = await make_stream(nc)
        proxy.cut()
        async with asyncio.timeout(10):
            await reconnected.wait()
        assert (await js.publish("s.a", b"")).seq == 1


async def test_a_refusing_proxy_lets_nobody_new_in(proxy: Proxy) -> None:
    async with client(proxy.url) as nc:
        js = await make_stream(nc)
        proxy.refuse(True)
        assert await greeting(proxy.url) == b""
        assert (await js.publish("s.a", b"")).seq == 1  # the old connection goes on
        proxy.refuse(False)
        async with client(proxy.url) as second:
            await second.flush()


async def test_the_proxy_hides_the_other_servers_of_a_cluster(server: NatsServer) -> None:
    async def a_clustered_server(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "connect_urls": ["127.0.0.1:1"]}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(a_clustered_server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    proxy = await Proxy.start(f"nats://127.0.0.1:{port}")
    line = await greeting(proxy.url)
    assert json.loads(line.removeprefix(b"INFO ")) == {"server_id": "x"}
    await proxy.stop()
    listener.close()
