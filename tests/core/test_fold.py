"""State is a fold (R6, R13, R19): what an honest journal means, and that no other one is taken."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import build
from kit.build import (
    ALLOW,
    Log,
    answered,
    approved,
    asking,
    asks,
    claimed,
    denying,
    done,
    error_of,
    failed,
    model_start,
    parked,
    rejected,
    released,
    reply_of,
    request,
    result_of,
    retry,
    start_of,
    started,
)

from journal.codec import Damage, Entry, seal
from journal.fold import Fold
from journal.messages import Reply
from journal.records import Commit, Interrupted, Record, RunPurged, StepCompleted, StepError
from journal.step_state import call_step

READ, PAY = "tool/1/0/lookup", "tool/1/1/pay"
ASK = asking(1, 1, "pay")
REPLY = asks(request("lookup", {}), request("pay", {}))


def asked() -> list[Record]:
    """A run whose model asked for a read and for a write that needs approval."""
    return [started(), model_start(), reply_of(1, REPLY, ALLOW, ASK)]


def read_done() -> list[Record]:
    return [start_of(READ, "lookup", unsafe=False), result_of(READ)]


def whole() -> Log:
    """An honest journal of a fleet: two holders, an approval, an unknown write, its retry."""
    return Log(
        started(),
        claimed("w1"),
        model_start(),
        reply_of(1, REPLY, ALLOW, ASK),
        *read_done(),
        parked("approval"),
        approved(ASK.marker),
        claimed("w2"),
        start_of(PAY, permit=8),
        claimed("w3"),
        parked("reconcile"),
        retry(PAY, 10),
        claimed("w4"),
        start_of(PAY, permit=13),
        result_of(PAY),
        answered(),
    )


def fold_of(entries: list[Entry]) -> Fold:
    fold = Fold()
    for entry in entries:
        fold.apply(entry)
    return fold


def contents(value: Any) -> Any:
    """Everything a fold holds, as plain values, to compare two of them."""
    slots = getattr(type(value), "__slots__", None)
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    if slots and not isinstance(value, type):
        return {name: contents(getattr(value, name)) for name in slots}
    if isinstance(value, dict):
        return {key: contents(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [contents(item) for item in value]
    return value


def refuse(log: Log, entry: Entry, why: str) -> None:
    """The entry is damage at the log's end, and leaves the fold as it was."""
    before = contents(log.fold)
    with pytest.raises(Damage, match=why):
        log.fold.apply(entry)
    assert contents(log.fold) == before


# ---- the chain (R13, R19) ---------------------------------------------------------------------


def test_an_honest_journal_folds_to_its_end():
    fold = fold_of(whole().entries)
    assert (fold.n, fold.finished, fold.status(), fold.model_calls) == (17, True, "completed", 1)


def test_a_gap_names_the_missing_records():
    entries = whole().entries
    log = Log(started())
    refuse(log, entries[4], "record 2 to 4 is missing: record 5 follows 1")


def test_a_record_that_stands_twice_is_damage():
    log = Log(started(), model_start())
    refuse(log, log.entries[-1], "missing: record 2 follows 2")


def test_an_edited_record_is_found_by_the_hash_in_its_successor():
    entries = Log(*asked()).entries
    raw = entries[0].raw.replace(b"VPN is down", b"VPN is up!!")
    fold = Fold()
    fold.apply(Entry(build.Log().raw(raw).record, raw))
    with pytest.raises(Damage, match="record 2 does not follow record 1: its hash differs"):
        fold.apply(entries[1])


def test_a_record_of_another_journal_is_found_by_its_hash():
    other = Log(started("other input"), model_start())
    refuse(Log(started()), other.entries[1], "hash differs")


def test_the_first_record_names_no_predecessor():
    record, raw = seal(
        started(), n=1, id="0123456789ab-1", at=build.AT, by="x", prev="f" * 32, claim=0
    )
    refuse(Log(), Entry(record, raw), "hash differs")


def repeating(counter: int) -> tuple[Log, Entry]:
    log = Log(started())
    log.add(model_start(), nonce="aaaaaaaaaaaa")
    record, raw = seal(
        result_of("llm/1"),
        n=3,
        id=f"aaaaaaaaaaaa-{counter}",
        at=build.AT,
        by="x",
        prev=log.fold.head,
    )
    return log, Entry(record, raw)


@pytest.mark.parametrize("counter", [0, 1, 2])
def test_a_writer_id_that_was_used_is_damage(counter: int):
    log, entry = repeating(counter)
    refuse(log, entry, f"record 3 repeats the writer id aaaaaaaaaaaa-{counter}")


