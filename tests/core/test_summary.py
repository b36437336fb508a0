"""R41, R82: state = fold(first record, last commit with its summary, what follows).

Random honest histories: each record is one that its writer's rules allow and `fold.check` accepts.
The fold restored at the last commit is then the full fold, in every attribute and every decision.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.build import (
    AGENT,
    AT,
    RUN,
    Log,
    cancelled_end,
    claimed,
    failed,
    goes_on,
    interrupted_of,
    model_start,
    released,
    result_of,
    spawned,
    start_of,
    started,
    submitted,
)
from kit.histories import LATER, history, seeded, signals_for

from journal.claims import Delivery, decide_claim, decide_task
from journal.codec import Damage, Entry
from journal.errors import RunfoldError
from journal.fold import Fold
from journal.inputs import (
    Queue,
    decide_input,
    decide_placing,
    decide_withdrawal,
    input_body,
    input_state,
)
from journal.limits import INPUTS_QUEUED_MAX, REPEATS_KEPT_S, SUMMARY_BYTES_MAX
from journal.records import Commit, Record, Signal
from journal.signal_rules import decide_signal
from journal.step_state import StepState
from journal.steps import decide_step, make_call
from journal.summary import restored, summary_after, with_summary
from journal.views import run_json, run_state, waiting_on
from journal.waits import instant_text, wakes_at

# ---- the two folds ----------------------------------------------------------------------------


def last_commit(log: Log) -> int | None:
    """The index of the last entry that is a point to restart at."""
    found = [
        index
        for index, entry in enumerate(log.entries)
        if isinstance(entry.record, Commit) and entry.record.summary is not msgspec.UNSET
    ]
    return found[-1] if found else None


def restored_fold(entries: Sequence[Entry], commit: int) -> Fold:
    fold = restored(entries[0], entries[commit])
    for entry in entries[commit + 1 :]:
        fold.apply(entry)
    return fold


def plain(value: Any) -> Any:
    if isinstance(value, StepState):
        return {name: plain(getattr(value, name)) for name in StepState.__slots__}
    if isinstance(value, msgspec.Struct):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]  # their order counts, too
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__name__ == "ModelReply":
        return plain(value.completed)
    return value


CLAIM_ENVELOPE = ("id", "by", "prev", "v")


def deciding(fold: Fold, commit: int) -> dict[str, Any]:
    """All of a fold that decides anything after record `commit`. Left out, each for its reason:

    `_counters`: a writer's id from before the commit can't come again: the chain would break first.
    `claims` from before, other than the live one: they are asked about for a start under them, and
    no step from before a commit is left. The live one without its envelope: nothing asks for it.
    `resumed` from before: it is compared with the n of a wait, and the commit began the last one.
    `content` of inputs that are no longer queued: nothing places them again.
    """
    found = {name: plain(getattr(fold, name)) for name in Fold.__slots__ if name != "_counters"}
    live = fold.claim.n if fold.claim else 0
    kept = {n: claim for n, claim in fold.claims.items() if n > commit or n == live}
    found["claims"] = {n: claim_fields(claim) for n, claim in kept.items()}
    found["claim"] = claim_fields(fold.claim) if fold.claim else None
    found["resumed"] = fold.resumed if fold.resumed > commit else 0
    found["inputs"] = [
        plain(known if known.status == "queued" else msgspec.structs.replace(known, content=None))
        for known in fold.inputs.values()
    ]
    return found


def claim_fields(claim: Record) -> dict[str, Any]:
    return {k: v for k, v in plain(claim).items() if k not in CLAIM_ENVELOPE}


def answer(decide: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is decided, or the refusal with its words."""
    try:
        return plain(decide(*args, **kwargs))
    except RunfoldError as refusal:
        return type(refusal), refusal.message, refusal.hint


