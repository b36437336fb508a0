"""R77: hints and signals: workers that begin by a task message alone, timers, doors and bridges.

As test_explorer.py, and besides: every unfinished run has a next actor in every state, by the
product's own predicates for who may claim, who wakes whom and what the sweep covers; and no signal
that SIGNALS took is lost.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from kit.exploring.bounds import Bounds, Rules, Violation
from kit.exploring.bridges import BOTH
from kit.exploring.search import Explorer
from kit.exploring.tally import Tally, tallied

DEEP = os.environ.get("RUNFOLD_EXPLORE") == "deep"
MORE = 1 if DEEP else 0


def fleet(records: int, **more: object) -> Bounds:
    """A fleet without faults but those named."""
    given = {"crashes": 0, "unknowns": 0, "lies": 0, "bridges": 1} | more
    return Bounds(shared=True, hints=True, records=records, **given)  # type: ignore[arg-type]


REPLIES = [
    fleet(12 + MORE, crashes=1),
    fleet(11 + 2 * MORE, unknowns=1, lies=MORE),
    fleet(11 + MORE, lies=1, crashes=MORE),
    fleet(12 + MORE, drains=1, crashes=MORE),
    fleet(10 + MORE, stales=1, waiting=1 + MORE),
    fleet(11 + MORE, cancels=True, crashes=MORE),
]
LATE = ("early", "twice", "lost")
TURNS = [
    fleet(10 + MORE, plot="turns", crashes=1, timers=LATE),
    fleet(11 + MORE, plot="turns", skews=1 + MORE, timers=("early",)),
    fleet(10 + MORE, plot="turns", inputs=True, unknowns=MORE),
    fleet(11 + MORE, plot="turns", unknowns=1, lies=MORE),
    fleet(11 + MORE, plot="turns", drains=1, stales=MORE),
    fleet(10 + MORE, plot="attempts", crashes=MORE, lies=1),
    fleet(11, plot="attempts", skews=1 + MORE, timers=LATE, policy="interrupt"),
]
SIGNALS = [
    fleet(10 + MORE, queued=2),
    fleet(9 + 2 * MORE, queued=2, cancels=True, crashes=MORE),
    fleet(11 + MORE, queued=1, plot="attempts", cancels=True),
    fleet(9 + MORE, queued=1, stales=1),
]
FROZEN = fleet(8 + 2 * MORE, queued=1, bridges=2, plot="turns")


@pytest.fixture(scope="module", name="tally")
def _tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    yield from tallied(request)


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", REPLIES, ids=Bounds.name)
def test_whatever_becomes_of_tasks_a_run_has_a_next_actor_and_ends_as_without_faults(
    bounds: Bounds, tally: Tally
):
    """R53, PROTOCOL 4: deliveries that come late, twice, or whose worker dies at any point; drained
    holders; stale reads. In every state a process, a message, a timer, a door, a bridge or the
    sweep moves the run on, or a person whose word it waits for; and it can end from there without
    another fault."""
    found = tally.explored(bounds)
    assert found.ends >= {("R", "W"), ("R", "rejected")}
    assert found.ends <= {("R", "W"), ("R", "D"), ("R", "rejected"), "cancelled"}
    assert ("cancelled" in found.ends) == bounds.cancels


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", TURNS, ids=Bounds.name)
def test_a_wait_for_an_instant_ends_whatever_clocks_and_timers_do(bounds: Bounds, tally: Tally):
    """R63, R44, PROTOCOL 5: two iterations, a wait for an instant or an input between them, a retry
    of the first one; timers that fire early, twice or never, processes whose clocks are slow or
    fast. The write of a failed attempt is honoured; what is read from the commit on is the whole.
    """
    found = tally.explored(bounds)
    interrupted = {("interrupted", "R")} if bounds.policy == "interrupt" else set()
    assert {("W", "R")} <= found.ends <= {("W", "R"), ("D", "R"), *interrupted}
    assert found.calls_max >= 1


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("bounds", SIGNALS, ids=Bounds.name)
def test_no_signal_is_lost_and_each_is_recorded_once_or_refused_in_their_order(
    bounds: Bounds, tally: Tally
):
    """R58-R61: a bridge that dies anywhere; every signal that SIGNALS took is in the journal once,
    repeats one that is, or is refused; those of a run are recorded in their order."""
    found = tally.explored(bounds)
    assert {"applied"} <= found.signals <= {"applied", "repeated", "refused"}


@pytest.mark.timeout(3600 if DEEP else 120)
def test_only_a_bridge_that_was_frozen_can_apply_what_another_one_refused(tally: Tally):
    """Two bridges with one signal in hand, one frozen for longer than the ack wait since its last
    look at the stream. It is not lost, and applied once, and stands among the refused all the same.
    """
    found = tally.explored(FROZEN)
    assert found.signals >= {"applied", "refused", BOTH}


# ---- without the sweep: what it is for ----------------------------------------------------------

DOOR = "x the door dies before its task"
UNSWEPT = {
    "bridges that die anywhere": (fleet(11, queued=1), set[str]()),
    "workers that die anywhere": (fleet(9, queued=1, crashes=1), {DOOR}),
    "timers early and twice, clocks that differ": (
        fleet(11, plot="turns", skews=1, timers=("early", "twice")),
        set[str](),
    ),
    "stale reads": (fleet(9, queued=1, stales=1), set[str]()),
    "lost acknowledgements": (fleet(11, plot="turns", unknowns=1), set[str]()),
    "drained holders": (fleet(12, drains=1), set[str]()),
    "timers that are lost": (
        fleet(11, plot="turns", timers=("lost",)),
        {"x the timer is lost"},
    ),
    "doors that die": (fleet(8, crashes=1, plot="attempts"), {DOOR}),
    "zombies that settle their successor's task": (
        fleet(11, crashes=1, lies=1),
        {DOOR, "x dies (ready)", "x dies (started)", "x dies (result)"},
    ),
}


@pytest.mark.timeout(3600 if DEEP else 120)
@pytest.mark.parametrize("what", UNSWEPT)
def test_the_sweep_is_needed_for_these_and_for_nothing_else(what: str):
    """PROTOCOL 5, 7: without a sweep nobody would move the run on only behind these faults: who
    appended what ends a wait died before its task; a timer was lost; a worker died whose task its
    predecessor had settled meanwhile."""
    bounds, stuck = UNSWEPT[what]
    assert unswept(bounds) == stuck


def unswept(bounds: Bounds, rules: Rules | None = None) -> set[str]:
    """The last faults before the run is stuck, in a fleet without a sweep."""
    return set(Explorer(without_sweep(bounds), rules, collects=True).run().stuck)


def without_sweep(bounds: Bounds) -> Bounds:
    return replace(bounds, sweep=False)


# ---- it can fail: each rule removed, the explorer sees it ---------------------------------------


def stuck_at_first(what: str, rules: Rules) -> list[str]:
    """The shortest way to a state that nobody moves on, where with the rules there is none."""
    bounds, stuck = UNSWEPT[what]
    assert stuck == set()
    with pytest.raises(Violation) as raised:
        Explorer(without_sweep(bounds), rules).run()
    assert raised.value.what == "nobody is about to move the run on"
    return raised.value.way


def test_with_a_signal_acknowledged_before_it_is_recorded_it_finds_it_lost():
    with pytest.raises(Violation) as raised:
        Explorer(fleet(9, queued=1), Rules(acks_last=False)).run()
    assert raised.value.what == "signal 0 is lost: neither recorded nor refused"
    assert raised.value.way[-1] == "x a bridge with signal 0 dies (apply)"


def test_with_signals_taken_out_of_their_order_it_finds_a_violation():
    with pytest.raises(Violation) as raised:
        Explorer(fleet(9, queued=2, cancels=True), Rules(in_order=False)).run()
    assert raised.value.what == "signals of one run are recorded out of their order"


def test_without_a_task_behind_what_ends_a_wait_the_run_is_stuck():
    way = stuck_at_first("bridges that die anywhere", Rules(wakes=False))
    assert not [event for event in way if event.startswith("x ")]


def test_without_a_task_behind_a_repeat_a_bridge_that_died_leaves_the_run_stuck():
    way = stuck_at_first("bridges that die anywhere", Rules(wakes_again=False))
    assert "x a bridge with signal 0 dies (wake)" in way


def test_with_a_task_acknowledged_before_the_timer_is_set_the_run_is_stuck():
    bounds = fleet(8, plot="turns", crashes=1)
    assert unswept(bounds) == {DOOR}
    assert unswept(bounds, Rules(pays_first=False)) == {DOOR, "x dies (pay)"}


def test_with_a_timer_that_is_not_set_again_one_that_fired_early_leaves_the_run_stuck():
    what = "timers early and twice, clocks that differ"
    way = stuck_at_first(what, Rules(sets_again=False))
    assert "x the timer fires early" in way


def test_with_a_stale_read_that_settles_a_task_the_run_is_stuck():
    way = stuck_at_first("stale reads", Rules(causes=False))
    assert "x a worker is answered by a deposed leader" in way


def test_with_a_turn_that_waits_for_an_input_that_is_there_the_audit_finds_it():
    bounds = fleet(7, plot="turns", inputs=True, room=7)
    with pytest.raises(Violation) as raised:
        Explorer(bounds, Rules(waits_for_nothing_there=False)).run()
    assert raised.value.what.startswith("the audit says: record 6: wake")
    assert raised.value.way[-1] == "commit W True"


def test_without_a_sweep_that_finds_it_a_run_is_stuck_behind_a_lost_timer():
    bounds, _ = UNSWEPT["timers that are lost"]
    Explorer(bounds).run()
    with pytest.raises(Violation) as raised:
        Explorer(without_sweep(bounds)).run()
    assert raised.value.way[-1] == "x the timer is lost"


def test_the_same_exploration_twice_sees_the_same():
    bounds = fleet(10, plot="turns", crashes=1)
    assert Explorer(bounds).run() == Explorer(bounds).run()


def test_reading_back_early_hides_no_journal():
    """The explorer's own shortcut, against the search without it. A process that has been fenced
    and has not read it yet says that its call runs: with the shortcut that is a lie."""
    bounds = fleet(9, plot="turns", unknowns=1)
    quick, slow = Explorer(bounds), Explorer(bounds, shortcut=False)
    lying = Explorer(fleet(9, plot="turns", unknowns=1, lies=1))
    one, other, _ = quick.run(), slow.run(), lying.run()
    assert quick.journals <= slow.journals <= lying.journals
    assert (one.ends, one.calls_max) == (other.ends, other.calls_max)
    assert one.states < other.states
