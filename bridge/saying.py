"""Shell: a signal or an input that came by NATS: strictly read, and done by the journal's doors.

The one path of the signals that were kept and of the requests: only who waits for the answer
differs. Every rule is the journal's.
"""

from __future__ import annotations

from typing import Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from journal import doors
from journal.errors import BadPayload, TooLarge
from journal.escape import visible
from journal.limits import SIGNAL_BYTES_MAX
from journal.messages import JSON
from journal.signal_address import SignalAddress
from journal.signals import parse_signal
from journal.store import Store
from journal.values import BadJSON, parse_strict

from .shapes import InputReceipt, SignalReceipt

T = TypeVar("T", bound=Struct)

REASON_CHARS: Final = 300


class InputPayload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The signal `input`."""

    content: JSON | UnsetType = UNSET
    mode: Literal["steer", "follow_up"] = "steer"
    request_id: str = ""


class Said(Struct, frozen=True, kw_only=True):
    """What became of it: a word, and the answer as docs/http.md has it."""

    result: Literal["applied", "kept", "repeated"]
    answer: SignalReceipt | InputReceipt


async def say(
    store: Store,
    address: SignalAddress,
    data: bytes,
    *,
    header: str | None,
    kept_id: str | None = None,
    known: int = 0,
) -> Said:
    """Do it. The request id: the payload's, else the publisher's header, else `kept_id`, of a
    message that will be delivered again. `known`, and what is raised: as doors.signal has it."""
    if address.name == "input":
        wanted = read_payload(data, InputPayload, "input", SIGNAL_BYTES_MAX)
        found = await doors.submit(
            store,
            address.run,
            given(wanted.content, "input", "content"),
            mode=wanted.mode,
            request_id=wanted.request_id or header or None,
            kept_id=kept_id,
            known=known,
            by=address.by,
        )
        result = "applied" if found.created else "repeated"
        return Said(result=result, answer=InputReceipt.of(address.run, found))
    signal = parse_signal(address.name, data)
    receipt = await doors.signal(
        store,
        address.run,
        address.name,
        signal,
        request_id=signal.request_id or header or None,
        kept_id=kept_id,
        known=known,
        by=address.by,
    )
    return Said(result=receipt.result, answer=SignalReceipt.of(address.run, receipt))


def read_payload(data: bytes, shape: type[T], what: str, bytes_max: int) -> T:
    """The payload of `what`; raises BadPayload, TooLarge. Nothing is repaired (R59)."""
    if len(data) > bytes_max:
        raise TooLarge(f"the payload of {what} is at most {bytes_max} bytes, not {len(data)}")
    try:
        value = parse_strict(data)
        if not isinstance(value, dict):
            raise BadPayload(f"the payload of {what} is not a JSON object")
        return msgspec.convert(value, shape)
    except BadJSON as error:
        raise BadPayload(f"the payload of {what} is not JSON: {_short(error)}") from error
    except msgspec.ValidationError as error:
        raise BadPayload(f"the payload of {what} is wrong: {_short(error)}") from error


def given(value: JSON | UnsetType, what: str, field: str) -> JSON:
    """A field that must be there; null is a value. Raises BadPayload."""
    if isinstance(value, UnsetType):
        raise BadPayload(f"the payload of {what} is wrong: it has no `{field}`")
    return value


def _short(error: Exception) -> str:
    return visible(str(error)[:REASON_CHARS])[:REASON_CHARS]