def test_a_writer_may_skip_counters():
    log, entry = repeating(9)
    log.fold.apply(entry)
    assert log.fold.n == 3


@given(st.data())
def test_any_reordering_removal_or_repeat_in_an_honest_journal_is_damage(data: st.DataObject):
    entries = whole().entries
    picks = st.lists(st.integers(0, len(entries) - 1), min_size=1, max_size=len(entries) + 2)
    order = data.draw(st.permutations(range(len(entries))) | picks)
    if list(order) == list(range(len(order))):
        return  # a prefix: an honest journal that is not as long
    with pytest.raises(Damage):
        fold_of([entries[index] for index in order])


@pytest.mark.parametrize("gone", range(16))
def test_a_missing_record_is_damage_wherever_it_stood(gone: int):
    entries = whole().entries
    with pytest.raises(Damage, match="is missing"):
        fold_of(entries[:gone] + entries[gone + 1 :])


@pytest.mark.parametrize("length", range(1, 18))
def test_every_prefix_of_an_honest_journal_is_one(length: int):
    assert fold_of(whole().entries[:length]).n == length


# ---- claims (R49) -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [start_of(READ, "lookup"), result_of("llm/1"), parked(), released(), answered()]
)
@pytest.mark.parametrize("claim", [0, 2])
def test_a_holders_record_under_a_fenced_claim_is_damage(body: Record, claim: int):
    log = Log(started(), claimed("w1"), model_start(), claimed("w2"))
    refuse(log, log.sealed(body, claim=claim), f"under claim {claim}, not 4")


@pytest.mark.parametrize("end", [released(), parked()])
def test_a_holders_record_after_its_claim_ended_is_damage(end: Record):
    log = Log(started(), claimed("w1"), end)
    refuse(log, log.sealed(model_start(), claim=2), "under claim 2, not 0")


def test_a_claim_that_nobody_made_is_damage():
    log = Log(started())
    refuse(log, log.sealed(model_start(), claim=1), "under claim 1, not 0")


def test_signals_need_no_claim_and_end_none():
    log = Log(*asked()[:1], claimed("w1"), *asked()[1:], approved(ASK.marker))
    assert log.fold.claim is not None and log.fold.claim.n == 2


# ---- the order every writer keeps -------------------------------------------------------------


def test_a_run_starts_at_its_first_record():
    refuse(Log(), Log().sealed(model_start()), "a run starts once, at record 1")


def test_a_run_starts_once():
    log = Log(started())
    refuse(log, log.sealed(started()), "a run starts once, at record 1")


ANY_BODY = [model_start(2), result_of("llm/2"), approved("x"), claimed(), answered(), failed()]


@pytest.mark.parametrize("permit", [0, 3, 6, 9])
def test_an_unsafe_step_starts_again_only_by_the_retry_of_its_last_start(permit: int):
    log = Log(*WRITE, retry(PAY, 7))
    refuse(log, log.sealed(start_of(PAY, permit=permit)), "without a permit")
    log.add(start_of(PAY, permit=8))
    refuse(log, log.sealed(start_of(PAY, permit=8)), "without a permit")


def test_an_unsafe_step_that_a_person_called_done_never_starts_again():
    log = Log(*WRITE, done(PAY, 7))
    refuse(log, log.sealed(start_of(PAY, permit=8)), "without a permit")


def test_a_safe_step_starts_again_without_asking():
    log = Log(*asked(), *[start_of(READ, "lookup", unsafe=False)] * 3)
    assert len(log.fold.steps[READ].starts) == 3


@pytest.mark.parametrize("end", [answered(), failed()], ids=["completed", "failed"])
@pytest.mark.parametrize("body", ANY_BODY, ids=lambda body: type(body).__name__)
def test_a_record_after_the_end_is_damage(end: Record, body: Record):
    log = Log(started(), end)
    refuse(log, log.sealed(body), "stands after the run's end")


def test_a_second_result_is_damage():
    log = Log(*asked(), *read_done())
    refuse(log, log.sealed(result_of(READ)), f"completes {READ} a second time")


def test_a_start_after_the_result_is_damage():
    log = Log(*asked(), *read_done())
    refuse(log, log.sealed(start_of(READ, "lookup")), "again after its result")


def test_a_result_of_a_step_that_never_started_is_damage():
    log = Log(*asked())
    refuse(log, log.sealed(result_of(READ)), f"completes {READ}, which never started")


def test_a_refused_call_needs_no_start_and_never_gets_one():
    log = Log(*asked(), error_of(PAY, via="refused"))
    refuse(log, log.sealed(start_of(PAY)), "again after its result")


