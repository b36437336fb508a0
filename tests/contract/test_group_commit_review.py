"""Group commit: what a batch must not cost those that only happen to be in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.proxy import Proxy
from kit.records import Chain, fill
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.errors import PermissionDenied
from journal.grouping import Grouping, _Load
from journal.store import AppendAnswer, Appended, Conflict
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_streams import subject_prefix
from journal.stores.provision import provision

RUNS = 6


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNFOLD_GROUP_COMMIT", "on")


def starts() -> list[Chain]:
    chains = [Chain(f"run-{number}") for number in range(RUNS)]
    for chain in chains:
        chain.started()
    return chains


async def append(store: JetStreamStore, chain: Chain) -> AppendAnswer:
    return await store.append(chain.run_id, chain.entries[-1], expected=0)


async def appended(
    store: JetStreamStore, chains: list[Chain]
) -> list[AppendAnswer | BaseException]:
    return await asyncio.gather(*(append(store, chain) for chain in chains), return_exceptions=True)


# ---- one that was given up -----------------------------------------------------------------------


async def test_one_given_up_in_a_batch_that_is_refused_is_counted_nowhere(
    proxied: JetStreamStore, direct: JetStreamStore, proxy: Proxy
) -> None:
    """Else each such stays among those on their way for ever, and a few let one run alone pass for
    many."""
    rival = Chain("run-0", nonce="ba9876543210")
    rival.started()
    await fill(direct, rival)
    lane = proxied._shards[0].lane
    proxy.pause()
    appends = [asyncio.create_task(append(proxied, chain)) for chain in starts()]
    await eventually(lambda: lane._committing)
    appends[3].cancel()
    with pytest.raises(asyncio.CancelledError):
        await appends.pop(3)
    proxy.resume()
    await asyncio.gather(*appends)
    assert lane._grouping is not None
    assert not any(lane._grouping.places.values()), lane._grouping.places


async def test_a_run_that_lost_goes_alone_until_it_is_stored_again(
    proxied: JetStreamStore, direct: JetStreamStore
) -> None:
    """Else a run that others write to, too, would have batch after batch refused."""
    chains = starts()
    rival = Chain("run-0", nonce="ba9876543210")
    rival.started()
    await fill(direct, rival)
    lane = proxied._shards[0].lane
    first = await appended(proxied, chains)
    assert isinstance(first.pop(0), Conflict) and all(isinstance(one, Appended) for one in first)
    batches = next(lane._batches)
    assert isinstance(await append(proxied, chains[0]), Conflict)
    assert next(lane._batches) == batches + 1, "no batch was made for it"
    rival.claimed()
    tail = await direct.tail(rival.run_id)
    entry = rival.entries[-1]
    assert isinstance(await proxied.append(rival.run_id, entry, expected=tail), Appended)
    assert next(lane._batches) == batches + 2, "it went alone once more"
    assert not lane._apart


# ---- one that can't be sent ----------------------------------------------------------------------


@pytest.fixture
async def denying(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[NatsServer]:
    """A server whose user `some` may not write to one run."""
    denied = f"{subject_prefix('runfold', 0)}run-{request.param}"
    server = await NatsServer.start(
        tmp_path / "denying",
        extra_conf=(
            "authorization { users: [{user: all, password: x}, {user: some, password: x, "
            f'permissions: {{publish: {{deny: ["{denied}"]}}}}}}] }}'
        ),
    )
    yield server
    await server.stop()


@pytest.mark.parametrize("denying", [0, 2, RUNS - 1], indirect=True)
async def test_a_run_that_may_not_be_written_costs_no_other_its_record(
    denying: NatsServer, request: pytest.FixtureRequest
) -> None:
    place = request.node.callspec.params["denying"]
    address = denying.url.removeprefix("nats://")
    await provision(f"nats://all:x@{address}")
    async with JetStreamStore(f"nats://some:x@{address}") as store:
        answers = await appended(store, starts())
    assert isinstance(answers.pop(place), PermissionDenied)
    assert all(isinstance(answer, Appended) for answer in answers), answers


# ---- what is measured ----------------------------------------------------------------------------


def replied(load: _Load, now: float, alone_s: float, batch_s: float, at_once: int = 64) -> float:
    """All that go at once, the way that is due; when they are answered."""
    took_s = alone_s if load.way == "alone" else batch_s
    measurement = load.measurement
    for _ in range(at_once):
        load.tell(measurement, took_s, now + took_s)
    return now + took_s


@pytest.mark.parametrize(("alone_s", "batch_s"), [(0.002, 0.015), (0.015, 0.004)])
def test_a_stall_is_forgotten_in_a_minute(alone_s: float, batch_s: float) -> None:
    """Of the server, or of this process's loop: a stall in any measurement, also in a trial."""
    better = "alone" if alone_s < batch_s else "batch"
    for calm in range(1, 40):  # cohorts before it
        load, now = Grouping()._load(64), 0.0
        for _ in range(calm):
            now = replied(load, now, alone_s, batch_s)
        now = replied(load, now, 2.0, 2.0)
        over_at, spent = now, Counter[str]()
        while now < over_at + 90.0:
            way, began = load.way, now
            now = replied(load, now, alone_s, batch_s)
            if now > over_at + 60.0:
                spent[way] += now - began
        assert spent[better] > 0.8 * spent.total(), (calm, spent)
