"""R41, R44, R52, R56, R62: what moves a run on: iterations, attempts, restarts, inputs, the end."""

from __future__ import annotations

from typing import Any

import pytest
from kit.build import (
    ALLOW,
    RUN,
    Log,
    answered,
    approved,
    asked_for,
    asks,
    cancel,
    cancelled_end,
    child_ended,
    claimed,
    done,
    error_of,
    failed,
    goes_on,
    interrupted_of,
    late,
    model_start,
    parked,
    placed,
    progress_of,
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
    submitted,
    withdrawn,
)

from journal.handle import Journal
from journal.records import Record, StepCompleted, StepStarted, Submitted
from journal.stepping import do_step
from journal.steps import make_call
from journal.unknown import Ways

PAY, READ, NEXT = "0/0", "0/1", "0/2"
SOON = "2026-01-02T04:00:00.000Z"
HELD: list[Record] = [started(), claimed()]


# ---- restarts: holders in a row that were lost without moving the run on (R52) ------------------


def test_each_claim_over_a_live_claim_is_a_restart():
    log = Log(*HELD)
    assert log.fold.restarts == 0
    for lost in (1, 2, 3):
        log.add(claimed(f"w{lost}"))
        assert log.fold.restarts == lost


LOST: list[Record] = [
    *HELD,
    start_of(READ, unsafe=False),
    submitted("i1"),
    submitted("i2"),
    claimed("w2"),
    claimed("w3"),
]
MOVES_ON: dict[str, Record] = {
    "the first start of a step": start_of(NEXT, unsafe=False),
    "the first start of a write": start_of(PAY),
    "a model call's first start": model_start(),
    "a result": result_of(READ),
    "an error": error_of(READ),
    "a call that is refused": error_of(NEXT, via="refused"),
    "a placed input": placed("i1"),
    "a commit": goes_on(),
    "a commit with a wait": goes_on(until=SOON),
    "the end of an attempt": parked("retry"),
}
MOVES_NOTHING: dict[str, Record] = {
    "a repeated start": start_of(READ, unsafe=False),
    "progress": progress_of(READ),
    "a release": released(),
    "a park for approval": parked(),
    "a park for a reconcile": parked("reconcile"),
    "a pause in a turn": parked("pause"),
    "an input": submitted("i3"),
    "a withdrawal": withdrawn("i2"),
    "an approval": approved("m"),
    "a resume": resume(),
    "a cancel": cancel(),
    "a child's end": child_ended("c1"),
}


@pytest.mark.parametrize("case", MOVES_ON)
def test_what_moves_a_run_on_begins_the_count_anew(case: str):
    log = Log(*LOST)
    assert log.fold.restarts == 2
    log.add(MOVES_ON[case])
    assert log.fold.restarts == 0


@pytest.mark.parametrize("case", MOVES_NOTHING)
def test_what_moves_nothing_on_neither_adds_nor_resets(case: str):
    log = Log(*LOST)
    log.add(MOVES_NOTHING[case])
    assert log.fold.restarts == 2


@pytest.mark.parametrize("end", [released(), parked("pause"), parked("approval")])
def test_a_claim_after_one_that_ended_in_order_is_no_restart(end: Record):
    log = Log(*LOST, end, claimed("w4"))
    assert log.fold.restarts == 2
    log.add(claimed("w5"))
    assert log.fold.restarts == 3


def test_a_permitted_retry_of_a_write_is_a_repeated_start():
    log = Log(*HELD, start_of(PAY), claimed("w2"))
    permit = log.add(retry(PAY, 3))
    log.add(start_of(PAY, permit=permit))
    assert log.fold.restarts == 1


# ---- attempts (R44) ---------------------------------------------------------------------------


def attempted() -> Log:
    """A handler that made a model call, read, paid twice and mailed, and then failed."""
    return Log(
        *HELD,
        model_start(),
        result_of("llm/1", {"text": "hm"}),
        start_of(READ, "lookup", unsafe=False),
        result_of(READ),
        start_of(PAY, "pay", 10),
        result_of(PAY, "first"),
        start_of("0/3", "pay", 10),
        error_of("0/3", "tool_error"),
        start_of("0/4", "mail"),
        interrupted_of("0/4", "half"),
    )


def test_a_new_attempt_afresh_honours_unsafe_steps_by_tool_input_and_order_and_drops_the_rest():
    log = attempted()
    pay, mail = log.fold.steps[PAY], log.fold.steps["0/4"]
    log.add(parked("retry", afresh=True))
    fold = log.fold
    assert (fold.attempt, fold.steps, fold.open, fold.reply) == (2, {}, {}, None)
    honoured = {key: [step.name for step in steps] for key, steps in fold.honoured.items()}
    assert honoured == {
        ("pay", pay.last.digest): [PAY, "0/3"],
        ("mail", mail.last.digest): ["0/4"],
    }


