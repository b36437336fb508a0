"""`--json` of every command, and the exit code of every status a run can reach (PROTOCOL 8)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from kit.cli import Cli, run_line

pytestmark = pytest.mark.real

STEP = "tool/2/0/create_ticket"
FAST = ("--ack-wait", "1")
RUN_KEYS = {
    *("run", "agent", "status", "message", "pending", "unknown", "waiting_on"),
    *("records", "model_calls"),
}
WAITS = {"worker", "approval", "reconcile", "input", "timer", "child", "operator"}


def has_the_shape_of_a_run(shape: dict[str, Any]) -> None:
    assert shape.keys() >= RUN_KEYS, shape
    for pending in shape["pending"]:
        assert pending.keys() == {"marker", "step", "tool", "input", "text"}
    for unknown in shape["unknown"]:
        assert unknown.keys() == {"step", "start", "tool", "input", "key", "partial", "deadline"}
    for wait in shape["waiting_on"]:
        assert wait.keys() == {"what", "since", "until", "ended_by"}
        assert wait["what"] in WAITS and wait["ended_by"]
        assert datetime.fromisoformat(wait["since"]).tzinfo is not None
    ended = shape["status"] in ("completed", "failed", "cancelled")
    assert ended == (shape["waiting_on"] == []), shape  # R7: whoever is not done has a next actor


async def stands(cli: Cli, id: str, status: str, exit_code: int) -> dict[str, Any]:
    """The run is shown and listed alike, with this status and exit code."""
    shown, listed, filtered, plain = await cli.forked(
        [
            ["show", id, "--json"],
            ["list", "--json"],
            ["list", "--json", "--status", status],
            ["show", id],
        ],
        at_once=2,
    )
    assert (shown.code, shown.json["status"]) == (exit_code, status), shown
    assert plain.code == exit_code and plain.out, plain
    has_the_shape_of_a_run(shown.json)
    for page in (listed, filtered):
        assert page.code == 0 and page.json.keys() == {"runs", "next"}
        assert [run for run in page.json["runs"] if run["run"] == id] == [shown.json]
    return shown.json


async def test_an_approval_is_awaited_with_3_and_completed_with_0(cli: Cli) -> None:
    first = await cli.run("s1")
    assert first.code == 3
    shape = await stands(cli, "s1", "awaiting_approval", 3)
    assert first.json == shape
    assert [wait["what"] for wait in shape["waiting_on"]] == ["approval"]
    marker = shape["pending"][0]["marker"]
    approve = ["approve", marker, "--json", "--request-id=r-1", "--comment=fine"]
    wrong = ["approve", marker, "--json", "--request-id=r-1", "--comment=other"]
    told, again, other = await cli.forked([approve, approve, wrong], at_once=1)
    assert (told.code, again.code, other.code) == (0, 0, 8), (told, again, other)
    assert told.json == {
        "run": "s1",
        "request_id": "r-1",
        "result": "applied",
        "n": shape["records"] + 1,
    }
    assert again.json == told.json | {"result": "repeated"}
    assert other.json["error"]["code"] == "decision_conflict"
    shape = await stands(cli, "s1", "running", 0)
    assert [wait["what"] for wait in shape["waiting_on"]] == ["worker"]
    end = await cli.run("s1")
    assert (end.code, end.json) == (0, await stands(cli, "s1", "completed", 0))
    assert (end.json["agent"], end.json["message"]) == ("desk", "Ticket filed.")


async def test_an_unknown_write_is_indeterminate_with_4(cli: Cli) -> None:
    cli.hold("create_ticket")
    child = await cli.begin("s2", "quick")
    await cli.reached("create_ticket")
    await child.kill()
    cli.let_go("create_ticket")
    done = await cli.run("s2", "quick", *FAST)
    assert done.code == 4, done
    shape = await stands(cli, "s2", "indeterminate", 4)
    assert done.json == shape
    assert [wait["what"] for wait in shape["waiting_on"]] == ["reconcile"]
    (unknown,) = shape["unknown"]
    assert (unknown["step"], unknown["key"]) == (STEP, cli.effects("create_ticket")[0])
    settle = ["reconcile", "s2", STEP, "--done", "[1]", "--json"]
    told, again = await cli.forked([settle, settle], at_once=1)
    assert told.json.keys() == {"run", "request_id", "result", "n"}
    assert (told.json["result"], again.json["result"]) == ("applied", "repeated")
    assert (await cli.run("s2", "quick", *FAST)).code == 0
    await stands(cli, "s2", "completed", 0)


async def test_a_rejection_has_the_shape_of_a_receipt(cli: Cli) -> None:
    marker = (await cli.run("s3")).json["pending"][0]["marker"]
    told = await cli("reject", marker, "--json")
    assert told.json.keys() == {"run", "request_id", "result", "n"} and told.code == 0


async def test_a_failed_run_ends_with_6_and_a_reason(cli: Cli) -> None:
    line = run_line("s4", "mute", input="x")
    done, again, plain = await cli.forked([line, line, [*line[:-1]]], at_once=1)
    assert (done.code, again.code, plain.code) == (6, 6, 6), done
    shape = await stands(cli, "s4", "failed", 6)
    assert done.json == again.json == shape
    assert (shape["reason"], shape["message"]) == ("bad_replies", None)
    assert "bad_replies" in plain.out
    assert len(cli.requests()) == 3


async def test_a_failed_model_call_is_an_error_and_the_run_goes_on_later(cli: Cli) -> None:
    """Nothing is recorded of it, so it is no outcome: exit 1, and the run is still there (R45)."""
    done = await cli.run("s5", "speechless")
    assert (done.code, done.json["error"]["code"]) == (1, "step_failed"), done
    assert done.json["error"]["run"] == "s5"
    await stands(cli, "s5", "running", 0)
    again = await cli.run("s5", "speechless")
    assert again.code == 1
    assert len(cli.requests()) == 2


async def test_a_declared_tool_error_is_a_result(cli: Cli) -> None:
    done = await cli.run("s6", "declined")
    assert (done.code, done.json["message"]) == (0, "No."), done
    error = cli.requests()[-1][-1]["content"]["error"]
    assert (error["type"], error["data"]) == ("tool_error", {"amount": 5})
    assert error["message"] == "the card was declined"


async def test_a_running_run_is_0_while_somebody_holds_it(any_cli: Cli) -> None:
    any_cli.hold("lookup")
    child = await any_cli.begin("s7", "quick")
    await any_cli.reached("lookup")
    shape = await stands(any_cli, "s7", "running", 0)
    assert [wait["what"] for wait in shape["waiting_on"]] == ["worker"]
    any_cli.let_go("lookup")
    assert (await child.done()).code == 0


async def test_init_says_what_it_made(on_jetstream: Cli) -> None:
    on_jetstream.env["RUNFOLD_NAMESPACE"] = f"{on_jetstream.namespace[:20]}-init"
    made, again = await on_jetstream.forked([["init", "--json"]] * 2, at_once=1)
    prefix = on_jetstream.env["RUNFOLD_NAMESPACE"].upper()
    journals = [f"JOURNAL_{shard}" for shard in range(4)]  # one server
    names = [f"{prefix}_{name}" for name in (*journals, "TASKS", "SIGNALS", "REJECTED")]
    for done, created in ((made, True), (again, False)):
        told: dict[str, Any] = {"created": created, "replicas": 1, "differences": []}
        journal, *others = [told | {"stream": name} for name in names]
        assert (done.code, done.json) == (0, journal | {"shards": 4, "others": others})


async def test_init_on_a_stream_with_other_settings_says_which_and_changes_nothing(
    on_jetstream: Cli,
) -> None:
    name = f"{on_jetstream.namespace.upper()}_JOURNAL_0"
    async with on_jetstream.client() as client:
        js = client.jetstream()
        config = (await js.stream_info(name)).config
        config.max_age = 3600
        await js.update_stream(config)
        done = await on_jetstream("init", "--json")
        assert (done.code, done.json["created"]) == (1, False), done
        assert [found["setting"] for found in done.json["differences"]] == ["max_age"]
        assert (await js.stream_info(name)).config.max_age == 3600
    judged = await on_jetstream("doctor", "--json")
    assert (judged.code, judged.json["level"]) == (1, "degraded")


async def test_doctor_judges_the_storage(any_cli: Cli) -> None:
    done = await any_cli("doctor", "--json")
    assert done.json.keys() == {"level", "findings", "facts", "runs", "next"}
    assert (done.json["runs"], done.json["next"]) == ([], None)
    for finding in done.json["findings"]:
        assert finding.keys() == {"level", "what", "why", "fix"} and all(finding.values())
    level = {"file": "safe", "embedded": "safe", "jetstream": "unverified"}[any_cli.kind]
    assert (done.code, done.json["level"]) == (0, level)


TALKS = """
from runfold import Agent, read
from runfold.testing import ScriptedModel, call, say

