"""Core: what a worker over HTTP appends in its turn: the shapes of its records (R65)."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from journal import limits
from journal.errors import BadPayload
from journal.messages import JSON
from journal.records import Mode
from journal.steps import CannotTell, DidNotHappen, Happened, Probed

Position = Annotated[int, Meta(ge=0, le=100_000)]
Text = Annotated[str, Meta(max_length=4000)]


class ProbeAnswer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the outside system says of the call of start `n`: one of the three."""

    n: Annotated[int, Meta(ge=1)]
    happened: JSON | UnsetType = UNSET
    did_not_happen: bool = False
    cannot_tell: bool = False

    def said(self) -> Probed:
        """Raises BadPayload."""
        if [self.happened is not UNSET, self.did_not_happen, self.cannot_tell].count(True) != 1:
            raise BadPayload("a probe says one of happened, did_not_happen, cannot_tell")
        if self.happened is not UNSET:
            return Happened(self.happened)
        return DidNotHappen() if self.did_not_happen else CannotTell()


class Started(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="step.started"):
    """May I make this call?"""

    position: Position
    kind: Literal["model", "tool"]
    tool: str = ""
    input: JSON = None
    replay: Literal["safe", "unsafe"] = "unsafe"
    on_unknown: Literal["reconcile", "interrupt", "probe"] = "reconcile"
    approval: Text | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=limits.TOOL_TIMEOUT_MAX_S)] = limits.TOOL_TIMEOUT_S
    occurrence: Position = 0
    probe: ProbeAnswer | None = None


class ToolProblem(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool's declared failure, shown to the model."""

    message: str
    data: JSON = None


class Completed(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="step.completed"
):
    """What the call came to. `start`: the `n` of the answer that let it be made."""

    position: Position
    start: Annotated[int, Meta(ge=1)]
    result: JSON | UnsetType = UNSET
    error: ToolProblem | UnsetType = UNSET
    not_called: Text | UnsetType = UNSET


class Progress(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="step.progress"):
    """Partial output of a call that runs."""

    position: Position
    output: JSON


class Placed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="input.placed"):
    """The queued inputs of this mode belong here."""

    position: Position
    mode: Mode


Appended: TypeAlias = Started | Completed | Progress | Placed
