"""send, input, withdraw, cancel, resume, inbox and follow, on a directory and on a server."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from kit.cli import RUNFOLD, Cli, Done
from kit.waiting import eventually

pytestmark = pytest.mark.real

AGENTS = """
from runfold import Complete, Continue, Fail, Pause, turn

@turn("chat")
async def chat(ctx):
    steer = await ctx.place_inputs("steer")
    heard = [*(ctx.load_checkpoint() or []), *(one.content for one in steer)]
    if "bye" in heard:
        return Complete(heard)
    return Continue(state=heard, until_input=True)

@turn("careful")
async def careful(ctx):
    if ctx.load_checkpoint() is None:
        return Pause(reason="look \\x1b[2J at me", state=1)
    return Complete("looked at")
"""


@pytest.fixture
def chat(cli: Cli) -> Cli:
    cli.folder.joinpath("talkers.py").write_text(AGENTS)
    return cli


async def taken_up(cli: Cli, id: str, agent: str = "chat") -> Done:
    return await cli("run", f"talkers.py:{agent}", "--id", id, "--json", "--ack-wait", "1")


def the_input(done: Done) -> tuple[str, str, object, str, bool]:
    assert done.code == 0, done
    shape = done.json
    assert shape.keys() == {"run", "request_id", "mode", "content", "status", "created"}
    assert shape["run"] == "r1"
    return (
        shape["request_id"],
        shape["mode"],
        shape["content"],
        shape["status"],
        shape["created"],
    )


async def test_a_message_is_sent_read_and_answered(chat: Cli) -> None:
    cli = chat
    assert (await cli("start", "chat", "--input", "x", "--id", "r1")).code == 0
    assert (await taken_up(cli, "r1")).code == 5
    sent, again = await cli.forked(
        [
            ["send", "r1", "hello", "--request-id", "i1", "--json"],
            ["send", "r1", "other", "--request-id", "i1", "--mode", "follow-up", "--json"],
        ],
        at_once=1,
    )
    assert the_input(sent) == ("i1", "steer", "hello", "queued", True)
    assert the_input(again) == ("i1", "steer", "hello", "queued", False)
    shown = await cli("input", "r1", "i1", "--json")
    assert the_input(shown) == ("i1", "steer", "hello", "queued", False)
    assert (await cli("show", "r1", "--json")).json["status"] == "running"
    assert (await taken_up(cli, "r1")).code == 5
    waiting = await cli.start("input", "r1", "i2", "--wait", "60", "--json")
    refused = await waiting.done()
    assert (refused.code, refused.json["error"]["code"]) == (8, "stale_signal")
    said = await cli("send", "r1", "--input-json", '"bye"', "--request-id", "i2", "--json")
    assert the_input(said)[:4] == ("i2", "steer", "bye", "queued")
    waiting = await cli.start("input", "r1", "i2", "--wait", "60", "--json")
    end = await taken_up(cli, "r1")
    assert (end.code, end.json["message"]) == (0, ["hello", "bye"])
    assert the_input(await waiting.done())[3] == "done"
    late = await cli("send", "r1", "more", "--json")
    assert (late.code, late.json["error"]["code"]) == (8, "run_finished")


async def test_a_message_is_withdrawn_while_it_is_queued(chat: Cli) -> None:
    cli = chat
    await cli("start", "chat", "--input", "x", "--id", "r1")
    await cli("send", "r1", "bye", "--request-id", "i1")
    for _ in range(2):
        withdrawn = await cli("withdraw", "r1", "i1", "--json")
        assert the_input(withdrawn)[3] == "withdrawn"
    assert (await taken_up(cli, "r1")).code == 5
    plain = await cli("input", "r1", "i1")
    assert plain.out.startswith("i1: withdrawn (steer)")
    await cli("send", "r1", "bye", "--request-id", "i2")
    await taken_up(cli, "r1")
    refused = await cli("withdraw", "r1", "i2", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (8, "stale_signal")


async def test_a_paused_run_is_in_the_inbox_until_it_is_resumed(chat: Cli) -> None:
    cli = chat
    await cli("start", "careful", "--input", "x", "--id", "r1")
    assert (await taken_up(cli, "r1", "careful")).code == 5
    (item,) = (await cli("inbox", "--json")).json
    assert (item["kind"], item["run"], item["status"]) == ("operator", "r1", "paused")
    plain = await cli("inbox")
    assert "runfold resume r1" in plain.out and "\x1b" not in plain.out
    resumed, again = await cli.forked(
        [["resume", "r1", "--reason", "I did", "--request-id", "q", "--json"]] * 2, at_once=1
    )
    assert (resumed.json["result"], again.json["result"]) == ("applied", "repeated")
    assert (await cli("inbox", "--json")).json == []
    stale = await cli("resume", "r1", "--json")
    assert (stale.code, stale.json["error"]["code"]) == (8, "stale_signal")
    end = await taken_up(cli, "r1", "careful")
    assert (end.code, end.json["message"]) == (0, "looked at")


async def test_a_cancelled_run_ends_with_7_and_so_does_its_follower(chat: Cli) -> None:
    cli = chat
    await cli("start", "chat", "--input", "x", "--id", "r1")
    await taken_up(cli, "r1")
    follower = await cli.start("follow", "r1", "--json")
    told = await cli("cancel", "r1", "--reason", "enough", "--json")
    assert (told.code, told.json["run"], told.json["result"]) == (0, "r1", "applied")
    refused = await cli("send", "r1", "more", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (8, "run_finished")
    end = await taken_up(cli, "r1")
    assert (end.code, end.json["reason"]) == (7, "enough")
    followed = await follower.done()
    assert followed.code == 7
    assert followed.out.encode() == b"".join(entry.raw + b"\n" for entry in await cli.entries("r1"))
    assert [json.loads(line)["n"] for line in followed.out.splitlines()] == list(
        range(1, end.json["records"] + 1)
    )


async def test_a_follower_is_told_to_stop_with_130(chat: Cli) -> None:
    cli = chat
    await cli("start", "chat", "--input", "x", "--id", "r1")
    out = cli.folder / "out"
    child = await cli.execute("bash", "-c", 'exec "$0" "$@" > out', RUNFOLD, "follow", "r1")
    await eventually(lambda: out.exists() and out.read_text().count("\n") == 1, 30)
    child.send(signal.SIGINT)
    done = await child.done()
    assert done.code == 130 and "Traceback" not in done.err


async def test_what_is_no_message_is_refused(chat: Cli) -> None:
    cli = chat
    await cli("start", "chat", "--input", "x", "--id", "r1")
    cases: list[tuple[list[str], int, str]] = [
        (["send", "r1"], 2, "usage"),
        (["send", "r1", "x", "--input-json", "1"], 2, "usage"),
        (["send", "r1", "--input-json", "{"], 2, "usage"),
        (["send", "r1", "x", "--mode", "loud"], 2, "usage"),
        (["send", "r1", "x", "--request-id", ""], 2, "bad_payload"),
        (["send", "r1", "--input-json", json.dumps("x" * 70_000)], 2, "too_large"),
        (["send", "nobody", "x"], 8, "run_not_found"),
        (["send", "no id", "x"], 2, "invalid_id"),
        (["input", "r1", "i1", "--wait", "61"], 2, "bad_payload"),
        (["input", "r1", "i1"], 8, "stale_signal"),
        (["withdraw", "r1", "i1"], 8, "stale_signal"),
        (["cancel", "nobody"], 8, "run_not_found"),
        (["resume", "r1"], 8, "stale_signal"),
    ]
    found = await cli.forked([[*words, "--json"] for words, _, _ in cases], at_once=4)
    for (words, code, word), done in zip(cases, found, strict=True):
        assert (done.code, done.json["error"]["code"]) == (code, word), (words[:4], done)
    assert len(await cli.records("r1")) == 1


async def test_a_directory_says_that_nobody_works_there(on_file: Cli) -> None:
    started = await on_file("start", "chat", "--input", "x", "--id", "r1")
    assert started.code == 0 and "runfold run" in started.err
    for words in (["workers"], ["queue"], ["sweep"]):
        done = await on_file(*words, "--json")
        assert (done.code, done.json["error"]["code"]) == (2, "usage"), done


async def test_a_message_comes_from_a_file_or_a_pipe(on_file: Cli, tmp_path: Path) -> None:
    cli = on_file
    await cli("start", "chat", "--input", "x", "--id", "r1")
    cli.folder.joinpath("text").write_text("from a file")
    assert (await cli("send", "r1", "@text", "--json")).json["content"] == "from a file"
    piped = await cli.typed("send", "r1", "-", "--json", stdin=b"from a pipe")
    assert piped.json["content"] == "from a pipe"
