"""A schedule: a model server, real workers and bridges on it, people, agents' outside, faults."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple

from kit.simulated.client import ModelClient
from kit.simulated.server import ModelServer
from msgspec import Struct

from journal.codec import Entry, decode
from journal.ids import RunId, from_subject_token, subject_token
from journal.records import Record, RunPurged, StepStarted
from journal.shards import shard_of
from journal.stores.jetstream_streams import stream_name, subject_prefix
from journal.waits import parse_instant
from worker.tools import ToolCall

from .agents import AGENTS, NEEDS, Here
from .faults import Chaos, happen, mend
from .loop import PROCESS, START_S, Process, Task, VirtualLoop, place
from .members import Alone, BridgeProcess, Member, WorkerProcess
from .patches import EPOCH, EPOCH_NS
from .people import Person, Said
from .plans import REMOTE, WINDOW_S, Plan
from .purgers import PurgerProcess
from .remote import RemoteWorker
from .trace import Trace
from .wire import Http

NAMESPACE: Final = "runfold"
SHARDS: Final = 4
"""Journal streams of every fifth schedule; the others have one."""

QUIET_S: Final = 150.0
"""After the last fault the world comes to rest within this, in virtual seconds: above a read's and
an append's budget, a sweep of every worker and the time limits of calls, one after another."""

SKEW_S: Final = 3.5
"""Between two clocks of a world, at most: a deadline is written by one and read by the other."""

POLL_S: Final = 0.25
REQUEST: Final = re.compile(rb'"request_id":"(p?[0-9]+)"')
ENDED: Final = frozenset({"completed", "failed", "cancelled"})
OUTSIDE: Final = frozenset(name for name in sys.modules if name.startswith("kit.simulated."))


class Broken(Exception):
    """An invariant does not hold."""


class Effect(Struct, frozen=True):
    """Something that an agent did outside."""

    run: str
    step: str
    key: str
    text: str


class UnderWay(NamedTuple):
    """A call that runs, unless its process is dead; nothing is made beside it until `deadline_s`,
    a POSIX time."""

    process: Process
    deadline_s: float


