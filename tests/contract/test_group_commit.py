"""Group commit: many runs' records in one atomic batch, and what becomes of each when the batch is
refused, unanswered, late or cut off (PROTOCOL 3, R81)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from kit.proxy import Proxy
from kit.records import Chain, fill, raws
from kit.servers import Cluster, NatsServer
from kit.waiting import eventually

from journal.codec import Entry
from journal.errors import StoreUnavailable
from journal.fold import Fold
from journal.ids import RunId
from journal.log import Log
from journal.records import RunStarted
from journal.steps import input_digest
from journal.store import AppendAnswer, Appended, Conflict, RawRecord, Unknown
from journal.stores import jetstream_lane
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_headers import HeaderCheck
from journal.stores.jetstream_lane import BATCH_COMMIT, BATCH_ID, BATCH_SEQUENCE
from journal.stores.jetstream_streams import stream_name
from journal.stores.provision import provision
from journal.stores.stream_lookup import call, look_up

RUNS = 20


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNFOLD_GROUP_COMMIT", "on")


def starts(count: int = RUNS) -> list[Chain]:
    """Runs with their first record made."""
    chains = [Chain(f"run-{number}") for number in range(count)]
    for chain in chains:
        chain.started()
    return chains


async def append(store: JetStreamStore, chain: Chain, expected: int = 0) -> AppendAnswer:
    return await store.append(chain.run_id, chain.entries[-1], expected=expected)


async def appended(store: JetStreamStore, chains: Sequence[Chain]) -> list[AppendAnswer]:
    """All in one turn of the loop."""
    return await asyncio.gather(*(append(store, chain) for chain in chains))


async def stored(store: JetStreamStore, run_id: RunId) -> list[RawRecord]:
    return [record async for page in store.stored(run_id) for record in page]


async def batches(store: JetStreamStore, chains: Sequence[Chain]) -> list[str]:
    """In which batch each run's last record came; "" alone."""
    found = [(await stored(store, chain.run_id))[-1] for chain in chains]
    return [(record.headers or {}).get(BATCH_ID, "") for record in found]


async def check_once(store: JetStreamStore, chains: Sequence[Chain]) -> None:
    for chain in chains:
        assert raws(await store.load(chain.run_id)) == [entry.raw for entry in chain.entries]


async def definite(store: JetStreamStore, run_id: RunId, entry: Entry, expected: int = 0) -> None:
    async def known() -> bool:
        return not isinstance(await store.append(run_id, entry, expected=expected), Unknown)

    await eventually(known)


# ---- what goes well ------------------------------------------------------------------------------


async def check_own_sequences(store: JetStreamStore) -> None:
    chains = starts()
    answers = await appended(store, chains)
    for chain, answer in zip(chains, answers, strict=True):
        assert isinstance(answer, Appended)
        (entry,) = (await store.load(chain.run_id)).entries
        assert entry.position == answer.tail
    ids = set(await batches(store, chains))
    assert len(ids) == 1 and ids != {""}
    for chain, answer in zip(chains, answers, strict=True):
        assert isinstance(answer, Appended)
        chain.steps(1)
        assert isinstance(await append(store, chain, answer.tail), Appended)
    await check_once(store, chains)


async def test_each_record_of_a_batch_has_its_own_sequence(direct: JetStreamStore) -> None:
    await check_own_sequences(direct)


@pytest.mark.cluster
async def test_each_record_of_a_batch_has_its_own_sequence_on_three_servers(
    cluster: Cluster, namespace: str
) -> None:
    url = ",".join(cluster.urls)
    await provision(url, namespace=namespace)
    async with JetStreamStore(url, namespace=namespace) as store:
        chains = starts()
        answers = await appended(store, chains)
        tails = {answer.tail for answer in answers if isinstance(answer, Appended)}
        assert tails == set(range(1, RUNS + 1))
        await check_once(store, chains)
        assert len(set(await batches(store, chains))) == 1
        taken, *others = chains
        for chain in others:
            chain.steps(1)
        expected = [0, *(a.tail for a in answers[1:] if isinstance(a, Appended))]
        again = await asyncio.gather(*map(append, [store] * RUNS, [taken, *others], expected))
        assert not isinstance(again[0], Appended)
        for chain, tail in zip(others, expected[1:], strict=True):
            await definite(store, chain.run_id, chain.entries[-1], tail)
        await check_once(store, chains)


