"""R31, R32, R36: what becomes of each call of a model's reply, when it is recorded and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.build import (
    ALLOW,
    RUN,
    Log,
    approved,
    asks,
    denying,
    error_of,
    model_start,
    rejected,
    reply_of,
    request,
    result_of,
    start_of,
    started,
)

from journal.fold import Fold
from journal.ids import marker_run
from journal.limits import ARGUMENTS_BYTES_MAX
from journal.messages import JSON, Reply, ToolRequest, ToolSpec
from journal.records import Record, Verdict, VerdictAllow, VerdictAsk, VerdictDeny
from journal.terms import Bounds
from runfold.testing import ScriptedModel
from worker.agent import Agent
from worker.gate import Allow, Deny, GateDecision, NeedsApproval, PolicyGate
from worker.replies import (
    Answered,
    AwaitDecision,
    CallDecision,
    Execute,
    Refuse,
    decide_call,
    judge_reply,
)
from worker.tools import SAFE, Tool, read, write


@read
def lookup(q: str = "") -> str:
    """Look it up."""
    return q


@write
def charge(amount: int) -> str:
    """Charge the card."""
    return str(amount)


@write(approval=False)
def mail(to: str) -> str:
    """Send a mail."""
    return to


@write(approval=False, replay=SAFE)
def note(text: str) -> str:
    """Keep a note; twice is harmless."""
    return text


TOOLS = [lookup, charge, mail, note]
PAY = request("charge", {"amount": 10})
STEP = "tool/1/0/charge"


class AskWith(PolicyGate):
    """A gate with its own words for a person, or another rule."""

    def __init__(self, decision: Callable[[JSON], GateDecision]) -> None:
        super().__init__(TOOLS)
        self._decision = decision

    def decide(self, tool: ToolSpec, input: JSON) -> GateDecision:
        return self._decision(input)


def agent(tools: list[Tool] = TOOLS, gate: PolicyGate | None = None, **bounds: int) -> Agent:
    return Agent("helpdesk", model=ScriptedModel(), tools=tools, gate=gate, bounds=Bounds(**bounds))


def judge(*requests: ToolRequest, by: Agent | None = None, **fields: Any) -> tuple[Verdict, ...]:
    reply = msgspec.structs.replace(asks(*requests), **fields)
    return judge_reply(by or agent(), RUN, 1, reply)


def marker_of(verdict: Verdict) -> str:
    assert isinstance(verdict, VerdictAsk)
    return verdict.marker


def journal(*requests: ToolRequest, by: Agent | None = None) -> tuple[Log, tuple[Verdict, ...]]:
    """A run whose model made these calls; the verdicts that were recorded with them."""
    verdicts = judge(*requests, by=by)
    return Log(started(), model_start(), reply_of(1, asks(*requests), *verdicts)), verdicts


def decide(
    fold: Fold, verdict: Verdict, call: ToolRequest = PAY, *, by: Agent | None = None
) -> CallDecision:
    return decide_call(fold, by or agent(), 1, 0, call, verdict)


# ---- verdicts (R31) ---------------------------------------------------------------------------


def test_the_default_gate_allows_reads_and_asks_for_writes_unless_they_say_otherwise():
    verdicts = judge(
        request("lookup"), PAY, request("mail", {"to": "x"}), request("note", {"text": "x"})
    )
    assert [type(verdict) for verdict in verdicts] == [
        VerdictAllow,
        VerdictAsk,
        VerdictAllow,
        VerdictAllow,
    ]


def test_a_rule_of_the_gate_comes_before_the_declaration():
    rules: dict[str, GateDecision] = {
        "lookup": NeedsApproval("May it look?"),
        "charge": Deny("no charges here"),
        "mail": NeedsApproval("Send?"),
    }
    by = agent(gate=PolicyGate(TOOLS, rules))
    asked, denied, mailed = judge(request("lookup"), PAY, request("mail", {"to": "x"}), by=by)
    assert isinstance(asked, VerdictAsk) and asked.text == "May it look?"
    assert denied == VerdictDeny(type="denied", reason="no charges here")
    assert isinstance(mailed, VerdictAsk) and mailed.text == "Send?"


def test_a_marker_names_run_and_step_so_that_an_approval_needs_nothing_else():
    marker = marker_of(judge(PAY)[0])
    assert marker_run(marker) == RUN
    assert marker.startswith(f"a1/{STEP}@1.")


# ---- ill-formed calls (UR-53, UR-55) ----------------------------------------------------------

BAD_ARGUMENTS = {
    "cut off": '{"amount": 10',
    "nothing": "",
    "null": "null",
    "an array": "[1]",
    "a text": '"x"',
    "NaN": '{"amount": NaN}',
    "another type": '{"amount":"10"}',
    "a fraction": '{"amount":10.5}',
    "a boolean": '{"amount":true}',
    "a key twice": '{"amount":1,"amount":1000}',
    "an unknown argument": '{"amount":10,"force":true}',
    "no argument": "{}",
    "1 MB": '{"amount":' + "1" * 1_000_000 + "}",
    "half a surrogate": '{"amount":"\ud83d"}',
    "text after it": '{"amount":10} please',
    "a code block": '```json\n{"amount":10}\n```',
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_ill_formed_arguments_are_answered_as_an_error_and_never_run(case: str):
    call = request("charge", BAD_ARGUMENTS[case], id="c")
    log, verdicts = journal(request("charge", "{}", id="c"))
    verdict = judge(call)[0]
    assert isinstance(verdict, VerdictDeny)
    assert verdict.type == "bad_arguments"
    assert len(verdict.reason) < 400
    for recorded in (verdict, ALLOW, *verdicts):  # whatever was recorded of it
        assert isinstance(decide(log.fold, recorded, call), Refuse)


@pytest.mark.parametrize(
    "name", ["charge_v2", " charge", "\u0441harge", "Charge", "charge ", "", "?"]
)
def test_near_names_are_not_mapped(name: str):
    verdict = judge(request(name, {"amount": 10}, id="c"))[0]
    assert isinstance(verdict, VerdictDeny)
    assert verdict.type == "unknown_tool"
    assert "the tools are: lookup, charge, mail, note" in verdict.reason
    assert verdict.reason.isprintable()


def test_an_unknown_name_is_answered_bounded_and_names_no_step_of_its_own():
    call = request("x/../" + "y" * 10_000, {}, id="c")
    verdict = judge(call)[0]
    assert isinstance(verdict, VerdictDeny) and len(verdict.reason) < 700
    log, _ = journal(call)
    refused = decide(log.fold, verdict, call)
    assert isinstance(refused, Refuse) and refused.step == "tool/1/0/?"


def test_arguments_of_the_largest_size_are_still_read():
    text = '{"q":"' + "x" * (ARGUMENTS_BYTES_MAX - len('{"q":""}')) + '"}'
    assert judge(request("lookup", text, id="c")) == (ALLOW,)


@pytest.mark.parametrize("shared", ["same", ""])
def test_calls_with_equal_or_empty_ids_are_all_refused(shared: str):
    """No two calls may ever share an answer, or an approval."""
    calls = (
        ToolRequest(id=shared, name="charge", arguments='{"amount":10}'),
        ToolRequest(id="own", name="charge", arguments='{"amount":10}'),
        ToolRequest(id=shared, name="charge", arguments='{"amount":10}'),
    )
    first, own, third = judge(*calls)
    assert isinstance(first, VerdictDeny) and first.type == "bad_reply"
    assert isinstance(third, VerdictDeny) and third.type == "bad_reply"
    assert isinstance(own, VerdictAsk)


def test_equal_calls_in_one_reply_have_markers_of_their_own():
    calls = [request("charge", {"amount": 10}, id=f"c{i}") for i in range(3)]
    assert len({marker_of(verdict) for verdict in judge(*calls)}) == 3


def test_a_reply_that_was_cut_off_runs_nothing():
    verdicts = judge(request("lookup"), PAY, finish="length")
    assert {verdict.type for verdict in verdicts if isinstance(verdict, VerdictDeny)} == {
        "bad_reply"
    }
    assert len(verdicts) == 2


def test_a_reply_with_too_many_calls_runs_none_of_them():
    calls = [request("lookup", {"q": str(i)}) for i in range(300)]
    verdicts = judge(*calls)
    assert len(verdicts) == 300
    assert all(isinstance(verdict, VerdictDeny) for verdict in verdicts)
    assert judge(*calls[:2], by=agent(calls_per_reply=2)) == (ALLOW, ALLOW)


def test_a_bad_call_leaves_the_others_alone():
    verdicts = judge(request("nope"), request("lookup"), request("charge", "{", id="c"))
    assert [type(verdict) for verdict in verdicts] == [VerdictDeny, VerdictAllow, VerdictDeny]


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_call_gets_a_verdict_and_only_a_good_one_is_let_through(name: str, arguments: str):
    (verdict,) = judge(ToolRequest(id="c", name=name, arguments=arguments))
    if not isinstance(verdict, VerdictDeny):
        assert name in agent().tools
        agent().tools[name].parse(arguments)


# ---- what becomes of a recorded call ----------------------------------------------------------


def test_an_allowed_call_runs():
    call = request("lookup", {"q": "x"})
    log, (verdict,) = journal(call)
    decision = decide(log.fold, verdict, call)
    assert isinstance(decision, Execute)
    assert (decision.tool, decision.call.input) == (lookup, {"q": "x"})
    assert (decision.call.unsafe, decision.call.permit) == (False, 0)


def test_a_call_that_needs_approval_waits_for_its_marker():
    log, (verdict,) = journal(PAY)
    assert decide(log.fold, verdict) == AwaitDecision(marker_of(verdict))


def test_an_approved_call_runs_by_that_approval_exactly_as_it_was_shown():
    log, (verdict,) = journal(PAY)
    n = log.add(approved(marker_of(verdict)))
    decision = decide(log.fold, verdict)
    assert isinstance(decision, Execute)
    assert (decision.call.input, decision.call.permit, decision.call.unsafe) == (
        {"amount": 10},
        n,
        True,
    )


def test_an_approval_that_came_before_the_gate_counts():
    _, (verdict,) = journal(PAY)
    log = Log(started(), approved(marker_of(verdict)), model_start())
    log.add(reply_of(1, asks(PAY), verdict))
    assert isinstance(decide(log.fold, verdict), Execute)


def test_a_rejected_call_is_answered_with_the_reason_and_never_started():
    log, (verdict,) = journal(PAY)
    log.add(rejected(marker_of(verdict), "too much"))
    decision = decide(log.fold, verdict)
    assert isinstance(decision, Refuse)
    assert (decision.step, decision.error.type) == (STEP, "rejected")
    assert "too much" in decision.error.message


@pytest.mark.parametrize("type", ["denied", "unknown_tool", "bad_arguments", "bad_reply"])
def test_a_denied_call_stays_denied_whatever_the_gate_says_today(type: str):
    log, _ = journal(PAY)
    decision = decide(log.fold, denying(type, "because"))
    assert isinstance(decision, Refuse)
    assert (decision.error.type, decision.error.message) == (type, "because")


@pytest.mark.parametrize("result", [result_of(STEP), error_of(STEP, "tool_error")])
def test_a_call_with_a_result_is_answered_whatever_the_code_says_today(result: Record):
    log = Log(started(), start_of(STEP, "charge", {"amount": 10}), result)
    for by in (agent(), agent([lookup]), agent(gate=AskWith(lambda _: Deny("never")))):
        decision = decide(log.fold, ALLOW, by=by)
        assert isinstance(decision, Answered)


def test_a_call_that_was_started_goes_to_the_step_table_whatever_the_gate_says_today():
    log = Log(started(), start_of(STEP, "charge", {"amount": 10}))
    for by in (agent(), agent(gate=AskWith(lambda _: Deny("never")))):
        decision = decide(log.fold, ALLOW, by=by)
        assert isinstance(decision, Execute)
        assert decision.call.input == {"amount": 10}
        assert decision.call.unsafe


def test_a_started_call_whose_tool_is_gone_counts_as_unsafe():
    log = Log(started(), start_of(STEP, "charge", {"amount": 10}, unsafe=False))
    decision = decide(log.fold, ALLOW, by=agent([lookup]))
    assert isinstance(decision, Execute)
    assert (decision.tool, decision.call.unsafe) == (None, True)


# ---- an approval covers what was shown, and nothing else (R32) --------------------------------


@write(name="charge", revision="2")
def charge_2(amount: int) -> str:
    """Charge the card."""
    return str(amount)


@write(name="charge")
def charge_wider(amount: int, currency: str = "EUR") -> str:
    """Charge the card."""
    return f"{amount} {currency}"


@write(name="charge", replay=SAFE)
def charge_safe(amount: int) -> str:
    """Charge the card."""
    return str(amount)


@write(name="charge")
def charge_renamed(amount: str) -> str:
    """Charge the card."""
    return amount


def swapped(tool: Tool) -> Agent:
    return agent([lookup, tool, mail, note])


CHANGED: dict[str, Agent] = {
    "the tool's revision": swapped(charge_2),
    "the tool's parameters": swapped(charge_wider),
    "the tool's replay": swapped(charge_safe),
    "the argument's type": swapped(charge_renamed),
    "the tool is gone": agent([lookup, mail, note]),
    "the gate's text": agent(gate=AskWith(lambda _: NeedsApproval("Other words"))),
    "the gate's rule": agent(gate=PolicyGate(TOOLS, {"charge": NeedsApproval("By rule")})),
    "the gate denies": agent(gate=AskWith(lambda _: Deny("not any more"))),
    "text by argument": agent(gate=AskWith(lambda given: NeedsApproval(f"Charge {given}?"))),
}


@pytest.mark.parametrize("case", CHANGED)
def test_an_approval_does_not_cover_a_call_that_changed_since(case: str):
    log, (verdict,) = journal(PAY)
    log.add(approved(marker_of(verdict)))
    decision = decide(log.fold, verdict, by=CHANGED[case])
    assert isinstance(decision, Refuse)
    assert decision.error.type in ("outdated", "denied", "unknown_tool", "bad_arguments")


@pytest.mark.parametrize("arguments", ['{"amount":9999}', '{"amount":10.0}', '{"amount":11}'])
def test_an_approval_does_not_cover_other_arguments(arguments: str):
    """No journal can hold this: its hashes would differ. The decision would still refuse."""
    log, (verdict,) = journal(PAY)
    log.add(approved(marker_of(verdict)))
    assert isinstance(decide(log.fold, verdict, request("charge", arguments, id=PAY.id)), Refuse)


def test_an_approval_does_not_cover_the_same_call_at_another_place():
    log, (verdict,) = journal(PAY)
    log.add(approved(marker_of(verdict)))
    elsewhere = decide_call(log.fold, agent(), 1, 1, PAY, verdict)
    assert isinstance(elsewhere, Refuse)
    assert elsewhere.error.type == "outdated"


def test_a_decision_on_the_other_of_two_equal_calls_covers_only_that_one():
    calls = [request("charge", {"amount": 10}, id=f"c{i}") for i in range(2)]
    log, verdicts = journal(*calls)
    log.add(approved(marker_of(verdicts[1])))
    decisions = [
        decide_call(log.fold, agent(), 1, i, call, verdict)
        for i, (call, verdict) in enumerate(zip(calls, verdicts, strict=True))
    ]
    assert isinstance(decisions[0], AwaitDecision)
    assert isinstance(decisions[1], Execute)


def test_a_call_that_was_allowed_but_needs_approval_today_does_not_run():
    call = request("mail", {"to": "x"})
    log, (verdict,) = journal(call)
    by = agent(gate=AskWith(lambda _: NeedsApproval("Send?")))
    decision = decide(log.fold, verdict, call, by=by)
    assert isinstance(decision, Refuse) and decision.error.type == "outdated"


def test_a_gate_that_became_more_generous_does_not_decide_for_the_person():
    log, (verdict,) = journal(PAY)
    by = agent(gate=AskWith(lambda _: Allow()))
    assert isinstance(decide(log.fold, verdict, by=by), AwaitDecision)
    log.add(rejected(marker_of(verdict)))
    assert isinstance(decide(log.fold, verdict, by=by), Refuse)


@given(
    st.sampled_from([*CHANGED, "nothing"]),
    st.sampled_from(["nobody", "approved", "rejected"]),
)
def test_a_write_that_asks_runs_only_approved_and_unchanged(change: str, said: str):
    log, (verdict,) = journal(PAY)
    if said != "nobody":
        log.add((approved if said == "approved" else rejected)(marker_of(verdict)))
    decision = decide(log.fold, verdict, by=CHANGED.get(change, agent()))
    assert isinstance(decision, Execute) == (said == "approved" and change == "nothing")


# ---- what is unsafe (R30) ---------------------------------------------------------------------


class SuspiciousGate(PolicyGate):
    def is_write(self, tool: str) -> bool:
        return True


def test_a_step_is_unsafe_if_the_declaration_or_the_gate_says_so():
    usual, suspicious = agent(), agent(gate=SuspiciousGate(TOOLS))
    assert [usual.is_unsafe(tool) for tool in ("lookup", "charge", "mail", "note", "gone")] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert suspicious.is_unsafe("lookup")
    assert not suspicious.is_unsafe("note")  # it dedupes on its key: declared, and a write to both


def test_the_replies_shape_needs_no_calls():
    assert judge_reply(agent(), RUN, 1, Reply(text="hello")) == ()
