"""Shell: a run's journal as anybody may read it and append to it: the append rule (PROTOCOL 3).

Why it is safe: every append names the tail its decision was made at, so whatever moved the tail
(a signal, a claim, the own record landing late) makes it lose, re-read and decide again. A holder
that reads a newer claim, or a record of a newer version, stops there.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Self, TypeVar, cast

from . import ids
from .codec import Damage, Entry
from .errors import (
    DAMAGED_HINT,
    ConcurrentUse,
    Fenced,
    JournalDamaged,
    NewerVersion,
    RunNotFound,
    StoreUnavailable,
    TooLarge,
)
from .fold import Fold
from .ids import RunId
from .limits import APPEND_BUDGET_S
from .observing import Trace
from .order import buried, check_run, trimmed
from .records import Record
from .sealing import sealed
from .store import Appended, Loaded, Store, Unknown
from .summary import is_restart_point, restored
from .views import RunState, run_state
from .waits import instant_text

Body = TypeVar("Body", bound=Record)


class Log:
    """One run's journal. `fold` is its state up to the token `tail`; `torn` as in Loaded;
    `restart_at` the token of the last commit to restart at, 0 without one; `trace` the traceparents
    stored with its records.

    `claim` is the n of this writer's claim, 0 without one; an `owner` (lock or claim) stops for
    good where the run is no longer its own. One task at a time (R46).
    """

    def __init__(self, store: Store, run_id: RunId, *, by: str) -> None:
        self.store = store
        self.run_id = run_id
        self.fold = Fold()
        self.tail = 0
        self.restart_at = 0
        self.trace = Trace()
        self.torn = 0
        self.claim = 0
        self.owner = False
        self.by = by
        self._nonce = secrets.token_hex(6)
        self._counter = 0
        self._appending = False
        self._stopped = False
        self._cut_off = False
        self._sent: dict[bytes, int] = {}  # what may still land, and its n
        self._over_at = ""
        self._fences: set[int] = set()

    @classmethod
    async def read(cls, store: Store, run_id: str, *, by: str = "") -> Self:
        """The journal as it is, without owning the run; `fold.n` is 0 where there is none."""
        log = cls(store, ids.run_id(run_id), by=by or "library")
        await log.refresh()
        return log

    @classmethod
    async def resumed(cls, store: Store, run_id: RunId, *, by: str, known: int = 0) -> Self:
        """As read, from the last commit on where the store can tell it: what a holder needs. Raises
        StoreUnavailable where it ends before `known`, a tail that was read before."""
        log = cls(store, run_id, by=by)
        loaded = await store.resume(run_id)
        if loaded is None:
            await log._read_all()
        else:
            log._take(log._restored(loaded), "")
        if log.tail < known:
            raise StoreUnavailable(
                f"run {run_id}: its journal was read up to {log.tail}, and to {known} before",
                run_id=run_id,
                hint="a leader that was deposed answers; try again",
            )
        return log

    @classmethod
    def of(cls, store: Store, run_id: RunId, loaded: Loaded) -> Self:
        """The journal that was loaded from the start, for who wants its entries, too."""
        log = cls(store, run_id, by="library")
        log._take(loaded, "")
        return log

    @property
    def state(self) -> RunState:
        """The run as of `tail`; only where it has started."""
        return run_state(self.fold, now=instant_text(datetime.now(UTC)))

    @property
    def gone(self) -> bool:
        """Whether there is no such run, or a tombstone of it, though records stand before it."""
        return self.fold.started is None or self.fold.purged is not None

    def check_runnable(self) -> None:
        """Raises RunNotFound or NewerVersion where this version can't run it."""
        fold = self.fold
        if fold.purged is not None:
            raise self.purged()
        if fold.started is None and fold.newer is None:
            raise self._not_there("does not exist")
        self._check_newer()

    def purged(self) -> RunNotFound:
        """The error for a run whose journal was removed."""
        return self._not_there("was purged")

    def _not_there(self, what: str) -> RunNotFound:
        return RunNotFound(
            f"run {self.run_id} {what}",
            run_id=self.run_id,
            hint="`runfold list` shows the runs",
        )

    @property
    def over_at(self) -> str:
        """Since when a holder has had something to do on a run that waits: the instant of the first
        such record, or the one waited for, if that is earlier. "" where it waits for neither."""
        wait = self.fold.wait
        return "" if wait is None else min(filter(None, (self._over_at, wait.until)), default="")

    @property
    def in_doubt(self) -> bool:
        """Whether something that we sent may be in the journal, and was not read there."""
        return any(n > self.fold.n for n in self._sent.values())

    def lose(self) -> None:
        """The run is another holder's: this handle writes nothing any more."""
        self._stopped = True
        if self.claim not in self._fences:
            self._fences.add(self.claim)
            self.store.observer.fenced(self.run_id, self.claim)

    # ---- reading ------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Fold what was appended since. An owner raises Fenced where somebody else claimed the run,
        NewerVersion where a newer Runfold wrote to it."""
        if self.tail:
            self._take(await self._news(), "")
        else:
            await self._read_all()
        if self.owner:
            self._check_newer()

    async def _read_all(self) -> None:
        """Fold all of it, page by page. A run that was purged meanwhile is read again, once: what
        is missing then was missing before."""
        for again in (False, True):
            async with aclosing(self.store.pages(self.run_id)) as pages:
                async for page in pages:
                    if not again and trimmed(self.fold.n, page.entries):
                        break
                    self._take(page, "")
                else:
                    return
            self.fold, self.tail, self.restart_at = Fold(), 0, 0

    async def _news(self) -> Loaded:
        """What was appended since; of a run that was purged meanwhile, what is left of it, from the
        start. Raises Fenced for a holder: its claim is over, then."""
        loaded = await self.store.load(self.run_id, after=self.tail)
        if not loaded.entries or not buried(self.fold, loaded.entries[0].record):
            return loaded
        if self.claim:
            self.lose()
            raise Fenced(f"run {self.run_id} has ended and was purged", run_id=self.run_id)
        self.fold, self.tail, self.restart_at = Fold(), 0, 0
        return await self.store.load(self.run_id)

    def _take(self, loaded: Loaded, record_id: str) -> Record | None:
        """Fold new entries; the one with our id, if it is among them. Raises Fenced first."""
        landed: Record | None = None
        told: Record | None = None
        fresh = self.fold.n == 0
        for index, entry in enumerate(loaded.entries):
            try:
                check_run(self.run_id, entry.record)
                self.fold.apply(entry)
            except Damage as damage:
                place = index if fresh else self.fold.n
                raise self._damaged(damage, place, entry, loaded.entries[:index]) from damage
            self.tail = entry.position
            self.trace = self.trace.behind(entry)
            if is_restart_point(entry.record):
                self.restart_at = entry.position
            if self.fold.wait is None:
                self._over_at = ""
            elif not self._over_at and self.fold.runnable():
                self._over_at = entry.record.at
            if entry.record.id == record_id:
                landed = entry.record
            if self._sent and entry.raw in self._sent:
                told = entry.record
        self.torn = self.torn or loaded.torn
        if told is not None:
            self._tell(told)
        newest = next(reversed(self.fold.claims), 0)
        if self.claim and newest > self.claim:
            self.lose()
            raise Fenced(
                f"run {self.run_id} was taken over by worker {self.fold.claims[newest].worker}, "
                f"record {newest}",
                run_id=self.run_id,
                hint="this process stopped the run; the other one goes on with it",
            )
        return landed

    def _restored(self, loaded: Loaded) -> Loaded:
        """Start the fold at the commit behind the gap, where there is one; what is left to fold."""
        entries = loaded.entries
        if len(entries) < 2 or entries[1].record.n == entries[0].record.n + 1:
            return loaded
        first, commit = entries[:2]
        try:
            check_run(self.run_id, first.record)
            self.fold = restored(first, commit)
        except Damage as damage:
            raise self._damaged(damage, commit.record.n - 1, commit, entries[:1]) from damage
        self.tail = self.restart_at = commit.position
        self.trace = Trace().behind(first)
        return Loaded(entries[2:], loaded.tail, loaded.torn)

    def _damaged(
        self, damage: Damage, index: int, entry: Entry, good: tuple[Entry, ...]
    ) -> JournalDamaged:
        at = self.store.where(self.run_id, index, entry)
        return JournalDamaged(
            f"run {self.run_id}: {at}: {damage}",
            where=at,
            run_id=self.run_id,
            hint=DAMAGED_HINT,
            good=good,
        )

    def _check_newer(self) -> None:
        """A record of a newer version may mean anything, a claim or a cancel: nothing is written
        after it (R18)."""
        if self.fold.newer is not None:
            self._stopped = True
            raise NewerVersion(
                f"run {self.run_id} holds a record this version can't read: {self.fold.newer}",
                run_id=self.run_id,
                hint="update this installation",
            )

    # ---- appending ----------------------------------------------------------------------------

    async def append(
        self,
        decide: Callable[[Fold], Body | None],
        *,
        record_id: str = "",
        patience_s: float = 0.0,
    ) -> Body | None:
        """Append what `decide` asks for at the tail; None where it says nothing is due any more.

        `decide` is pure and is asked again at every new tail. Raises what it raises; Fenced;
        TooLarge (nothing was sent); StoreUnavailable when the outcome stays unknown for the budget:
        then this handle is over, because the record may land later.

        `record_id`: that of the record, for who can repeat the append from outside; none that the
        fold has, or a later one of its writer (`Fold.repeats`).

        `patience_s`: it is tried for so long at least, also while the store can't be read.
        """
        if self._appending:
            raise self._concurrent()
        self._appending = True
        try:
            return await self._append(decide, record_id, patience_s)
        finally:
            self._appending = False

    async def _append(
        self, decide: Callable[[Fold], Body | None], record_id: str, patience_s: float
    ) -> Body | None:
        if self._stopped:
            raise Fenced(f"run {self.run_id} is no longer held here", run_id=self.run_id)
        self._check_newer()
        body = decide(self.fold)
        if body is None:
            return None
        if not record_id:
            self._counter += 1
            record_id = f"{self._nonce}-{self._counter}"
        deadline = time.monotonic() + max(APPEND_BUDGET_S, patience_s)
        pause_s = 0.01
        trace = self.store.observer.carry(self.run_id, body, self.trace)
        record, entry = sealed(self, body, record_id, trace)
        tries = 0
        while True:
            before = self.tail
            tries += 1
            landed, cause = await self._try(entry, record_id, tries, patience_s > 0)
            if landed is not None and not self._stopped and _same(landed, record):
                return cast("Body", landed)
            if self._stopped:  # given up meanwhile, by another task
                raise Fenced(f"run {self.run_id} is no longer held here", run_id=self.run_id)
            if self.tail != before:  # the sequence it expected is spent: it can't land any more
                body = decide(self.fold)
                if body is None:
                    return None
                record, entry = sealed(self, body, record_id, trace)
                continue
            if time.monotonic() > deadline:
                self._stopped = True
                raise StoreUnavailable(
                    f"run {self.run_id}: whether record {record.n} was stored is unknown: {cause}",
                    run_id=self.run_id,
                    hint="run or send it again: the journal will tell",
                )
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, 1.0)

    async def _try(
        self, entry: Entry, record_id: str, tries: int, patient: bool
    ) -> tuple[Record | None, str]:
        """One try and, where its answer is not Appended, the read that settles it: what landed (of
        a record id from outside perhaps an earlier try's), and why that was in doubt. Whatever is
        raised here, but TooLarge at the first try, leaves it unknown whether the record will land,
        so this handle is over then."""
        if self._sent:
            self._sent = {raw: n for raw, n in self._sent.items() if n > self.fold.n}
        self._sent[entry.raw] = entry.record.n
        try:
            answer = await self.store.append(self.run_id, entry, expected=self.tail)
            if isinstance(answer, Appended):
                self.fold.take(entry)  # `sealed` checked it, and nothing was folded since
                self.tail = answer.tail
                self.trace = self.trace.behind(entry)
                if entry.commit < 0:
                    self.restart_at = answer.tail
                if entry.raw in self._sent:  # else it is its successor's to tell
                    self._tell(entry.record)
                return entry.record, ""
            landed = self._take(await self._news(), record_id)
            self._check_newer()
        except BaseException as error:
            if patient and isinstance(error, StoreUnavailable):
                return None, error.message
            self._stopped = tries > 1 or not isinstance(error, TooLarge)
            self._cut_off = isinstance(error, asyncio.CancelledError)
            raise
        cause = answer.cause if isinstance(answer, Unknown) else "the tail can't be read"
        return landed, cause

    def _tell(self, record: Record) -> None:
        """A record that we sent is in the journal, and folded; also where we have lost the run
        meanwhile, or were cut off: nothing else of what we sent can land any more."""
        self._sent = {}
        self.store.observer.appended(self.run_id, self.fold, record, self.trace)

    async def _pause(self, pause_s: float) -> None:
        try:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
        except asyncio.CancelledError:
            self._stopped = self._cut_off = True  # what was published may still land
            raise

    def _concurrent(self) -> ConcurrentUse:
        return ConcurrentUse(
            f"run {self.run_id}: two tasks use one journal handle at once",
            run_id=self.run_id,
            hint="await one step before the next",
        )


def _same(landed: Record, wanted: Record) -> bool:
    """Whether a record with our id is the one that was asked for: an id may come from outside."""
    if landed is wanted:
        return True
    step = getattr(landed, "step", None), getattr(wanted, "step", None)
    return type(landed) is type(wanted) and step[0] == step[1]
