"""Core: the audit of steps: each started as it may be, and brought to one result (PROTOCOL 3, 6).

The heart of it: an unsafe step is started again only under its own permit, and a call that a person
is asked about only under that person's approval. Each function names what its record breaks and
then notes the record as if it were right, so that one fault is not named twice.
"""

from __future__ import annotations

import re
from typing import cast

import msgspec
from msgspec import UNSET

from .audit_book import Book, Findings, Gated, StepBook, instant
from .ids import valid_name, valid_run_id
from .messages import JSON, Reply
from .records import (
    SPAWN,
    Signal,
    StepCompleted,
    StepProgress,
    StepStarted,
    VerdictAllow,
    VerdictAsk,
    VerdictDeny,
)
from .values import BadJSON, call_digest, canonical, parse_strict

_LOOP_MODEL = re.compile(r"llm/(\d+)", re.ASCII)
_LOOP_TOOL = re.compile(r"tool/(\d+)/\d+/.+", re.ASCII)
_MARKER_END = re.compile(r"@([1-9]\d{0,5})\.[0-9a-f]{16}", re.ASCII)


# ---- starts -----------------------------------------------------------------------------------


def started(book: Book, record: StepStarted) -> Findings:
    """What a step.started breaks."""
    step = book.steps.get(record.step)
    yield from _alone(book, record)
    if record.digest != call_digest(record.tool, record.input):
        yield "digest", f"the digest of {record.step} is not that of its tool and input"
    if record.tool == SPAWN and not _names_run(record.input):
        yield "child", f"{record.step} starts a child run and names none"
    if step is not None and step.result:
        yield "repeated_step", f"{record.step} is started again after its result, {step.result}"
        del book.steps[record.step]
    elif step is not None and step.starts:
        yield from _again(book, step, record)
    else:
        yield from _first(book, record)
    book.steps.setdefault(record.step, StepBook(record.step)).starts.append(record)
    book.goes_on()
    if record.tool == SPAWN and _names_run(record.input):
        book.children.setdefault(cast("str", record.input["run"]), False)


def _alone(book: Book, record: StepStarted) -> Findings:
    """What holds of every start, first or not."""
    if record.attempt != book.attempt:
        yield "attempt", f"{record.step} is of attempt {record.attempt}, not {book.attempt}"
    if record.replay == "unsafe" and book.cancel:
        yield "cancelled", f"the write {record.step} starts after the cancel in {book.cancel}"
    given = record.deadline or record.replay == "unsafe"
    if given and instant(record.deadline) is None:
        yield "deadline", f"{record.step} has no instant for a deadline"
    for other in book.unknown():
        start = other.starts[-1]
        if other.name != record.step and record.claim and start.claim != record.claim:
            what = f"{other.name}, record {start.n}"
            yield "beside_unknown", f"{record.step} starts while nobody knows what became of {what}"
            break


def _names_run(input: JSON) -> bool:
    if not isinstance(input, dict):
        return False
    run = cast("dict[str, JSON]", input).get("run")
    return isinstance(run, str) and valid_run_id(run)


def _again(book: Book, step: StepBook, record: StepStarted) -> Findings:
    last = step.starts[-1]
    if (last.kind, last.tool, last.digest) != (record.kind, record.tool, record.digest):
        yield "same_call", f"{record.step} is another call than in record {last.n}"
    if record.key != last.key:
        yield "key", f"{record.step} has another key than in record {last.n}"
    if not step.unsafe and record.replay == "safe":
        if record.permit != last.permit:
            yield "permit", f"{record.step} names permit {record.permit}, not {last.permit}"
        return
    permit = step.retry()
    if permit is None or permit.n != record.permit:
        named = f"record {record.permit}, which is no retry" if record.permit else "no permit"
        yield "permit", f"the write {record.step}, start {last.n}, starts again under {named} of it"


def _first(book: Book, record: StepStarted) -> Findings:
    """The first start of a step in its attempt."""
    what = (record.tool, record.digest)
    tried = book.attempt > 1 and record.step[:1].isdecimal()
    place = f"{record.step}@{book.attempt}" if tried else record.step
    own = f"{book.run}:{place}:{record.digest[:16]}"
    if record.key != own and record.key not in book.keys.get(what, ()):
        yield "key", f"the key of {record.step} is neither its own nor that of an earlier attempt"
    gated = book.calls.get(record.step)
    if gated is not None and gated.digest != record.digest:
        yield "same_call", f"{record.step} is another call than {book.reply} made"
    yield from _of_this_reply(book, record)
    if gated is not None and isinstance(gated.verdict, VerdictDeny):
        yield "denied", f"{record.step} starts, and the gate denied it"
    elif not record.permit:
        yield from _without_permit(book, record, gated)
    else:
        yield from _with_permit(book, record, gated)


