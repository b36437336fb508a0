"""Shell: find runs that nothing would move on, and dispatch them again (R53). Safe on every worker,
and on every bridge, for its workers over HTTP: a task is a hint, and repeated ones are harmless.

Covered are runs without a task message in TASKS that a holder would have something to do on: never
claimed, released, or whose wait has ended; whose time is overdue; whose child has ended; and runs
under a claim whose worker is gone. `sweep_book.py` says why none is missed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from .errors import JournalDamaged, RunfoldError, StoreUnavailable
from .fold import Fold
from .ids import RunId
from .limits import SWEEP_RUNS
from .log import Log
from .owed import pay
from .stores.jetstream import JetStreamStore
from .stores.jetstream_listing import Head, head_of
from .stores.jetstream_shards import Shard
from .sweep_book import RESTING, Book, Mark, Rest, rest_of
from .views import instant
from .waits import instant_text, other_code_may

log = logging.getLogger("runfold")

FRESH_S = 5.0
"""A record this young is somebody's at work: its task is on the way."""

SHARE = 0.1
"""Of the time, at most about: the first pass over a million headers takes long (docs/scale.md)."""

UNFINISHED = frozenset({"running"}) | RESTING


class Swept(Struct, frozen=True, kw_only=True):
    """One pass. `cursor`: where the next one goes on; None: from the start."""

    dispatched: tuple[RunId, ...]
    looked_at: int
    cursor: RunId | None = None


async def sweep(
    store: JetStreamStore,
    *,
    agents: Mapping[str, str] | None = None,
    held: Collection[RunId] = (),
    after: RunId | None = None,
    runs_max: int = SWEEP_RUNS,
    fresh_s: float = FRESH_S,
) -> Swept:
    """Look at up to `runs_max` unfinished runs behind `after`, and dispatch those of these agents
    (name to revision; all where None) that nothing would move on. `held`: by who asks.

    Raises StoreUnavailable."""
    dispatched: list[RunId] = []
    looked_at = 0
    async for run_id, _ in store.heads(status=UNFINISHED, after=after):
        looked_at += 1
        if run_id not in held and (await _look(store, run_id, agents, fresh_s)).dispatched:
            dispatched.append(run_id)
        if looked_at >= runs_max:
            return Swept(dispatched=tuple(dispatched), looked_at=looked_at, cursor=run_id)
    return Swept(dispatched=tuple(dispatched), looked_at=looked_at)


async def keep_sweeping(
    store: JetStreamStore,
    agents: Callable[[], Mapping[str, str]],
    held: Callable[[], Collection[RunId]],
    *,
    every_s: float,
) -> None:
    """Pass after pass over each journal stream by itself, until it is cancelled: one that can't be
    read keeps nobody from the others. `agents`, `held`: as `sweep` takes them, asked for before
    each; no agents: nothing is looked at."""
    async with asyncio.TaskGroup() as group:
        for shard in store.shards:
            group.create_task(_keep_sweeping(store, shard, agents, held, every_s))


async def _keep_sweeping(
    store: JetStreamStore,
    shard: Shard,
    agents: Callable[[], Mapping[str, str]],
    held: Callable[[], Collection[RunId]],
    every_s: float,
) -> None:
    book, known, took_s = Book(), dict[str, str](), 0.0
    while True:
        pause_s = max(every_s, took_s * (1 / SHARE - 1))
        await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        began = time.monotonic()
        wanted = agents()
        if not wanted:
            continue
        if not wanted.items() <= known.items():  # what was no business of these agents may be now
            book, known = Book(), dict(wanted)
        try:
            await sweep_shard(store, shard, book, agents=wanted, known=known, held=held())
        except RunfoldError as error:
            log.warning("the sweep of %s was cut short: %s", shard.stream, error.message)
        took_s = time.monotonic() - began


async def sweep_shard(
    store: JetStreamStore,
    shard: Shard,
    book: Book,
    *,
    agents: Mapping[str, str],
    known: Mapping[str, str],
    held: Collection[RunId],
) -> Swept:
    """Note what changed, and look at what is due, and at those whose turn it is. `known`: all
    agents that the book is for, of which these are some. Raises RunfoldError."""
    server_now = await _learn(shard, book)
    turn = book.turn(_now(), server_now - FRESH_S, SWEEP_RUNS)
    dispatched: list[RunId] = []
    looked_at = 0
    for run_id, mark in turn:
        if run_id in held:
            continue
        looked_at += 1
        look = await _look(store, run_id, agents, FRESH_S, mark.seq)
        if look.dispatched:
            dispatched.append(run_id)
        book.looked(run_id, "open" if look.agent in known.keys() - agents.keys() else look.rest)
    return Swept(dispatched=tuple(dispatched), looked_at=looked_at)


