"""Core: what a signal does to the state of its run, and what is kept to recognise its repeats."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from msgspec import structs

from .attempts import begin_afresh
from .limits import REASON_CHARS_MAX, REPEATS_KEPT_S
from .records import Commit, Known, Record, Signal
from .values import canonical, digest
from .waits import instant_text, parse_instant

if TYPE_CHECKING:
    from .fold import Fold


def hear(fold: Fold, record: Signal) -> None:
    """Take a signal that passed `check` at this very state."""
    known = known_signal(record)
    fold.requests.setdefault(request_key(record.name, record.request_id), known)
    payload = record.payload
    match record.name:
        case "approve" | "reject":
            fold.decisions.setdefault(known.about, known)
        case "reconcile":
            said = (payload.get("outcome"), "result" in payload)
            if said not in (("done", True), ("retry", False)):  # never taken for a permit
                why = f"this version knows no reconcile {payload.get('outcome')!r}"
                fold.newer = newer_text(fold, record, "signal", why)
                return
            fold.steps[payload["step"]].reconciled.setdefault(payload["start"], record)
        case "late":
            step = fold.find(payload["step"], payload["start"])
            assert step is not None
            step.late.setdefault(payload["start"], record)
        case "cancel":
            fold.cancel = fold.cancel or known
        case "resume":
            _resume(fold, record.n)
        case "child":
            if fold.children.get(payload["run"]) is None:
                fold.children[payload["run"]] = payload.get("outcome")


def _resume(fold: Fold, n: int) -> None:
    fold.resumed = n
    if not isinstance(fold.end, Commit):
        return
    # A failed run gets another try: a new iteration from the same checkpoint, which goes on from
    # what the failed one recorded, or honours its unsafe calls (R44, R52).
    placed = fold.last_placed if fold.end.afresh else ()
    if fold.end.afresh:
        begin_afresh(fold)
    fold.end = None
    fold.cancel = None
    kept = fold.honoured, fold.keys, fold.steps, fold.open, fold.reply
    fold.next_iteration()
    fold.honoured, fold.keys, fold.steps, fold.open, fold.reply = kept
    for request_id in placed:  # what the failed turn was told, the next one is told first
        known = fold.inputs[request_id]
        fold.inputs[request_id] = structs.replace(known, status="placed", placed_at="")


def forget_before(fold: Fold, at: str) -> None:
    """At a commit: drop what is only kept to recognise repeats, once it is old enough (R62).
    Decisions stay: one may be kept for a gate that is yet to come."""
    try:
        oldest = instant_text(parse_instant(at) - timedelta(seconds=REPEATS_KEPT_S))
    except (ValueError, OverflowError):  # `at` is informative only
        return
    fold.requests = {
        key: known
        for key, known in fold.requests.items()
        if known.at >= oldest or known.name in ("approve", "reject")
    }
    fold.inputs = {
        key: known
        for key, known in fold.inputs.items()
        if known.status == "queued" or known.at >= oldest
    }


def known_signal(record: Signal) -> Known:
    """What is kept of a signal."""
    payload = record.payload
    about = payload.get("marker", payload.get("start", ""))
    return Known(
        request_id=record.request_id,
        name=record.name,
        n=record.n,
        at=record.at,
        by=record.by,
        digest=payload_digest(payload),
        about=str(about),
        reason=str(payload.get("reason", ""))[:REASON_CHARS_MAX],
    )


def request_key(name: str, request_id: str) -> str:
    """Under what a signal's repeats are known. Those of workers apart: nobody else's request id
    must stand in their way."""
    return f"{name}\0{request_id}" if name in ("late", "child") else request_id


def payload_digest(payload: dict[str, Any]) -> str:
    """What two payloads are the same by."""
    return digest("signal", canonical(payload))


def newer_text(fold: Fold, record: Record, type_: str, why: str) -> str:
    """What this version can't read, and who wrote it; of which release is known of a holder."""
    claim = fold.claims.get(record.claim)
    release = f" (Runfold {claim.runfold})" if claim is not None and claim.runfold else ""
    by = f"; {record.by}{release} wrote it" if record.by else ""
    return f"record {record.n}, {type_}: {why}{by}"
