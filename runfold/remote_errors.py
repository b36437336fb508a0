"""Core: what a bridge answers where it refuses, as the errors they are here: one word, one code.

`problem+json` of HTTP and the error object of NATS replies say the same (docs/http.md).
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec import Struct

from journal.errors import (
    BadPayload,
    DecisionConflict,
    Fenced,
    InputMismatch,
    InvalidId,
    JournalDamaged,
    NewerVersion,
    NotEncodable,
    NotProvisioned,
    PermissionDenied,
    RunCancelled,
    RunFinished,
    RunfoldError,
    RunNotFound,
    StaleSignal,
    StoreUnavailable,
    TooLarge,
)
from journal.escape import visible

TEXT_CHARS_MAX: Final = 2000
"""Of what the other side says: an error is a line, whoever wrote it."""


class Unauthorized(RunfoldError):
    """The bridge has not been given a token that it knows."""

    code = "unauthorized"


class Forbidden(RunfoldError):
    """The token's scopes don't reach so far."""

    code = "forbidden"


class BadRequest(RunfoldError):
    """The bridge does not take such a request: it is of another version."""

    code = "bad_request"


class NotFound(RunfoldError):
    """There is nothing at this address of the bridge."""

    code = "not_found"


class Busy(RunfoldError):
    """The bridge does as much as it may at once, or is stopping."""

    code = "busy"


class BridgeFailed(RunfoldError):
    """A bug of the bridge."""

    code = "internal"


class BridgeLost(StoreUnavailable):
    """No answer came, or half of one: asking again may bring it. `unheard`: nobody was reached, so
    nothing was done."""

    def __init__(self, message: str, *, unheard: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.unheard = unheard


class NoBridge(StoreUnavailable):
    """What answers at the address is no bridge."""


_PLAIN: Final[dict[str, type[RunfoldError]]] = {
    kind.code: kind
    for kind in (
        *(BadPayload, BadRequest, BridgeFailed, Busy, Fenced, Forbidden, InputMismatch, InvalidId),
        *(NewerVersion, NotEncodable, NotFound, NotProvisioned, RunCancelled, RunFinished),
        *(RunNotFound, StaleSignal, StoreUnavailable, TooLarge, Unauthorized),
    )
}


class Problem(Struct, frozen=True, kw_only=True):
    """The fields of problem+json that say something here."""

    code: str
    detail: str
    hint: str = ""
    run: str | None = None
    winner: int = 0


class Refusal(Struct, frozen=True, kw_only=True):
    """What stands under `error` in a NATS reply."""

    code: str
    message: str
    hint: str = ""
    run: str | None = None


def problem_error(body: bytes) -> RunfoldError | None:
    """The error that a problem+json tells; None where the bytes are none."""
    try:
        found = msgspec.json.decode(body, type=Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return _error(found.code, found.detail, found.run, found.hint, found.winner)


def refusal_error(value: Any) -> RunfoldError:
    """The error of a NATS reply's `error`."""
    try:
        found = msgspec.convert(value, Refusal)
    except msgspec.ValidationError as error:
        return BridgeFailed(f"the bridge refused, and its answer can't be read: {error}")
    return _error(found.code, found.message, found.run, found.hint, 0)


def _error(code: str, message: str, run: str | None, hint: str, winner: int) -> RunfoldError:
    message, hint = message[:TEXT_CHARS_MAX], hint[:TEXT_CHARS_MAX]
    match code:
        case DecisionConflict.code:
            return DecisionConflict(message, winner=winner, run_id=run, hint=hint)
        case JournalDamaged.code:
            return JournalDamaged(message, where="", run_id=run, hint=hint)
        case PermissionDenied.code:
            return PermissionDenied(message, subject="", run_id=run, hint=hint)
        case _:
            pass
    kind = _PLAIN.get(code)
    if kind is not None:
        return kind(message, run_id=run, hint=hint)
    what = f"the bridge refuses: {visible(code[:100])}: {message}"
    return RunfoldError(what, run_id=run, hint=hint)


def passing(error: RunfoldError) -> bool:
    """Whether the same question may be answered in a while."""
    return isinstance(error, BridgeLost | Busy) or type(error) is StoreUnavailable