@pytest.mark.parametrize(
    "body",
    [
        StepCompleted(step=READ),
        StepCompleted(step=READ, result=1, error=StepError(type="x", message="y")),
        StepCompleted(step=READ, result=1, interrupted=Interrupted()),
        StepCompleted(step=READ, error=StepError(type="x", message="y"), interrupted=Interrupted()),
    ],
    ids=["none", "result and error", "result and interrupted", "error and interrupted"],
)
def test_a_completed_step_holds_exactly_one_of_result_error_interrupted(body: Record):
    log = Log(*asked(), start_of(READ, "lookup"))
    refuse(log, log.sealed(body), "not exactly one of result, error, interrupted")


@pytest.mark.parametrize("verdicts", [(ALLOW,), (ALLOW, ALLOW, ALLOW)])
def test_a_reply_without_one_verdict_for_each_call_is_damage(verdicts: Any):
    log = Log(started(), model_start())
    refuse(log, log.sealed(reply_of(1, REPLY, *verdicts)), "verdicts")


def test_verdicts_on_what_is_no_reply_are_damage():
    log = Log(started(), model_start())
    body = StepCompleted(step="llm/1", result={"calls": "none"}, verdicts=(ALLOW,))
    refuse(log, log.sealed(body), "verdicts on no reply")


@pytest.mark.parametrize("signal", [retry(READ, 3), retry(PAY, 2), done("llm/9", 2)])
def test_a_reconcile_of_a_start_that_is_not_there_is_damage(signal: Record):
    log = Log(*asked())
    refuse(log, log.sealed(signal), "reconciles a start that is not there")


# ---- what a newer version or a purge left -----------------------------------------------------


def newer(log: Log, type: str = "run.sealed", **fields: Any) -> Entry:
    n = log.fold.n + 1
    record = {"type": type, "v": 1, "n": n, "id": f"ffffffffffff-{n}", "at": build.AT, "by": "w9"}
    return log.raw(msgspec.json.encode(record | {"prev": log.fold.head} | fields))


def test_after_a_record_of_a_newer_version_only_the_chain_is_followed():
    log = Log(started())
    log.fold.apply(newer(log))
    log.fold.apply(log.sealed(result_of("no such step"), claim=77))
    assert (log.fold.n, log.fold.status(), log.fold.steps) == (3, "newer", {})
    assert log.fold.newer is not None and "run.sealed" in log.fold.newer


def test_a_record_of_a_newer_version_must_chain_like_any_other():
    log = Log(started())
    refuse(log, newer(log, prev="0" * 32), "hash differs")
    refuse(log, newer(log, n=5), "is missing")


def test_a_run_whose_first_record_is_newer_is_newer():
    log = Log()
    log.fold.apply(newer(log, "run.started", v=2))
    assert log.fold.status() == "newer"


def test_a_tombstone_stands_first_whatever_its_ordinal():
    log = Log(started(), answered(), RunPurged())
    fold = fold_of(log.entries[-1:])
    assert (fold.n, fold.finished, fold.started) == (3, True, None)
    assert fold.purged is not None


@pytest.mark.parametrize("before", [[started()], [started(), answered(), RunPurged()]])
def test_a_tombstone_stands_once_and_only_behind_an_end(before: list[Record]):
    log = Log(*before)
    refuse(log, log.sealed(RunPurged()), "record")


def test_nothing_follows_a_tombstone():
    log = Log(started(), answered(), RunPurged())
    refuse(log, log.sealed(approved(ASK.marker)), "stands after the run's end")
    fold = fold_of(log.entries[-1:])
    for body in (started(), claimed()):
        with pytest.raises(Damage):
            fold.apply(log.sealed(body))


# ---- state ------------------------------------------------------------------------------------

WRITE = [*asked(), *read_done(), approved(ASK.marker), start_of(PAY, permit=6)]
UNKNOWN = [*asked(), start_of(PAY)]

