"""R13, R19: a record out of its order is damage: steps, parks, commits, inputs, signals, ends."""

from __future__ import annotations

from typing import Any

import pytest
from kit.build import (
    Log,
    answered,
    approved,
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
    released,
    result_of,
    resume,
    retry,
    start_of,
    started,
    submitted,
    withdrawn,
)

from journal.codec import Damage
from journal.records import (
    SPAWN,
    Commit,
    InputPlaced,
    Park,
    Record,
    RunCompleted,
    RunPurged,
    Signal,
    Waits,
)

PAY, READ = "0/0", "0/1"
HELD: list[Record] = [started(), claimed()]
UNKNOWN: list[Record] = [*HELD, start_of(PAY)]
START = 3


def refused(log: Log, body: Record, **envelope: Any) -> str:
    """What is wrong with the body at the log's end, exactly as it is."""
    with pytest.raises(Damage) as raised:
        log.fold.check(log.sealed(body, **envelope).record)
    return str(raised.value)


OUT_OF_ORDER: dict[str, tuple[list[Record], Record, str]] = {
    # ---- progress
    "progress of a step that never started": (HELD, progress_of(PAY), "which is not open"),
    "progress after the result": (
        [*UNKNOWN, result_of(PAY)],
        progress_of(PAY),
        "which is not open",
    ),
    "progress of a step of an earlier iteration": (
        [*HELD, start_of(READ, unsafe=False), goes_on()],
        progress_of(READ),
        "which is not open",
    ),
    # ---- results
    "an interrupted step that never started": (HELD, interrupted_of(PAY), "which never started"),
    "an interrupted step after its result": (
        [*UNKNOWN, result_of(PAY)],
        interrupted_of(PAY),
        "a second time",
    ),
    "a result after it was interrupted": (
        [*UNKNOWN, interrupted_of(PAY)],
        result_of(PAY),
        "a second time",
    ),
    "a result of an earlier iteration": (
        [*HELD, start_of(READ, unsafe=False), goes_on()],
        result_of(READ),
        "which never started",
    ),
    "a start after it was interrupted": (
        [*UNKNOWN, interrupted_of(PAY)],
        start_of(PAY),
        "again after its result",
    ),
    "a write's second start without a permit": (UNKNOWN, start_of(PAY), "without a permit"),
    "a retry although the late result is there": (
        [*UNKNOWN, released(), retry(PAY, START), late(PAY, START), claimed("w2")],
        start_of(PAY, permit=5),
        "without a permit",
    ),
    # ---- parks
    "a park of an earlier iteration": (
        [*HELD, goes_on()],
        Park(why="pause"),
        "parks attempt 1 of iteration 0, not 1 of 1",
    ),
    "a park of a later iteration": (HELD, Park(why="pause", iteration=1), "not 1 of 0"),
    "a park of an earlier attempt": (
        [*HELD, parked("retry"), claimed("w2")],
        Park(why="retry"),
        "parks attempt 1 of iteration 0, not 2 of 0",
    ),
    "a park of a later attempt": (HELD, Park(why="retry", attempt=2), "not 1 of 0"),
    "a park for a step that is not open": (
        HELD,
        Park(why="reconcile", steps=(READ,)),
        "not open",
    ),
    "a park for a step that has its result": (
        [*HELD, start_of(READ, unsafe=False), result_of(READ)],
        Park(why="reconcile", steps=(READ,)),
        "not open",
    ),
    "a new attempt beside an unknown write": (
        UNKNOWN,
        Park(why="retry"),
        "ends an attempt while a write is unknown",
    ),
    "a new attempt beside a write with a policy": (
        [*HELD, start_of(PAY, policy="interrupt")],
        Park(why="retry", afresh=True),
        "ends an attempt while a write is unknown",
    ),
    "a park until no instant": (HELD, Park(why="pause", until="soon"), "which is no instant"),
    # ---- commits
    "a commit of an earlier iteration": (
        [*HELD, goes_on()],
        Commit(action="continue"),
        "commits iteration 0, not 1",
    ),
    "an end of an earlier iteration": (
        [*HELD, goes_on()],
        RunCompleted(message=""),
        "commits iteration 0, not 1",
    ),
    "a commit of a later iteration": (
        HELD,
        Commit(action="continue", iteration=1),
        "commits iteration 1, not 0",
    ),
    "a commit beside an unknown write": (UNKNOWN, goes_on(), "while a write is unknown"),
    "an answer beside an unknown write": (UNKNOWN, answered(), "while a write is unknown"),
    "a failure beside an unknown write": (UNKNOWN, failed(), "while a write is unknown"),
    "a cancel beside an unknown write": (
        [*UNKNOWN, cancel()],
        cancelled_end(),
        "while a write is unknown",
    ),
    "a commit beside a write with a policy": (
        [*HELD, start_of(PAY, policy="probe")],
        goes_on(),
        "while a write is unknown",
    ),
    "a commit until no instant": (
        HELD,
        Commit(action="continue", waits=Waits(until="2026-13-01T00:00:00Z")),
        "which is no instant",
    ),
    # ---- inputs
    "an input that stands twice": (
        [*HELD, submitted("i1")],
        submitted("i1", content="other"),
        "repeats the input i1",
    ),
    "an input that was withdrawn and stands twice": (
        [*HELD, submitted("i1"), withdrawn("i1")],
        submitted("i1"),
        "repeats the input i1",
    ),
    "a withdrawal of no input": (HELD, withdrawn("i1"), "is not queued but not there"),
    "a placing of no input": (HELD, placed("i1"), "is not queued but not there"),
    "a withdrawal after the placing": (
        [*HELD, submitted(), placed()],
        withdrawn(),
        "is not queued but placed",
    ),
    "a placing after the withdrawal": (
        [*HELD, submitted(), withdrawn()],
        placed(),
        "is not queued but withdrawn",
    ),
    "a second placing": ([*HELD, submitted(), placed()], placed(), "is not queued but placed"),
    "a placing in the next iteration": (
        [*HELD, submitted(), placed(), goes_on()],
        InputPlaced(request_id="i1", iteration=1, position="1/0"),
        "is not queued but done",
    ),
    "a second withdrawal": (
        [*HELD, submitted(), withdrawn()],
        withdrawn(),
        "is not queued but withdrawn",
    ),
    # ---- signals
    "an approve without a marker": (
        HELD,
        Signal(name="approve", request_id="r", payload={}),
        "approve without a marker",
    ),
    "a reject of a number": (
        HELD,
        Signal(name="reject", request_id="r", payload={"marker": 7}),
        "reject without a marker",
    ),
    "a reconcile without a step": (
        UNKNOWN,
        Signal(name="reconcile", request_id="r", payload={"start": 3, "outcome": "retry"}),
        "reconcile without a step",
    ),
    "a reconcile without a start": (
        UNKNOWN,
        Signal(name="reconcile", request_id="r", payload={"step": PAY, "outcome": "retry"}),
        "a start that is not there",
    ),
    "a late result of no start": (UNKNOWN, late(PAY, 2), "a start that is not there"),
    "a late result of another step": (UNKNOWN, late(READ, START), "a start that is not there"),
    "a late result of an earlier iteration": (
        [*HELD, start_of(READ, unsafe=False), goes_on()],
        late(READ, START),
        "a start that is not there",
    ),
    "a late result that holds none": (
        UNKNOWN,
        Signal(name="late", request_id="r", payload={"step": PAY, "start": START}),
        "a late result without one",
    ),
    "a child's end that names none": (
        HELD,
        Signal(name="child", request_id="c", payload={"outcome": {}}),
        "child without a run",
    ),
    # ---- the end
    "a purge of a run that goes on": (HELD, RunPurged(), "has not ended"),
    "a purge of a run that waits": ([*HELD, parked("pause")], RunPurged(), "has not ended"),
}


