"""Hand-made journals, one or more for each rule of the audit: an honest one, and the record that
breaks it. (prefix, record, envelope): the record is sealed behind the prefix as it is."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
from kit.build import (
    ALLOW,
    RUN,
    answered,
    approved,
    asked_for,
    asking,
    asks,
    cancel,
    cancelled_end,
    child_ended,
    claimed,
    denying,
    done,
    error_of,
    failed,
    goes_on,
    interrupted_of,
    late,
    model_start,
    parked,
    placed,
    progress_of,
    rejected,
    released,
    reply_of,
    request,
    result_of,
    resume,
    retry,
    spawned,
    start_of,
    started,
    submitted,
    withdrawn,
)

from journal.records import (
    SPAWN,
    Commit,
    InputPlaced,
    Interrupted,
    Park,
    Record,
    RunCompleted,
    RunPurged,
    Signal,
    StepCompleted,
    StepError,
    StepStarted,
    Waits,
)

Case: TypeAlias = tuple[list[Record], Record, dict[str, Any]]

SOON = "2026-01-02T03:05:00.000Z"
PAY, READ, TOOL = "0/0", "0/1", "tool/1/0/pay"
HELD: list[Record] = [started(), claimed()]
UNKNOWN: list[Record] = [*HELD, start_of(PAY)]
START = 3
FREE: list[Record] = [*UNKNOWN, released()]  # nobody holds it, and nobody knows
NEXT: list[Record] = [*FREE, claimed("w2")]

ASK = asking(1, 0, "pay")
OTHER = asking(1, 1, "pay")
ASKED: list[Record] = [*HELD, model_start(), reply_of(1, asks(request("pay")), ASK)]
LET: list[Record] = [*HELD, model_start(), reply_of(1, asks(request("pay")), ALLOW)]
TWO_ASKED: list[Record] = [
    *HELD,
    model_start(),
    reply_of(1, asks(request("pay"), request("pay", id="2")), ASK, OTHER),
]
HANDLER_ASKS = asked_for(PAY)
BESIDE = asked_for(READ)
HANDLER_ASKED: list[Record] = [
    *HELD,
    parked(asks=(HANDLER_ASKS, BESIDE)),
    approved(BESIDE.marker, "r0"),
    claimed("w2"),
]

KEY, DIGEST = start_of(PAY).key, start_of(PAY).digest[:16]
AFRESH: list[Record] = [  # a new attempt, in which the retry of the last one's write is permitted
    *FREE,
    retry(PAY, START),
    claimed("w2"),
    parked("retry", afresh=True, until=SOON),
    claimed("w3"),
]

LOOKED: list[Record] = [*HELD, start_of(READ, "look", unsafe=False)]
PROBED: list[Record] = [*HELD, start_of(PAY, policy="probe")]
CUT_OFF: list[Record] = [*HELD, start_of(PAY, policy="interrupt")]
QUEUED: list[Record] = [*HELD, submitted("i1"), submitted("i2")]


RETRIED: list[Record] = [parked("retry", afresh=True, until=SOON), claimed("w2")]
DONE: list[Record] = [*UNKNOWN, result_of(PAY), *RETRIED]
SECOND_ASK = HANDLER_ASKS.marker.replace("@1", "@2")
DENIED: list[Record] = [*HELD, model_start(), reply_of(1, asks(request("pay")), denying())]


def again(step: str, **fields: Any) -> Record:
    """The same write in the next attempt, as if there had been none."""
    return changed(start_of(step, key=f"{RUN}:{step}@2:{DIGEST}", **fields), attempt=2)


def tool_start(index: int = 0, permit: int = 0, input: Any = None) -> StepStarted:
    """The start of the reply's call at `index`."""
    value = {} if input is None else input
    return start_of(f"tool/1/{index}/pay", input=value, permit=permit)


def by(via: Any, step: str = PAY, **fields: Any) -> StepCompleted:
    return StepCompleted(step=step, via=via, **(fields or {"result": "ok"}))


def changed(body: Record, **fields: Any) -> Record:
    return msgspec.structs.replace(body, **fields)


def signal(name: Any, payload: dict[str, Any], request_id: str = "r") -> Signal:
    return Signal(name=name, request_id=request_id, payload=payload)


def case(prefix: list[Record], body: Record, **envelope: Any) -> Case:
    return prefix, body, envelope


