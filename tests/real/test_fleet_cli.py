"""`runfold worker` and the commands around it, on a real server: start, follow, inbox, drain, exit
codes, what doctor and sweep find (R7, R48, R54, R69)."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.cli import AGENTS, RUNFOLD, Cli, Done, Executed, names, nothing_runs_in
from kit.waiting import eventually

from runfold import Fleet, JetStreamStore, connect

pytestmark = pytest.mark.real

DESK, QUICK, CLOCK = (f"{AGENTS}:{name}" for name in ("desk", "quick", "clock"))
STEP = "tool/2/0/create_ticket"


class WorkerProcess:
    """`runfold worker` with what it says in a file, so that it can be read while it runs."""

    def __init__(self, cli: Cli, child: Executed, err: Path) -> None:
        self.cli = cli
        self.child = child
        self._err = err

    @property
    def err(self) -> str:
        return self._err.read_text() if self._err.exists() else ""

    async def says(self, text: str) -> None:
        try:
            await eventually(lambda: text in self.err or not self.child.running, 30)
        finally:
            assert text in self.err, self.err

    async def ended(self) -> int:
        return (await self.child.done()).code


async def begin(cli: Cli, *words: str, err: str = "worker.err") -> WorkerProcess:
    line = f'exec "$0" "$@" 2> {err}'
    child = await cli.execute("bash", "-c", line, RUNFOLD, "worker", *words)
    worker = WorkerProcess(cli, child, cli.folder / err)
    await worker.says("is ready")
    return worker


@pytest.fixture
def cli(on_jetstream: Cli) -> Cli:
    return on_jetstream


@asynccontextmanager
async def fleet_of(cli: Cli) -> AsyncIterator[Fleet]:
    async with connect(cli.store, namespace=cli.namespace) as fleet:
        yield fleet


async def no_tasks_are_left(cli: Cli) -> None:
    """As if whoever was to publish them had died, or an operator purged the stream."""
    async with cli.client() as client:
        await client.jetstream().purge_stream(f"{cli.namespace.upper()}_TASKS")


def records_of(done: Done) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


# -- a run, worked by a worker ------------------------------------------------------------------


async def test_a_run_is_started_decided_and_followed_from_other_processes(cli: Cli) -> None:
    await begin(cli, DESK, CLOCK, "--name", "desk-7")
    start = ("start", "desk", "--input", "hello", "--id", "a1", "--wait", "30", "--json")
    first = await cli(*start)
    assert (first.code, first.json["status"], first.json["created"]) == (
        3,
        "awaiting_approval",
        True,
    )
    marker = first.json["pending"][0]["marker"]
    (item,) = (await cli("inbox", "--json")).json
    assert (item["kind"], item["run"], item["marker"], item["step"]) == (
        "approval",
        "a1",
        marker,
        STEP,
    )
    assert item["text"] and item["since"] and item["input"] == {"title": "VPN is down"}
    plain = await cli("inbox")
    assert f"runfold approve {marker} --store {cli.store}" in plain.out
    follower = await cli.start("follow", "a1", "--after", "3", "--json")
    assert (await cli("approve", marker)).code == 0
    followed = await follower.done()
    entries = await cli.entries("a1")
    assert followed.code == 0
    assert followed.out.encode() == b"".join(entry.raw + b"\n" for entry in entries[3:])
    again = await cli(*start)
    assert (again.code, again.json["message"], again.json["created"]) == (0, "Ticket filed.", False)
    assert (await cli("inbox", "--json")).json == []
    assert len(cli.effects("create_ticket")) == 1
    plain = await cli("follow", "a1")
    assert (plain.code, len(plain.out.splitlines())) == (0, len(entries))


async def test_workers_and_queue_show_who_works_and_what_waits(cli: Cli) -> None:
    cli.hold("tick")
    worker = await begin(cli, CLOCK, "--concurrency", "3", "--name", "here")
    assert (await cli("start", "clock", "--input", "x", "--id", "c1")).out == "c1\n"
    assert (await cli("start", "desk", "--input", "x", "--id", "d1", "--json")).code == 0
    await cli.reached("tick")
    (report,) = (await cli("workers", "--json")).json["workers"]
    assert report["worker"].startswith("here-") and report["pid"] == worker.child.pid
    assert [agent["name"] for agent in report["agents"]] == ["clock"]
    assert (report["concurrency"], report["draining"]) == (3, False)
    assert [held["run"] for held in report["active"]] == ["c1"]
    found = (await cli("queue", "--json")).json
    assert found.keys() == {"agents", "timers"}
    clock, desk = found["agents"]
    assert (clock["agent"], clock["workers"], clock["in_progress"]) == ("clock", 1, 1)
    assert (desk["agent"], desk["workers"], desk["pending"]) == ("desk", 0, 1)
    for line, text in ((("workers",), "run c1 under claim"), (("queue",), "1 waiting")):
        assert text in (await cli(*line)).out
    cli.let_go("tick")
    assert (await cli("follow", "c1")).code == 0


async def test_a_failed_and_a_cancelled_run_end_followers_with_6_and_7(cli: Cli) -> None:
    cli.hold("tick")
    await begin(cli, f"{AGENTS}:mute", CLOCK)
    failed = await cli("start", "mute", "--input", "x", "--id", "f1", "--wait", "30", "--json")
    assert (failed.code, failed.json["status"]) == (6, "failed")
    assert (await cli("follow", "f1", "--json")).code == 6
    await cli("start", "clock", "--input", "x", "--id", "c1")
    await cli.reached("tick")
    running = await cli("start", "clock", "--input", "x", "--id", "c1", "--wait", "0", "--json")
    assert (running.code, running.json["status"]) == (0, "running")
    follower = await cli.start("follow", "c1")
    told = await cli("cancel", "c1", "--reason", "not needed", "--json")
    assert (told.code, told.json["result"]) == (0, "applied")
    followed = await follower.done()
    assert followed.code == 7 and "not needed" in followed.out
    assert (await cli("cancel", "c1", "--json")).code == 8


async def test_a_file_names_the_agent_and_its_revision(cli: Cli) -> None:
    started = await cli(
        "start", CLOCK, "--input-json", '{"a": 1}', "--id", "r1", "--priority", "-1"
    )
    assert started.code == 0 and "run r1 started" in started.err
    (record,) = await cli.records("r1")
    assert (record.agent, record.revision, record.priority) == ("clock", "1", -1)  # type: ignore[attr-defined]


# -- being told to stop -------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_an_idle_worker_that_is_told_to_stop_ends_with_0(
    cli: Cli, number: signal.Signals
) -> None:
    worker = await begin(cli, CLOCK)
    worker.child.send(number)
    assert await worker.ended() == 0
    assert "is stopping" in worker.err and "Traceback" not in worker.err
    assert (await cli("workers", "--json")).json == {"workers": []}


async def test_a_call_may_end_within_the_grace_and_the_run_is_handed_over(cli: Cli) -> None:
    cli.hold("create_ticket")
    worker = await begin(cli, QUICK, "--grace", "600")
    await cli("start", "quick", "--input", "x", "--id", "q1")
    await cli.reached("create_ticket")
    worker.child.send(signal.SIGTERM)
    await worker.says("is stopping")
    cli.let_go("create_ticket")
    assert await worker.ended() == 0
    assert names(await cli.records("q1"))[-2:] == [f"step.completed {STEP}", "release"]
    await begin(cli, QUICK, err="second.err")
    assert (await cli("follow", "q1")).code == 0
    assert len(cli.effects("create_ticket")) == 1


async def test_told_twice_it_waits_for_no_call_and_the_write_is_unknown(cli: Cli) -> None:
    cli.hold("create_ticket")
    worker = await begin(cli, QUICK, "--grace", "600")
    await cli("start", "quick", "--input", "x", "--id", "q1")
    await cli.reached("create_ticket")
    worker.child.send(signal.SIGINT)
    await worker.says("is stopping")
    assert worker.child.running
    worker.child.send(signal.SIGINT)
    assert await worker.ended() == 0
    assert "cut off" in worker.err and "Traceback" not in worker.err
    cli.let_go("create_ticket")
    await begin(cli, QUICK, "--ack-wait", "1", err="second.err")
    asked = await cli("start", "quick", "--input", "x", "--id", "q1", "--wait", "60", "--json")
    assert (asked.code, asked.json["status"]) == (4, "indeterminate")
    (item,) = (await cli("inbox", "--json")).json
    assert (item["kind"], item["step"], item["marker"]) == ("reconcile", STEP, None)
    assert "--retry" in (await cli("inbox")).out
    settled = await cli("reconcile", "q1", STEP, "--start", str(item["start"]), "--done", '"T"')
    assert settled.code == 0
    assert (await cli("follow", "q1")).code == 0
    assert len(cli.effects("create_ticket")) == 1


CLOSES = """
import asyncio
import gc
from nats.aio.client import Client
from runfold import Agent, read
from runfold.testing import ScriptedModel, call, say

