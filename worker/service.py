"""Shell: a worker process: pulls tasks, works runs, sweeps, and hands over when it is stopped (R48,
R51, R54, R55)."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import os
import random
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from journal import ids, limits
from journal.errors import RunfoldError, StoreUnavailable
from journal.handle import process_name
from journal.ids import RunId
from journal.observing import UNOBSERVED, Observer, beside
from journal.retaining import keep_retaining
from journal.stores.jetstream import JetStreamStore
from journal.stores.tasks import PRIORITIES, Task
from journal.stores.tasks_pull import PULL_S, Puller, standing_s
from journal.sweep import keep_sweeping

from .agent import Agent
from .dispatch import Dispatcher
from .events import first_of
from .health import Health, Load
from .peers import PeerWatch
from .report import report_of
from .watchdog import Watchdog

log = logging.getLogger("runfold")
PAUSE_S = 0.5
STALE_S = 0.2
YIELD_S = 0.03
LATELY_S = 60.0
"""Where priorities are in use, a pull for the lower ones waits this long for the higher ones'."""
HOPELESS_ACK_WAITS = 2
"""After one, messages are delivered again; after two, whoever took them has claimed the runs."""
CUT_S = 1.5
"""For settling what was cut off when the grace was over."""


class Worker:
    """Works the runs of its agents. `serve` until `stop` (in order) or `force` (at once).

    `concurrency` runs at once · `ack_wait_s` a run of a worker that is silent is taken over after,
    1 to 600 · `restart_limit` workers lost in a row by a run before that is its failure (R52) ·
    `grace_s` for steps to end when it is stopped · `retain_s` after its end a run is purged, for
    workers that may purge · `observer` is told of the work.
    Raises ValueError, TypeError, InvalidId.
    """

    def __init__(
        self,
        url: str,
        agents: Sequence[Agent],
        *,
        name: str | None = None,
        namespace: str = "runfold",
        creds: str | None = None,
        concurrency: int = limits.CONCURRENCY,
        ack_wait_s: float = limits.ACK_WAIT_S,
        restart_limit: int = limits.RESTART_LIMIT,
        grace_s: float = limits.GRACE_S,
        sweep_s: float = limits.SWEEP_S,
        retain_s: float | None = None,
        on_ready: Callable[[], None] | None = None,
        observer: Observer = UNOBSERVED,
    ) -> None:
        _check_range("concurrency", concurrency, 1, limits.CONCURRENCY_MAX)
        _check_range("ack_wait_s", ack_wait_s, limits.ACK_WAIT_MIN_S, limits.ACK_WAIT_MAX_S)
        _check_range("restart_limit", restart_limit, 1, limits.RESTART_LIMIT_MAX)
        _check_range("grace_s", grace_s, 0, 3600)
        _check_range("sweep_s", sweep_s, 0.1, 3600)
        _check_range("retain_s", retain_s or 0, 0, limits.RETENTION_MAX_S)
        if not agents:
            raise ValueError("a worker needs at least one agent")
        self.agents = {agent.name: agent for agent in agents}
        if len(self.agents) != len(agents):
            names = ", ".join(agent.name for agent in agents)
            raise ValueError(f"two agents have one name: {names}")
        own = f"{name}-{os.getpid()}" if name else process_name()
        # new with every process: a claim of an earlier one is never taken for ours (PROTOCOL 4)
        self.id = ids.name(f"{own}-{secrets.token_hex(4)}", "a worker")
        self.stubborn: set[asyncio.Task[None]] = set()
        self._store = JetStreamStore(url, namespace=namespace, creds=creds)
        self._store.observer = beside(self._store.observer, observer)
        self._concurrency = concurrency
        self._ack_wait_s = ack_wait_s
        self._restart_limit = restart_limit
        self._grace_s = grace_s
        self._sweep_s = sweep_s
        self._retain_s = retain_s
        self._on_ready = on_ready
        self._dispatcher: Dispatcher | None = None
        self._watchdog: Watchdog | None = None
        self._works: dict[asyncio.Task[None], Task] = {}
        self._waiting: list[tuple[int, int, Task]] = []
        self._order = itertools.count()
        self._backlog: dict[tuple[str, int], int] = {}
        self._seen: dict[tuple[str, int], float] = {}
        self._opened: dict[tuple[str, int], float] = {}
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._since = 0.0
        self._heard = 0.0
        self._problem = "it is starting"

    # ---- serving ----------------------------------------------------------------------------

    async def serve(self) -> None:
        """Work until stopped; returns when what it held has ended or is handed over.

        Raises NotProvisioned, PermissionDenied, StoreUnavailable (no server; later: the connection
        was closed for good).
        """
        async with self._store as store:
            for agent in self.agents.values():
                in_force_s = await store.tasks.ensure(agent.name, ack_wait_s=self._ack_wait_s)
                self._ack_wait_s = min(self._ack_wait_s, in_force_s)
            self._dispatcher = Dispatcher(
                store,
                self.id,
                self.agents,
                ack_wait_s=self._ack_wait_s,
                restart_limit=self._restart_limit,
                grace_s=self._grace_s,
                stubborn=self._keep_stubborn,
            )
            self._watchdog = Watchdog(min(1.0, self._ack_wait_s / 3))
            async with (
                self._watchdog,
                store.answering(self.id, self._dispatcher.holds),
                store.notices(self._on_notice),
                store.reporting(lambda _: self.report()),
            ):
                self._since = self._heard = time.monotonic()
                try:
                    await self._serve(store)
                finally:
                    await self._cut_off()

    async def _serve(self, store: JetStreamStore) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                loops = [
                    group.create_task(self._pull(store, agent, priority))
                    for agent in self.agents
                    for priority in PRIORITIES
                ]
                loops.append(group.create_task(self._sweep(store)))
                loops.append(group.create_task(PeerWatch(store, self.id, self.agents).run()))
                if self._retain_s is not None:
                    retaining = keep_retaining(store, self._retain_s, by=self.id)
                    loops.append(group.create_task(retaining))
                loops.append(group.create_task(self._watch_connection()))
                self._problem = ""
                if self._on_ready is not None:
                    self._on_ready()
                await self._stopping.wait()
                self._problem = "it is being stopped"
                self._begin_drain()
                for loop in loops[:-1]:
                    loop.cancel()
                await self._drain()
                loops[-1].cancel()
        except* RunfoldError as group_error:
            raise group_error.exceptions[0] from None

    async def stop(self) -> None:
        """Take nothing new; give each run up at its next step, within the grace."""
        self._stopping.set()

    def force(self) -> None:
        """The grace is over."""
        self._stopping.set()
        self._forced.set()

    def _begin_drain(self) -> None:
        assert self._dispatcher is not None
        self._dispatcher.drain()
        while self._waiting:
            self._store.tasks.nak(heapq.heappop(self._waiting)[2])

    async def _drain(self) -> None:
        assert self._dispatcher is not None
        deadline = time.monotonic() + self._grace_s
        while self._works and not self._forced.is_set():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            await first_of(self._forced, timeout_s=left_s, tasks=self._works)
        for held in list(self._dispatcher.held.values()):
            log.warning(
                "run %s did not come to its next step in time: it is cut off; of a write nobody "
                "knows then whether it happened (`runfold show`)",
                held.run_id,
                extra={"run": held.run_id},
            )
            held.forced.set()
        if self._works:
            await asyncio.wait(list(self._works), timeout=CUT_S)

    async def _cut_off(self) -> None:
        """Leaving, in order or not: nothing of ours goes on."""
        for work in self._works:
            work.cancel()
        if self._works:
            await asyncio.wait(list(self._works), timeout=CUT_S / 4)
        self.stubborn.update(work for work in self._works if not work.done())

    def _keep_stubborn(self, task: asyncio.Task[None]) -> None:
        self.stubborn.add(task)
        task.add_done_callback(self.stubborn.discard)

    async def _watch_connection(self) -> None:
        closed = asyncio.create_task(self._store.closed())
        connected = True
        try:
            while not closed.done():
                await asyncio.wait([closed], timeout=1.0)
                if self._store.connected != connected:
                    connected = not connected
                    log.warning(
                        "worker %s is connected again"
                        if connected
                        else "worker %s has lost its server; it goes on when that is back",
                        self.id,
                    )
            raise closed.result()
        finally:
            closed.cancel()

    # ---- pulling ----------------------------------------------------------------------------

    async def _pull(self, store: JetStreamStore, agent: str, priority: int) -> None:
        async with store.tasks.pulling(agent, priority, self._on_task) as puller:
            while True:
                await self._room_for(agent, priority)
                await self._pull_once(store, puller, agent, priority)

    async def _pull_once(
        self, store: JetStreamStore, puller: Puller[Task], agent: str, priority: int
    ) -> None:
        self._opened[agent, priority] = time.monotonic()
        shares = len(PRIORITIES) * len(self.agents)
        batch = max(1, self._free // shares)
        # Uneven: the server serves who has stood longest, and in step that is always the same one.
        stands_s = standing_s(self._ack_wait_s) * random.uniform(0.5, 1.0)
        end = await puller.pull(batch, expires_s=stands_s)
        if end.why in ("filled", "expired"):
            self._heard = time.monotonic()
        if end.why != "filled":
            self._backlog[agent, priority] = 0
            self._changed.set()
        if end.why in ("gone", "other"):
            self._problem = f"its tasks can't be pulled: {end.text}"
            log.warning("tasks of agent %s can't be pulled: %s", agent, end.text)
            await asyncio.sleep(PAUSE_S * random.uniform(0.5, 1.5))
            try:
                await store.tasks.ensure(agent, ack_wait_s=self._ack_wait_s)
                self._problem = ""
            except StoreUnavailable as error:  # only a connection closed for good ends a worker
                log.warning("the consumers of agent %s can't be made: %s", agent, error.message)

    async def _room_for(self, agent: str, priority: int) -> None:
        """Until there is room for work that nothing of a higher priority waits for."""
        above = [(agent, higher) for higher in PRIORITIES if higher > priority]
        while True:
            while self._free <= 0 or self._waits_for(above):
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(STALE_S if self._free > 0 else None):
                        await self._changed.wait()
            recently = time.monotonic() - LATELY_S
            used = sum(self._seen.get(one, 0.0) > recently for one in above)
            if not used or self._free >= len(PRIORITIES) * len(self.agents):
                return
            await asyncio.sleep(YIELD_S * used)  # what is higher is pulled first
            if self._free > 0 and not self._waits_for(above):
                return

    def _waits_for(self, above: list[tuple[str, int]]) -> bool:
        """Whether tasks of these consumers are known to wait. What a delivery said of them is old
        news once a pull has been open for a while without another: other workers took them."""
        now = time.monotonic()
        return any(
            self._backlog.get(one, 0)
            and now - max(self._seen.get(one, 0.0), self._opened.get(one, now)) < STALE_S
            for one in above
        )

    @property
    def _free(self) -> int:
        return self._concurrency - len(self._works) - len(self._waiting)

    def _on_task(self, task: Task) -> None:
        self._heard = time.monotonic()
        self._backlog[task.agent, task.priority] = task.pending
        self._seen[task.agent, task.priority] = self._heard
        if self._stopping.is_set():
            self._store.tasks.nak(task)
        elif len(self._works) < self._concurrency:
            self._begin(task)
        elif task.priority > 0 and len(self._waiting) < len(self.agents):
            heapq.heappush(self._waiting, (-task.priority, next(self._order), task))
        else:  # pulled when there was room: what is higher may come before it
            self._store.tasks.nak(task, YIELD_S)

    def _begin(self, task: Task) -> None:
        assert self._dispatcher is not None
        work = asyncio.create_task(self._dispatcher.look(task), name=f"task of run {task.run_id}")
        self._works[work] = task
        work.add_done_callback(self._ended)

    def _ended(self, work: asyncio.Task[None]) -> None:
        del self._works[work]
        if not work.cancelled() and (error := work.exception()) is not None:
            log.error("a task was left to redelivery: this is a bug", exc_info=error)
        while self._waiting and len(self._works) < self._concurrency:
            task = heapq.heappop(self._waiting)[2]
            if time.monotonic() - task.arrived < self._ack_wait_s / 2:
                self._begin(task)  # a lapsed one has been delivered again
        self._changed.set()

    # ---- sweeping, telling ------------------------------------------------------------------

    async def _sweep(self, store: JetStreamStore) -> None:
        revisions = {agent.name: agent.revision for agent in self.agents.values()}
        await keep_sweeping(store, lambda: revisions, self._held, every_s=self._sweep_s)

    def _held(self) -> Collection[RunId]:
        return self._dispatcher.held if self._dispatcher else ()

    def _on_notice(self, run_id: RunId, payload: bytes) -> None:
        assert self._dispatcher is not None
        held = self._dispatcher.held.get(run_id)
        if held is not None:
            held.look()

    def health(self) -> Health:
        """For other threads. Red while it is deaf: not connected, not heard of for two pulls, its
        loop blocked, or being stopped (R55). Hopeless when the loop has been blocked for so long
        that other workers have taken over what it held; never for want of a server."""
        problems: list[str] = []
        if self._problem:
            problems.append(self._problem)
        if not self._store.connected:
            problems.append("it is not connected to the server")
        silent_s = time.monotonic() - self._heard
        if self._since and silent_s > 2 * PULL_S and self._free > 0:
            problems.append(f"the server has been silent for {silent_s:.0f} s")
        blocked_s = self._watchdog.blocked_s if self._watchdog is not None else 0.0
        if blocked_s:
            problems.append(f"its event loop has been blocked for {blocked_s:.1f} s")
        details = {
            "worker": self.id,
            "active": len(self._works),
            "concurrency": self._concurrency,
            "stubborn": len(self.stubborn),
        }
        return Health(
            ok=not problems,
            hopeless=blocked_s > HOPELESS_ACK_WAITS * self._ack_wait_s,
            problems=tuple(problems),
            details=details,
        )

    def load(self) -> Load:
        """For other threads."""
        backlog = dict.fromkeys(self.agents, 0)
        for (agent, _), pending in self._backlog.copy().items():
            backlog[agent] += pending
        active, stubborn = len(self._works), len(self.stubborn)
        return Load(active, self._concurrency, self._store.connected, stubborn, backlog)

    def report(self) -> bytes:
        """What `runfold workers` shows."""
        return report_of(
            self.id,
            self.agents.values(),
            self._dispatcher.held if self._dispatcher else {},
            concurrency=self._concurrency,
            ack_wait_s=self._ack_wait_s,
            draining=self._stopping.is_set(),
        )


def _check_range(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"{what} is {least:g} to {most:g}, not {value:g}")
