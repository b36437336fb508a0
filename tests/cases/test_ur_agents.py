"""UR-49, UR-50, UR-52, UR-53, UR-55: several calls in a reply, changed code, misbehaving models."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cases.world import World, check_store, named
from kit.ledger import Ledger

from journal.doors import signal, state
from journal.store import Store
from journal.stores.memory import MemoryStore
from runfold import (
    Agent,
    AwaitingApproval,
    Bounds,
    Completed,
    ConcurrentUse,
    Failed,
    Indeterminate,
    InputMismatch,
    Journal,
    Message,
    ReplayMismatch,
    Reply,
    ToolCall,
    ToolRequest,
    read,
    run,
    write,
)
from runfold.testing import ScriptedModel, call, say


def ask(*calls: tuple[str, Any], **how: Any) -> Reply:
    """A reply with these calls; a string of arguments is sent as it is."""
    requests = tuple(
        ToolRequest(
            id=f"c{n}", name=name, arguments=args if isinstance(args, str) else json.dumps(args)
        )
        for n, (name, args) in enumerate(calls)
    )
    return Reply(calls=requests, **({"finish": "tool_calls"} | how))


# ---- UR-49 ------------------------------------------------------------------------------------

FOUR = ask(("lookup", {"q": 1}), ("pay", {"to": "A"}), ("pay", {"to": "B"}), ("mail", {"to": "C"}))


def four(ledger: Ledger, at: str = "") -> Agent:
    """lookup (a read), pay (gated), mail (unsafe, not gated). Stops like a crash after pay `at`."""

    @read
    def lookup(q: int, this: ToolCall) -> str:
        ledger.add(this.run_id, this.step, "lookup")
        return f"found {q}"

    @write
    def pay(to: str, this: ToolCall) -> str:
        ledger.add(this.run_id, this.step, to)
        return f"paid {to}"

    @write(approval=False)
    def mail(to: str, this: ToolCall) -> str:
        ledger.add(this.run_id, this.step, to)
        return f"mailed {to}"

    return Agent("four", model=ScriptedModel(FOUR, say("all done")), tools=[lookup, pay, mail])


async def test_ur49_four_calls_two_of_them_gated(store: Store, world: World) -> None:
    """UR-49: B is approved first, then a new process, then A: each once, each result under its own
    call id, one following request with the four in order."""
    end = await run(store, four(world.ledger), "r1", "x")
    assert isinstance(end, AwaitingApproval)
    a, b = (pending.marker for pending in end.pending)
    assert [pending.input for pending in end.pending] == [{"to": "A"}, {"to": "B"}]
    assert [line[2] for line in world.ledger.lines()] == ["lookup", "C"]
    await signal(store, "r1", "approve", {"marker": b})
    end = await run(store, four(world.ledger), "r1")
    assert isinstance(end, AwaitingApproval)
    assert [pending.marker for pending in end.pending] == [a]
    assert [line[2] for line in world.ledger.lines()] == ["lookup", "C", "B"]
    await signal(store, "r1", "approve", {"marker": a})
    agent = four(world.ledger)
    assert isinstance(await run(store, agent, "r1"), Completed)
    assert [line[2] for line in world.ledger.lines()] == ["lookup", "C", "B", "A"]
    (request,) = agent.model.requests  # type: ignore[attr-defined]
    assert [(m.call_id, m.content) for m in request if m.role == "tool"] == [
        ("c0", "found 1"),
        ("c1", "paid A"),
        ("c2", "paid B"),
        ("c3", "mailed C"),
    ]
    await check_store(store, "r1")


async def test_ur49_a_denied_call_leaves_the_others_alone(store: Store, world: World) -> None:
    """UR-49: A is rejected: its result says so, the other three are as they were."""
    end = await run(store, four(world.ledger), "r1", "x")
    assert isinstance(end, AwaitingApproval)
    a, b = (pending.marker for pending in end.pending)
    await signal(store, "r1", "reject", {"marker": a, "reason": "not A"})
    await signal(store, "r1", "approve", {"marker": b})
    agent = four(world.ledger)
    assert isinstance(await run(store, agent, "r1"), Completed)
    (request,) = agent.model.requests  # type: ignore[attr-defined]
    results = {m.call_id: m.content for m in request if m.role == "tool"}
    assert results["c1"] == {"error": {"type": "rejected", "message": "not A"}}
    assert [results[c] for c in ("c0", "c2", "c3")] == ["found 1", "paid B", "mailed C"]
    assert sorted(str(line[2]) for line in world.ledger.lines()) == ["B", "C", "lookup"]
    await check_store(store, "r1")


async def test_ur49_equal_calls_are_two_calls(store: Store, world: World) -> None:
    """UR-49: pay A twice in one reply: two markers; approving one runs one."""
    agent = four(world.ledger)
    agent.model = ScriptedModel(ask(("pay", {"to": "A"}), ("pay", {"to": "A"})), say("done"))
    end = await run(store, agent, "r1", "x")
    assert isinstance(end, AwaitingApproval)
    first, second = (pending.marker for pending in end.pending)
    assert first != second
    await signal(store, "r1", "approve", {"marker": second})
    end = await run(store, agent, "r1")
    assert isinstance(end, AwaitingApproval)
    assert [line[1] for line in world.ledger.lines()] == ["tool/1/1/pay"]
    await signal(store, "r1", "reject", {"marker": first})
    assert isinstance(await run(store, agent, "r1"), Completed)
    assert len(world.ledger.lines()) == 1


# ---- UR-50 ------------------------------------------------------------------------------------

THREE = ask(("one", {}), ("two", {}), ("three", {}))


def three(ledger: Ledger, rng: random.Random, stop_after: int = 3) -> Agent:
    """Three writes that take turns of the loop; then, if `stop_after` < 3, a lost connection."""

    def tool(name: str) -> Any:
        async def body(this: ToolCall) -> str:
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            ledger.add(this.run_id, this.step, name)
            return f"result of {name}"

        return write(name=name, approval=False)(body)

    class Model(ScriptedModel):
        async def reply(self, messages: Sequence[Message], *more: Any, **options: Any) -> Reply:
            found = await super().reply(messages, *more, **options)
            if found != THREE and stop_after < 3:
                raise ConnectionError
            return found

    model = Model(THREE, say("done"))
    return Agent("three", model=model, tools=[tool(n) for n in ("three", "one", "two")])


async def test_ur50_each_call_keeps_its_own_result(store: Store, world: World) -> None:
    """UR-50: stopped after the results, resumed 20 times in other orders of tools and turns: no
    mismatch, no call twice, each result its own."""
    with pytest.raises(Exception, match="ConnectionError"):
        await run(store, three(world.ledger, random.Random(0), 2), "r1", "x")
    for seed in range(20):
        with pytest.raises(Exception, match="ConnectionError"):
            await run(store, three(world.ledger, random.Random(seed), 2), "r1")
    agent = three(world.ledger, random.Random(99))
    assert isinstance(await run(store, agent, "r1"), Completed)
    (request,) = agent.model.requests  # type: ignore[attr-defined]
    assert [(m.call_id, m.content) for m in request if m.role == "tool"] == [
        ("c0", "result of one"),
        ("c1", "result of two"),
        ("c2", "result of three"),
    ]
    assert [line[2] for line in world.ledger.lines()] == ["one", "two", "three"]
    await check_store(store, "r1")


RESUME = """
import asyncio, pathlib, random, sys
from cases.test_ur_agents import three
from kit.ledger import Ledger
from runfold import FileStore, run
home = pathlib.Path(sys.argv[1])
agent = three(Ledger(home / "ledger"), random.Random(), int(sys.argv[2]))
try:
    print(type(asyncio.run(run(FileStore(home / "runs"), agent, "r1", "x"))).__name__)
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.real
def test_ur50_another_hash_seed_replays_the_same(world: World) -> None:
    """UR-50: other processes with other PYTHONHASHSEED: the same journal, no mismatch."""
    here = Path(__file__).resolve()
    paths = os.pathsep.join([str(here.parents[1]), str(here.parents[2])])
    said: list[str] = []
    for seed, stop in (("0", "2"), ("1", "2"), ("4242", "3")):
        done = subprocess.run(
            [sys.executable, "-c", RESUME, str(world.home), stop],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout.strip())
    assert said == ["StepFailed", "StepFailed", "Completed"]
    assert len(world.ledger.lines()) == 3
    world.check("r1")


