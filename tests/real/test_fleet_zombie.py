"""A worker that stands still past the ack wait, and goes on: it harms nobody (R49, R29)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kit.fleet import Crew, Tap, WorkerProcess, crew_on, instant, tap_on
from kit.proxy import Proxy
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.errors import RunFinished, StaleSignal
from journal.records import Claim, Park, Record, Signal, StepStarted

pytestmark = pytest.mark.real

CONSUMER = ("num_ack_pending", "num_pending", "num_redelivered", "ack_floor", "delivered")


@pytest.fixture
async def crew(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        yield crew


@pytest.fixture
async def tap(nats_server: NatsServer) -> AsyncIterator[Tap]:
    async with tap_on(nats_server.url) as tap:
        yield tap


class Taken(NamedTuple):
    """How a run stood when its successor had it and the zombie still stood still."""

    claim: Claim
    sent: int
    consumer: dict[str, Any]


async def taken_over(crew: Crew, run: str, agent: str, successor: WorkerProcess, tap: Tap) -> Taken:
    claim = await crew.claimed_by(run, successor)
    return Taken(claim, len(tap.sent), await told_of(crew, agent))


async def told_of(crew: Crew, agent: str) -> dict[str, Any]:
    """How the agent's consumer stands, less what the successor's heartbeat changes."""
    consumer = await crew.consumer(agent)
    found = {name: consumer[name] for name in CONSUMER}
    for name in ("ack_floor", "delivered"):
        found[name] = {key: value for key, value in found[name].items() if key != "last_active"}
    return found


async def holds_nothing(crew: Crew, worker: WorkerProcess) -> None:
    async def nothing() -> bool:
        found = await worker.stats()
        return found["held"] == found["works"] == 0

    await eventually(nothing, 20, what=f"{worker.name} holds nothing")


async def knows_it(zombie: WorkerProcess) -> None:
    """It has found that it holds no run any more; a write may still run."""

    async def lost() -> bool:
        found = await zombie.stats()
        return found["held"] == found["lost"]

    await eventually(lost, 20, what=f"{zombie.name} knows that its runs are lost")


async def untouched(crew: Crew, run: str, agent: str, taken: Taken, tap: Tap) -> None:
    """The zombie sent nothing about the successor's message, which is there and held."""
    claim = taken.claim
    assert [one for one in tap.settled(taken.sent) if one[1] == claim.task] == []
    assert await crew.task_left(claim.task)
    assert await told_of(crew, agent) == taken.consumer


def after(records: list[Record], claim: Claim) -> list[Record]:
    return [record for record in records if record.n > claim.n]


async def serves_again(crew: Crew, zombie: WorkerProcess, successor: WorkerProcess) -> None:
    """The zombie is a worker like any other."""
    await successor.kill()
    agents = [
        one["agents"] for one in await crew.fleet.workers(wait_s=0.3) if one["worker"] == zombie.id
    ]
    assert agents, "the zombie answers"
    await crew.start("reader", "next")
    await crew.claimed_by("next", zombie)
    await crew.status("next", "completed")


async def test_a_task_comes_again_to_a_worker_that_lives_not_to_the_zombies_own_pull(
    crew: Crew,
) -> None:
    """The pull of a worker that stands still would be served first, and the task be silent for a
    second ack wait."""
    crew.hold("read")
    zombie = await crew.worker("reader", ack_wait_s=3.0)
    await crew.start("reader", "run")
    await crew.reaches("read", zombie)
    successor = await crew.worker("reader", ack_wait_s=3.0)
    await zombie.freeze()
    claim = await crew.claimed_by("run", successor)
    assert (claim.reason, claim.delivery) == ("redelivery", 2)


async def test_a_zombie_in_a_read_leaves_the_run_and_its_message_to_the_successor(
    crew: Crew, tap: Tap
) -> None:
    crew.hold("read")
    zombie = await crew.worker("reader", url=tap.url)
    await crew.start("reader", "run")
    await crew.reaches("read", zombie)
    await zombie.freeze()
    successor = await crew.worker("reader")
    await crew.reaches("read", successor)
    taken = await taken_over(crew, "run", "reader", successor, tap)
    zombie.thaw()
    await holds_nothing(crew, zombie)
    await untouched(crew, "run", "reader", taken, tap)
    crew.let_go("read")
    run = await crew.status("run", "completed")
    assert run.outcome.message.content == [successor.name, successor.name]
    records = after(await crew.records("run"), taken.claim)
    assert {record.by for record in records} == {successor.id}
    assert len(crew.effects("run")) == 1
    await serves_again(crew, zombie, successor)


