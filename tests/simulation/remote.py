"""Workers over HTTP: examples/http_worker.py and its lower half, as coroutines, one task at a time;
and the wire between them and the bridges' own operations (bridge/work_api.py), without uvicorn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from bridge import remote_turns
from bridge.offers import RemoteTasks
from bridge.problems import STATUS_BY_CODE
from bridge.remote_calls import append
from bridge.remote_turns import Completes, Continues, Fails, Pauses
from bridge.work_api import Appends, Beats, Polls, Reads
from journal.errors import RunfoldError
from worker.tools import ToolCall

from .members import BridgeProcess, Member

if TYPE_CHECKING:
    from .world import World

OWNER = "crew"
POLL_S = 5.0
REQUEST_S = 8.0
BUDGET_S = 30.0
TOOL_S = 4.0
Body = dict[str, Any]

VERBS: dict[str, tuple[type[Any], Callable[[Any, Any], Awaitable[Any]]]] = {
    "journal.read": (Reads, lambda t, b: remote_turns.read(t, b.claim)),
    "journal.append": (Appends, lambda t, b: append(t, b.id, b.claim, b.record)),
    "heartbeat": (Beats, lambda t, b: remote_turns.beat(t, b.claim, b.preview)),
    "release": (Reads, lambda t, b: remote_turns.release(t, b.claim)),
    "complete": (Completes, remote_turns.end),
    "continue": (Continues, remote_turns.end),
    "pause": (Pauses, remote_turns.end),
    "fail": (Fails, remote_turns.end),
}


class Stop(Exception):
    """The bridge has ended this turn."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Unanswered(Exception):
    """Nobody knows whether the bridge did what it was asked."""


async def served(tasks: RemoteTasks, verb: str, task: str, body: Body) -> tuple[int, Any]:
    """What a bridge answers: the status, and the JSON."""
    try:
        if verb == "poll":
            asked = msgspec.convert(body, Polls)
            found = await tasks.poll(OWNER, asked.agents, asked.wait_s)
            if found is None:
                return 204, {}
            text, given = found
            return 200, {"task": text, "ack_wait_s": given.ack_wait_s}
        shape, do = VERBS[verb]
        async with tasks.using(task, OWNER) as given:
            answer = await do(given, msgspec.convert(body, shape))
        return 200, msgspec.json.decode(msgspec.json.encode(answer))
    except RunfoldError as error:
        return STATUS_BY_CODE.get(error.code, 500), {"code": error.code, "detail": str(error)}


class RemoteWorker(Member):
    """A process that works tasks over HTTP."""

    role = "remote"

    def __init__(self, world: World, index: int) -> None:
        super().__init__(world, index)
        self.draining = False

    async def body(self) -> None:
        self.draining = False
        poll = {"agents": [{"name": "remote"}], "wait_s": POLL_S}
        while not self.draining:
            given = await self.ask("poll", "", poll)
            if given:
                await Task(self, given).work()

    def finish(self) -> None:
        self.draining = True

    # ---- requests -------------------------------------------------------------------------------

    async def ask(self, verb: str, task: str, body: Body, timeout_s: float = REQUEST_S) -> Body:
        """Until it is answered, each time with the same body."""
        while True:
            try:
                return await self.once(verb, task, body, timeout_s)
            except Unanswered:
                if self.draining and verb == "poll":
                    return {}
                await asyncio.sleep(self.world.rng.uniform(0.05, 0.5))

    async def once(self, verb: str, task: str, body: Body, timeout_s: float) -> Body:
        """One try. Raises Unanswered, Stop."""
        bridges = [
            one
            for one in self.world.members
            if isinstance(one, BridgeProcess) and one.up and one.tasks is not None
        ]
        if not bridges:
            raise Unanswered
        answer = self.world.http.send(self, self.world.rng.choice(bridges), verb, task, body)
        try:
            await asyncio.wait([answer], timeout=timeout_s)
        finally:
            answer.cancel()  # the bridge sees that nobody waits
        if answer.cancelled():
            raise Unanswered
        found = answer.result()
        if found is None or found[0] >= 500:
            raise Unanswered
        status, told = found
        if status in (200, 204):
            return told
        if status in (404, 409, 410):
            raise Stop(told["code"])
        raise AssertionError(f"{verb} was refused: {status} {told}")