def decisions(fold: Fold) -> Iterator[Any]:
    """Everything that is ever decided from a fold, over what could be asked of it."""
    yield wakes_at(fold)
    for now in ("", AT, LATER):
        yield fold.runnable(now), fold.status(now=now), fold.status(held=True, now=now)
        yield plain(run_state(fold, now=now)), run_json(fold, now=now)
        for answers in ((), ("yes",), ("no",), ("silent",), ("nobody", "nobody"), ("nobody",)):
            yield answer(decide_claim, fold, answers, ack_wait_s=30.0, now=now)
            for task in (0, 7):
                delivery = Delivery(sequence=task, delivery=2, cause=fold.n)
                asked = {
                    "agent": AGENT,
                    "accepts": ["1"],
                    "now": now,
                    "ack_wait_s": 30.0,
                    "restart_limit": 2,
                }
                yield answer(decide_task, fold, delivery, answers, **asked)
    for signal in signals_for(fold):
        for request_id in ("new", *fold.requests):
            yield answer(decide_signal, fold, signal, request_id, held=False)
    for request_id in ("new", *fold.inputs):
        yield answer(lambda id: type(decide_input(fold, input_body(id, "steer", 1))), request_id)
        yield answer(decide_withdrawal, fold, request_id)
    for modes in ((), ("steer",), ("follow_up",)):
        yield plain(decide_placing(fold, "p", modes))
    if not fold.finished:
        for step in fold.steps.values():
            if step.starts:
                last = step.last
                call = make_call(last.step, last.kind, last.tool, last.input, unsafe=True)
                yield answer(decide_step, fold, call, earlier_over=True)


def check_restored(log: Log) -> bool:
    commit = last_commit(log)
    if commit is None:
        return False
    again = restored_fold(log.entries, commit)
    n = log.entries[commit].record.n
    full, other = deciding(log.fold, n), deciding(again, n)
    assert {name: (full[name], other[name]) for name in full if full[name] != other[name]} == {}
    assert list(decisions(again)) == list(decisions(log.fold))
    return True


@given(st.randoms(use_true_random=False), st.integers(10, 60))
@settings(max_examples=100)
def test_the_fold_restored_at_the_last_commit_is_the_full_fold_and_decides_the_same(
    chance: random.Random, length: int
):
    check_restored(history(chance.choice, length).log)


@pytest.mark.parametrize("seed", range(60))
def test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record(seed: int):
    log = seeded(seed, 120)
    full = Fold()
    others: list[tuple[int, Fold]] = []
    for entry in log.entries:
        record = entry.record
        full.apply(entry)
        for n, other in others:
            other.apply(entry)
            assert deciding(other, n) == deciding(full, n)
        if isinstance(record, Commit) and record.summary is not msgspec.UNSET:
            others = [*others[-2:], (record.n, restored(log.entries[0], entry))]
    assert full.head == log.fold.head
    assert check_restored(log) == (len(others) > 0)


def test_the_histories_hold_every_record_and_signal_before_and_after_a_commit():
    before: set[str] = set()
    after: set[str] = set()
    points = 0
    for seed in range(100):
        log = seeded(seed, 120)
        commit = last_commit(log)
        points += commit is not None
        for index, entry in enumerate(log.entries):
            record = entry.record
            word = f"signal {record.name}" if isinstance(record, Signal) else entry.type
            (before if index < (commit or 0) else after).add(word)
    signals = {"approve", "reject", "reconcile", "cancel", "resume", "late", "child"}
    holders = {"step.started", "step.progress", "step.completed", "input.placed", "commit", "park"}
    others = {"claim", "release", "input", "input.withdrawn", *(f"signal {one}" for one in signals)}
    assert holders | others <= before
    assert holders | others <= after
    assert points > 50


def test_a_history_is_a_function_of_its_seed():
    assert [e.raw for e in seeded(7).entries] == [e.raw for e in seeded(7).entries]


@pytest.mark.parametrize("seed", range(60))
def test_no_history_leaves_a_run_without_a_next_actor(seed: int):
    """R7: it has ended, or somebody holds it, or a holder has something to do, or it is said what
    it waits for and what ends that."""
    fold = Fold()
    for entry in seeded(seed, 120).entries:
        fold.apply(entry)
        found = waiting_on(fold)
        assert bool(found) == (not fold.finished)
        assert all(one.ended_by for one in found)
        working = fold.claim is not None or fold.runnable()
        assert working == (fold.status() == "running") or fold.finished
        if not working and not fold.finished:
            assert "worker" not in {one.what for one in found}