@pytest.mark.parametrize("case", OUT_OF_ORDER)
def test_a_record_out_of_its_order_is_damage(case: str):
    records, body, why = OUT_OF_ORDER[case]
    assert why in refused(Log(*records), body)


@pytest.mark.parametrize(
    "body", [progress_of(PAY), placed(), goes_on(), parked("retry"), interrupted_of(PAY)]
)
@pytest.mark.parametrize("claim", [0, 2])
def test_a_holders_record_of_the_fleet_under_a_fenced_claim_is_damage(body: Record, claim: int):
    log = Log(*UNKNOWN, submitted(), claimed("w2"))
    assert f"under claim {claim}, not 5" in refused(log, body, claim=claim)


@pytest.mark.parametrize("end", [goes_on(until_input=True), parked("retry"), released()])
@pytest.mark.parametrize("body", [model_start(), goes_on(), placed()])
def test_after_the_record_that_ends_a_claim_nothing_is_written_under_it(end: Record, body: Record):
    log = Log(*HELD, submitted(), end)
    assert "under claim 2, not 0" in refused(log, body, claim=2)


def test_a_commit_without_waits_leaves_the_claim():
    log = Log(*HELD, goes_on(), model_start())
    assert log.fold.claim is not None
    assert log.fold.claim.n == 2


@pytest.mark.parametrize("body", [submitted(), withdrawn(), cancel(), child_ended("c1")])
def test_what_doors_write_needs_no_claim_and_ends_none(body: Record):
    log = Log(*HELD, submitted("i0"), submitted("i1"))
    if body == submitted():
        body = submitted("i2")
    log.add(body)
    assert log.fold.claim is not None


# ---- the end, and what follows it -------------------------------------------------------------

ENDS: dict[str, Record] = {
    "completed": answered(),
    "cancelled": cancelled_end(),
    "failed for good": failed(),
    "failed, retriable": failed("restart_limit", retriable=True),
}
AFTER_AN_END: list[Record] = [
    model_start(),
    result_of(PAY),
    claimed("w2"),
    goes_on(),
    parked("pause"),
    submitted("i2"),
    withdrawn(),
    placed(),
    approved("x"),
    done(PAY, START),
    late(PAY, START),
    cancel(),
    child_ended("c1"),
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("body", AFTER_AN_END, ids=lambda body: type(body).__name__)
def test_only_a_resume_and_a_purge_follow_an_end(end: str, body: Record):
    log = Log(*HELD, submitted(), start_of(PAY), error_of(PAY), ENDS[end])
    assert "stands after the run's end" in refused(log, log.here(body), claim=0)


@pytest.mark.parametrize("end", ENDS)
def test_a_resume_follows_only_a_failure_that_is_retriable(end: str):
    log = Log(*HELD, ENDS[end])
    if end == "failed, retriable":
        log.add(resume())
        assert log.fold.status() == "running"
    else:
        assert "stands after the run's end" in refused(log, resume())


@pytest.mark.parametrize("end", ENDS)
def test_a_purged_run_takes_nothing_not_even_a_resume(end: str):
    log = Log(*HELD, ENDS[end], RunPurged())
    assert "stands after the run's end" in refused(log, resume())
    assert not log.fold.can_reopen


@pytest.mark.parametrize(
    "input", [None, "r1", {}, {"run": 1}, {"run": "../x"}, {"no": "run"}], ids=str
)
def test_a_start_of_a_child_that_names_no_run_is_damage(input: Any):
    assert "starts no child run" in refused(Log(*HELD), start_of(PAY, SPAWN, input, unsafe=False))
    Log(*HELD, start_of(PAY, SPAWN, {"run": "r1"}, unsafe=False))