async def test_the_headers_of_records_in_a_batch_say_what_they_say_alone(
    direct: JetStreamStore,
) -> None:
    async def run(number: int) -> None:
        log = Log(direct, RunId(f"run-{number}"), by="test")
        await log.append(lambda fold: started(log))

    await asyncio.gather(*map(run, range(RUNS)))
    for number in range(RUNS):
        check = HeaderCheck()
        records = await stored(direct, RunId(f"run-{number}"))
        assert [text for record in records for text in check.broken(record)] == []
        headers = dict(records[0].headers or {})
        for name in (BATCH_ID, BATCH_SEQUENCE):
            assert headers.pop(name)
        assert (headers.pop(BATCH_COMMIT, None) == "1") == (number == RUNS - 1)
        names = {name for name in headers if not name.startswith("Nats-")}
        assert names == {"Runfold-Type", "Runfold-Status"}


def started(log: Log) -> RunStarted:
    digest = input_digest("a", "hello")
    return RunStarted(run=log.run_id, agent="a", revision="r", input="hello", digest=digest)


async def test_a_second_record_of_a_run_waits_for_the_next_group(direct: JetStreamStore) -> None:
    chain = Chain("twice")
    rivals = [chain, chain.rival(), *starts(5)]
    rivals[0].started()
    rivals[1].started()
    answers = await appended(direct, rivals)
    assert [isinstance(answer, Appended) for answer in answers] == [True, False] + [True] * 5
    await check_once(direct, [chain, *rivals[2:]])
    together = await batches(direct, [chain, *rivals[2:]])
    assert len(set(together)) == 1 and "" not in together  # nobody's batch was refused over it


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 7, RUNS - 1])
async def test_only_the_loser_of_a_refused_batch_loses(direct: JetStreamStore, lost: int) -> None:
    chains = starts()
    rival = Chain(f"run-{lost}", nonce="ba9876543210")
    rival.started()
    await fill(direct, rival)
    answers = await appended(direct, chains)
    assert answers[lost] == Conflict()
    del answers[lost], chains[lost]
    assert all(isinstance(answer, Appended) for answer in answers)
    await check_once(direct, [*chains, rival])
    assert set(await batches(direct, chains)) == {""}  # each alone, after the refusal


async def test_two_that_batch_against_each_other_share_each_tail_once(
    direct: JetStreamStore, server: NatsServer
) -> None:
    async with JetStreamStore(server.url) as other:
        chains = starts()
        tails = [await fill(direct, chain) for chain in chains]
        for _ in range(6):
            rivals = [chain.rival() for chain in chains]
            for chain, rival in zip(chains, rivals, strict=True):
                chain.steps(1)
                rival.steps(1)
            both = await asyncio.gather(
                *(append(direct, chain, tail) for chain, tail in zip(chains, tails, strict=True)),
                *(append(other, rival, tail) for rival, tail in zip(rivals, tails, strict=True)),
            )
            for index, (chain, rival) in enumerate(zip(chains, rivals, strict=True)):
                answers = both[index], both[RUNS + index]
                (landed,) = (await direct.load(chain.run_id, after=tails[index])).entries
                won = [isinstance(answer, Appended) for answer in answers]
                assert won == [landed.raw == one.entries[-1].raw for one in (chain, rival)]
                tails[index] = landed.position
                chains[index] = chain if won[0] else rival
        await check_once(direct, chains)


# ---- what has no answer --------------------------------------------------------------------------


@pytest.mark.usefixtures("short_tries")
async def test_a_lost_ack_of_a_batch_is_unknown_to_each_and_each_is_there_once(
    proxied: JetStreamStore, proxy: Proxy
) -> None:
    chains = starts()
    dropped = proxy.drop_next_ack()
    answers = await appended(proxied, chains)
    assert dropped.is_set()
    assert all(isinstance(answer, Unknown) for answer in answers)
    await check_once(proxied, chains)
    assert await appended(proxied, chains) == [Conflict()] * RUNS  # the honest retry
    await check_once(proxied, chains)


