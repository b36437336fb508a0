"""Core: the audit of signals: each about something that is there, and each said once (R58-R61)."""

from __future__ import annotations

from itertools import chain
from typing import cast

from . import ids
from .audit_book import Book, Findings, StepBook, request_key
from .errors import InvalidId
from .records import Park, Signal, VerdictAsk


def known_words(record: Signal) -> bool:
    """False for a reconcile with a word that only a newer version writes."""
    word = record.payload.get("outcome")
    return record.name != "reconcile" or word in ("done", "retry") or not isinstance(word, str)


def signalled(book: Book, record: Signal) -> Findings:
    """What a signal breaks."""
    book.heard = record.n
    wrong = _misshapen(record)
    if wrong:
        yield "payload", f"a {record.name} {wrong}"
        return
    key = request_key(record.name, record.request_id)
    if key in book.requests:
        yield "repeat", f"the request id {record.request_id} was used before"
    decision = record.name in ("approve", "reject")
    book.request(key, record.at, kept=decision)
    match record.name:
        case "approve" | "reject":
            yield from _decided(book, record)
        case "reconcile":
            yield from _reconciled(book, record)
        case "late":
            yield from _late(book, record)
        case "cancel":
            if book.cancel:
                yield "repeat", f"the run was cancelled before, record {book.cancel}"
            book.cancel = book.cancel or record.n
        case "resume":
            yield from _resumed(book, record)
        case "child":
            run = cast("str", record.payload["run"])
            if run not in book.children:
                yield "child", f"{run} has ended, which is no child of this run"
            book.children[run] = True


_SHAPES: dict[str, dict[str, type]] = {
    "approve": {"marker": str},
    "reject": {"marker": str},
    "reconcile": {"step": str, "start": int, "outcome": str},
    "late": {"step": str, "start": int, "result": object},
    "cancel": {},
    "resume": {},
    "child": {"run": str, "outcome": dict},
}


def _misshapen(record: Signal) -> str:
    payload = record.payload
    for name, shape in _SHAPES[record.name].items():
        if name not in payload:
            return f"has no {name}"
        if not isinstance(payload[name], shape) or (
            isinstance(payload[name], bool) and shape is int
        ):
            return f"has a {name} of another type"
    if record.name == "reconcile" and (payload["outcome"] == "done") != ("result" in payload):
        return "has a result where none belongs, or lacks it"
    if not record.request_id.isascii() or not 1 <= len(record.request_id) <= 128:
        return "has no request id"
    return ""


# ---- decisions --------------------------------------------------------------------------------


def _decided(book: Book, record: Signal) -> Findings:
    marker = cast("str", record.payload["marker"])
    book.permits[record.n] = record
    if marker in book.decided:
        yield "decision", f"{marker[:200]} was decided before, record {book.decided[marker].n}"
        return
    book.decide(marker, record)
    try:
        of_run = ids.marker_run(marker)
    except InvalidId:
        yield "marker", f"{marker[:200]!r} is no marker"
        return
    if of_run != book.run:
        yield "marker", f"the marker {marker} is of run {of_run}"
        return
    step, _, end = marker.partition("/")[2].rpartition("@")
    call = book.calls.get(step)
    asked = call.verdict.marker if call and isinstance(call.verdict, VerdictAsk) else ""
    iteration, attempt = step.partition("/")[0], int(end.partition(".")[0])
    past = iteration.isdecimal() and (int(iteration), attempt) < (book.iteration, book.attempt)
    if step in book.steps or past or (call is not None and asked != marker):
        yield "decision", f"{marker} is decided, and nothing waits for it any more"


# ---- what became of a write -------------------------------------------------------------------


def _reconciled(book: Book, record: Signal) -> Findings:
    book.permits[record.n] = record
    name, start = cast("str", record.payload["step"]), cast("int", record.payload["start"])
    step = book.steps.get(name)
    found = _not_last(step, start)
    if step is None or found:
        yield "reconcile", f"record {start} is reconciled, {found}"
        return
    last = step.starts[-1]
    probed = (
        (last.policy, record.request_id) == ("probe", f"probe:{start}")
        and record.payload["outcome"] == "retry"
        and step.asked < start
    )
    if not step.unsafe:
        yield "reconcile", f"record {start} is reconciled, which is safe to repeat"
    elif last.n in step.said or last.n in step.late:
        yield "reconcile", f"record {start} is reconciled, and is settled"
    elif book.claim and last.claim == book.claim and not probed:
        yield "reconcile", f"record {start} is reconciled while it runs under claim {book.claim}"
    step.said.setdefault(start, record)


def _late(book: Book, record: Signal) -> Findings:
    name, start = cast("str", record.payload["step"]), cast("int", record.payload["start"])
    earlier = chain.from_iterable(book.earlier.values())
    steps = [*(step for step in [book.steps.get(name)] if step), *earlier]
    step = next((s for s in steps if s.name == name and any(o.n == start for o in s.starts)), None)
    found = _not_last(step, start)
    if step is None or found:
        yield "late", f"record {start} has a late result, {found}"
        return
    said = step.said.get(start)
    if start in step.late or (said is not None and said.payload["outcome"] == "done"):
        yield "late", f"record {start} has a late result, and is settled"
    elif book.claim and step.starts[-1].claim == book.claim:
        yield "late", f"record {start} has a late result while it runs under claim {book.claim}"
    step.late.setdefault(start, record)


def _not_last(step: StepBook | None, start: int) -> str:
    """Why this is not the last start of an unresolved step; "" where it is."""
    if step is None or all(known.n != start for known in step.starts):
        return "which is no start of this step"
    if step.starts[-1].n != start:
        return f"and the last start is record {step.starts[-1].n}"
    if step.result:
        return f"and the step has its result, record {step.result}"
    return ""


# ---- resume -----------------------------------------------------------------------------------


def _resumed(book: Book, record: Signal) -> Findings:
    """It ends a pause or a wait for a retry, or reopens a run that failed in a retriable way."""
    wait = book.wait
    resumable = wait is not None and not book.claim and book.resumed < wait.n
    if isinstance(wait, Park):
        resumable = resumable and wait.why in ("pause", "retry")
    elif wait is not None:
        resumable = resumable and wait.waits.resume
    if book.can_reopen:
        book.reopen()
    elif not resumable:
        yield "resume", "the run is resumed, and neither paused nor waiting for a retry"
    book.resumed = record.n
