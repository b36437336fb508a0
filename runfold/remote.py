"""Shell: runs behind a bridge, over HTTP: the same questions and answers as on a store (R64, R69).

Each request that changes something carries an id that was made before it was sent, so that the
repeat after a lost answer is one.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Self
from urllib.parse import quote

import msgspec
from msgspec import Struct

from journal import ids
from journal.codec import Entry
from journal.doors import Receipt, Started
from journal.errors import (
    BadPayload,
    RunfoldError,
    StaleSignal,
    StoreUnavailable,
)
from journal.ids import RunId
from journal.inbox import InboxItem
from journal.inputs import InputState, input_body
from journal.limits import LIST_PAGE, WAIT_MAX_S
from journal.listing import Filter, Page
from journal.messages import JSON
from journal.records import Mode
from journal.signals import parse_request_id, parse_signal
from journal.store import RawRecord
from journal.stores.rejected import Refusal
from journal.values import normalise

from .http_client import HttpClient, decoded
from .reach import Seen, Take, ignored
from .remote_errors import BridgeLost, NoBridge, NotFound, passing
from .remote_journal import AWAY_S, Following, damaged, journal_pages, newer, read_journal

ONE_WAIT_S: Final = 30.0


class _Started(Struct):
    run: str
    created: bool


class _Runs(Struct):
    runs: list[dict[str, Any]]
    next: str | None


class _Inbox(Struct):
    items: list[InboxItem]
    next: str | None = None
    unread: list[str] = []


class _Workers(Struct):
    workers: list[dict[str, Any]]


class _Rejected(Struct):
    rejected: list[Refusal]


class BridgeRuns:
    """`async with BridgeRuns("http://host:port", token) as runs:`; Runs and Talk."""

    def __init__(self, address: str, token: str | None) -> None:
        self._client = HttpClient(address, token)

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    # ---- runs ---------------------------------------------------------------------------------

    async def start(
        self,
        agent: str,
        input: JSON,
        *,
        run_id: str | None = None,
        priority: int = 0,
        key: str | None = None,
        revision: str = "",
    ) -> Started:
        ids.name(agent, "an agent")
        body: dict[str, Any] = {
            "agent": agent,
            "input": normalise(input, "the input"),
            "run": ids.new_run_id() if run_id is None else ids.run_id(run_id),
            "priority": priority,
        }
        body |= ({} if key is None else {"key": key}) | ({"revision": revision} if revision else {})
        with _repeated_with(f"--id {body['run']}"):
            answer = await self._client.ask("POST", "/runs", body=body)
        found: _Started = decoded(answer, _Started)
        # Nobody else makes that id: the answer that was lost said that it was created.
        created = found.created or (run_id is None and answer.again)
        return Started(run_id=RunId(found.run), created=created)

    async def wait(self, run_id: str, *, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left_s := deadline - loop.time()) > 0:
            shape = await self._run(run_id, min(left_s, ONE_WAIT_S))
            if shape["status"] != "running":
                return

    async def _run(self, run_id: str, wait_s: float = 0.0) -> dict[str, Any]:
        query: dict[str, str | int] = {"wait": _wait(wait_s)} if wait_s else {}
        patience = {"patience_s": AWAY_S} if wait_s else {}
        answer = await self._client.ask(
            "GET", f"/runs/{run_id}", query=query, wait_s=wait_s, **patience
        )
        found: dict[str, Any] = decoded(answer, dict[str, Any])
        if not isinstance(found.get("status"), str):
            raise NoBridge("the bridge's answer is no run", hint="is it of this version?")
        return found

    async def shape(self, run_id: RunId) -> dict[str, Any]:
        found = await self._run(run_id)
        if found["status"] == "damaged":
            raise damaged(run_id, str(found.get("reason")))
        if found["status"] == "newer" and found.get("records") is None:
            raise newer(run_id, str(found.get("reason")))
        return found

    async def seen(self, run_id: RunId, take: Take = ignored) -> Seen:
        return await read_journal(self._client, run_id, take)

    async def follow(self, run_id: RunId, *, after: int, take: Callable[[Entry], None]) -> str:
        following = Following(self._client, run_id, after, take)
        if after:  # a stream begins at most one behind the last record
            records = (await self._run(run_id)).get("records")
            following.last = min(after, records if isinstance(records, int) else 0)
        ended = await following.until_end()
        return (await self.shape(run_id))["status"] if ended is None else ended

    async def page(
        self, wanted: Filter, *, after: RunId | None = None, limit: int = LIST_PAGE
    ) -> Page:
        query: dict[str, str | int] = {"limit": limit}
        for name, value in (("status", wanted.status), ("agent", wanted.agent), ("after", after)):
            if value is not None:
                query[name] = value
        found: _Runs = decoded(await self._client.ask("GET", "/runs", query=query), _Runs)
        return Page(found.runs, None if found.next is None else RunId(found.next))

    # ---- journals as they stand -----------------------------------------------------------------

    async def stored(
        self, run_id: RunId, *, after: int = 0
    ) -> AsyncGenerator[Sequence[RawRecord], None]:
        """As of a store, the token being the ordinal; without headers. Raises RunNotFound; and
        JournalDamaged, where a bridge gives no more of it."""
        async for page in journal_pages(self._client, run_id, after=after):
            yield [RawRecord(raw, after + place) for place, raw in enumerate(page, 1)]
            after += len(page)

    async def runs(self, *, after: RunId | None = None) -> AsyncGenerator[RunId, None]:
        """All but the purged ones."""
        while True:
            page = await self.page(Filter(), after=after)
            for run in page.runs:
                yield RunId(run["run"])
            if page.next is None:
                return
            after = page.next

    # ---- talking ------------------------------------------------------------------------------

    async def signal(
        self, run_id: str, name: str, payload: dict[str, Any], *, request_id: str | None = None
    ) -> Receipt:
        parse_signal(name, payload)  # what is wrong is said in our words, before it is sent
        request = parse_request_id(request_id) or f"{name}:{secrets.token_hex(8)}"
        path = f"/runs/{ids.run_id(run_id)}/signals/{name}"
        with _repeated_with(f"--request-id {shlex.quote(request)}"):
            answer = await self._client.ask("POST", path, body=payload | {"request_id": request})
        receipt: Receipt = decoded(answer, Receipt)
        return receipt

    async def send(
        self, run_id: str, content: JSON, *, mode: Mode = "steer", request_id: str | None = None
    ) -> InputState:
        request = parse_request_id(request_id) or f"input:{secrets.token_hex(8)}"
        value = input_body(request, mode, normalise(content, "the input")).content
        body: dict[str, Any] = {"content": value, "mode": mode, "request_id": request}
        with _repeated_with(f"--request-id {shlex.quote(request)}"):
            answer = await self._client.ask("POST", f"/runs/{ids.run_id(run_id)}/inputs", body=body)
        found: InputState = decoded(answer, InputState)
        created = answer.status == 201 or (request_id is None and answer.again)
        return msgspec.structs.replace(found, created=created)

    async def input(self, run_id: str, request_id: str, *, wait_s: float = 0) -> InputState:
        path = _input_path(run_id, request_id)
        query: dict[str, str | int] = {"wait": _wait(wait_s)} if wait_s else {}
        try:
            answer = await self._client.ask("GET", path, query=query, wait_s=wait_s)
        except NotFound as error:
            raise _no_input(error) from error
        found: InputState = decoded(answer, InputState)
        return found

    async def withdraw(self, run_id: str, request_id: str) -> InputState:
        try:
            await self._client.ask("DELETE", _input_path(run_id, request_id))
        except NotFound as error:
            raise _no_input(error) from error
        return await self.input(run_id, request_id)

    # ---- people and workers -------------------------------------------------------------------

    async def inbox(self) -> list[InboxItem]:
        items: list[InboxItem] = []
        query: dict[str, str | int] = {"limit": LIST_PAGE}
        while True:
            found: _Inbox = decoded(await self._client.ask("GET", "/inbox", query=query), _Inbox)
            items += found.items
            if found.unread:
                streams = ", ".join(found.unread)
                raise StoreUnavailable(
                    f"the bridge can't read {streams}: this is not all that waits"
                )
            if found.next is None:
                return items
            query["after"] = found.next

    async def workers(self, *, wait_s: float) -> list[dict[str, Any]]:
        """How long they may take is the bridge's."""
        found: _Workers = decoded(await self._client.ask("GET", "/workers"), _Workers)
        return found.workers

    async def rejected(self, limit: int) -> Sequence[Refusal]:
        answer = await self._client.ask("GET", "/rejected", query={"limit": limit})
        found: _Rejected = decoded(answer, _Rejected)
        return found.rejected


@contextmanager
def _repeated_with(words: str) -> Generator[None]:
    """Where nobody knows whether it was done: how to ask again without doing it twice."""
    try:
        yield
    except StoreUnavailable as error:
        if passing(error) and not (isinstance(error, BridgeLost) and error.unheard):
            error.hint = f"it may have been recorded: repeat it with {words}"
        raise


def _no_input(error: NotFound) -> RunfoldError:
    """The word that a store has for it; an address that is none is something else."""
    return StaleSignal(error.message, run_id=error.run_id) if error.run_id else error


def _input_path(run_id: str, request_id: str) -> str:
    request = parse_request_id(request_id) or ""
    # Dots alone would lead to another address.
    return f"/runs/{ids.run_id(run_id)}/inputs/{quote(request, safe='').replace('.', '%2E')}"


def _wait(wait_s: float) -> str:
    if not 0 <= wait_s <= WAIT_MAX_S:
        raise BadPayload(f"waiting takes 0 to {WAIT_MAX_S:g} seconds, not {wait_s:g}")
    return f"{int(wait_s * 1000)}ms"
