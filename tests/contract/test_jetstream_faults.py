"""What the JetStream store promises when acks, connections, records or servers go missing (R12, R13)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.proxy import Proxy
from kit.records import Chain
from kit.servers import Cluster, NatsServer, monitor
from kit.waiting import eventually

from journal.codec import Damage, Entry
from journal.errors import (
    JournalDamaged,
    NotProvisioned,
    PermissionDenied,
    StoreUnavailable,
    TooLarge,
)
from journal.fold import Fold
from journal.ids import RunId
from journal.store import Appended, Conflict, Loaded, Unknown
from journal.stores import jetstream, jetstream_read
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_answers import read_ack
from journal.stores.nats_connection import Connection
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


@pytest.fixture
def short_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience, where a test waits for it to end."""
    monkeypatch.setattr(jetstream, "APPEND_TRY_S", 0.3)
    monkeypatch.setattr(jetstream, "ASK_TRY_S", 0.3)
    monkeypatch.setattr(jetstream_read, "READ_TRY_S", 0.3)
    monkeypatch.setattr(jetstream_read, "READ_BUDGET_S", 0.6)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Connection]:
    """Another client of the server, which keeps no rules."""
    connection = Connection(url, namespace="test")
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()


async def ask(url: str, subject: str, request: dict[str, Any] | bytes = b"") -> dict[str, Any]:
    payload = request if isinstance(request, bytes) else json.dumps(request).encode()
    async with connected(url) as connection:
        reply = await connection.request(subject, payload, timeout_s=5)
    return json.loads(reply.data)  # type: ignore[union-attr]


async def fill(store: JetStreamStore, chain: Chain) -> int:
    tail = 0
    for entry in chain.entries:
        answer = await store.append(chain.run_id, entry, expected=tail)
        assert isinstance(answer, Appended)
        tail = answer.tail
    return tail


def raws(loaded: Loaded) -> list[bytes]:
    return [entry.raw for entry in loaded.entries]


def journal_of(records: int, run_id: str = "run-1") -> Chain:
    chain = Chain(run_id)
    chain.started()
    chain.steps(records - 1)
    return chain


# ---- appends whose outcome is not known ----------------------------------------------------------


@pytest.mark.parametrize("lost", range(8))
@pytest.mark.usefixtures("short_tries")
async def test_a_lost_ack_is_unknown_and_the_record_is_there_once(
    proxied: JetStreamStore, proxy: Proxy, lost: int
) -> None:
    chain = journal_of(7)
    chain.completed()
    tail = 0
    for index, entry in enumerate(chain.entries):
        if index == lost:
            dropped = proxy.drop_next_ack()
            answer = await proxied.append(chain.run_id, entry, expected=tail)
            assert isinstance(answer, Unknown)
            assert dropped.is_set()
            again = await proxied.append(chain.run_id, entry, expected=tail)
            assert again == Conflict()  # the honest retry of a record that landed
            (landed,) = (await proxied.load(chain.run_id, after=tail)).entries
            assert landed.record.id == entry.record.id
            tail = landed.position
        else:
            answer = await proxied.append(chain.run_id, entry, expected=tail)
            assert isinstance(answer, Appended)
            tail = answer.tail
    assert raws(await proxied.load(chain.run_id)) == [entry.raw for entry in chain.entries]


@pytest.mark.usefixtures("short_tries")
async def test_an_append_to_a_paused_server_may_land_later_and_never_twice(
    direct: JetStreamStore, server: NatsServer
) -> None:
    chain = journal_of(3)
    tail = await fill(direct, chain)
    entry = chain.step_started("late/0")
    server.pause()
    for _ in range(3):
        assert isinstance(await direct.append(chain.run_id, entry, expected=tail), Unknown)
    server.resume()

    async def definite() -> Appended | Conflict | None:
        answer = await direct.append(chain.run_id, entry, expected=tail)
        return None if isinstance(answer, Unknown) else answer

    await eventually(definite)
    assert raws(await direct.load(chain.run_id, after=tail)) == [entry.raw]


