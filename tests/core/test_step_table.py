"""R20-R26, R42: what becomes of a step. Each row is a situation after a crash, readable as it is.

recorded   how the start in the journal was marked: safe (twice is harmless) or unsafe
declared   how the code declares the call today
journal    what the journal holds of the step
person     what a person said of its last start
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.build import (
    Log,
    claimed,
    done,
    error_of,
    interrupted_of,
    late,
    parked,
    released,
    result_of,
    retry,
    start_of,
    started,
)

from journal.records import Policy, Record, StepCompleted, StepStarted
from journal.step_state import StepState
from journal.steps import (
    Ask,
    Call,
    Mismatch,
    Reuse,
    Run,
    Settle,
    StepDecision,
    Wait,
    completed_value,
    decide_step,
    make_call,
    step_key,
)

STEP = "tool/1/0/pay"
INPUT = {"amount": 10}
START, SIGNAL = 3, 4
RESULT = "paid"


def wanted(*, unsafe: bool, permit: int = 0, **changes: Any) -> Call:
    fields: dict[str, Any] = {"step": STEP, "kind": "tool", "tool": "pay", "input": INPUT}
    return make_call(**(fields | changes), unsafe=unsafe, permit=permit)


KEY = step_key("a1", wanted(unsafe=True))


def begun(*, unsafe: bool, permit: int = 0, key: str = KEY) -> StepStarted:
    return start_of(STEP, "pay", INPUT, unsafe=unsafe, permit=permit, key=key)


def journal(recorded: str, held: str, person: str) -> Log:
    log = Log(started(), claimed("gone"))
    if held != "none":
        assert log.add(begun(unsafe=recorded == "unsafe")) == START
    for name in person.split("+"):
        if name != "nothing":
            log.add(said(name))
    if held == "completed":
        log.add(result_of(STEP, RESULT))
    return log


def said(name: str, start: int = START) -> Record:
    """What a person, or the worker that was fenced, said of the start."""
    match name:
        case "done":
            return done(STEP, start, RESULT)
        case "retry":
            return retry(STEP, start)
        case _:
            return late(STEP, start, RESULT)


def word(decision: StepDecision) -> str:
    match decision:
        case Reuse(completed):
            assert completed.result == RESULT
            return "use the result"
        case Settle(result, by, via):
            assert result == RESULT
            assert by in ((SIGNAL,) if via == "reconcile" else (SIGNAL, SIGNAL + 1))
            return "record the person's result" if via == "reconcile" else "record the late result"
        case Run(permit, key, _):
            assert key == KEY
            return "call" if permit == 0 else f"call by permit {permit}"
        case Ask(start):
            assert start.n == START
            return "ask a person"
        case Wait(start):
            assert start.n == START
            return "wait for the earlier call"
        case Mismatch():
            return "refuse"


#   recorded  declared   journal      person     decision
TABLE = """
    -         safe       none         nothing    call
    -         unsafe     none         nothing    call

    safe      safe       started      nothing    call
    safe      unsafe     started      nothing    ask a person
    unsafe    safe       started      nothing    ask a person
    unsafe    unsafe     started      nothing    ask a person

    safe      safe       completed    nothing    use the result
    safe      unsafe     completed    nothing    use the result
    unsafe    safe       completed    nothing    use the result
    unsafe    unsafe     completed    nothing    use the result

    unsafe    unsafe     started      done       record the person's result
    unsafe    safe       started      done       record the person's result
    unsafe    unsafe     completed    done       use the result
    unsafe    unsafe     completed    retry      use the result

    unsafe    unsafe     started      retry      wait for the earlier call
    unsafe    safe       started      retry      wait for the earlier call

    unsafe    unsafe     started      late       record the late result
    unsafe    safe       started      late       record the late result
    unsafe    unsafe     started      retry+late record the late result
    unsafe    unsafe     completed    late       use the result
    safe      safe       started      late       call
    safe      unsafe     started      late       record the late result
