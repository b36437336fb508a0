"""Damaged and odd journals: what mutate.py makes of the product's own, the files of the manifest
in our record format, and a cut at every byte (UR-59)."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases.mutate import NEVER, REFUSED, TORN, Mutant, mutants
from cases.pay import ANSWER, RECEIPT
from cases.world import World, check_lines, named, one_line, rechain
from cases.zygote import Zygote

from journal.doors import signal, state
from journal.handle import Journal
from journal.ids import RunId
from runfold import Completed, run

ACC = "acc-001"
OTHER = "other-1"
STEP = "tool/1/0/charge"
INPUT = {"text": "pay Zoë 10 €"}
SHARED = Path("/work/shared/cases/mutate.py")
KINDS = ("going", "result", "complete")
"""A journal whose last record is a model call's start; an unsafe write's result; the end."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Journals that the product wrote, by kind; `other` is a complete one of another run."""
    world = World(tmp_path_factory.mktemp("made"))
    text = json.dumps(INPUT, ensure_ascii=False)
    assert world.run(ACC, "--input-json", text, at="fail:2").code == 1
    going = world.path(ACC).read_bytes()
    found = {"going": going}
    world = World(tmp_path_factory.mktemp("made"))
    assert world.run(ACC, "--input-json", text).code == 0
    assert world.run(OTHER, "--input-json", text).code == 0
    found["complete"] = world.path(ACC).read_bytes()
    found["result"] = b"".join(going.splitlines(keepends=True)[:5])
    found["other"] = world.path(OTHER).read_bytes()
    assert [found[kind].count(b"\n") for kind in KINDS] == [6, 5, 8]
    return found


def laid(world: World, made: dict[str, bytes], data: bytes) -> Path:
    """A directory with the file under test, one other run, and the ledger line of the effect."""
    world.runs.mkdir()
    path = world.path(ACC)
    path.write_bytes(data)
    world.path(OTHER).write_bytes(made["other"])
    world.ledger.add(ACC, STEP, {"amount": 10})
    return path


def cases(expect: str) -> list[Any]:
    """Names of mutants by kind; the made journals are not there when tests are collected."""
    blank = b'{"n":1,"x":"' + "é".encode() * 40 + b'1234"}\n'
    names = {mutant.name for mutant in mutants(blank * 6) if mutant.expect == expect}
    stems = {name.rstrip("0123456789").rstrip("_") for name in names}
    return [
        pytest.param(kind, stem, id=f"{kind}-{stem}") for kind in KINDS for stem in sorted(stems)
    ]


def of(made: dict[str, bytes], kind: str, stem: str) -> list[Mutant]:
    found = mutants(made[kind])
    return [m for m in found if m.name.rstrip("0123456789").rstrip("_") == stem]


def test_the_vendored_mutants_are_those_of_the_shared_script(
    made: dict[str, bytes], tmp_path: Path
) -> None:
    if not SHARED.exists():
        pytest.skip("../shared is not here")
    for kind in KINDS:
        valid, out = tmp_path / "valid.jsonl", tmp_path / kind
        valid.write_bytes(made[kind])
        subprocess.run([sys.executable, SHARED, valid, out], check=True, capture_output=True)
        theirs = {path.stem: path.read_bytes() for path in out.iterdir()}
        assert {mutant.name: mutant.data for mutant in mutants(made[kind])} == theirs


# ---- (a) mutants of what the product wrote ----------------------------------------------------


def assert_refused(
    world: World,
    path: Path,
    *,
    line: int,
    also: str = "",
    or_next: bool = False,
    every_door: bool = True,
) -> None:
    """Each command says where, in one line; nothing moves; the other run is usable."""
    data = path.read_bytes()
    lines = data.split(b"\n")
    places = [
        f"{path} line {at + 1} offset {sum(len(text) + 1 for text in lines[:at])}:"
        for at in ([line - 1, line] if or_next else [line - 1])
    ]
    marker = f"{ACC}/{STEP}@1.0123456789abcdef"
    commands = [world.show(ACC), world.run(ACC), world.reconcile(ACC, STEP, "--retry")]
    if every_door:
        commands += [
            world.show(ACC, "--json"),
            world.run(ACC, "--input-json", json.dumps(INPUT)),
            world.run(ACC, input="another input"),
            world.cli("approve", marker, "--store", str(world.runs)),
        ]
    for command in commands:
        assert command.code == 1
        assert any(place in one_line(command.err) for place in places), command.err
        assert also in command.err
        if command.out.startswith("{"):
            assert command.json["error"]["code"] == "journal_damaged"
    assert path.read_bytes() == data
    assert len(world.ledger.lines()) == 1
    assert not world.asked()
    assert world.list() == {ACC: "damaged", OTHER: "completed"}
    assert world.show(OTHER).code == world.run(OTHER).code == 0