@read
async def close() -> str:
    (client,) = [one for one in gc.get_objects() if isinstance(one, Client) and one.is_connected]
    # nats-server cuts the connection over it, and nats-py is then closed for good
    await client.publish("x.y", b"x" * client.max_payload, headers={"One": "too many"})
    await asyncio.sleep(3600)

agent = Agent("closes", model=ScriptedModel(call("close"), say("Done.")), tools=[close])
"""


async def test_a_worker_whose_connection_is_closed_for_good_ends_with_9(cli: Cli) -> None:
    cli.folder.joinpath("closes.py").write_text(CLOSES)
    worker = await begin(cli, "closes.py:agent")
    await cli("start", "closes", "--input", "x")
    assert await worker.ended() == 9
    assert "maximum payload" in worker.err.lower() and "Traceback" not in worker.err


HANGS = """
import asyncio
import threading
from runfold import Agent, read
from runfold.testing import ScriptedModel, call, say

@read
async def hang() -> str:
    threading.Thread(target=threading.Event().wait).start()
    open("places", "a").write("hang\\n")
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

agent = Agent("hangs", model=ScriptedModel(call("hang"), say("Done.")), tools=[hang])
"""


async def test_nothing_an_agent_does_keeps_a_worker_from_leaving(cli: Cli) -> None:
    cli.folder.joinpath("hangs.py").write_text(HANGS)
    worker = await begin(cli, "hangs.py:agent", "--grace", "0")
    await cli("start", "hangs", "--input", "x")
    await cli.reached("hang")
    worker.child.send(signal.SIGTERM)
    assert await worker.ended() == 0


async def test_without_a_store_a_worker_and_others_share_the_embedded_server(
    embedded: Cli,
) -> None:
    worker = await begin(embedded, CLOCK)
    started = await embedded("start", "clock", "--input", "x", "--wait", "60", "--json")
    assert (started.code, started.json["message"]) == (0, "It ticks.")
    worker.child.send(signal.SIGTERM)
    assert await worker.ended() == 0
    await nothing_runs_in(embedded.folder / ".runfold")


async def test_health_is_served_while_it_works(cli: Cli) -> None:
    worker = await begin(cli, CLOCK, "--health", "0")
    url = worker.err.split("health: ")[1].split()[0]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: ASYNC210
        assert answer.status == 200 and json.load(answer)["ok"] is True


# -- what nobody would move on ------------------------------------------------------------------


async def found_by_doctor(cli: Cli, run: str, problem: str) -> dict[str, Any]:
    """Young records are somebody's at work: it may take some seconds."""

    async def found() -> dict[str, Any] | None:
        runs = (await cli("doctor", "--json")).json["runs"]
        return next((one for one in runs if (one["run"], one["problem"]) == (run, problem)), None)

    one = await eventually(found, 30, what=f"doctor says {problem} of {run}")
    assert one.keys() == {"run", "problem", "what", "fix"} and all(one.values())
    return one


