"""Calls at the same time (R35, R46): in one reply of a model, and in a handler."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit.build import RUN, FaultyStore, Killed, asks, folded, request
from kit.turns import agent_of, ended

from journal.doors import signal
from journal.errors import ConcurrentUse, Fenced, StepFailed, Transient
from journal.messages import JSON, Reply
from journal.records import StepCompleted, StepStarted
from journal.terms import Complete, Next
from journal.views import AwaitingApproval, Indeterminate
from runfold.testing import ScriptedModel, say
from worker.agent import Agent
from worker.context import Call, Context
from worker.runner import run
from worker.tools import SAFE, UNSAFE, ToolCall, read, write

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(30)]

both = pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
kinds = pytest.mark.parametrize("kind", ["loop", "handler"])
MEET_S = 5.0


class Meeting:
    """Calls that end only once `parties` of them run, in the order `order` says; each once."""

    def __init__(self, parties: int, order: tuple[int, ...] = ()) -> None:
        self.barrier = asyncio.Barrier(parties)
        self.order = order
        self.ended: list[int] = []
        self.begun: list[int] = []
        self.raising: dict[int, BaseException] = {}
        self._turn = asyncio.Condition()

    async def attend(self, n: int) -> str:
        self.begun.append(n)
        async with asyncio.timeout(MEET_S):
            await self.barrier.wait()
            if self.order:
                async with self._turn:
                    await self._turn.wait_for(lambda: self.order[len(self.ended)] == n)
        async with self._turn:
            self.ended.append(n)
            self._turn.notify_all()
        if n in self.raising:
            raise self.raising[n]
        return f"result {n}"


def reply(count: int, tool: str = "look") -> Reply:
    return asks(*(request(tool, {"n": n}, id=f"c{n}") for n in range(count)))


def agent_for(
    kind: str, meeting: Meeting, count: int, *, safe: bool = True, **options: Any
) -> tuple[Agent, ScriptedModel]:
    """An agent that makes `count` calls of one reply, or in one `parallel`."""
    model = ScriptedModel(reply(count), say("Done."))

    @read
    async def look(n: int) -> str:
        return await meeting.attend(n)

    @write(name="look", approval=False)
    async def put(n: int) -> str:
        return await meeting.attend(n)

    async def handler(ctx: Context) -> Next:
        async def fn(call: ToolCall) -> JSON:
            value: Any = call.input
            return await meeting.attend(value["n"])

        replay = SAFE if safe else UNSAFE
        calls = [Call(name="look", input={"n": n}, fn=fn, replay=replay) for n in range(count)]
        results = await ctx.parallel(*calls)
        return Complete([result.output for result in results])

    if kind == "handler":
        return agent_of(handler), model
    return Agent("helpdesk", model=model, tools=[look if safe else put], **options), model


def answers(kind: str, model: ScriptedModel, outcome: Any) -> list[Any]:
    if kind == "handler":
        return outcome.message.content
    return [message.content for message in model.requests[-1] if message.role == "tool"]


@both
@kinds
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_reads_run_at_once_and_their_results_keep_the_order_of_the_calls(
    shared: bool, kind: str, order: tuple[int, ...]
):
    store, meeting = FaultyStore(shared=shared), Meeting(3, order)
    agent, model = agent_for(kind, meeting, 3)
    outcome = await run(store, agent, RUN, "go")
    expected = ["result 0", "result 1", "result 2"]
    assert answers(kind, model, outcome) == expected
    assert meeting.ended == list(order)
    assert await run(store, agent, RUN) == outcome
    assert len(meeting.begun) == 3


@both
@kinds
async def test_each_call_has_its_own_start_before_and_result_after_it(shared: bool, kind: str):
    store, meeting = FaultyStore(shared=shared), Meeting(3, (2, 0, 1))
    agent, _ = agent_for(kind, meeting, 3)
    await run(store, agent, RUN, "go")
    records = [
        r
        for r in (await store.load(RUN)).records
        if isinstance(r, StepStarted | StepCompleted) and not r.step.startswith("llm")
    ]
    starts = [r for r in records if isinstance(r, StepStarted)]
    ends = [r for r in records if isinstance(r, StepCompleted)]
    assert len({r.step for r in starts}) == len(starts) == len(ends) == 3
    began = {r.step: r.n for r in starts}
    assert all(began[r.step] < r.n for r in ends)
    assert [str(r.result) for r in ends] == ["result 2", "result 0", "result 1"]
    assert len({r.key for r in starts}) == 3


@both
async def test_a_read_that_fails_does_not_cut_the_others(shared: bool):
    store, meeting = FaultyStore(shared=shared), Meeting(3, (1, 0, 2))
    meeting.raising[1] = KeyError("gone")
    agent, model = agent_for("loop", meeting, 3)
    assert await run(store, agent, RUN, "go") == ended("Done.")
    told = answers("loop", model, None)
    assert [told[0], told[1]["error"]["type"], told[2]] == ["result 0", "KeyError", "result 2"]


@both
@kinds
async def test_one_that_fails_for_now_keeps_the_results_of_the_others(shared: bool, kind: str):
    store, meeting = FaultyStore(shared=shared), Meeting(3, (1, 0, 2))
    meeting.raising[1] = Transient("later")
    agent, model = agent_for(kind, meeting, 3)
    with pytest.raises(StepFailed):
        await run(store, agent, RUN, "go")
    assert sorted(meeting.ended) == [0, 1, 2]
    again = Meeting(1)
    agent, model = agent_for(kind, again, 3)
    outcome = await run(store, agent, RUN)
    assert answers(kind, model, outcome) == ["result 0", "result 1", "result 2"]
    assert again.begun == [1]


@both
@kinds
@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("fault", ["killed before", "killed after"])
async def test_reads_that_were_cut_off_anywhere_are_made_again_and_the_others_are_not(
    shared: bool, kind: str, at: int, fault: Any
):
    store, meeting = FaultyStore(shared=shared), Meeting(1)
    agent, model = agent_for(kind, meeting, 3)
    store.faults[1 + shared + 2 * (kind == "loop") + at] = fault
    with pytest.raises((Killed, Fenced)):
        await run(store, agent, RUN, "go")
    fold = await folded(store)
    kept = [s for s in fold.steps.values() if s.completed and not s.name.startswith("llm")]
    meeting.begun.clear()
    outcome = await run(store, agent, RUN)
    assert answers(kind, model, outcome) == ["result 0", "result 1", "result 2"]
    assert len(meeting.begun) == 3 - len(kept)


async def test_writes_of_a_reply_run_one_after_another_unless_told_otherwise():
    meeting = Meeting(1)
    agent, _ = agent_for("loop", meeting, 3, safe=False)
    store = FaultyStore()
    assert await run(store, agent, RUN, "go") == ended("Done.")
    steps = [
        (type(r).__name__, r.step)
        for r in (await store.load(RUN)).records
        if isinstance(r, StepStarted | StepCompleted) and not r.step.startswith("llm")
    ]
    assert [kind for kind, _ in steps] == ["StepStarted", "StepCompleted"] * 3


@both
@pytest.mark.parametrize("kind", ["loop", "handler"])
async def test_writes_run_at_once_where_the_agent_says_so(shared: bool, kind: str):
    store, meeting = FaultyStore(shared=shared), Meeting(3, (2, 1, 0))
    options: Any = {"parallel_writes": True} if kind == "loop" else {}
    agent, model = agent_for(kind, meeting, 3, safe=False, **options)
    outcome = await run(store, agent, RUN, "go")
    assert answers(kind, model, outcome) == ["result 0", "result 1", "result 2"]
    assert meeting.ended == [2, 1, 0]


@both
@pytest.mark.parametrize("kind", ["loop", "handler"])
async def test_of_parallel_writes_the_unknown_ones_are_named_and_the_others_kept(
    shared: bool, kind: str
):
    store, meeting = FaultyStore(shared=shared), Meeting(4, (2, 0, 1, 3))
    meeting.raising.update({0: OSError(), 2: OSError()})
    options: Any = {"parallel_writes": True} if kind == "loop" else {}
    agent, model = agent_for(kind, meeting, 4, safe=False, **options)
    outcome = await run(store, agent, RUN, "go")
    assert isinstance(outcome, Indeterminate)
    inputs: list[Any] = [one.input for one in outcome.unknown]
    assert [value["n"] for value in inputs] == [0, 2]

    for one in outcome.unknown:
        said = {"step": one.step, "start": one.start, "outcome": "done", "result": "by hand"}
        await signal(store, RUN, "reconcile", said)
    found = await run(store, agent, RUN)
    assert answers(kind, model, found) == ["by hand", "result 1", "by hand", "result 3"]
    assert len(meeting.begun) == 4


async def test_a_reply_with_a_gated_call_beside_reads_runs_the_reads():
    seen: list[str] = []

    @read
    async def look(n: int) -> str:
        seen.append(f"look {n}")
        return "x"

    @write
    async def pay(n: int) -> str:
        seen.append("pay")
        return "x"

    both_kinds = asks(
        request("look", {"n": 1}, id="a"),
        request("pay", {"n": 2}, id="b"),
        request("look", {"n": 3}, id="c"),
    )
    agent = Agent("helpdesk", model=ScriptedModel(both_kinds, say("x")), tools=[look, pay])
    assert isinstance(await run(FaultyStore(), agent, RUN, "go"), AwaitingApproval)
    assert sorted(seen) == ["look 1", "look 3"]


@both
async def test_a_call_within_a_call_is_refused(shared: bool):
    """A handle is one task's: what a tool wants recorded is its own handler's to call."""
    refused: list[ConcurrentUse] = []

    async def handler(ctx: Context) -> Next:
        async def inner(call: ToolCall) -> JSON:
            try:
                await ctx.model(lambda: inner(call))
            except ConcurrentUse as error:
                refused.append(error)
            return "outer"

        await ctx.tool(Call(name="outer", input=None, fn=inner, replay=SAFE))
        return Complete("x")

    with pytest.raises(ConcurrentUse):
        await run(FaultyStore(shared=shared), agent_of(handler), RUN, "go")
    assert len(refused) == 1


async def test_parallel_without_calls_is_nothing():
    async def handler(ctx: Context) -> Next:
        return Complete(list(await ctx.parallel()))

    assert await run(FaultyStore(), agent_of(handler), RUN, "go") == ended([])
