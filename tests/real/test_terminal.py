"""Nothing that is recorded can move the cursor, hide or reorder what a person reads (R68)."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from kit.cli import Cli, Done, run_line

from journal.records import StepCompleted

pytestmark = pytest.mark.real

ESCAPE = re.compile(r"\\(x|u00)[0-9a-f]{2}")
HARMFUL = ("Cc", "Cf", "Zl", "Zp", "Cs")
BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
_HARMFUL_CHARS = "".join(
    char
    for char in map(chr, range(0x3000))
    if unicodedata.category(char) in ("Cc", "Zl", "Zp") or unicodedata.bidirectional(char) in BIDI
)
NASTY = f"<{_HARMFUL_CHARS}\u200b\u200e\u200f\u061c\ufeff\x1b[2J\x1b]0;title\x07\U000e0041>"
ANSWER = NASTY.replace("\t\n", "")
"""An answer is a block of text: its line breaks and tabs stay."""

SHORT = "\x1b[31m\r\u202e"
"""Fits where text is cut."""

AGENT = r"""
from runfold import Agent, NeedsApproval, PolicyGate, Reply, ToolError, Transient, read, write
from runfold.testing import ScriptedModel, say
from runfold.testing import call as asks
from journal.messages import ToolRequest
from journal.values import canonical

NASTY = {nasty!r}
ANSWER = NASTY.replace("\t\n", "")
SHORT = {short!r}

@read
def lookup(query: str) -> str:
    return query

@read
def broken(query: str) -> str:
    raise ValueError(NASTY)

@write
def charge(payload: dict) -> dict:
    return payload

@write(approval=False)
def lost(query: str) -> str:
    raise RuntimeError(NASTY)

def request(id, name, **arguments):
    return ToolRequest(id=id, name=name, arguments=canonical(arguments).decode())

PAYLOAD = {{NASTY: [NASTY, 0.1, 1e308, -0.0, 2**63, -(2**63), None, True, ""]}}
tools = [lookup, broken, charge, lost]
gate = PolicyGate(tools, {{"charge": NeedsApproval(NASTY)}})
opening = Reply(calls=(
    request("1" + SHORT, "lookup", query=NASTY),
    request("2" + SHORT, "broken", query=NASTY),
    request("3" + SHORT, "no" + SHORT, query=NASTY),
    request("4" + SHORT, "lookup", wrong=NASTY),
), finish="tool_calls")
asking = Reply(calls=(request("5" + SHORT, "charge", payload=PAYLOAD),), finish="tool_calls")
agent = Agent("nasty", model=ScriptedModel(opening, asking, say(ANSWER)), tools=tools, gate=gate)
loses = Agent("loses", model=ScriptedModel(asks("lost", query=NASTY)), tools=tools)

class Raises:
    async def reply(self, messages, tools, *, preview):
        raise RuntimeError(NASTY)