async def test_a_zombie_whose_read_ended_meanwhile_records_nothing_of_it(
    crew: Crew, tap: Tap
) -> None:
    crew.hold("read")
    zombie = await crew.worker("reader", url=tap.url)
    await crew.start("reader", "run")
    await crew.reaches("read", zombie)
    await zombie.freeze()
    successor = await crew.worker("reader")
    crew.hold("read", successor)
    await crew.reaches("read", successor)
    taken = await taken_over(crew, "run", "reader", successor, tap)
    crew.let_go("read")  # of the zombie: it goes on to the write as soon as it can
    zombie.thaw()
    await holds_nothing(crew, zombie)
    await untouched(crew, "run", "reader", taken, tap)
    assert crew.effects("run") == [] and crew.reached("between", zombie) == 0
    crew.let_go("read", successor)
    await crew.status("run", "completed")
    assert {r.by for r in after(await crew.records("run"), taken.claim)} == {successor.id}
    assert len(crew.effects("run")) == 1
    await serves_again(crew, zombie, successor)


@pytest.mark.parametrize(("agent", "place"), [("writer", "write"), ("desk", "thread")])
async def test_a_zombies_write_that_did_finish_is_told_and_settles_the_unknown(
    crew: Crew, tap: Tap, agent: str, place: str
) -> None:
    crew.hold(place)
    zombie = await crew.worker(agent, "reader", url=tap.url)
    await crew.start(agent, "run")
    await crew.reaches(place, zombie)
    await zombie.freeze()
    successor = await crew.worker(agent, "reader")
    taken = await taken_over(crew, "run", agent, successor, tap)
    await crew.status("run", "indeterminate")
    crew.let_go(place)
    zombie.thaw()
    await crew.status("run", "completed", timeout_s=10)
    records = await crew.records("run")
    (late,) = [record for record in records if isinstance(record, Signal)]
    assert (late.name, late.by) == ("late", zombie.id)
    assert late.payload["result"] == f"by {zombie.name}"
    (first, *_) = await crew.claims("run")
    assert [r for r in after(records, taken.claim) if r.claim == first.n] == []
    assert len(crew.effects("run")) == 1 and crew.reached(place) == 1
    assert [one for one in tap.settled(taken.sent) if one[1] == taken.claim.task] == []
    await holds_nothing(crew, zombie)
    await serves_again(crew, zombie, successor)


async def test_a_zombies_write_that_is_still_running_changes_nothing(crew: Crew, tap: Tap) -> None:
    crew.hold("write")
    zombie = await crew.worker("writer", "reader", url=tap.url)
    await crew.start("writer", "run")
    await crew.reaches("write", zombie)
    await zombie.freeze()
    successor = await crew.worker("writer", "reader")
    taken = await taken_over(crew, "run", "writer", successor, tap)
    await crew.status("run", "indeterminate")
    before = await crew.records("run")
    zombie.thaw()
    await knows_it(zombie)
    assert [one for one in tap.settled(taken.sent) if one[1] == taken.claim.task] == []
    assert await crew.records("run") == before
    assert crew.effects("run") == [] and crew.reached("write") == 1
    await crew.fleet.signal(
        "run", "reconcile", {"step": "0/0", "outcome": "done", "result": "by me"}
    )
    run = await crew.status("run", "completed")
    assert run.outcome.message.content == "by me" and crew.effects("run") == []
    crew.let_go("write")
    await holds_nothing(crew, zombie)
    assert [one for one in tap.settled(taken.sent) if one[1] == taken.claim.task] == []
    (first, *_) = await crew.claims("run")  # it may work the woken run, like any other worker
    assert [r for r in after(await crew.records("run"), taken.claim) if r.claim == first.n] == []
    await serves_again(crew, zombie, successor)


async def test_a_permitted_retry_does_not_run_beside_the_write_of_a_zombie(
    crew: Crew, tap: Tap
) -> None:
    agent, place, step = "desk", "thread", "tool/1/0/ticket"
    zombie = crew.begin_worker(agent, "reader", url=tap.url)
    crew.hold(place, zombie)
    await zombie.ready()
    await crew.start(agent, "run")
    await crew.reaches(place, zombie)
    await zombie.freeze()
    successor = await crew.worker(agent, "reader")
    claim, sent = await crew.claimed_by("run", successor), len(tap.sent)
    await crew.status("run", "indeterminate")
    zombie.thaw()
    await knows_it(zombie)
    await crew.fleet.signal("run", "reconcile", {"step": step, "outcome": "retry"})

    async def put_off() -> int:
        records = await crew.records("run")
        assert crew.reached(place) == 1, records  # by nobody: not by the zombie itself either
        return sum(isinstance(r, Park) and r.why == "retry" for r in records)

    await eventually(put_off, what="the retry is put off")
    for _ in range(2):  # a person has somebody look again
        before = await put_off()
        await crew.fleet.signal("run", "resume", {})

        async def again(before: int = before) -> bool:
            return await put_off() > before

        await eventually(again, what="and put off again")
    assert [one for one in tap.settled(sent) if one[1] == claim.task] == []
    crew.let_go(place, zombie)

    async def made() -> bool:
        with contextlib.suppress(StaleSignal, RunFinished):
            await crew.fleet.signal("run", "resume", {})
        return (await crew.fleet.get("run")).status == "completed"

    await eventually(made, 20, what="the zombie says that it has ended")
    assert [(name, of) for name, of, _ in crew.effects("run")] == [("run", step)]
    await serves_again(crew, zombie, successor)