@pytest.mark.usefixtures("short_tries")
async def test_a_cut_connection_is_unknown_at_once_and_mends_itself(
    proxied: JetStreamStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "APPEND_TRY_S", 100.0)  # it does not wait for its time to end
    chain = journal_of(3)
    tail = await fill(proxied, chain)
    proxy.pause()
    acks = proxy.acks_seen
    append = asyncio.create_task(
        proxied.append(chain.run_id, chain.step_started("cut/0"), expected=tail)
    )
    await eventually(lambda: proxy.acks_seen > acks)
    proxy.cut()
    assert isinstance(await append, Unknown)
    proxy.resume()
    assert len((await proxied.load(chain.run_id, after=tail)).entries) == 1


async def test_a_killed_server_is_found_again(direct: JetStreamStore, server: NatsServer) -> None:
    chain = journal_of(3)
    tail = await fill(direct, chain)
    await server.kill()
    await server.restart()
    entry = chain.completed()

    async def appended() -> Appended | None:
        answer = await direct.append(chain.run_id, entry, expected=tail)
        return answer if isinstance(answer, Appended) else None

    await eventually(appended)
    assert raws(await direct.load(chain.run_id)) == [entry.raw for entry in chain.entries]


async def test_a_cancelled_append_is_cancelled_and_leaves_nothing_waiting(
    proxied: JetStreamStore, proxy: Proxy
) -> None:
    chain = journal_of(2)
    tail = await fill(proxied, chain)
    proxy.pause()
    acks = proxy.acks_seen
    append = asyncio.create_task(
        proxied.append(chain.run_id, chain.step_started("cut/0"), expected=tail)
    )
    await eventually(lambda: proxy.acks_seen > acks)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    assert not proxied._connection._waiting
    proxy.resume()
    assert len((await proxied.load(chain.run_id, after=tail)).entries) == 1


# ---- answers -------------------------------------------------------------------------------------


def answer_of(err_code: int, code: int) -> bytes:
    error = {"code": code, "err_code": err_code, "description": "wrong last sequence: 7"}
    return json.dumps({"error": error, "stream": STREAM, "seq": 0}).encode()


@pytest.mark.parametrize(
    ("err_code", "code"),
    [
        (10164, 400),  # in flight on a cluster
        (10158, 409),
        (10008, 503),
        (10023, 503),
        (10163, 503),
        (10047, 500),
        (10009, 500),
        (10167, 429),
        (10210, 429),
        (10194, 500),
    ],
)
def test_what_may_pass_is_unknown_and_never_a_lost_race(err_code: int, code: int) -> None:
    answer = read_ack(answer_of(err_code, code), stream=STREAM, expected=7)
    assert isinstance(answer, Unknown)
    assert str(err_code) in answer.cause


def test_only_a_wrong_last_sequence_is_a_lost_race() -> None:
    assert read_ack(answer_of(10071, 400), stream=STREAM, expected=7) == Conflict()


@pytest.mark.parametrize(
    ("err_code", "code"), [(10060, 400), (10077, 503), (10165, 400), (10054, 400), (10059, 404)]
)
def test_what_no_retry_settles_is_an_error(err_code: int, code: int) -> None:
    with pytest.raises(StoreUnavailable, match=str(err_code)):
        read_ack(answer_of(err_code, code), stream=STREAM, expected=7)


def test_no_error_code_of_the_server_is_taken_for_a_lost_race() -> None:
    for err_code in range(10000, 10300):
        for code in (400, 404, 409, 412, 429, 500, 503):
            try:
                answer = read_ack(answer_of(err_code, code), stream=STREAM, expected=7)
            except StoreUnavailable:
                continue
            assert not isinstance(answer, Appended)
            assert isinstance(answer, Conflict) == (err_code == 10071)


def test_an_ack_of_another_stream_is_an_error() -> None:
    with pytest.raises(StoreUnavailable, match="OTHER"):
        read_ack(b'{"stream":"OTHER","seq":8}', stream=STREAM, expected=7)


@pytest.mark.parametrize(
    "data",
    [b"", b"+OK", b"[]", b'{"stream":"RUNFOLD_JOURNAL_0","seq":"8"}', b"\xff\xfe"]
    + [b'{"stream":"RUNFOLD_JOURNAL_0","seq":%d}' % seq for seq in (0, 6, 7)],
)
def test_an_answer_that_is_no_ack_of_this_append_is_unknown(data: bytes) -> None:
    assert isinstance(read_ack(data, stream=STREAM, expected=7), Unknown)


