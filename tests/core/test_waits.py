"""R7, R61, R63: what each wait is ended by, and by nothing else; who acts next.

Every wait meets every event: the events that a row names make the run runnable again, all others
leave it waiting. Times are arguments: "the time" is an instant at which somebody looks.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.build import (
    RUN,
    Log,
    approved,
    asked_for,
    asking,
    asks,
    cancel,
    child_ended,
    claimed,
    done,
    goes_on,
    late,
    model_start,
    parked,
    placed,
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

from journal.records import Record
from journal.views import Waiting, outcome, run_json, run_state, waiting_on
from journal.waits import due, wakes_at

PAY, SPAWN_1, SPAWN_2 = "tool/1/0/pay", "0/0", "0/1"
ASK, HANDLERS_ASK = asking(1, 0, "pay"), asked_for("0/5")
SOON = "2026-01-02T04:00:00.000Z"
BEFORE, AFTER = "2026-01-02T03:59:59.999Z", "2026-01-02T04:00:00.001Z"

BASE: list[Record] = [
    started(),
    claimed(),
    spawned(SPAWN_1, "c1"),
    result_of(SPAWN_1),
    spawned(SPAWN_2, "c2"),
    result_of(SPAWN_2),
]
ASKED: list[Record] = [model_start(), reply_of(1, asks(request("pay")), ASK)]
WRITE: list[Record] = [start_of(PAY)]
START = len(BASE) + 1

EVENTS: dict[str, Record | str] = {
    "the time": SOON,
    "an earlier time": BEFORE,
    "an input": submitted(),
    "a resume": resume(),
    "a cancel": cancel(),
    "child c1": child_ended("c1"),
    "child c2": child_ended("c2"),
    "approve": approved(ASK.marker),
    "reject": rejected(ASK.marker),
    "approve another": approved(HANDLERS_ASK.marker.replace("0/5", "0/6")),
    "approve the handler's": approved(HANDLERS_ASK.marker),
    "reject the handler's": rejected(HANDLERS_ASK.marker),
}

#  case: (what leads to the wait, the status word meanwhile, what ends it)
WAITS: dict[str, tuple[list[Record], str, str]] = {
    "approval of a reply's call": (
        [*ASKED, parked()],
        "awaiting_approval",
        "approve, reject, a cancel",
    ),
    "approval of a reply's call, until": (
        [*ASKED, parked(until=SOON)],
        "awaiting_approval",
        "approve, reject, the time, a cancel",
    ),
    "approval of a handler's call": (
        [parked(asks=(HANDLERS_ASK,))],
        "awaiting_approval",
        "approve the handler's, reject the handler's, a cancel",
    ),
    "approval of a handler's call, until": (
        [parked(asks=(HANDLERS_ASK,), until=SOON)],
        "awaiting_approval",
        "approve the handler's, reject the handler's, the time, a cancel",
    ),
    "reconcile": ([*WRITE, parked("reconcile")], "indeterminate", ""),
    "reconcile, with a time": ([*WRITE, parked("reconcile", until=SOON)], "indeterminate", ""),
    "pause over an unknown write": ([*WRITE, parked("pause")], "indeterminate", ""),
    "retry": ([parked("retry")], "waiting", "a resume, a cancel"),
    "retry, until": ([parked("retry", until=SOON)], "waiting", "a resume, the time, a cancel"),
    "pause": ([parked("pause")], "paused", "a resume, a cancel"),
    "pause, until": ([parked("pause", until=SOON)], "paused", "a resume, the time, a cancel"),
    "until": ([goes_on(until=SOON)], "waiting", "the time, a cancel"),
    "until_input": ([goes_on(until_input=True)], "waiting", "an input, a cancel"),
    "until_child": ([goes_on(until_child="c1")], "waiting", "child c1, a cancel"),
    "resume": ([goes_on(resume=True)], "paused", "a resume, a cancel"),
    "resume or until": (
        [goes_on(resume=True, until=SOON)],
        "paused",
        "a resume, the time, a cancel",
    ),
    "until or input": (
        [goes_on(until=SOON, until_input=True)],
        "waiting",
        "the time, an input, a cancel",
    ),
    "input or child": (
        [goes_on(until_input=True, until_child="c2")],
        "waiting",
        "an input, child c2, a cancel",
    ),
    "any of them": (
        [goes_on(until=SOON, until_input=True, until_child="c1", resume=True)],
        "paused",
        "the time, an input, child c1, a resume, a cancel",
    ),
}


def waiting(case: str) -> Log:
    return Log(*BASE, *WAITS[case][0])


def happens(log: Log, event: str) -> str:
    """The event takes place; the instant at which somebody looks at the run after it."""
    what = EVENTS[event]
    if isinstance(what, str):
        return what
    log.add(what)
    return ""


def enders(case: str) -> list[str]:
    return [event for event in WAITS[case][2].split(", ") if event]


@pytest.mark.parametrize("case", WAITS)
def test_a_run_that_waits_is_nobodys_and_says_so(case: str):
    log = waiting(case)
    assert log.fold.claim is None
    assert not log.fold.runnable()
    assert log.fold.status() == WAITS[case][1]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("case", WAITS)
def test_a_wait_is_ended_by_what_it_is_for_and_by_nothing_else(case: str, event: str):
    log = waiting(case)
    now = happens(log, event)
    ended = event in enders(case)
    assert log.fold.runnable(now) == ended
    assert (log.fold.status(now=now) == "running") == ended


@pytest.mark.parametrize("case", WAITS)
def test_whichever_comes_first_ends_the_wait_and_the_rest_change_nothing(case: str):
    for first in enders(case):
        for second in EVENTS:
            log = waiting(case)
            now = happens(log, first)
            later = happens(log, second) if second != first else ""
            assert log.fold.runnable(max(now, later)), (first, second)


@pytest.mark.parametrize("case", WAITS)
def test_a_claim_ends_every_wait(case: str):
    log = waiting(case)
    log.add(claimed("w2"))
    assert (log.fold.wait, log.fold.asks, log.fold.status()) == (None, (), "running")
    log.add(released())
    unknown = log.fold.status() == "indeterminate"
    approval = log.fold.status() == "awaiting_approval"
    assert log.fold.runnable() != (unknown or approval)
    assert unknown == (WRITE[0] in WAITS[case][0])
    assert approval == (ASKED[0] in WAITS[case][0])


def test_every_event_is_tried_on_some_wait_that_it_ends_or_is_there_to_end_none():
    used = {event for case in WAITS for event in enders(case)}
    assert set(EVENTS) - used == {"an earlier time", "approve another"}


# ---- what was there before --------------------------------------------------------------------


@pytest.mark.parametrize("waits", [{"until_input": True}, {"until_input": True, "until": SOON}])
def test_an_input_that_was_queued_before_the_commit_ends_its_wait_at_once(waits: Any):
    log = Log(*BASE, submitted(), goes_on(**waits))
    assert log.fold.runnable()
    assert log.fold.status() == "running"


@pytest.mark.parametrize("became", [withdrawn(), placed()])
def test_an_input_that_is_not_queued_ends_no_wait(became: Record):
    log = Log(*BASE, submitted(), became, goes_on(until_input=True))
    assert log.fold.status() == "waiting"


def test_an_input_withdrawn_while_the_run_waits_leaves_it_waiting():
    log = Log(*BASE, goes_on(until_input=True), submitted())
    assert log.fold.runnable()
    log.add(withdrawn())
    assert log.fold.status() == "waiting"


def test_a_child_that_ended_before_the_commit_ends_its_wait_at_once():
    log = Log(*BASE, child_ended("c1"), goes_on(until_child="c1"))
    assert log.fold.runnable()


@pytest.mark.parametrize("wait", [parked("retry"), parked("pause"), goes_on(resume=True)])
def test_a_resume_from_before_the_wait_does_not_end_it(wait: Record):
    log = Log(*BASE, parked("pause"), resume("r1"), claimed("w2"), wait)
    assert not log.fold.runnable()
    log.add(resume("r2"))
    assert log.fold.runnable()


def test_an_approval_from_before_the_park_ends_it_at_once():
    """R61: nothing is lost between about to park and parked."""
    log = Log(*BASE, *ASKED, approved(ASK.marker), parked())
    assert log.fold.runnable()


def test_an_approval_of_one_of_two_calls_of_a_handler_wakes_the_run():
    other = asked_for("0/6", digest="b" * 16)
    log = Log(*BASE, parked(asks=(HANDLERS_ASK, other)), approved(HANDLERS_ASK.marker))
    assert log.fold.runnable()
    assert [ask.marker for ask in log.fold.asked()] == [other.marker]
    log.add(claimed("w2"))
    log.add(parked(asks=(other,)))
    assert not log.fold.runnable()


# ---- writes that were cut off -----------------------------------------------------------------

SETTLED: dict[str, Record] = {
    "done": done(PAY, START),
    "retry": retry(PAY, START),
    "late": late(PAY, START),
}


@pytest.mark.parametrize("what", SETTLED)
@pytest.mark.parametrize("case", ["reconcile", "reconcile, with a time"])
def test_an_unknown_write_is_settled_by_a_person_or_its_own_worker(case: str, what: str):
    log = waiting(case)
    log.add(SETTLED[what])
    assert log.fold.runnable()
    assert log.fold.unknown() == []


@pytest.mark.parametrize("what", SETTLED)
def test_a_pause_over_an_unknown_write_is_over_once_both_are_said(what: str):
    log = waiting("pause over an unknown write")
    log.add(SETTLED[what])
    assert log.fold.status() == "paused"
    log.add(resume())
    assert log.fold.status() == "running"


@pytest.mark.parametrize("what", SETTLED)
def test_a_cancelled_run_waits_for_what_became_of_its_write(what: str):
    log = waiting("reconcile")
    log.add(cancel())
    assert log.fold.status() == "indeterminate"
    log.add(SETTLED[what])
    assert log.fold.status() == "running"


@pytest.mark.parametrize("policy", ["interrupt", "probe"])
def test_a_write_with_a_policy_needs_no_person_until_a_holder_says_so(policy: Any):
    log = Log(*BASE, start_of(PAY, policy=policy), released())
    assert [step.name for step in log.fold.unknown()] == [PAY]
    assert log.fold.status() == "running"
    log.add(claimed("w2"))
    log.add(parked("reconcile"))
    assert log.fold.status() == "indeterminate"
    log.add(retry(PAY, START))
    assert log.fold.status() == "running"


def test_a_policy_counts_again_for_the_retry_of_a_write_that_a_person_was_asked_about():
    log = Log(*BASE, start_of(PAY, policy="interrupt"), parked("reconcile"))
    permit = log.add(retry(PAY, START))
    log.add(claimed("w2"))
    log.add(start_of(PAY, policy="interrupt", permit=permit))
    log.add(released())
    assert [step.name for step in log.fold.unknown()] == [PAY]
    assert log.fold.status() == "running"


# ---- times ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("until", "now", "over"),
    [
        (SOON, BEFORE, False),
        (SOON, SOON, True),
        (SOON, AFTER, True),
        (SOON, "", False),
        ("", AFTER, False),
        ("", "", False),
        ("2026-01-02T06:00:00.000+02:00", SOON, True),
        ("2026-01-02T06:00:00.001+02:00", SOON, False),
        ("2026-01-02T04:00:00", SOON, True),
        ("2226-01-02T04:00:00.000Z", SOON, False),
    ],
)
def test_an_instant_has_come_for_whoever_can_name_one_that_is_not_earlier(
    until: str, now: str, over: bool
):
    assert due(until, now) == over


@pytest.mark.parametrize("case", WAITS)
def test_a_run_wakes_by_itself_exactly_where_its_wait_has_a_time(case: str):
    log = waiting(case)
    timed = "the time" in enders(case) or case == "reconcile, with a time"
    assert wakes_at(log.fold) == (SOON if timed else "")
    log.add(claimed("w2"))
    assert wakes_at(log.fold) == ""


# ---- who acts next (R7) -----------------------------------------------------------------------

WAITS_FOR: dict[str, list[str]] = {
    "approval of a reply's call": ["approval"],
    "approval of a reply's call, until": ["approval"],
    "approval of a handler's call": ["approval"],
    "approval of a handler's call, until": ["approval"],
    "reconcile": ["reconcile"],
    "reconcile, with a time": ["reconcile"],
    "pause over an unknown write": ["reconcile"],
    "retry": ["operator"],
    "retry, until": ["timer"],
    "pause": ["operator"],
    "pause, until": ["operator", "timer"],
    "until": ["timer"],
    "until_input": ["input"],
    "until_child": ["child"],
    "resume": ["operator"],
    "resume or until": ["operator", "timer"],
    "until or input": ["timer", "input"],
    "input or child": ["input", "child"],
    "any of them": ["operator", "timer", "input", "child"],
}


@pytest.mark.parametrize("case", WAITS)
def test_a_waiting_run_names_who_acts_next_since_when_and_until_when(case: str):
    log = waiting(case)
    found = waiting_on(log.fold)
    assert [one.what for one in found] == WAITS_FOR[case]
    assert all(one.since.isoformat() == "2026-01-02T03:04:05.678000+00:00" for one in found)
    assert all(one.ended_by for one in found)
    if wakes_at(log.fold) and log.fold.unknown() == []:
        assert {one.until.isoformat() for one in found if one.until} == {
            "2026-01-02T04:00:00+00:00"
        }


@pytest.mark.parametrize("case", WAITS)
def test_a_run_whose_wait_has_ended_waits_for_a_worker(case: str):
    for event in enders(case):
        log = waiting(case)
        now = happens(log, event)
        (found,) = waiting_on(log.fold, now=now)
        assert found.what == "worker"
        assert "helpdesk" in found.ended_by and RUN in found.ended_by


@pytest.mark.parametrize("case", ["until", "pause", "any of them", "retry, until"])
def test_waiting_is_an_outcome_that_says_on_what(case: str):
    fold = waiting(case).fold
    assert outcome(fold) == Waiting(waiting_on(fold))
    state = run_state(fold)
    assert (state.status, state.waiting_on) == (WAITS[case][1], waiting_on(fold))
    assert [one["what"] for one in run_json(fold)["waiting_on"]] == WAITS_FOR[case]
    assert outcome(fold, held=True) is None
    assert run_state(fold, held=True).status == "running"


def test_a_run_state_names_iteration_and_attempt():
    fold = Log(*BASE, goes_on(), parked("retry", afresh=True)).fold
    state = run_state(fold)
    assert (state.iteration, state.attempt) == (1, 2)
    assert (run_json(fold)["iteration"], run_json(fold)["attempt"]) == (1, 2)


@pytest.mark.parametrize("case", ["approval of a handler's call", "approval of a reply's call"])
def test_a_call_that_waits_is_shown_with_what_ends_it(case: str):
    fold = waiting(case).fold
    marker = HANDLERS_ASK.marker if "handler" in case else ASK.marker
    (shown,) = run_json(fold)["pending"]
    assert shown["marker"] == marker
    assert waiting_on(fold)[0].ended_by == f"`runfold approve {marker}`"
