"""Core: strict JSON values (R16). What the live run sees is what a replay will see."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from hashlib import blake2b
from typing import Any, cast

import msgspec

from .errors import NotEncodable
from .limits import VALUE_DEPTH_MAX
from .messages import JSON

_encode = msgspec.json.Encoder().encode
_canonical = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder().decode


def normalise(value: object, what: str) -> JSON:
    """The value after encode and decode; raises NotEncodable naming `what`, place and type.

    msgspec 0.23 converts silently (NaN to null, sets and bytes to lists and text, keys 1 and "1"
    into one): such values differ from their round trip, which is how they are found.
    """
    if value is None or value is True or value is False:
        return value  # its own round trip
    if type(value) is str and value.isascii():
        return value
    try:
        copy = _decode(_encode(value))
        if copy == value:
            _check_depth(copy, what)
            return copy
    except (TypeError, ValueError, RecursionError, OverflowError, msgspec.MsgspecError):
        pass  # the walk below names the place
    plain = _plain(value, what, 0)
    return _decode(_encode(plain))


def _check_depth(value: JSON, what: str) -> None:
    level: list[JSON] = [value]
    for _ in range(VALUE_DEPTH_MAX + 1):
        below: list[JSON] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(cast("dict[str, Any]", item).values())
            elif isinstance(item, list):
                below.extend(cast("list[Any]", item))
        if not below:
            return
        level = below
    raise NotEncodable(f"{what} is nested deeper than {VALUE_DEPTH_MAX} levels")


def _plain(value: object, where: str, depth: int) -> JSON:
    """The value in JSON types; tuples become lists, dataclasses and Structs become objects."""
    if depth > VALUE_DEPTH_MAX:
        raise NotEncodable(f"{where[:200]} is nested deeper than {VALUE_DEPTH_MAX} levels")
    match value:
        case None | bool() | int():
            return value
        case str():
            if any("\ud800" <= char <= "\udfff" for char in value):
                raise NotEncodable(f"{where} holds half a surrogate pair, which is not text")
            return str(value)
        case float():
            if value - value != 0:
                raise NotEncodable(f"{where} is {value}, which JSON does not have")
            return value
        case dict():
            plain: dict[str, JSON] = {}
            for key, item in cast("dict[object, object]", value).items():
                if not isinstance(key, str):
                    raise NotEncodable(f"{where} has a key of type {type(key).__name__}, not str")
                name = _plain(key, f"a key of {where}", depth)
                plain[name] = _plain(item, f"{where}.{ascii(key[:64])[1:-1]}", depth + 1)
            return plain
        case list() | tuple():
            items = cast("list[object]", value)
            return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(items)]
        case _ if isinstance(value, msgspec.Struct) or (
            is_dataclass(value) and not isinstance(value, type)
        ):
            fields = value.__struct_fields__ if isinstance(value, msgspec.Struct) else None
            names = fields if fields is not None else tuple(value.__dataclass_fields__)  # type: ignore[union-attr]
            return {
                name: _plain(getattr(value, name), f"{where}.{name}", depth + 1) for name in names
            }
        case _:
            raise NotEncodable(
                f"{where} is of type {type(value).__name__}, which is not JSON",
                hint="use None, bool, int, finite float, str, list, tuple, dict with str keys, "
                "a dataclass or a msgspec Struct",
            )


class BadJSON(ValueError):
    """Text that is not strict JSON; the message says why."""


def parse_strict(text: str | bytes) -> JSON:
    """Parse JSON refusing what parsers let pass: duplicate keys, NaN, half surrogates, depth.

    Raises BadJSON. The standard library's parser is used because msgspec's keeps the last of two
    equal keys and cannot be asked not to.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        return normalise(value, "the value")
    except UnicodeDecodeError as error:
        raise BadJSON("it is not UTF-8") from error
    except RecursionError as error:
        raise BadJSON("it is nested too deep") from error
    except NotEncodable as error:
        raise BadJSON(error.message) from error
    except json.JSONDecodeError as error:
        raise BadJSON(f"{error.msg.lower()} at character {error.pos}") from error
    except ValueError as error:
        raise BadJSON(str(error)) from error


def _unique(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise BadJSON(f"the key {twice!a} stands twice")
    return found


def _no_constant(name: str) -> JSON:
    raise BadJSON(f"{name} is not JSON")


def canonical(value: JSON) -> bytes:
    """UTF-8 JSON, keys sorted, no blanks: equal values have equal bytes (PROTOCOL 6)."""
    return _canonical(value)


def digest(*parts: str | bytes) -> str:
    """BLAKE2b-128 over the parts, each behind its length, so that parts can't run together."""
    state = blake2b(digest_size=16)
    for part in parts:
        raw = part.encode() if isinstance(part, str) else part
        state.update(len(raw).to_bytes(8, "big"))
        state.update(raw)
    return state.hexdigest()


def call_digest(tool: str, value: JSON) -> str:
    """What two calls are the same by: tool and canonical input (R43, R44); also ends their key."""
    return digest(tool, canonical(value))


def marker_digest(run: str, step: str, call: str, text: str, tool_revision: str) -> str:
    """16 hex over run, step, call digest, gate text and tool revision (R32)."""
    return digest(run, step, call, text, tool_revision)[:16]


class Unrecordable(Exception):
    """What the call returned is no JSON. Not the same as the call raising NotEncodable."""

    def __init__(self, error: NotEncodable) -> None:
        super().__init__(error.message)
        self.error = error


def recordable(value: object, what: str) -> JSON:
    """The result of a call as JSON; raises Unrecordable."""
    try:
        return normalise(value, what)
    except NotEncodable as error:
        raise Unrecordable(error) from error
