"""Core: tools as users declare them: what a model is told of one, what arguments it takes."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, TypeAlias, cast, get_args, get_type_hints, overload

import msgspec
from msgspec import Struct

from journal import ids, limits, values
from journal.errors import NotEncodable
from journal.messages import JSON, ToolSpec
from journal.records import Policy
from journal.steps import Probe

# The root is cut out of the schema, so the name is never seen; it must only meet no user's type.
_ROOT = "_arguments_"


class Replay(Enum):
    """Twice is harmless (SAFE): a read, or a write that dedupes on `ToolCall.key`; or not (R30)."""

    SAFE = "safe"
    UNSAFE = "unsafe"


SAFE: Final = Replay.SAFE
UNSAFE: Final = Replay.UNSAFE


OnUnknown: TypeAlias = Policy
"""What becomes of a write that was cut off (R27): `reconcile` asks a person; `interrupt` tells the
model it may have happened; `probe` asks the outside system."""


async def _unrecorded(output: JSON) -> None:
    """Progress of a call that no journal stands behind: a unit test's."""


class ToolCall(Struct, frozen=True, kw_only=True):
    """The call a tool is executing, for a parameter annotated `ToolCall`; the model can't set it.

    `key` is the idempotency key: the same on every delivery and attempt of this call (R28).
    """

    run_id: ids.RunId
    step: str
    name: str
    input: JSON
    key: str
    report: Callable[[JSON], Awaitable[None]] = _unrecorded

    async def progress(self, output: JSON) -> None:
        """Record the partial output so far: what a person or the model is shown should the call be
        cut off (R27). For async tools. Raises NotEncodable, TooLarge, Fenced."""
        await self.report(output)


class BadArguments(ValueError):
    """A model's arguments do not fit the tool. The message is short, bounded, and for the model."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Tool:
    """A declared tool, made by `@read` or `@write`. Calling it calls the function, for unit tests.

    `revision` is a digest of what an approval of a call relies on; it is part of the marker (R32).
    """

    spec: ToolSpec
    replay: Replay
    approval: bool
    timeout_s: float
    revision: str
    on_unknown: OnUnknown
    probe: Probe | None
    fn: Callable[..., Any] = field(repr=False)
    shape: type[Struct] = field(repr=False)
    call_parameter: str | None = None  # the one that gets the ToolCall

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def parse(self, arguments: str) -> JSON:
        """The arguments object as the model wrote it; raises BadArguments. Nothing is repaired.

        Not the converted one: this is what is recorded, digested and shown to who approves.
        """
        # A half surrogate has no UTF-8 form; it is counted here and refused by the parser.
        size = len(arguments.encode("utf-8", "surrogatepass"))
        if size > limits.ARGUMENTS_BYTES_MAX:
            raise self._refusal(f"{size} bytes of arguments; at most {limits.ARGUMENTS_BYTES_MAX}")
        try:
            plain = values.parse_strict(arguments)
        except values.BadJSON as error:
            raise self._refusal(f"the arguments are not strict JSON: {error}") from error
        self.typed(plain)
        return plain

    def typed(self, plain: JSON) -> dict[str, Any]:
        """Arguments for the function, by name, in the types it declares; raises BadArguments.

        Only those that were given: the function has its own defaults. They are decoded from bytes
        so that a tool that changes one in place does not change what is recorded.
        """
        try:
            found = msgspec.json.decode(msgspec.json.encode(plain), type=self.shape)
        except msgspec.ValidationError as error:
            raise self._refusal(str(error)) from error
        if (ignored := _ignored(plain, found, "$")) is not None:
            raise self._refusal(f"unknown field {ignored}")
        return {name: getattr(found, name) for name in plain}

    def _refusal(self, reason: str) -> BadArguments:
        # Cut, because msgspec quotes a wrong enum value or field name whole.
        short = reason if len(reason) <= 200 else f"{reason[:200]}…"
        return BadArguments(f"{self.spec.name} was not called: {short}")


@overload
def read(fn: Callable[..., Any], /) -> Tool: ...
@overload
def read(
    *, name: str | None = None, timeout_s: float | None = None, revision: str = "1"
) -> Callable[[Callable[..., Any]], Tool]: ...
def read(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    revision: str = "1",
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Declare a function that changes nothing as a tool: it needs no approval and may run twice."""
    declare = partial(_declare, name, timeout_s, revision, False, SAFE, False, "reconcile", None)
    return declare if fn is None else declare(fn)