async def test_doctor_finds_a_run_that_no_worker_may_take_and_sweep_wakes_it(cli: Cli) -> None:
    await cli("start", "clock", "--input", "x", "--id", "lost")
    await no_tasks_are_left(cli)
    assert "clock" in (await found_by_doctor(cli, "lost", "no_worker"))["what"]
    plain = await cli("doctor")
    assert plain.code == 0 and "run lost: " in plain.out

    async def woken() -> bool:
        done = await cli("sweep", "--json")
        assert done.code == 0 and done.json.keys() == {"dispatched", "looked_at", "next"}
        return done.json["dispatched"] == ["lost"]

    await eventually(woken, 30, what="the run is swept")
    (clock,) = (await cli("queue", "--json")).json["agents"]
    assert (clock["agent"], clock["pending"]) == ("clock", 1)
    await begin(cli, CLOCK)
    assert (await cli("follow", "lost")).code == 0
    assert (await cli("doctor", "--json")).json["runs"] == []


@asynccontextmanager
async def as_a_worker_of(cli: Cli, agent: str) -> AsyncIterator[Fleet]:
    """A worker that answers, and takes nothing up."""
    report = {"worker": "w1", "agents": [{"name": agent, "revision": "1"}]}
    async with fleet_of(cli) as fleet:
        assert isinstance(fleet.store, JetStreamStore)
        async with fleet.store.reporting(lambda _: json.dumps(report).encode()):
            yield fleet


