"""Tools as declared: what a model is told of them, and that ill-formed arguments never pass."""

from __future__ import annotations

import json
import types
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, field
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import limits
from journal.errors import InvalidId
from worker.tools import SAFE, BadArguments, Replay, Tool, ToolCall, read, write

UNSET = object()


@write
def charge(amount: int) -> str:
    """Charge the card."""
    return f"charged {amount}"


@dataclass
class Address:
    city: str
    zip_code: str = ""


@dataclass
class Order:
    to: Address
    lines: list[Address] = field(default_factory=list[Address])


class Colour(Enum):
    RED = "red"


class Card(msgspec.Struct, tag="card", rename="camel"):
    card_number: str


class Cash(msgspec.Struct, tag="cash"):
    amount: int


class Options(TypedDict, total=False):
    fast: bool
    tags: dict[str, int]


class Point(NamedTuple):
    x: int
    y: int


class Opaque:
    pass


def message_of(tool: Tool, arguments: str) -> str:
    with pytest.raises(BadArguments) as refused:
        tool.parse(arguments)
    message = str(refused.value)
    assert len(message) <= 300
    message.encode()  # it stands in a record
    return message


# ---- what a declaration says ------------------------------------------------------------------


def test_a_bare_write_is_unsafe_needs_approval_and_has_a_deadline():
    assert charge.spec.write is True
    assert charge.replay is Replay.UNSAFE
    assert charge.approval is True
    assert charge.timeout_s == limits.TOOL_TIMEOUT_S
    assert (charge.spec.name, charge.spec.description) == ("charge", "Charge the card.")


def test_a_read_is_safe_and_needs_no_approval():
    @read
    def lookup(q: str) -> str:
        return q

    assert (lookup.spec.write, lookup.replay, lookup.approval) == (False, SAFE, False)
    assert lookup.spec.description == ""


def test_keywords_are_taken_over():
    @write(name="pay.v2", timeout_s=5, approval=False, replay=SAFE)
    def pay(amount: int) -> None: ...

    @read(name="find", timeout_s=0.5)
    def lookup() -> None: ...

    assert (pay.spec.name, pay.timeout_s, pay.approval, pay.replay) == ("pay.v2", 5.0, False, SAFE)
    assert (lookup.spec.name, lookup.timeout_s) == ("find", 0.5)


def test_the_docstring_is_the_description_whole_and_dedented():
    @read
    def lookup() -> None:
        """Look it up.

        Twice:
            if need be.
        """

    assert lookup.spec.description == "Look it up.\n\nTwice:\n    if need be."


def test_calling_a_tool_calls_its_function():
    assert charge(3) == "charged 3"
    assert charge(amount=4) == "charged 4"


async def test_calling_an_async_tool_gives_what_can_be_awaited():
    @read
    async def lookup(q: str) -> str:
        return q

    assert await lookup("x") == "x"


def test_a_tool_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        charge.approval = False  # pyright: ignore[reportAttributeAccessIssue]


def test_a_bound_method_can_be_a_tool():
    class Client:
        def find(self, q: str) -> tuple[object, str]:
            return self, q

    client = Client()
    found = read(client.find)
    assert list(found.spec.schema["properties"]) == ["q"]
    assert found("x") == (client, "x")


def test_the_revision_changes_with_what_an_approval_relies_on_and_with_nothing_else():
    def make(
        hint: Any = int, name: str = "f", revision: str = "1", doc: str = "", **more: Any
    ) -> str:
        def f(a: Any) -> None: ...

        f.__annotations__["a"] = hint
        f.__doc__ = doc
        return write(name=name, revision=revision, **more)(f).revision

    changed = [make(), make(hint=str), make(name="g"), make(revision="2"), make(replay=SAFE)]
    assert len(set(changed)) == len(changed)
    assert make() == make(doc="New words.") == make(timeout_s=1) == make(approval=False)


# ---- the schema -------------------------------------------------------------------------------


