"""`runfold dev`: one terminal with it, others that find it; reload, crash, Ctrl-C, no orphans."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kit.cli import RUNFOLD, Cli, Executed, nothing_runs_in
from kit.waiting import eventually

pytestmark = pytest.mark.real

AGENT = """
import os
import time
from pathlib import Path
from runfold import Agent, read, write
from runfold.testing import ScriptedModel, call, say

@read
def lookup(query: str) -> str:
    with open("places", "a") as file:
        file.write("lookup\\n")
    while Path("hold").exists():
        time.sleep(0.01)
    return "nothing"

@write
def create_ticket(title: str) -> str:
    with open("tickets", "a") as file:
        file.write(title + "\\n")
    return "TICKET-1"

agent = Agent(
    "helpdesk",
    revision="{revision}",
    compatible=("1",),
    model=ScriptedModel(
        call("lookup", query="VPN"), call("create_ticket", title="VPN is down"), say("{answer}")
    ),
    tools=[lookup, create_ticket],
)
"""
# A user's file of this name must not be taken for our package (STYLE 3).
SHADOWS = "raise SystemExit('the wrong worker was imported')\n"


class Dev:
    """`runfold dev` in a terminal; what it says stands in files."""

    def __init__(self, cli: Cli, child: Executed) -> None:
        self.cli = cli
        self.child = child

    def said(self) -> str:
        return "".join(
            path.read_text() for path in (self.cli.folder / "out", self.cli.folder / "err")
        )

    async def says(self, text: str, times: int = 1) -> None:
        def told() -> bool:
            return self.said().count(text) >= times or not self.child.running

        await eventually(told, 60, what=f"it says {text}")
        assert self.said().count(text) >= times, self.said()

    def worker(self) -> int:
        """The pid of its worker."""
        children = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text()
        (pid,) = [int(word) for word in children.split()]
        return pid

    async def ends(self) -> None:
        """With 0, and nothing of it is left."""
        done = await self.child.done()
        assert done.code == 0, self.said()
        assert "Traceback" not in self.said()
        await nothing_runs_in(self.cli.folder)
        await nothing_runs_in(self.cli.folder / ".runfold")


def write_agent(cli: Cli, answer: str = "Filed.", revision: str = "1") -> None:
    text = AGENT.replace("{answer}", answer).replace("{revision}", revision)
    cli.folder.joinpath("helpdesk.py").write_text(text)


@pytest.fixture
def cli(embedded: Cli) -> Cli:
    write_agent(embedded)
    return embedded


async def begin(cli: Cli, *words: str) -> Dev:
    for name in ("out", "err"):  # of an earlier one
        cli.folder.joinpath(name).unlink(missing_ok=True)
    line = 'exec "$0" "$@" > out 2> err'
    words = ("dev", "helpdesk.py:agent", "--no-bridge", *words)  # test_dev_bridge.py has it
    child = await cli.execute("bash", "-c", line, RUNFOLD, *words)
    dev = Dev(cli, child)
    await eventually(lambda: (cli.folder / "err").exists(), 10)
    await dev.says("is ready")
    return dev


async def test_a_run_is_started_approved_and_followed_in_other_terminals(cli: Cli) -> None:
    cli.folder.joinpath("worker.py").write_text(SHADOWS)
    dev = await begin(cli)
    assert "nats://127.0.0.1:" in dev.said() and "runfold start AGENT" in dev.said()
    started = await cli.typed(
        *("start", "helpdesk", "--input", "VPN is down", "--id", "a1", "--wait", "60", "--json")
    )
    assert (started.code, started.json["status"]) == (3, "awaiting_approval"), started
    follower = await cli.start("follow", "a1")
    (item,) = (await cli("inbox", "--json")).json
    assert (await cli("approve", item["marker"])).code == 0
    followed = await follower.done()
    assert followed.code == 0 and "Filed." in followed.out
    assert cli.lines("tickets") == ["VPN is down"]
    assert (await cli("doctor", "--json")).json["level"] == "safe"  # R14: every write is synced
    dev.child.send(signal.SIGINT)
    await dev.ends()


async def test_a_changed_file_is_reloaded_and_runs_go_on_with_it(cli: Cli) -> None:
    dev = await begin(cli)
    await cli("start", "helpdesk", "--input", "x", "--id", "a1", "--wait", "60")
    write_agent(cli, "Filed by the new one.", revision="2")
    await dev.says("changed: reloading")
    await dev.says("is ready", 2)
    (report,) = (await cli("workers", "--json")).json["workers"]
    assert [agent["revision"] for agent in report["agents"]] == ["2"]
    (item,) = (await cli("inbox", "--json")).json
    await cli("approve", item["marker"])
    assert "Filed by the new one." in (await cli("follow", "a1")).out
    dev.child.send(signal.SIGTERM)
    await dev.ends()


async def test_a_file_that_can_not_be_loaded_is_shown_and_the_next_change_mends_it(
    cli: Cli,
) -> None:
    dev = await begin(cli)
    cli.folder.joinpath("helpdesk.py").write_text("def (:\n")
    await dev.says("SyntaxError")
    await dev.says("there is no worker now")
    assert (await cli("workers", "--json")).json["workers"] == []
    write_agent(cli)
    await dev.says("is ready", 2)
    dev.child.send(signal.SIGINT)
    await dev.ends()


async def test_a_crashed_worker_is_said_and_started_again(cli: Cli) -> None:
    cli.folder.joinpath("hold").touch()
    dev = await begin(cli, "--ack-wait", "1")
    await cli("start", "helpdesk", "--input", "x", "--id", "a1")
    await eventually(lambda: cli.lines("places") == ["lookup"], 30)
    os.kill(dev.worker(), signal.SIGKILL)
    await dev.says("the worker ended (signal SIGKILL); starting it again in 1 s")
    await dev.says("is ready", 2)
    cli.folder.joinpath("hold").unlink()
    asked = await cli("start", "helpdesk", "--input", "x", "--id", "a1", "--wait", "60", "--json")
    assert (asked.code, asked.json["status"]) == (3, "awaiting_approval")
    assert cli.lines("places") == ["lookup", "lookup"]
    dev.child.send(signal.SIGINT)
    await dev.ends()


async def test_a_second_ctrl_c_ends_the_grace(cli: Cli) -> None:
    cli.folder.joinpath("hold").touch()
    dev = await begin(cli, "--grace", "25")
    await cli("start", "helpdesk", "--input", "x", "--id", "a1")
    await eventually(lambda: cli.lines("places") == ["lookup"], 30)
    dev.child.send(signal.SIGINT)
    await dev.says("is stopping")
    assert dev.child.running
    dev.child.send(signal.SIGINT)
    await dev.ends()


async def test_nothing_outlives_a_dev_that_was_killed(cli: Cli) -> None:
    dev = await begin(cli)
    assert dev.worker()
    await dev.child.kill()
    await nothing_runs_in(cli.folder)
    await nothing_runs_in(cli.folder / ".runfold")
    again = await begin(cli)  # the data is there, and a new one takes over
    again.child.send(signal.SIGINT)
    await again.ends()


async def test_what_is_no_agent_is_refused(cli: Cli) -> None:
    for word in ("helpdesk", "nothing.py:agent"):
        done = await cli("dev", word)
        assert done.code == 2 and "Traceback" not in done.err, done
