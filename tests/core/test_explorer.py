"""R77: every interleaving of two holders, people at doors and crashes, over the pure decisions.

With tasks, timers and the SIGNALS stream: test_explorer_tasks.py. `RUNFOLD_EXPLORE=deep` looks
further: see docs/guarantees.md for how far, and what it costs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from typing import Any

import pytest
from kit.build import RUN
from kit.exploring.bounds import Bounds, Rules, Violation
from kit.exploring.plots import WRITE
from kit.exploring.search import Explorer
from kit.exploring.tally import Tally, tallied

from journal.errors import RunfoldError
from journal.fold import Fold
from journal.records import InputPlaced
from journal.signal_rules import Append, Repeated, decide_signal
from journal.signals import AnySignal, Reconcile
from journal.steps import Ask, Call, StepDecision, decide_step
from journal.steps import Run as RunIt

DEEP = os.environ.get("RUNFOLD_EXPLORE") == "deep"
LOCK = Bounds(shared=False, records=22 if DEEP else 18, crashes=3 if DEEP else 2, unknowns=2)
CLAIMS = [
    Bounds(shared=True, records=16, crashes=1, unknowns=0, lies=1),
    Bounds(shared=True, records=14, crashes=2, unknowns=0, lies=1),
    Bounds(shared=True, records=14, crashes=1, unknowns=1, lies=1),
    Bounds(shared=True, records=16, crashes=0, unknowns=0, lies=2),
]
DEEP_CLAIMS = [
    Bounds(shared=True, records=16, crashes=2, unknowns=1, lies=1),
    Bounds(shared=True, records=16, crashes=1, unknowns=1, lies=2),
    Bounds(shared=True, records=18, crashes=2, unknowns=0, lies=2),
]
BOUNDS = [LOCK, *(DEEP_CLAIMS if DEEP else CLAIMS)]

MORE = 2 if DEEP else 0
CANCELLED = [
    Bounds(shared=True, records=13 + MORE, crashes=1, unknowns=0, cancels=True, policy="interrupt"),
    Bounds(shared=True, records=12 + MORE, crashes=1, unknowns=1, lies=0, cancels=True),
    Bounds(shared=False, records=12 + MORE, cancels=True, policy="interrupt"),
]
WITH_INPUTS = [
    Bounds(shared=True, records=12 + MORE, crashes=1, unknowns=0, lies=0, inputs=True),
    Bounds(shared=True, records=11 + MORE, crashes=0, unknowns=1, lies=0, inputs=True),
    Bounds(
        shared=True, records=11 + MORE, crashes=1, unknowns=0, lies=0, inputs=True, cancels=True
    ),
    Bounds(shared=False, records=11 + MORE, inputs=True, cancels=True),
]
REPORTED = [
    Bounds(shared=True, records=16 + MORE, crashes=1, unknowns=0, late=True),
    Bounds(shared=True, records=14 + MORE, crashes=1, unknowns=0, late=True, policy="interrupt"),
    Bounds(shared=True, records=13 + MORE, crashes=1, unknowns=0, late=True, cancels=True),
]
DRAINED = [Bounds(shared=True, records=12 + MORE, crashes=1, unknowns=0, drains=1)]


@pytest.fixture(scope="module", name="tally")
def _tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    yield from tallied(request)


ANSWERS = {("R", "W"), ("R", "D"), ("R", "rejected")}
INTERRUPTED = ("R", "interrupted")


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", BOUNDS, ids=Bounds.name)
def test_no_interleaving_repeats_a_write_loses_an_answer_or_leaves_a_run_without_a_next_actor(
    bounds: Bounds, tally: Tally
):
    """In every state: the write begins at most once for its approval and once for each recorded
    retry, after its acknowledged start, never by a process that knows that it is fenced, never
    twice by one process; one decision counts; the log folds and the audit finds nothing in it;
    somebody can do something and the end is in reach without another fault; the
    answer is that of a run without crashes, or holds what a person said was done.
    """
    found = tally.explored(bounds)
    assert found.ends == ANSWERS
    assert found.calls_max >= 2  # permitted retries were among them


def ends_of(bounds: Bounds) -> set[Any]:
    return (
        ANSWERS
        | ({INTERRUPTED} if bounds.policy == "interrupt" else set())
        | ({"cancelled"} if bounds.cancels else set())
    )


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", CANCELLED, ids=Bounds.name)
def test_nothing_is_started_on_a_cancelled_run_and_its_end_is_in_reach(
    bounds: Bounds, tally: Tally
):
    """R56, R27: besides all of the above: no start stands behind the cancel, the run ends as
    cancelled and as nothing else, and a write that was cut off is settled before, by a person or
    its policy."""
    assert tally.explored(bounds).ends == ends_of(bounds)


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", WITH_INPUTS, ids=Bounds.name)
def test_an_input_is_placed_at_most_once_and_never_after_its_withdrawal(
    bounds: Bounds, tally: Tally
):
    """R62: besides all of the above: the log folds, so no input is placed that is not queued; and
    none is left queued at the end."""
    found = tally.explored(bounds)
    assert found.ends <= ends_of(bounds)
    assert {("R", "W"), ("R", "rejected")} <= found.ends
    assert {"queued", "placed", "done", "withdrawn"} <= found.inputs
    assert ("unanswered" in found.inputs) == bounds.cancels  # else the holder places it first


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", REPORTED, ids=Bounds.name)
def test_the_result_of_a_fenced_process_settles_its_write_unless_a_retry_has_started(
    bounds: Bounds, tally: Tally
):
    """R29: besides all of the above: no retry starts behind the late result of its start."""
    found = tally.explored(bounds)
    assert found.ends == ends_of(bounds)
    assert found.lates > 0


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", DRAINED, ids=Bounds.name)
def test_a_run_that_is_handed_over_goes_on(bounds: Bounds, tally: Tally):
    """R51: a holder that is told to stop releases the run at its next step, whatever comes between;
    the next one goes on from the journal."""
    assert tally.explored(bounds).ends == ends_of(bounds)


# ---- it can fail: each rule removed, the explorer sees it ---------------------------------------


def violation(bounds: Bounds, rules: Rules) -> Violation:
    with pytest.raises(Violation) as raised:
        Explorer(bounds, rules).run()
    assert raised.value.way
    return raised.value


def unbound_retry(
    fold: Fold, call: Call, *, attempted: Set[int] = frozenset(), earlier_over: bool = False
) -> StepDecision:
    """A retry permits any later start of its step too."""
    decision = decide_step(fold, call, attempted=attempted, earlier_over=earlier_over)
    if isinstance(decision, Ask):
        for said in fold.steps[call.step].reconciled.values():
            if said.payload["outcome"] == "retry":
                return RunIt(said.n, decision.start.key, unsafe=True)
    return decision


def deaf_to_late(
    fold: Fold, call: Call, *, attempted: Set[int] = frozenset(), earlier_over: bool = False
) -> StepDecision:
    """A person's retry counts for more than the truth."""
    deaf = fold.copy()
    for step in deaf.steps.values():
        step.late = {}
    return decide_step(deaf, call, attempted=attempted, earlier_over=earlier_over)


