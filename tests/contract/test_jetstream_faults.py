"""What an append promises when acks, connections or servers go missing (R12, R17, UR-09)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from kit.proxy import Proxy
from kit.records import Chain, fill, journal_of, raws
from kit.servers import Cluster, NatsServer
from kit.waiting import eventually

from journal.errors import (
    TooLarge,
)
from journal.store import Appended, Conflict, Unknown
from journal.stores import jetstream_lane
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_answers import read_ack
from journal.stores.provision import provision

STREAM = "RUNFOLD_JOURNAL_0"


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
    server.pause()
    entry = chain.step_started("late/0")
    while isinstance(answer := await direct.append(chain.run_id, entry, expected=tail), Appended):
        tail = answer.tail  # not paused yet: the signal is not waited for
        entry = chain.step_started(f"late/{tail}")
    for _ in range(2):
        assert isinstance(answer, Unknown)
        answer = await direct.append(chain.run_id, entry, expected=tail)
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
    monkeypatch.setattr(jetstream_lane, "APPEND_TRY_S", 100.0)  # it does not wait so long
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
    if jetstream_lane.commit_wanted() != "on":  # a batch waits on, for the others in it
        assert not proxied._connection._waiting
    proxy.resume()
    assert len((await proxied.load(chain.run_id, after=tail)).entries) == 1


@pytest.mark.cluster
async def test_a_cluster_under_contention_never_calls_an_append_in_flight_a_lost_race(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNFOLD_GROUP_COMMIT", "off")
    seen: list[tuple[bytes, object]] = []

    def recorded(data: bytes, **known: Any) -> object:
        answer = read_ack(data, **known)
        seen.append((data, answer))
        return answer

    monkeypatch.setattr(jetstream_lane, "read_ack", recorded)
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
            refused: list[TooLarge] = []
            largest = 0
            for below in range(400, -1, -1):
                chain = Chain(f"run-{below}")
                made = chain.started("")
                entry = Chain(f"run-{below}").started("x" * (max_payload - below - len(made.raw)))
                assert len(entry.raw) == max_payload - below
                try:
                    answer = await store.append(chain.run_id, entry, expected=0)
                except TooLarge as error:
                    refused.append(error)
                else:
                    assert isinstance(answer, Appended)
                    assert largest == len(entry.raw) - 1 or largest == 0
                    largest = len(entry.raw)
            headers = (
                b"NATS/1.0\r\nNats-Expected-Last-Subject-Sequence: 0\r\n"
                b"Runfold-Type: run.started\r\nRunfold-Status: running\r\n\r\n"
            )
            assert all(str(max_payload) in str(error) for error in refused)
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