def test_the_schema_of_a_small_tool_is_exactly_this():
    @read
    def find(q: Annotated[str, msgspec.Meta(min_length=1)], *, limit: int = 10) -> None: ...

    assert find.spec.schema == {
        "type": "object",
        "properties": {
            "q": {"type": "string", "minLength": 1},
            "limit": {"type": "integer", "default": 10},
        },
        "required": ["q"],
        "additionalProperties": False,
    }


def test_the_schema_of_a_tool_without_parameters_is_an_empty_object():
    @read
    def now() -> None: ...

    assert now.spec.schema == {
        "type": "object",
        "properties": {},
        "required": [],
        "additionalProperties": False,
    }
    assert now.parse("{}") == {}


def test_a_nested_dataclass_is_in_the_schema_and_comes_typed():
    @write
    def ship(order: Order) -> None: ...

    assert ship.spec.schema["properties"] == {"order": {"$ref": "#/$defs/Order"}}
    assert ship.spec.schema["$defs"]["Address"] == {
        "title": "Address",
        "type": "object",
        "properties": {"city": {"type": "string"}, "zip_code": {"type": "string", "default": ""}},
        "required": ["city"],
        "additionalProperties": False,
    }
    text = '{"order": {"to": {"city": "Bern"}, "lines": [{"city": "Rom"}]}}'
    plain = ship.parse(text)
    assert plain == json.loads(text)  # as the model gave it, without the defaults
    assert ship.typed(plain) == {"order": Order(Address("Bern"), [Address("Rom")])}


def test_a_tool_call_parameter_is_not_in_the_schema_and_the_model_cannot_set_it():
    @write
    def pay(amount: int, call: ToolCall) -> None: ...

    assert list(pay.spec.schema["properties"]) == ["amount"]
    assert pay.call_parameter == "call"
    assert "call" in message_of(pay, '{"amount": 1, "call": {}}')


def _takes(default: Any) -> Tool:
    def f(a: Any = None) -> None: ...

    f.__defaults__ = (default,)
    return read(f)


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        (None, None),
        ([1, 2], [1, 2]),
        ((1, 2), [1, 2]),
        (Colour.RED, "red"),
        (Address("Bern"), {"city": "Bern", "zip_code": ""}),
        (float("inf"), UNSET),
        (Opaque(), UNSET),
    ],
)
def test_a_default_makes_the_argument_optional_and_is_shown_where_it_is_json(
    default: object, shown: object
):
    tool = _takes(default)
    assert tool.spec.schema["required"] == []
    assert tool.spec.schema["properties"]["a"].get("default", UNSET) == shown
    assert tool.typed({}) == {}  # the function's own default applies


def test_a_schema_is_strict_json_that_stands_for_itself():
    @write
    def pay(by: Card | Cash, options: Options, at: Point, colour: Colour = Colour.RED) -> None: ...

    text = json.dumps(pay.spec.schema, allow_nan=False)
    assert json.loads(text) == pay.spec.schema
    wanted = {ref.split('"')[0] for ref in text.split('"#/$defs/')[1:]}
    assert wanted == set(pay.spec.schema["$defs"]) == {"Card", "Cash", "Options", "Point", "Colour"}


# ---- mistakes in a declaration ----------------------------------------------------------------


def _var_args(*args: int) -> None: ...
def _var_keywords(**kwargs: int) -> None: ...
def _positional(a: int, /) -> None: ...
def _no_hint(a) -> None: ...  # pyright: ignore
def _complex(a: complex) -> None: ...
def _opaque(a: Opaque | None = None) -> None: ...
def _callback(a: Callable[[int], int]) -> None: ...
def _two_calls(a: ToolCall, b: ToolCall) -> None: ...
def _maybe_call(a: ToolCall | None = None) -> None: ...
def _calls(a: list[ToolCall]) -> None: ...
def _annotated_call(a: Annotated[ToolCall, "x"]) -> None: ...
def _generator(a: int) -> Iterator[int]:
    yield a


