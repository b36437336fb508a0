"""Shell: `Fleet`: starting runs, looking at them, talking to them, from any process (R3, R4, R54).

It owns nothing. On a directory it does the same, but nobody works there: `run()` takes a run up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from . import doors, ids
from .doors import Receipt, Started
from .errors import (
    BadPayload,
    InvalidId,
    JournalDamaged,
    NewerVersion,
    RunNotFound,
    StaleSignal,
)
from .following import followed, watching
from .ids import RunId
from .inbox import InboxItem, InboxPage, inbox, inbox_page
from .inputs import InputState, input_state
from .limits import LIST_PAGE, WAIT_MAX_S
from .listing import Filter, Page, page, shown, shown_log, unreadable
from .log import Log
from .looks import Looks
from .messages import JSON
from .records import Mode, Record
from .signals import AnySignal, Cancel, Resume, parse_request_id
from .store import Store
from .stores.jetstream import JetStreamStore
from .stores.tasks import Backlog
from .stores.tasks_message import PRIORITIES
from .views import RunState, WaitingOn, run_state
from .waits import instant_text

WORKERS_WAIT_S = 1.0
"""Workers answer from memory; those that don't within this have something else to worry about."""

QUEUE_RUNS = 200
"""To find agents that no worker has, at most so many unfinished runs are looked at."""

UNFINISHED = frozenset({"running", "waiting"})
SETTLED = frozenset({"done", "unanswered", "withdrawn"})


class Workload(Struct, frozen=True, kw_only=True):
    """Of one agent: its tasks, as `Backlog` says them, and how many workers have it."""

    agent: str
    workers: int
    pending: int
    in_progress: int
    redelivered: int
    pulls: int


