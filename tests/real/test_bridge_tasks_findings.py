"""Workers over HTTP: faults that a review found, each named for the promise it breaks (R65)."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import msgspec
import nats
import pytest
from kit.http_tasks import AGENT, HttpSite, HttpTask, Refused, bridge_on, http_site
from kit.servers import NatsServer

from bridge import remote
from journal import limits, stepping
from journal import log as log_module
from journal.doors import signal, start, submit
from journal.errors import StoreUnavailable
from journal.ids import RunId
from journal.log import Log
from journal.store import Unknown
from journal.sweep import sweep

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncGenerator[HttpSite, None]:
    async with http_site(nats_server, namespace) as made:
        yield made


async def refusal(work: Any) -> Refused | None:
    try:
        await work
    except Refused as refused:
        return refused
    return None


def forged(task: HttpTask, **fields: Any) -> HttpTask:
    """The same name with other fields (TaskName is an array)."""
    order = ["run", "priority", "cause", "reply", "nonce", "owner", "terms", "ack_wait_s"]
    raw = msgspec.json.decode(urlsafe_b64decode(task.name + "=" * (-len(task.name) % 4)))
    for name, value in fields.items():
        raw[order.index(name)] = value
    text = urlsafe_b64encode(msgspec.json.encode(raw)).decode().rstrip("=")
    return HttpTask(task.http, {**task.given, "task": text})


def reply_of(task: HttpTask) -> str:
    return msgspec.json.decode(urlsafe_b64decode(task.name + "=" * (-len(task.name) % 4)))[3]


# ---- what a name or a record may do ------------------------------------------------------------


async def test_a_forged_task_name_publishes_nothing_of_its_own_to_nats(site: HttpSite):
    heard: list[bytes] = []
    nc = await nats.connect(site.url)

    async def hear(message: Any) -> None:
        heard.append(message.data)

    await nc.subscribe("evil.>", cb=hear)
    await nc.subscribe("evil", cb=hear)
    await nc.flush()
    await site.start("a1")
    task = await site.poll()
    stream, consumer = reply_of(task).split(".")[2:4]
    # domain and hash of the long form are the consumer that is looked for; the rest is free
    reply = f"$JS.ACK.{stream}.{consumer}.x 0\r\n\r\nPUB evil.y 2\r\nhi\r\nPUB z.1.1.1.1.0"
    undotted = f"$JS.ACK.x 0\r\n\r\nPUB evil 2\r\nhi\r\nPUB z.h.{stream}.{consumer}.1.1.1.1.0"
    for bad in (reply, undotted):
        refused = await refusal(forged(task, reply=bad).read())
        await nc.flush()
        await asyncio.sleep(0.2)
        assert (heard, refused and refused.status) == ([], 404)
    await nc.close()


async def test_a_recorded_call_never_makes_the_journal_unreadable(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await refusal(task.start(0, "runfold.spawn", {"no": "run"}))
    assert (await site.state("a1")).status == "running"


async def test_a_run_that_can_not_be_read_ends_no_bridge(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await refusal(task.start(0, "runfold.spawn", {"no": "run"}))
    for _ in range(3):  # its message comes again
        await site.http.post("/tasks/poll", json={"agents": [{"name": AGENT}], "wait_s": 1.5})
    assert (await site.http.get("/readyz")).status_code == 200


async def test_a_worker_without_the_scope_signal_cancels_no_run_of_others(site: HttpSite):
    await site.fleet.start("another", None, run_id="victim")
    await site.start("a1")
    task = await site.poll()
    await task.read()
    if await refusal(task.start(0, "runfold.spawn", {"run": "victim"}, replay="safe")) is None:
        await task.complete(0, 3, result={})
        await task.end("fail", reason="x")
    assert "signal" not in await site.types("victim")


async def test_a_forged_delivery_time_is_no_failure_of_the_bridge(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    parts = reply_of(task).split(".")
    parts[-2] = "9" * 40
    refused = await refusal(forged(task, reply=".".join(parts)).read())
    assert refused is not None
    assert refused.status == 404


async def test_every_name_that_a_poll_answers_can_be_used(site: HttpSite):
    await site.start("a1")
    odd = {"name": AGENT, "revision": "\U0001f600" * 100}
    answer = await site.http.post("/tasks/poll", json={"agents": [odd], "wait_s": 1})
    assert answer.status_code == 400
    longest = {"revision": '"' * 100, "compatible": [f"{n}" + "\\" * 99 for n in range(8)]}
    task = await site.poll(**longest)
    assert (await task.read())["run"] == "a1"


# ---- calls -------------------------------------------------------------------------------------


async def test_a_permitted_retry_waits_for_a_remote_call_also_after_a_commit(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    await first.end("continue", state=1)  # a point to restart at: its summary sums up the claim
    started = await first.start(0, "charge", 1, timeout_s=20)
    second = await site.poll()  # the first is silent, and its call still runs
    await refusal(second.read())
    payload = {"step": "1/0", "outcome": "retry", "start": started["n"]}
    await signal(site.fleet.store, "a1", "reconcile", payload)
    await asyncio.sleep(1.0)  # the bridge forgets the first one
    third = await site.poll()
    await third.read()
    refused = await refusal(third.start(0, "charge", 1, timeout_s=20))
    assert (await site.types("a1")).count("step.started") == 1
    assert refused is not None
    assert refused.code == "waiting"


async def test_a_repeat_gets_no_leave_to_call_once_the_recorded_deadline_would_not_hold(
    site: HttpSite, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stepping, "APPEND_BUDGET_S", 0.5)
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await task.start(0, "charge", 1, timeout_s=5)
    await asyncio.sleep(1.0)  # the answer was lost; a call that begins now may outlast its deadline
    again = await task.start(0, "charge", 1, timeout_s=5, id=1)
    assert again["decision"] != "call"


async def test_a_repeat_gets_no_leave_to_call_after_the_cancel_was_recorded(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await task.start(0, "charge", 1)
    await signal(site.fleet.store, "a1", "cancel", {})
    await asyncio.sleep(0.8)  # more than a third of the ack wait
    refused = None
    try:
        again = await task.start(0, "charge", 1, id=1)
    except Refused as error:
        refused = error
    else:
        assert again["decision"] != "call"
    assert refused is None or refused.code == "cancelled"


async def test_a_probes_answer_counts_for_the_start_it_was_asked_about_only(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await task.start(0, "charge", 1, on_unknown="probe")
    asked = await task.start(0, "charge", 1, on_unknown="probe")
    probe = {"n": asked["n"], "did_not_happen": True}
    second = await task.start(0, "charge", 1, on_unknown="probe", probe=probe)
    assert second["decision"] == "call"
    # that call, too, ends without a result: the old answer says nothing of it
    third = await task.start(0, "charge", 1, on_unknown="probe", probe=probe)
    assert third["decision"] == "probe"


async def test_a_failed_model_request_records_nothing(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.append("step.started", position=0, kind="model")
    await refusal(task.complete(0, started["n"], error={"message": "overloaded"}))
    assert "step.completed" not in await site.types("a1")


async def test_a_place_in_front_of_a_refused_call_is_a_mismatch(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    await refusal(first.start(0, "charge", 1, approval="pay?"))
    fold = (await Log.read(site.fleet.store, "a1")).fold
    await signal(site.fleet.store, "a1", "reject", {"marker": fold.asked()[0].marker})
    task = await site.poll()
    await task.read()
    answer = await task.start(0, "charge", 1, approval="pay?")
    assert answer["via"] == "refused"
    refused = await refusal(task.append("input.placed", position=0, mode="steer"))
    assert refused is not None
    assert refused.code == "replay_mismatch"


# ---- ids and repeats ---------------------------------------------------------------------------


async def test_results_of_parallel_calls_are_recorded_in_whatever_order_they_arrive(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    one = await task.start(0, "charge", 1)
    two = await task.start(1, "charge", 2)
    await task.complete(1, two["n"], result="T-2", id=4)  # overtakes the other one on the way
    assert (await task.complete(0, one["n"], result="T-1", id=3))["n"]


async def test_an_end_that_is_repeated_while_the_first_is_at_work_gets_its_answer(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    one, two = await asyncio.gather(
        task.end("complete", message="x", id=1), task.end("complete", message="x", id=1)
    )
    assert one == two


async def test_an_end_under_a_used_id_is_refused_and_not_answered_as_done(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1)
    await task.complete(0, started["n"], result="T-1")
    refused = await refusal(task.end("complete", message="x", id=1))
    assert refused is not None
    assert refused.status == 400


# ---- bounds, ownership, polls ------------------------------------------------------------------


async def test_the_bound_of_iterations_holds_for_turns_under_one_claim(site: HttpSite):
    await site.start("a1")
    task = await site.poll(bounds={"iterations": 2})
    await task.read()
    for _ in range(2):
        await task.end("continue", state=None)
    await refusal(task.read())
    await refusal(task.end("continue", state=None))
    assert (await site.state("a1")).status == "failed"


async def test_the_bound_of_duration_holds_for_a_worker_that_keeps_on(site: HttpSite):
    await site.start("a1")
    task = await site.poll(bounds={"duration_s": 1.0})
    await task.read()
    await asyncio.sleep(1.2)
    await refusal(task.end("continue", state=None))
    await refusal(task.read())
    assert (await site.state("a1")).status == "failed"


async def test_a_worker_that_went_to_another_bridge_is_always_answered_for(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    claim = task.claim or 0
    loaded = await site.fleet.store.load(RunId("a1"))
    worker = loaded.entries[1].record.worker  # type: ignore[attr-defined]
    async with bridge_on(site.url, site.namespace) as other:
        elsewhere = task.on(other.address)
        answers: set[str] = set()
        for _ in range(14):
            await elsewhere.post("heartbeat", {})
            answers.add(await site.fleet.store.ask(worker, RunId("a1"), claim))
            await asyncio.sleep(0.2)
        await elsewhere.http.aclose()
    assert answers == {"yes"}


async def test_polls_that_have_ended_are_forgotten(site: HttpSite):
    async def one(after_s: float) -> None:
        await asyncio.sleep(after_s)
        await site.nothing(0.3)

    polls = asyncio.gather(*[one(index * 0.05) for index in range(40)])
    await asyncio.sleep(1.9)
    tasks = site.bridge._parts[0]
    kept = [len(one.polls) for one in tasks._channels.values()]
    await polls
    assert max(kept) <= 10  # as many as wait at once


async def test_an_answer_says_the_deadline_that_was_recorded(
    site: HttpSite, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(log_module, "APPEND_BUDGET_S", 0.3)
    await site.start("a1")
    task = await site.poll()
    await task.read()
    store_type = type(site.fleet.store)
    real, late = store_type.append, list[Any]()

    async def append(self: Any, run_id: Any, entry: Any, *, expected: int) -> Any:
        if entry.type != "step.started":
            return await real(self, run_id, entry, expected=expected)
        if not late or late[0] is None:
            late[:] = [None]
            entries.append((entry, expected))
            return Unknown("lost on its way")
        return await real(self, run_id, entry, expected=expected)

    entries: list[Any] = []
    monkeypatch.setattr(store_type, "append", append)
    refused = await refusal(task.start(0, "charge", 1, timeout_s=5))
    assert refused is not None
    assert refused.status == 503
    await asyncio.sleep(1.0)

    async def landing(self: Any, run_id: Any, entry: Any, *, expected: int) -> Any:
        if entries and entry.type == "step.started":
            first, at = entries[0]
            entries.clear()
            await real(self, run_id, first, expected=at)  # now it lands
        return await real(self, run_id, entry, expected=expected)

    monkeypatch.setattr(store_type, "append", landing)
    again = await task.start(0, "charge", 1, timeout_s=5, id=1)
    monkeypatch.undo()
    loaded = await site.fleet.store.load(RunId("a1"))
    start: Any = loaded.entries[-1].record
    assert (again["n"], again["deadline"]) == (start.n, start.deadline)


async def test_the_restart_limits_claim_plays_no_turn_also_if_recording_that_was_cut_off(
    site: HttpSite, monkeypatch: pytest.MonkeyPatch
):
    await site.start("a1")
    async with (
        bridge_on(site.url, site.namespace, ack_wait_s=1.0, restart_limit=1) as other,
        httpx.AsyncClient(base_url=other.address, timeout=70) as http,
    ):
        second = HttpSite(site.url, site.namespace, site.fleet, other)
        await second.http.aclose()
        second.http = http
        first = await second.poll()
        await first.read()
        taker = await second.poll()
        real = remote.unplayed

        async def cut(*_: Any, **__: Any) -> bool:
            raise StoreUnavailable("the server is gone")

        monkeypatch.setattr(remote, "unplayed", cut)
        refused = await refusal(taker.read())
        assert refused is not None
        assert refused.status == 503
        monkeypatch.setattr(remote, "unplayed", real)
        assert await refusal(taker.read()) is not None


async def test_load_checkpoint_holds_the_task_as_every_request_does(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()

    async def load() -> None:
        for _ in range(16):
            await asyncio.sleep(0.25)
            await task.post("load_checkpoint", {})

    await asyncio.gather(load(), site.nothing(4.0))


async def test_a_worker_reads_the_state_of_no_run_that_is_not_its_agents(site: HttpSite):
    await site.fleet.start("another", {"secret": 1}, run_id="other")
    await site.start("a1")
    task = await site.poll()
    assert await refusal(forged(task, run="other").post("load_checkpoint", {})) is not None


async def test_a_call_that_must_be_decided_on_beside_an_unknown_one_is_answered(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    await first.start(0, "charge", 1, on_unknown="interrupt")
    second = await site.poll()
    await second.read()
    async with asyncio.timeout(5):  # and its neighbour's request waits behind it
        await refusal(second.start(1, "pay", 2, approval="pay?"))


async def test_a_permit_by_probe_survives_the_bridge(
    site: HttpSite, monkeypatch: pytest.MonkeyPatch
):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1, on_unknown="probe")
    asked = await task.start(0, "charge", 1, on_unknown="probe")
    monkeypatch.setattr(log_module, "APPEND_BUDGET_S", 0.3)
    store_type = type(site.fleet.store)
    real = store_type.append

    async def append(self: Any, run_id: Any, entry: Any, *, expected: int) -> Any:
        if entry.type == "step.started":
            return Unknown("lost on its way")
        return await real(self, run_id, entry, expected=expected)

    monkeypatch.setattr(store_type, "append", append)
    probe = {"n": asked["n"], "did_not_happen": True}
    fields: dict[str, Any] = {"on_unknown": "probe", "probe": probe}
    refused = await refusal(task.start(0, "charge", 1, **fields))
    assert refused is not None
    assert refused.status == 503
    monkeypatch.undo()
    async with asyncio.timeout(5):
        again = await task.start(0, "charge", 1, id=task.numbers, **fields)
    assert (again["decision"], again["key"]) == ("call", started["key"])


async def test_a_late_copy_of_a_placing_places_nothing_in_a_later_turn(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await task.append("input.placed", position=0, mode="steer")
    await task.end("continue", state=None)
    await submit(site.fleet.store, "a1", "hello", request_id="i1")
    await refusal(task.append("input.placed", position=0, mode="steer", id=1))
    fold = (await Log.read(site.fleet.store, "a1")).fold
    assert fold.inputs["i1"].status == "queued"


async def test_a_late_copy_of_a_refused_end_ends_nothing(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await submit(site.fleet.store, "a1", "hello", request_id="i1")
    refused = await refusal(task.end("complete", message="x", id=1))
    assert refused is not None
    assert refused.code == "inputs_queued"
    await task.append("input.placed", position=0, mode="steer", id=2)
    await refusal(task.end("complete", message="x", id=1))  # it knows nothing of the input
    assert (await site.state("a1")).status == "running"


async def test_a_bridge_that_nobody_polls_is_well_again_after_an_outage(
    site: HttpSite, monkeypatch: pytest.MonkeyPatch
):
    queue = type(site.fleet.store.tasks)
    real = queue.ensure

    async def ensure(self: Any, agent: str, *, ack_wait_s: float) -> float:
        raise StoreUnavailable("the server is gone")

    monkeypatch.setattr(queue, "ensure", ensure)
    await site.nothing(0.3)
    monkeypatch.setattr(queue, "ensure", real)
    await site.nothing(1.0)
    assert site.bridge.health().problems == ()


async def test_a_used_id_stays_used_in_a_later_turn_through_another_bridge(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    started = await task.start(0, "charge", 1)
    await task.complete(0, started["n"], result="T-1")
    await task.end("continue", state=None)
    async with bridge_on(site.url, site.namespace) as other:
        elsewhere = task.on(other.address)
        await elsewhere.post("heartbeat", {})
        await refusal(elsewhere.start(0, "charge", 1, id=1))  # a late copy
        await elsewhere.http.aclose()
    assert (await site.types("a1")).count("step.started") == 1
    assert (await site.state("a1")).status == "running"


async def test_requests_at_once_through_a_fresh_bridge_leave_nothing_behind(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    loaded = await site.fleet.store.load(RunId("a1"))
    worker = loaded.entries[1].record.worker  # type: ignore[attr-defined]
    async with bridge_on(site.url, site.namespace) as other:
        elsewhere = task.on(other.address)
        beats = [elsewhere.post("heartbeat", {}) for _ in range(8)]
        await asyncio.gather(*beats)
        await elsewhere.http.aclose()
        await asyncio.sleep(3.5)  # the ack wait, and the time to notice
        answer = await site.fleet.store.ask(worker, RunId("a1"), task.claim or 0)
    assert answer == "nobody"


async def test_a_fail_that_must_wait_for_a_person_says_so(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    await first.start(0, "charge", 1, on_unknown="probe")
    second = await site.poll()
    await second.read()
    refused = await refusal(second.end("fail", reason="x"))
    assert refused is not None
    status = (await site.state("a1")).status
    assert (refused.code, status) in [("step_open", "running"), ("indeterminate", "indeterminate")]


async def test_a_replay_is_answered_in_order_up_to_the_call_that_was_cut_off(site: HttpSite):
    await site.start("a1")
    first = await site.poll()
    await first.read()
    looked = await first.start(0, "look", 1, replay="safe")
    await first.complete(0, looked["n"], result="L")
    await first.start(1, "charge", 1, on_unknown="interrupt")
    second = await site.poll()
    await second.read()
    again = await second.start(0, "look", 1, replay="safe")  # its code begins the turn anew
    assert (again["decision"], again["result"]) == ("recorded", "L")
    assert (await second.start(1, "charge", 1, on_unknown="interrupt"))["via"] == "interrupted"


async def test_a_late_copy_of_progress_does_not_hide_what_was_reported_since(site: HttpSite):
    await site.start("a1")
    task = await site.poll()
    await task.read()
    await task.start(0, "charge", 1)
    await task.append("step.progress", position=0, output="half")
    await task.append("step.progress", position=0, output="sent")
    await task.append("step.progress", position=0, output="half", id=2)
    fold = (await Log.read(site.fleet.store, "a1")).fold
    assert fold.steps["0/0"].partial == "sent"


# ---- what the chaos soak found -------------------------------------------------------------------


async def test_a_run_whose_task_was_never_published_is_found_where_only_http_workers_have_it(
    site: HttpSite, monkeypatch: pytest.MonkeyPatch
):
    """Whoever started, or woke it, died between its record and the task. The sweep of native
    workers is for their own agents."""
    monkeypatch.setattr(limits, "SWEEP_S", 0.2)
    monkeypatch.setitem(sweep.__kwdefaults__, "fresh_s", 0.0)
    async with bridge_on(site.url, site.namespace) as other:
        await start(site.fleet.store, AGENT, None, run_id="a1", revision="")
        http = httpx.AsyncClient(base_url=other.address, timeout=70)
        body = {"agents": [{"name": AGENT}], "wait_s": 10}
        async with http:
            answer = await http.post("/tasks/poll", json=body)
    assert (answer.status_code, answer.json()["run"]) == (200, "a1")


async def test_a_run_whose_worker_is_gone_is_not_passed_over_while_no_poll_waits_long(
    site: HttpSite,
):
    """Whether its worker is gone is asked twice, half a second apart. Polls that find something to
    do at once, as where all workers are busy, were never there when the answer was."""
    await site.start("a1")
    gone = await site.poll()
    await gone.read()
    await gone.start(0, "charge")
    given: list[str] = []
    for _ in range(60):
        body = {"agents": [{"name": AGENT}], "wait_s": 0.2}
        answer = await site.http.post("/tasks/poll", json=body)
        if answer.status_code == 200:
            given.append(answer.json()["run"])
            break
    assert given == ["a1"]