@pytest.mark.usefixtures("short_tries")
async def test_a_writer_whose_batch_has_no_answer_goes_on_from_what_landed(
    proxied: JetStreamStore, proxy: Proxy
) -> None:
    logs = [Log(proxied, RunId(f"run-{number}"), by="test") for number in range(RUNS)]

    async def start(log: Log) -> None:
        def decide(fold: Fold) -> RunStarted | None:
            return started(log) if fold.started is None else None

        assert await log.append(decide) is not None

    dropped = proxy.drop_next_ack()
    await asyncio.gather(*map(start, logs))
    assert dropped.is_set()
    for log in logs:
        loaded = await proxied.load(log.run_id)
        assert (len(loaded.entries), loaded.tail) == (1, log.tail)


@pytest.mark.usefixtures("short_tries")
async def test_a_server_that_is_killed_before_the_commit_stores_nothing_of_the_batch(
    direct: JetStreamStore, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = starts()
    connection = direct._connection
    request = connection.request
    killed: list[str] = []

    async def killing(subject: str, payload: bytes, headers: Any = None, **more: Any) -> Any:
        if headers and BATCH_COMMIT in headers and not killed:
            killed.append(subject)
            await server.kill()
            await server.restart()
        return await request(subject, payload, headers, **more)

    monkeypatch.setattr(connection, "request", killing)
    await appended(direct, chains)
    assert len(killed) == 1
    for chain in chains:
        await definite(direct, chain.run_id, chain.entries[-1])
    await check_once(direct, chains)


@pytest.mark.usefixtures("short_tries")
async def test_a_batch_to_a_frozen_server_may_land_later_and_never_twice(
    direct: JetStreamStore, server: NatsServer
) -> None:
    chains = starts()
    server.pause()
    for _ in range(2):
        answers = await appended(direct, chains)
        assert all(isinstance(answer, Unknown) for answer in answers)
    server.resume()
    for chain in chains:
        await definite(direct, chain.run_id, chain.entries[-1])
    await check_once(direct, chains)


@pytest.mark.usefixtures("short_tries")
async def test_an_acknowledgement_of_another_count_is_unknown(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fewer(data: bytes, **known: Any) -> Any:
        return read_batch_ack(data.replace(b'"count":20', b'"count":19'), **known)

    read_batch_ack = jetstream_lane.read_batch_ack
    monkeypatch.setattr(jetstream_lane, "read_batch_ack", fewer)
    chains = starts()
    assert all(isinstance(answer, Unknown) for answer in await appended(direct, chains))
    await check_once(direct, chains)


# ---- waiting in the lane -------------------------------------------------------------------------


async def test_what_waits_for_an_unanswered_batch_goes_alone_before_long(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy
) -> None:
    batched, late = starts(3), Chain("late")
    late.started()
    proxy.pause()
    sending = asyncio.create_task(appended(proxied, batched))
    await eventually(lambda: proxied._shards[0].lane._committing)
    waiting = asyncio.create_task(append(proxied, late))

    async def there() -> bool:
        return bool((await direct.load(late.run_id)).entries)

    await eventually(there)
    assert not sending.done()
    proxy.resume()
    assert isinstance(await waiting, Appended)
    assert all(isinstance(answer, Appended) for answer in await sending)
    assert await batches(direct, [late]) == [""]


async def test_what_is_cancelled_while_it_waits_is_never_sent(
    proxied: JetStreamStore, proxy: Proxy
) -> None:
    batched, given_up = starts(3), Chain("given-up")
    given_up.started()
    proxy.pause()
    sending = asyncio.create_task(appended(proxied, batched))
    await eventually(lambda: proxied._shards[0].lane._committing)
    waiting = asyncio.create_task(append(proxied, given_up))
    await asyncio.sleep(0)  # it is in the lane now
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    proxy.resume()
    assert all(isinstance(answer, Appended) for answer in await sending)
    chains = starts(4)[3:]
    await appended(proxied, chains)
    assert (await proxied.load(given_up.run_id)).entries == ()
    places = proxied._shards[0].lane._grouping
    assert places is not None and not any(places.places.values())


async def test_one_cancelled_in_a_batch_leaves_the_others_to_it(
    proxied: JetStreamStore, proxy: Proxy
) -> None:
    chains = starts()
    proxy.pause()
    appends = [asyncio.create_task(append(proxied, chain)) for chain in chains]
    await eventually(lambda: proxied._shards[0].lane._committing)
    appends[3].cancel()
    with pytest.raises(asyncio.CancelledError):
        await appends.pop(3)
    proxy.resume()
    assert all([isinstance(await one, Appended) for one in appends])
    await check_once(proxied, chains)  # what was sent may land


async def test_one_cancelled_in_a_batch_that_is_refused_is_forgotten(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy
) -> None:
    chains = starts()
    rival = Chain("run-0", nonce="ba9876543210")
    rival.started()
    await fill(direct, rival)
    proxy.pause()
    appends = [asyncio.create_task(append(proxied, chain)) for chain in chains]
    await eventually(lambda: proxied._shards[0].lane._committing)
    appends[3].cancel()
    await asyncio.wait([appends.pop(3)])
    proxy.resume()
    assert [isinstance(await one, Appended) for one in appends] == [False] + [True] * (RUNS - 2)
    assert (await direct.load(chains[3].run_id)).entries == ()
    grouping = proxied._shards[0].lane._grouping
    assert grouping is not None and not any(grouping.places.values())


async def test_a_closed_connection_tells_everybody_in_the_lane(
    proxied: JetStreamStore, proxy: Proxy
) -> None:
    proxy.pause()
    sending = asyncio.create_task(appended(proxied, starts()))
    await eventually(lambda: proxied._shards[0].lane._committing)
    await proxied._connection.close()
    assert all(isinstance(answer, Unknown) for answer in await sending)
    with pytest.raises(StoreUnavailable):
        await append(proxied, starts()[0])


async def test_a_record_that_a_batch_would_make_too_large_goes_alone(
    direct: JetStreamStore,
) -> None:
    chain = Chain("large")
    limit = direct._connection.max_payload
    entry = chain.started("x" * (limit - 500))
    chain = Chain("large")
    entry = chain.started("x" * (2 * limit - 500 - len(entry.raw) - 150))
    assert limit - 200 < len(entry.raw) < limit - 130  # with its own headers, not with more
    others = starts(3)
    answers = await appended(direct, [chain, *others])
    assert all(isinstance(answer, Appended) for answer in answers)
    alone, *batched = await batches(direct, [chain, *others])
    assert alone == "" and len(set(batched)) == 1


# ---- the switch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["off", "auto", ""])
async def test_few_appends_go_alone_unless_it_is_on(
    direct: JetStreamStore, server: NatsServer, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    monkeypatch.setenv("RUNFOLD_GROUP_COMMIT", choice)
    async with JetStreamStore(server.url) as store:
        chains = starts(5)
        await appended(store, chains)
        assert await batches(store, chains) == [""] * 5


async def test_a_choice_that_is_none_is_refused(
    direct: JetStreamStore, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNFOLD_GROUP_COMMIT", "yes")
    with pytest.raises(StoreUnavailable, match="RUNFOLD_GROUP_COMMIT is 'yes'") as refused:
        await JetStreamStore(server.url).__aenter__()
    assert refused.value.hint == "it is auto, on or off"


async def test_a_stream_that_takes_no_batches_gets_none_and_it_is_said(
    direct: JetStreamStore,
    server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = stream_name("runfold")
    info = await look_up(direct._connection, name)
    assert info is not None
    changed = json.dumps(info.config | {"allow_atomic": False}).encode()
    answer = await call(direct._connection, f"$JS.API.STREAM.UPDATE.{name}", changed)
    assert answer.error is None
    async with JetStreamStore(server.url) as store:
        chains = starts(5)
        assert all(isinstance(answer, Appended) for answer in await appended(store, chains))
        assert await batches(store, chains) == [""] * 5
    said = [record.getMessage() for record in caplog.records if "allow_atomic" in record.message]
    assert len(said) == 1 and name in said[0]
    # One that was changed since it was opened: each append goes alone when its batch is refused.
    assert all(isinstance(answer, Appended) for answer in await appended(direct, starts(7)[5:]))
