"""Core: what the journal knows of one step, and of the last model reply."""

from __future__ import annotations

import msgspec

from .codec import Damage
from .ids import valid_name
from .messages import JSON, Reply
from .records import Signal, StepCompleted, StepStarted
from .values import BadJSON, parse_strict


class StepState:
    """What the journal knows of one step: its starts, its result, what was said of a start.

    `reconciled`, `late`: by start · `asked`: the n of the latest park for a person while it was
    unknown · `partial`: the latest progress of its last start.
    """

    __slots__ = (
        "asked",
        "completed",
        "doubted",
        "late",
        "name",
        "partial",
        "reconciled",
        "starts",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.doubted = 0
        self.asked = 0
        self.partial: JSON = None
        self.starts: list[StepStarted] = []
        self.completed: StepCompleted | None = None
        self.reconciled: dict[int, Signal] = {}
        self.late: dict[int, Signal] = {}

    @property
    def last(self) -> StepStarted:
        """The latest start; only where there is one."""
        return self.starts[-1]

    @property
    def unsafe(self) -> bool:
        """Whether twice may do harm: any start was recorded unsafe (a permitted second start of a
        tool declared safe by then is one too), or a holder parked because the code says so now."""
        return self.doubted > 0 or any(start.replay == "unsafe" for start in self.starts)

    @property
    def unknown(self) -> bool:
        """An unsafe start without a result that nobody has settled (R23)."""
        return (
            self.completed is None
            and bool(self.starts)
            and self.last.n not in self.reconciled
            and self.last.n not in self.late
            and self.unsafe
        )

    @property
    def needs_person(self) -> bool:
        """Unknown, and no policy settles it: none, or a holder has parked over it (R27)."""
        return self.unknown and (self.last.policy == "reconcile" or self.asked > self.last.n)

    def copy(self) -> StepState:
        other = StepState(self.name)
        other.starts = list(self.starts)
        other.completed = self.completed
        other.doubted = self.doubted
        other.asked = self.asked
        other.partial = self.partial
        other.reconciled = dict(self.reconciled)
        other.late = dict(self.late)
        return other


class ModelReply:
    """The last model reply that passed the gate: its calls, their steps and verdicts."""

    __slots__ = ("completed", "reply", "steps")

    def __init__(self, completed: StepCompleted) -> None:
        self.completed = completed
        self.reply = msgspec.convert(completed.result, Reply)
        ordinal = completed.step.rpartition("/")[2]
        self.steps = tuple(
            call_step(ordinal, index, call.name) for index, call in enumerate(self.reply.calls)
        )

    def arguments(self, index: int) -> JSON:
        """The arguments of a call, as they will be run."""
        text = self.reply.calls[index].arguments
        try:
            return parse_strict(text)
        except BadJSON:  # can't be asked for by this version's gate; shown as it is all the same
            return text


def model_reply(record: StepCompleted) -> ModelReply:
    """The reply in a model step of the loop; other model steps hold any JSON, no verdicts."""
    try:
        reply = ModelReply(record)
    except msgspec.ValidationError as error:
        raise Damage(f"record {record.n} has verdicts on no reply: {error}") from error
    if len(reply.steps) != len(record.verdicts):
        raise Damage(f"record {record.n} has {len(record.verdicts)} verdicts")
    return reply


def call_step(reply: str | int, index: int, tool: str) -> str:
    """`tool/<reply>/<index>/<tool>`; `?` for a tool name that is none (it is never started)."""
    return f"tool/{reply}/{index}/{tool if valid_name(tool) else '?'}"
