"""What the simulation found, each as small as it gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from kit.simulated.server import ModelServer
from simulation import patches
from simulation.loop import VirtualLoop

import journal.stores.nats_connection
from bridge.nats_api import NatsApi
from journal.stores.jetstream import JetStreamStore
from journal.stores.nats_waiting import Reply


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    made = VirtualLoop()
    with patches.deterministic(made, 0):
        yield made
    made.close()


@pytest.fixture
def server(loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> ModelServer:
    made = ModelServer(now=lambda: patches.EPOCH_NS + int(loop.time() * 1e9))
    made.provision()
    monkeypatch.setattr(journal.stores.nats_connection, "Client", made.client)
    return made


def test_a_bridge_whose_server_is_silent_as_it_begins_to_listen_outlives_that(
    loop: VirtualLoop, server: ModelServer
):
    """nats-py's flush gave up after 10 s, with an error that ended the bridge."""

    async def main() -> None:
        async with JetStreamStore(server.url) as store:
            server.pause()
            api = NatsApi(store)
            running = asyncio.create_task(api.run())
            await asyncio.sleep(15)
            server.resume()
            await asyncio.sleep(15)
            assert not running.done(), running.exception()
            assert api.problem() == ""
            asked = await store._connection.request(
                "runfold.api.signals.r1.cancel", b"{}", timeout_s=2
            )
            assert isinstance(asked, Reply) and b"run_not_found" in asked.data
            pings = [
                one.subject
                for client in server.clients
                for one in client.wire.session.subscribed.values()
                if one.subject == "$SRV.PING"
            ]
            assert pings == ["$SRV.PING"]
            running.cancel()
            await asyncio.wait([running])

    loop.run_until_complete(main())