@pytest.mark.parametrize("how", ["gather", "as_completed", "task_group"])
async def test_ur50_concurrent_steps_on_one_handle_are_refused(store: Store, how: str) -> None:
    """UR-50: gather and as_completed over one handle can't be numbered the same at a replay: the
    second is refused (R46), nothing is run twice, the handle stays usable."""
    ran: list[str] = []

    async def body(name: str) -> str:
        ran.append(name)
        await asyncio.sleep(0.01)
        return name

    await run(store, Agent("a", model=ScriptedModel(say("x"))), "other", "x")
    agent = Agent("a", model=ScriptedModel())
    with pytest.raises(Exception, match="script"):
        await run(store, agent, "r1", "x")
    async with await Journal.open(store, "r1", is_write=lambda _: True) as journal:

        def step(name: str) -> Any:
            return journal.run_step(name, "tool", lambda: body(name))

        async def concurrently() -> None:
            if how == "task_group":
                async with asyncio.TaskGroup() as group:
                    for name in "abc":
                        group.create_task(step(name))
                return
            tasks = [asyncio.ensure_future(step(name)) for name in "abc"]
            try:
                if how == "gather":
                    await asyncio.gather(*tasks)
                for done in asyncio.as_completed(tasks):
                    await done
            finally:
                await asyncio.gather(*tasks, return_exceptions=True)

        with pytest.raises((ConcurrentUse, ExceptionGroup)):
            await concurrently()
    # A task group cancels the first when the second is refused, perhaps before its call began.
    assert len(ran) == 1 or (how == "task_group" and not ran)
    await check_store(store, "r1")


