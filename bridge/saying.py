"""Shell: a signal or an input that came by NATS: strictly read, and done by the journal's doors.

The one path of the signals that were kept and of the requests: only who waits for the answer
differs. Every rule is the journal's.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from journal import doors
from journal.doors import Receipt
from journal.errors import BadPayload, DecisionConflict, TooLarge
from journal.escape import visible
from journal.inputs import InputState
from journal.limits import SIGNAL_BYTES_MAX
from journal.messages import JSON
from journal.signal_address import SignalAddress
from journal.signals import parse_request_id, parse_signal
from journal.store import Store
from journal.values import BadJSON, canonical, parse_strict

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
    answer: dict[str, Any]


async def say(
    store: Store,
    address: SignalAddress,
    data: bytes,
    *,
    header: str | None,
    number: str | None = None,
) -> Said:
    """Do it. The request id: the payload's, else the publisher's header, else `number`, of a
    message that will be delivered again. Raises what doors.signal and doors.submit raise."""
    if address.name == "input":
        wanted = read_payload(data, InputPayload, "input", SIGNAL_BYTES_MAX)
        return await _submit(store, address, wanted, header, number)
    signal = parse_signal(address.name, data)
    request = signal.request_id or header or number
    receipt = await doors.signal(
        store, address.run, address.name, signal, request_id=request, by=address.by
    )
    return Said(result=receipt.result, answer=receipt_json(address.run, receipt))


async def _submit(
    store: Store,
    address: SignalAddress,
    wanted: InputPayload,
    header: str | None,
    number: str | None,
) -> Said:
    content = given(wanted.content, "input", "content")
    own = parse_request_id(wanted.request_id or header or None)
    found = await doors.submit(
        store,
        address.run,
        content,
        mode=wanted.mode,
        request_id=own or number,
        by=address.by,
    )
    if own is None and (found.mode, canonical(found.content)) != (wanted.mode, canonical(content)):
        # A repeat of an input gets the original, whatever it says; but a number of the stream is
        # nobody's choice: a stream that was made anew counts from 1 again.
        raise DecisionConflict(
            f"{found.request_id} was another input, before the stream was made anew",
            winner=0,
            run_id=address.run,
            hint="send it again with a request_id",
        )
    result = "applied" if found.created else "repeated"
    return Said(result=result, answer=input_json(address.run, found))


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


def receipt_json(run: str, receipt: Receipt) -> dict[str, Any]:
    return {
        "run": run,
        "request_id": receipt.request_id,
        "result": receipt.result,
        "n": receipt.n,
    }


def input_json(run: str, found: InputState) -> dict[str, Any]:
    return {
        "run": run,
        "request_id": found.request_id,
        "mode": found.mode,
        "content": found.content,
        "status": found.status,
    }
