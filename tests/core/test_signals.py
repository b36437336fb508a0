"""R59, R60: what a signal may say, which of two wins, what is refused and why."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.build import (
    RUN,
    FaultyStore,
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
    error_of,
    failed,
    folded,
    goes_on,
    interrupted_of,
    late,
    model_start,
    parked,
    rejected,
    released,
    reply_of,
    request,
    result_of,
    resume,
    retry,
    spawned,
    start_of,
    started,
    types_of,
)

from journal.doors import signal
from journal.errors import (
    BadPayload,
    DecisionConflict,
    RunFinished,
    RunfoldError,
    RunNotFound,
    StaleSignal,
)
from journal.limits import SIGNAL_BYTES_MAX
from journal.records import Record, RunPurged, VerdictAllow
from journal.signal_rules import Append, Repeated, SignalDecision, decide_signal
from journal.signals import (
    AnySignal,
    Approve,
    Cancel,
    Child,
    Late,
    Reconcile,
    Reject,
    Resume,
    given_request_id,
    name_of,
    parse_request_id,
    parse_signal,
)

PAY = "tool/1/0/pay"
ASK = asking(1, 0, "pay", "a" * 16)
M1, M2 = ASK.marker, asking(2, 0, "pay", "b" * 16).marker
HANDLERS = asked_for("0/5").marker
ASKED: list[Record] = [model_start(), reply_of(1, asks(request("pay")), ASK)]
WAITING: list[Record] = [started(), *ASKED]
UNKNOWN: list[Record] = [*WAITING, approved(M1), start_of(PAY, input={}, permit=4)]
START = 5


def decide(
    log: Log, signal: AnySignal, request_id: str = "mine", *, held: bool = False
) -> SignalDecision:
    return decide_signal(log.fold, signal, request_id, held=held)


def say(log: Log, signal: AnySignal, request_id: str, **said_by: Any) -> int:
    """Decide the signal, and append what is decided; the ordinal of its record."""
    decision = decide(log, signal, request_id)
    if isinstance(decision, Repeated):
        return decision.n
    return log.add(decision.body, **said_by)


# ---- payloads (R59, UR-16) --------------------------------------------------------------------

MARKER = json.dumps(M1)
MALFORMED: dict[str, tuple[str, bytes, str]] = {
    "empty body": ("approve", b"", "not JSON"),
    "null": ("approve", b"null", "not a JSON object"),
    "an array": ("approve", b"[]", "not a JSON object"),
    "cut off": ("approve", b"{", "not JSON"),
    "a text": ("approve", b'"approve"', "not a JSON object"),
    "a number": ("approve", b"7", "not a JSON object"),
    "a fraction": ("approve", b"-0.5e3", "not a JSON object"),
    "not UTF-8": ("approve", b"\xff\xfe", "not UTF-8"),
    "900 kB of text": ("approve", b'"' + b"x" * 900_000 + b'"', "at most 65536 bytes"),
    "1.2 MB": ("approve", b'{"marker":"' + b"x" * 1_200_000 + b'"}', "at most 65536 bytes"),
    "depth 10 000": ("approve", b"[" * 10_000 + b"]" * 10_000, "nested"),
    "a duplicate key": ("approve", b'{"approve":true,"approve":false}', "stands twice"),
    "a marker twice": ("approve", f'{{"marker":{MARKER},"marker":{MARKER}}}'.encode(), "twice"),
    "NaN": ("approve", b'{"marker": NaN}', "NaN is not JSON"),
    "gzip": ("approve", b"\x1f\x8b\x08\x00\x00\x00", "not UTF-8"),
    "byte order mark": ("approve", f'\ufeff{{"marker":{MARKER}}}'.encode(), "not JSON"),
    "no marker": ("approve", b"{}", "marker"),
    "an unknown key": ("approve", f'{{"marker":{MARKER},"run":"a2"}}'.encode(), "unknown field"),
    "a marker that is no text": ("approve", b'{"marker":7}', "Expected `str`"),
    "a null comment": ("approve", f'{{"marker":{MARKER},"comment":null}}'.encode(), "`str`"),
    "a reason on an approve": (
        "approve",
        f'{{"marker":{MARKER},"reason":"x"}}'.encode(),
        "unknown",
    ),
    "a comment on a reject": ("reject", f'{{"marker":{MARKER},"comment":"x"}}'.encode(), "unknown"),
    "no step": ("reconcile", b'{"outcome":"retry"}', "step"),
    "no outcome": ("reconcile", b'{"step":"s"}', "outcome"),
    "another outcome": ("reconcile", b'{"step":"s","outcome":"Done","result":1}', "Done"),
    "an outcome that is a boolean": ("reconcile", b'{"step":"s","outcome":true}', "bool"),
    "done without a result": ("reconcile", b'{"step":"s","outcome":"done"}', "needs the result"),
    "retry with a result": (
        "reconcile",
        b'{"step":"s","outcome":"retry","result":null}',
        "takes no result",
    ),
    "a start that is text": ("reconcile", b'{"step":"s","outcome":"retry","start":"5"}', "start"),
    "a start that is true": ("reconcile", b'{"step":"s","outcome":"retry","start":true}', "start"),
    "a start with a fraction": (
        "reconcile",
        b'{"step":"s","outcome":"retry","start":5.5}',
        "start",
    ),
    "a cancel of something": ("cancel", b'{"run":"a1"}', "unknown field"),
    "a cancel for a null": ("cancel", b'{"reason":null}', "`str`"),
    "a resume with a marker": ("resume", f'{{"marker":{MARKER}}}'.encode(), "unknown field"),
    "a resume that is an array": ("resume", b"[]", "not a JSON object"),
    "half a surrogate": (
        "reconcile",
        b'{"step":"s","outcome":"done","result":"\\ud83d"}',
        "surrogate",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_payload_is_refused_with_a_bounded_reason(case: str):
    name, body, why = MALFORMED[case]
    with pytest.raises(BadPayload) as raised:
        parse_signal(name, body)
    assert why in raised.value.message
    assert len(raised.value.message) < 400


@pytest.mark.parametrize("case", MALFORMED)
async def test_a_malformed_signal_leaves_the_run_waiting_and_the_right_one_works(case: str):
    store = await Log(*WAITING).store(FaultyStore())
    name, body, _ = MALFORMED[case]
    with pytest.raises(BadPayload):
        await signal(store, RUN, name, body)
    assert len(await types_of(store)) == len(WAITING)
    assert (await signal(store, RUN, "approve", {"marker": M1})).result == "applied"


@pytest.mark.parametrize(
    "name", ["", "Approve", "resume!", "approve\n", "late", "child", "x" * 999]
)
def test_a_name_that_is_no_signal_is_refused(name: str):
    with pytest.raises(BadPayload, match="is not a signal"):
        parse_signal(name, {"marker": M1})


def test_a_signal_sent_under_another_name_is_refused():
    with pytest.raises(BadPayload, match="Reject was sent as approve"):
        parse_signal("approve", Reject(marker=M1))


def test_the_limit_counts_the_bytes_of_the_whole_payload():
    def body(comment: str) -> str:
        return json.dumps({"marker": M1, "comment": comment}, separators=(",", ":"))

    room = SIGNAL_BYTES_MAX - len(body(""))
    assert parse_signal("approve", body("x" * room))
    with pytest.raises(BadPayload, match="at most"):
        parse_signal("approve", body("x" * (room + 1)))
    with pytest.raises(BadPayload, match="at most"):
        parse_signal("approve", {"marker": M1, "comment": "€" * (room // 2)})
    wide = json.dumps({"marker": M1, "comment": "€" * (room // 2)}, ensure_ascii=False)
    with pytest.raises(BadPayload, match="at most"):
        parse_signal("approve", wide)


GOOD: list[tuple[str, dict[str, Any], AnySignal]] = [
    ("approve", {"marker": M1}, Approve(marker=M1)),
    ("approve", {"marker": M1, "comment": "ok"}, Approve(marker=M1, comment="ok")),
    ("reject", {"marker": M1, "reason": "no"}, Reject(marker=M1, reason="no")),
    (
        "reconcile",
        {"step": PAY, "outcome": "done", "result": None},
        Reconcile(step=PAY, outcome="done", result=None),
    ),
    (
        "reconcile",
        {"step": PAY, "outcome": "retry", "start": 5},
        Reconcile(step=PAY, outcome="retry", start=5),
    ),
    ("cancel", {}, Cancel()),
    ("cancel", {"reason": "enough"}, Cancel(reason="enough")),
    ("resume", {}, Resume()),
    ("resume", {"reason": "go on", "request_id": "r1"}, Resume(reason="go on", request_id="r1")),
]


@pytest.mark.parametrize(("name", "payload", "meant"), GOOD)
def test_a_payload_means_the_same_as_bytes_text_mapping_or_signal(
    name: str, payload: dict[str, Any], meant: AnySignal
):
    text = json.dumps(payload)
    for form in (text, text.encode(), payload, meant):
        assert parse_signal(name, form) == meant


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_any_payload_is_a_signal_or_bad(body: bytes | str):
    for name in ("approve", "reject", "reconcile", "cancel", "resume", "late", "child"):
        with suppress(BadPayload):
            assert parse_signal(name, body, worker=True) is not None


OF_WORKERS: list[tuple[str, dict[str, Any], AnySignal]] = [
    (
        "late",
        {"step": PAY, "start": 5, "result": None},
        Late(step=PAY, start=5, result=None),
    ),
    (
        "child",
        {"run": "a1.c1", "outcome": {"status": "completed"}},
        Child(run="a1.c1", outcome={"status": "completed"}),
    ),
]


@pytest.mark.parametrize(("name", "payload", "meant"), OF_WORKERS)
def test_what_only_workers_say_is_no_signal_at_the_public_door(
    name: str, payload: dict[str, Any], meant: AnySignal
):
    for form in (json.dumps(payload), payload, meant):
        assert parse_signal(name, form, worker=True) == meant
        with pytest.raises(BadPayload, match="is not a signal") as raised:
            parse_signal(name, form)
        for one in ("approve", "reject", "reconcile", "cancel", "resume"):
            assert one in raised.value.hint
        assert "late" not in raised.value.hint
        assert "child" not in raised.value.hint


@pytest.mark.parametrize(("name", "payload", "meant"), OF_WORKERS)
async def test_the_public_door_appends_nothing_that_only_workers_say(
    name: str, payload: dict[str, Any], meant: AnySignal
):
    store = await Log(*UNKNOWN).store(FaultyStore())
    for form in (payload, meant):
        with pytest.raises(BadPayload, match="is not a signal"):
            await signal(store, RUN, name, form)
    assert len(await types_of(store)) == len(UNKNOWN)


LONG = "x" * 60_000
QUOTED: dict[str, tuple[str, str]] = {
    "an unknown key": ("approve", f'{{"{LONG}":1}}'),
    "a duplicate key": ("approve", f'{{"{LONG[:30_000]}":1,"{LONG[:30_000]}":2}}'),
    "an outcome": ("reconcile", f'{{"step":"s","outcome":"{LONG}"}}'),
}


@pytest.mark.parametrize("case", QUOTED)
def test_the_reason_is_bounded_whatever_the_payload_holds(case: str):
    with pytest.raises(BadPayload) as raised:
        parse_signal(*QUOTED[case])
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize("step", ["x" * 60_000, "\x1b[2J", "a\u202eb", "a\nb"])
def test_a_refused_marker_is_shown_escaped_and_cut(step: str):
    with pytest.raises(RunfoldError) as raised:
        decide(Log(*WAITING), Approve(marker=f"a1/{step}@1.{'a' * 16}"))
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 1000


@pytest.mark.parametrize("value", ["", "x" * 129, "a\nb", "é", "\x1b", "a\0"])
def test_a_request_id_that_is_none_is_refused(value: str):
    with pytest.raises(BadPayload, match="request id"):
        parse_request_id(value)


@pytest.mark.parametrize("value", [None, "r", "Sig:7", "x" * 128, "a b"])
def test_a_request_id_is_taken_as_it_is(value: str | None):
    assert parse_request_id(value) == given_request_id(value) == value


def test_a_kept_signals_own_id_is_looked_up_and_given_to_nothing_new():
    assert parse_request_id("sig:7:1") == "sig:7:1"
    with pytest.raises(BadPayload, match="kept signal's"):
        given_request_id("sig:7:1")


# ---- approve and reject (UR-18, UR-20) --------------------------------------------------------


def test_the_pending_marker_is_decided_at_once():
    decision = decide(Log(*WAITING), Approve(marker=M1, comment="ok"))
    assert isinstance(decision, Append)
    assert not decision.kept
    assert decision.body.payload == {"marker": M1, "comment": "ok"}


@pytest.mark.parametrize("first", [Approve(marker=M1), Reject(marker=M1)])
@pytest.mark.parametrize("second", [Approve(marker=M1, comment="c"), Reject(marker=M1, reason="r")])
def test_the_first_decision_wins_and_the_other_is_told_who_won(first: AnySignal, second: AnySignal):
    log = Log(*WAITING)
    winner = say(log, first, "one", by="anna")
    if type(first) is type(second):
        assert decide(log, second, "two") == Repeated(winner)
    else:
        with pytest.raises(DecisionConflict, match=f"by anna, record {winner}") as raised:
            decide(log, second, "two")
        assert raised.value.winner == winner


@pytest.mark.parametrize(
    "later", [[], [start_of(PAY, input={}, permit=4)], [error_of(PAY, via="refused")]]
)
def test_a_decision_repeated_later_is_answered_as_done_not_as_an_error(later: list[Record]):
    log = Log(*WAITING, approved(M1), *later)
    assert decide(log, Approve(marker=M1), "again") == Repeated(4)


NOT_A_MARKER = ["", "yes", "tool/1/0/pay", f"{M1}x", f" {M1}", f"a1/{PAY}@01.{'a' * 16}"]


@pytest.mark.parametrize("marker", NOT_A_MARKER)
def test_an_approve_without_a_marker_is_refused(marker: str):
    with pytest.raises(BadPayload, match="not a marker"):
        decide(Log(*WAITING), Approve(marker=marker))


def test_a_marker_of_another_run_is_refused():
    with pytest.raises(BadPayload, match="is of run a2, not a1"):
        decide(Log(*WAITING), Approve(marker=M1.replace("a1/", "a2/")))


@pytest.mark.parametrize(
    "marker",
    [
        M1.replace("a" * 16, "f" * 16),  # other arguments, tool or gate text
        M1.replace("@1.", "@2."),  # another attempt
        M1.replace("pay", "refund"),
        M2,  # a call that nobody asked about yet
    ],
)
def test_on_a_waiting_run_only_the_pending_marker_is_taken(marker: str):
    with pytest.raises(StaleSignal, match="is not pending") as raised:
        decide(Log(*WAITING), Approve(marker=marker))
    assert raised.value.hint == f"pending now: {M1}"


def test_the_old_marker_does_not_cover_the_changed_call():
    """UR-18: pay(10) was rejected, pay(9999) is asked for; the old approval covers nothing."""
    log = Log(*WAITING, rejected(M1), error_of(PAY, "rejected", via="refused"), model_start(2))
    log.add(reply_of(2, asks(request("pay", {"amount": 9999})), asking(2, 0, "pay", "b" * 16)))
    with pytest.raises(DecisionConflict, match="decided before: reject"):
        decide(log, Approve(marker=M1))
    with pytest.raises(StaleSignal, match="is not pending"):
        decide(log, Approve(marker=M1.replace("a" * 16, "c" * 16)))
    decision = decide(log, Approve(marker=M2))
    assert isinstance(decision, Append) and not decision.kept


RUNNING: dict[str, list[Record]] = {
    "started": [started()],
    "claimed": [started(), claimed()],
    "in the model call": [started(), claimed(), model_start()],
    "in a read": [started(), claimed(), start_of("tool/1/1/lookup", unsafe=False)],
    "in a write": [started(), claimed(), start_of("tool/1/1/mail")],
}


@pytest.mark.parametrize("case", RUNNING)
@pytest.mark.parametrize("signal", [Approve(marker=M1), Reject(marker=M1)])
def test_a_decision_whose_call_is_not_there_yet_is_kept_while_the_run_is_running(
    case: str, signal: AnySignal
):
    log = Log(*RUNNING[case])
    decision = decide(log, signal)
    assert isinstance(decision, Append)
    assert decision.kept
    log.add(decision.body)
    assert M1 in log.fold.decisions


@pytest.mark.parametrize(
    "records",
    [[started(), start_of("tool/1/1/mail")], [*WAITING, model_start(2)], WAITING],
    ids=["in a write", "in the next model call", "about to stop"],
)
def test_a_run_under_a_lock_is_running_and_keeps_a_decision_too(records: list[Record]):
    decision = decide(Log(*records), Approve(marker=M2), held=True)
    assert isinstance(decision, Append)
    assert decision.kept


def test_a_kept_decision_is_no_longer_pending_when_its_gate_is_reached():
    log = Log(started(), approved(M1), *ASKED)
    assert log.fold.pending() == []
    assert log.fold.status() == "running"


def test_a_decision_about_a_call_that_is_over_is_refused():
    log = Log(started(), model_start(), reply_of(1, asks(request("pay")), VerdictAllow()))
    log.add(start_of(PAY, input={}))
    log.add(result_of(PAY))
    with pytest.raises(StaleSignal, match="is not pending"):
        decide(log, Approve(marker=M1))


GONE_BY: dict[str, tuple[list[Record], str]] = {
    "a step of an earlier reply": (
        [*WAITING, error_of(PAY, via="refused"), model_start(2), reply_of(2, asks())],
        M1.replace("a" * 16, "c" * 16),
    ),
    "a handler's step that has started": ([started(), claimed(), start_of("0/5")], HANDLERS),
    "a handler's step of an earlier iteration": ([started(), claimed(), goes_on()], HANDLERS),
}


@pytest.mark.parametrize("case", GONE_BY)
def test_a_running_run_keeps_no_decision_about_a_call_that_no_gate_will_reach(case: str):
    records, marker = GONE_BY[case]
    log = Log(*records)
    assert log.fold.status() == "running"
    with pytest.raises(StaleSignal, match="is not pending"):
        decide(log, Approve(marker=marker))


def test_a_decision_about_a_handlers_call_to_come_is_kept():
    decision = decide(Log(started(), claimed()), Approve(marker=HANDLERS))
    assert isinstance(decision, Append)
    assert decision.kept


# ---- reconcile (R21, R22, UR-22) --------------------------------------------------------------

DONE = Reconcile(step=PAY, outcome="done", result="D")
RETRY = Reconcile(step=PAY, outcome="retry")


@pytest.mark.parametrize("signal", [DONE, RETRY])
def test_an_unknown_write_is_reconciled_and_the_record_names_its_start(signal: Reconcile):
    decision = decide(Log(*UNKNOWN), signal)
    assert isinstance(decision, Append)
    assert decision.body.payload["start"] == START


@pytest.mark.parametrize(("first", "second"), [(DONE, RETRY), (RETRY, DONE)])
def test_the_first_reconcile_wins_and_the_other_is_told(first: Reconcile, second: Reconcile):
    log = Log(*UNKNOWN)
    winner = say(log, first, "one", by="anna")
    message = f"reconciled before: {first.outcome} by anna, record {winner}"
    with pytest.raises(DecisionConflict, match=message) as raised:
        decide(log, second, "two")
    assert raised.value.winner == winner


def test_two_results_for_one_write_are_a_conflict():
    log = Log(*UNKNOWN)
    winner = say(log, DONE, "one")
    other = Reconcile(step=PAY, outcome="done", result="another")
    with pytest.raises(DecisionConflict):
        decide(log, other, "two")
    assert decide(log, DONE, "three") == Repeated(winner)


@pytest.mark.parametrize("signal", [DONE, RETRY])
def test_the_same_reconcile_from_somebody_else_is_answered_as_done(signal: Reconcile):
    log = Log(*UNKNOWN)
    winner = say(log, signal, "one")
    named = msgspec.structs.replace(signal, start=START)
    assert decide(log, named, "two") == Repeated(winner)


NOT_UNKNOWN: dict[str, tuple[list[Record], AnySignal, str]] = {
    "a step that is not there": (UNKNOWN, Reconcile(step="x", outcome="retry"), "no step 'x'"),
    "a step that only waits": (WAITING, RETRY, "has no step"),
    "a refused step": ([*WAITING, error_of(PAY, via="refused")], RETRY, "has no step"),
    "a finished step": ([*UNKNOWN, result_of(PAY)], RETRY, "it has a result, record 6"),
    "a read": ([*WAITING, start_of(PAY, input={}, unsafe=False)], RETRY, "safe to repeat"),
    "a model call": (
        [started(), model_start()],
        Reconcile(step="llm/1", outcome="done", result="x"),
        "safe to repeat",
    ),
    "a record that is no start of it": (
        UNKNOWN,
        Reconcile(step=PAY, outcome="retry", start=4),
        "record 4 is not its last start, which is record 5",
    ),
    "a start of the future": (
        UNKNOWN,
        Reconcile(step=PAY, outcome="retry", start=99),
        "record 99 is not its last start",
    ),
    "running under the live claim": (
        [started(), claimed(), start_of(PAY, input={})],
        RETRY,
        "it is running under claim 2 of worker w1",
    ),
}


@pytest.mark.parametrize("case", NOT_UNKNOWN)
def test_what_is_not_unknown_cannot_be_reconciled(case: str):
    records, signal, why = NOT_UNKNOWN[case]
    with pytest.raises(StaleSignal, match=why):
        decide(Log(*records), signal)


def test_a_write_that_runs_under_a_lock_cannot_be_reconciled():
    with pytest.raises(StaleSignal, match="is being worked on now"):
        decide(Log(*UNKNOWN), DONE, held=True)


@pytest.mark.parametrize("after", [[released()], [parked("reconcile")], [claimed("w2")]])
def test_a_write_of_a_claim_that_is_over_can_be_reconciled(after: list[Record]):
    decision = decide(Log(started(), claimed(), start_of(PAY, input={}), *after), RETRY)
    assert isinstance(decision, Append)


def twice_started() -> Log:
    """The write was permitted a retry, and that was cut off too."""
    return Log(*UNKNOWN, retry(PAY, START, "first"), start_of(PAY, input={}, permit=6))


def test_a_step_that_was_started_twice_needs_the_start_to_be_named():
    with pytest.raises(StaleSignal, match="started more than once") as raised:
        decide(twice_started(), RETRY)
    assert raised.value.hint == "the last one is --start 7"
    decision = decide(twice_started(), msgspec.structs.replace(RETRY, start=7))
    assert isinstance(decision, Append)


def test_an_earlier_start_cannot_be_reconciled_differently_any_more():
    with pytest.raises(DecisionConflict, match="reconciled before: retry"):
        decide(twice_started(), msgspec.structs.replace(DONE, start=START))
    repeat = decide(twice_started(), msgspec.structs.replace(RETRY, start=START))
    assert repeat == Repeated(6)


# ---- request ids (R60) ------------------------------------------------------------------------

SPOKEN: dict[str, tuple[list[Record], AnySignal]] = {
    "approve": (WAITING, Approve(marker=M1, comment="ok")),
    "reject": (WAITING, Reject(marker=M1)),
    "done": (UNKNOWN, DONE),
    "retry": (UNKNOWN, RETRY),
    "kept": ([started()], Approve(marker=M1)),
    "cancel": (WAITING, Cancel(reason="enough")),
    "resume": ([started(), claimed(), parked("pause")], Resume(reason="go on")),
    "late": (UNKNOWN, Late(step=PAY, start=START, result="L")),
    "child": (
        [started(), claimed(), spawned("0/0", "a1.c1"), result_of("0/0")],
        Child(run="a1.c1", outcome={"status": "completed"}),
    ),
}
AFTER: dict[str, list[Record]] = {"at once": [], "after the end": [answered()]}


@pytest.mark.parametrize("case", SPOKEN)
@pytest.mark.parametrize("when", AFTER)
def test_a_repeated_request_gets_the_first_answer_again(case: str, when: str):
    records, signal = SPOKEN[case]
    log = Log(*records)
    first = say(log, signal, "r1")
    for body in AFTER[when]:
        log.add(body)
    assert decide(log, signal, "r1") == Repeated(first)


def test_a_repeated_retry_gets_the_first_answer_again_once_the_retry_has_started():
    log = Log(*UNKNOWN)
    first = say(log, RETRY, "r1")
    log.add(start_of(PAY, input={}, permit=first))
    assert decide(log, RETRY, "r1") == Repeated(first)


@pytest.mark.parametrize("case", SPOKEN)
@pytest.mark.parametrize(
    "other",
    [
        Approve(marker=M2),
        Reject(marker=M1, reason="x"),
        DONE,
        RETRY,
        Approve(marker=M1),
        Cancel(reason="x"),
        Resume(),
        Late(step=PAY, start=START, result="other"),
        Child(run="a1.c1", outcome={"status": "failed"}),
    ],
)
def test_a_request_id_used_for_another_signal_is_a_conflict(case: str, other: AnySignal):
    records, signal = SPOKEN[case]
    apart = ("late", "child")  # theirs are known apart: nobody else's id stands in their way
    names = {name_of(signal), name_of(other)}
    if signal == other or (len(names) == 2 and names & set(apart)):
        return
    log = Log(*records)
    first = say(log, signal, "r1")
    with pytest.raises(DecisionConflict) as raised:
        decide(log, other, "r1")
    assert raised.value.winner == first


@pytest.mark.parametrize("other", ["late", "child"])
def test_no_request_id_of_a_person_stands_in_the_way_of_a_workers_signal(other: str):
    records, signal = SPOKEN[other]
    log = Log(*records)
    say(log, Cancel(reason="x"), "r1")
    assert isinstance(decide(log, signal, "r1"), Append)


# ---- cancel (R56) -------------------------------------------------------------------------------

UNFINISHED: dict[str, list[Record]] = {
    "started": [started()],
    "held": [started(), claimed()],
    "in a write": [started(), claimed(), start_of(PAY, input={})],
    "waiting for a person": WAITING,
    "indeterminate": UNKNOWN,
    "paused": [started(), claimed(), parked("pause")],
    "waiting": [started(), claimed(), goes_on(until_input=True)],
}


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("case", UNFINISHED)
def test_every_run_that_has_not_ended_can_be_cancelled(case: str, held: bool):
    log = Log(*UNFINISHED[case])
    decision = decide(log, Cancel(reason="enough"), held=held)
    assert isinstance(decision, Append)
    assert not decision.kept
    log.add(decision.body)
    assert log.fold.cancel is not None
    assert log.fold.cancel.reason == "enough"


def test_cancelled_is_cancelled_whoever_said_it_first_and_why():
    log = Log(started())
    first = say(log, Cancel(reason="one"), "r1")
    assert decide(log, Cancel(reason="two"), "r2") == Repeated(first)
    assert decide(log, Cancel(reason="one"), "r1") == Repeated(first)
    with pytest.raises(DecisionConflict):
        decide(log, Cancel(reason="two"), "r1")


def test_a_cancelled_run_still_takes_what_settles_its_write():
    log = Log(*UNKNOWN, cancel())
    assert isinstance(decide(log, DONE), Append)
    assert isinstance(decide(log, RETRY), Append)


# ---- resume (R43, R52) --------------------------------------------------------------------------

RESUMABLE: dict[str, list[Record]] = {
    "paused in a turn": [started(), claimed(), parked("pause")],
    "paused until": [started(), claimed(), parked("pause", until="2027-01-01T00:00:00Z")],
    "backing off": [started(), claimed(), parked("retry", until="2027-01-01T00:00:00Z")],
    "paused by its turn": [started(), claimed(), goes_on(resume=True)],
    "paused again": [
        started(),
        claimed(),
        parked("pause"),
        resume(),
        claimed("w2"),
        parked("pause"),
    ],
    "failed, retriable": [started(), claimed(), failed(retriable=True)],
    "failed again": [started(), failed(retriable=True), resume(), failed(retriable=True)],
    "paused, and cancelled": [started(), claimed(), parked("pause"), cancel()],
}
NOT_RESUMABLE: dict[str, tuple[list[Record], str]] = {
    "started": ([started()], "running, not paused"),
    "held": ([started(), claimed()], "running, not paused"),
    "waiting for a person": ([*WAITING, claimed(), parked()], "awaiting_approval, not paused"),
    "indeterminate": (UNKNOWN, "indeterminate, not paused"),
    "waiting for an input": (
        [started(), claimed(), goes_on(until_input=True)],
        "waiting, not paused",
    ),
    "waiting for a time": (
        [started(), claimed(), goes_on(until="2027-01-01T00:00:00Z")],
        "waiting, not paused",
    ),
    "resumed already": (
        [started(), claimed(), parked("pause"), resume()],
        "running, not paused",
    ),
    "taken up after the pause": (
        [started(), claimed(), parked("pause"), resume(), claimed("w2")],
        "running, not paused",
    ),
}


@pytest.mark.parametrize("case", RESUMABLE)
def test_a_run_that_waits_for_an_operator_is_resumed(case: str):
    log = Log(*RESUMABLE[case])
    decision = decide(log, Resume())
    assert isinstance(decision, Append)
    log.add(decision.body)
    assert log.fold.runnable()


@pytest.mark.parametrize("case", NOT_RESUMABLE)
def test_a_run_that_no_operator_stopped_is_not_resumed(case: str):
    records, why = NOT_RESUMABLE[case]
    with pytest.raises(StaleSignal, match=why):
        decide(Log(*records), Resume())


@pytest.mark.parametrize("end", [answered(), failed(), cancelled_end()])
def test_a_run_that_ended_for_good_is_not_resumed(end: Record):
    log = Log(started(), end)
    with pytest.raises(RunFinished) as raised:
        decide(log, Resume())
    assert raised.value.hint == ""


@pytest.mark.parametrize(
    "signal", [Approve(marker=M1), Cancel(), Reconcile(step=PAY, outcome="retry")]
)
def test_a_run_that_failed_retriably_takes_nothing_but_a_resume_and_says_so(signal: AnySignal):
    log = Log(started(), failed(retriable=True))
    with pytest.raises(RunFinished) as raised:
        decide(log, signal)
    assert raised.value.hint == "`runfold resume` gives it another try"


def test_a_purged_run_is_not_resumed():
    with pytest.raises(RunFinished):
        decide(Log(started(), failed(retriable=True), RunPurged()), Resume())


# ---- late results (R29) -------------------------------------------------------------------------

LATE = Late(step=PAY, start=START, result="L")


@pytest.mark.parametrize("said", [[], [retry(PAY, START)]], ids=["nothing", "retry"])
def test_a_late_result_settles_a_write_unless_a_retry_has_started(said: list[Record]):
    log = Log(*UNKNOWN, *said)
    decision = decide(log, LATE)
    assert isinstance(decision, Append)
    log.add(decision.body)
    assert log.fold.unknown() == []
    assert decide(log, LATE, "another") == Repeated(log.fold.n)


NOT_LATE: dict[str, tuple[list[Record], Late, str]] = {
    "a step that is not there": (WAITING, LATE, "is not the last start of step"),
    "a record that is no start": (UNKNOWN, Late(step=PAY, start=4, result=1), "not the last start"),
    "the retry has started": (
        [*UNKNOWN, retry(PAY, START), start_of(PAY, input={}, permit=6)],
        LATE,
        "record 5 is not the last start",
    ),
    "a person's done stands": ([*UNKNOWN, done(PAY, START)], LATE, "has its result already"),
    "the result is there": ([*UNKNOWN, result_of(PAY)], LATE, "has its result already"),
    "it was interrupted": ([*UNKNOWN, interrupted_of(PAY)], LATE, "has its result already"),
    "its iteration is over": (
        [*WAITING, approved(M1), start_of(PAY, input={}), result_of(PAY), goes_on()],
        LATE,
        "not the last start",
    ),
    "it is running under the live claim": (
        [started(), claimed(), start_of(PAY, input={})],
        Late(step=PAY, start=3, result="L"),
        "running under claim 2",
    ),
}


@pytest.mark.parametrize("case", NOT_LATE)
def test_a_late_result_that_comes_too_late_or_too_early_is_refused(case: str):
    records, said, why = NOT_LATE[case]
    with pytest.raises(StaleSignal, match=why):
        decide(Log(*records), said)


def test_after_a_late_result_a_person_has_nothing_to_say():
    log = Log(*UNKNOWN, late(PAY, START))
    for said in (DONE, RETRY):
        with pytest.raises(StaleSignal, match="its worker reported the result, record 6"):
            decide(log, said)


@pytest.mark.parametrize("after", [[released()], [parked("reconcile")], [claimed("w2")]])
def test_a_worker_that_lost_its_claim_may_report(after: list[Record]):
    log = Log(started(), claimed(), start_of(PAY, input={}), *after)
    assert isinstance(decide(log, Late(step=PAY, start=3, result="L")), Append)


# ---- children (R57) -----------------------------------------------------------------------------

PARENT: list[Record] = [started(), claimed(), spawned("0/0", "a1.c1"), result_of("0/0")]
ENDED = Child(run="a1.c1", outcome={"status": "completed"})


def test_the_end_of_a_child_is_told_its_parent_once():
    log = Log(*PARENT)
    first = say(log, ENDED, "a1.c1")
    assert decide(log, ENDED, "a1.c1") == Repeated(first)
    assert log.fold.children == {"a1.c1": {"status": "completed"}}


def test_another_end_of_the_same_child_is_a_conflict():
    log = Log(*PARENT)
    first = say(log, ENDED, "a1.c1")
    other = Child(run="a1.c1", outcome={"status": "failed"})
    with pytest.raises(DecisionConflict) as raised:
        decide(log, other, "a1.c1")
    assert raised.value.winner == first


def test_a_run_that_is_no_child_is_refused():
    with pytest.raises(StaleSignal, match=r"no child 'a1\.c2'"):
        decide(Log(*PARENT), Child(run="a1.c2", outcome={}))


# ---- the end (UR-14) --------------------------------------------------------------------------


@pytest.mark.parametrize("end", [answered(), failed()], ids=["completed", "failed"])
@pytest.mark.parametrize("signal", [Approve(marker=M1), Reject(marker=M1), DONE, RETRY])
def test_a_finished_run_takes_no_signal_and_says_how_it_ended(end: Record, signal: AnySignal):
    log = Log(*UNKNOWN, result_of(PAY), end)
    with pytest.raises(RunFinished, match=f"run a1 is {log.fold.status()}"):
        decide(log, signal)


@pytest.mark.parametrize("name", ["approve", "reject"])
async def test_a_signal_to_a_run_that_does_not_exist_is_refused_and_leaves_none(name: str):
    store = FaultyStore()
    with pytest.raises(RunNotFound):
        await signal(store, RUN, name, {"marker": M1})
    assert store.appends == 0
    assert [run async for run in store.runs()] == []


# ---- two at once, at the door -----------------------------------------------------------------

APPROVE = ("approve", {"marker": M1})
REJECT = ("reject", {"marker": M1})
SAY_DONE = ("reconcile", {"step": PAY, "outcome": "done", "result": "D"})
SAY_RETRY = ("reconcile", {"step": PAY, "outcome": "retry"})


@pytest.mark.parametrize(
    ("records", "mine", "theirs"),
    [
        (WAITING, APPROVE, REJECT),
        (WAITING, REJECT, APPROVE),
        (UNKNOWN, SAY_DONE, SAY_RETRY),
        (UNKNOWN, SAY_RETRY, SAY_DONE),
    ],
)
async def test_of_two_contrary_signals_at_once_one_is_recorded_and_the_other_told(
    records: list[Record], mine: tuple[str, Any], theirs: tuple[str, Any]
):
    """The other record comes between our read and our append."""
    store = await Log(*records).store(FaultyStore())

    async def rival() -> None:
        await signal(store, RUN, *theirs)

    store.faults[store.appends + 1] = rival
    with pytest.raises(DecisionConflict) as raised:
        await signal(store, RUN, *mine)
    assert raised.value.winner == len(records) + 1
    assert len(await types_of(store)) == len(records) + 1


@pytest.mark.parametrize("fault", ["ack lost", "lost", "lands before the next append"])
@pytest.mark.parametrize("what", [APPROVE, REJECT])
async def test_a_signal_whose_acknowledgement_was_lost_is_recorded_once(
    fault: Any, what: tuple[str, Any], no_waiting: None
):
    store = await Log(*WAITING).store(FaultyStore())
    store.faults[store.appends + 1] = fault
    receipt = await signal(store, RUN, *what, request_id="r1")
    assert (receipt.result, receipt.n) == ("applied", 4)
    again = await signal(store, RUN, *what, request_id="r1")
    assert (again.result, again.n) == ("repeated", 4)
    assert (await folded(store)).n == 4


async def test_a_signal_that_comes_as_the_run_ends_is_refused():
    store = await Log(*WAITING, approved(M1), start_of(PAY, input={}, permit=4)).store(
        FaultyStore()
    )

    async def ends() -> None:
        log = Log(*WAITING, approved(M1), start_of(PAY, input={}, permit=4))
        for body in (result_of(PAY), answered()):
            n = log.add(body)
            await store.append(RUN, log.entries[-1], expected=n - 1)

    store.faults[store.appends + 1] = ends
    with pytest.raises(RunfoldError) as raised:
        await signal(store, RUN, *SAY_DONE)
    assert isinstance(raised.value, RunFinished)


async def test_done_is_recorded_as_it_was_said():
    store = await Log(*UNKNOWN).store(FaultyStore())
    await signal(store, RUN, *SAY_DONE, request_id="r9", by="anna")
    record = (await store.load(RUN)).entries[-1].record
    expected = done(PAY, START, "D", "r9")
    assert (record.by, record.payload) == ("anna", expected.payload)  # type: ignore[attr-defined]
