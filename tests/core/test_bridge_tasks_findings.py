"""A fault that a review of workers over HTTP found in the core."""

from __future__ import annotations

from journal.codec import Entry, seal
from journal.fold import Fold
from journal.records import Claim, Commit, Record, RunStarted
from journal.summary import restored, with_summary


def test_a_restored_claim_still_says_that_its_worker_is_remote():
    fold, entries = Fold(), list[Entry]()

    def add(body: Record) -> None:
        claim = 2 if isinstance(body, Commit) else 0
        record, raw = seal(
            body,
            n=fold.n + 1,
            id=f"{'0' * 12}-{fold.n + 1}",
            at="2026-01-01T00:00:00.000Z",
            by="http-dev-0123456789abcdef",
            prev=fold.head,
            claim=claim,
        )
        entries.append(Entry(record, raw))
        fold.apply(entries[-1])

    add(RunStarted(run="a1", agent="a", revision="1", input=None, digest="0" * 32))
    add(Claim(worker="http-dev-0123456789abcdef", revision="1", reason="new", remote=True))
    commit = Commit(action="continue", at="2026-01-01T00:00:00.000Z")
    add(with_summary(fold, commit))
    again = restored(entries[0], entries[-1])
    assert again.claim is not None
    assert again.claim.remote
