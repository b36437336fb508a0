"""Shell: a record made ready for the tail of its run: chained, and such that every reader takes it.

Raises before anything was sent.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from .codec import Damage, Entry, decode, seal, tag
from .errors import Fenced, NotEncodable
from .records import HOLDER_RECORDS, NewerRecord, Record
from .summary import is_restart_point
from .waits import instant_text, status_after

if TYPE_CHECKING:
    from .log import Log

Body = TypeVar("Body", bound=Record)


def sealed(log: Log, body: Body, record_id: str, trace: str) -> tuple[Body, Entry]:
    """As the next record of the run. Raises Fenced where it is no longer this writer's to append,
    NotEncodable where no record can be made of it."""
    claim = log.claim if isinstance(body, HOLDER_RECORDS) else 0
    if log.store.shared and isinstance(body, HOLDER_RECORDS) and not claim:
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
        read_back = decode(raw)
    except (TypeError, ValueError, Damage) as error:
        raise _unwritable(log, body, str(error)) from error
    if isinstance(read_back, NewerRecord):
        raise _unwritable(log, body, read_back.why)
    log.fold.check(record)
    entry = Entry(record, raw, trace=trace)  # a directory keeps no headers: for this handle
    if log.store.shared:
        commit = -1 if is_restart_point(record) else log.restart_at
        status = status_after(log.fold, entry)
        entry = Entry(record, raw, status, commit=commit, trace=trace)
    return record, entry


def _unwritable(log: Log, body: Record, why: str) -> NotEncodable:
    return NotEncodable(
        f"run {log.run_id}: no {tag(body)} record can be made of this: {why[:300]}",
        run_id=log.run_id,
        hint="check the types of what was passed in",
    )
