"""Shell: tasks for workers over HTTP: polls, and who is at work (R65).

Nothing is kept that the journal does not say: a task that is forgotten here is found again by its
name (task_id.py), here or by another bridge. What is pulled and finds nobody is given back at once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from msgspec import Struct

from journal import ids, limits
from journal.errors import JournalDamaged, RunfoldError, StoreUnavailable
from journal.handle import process_name
from journal.ids import RunId
from journal.lease import Lease
from journal.stores.jetstream import JetStreamStore
from journal.stores.tasks import PRIORITIES, Task
from journal.stores.tasks_pull import standing_s
from journal.sweep import keep_sweeping
from journal.taking import Taking, Wanted

from .problems import Busy
from .remote import RemoteTask
from .task_id import AgentTerms, TaskName, decode_name, encode_name, named

log = logging.getLogger("runfold")

TASKS_MAX: Final = 2048
"""Tasks that workers were heard of lately: each has a subscription and a folded journal."""

LOOKS_MAX: Final = 256
PAUSE_S: Final = 0.5
BATCH_MAX: Final = 16
HEAD_START_S: Final = 0.01


class Poll:
    """A worker that waits for a task of these agents."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.offer: asyncio.Future[RemoteTask] = asyncio.get_running_loop().create_future()


class Ready(Struct, frozen=True):
    """A run whose holder is gone, and that nobody waited for when this was known."""

    channel: Channel
    task: Task
    wanted: Wanted
    lease: Lease


class Channel:
    """The tasks of one agent, on one worker's terms, and the polls that wait for them."""

    def __init__(self, terms: AgentTerms) -> None:
        self.terms = terms
        self.polls: deque[Poll] = deque()
        self.pulling: asyncio.Task[None] | None = None
        self.ack_wait_s = limits.ACK_WAIT_S

    def next(self) -> Poll | None:
        """The poll that waits longest."""
        while self.polls:
            poll = self.polls.popleft()
            if not poll.offer.done():
                return poll
        return None