@pytest.mark.parametrize(("kind", "stem"), cases(REFUSED))
def test_a_damaged_journal_is_refused_with_its_place(
    world: World, made: dict[str, bytes], kind: str, stem: str
) -> None:
    (mutant,) = of(made, kind, stem)
    words = {
        "bom": "byte order mark",
        "crlf": "CR LF",
        "blank_lines": "blank line",
        "missing_middle": "missing",
        "missing_first": "record 2 follows 0",
    }
    path = laid(world, made, mutant.data)
    or_next = stem == "digit_changed"  # the record itself may show it, else the next one's hash
    every_door = kind == "going"  # the other kinds only move the place
    assert_refused(
        world,
        path,
        line=mutant.line,
        also=words.get(stem, ""),
        or_next=or_next,
        every_door=every_door,
    )


@pytest.mark.parametrize(("kind", "stem"), cases(TORN))
def test_a_torn_tail_is_dropped_and_said_and_the_run_goes_on(
    made: dict[str, bytes], kind: str, stem: str, tmp_path: Path
) -> None:
    found = of(made, kind, stem)
    assert found or (stem == "torn_utf8" and kind == "going"), "no such mutant"
    for mutant in found:
        home = tmp_path / mutant.name
        home.mkdir()
        _torn(World(home), made, kind, mutant)


def _torn(world: World, made: dict[str, bytes], kind: str, mutant: Mutant) -> None:
    path = laid(world, made, mutant.data)
    whole = mutant.data[: mutant.data.rindex(b"\n") + 1]
    torn = len(mutant.data) - len(whole)

    shown = world.show(ACC, "--json")
    assert shown.json["records"] == whole.count(b"\n") == made[kind].count(b"\n") - 1
    assert f"{torn} bytes" in one_line(shown.err)
    assert shown.code == (4 if kind == "result" else 0)
    assert shown.json["status"] == ("indeterminate" if kind == "result" else "running")
    assert path.read_bytes() == mutant.data, "show changed the file"

    if kind == "result":
        for _ in range(2):  # a write whose result was torn: nobody knows, however often asked
            again = world.run(ACC)
            assert (again.code, again.out.count("may or may not have happened")) == (4, 1)
            assert path.read_bytes()[: len(whole)] == whole
        assert world.reconcile(ACC, STEP, "--done", json.dumps(RECEIPT)).code == 0
        clean = world.show(ACC)
        assert (clean.code, clean.err) == (0, "")
    end = world.run(ACC)
    assert (end.code, end.out) == (0, f"{ANSWER}\n")
    assert path.read_bytes().startswith(whole), "an earlier record changed"
    clean = world.show(ACC)
    assert (clean.code, clean.err) == (0, "")
    world.check(ACC)
    assert len(world.ledger.lines()) == 1
    assert world.list() == {ACC: "completed", OTHER: "completed"}


def test_a_torn_tail_is_reported_by_the_run_that_drops_it(
    world: World, made: dict[str, bytes]
) -> None:
    laid(world, made, made["going"][:-20])
    end = world.run(ACC)
    assert end.code == 0
    assert "torn" in end.err


@pytest.mark.parametrize(("kind", "stem"), cases(NEVER))
def test_a_run_without_a_whole_record_never_started_and_starts_once(
    world: World, made: dict[str, bytes], kind: str, stem: str
) -> None:
    (mutant,) = of(made, kind, stem)
    path = laid(world, made, mutant.data)
    for command in (world.show(ACC), world.run(ACC)):
        assert command.code == 8
        assert "does not exist" in one_line(command.err)
    assert world.list() == {OTHER: "completed"}
    assert path.read_bytes() == mutant.data
    for records in (8, 8):  # the second start is the same run
        end = world.run(ACC, "--input-json", json.dumps(INPUT))
        assert end.code == 0
        assert len(world.check(ACC)) == records
    assert len(world.ledger.lines(ACC)) == 2  # the one laid there, and this run's


