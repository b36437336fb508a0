"""Core: which values may stand where a wrong one was found, for the hint of an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import inspect

_PLACE = re.compile(r".* - at `\$(?P<path>.*)`", re.DOTALL)  # as msgspec 0.23.0 says it
_STEP = re.compile(r"\.(?P<field>\w+)|\[[^\]]*\]")


def allowed_values(shape: Any, error: msgspec.ValidationError) -> str:
    """`mode is one of follow_up, steer`, where only a few values may stand; else ""."""
    found = _PLACE.fullmatch(str(error))
    if found is None:
        return ""
    types = [inspect.type_info(shape)]
    field = ""
    for step in _STEP.finditer(found["path"]):
        field = step["field"] or field
        types = [after for one in types for after in _after(one, step["field"])]
    values = [str(value) for one in types for value in _values(one)]
    return f"{field} is one of {', '.join(dict.fromkeys(values))}" if values else ""


def _alternatives(one: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(one, inspect.UnionType):
        yield from one.types
    else:
        yield one


def _after(one: inspect.Type, field: str | None) -> Iterator[inspect.Type]:
    """The types behind one step of the path."""
    for each in _alternatives(one):
        if isinstance(each, inspect.StructType) and field is not None:
            if field == each.tag_field:
                yield inspect.LiteralType((each.tag,))
            for known in each.fields:
                if known.encode_name == field:
                    yield known.type
        elif isinstance(each, inspect.ListType | inspect.VarTupleType) and field is None:
            yield each.item_type


def _values(one: inspect.Type) -> Iterator[Any]:
    for each in _alternatives(one):
        if isinstance(each, inspect.LiteralType):
            yield from each.values
