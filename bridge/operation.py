"""Core: what an operation of the bridge is. One table of them routes requests and is /openapi.json.

So what is documented is what is served: an operation that is not in the table has no address.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias
from urllib.parse import unquote

from msgspec import Struct

from journal.messages import JSON

if TYPE_CHECKING:
    from starlette.responses import Response

    from .call import Call

Scope: TypeAlias = Literal["read", "signal", "work", "admin"]
Handler: TypeAlias = "Callable[[Call], Awaitable[Response]]"

JSON_TYPE: Final = "application/json"
TEXT: Final[dict[str, JSON]] = {"type": "string"}
_PARAMETER: Final = re.compile(r"\{([a-z_]+)\}")


class Parameter(Struct, frozen=True, kw_only=True):
    """A part of the path, the query or the headers; `schema` as in OpenAPI."""

    name: str
    place: Literal["path", "query", "header"]
    schema: dict[str, JSON]
    about: str = ""


class Answer(Struct, frozen=True, kw_only=True):
    """What a status means, and the body by content type: a Python type that msgspec knows, or a
    schema; no body at all where there is no content type."""

    about: str
    bodies: dict[str, Any] = {}
    headers: dict[str, str] = {}


class Operation(Struct, frozen=True, kw_only=True):
    """`body`: a type that msgspec knows. `problems`: statuses answered with problem+json, besides
    those that every operation has.

    `scope` None: for everybody. `any_query`: parameters that are not named are passed over, not
    refused (pages and probes; anywhere else a misspelt filter would be no filter).
    """

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    scope: Scope | None
    summary: str
    handle: Handler
    answers: dict[int, Answer]
    problems: tuple[int, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    any_query: bool = False

    @property
    def query_names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.parameters if one.place == "query")


def query(name: str, about: str, **schema: JSON) -> Parameter:
    """A parameter of the query, with its schema."""
    return Parameter(name=name, place="query", schema=schema, about=about)


def json_answer(about: str, body: Any, **headers: str) -> Answer:
    """An answer in JSON; a header's name has `_` for `-`."""
    named = {name.replace("_", "-"): said for name, said in headers.items()}
    return Answer(about=about, bodies={JSON_TYPE: body}, headers=named)


class Place:
    """One address: the operations at it, by method."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.segments = path.split("/")
        self.by_method: dict[str, Operation] = {}

    @property
    def allow(self) -> str:
        methods = set(self.by_method)
        return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))

    def match(self, segments: Sequence[str]) -> dict[str, str] | None:
        """The parameters, decoded; None where this is another address."""
        if len(segments) != len(self.segments):
            return None
        found: dict[str, str] = {}
        for mine, given in zip(self.segments, segments, strict=True):
            name = _PARAMETER.fullmatch(mine)
            if name is not None:
                found[name[1]] = given
            elif mine != given:
                return None
        return found


class Table:
    """All operations, by address. Literal addresses come before those with parameters."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)
        places: dict[str, Place] = {}
        for operation in operations:
            place = places.setdefault(operation.path, Place(operation.path))
            assert operation.method not in place.by_method, operation.name
            place.by_method[operation.method] = operation
        self._places = sorted(places.values(), key=lambda place: place.path.count("{"))

    def find(self, raw_path: bytes) -> tuple[Place, dict[str, str]] | None:
        """The address of a request's undecoded path. Each part is decoded by itself, so that `%2F`
        is a slash in a parameter and never one between two; what is no UTF-8 becomes U+FFFD, which
        no id has."""
        text = raw_path.decode("latin-1")
        segments = [unquote(part, errors="replace") for part in text.split("/")]
        for place in self._places:
            found = place.match(segments)
            if found is not None:
                return place, found
        return None
