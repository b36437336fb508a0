"""`runfold check` and `export`: on every store, offline, through a bridge; refusals (R70)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kit.cli import RUNFOLD, Cli, Done, is_refused
from kit.raw_client import ask
from kit.waiting import eventually

from journal.audit import RULES
from journal.auditing import STORE_RULES, audit_run
from journal.codec import Entry, record_hash
from journal.ids import RunId
from journal.purging import purge
from journal.stores.jetstream import JetStreamStore

pytestmark = pytest.mark.real

CLEAN = {"violations": [], "unlisted": 0, "newer": []}
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
AllRefused = Callable[..., Awaitable[None]]


def rules(done: Done) -> list[tuple[str, int, str]]:
    """Run, ordinal and rule of each violation in an object."""
    assert done.json.keys() == {"runs", "records", "violations", "unlisted", "newer"}, done
    for found in done.json["violations"]:
        assert found.keys() == {"run", "n", "rule", "text"} and found["text"]
    return [(found["run"], found["n"], found["rule"]) for found in done.json["violations"]]


def chained(last: Entry, type: str, **fields: object) -> bytes:
    """A record behind another one, its envelope as it must be."""
    envelope = {
        "type": type,
        "v": 1,
        "n": last.record.n + 1,
        "id": "0123456789ab-1",
        "at": "2027-01-01T00:00:00.000Z",
        "by": "somebody",
        "prev": record_hash(last.raw),
    }
    return json.dumps(envelope | fields, separators=(",", ":")).encode()


# -- sound journals -----------------------------------------------------------------------------


async def test_sound_runs_are_clean_online_and_exported_on_every_store(
    any_cli: Cli, tmp_path: Path
) -> None:
    """A finished one, one that waits for a person, one that runs."""
    any_cli.hold("tick")
    held = await any_cli.begin("c1", "clock")
    await any_cli.reached("tick")
    ended, waiting = await any_cli.run("q1", "quick"), await any_cli.run("s1")
    assert (ended.code, waiting.code) == (0, 3)
    both, every, plain, to_file, shown = await any_cli.forked(
        [
            ["check", "q1", "s1", "--json"],
            ["check", "--all", "--json"],
            ["check", "--all"],
            ["export", "q1", "-o", "copies.jsonl", "--json"],
            ["export", "s1"],
        ],
        at_once=2,
    )
    records = ended.json["records"] + waiting.json["records"]
    assert (both.code, both.json) == (0, CLEAN | {"runs": 2, "records": records})
    assert (every.code, every.json["runs"], rules(every)) == (0, 3, [])
    assert plain.code == 0
    assert plain.out.startswith(f"3 runs, {every.json['records']} records, 0 violations, ")
    assert plain.out.endswith(" records/s\n")
    data = any_cli.folder.joinpath("copies.jsonl").read_bytes()
    assert to_file.json == {
        "run": "q1",
        "path": "copies.jsonl",
        "records": ended.json["records"],
        "bytes": len(data),
        "complete": True,
    }
    assert shown.out.count("\n") == waiting.json["records"]
    if any_cli.store is not None:
        assert data == b"".join(one.raw + b"\n" for one in await any_cli.entries("q1"))
    # An export is a journal of a directory store.
    elsewhere = Cli(any_cli.folder, "elsewhere")
    any_cli.folder.joinpath("elsewhere").mkdir()
    into = await any_cli("export", "s1", "-o", "elsewhere")
    assert (into.code, into.out) == (0, "")
    again, offline = await elsewhere.forked(
        [["show", "s1", "--json"], ["check", "copies.jsonl", "elsewhere/s1.jsonl"]], at_once=2
    )
    keys = ("status", "records", "pending", "model_calls")
    assert [again.json[key] for key in keys] == [waiting.json[key] for key in keys]
    assert (offline.code, offline.out) == (0, f"2 runs, {records} records, 0 violations\n")
    any_cli.let_go("tick")
    assert (await held.done()).code == 0


async def test_an_export_is_checked_from_a_pipe(on_file: Cli) -> None:
    await on_file.run("c1", "clock")
    child = await on_file.execute("bash", "-c", '"$0" export c1 | "$0" check -', RUNFOLD)
    done = await child.done()
    assert (done.code, done.out) == (0, "1 run, 8 records, 0 violations\n"), done


async def test_an_export_that_cannot_be_written_says_why_and_replaces_no_device(
    on_file: Cli,
) -> None:
    await on_file.run("c1", "clock")
    full = await on_file.execute("bash", "-c", '"$0" export c1 > /dev/full', RUNFOLD)
    done = await full.done()
    assert (done.code, "No space left on device" in done.line) == (2, True)
    pipe = on_file.folder / "pipe"
    os.mkfifo(pipe)
    for words in (["-o", "pipe"], ["-o", "pipe", "--force"]):
        is_refused(await on_file("export", "c1", *words, "--json"), 2, "usage")
    assert pipe.is_fifo()


async def test_a_purged_run_is_clean_and_not_exported(cli: Cli) -> None:
    await cli.run("p1", "quick")
    before = len(await cli.entries("p1"))
    async with cli._opened() as store:
        await purge(store, "p1")
    checked, listed, exported = await cli.forked(
        [["check", "p1", "--json"], ["check", "--all", "--json"], ["export", "p1", "--json"]],
        at_once=3,
    )
    assert before > 1 and checked.json == CLEAN | {"runs": 1, "records": 1}
    assert listed.json == checked.json
    is_refused(exported, 8, "run_not_found")


async def test_a_purge_while_it_is_read_is_no_violation(
    on_jetstream: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found is found twice: the second time there is the tombstone alone."""
    await on_jetstream.run("p1", "quick")
    async with JetStreamStore(str(on_jetstream.store), namespace=on_jetstream.namespace) as store:
        stored = store.stored

        async def purged_meanwhile(run: RunId, *, after: int = 0) -> Any:
            first = [record async for page in stored(run) for record in page]
            monkeypatch.setattr(store, "stored", stored)
            await purge(store, run)
            yield first[:2]
            async for page in stored(run):
                yield page

        monkeypatch.setattr(store, "stored", purged_meanwhile)
        audited = await audit_run(store, RunId("p1"))
    assert (audited.records, audited.violations) == (1, ())