def test_an_ack_is_appended_with_its_sequence() -> None:
    ack = b'{"stream":"RUNFOLD_JOURNAL_0","seq":8,"domain":"x"}'
    assert read_ack(ack, stream=STREAM, expected=7) == Appended(8)


@pytest.mark.cluster
async def test_a_cluster_under_contention_never_calls_an_append_in_flight_a_lost_race(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bytes, object]] = []

    def recorded(data: bytes, **known: Any) -> object:
        answer = read_ack(data, **known)
        seen.append((data, answer))
        return answer

    monkeypatch.setattr(jetstream, "read_ack", recorded)
    url = ",".join(cluster.urls)
    await provision(url, namespace=namespace)
    async with JetStreamStore(url, namespace=namespace) as store:
        for number in range(200):
            chain = Chain(f"run-{number}")
            rivals = [chain.rival(f"{index:012x}") for index in range(20)]
            answers = await asyncio.gather(
                *(store.append(chain.run_id, rival.started(), expected=0) for rival in rivals)
            )
            assert sum(isinstance(answer, Appended) for answer in answers) <= 1
            assert len((await store.load(chain.run_id)).entries) == 1
            in_flight = [answer for data, answer in seen if b"10164" in data]
            if number >= 9 and in_flight:
                break
    assert in_flight, "10164 was not provoked"
    assert all(isinstance(answer, Unknown) for answer in in_flight)


@pytest.mark.cluster
async def test_a_journal_stays_whole_through_elections(cluster: Cluster, namespace: str) -> None:
    url = ",".join(cluster.urls)
    await provision(url, namespace=namespace)
    chain = journal_of(40)
    async with JetStreamStore(url, namespace=namespace) as store:
        tail = 0
        for index, entry in enumerate(chain.entries):
            if index in (10, 25):
                await cluster.step_down(f"{namespace.upper()}_JOURNAL_0")
            while True:
                answer = await store.append(chain.run_id, entry, expected=tail)
                if isinstance(answer, Appended):
                    tail = answer.tail
                    break
                new = (await store.load(chain.run_id, after=tail)).entries
                if new:
                    assert [found.raw for found in new] == [entry.raw]
                    tail = new[0].position
                    break
                assert isinstance(answer, Unknown)
        assert raws(await store.load(chain.run_id)) == [entry.raw for entry in chain.entries]


# ---- sizes ---------------------------------------------------------------------------------------


async def test_a_record_near_max_payload_is_stored_or_refused_and_costs_no_connection(
    tmp_path: Path,
) -> None:
    max_payload = 64 * 1024
    server = await NatsServer.start(tmp_path / "small", max_payload=max_payload)
    try:
        await provision(server.url)
        async with JetStreamStore(server.url) as store:
            client = store._connection._nc.client_id
            largest = 0
            for below in range(400, -1, -1):
                chain = Chain(f"run-{below}")
                made = chain.started("")
                fill = "x" * (max_payload - below - len(made.raw))
                entry = Chain(f"run-{below}").started(fill)
                assert len(entry.raw) == max_payload - below
                try:
                    answer = await store.append(chain.run_id, entry, expected=0)
                except TooLarge as refused:
                    assert str(max_payload) in str(refused)
                else:
                    assert isinstance(answer, Appended)
                    assert largest == len(entry.raw) - 1 or largest == 0
                    largest = len(entry.raw)
            headers = (
                b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 0\r\n"
                b"Runfold-Type: run.started\r\nRunfold-Status: running\r\n\r\n"
            )
            assert largest == max_payload - len(headers)  # nothing is refused needlessly
            assert store._connection._nc.client_id == client
            assert store._connection._nc.stats["reconnects"] == 0
    finally:
        await server.stop()


async def test_a_large_journal_is_read_in_bounded_batches(direct: JetStreamStore) -> None:
    chain = Chain()
    chain.started()
    for index in range(20):
        chain.step_started(f"work/{index}")
        chain.step_completed(f"work/{index}", result="x" * 900_000)
    await fill(direct, chain)
    assert raws(await direct.load(chain.run_id)) == [entry.raw for entry in chain.entries]