# ---- UR-52 ------------------------------------------------------------------------------------


def versioned(ledger: Ledger, *tools: Any, name: str = "v", script: Sequence[Reply] = ()) -> Agent:
    replies = script or (
        call("lookup", q=1),
        ask(("pay", {"to": "A"}), ("lookup", {"q": 2})),
        say("done"),
    )
    return Agent(name, model=ScriptedModel(*replies), tools=tools)


def v1_tools(ledger: Ledger) -> tuple[Any, Any]:
    @read
    def lookup(q: int) -> str:
        return f"found {q}"

    @write
    def pay(to: str, this: ToolCall) -> str:
        ledger.add(this.run_id, this.step, to)
        return "paid"

    return lookup, pay


async def _waiting_under_v1(store: Store, ledger: Ledger) -> None:
    end = await run(store, versioned(ledger, *v1_tools(ledger)), "r1", "x")
    assert isinstance(end, AwaitingApproval)
    await signal(store, "r1", "approve", {"marker": end.pending[0].marker})


async def test_ur52_recorded_results_replay_without_the_tool(store: Store, world: World) -> None:
    """UR-52: v2 has no lookup: its results of v1 are used; the approved pay runs; a new call to
    lookup is an error the model sees."""
    await _waiting_under_v1(store, world.ledger)
    _, pay = v1_tools(world.ledger)
    script = (*versioned(world.ledger).model.replies[:2], call("lookup", q=3), say("done"))  # type: ignore[attr-defined]
    v2 = versioned(world.ledger, pay, script=script)
    assert isinstance(await run(store, v2, "r1"), Completed)
    first, last = v2.model.requests  # type: ignore[attr-defined]
    assert [m.content for m in first if m.role == "tool"] == ["found 1", "paid", "found 2"]
    assert last[-1].content["error"]["type"] == "unknown_tool"
    assert len(world.ledger.lines()) == 1
    await check_store(store, "r1")


async def test_ur52_the_approved_tool_was_removed_or_renamed(store: Store, world: World) -> None:
    """UR-52: v2 has no pay, or calls it otherwise: an explicit error, nothing runs under the new
    name."""
    await _waiting_under_v1(store, world.ledger)
    lookup, pay = v1_tools(world.ledger)
    renamed = write(name="pay_v2")(pay.fn)
    v2 = versioned(world.ledger, lookup, renamed)
    assert isinstance(await run(store, v2, "r1"), Completed)
    (request,) = v2.model.requests  # type: ignore[attr-defined]
    errors = [m.content["error"] for m in request if m.role == "tool" and "error" in m.content]
    assert [error["type"] for error in errors] == ["unknown_tool"]
    assert "pay_v2" in errors[0]["message"]  # the tools there are: named, not guessed
    assert not world.ledger.lines()


async def test_ur52_an_argument_was_added(store: Store, world: World) -> None:
    """UR-52: v2 of pay has one more argument: the approval of v1 does not cover it."""
    await _waiting_under_v1(store, world.ledger)
    lookup, _ = v1_tools(world.ledger)

    @write
    def pay(to: str, this: ToolCall, fast: bool = True) -> str:
        world.ledger.add(this.run_id, this.step, to)
        return "paid"

    v2 = versioned(world.ledger, lookup, pay)
    assert isinstance(await run(store, v2, "r1"), Completed)
    (request,) = v2.model.requests  # type: ignore[attr-defined]
    (error,) = [m.content["error"] for m in request if m.role == "tool" and "error" in m.content]
    assert error["type"] == "outdated"
    assert not world.ledger.lines()