def _of_this_reply(book: Book, record: StepStarted) -> Findings:
    """A call of the loop is one of its last reply."""
    found = _LOOP_TOOL.fullmatch(record.step)
    if found is None:
        return
    later = [
        name
        for name in book.steps
        if (model := _LOOP_MODEL.fullmatch(name)) and int(model[1]) > int(found[1])
    ]
    if later:
        yield "stale_call", f"{record.step} starts after the later model call {later[-1]}"
    elif record.step not in book.calls and book.reply == f"llm/{found[1]}" and book.calls:
        yield "same_call", f"{record.step} is no call that {book.reply} made"


def _without_permit(book: Book, record: StepStarted, gated: Gated | None) -> Findings:
    waiting = [
        marker
        for marker, ask in book.asks.items()
        if (ask.step, ask.digest) == (record.step, record.digest)
    ]
    if gated is not None and isinstance(gated.verdict, VerdictAsk):
        waiting = [gated.verdict.marker]
    if waiting:
        yield "approval", f"{record.step} starts without the approval of {waiting[-1]}"
    elif record.digest in book.interrupted:
        yield "approval", f"{record.step} repeats an interrupted call, and nobody was asked"


def _with_permit(book: Book, record: StepStarted, gated: Gated | None) -> Findings:
    permit = book.permits.get(record.permit)
    if permit is None:
        yield "permit", f"{record.step} names record {record.permit}, which permits nothing"
        return
    if permit.n in book.spent:
        yield "spent", f"{record.step} uses permit {permit.n}, as {book.spent[permit.n]} did"
        return
    book.spent[permit.n] = record.step
    if permit.name == "reconcile":
        yield from _honoured(book, record)
        return
    marker = cast("str", permit.payload["marker"])
    # the built-in loop drops no result, so its calls are asked for once, whatever the attempt
    attempt = book.attempt if gated is None else 1
    head = f"{book.run}/{record.step}@{attempt}."
    asked = gated.verdict if gated is not None else None
    mine = marker == asked.marker if isinstance(asked, VerdictAsk) else gated is None
    if permit.name != "approve" or book.decided.get(marker) is not permit:
        yield "approval", f"{record.step} starts, and record {permit.n} does not approve it"
    elif not mine or not marker.startswith(head):
        yield "approval", f"{record.step} starts under the approval of {marker}"


def _honoured(book: Book, record: StepStarted) -> Findings:
    """A retry of an earlier attempt's write: it takes that write's place (R44)."""
    earlier = book.earlier.get((record.tool, record.digest), [])
    for index, step in enumerate(earlier):
        permit = step.retry()
        if permit is not None and permit.n == record.permit:
            if record.key != step.starts[-1].key:
                yield "key", f"{record.step} repeats {step.name} under another key"
            book.steps[record.step] = earlier[index] = StepBook(record.step)
            return
    yield "permit", f"{record.step} names record {record.permit}, a retry of another call"


# ---- progress and results ---------------------------------------------------------------------


def progressed(book: Book, record: StepProgress) -> Findings:
    step = book.steps.get(record.step)
    if step is None or not step.open:
        yield "progress", f"{record.step} reports progress and is not open"


def completed(book: Book, record: StepCompleted) -> Findings:
    """What a step.completed breaks."""
    step = book.steps.get(record.step)
    given = [record.result, record.error, record.interrupted]
    if sum(value is not UNSET for value in given) != 1:
        yield "result", f"{record.step} has not exactly one of result, error, interrupted"
    if step is not None and step.result:
        yield "second_result", f"{record.step} has its result already, record {step.result}"
        return
    if step is None and record.via != "refused":
        yield "unstarted", f"{record.step} has a result and never started"
    elif step is not None and step.starts:
        yield from _via(book, step, record)
    if record.error is not UNSET and record.via == "refused" and record.error.type == "rejected":
        yield from _rejected(book, record)
    if step is None:
        step = book.steps[record.step] = StepBook(record.step)
    step.result = record.n
    book.goes_on()
    if record.interrupted is not UNSET and step.starts:
        book.interrupted.add(step.starts[-1].digest)
    if step.starts and step.starts[-1].kind == "model":
        yield from _replied(book, record)
    elif record.verdicts:
        yield "verdicts", f"{record.step} has verdicts and is no model call"


