"""R16: values are strict JSON, and a first run sees what a replay will see."""

from __future__ import annotations

import datetime as dt
import decimal
import enum
import json
import math
import uuid
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.errors import NotEncodable
from journal.limits import VALUE_DEPTH_MAX
from journal.values import (
    BadJSON,
    call_digest,
    canonical,
    digest,
    marker_digest,
    normalise,
    parse_strict,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(allow_nan=False, allow_infinity=False),
    text,
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
py_values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(text, inner, max_size=3),
    ),
    max_leaves=12,
)


def exact(value: Any) -> Any:
    """The value so that == also tells 1 from 1.0 from True, and -0.0 from 0.0."""
    match value:
        case dict():
            return {key: exact(item) for key, item in value.items()}
        case list():
            return [exact(item) for item in value]
        case float():
            return ("float", value, math.copysign(1, value))
        case _:
            return (type(value).__name__, value)


def nested(depth: int, leaf: Any = None, *, into: type = list) -> Any:
    value = leaf
    for _ in range(depth):
        value = into([value])
    return value


@dataclass
class Point:
    x: int
    tags: tuple[str, ...] = ()
    more: dict[Any, Any] = field(default_factory=dict[Any, Any])


class Ticket(msgspec.Struct):
    title: str
    parts: tuple[int, ...] = ()


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


# ---- the round trip ---------------------------------------------------------------------------


@given(json_values)
def test_a_json_value_comes_back_exactly(value: Any):
    assert exact(normalise(value, "v")) == exact(value)


@given(py_values)
def test_the_first_run_sees_what_a_replay_decodes(value: Any):
    live = normalise(value, "v")
    assert exact(msgspec.json.decode(canonical(live))) == exact(live)
    assert exact(json.loads(canonical(live))) == exact(live)


@given(py_values)
def test_a_value_that_went_through_once_goes_through_unchanged(value: Any):
    once = normalise(value, "v")
    assert exact(normalise(once, "v")) == exact(once)


@given(json_values)
def test_the_live_value_is_a_copy_that_a_tool_cannot_change(value: Any):
    original = [value]
    live = normalise(original, "v")
    live.append("changed")
    assert original == [value]


@pytest.mark.parametrize(
    "number", [2**53 + 1, 2**63, 2**64, 2**70, -(2**100), -0.0, 0.1 + 0.2, 5e-324, 1e22, 1.0]
)
def test_numbers_are_exact(number: float):
    assert exact(normalise(number, "v")) == exact(number)
    assert exact(parse_strict(canonical(number))) == exact(number)


def test_tuples_dataclasses_and_structs_become_lists_and_objects():
    point = Point(1, ("a",), {"b": Ticket("t", (1, 2))})
    assert normalise((point,), "v") == [
        {"x": 1, "tags": ["a"], "more": {"b": {"title": "t", "parts": [1, 2]}}}
    ]


def test_an_int_enum_is_its_number():
    assert exact(normalise([Level.HIGH], "v")) == exact([3])


@pytest.mark.parametrize("text", ["\0", "\ufeff", "\u202e", "e\u0301", "👩\u200d💻", "\x80ÿ"])
def test_every_text_that_is_text_survives(text: str):
    assert normalise({text: text}, "v") == {text: text}


# ---- what is refused --------------------------------------------------------------------------