def places_what_was_withdrawn(
    fold: Fold, position: str, modes: tuple[str, ...]
) -> InputPlaced | None:
    """The holder places what it saw queued once."""
    for known in fold.inputs.values():
        if known.status in ("queued", "withdrawn"):
            return InputPlaced(request_id=known.request_id, position=position)
    return None


def hasty_signal(
    fold: Fold, signal: AnySignal, request_id: str, *, held: bool
) -> Append | Repeated:
    """A reconcile is accepted for a start that is running."""
    try:
        return decide_signal(fold, signal, request_id, held=held)
    except RunfoldError:
        if not isinstance(signal, Reconcile) or fold.finished:
            raise
        idle = fold.copy()
        idle.claim = None
        return decide_signal(idle, signal, request_id, held=False)


SMALL: dict[bool, Bounds] = {
    False: Bounds(shared=False, records=14, crashes=2, unknowns=1),
    True: Bounds(shared=True, records=14, crashes=1, unknowns=1),
}
ONE_MISTAKE = Bounds(shared=True, records=12, crashes=0, unknowns=1)


def test_without_compare_and_swap_it_finds_a_violation():
    for shared in (True, False):
        found = violation(SMALL[shared], Rules(cas=False))
        assert "the log does not fold" in found.what or "called" in found.what