async def test_doctor_finds_a_run_that_no_task_tells_of_and_sweep_wakes_it(cli: Cli) -> None:
    async with as_a_worker_of(cli, "clock"):
        await cli("start", "clock", "--input", "x", "--id", "r1")
        assert (await cli("doctor", "--json")).json["runs"] == []
        await no_tasks_are_left(cli)
        await found_by_doctor(cli, "r1", "no_task")


WAITERS = """
from datetime import timedelta
from runfold import Complete, Continue, turn

@turn("sleeper")
async def sleeper(ctx):
    return Continue(delay=timedelta(seconds=1))

@turn("parent")
async def parent(ctx):
    child = await ctx.spawn("child", "x", name="c")
    return Continue(until_child=child)

@turn("child")
async def child(ctx):
    return Complete("grown up")
"""


async def test_doctor_finds_a_wait_that_is_overdue(cli: Cli) -> None:
    cli.folder.joinpath("waiters.py").write_text(WAITERS)
    line = ("run", "waiters.py:sleeper", "--id", "r1", "--input", "x", "--json")
    assert (await cli(*line)).code == 5
    await no_tasks_are_left(cli)
    async with as_a_worker_of(cli, "sleeper"):
        await found_by_doctor(cli, "r1", "overdue")
    assert (await cli("list", "--status", "running", "--json")).json["runs"][0]["run"] == "r1"


async def test_doctor_finds_a_parent_that_was_not_told_of_its_childs_end(cli: Cli) -> None:
    cli.folder.joinpath("waiters.py").write_text(WAITERS)
    waiting = await cli("run", "waiters.py:parent", "--id", "r1", "--input", "x", "--json")
    assert (waiting.code, waiting.json["waiting_on"][0]["what"]) == (5, "child")
    child = waiting.json["waiting_on"][0]["ended_by"].rpartition(" ")[2]
    # by a worker that died before it told the parent
    await cli.append_chained(child, "run.completed", message="grown up")
    found = await found_by_doctor(cli, "r1", "child_ended")
    assert child in found["what"]


async def test_doctor_finds_a_revision_that_nobody_has(cli: Cli) -> None:
    await begin(cli, DESK)
    async with fleet_of(cli) as fleet:
        await fleet.start("desk", "x", run_id="old", revision="0")
    assert "revision 0" in (await found_by_doctor(cli, "old", "no_worker"))["what"]