@overload
def write(fn: Callable[..., Any], /) -> Tool: ...
@overload
def write(
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    approval: bool = True,
    replay: Replay = UNSAFE,
    on_unknown: OnUnknown = "reconcile",
    probe: Probe | None = None,
    revision: str = "1",
) -> Callable[[Callable[..., Any]], Tool]: ...
def write(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    approval: bool = True,
    replay: Replay = UNSAFE,
    on_unknown: OnUnknown = "reconcile",
    probe: Probe | None = None,
    revision: str = "1",
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Declare a function that changes something as a tool: by default never repeated on its own
    and called only once a person approved. `replay=SAFE` promises that it dedupes on its key.

    `on_unknown` says what becomes of a call that was cut off (R27); `probe(key)`, async, answers
    `Happened(result)`, `DidNotHappen()` or `CannotTell(detail)`.
    """
    declare = partial(
        _declare, name, timeout_s, revision, True, replay, approval, on_unknown, probe
    )
    return declare if fn is None else declare(fn)


def _declare(
    name: str | None,
    timeout_s: float | None,
    revision: str,
    write: bool,
    replay: Replay,
    approval: bool,
    on_unknown: OnUnknown,
    probe: Probe | None,
    fn: Callable[..., Any],
) -> Tool:
    label = _checked_function(fn)
    _check_policy(label, on_unknown, probe, replay)
    # Unchecked, replay="safe" or approval="no" would silently mean the opposite.
    _check_type(label, "revision", revision, str)
    _check_type(label, "approval", approval, bool)
    _check_type(label, "replay", replay, Replay)
    name = fn.__name__ if name is None else name
    _check_type(label, "name", name, str)
    timeout_s = limits.TOOL_TIMEOUT_S if timeout_s is None else timeout_s
    _check_type(label, "timeout_s", timeout_s, int, float)
    if not 0 < timeout_s <= limits.TOOL_TIMEOUT_MAX_S:
        most = f"{limits.TOOL_TIMEOUT_MAX_S:g}"
        raise ValueError(f"tool {label}: timeout_s is above 0 and at most {most}, not {timeout_s}")
    ids.tool_name(name)
    shape, schema, call_parameter = _shape(fn, label)
    spec = ToolSpec(name=name, description=inspect.getdoc(fn) or "", schema=schema, write=write)
    return Tool(
        spec=spec,
        replay=replay,
        approval=approval,
        timeout_s=float(timeout_s),
        revision=values.digest(revision, name, values.canonical(schema), replay.value),
        on_unknown=on_unknown,
        probe=probe,
        fn=fn,
        shape=shape,
        call_parameter=call_parameter,
    )


def _check_policy(label: str, policy: str, probe: Probe | None, replay: Replay) -> None:
    if policy not in ("reconcile", "interrupt", "probe"):
        raise ValueError(
            f"tool {label}: on_unknown is reconcile, interrupt or probe, not {policy!r}"
        )
    if (policy == "probe") != (probe is not None):
        raise ValueError(f"tool {label}: on_unknown='probe' and probe=… go together")
    if probe is not None and not inspect.iscoroutinefunction(probe):
        raise TypeError(f"tool {label}: its probe is not an async function")
    if policy != "reconcile" and replay is SAFE:
        raise ValueError(f"tool {label}: a write that is SAFE is never unknown")


def _checked_function(fn: object) -> str:
    if not (inspect.isfunction(fn) or inspect.ismethod(fn)):
        raise TypeError(f"a tool is declared on a function, not on a {type(fn).__name__}")
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"tool {fn.__qualname__}: a generator has no single result to record")
    return fn.__qualname__


def _check_type(label: str, what: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"tool {label}: {what} must be {expected}, not {type(value).__name__}")


def _shape(fn: Callable[..., Any], label: str) -> tuple[type[Struct], dict[str, JSON], str | None]:
    """The arguments as a strict struct, their schema, and the parameter that gets the ToolCall."""
    try:
        hints = get_type_hints(fn, include_extras=True)
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise TypeError(
            f"tool {label}: a type hint can't be resolved ({error}); a type that a hint names in "
            "quotes, or under `from __future__ import annotations`, must stand at module level"
        ) from error
    given: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    defaults: dict[str, object] = {}
    takers: list[str] = []
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"tool {label}: parameter {parameter} is {parameter.kind.description}; "
                "arguments of a tool are passed by name"
            )
        name = parameter.name
        if name not in hints:
            raise TypeError(f"tool {label}: parameter {name} has no type hint")
        if hints[name] is ToolCall:
            takers.append(name)
        elif _mentions_call(hints[name]):
            # As part of another type it would be an argument, which the model could forge.
            raise TypeError(f"tool {label}: annotate parameter {name} as ToolCall and no more")
        elif parameter.default is parameter.empty:
            given.append((name, hints[name]))
        else:
            defaults[name] = parameter.default
            # Only makes the field optional, never read: the function has its own default.
            given.append((name, hints[name], msgspec.field(default_factory=object)))
    if len(takers) > 1:
        raise TypeError(f"tool {label}: {' and '.join(takers)} are both ToolCall; one is enough")
    try:
        shape = msgspec.defstruct(_ROOT, given, forbid_unknown_fields=True, kw_only=True)
        schema = _schema(shape, defaults)
    except (TypeError, ValueError, NameError, RecursionError, NotEncodable) as error:
        why = str(error).splitlines()[-1]  # msgspec's first lines are advice for its own callers
        raise TypeError(f"tool {label}: its parameters have no JSON schema: {why}") from error
    return shape, schema, takers[0] if takers else None


def _mentions_call(hint: object) -> bool:
    return hint is ToolCall or any(_mentions_call(part) for part in get_args(hint))


def _schema(shape: type[Struct], defaults: dict[str, object]) -> dict[str, JSON]:
    _, parts = msgspec.json.schema_components([shape], ref_template="#/$defs/{name}")
    for part in parts.values():
        if "properties" in part:
            part["additionalProperties"] = False  # which _ignored enforces where msgspec doesn't
    root = parts.pop(_ROOT)
    for name, default in defaults.items():
        try:
            shown = values.normalise(msgspec.to_builtins(default), name)
        except (TypeError, ValueError, NotEncodable):
            continue  # a sentinel or the like: the parameter is optional, its default Python's own
        root["properties"][name]["default"] = shown
    del root["title"]
    return values.normalise(root | ({"$defs": parts} if parts else {}), "the schema")


def _ignored(plain: JSON, found: object, where: str) -> str | None:
    """The place of a field that was given but that no part of the converted value holds.

    msgspec refuses unknown fields only in structs that say so; nested dataclasses, typed dicts and
    other structs drop them, and a person would approve an argument that the tool never gets.
    """
    if isinstance(plain, dict):
        given = cast("dict[Any, JSON]", plain)
        held = _held(given, found)
    elif isinstance(plain, list) and isinstance(found, list | tuple):
        given = dict(enumerate(cast("list[JSON]", plain)))
        held = dict(enumerate(cast("list[Any]", found)))
    else:
        return None
    for key, item in given.items():
        place = f"{where}.{key}"
        if key not in held:
            return place
        if (deeper := _ignored(item, held[key], place)) is not None:
            return deeper
    return None


def _held(given: dict[Any, JSON], found: object) -> dict[Any, Any]:
    """What the converted value holds, by the names the model gave."""
    if isinstance(found, Struct):
        names = zip(found.__struct_encode_fields__, found.__struct_fields__, strict=True)
        tag = {found.__struct_config__.tag_field: None}
        return tag | {wire: getattr(found, name) for wire, name in names}
    if is_dataclass(found):
        return {part.name: getattr(found, part.name, None) for part in fields(found)}
    if isinstance(found, dict):
        items = cast("dict[Any, Any]", found)
        # Fewer where a typed dict dropped some; else paired by place, as keys may be numbers now.
        return items if len(items) != len(given) else dict(zip(given, items.values(), strict=True))
    return given  # a type that takes any object
