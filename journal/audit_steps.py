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

from .audit_book import LOOP_MODEL, LOOP_TOOL, PLACE, Ask, Book, Findings, Gated, StepBook, instant
from .ids import valid_name, valid_run_id
from .messages import JSON, Reply
from .records import (
    SPAWN,
    Record,
    Signal,
    StepCompleted,
    StepError,
    StepProgress,
    StepStarted,
    VerdictAllow,
    VerdictAsk,
    VerdictDeny,
)
from .values import BadJSON, call_digest, canonical, parse_strict

_MARKER_END = re.compile(r"@([1-9]\d{0,5})\.[0-9a-f]{16}", re.ASCII)


# ---- starts -----------------------------------------------------------------------------------


def started(book: Book, record: StepStarted) -> Findings:
    """What a step.started breaks."""
    step = book.steps.get(record.step)
    yield from _alone(book, record)
    if record.digest != call_digest(record.tool, record.input):
        yield "digest", f"the digest of {record.step} is not that of its tool and input"
    if LOOP_MODEL.fullmatch(record.step) and record.step not in book.steps:
        yield from _answered(book, record)
    if record.tool == SPAWN and not _names_run(record.input):
        yield "child", f"{record.step} starts a child run and names none"
    if step is not None and step.result:
        yield "repeated_step", f"{record.step} is started again after its result, {step.result}"
        del book.steps[record.step]
    elif step is not None and step.starts:
        yield from _again(step, record)
    else:
        yield from _first(book, record)
    book.begin(record)
    if record.tool == SPAWN and _names_run(record.input):
        book.children.setdefault(cast("str", record.input["run"]), False)


def _alone(book: Book, record: StepStarted) -> Findings:
    """What holds of every start, first or not."""
    if record.attempt != book.attempt:
        yield "attempt", f"{record.step} is of attempt {record.attempt}, not {book.attempt}"
    if record.kind == "model" and (record.tool or record.replay == "unsafe"):
        yield "model", f"{record.step} calls a tool, and is recorded as a model call"
    if record.replay == "unsafe" and book.cancel:
        yield "cancelled", f"the write {record.step} starts after the cancel in {book.cancel}"
    given = record.deadline or record.replay == "unsafe"
    if given and instant(record.deadline) is None:
        yield "deadline", f"{record.step} has no instant for a deadline"
    for other in book.unknown():
        start = other.starts[-1]
        if other.name != record.step and session(start) != session(record):
            what = f"{other.name}, record {start.n}"
            yield "beside_unknown", f"{record.step} starts while nobody knows what became of {what}"
            break


def _answered(book: Book, record: StepStarted) -> Findings:
    if left := book.unanswered():
        yield "stale_call", f"{record.step} starts, and {left}, of {book.reply}, has no result"


def session(record: Record) -> tuple[int, str]:
    """What two records of one holder share: their claim; under a lock the nonce of their ids."""
    return record.claim, "" if record.claim else record.id.partition("-")[0]


def _names_run(input: JSON) -> bool:
    if not isinstance(input, dict):
        return False
    run = cast("dict[str, JSON]", input).get("run")
    return isinstance(run, str) and valid_run_id(run)


def _again(step: StepBook, record: StepStarted) -> Findings:
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
    elif record.replay != "unsafe":
        yield "permit", f"the retry of {record.step}, start {last.n}, is recorded as safe to repeat"


def _first(book: Book, record: StepStarted) -> Findings:
    """The first start of a step in its attempt."""
    yield from _of_this_reply(book, record)
    gated = book.calls.get(record.step)
    if gated is not None and gated.digest != record.digest:
        yield "same_call", f"{record.step} is another call than {book.reply} made"
    permit = book.permits.get(record.permit)
    if permit is not None and permit.name == "reconcile":
        yield from _honoured(book, record, permit)
        return
    earlier = _made_before(book, record)
    if earlier is not None:
        start = earlier.starts[-1]
        yield "permit", f"{record.step} makes the write {earlier.name}, start {start.n}, again"
        return
    if record.key != _own_key(book, record) and record.key not in book.keys.get(_call(record), ()):
        yield "key", f"the key of {record.step} is neither its own nor that of an earlier attempt"
    if gated is not None and isinstance(gated.verdict, VerdictDeny):
        yield "denied", f"{record.step} starts, and the gate denied it"
    elif not record.permit:
        yield from _without_permit(book, record, gated)
    elif permit is None:
        yield "permit", f"{record.step} names record {record.permit}, which permits nothing"
    else:
        yield from _approved(book, record, gated, permit)


def _call(record: StepStarted) -> tuple[str, str]:
    return record.tool, record.digest


def _own_key(book: Book, record: StepStarted) -> str:
    tried = book.attempt > 1 and record.step[:1].isdecimal()
    place = f"{record.step}@{book.attempt}" if tried else record.step
    return f"{book.run}:{place}:{record.digest[:16]}"


def _made_before(book: Book, record: StepStarted) -> StepBook | None:
    """An earlier attempt's write that this start makes again: it has its key; or stands where that
    one's result was to be given. A turn handler gets one at each position that has no record, so
    there must be as many of these in front of a call as there are such writes (R44)."""
    earlier = book.earlier.get(_call(record), [])
    for step in earlier:
        if any(start.key == record.key for start in step.starts):
            return step
    owed = [step for step in earlier if book.steps.get(step.name) is not step]
    place = PLACE.fullmatch(record.step)
    if not owed or place is None or record.key in book.keys.get(_call(record), ()):
        return None
    places = [other for name in book.steps if (other := PLACE.fullmatch(name))]
    taken = sum(int(other[1]) < int(place[1]) for other in places)
    return owed[0] if int(place[1]) - taken < len(owed) else None