NOT_CALLED = StepError(type="not_called", message="late")

CASES: dict[str, list[Case]] = {
    # ---- the run, its claims and its end
    "run_id": [case([], started(run="b2"))],
    "first": [
        case(HELD, started()),
        case([], claimed()),
        case([], RunPurged()),
    ],
    "claim": [
        case([*HELD, claimed("w2")], model_start(), claim=2),
        case([*HELD, goes_on(until_input=True)], model_start(), claim=2),
        case(HELD, model_start(), claim=0),
        case([started()], model_start(), claim=1),
        case([started()], released()),
        case(HELD, submitted(), claim=2),
        case([*HELD, claimed("w2")], goes_on(until_input=True), claim=2),
        case(HELD, model_start(), by="zombie"),
        case([*HELD, released()], model_start()),
    ],
    "after_end": [
        case([*HELD, answered()], submitted()),
        case([*HELD, failed()], resume()),
        case([*HELD, failed(retriable=True)], claimed("w2")),
        case([*HELD, cancel(), cancelled_end()], cancel(request_id="r2")),
        case([*HELD, failed(retriable=True), RunPurged()], resume()),
        case([*HELD, answered(), RunPurged()], RunPurged()),
    ],
    "purge": [case(HELD, RunPurged()), case([*HELD, parked("pause")], RunPurged())],
    # ---- turns
    "iteration": [
        case([*HELD, goes_on()], Commit(action="continue")),
        case(HELD, Commit(action="continue", iteration=1)),
        case([*HELD, goes_on()], RunCompleted(message="")),
        case([*HELD, goes_on()], Park(why="pause")),
        case([*QUEUED, goes_on()], InputPlaced(request_id="i1", position="1/0")),
    ],
    "attempt": [
        case(HELD, Park(why="pause", attempt=2)),
        case([*HELD, parked("retry", until=SOON), claimed("w2")], Park(why="pause")),
        case([*HELD, parked("retry", until=SOON), claimed("w2")], model_start()),
    ],
    "unknown_write": [
        case(UNKNOWN, goes_on()),
        case(UNKNOWN, answered()),
        case(UNKNOWN, failed()),
        case([*UNKNOWN, cancel()], cancelled_end()),
        case(UNKNOWN, Park(why="retry")),
        case(CUT_OFF, Park(why="retry", afresh=True)),
    ],
    "instant": [
        case(HELD, Park(why="pause", until="soon")),
        case(HELD, Commit(action="continue", waits=Waits(until="2026-13-01T00:00:00Z"))),
    ],
    "wake": [
        case([*HELD, submitted()], goes_on(until_input=True)),
        case([*HELD, cancel()], Park(why="pause")),
        case(
            [*HELD, spawned(READ, "c1"), result_of(READ), child_ended("c1")],
            goes_on(until_child="c1"),
        ),
        case(HELD, Park(why="approval")),
        case(
            [
                *ASKED,
                rejected(ASK.marker),
                error_of(TOOL, "rejected", via="refused"),
                model_start(2),
                result_of("llm/2", "text"),
            ],
            Park(why="approval"),
        ),
        case([*ASKED, approved(ASK.marker)], Park(why="approval")),
        case([*HELD, approved(HANDLER_ASKS.marker)], Park(why="approval", asks=(HANDLER_ASKS,))),
        case(HELD, Park(why="reconcile")),
        case([*FREE, late(PAY, START), claimed()], Park(why="retry", steps=(PAY,))),
    ],
    "idle": [
        case([*ASKED, parked()], claimed("w2")),
        case([*UNKNOWN, parked("reconcile")], claimed("w2")),
        case([*HELD, goes_on(until_input=True)], claimed("w2")),
        case([*HELD, submitted(), parked("retry")], claimed("w2")),
    ],
    "park": [
        case(HELD, Park(why="reconcile", steps=(READ,))),
        case([*LOOKED, result_of(READ)], Park(why="reconcile", steps=(READ,))),
        case(HELD, Park(why="retry", steps=(PAY,))),
    ],
    "cancel": [
        case(HELD, cancelled_end()),
        case([*HELD, cancel()], answered()),
        case([*HELD, cancel()], failed()),
        case([*HELD, cancel()], goes_on()),
        case([*HELD, cancel()], goes_on(until_input=True)),
    ],
    "unfinished": [
        case([*HELD, model_start()], answered()),
        case(LOOKED, goes_on()),
        case(LET, answered()),
        case([*FREE, retry(PAY, START), claimed("w2")], goes_on()),
    ],
    # ---- starts
    "cancelled": [case([*HELD, cancel()], start_of(PAY))],
    "deadline": [
        case(HELD, start_of(PAY, deadline="")),
        case(HELD, start_of(PAY, deadline="soon")),
        case(HELD, changed(start_of(READ, "look", unsafe=False), deadline="soon")),
    ],
    "digest": [
        case([], changed(started(), digest="0" * 32)),
        case(HELD, changed(start_of(PAY), digest="0" * 32, key=f"{RUN}:{PAY}:{'0' * 16}")),
    ],
    "key": [
        case(HELD, start_of(PAY, key=f"{RUN}:{READ}:{'0' * 16}")),
        case(
            AFRESH,
            changed(start_of("0/2", permit=5, key=f"{RUN}:0/2@2:{DIGEST}"), attempt=2),
        ),
        case(LOOKED, start_of(READ, "look", unsafe=False, key=f"{RUN}:{READ}:again")),
    ],
    "same_call": [
        case(
            LOOKED,
            start_of(READ, "look", 2, unsafe=False, key=start_of(READ, "look").key),
        ),
        case(LET, tool_start(input={"amount": 9999})),
        case(LET, tool_start(index=1)),
        case([*HELD, model_start(), reply_of(1, asks(text="Hi."))], tool_start()),
    ],
    "stale_call": [
        case(LET, model_start(2)),
        case([*LET, tool_start()], model_start(2)),
        case([*ASKED, approved(ASK.marker)], model_start(2)),
        case([*HELD, model_start(2)], tool_start()),
    ],
    "repeated_step": [
        case([*UNKNOWN, result_of(PAY)], start_of(PAY)),
        case([*CUT_OFF, interrupted_of(PAY)], start_of(PAY)),
        case([*LET, error_of(TOOL, via="refused")], tool_start()),
    ],
    "permit": [
        case(UNKNOWN, start_of(PAY)),
        case(NEXT, start_of(PAY)),
        case([*FREE, retry(PAY, START), claimed("w2")], start_of(PAY)),
        case([*FREE, retry(PAY, START), claimed("w2")], start_of(PAY, permit=START)),
        case([*FREE, done(PAY, START), claimed("w2")], start_of(PAY, permit=5)),
        case([*FREE, retry(PAY, START), late(PAY, START), claimed()], start_of(PAY, permit=5)),
        case(
            [*FREE, retry(PAY, START), claimed(), start_of(PAY, permit=5)], start_of(PAY, permit=5)
        ),
        case(LOOKED, start_of(READ, "look", permit=1, unsafe=False)),
        case(HELD, start_of(PAY, permit=2)),
        case([*FREE, retry(PAY, START), claimed()], start_of(READ, permit=5)),
        case(
            [*FREE, retry(PAY, START), claimed("w2")],
            changed(start_of(PAY, permit=5), replay="safe"),
        ),
        case(
            AFRESH,
            changed(start_of("0/2", permit=5, key=KEY), replay="safe", attempt=2),
        ),
        case(DONE, again(PAY)),
        case(DONE, changed(again(PAY), replay="safe", deadline="")),
        case([*DONE, approved(SECOND_ASK)], again(PAY, permit=7)),
        case(
            [*UNKNOWN, result_of(PAY), failed(retriable=True, afresh=True), resume(), claimed()],
            start_of("1/0"),
        ),
        case(
            [*LET, tool_start(), result_of(TOOL), *RETRIED, model_start(), LET[-1]],
            changed(tool_start(), attempt=2),
        ),
    ],
    "approval": [
        case(ASKED, tool_start()),
        case([*ASKED, rejected(ASK.marker)], tool_start(permit=5)),
        case([*TWO_ASKED, approved(ASK.marker)], tool_start(index=1, permit=5)),
        case([*LET, approved(asking(9, 0, "pay").marker)], tool_start(permit=5)),
        case([*HANDLER_ASKED, rejected(HANDLER_ASKS.marker)], start_of(PAY)),
        case([*HANDLER_ASKED, rejected(HANDLER_ASKS.marker)], start_of(PAY, permit=6)),
        case([*HANDLER_ASKED, approved(HANDLER_ASKS.marker)], start_of(READ, permit=6)),
        case([*HANDLER_ASKED, approved(HANDLER_ASKS.marker)], start_of(PAY, input=9999, permit=6)),
        case([*CUT_OFF, interrupted_of(PAY)], start_of(READ)),
        case([*CUT_OFF, interrupted_of(PAY), goes_on()], start_of("1/0")),
    ],
    "spent": [
        case(
            [*TWO_ASKED, approved(ASK.marker), tool_start(permit=5), result_of(TOOL)],
            tool_start(index=1, permit=5),
        )
    ],
    "denied": [case(DENIED, tool_start())],
    "beside_unknown": [
        case([started(), start_of(PAY)], model_start(), nonce="a" * 12),
        case(NEXT, model_start()),
        case([*CUT_OFF, claimed("w2")], start_of(READ)),
    ],
    "child": [
        case(HELD, start_of(READ, SPAWN, None, unsafe=False)),
        case(HELD, start_of(READ, SPAWN, {"run": "../x"}, unsafe=False)),
        case(HELD, child_ended("c1")),
        case([*HELD, start_of(READ, "look", {"run": "c1"}, unsafe=False)], child_ended("c1")),
        case(HELD, goes_on(until_child="c1")),
    ],
    # ---- results
    "progress": [case(HELD, progress_of(PAY)), case([*UNKNOWN, result_of(PAY)], progress_of(PAY))],
    "result": [
        case(UNKNOWN, StepCompleted(step=PAY)),
        case(UNKNOWN, StepCompleted(step=PAY, result=1, error=NOT_CALLED)),
    ],
    "second_result": [
        case([*UNKNOWN, result_of(PAY)], result_of(PAY)),
        case([*CUT_OFF, interrupted_of(PAY)], result_of(PAY)),
    ],
    "unstarted": [
        case(HELD, result_of(PAY)),
        case(HELD, interrupted_of(PAY)),
        case(HELD, by("refused")),
    ],
    "via": [
        case(NEXT, result_of(PAY)),
        case(UNKNOWN, by("run", interrupted=Interrupted())),
        case(UNKNOWN, by("not_called")),
        case(NEXT, by("not_called", error=NOT_CALLED)),
        case(NEXT, error_of(PAY, via="refused")),
        case(LOOKED, by("refused", READ)),
        case(UNKNOWN, interrupted_of(PAY)),
        case([*CUT_OFF, parked("reconcile"), cancel(), claimed("w2")], interrupted_of(PAY)),
        case(CUT_OFF, by("interrupted")),
        case(UNKNOWN, by("probe")),
        case(NEXT, by("reconcile")),
        case([*FREE, done(PAY, START, "D"), claimed()], by("reconcile", result="E")),
        case([*FREE, retry(PAY, START), claimed()], by("reconcile")),
        case(NEXT, by("late")),
        case([*FREE, late(PAY, START, "L"), claimed()], by("late", result="M")),
        case([*FREE, done(PAY, START), claimed()], by("late", result="D")),
        case([*FREE, done(PAY, START), claimed()], error_of(PAY, via="refused")),
        case([started(), start_of(PAY)], result_of(PAY), nonce="a" * 12),
    ],
    "model": [
        case([*HELD, model_start()], error_of("llm/1")),
        case(HELD, changed(start_of(PAY), kind="model")),
        case(LET, changed(tool_start(), kind="model", replay="safe", deadline="")),
        case([*HELD, model_start()], result_of("llm/1", via="probe")),
    ],
    "verdicts": [
        case([*HELD, model_start()], reply_of(1, asks(request("pay")))),
        case([*HELD, model_start()], reply_of(1, asks(request("pay")), ALLOW, ALLOW)),
        case(UNKNOWN, result_of(PAY, verdicts=(ALLOW,))),
        case([*HELD, model_start()], result_of("llm/1", "text", verdicts=(ALLOW,))),
    ],
    "refusal": [
        case(ASKED, error_of(TOOL, "rejected", via="refused")),
        case([*ASKED, approved(ASK.marker)], error_of(TOOL, "rejected", via="refused")),
        case(HANDLER_ASKED, error_of(PAY, "rejected", via="refused")),
        case(ASKED, error_of(TOOL, via="refused")),
        case(DENIED, error_of(TOOL, "outdated", via="refused")),
    ],
    "marker": [
        case([*HELD, model_start()], reply_of(1, asks(request("pay")), OTHER)),
        case(HELD, Park(why="approval", asks=(asked_for(PAY, digest="no hex"),))),
        case(
            HANDLER_ASKED,
            Park(why="approval", asks=(changed(HANDLER_ASKS, input=2),)),
        ),
        case(HELD, approved("yes")),
        case(HELD, approved(f"b2/{PAY}@1.{'0' * 16}")),
    ],
    # ---- signals and inputs
    "payload": [
        case(HELD, signal("approve", {})),
        case(HELD, signal("reject", {"marker": 7})),
        case(FREE, signal("reconcile", {"step": PAY, "start": START, "outcome": "done"})),
        case(FREE, signal("reconcile", {"step": PAY, "start": True, "outcome": "retry"})),
        case(
            FREE,
            signal("reconcile", {"step": PAY, "start": START, "outcome": "retry", "result": 1}),
        ),
        case(FREE, signal("late", {"step": PAY, "start": START})),
        case(HELD, signal("child", {"run": "c1"})),
        case(HELD, signal("cancel", {}, request_id="")),
    ],
    "repeat": [
        case([*HELD, cancel()], cancel(request_id="other")),
        case([*TWO_ASKED, approved(ASK.marker)], approved(OTHER.marker)),
        case([*HELD, spawned(READ, "c1"), child_ended("c1")], child_ended("c1")),
    ],
    "decision": [
        case([*ASKED, approved(ASK.marker)], rejected(ASK.marker)),
        case([*ASKED, approved(ASK.marker)], approved(ASK.marker, "r2")),
        case([*LET, tool_start()], approved(ASK.marker)),
        case(ASKED, approved(asking(1, 0, "pay", "f" * 16).marker)),
        case([*HELD, goes_on()], approved(HANDLER_ASKS.marker)),
    ],
    "reconcile": [
        case(FREE, retry(PAY, 2)),
        case(FREE, retry(READ, START)),
        case(UNKNOWN, retry(PAY, START)),
        case([*UNKNOWN, result_of(PAY), released()], retry(PAY, START)),
        case([*LOOKED, released()], done(READ, START)),
        case([*FREE, retry(PAY, START)], done(PAY, START)),
        case([*FREE, late(PAY, START)], retry(PAY, START)),
        case(
            [*FREE, retry(PAY, START), claimed(), start_of(PAY, permit=5), released()],
            done(PAY, START),
        ),
        case(UNKNOWN, retry(PAY, START, f"probe:{START}")),
        case(PROBED, done(PAY, START, request_id=f"probe:{START}")),
        case(HELD, retry(PAY, 1)),
    ],
    "late": [
        case(FREE, late(PAY, 2)),
        case(UNKNOWN, late(PAY, START)),
        case([*UNKNOWN, result_of(PAY), released()], late(PAY, START)),
        case([*FREE, done(PAY, START)], late(PAY, START)),
        case([*FREE, late(PAY, START)], late(PAY, START, request_id="r2")),
        case([*LOOKED, result_of(READ), goes_on()], late(READ, START)),
        case([*AFRESH, start_of("0/2", permit=5, key=KEY), released()], late(PAY, START)),
    ],
    "resume": [
        case(HELD, resume()),
        case([*HELD, parked("pause"), claimed("w2")], resume()),
        case([*HELD, parked("pause"), resume("r1")], resume()),
        case([*HELD, goes_on(until_input=True)], resume()),
    ],
    "input": [
        case(QUEUED, submitted("i1", content="other")),
        case([*QUEUED, withdrawn("i1")], submitted("i1")),
        case(HELD, withdrawn()),
        case(HELD, placed()),
        case([*QUEUED, placed()], withdrawn()),
        case([*QUEUED, withdrawn()], placed()),
        case([*QUEUED, placed()], placed()),
        case([*QUEUED, withdrawn()], withdrawn()),
        case(
            [*QUEUED, placed(), goes_on()],
            InputPlaced(request_id="i1", iteration=1, position="1/0"),
        ),
    ],
    "queued": [case([*HELD, model_start(), result_of("llm/1", "text"), submitted()], answered())],
    "input_order": [
        case(QUEUED, placed("i2")),
        case([*HELD, model_start(), submitted()], placed()),
    ],
}