class Fleet:
    """Runs and workers of one store. `by` stands in the records that it causes."""

    def __init__(self, store: Store, *, by: str = "library") -> None:
        self.store = store
        self.by = by

    # ---- runs ---------------------------------------------------------------------------------

    async def start(
        self,
        agent: str,
        input: JSON,
        *,
        run_id: str | None = None,
        priority: int = 0,
        key: str | None = None,
        revision: str = "",
    ) -> Started:
        """Start a run, idempotently (R3), and tell the agent's workers; a random id where none is
        given. Runs with one `key` go one at a time; a `revision` binds the run before any worker
        has seen it. After StoreUnavailable repeat it with the same id: nothing is lost between.

        Raises InvalidId, NotEncodable, TooLarge, InputMismatch, BadPayload (priority, key).
        """
        if priority not in PRIORITIES:
            raise BadPayload(f"a priority is -1, 0 or 1, not {ids.shown(str(priority))}")
        if key is not None and (not key.isprintable() or not 1 <= len(key) <= 128):
            raise BadPayload("a key is 1 to 128 printable characters")
        run = ids.new_run_id() if run_id is None else ids.run_id(run_id)
        body = doors.started_body(
            run,
            agent,
            doors.start_value(agent, input),
            revision=revision,
            priority=priority,
            key=key or "",
        )
        # Not read first: an id that is new needs no look, and of one that is not the append loses.
        log = Log(self.store, run, by=self.by)
        created = await doors.start_in(log, body)
        await doors.wake(log, again=not created)  # the first may have died in between
        return Started(run_id=run, created=created)

    async def get(self, run_id: str) -> RunState:
        """The run as it is now. Raises RunNotFound, JournalDamaged."""
        return await doors.state(self.store, run_id)

    async def wait(self, run_id: str, *, timeout_s: float) -> RunState:
        """The run once it is not running any more (it ended, or waits for something), or as it is
        after `timeout_s`. Raises as `get`."""
        found: list[RunState] = []

        def stopped(log: Log, now: str, held: bool) -> bool:
            found[:] = [run_state(log.fold, held=held, now=now)]
            return found[0].outcome is not None or log.fold.newer is not None

        await self._until(run_id, timeout_s, stopped, stops=True)
        return found[0]

    async def shown(self, run_id: str, *, wait_s: float = 0) -> dict[str, Any]:
        """The run object of every `--json` (PROTOCOL 8), at once or, within `wait_s` (60), when the
        run is not running any more. A journal that can't be read has the status `damaged` or
        `newer`, and a reason. Raises RunNotFound, BadPayload (`wait_s`)."""
        _check_wait(wait_s)
        run = ids.run_id(run_id)
        if not wait_s:
            return await shown(self.store, run)
        found: list[dict[str, Any]] = []

        def stopped(log: Log, now: str, held: bool) -> bool:
            found[:] = [shown_log(log, held=held)]
            return found[0]["status"] != "running"

        try:
            await self._until(run, wait_s, stopped, stops=True)
        except JournalDamaged as damage:
            return unreadable(run, "damaged", damage.message)
        except NewerVersion as error:
            return unreadable(run, "newer", error.message)
        return found[0]

    async def page(
        self, wanted: Filter, *, after: RunId | None = None, limit: int = LIST_PAGE
    ) -> Page:
        """As `list`, at most `limit` of them at once, as run objects."""
        return await page(self.store, wanted, after=after, limit=limit)

    async def list(
        self, *, status: str | None = None, agent: str | None = None, after: RunId | None = None
    ) -> AsyncIterator[RunState]:
        """Runs in the order of their ids, after the id `after`. A journal that can't be read has
        the status `damaged` or `newer`, and no agent."""
        # Who iterates takes its time: each is read as it is by then.
        async for run in Looks(self.store, by_heads=False).candidates(status, after):
            found = await self._listed(run)
            if found is None or status not in (None, found.status):
                continue
            if agent in (None, found.agent):
                yield found

    async def _listed(self, run: RunId) -> RunState | None:
        """None for a purged run."""
        try:
            return await self.get(run)
        except RunNotFound:
            return None
        except JournalDamaged as damage:
            return _unreadable(run, "damaged", damage.message)
        except NewerVersion as error:
            return _unreadable(run, "newer", error.message)

    async def follow(self, run_id: str, *, after: int = 0) -> AsyncIterator[Record]:
        """The run's records from ordinal `after` + 1 on, each once, as they come; ends with the
        run. Raises RunNotFound, JournalDamaged, NewerVersion."""
        async with aclosing(followed(self.store, run_id, after=after)) as entries:
            async for entry in entries:
                yield entry.record

    # ---- signals and inputs -------------------------------------------------------------------

    async def signal(
        self,
        run_id: str,
        name: str,
        payload: AnySignal | Mapping[str, Any],
        *,
        request_id: str | None = None,
    ) -> Receipt:
        """As `runfold.signal`."""
        return await doors.signal(
            self.store, run_id, name, payload, request_id=request_id, by=self.by
        )

    async def cancel(
        self, run_id: str, *, reason: str = "", request_id: str | None = None
    ) -> Receipt:
        """End the run: nothing new is started; a write that runs is let end (R56)."""
        return await self.signal(run_id, "cancel", Cancel(reason=reason), request_id=request_id)

    async def resume(
        self, run_id: str, *, reason: str = "", request_id: str | None = None
    ) -> Receipt:
        """End a pause or a wait for a retry; give a run that failed retriably another try."""
        return await self.signal(run_id, "resume", Resume(reason=reason), request_id=request_id)

    async def send(
        self, run_id: str, content: JSON, *, mode: Mode = "steer", request_id: str | None = None
    ) -> InputState:
        """Send the running agent a message (R62). A repeat of the request id gets the original.

        Raises BadPayload, TooLarge, NotEncodable, RunNotFound, RunFinished, StaleSignal.
        """
        return await doors.submit(
            self.store, run_id, content, mode=mode, request_id=request_id, by=self.by
        )

    async def input(self, run_id: str, request_id: str, *, wait_s: float = 0) -> InputState:
        """What became of an input; waits at most `wait_s` (60) until it is done, unanswered or
        withdrawn. Raises RunNotFound, StaleSignal (it is not there)."""
        parse_request_id(request_id)
        _check_wait(wait_s)
        found: list[InputState] = []

        def settled(log: Log, now: str, held: bool) -> bool:
            known = log.fold.inputs.get(request_id)
            if known is None:
                run = log.run_id
                raise StaleSignal(f"run {run} has no input {ids.shown(request_id)}", run_id=run)
            found[:] = [input_state(known)]
            return known.status in SETTLED

        await self._until(run_id, wait_s, settled)
        return found[0]

    async def withdraw(self, run_id: str, request_id: str) -> InputState:
        """Take a queued input back. Raises RunNotFound, StaleSignal (placed, or not there)."""
        return await doors.withdraw(self.store, run_id, request_id, by=self.by)

    async def _until(
        self,
        run_id: str,
        timeout_s: float,
        over: Callable[[Log, str, bool], bool],
        *,
        stops: bool = False,
    ) -> None:
        """Ask `over` at each new tail, and from time to time, until it says yes or time is up.
        `stops`: at tails that leave the run not running."""
        run = ids.run_id(run_id)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        async with watching(self.store, run, stops=stops) as watch:
            log = await Log.read(self.store, run, by=self.by)
            while True:
                if log.gone:  # it may end and be purged as it is waited for
                    log.check_runnable()
                held = await self.store.holder(run) is not None
                if over(log, instant_text(datetime.now(UTC)), held) or loop.time() >= deadline:
                    return
                await watch.changed(deadline - loop.time())
                await log.refresh()

    # ---- people and workers -------------------------------------------------------------------

    async def inbox(self) -> list[InboxItem]:
        """What waits for a person, over all runs."""
        return await inbox(self.store)

    async def inbox_page(self, *, after: RunId | None = None, limit: int = LIST_PAGE) -> InboxPage:
        """A part of it: what the runs behind the id `after` wait for."""
        return await inbox_page(self.store, after=after, limit=limit)

    async def workers(self, *, wait_s: float = WORKERS_WAIT_S) -> list[dict[str, Any]]:
        """What each connected worker says of itself, by worker id. One that doesn't answer within
        `wait_s` is not there."""
        reports = await self._server().ask_workers(wait_s)
        found: dict[str, dict[str, Any]] = {}
        for raw in reports:
            try:
                report = msgspec.json.decode(raw, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                report = {"error": f"its report can't be read: {error}"}
            found[str(report.get("worker", f"?{len(found)}"))] = report
        return [found[name] for name in sorted(found)]

    async def queue(self, *, wait_s: float = WORKERS_WAIT_S) -> list[Workload]:
        """Tasks of each agent that a worker has or an unfinished run needs, by the agent's name."""
        store = self._server()
        workers: dict[str, int] = {}
        for report in await self.workers(wait_s=wait_s):
            for agent in agents_of(report):
                workers[agent] = workers.get(agent, 0) + 1
        looked_at = 0
        async for run in Looks(store, by_heads=False).told(UNFINISHED):
            if looked_at == QUEUE_RUNS:
                break
            looked_at += 1
            listed = await self._listed(run)
            if listed is not None and listed.agent:
                workers.setdefault(listed.agent, 0)
        return [
            _workload(agent, workers[agent], await store.tasks.backlog(agent))
            for agent in sorted(workers)
        ]

    def _server(self) -> JetStreamStore:
        if not isinstance(self.store, JetStreamStore):
            raise InvalidId("a directory has no workers", hint="use a nats:// store")
        return self.store


def _check_wait(wait_s: float) -> None:
    if not 0 <= wait_s <= WAIT_MAX_S:
        raise BadPayload(f"waiting takes 0 to {WAIT_MAX_S:g} seconds, not {wait_s:g}")


def agents_of(report: Mapping[str, Any]) -> dict[str, str]:
    """The agents a worker's report names, with their revisions."""
    try:
        listed = msgspec.convert(report.get("agents", []), list[dict[str, Any]])
    except msgspec.ValidationError:
        return {}
    return {
        str(one["name"]): str(one.get("revision", ""))
        for one in listed
        if ids.valid_name(one.get("name", ""))
    }


def _workload(agent: str, workers: int, backlog: Backlog) -> Workload:
    return Workload(
        agent=agent,
        workers=workers,
        pending=backlog.pending,
        in_progress=backlog.in_progress,
        redelivered=backlog.redelivered,
        pulls=backlog.waiting,
    )


def _unreadable(run: RunId, status: Any, why: str) -> RunState:
    since = datetime.fromtimestamp(0, UTC)
    return RunState(
        run_id=run,
        agent="",
        revision="",
        status=status,
        outcome=None,
        waiting_on=(WaitingOn(what="operator", since=since, ended_by=why),),
        iteration=0,
        attempt=0,
        records=0,
        model_calls=0,
    )