print("imported")

@read
def talk() -> str:
    print("called")
    return "x"

agent = Agent("talks", model=ScriptedModel(call("talk"), say("Done.")), tools=[talk])
"""


async def test_what_an_agents_code_prints_is_kept_out_of_the_answer(
    on_file: Cli, tmp_path: Path
) -> None:
    """One object on stdout, for whatever reads it."""
    agent = tmp_path / "talks.py"
    agent.write_text(TALKS)
    done = await on_file("run", f"{agent}:agent", "--id=p1", "--input=x", "--json")
    assert (done.code, done.json["message"]) == (0, "Done.")
    assert "called" in done.err


# -- what this version can't run ----------------------------------------------------------------


async def test_a_run_with_a_record_of_a_newer_version_is_left_alone(cli: Cli) -> None:
    await cli.run("v1")
    await cli.append_chained("v1", "run.transcended", whither="beyond")
    assert (await cli.run("other", "clock")).code == 0
    shown, listed, plain = await cli.forked(
        [["show", "v1", "--json"], ["list", "--json"], ["show", "v1"]], at_once=2
    )
    assert (shown.code, shown.json["status"]) == (1, "newer"), shown
    assert [wait["what"] for wait in shown.json["waiting_on"]] == ["operator"]
    assert {run["run"]: run["status"] for run in listed.json["runs"]} == {
        "other": "completed",
        "v1": "newer",
    }
    assert "run.transcended" in plain.out
    before = await cli.contents()
    marker = f"v1/{STEP}@1.0123456789abcdef"
    for done in await cli.forked(
        [
            run_line("v1", "desk", input="hello"),
            ["approve", marker, "--json"],
            ["reconcile", "v1", STEP, "--retry", "--json"],
        ],
        at_once=2,
    ):
        assert (done.code, done.json["error"]["code"]) == (1, "newer_version"), done
        assert "run.transcended" in done.line
    assert await cli.contents() == before
    assert cli.effects("create_ticket") == []


FOREIGN = [
    b"hello",
    b"{}",
    b'{"type":"signal"}',
    b'{"type":"run.completed","v":1,"n":99,"id":"0123456789ab-1","prev":"'
    + b"0" * 32
    + b'","message":1}',
]


@pytest.mark.parametrize("raw", FOREIGN, ids=range(len(FOREIGN)))
async def test_a_foreign_record_damages_its_run_and_no_other(cli: Cli, raw: bytes) -> None:
    first = await cli.run("d1")
    marker = first.json["pending"][0]["marker"]
    await cli.append_raw("d1", raw)
    await damaged(cli, marker, first.json["records"] + 1)


async def damaged(cli: Cli, marker: str, record: int) -> None:
    """`d1` is damaged at every door, other runs and lists are not, nothing is written."""
    assert (await cli.run("other", "clock")).code == 0
    before = await cli.contents()
    listed, *doors = await cli.forked(
        [
            ["list", "--json"],
            ["show", "d1", "--json"],
            run_line("d1", "desk", input="hello"),
            ["approve", marker, "--json"],
        ],
        at_once=2,
    )
    runs = {run["run"]: run for run in listed.json["runs"]}
    assert listed.code == 0
    assert {id: run["status"] for id, run in runs.items()} == {
        "d1": "damaged",
        "other": "completed",
    }
    assert runs["d1"].keys() >= RUN_KEYS and runs["d1"]["reason"]
    for done in doors:
        assert (done.code, done.json["error"]["code"]) == (1, "journal_damaged"), done
        if cli.kind == "file":
            assert "d1.jsonl" in done.line
            assert f"line {record}" in done.line and "offset" in done.line
        else:
            assert f"{cli.namespace.upper()}_JOURNAL_0" in done.line
    assert await cli.contents() == before
    assert cli.effects("create_ticket") == []


def edit(whole: bytes) -> bytes:
    assert whole.count(b'"input":"hello"') == 1
    return whole.replace(b'"input":"hello"', b'"input":"hellO"')


def write_behind(whole: bytes) -> bytes:
    return whole + b"hello\n"


def cut_out(whole: bytes) -> bytes:
    lines = whole.split(b"\n")
    return b"\n".join(lines[:2] + lines[3:])


@pytest.mark.parametrize(("change", "record"), [(edit, 2), (cut_out, 3)])
async def test_an_edit_and_a_gap_are_found_by_the_next_record(
    on_file: Cli, change: Callable[[bytes], bytes], record: int
) -> None:
    first = await on_file.run("d1")
    path = on_file.folder / "runs" / "d1.jsonl"
    path.write_bytes(change(path.read_bytes()))
    await damaged(on_file, first.json["pending"][0]["marker"], record)


@pytest.mark.parametrize(
    "change",
    [
        write_behind,
        edit,
        cut_out,
    ],
    ids=["appended", "edited", "cut out"],
)
async def test_doctor_names_damaged_runs(on_file: Cli, change: Callable[[bytes], bytes]) -> None:
    await on_file.run("d1")
    path = on_file.folder / "runs" / "d1.jsonl"
    path.write_bytes(change(path.read_bytes()))
    judged = await on_file("doctor", "--json")
    assert judged.json["facts"]["damaged"] == ["d1"]