def test_real_processes_answer_a_damaged_and_a_torn_journal_alike(
    world: World, made: dict[str, bytes], zygote: Zygote
) -> None:
    damaged = made["going"].replace(b"charge", b"chargf", 1)
    path = laid(world, made, damaged)
    refused = zygote.cli(*world.run_args(ACC), env=world.env()).wait()
    assert refused.code == 1
    assert f"{path} line 4 " in one_line(refused.err)
    path.write_bytes(made["result"][:-9])
    unknown = zygote.cli(*world.run_args(ACC), env=world.env()).wait()
    assert unknown.code == 4
    assert len(world.ledger.lines()) == 1


# ---- (b) the files of the manifest, in our format ---------------------------------------------


def edited(made: dict[str, bytes], edit: Callable[[list[Any]], object], **how: Any) -> bytes:
    """The complete journal with edited records, chained as a writer would have."""
    records = [json.loads(line) for line in made["complete"].split(b"\n")[:-1]]
    edit(records)
    return b"\n".join(rechain(records, **how)) + b"\n"


def as_completed(world: World, path: Path, records: int = 8) -> Any:
    """The run is complete: show lists all records, a start with id and input returns it."""
    data = path.read_bytes()
    shown = world.show(ACC, "--json")
    assert (shown.code, shown.err) == (0, "")
    assert (shown.json["status"], shown.json["records"]) == ("completed", records)
    lines = world.show(ACC)
    assert (lines.code, lines.err) == (0, "")
    for more in ([], ["--input-json", json.dumps(INPUT)]):
        end = world.run(ACC, "--json", *more)
        assert (end.code, end.json["message"]) == (0, shown.json["message"])
    assert path.read_bytes() == data
    assert (len(world.ledger.lines()), world.asked()) == (1, [])
    assert world.list() == {ACC: "completed", OTHER: "completed"}
    return lines


def test_01_valid_complete(world: World, made: dict[str, bytes]) -> None:
    path = laid(world, made, made["complete"])
    lines = as_completed(world, path)
    assert lines.out.endswith(f"{ANSWER}\n")
    assert world.run(ACC, input="another").code == 8


def test_02_valid_no_final_newline(world: World, made: dict[str, bytes]) -> None:
    _torn(world, made, "complete", Mutant("02", made["complete"][:-1], TORN, 0))


def test_03_torn_tail_json(world: World, made: dict[str, bytes]) -> None:
    _torn(world, made, "result", Mutant("03", made["result"][:-100], TORN, 0))


def test_05_corrupt_middle(world: World, made: dict[str, bytes]) -> None:
    lines = made["complete"].split(b"\n")
    lines[3] = lines[3][:30] + b"\x00\x01\x02GARBAGE"
    assert_refused(world, laid(world, made, b"\n".join(lines)), line=4, also="not a JSON")


def test_05_corrupt_middle_shows_the_records_before_it(
    world: World, made: dict[str, bytes]
) -> None:
    lines = made["complete"].split(b"\n")
    lines[3] = b"GARBAGE"
    laid(world, made, b"\n".join(lines))
    shown = world.show(ACC)
    assert shown.code == 1
    assert [line.split()[0] for line in shown.out.splitlines()[:3]] == ["1", "2", "3"]


def test_07_duplicate_seq_same(world: World, made: dict[str, bytes]) -> None:
    lines = made["complete"].split(b"\n")
    lines.insert(5, lines[4])
    assert_refused(world, laid(world, made, b"\n".join(lines)), line=6)


def test_07_duplicate_that_chains(world: World, made: dict[str, bytes]) -> None:
    """The same result once more under the next ordinal, hashes right: still two results."""

    def twice(records: list[Any]) -> None:
        records.insert(5, records[4] | {"id": "aaaaaaaaaaaa-1"})
        for n, record in enumerate(records, 1):
            record["n"] = n

    path = laid(world, made, edited(made, twice))
    assert_refused(world, path, line=6, also="a second time")


def test_07_writer_id_twice(world: World, made: dict[str, bytes]) -> None:
    def twice(records: list[Any]) -> None:
        records[4]["id"] = records[3]["id"]

    path = laid(world, made, edited(made, twice))
    assert_refused(world, path, line=5, also="repeats the writer id")


def test_09_gap_seq(world: World, made: dict[str, bytes]) -> None:
    def gap(records: list[Any]) -> None:
        del records[3]  # the hashes chain over the gap: the ordinals alone tell

    path = laid(world, made, edited(made, gap))
    assert_refused(world, path, line=4, also="record 5 follows 3")


def test_11_bom(world: World, made: dict[str, bytes]) -> None:
    path = laid(world, made, b"\xef\xbb\xbf" + made["complete"])
    assert_refused(world, path, line=1, also="byte order mark")