# ---- reading -------------------------------------------------------------------------------------


def at_record(n: int, act: Callable[[], object]) -> Callable[[bytes], bool]:
    """A match for the proxy that loses nothing: acts once when record n passes."""
    acted = False

    def match(payload: bytes) -> bool:
        nonlocal acted
        if not acted and f'"n":{n},'.encode() in payload:
            acted = True
            act()
        return False

    return match


async def test_a_read_that_loses_its_connection_half_way_goes_on(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy
) -> None:
    chain = journal_of(2_000)
    tail = await fill(direct, chain)
    cut = asyncio.Event()

    def act() -> None:
        proxy.cut()
        cut.set()

    proxy.drop_next_ack(at_record(700, act))
    loaded = await proxied.load(chain.run_id)
    assert cut.is_set()
    assert raws(loaded) == [entry.raw for entry in chain.entries]
    assert loaded.tail == tail


@pytest.mark.usefixtures("short_tries")
async def test_a_read_whose_connection_does_not_come_back_is_an_error_not_a_short_journal(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy
) -> None:
    chain = journal_of(2_000)
    await fill(direct, chain)

    def act() -> None:
        proxy.refuse(True)
        proxy.cut()

    proxy.drop_next_ack(at_record(700, act))
    with pytest.raises(StoreUnavailable):
        await proxied.load(chain.run_id)


async def test_a_pause_in_delivery_is_not_the_end(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream_read, "READ_TRY_S", 0.2)
    chain = journal_of(2_000)
    await fill(direct, chain)
    paused = asyncio.Event()

    def act() -> None:
        proxy.pause()
        paused.set()

    proxy.drop_next_ack(at_record(700, act))
    asked_again = asyncio.Event()
    request = proxied._connection.request

    async def counted(subject: str, *args: Any, **options: Any) -> Any:
        if paused.is_set():
            asked_again.set()
        return await request(subject, *args, **options)

    monkeypatch.setattr(proxied._connection, "request", counted)
    load = asyncio.create_task(proxied.load(chain.run_id))
    await asked_again.wait()  # the batch ended early, and the reader did not take it for the end
    assert not load.done()
    proxy.resume()
    assert raws(await load) == [entry.raw for entry in chain.entries]


@pytest.mark.usefixtures("short_tries")
async def test_a_delivery_that_stays_paused_is_an_error_not_a_short_journal(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy
) -> None:
    chain = journal_of(2_000)
    await fill(direct, chain)
    proxy.drop_next_ack(at_record(700, proxy.pause))
    with pytest.raises(StoreUnavailable, match="could not be read"):
        await proxied.load(chain.run_id)


@pytest.mark.parametrize("lost", [1, 2, 255, 256, 257, 300])
async def test_a_message_lost_from_a_batch_is_read_again(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy, lost: int
) -> None:
    chain = journal_of(300)
    await fill(direct, chain)
    fetched = f'"n":{lost},'.encode()
    dropped = proxy.drop_next_ack(
        lambda payload: payload.startswith(b'{"type"') and fetched in payload
    )
    loaded = await proxied.load(chain.run_id)
    assert dropped.is_set()
    assert raws(loaded) == [entry.raw for entry in chain.entries]


async def test_a_stream_without_direct_gets_is_read_from_its_leader(
    direct: JetStreamStore, server: NatsServer
) -> None:
    chain = journal_of(20)
    await fill(direct, chain)
    info = await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}")
    changed = await ask(
        server.url, f"$JS.API.STREAM.UPDATE.{STREAM}", info["config"] | {"allow_direct": False}
    )
    assert changed["config"]["allow_direct"] is False
    assert raws(await direct.load(chain.run_id)) == [entry.raw for entry in chain.entries]


@pytest.mark.usefixtures("short_tries")
async def test_a_tail_before_what_is_known_is_stale(direct: JetStreamStore) -> None:
    chain = journal_of(3)
    tail = await fill(direct, chain)
    with pytest.raises(StoreUnavailable, match="before"):
        await direct.load(chain.run_id, after=tail + 1)
    with pytest.raises(StoreUnavailable, match="before"):
        await direct.load(RunId("nobody"), after=tail)