async def _async_generator(a: int) -> AsyncIterator[int]:
    yield a


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (_var_args, "args"),
        (_var_keywords, "kwargs"),
        (_positional, "positional-only"),
        (cast("Any", _no_hint), "a has no type hint"),
        (_complex, "complex"),
        (_opaque, "Opaque"),
        (_callback, "Callable"),
        (_two_calls, "a and b are both ToolCall"),
        (_maybe_call, "annotate parameter a as ToolCall"),
        (_calls, "annotate parameter a as ToolCall"),
        (_annotated_call, "annotate parameter a as ToolCall"),
        (_generator, "generator"),
        (_async_generator, "generator"),
        (print, "builtin_function_or_method"),
        (Opaque, "type"),
        ("charge", "str"),
        (charge, "Tool"),
        (types.SimpleNamespace(), "SimpleNamespace"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_at_its_definition(fn: Any, said: str):
    for declare in (read, write, read(), write()):
        with pytest.raises(TypeError, match=said):
            declare(fn)


def test_a_hint_that_cannot_be_resolved_is_refused_at_the_definition():
    @dataclass
    class Local:
        a: int

    def local(a: Local) -> None: ...

    with pytest.raises(TypeError, match=r"tool .*local: .*'Local'.* module level"):
        read(local)


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "<lambda>", "сharge", "x" * (limits.NAME_CHARS_MAX + 1)]
)
def test_a_name_that_is_none_is_refused(name: str):
    def f() -> None: ...

    with pytest.raises(InvalidId):
        read(name=name)(f)


@pytest.mark.parametrize("timeout_s", [0, -1, float("inf"), float("nan"), 1e12])
def test_a_deadline_is_above_zero_and_a_date(timeout_s: float):
    def f() -> None: ...

    for declare in (read(timeout_s=timeout_s), write(timeout_s=timeout_s)):
        with pytest.raises(ValueError, match="timeout_s is above 0 and at most"):
            declare(f)


@pytest.mark.parametrize(
    "keywords",
    [{"replay": "safe"}, {"approval": "no"}, {"revision": 2}, {"name": 3}, {"timeout_s": "5"}],
)
def test_a_keyword_of_the_wrong_type_is_refused_by_name(keywords: dict[str, Any]):
    def f() -> None: ...

    with pytest.raises(TypeError, match=f"{next(iter(keywords))} must be"):
        write(**keywords)(f)


# ---- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ('{"amount": 10', "not strict JSON"),
        ("", "not strict JSON"),
        ("null", "Expected `object`, got `null`"),
        ("[1]", "Expected `object`, got `array`"),
        ('"x"', "Expected `object`, got `str`"),
        ('{"amount": NaN}', "NaN is not JSON"),
        ('{"amount":"10"}', "Expected `int`, got `str`"),
        ('{"amount":1,"amount":1000}', "'amount' stands twice"),
        ('{"amount":1,"currency":"EUR"}', "unknown field `currency`"),
        ('{"amount":1,"note":"' + "x" * 1_000_000 + '"}', "bytes of arguments"),
    ],
)
def test_ur_53_malformed_arguments_are_refused_with_a_bounded_message(arguments: str, said: str):
    message = message_of(charge, arguments)
    assert message.startswith("charge was not called: ")
    assert said in message


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"Amount": 1}',
        '{"amount": 10.0}',
        '{"amount": 1e3}',
        '{"amount": true}',
        '{"amount": null}',
        '{"amount": [1]}',
        '{"amount": {"amount": 1}}',
        '{"amount": 1}}',
        '{"amount": 1} {"amount": 2}',
        '{"amount": 1,}',
        "{'amount': 1}",
        '{"amount": 01}',
        '{"amount": 0x10}',
        '{"amount": Infinity}',
        '{"amount": 1e400}',
        '{"amount": 1 // one\n}',
        '```json\n{"amount": 1}\n```',
        '\ufeff{"amount": 1}',
        '{"amount": 1, "\\ud800": 2}',
        '{"amount": \ud800}',
        '{"amount": ' + "9" * 5000 + "}",
        "[" * 100_000,
        '{"a":' * 1000 + "1" + "}" * 1000,
    ],
)
def test_near_misses_are_refused_and_never_repaired(arguments: str):
    assert message_of(charge, arguments).startswith("charge was not called: ")