# ---- while committing ----------------------------------------------------------------------------


async def test_a_zombie_that_stood_before_its_last_record_adds_nothing_to_the_ended_run(
    crew: Crew, tap: Tap
) -> None:
    crew.hold("append")
    zombie = await crew.worker("reader", url=tap.url, hold_append="run.completed")
    await crew.start("reader", "run")
    await crew.reaches("append", zombie)
    await zombie.freeze()
    successor = await crew.worker("reader")
    taken = await taken_over(crew, "run", "reader", successor, tap)
    run = await crew.status("run", "completed")
    assert run.outcome.message.content == [zombie.name, zombie.name]
    before = await crew.records("run")
    crew.let_go("append")
    zombie.thaw()
    await holds_nothing(crew, zombie)
    assert await crew.records("run") == before
    assert {r.by for r in after(before, taken.claim)} == {successor.id}
    assert [one for one in tap.settled(taken.sent) if one[1] == taken.claim.task] == []
    assert len(crew.effects("run")) == 1
    await serves_again(crew, zombie, successor)


@pytest.mark.parametrize(
    ("agent", "type_", "settled"),
    [
        ("reader", "run.completed", "completed"),
        ("asker", "park", "awaiting_approval"),
        ("waiter", "commit", "waiting"),
    ],
)
async def test_a_zombie_whose_last_record_landed_without_its_ack_harms_no_successor(
    crew: Crew, nats_server: NatsServer, agent: str, type_: str, settled: str
) -> None:
    """The server's answer is held back while the worker stands still; meanwhile another worker
    finds the record, and goes on with what comes after it."""
    proxy = await Proxy.start(nats_server.url)
    async with tap_on(proxy.url) as tap:
        crew.hold("append")
        agents = {agent, "reader"}
        zombie = await crew.worker(*agents, url=tap.url, hold_append=type_)
        await crew.start(agent, "run")
        await crew.reaches("append", zombie)
        proxy.pause()
        crew.let_go("append")
        await crew.status("run", settled)  # it landed
        await zombie.freeze()
        sent = len(tap.sent)
        (first,) = await crew.claims("run")
        proxy.resume()

        successor = await crew.worker(*agents)

        async def hint_followed() -> bool:
            return not await crew.task_left(first.task)

        await eventually(hint_followed, 30, what="the message is settled by the successor")
        if agent == "asker":
            crew.hold("append", successor)
            run = await crew.fleet.get("run")
            marker = run.outcome.pending[0].marker
            await crew.fleet.signal("run", "approve", {"marker": marker})
        elif agent == "waiter":
            await crew.fleet.send("run", "hello", request_id="hello")
        await crew.status("run", "completed")
        before = await crew.records("run")
        zombie.thaw()
        await holds_nothing(crew, zombie)
        assert await crew.records("run") == before
        claims = await crew.claims("run")
        assert [claim.worker for claim in claims[1:]] == [successor.id] * (agent != "reader")
        sequences = {claim.task for claim in claims[1:]}
        assert [one for one in tap.settled(sent) if one[1] in sequences] == []
        assert len(crew.effects("run")) == (0 if agent == "waiter" else 1)
        parks = [record for record in before if isinstance(record, Park)]
        assert len(parks) == (1 if agent == "asker" else 0)
        starts = [r for r in before if isinstance(r, StepStarted) and r.replay == "unsafe"]
        assert len(starts) == len(crew.effects("run"))
        await serves_again(crew, zombie, successor)
    await proxy.stop()


async def test_a_zombie_that_sets_the_alarm_of_a_wait_that_is_over_does_not_lose_the_next_one(
    crew: Crew, nats_server: NatsServer
) -> None:
    """It pays what its commit owed once it goes on: that replaces the run's only timer."""
    proxy = await Proxy.start(nats_server.url)
    async with tap_on(proxy.url) as tap:
        crew.hold("append")
        zombie = await crew.worker("sleeper", url=tap.url, hold_append="commit", sweep_s=3600)
        await crew.start("sleeper", "run", {"delay_s": 2.0, "turns": 2})
        await crew.reaches("append", zombie)
        proxy.pause()
        crew.let_go("append")
        await crew.until("run", lambda run: run.iteration == 1)
        await zombie.freeze()
        sent = len(tap.sent)
        proxy.resume()
        successor = await crew.worker("sleeper", sweep_s=3600)
        await crew.until("run", lambda run: run.iteration == 2)
        zombie.thaw()
        await eventually(lambda: b".timer.run" in tap.sent[sent:], what="the zombie pays")
        await crew.status("run", "completed", timeout_s=20)
        claims = await crew.claims("run")
        assert [claim.reason for claim in claims] == ["new", "wake", "wake"], successor.log
        commits = [record for record in await crew.records("run") if record.n in (3, 5)]
        assert instant(claims[1]) - instant(commits[0]) >= 1.99
        assert instant(claims[2]) - instant(commits[1]) >= 1.99
        assert len(crew.effects("run")) == 1
    await proxy.stop()
