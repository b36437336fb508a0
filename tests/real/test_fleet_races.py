"""Signals and inputs against a run that parks, wakes and parks again: none is lost, none counts
twice, the run never gets stuck (R60-R62)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kit.fleet import Crew, crew_on, zygote
from kit.fleet_agents import Outcome
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.records import (
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    Park,
    RunCompleted,
    Signal,
    StepCompleted,
    StepStarted,
)

pytestmark = pytest.mark.real
REQUESTS = 1000
INPUTS = 500


@pytest.fixture
async def crew(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        yield crew


async def told(crew: Crew, run: str, function: str, **arguments: Any) -> list[Outcome]:
    """What a process that sends something to the run says of each request."""
    child = zygote().call(
        f"kit.fleet_agents:{function}",
        url=crew.url,
        namespace=crew.namespace,
        run=run,
        **arguments,
    )
    await eventually(child.ended.is_set, 120, what=f"{function} ends")
    done = child.wait()
    assert done.code == 0, done
    return [Outcome(*one) for one in done.json]


async def test_of_a_thousand_signals_and_inputs_racing_parking_runs_none_is_lost_or_counts_twice(
    crew: Crew,
) -> None:
    for _ in range(2):
        await crew.worker("parker", ack_wait_s=5.0, sweep_s=3600)
    total = 0
    for number in itertools.count():
        total += await one_race(crew, f"raced-{number}")
        if total >= REQUESTS:
            break


async def one_race(crew: Crew, run: str) -> int:
    """How many requests were made; each is accounted for."""
    await crew.start("parker", run)
    began = time.monotonic()
    deciding = [
        asyncio.create_task(told(crew, run, "decide_many", at_once=2, name=name)) for name in "ab"
    ]
    inputs = await told(crew, run, "submit_many", count=INPUTS, at_once=6)
    await crew.fleet.send(run, "end", request_id="end")
    await crew.status(run, "completed")
    decisions = await asyncio.gather(*deciding)
    raced_s = time.monotonic() - began
    records = await crew.records(run)

    # inputs: each that was taken stands there once, and was placed or withdrawn, once, in order
    queued = [one.request_id for one in records if isinstance(one, Input)]
    taken = [one.request for one in inputs if one.what == "taken"]
    assert len(taken) == INPUTS
    assert Counter(queued) == Counter([*taken, "end"])
    placed = [one.request_id for one in records if isinstance(one, InputPlaced)]
    withdrawn = [one.request_id for one in records if isinstance(one, InputWithdrawn)]
    assert Counter(withdrawn) == Counter(one.request for one in inputs if one.what == "withdrawn")
    taken_back = set(withdrawn)
    assert placed == [request for request in queued if request not in taken_back]

    # decisions: each that was applied stands there once, the first one per marker, and no other
    signals = [one for one in records if isinstance(one, Signal)]
    applied = [one.request for each in decisions for one in each if one.what == "applied"]
    assert Counter(one.request_id for one in signals) == Counter(applied)
    markers = [one.payload["marker"] for one in signals]
    assert len(set(markers)) == len(markers)
    asked = [ask.marker for one in records if isinstance(one, Park) for ask in one.asks]
    assert markers == asked, "each question was put once, and answered once"

    # what came of it: one write per approval, under its permit; one refusal per rejection
    starts = {one.permit: one for one in records if isinstance(one, StepStarted)}
    approvals = [one.n for one in signals if one.name == "approve"]
    overtaken = len(starts) < len(approvals)  # the last one, by the input "end"
    assert list(starts) == (approvals[:-1] if overtaken else approvals)
    assert [key for _, _, key in crew.effects(run)] == [one.key for one in starts.values()]
    refused = [r for r in records if isinstance(r, StepCompleted) and r.via == "refused"]
    undecided = signals[-1:] if len(starts) + len(refused) < len(signals) else []
    assert len(refused) == sum(one.name == "reject" for one in signals if one not in undecided)

    (end,) = [one for one in records if isinstance(one, RunCompleted)]
    assert end.message["content"] == len(placed)
    assert await crew.restarts(run) == 0
    states = {(await crew.fleet.input(run, one)).status for one in queued[::20]}
    assert states <= {"done", "withdrawn"}
    kinds: Counter[str] = Counter(one.what for each in (inputs, *decisions) for one in each)
    claims = sum(isinstance(one, Claim) for one in records)
    commits = sum(isinstance(one, Commit) for one in records)
    print(
        f"\n{kinds.total()} requests in {raced_s:.1f} s: {dict(kinds)}; {len(records)} "
        f"records, {claims} claims, {commits} commits, {len(asked)} questions"
    )
    return kinds.total()


async def test_an_input_that_meets_the_commit_of_a_wait_is_placed_and_none_stays_behind(
    crew: Crew,
) -> None:
    """Many short races: each run is sent its one input at the moment it begins to wait for it."""
    for _ in range(2):
        await crew.worker("waiter", ack_wait_s=5.0, sweep_s=3600)
    runs = [f"short-{number}" for number in range(300)]

    async def race(run: str) -> None:
        await crew.start("waiter", run)
        await crew.fleet.send(run, run, request_id="one")

    for first in range(0, len(runs), 16):
        await asyncio.gather(*(race(run) for run in runs[first : first + 16]))
    await crew.all_completed(runs, 30)
    claims = Counter()
    for run in runs:
        records = await crew.records(run)
        placed = [one for one in records if isinstance(one, InputPlaced)]
        assert [one.request_id for one in placed] == ["one"], run
        claims[sum(isinstance(one, Claim) for one in records)] += 1
    assert set(claims) <= {1, 2}, "once is for the start, once for the wait that had begun"
    print(f"\nruns by their claims: {dict(claims)}")


async def test_a_worker_takes_ordinary_runs_though_others_took_the_urgent_ones_it_knew_of(
    crew: Crew,
) -> None:
    """What it was told of the backlog is old by then (R54)."""
    urgent = [f"urgent-{number}" for number in range(4)]
    for run in urgent:
        await crew.fleet.start("reader", None, run_id=run, priority=1)
    crew.hold("read")
    first = await crew.worker("reader", concurrency=1, sweep_s=3600)
    await crew.reaches("read", first)  # it was told that three more wait
    crew.hold("read", first)
    crew.let_go("read")
    second = await crew.worker("reader", sweep_s=3600)
    await eventually(lambda: crew.reached("between", second) == 3, what="the others are taken")
    crew.let_go("read", first)
    await crew.all_completed(urgent)
    await second.kill()
    for number in range(3):
        await crew.start("reader", f"plain-{number}")
        await crew.status(f"plain-{number}", "completed", timeout_s=15)
