"""A load is whole, or an error that names what is missing (R13)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kit.backends import REAL_ONLY
from kit.proxy import Proxy
from kit.raw_client import ask
from kit.records import Chain, fill, journal_of, raws
from kit.servers import NatsServer, monitor

from journal.codec import Damage, Entry
from journal.errors import (
    JournalDamaged,
    StoreUnavailable,
)
from journal.fold import Fold
from journal.ids import RunId
from journal.stores import jetstream_read
from journal.stores.jetstream import JetStreamStore

STREAM = "RUNFOLD_JOURNAL_0"


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


@REAL_ONLY
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
    given = {name: value.format(tail=tail) for name, value in headers.items()}
    sequence = (await ask(server.url, "runfold.journal.0.run~X", data, given))["seq"]
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
    headers = {"Nats-Expected-Last-Subject-Sequence": "0", "Runfold-Status": "sleeping"}
    await ask(server.url, "runfold.journal.0.run-1", entry.raw, headers)
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
