"""A server of a cluster that is lost is no loss of the login at the others (R14, R66)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.servers import Cluster
from kit.waiting import eventually

from journal.stores.nats_connection import Connection

pytestmark = pytest.mark.real
LOGIN = "authorization { users: [ { user: worker, password: p } ] }"


async def test_servers_that_another_one_told_of_are_connected_to_as_the_same_user(
    tmp_path: Path,
) -> None:
    """nats-py goes to them as nobody; refused, it closes the connection for good."""
    cluster = Cluster({})
    await cluster._launch(tmp_path, fsync=False, extra_conf=LOGIN)
    first = cluster.servers[0]
    port = int(first.url.rpartition(":")[2])
    connection = Connection(first.url.replace("nats://", "nats://worker:p@"), namespace="runfold")
    try:
        await connection.open()
        client = connection._nc
        await eventually(lambda: len(client.discovered_servers) == 2, 20)
        await first.kill()

        def moved() -> bool:
            return client.connected_url is not None and client.connected_url.port != port

        await eventually(moved, 20)
        assert await client.round_trip(20)
    finally:
        await connection.close()
        await cluster.stop()
