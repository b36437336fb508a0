"""Shell: removing the journals of runs that have ended (R15). See retention.py for why it is safe.

Whoever purges reads a journal, audits it as `check` does, keeps a copy where one is wanted, and
only then leaves a tombstone in its place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, aclosing
from datetime import UTC, datetime
from typing import Literal, assert_never

from msgspec import Struct, structs

from . import ids
from .auditing import RunAudit
from .errors import JournalDamaged, StaleSignal
from .fold import Fold
from .ids import RunId
from .limits import RETENTION_S
from .log import Log
from .owed import pay
from .records import RunPurged
from .retention import (
    Evidence,
    Finish,
    Keep,
    Parent,
    Purge,
    Retention,
    Why,
    decide_purge,
)
from .store import Store
from .stores.archive import Archive, Copy
from .stores.file import FileStore

Clock = Callable[[], datetime]


class Purged(Struct, frozen=True, kw_only=True):
    """What became of one run. `finished`: only its tombstone was left of an earlier purge, and what
    was before it; `due`: it would have been purged; `kept` for `why`. `path` of its copy."""

    run: RunId
    what: Literal["purged", "finished", "due", "kept"]
    why: Why | None = None
    text: str = ""
    path: str | None = None


def now_utc() -> datetime:
    """Our own clock."""
    return datetime.now(UTC)


async def purge(store: Store, run_id: str, *, by: str = "library", force: bool = False) -> None:
    """Remove a finished run's journal now; a tombstone stays and the id stays used (R10).

    After a crash in the middle call it again. Raises RunNotFound, JournalDamaged, NewerVersion;
    StaleSignal where the run has not ended, is a child whose parent was not purged, has something
    wrong with it, or failed so lately that `resume` could reopen it (these two not with `force`).
    """
    done = await purge_named(Purger(store, named(force=force), by=by), run_id)
    if done.what == "kept":
        raise refusal(done)


async def purge_named(purger: Purger, run_id: str) -> Purged:
    """Of a run that somebody names. Raises RunNotFound, JournalDamaged, NewerVersion."""
    log = await Log.read(purger.store, ids.run_id(run_id))
    if log.fold.purged is None:
        log.check_runnable()
    return await purger.purge(log.run_id)


def named(*, force: bool = False) -> Retention:
    """What may go of runs that somebody names: whatever their age."""
    return Retention(keep_s=0, resumable_s=0 if force else RETENTION_S, flawed=force)


def refusal(done: Purged) -> StaleSignal:
    """Why the run that somebody named is kept."""
    forced = done.why in ("flawed", "resumable")
    hint = "--force (force=True in a program) purges it all the same" if forced else ""
    return StaleSignal(f"run {done.run} is kept: {done.text}", run_id=done.run, hint=hint)


class Purger:
    """Purges runs of one store, one after another. `archive`: only once a copy of it is there;
    `dry`: only says what it would do."""

    def __init__(
        self,
        store: Store,
        wanted: Retention,
        *,
        by: str,
        archive: Archive | None = None,
        dry: bool = False,
        clock: Clock = now_utc,
    ) -> None:
        if archive is not None and isinstance(store, FileStore):
            archive.check_apart(store.directory)
        self.store = store
        self._wanted = wanted
        self._by = by
        self._archive = archive
        self._dry = dry
        self._clock = clock
        self._due_parents: set[str] = set()

    async def purge_ended(self, *, after: RunId | None = None) -> AsyncGenerator[Purged, None]:
        """Of all runs behind `after` that have ended as is wanted, in the order of their ids: so a
        parent comes before its children. Young ones may be left out. Raises StoreUnavailable,
        PermissionDenied."""
        wanted = self._wanted
        async for run in self.store.ended(
            age_s=wanted.keep_s, statuses=wanted.statuses, after=after
        ):
            yield await self.purge(run)

    async def purge(self, run: RunId) -> Purged:
        """Purge the run, where that is wanted and safe."""
        try:
            async with AsyncExitStack() as stack:
                return await self._purge(run, stack)
        except JournalDamaged as damage:
            return Purged(run=run, what="kept", why="damaged", text=damage.message)

    async def _purge(self, run: RunId, stack: AsyncExitStack) -> Purged:
        log = await Log.read(self.store, run, by=self._by)
        found = Evidence(
            n=log.fold.n,
            parent=await self._parent(log.fold),
            stamp=await self.store.stamp(run),  # behind the read: perhaps too late, never too early
            now=self._clock(),
        )
        decision = decide_purge(log.fold, self._wanted, found)
        if isinstance(decision, Keep):  # not needed for safety: spares what follows
            return _kept(run, decision)
        if log.fold.started is None:
            return Purged(run=run, what="finished")  # the tombstone is all there is
        copy: Copy | None = None
        if self._archive is not None and not self._dry:
            copy = await stack.enter_async_context(self._archive.copying(run))
        audited = await _audited(self.store, log, copy)
        if isinstance(audited, Keep):
            return _kept(run, audited)
        found = structs.replace(found, flaw=audited)
        decision = decide_purge(log.fold, self._wanted, found)
        if isinstance(decision, Keep):
            return _kept(run, decision)
        if self._dry:
            return self._due(run, log.fold)
        if copy is not None and (refused := await copy.keep()):
            return _kept(run, Keep("archive", refused))
        what = await self._bury(log, found)
        if isinstance(what, Keep):
            return _kept(run, what)
        return Purged(run=run, what=what, path=str(copy.path) if copy is not None else None)

    async def _parent(self, fold: Fold) -> Parent:
        parent = fold.started.parent if fold.started is not None else ""
        if not parent:
            return "none"
        if parent in self._due_parents:
            return "purged"
        if not ids.valid_run_id(parent):
            return "missing"
        try:
            log = await Log.resumed(self.store, RunId(parent), by=self._by)
        except JournalDamaged:
            return "there"
        if log.fold.purged is not None:
            return "purged"
        return "there" if log.fold.n else "missing"

    def _due(self, run: RunId, fold: Fold) -> Purged:
        if fold.children:
            self._due_parents.add(run)
        return Purged(run=run, what="due", text=f"it is {fold.status()}, {fold.n} records")

    async def _bury(self, log: Log, found: Evidence) -> Literal["purged", "finished"] | Keep:
        """Pay, append the tombstone where there is none, then remove what is before it."""
        kept: list[Keep] = []

        def due(fold: Fold) -> RunPurged | None:
            """Asked again at each new tail."""
            decision = decide_purge(fold, self._wanted, found)
            match decision:
                case Purge():
                    return RunPurged()
                case Finish():
                    return None
                case Keep():
                    kept[:] = [decision]
                    return None
                case other:
                    assert_never(other)

        made = None
        if log.fold.purged is None:
            await pay(log)
            made = await log.append(due)
        if log.fold.purged is None:
            return kept[0]
        if log.fold.started is not None:  # else somebody else has removed it already
            await self.store.trim(log.run_id, before=log.tail)
        return "finished" if made is None else "purged"


def _kept(run: RunId, why: Keep) -> Purged:
    return Purged(run=run, what="kept", why=why.why, text=why.text)


async def _audited(store: Store, log: Log, copy: Copy | None) -> str | Keep:
    """The first flaw that an audit finds in what is stored, "" where there is none; it is copied on
    the way. Keep: that is not what was read before, or can't be judged."""
    audit, flaw = RunAudit(log.run_id), ""
    async with aclosing(store.stored(log.run_id)) as pages:
        async for page in pages:
            for record in page:
                found = audit.take(record)
                if found and not flaw:
                    flaw = f"record {found[0].n}: {found[0].rule}: {found[0].text}"
                if copy is not None and not record.flaw:
                    copy.write(record.data)
    if (audit.position, audit.records) != (log.tail, log.fold.n):
        return Keep("changed", "it was changed while it was read")
    if audit.newer is not None:
        return Keep("newer", f"a newer version wrote to it: {audit.newer}")
    return flaw
