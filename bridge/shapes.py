"""Core: what goes in and comes out as JSON, and what of it a type can't say."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal, Self, TypeAlias

from msgspec import UNSET, Struct, UnsetType

from journal.doors import Receipt
from journal.inbox import InboxItem
from journal.inputs import InputState
from journal.limits import NAME_CHARS_MAX, RUN_ID_CHARS_MAX
from journal.messages import JSON
from journal.records import InputStatus, Mode, Status
from journal.stores.rejected import Refusal
from journal.views import Pending, UnknownStep

RUN_ID: Final[dict[str, JSON]] = {
    "type": "string",
    "pattern": f"^[A-Za-z0-9][A-Za-z0-9_.-]{{0,{RUN_ID_CHARS_MAX - 1}}}$",
}
NAME: Final[dict[str, JSON]] = {
    "type": "string",
    "pattern": f"^[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{NAME_CHARS_MAX - 1}}}$",
}
REQUEST_ID: Final[dict[str, JSON]] = {"type": "string", "pattern": "^[ -~]{1,128}$"}
MARKER: Final[dict[str, JSON]] = {
    "type": "string",
    "pattern": "^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}/[A-Za-z0-9_.?/-]{1,200}@[1-9][0-9]{0,5}"
    r"\.[0-9a-f]{16}$",
}


class NewRun(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`run`: an id of the caller's: after a lost answer the same request is a repeat. Runs with one
    `key` go one at a time; `revision` binds the run before a worker has seen it."""

    agent: str
    input: JSON
    run: str | None = None
    priority: Literal[-1, 0, 1] = 0
    key: str | None = None
    revision: str | None = None


class NewInput(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message for the running agent."""

    content: JSON
    mode: Mode = "steer"
    request_id: str | None = None


class Approval(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="decision",
    tag="approve",
):
    """Let the call behind this marker run, once."""

    marker: str
    comment: str = ""
    request_id: str | None = None


class Rejection(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="decision",
    tag="reject",
):
    """Refuse the call behind this marker; the model sees the reason."""

    marker: str
    reason: str = ""
    request_id: str | None = None


Decision: TypeAlias = Approval | Rejection


class StartedRun(Struct, frozen=True, kw_only=True):
    run: str
    created: bool


class Wait(Struct, frozen=True, kw_only=True):
    what: Literal["worker", "approval", "reconcile", "input", "timer", "child", "operator"]
    since: datetime | None
    until: datetime | None
    ended_by: str


class Run(Struct, frozen=True, kw_only=True):
    """As `runfold show --json` prints it. Where the journal can't be read, `reason` says why."""

    run: str
    agent: str | None
    status: Status
    message: JSON
    pending: list[Pending]
    unknown: list[UnknownStep]
    waiting_on: list[Wait]
    reason: str | None
    detail: str | None
    iteration: int | None
    attempt: int | None
    records: int | None
    model_calls: int | None


class Runs(Struct, frozen=True, kw_only=True):
    """`next`: pass it as `after`; null at the end."""

    runs: list[Run]
    next: str | None


class JournalPage(Struct, frozen=True, kw_only=True):
    """Records as they are stored. `next`: the following `from`; null at the tail."""

    run: str
    records: list[dict[str, Any]]
    next: int | None


class SignalReceipt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`n`: the ordinal of its record, or of what it repeats. `kept`: its call is not there yet.
    `deadline`: a retry waits until then, unless the worker says before that its call has ended."""

    run: str
    request_id: str
    result: Literal["applied", "kept", "repeated"]
    n: int
    deadline: datetime | None = None

    @classmethod
    def of(cls, run: str, receipt: Receipt) -> Self:
        return cls(
            run=run,
            request_id=receipt.request_id,
            result=receipt.result,
            n=receipt.n,
            deadline=receipt.deadline,
        )


class InputReceipt(Struct, frozen=True, kw_only=True):
    """An input and what became of it."""

    run: str
    request_id: str
    mode: Mode
    content: JSON
    status: InputStatus

    @classmethod
    def of(cls, run: str, known: InputState) -> Self:
        return cls(
            run=run,
            request_id=known.request_id,
            mode=known.mode,
            content=known.content,
            status=known.status,
        )


class Inbox(Struct, frozen=True, kw_only=True):
    """`next`: pass it as `after`; null at the end. `unread`, where there are such: journal streams
    that could not be read; what waits in them is not here."""

    items: list[InboxItem]
    next: str | None
    unread: list[str] | UnsetType = UNSET


class Refusals(Struct, frozen=True, kw_only=True):
    rejected: list[Refusal]


class Workers(Struct, frozen=True, kw_only=True):
    """What each says of itself; `worker` is its id."""

    workers: list[dict[str, Any]]


EVENT: Final[dict[str, JSON]] = {
    "type": "object",
    "description": "A record has an `id`, its ordinal. `data` is JSON.",
    "properties": {
        "event": {"type": "string", "enum": ["record", "preview", "end", "problem"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "id": {"type": "string", "pattern": "^[1-9][0-9]*$"},
        "retry": {"type": "integer"},
    },
    "required": ["event", "data"],
}
"""Of a stream. `problem`, where a journal can't be read further, holds what problem+json does."""

_OPTIONAL_TEXT: Final[dict[str, JSON]] = {
    "anyOf": [{"type": "string", "pattern": "^[ -~]{1,128}$"}, {"type": "null"}]
}
_SIGNAL_REQUEST: Final[dict[str, JSON]] = {"type": "string", "pattern": "^[ -~]{0,128}$"}

CONSTRAINTS: Final[dict[str, dict[str, dict[str, JSON]]]] = {
    "NewRun": {
        "agent": NAME,
        "run": {"anyOf": [RUN_ID, {"type": "null"}]},
        "key": _OPTIONAL_TEXT,
        "revision": _OPTIONAL_TEXT,
    },
    "NewInput": {"request_id": _OPTIONAL_TEXT},
    "Approval": {"marker": MARKER, "request_id": _OPTIONAL_TEXT},
    "Rejection": {"marker": MARKER, "request_id": _OPTIONAL_TEXT},
    "Approve": {"marker": MARKER, "request_id": _SIGNAL_REQUEST},
    "Reject": {"marker": MARKER, "request_id": _SIGNAL_REQUEST},
    "Reconcile": {"request_id": _SIGNAL_REQUEST},
    "Cancel": {"request_id": _SIGNAL_REQUEST},
    "Resume": {"request_id": _SIGNAL_REQUEST},
}
"""What of these fields the journal checks: for the description; the journal's word counts. Keys and
revisions are any printable characters; those that are ASCII are surely taken."""

ALSO: Final[dict[str, dict[str, JSON]]] = {
    "Reconcile": {
        "oneOf": [
            {"properties": {"outcome": {"const": "done"}}, "required": ["result"]},
            {"properties": {"outcome": {"const": "retry"}, "result": False}},
        ]
    }
}
"""What holds between fields."""