async def _learn(shard: Shard, book: Book) -> float:
    """Note what came since, or all there is; the time on the server's clock."""
    end = await shard.journals.end()
    if book.must_list(end.created, end.last, end.subjects, _now()):
        book.begin(end.created)
        up_to = end.last
        async for page, known in shard.listing.pages():
            for run_id, head in page.items():
                _note(book, run_id, head)
            up_to = min(up_to, known)  # of a server that lags, only so much
        book.listed(up_to)
        if book.seen is None:  # nothing is there; or a server went away in its answer
            return end.now.timestamp()
    async for page in shard.journals.grown(book.seen or 0):
        for run_id, raw in page:
            if run_id is not None:
                _note(book, run_id, head_of(raw.headers or {}, raw.position, raw.data))
        book.seen = page[-1][1].position
    return end.now.timestamp()


def _now() -> float:
    return datetime.now(UTC).timestamp()


def _note(book: Book, run_id: RunId, head: Head) -> None:
    stored = head.stored.timestamp() if head.stored is not None else 0.0
    book.note(run_id, head.word, Mark(head.seq, stored), head.data)


class _Look(Struct, frozen=True):
    """At one run. `agent`: "" where that is not known."""

    dispatched: bool
    rest: Rest
    agent: str = ""


async def _look(
    store: JetStreamStore,
    run_id: RunId,
    agents: Mapping[str, str] | None,
    fresh_s: float,
    known: int = 0,
) -> _Look:
    """`known`: a tail that was read before; raises StoreUnavailable where less is there."""
    try:
        log = await Log.resumed(store, run_id, by="sweep", known=known)
    except JournalDamaged:
        return _Look(False, "ended")  # doctor and inbox show it
    started = log.fold.started
    if started is None:
        return _Look(False, "ended")
    agent = started.agent
    if agents is not None and agent not in agents:
        return _Look(False, "ended", agent)
    revision = None if agents is None else agents[agent]
    rest = rest_of(log.fold, revision)
    now = datetime.now(UTC)
    if instant(log.fold.head_at) > now - timedelta(seconds=fresh_s):
        return _Look(False, "open", agent)
    cause = await store.task_cause(run_id, agent)
    if cause > log.fold.n:  # a stale read, or records are lost: not even told of a child's end
        return _Look(False, "open", agent)
    reason = await stranded(store, log, instant_text(now), revision)
    if reason is None:
        return _Look(False, rest, agent)
    if cause:
        return _Look(False, "open", agent)
    await store.wake(run_id, agent, cause=log.fold.n, priority=started.priority)
    return _Look(True, "open", agent)


async def stranded(
    store: JetStreamStore, log: Log, now: str, revision: str | None = None
) -> str | None:
    """Why nothing would move the run on but a task, or None. Lets the ended child of a waiting
    parent tell it. `revision`: of the worker that asks."""
    fold = log.fold
    if fold.newer is not None or fold.finished:
        return None
    if fold.claim is not None:
        answer = await store.ask(fold.claim.worker, log.run_id, fold.claim.n)
        gone = answer in ("no", "nobody")
        return f"worker {fold.claim.worker}, which held it, is gone" if gone else None
    if fold.runnable(now):
        return "nobody holds it and it could go on"
    if revision is not None and other_code_may(fold, revision):
        return "it is paused because other code than this worker's did not match it"
    if await _child_ended(store, fold):
        return "the child it waits for has ended"
    return None


async def _child_ended(store: JetStreamStore, fold: Fold) -> bool:
    """Let the child's journal tell its parent, if it has ended; whether it has."""
    wait = fold.wait
    if wait is None or not wait.child:
        return False
    try:
        child = await Log.resumed(store, RunId(wait.child), by="sweep")
        if child.fold.end is None:
            return False
        await pay(child)
    except StoreUnavailable:
        raise
    except RunfoldError:  # this run is not to keep the sweep from the others
        return False
    return True