async def test_a_torn_tail_is_no_violation_and_is_left_out(on_file: Cli) -> None:
    await on_file.run("t1", "clock")
    path = on_file.folder / "runs" / "t1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"type":"cl')
    checked, exported = await on_file.forked(
        [["check", "t1"], ["export", "t1", "-o", "out.jsonl"]], at_once=2
    )
    assert (checked.code, checked.out) == (0, "1 run, 8 records, 0 violations\n")
    assert "11 bytes of a torn last record" in checked.line
    assert "11 bytes of a torn last record are left out" in exported.line
    assert on_file.folder.joinpath("out.jsonl").read_bytes() == whole


# -- violations ---------------------------------------------------------------------------------

DAMAGES: list[tuple[str, dict[str, object], str]] = [
    (
        "run.started",
        {"run": "d1", "agent": "x", "revision": "1", "input": 1, "digest": "0"},
        "first",
    ),
    ("step.completed", {"step": "llm/9", "result": 1}, "unstarted"),
    ("input.placed", {"request_id": "never", "iteration": 0}, "input"),
]


@pytest.mark.parametrize(("type", "fields", "rule"), DAMAGES, ids=lambda one: str(one)[:14])
async def test_a_record_that_breaks_a_rule_is_named_online_and_in_the_export(
    cli: Cli, type: str, fields: dict[str, object], rule: str
) -> None:
    waiting = await cli.run("d1")
    await cli.append_chained("d1", type, **fields)
    n = waiting.json["records"] + 1
    checked, plain, exported = await cli.forked(
        [["check", "d1", "--json"], ["check", "--all"], ["export", "d1", "-o", "out.jsonl"]],
        at_once=3,
    )
    assert checked.code == plain.code == 1
    assert ("d1", n, rule) in rules(checked)
    assert {found[1] for found in rules(checked)} == {n}
    assert f"run d1 record {n}: {rule}: " in plain.out
    assert exported.code == 0 and f"record {n}: " in exported.line
    offline = await cli("check", "out.jsonl", "--json")
    assert ("d1", n, rule) in rules(offline) and offline.code == 1


