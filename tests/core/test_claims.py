"""PROTOCOL 4: who may take a run on a shared store."""

from __future__ import annotations

import pytest
from kit.build import (
    ALLOW,
    Log,
    answered,
    approved,
    asking,
    asks,
    claimed,
    done,
    failed,
    model_start,
    parked,
    released,
    reply_of,
    request,
    start_of,
    started,
)

from journal.claims import Answer, AskHolder, HeldBy, Rest, Take, decide_claim
from journal.limits import HOLDER_GRACE_S
from journal.records import Record

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
    "completed": ([started(), claimed(), answered()], Rest()),
    "failed": ([started(), claimed(), failed()], Rest()),
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