REFUSED = {
    "NaN": (math.nan, "nan"),
    "infinity": (math.inf, "inf"),
    "minus infinity": (-math.inf, "-inf"),
    "set": ({1}, "type set"),
    "frozenset": (frozenset({1}), "type frozenset"),
    "bytes": (b"x", "type bytes"),
    "bytearray": (bytearray(b"x"), "type bytearray"),
    "memoryview": (memoryview(b"x"), "type memoryview"),
    "datetime": (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), "type datetime"),
    "date": (dt.date(2026, 1, 1), "type date"),
    "time": (dt.time(1), "type time"),
    "timedelta": (dt.timedelta(1), "type timedelta"),
    "decimal": (decimal.Decimal("1.5"), "type Decimal"),
    "uuid": (uuid.UUID(int=1), "type UUID"),
    "enum": (Colour.RED, "type Colour"),
    "raw": (msgspec.Raw(b"1"), "type Raw"),
    "unset": (msgspec.UNSET, "type UnsetType"),
    "half surrogate": ("\ud83d", "half a surrogate"),
    "key of int": ({1: "a"}, "key of type int"),
    "keys that merge": ({1: "a", "1": "b"}, "key of type int"),
    "key None": ({None: 1}, "key of type NoneType"),
    "key that is half a surrogate": ({"\udc00": 1}, "half a surrogate"),
    "generator": ((i for i in ()), "type generator"),
    "object": (object(), "type object"),
    "function": (print, "type builtin_function_or_method"),
    "class": (Point, "type type"),
    "exception": (ValueError("x"), "type ValueError"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_json_does_not_have_is_refused_naming_it(case: str):
    value, named = REFUSED[case]
    with pytest.raises(NotEncodable) as raised:
        normalise(value, "the result of pay")
    assert named in raised.value.message
    assert "the result of pay" in raised.value.message


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_found_at_its_place(case: str):
    value, named = REFUSED[case]
    with pytest.raises(NotEncodable) as raised:
        normalise({"items": [0, Point(1, more={"deep": (value,)})]}, "v")
    assert named in raised.value.message
    assert "v.items[1].more.deep[0]" in raised.value.message


def test_a_value_that_holds_itself_is_refused():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(NotEncodable, match="nested deeper"):
        normalise(loop, "v")


@pytest.mark.parametrize("into", [list, tuple])
@pytest.mark.parametrize("extra", [2, 1000, 100_000])
def test_a_value_nested_too_deep_is_refused(into: type, extra: int):
    with pytest.raises(NotEncodable, match="nested deeper"):
        normalise(nested(VALUE_DEPTH_MAX + extra, 1, into=into), "v")


def test_the_depth_limit_is_the_same_for_a_value_and_its_round_trip():
    once = normalise(nested(VALUE_DEPTH_MAX, 1, into=tuple), "v")
    assert normalise(once, "v") == once


# ---- text from outside ------------------------------------------------------------------------

BAD_TEXT = {
    "empty": (b"", "expecting value"),
    "open object": (b"{", "at character 1"),
    "two values": (b"1 2", "extra data"),
    "trailing comma": (b"[1,]", "at character"),
    "single quotes": (b"{'a': 1}", "at character"),
    "comment": (b"1 // one", "extra data"),
    "NaN": (b'{"a": NaN}', "NaN is not JSON"),
    "Infinity": (b"[Infinity]", "Infinity is not JSON"),
    "minus Infinity": (b"[-Infinity]", "-Infinity is not JSON"),
    "a float that is infinite": (b"[1e999]", "inf"),
    "duplicate keys": (b'{"a": 1, "a": 2}', "'a' stands twice"),
    "duplicate keys by escape": (b'{"a": 1, "\\u0061": 2}', "'a' stands twice"),
    "duplicate keys below": (b'[{"x": {"a": 1, "b": 2, "a": 1}}]', "'a' stands twice"),
    "half surrogate": (b'"\\ud83d"', "half a surrogate"),
    "half surrogate in a key": (b'{"\\udc00": 1}', "half a surrogate"),
    "not UTF-8": (b'"\xff\xfe"', "not UTF-8"),
    "UTF-16": ("{}".encode("utf-16"), "not UTF-8"),
    "a bare control character": (b'"a\nb"', "control character"),
    "too deep": (b"[" * 200 + b"]" * 200, "nested"),
    "far too deep": (b"[" * 10_000 + b"]" * 10_000, "nested"),
    "far too deep and open": (b'{"a":' * 100_000, "nested"),
    "a number of 5000 digits": (b"1" * 5000, "digits"),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_text_that_is_not_strict_json_is_refused_saying_why(case: str):
    raw, why = BAD_TEXT[case]
    with pytest.raises(BadJSON) as raised:
        parse_strict(raw)
    assert why in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_byte_order_mark_is_refused():
    with pytest.raises(BadJSON):
        parse_strict(b"\xef\xbb\xbf{}")
    with pytest.raises(BadJSON):
        parse_strict("\ufeff{}")


@given(json_values)
def test_strict_parsing_reads_what_any_writer_writes(value: Any):
    assert exact(parse_strict(json.dumps(value))) == exact(value)
    assert exact(parse_strict(json.dumps(value, ensure_ascii=False).encode())) == exact(value)


@given(st.binary(max_size=40) | st.text(max_size=40))
def test_strict_parsing_answers_any_input_with_a_value_or_bad_json(raw: bytes | str):
    try:
        value = parse_strict(raw)
    except BadJSON:
        return
    assert exact(normalise(value, "v")) == exact(value)


# ---- canonical bytes and digests --------------------------------------------------------------


@given(json_values, json_values)
def test_two_values_have_equal_canonical_bytes_only_if_they_are_equal(one: Any, other: Any):
    assert (canonical(one) == canonical(other)) == (exact(one) == exact(other))


@given(st.dictionaries(text, scalars, max_size=6), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], random: Any):
    keys = list(value)
    random.shuffle(keys)
    assert canonical({key: value[key] for key in keys}) == canonical(value)


def test_canonical_bytes_are_utf8_without_blanks():
    assert canonical({"b": [1, 2.5], "a": "é"}) == '{"a":"é","b":[1,2.5]}'.encode()


@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_parts_of_a_digest_never_run_together(one: list[bytes], other: list[bytes]):
    assert (digest(*one) == digest(*other)) == (one == other)


def test_a_call_is_the_same_call_by_tool_and_input_alone():
    assert call_digest("pay", {"a": 1, "b": 2}) == call_digest("pay", {"b": 2, "a": 1})
    calls = [("pay", {"a": 1}), ("pay", {"a": 1.0}), ("pay", {"a": "1"}), ("pa", {"ya": 1})]
    calls += [("pay", {"a": True}), ("pay", {}), ("pay", None), ("", {"a": 1})]
    assert len({call_digest(tool, value) for tool, value in calls}) == len(calls)


@pytest.mark.parametrize("place", range(5))
def test_a_marker_binds_run_step_arguments_gate_text_and_tool_revision(place: int):
    parts = ["a1", "tool/1/0/pay", "c" * 32, "Pay?", "rev"]
    changed = [*parts]
    changed[place] += "x"
    assert marker_digest(*parts) != marker_digest(*changed)
    assert len(marker_digest(*parts)) == 16