async def test_bytes_that_are_no_record_are_exported_as_they_stand(cli: Cli) -> None:
    waiting = await cli.run("d1")
    await cli.append_raw("d1", b"hello \xff")
    checked, exported = await cli.forked(
        [["check", "d1", "--json"], ["export", "d1", "-o", "out.jsonl"]], at_once=2
    )
    n = waiting.json["records"] + 1
    assert (checked.code, rules(checked)[0]) == (1, ("d1", n, "undecodable"))
    assert exported.code == 0 and "not sound" in exported.line
    assert on_lines(cli.folder / "out.jsonl")[-1] == b"hello \xff"


def on_lines(path: Path) -> list[bytes]:
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return data[:-1].split(b"\n")


HEADERS = [
    ({}, "header"),
    ({"Runfold-Status": "completed"}, "status"),
    ({"Runfold-Status": "splendid"}, "header"),
    ({"Runfold-Type": "claim"}, "header"),
    ({"Runfold-Commit": "1"}, "header"),
]


@pytest.mark.parametrize(("wrong", "rule"), HEADERS, ids=lambda one: str(one)[:40])
async def test_headers_are_held_to_what_the_journal_says(
    on_jetstream: Cli, wrong: dict[str, str], rule: str
) -> None:
    """A sound record with one wrong header; without any it was published past the fence."""
    first = await on_jetstream.run("h1")
    last = (await on_jetstream.entries("h1"))[-1]
    raw = chained(last, "signal", request_id="x", name="cancel", payload={})
    right = {
        EXPECTED: str(last.position),
        "Runfold-Type": "signal",
        "Runfold-Status": "running",
    }
    subject = f"{on_jetstream.namespace}.journal.0.h1"
    sent = await ask(str(on_jetstream.store), subject, raw, right | wrong if wrong else {})
    assert "error" not in sent
    done = await on_jetstream("check", "h1", "--json")
    assert (done.code, rules(done)) == (1, [("h1", first.json["records"] + 1, rule)])


async def test_a_run_of_a_newer_version_is_named_and_not_called_sound(cli: Cli) -> None:
    await cli.run("v1")
    await cli.append_chained("v1", "run.transcended", whither="beyond")
    done, plain = await cli.forked([["check", "v1", "--json"], ["check", "--all"]], at_once=2)
    assert (done.code, done.json["newer"], rules(done)) == (1, ["v1"], [])
    assert plain.code == 1 and "run.transcended" in plain.line


async def test_violations_are_listed_up_to_a_limit_and_counted_beyond(on_file: Cli) -> None:
    await on_file.run("g1", "clock")
    path = on_file.folder / "runs" / "g1.jsonl"
    path.write_bytes(path.read_bytes() + b"garbage\n" * 300)
    done, plain = await on_file.forked([["check", "g1", "--json"], ["check", "g1"]], at_once=2)
    assert (len(rules(done)), done.json["unlisted"], done.json["records"]) == (100, 200, 308)
    assert plain.out.endswith("run g1: 200 more violations\n1 run, 308 records, 300 violations\n")


# -- through a bridge ---------------------------------------------------------------------------


@pytest.fixture
async def bridge(on_jetstream: Cli) -> str:
    """The address of one."""
    child = await on_jetstream.start("bridge", "--no-auth", "--listen=0")
    said = Path(f"{child._to}.err")  # type: ignore[attr-defined]

    def address() -> str:
        found = re.search(r"bridge: (http://\S+)\n", said.read_text() if said.exists() else "")
        return found[1] if found else ""

    return await eventually(address, 30)