"""
ROWS = [tuple(line.split(None, 4)) for line in TABLE.splitlines() if line.strip()]


@pytest.mark.parametrize(("recorded", "declared", "held", "person", "decision"), ROWS)
def test_a_step_after_a_crash(recorded: str, declared: str, held: str, person: str, decision: str):
    log = journal(recorded, held, person)
    assert word(decide_step(log.fold, wanted(unsafe=declared == "unsafe"))) == decision


#   person     earlier call is over   this process attempted it   decision
MEMORY = """
    nothing    no                     no                          ask a person
    nothing    yes                    no                          ask a person
    nothing    yes                    yes                         ask a person
    retry      no                     no                          wait for the earlier call
    retry      yes                    no                          call by permit 4
    retry      no                     yes                         ask a person
    retry      yes                    yes                         ask a person
    done       no                     no                          record the person's result
    done       yes                    yes                         ask a person
    late       no                     no                          record the late result
    late       yes                    yes                         record the late result
    retry+late yes                    no                          record the late result
    retry+late yes                    yes                         record the late result
"""
MEMORY_ROWS = [tuple(line.split(None, 3)) for line in MEMORY.splitlines() if line.strip()]


@pytest.mark.parametrize(("person", "over", "attempted", "decision"), MEMORY_ROWS)
def test_an_unknown_write_runs_again_only_by_permit_when_it_is_over_and_not_in_this_process(
    person: str, over: str, attempted: str, decision: str
):
    fold = journal("unsafe", "started", person).fold
    mine = frozenset({START}) if attempted == "yes" else frozenset[int]()
    decided = decide_step(fold, wanted(unsafe=True), attempted=mine, earlier_over=over == "yes")
    assert word(decided) == decision


def test_a_permit_covers_only_the_start_it_names():
    """A crash in the retried write is unknown again (R22)."""
    log = journal("unsafe", "started", "retry")
    log.add(begun(unsafe=True, permit=SIGNAL))
    decided = decide_step(log.fold, wanted(unsafe=True), earlier_over=True)
    assert isinstance(decided, Ask)
    assert decided.start.n == 5


def test_a_second_permit_runs_it_once_more():
    log = journal("unsafe", "started", "retry")
    second = log.add(begun(unsafe=True, permit=SIGNAL))
    again = log.add(retry(STEP, second, "r2"))
    assert decide_step(log.fold, wanted(unsafe=True), earlier_over=True) == Run(
        again, KEY, unsafe=True
    )


def test_what_this_process_attempted_earlier_says_nothing_of_a_later_start():
    log = journal("unsafe", "started", "retry")
    second = log.add(begun(unsafe=True, permit=SIGNAL))
    log.add(done(STEP, second, RESULT, "r2"))
    decided = decide_step(log.fold, wanted(unsafe=True), attempted={START})
    assert isinstance(decided, Settle)


def test_the_first_start_takes_the_approval_as_its_permit():
    assert decide_step(Log(started()).fold, wanted(unsafe=True, permit=2)) == Run(
        2, KEY, unsafe=True
    )


def test_a_read_that_is_called_again_keeps_its_key_and_permit():
    """R28: a call matched to an earlier intent keeps that intent's key."""
    log = Log(started(), begun(unsafe=False, permit=1, key="a key of older code"))
    assert decide_step(log.fold, wanted(unsafe=False)) == Run(
        1, "a key of older code", unsafe=False
    )


def test_a_permitted_retry_uses_the_key_of_its_first_start():
    log = Log(started(), begun(unsafe=True, key="a key of older code"))
    permit = log.add(retry(STEP, 2))
    decided = decide_step(log.fold, wanted(unsafe=True), earlier_over=True)
    assert decided == Run(permit, "a key of older code", unsafe=True)


def test_a_recorded_error_is_a_result():
    log = Log(started(), begun(unsafe=True), error_of(STEP, "tool_error", "declined"))
    decided = decide_step(log.fold, wanted(unsafe=True))
    assert isinstance(decided, Reuse)
    value, error = completed_value(decided.completed)
    assert value is None
    assert error is not None and (error.type, error.message) == ("tool_error", "declined")


def test_a_recorded_null_is_a_result():
    log = Log(started(), begun(unsafe=True), result_of(STEP, None))
    decided = decide_step(log.fold, wanted(unsafe=True))
    assert isinstance(decided, Reuse)
    assert completed_value(decided.completed) == (None, None)


CHANGES = {
    "another tool": {"tool": "refund"},
    "other input": {"input": {"amount": 11}},
    "input of another type": {"input": {"amount": 10.0}},
    "another kind": {"kind": "model"},
}


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("held", ["started", "completed"])
@pytest.mark.parametrize("person", ["nothing", "done", "retry"])
def test_another_call_at_a_recorded_position_is_refused_naming_both(
    case: str, held: str, person: str
):
    fold = journal("unsafe", held, person).fold
    decided = decide_step(fold, wanted(unsafe=True, **CHANGES[case]), earlier_over=True)
    assert isinstance(decided, Mismatch)
    assert decided.recorded == 'tool pay {"amount":10}'
    assert decided.attempted != decided.recorded


