"""PROTOCOL 4: who may take a run on a shared store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kit.build import (
    AGENT,
    ALLOW,
    AT,
    Log,
    answered,
    approved,
    asking,
    asks,
    cancel,
    cancelled_end,
    claimed,
    done,
    error_of,
    failed,
    goes_on,
    model_start,
    parked,
    progress_of,
    released,
    reply_of,
    request,
    result_of,
    resume,
    retry,
    start_of,
    started,
    submitted,
)

from journal.claims import (
    Answer,
    AskHolder,
    Delivery,
    Drop,
    Finished,
    HeldBack,
    HeldBy,
    Leave,
    NotMine,
    Rest,
    Resting,
    Stale,
    Take,
    TaskDecision,
    decide_claim,
    decide_task,
)
from journal.limits import HELD_BACK_DELIVERIES, HOLDER_GRACE_S, RESTART_LIMIT
from journal.records import Record, RunPurged

ACK_WAIT_S = 30.0
PAY = "tool/1/0/pay"
ASK = asking(1, 0, "pay")
ASKED: list[Record] = [model_start(), reply_of(1, asks(request("pay")), ASK)]

NOBODY_HOLDS: dict[str, tuple[list[Record], object]] = {
    "never claimed": ([started()], Take("new")),
    "never claimed, a person must act": ([started(), *ASKED], Rest()),
    "released": ([started(), claimed(), released()], Take("wake")),
    "released in a write": ([started(), claimed(), start_of(PAY), released()], Rest()),
    "parked for approval": ([started(), claimed(), *ASKED, parked()], Rest()),
    "parked, then approved": (
        [started(), claimed(), *ASKED, parked(), approved(ASK.marker)],
        Take("wake"),
    ),
    "parked for reconcile": ([started(), claimed(), start_of(PAY), parked("reconcile")], Rest()),
    "parked, then reconciled": (
        [started(), claimed(), start_of(PAY), parked("reconcile"), done(PAY, 3)],
        Take("wake"),
    ),
    "parked for another attempt": ([started(), claimed(), parked("retry")], Rest()),
    "parked for another attempt, resumed": (
        [started(), claimed(), parked("retry"), resume()],
        Take("retry"),
    ),
    "paused": ([started(), claimed(), parked("pause")], Rest()),
    "paused, resumed": ([started(), claimed(), parked("pause"), resume()], Take("wake")),
    "waits for an input": ([started(), claimed(), goes_on(until_input=True)], Rest()),
    "waits for an input that came": (
        [started(), claimed(), goes_on(until_input=True), submitted()],
        Take("wake"),
    ),
    "cancelled before any claim": ([started(), cancel()], Take("new")),
    "parked, then cancelled": (
        [started(), claimed(), *ASKED, parked(), cancel()],
        Take("wake"),
    ),
    "unknown, then cancelled": (
        [started(), claimed(), start_of(PAY), parked("reconcile"), cancel()],
        Rest(),
    ),
    "completed": ([started(), claimed(), answered()], Rest()),
    "failed": ([started(), claimed(), failed()], Rest()),
    "failed, retriable": ([started(), claimed(), failed(retriable=True)], Rest()),
    "failed, resumed": ([started(), claimed(), failed(retriable=True), resume()], Take("wake")),
}


@pytest.mark.parametrize("case", NOBODY_HOLDS)
def test_a_run_that_nobody_claims_is_taken_if_there_is_something_to_do(case: str):
    records, decision = NOBODY_HOLDS[case]
    assert decide_claim(Log(*records).fold, (), ack_wait_s=ACK_WAIT_S) == decision


@pytest.mark.parametrize("case", NOBODY_HOLDS)
def test_answers_about_a_claim_that_has_ended_change_nothing(case: str):
    records, decision = NOBODY_HOLDS[case]
    assert decide_claim(Log(*records).fold, ("nobody",), ack_wait_s=ACK_WAIT_S) == decision


def asked_again(after_s: float) -> AskHolder:
    return AskHolder("w1", 2, after_s)


HELD: list[tuple[tuple[Answer, ...], object, object]] = [
    # answers so far          decision                    decision with an open write
    ((), asked_again(0), asked_again(0)),
    (("yes",), HeldBy("w1", silent=False), HeldBy("w1", silent=False)),
    (("silent",), HeldBy("w1", silent=True), HeldBy("w1", silent=True)),
    (("no",), Take("adopted"), Take("adopted")),
    (("nobody",), asked_again(HOLDER_GRACE_S), asked_again(ACK_WAIT_S)),
    (("nobody", "nobody"), Take("adopted"), Take("adopted")),
    (("nobody", "yes"), HeldBy("w1", silent=False), HeldBy("w1", silent=False)),
    (("nobody", "silent"), HeldBy("w1", silent=True), HeldBy("w1", silent=True)),
    (("nobody", "no"), Take("adopted"), Take("adopted")),
]


@pytest.mark.parametrize(("answers", "idle", "in_a_write"), HELD)
def test_a_live_claim_is_taken_over_only_if_its_holder_says_no_or_is_twice_not_there(
    answers: tuple[Answer, ...], idle: object, in_a_write: object
):
    log = Log(started(), claimed("w1"))
    assert decide_claim(log.fold, answers, ack_wait_s=ACK_WAIT_S) == idle
    log.add(start_of(PAY))
    assert decide_claim(log.fold, answers, ack_wait_s=ACK_WAIT_S) == in_a_write


@pytest.mark.parametrize("answers", [(), ("yes",), ("nobody", "nobody")])
def test_a_person_who_must_act_first_does_not_hide_a_live_claim(answers: tuple[Answer, ...]):
    log = Log(started(), claimed("w1"), *ASKED)
    idle = next(idle for known, idle, _ in HELD if known == answers)
    assert decide_claim(log.fold, answers, ack_wait_s=ACK_WAIT_S) == idle


def test_the_newest_claim_is_the_one_that_is_asked_about():
    log = Log(started(), claimed("w1"), claimed("w2"), model_start())
    assert decide_claim(log.fold, (), ack_wait_s=ACK_WAIT_S) == AskHolder("w2", 3, 0.0)


def test_a_read_that_was_cut_off_needs_no_long_wait():
    log = Log(started(), claimed("w1"), start_of("tool/1/0/lookup", unsafe=False))
    assert decide_claim(log.fold, ("nobody",), ack_wait_s=ACK_WAIT_S) == asked_again(HOLDER_GRACE_S)


def test_a_reply_without_gated_calls_leaves_the_run_claimable():
    log = Log(started(), model_start(), reply_of(1, asks(request("lookup")), ALLOW))
    assert decide_claim(log.fold, (), ack_wait_s=ACK_WAIT_S) == Take("new")


# ---- a worker with a task message (PROTOCOL 4) --------------------------------------------------

TASK, OTHER = 7, 8
"""Sequences: of the task message that the live claim was made under, and of another one."""

SOON = "2026-01-02T04:00:00.000Z"
NOW, LATER = AT, "2026-01-02T05:00:00.000Z"
HELD_RUN: list[Record] = [started(), claimed("w1", task=TASK, delivery=1)]
IN_A_WRITE: list[Record] = [*HELD_RUN, start_of(PAY)]


def restarted(times: int) -> list[Record]:
    """A run whose holders were lost this often, and are never seen to move it on."""
    return [started(), *(claimed(f"w{n}", task=TASK, delivery=n) for n in range(times + 1))]


def decide(
    records: list[Record],
    *answers: Answer,
    task: int = TASK,
    delivery: int = 1,
    cause: int = 1,
    now: str = NOW,
    accepts: tuple[str, ...] = ("1",),
    restart_limit: int = RESTART_LIMIT,
    crowded: bool = False,
) -> TaskDecision:
    return decide_task(
        Log(*records).fold,
        Delivery(sequence=task, delivery=delivery, cause=cause),
        answers,
        agent=AGENT,
        accepts=accepts,
        now=now,
        ack_wait_s=ACK_WAIT_S,
        restart_limit=restart_limit,
        crowded=crowded,
    )


def about(*args: Any, **kwargs: Any) -> Callable[[], TaskDecision]:
    """The decision, made when its test runs."""
    return lambda: decide(*args, **kwargs)


NEVER_HELD: dict[str, tuple[Callable[[], TaskDecision], TaskDecision]] = {
    # "a read that ends before `cause` is stale: read again, settle nothing on it"
    "the read holds the cause exactly": (about([started()], cause=1), Take("new")),
    "the read ends before the cause": (about([started()], cause=2), Stale()),
    "the read is empty": (about([], cause=1), Stale()),
    "the read of an ended run ends before the cause": (
        about([started(), answered()], cause=3),
        Stale(),
    ),
    "the read of a held run ends before the cause": (about(HELD_RUN, "no", cause=3), Stale()),
    # "finished -> do what its end owes, ack"
    "completed": (about([*HELD_RUN, answered()]), Finished()),
    "failed": (about([*HELD_RUN, failed()]), Finished()),
    "failed, retriable": (about([*HELD_RUN, failed(retriable=True)]), Finished()),
    "cancelled": (about([*HELD_RUN, cancelled_end()]), Finished()),
    "completed, and of another revision": (
        about([*HELD_RUN, answered()], accepts=("2",)),
        Finished(),
    ),
    "purged": (about([*HELD_RUN, answered(), RunPurged()]), Drop()),
    # "waiting and not ended -> publish its schedule again, ack"
    "waits for a person": (about([*HELD_RUN, *ASKED, parked()]), Resting("")),
    "waits for a reconcile": (about([*IN_A_WRITE, parked("reconcile")]), Resting("")),
    "waits for an input": (about([*HELD_RUN, goes_on(until_input=True)]), Resting("")),
    "waits until later": (about([*HELD_RUN, goes_on(until=SOON)]), Resting(SOON)),
    "waits until now": (about([*HELD_RUN, goes_on(until=SOON)], now=SOON), Take("wake")),
    "waits until a moment ago": (about([*HELD_RUN, goes_on(until=SOON)], now=LATER), Take("wake")),
    "waits until later or for an input": (
        about([*HELD_RUN, goes_on(until=SOON, until_input=True)]),
        Resting(SOON),
    ),
    "its input came": (
        about([*HELD_RUN, goes_on(until=SOON, until_input=True), submitted()]),
        Take("wake"),
    ),
    "backs off": (about([*HELD_RUN, parked("retry", until=SOON)]), Resting(SOON)),
    "backed off": (about([*HELD_RUN, parked("retry", until=SOON)], now=SOON), Take("retry")),
    "an approval that ends some day": (
        about([*HELD_RUN, *ASKED, parked(until=SOON)]),
        Resting(SOON),
    ),
    "a time that has come, and a write that only a person can settle": (
        about([*IN_A_WRITE, parked("pause", until=SOON)], now=LATER),
        Resting(""),
    ),
    # "newer version, or not this worker's agents or revision -> nak with delay"
    "another revision": (
        about([started()], accepts=("2", "3")),
        NotMine("it is bound to revision 1"),
    ),
    "a compatible revision": (about([started()], accepts=("2", "1")), Take("new")),
    "another revision, held": (
        about(HELD_RUN, accepts=("2",)),
        NotMine("it is bound to revision 1"),
    ),
    "no revision yet": (about([started(revision="")], accepts=("2",)), Take("new")),
    "bound by its first worker": (
        about([started(revision=""), claimed(revision="1"), released()], accepts=("2",)),
        NotMine("it is bound to revision 1"),
    ),
    # "no live claim (never claimed; wait ended; released) -> claim, whatever `cause` says"
    "never claimed": (about([started()], cause=0), Take("new")),
    "released": (about([*HELD_RUN, released()]), Take("wake")),
    "approved": (about([*HELD_RUN, *ASKED, parked(), approved(ASK.marker)]), Take("wake")),
    "reconciled": (about([*IN_A_WRITE, parked("reconcile"), done(PAY, 3)]), Take("wake")),
    "resumed after it failed": (
        about([*HELD_RUN, failed(retriable=True), resume()]),
        Take("wake"),
    ),
    "a write with a policy, released": (
        about([*HELD_RUN, start_of(PAY, policy="interrupt"), released()]),
        Take("wake"),
    ),
    # "cancel requested -> claim, then commit(cancel)"; "with an unknown write: park for reconcile"
    "cancelled, never claimed": (about([started(), cancel()]), Take("new")),
    "cancelled while it waits": (about([*HELD_RUN, parked("pause"), cancel()]), Take("wake")),
    "cancelled, and a person must settle a write first": (
        about([*IN_A_WRITE, parked("reconcile"), cancel()]),
        Resting(""),
    ),
    "cancelled, and the write is settled": (
        about([*IN_A_WRITE, parked("reconcile"), cancel(), retry(PAY, 3)]),
        Take("wake"),
    ),
}


@pytest.mark.parametrize("case", NEVER_HELD)
def test_what_a_worker_does_about_a_task_of_a_run_that_nobody_holds(case: str):
    decided, expected = NEVER_HELD[case]
    assert decided() == expected


def ask_again(after_s: float) -> AskHolder:
    return AskHolder("w1", 2, after_s)


REDELIVERED, ADOPTED = Take("redelivery"), Take("adopted")
ABOUT_A_CLAIM: list[tuple[tuple[Answer, ...], TaskDecision, TaskDecision, TaskDecision]] = [
    # answers so far          the same message       redelivered            another message
    ((), ask_again(0), ask_again(0), ask_again(0)),
    (("yes",), Leave(), Leave(), Drop()),
    (("no",), ADOPTED, ADOPTED, ADOPTED),
    (("nobody",), ask_again(HOLDER_GRACE_S), ask_again(HOLDER_GRACE_S), ask_again(HOLDER_GRACE_S)),
    (("nobody", "nobody"), ADOPTED, ADOPTED, ADOPTED),
    (("nobody", "yes"), Leave(), Leave(), Drop()),
    (("nobody", "no"), ADOPTED, ADOPTED, ADOPTED),
    (("silent",), Leave(), REDELIVERED, Drop()),
    (("nobody", "silent"), Leave(), REDELIVERED, Drop()),
]


@pytest.mark.parametrize(("answers", "same", "redelivered", "another"), ABOUT_A_CLAIM)
def test_what_a_worker_does_about_a_task_of_a_run_that_somebody_holds(
    answers: tuple[Answer, ...],
    same: TaskDecision,
    redelivered: TaskDecision,
    another: TaskDecision,
):
    assert decide(HELD_RUN, *answers, task=TASK, delivery=1) == same
    assert decide(HELD_RUN, *answers, task=TASK, delivery=2) == redelivered
    assert decide(HELD_RUN, *answers, task=OTHER, delivery=1) == another
    assert decide(HELD_RUN, *answers, task=OTHER, delivery=9) == another


@pytest.mark.parametrize("task", [TASK, OTHER])
def test_with_an_open_write_the_second_ask_comes_after_the_ack_wait(task: int):
    assert decide(IN_A_WRITE, "nobody", task=task) == ask_again(ACK_WAIT_S)
    assert decide(IN_A_WRITE, "nobody", "nobody", task=task) == ADOPTED


def test_a_message_that_came_again_has_waited_the_ack_wait_already():
    """Nobody held it meanwhile; so a takeover out of a write takes one ack wait, not two."""
    assert decide(IN_A_WRITE, "nobody", task=TASK, delivery=2) == ask_again(HOLDER_GRACE_S)
    assert decide(IN_A_WRITE, "nobody", task=OTHER, delivery=2) == ask_again(ACK_WAIT_S)


def test_an_answer_of_nobody_counts_twice_only_in_a_row():
    assert decide(HELD_RUN, "nobody", "silent", "nobody") == ask_again(HOLDER_GRACE_S)


@pytest.mark.parametrize("answers", [(), ("yes",), ("nobody", "nobody"), ("silent",)])
@pytest.mark.parametrize("also", [cancel(), submitted(), approved(ASK.marker)])
def test_what_doors_append_hides_no_live_claim(answers: tuple[Answer, ...], also: Record):
    assert decide([*HELD_RUN, also], *answers) == decide(HELD_RUN, *answers)


def test_a_claim_of_run_is_no_message_of_anybodys():
    run = [started(), claimed("w1")]  # it has no task message: sequence 0
    assert decide(run, "yes") == Drop()
    assert decide(run, "silent", delivery=9) == Drop()
    assert decide(run, "no") == ADOPTED


# ---- the restart limit (R52) --------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_so_many_claims_in_a_row_without_progress_and_the_next_one_ends_the_run(limit: int):
    """`limit` claims were lost; the one after them is claimed to record the failure."""
    for lost in range(limit + 2):
        found = decide(restarted(lost), "no", delivery=9, restart_limit=limit)
        claims = lost + 1  # with the live one, which is lost now, too
        assert found == Take("adopted", lost=claims >= limit), claims


@pytest.mark.parametrize(
    "answers", [("no",), ("nobody", "nobody"), ("silent",)], ids=["no", "nobody", "silent"]
)
def test_the_limit_counts_however_the_holder_was_lost(answers: tuple[Answer, ...]):
    at, below = restarted(4), restarted(3)
    reason = "redelivery" if answers == ("silent",) else "adopted"
    assert decide(at, *answers, delivery=9, restart_limit=5) == Take(reason, lost=True)
    assert decide(below, *answers, delivery=9, restart_limit=5) == Take(reason)


@pytest.mark.parametrize("answer", ["yes", "nobody"])
def test_a_holder_that_may_be_alive_is_left_alone_at_the_limit_too(answer: Answer):
    assert not isinstance(decide(restarted(9), answer), Take)


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("answers", [("no",), ("nobody", "nobody"), ("silent",)])
def test_beside_a_run_on_its_last_chance_no_other_such_run_is_taken(
    answers: tuple[Answer, ...], limit: int
):
    """Nor one that has lost nobody kept from work, nor one whose failure is to be recorded."""
    for lost in range(limit + 2):
        claims = lost + 1
        held = claims == limit - 1
        beside = decide(restarted(lost), *answers, delivery=9, restart_limit=limit, crowded=True)
        let_go = decide([*restarted(claims), released()], restart_limit=limit, crowded=True)
        assert isinstance(beside, HeldBack) == held, claims
        assert isinstance(let_go, HeldBack) == held, claims
        assert held or isinstance(beside, Take)
    assert decide([started()], restart_limit=limit, crowded=True) == Take("new")


def test_who_is_held_back_for_minutes_is_taken_after_all():
    at = restarted(3)
    few, many = HELD_BACK_DELIVERIES, HELD_BACK_DELIVERIES + 1
    assert decide(at, "no", delivery=few, restart_limit=5, crowded=True) == HeldBack()
    assert decide(at, "no", delivery=many, restart_limit=5, crowded=True) == Take("adopted")


def test_a_release_is_no_loss_and_takes_none_back():
    assert decide([*restarted(4), released()], restart_limit=5) == Take("wake")
    assert decide([*restarted(5), released()], restart_limit=5) == Take("wake", lost=True)


@pytest.mark.parametrize(
    ("moved", "lost"),
    [
        (start_of(PAY, unsafe=False), False),
        (error_of(PAY, via="refused"), False),
        (goes_on(), False),
        (submitted(), True),
        (approved(ASK.marker), True),
    ],
)
def test_only_what_moves_the_run_on_holds_the_limit_off(moved: Record, lost: bool):
    assert decide([*restarted(9), moved], "no", delivery=99) == Take("adopted", lost)


def test_progress_of_a_call_and_its_repeated_start_hold_no_limit_off():
    read = start_of(PAY, unsafe=False)
    again = [claimed(task=TASK), read, progress_of(PAY)]
    records = [*HELD_RUN, read, *again, *again, *again, *again]
    assert decide(records, "no", restart_limit=5) == Take("adopted", lost=True)
    assert decide([*records, result_of(PAY)], "no", restart_limit=5) == Take("adopted")


def test_a_resume_after_the_limit_gives_the_run_its_claims_again():
    end = failed("restart_limit", retriable=True)
    assert decide([*restarted(9), end, resume()], restart_limit=5) == Take("wake")


# ---- what this version can't read ---------------------------------------------------------------


def test_a_run_of_a_newer_version_is_somebody_elses():
    log = Log(started())
    raw = b'{"type":"run.sealed","v":1,"n":2,"id":"ffffffffffff-2","at":"","by":"","prev":"%s"}'
    log.fold.apply(log.raw(raw % log.fold.head.encode()))
    task = Delivery(sequence=TASK, delivery=1, cause=1)
    found = decide_task(
        log.fold,
        task,
        (),
        agent=AGENT,
        accepts=["1"],
        now=NOW,
        ack_wait_s=ACK_WAIT_S,
        restart_limit=5,
    )
    assert isinstance(found, NotMine)
    assert "newer version" in found.why


def test_a_tombstone_is_dropped():
    log = Log(*HELD_RUN, answered(), RunPurged())
    bare = Log()
    bare.fold.apply(log.entries[-1])
    assert bare.fold.started is None
    task = Delivery(sequence=TASK, delivery=1, cause=4)
    found = decide_task(
        bare.fold,
        task,
        (),
        agent=AGENT,
        accepts=["1"],
        now=NOW,
        ack_wait_s=ACK_WAIT_S,
        restart_limit=5,
    )
    assert found == Drop()


def test_every_decision_on_a_task_stands_in_these_tables():
    seen = {type(expected) for _, expected in NEVER_HELD.values()} | {HeldBack}  # below a limit
    for _, *expected in ABOUT_A_CLAIM:
        seen |= {type(one) for one in expected}
    assert seen == set(TaskDecision.__args__)  # type: ignore[attr-defined]
