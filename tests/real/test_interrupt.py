"""Ctrl-C and SIGTERM: one line, the exit code of the signal, and a run that goes on later."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from kit.cli import AGENTS, RUNFOLD, Child, Cli, Done, names, nothing_runs_in, run_line
from kit.waiting import eventually

pytestmark = pytest.mark.real

STEP = "tool/2/0/create_ticket"
FAST = ("--ack-wait", "1")


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def number(request: pytest.FixtureRequest) -> signal.Signals:
    found: signal.Signals = request.param
    return found


async def told_to_end(child: Child, number: signal.Signals) -> Done:
    """It gives the run up, with the exit code of the signal and no outcome on stdout."""
    done = await child.done()
    assert done.code == 128 + number, done
    assert done.out == "" or done.json["error"]["code"] == "interrupted", done
    assert "Traceback" not in done.err, done
    return done


SAID = [
    pytest.param(
        signal.SIGINT,
        "interrupted",
    ),
    pytest.param(signal.SIGTERM, "terminated"),
]


@pytest.mark.parametrize(("which", "word"), SAID)
async def test_a_run_told_to_end_says_so_in_one_line(
    any_cli: Cli, which: signal.Signals, word: str
) -> None:
    any_cli.hold("model")
    child = await any_cli.begin("i0", "quick")
    await any_cli.reached("model")
    child.send(which)
    done = await told_to_end(child, which)
    assert word in done.line and "can be taken up again" in done.line


async def test_a_run_told_to_end_in_a_model_call_goes_on_later(
    any_cli: Cli, number: signal.Signals
) -> None:
    cli = any_cli
    cli.hold("model")
    child = await cli.begin("i1", "quick")
    await cli.reached("model")
    child.send(number)
    await told_to_end(child, number)
    cli.let_go("model")
    if cli.kind == "embedded":
        await nothing_runs_in(cli.folder / ".runfold")
    # Given up in order: the next one neither asks nor waits for anybody.
    end = await cli.run("i1", "quick")
    assert (end.code, end.json["message"]) == (0, "Ticket filed."), end
    assert "does not answer" not in end.err
    assert len(cli.requests()) == 4  # the first one twice
    assert len(cli.effects("create_ticket")) == 1


async def test_a_run_told_to_end_in_an_async_read_goes_on_later(
    cli: Cli, number: signal.Signals
) -> None:
    cli.hold("tick")
    child = await cli.begin("i2", "clock")
    await cli.reached("tick")
    child.send(number)
    await told_to_end(child, number)
    cli.let_go("tick")
    assert (await cli.run("i2", "clock")).code == 0


async def test_a_sync_read_is_left_to_its_thread_and_done_again(
    any_cli: Cli, number: signal.Signals
) -> None:
    """A thread can't be stopped, but a read that goes on beside its repetition does no harm."""
    cli = any_cli
    cli.hold("lookup")
    child = await cli.begin("i3", "quick")
    await cli.reached("lookup")
    child.send(number)
    await told_to_end(child, number)
    cli.let_go("lookup")
    if cli.kind == "embedded":
        await nothing_runs_in(cli.folder / ".runfold")
    end = await cli.run("i3", "quick")
    assert (end.code, end.json["message"]) == (0, "Ticket filed."), end
    assert len(cli.effects("create_ticket")) == 1


async def test_a_sync_write_that_was_cut_off_is_unknown_never_repeated(
    cli: Cli, number: signal.Signals
) -> None:
    cli.hold("create_ticket")
    child = await cli.begin("i4", "quick")
    await cli.reached("create_ticket")
    child.send(number)
    refused = await cli.run("i4", "quick", *FAST)
    assert refused.code == 8, refused
    cli.let_go("create_ticket")
    await told_to_end(child, number)
    again = await cli.run("i4", "quick", *FAST)
    # Told to end while it ran: either its result was recorded, or nobody knows it.
    written = names(await cli.records("i4"))
    assert again.code == (0 if f"step.completed {STEP}" in written else 4), again
    assert len(cli.effects("create_ticket")) == 1


@pytest.mark.parametrize("times", [2, 3])
async def test_repeated_signals_give_no_run_up_while_its_write_still_works(
    cli: Cli, number: signal.Signals, times: int
) -> None:
    """Impatience must not let a second holder, or a permitted retry, run beside the first."""
    cli.hold("create_ticket")
    child = await cli.begin("i5", "quick")
    await cli.reached("create_ticket")
    for _ in range(times):
        child.send(number)
        await eventually(lambda: not pending(child), what="the signal is taken")
    await is_not_free(cli, "i5")
    cli.let_go("create_ticket")
    done = await told_to_end(child, number)
    assert "Task was destroyed" not in done.err
    assert len(cli.effects("create_ticket")) == 1


TWICE = f"""
import os, signal, sys
sys.path.insert(0, {str(AGENTS.parent)!r})
from agents import quick
import worker.invoke

wait_out = worker.invoke._wait_out

async def impatient(ended):
    os.kill(os.getpid(), signal.SIGINT)  # again, just when the first one is being dealt with
    await wait_out(ended)

worker.invoke._wait_out = impatient
"""


async def test_ctrl_c_twice_gives_no_run_up_while_its_write_still_works(
    on_file: Cli, tmp_path: Path
) -> None:
    """Else a permitted retry would run beside the call it repeats (R22)."""
    agent = tmp_path / "twice.py"
    agent.write_text(TWICE)
    on_file.hold("create_ticket")
    line = ("run", f"{agent}:quick", "--id=i7", "--input=hello", "--json")
    child = await on_file.execute(RUNFOLD, *line)
    await on_file.reached("create_ticket")
    child.send(signal.SIGINT)
    await eventually(lambda: not pending(child), what="the signal is taken")
    try:
        await is_not_free(on_file, "i7")
        assert child.running
    finally:
        on_file.let_go("create_ticket")
    await told_to_end(child, signal.SIGINT)
    assert len(on_file.effects("create_ticket")) == 1


async def is_not_free(cli: Cli, id: str) -> None:
    """Somebody holds it: nobody else runs it, nobody settles its write."""
    refused = await cli.run(id, "quick", *FAST)
    assert refused.code == 8 and refused.json["error"]["code"] == "store_locked", refused
    retry = await cli("reconcile", id, STEP, "--retry", "--json")
    assert retry.code == 8 and retry.json["error"]["code"] == "stale_signal", retry


def pending(child: Child) -> bool:
    """Whether a signal was sent that the process has not taken yet."""
    status = Path(f"/proc/{child.pid}/status").read_text()
    masks = [line.split()[1] for line in status.split("\n") if line[:6] in ("SigPnd", "ShdPnd")]
    return any(int(mask, 16) for mask in masks)


async def test_a_killed_user_of_the_embedded_server_leaves_none(embedded: Cli) -> None:
    embedded.hold("model")
    child = await embedded.begin("i6", "quick")
    await embedded.reached("model")
    await child.kill()
    embedded.let_go("model")
    await nothing_runs_in(embedded.folder / ".runfold")
    assert (await embedded.run("i6", "quick", *FAST)).code == 0


async def test_a_reader_that_hangs_up_is_no_error(on_file: Cli) -> None:
    """`runfold list | head -1`."""
    await on_file.forked([run_line(f"p{n}", "clock", input="x") for n in range(3)], at_once=3)
    pipe = f"{RUNFOLD} list --json | true; echo ${{PIPESTATUS[0]}}"
    done = await (await on_file.execute("bash", "-c", pipe)).done()
    assert done.out.strip() in ("0", "1") and done.err == "", done