@pytest.mark.parametrize("seed", range(60))
def test_what_is_settled_about_a_history_never_comes_undone(seed: int):
    """A result, a decision, a child's end, an input's last state: later records change none."""
    fold = Fold()
    settled: dict[Any, Any] = {}
    for entry in seeded(seed, 120).entries:
        before = fold.iteration, fold.attempt
        fold.apply(entry)
        if (fold.iteration, fold.attempt) != before:
            forgotten = {("marker", key[1]) for key in settled if key[1] not in fold.decisions}
            settled = {
                key: was
                for key, was in settled.items()
                if key[0] != "step" and key not in forgotten
            }
        now: dict[Any, Any] = {
            **{("step", s.name): s.completed.n for s in fold.steps.values() if s.completed},
            **{("marker", marker): known.n for marker, known in fold.decisions.items()},
            **{("child", run): end for run, end in fold.children.items() if end is not None},
            **{
                ("input", known.request_id): known.status
                for known in fold.inputs.values()
                if known.status not in ("queued", "placed")
            },
        }
        assert {key: now.get(key, was) for key, was in settled.items()} == settled
        settled |= now


# ---- what is no point to restart at -----------------------------------------------------------


def commit_with_summary(log: Log, **waits: Any) -> Commit:
    commit = log.here(goes_on({"seen": 1}, **waits))
    assert isinstance(commit, Commit)
    return with_summary(log.fold, msgspec.structs.replace(commit, at=log.at))


def size(commit: Commit) -> int:
    return len(msgspec.json.encode(commit.summary))


def with_a_summary_of(bytes: int) -> Log:
    """A run whose next commit would have a summary of exactly this many bytes."""
    log = Log(started(), claimed())
    log.add(submitted("last", content=""))
    per_input = 50_000
    count = 0
    while bytes - size_now(log) > 2 * per_input:
        log.add(submitted(f"i{count}", content="x" * per_input))
        count += 1
    room = bytes - size_now(log)
    other = Log(started(), claimed())
    for body in [submitted("last", content="x" * room)] + [
        submitted(f"i{n}", content="x" * per_input) for n in range(count)
    ]:
        other.add(body)
    return other


def size_now(log: Log) -> int:
    return len(msgspec.json.encode(summary_after(log.fold, Commit(action="continue", at=log.at))))


@pytest.mark.parametrize("more", [0, 1])
def test_a_summary_above_the_limit_is_left_out(more: int):
    log = with_a_summary_of(SUMMARY_BYTES_MAX + more)
    assert size_now(log) == SUMMARY_BYTES_MAX + more
    commit = commit_with_summary(log)
    assert (commit.summary is msgspec.UNSET) == (more == 1)
    if not more:
        assert size(commit) == SUMMARY_BYTES_MAX
        log.add(commit)
        assert check_restored(log)


def test_a_commit_whose_summary_was_left_out_is_a_commit_all_the_same():
    log = with_a_summary_of(SUMMARY_BYTES_MAX + 1)
    log.add(commit_with_summary(log))
    assert log.fold.iteration == 1
    with pytest.raises(Damage, match="no commit to restart at"):
        restored(log.entries[0], log.entries[-1])


@pytest.mark.parametrize("body", [goes_on(), failed(), cancelled_end(), claimed("w2"), released()])
def test_only_a_commit_with_a_summary_that_goes_on_is_a_point_to_restart_at(body: Record):
    log = Log(started(), claimed(), body)
    with pytest.raises(Damage, match="record 3 is no commit to restart at"):
        restored(log.entries[0], log.entries[2])


def test_a_journal_is_restored_from_its_very_first_record():
    log = Log(started(), claimed())
    log.add(commit_with_summary(log))
    with pytest.raises(Damage, match=r"the first record is no run\.started"):
        restored(log.entries[1], log.entries[2])


def test_a_summary_with_a_claim_that_is_none_is_damage():
    log = Log(started(), claimed())
    commit = commit_with_summary(log)
    assert commit.summary is not msgspec.UNSET
    summary = msgspec.structs.replace(commit.summary, claim={"worker": 7})
    log.add(msgspec.structs.replace(commit, summary=summary))
    with pytest.raises(Damage, match="sums up no claim"):
        restored(log.entries[0], log.entries[2])


