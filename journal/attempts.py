"""Core: what a new attempt keeps of the ones before: their unsafe calls (R44).

A new attempt of a turn makes its safe and model calls anew; a safe tool call keeps the key of the
earlier one, so that the outside system knows it again. An unsafe call is matched to the one of an
earlier attempt with the same tool, input and occurrence: its result is returned, and what a person
permitted is spent by the one start that names the permit, in whichever attempt. Inputs that were
placed are placed again, first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from .records import StepStarted
from .step_state import StepState

if TYPE_CHECKING:
    from .fold import Fold


def begin_afresh(fold: Fold) -> None:
    """Forget the attempt's steps, but honour its unsafe ones."""
    for step in sorted(fold.steps.values(), key=_place):
        if not step.starts or step.last.kind == "model":
            continue
        what = (step.last.tool, step.last.digest)
        if step.unsafe:
            earlier = fold.honoured.setdefault(what, [])
            if not any(step is known for known in earlier):
                earlier.append(step)
        elif step.last.key not in (keys := fold.keys.get(what, ())):
            fold.keys[what] = (*keys, step.last.key)
    fold.steps = {}
    fold.open = {}
    fold.reply = None
    fold.offered = {}
    for known in list(fold.inputs.values()):
        if known.status == "placed":  # the next attempt places it first
            fold.inputs[known.request_id] = structs.replace(known, placed_at="")


def _place(step: StepState) -> int:
    """A handler's calls in the order of their positions: parallel ones start in any order."""
    position = step.name.rpartition("/")[2]
    return int(position) if position.isdecimal() else 0


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
        return other.steps[step.name] if fold.steps.get(step.name) is step else step.copy()

    return {key: [same(step) for step in steps] for key, steps in fold.honoured.items()}