class World:
    """`calls`: calls of writes, by run and step; `under_way` those that run; `effects` what came of
    them. `said`: what people said, with what they were answered. `injected`: faults by kind."""

    def __init__(self, plan: Plan, loop: VirtualLoop, trace: Trace, purgers: int = 0) -> None:
        self.plan = plan
        self.loop = loop
        self.trace = trace
        self.rng = random.Random(f"world {plan.seed}")
        self.injected: Counter[str] = Counter()
        self.context = contextvars.copy_context()
        self.server = ModelServer(
            now=lambda: EPOCH_NS + int((loop.time() - START_S) * 1e9),
            rng=random.Random(f"server {plan.seed}"),
        )
        self.shards = SHARDS if plan.seed % 5 == 4 else 1
        self.server.provision(NAMESPACE, self.shards)
        loop.outside = OUTSIDE
        lots = random.Random(f"chaos {plan.seed}")
        self.chaos = Chaos(plan.odds, lots, self.injected, trace)
        self.server.policy = self.chaos
        self.calls: Counter[tuple[str, str]] = Counter()
        self.under_way: defaultdict[tuple[str, str], list[UnderWay]] = defaultdict(list)
        self.effects: list[Effect] = []
        self.keyed: dict[str, str] = {}
        self.said: list[Said] = []
        self.partitioned: list[ModelClient] = []
        self.stalls = 0
        self.rested_s = 0.0
        self._refused: set[str] | None = None
        self.ending = self.over = False
        self.http = Http(self)
        wanted = sorted({run.agent for run in plan.runs} - {REMOTE}) or ["clerk"]
        names = sorted({need for name in wanted for need in NEEDS.get(name, (name,))})
        self.agents = [AGENTS[name] for name in names]
        self.person = Person(self)
        self.members: list[Member] = [
            *(WorkerProcess(self, index) for index in range(plan.workers)),
            *(BridgeProcess(self, index) for index in range(plan.bridges)),
            *(RemoteWorker(self, index) for index in range(plan.remotes)),
            *(Alone(self, index, run) for index, run in enumerate(plan.runs) if run.alone),
            *(PurgerProcess(self, index) for index in range(purgers)),
        ]
        Here.world = self

    # ---- the schedule ---------------------------------------------------------------------------

    async def play(self) -> None:
        """From the first start to the end of the last process. Raises Broken where the world does
        not come to rest."""
        for member in self.members:
            member.start()
        self.person.start()
        for event in self.plan.events:
            self.later(event.at_s, lambda event=event: happen(self, event))
        last_s = max((event.over_s for event in self.plan.events), default=0.0)
        while (passed_s := self.loop.time() - START_S) < WINDOW_S:
            if passed_s > last_s and not self.restless():
                break
            await asyncio.sleep(POLL_S)
        self._calm_down()
        deadline = self.loop.time() + QUIET_S
        while restless := self.restless():
            if self.loop.time() > deadline:
                raise Broken(f"no rest: {restless}\n{self.loop.stacks()}")
            await asyncio.sleep(POLL_S)
        self.rested_s = self.loop.time() - deadline + QUIET_S
        self._check_idle()
        if self.plan.orderly:
            await self._end()

    def _calm_down(self) -> None:
        self.trace.note("quiet")
        self.chaos.calm_down()
        self.server.resume()
        for client in list(self.partitioned):
            mend(self, client)
        for member in self.members:
            member.calm_down()

    def _check_idle(self) -> None:
        """Nothing is kept for a run when all have ended."""
        for stream in self.server.streams.values():
            for consumer in stream.consumers.values():
                if consumer.pending:
                    self.loop.failures.append(f"{consumer.name} waits for acks")
        ready = {
            one.process.name
            for one in self.members
            if isinstance(one, WorkerProcess) and one.up and one.ready
        }
        for client in self.server.clients:
            if client.process in ready and client.wire.session is not None:
                subjects = [one.subject for one in client.wire.session.subscribed.values()]
                if len(subjects) > 5 + 3 * len(self.agents):
                    self.loop.failures.append(f"{client.process} listens to {subjects}")

    def _at_work(self) -> list[Task]:
        """Tasks of workers that are about a run."""
        return [
            task
            for task in self.loop.pending()
            if task.process is not None
            and not task.process.dead
            and " run " in f" {task.get_name()} "
        ]

    async def _end(self) -> None:
        self.trace.note("end")
        self.ending = True
        doors = [one for one in self.members if isinstance(one, BridgeProcess)]
        for each in ([one for one in self.members if one not in doors], [*doors, self.person]):
            for member in each:
                member.finish()
            mains = [one.main for one in each if one.up]
            if mains:
                await asyncio.wait(mains, timeout=60)
            if late := [main.get_name() for main in mains if not main.done()]:
                raise Broken(f"did not end: {late}\n{self.loop.stacks()}")
        await asyncio.sleep(1)  # what was on its way
        self.over = True

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do it then; it belongs to no process."""
        self.loop.call_later(delay_s, what, context=self.context)

    def restless(self) -> str:
        """Why the world is not at rest; "" where it is."""
        for run in self.plan.runs:
            if run.run not in self.runs():
                return f"run {run.run} has not started"
        for run in self.runs():
            if (status := self.status(run)) not in ENDED:
                return f"run {run} is {status}"
        for name in ("TASKS", "SIGNALS"):
            messages = self.server.streams[f"RUNFOLD_{name}"].messages
            if messages:
                subjects = [message.subject for message in messages.values()]
                return f"{name} holds {subjects}"
        if self.loop.time() < self.chaos.lands_by:
            return "something lands late"
        for task in self._at_work():
            assert task.process is not None
            return f"{task.process.name} is at {task.get_name()}, at {place(task)}"
        return self.person.busy()

    # ---- what the agents do outside -------------------------------------------------------------

    async def look(self, what: str) -> str:
        await self.think()
        return f"found {what}"

    async def act(self, call: ToolCall, text: str) -> str:
        self.calls[call.run_id, call.step] += 1
        self.trace.note("call", call.run_id, call.step, call.key)
        with self._permitted(call):
            await self._trouble()
            await self.think()
            self.effects.append(Effect(call.run_id, call.step, call.key, text))
            self.keyed[call.key] = text
            self.trace.note("effect", call.run_id, call.step, call.key)
            await self._trouble()
            await self.think()
            return text

    @contextlib.contextmanager
    def _permitted(self, call: ToolCall) -> Generator[None]:
        """Each call of an unsafe write has a start of its own, and none is made beside an earlier
        one before the deadline of that; else the schedule ends here."""
        what = call.run_id, call.step
        starts = [
            one
            for one in self.records(call.run_id)
            if isinstance(one, StepStarted) and one.step == call.step
        ]
        unsafe = any(one.replay == "unsafe" for one in starts)
        if self.calls[what] > len(starts) and unsafe:
            self._broken(f"{what} is called, call {self.calls[what]}, start {len(starts)}")
        now_s = EPOCH.timestamp() + self.loop.time() - START_S
        for other in self.under_way[what]:
            if not other.process.dead and now_s < other.deadline_s:
                self._broken(f"{what} is called beside the call in {other.process.name}")
        process = PROCESS.get()
        assert process is not None
        until_s = parse_instant(starts[-1].deadline).timestamp() - SKEW_S if unsafe else 0.0
        made = UnderWay(process, until_s)
        self.under_way[what].append(made)
        try:
            yield
        finally:
            self.under_way[what].remove(made)

    def _broken(self, text: str) -> None:
        self.loop.failures.append(text)
        self.loop.stop()

    async def _trouble(self) -> None:
        """Perhaps the process of a call dies in it, or stands still."""
        if self.chaos.quiet or self.rng.random() >= self.plan.odds.in_call:
            return
        process = PROCESS.get()
        member = next(one for one in self.members if one.process is process)
        self.trace.note("fault", "in call", member.process.name)
        if self.rng.random() < 0.5:
            self.injected["killed in call"] += 1
            member.kill()
        else:
            self.injected["stalled in call"] += 1
            member.stall(self.rng.uniform(0.1, 6.0))
        await asyncio.sleep(0)

    async def think(self) -> None:
        delay_s = self.rng.choice((0.0, 0.0, 0.01, 0.2, 0.9))
        if delay_s:
            await asyncio.sleep(delay_s * self.rng.uniform(0.5, 1.5))

    def probe(self, key: str) -> str | None:
        return self.keyed.get(key)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    # ---- looking at the server ------------------------------------------------------------------

    def runs(self) -> list[RunId]:
        """Of which there is a journal, stream by stream in the order of their starts."""
        return [
            from_subject_token(subject.removeprefix(subject_prefix(NAMESPACE, shard)))
            for shard in range(self.shards)
            for subject in self.server.streams[stream_name(NAMESPACE, shard)].by_subject
        ]

    def status(self, run: str) -> str:
        return self._messages(run)[-1].headers["Runfold-Status"]

    def entries(self, run: str) -> list[Entry]:
        """The run's journal as it is stored, and what a purge has taken of it."""
        return [
            Entry(decode(message.data), message.data, message.headers.get("Runfold-Status"))
            for message in self._messages(run)
        ]

    def records(self, run: str) -> list[Record]:
        return [entry.record for entry in self.entries(run)]

    def purged(self, run: str) -> bool:
        """Whether there is a tombstone."""
        return isinstance(self.records(run)[-1], RunPurged)

    def stamps_s(self, run: str) -> list[float]:
        """When the server stored each of its records, by its own clock."""
        return [message.stamp / 1e9 for message in self._messages(run)]

    def buried_s(self, run: str) -> float:
        """When its last record was stored."""
        return self.stamps_s(run)[-1]

    def removed(self, run: str) -> bool:
        """Whether something of it is not there any more."""
        return any(message.died for message in self._messages(run))

    def kept(self, run: str) -> dict[str, list[int]]:
        """Request ids of the run's signals that the SIGNALS stream had, with their sequences."""
        stream = self.server.streams["RUNFOLD_SIGNALS"]
        found: dict[str, list[int]] = {}
        for message in [*stream._dead, *stream.messages.values()]:
            if message.subject.startswith(f"{NAMESPACE}.signal.{run}."):
                for request in REQUEST.findall(message.data):
                    found.setdefault(request.decode(), []).append(message.seq)
        return found

    def refused(self) -> set[str]:
        """Request ids that stand in REJECTED."""
        if self._refused is None:
            messages = self.server.streams["RUNFOLD_REJECTED"].messages.values()
            payloads = [json.loads(message.data)["payload"].encode() for message in messages]
            self._refused = {found.decode() for one in payloads for found in REQUEST.findall(one)}
        return self._refused

    def _messages(self, run: str) -> list[Any]:
        shard = shard_of(RunId(run), self.shards)
        stream = self.server.streams[stream_name(NAMESPACE, shard)]
        subject = subject_prefix(NAMESPACE, shard) + subject_token(RunId(run))
        purged = [message for message in stream._dead if message.subject == subject]
        return [*purged, *stream.by_subject[subject]] if purged else stream.by_subject[subject]