@pytest.mark.parametrize("shared", [True, False])
def test_with_a_call_before_its_start_is_acknowledged_it_finds_a_violation(shared: bool):
    found = violation(SMALL[shared], Rules(start_first=False))
    assert found.what == "the write is called without an acknowledged start"


@pytest.mark.parametrize("shared", [True, False])
def test_with_a_retry_that_is_not_bound_to_its_start_it_finds_a_violation(shared: bool):
    bounds = Bounds(shared=shared, records=18, crashes=3, unknowns=0, lies=0)
    found = violation(bounds, Rules(decide_step=unbound_retry))
    assert "permit" in found.what


def test_without_memory_and_with_a_reconcile_of_a_running_write_it_finds_a_violation():
    rules = Rules(remembers=False, decide_signal=hasty_signal)
    found = violation(SMALL[False], rules)
    assert found.what == "a process calls the write again that it called before"
    assert [event for event in found.way if "WRITE" in event or "write" in event] == [
        "CALLS THE WRITE under start 7",
        "the write raises",
    ]


@pytest.mark.parametrize("rules", [Rules(remembers=False), Rules(decide_signal=hasty_signal)])
def test_either_of_the_two_guards_is_enough(rules: Rules):
    Explorer(SMALL[False], rules).run()


@pytest.mark.parametrize("shared", [True, False])
def test_with_an_append_that_is_published_again_and_not_looked_for_it_finds_a_violation(
    shared: bool,
):
    bounds = Bounds(shared=shared, records=11, crashes=0, unknowns=1)
    found = violation(bounds, Rules(reads_back=False))
    assert "the log does not fold" in found.what
    assert "x done 0 R, acknowledgement lost" in found.way


def test_with_a_fenced_holder_that_goes_on_it_finds_a_violation():
    found = violation(ONE_MISTAKE, Rules(stops_when_fenced=False))
    assert "fenced" in found.what or "under claim" in found.what


@pytest.mark.parametrize("shared", [True, False])
def test_with_a_holder_that_does_not_heed_a_cancel_it_finds_a_violation(shared: bool):
    bounds = Bounds(shared=shared, records=10, crashes=0, unknowns=0, cancels=True)
    found = violation(bounds, Rules(heeds_cancel=False))
    assert found.what == "a step is started on a cancelled run"


@pytest.mark.parametrize("shared", [True, False])
def test_with_a_holder_that_places_a_withdrawn_input_it_finds_a_violation(shared: bool):
    bounds = Bounds(shared=shared, records=12, crashes=0, unknowns=0, inputs=True)
    found = violation(bounds, Rules(decide_placing=places_what_was_withdrawn))
    assert "is not queued but withdrawn" in found.what


def test_with_a_retry_that_beats_the_late_result_it_finds_a_violation():
    bounds = Bounds(shared=True, records=16, crashes=0, unknowns=0, lies=2, late=True)
    found = violation(bounds, Rules(decide_step=deaf_to_late))
    assert "without a permit" in found.what
    assert "a fenced process reports its result" in found.way


def test_a_violation_comes_with_a_shortest_way_to_it():
    found = violation(SMALL[False], Rules(start_first=False))
    assert found.way == [
        "a process takes the lock",
        "start 0 0",
        "done 0 R",
        "person: ('approve',)",
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_reading_back_early_hides_no_journal(shared: bool):
    """The explorer's own shortcut, against the search without it."""
    bounds = Bounds(shared=shared, records=11, crashes=1, unknowns=int(not shared), lies=1)
    quick, slow = Explorer(bounds), Explorer(bounds, shortcut=False)
    one, other = quick.run(), slow.run()
    assert quick.journals == slow.journals
    assert (one.ends, one.calls_max) == (other.ends, other.calls_max)
    assert one.states < other.states


def test_the_same_exploration_twice_sees_the_same():
    assert Explorer(SMALL[False]).run() == Explorer(SMALL[False]).run()


def test_the_explored_run_is_the_one_it_says():
    explorer = Explorer(SMALL[True])
    fold = explorer.world.journals.first().fold
    assert fold.started is not None and fold.started.run == RUN
    (pending,) = fold.pending()
    assert pending[1].marker.startswith(f"{RUN}/{WRITE}@1.")
    assert fold.runnable()  # the read is due
