"""Shell: what a turn handler sees of its run: durable calls by position (R40-R46).

Why it is safe: every call is a step of the journal, `<iteration>/<position>`, decided by the step
table. An engine error (fenced, cancelled, unknown, mismatch) ends the turn: it is raised again at
every later call, and what the handler returns after it counts for nothing (R23).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from msgspec import UNSET, Struct, structs

from journal import ids, steps
from journal.errors import (
    ConcurrentUse,
    Fenced,
    ReplayMismatch,
    RunfoldError,
    StepFailed,
)
from journal.grouped import Job
from journal.handle import Journal
from journal.ids import RunId
from journal.limits import TOOL_TIMEOUT_S
from journal.messages import JSON
from journal.positions import (
    Furthest,
    decided,
    earlier_call,
    later,
    moved,
    placing,
    step_at,
    told,
)
from journal.records import (
    Asked,
    Mode,
    StepCompleted,
    StepError,
    StepStarted,
)
from journal.stepping import check_stop
from journal.steps import Probe, completed_value, make_call
from journal.stops import AwaitDecisions, BoundReached
from journal.unknown import Ways
from journal.values import Unrecordable, normalise, recordable

from .agent import Agent
from .calls import model_failed, perform_call
from .children import answer_of, spawning
from .tools import OnUnknown, Replay, ToolCall

T = TypeVar("T")


class ToolResult(Struct, frozen=True, kw_only=True):
    """What a call came to: `output`; or an `error` that the tool declared; or `interrupted`, with
    what it reported (`partial`): then it may or may not have taken effect (R27)."""

    output: JSON = None
    error: str | None = None
    interrupted: bool = False
    partial: JSON = None


class Input(Struct, frozen=True, kw_only=True):
    """A message for the running agent, placed in this turn."""

    request_id: str
    mode: Mode
    content: JSON


class Call(Struct, frozen=True, kw_only=True):
    """A durable call of a turn handler. `approval`: the text a person decides on; None: none is
    needed. `on_unknown`, `probe`: as for `@write`."""

    name: str
    input: JSON
    fn: Callable[[ToolCall], Awaitable[JSON]]
    replay: Replay
    on_unknown: OnUnknown = "reconcile"
    probe: Probe | None = None
    approval: str | None = None
    timeout_s: float = TOOL_TIMEOUT_S


class Context:
    """One turn of one run. One task at a time; `parallel` is for several calls at once (R46)."""

    def __init__(self, journal: Journal, agent: Agent) -> None:
        started = journal.fold.started
        assert started is not None
        self.journal = journal
        self.run_id = RunId(journal.run_id)
        self.agent = agent.name
        self.iteration = journal.fold.iteration
        self.attempt = journal.fold.attempt
        self.input: JSON = started.input
        self._bounds = agent.bounds
        self._position = 0
        self._seen: Counter[tuple[str, str]] = Counter()
        self._safe_seen: Counter[tuple[str, str]] = Counter()
        self._placed: set[str] = set()
        self._furthest = Furthest()
        self.ended: Exception | None = None

    # ---- state ------------------------------------------------------------------------------

    def load_checkpoint(self) -> JSON:
        """The `state` of the last commit; None before the first."""
        return self.journal.fold.state

    async def child(self, run_id: RunId) -> JSON:
        """The answer of a child run that has ended. Raises ChildFailed where it has none, and
        LookupError while it runs: wait with `Continue(until_child=…)`."""
        return await answer_of(self.journal, run_id)

    async def heartbeat(self) -> None:
        """Raises RunCancelled or Fenced as soon as it is known; for long work between calls."""
        await asyncio.sleep(0)
        self._check()

    async def put_stream(self, tokens: str) -> None:
        """Show followers a piece of an answer that is being made; it is no record (R38)."""
        self._check()
        await self.journal.store.preview(self.run_id, tokens)

    # ---- calls ------------------------------------------------------------------------------

    async def model(self, fn: Callable[[], Awaitable[JSON]]) -> JSON:
        """The recorded result of `fn`, a model request. What it raises is not recorded and ends
        the attempt (R45)."""
        (position,) = self._take(1)
        self._check_moved(position)
        call = make_call(position, "model", "", None, unsafe=False)

        async def perform(start: StepStarted) -> StepCompleted:
            try:
                value = await fn()
            except Exception as error:
                raise model_failed(self.journal, position, error) from error
            return StepCompleted(
                step=position, result=recordable(value, f"the result of {position}")
            )

        completed = await self._engine(self.journal.step(call, perform))
        return completed_value(completed)[0]

    async def tool(self, call: Call) -> ToolResult:
        """The result of the call, made at most once where it is UNSAFE (R42)."""
        return (await self.parallel(call))[0]

    async def parallel(self, *calls: Call) -> tuple[ToolResult, ...]:
        """Several calls at once; positions and results are in the order of the arguments (R35).
        Where some wait for approval, the others are made first."""
        return await self._engine(self._parallel(calls, self._take(len(calls))))

    async def _parallel(
        self, calls: Sequence[Call], positions: Sequence[str]
    ) -> tuple[ToolResult, ...]:
        journal = self.journal
        results: dict[int, StepCompleted] = {}
        asks: list[Asked] = []
        jobs: dict[int, Job] = {}
        for index, (position, call) in enumerate(zip(positions, calls, strict=True)):
            made = self._made(call, position)
            ways = self._ways(call, made)
            if ways.honoured is None:
                self._check_moved(position)
            if position not in journal.fold.steps and ways.honoured is None:
                answer = decided(journal.fold, made, call.approval)
                if isinstance(answer, Asked):
                    asks.append(answer)
                    continue
                if isinstance(answer, StepError):
                    results[index] = await self._refuse(position, answer)
                    continue
                made = structs.replace(made, permit=answer)
            jobs[index] = (made, partial(perform_call, journal, call.fn, call.timeout_s), ways)
        if jobs:
            completed = await journal.steps(list(jobs.values()))
            results.update(zip(jobs, completed, strict=True))
        if asks:
            raise AwaitDecisions(tuple(asks))
        return tuple(_result(results[index]) for index in range(len(calls)))

    def _made(self, call: Call, position: str) -> steps.Call:
        return make_call(
            position,
            "tool",
            ids.tool_name(call.name),
            normalise(call.input, f"the input of {position}"),
            unsafe=call.replay is not Replay.SAFE,
            timeout_s=call.timeout_s,
            policy=call.on_unknown,
        )

    def _ways(self, call: Call, made: steps.Call) -> Ways:
        """What the same calls of earlier attempts are to this one, by tool, input and occurrence
        (R28, R44): an unsafe one is it; a safe one lends its key."""
        what = (made.tool, made.digest)
        safe_seen = self._safe_seen[what]
        self._safe_seen[what] += not made.unsafe
        key, honoured = earlier_call(self.journal.fold, made, self._seen[what], safe_seen)
        if key:
            return Ways(key=key)
        # an unsafe call finds its own, whatever safe ones saw
        self._seen[what] += made.unsafe and honoured is not None
        return Ways(probe=call.probe, honoured=honoured)

    async def _refuse(self, position: str, error: StepError) -> StepCompleted:
        body = StepCompleted(step=position, error=error, via="refused")
        refused = await self.journal.append(
            lambda fold: None if fold.finished or position in fold.steps else body
        )
        if refused is None:
            raise Fenced(f"step {position} was completed by somebody else", run_id=self.run_id)
        return refused

    # ---- inputs and children ----------------------------------------------------------------

    async def place_inputs(self, mode: Mode) -> tuple[Input, ...]:
        """The queued inputs of this mode, placed here: once and for ever, in order (R62). Those
        that an earlier attempt was told come first, at the first call."""
        (position,) = self._take(1)
        if position in self.journal.fold.steps:
            raise self._mismatch(position, "place_inputs")
        place = partial(
            placing,
            iteration=self.iteration,
            position=self._position - 1,
            mode=mode,
            furthest=self._furthest,
        )

        async def place_all() -> None:
            while await self.journal.append(place) is not None:
                pass

        await self._engine(place_all())
        fold = self.journal.fold
        before = [] if mode in self._placed else told(fold, mode)
        self._placed.add(mode)
        return tuple(
            Input(request_id=known.request_id, mode=known.mode, content=known.content)
            for known in [*before, *fold.placed_at(position)]
            if known.mode == mode
        )

    async def spawn(self, agent: str, input: JSON, *, name: str, priority: int = 0) -> RunId:
        """Start a child run under an id derived from this run and `name`; the same call is the
        same child. Its end wakes a `Continue(until_child=…)`; a failed or cancelled parent cancels
        its children (R57)."""
        (position,) = self._take(1)
        child, call, perform = spawning(
            self.journal, position, agent, input, name=name, priority=priority
        )
        self._check_moved(position)
        await self._engine(self.journal.step(call, perform))
        return child

    # ---- the engine -------------------------------------------------------------------------

    def _take(self, count: int) -> list[str]:
        """The next positions."""
        self._check()
        first = self._position
        self._position += count
        if self._position > self._bounds.calls_per_iteration:
            self.ended = BoundReached("calls_per_iteration", f"{self._position} calls in a turn")
            raise self.ended
        return [step_at(self.iteration, first + index) for index in range(count)]

    def _check(self) -> None:
        """Raises what ended this turn: at every call of it, whatever the handler makes of it."""
        run = self.run_id
        self.check_cut_off()
        if self.ended is None:
            fold = self.journal.fold
            if (fold.iteration, fold.attempt) != (self.iteration, self.attempt):
                self.ended = ConcurrentUse(f"turn {self.iteration} has ended", run_id=run)
            elif self.journal.lost:
                self.ended = Fenced(f"run {run} is no longer held here", run_id=run)
        if self.ended is not None:
            raise self.ended
        try:
            check_stop(self.journal)
        except RunfoldError as error:
            self.ended = error
            raise

    def check_cut_off(self) -> None:
        """A turn that cut off a durable call of its own has failed: nobody knows what it saw."""
        if self.ended is None and self.journal.cut_off:
            self.ended = StepFailed(
                f"run {self.run_id}: the turn cut off a durable call of its own",
                step=str(self.iteration),
                run_id=self.run_id,
                hint="put time limits inside the calls (timeout_s), not around them",
            )

    async def _engine(self, work: Awaitable[T]) -> T:
        """Await work of the engine; its errors end the turn."""
        try:
            return await work
        except (RunfoldError, AwaitDecisions, Unrecordable) as error:
            self.ended = self.ended or error
            raise

    def _check_moved(self, position: str) -> None:
        """A new call in front of a recorded one: the code has changed, and what stood here before
        would be made again behind it (R43)."""
        if position not in self.journal.fold.steps and (later := self.leftover()) is not None:
            raise self._mismatch(position, f"a new call, in front of the one at {later}")

    def _mismatch(self, position: str, attempted: str) -> ReplayMismatch:
        error = moved(self.journal.fold, position, attempted)
        self.ended = self.ended or error
        return error

    def leftover(self) -> str | None:
        """A recorded call behind the last one this turn asked for: the code has changed (R43)."""
        fold = self.journal.fold
        if self._furthest.before(fold, self.iteration, self._position):
            return None
        return later(fold, self.iteration, self._position)


def _result(completed: StepCompleted) -> ToolResult:
    if completed.error is not UNSET:
        return ToolResult(error=completed.error.message, output=completed.error.data)
    if completed.interrupted is not UNSET:
        return ToolResult(interrupted=True, partial=completed.interrupted.partial)
    return ToolResult(output=completed.result)
