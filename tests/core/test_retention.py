"""R15: what is purged, and what never is, whoever asks and whatever the clocks say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import product
from typing import Any, get_args

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
    released,
    resume,
    start_of,
    started,
    submitted,
)
from msgspec import structs

from journal.fold import Fold
from journal.records import Record, RunPurged
from journal.retention import (
    Evidence,
    Finish,
    Keep,
    Parent,
    Purge,
    PurgeDecision,
    Retention,
    decide_purge,
)
from journal.store import Stamp

DAY = timedelta(days=1)
END = datetime(2026, 3, 1, 12, tzinfo=UTC)
MONTH = Retention()
"""What is asked for where nothing is said: runs that ended 30 days ago."""

HELD: list[Record] = [started(), claimed()]
CHILD = structs.replace(started(), parent="p1", depth=1)
JOURNALS: dict[str, list[Record]] = {
    "nothing": [],
    "just started": [started()],
    "held": HELD,
    "released": [*HELD, released()],
    "in a write": [*HELD, start_of("pay/1")],
    "waits for a person": [*HELD, start_of("pay/1"), parked("reconcile")],
    "waits for a retry": [*HELD, parked("retry", until="2026-01-01T00:00:00.000Z")],
    "paused": [*HELD, parked("pause")],
    "waits for an input": [*HELD, goes_on(until_input=True)],
    "waits for a child": [*HELD, goes_on(until_child="a1.kid")],
    "has an input": [*HELD, submitted()],
    "is to be cancelled": [*HELD, cancel()],
    "was reopened": [*HELD, failed(retriable=True), resume()],
    "completed": [*HELD, answered()],
    "failed": [*HELD, failed()],
    "failed, may go on": [*HELD, failed(retriable=True)],
    "cancelled": [*HELD, cancel(), cancelled_end()],
    "has a tombstone": [*HELD, answered(), RunPurged()],
}
ENDED = ("completed", "failed", "failed, may go on", "cancelled")


def folded(*bodies: Record, at: datetime = END) -> Fold:
    """The journal, whose every record says it was written at this instant."""
    log = Log()
    log.at = at.isoformat()
    for body in bodies:
        log.add(body)
    return log.fold


def found(
    fold: Fold,
    *,
    age: timedelta = 31 * DAY,
    stored: datetime = END,
    ahead: timedelta = timedelta(),
    parent: Parent = "none",
    flaw: str = "",
) -> Evidence:
    """`age` of the end by the store's clock; our own is `ahead` of it."""
    now = stored + age
    stamp = Stamp(stored, now)
    return Evidence(n=fold.n, stamp=stamp, now=now + ahead, parent=parent, flaw=flaw)


def decided(journal: str, wanted: Retention = MONTH, **about: Any) -> PurgeDecision:
    fold = folded(*JOURNALS[journal])
    return decide_purge(fold, wanted, found(fold, **about))


def kept(decision: PurgeDecision) -> str:
    assert isinstance(decision, Keep), decision
    assert decision.text
    return decision.why


# ---- what may go --------------------------------------------------------------------------------


@pytest.mark.parametrize("journal", JOURNALS)
def test_only_what_has_ended_goes_and_a_purge_that_was_cut_off_is_finished(journal: str):
    decision = decided(journal)
    if journal in ENDED:
        assert decision == Purge()
    elif journal == "has a tombstone":
        assert decision == Finish()
    else:
        assert kept(decision) == ("missing" if journal == "nothing" else "running")


def test_a_tombstone_alone_is_finished_with():
    fold = Fold()
    fold.apply(Log(*JOURNALS["has a tombstone"]).entries[-1])
    assert decide_purge(fold, MONTH, found(fold)) == Finish()


@pytest.mark.parametrize("journal", ENDED)
def test_what_a_newer_version_wrote_to_is_kept(journal: str):
    log = Log(*HELD)
    raw = log.sealed(submitted()).raw.replace(b'"input"', b'"thought"', 1)
    entry = log.raw(raw)
    log.fold.apply(entry)
    assert kept(decide_purge(log.fold, Retention(flawed=True), found(log.fold))) == "newer"


@pytest.mark.parametrize("journal", [*ENDED, "has a tombstone"])
def test_what_an_audit_finds_fault_with_is_kept_unless_it_is_asked_for(journal: str):
    flaw = "record 2: claim: nobody"
    decision = decided(journal, flaw=flaw)
    assert kept(decision) == "flawed" and isinstance(decision, Keep)
    assert flaw in decision.text
    forced = decided(journal, Retention(flawed=True), flaw=flaw)
    assert forced == (Purge() if journal in ENDED else Finish())


def test_a_run_that_ended_anew_while_it_was_looked_at_is_kept():
    """Its stamp and its audit are those of another end."""
    fold = folded(*HELD, failed(retriable=True))
    seen = found(fold)
    again = folded(*HELD, failed(retriable=True), resume(), claimed(), answered())
    assert decide_purge(fold, MONTH, seen) == Purge()
    assert kept(decide_purge(again, MONTH, seen)) == "changed"


# ---- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "why"),
    [(29.9 * DAY, "young"), (30 * DAY, None), (31 * DAY, None), (-DAY, "young")],
)
def test_a_run_is_kept_for_its_time_from_its_end(age: timedelta, why: str | None):
    decision = decided("completed", age=age)
    assert decision == Purge() if why is None else kept(decision) == why