STATUS: dict[str, tuple[list[Record], str]] = {
    "started": ([started()], "running"),
    "a model call cut off": ([started(), model_start()], "running"),
    "a read is due": (asked(), "running"),
    "a read cut off": ([*asked(), start_of(READ, "lookup", unsafe=False)], "running"),
    "only the approval is missing": ([*asked(), *read_done()], "awaiting_approval"),
    "approved": ([*asked(), *read_done(), approved(ASK.marker)], "running"),
    "rejected": ([*asked(), *read_done(), rejected(ASK.marker)], "running"),
    "a write cut off": (WRITE, "indeterminate"),
    "a write cut off, reconciled": ([*WRITE, done(PAY, 7)], "running"),
    "a write cut off, a retry permitted": ([*WRITE, retry(PAY, 7)], "running"),
    "the retry cut off": ([*WRITE, retry(PAY, 7), start_of(PAY, permit=8)], "indeterminate"),
    "a write done": ([*WRITE, result_of(PAY)], "running"),
    "a write failed for good": ([*WRITE, error_of(PAY, "tool_error")], "running"),
    "claimed": ([started(), claimed()], "running"),
    "claimed, a write in progress": ([started(), claimed(), start_of(PAY)], "running"),
    "released in a write": ([started(), claimed(), start_of(PAY), released()], "indeterminate"),
    "parked": ([*asked(), *read_done(), claimed(), parked()], "awaiting_approval"),
    "parked, then approved": (
        [*asked(), *read_done(), claimed(), parked(), approved(ASK.marker)],
        "running",
    ),
    "completed": ([started(), answered()], "completed"),
    "failed": ([started(), failed()], "failed"),
    "cancelled": ([started(), Commit(action="cancel", reason="asked to")], "cancelled"),
    "completed, then purged": ([started(), answered(), RunPurged()], "completed"),
}


@pytest.mark.parametrize("case", STATUS)
def test_the_status_word(case: str):
    records, word = STATUS[case]
    assert Log(*records).fold.status() == word


@pytest.mark.parametrize("case", STATUS)
def test_a_run_that_somebody_holds_is_running_until_its_end(case: str):
    records, word = STATUS[case]
    ended = word in ("completed", "failed", "cancelled")
    assert Log(*records).fold.status(held=True) == (word if ended else "running")


@pytest.mark.parametrize("case", STATUS)
def test_a_run_waits_for_a_person_exactly_where_a_holder_has_nothing_to_do(case: str):
    records, word = STATUS[case]
    fold = Log(*records).fold
    if not fold.finished and fold.claim is None:
        assert fold.runnable() == (word == "running")


def test_unknown_writes_are_named_oldest_first_before_what_is_pending():
    other = "tool/1/0/mail"
    fold = Log(*asked(), start_of(other, "mail"), start_of(PAY)).fold
    assert [step.name for step in fold.unknown()] == [other, PAY]
    assert fold.status() == "indeterminate"


def test_a_safe_start_is_never_unknown():
    fold = Log(*asked(), start_of(READ, "lookup", unsafe=False)).fold
    assert fold.unknown() == []
    assert list(fold.open) == [READ]


def test_only_the_first_decision_on_a_marker_counts():
    log = Log(*asked(), *read_done(), rejected(ASK.marker))
    log.add(approved(ASK.marker))
    assert log.fold.decisions[ASK.marker].name == "reject"


def test_pending_are_the_asked_calls_of_the_last_reply_that_nobody_decided():
    log = Log(
        started(),
        model_start(),
        reply_of(
            1,
            asks(request("pay", {"a": 1}), request("lookup"), request("pay", {"a": 2})),
            asking(1, 0, "pay", "a" * 16),
            denying(),
            asking(1, 2, "pay", "b" * 16),
        ),
    )
    assert [index for index, _ in log.fold.pending()] == [0, 2]
    log.add(rejected(asking(1, 0, "pay", "a" * 16).marker))
    assert [index for index, _ in log.fold.pending()] == [2]
    log.add(error_of("tool/1/2/pay", via="refused"))
    assert log.fold.pending() == []


def test_a_later_reply_ends_what_was_pending():
    log = Log(*asked(), model_start(2), reply_of(2, Reply(text="never mind")))
    assert log.fold.pending() == []


def test_every_model_call_that_was_started_counts():
    fold = Log(started(), model_start(), model_start(), result_of("llm/1"), model_start(2)).fold
    assert fold.model_calls == 3


@pytest.mark.parametrize(
    ("tool", "step"), [("pay", "tool/3/1/pay"), ("a/b", "tool/3/1/?"), ("", "tool/3/1/?")]
)
def test_a_call_has_its_place_as_its_step_name(tool: str, step: str):
    assert call_step(3, 1, tool) == step


@pytest.mark.parametrize("length", range(1, 17))
def test_a_copy_shares_nothing_that_changes(length: int):
    entries = whole().entries
    fold = fold_of(entries[:length])
    copy = fold.copy()
    assert contents(copy) == contents(fold)
    for entry in entries[length:]:
        copy.apply(entry)
    assert contents(fold) == contents(fold_of(entries[:length]))
    assert contents(copy) == contents(fold_of(entries))


def test_claims_are_kept_with_their_workers():
    claims = whole().fold.claims
    assert {n: claim.worker for n, claim in claims.items()} == {
        2: "w1",
        9: "w2",
        11: "w3",
        14: "w4",
    }
