"""R62: what becomes of a submission, a withdrawal, a placing, by where the input and the run are.

state      where the input is in the journal
run        what else is true of the run
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.build import (
    Log,
    answered,
    cancel,
    cancelled_end,
    claimed,
    failed,
    goes_on,
    parked,
    placed,
    resume,
    started,
    submitted,
    withdrawn,
)

from journal.errors import BadPayload, RunFinished, RunfoldError, StaleSignal, TooLarge
from journal.inputs import (
    InputState,
    Known,
    Queue,
    decide_input,
    decide_placing,
    decide_withdrawal,
    input_body,
    input_state,
)
from journal.limits import INPUT_BYTES_MAX, INPUTS_QUEUED_MAX
from journal.records import Input, InputPlaced, InputWithdrawn, Record, RunPurged

HELD: list[Record] = [started(), claimed()]
STATES: dict[str, list[Record]] = {
    "none": [],
    "queued": [submitted("i1")],
    "placed": [submitted("i1"), placed("i1")],
    "done": [submitted("i1"), placed("i1"), goes_on()],
    "withdrawn": [submitted("i1"), withdrawn("i1")],
}
RUNS: dict[str, list[Record]] = {
    "held": [],
    "waiting": [goes_on(until_input=True)],
    "paused": [parked("pause")],
    "cancelled, not ended": [cancel()],
    "completed": [answered()],
    "failed": [failed()],
    "failed, retriable": [failed(retriable=True)],
    "resumed": [failed(retriable=True), resume()],
    "cancelled": [cancelled_end()],
    "purged": [answered(), RunPurged()],
}


def journal(state: str, run: str) -> Log:
    return Log(*HELD, *STATES[state], *RUNS[run])


def word(decide: Any, *args: Any) -> str:
    """The decision, in a word."""
    try:
        decision = decide(*args)
    except RunfoldError as refused:
        return f"refused: {refused.code}"
    match decision:
        case Queue(body):
            return f"queue {body.request_id}"
        case Known(known):
            return f"known as {known.status}"
        case InputWithdrawn(request_id=request_id):
            return f"withdraw {request_id}"
        case InputPlaced(request_id=request_id):
            return f"place {request_id}"
        case None:
            return "nothing"
        case other:
            raise AssertionError(other)


#   state       run                     submit                   withdraw                 place
TABLE = """
    none      | held                  | queue i1               | refused: stale_signal  | nothing
    none      | waiting               | queue i1               | refused: stale_signal  | nothing
    none      | paused                | queue i1               | refused: stale_signal  | nothing
    none      | resumed               | queue i1               | refused: stale_signal  | nothing
    none      | cancelled, not ended  | refused: run_finished  | refused: stale_signal  | nothing
    none      | completed             | refused: run_finished  | refused: stale_signal  | nothing
    none      | failed                | refused: run_finished  | refused: stale_signal  | nothing
    none      | failed, retriable     | refused: run_finished  | refused: stale_signal  | nothing
    none      | cancelled             | refused: run_finished  | refused: stale_signal  | nothing
    none      | purged                | refused: run_finished  | refused: stale_signal  | nothing

    queued    | held                  | known as queued        | withdraw i1            | place i1
    queued    | waiting               | known as queued        | withdraw i1            | place i1
    queued    | paused                | known as queued        | withdraw i1            | place i1
    queued    | cancelled, not ended  | known as queued        | withdraw i1            | place i1
    queued    | completed             | known as unanswered    | refused: stale_signal  | nothing
    queued    | failed                | known as unanswered    | refused: stale_signal  | nothing
    queued    | failed, retriable     | known as unanswered    | refused: stale_signal  | nothing
    queued    | resumed               | known as unanswered    | refused: stale_signal  | nothing
    queued    | cancelled             | known as unanswered    | refused: stale_signal  | nothing
    queued    | purged                | known as unanswered    | refused: stale_signal  | nothing

    placed    | held                  | known as placed        | refused: stale_signal  | nothing
    placed    | waiting               | known as done          | refused: stale_signal  | nothing
    placed    | paused                | known as placed        | refused: stale_signal  | nothing
    placed    | cancelled, not ended  | known as placed        | refused: stale_signal  | nothing
    placed    | completed             | known as done          | refused: stale_signal  | nothing
    placed    | cancelled             | known as done          | refused: stale_signal  | nothing

    done      | held                  | known as done          | refused: stale_signal  | nothing
    done      | completed             | known as done          | refused: stale_signal  | nothing

    withdrawn | held                  | known as withdrawn     | nothing                | nothing
    withdrawn | waiting               | known as withdrawn     | nothing                | nothing
    withdrawn | completed             | known as withdrawn     | nothing                | nothing
    withdrawn | purged                | known as withdrawn     | nothing                | nothing
