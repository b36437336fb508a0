"""Two processes, one run: one goes on, the other says so; a stalled one never writes again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kit.cli import Child, Cli, Done, names, run_line
from kit.proxy import Proxy
from kit.waiting import eventually

from journal.records import Claim

pytestmark = pytest.mark.real

STEP = "tool/2/0/create_ticket"
FAST = ("--ack-wait", "1")
ROUNDS = 10


@pytest.fixture
async def proxy(on_jetstream: Cli) -> AsyncIterator[Proxy]:
    assert on_jetstream.store is not None
    proxy = await Proxy.start(on_jetstream.store)
    yield proxy
    await proxy.stop()


def is_held(done: Done) -> None:
    assert (done.code, done.json["error"]["code"]) == (8, "store_locked"), done
    assert "is being worked on by" in done.line


def is_answered(done: Done) -> None:
    assert (done.code, done.json["message"]) == (0, "Ticket filed."), done


async def test_of_two_runs_at_once_one_goes_on_and_one_effect_happens(any_cli: Cli) -> None:
    cli = any_cli
    cli.hold("lookup")
    both = [await cli.begin("t1", "quick"), await cli.begin("t1", "quick")]
    await eventually(lambda: not all(child.running for child in both), 60, what="one stops")
    (loser,) = (child for child in both if not child.running)
    (winner,) = (child for child in both if child.running)
    is_held(await loser.done())
    await cli.reached("lookup")
    shown = await cli("show", "t1", "--json")
    assert (shown.code, shown.json["status"]) == (0, "running")
    assert [wait["what"] for wait in shown.json["waiting_on"]] == ["worker"]
    cli.let_go("lookup")
    is_answered(await winner.done())
    assert len(cli.effects("lookup")) == len(cli.effects("create_ticket")) == 1
    assert len(cli.requests()) == 3


async def test_of_many_runs_at_once_each_answers_or_is_told_who_has_it(cli: Cli) -> None:
    """Nothing is held here: whoever comes first, second, last."""
    line = run_line("t2", "quick", input="hello")
    found = await cli.forked([line] * 8, at_once=8)
    for done in found:
        if done.code == 8:
            is_held(done)
        else:
            is_answered(done)
    assert any(done.code == 0 for done in found)
    is_answered((await cli.forked([line], at_once=1))[0])
    assert len(cli.effects("lookup")) == len(cli.effects("create_ticket")) == 1
    assert len(cli.requests()) == 3


async def test_a_write_is_not_unknown_while_its_holder_lives(any_cli: Cli) -> None:
    """Nobody may reconcile a write that is running."""
    cli = any_cli
    cli.hold("create_ticket")
    holder = await cli.begin("t3", "quick")
    await cli.reached("create_ticket")
    refused = await cli("reconcile", "t3", STEP, "--retry", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (8, "stale_signal"), refused
    is_held(await cli.run("t3", "quick", *FAST))
    cli.let_go("create_ticket")
    is_answered(await holder.done())
    assert len(cli.effects("create_ticket")) == 1


async def test_a_stopped_holder_keeps_its_run_until_it_is_killed(cli: Cli) -> None:
    cli.hold("lookup")
    holder = await cli.begin("t4", "quick")
    await cli.reached("lookup")
    await holder.stop()
    refused = await cli.run("t4", "quick", *FAST)
    is_held(refused)
    if cli.kind == "jetstream":
        assert "which is connected but does not answer" in refused.line
    else:
        assert f"process {holder.pid}" in refused.line
    await holder.kill()
    cli.let_go("lookup")
    is_answered(await cli.run("t4", "quick", *FAST))
    assert len(cli.effects("create_ticket")) == 1
    assert len(cli.requests()) == 3


async def stalled_in_its_write(cli: Cli, proxy: Proxy, id: str, agent: str = "quick") -> Child:
    """A holder, SIGSTOPped in its write and then unknown to the server."""
    cli.hold("create_ticket")
    holder = await cli.on(proxy.url).begin(id, agent, *FAST)
    await cli.reached("create_ticket")
    await holder.stop()
    proxy.refuse(True)
    proxy.cut()
    return holder


async def test_a_stalled_holder_that_wakes_after_a_takeover_writes_nothing_more(
    on_jetstream: Cli, proxy: Proxy
) -> None:
    cli = on_jetstream
    holder = await stalled_in_its_write(cli, proxy, "t5")
    taken = await cli.run("t5", "quick", *FAST)
    assert (taken.code, taken.json["status"]) == (4, "indeterminate"), taken
    before = await cli.contents()
    proxy.refuse(False)
    cli.let_go("create_ticket")
    holder.go_on()
    fenced = await holder.done()
    assert (fenced.code, fenced.json["error"]["code"]) == (8, "fenced"), fenced
    assert "was taken over by worker" in fenced.err
    assert await cli.contents() == before
    assert len(cli.effects("create_ticket")) == 1
    # What it did is settled by a person, and the run goes on.
    assert (await cli("reconcile", "t5", STEP, "--done", '"TICKET-1"')).code == 0
    is_answered(await cli.run("t5", "quick", *FAST))
    assert len(cli.effects("create_ticket")) == 1
    assert len(cli.requests()) == 3


async def test_a_retry_waits_while_the_earlier_call_may_still_run(
    on_jetstream: Cli, proxy: Proxy
) -> None:
    """The holder lives and is back on the network: its call and the retry never overlap (R22)."""
    cli = on_jetstream
    holder = await stalled_in_its_write(cli, proxy, "t6", "swift")
    (unknown,) = (await cli.run("t6", "swift", *FAST)).json["unknown"]
    assert (await cli("reconcile", "t6", STEP, "--retry")).code == 0
    proxy.refuse(False)
    holder.go_on()
    await eventually(lambda: _is_back(cli), 20, what="the holder answers again")
    later = await cli.run("t6", "swift", *FAST)
    assert (later.code, later.json["status"]) == (5, "waiting"), later
    (wait,) = later.json["waiting_on"]
    assert (wait["what"], wait["until"]) == ("timer", unknown["deadline"])
    over = datetime.fromisoformat(unknown["deadline"])
    await eventually(lambda: datetime.now(UTC) > over, what="the deadline passes")
    later = await cli.run("t6", "swift", *FAST)  # the holder says that its call still runs
    assert (later.code, later.json["status"]) == (5, "waiting"), later
    assert len(cli.effects("create_ticket")) == 1
    cli.let_go("create_ticket")
    assert (await holder.done()).json["error"]["code"] == "fenced"
    is_answered(await cli.run("t6", "swift", *FAST))
    first, second = cli.effects("create_ticket")
    assert first == second


async def _is_back(cli: Cli) -> bool:
    """Whether the first claim's worker answers on its subject again."""
    claims = [record for record in await cli.records("t6") if isinstance(record, Claim)]
    async with cli.client() as client:
        try:
            question = b'{"run": "", "claim": 0}'
            await client.request(f"{cli.namespace}.worker.{claims[0].worker}", question, timeout=1)
        except Exception:  # no responder yet, or silence
            return False
    return True


