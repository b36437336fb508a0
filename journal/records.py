"""Core: the records of a run, as a tagged union (PROTOCOL 2).

Once on the wire a tag, field name or type never changes; new fields have defaults. A chained record
that is none of these types, or does not decode, was written by a newer version: never skipped.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from .messages import JSON

ZERO_HASH = "0" * 32
VERSION = 1
RELEASE = "0.5.0"
"""Of the package. It stands in claims, so that who reads a record that it does not know can say
which release wrote it."""

Kind: TypeAlias = Literal["model", "tool"]
Replay: TypeAlias = Literal["safe", "unsafe"]
Via: TypeAlias = Literal[
    "run", "refused", "reconcile", "probe", "late", "interrupted", "not_called"
]
Policy: TypeAlias = Literal["reconcile", "interrupt", "probe"]
"""What becomes of a write that was cut off: a person is asked; it is recorded as interrupted; the
tool's probe is asked (R27)."""

Mode: TypeAlias = Literal["steer", "follow_up"]
SignalName: TypeAlias = Literal[
    "approve", "reject", "reconcile", "cancel", "resume", "late", "child"
]
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
    """First, once; by the starter, expecting an empty subject. Fences other starters (R3).

    `parent`, `depth`: of a child run (R57). `priority` -1, 0 or 1; `key`: runs of one key go one at
    a time (R54).
    """

    run: str
    agent: str
    revision: str
    input: JSON
    digest: str
    parent: str = ""
    depth: int = 0
    priority: int = 0
    key: str = ""


class Claim(Record, frozen=True, kw_only=True, tag="claim"):
    """By a worker that takes the run. Fences every earlier claim (R49).

    `remote`: it is known only by its requests over HTTP: its silence says nothing of its calls.
    `runfold`: the release of Runfold that it is.
    """

    worker: str
    revision: str
    reason: Literal["new", "redelivery", "wake", "retry", "adopted"]
    attempt: int = 1
    task: int = 0
    delivery: int = 0
    remote: bool = False
    runfold: str = ""


class Release(Record, frozen=True, kw_only=True, tag="release"):
    """By the holder that gives the run up in order; ends its claim. `reason` is for people."""

    reason: str = ""


SPAWN = "runfold.spawn"
"""The tool name of a step that starts a child run; its input names the run."""


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


class StepProgress(Record, frozen=True, kw_only=True, tag="step.progress"):
    """By the holder, from inside a call: its partial output so far, for who must judge it (R27)."""

    step: str
    output: JSON


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


class Interrupted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a write that was cut off, of a tool that says `interrupt`: it may have happened
    (R27). `partial`: the last progress it reported."""

    partial: JSON = None


class StepCompleted(Record, frozen=True, kw_only=True, tag="step.completed"):
    """By the holder, before the result is used. Exactly one of result, error, interrupted.

    For a model reply also the gate's verdict on each call, so that the journal itself says what is
    pending (R9).
    """

    step: str
    result: JSON | UnsetType = UNSET
    error: StepError | UnsetType = UNSET
    interrupted: Interrupted | UnsetType = UNSET
    via: Via = "run"
    verdicts: tuple[Verdict, ...] = ()


class Asked(Struct, frozen=True, kw_only=True):
    """A turn handler's call that waits for a decision. A model's calls have verdicts instead."""

    marker: str
    step: str
    tool: str
    input: JSON
    text: str


class Park(Record, frozen=True, kw_only=True, tag="park"):
    """By the holder that stops inside a turn: ends the claim, not the iteration.

    `steps` of a reconcile: open steps that were recorded safe and that the code of today calls
    unsafe, so that only a person can settle them (R42); such a park is written on every store. Of a
    retry: the permitted retry of these steps waits for the end of the earlier call (R22). `until`
    ends the wait at an instant; `reason` is for people; `asks` are a turn handler's pending calls.
    `retry` without steps ends the attempt (R44); `afresh`: the next one makes its calls anew, and
    honours only the unsafe ones (turn handlers; the built-in loop never drops a result).
    """

    why: Literal["approval", "reconcile", "retry", "pause"]
    steps: tuple[str, ...] = ()
    iteration: int = 0
    attempt: int = 1
    until: str = ""
    reason: str = ""
    asks: tuple[Asked, ...] = ()
    afresh: bool = False


class Waits(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a finished turn waits for: whichever comes first ends the wait (R63).

    `until` an instant · `until_input` a queued input · `until_child` a child run's end · `resume`
    an operator (Pause). None of them: the next turn begins at once, under the same claim.
    """

    until: str = ""
    until_input: bool = False
    until_child: str = ""
    resume: bool = False


