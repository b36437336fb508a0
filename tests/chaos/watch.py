"""Watches all journals as they grow, brings people to runs that wait, has ended runs checked."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from chaos.books import Book, Books
from chaos.check import Checker
from chaos.people import People
from chaos.plans import Plan

from journal.errors import RunfoldError, RunNotFound
from journal.fleet import Fleet
from journal.ids import from_subject_token
from journal.stores.jetstream import JetStreamStore

ENDED = frozenset({"completed", "failed", "cancelled"})
RESTS = frozenset({"awaiting_approval", "indeterminate", "waiting", "paused"})
LOOK_S = 0.25
STALE_S = 6.0
AGAIN_S = 3.0
AT_ONCE = 12
TASKS_KEPT = 400


class Watch:
    """`run` until it is cancelled. `tasks`: the last task messages, to be published again."""

    def __init__(
        self,
        books: Books,
        people: People,
        checker: Checker,
        store: JetStreamStore,
        plain: Any,
        rng: random.Random,
        log: Callable[[str], None],
    ) -> None:
        self.log = log
        self._books = books
        self._people = people
        self._checker = checker
        self._fleet = Fleet(store, by="soak")
        self._plain = plain
        self._rng = rng
        self._due: dict[str, float] = {}
        self._looking: set[str] = set()
        self.tasks: deque[tuple[str, bytes]] = deque(maxlen=TASKS_KEPT)
        self.talking = True
        self.appends = 0

    async def run(self) -> None:
        await self._plain.subscribe("runfold.journal.*.*", cb=self._on_append)
        await self._plain.subscribe("runfold.task.>", cb=self._on_task)
        group: set[asyncio.Task[None]] = set()
        talk = time.monotonic() + 1
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            for run in list(self._books.active):
                book = self._books.runs[run]
                due = min(self._due.get(run, book.seen + STALE_S), book.seen + STALE_S)
                if due <= now and run not in self._looking and len(self._looking) < AT_ONCE:
                    self._looking.add(run)
                    self._begin(group, self._look(book))
            if self.talking and now >= talk:
                talk = now + self._rng.expovariate(1.0)
                self._begin(group, self._people.chat())

    def _begin(self, group: set[asyncio.Task[None]], work: Any) -> None:
        task = asyncio.create_task(work)
        group.add(task)
        task.add_done_callback(group.discard)

    # ---- what is heard ------------------------------------------------------------------------

    async def _on_append(self, message: Any) -> None:
        """A record that somebody wants to append; most are stored."""
        self.appends += 1
        headers = message.headers or {}
        run = from_subject_token(message.subject.rpartition(".")[2])
        if headers.get("Runfold-Type") == "run.started":
            self._meet(run, json.loads(message.data))
        book = self._books.runs.get(run)
        if book is None:
            return
        book.status = headers.get("Runfold-Status") or book.status
        book.seen = time.monotonic()
        if book.status in ENDED or book.status in RESTS:
            self._due[run] = book.seen + 0.1

    def _meet(self, run: str, record: dict[str, Any]) -> None:
        """A child run, as it starts."""
        if record.get("parent") and run not in self._books.runs:
            plan = Plan(run, record["agent"], record["input"], "spawn", 0, None)
            book = self._books.begin(plan, time.monotonic(), parent=record["parent"])
            book.acknowledged = True

    async def _on_task(self, message: Any) -> None:
        if not (message.headers or {}).get("Nats-Schedule"):
            self.tasks.append((message.subject, message.data))

    # ---- what is done about it ----------------------------------------------------------------

    async def _look(self, book: Book) -> None:
        run = book.plan.run
        try:
            state = await self._fleet.get(run)
            book.status = state.status
            if state.status in ENDED:
                await self._ended(book, state.status)
            elif state.status in RESTS:
                await self._people.attend(book, state)
        except RunNotFound:
            if book.acknowledged:
                self._books.violation(run, "acknowledged start is lost", "there is no such run")
        except RunfoldError as error:
            if error.code in ("journal_damaged", "newer_version"):
                self._books.violation(run, "unreadable", error.message)
        finally:
            self._looking.discard(run)
            book.seen = time.monotonic()
            self._due[run] = time.monotonic() + AGAIN_S

    async def _ended(self, book: Book, status: str) -> None:
        again = status == "failed" and await self._checker.can_reopen(book)
        if again and await self._people.resume_failed(book):
            self._books.counts["failed runs resumed"] += 1
            return
        await self._checker.check(book)
        took_s = time.monotonic() - book.begun
        self.log(f"{book.plan.run} ended {status} {took_s:.1f} s old")
        longest = "the longest that a run took, s"
        self._books.counts[longest] = max(self._books.counts[longest], round(took_s))
        book.ended = status
        self._books.active.discard(book.plan.run)