def test_a_new_attempt_that_is_not_afresh_keeps_every_step():
    log = attempted()
    names = set(log.fold.steps)
    log.add(start_of(NEXT, "lookup", unsafe=False))
    log.add(parked("retry"))
    assert log.fold.attempt == 2
    assert set(log.fold.steps) == {*names, NEXT}
    assert set(log.fold.open) == {NEXT}
    assert log.fold.honoured == {}


def test_a_reply_of_the_loop_stands_after_a_new_attempt_of_the_loop():
    reply = [model_start(), reply_of(1, asks(request("lookup")), ALLOW)]
    log = Log(*HELD, *reply, parked("retry"))
    assert log.fold.reply is not None


@pytest.mark.parametrize("again", [released(), claimed("w2"), parked("pause"), parked()])
def test_only_a_recorded_failure_raises_the_attempt(again: Record):
    log = attempted()
    names = set(log.fold.steps)
    log.add(again)
    log.add(claimed("w3"))
    assert log.fold.attempt == 1
    assert set(log.fold.steps) == names


def test_unsafe_steps_of_every_earlier_attempt_are_honoured_in_their_order():
    log = attempted()
    log.add(parked("retry", afresh=True))
    log.add(claimed("w2"))
    log.add(start_of("0/5", "pay", 10))
    log.add(result_of("0/5", "third"))
    log.add(parked("retry", afresh=True))
    key = ("pay", start_of(PAY, "pay", 10).digest)
    assert [step.name for step in log.fold.honoured[key]] == [PAY, "0/3", "0/5"]
    assert log.fold.attempt == 3


def test_a_write_that_was_refused_before_its_start_is_not_honoured():
    log = Log(*HELD, error_of(PAY, "denied", via="refused"), parked("retry", afresh=True))
    assert log.fold.honoured == {}


@pytest.mark.parametrize(
    "said", [done(PAY, 3), retry(PAY, 3), late(PAY, 3)], ids=["done", "retry", "late"]
)
def test_a_write_that_was_settled_but_not_recorded_is_honoured_with_what_was_said(said: Record):
    log = Log(*HELD, start_of(PAY), released(), said, claimed("w2"))
    log.add(parked("retry", afresh=True))
    (step,) = log.fold.honoured["pay", start_of(PAY).digest]
    assert step.completed is None
    assert {*step.reconciled, *step.late} == {3}


def test_a_commit_begins_a_new_iteration_with_nothing_of_the_last_one():
    log = attempted()
    log.add(parked("retry", afresh=True))
    log.add(claimed("w2"))
    log.add(start_of(NEXT, "lookup", unsafe=False))
    n = log.add(goes_on({"seen": 1}))
    fold = log.fold
    assert (fold.iteration, fold.attempt, fold.state, fold.committed) == (1, 1, {"seen": 1}, n)
    assert (fold.steps, fold.open, fold.honoured, fold.reply) == ({}, {}, {}, None)


def test_failures_in_a_row_are_counted_from_the_last_result():
    log = Log(*HELD)
    for failures in (1, 2, 3):
        log.add(parked("retry"))
        assert (log.fold.failures, log.fold.attempt) == (failures, failures + 1)
        log.add(claimed("w"))
    log.add(start_of(READ, unsafe=False))
    assert log.fold.failures == 3
    log.add(result_of(READ))
    assert (log.fold.failures, log.fold.attempt) == (0, 4)


def test_model_calls_and_interrupted_writes_are_counted_over_iterations():
    log = attempted()
    log.add(goes_on())
    log.add(model_start())
    assert log.fold.model_calls == 2
    assert log.fold.interrupted == {start_of("0/4", "mail").digest}


def test_progress_is_that_of_the_last_start():
    log = Log(*HELD, start_of(PAY), progress_of(PAY, 1), progress_of(PAY, 2))
    assert log.fold.steps[PAY].partial == 2
    permit = log.add(claimed("w2")) and log.add(retry(PAY, 3))
    log.add(start_of(PAY, permit=permit))
    assert log.fold.steps[PAY].partial is None


# ---- what a shell makes of it -----------------------------------------------------------------


