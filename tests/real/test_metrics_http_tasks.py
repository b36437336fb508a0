"""What bridges count of workers over HTTP: each record once, whoever repeats what to whom (R73)."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import httpx
import pytest
from kit.http_tasks import HttpSite, bridge_on, http_site
from kit.measured import Samples, by, parsed, types
from kit.servers import NatsServer

from journal.ids import RunId

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncGenerator[HttpSite, None]:
    async with http_site(nats_server, namespace) as made:
        yield made


async def scraped(http: httpx.AsyncClient) -> Samples:
    return parsed((await http.get("/metrics")).text)


async def test_a_run_worked_over_two_bridges_with_repeats_is_counted_once(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "lookup", {"q": 1}, replay="safe")
    async with bridge_on(site.url, site.namespace) as other:
        elsewhere = task.on(other.address)
        assert await elsewhere.start(0, "lookup", {"q": 1}, id=1, replay="safe") == started
        for _ in range(2):
            await elsewhere.complete(0, started["n"], result=7, id=2)
        there = await scraped(elsewhere.http)
        await elsewhere.http.aclose()
    task.numbers = 2
    begun = await task.start(1, "charge", {"eur": 10})
    await task.complete(1, begun["n"], result="T-1")
    for _ in range(2):
        await task.end("complete", message="done", id=9)
    here = await scraped(site.http)
    both = {key: here.get(key, 0) + there.get(key, 0) for key in here | there}
    journal = types((await site.fleet.store.load(RunId("a1"))).entries)
    del journal["run.started"]  # by the test's own fleet
    assert by(both, "runfold_records_total", "type") == journal
    assert by(both, "runfold_steps_total", "replay") == {"safe": 1, "unsafe": 1}
    assert by(both, "runfold_runs_ended_total", "status") == {"completed": 1}
    assert here['runfold_step_seconds_count{kind="tool"}'] == 1  # the other's start is not its own
    assert 'runfold_step_seconds_count{kind="tool"}' not in there


async def test_a_recorded_result_that_the_next_worker_asks_for_is_a_replay(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    started = await first.start(0, "lookup", 1, replay="safe")
    await first.complete(0, started["n"], result="seven")
    second = await site.poll()  # the first is silent for the ack wait
    await second.read()
    assert (await second.start(0, "lookup", 1, replay="safe"))["decision"] == "recorded"
    found = await scraped(site.http)
    assert found["runfold_steps_replayed_total"] == 1
    assert by(found, "runfold_steps_total", "kind") == {"tool": 1}
    assert by(found, "runfold_records_total", "type")["step.started"] == 1