class RemoteTasks:
    """The bridge's part for workers over HTTP: `run` it, `poll`, `using`. `ack_wait_s`: of agents
    that no worker has been there for."""

    def __init__(self, store: JetStreamStore, *, ack_wait_s: float, restart_limit: int) -> None:
        self._ack_wait_s = ack_wait_s
        self._store = store
        self._restart_limit = restart_limit
        self._worker = ids.name(f"bridge-{process_name()}", "a worker")
        self._channels: dict[AgentTerms, Channel] = {}
        self._tasks: dict[str, RemoteTask] = {}
        self._guests: dict[str, RemoteTask] = {}
        self._ready: dict[AgentTerms, deque[Ready]] = {}
        self._polled: dict[str, str] = {}
        self._looks = 0
        self._group: asyncio.TaskGroup | None = None
        self._problem = ""

    def problem(self) -> str:
        """Why tasks can't be pulled now."""
        return self._problem

    async def run(self) -> None:
        """Until cancelled: forget tasks whose workers are silent."""
        try:
            async with (
                self._store.reporting(lambda _: self._report()),
                asyncio.TaskGroup() as group,
            ):
                self._group = group
                group.create_task(
                    keep_sweeping(
                        self._store, self._polled_lately, self._held, every_s=limits.SWEEP_S
                    )
                )
                while True:
                    await asyncio.sleep(limits.ACK_WAIT_MIN_S / 4)
                    for text, task in list(self._tasks.items()):
                        if not task.heard and self._tasks.get(text) is task:
                            del self._tasks[text]
                            await task.close()
        finally:
            self._group = None
            for ready in self._ready.values():
                for one in ready:
                    one.lease.nak()
            self._ready.clear()
            for task in self._tasks.values():
                await task.close()

    def _polled_lately(self) -> Mapping[str, str]:
        """The agents that were polled for since the last time: maybe no native worker has them, and
        who owed a run its task is gone (R53)."""
        agents, self._polled = self._polled, {}
        return agents | {terms.name: terms.revision for terms in self._channels}

    def _held(self) -> Collection[RunId]:
        return {task.run_id for task in self._tasks.values() if task.held}

    def _report(self) -> bytes | None:
        """What `runfold workers` shows of the workers over HTTP that are heard of here."""
        tasks = [task for task in self._tasks.values() if task.held]
        terms = {*self._channels, *(task.terms for task in tasks)}
        if not terms:
            return None
        return msgspec.json.encode(
            {
                "worker": self._worker,
                "over_http": True,
                "agents": [
                    {"name": one.name, "revision": one.revision, "accepts": one.accepts}
                    for one in terms
                ],
                "concurrency": TASKS_MAX,
                "ack_wait_s": self._ack_wait_s,
                "draining": False,
                "active": [
                    {"run": task.run_id, "claim": task.journal.claim, "agent": task.terms.name}
                    for task in tasks
                ],
            }
        )

    # ---- polls ------------------------------------------------------------------------------

    async def poll(
        self, owner: str, agents: Sequence[AgentTerms], wait_s: float
    ) -> tuple[str, RemoteTask] | None:
        """A task of one of the agents, by its name; None where none came in time. Raises Busy."""
        if self._group is None or len(self._tasks) >= TASKS_MAX:
            raise Busy("the bridge has as many tasks as it takes", hint="poll again later")
        poll = Poll(owner)
        self._polled |= {terms.name: terms.revision for terms in agents}
        ready = next((kept for terms in agents if (kept := self._kept(terms))), None)
        if ready is not None:
            self._offer(poll, ready)
        channels = [] if ready is not None else [self._channel(terms) for terms in agents]
        try:
            for channel in channels:
                channel.polls.append(poll)
                if channel.pulling is None:
                    channel.pulling = self._group.create_task(self._pull(channel))
            await asyncio.wait([poll.offer], timeout=wait_s)
        except asyncio.CancelledError:
            if poll.offer.done():
                await self._give_back(poll.offer.result())
            raise
        finally:
            poll.offer.cancel()
            for channel in channels:
                self._left(channel, poll)
        if poll.offer.cancelled():
            return None
        task = poll.offer.result()
        return encode_name(task.name), task

    @asynccontextmanager
    async def using(self, text: str, owner: str) -> AsyncGenerator[RemoteTask, None]:
        """The owner's task with this name. It is known here from when it holds its run: anybody can
        make up names. Raises NotFound."""
        name, task = decode_name(text, owner, self._store.namespace)
        text = encode_name(name)
        known = self._tasks.get(text) or self._guests.get(text)
        if known is None or known.over:
            known = self._guests[text] = self._made(name, task)
        known.users += 1
        try:
            yield known
        finally:
            known.users -= 1
            if known.held:
                self._tasks[text] = known
            if not known.users and self._guests.get(text) is known:
                del self._guests[text]
                if not known.held:
                    await known.close()

    async def _give_back(self, task: RemoteTask) -> None:
        self._tasks.pop(encode_name(task.name), None)
        await task.give_back()

    def _channel(self, terms: AgentTerms) -> Channel:
        return self._channels.setdefault(terms, Channel(terms))

    def _left(self, channel: Channel, poll: Poll) -> None:
        """Nothing is pulled for nobody."""
        if poll in channel.polls:
            channel.polls.remove(poll)
        if not channel.polls:
            self._problem = ""  # of tasks that nobody waits for
            self._channels.pop(channel.terms, None)
            if channel.pulling is not None:
                channel.pulling.cancel()

    def _made(self, name: TaskName, task: Task, wanted: Wanted | None = None) -> RemoteTask:
        return RemoteTask(
            self._store,
            name,
            task,
            restart_limit=self._restart_limit,
            wanted=wanted,
        )

    # ---- pulling ----------------------------------------------------------------------------

    async def _pull(self, channel: Channel) -> None:
        """While polls wait. What goes wrong is tried again: the polls end by their own time."""
        while True:
            try:
                tasks = self._store.tasks
                channel.ack_wait_s = await tasks.ensure(
                    channel.terms.name, ack_wait_s=self._ack_wait_s, change=False
                )
                self._problem = ""
                async with asyncio.TaskGroup() as group:
                    for place, priority in enumerate(PRIORITIES):
                        group.create_task(self._pull_some(channel, priority, place))
            except* RunfoldError as errors:
                self._problem = f"tasks can't be pulled: {errors.exceptions[0]}"
                log.warning("tasks of agent %s: %s", channel.terms.name, errors.exceptions[0])
            except* Exception as bugs:  # the edge of one agent's pulls: the others go on
                self._problem = f"tasks of agent {channel.terms.name} can't be pulled"
                log.error("tasks of agent %s: a bug", channel.terms.name, exc_info=bugs)
            await asyncio.sleep(PAUSE_S)

    async def _pull_some(self, channel: Channel, priority: int, place: int) -> None:
        """Of one priority, until its consumer is gone. Higher ones are asked a little earlier."""
        agent = channel.terms.name

        def on_task(task: Task) -> None:
            if self._looks >= LOOKS_MAX or self._group is None:
                self._store.tasks.nak(task, PAUSE_S)
                return
            self._looks += 1
            look = self._group.create_task(self._look(channel, task))
            look.add_done_callback(self._looked)

        async with self._store.tasks.pulling(agent, priority, on_task) as puller:
            while True:
                await asyncio.sleep(HEAD_START_S * place)
                batch = min(len(channel.polls), BATCH_MAX)
                stands_s = standing_s(channel.ack_wait_s)
                end = await puller.pull(max(batch, 1), expires_s=stands_s)
                if end.why in ("filled", "expired"):
                    self._problem = ""
                elif end.why in ("gone", "other"):
                    raise StoreUnavailable(end.text)

    def _looked(self, look: asyncio.Task[None]) -> None:
        self._looks -= 1

    async def _look(self, channel: Channel, task: Task) -> None:
        """Follow a hint until it is known that somebody is to claim the run; then offer it."""
        lease = Lease(self._store.tasks, task, channel.ack_wait_s)
        taking = Taking(
            self._store,
            self._worker,
            ack_wait_s=channel.ack_wait_s,
            restart_limit=self._restart_limit,
        )
        try:
            wanted = await taking.look(task, lease, channel.terms)
        except JournalDamaged as damage:
            log.error("%s", damage.message, extra={"run": task.run_id})
            await lease.ack()  # doctor and inbox show it
            return
        except RunfoldError as error:
            log.warning(
                "run %s is left to redelivery: %s",
                task.run_id,
                error.message,
                extra={"run": task.run_id},
            )
            return
        except Exception:  # the edge of one run: it must not end the bridge
            log.exception(
                "run %s is left to redelivery: this is a bug",
                task.run_id,
                extra={"run": task.run_id},
            )
            return
        if wanted is None:
            return
        poll, ready = channel.next(), Ready(channel, task, wanted, lease)
        if poll is not None:
            self._offer(poll, ready)
        elif wanted.answers:
            self._keep(ready)
        else:
            lease.nak()

    def _offer(self, poll: Poll, ready: Ready) -> None:
        channel, task = ready.channel, ready.task
        name = named(task, poll.owner, channel.terms, secrets.token_hex(8), channel.ack_wait_s)
        remote = self._made(name, task, ready.wanted)
        self._tasks[encode_name(remote.name)] = remote
        poll.offer.set_result(remote)

    def _keep(self, ready: Ready) -> None:
        """For a poll that comes soon. To ask for a holder takes longer than a poll waits where all
        workers are busy: given back, the run would be asked for again, and fresh ones would have
        every poll, for as long as there are some."""
        terms = ready.channel.terms
        kept = self._ready.setdefault(terms, deque())
        if len(kept) >= BATCH_MAX:
            ready.lease.nak()
            return
        kept.append(ready)
        keep_s = ready.channel.ack_wait_s / 4  # while the delivery is surely current
        asyncio.get_running_loop().call_later(keep_s, self._give_up, terms, ready)

    def _kept(self, terms: AgentTerms) -> Ready | None:
        """The one that was kept first."""
        kept = self._ready.get(terms)
        if not kept:
            return None
        found = kept.popleft()
        if not kept:
            del self._ready[terms]
        return found

    def _give_up(self, terms: AgentTerms, ready: Ready) -> None:
        kept = self._ready.get(terms, deque())
        if ready in kept:
            kept.remove(ready)
            ready.lease.nak()
        if not kept:
            self._ready.pop(terms, None)
