"""Shell: requests by NATS that are answered with what became of them: a NATS service (R58).

`ns.api.signals.<run…>.<name>`, `ns.api.inputs.{submit,get,withdraw}`; with `ns.api.as.<user>.…` the
user stands in the records, since permissions tie that subject to the user (R66). Several bridges
share the work: each request reaches one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from journal import doors
from journal.errors import RunfoldError
from journal.escape import visible
from journal.fleet import Fleet
from journal.messages import JSON
from journal.signal_address import NOBODY, run_address, user
from journal.signals import parse_request_id
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_headers import TRACE
from journal.stores.nats_service import Asked, Service
from journal.stores.signals_queue import REQUEST_HEADER, header_of

from .problems import STATUS_BY_CODE, Busy, Internal
from .saying import given, read_payload, say
from .shapes import InputReceipt

log = logging.getLogger("runfold")

VERSION: Final = "1.0.0"
"""Of what is asked and answered here, not of Runfold."""

AT_ONCE: Final = 256
"""One more is told to come again. Who waits for an input counts apart: no decision is kept out."""

REQUEST_BYTES_MAX: Final = 256 * 1024
"""An input's 64 KiB, however its JSON is written."""

ANSWER_S: Final = 120.0
STOP_S: Final = 2.0
PAUSE_S: Final = 0.5
PAUSE_MAX_S: Final = 10.0
HEADER_CHARS_MAX: Final = 200
AGAIN: Final = "ask again, with the same request id"
INPUTS: Final = ("submit", "get", "withdraw")
INBOXES: Final = ("_INBOX.", "_R_.")
"""Where answers are waited for: a client's inbox, or what the server puts in place of one between
accounts. nats-server 2.15.1 checks no permission on the subject that a request wants its answer on:
anywhere else the bridge would publish with its own."""

NO_INBOX: Final = "no_inbox"


class SubmitRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: str
    content: JSON | UnsetType = UNSET
    mode: str = "steer"
    request_id: str = ""


class GetRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`wait`: seconds, at most 60, until the input is done, unanswered or withdrawn."""

    run: str
    request_id: str
    wait: float = 0.0


class WithdrawRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    run: str
    request_id: str


class NatsApi:
    """`count(name, result)`: as SignalDoor's."""

    def __init__(
        self,
        store: JetStreamStore,
        *,
        count: Callable[[str, str], None] = lambda name, result: None,
    ) -> None:
        self._store = store
        self._count = count
        self._prefix = f"{store.namespace}.api."
        self._service = Service(
            name=f"runfold-api-{store.namespace}",
            version=VERSION,
            description=f"Signals and inputs for the runs of {store.namespace}",
            endpoints=_endpoints(self._prefix),
        )
        self._group: asyncio.TaskGroup | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._looking: set[asyncio.Task[None]] = set()
        self._problem = "requests by NATS: not listening"

    async def run(self) -> None:
        """Until it is cancelled. Who is cut off hears nothing, and asks again."""
        pause_s = PAUSE_S
        while True:
            started = time.monotonic()
            try:
                await self._serve()
            except* RunfoldError as errors:
                self._problem = f"requests by NATS: {visible(_first(errors))}"
            pause_s = PAUSE_S if time.monotonic() - started > PAUSE_MAX_S else pause_s
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _serve(self) -> None:
        async with (
            asyncio.TaskGroup() as group,
            self._store.serving(self._service, self._take),
        ):
            self._group, self._problem = group, ""
            try:
                raise await self._store.closed()
            finally:
                self._group, self._problem = None, "requests by NATS: not listening"
                if left := self._answering | self._looking:  # they would have to ask again
                    await asyncio.wait(left, timeout=STOP_S)

    def problem(self) -> str:
        """Why requests are not answered now; "" where they are. For health."""
        return self._problem

    # ---- answering --------------------------------------------------------------------------

    async def _take(self, asked: Asked) -> None:
        """One request after another comes here: handed on at once. One that wants its answer in a
        journal, or is itself somebody's answer that was sent here, is not done either."""
        if not asked.reply.startswith(INBOXES):
            asked.drop(NO_INBOX)
            self._tally(asked, NO_INBOX)
            return
        if self._group is None:
            await _refuse(asked, Busy("the bridge is stopping", hint=AGAIN))
            return
        places = self._looking if asked.endpoint.endswith("get") else self._answering
        if len(places) >= AT_ONCE:
            await _refuse(asked, Busy("the bridge answers as many requests as it may", hint=AGAIN))
            return
        answering = self._group.create_task(self._answer(asked))
        places.add(answering)
        answering.add_done_callback(places.discard)

    async def _answer(self, asked: Asked) -> None:
        try:
            async with asyncio.timeout(ANSWER_S):
                with self._door(asked):
                    result, answer = await self._done(asked)
            await asked.answer(msgspec.json.encode(answer))
        except RunfoldError as error:
            result = error.code
            await _refuse(asked, error)
        except TimeoutError:
            result = Busy.code
            await _refuse(asked, Busy("it takes too long", hint=AGAIN))
        except Exception:  # the edge of one request; nothing of it is told
            log.exception("a request to %s: a bug", visible(asked.subject[:200]))
            result = Internal.code
            await _refuse(asked, Internal())
        self._tally(asked, result)

    def _door(self, asked: Asked) -> contextlib.AbstractContextManager[object]:
        """As App._door."""
        if asked.endpoint.endswith("get"):
            return contextlib.nullcontext()
        what = f"request {asked.endpoint.removeprefix('as-')}"
        return self._store.observer.door(what, header_of(asked.headers, TRACE))

    def _tally(self, asked: Asked, result: str) -> None:
        if asked.endpoint.endswith("signals"):
            self._count(asked.subject.rpartition(".")[2], result)
        elif asked.endpoint.endswith("submit"):
            self._count("input", result)

    async def _done(self, asked: Asked) -> tuple[str, JSON]:
        """Do it; a word and the answer. Raises RunfoldError."""
        rest, by = asked.subject.removeprefix(self._prefix), NOBODY
        if rest.startswith("as."):
            _, name, rest = rest.split(".", 2)
            by = user(name)
        kind, _, rest = rest.partition(".")
        header = header_of(asked.headers, REQUEST_HEADER) or None
        if kind == "signals":
            said = await say(self._store, run_address(rest, by=by), asked.data, header=header)
            return said.result, said.answer
        match rest:
            case "submit":
                return await self._submit(asked.data, by, header)
            case "withdraw":
                return await self._withdraw(asked.data, by)
            case _:
                return await self._get(asked.data)

    async def _submit(self, data: bytes, by: str, header: str | None) -> tuple[str, JSON]:
        wanted = read_payload(data, SubmitRequest, "submit", REQUEST_BYTES_MAX)
        found = await doors.submit(
            self._store,
            wanted.run,
            given(wanted.content, "submit", "content"),
            mode=wanted.mode,
            request_id=wanted.request_id or header or None,
            by=by,
        )
        return "applied" if found.created else "repeated", InputReceipt.of(wanted.run, found)

    async def _withdraw(self, data: bytes, by: str) -> tuple[str, JSON]:
        wanted = read_payload(data, WithdrawRequest, "withdraw", REQUEST_BYTES_MAX)
        request = parse_request_id(wanted.request_id) or ""
        found = await doors.withdraw(self._store, wanted.run, request, by=by)
        return "withdrawn", InputReceipt.of(wanted.run, found)

    async def _get(self, data: bytes) -> tuple[str, JSON]:
        wanted = read_payload(data, GetRequest, "get", REQUEST_BYTES_MAX)
        fleet = Fleet(self._store)
        found = await fleet.input(wanted.run, wanted.request_id, wait_s=wanted.wait)
        return "read", InputReceipt.of(wanted.run, found)


def _endpoints(prefix: str) -> dict[str, str]:
    """Each endpoint's subject: without a user, and `as` one."""
    found: dict[str, str] = {}
    for word, who in (("", ""), ("as-", "as.*.")):
        found[f"{word}signals"] = f"{prefix}{who}signals.>"
        for action in INPUTS:
            found[f"{word}inputs-{action}"] = f"{prefix}{who}inputs.{action}"
    return found


async def _refuse(asked: Asked, error: RunfoldError) -> None:
    """The error object of the CLI's --json, and services' headers. One without a status is a bug:
    nothing of it is told."""
    code = STATUS_BY_CODE.get(error.code)
    if code is None:
        error, code = Internal(), 500
    body = {
        "code": error.code,
        "message": visible(error.message),
        "run": error.run_id,
        "hint": visible(error.hint),
    }
    text = ascii(error.message[:HEADER_CHARS_MAX])[1:-1]
    await asked.refuse(code, error.code, text, msgspec.json.encode({"error": body}))


def _first(errors: BaseExceptionGroup[RunfoldError]) -> str:
    one: BaseException = errors
    while isinstance(one, BaseExceptionGroup):
        one = one.exceptions[0]  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return str(one)  # pyright: ignore[reportUnknownArgumentType]
