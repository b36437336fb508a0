"""Workers over HTTP: the same table, fencing and counting as for native ones (R65)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import pytest
from kit.http_tasks import AGENT, HttpSite, Refused, bridge_on, http_site
from kit.servers import NatsServer
from msgspec import structs

from bridge.task_id import decode_name, encode_name
from journal import stepping
from journal.ids import RunId
from journal.records import Claim
from journal.views import Failed

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncGenerator[HttpSite, None]:
    async with http_site(nats_server, namespace) as made:
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
    monkeypatch.setattr(stepping, "APPEND_BUDGET_S", 8.0)  # else the deadline is 30 s away
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
    probe = {"n": asked["n"], **answer}
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


async def test_the_claim_of_a_worker_over_http_says_so_and_whose_it_is(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    records = [entry.record for entry in (await site.fleet.store.load(RunId("a1"))).entries]
    claim = records[1]
    assert isinstance(claim, Claim)
    assert claim.remote
    assert claim.worker.startswith("http-dev-")
    assert claim.by == claim.worker
    await task.end("complete", message="x")


async def test_a_task_whose_claim_is_over_is_never_given_a_second_one(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    second = await site.poll()  # the first is silent for the ack wait
    await second.read()
    await second.end("continue", state=1, delay_s=0)
    ended = await second.end("continue", state=2, until_input=True)
    assert ended == {"status": "waiting", "more": False, "claim": second.claim}
    await site.fleet.send("a1", "go on")
    before = await site.types("a1")
    for claim in (first.claim, None):  # it may not even know that it was claimed
        first.claim = claim
        for verb in ("read", "end"):
            with pytest.raises(Refused) as refused:
                await (first.read() if verb == "read" else first.end("complete", message="x"))
            assert refused.value.code in ("fenced", "committed")
    async with bridge_on(site.url, site.namespace) as other:
        elsewhere = first.on(other.address)
        with pytest.raises(Refused) as refused:
            await elsewhere.read()
        assert refused.value.code in ("fenced", "committed")
        await elsewhere.http.aclose()
    assert await site.types("a1") == before


async def test_a_task_is_its_owners_alone_and_names_no_other_subject(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    name, _ = decode_name(task.name, "dev", site.namespace)
    forged = [
        structs.replace(name, owner="eve"),
        structs.replace(name, reply=name.reply.replace("TASKS", "SIGNALS")),
        structs.replace(name, reply=f"{site.namespace}.journal.0.a1"),
        structs.replace(name, nonce="../../x"),
        structs.replace(name, run="*"),
        structs.replace(name, priority=7),
    ]
    texts = [encode_name(one) for one in forged]
    for text in [*texts, "x", "e30", "A" * 5000, task.name[:-4]]:
        answer = await site.http.post(f"/tasks/{text}/journal.read", json={})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), text
    assert await site.types("a1") == ["run.started"]
    await task.end("complete", message="x")


async def test_a_turn_neither_stops_nor_ends_while_a_write_of_it_is_open(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1)
    with pytest.raises(Refused) as asked:
        await task.start(1, "refund", 1, approval="really?")
    assert asked.value.code == "step_open"
    ends = {"complete": {"message": "x"}, "fail": {"reason": "x"}, "pause": {"reason": "x"}}
    for verb, fields in ends.items():
        with pytest.raises(Refused) as ended:
            await task.end(verb, **fields)
        assert ended.value.code == "step_open", verb
    await task.complete(0, started["n"], result="T-1")
    with pytest.raises(Refused) as parked:
        await task.start(1, "refund", 1, approval="really?")
    assert parked.value.code == "awaiting_approval"
    assert parked.value.problem["marker"].startswith("a1/0/1@1.")
    assert (await site.state("a1")).status == "awaiting_approval"


async def test_a_result_is_recorded_for_the_start_it_names_only(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    first = await task.start(0, "charge", 1)
    await task.complete(0, first["n"], result="T-1")
    second = await task.start(1, "charge", 2)
    for position, start in ((1, first["n"]), (1, second["n"] + 7), (0, first["n"])):
        with pytest.raises(Refused) as refused:
            await task.complete(position, start, result="forged")
        assert refused.value.code == "stale_signal"
    await task.complete(1, second["n"], result="T-2")
    await task.end("complete", message="x")


async def decided(site: HttpSite, word: str) -> dict[str, Any]:
    """What the worker is answered about a call that a person decided on."""
    task = await site.poll()
    await task.read()
    with pytest.raises(Refused) as parked:
        await task.start(0, "charge", 0, approval="sure?")
    body = {"marker": parked.value.problem["marker"], "decision": word}
    assert (await site.http.post("/decisions", json=body)).json()["result"] == "applied"
    task = await site.poll()
    await task.read()
    answer = await task.start(0, "charge", 0, approval="sure?")
    if answer["decision"] == "call":
        await task.complete(0, answer["n"], result="T-0")
    await task.end("fail", reason="flaky", retriable=True)
    return answer


async def test_an_approval_lets_the_call_be_made_once_in_all_attempts(site: HttpSite):
    await site.start("a1")
    assert (await decided(site, "approve"))["decision"] == "call"
    second = await site.poll()
    assert (await second.read())["attempt"] == 2
    honoured = await second.start(0, "charge", 0, approval="sure?")
    assert (honoured["decision"], honoured["result"]) == ("recorded", "T-0")
    await second.end("complete", message="x")
    assert (await site.types("a1")).count("step.started") == 1


async def test_a_rejected_call_is_answered_with_the_refusal(site: HttpSite):
    await site.start("a1")
    answer = await decided(site, "reject")
    assert (answer["decision"], answer["error"]["type"]) == ("recorded", "rejected")
    assert "step.started" not in await site.types("a1")


async def test_a_run_that_is_cancelled_lets_its_write_end_and_starts_no_other(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1)
    await site.fleet.cancel("a1")
    assert (await task.post("heartbeat", {}))["cancelled"]
    with pytest.raises(Refused) as refused:
        await task.start(1, "charge", 2)
    assert (refused.value.status, refused.value.code) == (409, "cancelled")
    assert (await task.complete(0, started["n"], result="T-1"))["cancelled"]
    assert (await site.state("a1")).status == "cancelled"
    assert (await site.types("a1"))[-2:] == ["step.completed", "commit"]


async def test_a_cancelled_run_that_waits_for_a_worker_is_ended_without_a_turn(site: HttpSite):
    await site.start("a1")
    await site.fleet.cancel("a1")
    task = await site.poll()
    with pytest.raises(Refused) as refused:
        await task.read()
    assert refused.value.code == "cancelled"
    assert (await site.state("a1")).status == "cancelled"


async def test_a_run_does_not_complete_over_a_queued_input_unless_it_is_left(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await site.fleet.send("a1", "wait", request_id="i1")
    with pytest.raises(Refused) as refused:
        await task.end("complete", message="x")
    assert (refused.value.status, refused.value.code) == (409, "inputs_queued")
    placed = await task.append("input.placed", position=0, mode="steer")
    assert placed["inputs"] == [{"request_id": "i1", "mode": "steer", "content": "wait"}]
    await site.fleet.send("a1", "more", request_id="i2")
    assert (await task.end("complete", message="x", leave_inputs=True))["status"] == "completed"
    assert (await site.fleet.input("a1", "i1")).status == "done"
    assert (await site.fleet.input("a1", "i2")).status == "unanswered"


async def test_workers_that_vanish_count_as_restarts_until_the_limit(
    nats_server: NatsServer, namespace: str
):
    async with http_site(nats_server, namespace, ack_wait_s=1.0, restart_limit=2) as site:
        await site.start("a1")
        for _ in range(2):
            await (await site.poll(retry={"attempts": 1})).read()
        last = await site.poll(retry={"attempts": 1})
        with pytest.raises(Refused) as refused:
            await last.read()
        assert refused.value.code == "stale"
        state = await site.state("a1")
        assert isinstance(state.outcome, Failed)
        assert state.outcome.reason == "restart_limit"


async def test_a_task_that_is_given_back_goes_to_the_next_worker_and_counts_as_no_crash(
    nats_server: NatsServer,
    namespace: str,
):
    async with http_site(nats_server, namespace, ack_wait_s=60.0, restart_limit=1) as site:
        await site.start("a1")
        unread = await site.poll()
        assert await unread.post("release", {}) == {"released": True}
        first = await site.poll()
        await first.read()
        started = await first.start(0, "charge", 1)
        with pytest.raises(Refused) as refused:
            await first.post("release", {})
        assert refused.value.code == "step_open"
        await first.complete(0, started["n"], result="T-1")
        await first.post("release", {})
        second = await site.poll()
        assert (await second.read())["steps"][0]["result"] == "T-1"
        assert (await second.end("complete", message="x"))["status"] == "completed"
        assert (await site.types("a1")).count("release") == 1


async def test_a_bridge_keeps_to_the_ack_wait_that_an_agents_workers_have_set(site: HttpSite):
    assert await site.fleet.store.tasks.ensure(AGENT, ack_wait_s=7.0) == 7.0
    await site.start("a1")
    task = await site.poll()
    assert task.given["ack_wait_s"] == 7.0
    found = await site.fleet.store.tasks.ensure(AGENT, ack_wait_s=1.0, change=False)
    assert found == 7.0
    await task.end("complete", message="x")


async def test_a_safe_call_is_none_of_the_unsafe_ones_that_the_turn_asked_for(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    started = await first.start(0, "act", 1)
    await first.complete(0, started["n"], result="made once")
    await first.end("fail", reason="flaky", retriable=True)
    second = await site.poll()
    assert (await second.read())["attempt"] == 2
    assert (await second.start(0, "act", 1))["result"] == "made once"
    assert (await second.start(1, "act", 1, replay="safe"))["decision"] == "call"


async def test_an_id_that_was_used_for_another_call_lets_nothing_be_called(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await task.start(0, "pay", {"eur": 1})
    with pytest.raises(Refused) as refused:
        await task.start(0, "pay", {"eur": 2}, id=1)
    assert (refused.value.status, refused.value.code) == (400, "bad_payload")
    assert (await task.start(0, "pay", {"eur": 1}, id=1))["decision"] == "call"


async def test_workers_over_http_are_among_the_workers(site: HttpSite):
    assert await site.fleet.workers(wait_s=0.2) == []
    await site.start("a1")
    task = await site.poll()
    await task.read()
    (report,) = await site.fleet.workers(wait_s=0.2)
    assert report["over_http"] is True
    assert [one["name"] for one in report["agents"]] == [AGENT]
    assert report["active"] == [{"run": "a1", "claim": task.claim, "agent": AGENT}]
    await task.end("complete", message="x")