async def test_doctor_finds_a_run_whose_worker_is_gone_and_a_damaged_one(cli: Cli) -> None:
    cli.hold("tick")
    worker = await begin(cli, CLOCK)
    await cli("start", "clock", "--input", "x", "--id", "c1")
    await cli.reached("tick")
    assert (await cli("doctor", "--json")).json["runs"] == []
    await worker.child.kill()
    await no_tasks_are_left(cli)
    assert "is gone" in (await found_by_doctor(cli, "c1", "worker_gone"))["what"]
    await cli.append_raw("c1", b'{"nothing": "of ours"}')
    await found_by_doctor(cli, "c1", "damaged")
    (item,) = (await cli("inbox", "--json")).json
    assert (item["kind"], item["run"], item["status"]) == ("operator", "c1", "damaged")


# -- what is refused ----------------------------------------------------------------------------


async def test_what_makes_no_worker_is_refused_with_2(cli: Cli) -> None:
    same = cli.folder / "same.py"
    same.write_text(f"from runpy import run_path\nagent = run_path({str(AGENTS)!r})['clock']\n")
    cases = [
        ([CLOCK, f"{same}:agent"], "two agents are named clock"),
        (["nothing.py:agent"], "no such file"),
        ([f"{AGENTS}:lookup"], "not an Agent"),
        ([CLOCK, "--concurrency", "0"], "concurrency"),
        ([CLOCK, "--ack-wait", "0.5"], "ack_wait"),
        ([CLOCK, "--restart-limit", "1001"], "restart_limit"),
        ([CLOCK, "--health", "here"], "PORT"),
        ([CLOCK, "--name", "no name"], "not a name"),
        ([CLOCK, "--store", "runs"], "a directory has no workers"),
    ]
    found = await cli.forked([["worker", *words] for words, _ in cases], at_once=3)
    for (words, text), done in zip(cases, found, strict=True):
        assert (done.code, done.out) == (2, ""), (words, done)
        assert text in done.line, (words, done)


async def test_a_server_without_streams_or_none_at_all_is_9(cli: Cli) -> None:
    for words in (["--namespace", "other"], ["--store", "nats://127.0.0.1:1"]):
        for line in (["worker", CLOCK], ["start", "clock", "--input", "x"], ["inbox"], ["queue"]):
            done = await cli(*line, *words)
            assert done.code == 9, (line, done)
            assert "Traceback" not in done.err


async def test_what_is_no_start_is_refused(cli: Cli) -> None:
    await cli("start", "clock", "--input", "x", "--id", "taken")
    cases: list[tuple[list[str], int, str]] = [
        (["start", "clock"], 2, "usage"),
        (["start", "no name", "--input", "x"], 2, "invalid_id"),
        (["start", "clock", "--input", "x", "--id", "no id"], 2, "invalid_id"),
        (["start", "clock", "--input", "x", "--priority", "2"], 2, "bad_payload"),
        (["start", "clock", "--input", "x", "--key", ""], 2, "bad_payload"),
        (["start", "clock", "--input", "x", "--wait", "-1"], 2, "usage"),
        (["start", "clock", "--input", "y", "--id", "taken"], 8, "input_mismatch"),
        (["start", "desk", "--input", "x", "--id", "taken"], 8, "input_mismatch"),
        (["follow", "nobody"], 8, "run_not_found"),
        (["follow", "taken", "--after", "-1"], 2, "usage"),
        (["sweep", "--after", "no id"], 2, "invalid_id"),
    ]
    found = await cli.forked([[*words, "--json"] for words, _, _ in cases], at_once=4)
    for (words, code, word), done in zip(cases, found, strict=True):
        assert (done.code, done.json["error"]["code"]) == (code, word), (words, done)
    assert len(await cli.records("taken")) == 1
