"""Core: what a signal or an input says: shapes, strictly parsed (PROTOCOL 8, R59)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from . import ids
from .allowed import allowed_values
from .errors import BadPayload, NotEncodable
from .escape import visible
from .limits import SIGNAL_BYTES_MAX
from .messages import JSON
from .records import SignalName
from .values import BadJSON, canonical, normalise, parse_strict

# `request_id` is optional in each payload (PROTOCOL 8); it becomes the record's own field.


class Approve(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Let the call behind this marker run, once."""

    marker: str
    comment: str = ""
    request_id: str = ""


class Reject(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Refuse the call behind this marker; the model sees the reason."""

    marker: str
    reason: str = ""
    request_id: str = ""


class Reconcile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Say what became of a write: `done` with its result, or `retry`.

    `start` is the ordinal of the start it answers; left out it means the step's only one.
    """

    step: str
    outcome: Literal["done", "retry"]
    start: int | None = None
    result: JSON | UnsetType = UNSET
    request_id: str = ""


class Cancel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """End the run: nothing new is started, a write that runs is let end (R56)."""

    reason: str = ""
    request_id: str = ""


class Resume(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """End a pause or a wait for a retry; give a run that failed in a retriable way another try."""

    reason: str = ""
    request_id: str = ""


class Late(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By a worker that lost the run: what its own write returned (R29)."""

    step: str
    start: int
    result: JSON
    request_id: str = ""


class Child(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By a worker: the child run has ended so (R57). `outcome` as views.end_json."""

    run: str
    outcome: dict[str, Any]
    request_id: str = ""


AnySignal: TypeAlias = Approve | Reject | Reconcile | Cancel | Resume | Late | Child
_SHAPES: dict[str, type[AnySignal]] = {
    "approve": Approve,
    "reject": Reject,
    "reconcile": Reconcile,
    "cancel": Cancel,
    "resume": Resume,
    "late": Late,
    "child": Child,
}
WORKERS_ONLY = {"late", "child"}


def parse_signal(
    name: str, payload: AnySignal | Mapping[str, Any] | bytes | str, *, worker: bool = False
) -> AnySignal:
    """The payload as a signal; raises BadPayload with the reason. Unknown keys, loose types and
    duplicate keys are refused, never repaired. `worker`: late and child are signals, too."""
    shape = _SHAPES.get(name)
    if shape is None or (name in WORKERS_ONLY and not worker):
        raise BadPayload(
            f"{ids.shown(name)} is not a signal",
            hint=f"signals are {', '.join(sorted(_SHAPES.keys() - WORKERS_ONLY))}",
        )
    if isinstance(payload, Struct) and not isinstance(payload, shape):
        raise BadPayload(f"a {type(payload).__name__} was sent as {name}")
    try:
        value = _parsed(payload)
        if not worker and len(canonical(value)) > SIGNAL_BYTES_MAX:
            raise BadPayload(f"a signal's payload is at most {SIGNAL_BYTES_MAX} bytes")
        if not isinstance(value, dict):
            raise BadPayload(f"the payload of {name} is not a JSON object")
        found = msgspec.convert(value, shape)
    except BadJSON as error:
        raise BadPayload(f"the payload of {name} is not JSON: {_short(error)}") from error
    except NotEncodable as error:
        raise BadPayload(f"the payload of {name} is not JSON: {_short(error)}") from error
    except msgspec.ValidationError as error:
        what = f"the payload of {name} is wrong: {_short(error)}"
        raise BadPayload(what, hint=allowed_values(shape, error)) from error
    if isinstance(found, Reconcile):
        _check_reconcile(found)
    return found


def _short(error: Exception) -> str:
    """What parsers say, without all that they quote."""
    text = visible(str(error)[:300])
    return text[:300]


def _parsed(payload: AnySignal | Mapping[str, Any] | bytes | str) -> JSON:
    if isinstance(payload, bytes | str):
        size = len(payload)
        if size > SIGNAL_BYTES_MAX:
            raise BadPayload(f"a signal's payload is at most {SIGNAL_BYTES_MAX} bytes, not {size}")
        return parse_strict(payload)
    plain = msgspec.to_builtins(payload) if isinstance(payload, Struct) else dict(payload)
    return normalise(plain, "the payload")


def _check_reconcile(signal: Reconcile) -> None:
    if signal.outcome == "done" and signal.result is UNSET:
        raise BadPayload("reconcile done needs the result", hint="null is a result too")
    if signal.outcome == "retry" and signal.result is not UNSET:
        raise BadPayload("reconcile retry takes no result")


def name_of(signal: AnySignal) -> SignalName:
    """The signal's name on the wire."""
    return cast("SignalName", type(signal).__name__.lower())


KEPT_ID: Final = "sig:"
"""Begins the request id of a kept signal that has none of its own: what it is in the stream."""


def given_request_id(value: str | None) -> str | None:
    """As parse_request_id, for something new; raises BadPayload also for one that begins as those
    of kept signals do: the signal that comes to have it would be taken for a repeat, and dropped.
    """
    found = parse_request_id(value)
    if found is not None and found.startswith(KEPT_ID):
        raise BadPayload(f"a request id that begins with {KEPT_ID} is a kept signal's own")
    return found


def parse_request_id(value: str | None) -> str | None:
    """A caller's request id, or None; raises BadPayload for one that is not printable ASCII."""
    if value is None:
        return None
    if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadPayload("a request id is text")
    if not value.isascii() or not value.isprintable() or not 1 <= len(value) <= 128:
        raise BadPayload("a request id is 1 to 128 printable ASCII characters")
    return value
