"""Ids, markers, namespaces: one rule, the same answer at every door, nothing touched (R1, R2)."""

from __future__ import annotations

from typing import Any

import pytest
from kit.cli import AGENTS, Cli, run_line

pytestmark = pytest.mark.real

DESK = f"{AGENTS}:desk"
STEP = "tool/2/0/create_ticket"
DIGEST = "0123456789abcdef"

Case = tuple[list[str], int, str]

BAD_IDS = [
    *("", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "C:x", "a:b", "x ", " x", "a b", "a*", "*"),
    *(">", "a.>", "a\tb", "a\nb", "a\r\nb", "\n", "a\n", "%2e%2e", "~", "a~b", "_a", "é", "😀"),
    *("ａ", "a\u202eb", "\x1b[31mx", "\udcff", "x" * 129, "x" * 255, "x" * 5000),
]
"""UR-64 and the like. `a\\0b` can't be said on a command line."""

DASHED = ["-rf", "-", "--", "-1"]
"""They look like options: the parser refuses some before the id is looked at."""

GOOD_IDS = [
    *("a", "A", "A-1_b", "a.b", "a-b", "a_b", "x.", "CON", "con", "nul.txt", "0", "x" * 128),
    "018f2d3e-7b6a-7c11-9e5f-2b1a0c9d8e7f",
]

BAD_NAMESPACES = ["A", "1a", "-a", "a.b", "a_b", "a b", "*", ">", "é", "../x", "a\n", "x" * 33]


def doors(id: str) -> list[list[str]]:
    """Every command that takes a run's id."""
    marker = f"{id}/{STEP}@1.{DIGEST}" if id != "a/b" else f"a\\b/{STEP}@1.{DIGEST}"
    return [
        ["run", DESK, f"--id={id}", "--input", "x"],
        ["show", "--", id],
        ["list", f"--after={id}"],
        ["approve", "--", marker],
        ["reject", "--reason", "no", "--", marker],
        ["reconcile", "--retry", "--", id, STEP],
        ["start", "desk", f"--id={id}", "--input", "x"],
        ["follow", "--", id],
        ["send", "--", id, "hello"],
        ["input", "--", id, "i1"],
        ["withdraw", "--", id, "i1"],
        ["cancel", "--", id],
        ["resume", "--", id],
        ["sweep", f"--after={id}"],
    ]


async def test_a_bad_run_id_is_refused_at_every_door(any_cli: Cli, all_refused: Any) -> None:
    """Before anything is touched: without a store not even the embedded server starts."""
    few = BAD_IDS if any_cli.kind == "file" else ["", "../x", "*", "a\nb", "x" * 129, "x" * 5000]
    await all_refused(any_cli, [(args, 2, "invalid_id") for id in few for args in doors(id)])


async def test_an_id_that_looks_like_an_option_is_refused(on_file: Cli, all_refused: Any) -> None:
    cases: list[Case] = []
    for id in DASHED:
        cases += [(args, 2, "invalid_id") for args in doors(id)]
    for args in (["show", "-rf"], ["reconcile", "-x", STEP, "--retry"], ["approve", "-rf"]):
        cases.append((args, 2, "usage"))
    await all_refused(on_file, cases)


async def test_good_ids_are_runs_of_their_own(cli: Cli) -> None:
    lines = [run_line(id, "clock", input=f"input of {id}") for id in GOOD_IDS]
    for id, done in zip(GOOD_IDS, await cli.forked(lines, at_once=2), strict=True):
        assert (done.code, done.json["run"]) == (0, id), done
    listed = await cli("list", "--json")
    assert [run["run"] for run in listed.json["runs"]] == sorted(GOOD_IDS)
    for id in GOOD_IDS:
        assert (await cli.records(id))[0].input == f"input of {id}"  # type: ignore[attr-defined]
    page = await cli("list", "--json", "--after", "a.b", "--limit", "2")
    assert [run["run"] for run in page.json["runs"]] == [
        id for id in sorted(GOOD_IDS) if id > "a.b"
    ][:2]
    if cli.kind == "file":
        names = [path.name.lower() for path in (cli.folder / "runs").glob("*.jsonl")]
        assert len(set(names)) == len(GOOD_IDS)
        assert not {name.partition(".")[0] for name in names} & {"con", "nul"}


async def test_a_marker_that_is_none_is_refused(cli: Cli, all_refused: Any) -> None:
    marker = f"a1/{STEP}@1.{DIGEST}"
    bad = [
        *("", "a1", "a1/x", f"a1/{STEP}", f"{STEP}@1.{DIGEST}"[4:], marker[:-1], f"{marker}0"),
        *(marker.upper(), marker.replace("@1", "@0"), marker.replace("@1", "@-1"), f"{marker}\n"),
        *(f" {marker}", marker.replace("0123", "01\u202e3"), "x" * 5000),
    ]
    cases: list[Case] = [
        ([command, "--", text], 2, "invalid_id")
        for text in bad
        for command in ("approve", "reject")
    ]
    await all_refused(cli, cases)


async def test_a_bad_namespace_is_refused(cli: Cli, all_refused: Any) -> None:
    commands = [
        ["run", DESK, "--id=a1", "--input=x"],
        ["show", "a1"],
        ["list"],
        ["approve", f"a1/{STEP}@1.{DIGEST}"],
        ["reconcile", "a1", STEP, "--retry"],
    ]
    if cli.kind == "jetstream":
        commands += [["init"], ["doctor"]]
    cases: list[Case] = [
        ([*command, f"--namespace={namespace}"], 2, "invalid_id")
        for namespace in ["", *BAD_NAMESPACES]
        for command in (commands if namespace in ("", "A", "a.b") else commands[:2])
    ]
    await all_refused(cli, cases)
