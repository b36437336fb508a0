"""A turn of many calls: each recorded one is looked at once, and none is overlooked (R43)."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from journal.fold import Fold
from journal.positions import Furthest, later, step_at
from journal.step_state import StepState

NAMES = st.one_of(
    st.builds(step_at, st.integers(0, 1), st.integers(0, 30)),
    st.sampled_from(["llm/3", "tool/2/0/pay", "1/x", "note", "0/٣"]),
)
TURNS = st.lists(st.tuples(st.lists(NAMES, max_size=4), st.integers(0, 32), st.booleans()))


@given(TURNS)
def test_what_stands_behind_a_position_is_found_whatever_was_recorded_since(
    turns: list[tuple[list[str], int, bool]],
) -> None:
    fold, furthest = Fold(), Furthest()
    for names, position, afresh in turns:
        if afresh:  # another attempt
            fold.steps = {}
        for name in names:
            fold.steps.setdefault(name, StepState(name))
        assert furthest.before(fold, 0, position) == (later(fold, 0, position) is None)


class Looked(dict[str, StepState]):
    """Counts how many names were looked at."""

    looked = 0

    def __reversed__(self) -> Iterator[str]:
        for name in super().__reversed__():
            self.looked += 1
            yield name

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            self.looked += 1
            yield name


def test_a_turn_of_many_calls_looks_at_each_recorded_one_once() -> None:
    fold, furthest, steps = Fold(), Furthest(), Looked()
    fold.steps = steps
    for n in range(1000):
        name = step_at(0, n)
        assert furthest.before(fold, 0, n)
        steps[name] = StepState(name)
    assert steps.looked == 999