async def test_through_a_bridge_journals_are_checked_and_exported(
    on_jetstream: Cli, bridge: str
) -> None:
    ended, waiting = await on_jetstream.run("q1", "quick"), await on_jetstream.run("d1")
    await on_jetstream.append_raw("d1", b"hello")
    cli = on_jetstream.on(bridge)
    del cli.env["RUNFOLD_NAMESPACE"]
    one, every, copied, damaged, follow, missing = await cli.forked(
        [
            ["check", "q1", "--json"],
            ["check", "--all", "--json"],
            ["export", "q1", "-o", "q1.jsonl"],
            ["export", "d1", "-o", "d1.jsonl", "--json"],
            ["check", "--follow", "--json"],
            ["check", "nobody", "--json"],
        ],
        at_once=3,
    )
    assert (one.code, one.json) == (0, CLEAN | {"runs": 1, "records": ended.json["records"]})
    assert "headers" in one.line
    assert (every.code, every.json["runs"]) == (1, 2)
    n = waiting.json["records"] + 1
    assert rules(every) == [("d1", n, "unreadable")]
    assert copied.code == 0
    copy = cli.folder.joinpath("q1.jsonl").read_bytes()
    assert copy == b"".join(one.raw + b"\n" for one in await on_jetstream.entries("q1"))
    assert (damaged.code, damaged.json["complete"]) == (1, False)
    assert damaged.json["records"] == waiting.json["records"]
    is_refused(follow, 2, "usage")
    is_refused(missing, 8, "run_not_found")


# -- what is refused ----------------------------------------------------------------------------


async def test_what_can_not_be_checked_or_exported_is_refused(
    cli: Cli, all_refused: AllRefused
) -> None:
    assert (await cli.run("e1", "clock")).code == 0
    cli.folder.joinpath("there").write_bytes(b"")
    cli.folder.joinpath("empty.jsonl").write_bytes(b"")
    usage: Sequence[list[str]] = [
        ["check"],
        ["check", "--all", "e1"],
        ["check", "--follow", "e1"],
        ["check", "--all", "--metrics-port=0"],
        ["check", "--follow", "--metrics-port=x"],
        ["check", "--follow", "--metrics-port=70000"],
        ["check", "missing.jsonl"],
        ["check", "missing/file"],
        ["check", "./"],
        ["check", "-", "-"],
        ["export", "e1", "-o", "there"],
        ["export", "e1", "-o", "no/such/folder"],
    ]
    cases: list[tuple[list[str], int, str]] = [(words, 2, "usage") for words in usage]
    cases += [
        (["check", "e1", "nobody"], 8, "run_not_found"),
        (["check", "empty.jsonl"], 8, "run_not_found"),
        (["export", "nobody"], 8, "run_not_found"),
        (["export", "nobody", "-o", "new.jsonl"], 8, "run_not_found"),
        (["check", "not an id"], 2, "invalid_id"),
        (["export", "../e1"], 2, "invalid_id"),
    ]
    await all_refused(cli, cases)


async def test_an_audit_of_a_directory_that_is_not_there_is_a_slip(on_file: Cli) -> None:
    for word in ("--all", "--follow"):
        done = await on_file("check", word, "--store", "typo", "--json")
        assert (done.code, done.json["error"]["code"]) == (9, "store_unavailable"), done


async def test_an_export_replaces_a_file_only_with_force_and_only_once_it_is_whole(
    on_file: Cli,
) -> None:
    assert (await on_file.run("e1", "clock")).code == 0
    there = on_file.folder / "there.jsonl"
    there.write_bytes(b"what was kept")
    forced = await on_file("export", "nobody", "-o", "there.jsonl", "--force")
    assert (forced.code, there.read_bytes()) == (8, b"what was kept")
    forced = await on_file("export", "e1", "-o", "there.jsonl", "--force")
    assert forced.code == 0
    assert there.read_bytes() == on_file.folder.joinpath("runs", "e1.jsonl").read_bytes()
    assert sorted(path.name for path in on_file.folder.glob("*.part*")) == []


def test_the_document_lists_every_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "check.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))
    assert listed == {**RULES, **STORE_RULES}
