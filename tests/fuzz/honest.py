"""Honest journals of every kind of record: what the mutations start from, and must not pass for."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import msgspec
from kit import build
from kit.build import ALLOW, RUN, Log

from journal.codec import Entry
from journal.records import Commit, Record, RunPurged
from journal.summary import with_summary

PAY = "tool/1/0/pay"
MARKER = f"{RUN}/{PAY}@1.0123456789abcdef"


def _asked(*, gated: bool) -> list[Record]:
    """A started run whose model asks for one payment, behind an approval or not."""
    verdict = build.asking(1, 0, "pay") if gated else ALLOW
    reply = build.reply_of(1, build.asks(build.request("pay", {"zł": 10})), verdict)
    return [build.started("pay Zoë 10 €"), build.model_start(1), reply]


def _paid() -> Log:
    log = Log(*_asked(gated=True))
    log.add(build.approved(MARKER))
    log.add(build.start_of(PAY, "pay", {"zł": 10}, permit=4))
    log.add(build.result_of(PAY, {"receipt": "\U0001f600", "n": 2**70}))
    log.add(build.model_start(2))
    log.add(build.reply_of(2, build.asks(text="Paid.")))
    log.add(build.answered("Paid."))
    return log


def _reconciled() -> Log:
    log = Log(*_asked(gated=False))
    log.add(build.start_of(PAY, "pay", {"zł": 10}))
    log.add(build.retry(PAY, 4))
    log.add(build.start_of(PAY, "pay", {"zł": 10}, permit=5))
    log.add(build.done(PAY, 6, {"receipt": 1}))
    log.add(build.result_of(PAY, {"receipt": 1}, via="reconcile"))
    return log


def _fleet() -> Log:
    """Claims, a park, a late result, an input, turns with a summary, a child, a cancel."""
    log = Log(build.started())
    log.add(build.claimed())
    log.add(build.model_start(1))
    log.add(build.claimed("w2", reason="redelivery"))
    log.add(build.model_start(1))
    log.add(build.reply_of(1, build.asks(build.request("pay", {"zł": 10})), ALLOW))
    log.add(build.start_of(PAY, "pay", {"zł": 10}))
    log.add(build.progress_of(PAY, {"half": True}))
    log.add(build.claimed("w3", reason="redelivery"))
    log.add(build.parked("reconcile"))
    log.add(build.late(PAY, 7, "L"))
    log.add(build.claimed("w4", reason="wake"))
    log.add(build.result_of(PAY, "L", via="late"))
    log.add(build.submitted("i1"))
    log.add(build.placed("i1", "llm/2"))
    log.add(build.model_start(2))
    log.add(build.reply_of(2, build.asks(text="Hello.")))
    return log


def _turns() -> Log:
    log = Log(build.started(), build.claimed())
    log.add(build.spawned("0/0", "a1.child"))
    log.add(build.result_of("0/0", {"run": "a1.child"}))
    _commit(log, build.goes_on({"talk": ["hi"]}, until_child="a1.child"))
    log.add(build.child_ended("a1.child", {"status": "completed", "message": "ok"}))
    log.add(build.submitted("i1", "follow_up"))
    log.add(build.submitted("i2"))
    log.add(build.withdrawn("i2"))
    log.add(build.claimed("w2", reason="wake"))
    log.add(build.placed("i1", "1/0"))
    log.add(build.start_of("1/1", "pay", {"a": 1}))
    log.add(build.result_of("1/1"))
    _commit(log, build.goes_on([1, 2.5, None], until="2026-01-03T00:00:00.000Z"))
    log.add(build.claimed("w3", reason="wake"))
    log.add(build.released())
    log.add(build.claimed("w4", reason="adopted"))
    log.add(build.start_of("2/0", "look", {}, unsafe=False))
    log.add(build.parked("retry", until="2026-01-03T00:00:00.000Z", afresh=True))
    log.add(build.claimed("w5", reason="retry"))
    log.add(build.failed("retries", retriable=True, afresh=True))
    log.add(build.resume())
    log.add(build.cancel())
    log.add(build.claimed("w6", reason="wake"))
    log.add(build.cancelled_end())
    return log


def _commit(log: Log, commit: Commit) -> None:
    """As a holder ends a turn: with the summary that makes it a point to restart at."""
    here = log.here(commit)
    assert isinstance(here, Commit)
    fold = log.fold
    claim = fold.claim.n if fold.claim else 0
    sealed = msgspec.structs.replace(here, at=log.at, n=fold.n + 1, claim=claim)
    log.add(msgspec.structs.replace(here, summary=with_summary(fold, sealed).summary))


def _purged() -> Log:
    log = _paid()
    log.add(RunPurged())
    log.entries = log.entries[-1:]
    return log


@functools.cache
def journals() -> tuple[tuple[Entry, ...], ...]:
    """Each one's entries, in order; all of run a1."""
    logs = [_paid(), _reconciled(), _fleet(), _turns(), _purged()]
    return tuple(tuple(log.entries) for log in logs)


def file_of(entries: Iterable[Entry]) -> bytes:
    """As the file store keeps them."""
    return b"".join(entry.raw + b"\n" for entry in entries)