def test_13_huge_line(world: World, made: dict[str, bytes]) -> None:
    """1.5 MB: a file takes it; it opens, replays, and goes on."""

    def huge(records: list[Any]) -> None:
        records[4]["result"] = "x" * 1_500_000

    path = laid(world, made, edited(made, huge))
    lines = as_completed(world, path)
    assert len(lines.out) < 10_000


def test_13_line_above_the_bound(world: World, made: dict[str, bytes]) -> None:
    def huge(records: list[Any]) -> None:
        records[4]["result"] = "x" * (16 * 1024 * 1024)

    path = laid(world, made, edited(made, huge))
    assert_refused(world, path, line=5, also="above 16777216")


def test_15_unknown_field(world: World, made: dict[str, bytes]) -> None:
    """Accepted; the fields are kept because stored bytes are never rewritten, and are hashed."""

    def extra(records: list[Any]) -> None:
        for record in records:
            record |= {"new_field": True, "extra": {"k": [1, 2]}}

    data = edited(made, extra)
    as_completed(world, laid(world, made, data))
    world.path(ACC).write_bytes(b"".join(data.splitlines(keepends=True)[:6]))
    assert world.run(ACC).code == 0
    assert world.path(ACC).read_bytes().count(b"new_field") == 6
    world.check(ACC)


def test_16_empty(world: World, made: dict[str, bytes]) -> None:
    test_a_run_without_a_whole_record_never_started_and_starts_once(world, made, "going", "empty")


def test_18_nul_tail(world: World, made: dict[str, bytes]) -> None:
    whole = b"".join(made["result"].splitlines(keepends=True)[:4])
    _torn(world, made, "result", Mutant("18", whole + b"\0" * 512, TORN, 0))
    assert b"\0" not in world.path(ACC).read_bytes()


def test_21_lone_surrogate(world: World, made: dict[str, bytes]) -> None:
    """No writer of ours leaves half a pair (R16): refused with its place, and no reader crashes."""

    def half(records: list[Any]) -> None:
        records[4]["result"] = {"t": "\ud83d and \u0000"}

    path = laid(world, made, edited(made, half, ascii=True))
    assert_refused(world, path, line=5)


def test_21_nul_escape(world: World, made: dict[str, bytes]) -> None:
    def nul(records: list[Any]) -> None:
        records[4]["result"] = {"t": "\u0000"}
        records[7]["message"]["content"] = "a\u0000b\u202ec"

    path = laid(world, made, edited(made, nul, ascii=True))
    lines = as_completed(world, path)
    assert "\0" not in lines.out and "\u202e" not in lines.out
    assert "a\\x00b\\u202ec" in lines.out
    assert world.show(ACC, "--json").json["message"] == "a\u0000b\u202ec"


NUMBERS = {
    "i": 1180591620717411303424,
    "j": -9223372036854775809,
    "z": -0.0,
    "f": 0.30000000000000004,
}


def test_23_big_numbers(world: World, made: dict[str, bytes]) -> None:
    """Exact values in the timeline, in `--json`, and in what the model is told at a replay."""

    def numbers(records: list[Any]) -> None:
        records[4]["result"] = NUMBERS
        records[7]["message"]["content"] = NUMBERS

    path = laid(world, made, edited(made, numbers))
    lines = as_completed(world, path)
    exact = '"i":1180591620717411303424,"j":-9223372036854775809,"z":-0.0'
    for part in (*exact.split(","), '"f":0.30000000000000004'):
        assert lines.out.count(part) == 3, part  # the result, the end, the answer
    assert "e+21" not in lines.out
    assert json.dumps(world.show(ACC, "--json").json["message"]) == json.dumps(NUMBERS)

    world.path(ACC).write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    agent = world.agent()
    asyncio.run(run(world.store(), agent, ACC))
    (request,) = agent.model.requests
    assert json.dumps(request[-1].content) == json.dumps(NUMBERS)


def test_25_after_terminal(world: World, made: dict[str, bytes]) -> None:
    def late(records: list[Any]) -> None:
        intent = records[3] | {"n": 9, "id": "aaaaaaaaaaaa-1", "step": "tool/2/0/charge"}
        records.append(intent)

    path = laid(world, made, edited(made, late))
    assert_refused(world, path, line=9, also="after the run's end")


def test_28_not_text(world: World, made: dict[str, bytes]) -> None:
    data = gzip.compress(made["complete"])
    path = laid(world, made, data)
    assert_refused(world, path, line=1, also="gzip" if b"\n" in data else "not a journal")


