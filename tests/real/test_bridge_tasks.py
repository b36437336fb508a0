"""Workers over HTTP: the same table, fencing and counting as for native ones (R65)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from kit.http_tasks import HttpSite, Refused, bridge_on, http_site
from kit.servers import NatsServer

from journal import stepping

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]
_names = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with asyncio.Runner() as runner:
        made = runner.run(NatsServer.start(tmp_path_factory.mktemp("nats")))
        yield made
        runner.run(made.stop())


@pytest.fixture
async def site(server: NatsServer) -> AsyncGenerator[HttpSite, None]:
    async with http_site(server, f"t{next(_names)}") as made:
        yield made


async def test_a_run_is_polled_read_worked_and_completed(site: HttpSite):
    await site.start("a1", {"n": 1})
    task = await site.poll()
    assert await site.types("a1") == ["run.started"]  # a poll claims nothing
    turn = await task.read()
    assert (turn["run"], turn["input"], turn["steps"]) == ("a1", {"n": 1}, [])
    first = await task.start(0, "lookup", {"q": 1}, replay="safe")
    assert first["decision"] == "call"
    await task.complete(0, first["n"], result={"found": 7})
    second = await task.start(1, "charge", {"eur": 10})
    assert second["key"].startswith("a1:0/1:")
    await task.complete(1, second["n"], result="T-1")
    assert await task.end("complete", message="done", calls=2) == {
        "status": "completed",
        "more": False,
        "claim": task.claim,
    }
    assert await site.types("a1") == [
        "run.started",
        "claim",
        *["step.started", "step.completed"] * 2,
        "run.completed",
    ]
    await site.nothing()


async def test_a_repeated_request_gets_its_first_answer_and_writes_nothing(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1)
    assert await task.start(0, "charge", 1, id=1) == started
    completed = await task.complete(0, started["n"], result="T-1")
    assert await task.complete(0, started["n"], result="T-1", id=2) == completed
    assert await task.end("complete", message="x") == await task.end("complete", message="x", id=3)
    assert (await site.types("a1")).count("step.started") == 1
    with pytest.raises(Refused) as refused:
        await task.start(1, "charge", 2)
    assert (refused.value.status, refused.value.code) == (410, "committed")


async def test_another_bridge_goes_on_with_a_task_and_its_repeats(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1)
    async with bridge_on(site.url, site.namespace) as other:
        elsewhere = task.on(other.address)
        assert await elsewhere.start(0, "charge", 1, id=1) == started
        await elsewhere.complete(0, started["n"], result="T-1", id=2)
        await elsewhere.http.aclose()
    task.numbers = 2
    ended = await task.end("complete", message="x")
    assert ended["status"] == "completed"


async def test_a_bridge_that_is_restarted_between_poll_and_read_loses_no_task(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    async with bridge_on(site.url, site.namespace) as other:
        elsewhere = task.on(other.address)
        assert (await elsewhere.read())["run"] == "a1"
        assert (await elsewhere.end("complete", message="x"))["status"] == "completed"
        await elsewhere.http.aclose()


async def test_a_recorded_result_is_answered_and_another_call_is_a_mismatch(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    started = await first.start(0, "lookup", 1, replay="safe")
    await first.complete(0, started["n"], result="seven")
    second = await site.poll()  # the first is silent for the ack wait
    turn = await second.read()
    assert turn["steps"][0]["result"] == "seven"
    again = await second.start(0, "lookup", 1, replay="safe")
    assert (again["decision"], again["result"]) == ("recorded", "seven")
    with pytest.raises(Refused) as refused:
        await second.start(0, "lookup", 2, replay="safe")
    assert (refused.value.status, refused.value.code) == (409, "replay_mismatch")
    assert (await site.state("a1")).status == "paused"


async def test_a_silent_worker_is_fenced_and_its_finished_write_is_told(site: HttpSite):
    await site.start("a1")
    zombie = await site.poll()
    await zombie.read()
    started = await zombie.start(0, "charge", 1)
    taker = await site.poll()
    with pytest.raises(Refused) as parked:
        await taker.read()
    assert (parked.value.status, parked.value.code) == (410, "stale")
    assert (await site.state("a1")).status == "indeterminate"
    with pytest.raises(Refused) as fenced:
        await zombie.complete(0, started["n"], result="T-1")
    assert (fenced.value.status, fenced.value.code) == (409, "fenced")
    after = await site.poll()
    assert (await after.read())["attempt"] == 1
    settled = await after.start(0, "charge", 1)
    assert (settled["decision"], settled["result"], settled["via"]) == ("recorded", "T-1", "late")
    assert (await after.end("complete", message="x"))["status"] == "completed"


async def test_a_worker_that_does_not_know_is_answered_by_the_writes_policy(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1, on_unknown="interrupt")
    await task.append("step.progress", position=0, output={"sent": True})
    again = await task.start(0, "charge", 1, on_unknown="interrupt")
    assert again["decision"] == "recorded"
    assert again["interrupted"] == {"partial": {"sent": True}}
    with pytest.raises(Refused) as refused:
        await task.complete(0, started["n"], result="T-1")
    assert refused.value.code == "stale_signal"


@pytest.mark.parametrize("said", ["happened", "did_not_happen", "cannot_tell"])
async def test_a_probe_over_http_settles_permits_or_asks(
    site: HttpSite, said: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stepping, "APPEND_BUDGET_S", 2.0)  # else the deadline is 30 s away
    await site.start("a1")
    first = await site.poll()
    await first.read()
    # the earlier call can't be running once its time limit has passed: nobody knows otherwise
    started = await first.start(0, "charge", 1, on_unknown="probe", timeout_s=0.1)
    second = await site.poll()
    await second.read()
    fields: dict[str, Any] = {"on_unknown": "probe", "timeout_s": 0.1}
    with pytest.raises(Refused) as early:
        await second.start(0, "charge", 1, **fields)
    assert early.value.code == "waiting"
    third = await site.poll()
    await third.read()
    asked = await third.start(0, "charge", 1, **fields)
    assert (asked["decision"], asked["key"]) == ("probe", started["key"])
    answer = {"happened": "T-1"} if said == "happened" else {said: True}
    probe = {"key": asked["key"], **answer}
    if said == "cannot_tell":
        with pytest.raises(Refused) as refused:
            await third.start(0, "charge", 1, probe=probe, **fields)
        assert refused.value.code == "indeterminate"
        return
    settled = await third.start(0, "charge", 1, probe=probe, **fields)
    if said == "happened":
        assert (settled["decision"], settled["result"], settled["via"]) == (
            "recorded",
            "T-1",
            "probe",
        )
    else:
        assert (settled["decision"], settled["key"]) == ("call", started["key"])
