"""Core: what a new attempt keeps of the ones before: their unsafe calls (R44).

A new attempt of a turn makes its safe and model calls anew. An unsafe call is matched to the one
of an earlier attempt with the same tool, input and occurrence: its result is returned, and what a
person permitted is spent by the one start that names the permit, in whichever attempt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .records import StepStarted
from .step_state import StepState

if TYPE_CHECKING:
    from .fold import Fold


def begin_afresh(fold: Fold) -> None:
    """Forget the attempt's steps, but honour its unsafe ones."""
    for step in fold.steps.values():
        if step.starts and step.unsafe:
            earlier = fold.honoured.setdefault((step.last.tool, step.last.digest), [])
            if not any(step is known for known in earlier):
                earlier.append(step)
    fold.steps = {}
    fold.open = {}
    fold.reply = None


def spend(fold: Fold, record: StepStarted) -> None:
    """A start under the permit of an earlier attempt's write takes that write's place: the permit
    is for this start only (R22)."""
    earlier = fold.honoured.get((record.tool, record.digest), [])
    for index, step in enumerate(earlier):
        if any(said.n == record.permit for said in step.reconciled.values()):
            earlier[index] = fold.steps[record.step]


def copied(fold: Fold, other: Fold) -> dict[tuple[str, str], list[StepState]]:
    """The honoured steps for a copy of the fold, whose own steps are `other`'s."""

    def same(step: StepState) -> StepState:
        return other.steps[step.name] if fold.steps.get(step.name) is step else step

    return {key: [same(step) for step in steps] for key, steps in fold.honoured.items()}