def _via(book: Book, step: StepBook, record: StepCompleted) -> Findings:
    """Whether the result is one that its `via` says it is."""
    last = step.starts[-1]
    own = book.fenced or last.claim == record.claim
    plain = record.interrupted is UNSET
    by_policy = step.unknown and step.asked < last.n
    error = record.error.type if record.error is not UNSET else ""
    if last.kind == "model" and (record.via != "run" or record.result is UNSET):
        yield "model", f"the model call {record.step} has no result of its own"
        return
    match record.via:
        case "run":
            right = plain and own
        case "not_called":
            right = error == "not_called" and own
        case "refused":
            right = bool(error) and not step.unknown
        case "interrupted":
            right = not plain and by_policy and last.policy == "interrupt"
        case "probe":
            right = record.result is not UNSET and by_policy and last.policy == "probe"
        case "reconcile":
            right = _same(step.said.get(last.n), record, "done")
        case "late":
            right = _same(step.late.get(last.n), record, None)
    if not right:
        yield "via", f"{record.step} has a result by {record.via}, which its start does not allow"


def _same(said: Signal | None, record: StepCompleted, outcome: str | None) -> bool:
    """Whether the result is what the signal says it is."""
    if said is None or said.payload.get("outcome") != outcome or record.result is UNSET:
        return False
    return canonical(said.payload["result"]) == canonical(record.result)


def _rejected(book: Book, record: StepCompleted) -> Findings:
    gated = book.calls.get(record.step)
    heads = f"{book.run}/{record.step}@{book.attempt}."
    said = [signal for marker, signal in book.decided.items() if marker.startswith(heads)]
    if gated is not None and isinstance(gated.verdict, VerdictAsk):
        said = [book.decided[m] for m in [gated.verdict.marker] if m in book.decided]
    if not any(signal.name == "reject" for signal in said):
        yield "refusal", f"{record.step} is answered as rejected, and nobody rejected it"


# ---- model replies ----------------------------------------------------------------------------


def _replied(book: Book, record: StepCompleted) -> Findings:
    """The verdicts of a reply: one a call. They say what may start, and what a person is asked."""
    book.reply = record.step
    book.calls = {}
    loop = _LOOP_MODEL.fullmatch(record.step)
    try:
        reply = msgspec.convert(record.result, Reply)
    except msgspec.ValidationError:
        reply = Reply()
    if len(reply.calls) != len(record.verdicts) and (loop or record.verdicts):
        yield "verdicts", f"{record.step} has {len(record.verdicts)} verdicts on its calls"
    if not record.verdicts:
        return
    ordinal = record.step.rpartition("/")[2]
    for index, (call, verdict) in enumerate(zip(reply.calls, record.verdicts, strict=False)):
        name = call.name if valid_name(call.name) else "?"
        step = f"tool/{ordinal}/{index}/{name}"
        digest = _digest(call.name, call.arguments)
        given = None if isinstance(verdict, VerdictAllow) else verdict
        book.calls[step] = Gated(given, digest)
        if isinstance(verdict, VerdictAsk):
            yield from marked(book, verdict.marker, step, digest, attempt=1)


def _digest(tool: str, arguments: str) -> str:
    try:
        return call_digest(tool, parse_strict(arguments))
    except BadJSON:
        return ""


def marked(book: Book, marker: str, step: str, digest: str, *, attempt: int) -> Findings:
    """A marker that a person is asked by: of this run, step and attempt, and of one call only."""
    head = f"{book.run}/{step}"
    end = _MARKER_END.fullmatch(marker, len(head)) if marker.startswith(head) else None
    if end is None or int(end[1]) != attempt:
        yield "marker", f"{step} is asked about under the marker {marker[:200]}"
    elif book.markers.setdefault(marker, (step, digest)) != (step, digest):
        yield "marker", f"{step} is asked about under another call's marker, {marker[:200]}"