def test_what_follows_must_chain_to_the_commit():
    log = Log(started(), claimed())
    log.add(commit_with_summary(log))
    log.add(model_start())
    log.add(result_of("llm/1"))
    fold = restored(log.entries[0], log.entries[2])
    with pytest.raises(Damage, match="record 4 is missing"):
        fold.apply(log.entries[4])


# ---- what is dropped, and when ----------------------------------------------------------------


def day(days: float) -> str:
    return instant_text(datetime(2026, 1, 2, tzinfo=UTC) + timedelta(days=days))


def test_repeats_are_known_for_seven_days_over_commits_and_then_forgotten():
    """R62: an input or signal sent again within seven days is a repeat, not a second one."""
    assert REPEATS_KEPT_S >= 7 * 86400
    log = Log()
    log.at = day(0)
    for body in (started(), claimed(), submitted("i1"), _kept()):
        log.add(body)
    log.add(_placed(log))
    for days in (1, 7, REPEATS_KEPT_S / 86400):
        log.at = day(days)
        log.add(commit_with_summary(log))
        fold = restored(log.entries[0], log.entries[-1])
        assert "i1" in fold.inputs
        assert "r-kept" in fold.requests
    log.at = day(REPEATS_KEPT_S / 86400 + 0.01)
    log.add(commit_with_summary(log))
    fold = restored(log.entries[0], log.entries[-1])
    assert (fold.inputs, log.fold.inputs) == ({}, {})
    assert "r-kept" in fold.requests  # its gate may still come


def _kept() -> Signal:
    return Signal(
        name="approve", request_id="r-kept", payload={"marker": f"{RUN}/9/9@1.{'a' * 16}"}
    )


def _placed(log: Log) -> Record:
    placing = decide_placing(log.fold, "llm/1", ())
    assert placing is not None
    return placing


def test_a_queued_input_is_never_forgotten():
    log = Log()
    log.at = day(0)
    for body in (started(), claimed(), submitted("i1", content="still here")):
        log.add(body)
    log.at = day(400)
    log.add(commit_with_summary(log))
    fold = restored(log.entries[0], log.entries[-1])
    assert [known.content for known in fold.queued()] == ["still here"]


def test_a_decision_that_waits_for_its_gate_is_never_forgotten():
    """R60: it was accepted and is kept for the next gate it reaches; a contrary one is refused."""
    log = Log()
    log.at = day(0)
    kept = _kept()
    for body in (started(), claimed(), kept):
        log.add(body)
    log.at = day(9)
    log.add(commit_with_summary(log))
    assert kept.payload["marker"] in log.fold.decisions


@pytest.mark.parametrize("days", [0, 400])
def test_children_interrupted_writes_and_a_cancel_are_never_forgotten(days: int):
    log = Log()
    log.at = day(0)
    pay = start_of("0/1", "pay")
    for body in (started(), claimed(), spawned("0/0", "c1"), pay, interrupted_of("0/1")):
        log.add(body)
    log.add(Signal(name="cancel", request_id="r", payload={"reason": "enough"}))
    log.at = day(days)
    log.add(commit_with_summary(log, until_child="c1"))
    fold = restored(log.entries[0], log.entries[-1])
    assert fold.children == {"c1": None}
    assert fold.interrupted == {pay.digest}
    assert fold.cancel is not None
    assert fold.cancel.reason == "enough"


def test_a_run_with_as_many_inputs_as_are_allowed_is_a_point_to_restart_at_if_they_are_small():
    log = Log(started(), claimed())
    for n in range(INPUTS_QUEUED_MAX):
        decision = decide_input(log.fold, input_body(f"i{n}", "steer", "go on"))
        assert isinstance(decision, Queue)
        log.add(decision.body)
    log.add(commit_with_summary(log))
    assert check_restored(log)


def test_only_the_content_of_a_done_input_is_left_to_the_journal():
    """A holder needs it no more; a door reads the whole journal, and so answers a repeat (R62)."""
    log = Log(started(), claimed(), submitted("i1", content="hurry"))
    log.add(_placed(log))
    log.add(commit_with_summary(log))
    again = restored_fold(log.entries, 4)
    one, other = log.fold.inputs["i1"], again.inputs["i1"]
    assert (one.content, other.content) == ("hurry", None)
    assert input_state(one) == msgspec.structs.replace(input_state(other), content="hurry")