async def test_ur52_a_started_write_whose_tool_is_gone(store: Store, world: World) -> None:
    """UR-52: unknown write, v2 without the tool: still Indeterminate; reconcile done needs no tool;
    a permitted retry does, and its absence is an explicit error that names it: nothing runs."""

    @write(approval=False)
    def pay(this: ToolCall) -> str:
        world.ledger.add(this.run_id, this.step, "A")
        if len(world.ledger.lines(this.run_id)) == 1:
            raise OSError("lost")
        return "paid"

    script = (call("pay"), say("done"))
    for run_id, outcome in (("r1", {"outcome": "done", "result": 1}), ("r2", {"outcome": "retry"})):
        v1 = versioned(world.ledger, pay, script=script)
        v2 = versioned(world.ledger, script=script)
        assert isinstance(await run(store, v1, run_id, "x"), Indeterminate)
        assert isinstance(await run(store, v2, run_id), Indeterminate)
        await signal(store, run_id, "reconcile", {"step": "tool/1/0/pay"} | outcome)
        try:
            assert isinstance(await run(store, v2, run_id), Completed)
            told = str(v2.model.requests[-1][-1].content)  # type: ignore[attr-defined]
        except ReplayMismatch as mismatch:
            told = mismatch.message
        assert ("pay" in told) == (run_id == "r2")
        await check_store(store, run_id)
        assert len(world.ledger.lines(run_id)) == 1


async def test_ur52_another_agent_does_not_take_the_run(store: Store, world: World) -> None:
    """UR-52: an agent of another name leaves the run alone; two tools of one name are refused when
    the agent is defined."""
    await _waiting_under_v1(store, world.ledger)
    lookup, pay = v1_tools(world.ledger)
    before = (await state(store, "r1")).records
    for given in (None, "x"):
        with pytest.raises(InputMismatch):
            await run(store, versioned(world.ledger, lookup, pay, name="w"), "r1", given)
    assert (await state(store, "r1")).records == before
    with pytest.raises(TypeError, match="two tools are named lookup"):
        versioned(world.ledger, lookup, read(name="lookup")(pay.fn))
    assert isinstance(await run(store, versioned(world.ledger, lookup, pay), "r1"), Completed)


# ---- UR-53 ------------------------------------------------------------------------------------

BROKEN = {
    "cut": '{"amount": 10',
    "empty": "",
    "null": "null",
    "list": "[1]",
    "text": '"x"',
    "NaN": '{"amount": NaN}',
    "number as text": '{"amount":"10"}',
    "key twice": '{"amount":1,"amount":1000}',
    "unknown": '{"amount":1,"to":"me"}',
    "1 MB": '{"amount":"' + "1" * 1_000_000 + '"}',
    "float": '{"amount":10.5}',
    "bool": '{"amount":true}',
    "missing": "{}",
    "half": '{"amount":1,"\\ud83d":1}',
    "python": "{'amount': 10}",
    "fenced": '```json\n{"amount": 10}\n```',
    "trailing": '{"amount":10}}',
    "deep": '{"amount":' + "[" * 5000 + "]" * 5000 + "}",
    "big": '{"amount":' + "9" * 5000 + "}",
}


def charging(ledger: Ledger, *replies: Reply, **bounds: Any) -> Agent:
    @write(approval=False)
    def charge(amount: int, this: ToolCall) -> str:
        ledger.add(this.run_id, this.step, amount)
        return "paid"

    @read
    def lookup(q: int) -> str:
        return f"found {q}"

    model = ScriptedModel(*replies)
    return Agent("c", model=model, tools=[charge, lookup], bounds=Bounds(**bounds))


@pytest.mark.parametrize("what", BROKEN)
async def test_ur53_malformed_arguments_run_nothing(world: World, what: str) -> None:
    """UR-53: nothing is charged; one bounded error per call; the other call of the reply proceeds;
    a model that repeats it for ever ends the run with that reason."""
    store = MemoryStore()
    both = ask(("charge", BROKEN[what]), ("lookup", {"q": 1}))
    only = ask(("charge", BROKEN[what]))
    agent = charging(world.ledger, both, *[only] * 10)
    end = await run(store, agent, "r1", "x")
    assert isinstance(end, Failed)
    assert end.reason == "bad_replies"
    requests = agent.model.requests  # type: ignore[attr-defined]
    assert len(requests) == 4  # the first reply had a usable call, then three in a row had none
    error, found = (m.content for m in requests[1] if m.role == "tool")
    assert found == "found 1"
    assert error["error"]["type"] == "bad_arguments"
    assert len(json.dumps(error)) < 600
    assert not world.ledger.lines()
    await check_store(store, "r1")


