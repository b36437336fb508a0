"""Journals with one record changed, well sealed and chained again: what a forger would leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET

from journal.codec import Entry, record_hash, seal
from journal.records import (
    ZERO_HASH,
    Commit,
    Interrupted,
    Record,
    Signal,
    StepCompleted,
    StepError,
    StepStarted,
)

from .build import NONCE

ENVELOPE = ("v", "n", "id", "at", "by", "prev")


def mutations(entries: Sequence[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Each with a word for it: a record left out, twice, in the other order, or with one field of
    another value."""
    records = [_without_summary(entry.record) for entry in entries]
    for index in range(len(records)):
        name = f"{index + 1} {type(records[index]).__name__}"
        yield f"{name} is left out", sealed([*records[:index], *records[index + 1 :]])
        yield f"{name} comes twice", sealed([*records[: index + 1], *records[index:]])
        if index + 1 < len(records):
            first, second = records[index : index + 2]
            swapped = [*records[:index], second, first, *records[index + 2 :]]
            yield f"{name} comes later", sealed(swapped)
        for what, other in _changes(records[index], records):
            changed = [*records[:index], other, *records[index + 1 :]]
            yield f"{name} has {what}", sealed(changed)


def _without_summary(record: Record) -> Record:
    return msgspec.structs.replace(record, summary=UNSET) if isinstance(record, Commit) else record


def sealed(records: Sequence[Record]) -> list[Entry]:
    """The records as a chain; what they say of each other by ordinal follows them."""
    places: dict[int, int] = {}
    for n, record in enumerate(records, 1):
        places.setdefault(record.n, n)
    entries: list[Entry] = []
    head = ZERO_HASH
    for n, record in enumerate(records, 1):
        claim = places.get(record.claim, record.claim)
        body, raw = seal(
            _moved(record, places),
            n=n,
            id=f"{NONCE}-{n}",
            at=record.at,
            by=record.by,
            prev=head,
            claim=claim,
        )
        head = record_hash(raw)
        entries.append(Entry(body, raw))
    return entries


def _moved(record: Record, places: dict[int, int]) -> Record:
    replace = msgspec.structs.replace
    if isinstance(record, StepStarted):
        return replace(record, permit=places.get(record.permit, record.permit))
    if isinstance(record, Signal) and isinstance(start := record.payload.get("start"), int):
        return replace(record, payload=record.payload | {"start": places.get(start, start)})
    return record


def _changes(record: Record, records: Sequence[Record]) -> Iterator[tuple[str, Record]]:
    hints = get_type_hints(type(record))
    for field in type(record).__struct_fields__:
        if field in ENVELOPE or field == "summary":
            continue
        value = getattr(record, field)
        seen = [getattr(other, field) for other in records if hasattr(other, field)]
        for other in _others(field, value, hints[field], seen):
            changed = msgspec.structs.replace(record, **{field: other})
            yield f"{field} {str(other)[:60]}", changed
    if isinstance(record, Signal):
        for payload in _payloads(record, records):
            yield f"payload {payload}", msgspec.structs.replace(record, payload=payload)
    if isinstance(record, StepCompleted):
        for given in _results():
            yield f"the results {given}", msgspec.structs.replace(record, **given)


def _others(field: str, value: Any, hint: Any, seen: list[Any]) -> list[Any]:
    """Other values that the field may have."""
    if field in ("payload", "result", "error", "interrupted", "waits"):
        return []
    found: list[Any] = []
    if get_origin(hint) is Literal:
        found += get_args(hint)
    elif isinstance(value, bool):
        found += [not value]
    elif isinstance(value, int):
        found += [0, value + 1, max(value - 1, 0)]
    elif isinstance(value, str):
        found += ["", f"{value}x"]
    elif isinstance(value, tuple):
        found += [(), value[:-1], value + value[:1]]
    found += [one for one in seen if isinstance(one, type(value))]
    return [one for index, one in enumerate(found) if one != value and one not in found[:index]]


def _payloads(record: Signal, records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    payload = record.payload
    for key, value in payload.items():
        yield {name: other for name, other in payload.items() if name != key}
        yield payload | {key: None}
        for other in records:
            if isinstance(other, Signal) and other.payload.get(key, value) != value:
                yield payload | {key: other.payload[key]}
            if key == "start" and isinstance(other, StepStarted) and other.n != value:
                yield payload | {"start": other.n}
    if record.name == "reconcile":
        yield {key: value for key, value in payload.items() if key != "result"} | {
            "outcome": "retry"
        }


def _results() -> Iterator[dict[str, Any]]:
    nothing = {"result": UNSET, "error": UNSET, "interrupted": UNSET}
    yield nothing
    yield nothing | {"result": "forged"}
    yield nothing | {"error": StepError(type="forged", message="")}
    yield nothing | {"interrupted": Interrupted()}
    yield nothing | {"result": 1, "interrupted": Interrupted()}