def test_a_refused_step_has_no_call_to_differ_from():
    log = Log(started(), error_of(STEP, via="refused"))
    assert isinstance(decide_step(log.fold, wanted(unsafe=True)), Reuse)


def test_a_mismatch_shows_long_inputs_cut():
    log = Log(started(), start_of(STEP, "pay", "x" * 10_000))
    decided = decide_step(log.fold, wanted(unsafe=True))
    assert isinstance(decided, Mismatch)
    assert len(decided.recorded) < 250


def test_a_key_ends_in_the_calls_digest_and_differs_by_run_and_step():
    """R28: two different calls never share a key."""
    call = wanted(unsafe=True)
    assert f"a1:{STEP}:{call.digest[:16]}" == KEY
    others = [
        step_key("a2", call),
        step_key("a1", wanted(unsafe=True, step="tool/1/1/pay")),
        step_key("a1", wanted(unsafe=True, input={"amount": 11})),
        step_key("a1", wanted(unsafe=True, tool="refund")),
    ]
    assert len({KEY, *others}) == 5


def test_the_timeout_and_the_permit_are_no_part_of_what_a_call_is():
    one = make_call(STEP, "tool", "pay", INPUT, unsafe=True, permit=3, timeout_s=1)
    assert one.digest == wanted(unsafe=False).digest


def test_completed_value_tells_result_from_error():
    assert completed_value(StepCompleted(step=STEP, result=[1])) == ([1], None)


def test_an_interrupted_write_is_an_error_with_what_it_had_got_to():
    log = Log(started(), begun(unsafe=True), interrupted_of(STEP, {"sent": 3}))
    decided = decide_step(log.fold, wanted(unsafe=True))
    assert isinstance(decided, Reuse)
    value, error = completed_value(decided.completed)
    assert value is None
    assert error is not None and (error.type, error.data) == ("interrupted", {"sent": 3})


# ---- what settles an unknown write (R27) --------------------------------------------------------

POLICIES: list[Policy] = ["reconcile", "interrupt", "probe"]


def cut_off(policy: Policy, *more: Record) -> Log:
    log = Log(started(), claimed("gone"), start_of(STEP, "pay", INPUT, policy=policy), released())
    for body in more:
        log.add(body)
    return log


def asked(log: Log, **known: Any) -> str:
    decided = decide_step(log.fold, wanted(unsafe=True), **known)
    assert isinstance(decided, Ask)
    assert decided.start.n == START
    return decided.policy


@pytest.mark.parametrize("policy", POLICIES)
def test_an_unknown_write_is_left_to_the_policy_that_its_start_recorded(policy: Policy):
    assert asked(cut_off(policy)) == policy
    today = wanted(unsafe=True, policy="reconcile")
    decided = decide_step(cut_off(policy).fold, today)
    assert isinstance(decided, Ask) and decided.policy == policy


@pytest.mark.parametrize("policy", POLICIES)
def test_once_a_holder_asked_a_person_no_policy_settles_the_write_behind_their_back(policy: Policy):
    assert asked(cut_off(policy, claimed("w2"), parked("reconcile"))) == "reconcile"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("why", ["pause", "approval"])
def test_a_park_for_another_reason_leaves_it_to_the_policy(policy: Policy, why: Any):
    assert asked(cut_off(policy, claimed("w2"), parked(why))) == policy


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("person", ["done", "retry"])
def test_what_a_person_said_is_never_overridden_by_a_policy(policy: Policy, person: str):
    """This very process attempted it: it neither runs it again nor records it as interrupted."""
    log = cut_off(policy, said(person))
    assert asked(log, attempted={START}, earlier_over=True) == "reconcile"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_start_that_was_safe_when_it_was_recorded_has_no_policy(policy: Policy):
    """Its policy can settle nothing: the journal does not call it unknown yet (R42)."""
    log = Log(started(), claimed())
    log.add(start_of(STEP, "pay", INPUT, unsafe=False, policy=policy))
    assert asked(log) == "reconcile"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_settles_the_write_of_an_unknown_retry_too(policy: Policy):
    log = cut_off(policy, claimed("w2"), parked("reconcile"), retry(STEP, START), claimed("w3"))
    log.add(start_of(STEP, "pay", INPUT, policy=policy, permit=7))
    decided = decide_step(log.fold, wanted(unsafe=True), earlier_over=True)
    assert isinstance(decided, Ask)
    assert (decided.start.n, decided.policy) == (9, policy)


