"""Shell: looking around: what waits for people, who works, what was refused, health, metrics."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET
from starlette.responses import Response

from journal.limits import LIST_PAGE
from journal.stores.rejected import REJECTED_PAGE

from .call import Call, answer
from .desk import Desk, Health
from .metrics import METRICS_TYPE
from .operation import TEXT, Answer, Operation, json_answer, query
from .shapes import RUN_ID, Inbox, Refusals, Workers

PAGE: Final = 100


def operations(desk: Desk) -> list[Operation]:
    """The table's part. The desk comes with each call."""
    return [_inbox(), _workers(), _rejected(), *_health(), _metrics()]


def _inbox() -> Operation:
    async def handle(call: Call) -> Response:
        found = await call.fleet.inbox_page(
            after=call.after(),
            limit=call.whole("limit", 1, LIST_PAGE, PAGE),
        )
        unread = list(found.unread) or UNSET
        return answer(Inbox(items=found.items, next=found.next, unread=unread))

    after = query("after", "Go on after this run: `next` of the page before.", **RUN_ID)
    about = f"Items; a run's stand on one page. Default {PAGE}."
    limit = query("limit", about, type="integer", minimum=1, maximum=LIST_PAGE)
    return Operation(
        name="inbox",
        method="GET",
        path="/inbox",
        scope="read",
        summary="What waits for a person, over all runs",
        handle=handle,
        parameters=(after, limit),
        answers={200: json_answer("A page, by run id.", Inbox)},
        problems=(400,),
    )


def _workers() -> Operation:
    async def handle(call: Call) -> Response:
        return answer(Workers(workers=await call.fleet.workers()))

    return Operation(
        name="workers",
        method="GET",
        path="/workers",
        scope="read",
        summary="The connected workers: their agents and the runs they hold",
        handle=handle,
        answers={200: json_answer("By worker id.", Workers)},
        problems=(400,),
    )


def _rejected() -> Operation:
    async def handle(call: Call) -> Response:
        limit = call.whole("limit", 1, REJECTED_PAGE, PAGE)
        return answer(Refusals(rejected=await call.desk.store.rejected.latest(limit)))

    about = f"Default {PAGE}."
    limit = query("limit", about, type="integer", minimum=1, maximum=REJECTED_PAGE)
    return Operation(
        name="rejected",
        method="GET",
        path="/rejected",
        scope="read",
        summary="Signals that were published and refused, with their reason",
        handle=handle,
        parameters=(limit,),
        answers={200: json_answer("Newest first.", Refusals)},
        problems=(400,),
    )


def _health() -> list[Operation]:
    async def health(call: Call) -> Response:
        return _said(call.desk.health())

    async def ready(call: Call) -> Response:
        return _said(call.desk.ready())

    return [
        Operation(
            name=name,
            method="GET",
            path=f"/{name}",
            scope=None,
            summary=summary,
            handle=handle,
            answers={
                200: json_answer("It can.", Health),
                503: json_answer("It can't, and why.", Health),
            },
            any_query=True,
        )
        for name, summary, handle in (
            ("healthz", "Whether the bridge can do all its work", health),
            ("readyz", "Whether requests can be answered", ready),
        )
    ]


def _said(found: Health) -> Response:
    return answer(found, 200 if found.ok else 503)


def _metrics() -> Operation:
    async def handle(call: Call) -> Response:
        return Response(call.desk.metrics.text(), headers={"content-type": METRICS_TYPE})

    return Operation(
        name="metrics",
        method="GET",
        path="/metrics",
        scope="read",
        summary="For Prometheus",
        handle=handle,
        answers={200: Answer(about="All metrics.", bodies={METRICS_TYPE: TEXT})},
        problems=(400,),
    )