"""
ROWS = [tuple(cell.strip() for cell in row.split("|")) for row in TABLE.splitlines() if row.strip()]


@pytest.mark.parametrize(("state", "run", "submit", "withdraw", "place"), ROWS)
def test_what_becomes_of_a_submission_a_withdrawal_and_a_placing(
    state: str, run: str, submit: str, withdraw: str, place: str
):
    fold = journal(state, run).fold
    assert word(decide_input, fold, submitted("i1", content="other content")) == submit
    assert word(decide_withdrawal, fold, "i1") == withdraw
    assert word(decide_placing, fold, "llm/2", ()) == place


@pytest.mark.parametrize(("state", "run"), [row[:2] for row in ROWS])
def test_what_is_decided_may_be_appended(state: str, run: str):
    log = journal(state, run)
    fold = log.fold
    if word(decide_input, fold, submitted("i1")) == "queue i1":
        decision = decide_input(fold, submitted("i1"))
        assert isinstance(decision, Queue)
        log.add(decision.body)
    elif word(decide_withdrawal, fold, "i1") == "withdraw i1":
        body = decide_withdrawal(fold, "i1")
        assert body is not None
        log.add(body)
        assert decide_placing(fold, "llm/2", ()) is None
    assert [known.status for known in fold.inputs.values()].count("placed") <= 1


def test_a_repeat_gets_the_original_whatever_its_content_and_mode():
    log = Log(*HELD, submitted("i1", "steer", "first"))
    decision = decide_input(log.fold, submitted("i1", "follow_up", "second"))
    assert isinstance(decision, Known)
    assert input_state(decision.input) == InputState(
        request_id="i1", mode="steer", content="first", status="queued"
    )
    assert input_state(decision.input, created=True).created


def test_a_withdrawal_that_was_acknowledged_is_never_followed_by_a_placing():
    log = Log(*HELD, submitted("i1"), submitted("i2"), withdrawn("i1"))
    body = decide_placing(log.fold, "llm/1", ())
    assert body is not None
    assert body.request_id == "i2"
    log.add(body)
    assert decide_placing(log.fold, "llm/1", ()) is None


@pytest.mark.parametrize(
    ("modes", "order"),
    [
        ((), ["a", "b", "c", "d"]),
        (("steer",), ["a", "c"]),
        (("follow_up",), ["b", "d"]),
        (("steer", "follow_up"), ["a", "b", "c", "d"]),
    ],
)
def test_inputs_are_placed_in_their_order_each_once_and_only_of_the_modes_asked_for(
    modes: tuple[str, ...], order: list[str]
):
    log = Log(*HELD)
    for n, request_id in enumerate("abcd"):
        log.add(submitted(request_id, "follow_up" if n % 2 else "steer"))
    found: list[str] = []
    while (body := decide_placing(log.fold, "llm/1", modes)) is not None:
        found.append(body.request_id)
        log.add(body)
    assert found == order
    assert [known.request_id for known in log.fold.placed_at("llm/1")] == order


def test_a_placing_names_its_position_and_iteration():
    log = Log(*HELD, goes_on(), submitted())
    body = decide_placing(log.fold, "1/0", ())
    assert body == InputPlaced(request_id="i1", iteration=1, position="1/0")


# ---- bounds -----------------------------------------------------------------------------------


def test_a_run_takes_so_many_queued_inputs_and_again_once_one_is_gone():
    log = Log(*HELD, *(submitted(f"q{n}") for n in range(INPUTS_QUEUED_MAX)))
    with pytest.raises(StaleSignal, match="256 inputs queued") as raised:
        decide_input(log.fold, submitted("i1"))
    assert raised.value.hint
    assert word(decide_input, log.fold, submitted("q0")) == "known as queued"
    log.add(withdrawn("q7"))
    assert word(decide_input, log.fold, submitted("i1")) == "queue i1"


@pytest.mark.parametrize("mode", ["", "Steer", "followup", "whisper", "x" * 999, "\x1b[2J"])
def test_an_input_of_a_mode_that_is_none_is_refused(mode: str):
    with pytest.raises(BadPayload, match="steer or follow_up") as raised:
        input_body("i1", mode, "x")
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 400


@pytest.mark.parametrize("mode", ["steer", "follow_up"])
def test_an_input_is_any_json_up_to_its_limit_in_bytes(mode: str):
    room = INPUT_BYTES_MAX - len('""')
    assert input_body("i1", mode, "x" * room) == Input(
        request_id="i1",
        mode=mode,  # type: ignore[arg-type]
        content="x" * room,
    )
    for content in ("x" * (room + 1), "é" * (room // 2 + 1), ["x" * room]):
        with pytest.raises(TooLarge, match="at most 65536 bytes"):
            input_body("i1", mode, content)


@pytest.mark.parametrize("content", [None, 0, False, "", [], {}, {"a": [1, None]}])
def test_an_empty_content_is_content(content: Any):
    assert input_body("i1", "steer", content).content == content


@pytest.mark.parametrize("end", ["completed", "failed", "cancelled"])
def test_a_refused_submission_says_how_the_run_ended(end: str):
    with pytest.raises(RunFinished, match=f"run a1 is {end}") as raised:
        decide_input(journal("none", end).fold, submitted("i1"))
    assert raised.value.run_id == "a1"


def test_a_refused_withdrawal_says_what_the_input_is_by_now():
    with pytest.raises(StaleSignal, match="input i1 of run a1 is placed"):
        decide_withdrawal(journal("placed", "held").fold, "i1")
    with pytest.raises(StaleSignal, match="no input 'nobody'"):
        decide_withdrawal(journal("placed", "held").fold, "nobody")