# ---- unsafe steps of earlier attempts (R44) -----------------------------------------------------

OLD, NEW = "0/0", "0/1"


def call_at(step: str, *, unsafe: bool = True, permit: int = 0) -> Call:
    return wanted(unsafe=unsafe, step=step, permit=permit)


def after_a_failed_attempt(*bodies: Record) -> Log:
    """A write at position 0/0, started as record 3, what became of it, and the next attempt."""
    log = Log(started(), claimed("w1"), start_of(OLD, "pay", INPUT), *bodies)
    log.add(parked("retry", afresh=True))
    log.add(claimed("w2"))
    return log


def honoured(log: Log, occurrence: int = 0) -> StepState | None:
    """As a turn's context matches a call: by tool, input and occurrence."""
    earlier = log.fold.honoured.get(("pay", wanted(unsafe=True).digest), [])
    return earlier[occurrence] if occurrence < len(earlier) else None


def decide_at(log: Log, step: str, occurrence: int = 0, **known: Any) -> StepDecision:
    matched = honoured(log, occurrence)
    return decide_step(log.fold, call_at(step), honoured=matched, **known)


@pytest.mark.parametrize("step", [OLD, NEW, "0/7"])
def test_a_write_of_an_earlier_attempt_gives_its_result_wherever_the_call_stands_now(step: str):
    log = after_a_failed_attempt(result_of(OLD, RESULT))
    decided = decide_at(log, step)
    assert isinstance(decided, Reuse)
    assert decided.completed.result == RESULT


@pytest.mark.parametrize("became", [error_of(OLD, "tool_error"), interrupted_of(OLD, "half")])
def test_an_error_or_an_interruption_of_an_earlier_attempt_is_a_result_too(became: Record):
    decided = decide_at(after_a_failed_attempt(became), NEW)
    assert isinstance(decided, Reuse)
    assert completed_value(decided.completed)[1] is not None


@pytest.mark.parametrize(
    ("body", "via"), [(done(OLD, 3, RESULT), "reconcile"), (late(OLD, 3, RESULT), "late")]
)
def test_an_unrecorded_answer_about_an_earlier_attempt_is_recorded_not_called(
    body: Record, via: str
):
    log = after_a_failed_attempt(claimed("w2"), body)
    decided = decide_at(log, NEW)
    assert isinstance(decided, Settle)
    assert (decided.result, decided.via) == (RESULT, via)


def test_a_retry_of_an_earlier_attempt_runs_under_its_permit_and_key_once_that_call_is_over():
    log = after_a_failed_attempt(claimed("w2"), retry(OLD, 3))
    assert isinstance(decide_at(log, NEW), Wait)
    first = start_of(OLD, "pay", INPUT)
    assert decide_at(log, NEW, earlier_over=True) == Run(5, first.key, unsafe=True)


def test_the_second_call_alike_is_another_call():
    log = after_a_failed_attempt(result_of(OLD, RESULT))
    decided = decide_at(log, NEW, occurrence=1)
    assert decided == Run(0, step_key("a1", call_at(NEW), 2), unsafe=True)


def test_a_step_of_this_attempt_counts_before_an_earlier_one():
    log = after_a_failed_attempt(result_of(OLD, RESULT))
    log.add(start_of(NEW, "pay", INPUT))
    log.add(result_of(NEW, "second"))
    decided = decide_at(log, NEW)
    assert isinstance(decided, Reuse)
    assert decided.completed.result == "second"


def test_a_permit_for_a_write_of_an_earlier_attempt_is_spent_by_the_start_that_names_it():
    """R22: a retry runs it once more, in whichever attempt; the next one gets that result."""
    log = after_a_failed_attempt(claimed("w2"), retry(OLD, 3))
    decided = decide_at(log, NEW, earlier_over=True)
    assert isinstance(decided, Run)
    log.add(start_of(NEW, "pay", INPUT, permit=decided.permit, key=decided.key))
    log.add(result_of(NEW, "paid by the retry"))
    log.add(parked("retry", afresh=True))
    log.add(claimed("w3"))
    again = decide_at(log, NEW, earlier_over=True)
    assert isinstance(again, Reuse)
    assert again.completed.result == "paid by the retry"
