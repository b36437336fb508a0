"""Workers killed with SIGKILL inside a read and a write: nothing is repeated unasked (R34)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from kit.cli import Cli, Done, names, run_line
from kit.waiting import eventually

from journal.waits import instant_text

pytestmark = pytest.mark.real

STEP = "tool/2/0/create_ticket"
FAST = ("--ack-wait", "1")


async def killed(cli: Cli, id: str, place: str, agent: str = "desk", times: int = 1) -> Done:
    """A worker that is killed at this place."""
    cli.hold(place)
    worker = await cli.begin(id, agent, *FAST)
    await cli.reached(place, times)
    done = await worker.kill()
    cli.let_go(place)
    assert (done.code, done.out) == (-9, "")
    return done


async def killed_in_the_write(cli: Cli, id: str = "k1", agent: str = "desk") -> None:
    """Three workers: killed in the read; stops for approval; killed in the approved write."""
    await killed(cli, id, "lookup", agent)
    second = await cli.run(id, agent, *FAST)
    assert second.code == 3, second
    assert (await cli("approve", second.json["pending"][0]["marker"])).code == 0
    await killed(cli, id, "create_ticket", agent)


async def surely_over(cut_off: Done) -> None:
    """On a server nobody can tell who is dead from who is cut off: a retry waits for the deadline
    of the write. In a directory the lock of the dead is free."""
    (unknown,) = cut_off.json["unknown"]
    if unknown["deadline"] is not None:
        until = datetime.fromisoformat(unknown["deadline"])
        await eventually(lambda: datetime.now(UTC) > until, what="the deadline passes")


def is_indeterminate(done: Done, start: int | None = None) -> int:
    """The record of the start that nobody knows the outcome of."""
    assert done.code == 4, done
    shape = done.json
    assert (shape["status"], shape["pending"]) == ("indeterminate", [])
    (unknown,) = shape["unknown"]
    assert (unknown["step"], unknown["tool"]) == (STEP, "create_ticket")
    assert [wait["what"] for wait in shape["waiting_on"]] == ["reconcile"]
    assert start is None or unknown["start"] == start
    return unknown["start"]


async def test_five_workers_two_killed_three_model_calls_one_ticket(cli: Cli) -> None:
    await killed_in_the_write(cli)
    start = is_indeterminate(await cli.run("k1", "desk", *FAST))
    is_indeterminate(await cli("show", "k1", "--json"), start)
    assert (await cli("reconcile", "k1", STEP, "--done", '"TICKET-7"')).code == 0
    fifth = await cli.run("k1", "desk", *FAST)
    assert (fifth.code, fifth.json["message"]) == (0, "Ticket filed."), fifth
    assert fifth.json["model_calls"] == 3
    assert len(cli.requests()) == 3
    assert len(cli.effects("create_ticket")) == 1
    assert len(cli.effects("lookup")) == 2  # the read that was cut off was done again
    assert len(set(cli.effects("lookup"))) == 1  # under the same key
    assert cli.requests()[-1][-1] == {
        "role": "tool",
        "content": "TICKET-7",
        "call_id": cli.requests()[-1][-2]["calls"][0]["id"],
    }
    written = names(await cli.records("k1"))
    assert written.count("step.started tool/1/0/lookup") == 2
    assert written.count(f"step.started {STEP}") == written.count(f"step.completed {STEP}") == 1


async def test_a_model_call_that_was_cut_off_is_made_again(cli: Cli) -> None:
    await killed(cli, "k2", "model")
    end = await cli.run("k2", "clock", input="hello")
    assert end.code == 8 and end.json["error"]["code"] == "input_mismatch"  # another agent
    end = await cli.run("k2", "desk", *FAST)
    assert end.code == 3, end
    assert len(cli.requests()) == 3  # llm/1 twice, llm/2 once


async def test_five_restarts_after_the_kill_repeat_nothing(cli: Cli) -> None:
    """UR-05: the third state needs a person, however often somebody starts the run again."""
    await killed_in_the_write(cli)
    restart = run_line("k1", "desk", *FAST, input="hello")
    restarts = await cli.forked([restart] * 5, at_once=1)
    starts = {is_indeterminate(done) for done in restarts}
    assert len(restarts) == 5 and len(starts) == 1
    shown, listed = await cli.forked([["show", "k1", "--json"], ["list", "--json"]], at_once=2)
    is_indeterminate(shown, *starts)
    assert [run["status"] for run in listed.json["runs"]] == ["indeterminate"]
    assert len(cli.effects("create_ticket")) == 1
    given = {"ticket": 7, "by": ["hand", None]}
    settle = ["reconcile", "k1", STEP, "--done", '{"ticket": 7, "by": ["hand", null]}']
    settled, end = await cli.forked([settle, restart], at_once=1)
    assert (settled.code, end.code) == (0, 0), (settled, end)
    assert cli.requests()[-1][-1]["content"] == given
    assert len(cli.effects("create_ticket")) == 1


async def test_each_permitted_retry_starts_the_write_once_under_the_same_key(cli: Cli) -> None:
    await killed_in_the_write(cli, agent="brief")
    cut_off = await cli.run("k1", "brief", *FAST)
    first = is_indeterminate(cut_off)
    assert (await cli("reconcile", "k1", STEP, "--retry")).code == 0
    await surely_over(cut_off)
    await killed(cli, "k1", "create_ticket", "brief", times=2)
    # The permit is spent by the start that was cut off: unknown again.
    cut_off = await cli.run("k1", "brief", *FAST)
    second = is_indeterminate(cut_off)
    assert second > first
    assert len(cli.effects("create_ticket")) == 2
    reconcile = ["reconcile", "k1", STEP, "--json"]
    refusals = await cli.forked(
        [
            [*reconcile, "--retry"],
            [*reconcile, "--done", "1"],
            [*reconcile, "--done", "1", "--start", str(first)],
            [*reconcile, "--done", "1", "--start", str(second + 1)],
        ],
        at_once=2,
    )
    for refused in refusals:
        assert (refused.code, refused.json["error"]["code"]) in [
            (8, "stale_signal"),
            (8, "decision_conflict"),  # start `first` was answered with retry
        ], refused
    assert all(f"start {second}" in refused.line for refused in refusals[:2])
    permit = [*reconcile, "--retry", "--start", str(second)]
    restart = run_line("k1", "brief", *FAST, input="hello")
    await surely_over(cut_off)
    permitted, end, again = await cli.forked([permit, restart, restart], at_once=1)
    assert (permitted.code, end.code, again.code) == (0, 0, 0), (permitted, end, again)
    assert end.json["message"] == "Ticket filed."
    assert again.json["records"] == end.json["records"]
    keys = cli.effects("create_ticket")
    assert len(keys) == 3 and len(set(keys)) == 1 and keys[0].startswith(f"k1:{STEP}:")
    assert cli.requests()[-1][-1]["content"] == "TICKET-1"
    assert len(cli.requests()) == 3


async def test_a_person_who_permits_a_retry_is_told_how_long_it_waits(cli: Cli) -> None:
    await killed(cli, "k5", "create_ticket", "quick")
    (unknown,) = (await cli.run("k5", "quick", *FAST)).json["unknown"]
    deadline = unknown["deadline"]
    told = await cli.forked(
        [["show", "k5"], ["inbox"], ["reconcile", "k5", STEP, "--retry"]], at_once=1
    )
    end = await cli.run("k5", "quick", *FAST)
    if deadline is None:  # the lock tells
        assert not any("a retry waits" in done.out for done in told)
        assert (end.code, len(cli.effects("create_ticket"))) == (0, 2), end
        return
    until = f"a retry waits until {instant_text(datetime.fromisoformat(deadline))}"
    assert all(until in done.out for done in told), told
    (wait,) = end.json["waiting_on"]
    assert (end.code, wait["what"], wait["until"]) == (5, "timer", deadline), end
    assert len(cli.effects("create_ticket")) == 1


async def test_a_second_worker_that_dies_in_the_recovery_changes_nothing(cli: Cli) -> None:
    """Killed while the run is taken over from a killed one: the next one still goes on (UR-06)."""
    await killed(cli, "k3", "lookup", "quick")
    await killed(cli, "k3", "lookup", "quick", times=2)
    end = await cli.run("k3", "quick", *FAST)
    assert (end.code, end.json["message"]) == (0, "Ticket filed."), end
    assert len(cli.requests()) == 3
    assert len(cli.effects("lookup")) == 3 and len(cli.effects("create_ticket")) == 1


async def test_a_server_that_lost_its_only_user_to_a_kill_goes_too(embedded: Cli) -> None:
    """The kill example without --store: the data stays, the server does not."""
    await killed(embedded, "k4", "create_ticket", "quick")
    is_indeterminate(await embedded.run("k4", "quick", *FAST))
    assert (await embedded("reconcile", "k4", STEP, "--done-text", "TICKET-7")).code == 0
    end = await embedded.run("k4", "quick", *FAST)
    assert (end.code, len(embedded.requests())) == (0, 3), end
    assert embedded.requests()[-1][-1]["content"] == "TICKET-7"
    assert len(embedded.effects("create_ticket")) == 1