@pytest.mark.parametrize("data", [b"\x1f\x8b\x08 no line end", b"PK\x03\x04\nzip", b"hello\n"])
def test_28_other_files_that_are_no_journal(
    world: World, made: dict[str, bytes], data: bytes
) -> None:
    assert_refused(world, laid(world, made, data), line=1)


def test_30_blank_lines(world: World, made: dict[str, bytes]) -> None:
    lines = made["complete"].split(b"\n")
    for at, (data, line) in enumerate(
        [
            (b"\n" + made["complete"], 1),
            (b"\n".join([lines[0], b"", *lines[1:]]), 2),
            (made["complete"] + b"\n", 9),
        ]
    ):
        home = world.home / str(at)
        home.mkdir()
        inner = World(home)
        path = laid(inner, made, data)
        assert_refused(inner, path, line=line, also="blank line")


def test_a_journal_of_another_run_is_refused(world: World, made: dict[str, bytes]) -> None:
    """A copied file under a new name is not a run of that name (R11: the id inside is checked)."""
    path = laid(world, made, made["complete"])
    copy = world.path("copy-1")
    copy.write_bytes(path.read_bytes())
    shown = world.show("copy-1")
    assert shown.code == 1
    assert ACC in one_line(shown.err)
    assert world.run("copy-1").code == 1
    assert world.list()["copy-1"] == "damaged"


# ---- (c) UR-59: cut at every byte -------------------------------------------------------------


async def test_ur59_cut_at_every_byte_of_a_torn_result(
    made: dict[str, bytes], tmp_path: Path
) -> None:
    """UR-59: the result of an unsafe write (with a 4-byte emoji) cut at each byte: open, append,
    close, open. Earlier records stay, the new one is readable, the write is Indeterminate."""
    lines = made["result"].splitlines(keepends=True)
    whole, last = b"".join(lines[:-1]), lines[-1]
    emoji = last.index("😀".encode())
    assert 0 < emoji < len(last) - 4
    world = World(tmp_path)
    world.runs.mkdir()
    path, store = world.path(ACC), world.store()
    for cut in range(len(last)):
        torn = whole + last[:cut]
        path.write_bytes(torn)
        looked = await Journal.read(store, ACC)
        assert (looked.fold.n, looked.torn) == (4, cut)
        assert (await state(store, ACC)).status == "indeterminate"
        assert path.read_bytes() == torn, "looking changed the file"
        payload = {"step": STEP, "outcome": "done", "result": cut}
        assert (await signal(store, ACC, "reconcile", payload)).n == 5
        again = await store.load(RunId(ACC))
        assert (len(again.entries), again.torn) == (5, 0)
        data = path.read_bytes()
        assert data.startswith(whole) and data.endswith(b"\n")
        check_lines(data[:-1].split(b"\n"))
    path.write_bytes(made["result"])  # the cut after the last byte is no cut
    assert (await store.load(RunId(ACC))).torn == 0


async def test_ur59_cut_at_every_byte_of_a_first_record(
    made: dict[str, bytes], tmp_path: Path
) -> None:
    """UR-59: cut in the first record: the run never started, and starts once."""
    (first, *_) = made["complete"].splitlines(keepends=True)
    world = World(tmp_path)
    world.runs.mkdir()
    path, store = world.path(ACC), world.store()
    for cut in range(0, len(first), 5):
        path.write_bytes(first[:cut])
        assert (await Journal.read(store, ACC)).fold.n == 0
        assert path.read_bytes() == first[:cut]
        assert isinstance(await run(store, world.agent(), ACC, INPUT), Completed)
        assert len(world.check(ACC)) == 8
        assert len(world.ledger.lines()) == cut // 5 + 1


async def test_ur59_a_run_goes_on_over_a_cut_at_every_byte_of_a_start(
    made: dict[str, bytes], tmp_path: Path
) -> None:
    """UR-59: the start of a model call cut at each byte: it is made again, behind whole records."""
    lines = made["going"].splitlines(keepends=True)
    whole, last = b"".join(lines[:-1]), lines[-1]
    world = World(tmp_path)
    world.runs.mkdir()
    path, store = world.path(ACC), world.store()
    for cut in range(0, len(last), 3):
        path.write_bytes(whole + last[:cut])
        assert isinstance(await run(store, world.agent(), ACC), Completed)
        assert path.read_bytes().startswith(whole)
        assert named(world.check(ACC))[5:] == [
            "step.started llm/2",
            "step.completed llm/2",
            "run.completed",
        ]
    assert not world.ledger.lines()