def test_a_refusal_does_not_echo_what_is_huge():
    @write
    def paint(colour: Literal["red"], other: Literal["red"] = "red") -> None: ...

    huge = "x" * 100_000
    for arguments in (f'{{"colour": "{huge}"}}', f'{{"{huge}": 1}}', f'{{"{huge}":1,"{huge}":2}}'):
        assert "x" * 250 not in message_of(paint, arguments)


def test_arguments_at_the_limit_pass_and_are_counted_in_bytes():
    @write
    def note(text: str) -> None: ...

    room = limits.ARGUMENTS_BYTES_MAX - len('{"text":""}')
    assert note.parse('{"text":"' + "x" * room + '"}') == {"text": "x" * room}
    message_of(note, '{"text":"' + "x" * (room + 1) + '"}')
    message_of(note, '{"text":"' + "é" * (room // 2 + 1) + '"}')


@pytest.mark.parametrize(
    "given",
    [
        {"order": {"to": {"city": "Bern", "country": "CH"}}},
        {"order": {"to": {"city": "Bern"}, "lines": [{"city": "Rom"}, {"city": "Rom", "zip": ""}]}},
        {"by": {"type": "card", "cardNumber": "1", "cvc": "2"}},
        {"by": {"type": "card", "card_number": "1"}},
        {"by": {"type": "cash", "amount": 1, "tip": 1}},
        {"options": {"fast": True, "slow": False}},
        {"by_day": {"1": {"city": "Bern", "x": 1}}},
        {"at": [1, 2, 3]},
        {"stops": [{"city": "Bern"}, {"city": "Rom", "x": 1}]},
    ],
)
def test_a_field_that_a_nested_type_would_drop_is_refused(given: dict[str, Any]):
    @write
    def pay(
        order: Order | None = None,
        by: Card | Cash | None = None,
        options: Options | None = None,
        by_day: dict[int, Address] | None = None,
        at: Point | None = None,
        stops: tuple[Address, ...] = (),
    ) -> None: ...

    assert "was not called" in message_of(pay, json.dumps(given))


def test_nested_values_that_fit_pass_whatever_they_are_converted_to():
    @write
    def pay(
        by: Card | Cash,
        options: Options,
        by_day: dict[int, Address],
        at: Point,
        colours: set[Colour],
        anything: Any,
        raw: msgspec.Raw,
    ) -> None: ...

    plain = {
        "by": {"type": "card", "cardNumber": "1"},
        "options": {"tags": {"a": 1}, "fast": True},
        "by_day": {"2": {"city": "Rom"}, "1": {"city": "Bern", "zip_code": "3000"}},
        "at": [1, 2],
        "colours": ["red", "red"],
        "anything": {"a": [{"b": None}]},
        "raw": {"a": {"b": [1]}},
    }
    assert pay.parse(json.dumps(plain)) == plain
    typed = pay.typed(plain)
    assert typed["by"] == Card(card_number="1")
    assert typed["by_day"] == {2: Address("Rom"), 1: Address("Bern", "3000")}
    assert typed["at"] == Point(1, 2)
    assert typed["colours"] == {Colour.RED}


def test_constraints_of_a_hint_hold():
    @write
    def pay(amount: Annotated[int, msgspec.Meta(ge=1, le=100)]) -> None: ...

    assert pay.parse('{"amount": 100}') == {"amount": 100}
    assert "<= 100" in message_of(pay, '{"amount": 101}')


def test_typed_arguments_share_nothing_with_the_recorded_ones():
    @write
    def tag(labels: Any) -> None: ...

    plain = tag.parse('{"labels": [["a"]]}')
    tag.typed(plain)["labels"][0].append("b")
    assert plain == {"labels": [["a"]]}


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.text() | _json.map(json.dumps) | _json.map(lambda v: json.dumps({"amount": v})))
def test_any_text_is_either_refused_or_exactly_what_it_says(arguments: str):
    try:
        plain = charge.parse(arguments)
    except BadArguments:
        message_of(charge, arguments)
        return
    assert list(plain) == ["amount"]
    assert type(plain["amount"]) is int
    assert json.loads(arguments) == plain
