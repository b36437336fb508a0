"""examples/http_worker.py in real processes: killed, stopped, cut off, it calls no write twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kit.cli import RUNFOLD
from kit.fleet import WorkerProcess
from kit.http_agents import EXAMPLES
from kit.http_crew import APPEND_BUDGET_S, HttpCrew, Refused, http_crew_on
from kit.http_tasks import bridge_on
from kit.servers import NatsServer
from kit.waiting import eventually

from journal import stepping
from journal.records import StepCompleted, StepStarted
from journal.stores.provision import provision
from journal.views import AwaitingApproval

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

DONE = ["it", "done 1", "said"]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[HttpCrew]:
    async with http_crew_on(nats_server.url, namespace, tmp_path / "crew") as made:
        yield made


@pytest.fixture
def quick_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge of these tests is in this process."""
    monkeypatch.setattr(stepping, "APPEND_BUDGET_S", APPEND_BUDGET_S)


async def start(site: HttpCrew, run: str = "r1", agent: str = "clerk", **input: Any) -> str:
    return await site.crew.start(agent, run, input)


async def unsafe(site: HttpCrew, run: str = "r1") -> list[StepStarted]:
    records = await site.crew.records(run)
    return [r for r in records if isinstance(r, StepStarted) and r.replay == "unsafe"]


async def acted(site: HttpCrew, run: str = "r1") -> StepCompleted:
    """The one result of the one write."""
    records = await site.crew.records(run)
    (step,) = {start.step for start in await unsafe(site, run)}
    (found,) = (r for r in records if isinstance(r, StepCompleted) and r.step == step)
    return found


async def once(site: HttpCrew, run: str = "r1") -> None:
    """The write was started once, and took effect once, under the recorded key."""
    (started,) = await unsafe(site, run)
    assert site.crew.effects(run) == [(run, "act", started.key)]


async def reconcile(site: HttpCrew, run: str, outcome: dict[str, Any]) -> None:
    (*_, started) = await unsafe(site, run)
    said = {"step": started.step, "start": started.n, **outcome}
    await site.crew.fleet.signal(run, "reconcile", said)


async def told(worker: WorkerProcess, text: str) -> None:
    await eventually(lambda: text in worker.log, 20, what=f"{worker.name} logs {text}")


# ---- as it stands -----------------------------------------------------------------------------


def as_it_stands(url: str, ledger: Path, token: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(EXAMPLES / "http_worker.py")],
        env={
            "RUNFOLD_URL": url,
            "RUNFOLD_TOKEN": token,
            "CLERK_LEDGER": str(ledger),
            "PATH": os.environ["PATH"],
        },
        cwd=ledger.parent,
        stderr=subprocess.DEVNULL,
    )


