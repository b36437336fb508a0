"""Unknown writes (R22, R27, R29): what their policy makes of them, in the loop and in handlers."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from kit.build import (
    DEADLINE,
    RUN,
    FaultyStore,
    Killed,
    Log,
    PlainView,
    claimed,
    folded,
    parked,
    retry,
    start_of,
    started,
    types_of,
)
from kit.deadlines import deadlines_passed
from kit.turns import Clock, Handler, World, agent_of, begun, ended, work

import journal.unknown
from journal.doors import signal, state, submit
from journal.errors import RunfoldError
from journal.messages import JSON
from journal.records import Signal, StepCompleted, StepStarted
from journal.steps import CannotTell, DidNotHappen, Happened, Probed
from journal.store import Store
from journal.stores.file import FileStore
from journal.stores.memory import MemoryStore
from journal.terms import Complete, Continue, Next
from journal.views import AwaitingApproval, Cancelled, Indeterminate, Outcome, Waiting, instant
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.context import Call, Context, ToolResult
from worker.runner import run
from worker.tools import UNSAFE, ToolCall, write

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(30)]

NOW_S = 0.05
FUTURE = "2999-01-01T00:00:00.000Z"


@pytest.fixture(params=["memory", "file", "shared"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    match request.param:
        case "memory":
            return MemoryStore()
        case "file":
            return FileStore(tmp_path)
        case _:
            store = FaultyStore(shared=True)
            store.otherwise = "no"  # who made the call is there, and says that it has ended
            return store


class Post:
    """A loop and a handler that send one letter with this policy. `raising`: what cuts it off;
    `probed`: what its probe answers, one after another."""

    def __init__(
        self,
        kind: str,
        policy: Any,
        *,
        replies: Any = None,
        probed: Any = (),
        raising: BaseException | None = None,
    ) -> None:
        self.kind, self.policy = kind, policy
        self.calls: list[str] = []
        self.keys: list[str] = []
        self.asked: list[str] = []
        self.raising: list[BaseException | None] = [raising or OSError("cut")]
        self.probed = list(probed)
        self.seen: list[ToolResult] = []
        self.model = ScriptedModel(*(replies or (call("mail", to="anna"), say("Sent."))))

    async def send(self, call: ToolCall) -> JSON:
        self.calls.append("mail")
        self.keys.append(call.key)
        await call.progress(f"half {len(self.calls)}")
        error = self.raising.pop(0) if self.raising else None
        if error is not None:
            raise error
        return f"letter {len(self.calls)}"

    async def probe(self, key: str) -> Probed:
        self.asked.append(key)
        answer = self.probed.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        return answer

    @property
    def agent(self) -> Agent:
        options: Any = {"on_unknown": self.policy}
        if self.policy == "probe":
            options["probe"] = self.probe
        if self.kind == "handler":
            return agent_of(self.handler(options))

        @write(approval=False, **options)
        async def mail(to: str, call: ToolCall) -> Any:
            return await self.send(call)

        return Agent("helpdesk", model=self.model, tools=[mail])

    def handler(self, options: Any) -> Handler:
        async def handler(ctx: Context) -> Next:
            made = Call(name="mail", input={"to": "anna"}, fn=self.send, replay=UNSAFE, **options)
            self.seen.append(await ctx.tool(made))
            return Complete("Sent.")

        return handler

    async def run(self, store: Store) -> Outcome:
        return await run(store, self.agent, RUN, "go")

    def told(self) -> Any:
        """What the call came to, as the model or handler saw it last."""
        if self.kind == "handler":
            last = self.seen[-1]
            if last.interrupted:
                return "interrupted", last.partial
            return last.output
        content: Any = self.model.requests[-1][-1].content
        if isinstance(content, dict):
            return content["error"]["type"], content["error"].get("data")
        return content


kinds = pytest.mark.parametrize("kind", ["loop", "handler"])


async def reconcile(store: Store, outcome: Outcome, said: str, **more: Any) -> None:
    assert isinstance(outcome, Indeterminate)
    about = {"step": outcome.step, "start": outcome.unknown[0].start}
    await signal(store, RUN, "reconcile", {"outcome": said, **about, **more})


async def completed_via(store: Store) -> list[str]:
    records = (await store.load(RUN)).records
    kept = [r for r in records if isinstance(r, StepCompleted) and r.via != "run"]
    return [record.via for record in kept]


# ---- reconcile: the default ---------------------------------------------------------------------


@kinds
async def test_without_a_policy_a_person_is_asked_and_their_word_is_the_result(
    store: Store, kind: str
):
    post = Post(kind, "reconcile")
    outcome = await post.run(store)
    assert isinstance(outcome, Indeterminate)
    assert outcome.unknown[0].partial == "half 1"
    for _ in range(2):
        assert await post.run(store) == outcome
    await reconcile(store, outcome, "done", result="L-7")
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls) == ("L-7", ["mail"])


@kinds
async def test_a_permitted_retry_is_made_once_under_the_same_key(store: Store, kind: str):
    post = Post(kind, "reconcile")
    post.raising.append(OSError("cut again"))
    first = await post.run(store)
    await reconcile(store, first, "retry")
    second = await post.run(store)  # and is cut off: unknown again, for its own start
    assert isinstance(second, Indeterminate)
    assert isinstance(first, Indeterminate)
    assert second.unknown[0].start != first.unknown[0].start
    assert await post.run(store) == second
    await reconcile(store, second, "retry")
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), len(post.calls), len(set(post.keys))) == ("letter 3", 3, 1)


# ---- interrupt ----------------------------------------------------------------------------------


@kinds
async def test_an_interrupted_write_is_told_with_what_it_reported(store: Store, kind: str):
    post = Post(kind, "interrupt")
    for _ in range(2):
        assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls) == (("interrupted", "half 1"), ["mail"])
    assert await completed_via(store) == ["interrupted"]


@kinds
@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
async def test_a_crash_in_the_write_interrupts_it_too(kind: str, shared: bool):
    post = Post(kind, "interrupt", raising=Killed())
    store = FaultyStore(shared=shared)
    with pytest.raises(Killed):
        await post.run(store)
    assert (await state(PlainView(store), RUN)).status == "running"  # nobody need be asked
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls) == (("interrupted", "half 1"), ["mail"])


@kinds
async def test_a_cancelled_process_interrupts_it_too(store: Store, kind: str):
    post = Post(kind, "interrupt", raising=asyncio.CancelledError())
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls) == (("interrupted", "half 1"), ["mail"])


TWICE = (call("mail", to="anna"), call("mail", to="anna"), say("Sent."))
ANOTHER = (call("mail", to="anna"), call("mail", to="bob"), say("Sent."))


async def test_the_same_call_again_by_the_model_is_held_for_a_person(store: Store):
    post = Post("loop", "interrupt", replies=TWICE)
    asks = await post.run(store)
    assert isinstance(asks, AwaitingApproval)
    (pending,) = asks.pending
    assert (pending.step, "interrupted before" in pending.text) == ("tool/2/0/mail", True)
    assert post.calls == ["mail"]
    await signal(store, RUN, "approve", {"marker": pending.marker})
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls) == ("letter 2", ["mail", "mail"])


async def test_the_same_call_again_can_be_rejected(store: Store):
    post = Post("loop", "interrupt", replies=TWICE)
    asks = await post.run(store)
    assert isinstance(asks, AwaitingApproval)
    await signal(store, RUN, "reject", {"marker": asks.pending[0].marker})
    assert await post.run(store) == ended("Sent.")
    assert (post.told()[0], post.calls) == ("rejected", ["mail"])


async def test_another_call_of_the_tool_is_not_held(store: Store):
    post = Post("loop", "interrupt", replies=ANOTHER)
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls) == ("letter 2", ["mail", "mail"])


@pytest.mark.parametrize("next_turn", [False, True])
async def test_the_same_call_again_by_a_handler_is_held_for_a_person(store: Store, next_turn: bool):
    world = World()
    world.raising["pay"] = OSError()

    async def handler(ctx: Context) -> Next:
        if ctx.iteration == 0 or not next_turn:
            await ctx.tool(world.call("pay", 10, on_unknown="interrupt"))
            world.raising.clear()
        if next_turn and ctx.iteration == 0:
            return Continue(state="x")
        other = await ctx.tool(world.call("pay", 11, on_unknown="interrupt"))
        again = await ctx.tool(world.call("pay", 10, on_unknown="interrupt"))
        return Complete([other.output, again.output, again.error])

    agent = agent_of(handler)
    asks = await run(store, agent, RUN, "go")
    assert isinstance(asks, AwaitingApproval)
    assert (asks.pending[0].input, "interrupted before" in asks.pending[0].text) == (10, True)
    assert world.calls == ["pay", "pay"]
    await signal(store, RUN, "approve", {"marker": asks.pending[0].marker})
    assert await run(store, agent, RUN) == ended(["pay 2", "pay 3", None])


# ---- probe --------------------------------------------------------------------------------------


@kinds
async def test_a_probe_that_knows_of_the_effect_settles_the_write(store: Store, kind: str):
    post = Post(kind, "probe", probed=[Happened("L-1")])
    for _ in range(2):
        assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls, post.asked) == ("L-1", ["mail"], post.keys)
    assert await completed_via(store) == ["probe"]


@kinds
async def test_a_probe_that_knows_of_none_permits_exactly_one_retry(store: Store, kind: str):
    post = Post(kind, "probe", probed=[DidNotHappen(), Happened("L-2")])
    post.raising.append(OSError("cut again"))
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls, len(set(post.keys))) == ("L-2", ["mail", "mail"], 1)
    records = (await store.load(RUN)).records
    starts = [r for r in records if isinstance(r, StepStarted) and r.kind == "tool"]
    permits = [r for r in records if isinstance(r, Signal)]
    assert [start.permit for start in starts] == [0, permits[0].n]
    assert permits[0].payload["start"] == starts[0].n


@kinds
async def test_the_permitted_retry_of_a_probe_can_succeed(store: Store, kind: str):
    post = Post(kind, "probe", probed=[DidNotHappen()])
    assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls, post.asked) == ("letter 2", ["mail"] * 2, post.keys[:1])


@kinds
@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
async def test_a_crash_is_probed_by_whoever_comes_next(kind: str, shared: bool):
    store = FaultyStore(shared=shared)
    post = Post(kind, "probe", probed=[DidNotHappen(), Happened("L-2")], raising=Killed())
    post.raising.append(Killed())
    with pytest.raises(Killed):
        await post.run(store)
    if shared:  # it may be cut off, and at it
        assert isinstance(await post.run(store), Waiting)
        assert post.asked == []
    with deadlines_passed():
        with pytest.raises(Killed):
            await post.run(store)
        assert await post.run(store) == ended("Sent.")
    assert (post.told(), post.calls) == ("L-2", ["mail", "mail"])


NO_ANSWERS: dict[str, Any] = {
    "can't tell": CannotTell("the ledger is closed"),
    "raises": OSError("down"),
    "garbage": "yes",
    "nothing": None,
    "a class": Happened,
    "too late": "late",
    "cancelled from inside": asyncio.CancelledError(),
}


@kinds
@pytest.mark.parametrize("case", NO_ANSWERS)
async def test_a_probe_that_can_not_tell_leaves_the_write_to_a_person(
    store: Store, kind: str, case: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(journal.unknown, "PROBE_TIMEOUT_S", NOW_S)
    answer = asyncio.Event() if case == "too late" else NO_ANSWERS[case]
    post = Post(kind, "probe", probed=[answer])
    outcome = await post.run(store)
    assert isinstance(outcome, Indeterminate)
    for _ in range(2):  # not probed again: a person was asked
        assert await post.run(store) == outcome
    assert (post.calls, len(post.asked)) == (["mail"], 1)
    await reconcile(store, outcome, "done", result="L-9")
    assert await post.run(store) == ended("Sent.")
    assert post.told() == "L-9"


@kinds
async def test_a_probes_result_that_is_no_json_writes_nothing_false(store: Store, kind: str):
    post = Post(kind, "probe", probed=[Happened({1, 2})])
    outcome = await post.run(store)
    assert post.calls == ["mail"]
    assert isinstance(outcome, Indeterminate)


# ---- the journal's word and today's -------------------------------------------------------------

POLICIES = ("reconcile", "interrupt", "probe")


@kinds
@pytest.mark.parametrize("then", POLICIES)
@pytest.mark.parametrize("today", POLICIES)
async def test_a_policy_that_changed_since_the_start_leaves_the_write_to_a_person(
    kind: str, then: str, today: str
):
    if then == today:
        return
    store = FaultyStore(shared=True)
    before = Post(kind, then, raising=Killed())
    with pytest.raises(Killed):
        await before.run(store)
    after = Post(kind, today, probed=[Happened("wrong")])
    outcome = await after.run(store)
    assert isinstance(outcome, Indeterminate)
    assert (after.calls, after.asked) == ([], [])
    await reconcile(PlainView(store), outcome, "done", result="L-7")
    assert await after.run(store) == ended("Sent.")
    assert (after.told(), after.calls) == ("L-7", [])


@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
@pytest.mark.parametrize(("then", "today"), [(True, False), (False, True), (True, True)])
async def test_a_call_runs_again_only_if_recorded_and_declared_safe(
    shared: bool, then: bool, today: bool
):
    store, world = FaultyStore(shared=shared), World()

    def version(safe: bool) -> Agent:
        async def handler(ctx: Context) -> Next:
            return Complete((await ctx.tool(world.call("put", safe=safe))).output)

        return agent_of(handler)

    world.raising["put"] = Killed()
    with pytest.raises(Killed):
        await run(store, version(then), RUN, "go")
    world.raising.clear()
    outcome = await run(store, version(today), RUN)
    if then and today:
        assert outcome == ended("put 2")
        assert len(set(world.keys)) == 1
        return
    assert isinstance(outcome, Indeterminate)
    assert await run(store, version(today), RUN) == outcome
    await reconcile(PlainView(store), outcome, "done", result="by hand")
    assert await run(store, version(today), RUN) == ended("by hand")
    assert world.calls == ["put"]


@pytest.mark.parametrize("replay", ["unsafe", None, "UNSAFE"])
async def test_a_call_that_is_not_declared_safe_is_not_made_twice(replay: Any):
    store, calls = FaultyStore(), list[str]()

    async def put(call: ToolCall) -> JSON:
        calls.append("put")
        if len(calls) == 1:
            raise Killed
        return "x"

    async def handler(ctx: Context) -> Next:
        await ctx.tool(Call(name="put", input=None, fn=put, replay=replay))
        return Complete("x")

    with pytest.raises((Killed, RunfoldError, TypeError)):
        await run(store, agent_of(handler), RUN, "go")
    with contextlib.suppress(RunfoldError, TypeError):
        await run(store, agent_of(handler), RUN)
    assert len(calls) <= 1


# ---- late truth (R29) ---------------------------------------------------------------------------


def held_by_two(*, policy: Any = "reconcile") -> Log:
    """w0 started the payment and was fenced by w1, which asked a person."""
    return Log(
        started("go"),
        claimed("w0"),
        start_of("0/0", "pay", policy=policy),
        claimed("w1", reason="adopted"),
        parked("reconcile"),
    )


def pays(world: World, policy: Any = "reconcile") -> Agent:
    async def handler(ctx: Context) -> Next:
        paid = await ctx.tool(world.call("pay", on_unknown=policy))
        return Complete(paid.output)

    return agent_of(handler)


async def say_late(store: FaultyStore, start: int = 3) -> None:
    payload = {"step": "0/0", "start": start, "result": "P-late"}
    await signal(PlainView(store), RUN, "late", payload, worker=True)


async def test_a_late_result_settles_the_unknown_like_a_persons_done():
    store, world = await held_by_two().store(FaultyStore(shared=True)), World()
    await say_late(store)
    assert (await work(store, pays(world))).outcome == ended("P-late")
    assert world.calls == []
    assert await completed_via(store) == ["late"]


async def test_a_late_result_beats_a_retry_that_nothing_has_started_on():
    store, world = await held_by_two().store(FaultyStore(shared=True)), World()
    await signal(
        PlainView(store), RUN, "reconcile", {"step": "0/0", "outcome": "retry", "start": 3}
    )
    await say_late(store)
    assert (await work(store, pays(world))).outcome == ended("P-late")
    assert world.calls == []


async def test_a_late_result_beats_the_retry_as_it_is_about_to_start():
    store, world = await held_by_two().store(FaultyStore(shared=True)), World()
    store.answers["w0"] = "no"
    await signal(
        PlainView(store), RUN, "reconcile", {"step": "0/0", "outcome": "retry", "start": 3}
    )
    store.faults[store.appends + 2] = lambda: say_late(store)  # its claim, then the start
    assert (await work(store, pays(world))).outcome == ended("P-late")
    assert world.calls == []


async def waiting_to_retry() -> FaultyStore:
    """A retry is permitted while w0 says that its call still runs."""
    log = held_by_two()
    log.add(retry("0/0", 3))
    store = await log.store(FaultyStore(shared=True))
    store.answers["w0"] = "yes"
    return store


async def test_a_permitted_retry_waits_for_the_deadline_of_the_earlier_call():
    store, world, clock = await waiting_to_retry(), World(), Clock()
    for _ in range(3):  # and nobody looks again before
        waits = await work(store, pays(world), clock=clock)
        (on,) = waits.waiting_on
        assert (waits.status, on.what, on.until) == ("waiting", "timer", instant(DEADLINE))
        clock.passes(seconds=3600)
    assert (world.calls, store.asked) == ([], ["w0"])
    clock.now = instant(DEADLINE)
    store.answers["w0"] = "no"
    assert (await work(store, pays(world), clock=clock)).outcome == ended("pay 1")


async def test_a_worker_that_still_calls_past_the_deadline_is_asked_every_ack_wait():
    store, world, clock = await waiting_to_retry(), World(), Clock()
    clock.now = instant(DEADLINE)
    with deadlines_passed():
        for asked in range(1, 4):
            waits = await work(store, pays(world), clock=clock)
            assert waits.waiting_on[0].until == clock.now + timedelta(seconds=30)
            assert (waits.status, len(store.asked)) == ("waiting", asked)
            clock.passes(seconds=30)
        assert world.calls == []
        store.answers["w0"] = "nobody"
        assert (await work(store, pays(world), clock=clock)).outcome == ended("pay 1")


async def test_a_person_may_have_it_looked_at_before_the_deadline():
    store, world, clock = await waiting_to_retry(), World(), Clock()
    await work(store, pays(world), clock=clock)
    store.answers["w0"] = "no"
    await signal(PlainView(store), RUN, "resume", {})
    assert (await work(store, pays(world), clock=clock)).outcome == ended("pay 1")


async def test_a_late_result_ends_that_wait():
    store, world, clock = await waiting_to_retry(), World(), Clock()
    await work(store, pays(world), clock=clock)
    await say_late(store)
    assert (await folded(store)).runnable()
    assert (await work(store, pays(world), clock=clock)).outcome == ended("P-late")
    assert world.calls == []


async def test_a_late_result_that_comes_as_the_run_begins_to_wait_is_acted_on():
    store, world = await waiting_to_retry(), World()
    store.faults[store.appends + 2] = lambda: say_late(store)  # its claim, then the park
    assert (await work(store, pays(world))).outcome == ended("P-late")
    assert "park" not in (await types_of(store))[-3:]
    assert world.calls == []


async def test_a_word_that_comes_as_an_adopter_stops_to_ask_is_acted_on():
    store = await Log(started("go"), claimed("w0"), start_of("0/0", "pay")).store(
        FaultyStore(shared=True)
    )
    world = World()

    async def word() -> None:
        said = {"step": "0/0", "outcome": "done", "start": 3, "result": "P-7"}
        await signal(PlainView(store), RUN, "reconcile", said)

    store.faults[store.appends + 2] = word  # its claim, then the park
    assert (await work(store, pays(world))).outcome == ended("P-7")
    assert world.calls == []


@pytest.mark.parametrize("policy", ["interrupt", "probe"])
async def test_a_late_result_that_comes_as_the_policy_settles_is_the_result(policy: str):
    log = Log(started("go"), claimed("w0"), start_of("0/0", "pay", policy=policy))
    store, world = await log.store(FaultyStore(shared=True)), World()

    async def probe(key: str) -> Probed:
        return Happened("P-probe")

    async def handler(ctx: Context) -> Next:
        options: Any = {"probe": probe} if policy == "probe" else {}
        paid = await ctx.tool(world.call("pay", on_unknown=policy, **options))
        return Complete(paid.output)

    store.faults[store.appends + 2] = lambda: say_late(store)
    assert (await work(store, agent_of(handler))).outcome == ended("P-late")
    assert await completed_via(store) == ["late"]


async def test_a_late_result_of_an_earlier_start_is_refused():
    store, world = await waiting_to_retry(), World()
    store.answers["w0"] = "no"
    world.raising["pay"] = OSError()
    asks = await work(store, pays(world))
    assert isinstance(asks.outcome, Indeterminate)
    with pytest.raises(Exception, match="not the last start"):
        await say_late(store)


# ---- cancel (R56) -------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
async def test_a_cancelled_run_ends_when_its_unknown_write_is_settled(kind: str, shared: bool):
    post, store = Post(kind, "reconcile"), FaultyStore(shared=shared)
    first = await post.run(store)
    await signal(PlainView(store), RUN, "cancel", {"reason": "enough"})
    asks = await post.run(store)
    assert isinstance(asks, Indeterminate)
    await reconcile(PlainView(store), first, "done", result="L-7")
    assert await post.run(store) == Cancelled("enough")
    assert post.calls == ["mail"]


@kinds
@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
async def test_a_retry_on_a_cancelled_run_settles_the_write_as_not_made(kind: str, shared: bool):
    post, store = Post(kind, "reconcile"), FaultyStore(shared=shared)
    first = await post.run(store)
    await signal(PlainView(store), RUN, "cancel", {})
    await reconcile(PlainView(store), first, "retry")
    assert await post.run(store) == Cancelled("")
    assert post.calls == ["mail"]


@kinds
@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
async def test_an_interrupted_write_does_not_hold_up_a_cancelled_run(kind: str, shared: bool):
    post, store = Post(kind, "interrupt", raising=Killed()), FaultyStore(shared=shared)
    with pytest.raises(Killed):
        await post.run(store)
    await signal(PlainView(store), RUN, "cancel", {})
    assert await post.run(store) == Cancelled("")
    assert post.calls == ["mail"]
    assert await completed_via(store) == ["interrupted"]


@kinds
@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
async def test_a_write_to_be_probed_is_a_persons_matter_on_a_cancelled_run(kind: str, shared: bool):
    post, store = Post(kind, "probe", raising=Killed()), FaultyStore(shared=shared)
    with pytest.raises(Killed):
        await post.run(store)
    await signal(PlainView(store), RUN, "cancel", {})
    for _ in range(2):
        asks = await post.run(store)
        assert isinstance(asks, Indeterminate)
    await reconcile(PlainView(store), asks, "done", result="L-7")
    assert await post.run(store) == Cancelled("")
    assert (post.calls, post.asked) == (["mail"], [])


@kinds
async def test_nothing_starts_once_a_cancellation_is_in_the_journal(kind: str):
    for at in range(1, 8):
        post, store = Post(kind, "reconcile"), await begun()
        post.raising.clear()

        async def cancel(store: FaultyStore = store) -> None:
            await signal(PlainView(store), RUN, "cancel", {})

        store.faults[at] = cancel
        outcome = await run(store, post.agent, RUN)
        types = await types_of(store)
        if "signal" in types:
            assert "step.started" not in types[types.index("signal") :]
            assert isinstance(outcome, Cancelled)


@kinds
async def test_an_input_does_not_end_a_wait_for_a_person(kind: str):
    post, store = Post(kind, "reconcile"), FaultyStore(shared=True)
    outcome = await post.run(store)
    await submit(PlainView(store), RUN, "well?")
    assert await post.run(store) == outcome
    assert not (await folded(store)).runnable()