async def test_of_ten_starts_of_one_id_one_input_wins(cli: Cli) -> None:
    lines = [run_line("t7", "quick", input=f"input {number % 2}") for number in range(10)]
    found = await cli.forked(lines, at_once=10)
    records = await cli.records("t7")
    won = int(records[0].input.removeprefix("input "))  # type: ignore[attr-defined]
    for number, done in enumerate(found):
        if number % 2 != won:
            assert (done.code, done.json["error"]["code"]) == (8, "input_mismatch"), done
            assert "exists with another input" in done.line
        elif done.code == 8:
            is_held(done)
        else:
            is_answered(done)
    assert names(records).count("run.started") == 1
    assert len(cli.effects("create_ticket")) <= 1
    is_answered((await cli.forked([lines[won]], at_once=1))[0])
    assert len(cli.effects("create_ticket")) == 1
    assert {request[-1]["content"] for request in cli.requests()[:1]} == {f"input {won}"}


async def test_approve_and_reject_at_once_are_one_decision(cli: Cli) -> None:
    ids = [f"t8-{number}" for number in range(ROUNDS)]
    runs = [run_line(id, "desk", input="hello") for id in ids]
    started = await cli.forked(runs, at_once=4)
    decisions: list[list[str]] = []
    for number, done in enumerate(started):
        marker = done.json["pending"][0]["marker"]
        pair = [["approve", marker, "--json"], ["reject", marker, "--reason", "no", "--json"]]
        decisions += pair if number % 2 else pair[::-1]
    answers = await cli.forked(decisions, at_once=2)
    approved: set[str] = set()
    for number, id in enumerate(ids):
        words = [line[0] for line in decisions[2 * number : 2 * number + 2]]
        pair = answers[2 * number : 2 * number + 2]
        assert sorted(done.code for done in pair) == [0, 8], pair
        won = words[[done.code for done in pair].index(0)]
        (lost,) = (done for done in pair if done.code == 8)
        (kept,) = (done for done in pair if done.code == 0)
        assert kept.json["result"] == "applied"
        error = lost.json["error"]
        assert error["code"] == "decision_conflict"
        assert f"{won} by " in lost.line and f"record {kept.json['n']}" in lost.line
        if won == "approve":
            approved.add(id)
    for done in await cli.forked(runs, at_once=4):
        is_answered(done)
    assert sorted(key.partition(":")[0] for key in cli.effects("create_ticket")) == sorted(approved)


async def test_a_decision_said_twice_is_one_record(cli: Cli) -> None:
    marker = (await cli.run("t9")).json["pending"][0]["marker"]
    answers = await cli.forked([["approve", marker, "--json"]] * 6, at_once=6)
    assert [done.code for done in answers] == [0] * 6
    assert sorted(done.json["result"] for done in answers) == ["applied"] + ["repeated"] * 5
    assert len({done.json["n"] for done in answers}) == 1
    assert names(await cli.records("t9")).count("signal") == 1


async def test_an_approval_that_lands_while_the_run_is_going_takes_effect_in_it(
    cli: Cli, tmp_path: Path
) -> None:
    """Signals need no lock, and one that comes before its call is kept for it (R11, R60)."""
    twin = Cli(tmp_path / "twin", "runs")  # a marker depends on nothing but the call and its run
    marker = (await twin.run("t10")).json["pending"][0]["marker"]
    cli.hold("lookup")
    child = await cli.begin("t10")
    await cli.reached("lookup")
    kept = await cli("approve", marker, "--json")
    assert (kept.code, kept.json["result"]) == (0, "kept"), kept
    cli.let_go("lookup")
    is_answered(await child.done())
    assert len(cli.effects("create_ticket")) == 1