class Task:
    """A delivery of a run to this process: its claim, its numbers, its lease; for all its turns."""

    def __init__(self, worker: RemoteWorker, given: Body) -> None:
        self.worker = worker
        self.world = worker.world
        self.name: str = given["task"]
        self.ack_wait_s: float = given["ack_wait_s"]
        self.stop: Stop | None = None
        self.cancelled = False
        self._claim: Body = {}
        self._number = 0

    async def work(self) -> None:
        beating: asyncio.Task[None] | None = None
        try:
            while True:
                turn = await self._ask("journal.read", {})
                self._claim = {"claim": turn["claim"]}
                if beating is None:
                    beating = asyncio.create_task(self._beat_on(), name="heartbeat")
                if not await self._play(turn):
                    return
        except Stop as stop:
            self.world.trace.note("stopped", self.worker.process.name, stop.code)
        finally:
            if beating is not None:
                beating.cancel()

    async def _play(self, turn: Body) -> bool:
        """One turn; whether the next one is this task's, too."""
        placed = -1
        while True:
            ctx = Ctx(self, turn)
            verb, fields = await handler(ctx)
            ctx.check()
            more = {"calls": ctx.calls, **fields}
            if verb == "complete" and ctx.placed == placed:
                more["leave_inputs"] = True
            try:
                return (await self.ask_once(verb, more))["more"]
            except Stop as stop:
                if stop.code != "inputs_queued":
                    raise
                placed = ctx.placed
                turn = await self._ask("journal.read", {})

    async def _ask(self, verb: str, body: Body) -> Body:
        return await self.worker.ask(verb, self.name, {**self._claim, **body})

    async def ask_once(self, verb: str, body: Body) -> Body:
        self._number += 1
        return await self._ask(verb, {"id": self._number, **body})

    def hear(self, answer: Body) -> None:
        self.cancelled = self.cancelled or bool(answer.get("cancelled"))

    async def beat(self) -> None:
        self.hear(await self._ask("heartbeat", {}))

    async def _beat_on(self) -> None:
        third = self.ack_wait_s / 3
        while True:
            await asyncio.sleep(third)
            try:
                self.hear(await self.worker.once("heartbeat", self.name, self._claim, third))
            except Unanswered:
                pass
            except Stop as stop:
                self.stop = stop
                return


class Ctx:
    """What a handler sees of its run."""

    def __init__(self, task: Task, turn: Body) -> None:
        self.state, self.iteration = turn["state"], turn["iteration"]
        self.run = turn["run"]
        self.calls = self.placed = 0
        self._task = task
        self._recorded = {s["position"]: s for s in turn["steps"] if s["status"] == "completed"}
        self._told: list[Body] = turn["told"]
        self._made: set[int] = set()
        self._ended: Stop | None = None

    def check(self) -> None:
        self._ended = self._ended or self._task.stop
        if self._ended is None and self._task.cancelled:
            self._ended = Stop("cancelled")
        if self._ended is not None:
            raise self._ended

    async def pay(self, text: str) -> Any:
        """A write; what it came to."""
        record: Body = {"position": self._take(), "kind": "tool", "tool": "pay"}
        record |= {"input": {"text": text}, "replay": "unsafe", "timeout_s": TOOL_S}
        found = self._recorded.get(record["position"]) or await self._start(record)
        decision = found.get("decision", "recorded")
        while decision != "recorded":
            if decision == "call":
                found = await self._call(record, found, text)
            else:
                found = await self._complete(record, found["n"], {"not_called": "came late"})
            decision = found["decision"]
        if "interrupted" in found:
            return "interrupted"
        return f"error {found['error']['message']}" if "error" in found else found["result"]

    async def place_inputs(self) -> list[Any]:
        record = {"type": "input.placed", "position": self._take(), "mode": "steer"}
        placed = (await self._append(record))["inputs"]
        self.placed += len(placed)
        told, self._told = self._told, []
        return [one["content"] for one in [*told, *placed] if one["mode"] == "steer"]

    def _take(self) -> int:
        self.check()
        self.calls += 1
        return self.calls - 1

    async def _append(self, record: Body) -> Body:
        try:
            answer = await self._task.ask_once("journal.append", {"record": record})
        except Stop as stop:
            self._ended = stop
            raise
        self._task.hear(answer)
        return answer

    async def _start(self, record: Body) -> Body:
        asked_at = asyncio.get_running_loop().time()
        return {**await self._append({"type": "step.started", **record}), "asked_at": asked_at}

    async def _call(self, record: Body, start: Body, text: str) -> Body:
        n = start["n"]
        assert n not in self._made, f"start {n} was answered twice, and its call was made"
        if why := await self._too_late(start["asked_at"]):
            return await self._complete(record, n, {"not_called": why})
        self._made.add(n)
        step = f"{self.iteration}/{record['position']}"
        call = ToolCall(
            run_id=self.run, step=step, name="pay", input=record["input"], key=start["key"]
        )
        try:
            async with asyncio.timeout(TOOL_S):
                made = await self._task.world.act(call, text)
        except TimeoutError:  # whether it happened is unknown: its policy decides, or a person
            return await self._start(record)
        return await self._complete(record, n, {"result": made})

    async def _too_late(self, asked_at: float) -> str:
        loop = asyncio.get_running_loop()
        asked = asked_at
        while loop.time() - asked >= self._task.ack_wait_s / 3:
            asked = loop.time()
            await self._task.beat()
        if self._task.cancelled:
            return "the run was cancelled"
        return "recording its start took too long" if loop.time() - asked_at > BUDGET_S else ""

    async def _complete(self, record: Body, start: int, outcome: Body) -> Body:
        completed = {"type": "step.completed", "position": record["position"], "start": start}
        await self._append({**completed, **outcome})
        if "not_called" in outcome:
            outcome = {"error": {"message": outcome["not_called"]}}
        return {**json.loads(json.dumps(outcome)), "decision": "recorded"}


async def handler(ctx: Ctx) -> tuple[str, Body]:
    """A write, a wait for a moment, what people said, a write."""
    if ctx.iteration == 0:
        return "continue", {"state": [await ctx.pay("paid 20")], "delay_s": 0.5}
    heard = await ctx.place_inputs()
    calls = [*ctx.state, await ctx.pay("paid 21")]
    heard += await ctx.place_inputs()
    return "complete", {"message": {"calls": calls, "heard": heard}}