def runfold(*args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([RUNFOLD, *args], stderr=subprocess.PIPE)


async def test_the_example_as_it_stands_completes_and_ends_at_sigterm(
    site: HttpCrew, tmp_path: Path
):
    with as_it_stands(site.proxy.url, tmp_path / "ledger") as process:
        await site.crew.start("http-clerk", "r1", "ann")
        assert await site.answer("r1") == "Charged 3 EUR: RECEIPT-1."
        await eventually(lambda: site.proxy.count("poll") == 2, what="it polls again")
        process.terminate()
        await eventually(lambda: process.poll() is not None, what="it ends")
        assert process.returncode == 0
    key, _, charged = (tmp_path / "ledger").read_text().strip().partition(" ")
    assert [one.key for one in await unsafe(site)] == [key]
    assert json.loads(charged) == {"customer": "ann", "owes": 3}


async def test_the_example_as_it_stands_killed_in_its_write_charges_nobody_twice(
    site: HttpCrew, tmp_path: Path
):
    ledger = tmp_path / "ledger"
    os.mkfifo(ledger)  # opening it waits for a reader
    with as_it_stands(site.proxy.url, ledger) as process:
        await site.crew.start("http-clerk", "r1", "ann")
        await eventually(lambda: unsafe(site), 20, what="the write has begun")
        process.kill()
    ledger.unlink()
    with as_it_stands(site.proxy.url, ledger) as process:
        await site.crew.status("r1", "indeterminate")
        await reconcile(site, "r1", {"outcome": "done", "result": "RECEIPT-7"})
        assert await site.answer("r1") == "Charged 3 EUR: RECEIPT-7."
        process.kill()
    assert not ledger.exists()
    assert len(await unsafe(site)) == 1


async def test_the_example_needs_a_token_of_scope_work_and_ends_without_one(
    nats_server: NatsServer, namespace: str, tmp_path: Path
):
    """With the commands that the documents name."""
    store = ["--store", nats_server.url, "--namespace", namespace]
    tokens = tmp_path / "tokens"
    await provision(nats_server.url, namespace=namespace)

    async def said(*args: str) -> str:
        found = await asyncio.to_thread(subprocess.run, [RUNFOLD, *args], capture_output=True)
        assert found.returncode == 0, found
        return found.stdout.decode().strip()

    token = await said("token", "mill", "--scope", "work", "--tokens", str(tokens))
    reads = await said("token", "eyes", "--scope", "read", "--tokens", str(tokens))
    listen = ["--listen", "127.0.0.1:0", "--tokens", str(tokens)]
    with (
        runfold("bridge", *listen, *store) as bridge,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(bridge.kill)
        assert bridge.stderr is not None
        url = ""
        while not url:
            line = (await asyncio.to_thread(bridge.stderr.readline)).decode()
            assert line
            url = line.partition("bridge: ")[2].strip()
        with as_it_stands(url, tmp_path / "none", reads) as refused:
            assert await asyncio.to_thread(refused.wait, 20) == 1
        with as_it_stands(url, tmp_path / "ledger", token) as process:
            stack.callback(process.kill)
            await said("start", "http-clerk", "--id", "r1", "--input", '"ann"', *store)
            ledger = tmp_path / "ledger"
            await eventually(ledger.exists, 20, what="it charges")
            shown = ""
            while "RECEIPT-1" not in shown:
                shown = await said("show", "r1", "--json", *store)
            process.kill()


# ---- killed -----------------------------------------------------------------------------------


async def test_killed_in_its_read_the_read_is_done_again(site: HttpCrew):
    site.crew.hold("look")
    first = await site.worker()
    await start(site)
    await site.crew.reaches("look")
    await first.kill()
    site.crew.let_go("look")
    await site.worker()
    assert await site.answer("r1") == DONE
    assert site.crew.reached("look") == 2
    await once(site)


@pytest.mark.parametrize("place", ["act", "acted"])
@pytest.mark.parametrize("outcome", ["done", "retry"])
async def test_killed_in_its_write_a_person_says_what_becomes_of_it(
    site: HttpCrew, quick_deadlines: None, place: str, outcome: str
):
    site.crew.hold(place)
    first = await site.worker()
    await start(site, timeout_s=0.2)
    await site.crew.reaches(place)
    await first.kill()
    site.crew.let_go(place)
    await site.worker()
    await site.crew.status("r1", "indeterminate")
    happened = int(place == "acted")
    assert len(site.crew.effects()) == happened
    said = {"outcome": outcome} | ({"result": "done 1"} if outcome == "done" else {})
    await reconcile(site, "r1", said)
    assert await site.answer("r1") == DONE
    starts, retried = await unsafe(site), int(outcome == "retry")
    assert (len(starts), len(site.crew.effects())) == (1 + retried, happened + retried)
    assert len({one.key for one in starts}) == 1
    assert (await acted(site)).via == ("run" if retried else "reconcile")


# ---- stopped, and back ------------------------------------------------------------------------


@pytest.mark.parametrize("successor", ["http", "native"])
async def test_stopped_in_its_write_it_comes_back_fenced_and_its_result_is_late(
    site: HttpCrew, successor: str
):
    site.crew.hold("act")
    zombie = await site.worker()
    await start(site)
    await site.crew.reaches("act")
    await zombie.freeze()
    await (site.worker() if successor == "http" else site.native())
    await site.crew.status("r1", "indeterminate")
    assert site.crew.effects() == []
    site.crew.let_go("act")
    zombie.thaw()
    assert await site.answer("r1") == DONE
    assert (await acted(site)).via == "late"
    await told(zombie, "fenced")
    await once(site)


async def test_fenced_while_its_write_runs_it_still_tells_what_it_came_to(site: HttpCrew):
    """The heartbeat has heard it before."""
    site.crew.hold("act")
    zombie = await site.worker()
    await start(site)
    await site.crew.reaches("act")
    await zombie.freeze()
    await site.worker()
    await site.crew.status("r1", "indeterminate")
    zombie.thaw()
    await told(zombie, "heartbeat: fenced")
    site.crew.let_go("act")
    assert await site.answer("r1") == DONE
    assert (await acted(site)).via == "late"
    await once(site)


async def test_stopped_before_its_write_it_comes_back_and_makes_no_call(site: HttpCrew):
    """The answer that permits the call is older than a third of the ack wait."""
    zombie = await site.worker()
    asked = site.proxy.next("hold answer", lambda seen: seen.record == "step.started 1")
    await start(site)
    await eventually(lambda: unsafe(site), 20, what="its start is recorded")
    await zombie.freeze()
    asked.go.set()
    await site.worker()
    await site.crew.status("r1", "indeterminate")
    zombie.thaw()
    await told(zombie, "fenced")
    await reconcile(site, "r1", {"outcome": "done", "result": "done 1"})
    assert await site.answer("r1") == DONE
    assert site.crew.effects() == []
    assert site.crew.reached("act") == 0


async def test_an_answer_that_takes_long_is_followed_by_a_heartbeat_before_the_write(
    site: HttpCrew,
):
    await site.worker()
    asked = site.proxy.next("hold answer", lambda seen: seen.record == "step.started 1")
    await start(site)
    await asked.done.wait()
    before = site.proxy.count("heartbeat")
    await eventually(lambda: site.proxy.count("heartbeat") >= before + 2, what="time passes")
    verbs = len(site.proxy.seen)
    site.crew.hold("act")
    asked.go.set()
    await site.crew.reaches("act")
    assert "heartbeat" in [one.verb for one in site.proxy.seen[verbs:]]
    site.crew.let_go("act")
    assert await site.answer("r1") == DONE
    await once(site)


async def test_a_write_cancelled_before_it_began_is_not_made_and_that_is_recorded(site: HttpCrew):
    await site.worker()
    asked = site.proxy.next("hold answer", lambda seen: seen.record == "step.started 1")
    await start(site)
    await asked.done.wait()
    before = site.proxy.count("heartbeat")
    await eventually(lambda: site.proxy.count("heartbeat") >= before + 2, what="time passes")
    await site.crew.fleet.signal("r1", "cancel", {})
    asked.go.set()
    await site.crew.status("r1", "cancelled")
    assert (await acted(site)).via == "not_called"
    assert site.crew.reached("act") == 0


async def test_a_tool_that_outlives_the_ack_wait_is_nobody_elses(site: HttpCrew):
    """UR-01, the worker behind the bridge."""
    site.crew.hold("act")
    await site.worker()
    await start(site)
    await site.crew.reaches("act")
    await site.worker()
    await site.native()
    before = site.proxy.count("heartbeat")
    await eventually(lambda: site.proxy.count("heartbeat") >= before + 9, 30, what="3 ack waits")
    site.crew.let_go("act")
    assert await site.answer("r1") == DONE
    assert len(await site.crew.claims("r1")) == 1
    await once(site)


# ---- cut off ----------------------------------------------------------------------------------


async def test_a_bridge_restarted_in_the_middle_of_a_write_loses_nothing(
    site: HttpCrew, nats_server: NatsServer, namespace: str
):
    async with bridge_on(nats_server.url, namespace, ack_wait_s=1.0) as first:
        site.proxy.target = first.address
        site.crew.hold("act")
        await site.worker()
        await start(site)
        await site.crew.reaches("act")
    site.proxy.target = site.url
    site.crew.let_go("act")
    assert await site.answer("r1") == DONE
    assert len(await site.crew.claims("r1")) == 1
    await once(site)


@pytest.mark.parametrize("what", ["lose request", "lose answer", "twice"])
async def test_a_request_or_answer_that_is_lost_or_comes_twice_is_done_once(
    site: HttpCrew, what: Any
):
    await site.worker()
    asked = ["journal.read", "step.started 1", "step.completed 1", "step.started 2", "complete"]
    for run, which in enumerate(asked):
        rule = site.proxy.next(what, lambda seen, which=which: which in (seen.verb, seen.record))
        await start(site, f"l{run}")
        assert await site.answer(f"l{run}") == DONE, which
        assert rule.done.is_set(), which
        await once(site, f"l{run}")
        assert await site.types(f"l{run}") == [
            "run.started",
            "claim",
            *["step.started", "step.completed"] * 3,
            "run.completed",
        ]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_http_does_no_write_is_made_twice(site: HttpCrew, seed: int):
    site.proxy.chaos = random.Random(seed)
    for _ in range(2):
        await site.worker("clerk", "roller")
    runs = [await start(site, f"c{n}") for n in range(3)]
    await start(site, "rolls", "roller", turns=4)
    for run in runs:
        assert await site.answer(run) == DONE
        await once(site, run)
    assert await site.answer("rolls") == {"turns": 4}
    assert len(await unsafe(site, "rolls")) == len(site.crew.effects("rolls")) == 4


# ---- inputs, approvals, stops -----------------------------------------------------------------


async def test_a_steer_is_placed_once_though_its_answer_is_lost_and_the_worker_too(site: HttpCrew):
    site.crew.hold("end")
    first = await site.worker("talker")
    site.crew.hold("look")
    await start(site, agent="talker")
    await site.crew.reaches("look")
    await site.crew.fleet.send("r1", "be quick", mode="steer", request_id="s1")
    lost = site.proxy.next("lose answer", lambda seen: seen.record == "input.placed 1")
    site.crew.let_go("look")
    await site.crew.reaches("end")
    assert lost.done.is_set()
    await first.kill()
    site.crew.let_go("end")
    await site.worker("talker")
    assert await site.answer("r1") == [["be quick"], "said", []]
    assert (await site.types("r1")).count("input.placed") == 1
    assert (await site.crew.fleet.input("r1", "s1")).status == "done"


async def test_an_input_that_comes_as_it_completes_is_heard_before(site: HttpCrew):
    site.crew.hold("end")
    await site.worker("talker")
    await start(site, agent="talker")
    await site.crew.reaches("end")
    ending = site.proxy.next("hold request", lambda seen: seen.verb == "complete")
    site.crew.let_go("end")
    await ending.done.wait()
    await site.crew.fleet.send("r1", "one more", mode="follow_up", request_id="f1")
    ending.go.set()
    assert await site.answer("r1") == [[], "said", ["one more"]]
    assert (await site.crew.fleet.input("r1", "f1")).status == "done"


async def test_an_input_that_the_code_does_not_take_is_left_unanswered(site: HttpCrew):
    site.crew.hold("end")
    await site.worker()
    await start(site)
    await site.crew.reaches("end")
    await site.crew.fleet.send("r1", "hello?", mode="follow_up", request_id="f1")
    site.crew.let_go("end")
    assert await site.answer("r1") == DONE
    assert (await site.crew.fleet.input("r1", "f1")).status == "unanswered"


async def test_a_handler_that_swallows_exceptions_does_not_swallow_its_end(site: HttpCrew):
    await site.worker("swallower")
    await start(site, agent="swallower")
    await site.crew.status("r1", "awaiting_approval")
    await eventually(lambda: site.proxy.count("poll") == 2, 20, what="the turn is over")
    assert site.crew.reached("swallowed") == 0
    assert site.proxy.count("complete") == 0


@pytest.mark.parametrize("decision", ["approve", "reject"])
async def test_a_call_that_needs_approval_waits_for_it_and_is_made_once(
    site: HttpCrew, decision: str
):
    await site.worker()
    await start(site, approval="May it?")
    parked = await site.crew.status("r1", "awaiting_approval")
    assert site.crew.effects() == []
    assert isinstance(parked.outcome, AwaitingApproval)
    (ask,) = parked.outcome.pending
    reason = {"reason": "not today"} if decision == "reject" else {}
    await site.crew.fleet.signal("r1", decision, {"marker": ask.marker, **reason})
    if decision == "approve":
        assert await site.answer("r1") == DONE
        await once(site)
    else:
        assert (await site.answer("r1"))[1] == "not today"
        assert site.crew.effects() == []
    assert site.crew.reached("look") == 1


async def test_cancelled_in_the_middle_of_a_write_its_result_is_kept_and_nothing_follows(
    site: HttpCrew,
):
    site.crew.hold("act")
    await site.worker()
    await start(site)
    await site.crew.reaches("act")
    await site.crew.fleet.signal("r1", "cancel", {})
    before = site.proxy.count("heartbeat")
    await eventually(lambda: site.proxy.count("heartbeat") >= before + 2, what="it could hear")
    site.crew.let_go("act")
    await site.crew.status("r1", "cancelled")
    assert (await acted(site)).result == "done 1"
    await once(site)
    assert site.crew.reached("model") == 0


async def test_told_to_stop_in_the_middle_of_a_write_it_ends_its_turn_first(site: HttpCrew):
    site.crew.hold("act")
    worker = await site.worker("roller")
    await start(site, agent="roller", turns=2)
    await site.crew.reaches("act")
    polls = site.proxy.count("poll")
    worker.term()
    site.crew.let_go("act")
    assert (await worker.ended()).code == 0
    assert site.proxy.count("poll") == polls
    assert (await site.types("r1"))[-2:] == ["commit", "release"]
    await site.worker("roller")
    assert await site.answer("r1") == {"turns": 2}
    assert len(await unsafe(site)) == len(site.crew.effects()) == 2


# ---- unknown by its own word ------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["reconcile", "interrupt", "probe"])
async def test_a_write_that_raised_is_unknown_and_its_policy_decides(site: HttpCrew, policy: str):
    site.crew.hold("raise")
    await site.worker()
    await start(site, on_unknown=policy)
    if policy == "reconcile":
        await site.crew.status("r1", "indeterminate")
        await reconcile(site, "r1", {"outcome": "done", "result": "done 1"})
    expected = "interrupted" if policy == "interrupt" else "done 1"
    assert await site.answer("r1") == ["it", expected, "said"]
    await once(site)


async def test_an_answer_from_some_cache_is_no_second_permit(site: HttpCrew):
    """The write raised; asked again, its first permit is answered again."""
    site.crew.hold("raise")
    site.crew.hold("acted")
    await site.worker()
    await start(site)
    await site.crew.reaches("acted")
    stale = site.proxy.next("stale", lambda seen: seen.record == "step.started 1")
    site.crew.let_go("acted")
    await site.crew.status("r1", "indeterminate")
    assert stale.done.is_set()
    assert site.crew.reached("act") == 1
    await once(site)


async def test_a_result_that_could_not_be_sent_is_never_recorded_as_another(site: HttpCrew):
    """Its token is not known for a moment."""
    site.proxy.next("denied", lambda seen: seen.record == "step.completed 1")
    await site.worker()
    await start(site)
    await site.crew.status("r1", "indeterminate")
    assert not [r for r in await site.crew.records("r1") if getattr(r, "step", "") == "0/1"][1:]
    await once(site)


async def test_a_result_that_cannot_be_recorded_says_that_the_write_did_happen(site: HttpCrew):
    await site.worker("odd")
    for value in ("nan", "surrogate", "huge", "deep"):
        await start(site, value, "odd", value=value)
        await site.crew.status(value, "failed")
        error = str((await acted(site, value)).error)
        assert "can't be recorded" in error or "not_recordable" in error
        await once(site, value)


async def test_a_new_attempt_finds_its_writes_and_asks_the_model_anew(site: HttpCrew):
    await site.worker("stumbler")
    await start(site, agent="stumbler")
    answer = await site.answer("r1")
    keys = [key for _, _, key in site.crew.effects()]
    assert answer == [*keys, "attempt 2"]
    assert len(keys) == 2
    assert keys[0] != keys[1]


async def test_what_one_attempt_was_told_the_next_one_knows(site: HttpCrew):
    await start(site, agent="stumbler")
    await site.crew.fleet.send("r1", "heard", mode="steer", request_id="s1")
    await site.worker("stumbler")
    answer = await site.answer("r1")
    assert answer == ["heard", *(key for _, _, key in site.crew.effects()), "attempt 2"]
    assert (await site.types("r1")).count("input.placed") == 1


@pytest.mark.parametrize("code", ["changed", "shorter"])
async def test_changed_code_is_not_given_the_results_of_other_calls(site: HttpCrew, code: str):
    site.crew.hold("between")
    first = await site.worker()
    await start(site)
    await site.crew.reaches("between")
    await first.kill()
    await site.worker(f"clerk={code}")
    await site.crew.status("r1", "paused")
    assert site.crew.reached("look") == 1
    await site.crew.fleet.signal("r1", "cancel", {})


# ---- beside native ones -----------------------------------------------------------------------


@pytest.mark.parametrize("first", ["http", "native"])
@pytest.mark.parametrize("place", ["look", "act"])
async def test_a_run_begun_by_one_kind_of_worker_is_finished_by_the_other(
    site: HttpCrew, quick_deadlines: None, first: str, place: str
):
    site.crew.hold(place)
    kinds = [site.worker, site.native]
    if first == "native":
        kinds.reverse()
    begun = await kinds[0]()
    await start(site, on_unknown="probe", timeout_s=0.2)
    await site.crew.reaches(place)
    await begun.kill()
    site.crew.let_go(place)
    await kinds[1]()
    assert await site.answer("r1") == DONE
    starts = await unsafe(site)
    assert len({one.key for one in starts}) == 1
    assert len(starts) == 1 + (place == "act")
    assert len(site.crew.effects()) == 1
    records = await site.crew.records("r1")
    results = [r.step for r in records if isinstance(r, StepCompleted)]
    assert results == ["0/0", "0/1", "0/2"]


# ---- UR-69 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["poll", "read", "work"])
@pytest.mark.parametrize("successor", ["http", "native"])
async def test_of_a_worker_that_vanishes_others_get_the_work(
    site: HttpCrew, after: str, successor: str
):
    """UR-69: before reading the body, after it, after doing it."""
    await start(site)
    task = await site.poll()
    if after != "poll":
        await task.read()
    if after == "work":
        looked = await task.start(0, "look", "it", replay="safe")
        await task.complete(0, looked["n"], result={"seen": "it"})
        started = await task.start(1, "act", {"n": 1})
    await (site.worker() if successor == "http" else site.native())
    if after == "work":
        await site.crew.status("r1", "indeterminate")
        with pytest.raises(Refused) as late:
            await task.complete(1, started["n"], result="done 1")
        assert (late.value.status, late.value.code) == (409, "fenced")
    assert await site.answer("r1") == DONE
    assert len(await unsafe(site)) == 1
    assert site.crew.reached("act") == (after != "work")


async def test_a_late_result_of_a_read_is_refused_and_leaves_nothing(site: HttpCrew):
    await start(site)
    task = await site.poll()
    await task.read()
    started = await task.start(0, "look", "it", replay="safe")
    await site.worker()
    assert await site.answer("r1") == DONE
    before = await site.crew.entries("r1")
    with pytest.raises(Refused) as late:
        await task.complete(0, started["n"], result="late")
    assert late.value.status == 409
    assert [e.raw for e in await site.crew.entries("r1")] == [e.raw for e in before]


async def test_a_poll_cut_just_when_work_is_assigned_neither_loses_nor_doubles_it(site: HttpCrew):
    for number in range(2):
        lost = site.proxy.next("lose answer", lambda seen: seen.verb == "poll")
        worker = await site.worker()
        await start(site, f"p{number}")
        assert await site.answer(f"p{number}") == DONE
        await once(site, f"p{number}")
        assert lost.done.is_set()
        await worker.kill()
    for number in range(2):
        assert [c.reason for c in await site.crew.claims(f"p{number}")] == ["new"]


async def test_all_who_poll_one_agent_get_work(site: HttpCrew):
    site.crew.hold("act")
    workers = [await site.worker(), await site.worker(), await site.native(concurrency=1)]
    for number in range(4):
        await start(site, f"n{number}")
    for worker in workers:
        await site.crew.reaches("act", worker)
    site.crew.let_go("act")
    for number in range(4):
        assert await site.answer(f"n{number}") == DONE
        await once(site, f"n{number}")


async def test_names_that_look_alike_are_two_agents(site: HttpCrew):
    site.crew.hold("look")
    dot, dash = await site.worker("send.email"), await site.worker("send-email")
    await start(site, "dash", "send-email")
    await site.crew.reaches("look", dash)
    await start(site, "dot", "send.email")
    await site.crew.reaches("look", dot)
    site.crew.let_go("look")
    assert [await site.answer(run) for run in ("dot", "dash")] == [DONE, DONE]


@pytest.mark.parametrize("kind", ["http", "native"])
async def test_workers_lost_in_a_row_are_counted_alike_on_both_paths(site: HttpCrew, kind: str):
    site.crew.hold("look")
    await start(site)
    for lost in range(1, 6):
        worker = await (site.worker() if kind == "http" else site.native())
        await eventually(lambda n=lost: _claimed(site, n), 20, what=f"claim {lost}")
        await site.crew.reaches("look", worker)
        await worker.kill()
    await (site.worker() if kind == "http" else site.native())
    await eventually(lambda: _failed(site), 30, what="it is given up")
    assert site.crew.reached("look") == 5


async def _claimed(site: HttpCrew, count: int) -> bool:
    return len(await site.crew.claims("r1")) >= count


async def _failed(site: HttpCrew) -> bool:
    return any("restart_limit" in str(record) for record in await site.crew.records("r1"))
