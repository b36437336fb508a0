"""Core: what the bridge answers where it can't do what was asked: problem+json (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from msgspec import UNSET, Struct, UnsetType

from journal.errors import DecisionConflict, IndeterminateError, RunfoldError
from journal.escape import visible

PROBLEM_TYPE: Final = "application/problem+json"

RETRY_AFTER_S: Final = 2
"""Of a 503: an election or a reconnect takes some seconds; asking again costs little."""


class BadRequest(RunfoldError):
    """The query, a header or the JSON is not what the operation takes."""

    code = "bad_request"


class TwoLengths(BadRequest):
    """The body has two lengths. The connection is closed, as above."""


class Unauthorized(RunfoldError):
    """There is no token, or none that is known."""

    code = "unauthorized"


class Forbidden(RunfoldError):
    """The token's scopes don't reach so far, or the request comes from a foreign page."""

    code = "forbidden"


class NotFound(RunfoldError):
    """There is nothing at this address."""

    code = "not_found"


class MethodNotAllowed(RunfoldError):
    """The address takes other methods: `allow`."""

    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class PayloadTooLarge(RunfoldError):
    """The body is larger than any request may be. The connection is closed: the rest of it would
    be taken for the next request."""

    code = "too_large"


class Busy(RunfoldError):
    """The bridge does as much as it may at once, or is stopping."""

    code = "busy"


class Internal(RunfoldError):
    """A bug. What it was stands in the log, not in the answer."""

    code = "internal"

    def __init__(self) -> None:
        super().__init__("the bridge failed", hint="its log says more; please report it")


STATUS_BY_CODE: Final[dict[str, int]] = {
    "invalid_id": 400,
    "bad_payload": 400,
    "not_encodable": 400,
    "bad_request": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "run_not_found": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "input_mismatch": 409,
    "run_finished": 409,
    "decision_conflict": 409,
    "stale_signal": 409,
    "journal_damaged": 409,
    "newer_version": 409,
    "fenced": 409,
    "cancelled": 409,
    "inputs_queued": 409,
    "step_open": 409,
    "awaiting_approval": 409,
    "indeterminate": 409,
    "waiting": 409,
    "replay_mismatch": 409,
    "stale": 410,
    "committed": 410,
    "too_large": 413,
    "not_provisioned": 503,
    "store_unavailable": 503,
    "permission_denied": 503,
    "busy": 503,
    "internal": 500,
}
"""docs/http.md. A code that is not here is a bug, 500."""


class Problem(Struct, frozen=True, kw_only=True):
    """`code` is the word of the exception; `hint` says what to do; `winner` is the ordinal of the
    decision that won; `marker` and `step` are what a task's run waits for."""

    title: str
    status: int
    detail: str
    code: str
    type: str = "about:blank"
    hint: str = ""
    run: str | None = None
    winner: int | UnsetType = UNSET
    marker: str | UnsetType = UNSET
    step: str | UnsetType = UNSET


def problem(error: RunfoldError) -> Problem:
    """The error as it is answered. One without a status of its own is a bug: nothing of it is
    told."""
    status = STATUS_BY_CODE.get(error.code)
    if status is None:
        error, status = Internal(), 500
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        detail=visible(error.message),
        code=error.code,
        hint=visible(error.hint),
        run=error.run_id,
        winner=error.winner if isinstance(error, DecisionConflict) else UNSET,
        marker=getattr(error, "marker", UNSET),
        step=error.step if isinstance(error, IndeterminateError) else UNSET,
    )
