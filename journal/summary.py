"""Core: the summary in a commit, and the fold that starts from it (R41, R82).

A commit is a point to restart at: what the fold needs from before it stands in its `summary`, so
reading the first record and everything from the commit on gives the same state as reading all.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from .codec import Damage, Entry
from .fold import Fold
from .heard import request_key
from .limits import SUMMARY_BYTES_MAX
from .order import check_instant
from .records import Claim, Commit, Record, RunStarted, Summary
from .waits import wait_of

_CLAIM_FIELDS = ("worker", "revision", "reason", "attempt", "task", "delivery", "remote", "at")
_encode = msgspec.json.Encoder().encode


def with_summary(fold: Fold, commit: Commit) -> Commit:
    """The commit with the summary of the state after it; without one where it would be large: it
    is no point to restart at then. `commit.at` must be set: it says what is old enough to drop."""
    assert commit.at
    summary = summary_after(fold, commit)
    if len(_encode(summary)) > SUMMARY_BYTES_MAX:
        return commit
    return msgspec.structs.replace(commit, summary=summary)


def summary_after(fold: Fold, commit: Commit) -> Summary:
    """What the fold would need of itself once this commit is applied to it."""
    after = fold.copy()
    after.commit(commit)
    claim: dict[str, Any] = {}
    if after.claim is not None:
        claim = {name: getattr(after.claim, name) for name in _CLAIM_FIELDS}
    return Summary(
        claim_n=after.claim.n if after.claim else 0,
        claim=claim,
        revision=after.revision,
        model_calls=after.model_calls,
        requests=tuple(after.requests.values()),
        inputs=tuple(
            known if known.status == "queued" else msgspec.structs.replace(known, content=None)
            for known in after.inputs.values()
        ),
        children=dict(after.children),
        interrupted=tuple(sorted(after.interrupted)),
        cancel=after.cancel,
    )


def is_restart_point(record: Record) -> bool:
    """Whether a fold can start at this record."""
    return (
        isinstance(record, Commit) and record.action == "continue" and record.summary is not UNSET
    )


def restored(first: Entry, commit: Entry) -> Fold:
    """The fold as of a commit with a summary; raises Damage where these two are not such."""
    record = commit.record
    if not isinstance(first.record, RunStarted) or first.record.n != 1:
        raise Damage("the first record is no run.started")
    if not isinstance(record, Commit) or not is_restart_point(record):
        raise Damage(f"record {record.n} is no commit to restart at")
    check_instant(record.n, record.waits.until)
    summary = record.summary
    assert summary is not UNSET
    fold = Fold()
    fold.apply(first)
    if summary.claim_n:
        try:
            claim = msgspec.convert({"type": "claim", **summary.claim}, Claim)
        except msgspec.ValidationError as error:
            raise Damage(f"record {record.n} sums up no claim: {error}") from error
        fold.claim = msgspec.structs.replace(claim, n=summary.claim_n)
        fold.claims[summary.claim_n] = fold.claim
    fold.revision = summary.revision
    fold.model_calls = summary.model_calls
    fold.requests = {request_key(known.name, known.request_id): known for known in summary.requests}
    for known in summary.requests:
        if known.name in ("approve", "reject"):
            fold.decisions.setdefault(known.about, known)
    fold.inputs = {known.request_id: known for known in summary.inputs}
    fold.children = dict(summary.children)
    fold.interrupted = set(summary.interrupted)
    fold.cancel = summary.cancel
    fold.iteration = record.iteration + 1
    fold.state = record.state
    fold.committed = record.n
    fold.wait = wait_of(record)
    fold.mark(commit)
    return fold