async def called_again(said: Record) -> tuple[list[StepStarted], StepCompleted]:
    """The write of a failed attempt, of which somebody said so, is asked for by the next attempt,
    at another position: the calls made, and what the call came to."""
    store = await Log(started(), start_of(PAY), said, parked("retry", afresh=True)).store()
    journal = await Journal.open(store, RUN, is_write=lambda _: True)
    (earlier,) = journal.fold.honoured["pay", start_of(PAY).digest]
    calls: list[StepStarted] = []

    async def perform(start: StepStarted) -> StepCompleted:
        calls.append(start)
        return result_of(start.step, "paid")

    call = make_call(NEXT, "tool", "pay", None, unsafe=True)
    return calls, await do_step(journal, call, perform, Ways(honoured=earlier))


async def test_a_permitted_retry_of_an_earlier_attempts_write_is_called_once_under_its_key():
    calls, completed = await called_again(retry(PAY, 2))
    assert completed.result == "paid"
    assert [(start.key, start.permit) for start in calls] == [(start_of(PAY).key, 3)]


@pytest.mark.parametrize("said", [done(PAY, 2, "D"), late(PAY, 2, "D")], ids=["done", "late"])
async def test_what_was_said_of_an_earlier_attempts_write_is_its_result(said: Record):
    calls, completed = await called_again(said)
    assert (calls, completed.result) == ([], "D")


# ---- another try (R52) ------------------------------------------------------------------------


def failed_run(*before: Record, **fields: Any) -> Log:
    return Log(*HELD, *before, failed("restart_limit", retriable=True, **fields))


def test_a_resume_gives_a_failed_run_a_new_iteration_and_count():
    log = failed_run(claimed("w2"), claimed("w3"))
    assert log.fold.can_reopen
    log.add(resume())
    fold = log.fold
    assert (fold.end, fold.status(), fold.finished) == (None, "running", False)
    assert (fold.iteration, fold.attempt, fold.restarts, fold.failures) == (1, 1, 0, 0)
    assert fold.runnable()


def test_a_resumed_run_of_the_loop_keeps_its_steps_and_its_reply():
    reply = [model_start(), reply_of(1, asks(request("lookup")), ALLOW)]
    log = failed_run(*reply, start_of(READ, "lookup", unsafe=False))
    log.add(resume())
    assert set(log.fold.steps) == {"llm/1", READ}
    assert log.fold.reply is not None


def test_a_step_that_was_cut_off_before_the_failure_is_still_open_after_the_resume():
    log = failed_run(start_of(READ, "lookup", unsafe=False))
    log.add(resume())
    log.add(claimed("w2"))
    assert set(log.fold.open) == {READ}
    # today's code calls it unsafe: only a person can settle it (R42)
    log.add(parked("reconcile", steps=(READ,)))
    assert log.fold.status() == "indeterminate"


def test_a_resumed_run_of_a_handler_makes_its_calls_anew_and_honours_its_writes():
    steps = [start_of(PAY), result_of(PAY), start_of(READ, "lookup", unsafe=False)]
    log = failed_run(*steps, afresh=True)
    log.add(resume())
    assert (log.fold.steps, log.fold.open, log.fold.reply) == ({}, {}, None)
    assert [key[0] for key in log.fold.honoured] == ["pay"]


def test_a_resumed_run_is_no_longer_cancelled():
    log = failed_run(cancel())
    log.add(resume())
    assert log.fold.cancel is None


def test_a_run_may_fail_and_be_resumed_again():
    log = failed_run()
    log.add(resume("r1"))
    log.add(claimed("w2"))
    log.add(failed(retriable=True))
    log.add(resume("r2"))
    assert (log.fold.iteration, log.fold.status()) == (2, "running")


# ---- cancel (R56) -----------------------------------------------------------------------------


@pytest.mark.parametrize("before", [[started()], HELD, [*HELD, parked("pause")]])
def test_a_cancelled_run_is_due_for_a_holder_who_ends_it(before: list[Record]):
    log = Log(*before)
    n = log.add(cancel("enough"))
    assert log.fold.cancel is not None
    assert (log.fold.cancel.n, log.fold.cancel.reason) == (n, "enough")
    assert log.fold.runnable()
    log.add(claimed("w2"))
    log.add(cancelled_end("enough"))
    assert log.fold.status() == "cancelled"


def test_the_first_cancel_is_the_one_that_counts():
    log = Log(*HELD, cancel("one", "r1"), cancel("two", "r2"))
    assert log.fold.cancel is not None
    assert log.fold.cancel.reason == "one"


