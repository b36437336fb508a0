"""Core: the records of a run, as a tagged union (PROTOCOL 2).

Once on the wire a tag, field name or type never changes; new fields have defaults. A chained record
of these types that does not decode was written by a newer version: it is never skipped. The types
that only the fleet writes and reads (inputs, progress) are absent for that reason: this version
must leave such a run alone.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from .messages import JSON

ZERO_HASH = "0" * 32
VERSION = 1

Kind: TypeAlias = Literal["model", "tool"]
Replay: TypeAlias = Literal["safe", "unsafe"]
Via: TypeAlias = Literal["run", "refused", "reconcile", "not_called"]
Policy: TypeAlias = Literal["reconcile"]
Status: TypeAlias = Literal[
    "running",
    "awaiting_approval",
    "indeterminate",
    "waiting",
    "paused",
    "completed",
    "failed",
    "cancelled",
    "damaged",
    "newer",
]


class Record(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """The envelope. Bodies are made without it; `codec.seal` fills it in at the journal's tail.

    `n` ordinal from 1 · `id` the same for every retry of this append · `at` informative only ·
    `by` authenticated writer · `prev` BLAKE2b-128 of the previous record's stored bytes · `claim`
    the n of the writer's claim, on a holder's records under a claim.
    """

    v: int = 0
    n: int = 0
    id: str = ""
    at: str = ""
    by: str = ""
    prev: str = ""
    claim: int = 0


class RunStarted(Record, frozen=True, kw_only=True, tag="run.started"):
    """First, once; by the starter, expecting an empty subject. Fences other starters (R3)."""

    run: str
    agent: str
    revision: str
    input: JSON
    digest: str


class Claim(Record, frozen=True, kw_only=True, tag="claim"):
    """By a worker that takes the run. Fences every earlier claim (R49)."""

    worker: str
    revision: str
    reason: Literal["new", "redelivery", "wake", "retry", "adopted"]
    attempt: int = 1
    task: int = 0
    delivery: int = 0


class Release(Record, frozen=True, kw_only=True, tag="release"):
    """By the holder that gives the run up in order; ends its claim. `reason` is for people."""

    reason: str = ""


class StepStarted(Record, frozen=True, kw_only=True, tag="step.started"):
    """By the holder, before the call. For an unsafe step it is the intent that is never repeated
    without a permit (R22).

    `permit` is the n of the approval or reconcile used, 0 where none was needed. `deadline` is the
    instant after which this call can no longer be running (unsafe steps).
    """

    step: str
    kind: Kind
    tool: str = ""
    input: JSON = None
    digest: str
    replay: Replay
    key: str
    policy: Policy = "reconcile"
    permit: int = 0
    deadline: str = ""
    attempt: int = 1


class StepError(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step's error result. `type` is an exception's name or one of denied, rejected, outdated,
    unknown_tool, bad_arguments, bad_reply, tool_error, not_recordable, not_called."""

    type: str
    message: str
    data: JSON = None


class VerdictAllow(Struct, frozen=True, kw_only=True, tag_field="verdict", tag="allow"):
    """The gate lets the call run."""


class VerdictAsk(Struct, frozen=True, kw_only=True, tag_field="verdict", tag="ask"):
    """The call waits for a person's decision on `marker`; `text` is what the person is told."""

    marker: str
    text: str


class VerdictDeny(Struct, frozen=True, kw_only=True, tag_field="verdict", tag="deny"):
    """The call is answered with this error and never started."""

    type: str
    reason: str


Verdict: TypeAlias = VerdictAllow | VerdictAsk | VerdictDeny


class StepCompleted(Record, frozen=True, kw_only=True, tag="step.completed"):
    """By the holder, before the result is used. Exactly one of result, error.

    For a model reply also the gate's verdict on each call, so that the journal itself says what is
    pending (R9).
    """

    step: str
    result: JSON | UnsetType = UNSET
    error: StepError | UnsetType = UNSET
    via: Via = "run"
    verdicts: tuple[Verdict, ...] = ()


class Park(Record, frozen=True, kw_only=True, tag="park"):
    """By the holder that stops inside a turn for a person: ends the claim, not the iteration.

    `steps`: open steps that were recorded safe and that the code of today calls unsafe, so that
    only a person can settle them (R42). Such a park is written on every store.
    """

    why: Literal["approval", "reconcile"]
    steps: tuple[str, ...] = ()
    iteration: int = 0
    attempt: int = 1


class Commit(Record, frozen=True, kw_only=True, tag="commit"):
    """By the holder: the bad end of a run (fail, cancel). The good one is run.completed."""

    action: Literal["fail", "cancel"]
    iteration: int = 0
    reason: str
    detail: str = ""


class RunCompleted(Record, frozen=True, kw_only=True, tag="run.completed"):
    """By the holder: the good end, with the final message."""

    message: JSON


class Signal(Record, frozen=True, kw_only=True, tag="signal"):
    """By a door (library, CLI, bridge), any time before the end. `payload` as in PROTOCOL 8."""

    name: Literal["approve", "reject", "reconcile"]
    request_id: str
    payload: dict[str, Any]


class RunPurged(Record, frozen=True, kw_only=True, tag="run.purged"):
    """By an admin: the tombstone of a removed journal; the id stays used (R15)."""


class NewerRecord(Record, frozen=True, kw_only=True, tag="\0newer"):
    """Stands for a chained record that this version can't read. Never encoded."""

    type_: str


AnyRecord: TypeAlias = (
    RunStarted
    | Claim
    | Release
    | StepStarted
    | StepCompleted
    | Park
    | Commit
    | RunCompleted
    | Signal
    | RunPurged
)

HOLDER_RECORDS = (Release, StepStarted, StepCompleted, Park, Commit, RunCompleted)