NO_WAITS = Waits()


class Known(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is kept of a signal to recognise its repeats (R60). `about`: the marker it decides, the
    start it reconciles, or empty; `digest` of its payload."""

    request_id: str
    name: SignalName
    n: int
    at: str
    digest: str
    by: str = ""
    about: str = ""
    reason: str = ""


InputStatus: TypeAlias = Literal["queued", "placed", "done", "unanswered", "withdrawn"]


class Submitted(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An input and what became of it (R62). `placed_at`: the position it was placed at."""

    request_id: str
    mode: Mode
    content: JSON
    n: int
    at: str
    status: InputStatus = "queued"
    placed_at: str = ""


class Summary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the fold needs from before a commit, so that state = fold(records from there on).

    `claim` is the live claim the holder goes on under, `claim_n` its ordinal.
    """

    claim_n: int = 0
    claim: dict[str, Any] = {}
    revision: str = ""
    model_calls: int = 0
    requests: tuple[Known, ...] = ()
    inputs: tuple[Submitted, ...] = ()
    children: dict[str, JSON] = {}
    interrupted: tuple[str, ...] = ()
    cancel: Known | None = None


class Commit(Record, frozen=True, kw_only=True, tag="commit"):
    """By the holder: the end of an iteration (R41). With waits it ends the claim, too.

    `state` is the checkpoint of the next turn; `retriable`: `resume` gives a failed run another
    try (R52), `afresh` as in Park. A commit with a `summary` is a point to restart at.
    """

    action: Literal["continue", "fail", "cancel"]
    iteration: int = 0
    state: JSON = None
    waits: Waits = NO_WAITS
    reason: str = ""
    detail: str = ""
    retriable: bool = False
    afresh: bool = False
    summary: Summary | UnsetType = UNSET


class RunCompleted(Record, frozen=True, kw_only=True, tag="run.completed"):
    """By the holder: the good end, with the final message; its iteration's commit."""

    message: JSON
    iteration: int = 0


class Signal(Record, frozen=True, kw_only=True, tag="signal"):
    """By a door (library, CLI, bridge; late and child: a worker), any time before the end; resume
    also after a retriable failure. `payload` as in PROTOCOL 8."""

    name: SignalName
    request_id: str
    payload: dict[str, Any]


class Input(Record, frozen=True, kw_only=True, tag="input"):
    """By a door: a message for the running agent. It stays queued until the holder places it."""

    request_id: str
    mode: Mode
    content: JSON


class InputWithdrawn(Record, frozen=True, kw_only=True, tag="input.withdrawn"):
    """By a door: the queued input is never placed. Competes with placing for one sequence."""

    request_id: str


class InputPlaced(Record, frozen=True, kw_only=True, tag="input.placed"):
    """By the holder: the input stands at this position of the conversation, once and for ever."""

    request_id: str
    iteration: int = 0
    position: str = ""


class RunPurged(Record, frozen=True, kw_only=True, tag="run.purged"):
    """By an admin: the tombstone of a removed journal; the id stays used (R15)."""


class NewerRecord(Record, frozen=True, kw_only=True, tag="\0newer"):
    """Stands for a chained record that this version can't read: its tag, and what is new about it.
    Never encoded."""

    type_: str
    why: str


AnyRecord: TypeAlias = (
    RunStarted
    | Claim
    | Release
    | StepStarted
    | StepProgress
    | StepCompleted
    | Park
    | InputPlaced
    | Commit
    | RunCompleted
    | Signal
    | Input
    | InputWithdrawn
    | RunPurged
)

HOLDER_RECORDS = (
    Release,
    StepStarted,
    StepProgress,
    StepCompleted,
    Park,
    InputPlaced,
    Commit,
    RunCompleted,
)