def test_a_cancel_outlives_a_commit_with_its_reason():
    log = Log(*HELD, cancel("enough"), goes_on(until_input=True))
    assert log.fold.cancel is not None
    assert log.fold.cancel.reason == "enough"
    assert log.fold.runnable()


def test_the_reason_of_a_reject_that_waits_for_its_gate_outlives_a_commit():
    """R31, R60: it is kept for the next gate it reaches; the model sees the reason there."""
    marker = asked_for("1/0").marker
    log = Log(*HELD, rejected(marker, "too dear"), goes_on())
    assert log.fold.decisions[marker].reason == "too dear"


# ---- inputs (R62) -----------------------------------------------------------------------------


def input_of(log: Log, request_id: str = "i1") -> Submitted:
    return log.fold.inputs[request_id]


def test_an_input_is_queued_then_placed_then_done():
    log = Log(*HELD, submitted())
    assert input_of(log).status == "queued"
    log.add(placed("i1", "llm/2"))
    assert (input_of(log).status, input_of(log).placed_at) == ("placed", "llm/2")
    log.add(goes_on())
    assert (input_of(log).status, input_of(log).placed_at) == ("done", "llm/2")


@pytest.mark.parametrize("end", [answered(), failed(), cancelled_end()])
def test_at_the_end_a_placed_input_is_done_and_a_queued_one_unanswered(end: Record):
    log = Log(*HELD, *(submitted(f"i{n}") for n in range(3)), placed("i0"), withdrawn("i1"), end)
    became = {id: known.status for id, known in log.fold.inputs.items()}
    assert became == {"i0": "done", "i1": "withdrawn", "i2": "unanswered"}


@pytest.mark.parametrize("between", [parked("retry"), parked("pause"), released()])
def test_a_placed_input_stands_at_its_place_until_its_iteration_is_committed(between: Record):
    log = Log(*HELD, submitted(), placed("i1", "llm/1"), between, claimed("w2"))
    assert input_of(log).status == "placed"
    assert [known.request_id for known in log.fold.placed_at("llm/1")] == ["i1"]


@pytest.mark.parametrize(
    "again",
    [[parked("retry", afresh=True)], [failed(retriable=True, afresh=True), resume()]],
    ids=["retried", "resumed"],
)
def test_what_an_attempt_was_told_the_next_one_is_told_first(again: list[Record]):
    log = Log(*HELD, submitted(), placed("i1", "0/0"), *again, claimed("w2"))
    assert input_of(log).status == "placed"
    assert [known.request_id for known in log.fold.placed_at("")] == ["i1"]
    log.add(goes_on())
    assert input_of(log).status == "done"


def test_inputs_are_queued_in_the_order_of_their_records_and_placed_in_that_of_their_placing():
    log = Log(
        *HELD,
        submitted("b"),
        submitted("a", "follow_up"),
        submitted("d"),
        submitted("c"),
        withdrawn("d"),
    )
    assert [known.request_id for known in log.fold.queued()] == ["b", "a", "c"]
    assert [known.request_id for known in log.fold.queued("steer")] == ["b", "c"]
    assert [known.request_id for known in log.fold.queued("follow_up")] == ["a"]
    log.add(placed("c", "llm/1"))
    log.add(placed("b", "llm/1"))
    assert [known.request_id for known in log.fold.placed_at("llm/1")] == ["c", "b"]


# ---- children (R57) ---------------------------------------------------------------------------


def test_a_child_is_known_from_its_start_on_and_its_first_end_counts():
    log = Log(*HELD, spawned("0/0", "c1"))
    assert log.fold.children == {"c1": None}
    log.add(child_ended("c1", {"status": "completed"}))
    other = child_ended("c1", {"status": "failed"})
    log.add(other)
    log.add(result_of("0/0"))
    log.add(goes_on())
    assert log.fold.children == {"c1": {"status": "completed"}}


def test_spawning_a_child_again_forgets_nothing_of_its_end():
    log = Log(*HELD, spawned("0/0", "c1"), child_ended("c1"), spawned("0/0", "c1"))
    assert log.fold.children["c1"] is not None


# ---- asks of handlers -------------------------------------------------------------------------


def test_a_handlers_calls_that_wait_are_those_of_its_last_park():
    one, two = asked_for("0/0", digest="a" * 16), asked_for("0/1", digest="b" * 16)
    log = Log(*HELD, parked(asks=(one, two)))
    assert [ask.marker for ask in log.fold.asked()] == [one.marker, two.marker]
    log.add(approved(one.marker))
    assert [ask.marker for ask in log.fold.asked()] == [two.marker]
    log.add(claimed("w2"))
    assert log.fold.asked() == []
