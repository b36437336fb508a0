"""What mutants of the core survived (docs/guards.md): promises that no other test looked at."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from kit.build import (
    RUN,
    Log,
    answered,
    approved,
    asked_for,
    asking,
    asks,
    cancel,
    cancelled_end,
    claimed,
    done,
    failed,
    goes_on,
    late,
    model_start,
    parked,
    rejected,
    released,
    reply_of,
    request,
    retry,
    start_of,
    started,
)

from journal import ids
from journal.claims import Delivery, Drop, Resting, Take, TaskDecision, decide_task
from journal.codec import Damage
from journal.errors import (
    BadPayload,
    DecisionConflict,
    InvalidId,
    JournalDamaged,
    NotEncodable,
    PermissionDenied,
    RunfoldError,
    StaleSignal,
    StoreLocked,
    ToolError,
)
from journal.fold import Fold
from journal.heard import payload_digest
from journal.limits import VALUE_DEPTH_MAX
from journal.records import Signal, VerdictAllow
from journal.signal_address import run_filters
from journal.signal_rules import Append, Repeated, SignalDecision, decide_signal
from journal.signals import parse_signal
from journal.steps import make_call, step_key
from journal.values import normalise
from journal.views import instant, run_json, waiting_on
from journal.waits import other_code_may, parse_instant

PAY = "tool/1/0/pay"


def said(log: Log, name: str, payload: dict[str, Any], request_id: str = "r-new") -> SignalDecision:
    return decide_signal(log.fold, parse_signal(name, payload), request_id, held=False)


# ---- ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [5, None, b"a1", ["a1"]], ids=repr)
def test_what_is_no_text_is_no_id(value: Any):
    with pytest.raises(InvalidId, match="is not a run id"):
        ids.run_id(value)
    with pytest.raises(InvalidId, match="is not a name for a tool"):
        ids.name(value, "a tool")


def test_a_made_up_run_id_has_80_bits_in_letters_that_read_as_nothing_else():
    assert all(re.fullmatch("[0-9a-hjkmnp-tv-z]{16}", ids.new_run_id()) for _ in range(50))


def test_no_tool_is_named_as_the_engines_own_steps():
    with pytest.raises(InvalidId, match="the engine's own"):
        ids.tool_name("runfold.spawn")
    assert ids.tool_name("runfold") == "runfold"


# ---- values -------------------------------------------------------------------------------------


@dataclass
class Box:
    held: Any


NESTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda inner: [inner],
    "object": lambda inner: {"a": inner},
    "tuple": lambda inner: (inner,),
    "object with a tuple": lambda inner: {"a": inner, "b": ()},
    "dataclass": Box,
}


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("leaf", [1, (), {}], ids=["plain", "as its round trip is not", "empty"])
def test_a_value_is_nested_to_the_limit_and_no_deeper(nest: str, leaf: Any):
    value = leaf
    for _ in range(VALUE_DEPTH_MAX):
        value = NESTS[nest](value)
    normalise(value, "the value")
    with pytest.raises(NotEncodable, match="nested deeper"):
        normalise(NESTS[nest](value), "the value")


# ---- steps and claims ---------------------------------------------------------------------------


def test_a_call_of_the_loop_keeps_its_key_in_a_later_attempt_and_a_handlers_does_not():
    """A handler's position may be another call in a later attempt, a loop's never is (R28)."""
    loop = make_call(PAY, "tool", "pay", 1, unsafe=True)
    handler = make_call("0/1", "tool", "pay", 1, unsafe=True)
    assert step_key(RUN, loop, 2) == step_key(RUN, loop, 1)
    assert step_key(RUN, handler, 2) != step_key(RUN, handler, 1)


def test_a_task_of_a_run_that_does_not_exist_is_dropped():
    task = Delivery(sequence=1, delivery=1, cause=0)
    terms: dict[str, Any] = {"agent": "helpdesk", "accepts": ["1"], "now": ""}
    assert decide_task(Fold(), task, [], **terms, ack_wait_s=30, restart_limit=5) == Drop()


def test_a_task_of_a_run_that_is_paused_over_its_code_is_taken_by_other_code_only():
    log = Log(started(), claimed("w1"), parked("pause", reason="mismatch"))
    task = Delivery(sequence=9, delivery=1, cause=log.fold.n)

    def decided(revision: str) -> TaskDecision:
        terms: dict[str, Any] = {"agent": "helpdesk", "accepts": [revision, "1"], "now": ""}
        return decide_task(log.fold, task, [], **terms, ack_wait_s=30, restart_limit=5)

    assert decided("2") == Take("wake")
    assert decided("1") == Resting("")


def test_no_other_code_tries_a_run_whose_write_a_person_must_settle():
    log = Log(started(), claimed("w1"), start_of(PAY), parked("pause", reason="mismatch"))
    assert log.fold.status() == "indeterminate"
    assert not other_code_may(log.fold, "2")


def test_other_code_may_try_a_run_only_while_it_is_paused_over_its_code():
    """What a mismatch left behind says nothing of a later wait in the same turn (R43)."""
    log = Log(started(), claimed("w1"), parked("pause", reason="mismatch"))
    assert other_code_may(log.fold, "2")
    assert not other_code_may(log.fold, "1")
    log.add(claimed("w2", revision="2"))
    assert not other_code_may(log.fold, "3")
    log.add(parked("approval", asks=(asked_for("0/1"),)))
    assert not other_code_may(log.fold, "3")


# ---- signals ------------------------------------------------------------------------------------


def test_a_repeated_reconcile_that_names_another_start_is_another_signal():
    log = Log(started(), claimed("gone"), start_of(PAY))
    log.add(done(PAY, 3, "D", request_id="r1"))
    again: dict[str, Any] = {"step": PAY, "outcome": "done", "result": "D"}
    assert said(log, "reconcile", again, "r1") == Repeated(4)
    assert said(log, "reconcile", again | {"start": 3}, "r1") == Repeated(4)
    with pytest.raises(DecisionConflict, match="another signal"):
        said(log, "reconcile", again | {"start": 5}, "r1")


def test_an_approval_of_a_call_that_stands_there_under_another_marker_is_not_kept():
    """No later gate asks for it: it would permit nothing and be called taken."""
    log = Log(started(), model_start())
    pay = asking(1, 0, "pay")
    log.add(reply_of(1, asks(request("pay"), request("look")), pay, VerdictAllow()))
    assert log.fold.status() == "running"  # the other call is to be made
    other = asking(1, 0, "pay", "f" * 16).marker
    with pytest.raises(StaleSignal, match="not pending"):
        said(log, "approve", {"marker": other})
    later = asking(2, 0, "pay").marker
    assert said(log, "approve", {"marker": later}) == Append(approved(later, "r-new"), kept=True)


def test_arguments_that_are_no_strict_json_are_shown_as_they_are():
    log = Log(started(), model_start())
    text = '{"amount":1,"amount":2}'
    log.add(reply_of(1, asks(request("pay", text)), asking(1, 0, "pay")))
    assert [ask.input for ask in log.fold.asked()] == [text]


@pytest.mark.parametrize("payload", [{"reason": {1, 2}}, {"reason": float("nan")}, {1: "x"}])
def test_a_payload_that_is_no_json_is_refused_as_one(payload: Any):
    with pytest.raises(BadPayload, match="is not JSON"):
        parse_signal("cancel", payload)


# ---- what people and clients see ----------------------------------------------------------------


def test_the_run_object_has_its_keys_and_an_end_its_reason():
    """PROTOCOL 8: other programs read it."""
    ended = run_json(Log(started(), failed("iterations", detail="200 of 200")).fold)
    assert list(ended) == [
        *("run", "agent", "status", "message", "pending", "unknown", "waiting_on"),
        *("reason", "detail", "iteration", "attempt", "records", "model_calls"),
    ]
    assert (ended["run"], ended["status"], ended["message"]) == (RUN, "failed", None)
    assert (ended["reason"], ended["detail"], ended["records"]) == ("iterations", "200 of 200", 2)
    assert run_json(Log(started(), cancelled_end("asked to")).fold)["reason"] == "asked to"
    completed = run_json(Log(started(), answered("Done.")).fold)
    assert (completed["message"], completed["reason"]) == ("Done.", None)


def test_an_unknown_write_is_in_the_run_object_only_while_it_is_unknown():
    log = Log(started(), start_of(PAY, input={"amount": 1}))
    assert [one["step"] for one in run_json(log.fold)["unknown"]] == [PAY]
    log.add(done(PAY, 2))
    assert not run_json(log.fold)["unknown"]


def test_a_record_whose_time_is_no_time_hides_nothing():
    log = Log()
    log.at = "yesterday"
    log.add(started())
    log.add(start_of(PAY))
    assert instant("yesterday") == datetime.fromtimestamp(0, UTC)
    assert [one["step"] for one in run_json(log.fold)["unknown"]] == [PAY]


# ---- the order of records -----------------------------------------------------------------------


def test_a_permitted_write_of_an_earlier_attempt_may_be_waited_for_in_a_later_one():
    """Its call may still run, so the attempt that is to make it again parks in its name (R22, R44).
    No other park names a step that is not open."""
    log = Log(started(), claimed("w1"), start_of("0/0"), retry("0/0", 3))
    log.add(parked("retry", afresh=True))
    log.add(claimed("w2"))
    with pytest.raises(Damage, match="not open"):
        log.add(parked("approval", steps=("0/0",)))
    assert log.add(parked("retry", steps=("0/0",))) == 7


@pytest.mark.parametrize(
    ("signal", "what"),
    [
        (Signal(name="child", request_id="c1", payload={"run": "c1"}), "without an outcome"),
        (
            Signal(name="child", request_id="c1", payload={"run": "c1", "outcome": "done"}),
            "without an outcome",
        ),
        (
            Signal(
                name="reconcile",
                request_id="r1",
                payload={"step": "0/0", "outcome": "retry", "start": 3.0},
            ),
            "a start that is not there",
        ),
        (
            Signal(
                name="late", request_id="l1", payload={"step": "0/0", "start": "3", "result": 1}
            ),
            "a start that is not there",
        ),
    ],
)
def test_a_signal_of_the_wrong_shape_is_damage(signal: Signal, what: str):
    log = Log(started(), claimed("w1"), start_of("0/0"), released())
    with pytest.raises(Damage, match=what):
        log.add(signal)


# ---- what a commit keeps ------------------------------------------------------------------------


@pytest.mark.parametrize("decision", [approved, rejected])
def test_no_commit_forgets_a_decision_however_old(decision: Callable[[str], Signal]):
    """Its gate may be yet to come, and a fold that restarts at the commit knows nothing else."""
    log = Log()
    log.at = "2020-01-02T03:04:05.678Z"
    log.add(started())
    marker = asking(9, 0, "pay").marker
    log.add(decision(marker))
    log.add(other := cancel("enough", "r-old"))
    log.at = "2026-01-02T03:04:05.678Z"
    log.add(goes_on())
    assert marker in {known.about for known in log.fold.requests.values()}
    assert other.request_id not in log.fold.requests


def test_what_a_repeat_is_recognised_by_is_the_same_in_every_version():
    """It stands in the summaries of journals."""
    assert payload_digest({"marker": "m", "comment": "ok"}) == "ea1dc0a540fc3dcd3a327c165ff8e98f"


# ---- earlier attempts ---------------------------------------------------------------------------


def second_attempt() -> Log:
    """A write of the first attempt, permitted again, that the second one has not made yet."""
    log = Log(started(), claimed("w1"), start_of("0/0"), retry("0/0", 3))
    log.add(parked("retry", afresh=True))
    return log


def test_a_late_result_names_the_step_of_its_start():
    log = second_attempt()
    late_result = {"start": 3, "result": "L"}
    with pytest.raises(StaleSignal, match="not the last start"):
        said_by_a_worker(log, late_result | {"step": "0/1"})
    assert isinstance(said_by_a_worker(log, late_result | {"step": "0/0"}), Append)


def said_by_a_worker(log: Log, payload: dict[str, Any]) -> SignalDecision:
    return decide_signal(log.fold, parse_signal("late", payload, worker=True), "r", held=False)


def test_what_is_tried_on_a_copy_leaves_the_fold_as_it_was():
    log = second_attempt()
    (steps,) = log.fold.honoured.values()
    tried = log.fold.copy()
    tried.apply(log.sealed(late("0/0", 3)))
    assert [step.late for step in steps] == [{}]
    (tried_steps,) = tried.honoured.values()
    assert [list(step.late) for step in tried_steps] == [[3]]


def test_an_instant_that_has_no_date_in_utc_is_none():
    with pytest.raises(ValueError, match="no instant in UTC"):
        parse_instant("9999-12-31T23:59:00-14:00")


def test_a_pause_where_nobody_claims_is_a_pause():
    log = Log(started(), parked("pause", reason="mismatch"))
    assert log.fold.status() == "paused"
    assert log.fold.mismatched == set()


# ---- addresses and errors -----------------------------------------------------------------------


def test_the_filters_of_a_run_are_all_its_spellings_each_once():
    assert run_filters(ids.run_id("a1")) == ("a1.*", "as.*.a1.*")
    dotted = ("order~7.*", "as.*.order~7.*", "as.*.order.7.*", "order.7.*")
    assert run_filters(ids.run_id("order.7")) == dotted
    assert run_filters(ids.run_id("as.7")) == ("as~7.*", "as.*.as~7.*", "as.*.as.7.*")


def test_ids_that_differ_in_one_capital_have_different_files_where_case_is_ignored():
    stems = [ids.file_stem(ids.run_id(value)).lower() for value in ("abc", "Abc", "aBc", "abC")]
    assert len(set(stems)) == 4


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (JournalDamaged("m", where="w", run_id="a1", hint="h", good=()), {"where": "w"}),
        (JournalDamaged("m", where="w", run_id="a1", hint="h", good=(1,)), {"good": (1,)}),  # type: ignore[arg-type]
        (PermissionDenied("m", subject="s", run_id="a1", hint="h"), {"subject": "s"}),
        (StoreLocked("m", holder="p", run_id="a1", hint="h"), {"holder": "p"}),
    ],
)
def test_an_error_says_what_where_and_what_to_do(error: RunfoldError, fields: dict[str, Any]):
    assert (error.message, error.run_id, error.hint) == ("m", "a1", "h")
    assert {name: getattr(error, name) for name in fields} == fields
    assert "m" in str(error)


def test_a_tool_error_keeps_its_message_and_data():
    error = ToolError("no funds", {"code": 7})
    assert (error.message, error.data, str(error)) == ("no funds", {"code": 7}, "no funds")


def test_a_run_of_a_newer_version_waits_for_its_operator():
    log = Log(started())
    log.fold.newer = "step.split"
    (wait,) = waiting_on(log.fold)
    assert (wait.what, wait.ended_by) == ("operator", "update this installation")
