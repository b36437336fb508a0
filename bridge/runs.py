"""Shell: starting runs and looking at them and their journals."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import Any, Final, get_args

import msgspec
from starlette.responses import Response

from journal import ids
from journal.cursor import Cursor
from journal.errors import BadPayload, InputMismatch, JournalDamaged
from journal.ids import RunId
from journal.limits import LIST_PAGE
from journal.listing import Filter
from journal.log import Log
from journal.records import Status
from journal.stores.jetstream import JetStreamStore

from .call import WAIT_PATTERN, Call, answer, whole
from .desk import Desk
from .operation import JSON_TYPE, Answer, Operation, Parameter, json_answer, query
from .problems import BadRequest
from .shapes import EVENT, NAME, RUN_ID, JournalPage, NewRun, Run, Runs, StartedRun
from .sse import EVENTS_TYPE, Follow

PAGE: Final = 100
AGE_S_MAX: Final = 10**9
ORDINAL_MAX: Final = 10**9
STATUSES: Final[tuple[str, ...]] = get_args(Status)

ID: Final = Parameter(name="id", place="path", schema=RUN_ID, about="The run's id.")
WAIT: Final = Parameter(
    name="wait",
    place="query",
    schema={"type": "string", "pattern": WAIT_PATTERN},
    about="`30s`, `500ms` or seconds, at most 60 s.",
)


def operations(desk: Desk) -> list[Operation]:
    """The table's part. The desk comes with each call."""
    return [_start_run(), _list_runs(), _get_run(), _get_journal()]


def run_of(call: Call) -> RunId:
    """The run in the address; raises InvalidId before anything else is made of it."""
    return ids.run_id(call.path["id"])


# ---- start --------------------------------------------------------------------------------------


def _start_run() -> Operation:
    started = partial(json_answer, body=StartedRun, Location="The run's address.")
    return Operation(
        name="start_run",
        method="POST",
        path="/runs",
        scope="signal",
        summary="Start a run, idempotently by its id",
        handle=_start,
        body=NewRun,
        answers={201: started("It was started."), 200: started("It was there, as asked for.")},
        problems=(400, 409, 413),
    )


async def _start(call: Call) -> Response:
    body = await call.body(NewRun)
    if body.revision is not None and not (
        1 <= len(body.revision) <= 128 and body.revision.isprintable()
    ):
        raise BadPayload("a revision is 1 to 128 printable characters")
    try:
        started = await call.fleet.start(
            body.agent,
            body.input,
            run_id=body.run,
            priority=body.priority,
            key=body.key,
            revision=body.revision or "",
        )
    except InputMismatch as error:
        error.hint = "start it under another id"  # its own is of a command without the input
        raise
    return answer(
        StartedRun(run=started.run_id, created=started.created),
        201 if started.created else 200,
        Location=f"/runs/{started.run_id}",
    )


# ---- list and get -------------------------------------------------------------------------------


def _list_runs() -> Operation:
    return Operation(
        name="list_runs",
        method="GET",
        path="/runs",
        scope="read",
        summary="Runs in the order of their ids",
        handle=_list,
        parameters=(
            query("status", "Only these.", type="string", enum=list(STATUSES)),
            query("agent", "Only of this agent.", **NAME),
            query(
                "older_than",
                "Seconds since the last record, at least.",
                type="integer",
                minimum=0,
                maximum=AGE_S_MAX,
            ),
            query("after", "Go on after this id: `next` of the page before.", **RUN_ID),
            query("limit", f"Default {PAGE}.", type="integer", minimum=1, maximum=LIST_PAGE),
        ),
        answers={200: json_answer("A page.", Runs)},
        problems=(400,),
    )


async def _list(call: Call) -> Response:
    status, agent = call.query.get("status"), call.query.get("agent")
    if status is not None and status not in STATUSES:
        raise BadRequest(f"status is one of {', '.join(STATUSES)}, not {ids.shown(status)}")
    if agent is not None:
        ids.name(agent, "an agent")
    older_than = call.query.get("older_than")
    wanted = Filter(
        status=status,
        agent=agent,
        older_than_s=None if older_than is None else whole(older_than, "older_than", 0, AGE_S_MAX),
    )
    found = await call.fleet.page(
        wanted,
        after=call.after(),
        limit=call.whole("limit", 1, LIST_PAGE, PAGE),
    )
    return answer({"runs": found.runs, "next": found.next})


