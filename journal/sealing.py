"""Shell: a record made ready for the tail of its run: chained, and such that every reader takes it.

Raises before anything was sent.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from .codec import Entry, seal, tag, unreadable
from .errors import Fenced, NotEncodable
from .records import HOLDER_RECORDS, Record
from .summary import is_restart_point
from .waits import instant_text, status_after

if TYPE_CHECKING:
    from .log import Log

Body = TypeVar("Body", bound=Record)


def sealed(log: Log, body: Body, record_id: str, trace: str) -> tuple[Body, Entry]:
    """As the next record of the run. Raises Fenced where it is no longer this writer's to append,
    NotEncodable where no record can be made of it."""
    shared, holder = log.store.shared, isinstance(body, HOLDER_RECORDS)
    claim = log.claim if holder else 0
    if shared and holder and not claim:
        raise Fenced(f"run {log.run_id} was not claimed here", run_id=log.run_id)
    if claim and (log.fold.claim is None or log.fold.claim.n != claim):
        raise Fenced(f"run {log.run_id}: claim {claim} has ended", run_id=log.run_id)
    try:
        record, raw = seal(
            body,
            n=log.fold.n + 1,
            id=record_id,
            at=body.at or instant_text(datetime.now(UTC)),
            by=log.by,
            prev=log.fold.head,
            claim=claim,
        )
        # Our own record must be one that every reader takes: a field of a wrong type would be
        # read as a newer version's, for ever.
        why = unreadable(raw, record_id)
    except (TypeError, ValueError) as error:
        raise _unwritable(log, body, str(error)) from error
    if why:
        raise _unwritable(log, body, why)
    log.fold.check(record)
    if not shared:  # a directory keeps no headers: for this handle
        return record, Entry(record, raw, trace=trace)
    commit = -1 if is_restart_point(record) else log.restart_at
    entry = Entry(record, raw, "running", commit=commit, trace=trace)
    if (status := status_after(log.fold, entry)) != "running":
        entry = Entry(record, raw, status, commit=commit, trace=trace)
    return record, entry


def _unwritable(log: Log, body: Record, why: str) -> NotEncodable:
    return NotEncodable(
        f"run {log.run_id}: no {tag(body)} record can be made of this: {why[:300]}",
        run_id=log.run_id,
        hint="check the types of what was passed in",
    )