async def test_ur53_a_good_call_after_bad_ones_still_runs(store: Store, world: World) -> None:
    """UR-53: two broken rounds, then a right one: it runs once, and the count starts again."""
    broken = ask(("charge", BROKEN["cut"]))
    good = ask(("charge", {"amount": 10}))
    agent = charging(world.ledger, broken, broken, good, broken, broken, say("done"))
    assert isinstance(await run(store, agent, "r1", "x"), Completed)
    assert [line[2] for line in world.ledger.lines()] == [10]
    await check_store(store, "r1")


# ---- UR-55 ------------------------------------------------------------------------------------

SILENT = {
    "nothing": Reply(),
    "blanks": Reply(text=" \n\t\u3000"),
    "length": Reply(text="I was about to", finish="length"),
    "cut calls": ask(("charge", {"amount": 10}), finish="length"),
    "empty id": Reply(calls=(ToolRequest(id="", name="charge", arguments='{"amount":1}'),)),
}


@pytest.mark.parametrize("what", SILENT)
async def test_ur55_replies_with_nothing_in_them(store: Store, world: World, what: str) -> None:
    """UR-55: three in a row, then a clear end; what was cut off at the limit is never run."""
    agent = charging(world.ledger, *[SILENT[what]] * 10)
    end = await run(store, agent, "r1", "x")
    assert isinstance(end, Failed)
    assert end.reason == "bad_replies"
    requests = agent.model.requests  # type: ignore[attr-defined]
    assert len(requests) == 3
    assert len(str(requests[-1])) < 3000
    assert not world.ledger.lines()
    await check_store(store, "r1")


@pytest.mark.parametrize(
    "name",
    [
        "charge_v2",
        " charge",
        "charge ",
        "сharge",
        "Charge",
        "",
        "a" * 5000,
        "../x",
        "a\nb",
        "\u202e",
    ],
)
async def test_ur55_near_names_are_not_mapped(store: Store, world: World, name: str) -> None:
    """UR-55: an unknown name is one bounded error, whatever it looks like; the rest of the reply
    proceeds."""
    both = ask((name, {"amount": 10}), ("lookup", {"q": 1}))
    agent = charging(world.ledger, both, say("done"))
    assert isinstance(await run(store, agent, "r1", "x"), Completed)
    error, found = (m.content for m in agent.model.requests[-1] if m.role == "tool")  # type: ignore[attr-defined]
    assert (error["error"]["type"], found) == ("unknown_tool", "found 1")
    assert len(json.dumps(error)) < 1000
    assert not world.ledger.lines()
    await check_store(store, "r1")


async def test_ur55_too_many_calls_and_equal_ids(store: Store, world: World) -> None:
    """UR-55: 300 calls end the run with that reason, none of them run; two calls of one id are
    both answered with an error and neither runs; a refusal is an end of its own."""
    agent = charging(world.ledger, ask(*[("charge", {"amount": n}) for n in range(300)]))
    end = await run(store, agent, "r1", "x")
    assert isinstance(end, Failed)
    assert (end.reason, "300" in end.detail) == ("calls_per_reply", True)
    one = ToolRequest(id="same", name="lookup", arguments='{"q":1}')
    two = ToolRequest(id="same", name="charge", arguments='{"amount":1}')
    agent = charging(world.ledger, Reply(calls=(one, two)), say("done"))
    assert isinstance(await run(store, agent, "r2", "x"), Completed)
    errors = [m.content["error"]["type"] for m in agent.model.requests[-1] if m.role == "tool"]  # type: ignore[attr-defined]
    assert errors == ["bad_reply", "bad_reply"]
    agent = charging(world.ledger, Reply(text="I can't help with that", finish="refusal"))
    end = await run(store, agent, "r3", "x")
    assert isinstance(end, Failed)
    assert (end.reason, end.detail) == ("model_refused", "I can't help with that")
    assert not world.ledger.lines()
    for run_id in ("r1", "r2", "r3"):
        await check_store(store, run_id)


async def test_ur55_the_number_of_model_calls_is_bounded(store: Store, world: World) -> None:
    """UR-55: a model that looks something up for ever ends at the bound, with that reason; so it
    does after a restart in the middle."""
    agent = charging(world.ledger, *[ask(("lookup", {"q": n})) for n in range(30)], iterations=12)
    end = await run(store, agent, "r1", "x")
    assert isinstance(end, Failed)
    assert end.reason == "iterations"
    assert len(agent.model.requests) == 12  # type: ignore[attr-defined]
    records = await check_store(store, "r1")
    assert sum(name.startswith("step.started llm/") for name in named(records)) == 12
    assert await run(store, agent, "r1") == end