async def test_fifty_reads_leave_no_consumer_and_no_subscription(
    direct: JetStreamStore, server: NatsServer
) -> None:
    chain = journal_of(300)
    await fill(direct, chain)
    await direct.load(chain.run_id)
    client = direct._connection._nc
    before = len(client._subs), (await monitor(server.monitor_url, "subsz"))["num_subscriptions"]
    for _ in range(50):
        await direct.load(chain.run_id)
    after = len(client._subs), (await monitor(server.monitor_url, "subsz"))["num_subscriptions"]
    assert after == before
    assert not direct._connection._waiting
    info = await ask(server.url, f"$JS.API.STREAM.INFO.{STREAM}")
    assert info["state"]["consumer_count"] == 0


# ---- journals that are damaged -------------------------------------------------------------------


async def test_a_purged_head_is_found_by_the_fold_and_named(
    direct: JetStreamStore, server: NatsServer
) -> None:
    chain = journal_of(6)
    await fill(direct, chain)
    fourth = (await direct.load(chain.run_id)).entries[3].position
    await ask(
        server.url,
        f"$JS.API.STREAM.PURGE.{STREAM}",
        {"filter": "runfold.journal.0.run-1", "seq": fourth},
    )
    loaded = await direct.load(chain.run_id)
    assert raws(loaded) == [entry.raw for entry in chain.entries[3:]]
    with pytest.raises(Damage, match="record 1 to 3 is missing"):
        Fold().apply(loaded.entries[0])


async def test_a_purge_during_a_read_is_read_as_purged_not_as_damaged(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy
) -> None:
    chain = journal_of(1_999)
    tombstone = chain.purged()
    tail = await fill(direct, chain)
    paused = asyncio.Event()

    def act() -> None:
        proxy.pause()
        paused.set()

    proxy.drop_next_ack(at_record(100, act))
    load = asyncio.create_task(proxied.load(chain.run_id))
    await paused.wait()
    await direct.trim(chain.run_id, before=tail)
    proxy.resume()
    assert raws(await load) == [tombstone.raw]


@pytest.mark.parametrize(
    ("payload", "headers", "why"),
    [
        (b"", {"Nats-Expected-Last-Subject-Sequence": "{tail}"}, "empty"),
        (b"hello", {"Nats-Expected-Last-Subject-Sequence": "{tail}"}, "not a JSON object"),
        (b'{"a":1}', {"Nats-Expected-Last-Subject-Sequence": "{tail}"}, "without a type"),
        (None, {}, "published without"),
        (None, {"nats-expected-last-subject-sequence": "0"}, "published without"),
    ],
    ids=["empty", "foreign", "no record", "no header", "header in lower case"],
)
async def test_a_message_that_no_writer_writes_is_damage_with_its_place(
    direct: JetStreamStore,
    server: NatsServer,
    payload: bytes | None,
    headers: dict[str, str],
    why: str,
) -> None:
    chain = journal_of(3, "run.X")
    tail = await fill(direct, chain)
    data = chain.step_started("foreign/0").raw if payload is None else payload
    async with connected(server.url) as connection:
        reply = await connection.request(
            "runfold.journal.0.run~X",
            data,
            {name: value.format(tail=tail) for name, value in headers.items()},
            timeout_s=5,
        )
        sequence = json.loads(reply.data)["seq"]  # type: ignore[union-attr]
    for after in (0, tail):
        with pytest.raises(JournalDamaged, match=why) as damaged:
            await direct.load(chain.run_id, after=after)
        where = damaged.value.where
        assert where == f"stream {STREAM}, subject runfold.journal.0.run~X, sequence {sequence}"
        assert damaged.value.run_id == "run.X"


async def test_an_unknown_status_word_is_no_status(
    direct: JetStreamStore, server: NatsServer
) -> None:
    chain = Chain()
    entry = chain.started()
    async with connected(server.url) as connection:
        await connection.request(
            "runfold.journal.0.run-1",
            entry.raw,
            {"Nats-Expected-Last-Subject-Sequence": "0", "Runfold-Status": "sleeping"},
            timeout_s=5,
        )
    (loaded,) = (await direct.load(chain.run_id)).entries
    assert loaded == Entry(entry.record, entry.raw, status=None, position=1)