CLOCKS = """
    store's clock | ours           | the end's record | what becomes of a run that ended 29 days ago
    right         | right          | right            | kept
    right         | 2 days ahead   | right            | kept
    2 days ahead  | right          | right            | kept
    right         | 2 days ahead   | 2 days behind    | kept
    right         | 900 days ahead | 900 days behind  | kept
    2 days ahead  | 2 days ahead   | right            | purged
"""


@pytest.mark.parametrize("row", CLOCKS.strip().split("\n")[1:], ids=str.strip)
def test_one_clock_that_is_wrong_never_hastens_a_purge(row: str):
    """Of the store and of this process both must be wrong, and in one way."""
    store, ours, record, outcome = (word.strip() for word in row.split("|"))
    real_now = END + 29 * DAY
    fold = folded(*JOURNALS["completed"], at=shifted(END, record))
    stamp = Stamp(END, shifted(real_now, store))
    evidence = Evidence(n=fold.n, stamp=stamp, now=shifted(real_now, ours), parent="none")
    decision = decide_purge(fold, MONTH, evidence)
    assert decision == Purge() if outcome == "purged" else kept(decision) == "young"


def test_a_stamp_that_was_set_too_early_does_not_hasten_it_either():
    fold = folded(*JOURNALS["completed"])
    evidence = found(fold, stored=END - 2 * DAY, age=31 * DAY)
    assert kept(decide_purge(fold, MONTH, evidence)) == "young"


def shifted(instant: datetime, clock: str) -> datetime:
    if clock == "right":
        return instant
    days, _, way = clock.split(" ")
    return instant + int(days) * DAY * (1 if way == "ahead" else -1)


def test_a_record_from_the_future_keeps_its_run_and_breaks_nothing():
    """`at` is its writer's word. It may delay a purge; `9999` and garbage must not stop a pass."""
    for year in (2027, 9999):
        fold = folded(*JOURNALS["completed"], at=datetime(year, 12, 31, tzinfo=UTC))
        assert kept(decide_purge(fold, MONTH, found(fold))) == "young"
    log = Log()
    log.at = "yesterday"
    for body in JOURNALS["completed"]:
        log.add(body)
    assert decide_purge(log.fold, MONTH, found(log.fold)) == Purge()


def test_a_failure_that_resume_could_reopen_has_a_time_of_its_own():
    named = Retention(keep_s=0)
    assert kept(decided("failed, may go on", named, age=29 * DAY)) == "resumable"
    assert decided("failed, may go on", named, age=30 * DAY) == Purge()
    assert decided("failed", named, age=DAY) == Purge()
    forced = Retention(keep_s=0, resumable_s=0)
    assert decided("failed, may go on", forced, age=timedelta()) == Purge()


# ---- children -----------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", get_args(Parent))
@pytest.mark.parametrize(
    "end", [answered(), failed(), cancelled_end()], ids=["done", "fail", "off"]
)
def test_a_child_goes_only_behind_its_parents_tombstone(parent: Parent, end: Record):
    """One that is there may ask for its answer, or be reopened to do so; and must be told."""
    fold = folded(CHILD, claimed(), *([cancel()] if end == cancelled_end() else []), end)
    decision = decide_purge(fold, MONTH, found(fold, parent=parent))
    if parent in ("none", "purged"):
        assert decision == Purge()
    else:
        assert kept(decision) == {"there": "child", "missing": "orphan"}[parent]


# ---- what is asked for --------------------------------------------------------------------------


def test_only_the_statuses_and_the_agent_that_are_asked_for_go():
    for status in ("completed", "failed", "cancelled"):
        wanted = Retention(statuses=frozenset({status}))
        gone = {name for name in ENDED if decided(name, wanted) == Purge()}
        assert gone == {name for name in ENDED if name.startswith(status)}
    assert kept(decided("completed", Retention(agent="other"))) == "other"
    assert decided("completed", Retention(agent="helpdesk")) == Purge()


# ---- all of it ----------------------------------------------------------------------------------


def test_whatever_is_purged_had_ended_was_old_by_every_clock_and_nobody_needs_it():
    """Every state there is here, with every evidence, and everything that can be asked for."""
    ages = [timedelta(), 29 * DAY, 31 * DAY]
    wants = [
        Retention(keep_s=keep_s, resumable_s=resumable_s, flawed=flawed)
        for keep_s, resumable_s in ((0.0, 0.0), (0.0, MONTH.keep_s), (MONTH.keep_s, MONTH.keep_s))
        for flawed in (False, True)
    ]
    parents: tuple[Parent, ...] = get_args(Parent)
    flaws = ("", "record 1: first: a flaw")
    purged = looked_at = 0
    for bodies in JOURNALS.values():
        fold = folded(*bodies)
        for age, ahead, parent, flaw, wanted in product(
            ages, (-3 * DAY, timedelta(), 3 * DAY), parents, flaws, wants
        ):
            evidence = found(fold, age=age, ahead=ahead, parent=parent, flaw=flaw)
            looked_at += 1
            if decide_purge(fold, wanted, evidence) != Purge():
                continue
            purged += 1
            needed = wanted.resumable_s if fold.can_reopen else wanted.keep_s
            assert fold.end is not None and fold.purged is None and fold.newer is None
            assert needed == 0 or min(age, age + ahead) >= timedelta(seconds=needed)
            assert parent in ("none", "purged")
            assert not flaw or wanted.flawed
    assert looked_at > 5000 and purged > 300
