"""Opening, permissions, frozen servers, closing (R14, R55)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from kit.backends import REAL_ONLY
from kit.raw_client import ask
from kit.records import Chain, fill, journal_of
from kit.servers import NatsServer, monitor
from kit.simulated.client import ModelClient
from kit.waiting import eventually

from journal.errors import (
    NotProvisioned,
    PermissionDenied,
    StoreUnavailable,
)
from journal.ids import RunId
from journal.store import Loaded, Unknown
from journal.stores import jetstream_lane, nats_client, nats_connection
from journal.stores.jetstream import JetStreamStore
from journal.stores.nats_waiting import NoReply
from journal.stores.provision import provision

STREAM = "RUNFOLD_JOURNAL_0"
WHO_MAY_DO_WHAT = """
authorization {
  users = [
    { user: admin, password: p }
    { user: reader, password: p, permissions: {
        publish: { allow: ["$JS.API.>"] }, subscribe: { allow: ["_INBOX.>"] } } }
    { user: blind, password: p, permissions: {
        publish: { deny: ["$JS.API.DIRECT.>", "$JS.API.STREAM.MSG.>"] } } }
    { user: deaf, password: p, permissions: { subscribe: { deny: ["_INBOX.>"] } } }
    { user: mute, password: p, permissions: { subscribe: { deny: ["runfold.worker.>"] } } }
  ]
}
"""


# ---- permissions ---------------------------------------------------------------------------------


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Callable[[str], str]]:
    """The address of a server with permissions, as a user."""
    server = await NatsServer.start(tmp_path / "guarded", extra_conf=WHO_MAY_DO_WHAT)

    def url(user: str, password: str = "p") -> str:
        return server.url.replace("nats://", f"nats://{user}:{password}@")

    await provision(url("admin"))
    yield url
    await server.stop()


async def test_a_denied_append_reaches_the_caller_with_its_subject(
    guarded: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_lane, "APPEND_TRY_S", 1_000.0)  # at once, not when it is over
    chain = Chain("Run.A")
    async with JetStreamStore(guarded("reader")) as store:
        with pytest.raises(PermissionDenied) as denied:
            await store.append(chain.run_id, chain.started(), expected=0)
        assert denied.value.subject == "runfold.journal.0.Run~A"
        assert await store.load(chain.run_id) == Loaded((), 0)  # the connection lives on


async def test_a_denied_read_reaches_the_caller_with_its_subject(
    guarded: Callable[[str], str],
) -> None:
    async with JetStreamStore(guarded("admin")) as store:
        await fill(store, journal_of(3))
    async with JetStreamStore(guarded("blind")) as store:
        with pytest.raises(PermissionDenied) as denied:
            await store.load(RunId("run-1"))
        assert denied.value.subject == f"$JS.API.STREAM.MSG.GET.{STREAM}"


async def test_a_denied_inbox_is_found_when_the_store_opens(guarded: Callable[[str], str]) -> None:
    with pytest.raises(PermissionDenied) as denied:
        async with JetStreamStore(guarded("deaf")):
            raise AssertionError("opened without an inbox")
    assert denied.value.subject.startswith("_INBOX.runfold.")


async def test_a_denied_inbox_fails_later_calls_before_they_are_sent(
    guarded: Callable[[str], str],
) -> None:
    connection = nats_connection.Connection(guarded("deaf"), namespace="runfold")
    await connection.open()
    try:
        await eventually(lambda: connection._inbox_denied)
        sent = connection._nc.stats["out_msgs"]
        with pytest.raises(PermissionDenied):
            await connection.request("$JS.API.INFO", b"", timeout_s=1_000)
        assert connection._nc.stats["out_msgs"] == sent
    finally:
        await connection.close()


async def test_a_denied_worker_subject_is_found_before_anything_is_claimed(
    guarded: Callable[[str], str],
) -> None:
    async with JetStreamStore(guarded("mute")) as store:
        with pytest.raises(PermissionDenied) as denied:
            async with store.answering("w.1", lambda run_id, claim: True):
                raise AssertionError("answering without a subscription")
        assert denied.value.subject == "runfold.worker.w~1"


async def test_wrong_credentials_are_refused_with_the_server_and_without_the_password(
    guarded: Callable[[str, str], str],
) -> None:
    with pytest.raises(PermissionDenied, match="refuses these credentials") as denied:
        async with JetStreamStore(guarded("admin", "wr0ng")):
            raise AssertionError("opened")
    assert "wr0ng" not in str(denied.value) and "127.0.0.1" in denied.value.subject


# ---- opening and closing -------------------------------------------------------------------------


async def test_a_refused_connection_is_an_error_at_once(server: NatsServer) -> None:
    url = server.url
    await server.stop()
    with pytest.raises(StoreUnavailable, match=re.escape(url)):
        async with JetStreamStore(url):
            raise AssertionError("opened")
    with pytest.raises(StoreUnavailable):
        async with JetStreamStore(f"{url},{url}"):
            raise AssertionError("opened")


@REAL_ONLY
async def test_one_server_of_several_is_enough(
    direct: JetStreamStore, server: NatsServer, tmp_path: Path
) -> None:
    gone = await NatsServer.start(tmp_path / "gone")
    await gone.stop()
    for _ in range(10):  # nats-py tries them in random order
        async with JetStreamStore(f"{gone.url}, {server.url}") as store:
            assert await store.load(RunId("nobody")) == Loaded((), 0)


@pytest.mark.parametrize(
    "url", ["http://localhost:4222", "nats://", "nats://host:port", "", "nats://a b:4222", "::"]
)
async def test_an_address_that_is_none_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(StoreUnavailable, match="address") as refused:
        async with JetStreamStore(url):
            raise AssertionError("opened")
    assert "nats://host:4222" in refused.value.hint


async def test_a_server_without_the_stream_is_not_provisioned(server: NatsServer) -> None:
    with pytest.raises(NotProvisioned, match=STREAM) as missing:
        async with JetStreamStore(server.url):
            raise AssertionError("opened")
    assert f"runfold init --store {server.url}" in missing.value.hint


async def test_a_server_without_jetstream_is_not_provisioned(tmp_path: Path) -> None:
    conf = "accounts: { A: { users: [ { user: a, password: p } ] } }\nno_auth_user: a"
    server = await NatsServer.start(tmp_path / "plain", extra_conf=conf)
    try:
        with pytest.raises(NotProvisioned, match="JetStream"):
            async with JetStreamStore(server.url):
                raise AssertionError("opened")
    finally:
        await server.stop()


@pytest.mark.parametrize("shards", ["4", None])
async def test_a_stream_cut_in_another_way_is_refused(
    server: NatsServer, shards: str | None
) -> None:
    await provision(server.url)
    info = await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}")
    metadata = {"runfold.shards": shards} if shards else {}
    config = info["config"] | {"metadata": metadata}
    await ask(server.url, f"$JS.API.STREAM.UPDATE.{STREAM}", config)
    with pytest.raises(NotProvisioned, match="shards"):
        async with JetStreamStore(server.url):
            raise AssertionError("opened")


async def test_a_file_that_holds_no_credentials_is_refused(
    server: NatsServer, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.creds"
    bad.write_text("not credentials\n")
    for path in (bad, tmp_path / "missing.creds"):
        with pytest.raises(PermissionDenied) as refused:
            async with JetStreamStore(server.url, creds=str(path)):
                raise AssertionError("opened")
        assert refused.value.subject == str(path)


@pytest.mark.usefixtures("short_tries")
async def test_a_stream_deleted_under_the_store_is_a_clear_error(
    direct: JetStreamStore, server: NatsServer
) -> None:
    chain = journal_of(2)
    tail = await fill(direct, chain)
    await ask(server.url, f"$JS.API.STREAM.DELETE.{STREAM}")
    answer = await direct.append(chain.run_id, chain.completed(), expected=tail)
    assert isinstance(answer, Unknown) and "nobody answers" in answer.cause
    with pytest.raises(StoreUnavailable, match=f"{STREAM} is gone"):
        await direct.load(chain.run_id, after=tail)
    with pytest.raises(StoreUnavailable, match=f"{STREAM} is gone"):
        await direct.trim(chain.run_id, before=tail)
    with pytest.raises(StoreUnavailable, match=f"{STREAM} is gone"):
        [run_id async for run_id in direct.runs()]


async def test_a_connection_closed_for_good_is_an_error_on_every_call(
    direct: JetStreamStore,
) -> None:
    chain = journal_of(2)
    tail = await fill(direct, chain)
    client = direct._connection._nc
    await client.publish("runfold.x", b"x" * client.max_payload, headers={"One": "too many"})
    await eventually(lambda: client.is_closed)
    with pytest.raises(StoreUnavailable, match="closed"):
        await direct.append(chain.run_id, chain.completed(), expected=tail)
    with pytest.raises(StoreUnavailable, match="closed"):
        await direct.load(chain.run_id)
    with pytest.raises(StoreUnavailable, match="closed"):
        await direct.ask("w", chain.run_id, 1)
    with pytest.raises(StoreUnavailable, match="closed"):
        async with direct.answering("w", lambda run_id, claim: True):
            raise AssertionError("answering")


async def test_a_store_that_is_not_open_is_an_error(server: NatsServer) -> None:
    with pytest.raises(StoreUnavailable, match="closed"):
        await JetStreamStore(server.url).load(RunId("run-1"))
    await provision(server.url)
    store = JetStreamStore(server.url)
    for _ in range(2):  # it can be opened again
        async with store:
            assert await store.load(RunId("run-1")) == Loaded((), 0)
        with pytest.raises(StoreUnavailable, match="closed"):
            await store.load(RunId("run-1"))


async def freeze(server: NatsServer, connection: nats_connection.Connection) -> None:
    """Pause the server, and wait until it is: the signal is not."""
    server.pause()

    async def frozen() -> bool:
        reply = await connection.request("nobody.here", b"", timeout_s=0.2)
        return isinstance(reply, NoReply) and not reply.nobody

    await eventually(frozen)


@REAL_ONLY
async def test_a_frozen_server_is_left_for_another_though_bytes_to_it_are_unsent(
    direct: JetStreamStore,
    server: NatsServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nats_connection, "PING_INTERVAL_S", 0.5)
    other = await NatsServer.start(tmp_path / "other")
    try:
        connection = nats_connection.Connection(f"{server.url},{other.url}", namespace="test")
        await connection.open()
        client = connection._nc
        on_first = client.connected_url.netloc in server.url
        frozen, alive = (server, other) if on_first else (other, server)
        await freeze(frozen, connection)

        def ask_much() -> asyncio.Task[Any]:
            return asyncio.create_task(connection.request("x.y", b"z" * 900_000, timeout_s=100))

        asked = [ask_much() for _ in range(20)]  # more than the kernel takes
        await eventually(lambda: connection._waiting and not client.pending_data_size)
        asked.append(ask_much())  # this one stays with nats-py
        await eventually(
            lambda: client.is_connected and client.connected_url.netloc in alive.url, 60
        )
        assert all(isinstance(reply, NoReply) for reply in await asyncio.gather(*asked))
        assert isinstance(await connection.request("x.y", b"", timeout_s=5), NoReply)
        received = (await monitor(alive.monitor_url, "varz"))["in_bytes"]
        assert received < 900_000  # what was given up is not sent to the other one
        await connection.close()
    finally:
        server.resume()
        await other.stop()


async def test_a_store_on_a_frozen_server_can_be_left(
    server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_connection, "PING_INTERVAL_S", 0.5)
    monkeypatch.setattr(nats_client, "CLOSE_WAIT_S", 0.5)
    monkeypatch.setattr(jetstream_lane, "APPEND_TRY_S", 0.3)
    await provision(server.url)
    chain = Chain()
    large = chain.started("x" * 900_000)
    async with JetStreamStore(server.url) as store:
        await freeze(server, store._connection)
        answers = await asyncio.gather(
            *(store.append(RunId(f"run-{n}"), large, expected=0) for n in range(20))
        )
        await eventually(lambda: not store._connection._nc.is_connected)
    server.resume()
    assert all(isinstance(answer, Unknown) for answer in answers)
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()


@REAL_ONLY
async def test_a_cancellation_inside_nats_py_is_not_one_of_the_caller(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = asyncio.Event()

    async def cancelled(self: object) -> None:
        raise asyncio.CancelledError

    async def hanging(self: object) -> None:
        closing.set()
        await asyncio.Event().wait()

    client = nats_client.Client()
    with monkeypatch.context() as patch:
        patch.setattr(nats_client._Client, "close", cancelled)
        await client.close()
        patch.setattr(nats_client._Client, "close", hanging)
        task = asyncio.create_task(client.close())
        await closing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_connection_just_lost_is_waited_for_without_holding_up_the_loop(
    direct: JetStreamStore,
) -> None:
    """nats-py 2.16.0 is not connected for some turns of the loop before it calls disconnected_cb:
    who only asked again in between kept that from ever running."""
    connection = direct._connection
    await lose(connection)
    turns = 0
    while not await connection.connected_within(5):
        turns += 1
        assert turns < 10, "asked again and again in one turn of the loop"
    await lose(connection)
    async with direct.notices(lambda run, payload: None):
        assert connection.connected


async def test_a_pull_after_a_connection_just_lost_waits_for_the_next(
    direct: JetStreamStore,
) -> None:
    await direct.tasks.ensure("desk", ack_wait_s=30)
    await direct.wake(RunId("r"), "desk", cause=1)
    got: list[Any] = []
    async with direct.tasks.pulling("desk", 0, got.append) as puller:
        await lose(direct._connection)
        for _ in range(10):
            if (await puller.pull(1, 5)).why == "filled":
                break
        assert len(got) == 1


async def lose(connection: nats_connection.Connection) -> None:
    """The connection is lost, and nobody has been told yet."""
    client = connection._nc
    if isinstance(client, ModelClient):
        client.cut()
    else:
        await client._process_op_err(ConnectionError("lost"))
    assert not client.is_connected
