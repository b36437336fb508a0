"""Shell: signals, decisions and inputs: what people and programs tell a run."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from msgspec import Struct
from starlette.responses import Response

from journal import ids
from journal.errors import BadPayload, InvalidId, RunfoldError, StaleSignal
from journal.ids import RunId
from journal.signals import Approve, Cancel, Reconcile, Reject, Resume

from .call import Call, answer, converted
from .desk import Desk
from .operation import Answer, Handler, Operation, Parameter, json_answer
from .problems import NotFound
from .runs import ID, WAIT, run_of
from .shapes import REQUEST_ID, Approval, Decision, InputReceipt, NewInput, Rejection, SignalReceipt

SHAPES: Final[dict[str, type[Struct]]] = {
    "approve": Approve,
    "reject": Reject,
    "reconcile": Reconcile,
    "cancel": Cancel,
    "resume": Resume,
}
INPUT: Final = Parameter(
    name="request_id", place="path", schema=REQUEST_ID, about="The input's request id."
)
RECEIPT: Final = json_answer("It stands in the journal.", SignalReceipt)


def operations(desk: Desk) -> list[Operation]:
    """The table's part. The desk comes with each call."""
    return [*(_signal_run(name, shape) for name, shape in SHAPES.items()), _decide(), *_inputs()]


# ---- signals ------------------------------------------------------------------------------------


def _signal_run(name: str, shape: type[Struct]) -> Operation:
    return Operation(
        name=f"{name}_run",
        method="POST",
        path=f"/runs/{{id}}/signals/{name}",
        scope="signal",
        summary=(shape.__doc__ or "").partition("\n\n")[0].replace("\n    ", " "),
        handle=_signaller(name),
        parameters=(ID,),
        body=shape,
        answers={200: RECEIPT},
        problems=(400, 404, 409, 413),
    )


def _signaller(name: str) -> Handler:
    async def handle(call: Call) -> Response:
        run = run_of(call)
        return await _signal(call, run, name, await call.json())

    return handle


async def _signal(call: Call, run: RunId, name: str, payload: Any) -> Response:
    """The journal says what a payload is; here only that it is an object."""
    metrics = call.desk.metrics
    try:
        if not isinstance(payload, dict):
            raise BadPayload(f"the payload of {name} is not a JSON object", run_id=run)
        receipt = await call.fleet.signal(run, name, payload)  # pyright: ignore[reportUnknownArgumentType]
    except RunfoldError as error:
        metrics.signal(name, error.code)
        raise
    metrics.signal(name, receipt.result)
    return answer(SignalReceipt.of(run, receipt))


def _decide() -> Operation:
    return Operation(
        name="decide",
        method="POST",
        path="/decisions",
        scope="signal",
        summary="Approve or reject by the marker alone: it names the run",
        handle=_decision,
        body=Decision,
        answers={200: RECEIPT},
        problems=(400, 404, 409, 413),
    )


async def _decision(call: Call) -> Response:
    body: Decision = converted(await call.json(), Decision)
    try:
        run = ids.marker_run(body.marker)
    except InvalidId as error:  # as the run's own signals say it
        raise BadPayload(error.message, hint=error.hint) from error
    payload: dict[str, Any] = {"marker": body.marker}
    if body.request_id is not None:
        payload["request_id"] = body.request_id
    match body:
        case Approval(comment=comment):
            return await _signal(call, run, "approve", payload | {"comment": comment})
        case Rejection(reason=reason):
            return await _signal(call, run, "reject", payload | {"reason": reason})


# ---- inputs -------------------------------------------------------------------------------------


def _inputs() -> list[Operation]:
    at = "/runs/{id}/inputs"
    location = {"Location": "The input's address."}
    return [
        Operation(
            name="send_input",
            method="POST",
            path=at,
            scope="signal",
            summary="Send the running agent a message",
            handle=_send,
            parameters=(ID,),
            body=NewInput,
            answers={
                201: json_answer("It is queued.", InputReceipt, **location),
                200: json_answer("It was sent before: the original.", InputReceipt, **location),
            },
            problems=(400, 404, 409, 413),
        ),
        Operation(
            name="get_input",
            method="GET",
            path=at + "/{request_id}",
            scope="read",
            summary="What became of an input, at once or when it is done",
            handle=_get,
            parameters=(ID, INPUT, WAIT),
            answers={200: json_answer("The input.", InputReceipt)},
            problems=(400, 404, 409),
        ),
        Operation(
            name="withdraw_input",
            method="DELETE",
            path=at + "/{request_id}",
            scope="signal",
            summary="Take a queued input back",
            handle=_withdraw,
            parameters=(ID, INPUT),
            answers={204: Answer(about="It will never be placed.")},
            problems=(400, 404, 409),
        ),
    ]


async def _send(call: Call) -> Response:
    run = run_of(call)
    body = await call.body(NewInput)
    metrics = call.desk.metrics
    try:
        sent = await call.fleet.send(run, body.content, mode=body.mode, request_id=body.request_id)
    except RunfoldError as error:
        metrics.signal("input", error.code)
        raise
    metrics.signal("input", "applied" if sent.created else "repeated")
    return answer(
        InputReceipt.of(run, sent),
        201 if sent.created else 200,
        Location=f"/runs/{run}/inputs/{quote(sent.request_id, safe='')}",
    )


async def _get(call: Call) -> Response:
    run, wait_s = run_of(call), call.wait_s()
    request_id = call.path["request_id"]
    try:
        if wait_s:
            found = await call.attended(lambda: call.fleet.input(run, request_id, wait_s=wait_s))
        else:
            found = await call.fleet.input(run, request_id)
    except StaleSignal as error:
        raise NotFound(error.message, run_id=run) from error
    return answer(InputReceipt.of(run, found))


async def _withdraw(call: Call) -> Response:
    run, request_id = run_of(call), call.path["request_id"]
    try:
        await call.fleet.input(run, request_id)
    except StaleSignal as error:
        raise NotFound(error.message, run_id=run) from error
    await call.fleet.withdraw(run, request_id)
    return Response(status_code=204)