def _get_run() -> Operation:
    return Operation(
        name="get_run",
        method="GET",
        path="/runs/{id}",
        scope="read",
        summary="A run, at once or when it is not running any more",
        handle=_get,
        parameters=(ID, WAIT),
        answers={200: json_answer("The run, also one whose journal can't be read.", Run)},
        problems=(400, 404),
    )


async def _get(call: Call) -> Response:
    run, wait_s = run_of(call), call.wait_s()
    if not wait_s:
        return answer(await call.fleet.shown(run))
    return answer(await call.attended(lambda: call.fleet.shown(run, wait_s=wait_s)))


# ---- journal ------------------------------------------------------------------------------------


def _get_journal() -> Operation:
    ordinal: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": ORDINAL_MAX}
    return Operation(
        name="get_journal",
        method="GET",
        path="/runs/{id}/journal",
        scope="read",
        summary="A run's records: a page of them, or all as they come (Server-Sent Events)",
        handle=_journal,
        parameters=(
            ID,
            query(
                "from",
                "The first record's ordinal; of a stream at most one behind the last record.",
                **ordinal,
            ),
            query("limit", "Of a page.", type="integer", minimum=1, maximum=LIST_PAGE),
            query("follow", "1: as `Accept: text/event-stream`.", type="string", enum=["0", "1"]),
            Parameter(
                name="Last-Event-ID",
                place="header",
                schema={"type": "string", "pattern": "^[1-9][0-9]{0,8}$"},
                about="Of a stream: go on behind this record, whatever `from` says.",
            ),
        ),
        answers={
            200: Answer(
                about="A page; or one event a record, `preview`s, and `end`.",
                bodies={JSON_TYPE: JournalPage, EVENTS_TYPE: EVENT},
            ),
            204: Answer(about="Nothing follows: that was the last record of a finished run."),
        },
        problems=(400, 404, 409),
    )


async def _journal(call: Call) -> Response:
    run = run_of(call)
    follow = call.query.get("follow", "0")
    if follow not in ("0", "1"):
        raise BadRequest(f"follow is 0 or 1, not {ids.shown(follow)}")
    first = call.whole("from", 1, ORDINAL_MAX, 1)
    limit = call.whole("limit", 1, LIST_PAGE, LIST_PAGE)
    last_event = call.request.headers.get("last-event-id")
    last = None if last_event is None else whole(last_event, "Last-Event-ID", 1, ORDINAL_MAX)
    if follow == "1" or _wants_events(call):
        return await _follow(call, run, first, last)
    return await _page(call, run, first, limit)


def _wants_events(call: Call) -> bool:
    accepted = call.request.headers.get("accept", "").lower().split(",")
    return any(one.partition(";")[0].strip() == EVENTS_TYPE for one in accepted)


async def _page(call: Call, run: RunId, first: int, limit: int) -> Response:
    found, more = await call.desk.pages.page(run, first, limit)
    records = [msgspec.Raw(raw) for raw in found]
    return answer({"run": run, "records": records, "next": first + len(found) if more else None})


async def _follow(call: Call, run: RunId, first: int, last: int | None) -> Response:
    after = first - 1 if last is None else last
    try:
        log = await Log.resumed(call.desk.store, run, by=call.by)
        if log.gone and log.fold.newer is None:
            log.check_runnable()
        tail = log.fold.n
        if log.fold.newer is not None and after >= tail:
            log.check_runnable()
        if log.fold.finished and after == tail:
            return Response(status_code=204)
    except JournalDamaged:
        # What is good of it is told; where it breaks, the stream says so.
        tail = await _good(call.desk.store, run)
        if after >= tail:
            raise
    if after > tail:
        said = f"from is {first}" if last is None else f"Last-Event-ID is {last}"
        raise BadRequest(f"{said}, but the run has {tail} records")
    return Follow(call.desk, run, after)


async def _good(store: JetStreamStore, run: RunId) -> int:
    """The last record that is good of a damaged journal."""
    cursor, last = Cursor(store, run), 0
    with suppress(JournalDamaged):
        while page := await cursor.page():
            last = page[-1].record.n
    return last