def _of_this_reply(book: Book, record: StepStarted) -> Findings:
    """A call of the loop is one of its last reply."""
    found = LOOP_TOOL.fullmatch(record.step)
    if found is None:
        return
    if book.model_calls > int(found[1]):
        yield "stale_call", f"{record.step} starts after the later model call {book.model_calls}"
    elif record.step not in book.calls and book.reply == f"llm/{found[1]}" and book.replied:
        yield "same_call", f"{record.step} is no call that llm/{found[1]} made"


def _without_permit(book: Book, record: StepStarted, gated: Gated | None) -> Findings:
    """A model's call was let through by its verdict. A turn handler's need not be asked for any
    more where the code has changed; what a person rejected stays so."""
    if gated is not None and isinstance(gated.verdict, VerdictAsk):
        yield "approval", f"{record.step} starts without the approval of {gated.verdict.marker}"
    elif record.digest in book.interrupted:
        yield "approval", f"{record.step} repeats an interrupted call, and nobody was asked"
    for marker, ask in book.asks.items():
        said = book.decided.get(marker)
        if ask == Ask(record.step, record.digest) and said is not None and said.name == "reject":
            yield "approval", f"{record.step} starts, and {marker} was rejected, record {said.n}"


def _approved(book: Book, record: StepStarted, gated: Gated | None, permit: Signal) -> Findings:
    if permit.n in book.spent:
        yield "spent", f"{record.step} uses permit {permit.n}, as {book.spent[permit.n]} did"
        return
    book.spent[permit.n] = record.step
    marker = cast("str", permit.payload["marker"])
    # the built-in loop drops no result, so its calls are asked for once, whatever the attempt
    attempt = book.attempt if gated is None else 1
    head = f"{book.run}/{record.step}@{attempt}."
    asked = gated.verdict if gated is not None else None
    mine = marker == asked.marker if isinstance(asked, VerdictAsk) else gated is None
    shown = record.step, record.digest
    if permit.name != "approve" or book.decided.get(marker) is not permit:
        yield "approval", f"{record.step} starts, and record {permit.n} does not approve it"
    elif not mine or not marker.startswith(head) or book.markers.get(marker, shown) != shown:
        yield "approval", f"{record.step} starts under the approval of {marker}"


def _honoured(book: Book, record: StepStarted, permit: Signal) -> Findings:
    """A retry of an earlier attempt's write: it takes that write's place (R44)."""
    if permit.n in book.spent:
        yield "spent", f"{record.step} uses permit {permit.n}, as {book.spent[permit.n]} did"
        return
    book.spent[permit.n] = record.step
    earlier = book.earlier.get(_call(record), [])
    for index, step in enumerate(earlier):
        if step.retry() is permit:
            if record.key != step.starts[-1].key:
                yield "key", f"{record.step} repeats {step.name} under another key"
            if record.replay != "unsafe":
                yield "permit", f"the retry of {step.name} is recorded as safe to repeat"
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
    if step is not None:
        yield from _via(book, step, record)
    elif record.via != "refused" or record.error is UNSET:
        yield "unstarted", f"{record.step} has a result and never started"
    if record.error is not UNSET and record.via == "refused":
        yield from _refused(book, record, record.error)
    step = book.finish(record.step, record.n)
    if record.interrupted is not UNSET and step.starts:
        book.interrupted.add(step.starts[-1].digest)
    if step.starts and step.starts[-1].kind == "model":
        yield from _replied(book, record)
    elif record.verdicts:
        yield "verdicts", f"{record.step} has verdicts and is no model call"


def _via(book: Book, step: StepBook, record: StepCompleted) -> Findings:
    """Whether the result is one that its `via` says it is."""
    last = step.starts[-1]
    own = book.fenced or session(last) == session(record)
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
            right = bool(error) and (not step.unsafe or step.retry() is not None)
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


def _refused(book: Book, record: StepCompleted, error: StepError) -> Findings:
    """A call is refused as its verdict has it; as rejected by a person alone; and never while a
    person is asked."""
    gated = book.calls.get(record.step)
    verdict = gated.verdict if gated is not None else None
    rejected = f"{book.run}/{record.step}@{book.attempt}" in book.rejected
    if isinstance(verdict, VerdictAsk):
        said = book.decided.get(verdict.marker)
        if said is None:
            yield "refusal", f"{record.step} is refused, and nobody has decided on it"
            return
        rejected = said.name == "reject"
    if isinstance(verdict, VerdictDeny) and error.type != verdict.type:
        yield "refusal", f"{record.step} is refused as {error.type}, not as {verdict.type}"
    elif error.type == "rejected" and not rejected:
        yield "refusal", f"{record.step} is answered as rejected, and nobody rejected it"


# ---- model replies ----------------------------------------------------------------------------


def _replied(book: Book, record: StepCompleted) -> Findings:
    """The verdicts of a reply: one a call. They say what may start, and what a person is asked."""
    book.reply = record.step
    book.calls = {}
    loop = LOOP_MODEL.fullmatch(record.step)
    try:
        reply = msgspec.convert(record.result, Reply)
        book.replied = loop is not None
    except msgspec.ValidationError:
        reply = Reply()
        book.replied = False
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