raises = Agent("raises", model=Raises())
refusing = Agent("refusing", model=ScriptedModel(Reply(text=NASTY, finish="refusal")))
"""


@pytest.fixture
def agent(tmp_path: Path) -> str:
    path = tmp_path / "nasty.py"
    path.write_text(AGENT.format(nasty=NASTY, short=SHORT))
    return str(path)


def is_harmless(done: Done, *, escaped: bool = True) -> Done:
    """No control, format or separator character but line feeds; something stands escaped."""
    for char in done.out.replace("\n", "") + done.err.replace("\n", ""):
        assert unicodedata.category(char) not in HARMFUL, (hex(ord(char)), done)
    assert "Traceback" not in done.err and "internal error" not in done.err, done
    assert not escaped or ESCAPE.search(done.out + done.err), done
    return done


def is_exact(done: Done) -> Any:
    """Valid JSON for every parser: what is printed decodes to what was recorded."""
    assert not any(ord(char) < 0x20 for char in done.out[:-1]), done
    return done.json


async def test_what_a_run_records_is_shown_escaped_and_given_exactly(cli: Cli, agent: str) -> None:
    run = ["run", f"{agent}:agent", "--id=n1", f"--input-json={json.dumps([NASTY])}"]
    first, shown, listed = await cli.forked([run, ["show", "n1"], ["list"]], at_once=1)
    assert (first.code, shown.code, listed.code) == (3, 3, 0), (first, shown)
    is_harmless(first)
    is_harmless(shown)
    assert r"no\x1b[31m\r\u202e" in shown.out
    as_json, list_json = await cli.forked([["show", "n1", "--json"], ["list", "--json"]], at_once=2)
    (pending,) = is_exact(as_json)["pending"]
    assert pending["text"] == NASTY
    payload = {NASTY: [NASTY, 0.1, 1e308, -0.0, 2**63, -(2**63), None, True, ""]}
    assert pending["input"] == {"payload": payload}
    assert is_exact(list_json)["runs"] == [as_json.json]
    # What is shown for approval is what runs, letter by letter.
    shown_input = next(line for line in shown.out.split("\n") if line.startswith("  charge "))
    plain = shown_input.removeprefix("  charge ")
    assert plain.isprintable() and plain.count("\\u202e") >= 2
    approve = ["approve", pending["marker"], f"--comment={SHORT}"]
    approved, end, shown, listed = await cli.forked(
        [approve, run, ["show", "n1"], ["list"]], at_once=1
    )
    assert (approved.code, end.code, shown.code) == (0, 0, 0), (approved, end)
    for done in (end, shown, listed):
        is_harmless(done)
    (as_json,) = await cli.forked([["show", "n1", "--json"]], at_once=1)
    assert is_exact(as_json)["message"] == ANSWER
    records = await cli.records("n1")
    assert records[0].input == [NASTY]  # type: ignore[attr-defined]
    results = [
        record.result
        for record in records
        if isinstance(record, StepCompleted) and record.step == "tool/2/0/charge"
    ]
    assert results == [payload]


async def test_a_reason_is_shown_escaped(on_file: Cli, agent: str) -> None:
    run = ["run", f"{agent}:agent", "--id=n2", "--input=x"]
    await on_file.forked([run], at_once=1)
    (shown,) = await on_file.forked([["show", "n2", "--json"]], at_once=1)
    marker = shown.json["pending"][0]["marker"]
    reason = NASTY.replace("\0", "")
    rejected, end, shown = await on_file.forked(
        [["reject", marker, f"--reason={reason}"], run, ["show", "n2"]], at_once=1
    )
    assert (rejected.code, end.code) == (0, 0), (rejected, end)
    is_harmless(end)
    assert "rejected: <\\x01" in is_harmless(shown).out


QUOTE_NOTHING = ("--input-j", "--done=\x1b[", "--status=", "--request")
"""Options whose refusal does not repeat what was given."""


async def test_what_goes_wrong_is_said_escaped(on_file: Cli, agent: str) -> None:
    """On stderr: a model's failure, a write's, a model's refusal, refused words."""
    lines = [
        ["run", f"{agent}:loses", "--id=w1", "--input=x"],
        ["run", f"{agent}:raises", "--id=w2", "--input=x"],
        ["run", f"{agent}:refusing", "--id=w3", "--input=x"],
        ["show", "w1"],
        ["show", "w3"],
        ["list", "--status=failed"],
        ["show", f"w{SHORT}"],
        ["list", f"--store=http://{SHORT}"],
        ["list", f"--store=nats://{SHORT}"],
        ["list", f"--namespace={SHORT}"],
        ["list", f"--status={SHORT}"],
        ["run", f"{SHORT}.py:agent", "--id=w4", "--input=x"],
        ["run", f"x.py:{SHORT}", "--id=w4", "--input=x"],
        ["run", f"{agent}:agent", "--id=w4", f"--input=@{SHORT}"],
        ["run", f"{agent}:agent", "--id=w4", f"--input-json={SHORT}"],
        ["reconcile", "w1", f"x{SHORT}", "--retry"],
        ["reconcile", "w1", "tool/1/0/lost", f"--done={SHORT}"],
        ["reconcile", "w1", "tool/1/0/lost", "--retry", f"--request-id={SHORT}"],
        ["approve", SHORT],
        [SHORT],
        ["list", f"--{SHORT}"],
    ]
    found = await on_file.forked(lines, at_once=1)
    for line, done in zip(lines, found, strict=True):
        is_harmless(done, escaped=line[-1][:9] not in QUOTE_NOTHING)
    codes = [done.code for done in found]
    assert codes[:6] == [4, 1, 6, 4, 6, 0], codes
    assert set(codes[6:]) <= {2, 8, 9}, codes


@pytest.mark.parametrize("agent_of", ["loses", "refusing"])
async def test_errors_as_json_keep_the_exact_text(on_file: Cli, agent: str, agent_of: str) -> None:
    run = ["run", f"{agent}:{agent_of}", "--id=e1", "--input=x", "--json"]
    (done,) = await on_file.forked([run], at_once=1)
    shape = is_exact(done)
    if agent_of == "refusing":
        assert (shape["reason"], shape["detail"]) == ("model_refused", NASTY)
    else:
        assert shape["unknown"][0]["input"] == {"query": NASTY}


async def test_a_forged_record_is_shown_escaped(on_file: Cli, agent: str) -> None:
    """Whoever may write to the store can put anything into a record that is well formed."""
    await on_file.forked([run_line("f1", "desk", input="x")], at_once=1)
    intent = {"kind": "tool", "digest": "0" * 32, "replay": "unsafe", "tool": NASTY, "key": NASTY}
    await on_file.append_chained("f1", "step.started", step=f"tool{NASTY}", input=NASTY, **intent)
    shown, as_json = await on_file.forked([["show", "f1"], ["show", "f1", "--json"]], at_once=2)
    assert (shown.code, as_json.code) in [(4, 4), (1, 1)], shown
    is_harmless(shown)
    if as_json.code == 4:
        assert is_exact(as_json)["unknown"][0]["step"] == f"tool{NASTY}"


async def test_a_forged_type_is_shown_escaped(cli: Cli) -> None:
    await cli.forked([run_line("f2", "clock", input="x")], at_once=1)
    await cli.forked([run_line("f3", "desk", input="x")], at_once=1)
    await cli.append_chained("f3", f"type{NASTY}", at=NASTY, by=NASTY)
    words = [["show", "f3"], ["list"], list(run_line("f3", "desk", input="x"))[:-1]]
    shown, listed, refused = await cli.forked(words, at_once=1)
    assert (shown.code, listed.code, refused.code) == (1, 0, 1), (shown, refused)
    is_harmless(shown)
    is_harmless(listed, escaped=False)
    is_harmless(refused)


async def test_a_terminal_without_unicode_gets_escapes_not_an_error(
    on_file: Cli, agent: str
) -> None:
    on_file.env |= {"PYTHONIOENCODING": "ascii"}
    refused = await on_file.typed("run", f"{agent}:agent", "--id=é", "--input=é")
    assert refused.code == 2 and "\\xe9" in refused.line
    done = await on_file.typed("run", f"{agent}:agent", "--id=u1", "--input=é漢😀")
    shown = await on_file.typed("show", "u1")
    assert (done.code, shown.code) == (3, 3), (done, shown)
