"""The worked example as a person types it: four commands, exact counts, on every store (R33)."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.cli import Cli, Done, names, nothing_runs_in
from kit.servers import NatsServer

pytestmark = pytest.mark.real

HELPDESK = str(Path(__file__).parents[2] / "examples" / "helpdesk.py")
RUN = ("run", f"{HELPDESK}:agent", "--id", "a1", "--input", "VPN is down", "--json")

FIRST = [
    "run.started",
    "step.started llm/1",
    "step.completed llm/1",
    "step.started tool/1/0/lookup",
    "step.completed tool/1/0/lookup",
    "step.started llm/2",
    "step.completed llm/2",
]
THEN = [
    "signal",
    "step.started tool/2/0/create_ticket",
    "step.completed tool/2/0/create_ticket",
    "step.started llm/3",
    "step.completed llm/3",
    "run.completed",
]
CLAIMED = ["run.started", "claim", *FIRST[1:], "park", "signal", "claim", *THEN[1:]]


@pytest.fixture(autouse=True)
def model_ledger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the tickets, so that model calls are counted outside the journal too."""
    monkeypatch.setenv("HELPDESK_MODEL_LEDGER", "model.txt")


def awaits_approval(done: Done, records: int) -> str:
    """The one pending marker."""
    assert (done.code, done.err) == (3, ""), done
    shape = done.json
    assert (shape["status"], shape["records"], shape["model_calls"]) == (
        "awaiting_approval",
        records,
        2,
    )
    (pending,) = shape["pending"]
    assert (pending["tool"], pending["input"]) == ("create_ticket", {"title": "VPN is down"})
    return pending["marker"]


def is_answered(done: Done, records: int) -> None:
    assert (done.code, done.err) == (0, ""), done
    shape = done.json
    assert (shape["status"], shape["message"]) == ("completed", "Ticket filed.")
    assert (shape["records"], shape["model_calls"], shape["pending"]) == (records, 3, [])


def ledgers(cli: Cli) -> tuple[list[str], list[str]]:
    """Model calls and tickets, as the example wrote them down."""
    return cli.lines("model.txt"), cli.lines("tickets.txt")


async def test_four_commands_in_a_fresh_directory(tmp_path: Path) -> None:
    cli = Cli(tmp_path / "fresh", None)
    store = ("--store", "./runs")
    marker = awaits_approval(await cli.typed(*RUN, *store), 7)
    assert ledgers(cli) == (["llm/1", "llm/2"], [])
    approved = await cli.typed("approve", marker, *store)
    assert (approved.code, approved.err) == (0, "") and "approve: recorded" in approved.out
    is_answered(await cli.typed(*RUN, *store), 13)
    assert ledgers(cli) == (["llm/1", "llm/2", "llm/3"], ["VPN is down"])
    on_file = cli.on("runs")
    before = await on_file.contents()
    is_answered(await cli.typed(*RUN, *store), 13)
    assert await on_file.contents() == before
    assert ledgers(cli) == (["llm/1", "llm/2", "llm/3"], ["VPN is down"])
    assert names(await on_file.records("a1")) == FIRST + THEN
    assert sorted(path.name for path in cli.folder.iterdir()) == [
        "model.txt",
        "runs",
        "tickets.txt",
    ]


async def test_the_same_without_a_store_and_no_server_is_left(embedded: Cli) -> None:
    marker = awaits_approval(await embedded.typed(*RUN), 9)
    await nothing_runs_in(embedded.folder / ".runfold")
    assert (await embedded.typed("approve", marker)).code == 0
    is_answered(await embedded.typed(*RUN), 16)
    again = await embedded.typed(*RUN)
    is_answered(again, 16)
    assert ledgers(embedded) == (["llm/1", "llm/2", "llm/3"], ["VPN is down"])
    await nothing_runs_in(embedded.folder / ".runfold")


async def test_the_same_on_a_server_once_init_was_run(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    cli = Cli(tmp_path / "work", nats_server.url, namespace)
    store = ("--store", nats_server.url)
    refused = await cli.typed(*RUN, *store)
    assert refused.code == 9 and refused.json["error"]["code"] == "not_provisioned"
    assert "runfold init" in refused.line
    made = await cli.typed("init", *store, "--json")
    assert (made.code, made.json["created"]) == (0, True)
    again = await cli.typed("init", *store, "--json")
    assert (again.code, again.json["created"]) == (0, False)

    def unverified(done: Done) -> Done:
        """A server whose sync setting can't be seen is said to be so, in one line (R14)."""
        assert done.err.startswith("runfold: storage ") and done.err.count("\n") == 1, done
        return done._replace(err="")

    marker = awaits_approval(unverified(await cli.typed(*RUN, *store)), 9)
    assert (await cli.typed("approve", marker, *store)).code == 0
    is_answered(unverified(await cli.typed(*RUN, *store)), 16)
    before = await cli.contents()
    is_answered(unverified(await cli.typed(*RUN, *store)), 16)
    assert await cli.contents() == before
    assert ledgers(cli) == (["llm/1", "llm/2", "llm/3"], ["VPN is down"])
    assert names(await cli.records("a1")) == CLAIMED


async def test_commands_that_need_a_stream_say_when_there_is_none(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> None:
    cli = Cli(tmp_path / "work", nats_server.url, namespace)
    marker = "a1/tool/2/0/create_ticket@1.0123456789abcdef"
    lines = [
        ["show", "a1"],
        ["list"],
        ["approve", marker],
        ["reject", marker],
        ["reconcile", "a1", "tool/2/0/create_ticket", "--retry"],
        ["doctor"],
    ]
    for done in await cli.forked([[*line, "--json"] for line in lines], at_once=2):
        assert done.code == 9 and done.json["error"]["code"] == "not_provisioned", done
        assert "runfold init" in done.line


async def test_a_rejection_and_its_reason_reach_the_model(any_cli: Cli) -> None:
    cli = any_cli
    first = await cli.run("r1")
    assert first.code == 3, first
    marker = first.json["pending"][0]["marker"]
    rejected = await cli("reject", marker, "--reason", "the line is being repaired")
    assert rejected.code == 0, rejected
    end = await cli.run("r1")
    assert (end.code, end.json["message"]) == (0, "Ticket filed."), end
    assert cli.effects("create_ticket") == []
    last = cli.requests()[-1]
    assert last[-1]["role"] == "tool"
    assert "the line is being repaired" in last[-1]["content"]["error"]["message"]
    assert len(cli.requests()) == 3
    too_late = await cli("approve", marker, "--json")
    assert (too_late.code, too_late.json["error"]["code"]) == (8, "run_finished")


async def test_resuming_needs_a_run_that_is_there(any_cli: Cli) -> None:
    resumed = await any_cli("run", f"{HELPDESK}:agent", "--id", "nobody", "--json")
    assert (resumed.code, resumed.json["error"]["code"]) == (8, "run_not_found")
    assert ledgers(any_cli) == ([], [])


async def test_without_an_id_each_run_gets_a_new_one(on_file: Cli) -> None:
    line = ("run", f"{HELPDESK}:agent", "--input", "VPN is down", "--json")
    first, second = await on_file(*line), await on_file(*line)
    assert first.json["run"] != second.json["run"]
    listed = await on_file("list", "--json")
    assert sorted(run["run"] for run in listed.json["runs"]) == sorted(
        [first.json["run"], second.json["run"]]
    )
