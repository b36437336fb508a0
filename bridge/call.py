"""Shell: one request to an operation: its parameters and body, strictly read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from journal.allowed import allowed_values
from journal.errors import BadPayload, RunfoldError
from journal.escape import visible
from journal.fleet import Fleet
from journal.ids import RunId, run_id, shown
from journal.limits import WAIT_MAX_S
from journal.values import BadJSON, parse_strict

from .auth import Identity
from .desk import Desk, Place
from .operation import JSON_TYPE, Operation
from .problems import BadRequest, Busy

WAIT_PATTERN: Final = r"^((([0-5]?[0-9](\.[0-9]{1,3})?|60)s?)|(([0-5]?[0-9]{1,4}|60000)ms))$"
_WAIT: Final = re.compile(r"(?P<s>[0-9]{1,2}(\.[0-9]{1,3})?)s?|(?P<ms>[0-9]{1,5})ms", re.ASCII)
_WHOLE: Final = re.compile(r"[0-9]{1,18}", re.ASCII)

T = TypeVar("T")
S = TypeVar("S", bound=Struct)


class Call:
    """`path`: the address's parameters, decoded and not yet checked. `by` is who asks."""

    def __init__(
        self,
        desk: Desk,
        operation: Operation,
        request: Request,
        path: Mapping[str, str],
        identity: Identity | None = None,
        place: Place | None = None,
        body: bytes = b"",
    ) -> None:
        self.desk = desk
        self._operation = operation
        self.request = request
        self.path = path
        self.by = identity.name if identity is not None else ""
        self._place = place
        self._body = body
        self.query = _query(request, operation)

    @property
    def fleet(self) -> Fleet:
        assert self.by, "an operation for everybody changes nothing"
        return Fleet(self.desk.store, by=self.by)

    @property
    def head(self) -> bool:
        return self.request.method == "HEAD"

    # ---- query and headers --------------------------------------------------------------------

    def whole(self, name: str, low: int, high: int, default: int) -> int:
        """A whole number of the query; raises BadRequest."""
        text = self.query.get(name)
        return default if text is None else whole(text, name, low, high)

    def after(self) -> RunId | None:
        """`after`: the run that a page goes on behind; raises InvalidId."""
        text = self.query.get("after")
        return None if text is None else run_id(text)

    def wait_s(self) -> float:
        """`wait`: `30s`, `500ms` or seconds; raises BadRequest."""
        text = self.query.get("wait")
        if text is None:
            return 0.0
        found = _WAIT.fullmatch(text)
        seconds = WAIT_MAX_S + 1
        if found is not None:
            seconds = float(found["s"]) if found["s"] else int(found["ms"]) / 1000
        if seconds > WAIT_MAX_S:
            raise BadRequest(
                f"wait is {shown(text)}, not 0 to {WAIT_MAX_S:g} seconds",
                hint="write 30s, 500ms or a number of seconds",
            )
        return seconds

    # ---- body ---------------------------------------------------------------------------------

    async def json(self) -> Any:
        """The body as strict JSON; raises BadRequest."""
        if not self._body:
            raise BadRequest("the body is empty, not JSON", hint=_wanted(self._operation.body))
        try:
            return parse_strict(self._body)
        except BadJSON as error:
            text = visible(str(error)[:300])
            raise BadRequest(f"the body is not JSON: {text}") from error

    async def body(self, shape: type[S]) -> S:
        """The body in this shape; raises BadPayload besides."""
        return converted(await self.json(), shape)

    # ---- waiting ------------------------------------------------------------------------------

    async def attended(self, wanted: Callable[[], Awaitable[T]]) -> T:
        """What comes of it, while the client is there and the bridge stays; else Busy, which in the
        first case nobody reads."""
        place = self.desk.take_place()
        if self._place is not None:
            self._place.leave()  # who waits does nothing: it keeps nobody out
        found: list[T | RunfoldError] = []

        async def work() -> None:
            try:
                found.append(await wanted())
            except RunfoldError as error:
                found.append(error)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(work()),
                    group.create_task(self._gone()),
                    group.create_task(self.desk.stopping.wait()),
                ]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        finally:
            place.leave()
        if not found:
            raise Busy("the bridge is stopping", hint="ask again")
        if isinstance(found[0], RunfoldError):
            raise found[0]
        return found[0]

    async def _gone(self) -> None:
        while (await self.request.receive())["type"] != "http.disconnect":
            pass


def converted(value: Any, shape: Any) -> Any:
    """The value in the shape, which msgspec knows; raises BadPayload."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as error:
        what = f"the body is wrong: {visible(str(error)[:300])}"
        raise BadPayload(what, hint=allowed_values(shape, error)) from error


def _wanted(shape: Any) -> str:
    """What to send where nothing was sent."""
    try:
        msgspec.convert({}, shape)
    except msgspec.ValidationError:
        return "send a JSON object; GET /openapi.json says what is in it"
    return "send {}"


def whole(text: str, name: str, low: int, high: int) -> int:
    """The text as a whole number; raises BadRequest."""
    if _WHOLE.fullmatch(text) is None or not low <= int(text) <= high:
        raise BadRequest(f"{name} is {shown(text)}, not a whole number from {low} to {high}")
    return int(text)


def answer(value: Any, status: int = 200, **headers: str) -> Response:
    """JSON; a header's name has `_` for `-`."""
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return Response(msgspec.json.encode(value), status, named, JSON_TYPE)


def _query(request: Request, operation: Operation) -> dict[str, str]:
    raw = request.scope["query_string"].decode("latin-1")
    if not raw:
        return {}
    try:
        pairs = parse_qsl(raw, keep_blank_values=True, errors="strict", max_num_fields=50)
    except ValueError as error:  # too many, or no UTF-8
        if operation.any_query:
            return {}
        raise BadRequest("the query can't be read") from error
    found = {name: text for name, text in pairs if name in operation.query_names}
    if operation.any_query:
        return found
    for name, _ in pairs:
        if name not in operation.query_names:
            known = ", ".join(sorted(operation.query_names)) or "none"
            raise BadRequest(f"{shown(name)} is no parameter here", hint=f"parameters are: {known}")
    if len(found) != len(pairs):
        raise BadRequest("a parameter stands twice in the query")
    return found