async def test_the_status_comes_back_with_the_record(direct: JetStreamStore) -> None:
    chain = journal_of(2)
    chain.completed()
    await fill(direct, chain)
    loaded = await direct.load(chain.run_id)
    assert [entry.status for entry in loaded.entries] == ["running", "running", "completed"]


async def test_a_stray_subject_is_not_listed_as_a_run(
    direct: JetStreamStore, server: NatsServer
) -> None:
    await fill(direct, journal_of(1))
    await ask(server.url, "runfold.journal.0.$stray", b"x")
    assert [run_id async for run_id in direct.runs()] == ["run-1"]


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
    monkeypatch.setattr(jetstream, "APPEND_TRY_S", 1_000.0)  # at once, not when the time is over
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


async def test_one_server_of_several_is_enough(
    direct: JetStreamStore, server: NatsServer, tmp_path: Path
) -> None:
    gone = await NatsServer.start(tmp_path / "gone")
    await gone.stop()
    for url in (f"{gone.url},{server.url}", f"{server.url}, {gone.url}"):
        async with JetStreamStore(url) as store:
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
    async with JetStreamStore(server.url) as store:
        pass
    with pytest.raises(StoreUnavailable, match="closed"):
        await store.load(RunId("run-1"))


# ---- holders -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("short_tries")
async def test_a_worker_says_what_it_holds(direct: JetStreamStore, server: NatsServer) -> None:
    asked: list[tuple[str, int]] = []

    def held(run_id: RunId, claim: int) -> bool:
        asked.append((run_id, claim))
        return (run_id, claim) == ("run.1", 7)

    async with JetStreamStore(server.url) as other:
        assert await other.ask("w.1", RunId("run.1"), 7) == "nobody"
        async with direct.answering("w.1", held):
            assert await other.ask("w.1", RunId("run.1"), 7) == "yes"
            assert await other.ask("w.1", RunId("run.1"), 8) == "no"
            assert await direct.ask("w.1", RunId("run.1"), 7) == "yes"  # also itself
            assert await other.ask("w_1", RunId("run.1"), 7) == "nobody"
        assert await other.ask("w.1", RunId("run.1"), 7) == "nobody"
    assert asked == [("run.1", 7), ("run.1", 8), ("run.1", 7)]


@pytest.mark.usefixtures("short_tries")
async def test_a_worker_that_does_not_answer_is_silent_not_gone(
    direct: JetStreamStore, server: NatsServer
) -> None:
    async with connected(server.url) as connection:
        await connection._nc.subscribe("runfold.worker.frozen")
        await connection._nc.flush()
        assert await direct.ask("frozen", RunId("run-1"), 1) == "silent"


@pytest.mark.parametrize("worker", ["", "a b", "*", ">", "a\r\nPUB x 0", "é", "x" * 5_000])
async def test_a_worker_name_that_is_none_is_nobody(direct: JetStreamStore, worker: str) -> None:
    assert await direct.ask(worker, RunId("run-1"), 1) == "nobody"


@pytest.mark.usefixtures("short_tries")
async def test_a_worker_whose_answer_fails_keeps_its_run_and_goes_on_answering(
    direct: JetStreamStore, server: NatsServer
) -> None:
    def held(run_id: RunId, claim: int) -> bool:
        if claim == 1:
            raise ZeroDivisionError
        return True

    async with direct.answering("w", held):
        assert await direct.ask("w", RunId("run-1"), 1) == "silent"
        assert await direct.ask("w", RunId("run-1"), 2) == "yes"
        for question in (b"", b"{", b'{"run":1}', b"\xff"):
            assert "error" in await ask(server.url, "runfold.worker.w", question)
        assert await direct.ask("w", RunId("run-1"), 2) == "yes"


async def test_answering_leaves_no_subscription_however_it_ends(direct: JetStreamStore) -> None:
    subscriptions = direct._connection._nc._subs
    before = len(subscriptions)
    with pytest.raises(ZeroDivisionError):
        async with direct.answering("w", lambda run_id, claim: True):
            assert len(subscriptions) == before + 1
            raise ZeroDivisionError
    assert len(subscriptions) == before
