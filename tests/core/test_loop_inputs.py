"""Inputs (R62): where the loop and handlers place them, once, in order, whatever happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from kit.build import RUN, FaultyStore, Killed, PlainView, folded, types_of
from kit.turns import Clock, World, agent_of, begun, ended, work

from journal.doors import signal, submit, withdraw
from journal.errors import RunFinished, RunfoldError, StaleSignal
from journal.messages import Message, Reply
from journal.records import InputPlaced, Mode
from journal.terms import Complete, Continue, Fail, Next
from journal.views import AwaitingApproval, Failed, Outcome, Waiting
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.context import Context
from worker.runner import run
from worker.tools import read, write

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
HOUR = timedelta(hours=1)


class Chat:
    """A loop whose tool and model do what `during` says at their n-th call: `look 1`, `llm 2`."""

    def __init__(self, *replies: Reply, shared: bool = False) -> None:
        self.store = FaultyStore(shared=shared)
        self.during: dict[str, Callable[[], Awaitable[Any]]] = {}
        self.looks = 0
        chat = self

        class Model(ScriptedModel):
            async def reply(self, messages: Any, tools: Any, **rest: Any) -> Reply:
                found = await super().reply(messages, tools, **rest)
                await chat._now(f"llm {sum(m.role == 'assistant' for m in messages) + 1}")
                return found

        @read
        async def look(q: str) -> str:
            self.looks += 1
            await self._now(f"look {self.looks}")
            return f"found {q}"

        @write
        async def pay(amount: int) -> str:
            return "paid"

        self.model = Model(*replies)
        self.agent = Agent("helpdesk", model=self.model, tools=[look, pay])

    async def _now(self, place: str) -> None:
        if place in self.during:
            await self.during.pop(place)()

    def sends(self, content: str, mode: Mode = "steer") -> Callable[[], Awaitable[Any]]:
        async def send() -> None:
            await submit(PlainView(self.store), RUN, content, mode=mode, request_id=content)

        return send

    async def run(self) -> Outcome:
        return await run(self.store, self.agent, RUN, "go")

    def talk(self, n: int = -1) -> list[str]:
        """The n-th request, in words."""
        return [word(message) for message in self.model.requests[n]]

    async def placed(self) -> list[tuple[str, str]]:
        records = (await self.store.load(RUN)).records
        return [(r.request_id, r.position) for r in records if isinstance(r, InputPlaced)]

    async def states(self) -> dict[str, str]:
        return {key: known.status for key, known in (await folded(self.store)).inputs.items()}


def word(message: Message) -> str:
    if message.role == "assistant":
        return "calls" if message.calls else f"says {message.content}"
    return f"{message.role} {message.content}"


LOOK = call("look", q="x")


# ---- the built-in loop --------------------------------------------------------------------------


@both
async def test_a_steer_is_placed_before_the_model_call_after_the_tools(shared: bool):
    chat = Chat(LOOK, LOOK, say("Done."), shared=shared)
    chat.during["look 1"] = chat.sends("hurry")
    assert await chat.run() == ended("Done.")
    assert chat.talk(1) == ["user go", "calls", "tool found x", "user hurry"]
    assert chat.talk(2) == [*chat.talk(1), "calls", "tool found x"]
    assert await chat.placed() == [("hurry", "llm/2")]
    assert await chat.states() == {"hurry": "done"}


@both
async def test_a_follow_up_is_placed_after_the_answer_and_answered(shared: bool):
    chat = Chat(LOOK, say("Done."), say("And that too."), shared=shared)
    chat.during["look 1"] = chat.sends("and the printer?", "follow_up")
    assert await chat.run() == ended("And that too.")
    assert chat.talk(1) == ["user go", "calls", "tool found x"]
    assert chat.talk(2) == [*chat.talk(1), "says Done.", "user and the printer?"]
    assert await chat.placed() == [("and the printer?", "llm/3")]


@both
async def test_a_steer_that_comes_with_the_answer_is_answered_too(shared: bool):
    chat = Chat(say("Done."), say("Sorry."), shared=shared)
    chat.during["llm 1"] = chat.sends("wrong!")
    assert await chat.run() == ended("Sorry.")
    assert chat.talk() == ["user go", "says Done.", "user wrong!"]


@both
async def test_the_loop_ends_only_when_nothing_is_queued(shared: bool):
    chat = Chat(*(say(f"Answer {n}.") for n in range(1, 6)), shared=shared)
    for n in (1, 2, 3):
        mode: Mode = "steer" if n == 2 else "follow_up"
        chat.during[f"llm {n}"] = chat.sends(f"question {n}", mode)
    assert await chat.run() == ended("Answer 4.")
    assert await chat.states() == dict.fromkeys(["question 1", "question 2", "question 3"], "done")


@both
async def test_an_input_that_comes_as_the_run_ends_makes_it_go_on(shared: bool):
    chat = Chat(say("Done."), say("Sorry."), shared=shared)
    chat.store.faults[4 + shared] = chat.sends("wait!", "follow_up")  # before run.completed
    assert await chat.run() == ended("Sorry.")
    assert await chat.states() == {"wait!": "done"}


@both
async def test_inputs_are_placed_in_the_order_they_came_in(shared: bool):
    chat = Chat(LOOK, say("Done."), say("All."), shared=shared)

    async def several() -> None:
        for content, mode in (("1", "steer"), ("2", "follow_up"), ("3", "steer"), ("4", "steer")):
            await submit(PlainView(chat.store), RUN, content, mode=mode, request_id=content)

    chat.during["look 1"] = several
    assert await chat.run() == ended("All.")
    assert await chat.placed() == [("1", "llm/2"), ("3", "llm/2"), ("4", "llm/2"), ("2", "llm/3")]
    assert chat.talk(1)[-3:] == ["user 1", "user 3", "user 4"]
    assert chat.talk(2)[-1] == "user 2"


@both
async def test_a_steer_that_comes_as_the_model_is_about_to_be_asked_is_placed_first(shared: bool):
    chat = Chat(LOOK, say("Done."), shared=shared)
    chat.store.faults[6 + shared] = chat.sends("hurry")  # before the start of llm/2
    assert await chat.run() == ended("Done.")
    assert chat.talk(1) == ["user go", "calls", "tool found x", "user hurry"]


@both
async def test_an_input_before_the_first_call_waits_for_its_place(shared: bool):
    chat = Chat(LOOK, say("Done."), shared=shared)
    chat.store.faults[2 + shared] = chat.sends("early")
    assert await chat.run() == ended("Done.")
    assert (chat.talk(0), chat.talk(1)[-1]) == (["user go"], "user early")


async def whole_chat(shared: bool) -> Chat:
    chat = Chat(LOOK, say("Done."), say("More."), shared=shared)
    chat.during["look 1"] = chat.sends("steer 1")
    chat.during["llm 2"] = chat.sends("then", "follow_up")
    return chat


WHOLE = ["user go", "calls", "tool found x", "user steer 1", "says Done.", "user then"]


@both
@pytest.mark.parametrize("at", range(2, 13))
@pytest.mark.parametrize("fault", ["killed before", "killed after", "ack lost", "lost"])
async def test_a_replay_sees_the_same_inputs_once_at_the_same_call(
    shared: bool, at: int, fault: Any
):
    chat = await whole_chat(shared)
    chat.store.faults[at] = fault
    try:
        outcome = await chat.run()
    except Killed:
        while chat.during:  # a person sends what they meant to send, or again
            await chat.during.popitem()[1]()
        outcome = await chat.run()
    assert isinstance(outcome, type(ended("")))
    assert sorted(await chat.placed()) == sorted(set(await chat.placed()))
    assert {key for key, _ in await chat.placed()} == {"steer 1", "then"}
    assert [line for line in chat.talk() if "steer 1" in line] == ["user steer 1"]
    final = chat.talk()
    seen = [one for one in chat.model.requests if len(one) == len(chat.model.requests[-1])]
    assert all([word(m) for m in one] == final for one in seen)
    assert set((await chat.states()).values()) == {"done"}


@both
async def test_the_whole_chat_reads_as_it_was(shared: bool):
    chat = await whole_chat(shared)
    assert await chat.run() == ended("More.")
    assert chat.talk() == WHOLE
    before = await types_of(chat.store)
    assert await chat.run() == ended("More.")
    assert await types_of(chat.store) == before


@both
async def test_a_withdrawn_input_is_never_placed(shared: bool):
    chat = Chat(LOOK, say("Done."), shared=shared)

    async def twice() -> None:
        await chat.sends("hurry")()
        assert (await withdraw(PlainView(chat.store), RUN, "hurry")).status == "withdrawn"

    chat.during["look 1"] = twice
    assert await chat.run() == ended("Done.")
    assert await chat.placed() == []
    assert await chat.states() == {"hurry": "withdrawn"}


@both
async def test_a_withdrawal_that_comes_first_by_one_record_wins(shared: bool):
    chat = Chat(LOOK, say("Done."), shared=shared)
    chat.during["look 1"] = chat.sends("hurry")

    async def back() -> None:
        await withdraw(PlainView(chat.store), RUN, "hurry")

    real = chat.store.append

    async def append(run_id: Any, entry: Any, *, expected: int) -> Any:
        if entry.type == "input.placed":
            chat.store.append = real  # type: ignore[method-assign]
            await back()
        return await real(run_id, entry, expected=expected)

    chat.store.append = append  # type: ignore[method-assign]
    assert await chat.run() == ended("Done.")
    assert await chat.placed() == []
    assert chat.talk(1) == ["user go", "calls", "tool found x"]


@both
async def test_a_withdrawal_that_comes_second_is_refused(shared: bool):
    chat = Chat(LOOK, say("Done."), shared=shared)
    chat.during["look 1"] = chat.sends("hurry")
    refused: list[str] = []

    async def back() -> None:
        with pytest.raises(StaleSignal) as raised:
            await withdraw(PlainView(chat.store), RUN, "hurry")
        refused.append(raised.value.message)

    chat.during["llm 2"] = back
    assert await chat.run() == ended("Done.")
    assert len(refused) == 1 and "placed" in refused[0]


@both
async def test_what_is_queued_when_the_run_fails_is_unanswered_and_nothing_stays_queued(
    shared: bool,
):
    chat = Chat(LOOK, Reply(finish="refusal", text="no"), shared=shared)
    chat.during["look 1"] = chat.sends("placed")
    chat.during["llm 2"] = chat.sends("queued")
    outcome = await chat.run()
    assert isinstance(outcome, Failed)
    assert await chat.states() == {"placed": "done", "queued": "unanswered"}
    with pytest.raises(RunFinished):
        await submit(chat.store, RUN, "too late")


@both
async def test_what_is_queued_when_the_run_is_cancelled_is_unanswered(shared: bool):
    chat = Chat(call("pay", amount=1), say("x"), shared=shared)
    assert isinstance(await chat.run(), AwaitingApproval)
    await chat.sends("hello?")()
    await signal(PlainView(chat.store), RUN, "cancel", {})
    with pytest.raises(RunFinished):
        await submit(PlainView(chat.store), RUN, "too late")
    await chat.run()
    assert await chat.states() == {"hello?": "unanswered"}


@both
async def test_an_input_while_a_person_must_decide_waits_for_the_decision(shared: bool):
    chat = Chat(call("pay", amount=1), say("x"), shared=shared)
    asks = await chat.run()
    await chat.sends("hello?")()
    assert await chat.run() == asks
    assert isinstance(asks, AwaitingApproval)
    await signal(PlainView(chat.store), RUN, "approve", {"marker": asks.pending[0].marker})
    assert await chat.run() == ended("x")
    assert chat.talk(1)[-2:] == ["tool paid", "user hello?"]


async def test_inputs_are_placed_once_over_the_commits_of_a_long_run():
    count = 40
    chat = Chat(*[LOOK] * count, say("Done."), shared=True)
    for n in (3, 17, 30):
        chat.during[f"look {n}"] = chat.sends(f"steer {n}")
    assert await chat.run() == ended("Done.")
    assert (await types_of(chat.store)).count("commit") >= 2
    assert await chat.placed() == [(f"steer {n}", f"llm/{n + 1}") for n in (3, 17, 30)]
    assert [line for line in chat.talk() if "steer" in line] == [
        f"user steer {n}" for n in (3, 17, 30)
    ]
    assert set((await chat.states()).values()) == {"done"}


# ---- handlers -----------------------------------------------------------------------------------


@both
async def test_a_handler_places_the_mode_it_asks_for_in_order_and_sees_it_again(shared: bool):
    world, seen = World(), list[Any]()

    async def handler(ctx: Context) -> Next:
        follow = await ctx.place_inputs("follow_up")
        await ctx.model(world.does("ask"))
        steer = await ctx.place_inputs("steer")
        none = await ctx.place_inputs("steer")
        seen.append([[one.content for one in some] for some in (follow, steer, none)])
        if len(seen) == 1:
            raise KeyError
        return Complete("x")

    store = await begun(shared=shared)
    for content, mode in (("1", "steer"), ("2", "follow_up"), ("3", "steer"), ("4", "follow_up")):
        await submit(PlainView(store), RUN, content, mode=mode)
    agent = agent_of(handler)
    with pytest.raises(RunfoldError):
        await run(store, agent, RUN)
    await submit(PlainView(store), RUN, "5", mode="follow_up")  # behind a call made without it
    await submit(PlainView(store), RUN, "6", mode="steer")
    assert await run(store, agent, RUN) == ended("x")
    first: Any = [["2", "4"], ["1", "3"], []]
    assert seen[0] == first
    # no later call was recorded behind the last two positions: what came since is placed there
    assert seen[1][0] == ["2", "4"]
    assert seen[1][1] + seen[1][2] == ["1", "3", "6"]
    fold = await folded(store)
    assert [known.status for known in fold.inputs.values()].count("done") == 5
    assert [k.content for k in fold.inputs.values() if k.status == "unanswered"] == ["5"]


@both
async def test_an_input_wakes_a_handler_that_waits_for_one(shared: bool):
    async def handler(ctx: Context) -> Next:
        inputs = await ctx.place_inputs("steer")
        if inputs:
            return Complete([one.content for one in inputs])
        return Continue(until_input=True, delay=HOUR)

    store, agent = await begun(shared=shared), agent_of(handler)
    waits = await run(store, agent, RUN)
    assert isinstance(waits, Waiting)
    assert {on.what for on in waits.on} == {"timer", "input"}
    assert await run(store, agent, RUN) == waits
    await submit(PlainView(store), RUN, "hello")
    assert await run(store, agent, RUN) == ended(["hello"])


@both
async def test_an_input_that_comes_as_the_turn_is_about_to_wait_begins_another_turn(shared: bool):
    turns: list[int] = []

    async def handler(ctx: Context) -> Next:
        turns.append(ctx.iteration)
        inputs = await ctx.place_inputs("steer")
        return Complete(inputs[0].content) if inputs else Continue(until_input=True)

    store = await begun(shared=shared)

    async def send() -> None:
        await submit(PlainView(store), RUN, "just in time")

    store.faults[1 + shared] = send  # before the commit
    assert await run(store, agent_of(handler), RUN) == ended("just in time")
    assert turns == [0, 1]
    assert (await types_of(store)).count("claim") == shared


async def test_timer_and_input_together_wake_once():
    clock, turns = Clock(), list[int]()

    async def handler(ctx: Context) -> Next:
        turns.append(ctx.iteration)
        inputs = await ctx.place_inputs("steer")
        return Complete(inputs[0].content) if inputs else Continue(until_input=True, delay=HOUR)

    store, agent = await begun(), agent_of(handler)
    await work(store, agent, clock=clock)
    await submit(PlainView(store), RUN, "hello")
    clock.passes(hours=2)
    assert (await work(store, agent, clock=clock)).outcome == ended("hello")
    assert turns == [0, 1]


async def test_an_input_of_a_mode_that_is_never_placed_does_not_hold_a_handlers_end():
    async def handler(ctx: Context) -> Next:
        return Complete(len(await ctx.place_inputs("steer")))

    store = await begun()
    await submit(PlainView(store), RUN, "later", mode="follow_up", request_id="f")
    assert await run(store, agent_of(handler), RUN) == ended(0)
    assert (await folded(store)).inputs["f"].status == "unanswered"


async def test_an_input_of_a_turn_that_fails_for_good_counts_as_placed():
    async def handler(ctx: Context) -> Next:
        await ctx.place_inputs("steer")
        return Fail(reason="no_stock")

    store = await begun()
    await submit(PlainView(store), RUN, "hello", request_id="i")
    await run(store, agent_of(handler), RUN)
    assert (await folded(store)).inputs["i"].status == "done"


async def test_a_repeat_of_a_request_id_is_the_original_whatever_it_says():
    store = await begun()
    first = await submit(PlainView(store), RUN, "hello", request_id="i")
    again = await submit(PlainView(store), RUN, "another", request_id="i", mode="follow_up")
    assert (first.created, again.created) == (True, False)
    assert (again.content, again.mode) == ("hello", "steer")
    assert (await types_of(store)).count("input") == 1
