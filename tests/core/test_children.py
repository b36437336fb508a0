"""Child runs (R57): started once, their end told once, failure and cancel handed on."""

from __future__ import annotations

from typing import Any

import pytest
from kit.build import RUN, FaultyStore, Killed, PlainView, folded, types_of
from kit.turns import World, agent_of, begun, ended, work

from journal.doors import signal, start, state
from journal.errors import ChildFailed, RunFinished, StaleSignal
from journal.ids import RunId
from journal.limits import CHILD_DEPTH_MAX
from journal.log import Log
from journal.owed import pay
from journal.records import Signal
from journal.terms import Complete, Continue, Fail, Next, Retry
from journal.views import Cancelled, Completed, Failed, Waiting
from worker.agent import Agent, turn
from worker.context import Context
from worker.runner import run

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]

both = pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
KID = RunId("a1.kid")


@turn("helpdesk", retry=Retry(attempts=1))
async def parent(ctx: Context) -> Next:
    child: Any = ctx.load_checkpoint()
    if child is None:
        child = await ctx.spawn("other", {"do": "it"}, name="kid")
        return Continue(state=child, until_child=child)
    return Complete(await ctx.child(child))


def child_that(outcome: Next) -> Agent:
    async def handler(ctx: Context) -> Next:
        assert ctx.input == {"do": "it"}
        return outcome

    return turn("other")(handler)


ANSWERS = child_that(Complete({"answer": 42}))
FAILS = child_that(Fail(reason="no_stock", detail="none left"))


async def signals(store: FaultyStore, run_id: str = RUN) -> list[Signal]:
    return [r for r in (await store.load(RunId(run_id))).records if isinstance(r, Signal)]


# ---- start and end ------------------------------------------------------------------------------


@both
async def test_a_child_is_a_run_of_its_own_whose_end_wakes_the_parent(shared: bool):
    store = await begun(shared=shared)
    waits = await run(store, parent, RUN)
    assert isinstance(waits, Waiting)
    assert [(on.what, "a1.kid" in on.ended_by) for on in waits.on] == [("child", True)]
    started = (await folded(store, KID)).started
    assert started is not None
    assert (started.agent, started.parent, started.depth) == ("other", RUN, 1)
    assert isinstance(await run(store, ANSWERS, KID), Completed)
    assert (await folded(store)).runnable()
    assert await run(store, parent, RUN) == ended({"answer": 42})


@both
async def test_a_childs_failure_reaches_the_parent_as_child_failed(shared: bool):
    store = await begun(shared=shared)
    await run(store, parent, RUN)
    await run(store, FAILS, KID)
    found = await run(store, parent, RUN)
    assert isinstance(found, Failed)
    assert found.reason == "child_failed"
    assert "no_stock" in found.detail


async def test_a_worker_records_that_failure_too_and_does_not_try_again():
    store = await begun()
    await work(store, parent)
    await work(store, FAILS, run=KID)
    found = (await work(store, parent)).outcome
    assert isinstance(found, Failed) and found.reason == "child_failed"
    assert (await folded(store)).attempt == 1


@both
async def test_a_parent_can_go_on_without_the_answer(shared: bool):
    async def handler(ctx: Context) -> Next:
        child: Any = ctx.load_checkpoint()
        if child is None:
            child = await ctx.spawn("other", {"do": "it"}, name="kid")
            return Continue(state=child, until_child=child)
        try:
            return Complete(await ctx.child(child))
        except ChildFailed as error:
            return Complete(error.message)

    store, agent = await begun(shared=shared), agent_of(handler)
    await run(store, agent, RUN)
    await run(store, FAILS, KID)
    found = await run(store, agent, RUN)
    assert isinstance(found, Completed)
    assert "no_stock" in str(found.message.content)


@both
async def test_a_cancelled_child_reaches_the_parent_as_child_failed(shared: bool):
    store = await begun(shared=shared)
    await run(store, parent, RUN)
    await signal(PlainView(store), KID, "cancel", {"reason": "not now"})
    assert await run(store, ANSWERS, KID) == Cancelled("not now")
    found = await run(store, parent, RUN)
    assert isinstance(found, Failed)
    assert "cancelled" in found.detail and "not now" in found.detail


@both
async def test_a_child_that_ended_before_the_parent_waits_is_not_waited_for(shared: bool):
    async def handler(ctx: Context) -> Next:
        child: Any = ctx.load_checkpoint()
        if child is None:
            child = await ctx.spawn("other", {"do": "it"}, name="kid")
            await run(PlainView(store), ANSWERS, KID)  # somebody else's work, meanwhile
            return Continue(state=child, until_child=child)
        return Complete(await ctx.child(child))

    store = await begun(shared=shared)
    assert await run(store, agent_of(handler), RUN) == ended({"answer": 42})
    assert (await types_of(store)).count("claim") == shared


@both
async def test_an_end_that_comes_as_the_parent_begins_to_wait_is_heard(shared: bool):
    store = await begun(shared=shared)

    async def end() -> None:
        await run(PlainView(store), ANSWERS, KID)

    real = store.append

    async def append(run_id: Any, entry: Any, *, expected: int) -> Any:
        if run_id == RUN and entry.type == "commit":
            store.append = real  # type: ignore[method-assign]
            await end()
        return await real(run_id, entry, expected=expected)

    store.append = append  # type: ignore[method-assign]
    assert await run(store, parent, RUN) == ended({"answer": 42})


async def test_a_child_that_has_not_ended_has_no_answer_yet():
    async def handler(ctx: Context) -> Next:
        child = await ctx.spawn("other", {"do": "it"}, name="kid")
        with pytest.raises(LookupError):
            await ctx.child(child)
        with pytest.raises(LookupError):
            await ctx.child(RunId("somebody.else"))
        return Complete("x")

    assert await run(await begun(), agent_of(handler), RUN) == ended("x")


# ---- starting it once ---------------------------------------------------------------------------


@both
@pytest.mark.parametrize("fault", ["killed before", "killed after", "ack lost", "lost"])
@pytest.mark.parametrize("at", range(1, 6))
async def test_a_parent_that_is_cut_off_starts_its_child_once(shared: bool, at: int, fault: Any):
    store = await begun(shared=shared)
    store.faults[at] = fault
    try:
        await run(store, parent, RUN)
    except Killed:
        await run(store, parent, RUN)
    store.faults.clear()
    assert await types_of(store, KID) == ["run.started"]
    await run(PlainView(store), ANSWERS, KID)
    assert await run(store, parent, RUN) == ended({"answer": 42})


async def test_the_same_name_is_the_same_child_and_another_name_another():
    async def handler(ctx: Context) -> Next:
        found = [await ctx.spawn("other", {"do": "it"}, name=n) for n in ("kid", "kid", "two")]
        return Complete(found)

    store = await begun()
    assert await run(store, agent_of(handler), RUN) == ended(["a1.kid", "a1.kid", "a1.two"])
    assert await types_of(store, KID) == ["run.started"]


async def test_a_new_attempt_has_the_same_child():
    store, world = await begun(), World()

    async def handler(ctx: Context) -> Next:
        child = await ctx.spawn("other", {"do": "it"}, name="kid")
        if not world.calls:
            world.calls.append("failed")
            raise KeyError
        return Complete(child)

    agent = agent_of(handler, retry=Retry(backoff_s=0.0))
    await work(store, agent)
    assert (await work(store, agent)).outcome == ended(KID)
    assert await types_of(store, KID) == ["run.started"]


async def test_a_child_of_the_same_name_with_another_input_fails_the_attempt_and_never_loops():
    store = await begun()

    async def handler(ctx: Context) -> Next:
        await ctx.spawn("other", {"do": "it"}, name="kid")
        await ctx.spawn("other", {"do": "that"}, name="kid")
        return Complete("x")

    found = (await work(store, agent_of(handler, retry=Retry(attempts=1)))).outcome
    assert isinstance(found, Failed)
    assert "another input" in found.detail


async def test_an_id_that_would_be_too_long_is_shortened_and_stays_the_same():
    long = "p" * 120
    store = FaultyStore(shared=True)
    await start(PlainView(store), "helpdesk", "go", run_id=long)

    async def handler(ctx: Context) -> Next:
        return Complete([await ctx.spawn("other", 1, name=n) for n in ("kid" * 5, "kid" * 5, "k2")])

    found = await run(store, agent_of(handler), long)
    assert isinstance(found, Completed)
    ids: Any = found.message.content
    assert ids[0] == ids[1] != ids[2]
    assert all(len(one) <= 128 for one in ids)


# ---- depth --------------------------------------------------------------------------------------


@turn("nest", retry=Retry(attempts=1))
async def nest(ctx: Context) -> Next:
    child: Any = ctx.load_checkpoint()
    if child is None:
        child = await ctx.spawn("nest", "go", name="c")
        return Continue(state=child, until_child=child)
    return Complete(await ctx.child(child))


@both
async def test_depth_is_bounded_and_the_deepest_run_fails_with_a_recorded_reason(shared: bool):
    store = FaultyStore(shared=shared)
    await start(PlainView(store), "nest", "go", run_id="n")
    run_id = "n"
    for _ in range(CHILD_DEPTH_MAX):
        await work(store, nest, run=run_id) if shared else await run(store, nest, run_id)
        run_id += ".c"
    assert (await folded(store, run_id)).started is not None
    if shared:
        found = (await work(store, nest, run=run_id)).outcome
        assert isinstance(found, Failed)
        assert "levels deep" in found.detail
        assert (await folded(store, "n" + ".c" * (CHILD_DEPTH_MAX - 1))).runnable()
    assert await types_of(store, run_id + ".c") == []


# ---- telling the parent -------------------------------------------------------------------------


@both
async def test_a_crash_between_the_childs_end_and_telling_its_parent_is_made_up_for(shared: bool):
    store = await begun(shared=shared)
    await run(store, parent, RUN)
    store.faults[store.appends + 2 + shared] = "killed before"  # claim, end, then the signal
    with pytest.raises(Killed):
        await run(store, ANSWERS, KID)
    assert (await folded(store, KID)).finished
    assert await signals(store) == []
    await pay(await Log.read(store, KID, by="whoever comes next"))
    assert await run(store, parent, RUN) == ended({"answer": 42})


async def test_telling_the_parent_again_adds_nothing():
    store = await begun()
    await work(store, parent)
    await work(store, ANSWERS, run=KID)
    for _ in range(3):
        await pay(await Log.read(store, KID, by="w2"))
    assert [s.name for s in await signals(store)] == ["child"]
    await work(store, parent)
    records = len(await types_of(store))
    await pay(await Log.read(store, KID, by="w2"))  # the parent has ended: nothing to tell
    assert len(await types_of(store)) == records


@both
async def test_running_a_child_that_has_ended_tells_its_parent_if_nobody_did(shared: bool):
    store = await begun(shared=shared)
    await run(store, parent, RUN)
    store.faults[store.appends + 2 + shared] = "killed before"
    with pytest.raises(Killed):
        await run(store, ANSWERS, KID)
    await run(store, ANSWERS, KID)  # the same answer again
    assert [s.name for s in await signals(store)] == ["child"]


async def test_only_a_child_can_say_that_it_ended():
    store = await begun()
    await work(store, parent)
    said: Any = {"run": "stranger", "outcome": {"status": "completed"}}
    with pytest.raises(StaleSignal):
        await signal(PlainView(store), RUN, "child", said, worker=True)


# ---- cancel (R56) -------------------------------------------------------------------------------


@both
async def test_a_cancelled_parent_cancels_its_children(shared: bool):
    store, world = await begun(shared=shared), World()

    async def kid(ctx: Context) -> Next:
        await ctx.tool(world.call("pay"))
        return Complete("x")

    await run(store, parent, RUN)
    await signal(PlainView(store), RUN, "cancel", {"reason": "enough"})
    assert await run(store, parent, RUN) == Cancelled("enough")
    assert (await folded(store, KID)).cancel is not None
    found = await run(store, turn("other")(kid), KID)
    assert isinstance(found, Cancelled)
    assert RUN in found.reason
    assert world.calls == []


async def test_a_failed_parent_cancels_the_children_that_still_run():
    async def handler(ctx: Context) -> Next:
        await ctx.spawn("other", {"do": "it"}, name="kid")
        await ctx.spawn("other", {"do": "it"}, name="two")
        await run(PlainView(store), ANSWERS, "a1.two")
        return Fail(reason="no_stock")

    store = await begun()
    await work(store, agent_of(handler))
    assert (await folded(store, KID)).cancel is not None
    assert (await state(store, "a1.two")).status == "completed"


async def test_a_cancel_goes_all_the_way_down():
    store = FaultyStore(shared=True)
    await start(PlainView(store), "nest", "go", run_id="n")
    for run_id in ("n", "n.c"):
        await work(store, nest, run=run_id)
    await signal(PlainView(store), "n", "cancel", {})
    for run_id in ("n", "n.c", "n.c.c"):
        assert isinstance((await work(store, nest, run=run_id)).outcome, Cancelled)


async def test_a_crash_between_the_parents_end_and_cancelling_its_children_is_made_up_for():
    store = await begun()
    await work(store, parent)
    await signal(PlainView(store), RUN, "cancel", {})
    store.faults[store.appends + 3] = "killed before"  # claim, end, then the child's cancel
    with pytest.raises(Killed):
        await work(store, parent)
    assert (await folded(store)).finished
    await pay(await Log.read(store, RUN, by="whoever comes next"))
    assert (await folded(store, KID)).cancel is not None


async def test_a_child_that_ends_after_its_parent_was_cancelled_does_no_harm():
    store = await begun()
    await work(store, parent)
    await signal(PlainView(store), RUN, "cancel", {})
    await work(store, parent)
    with pytest.raises(RunFinished):
        await signal(PlainView(store), RUN, "resume", {})
    await work(store, ANSWERS, run=KID)
    assert isinstance((await state(store, RUN)).outcome, Cancelled)


async def test_a_child_with_a_priority_that_is_none_is_never_started():
    """Whoever had to wake it could not, for ever."""

    async def handler(ctx: Context) -> Next:
        return Complete(await ctx.spawn("other", 1, name="kid", priority=7))

    store = await begun()
    found = (await work(store, agent_of(handler, retry=Retry(attempts=1)))).outcome
    assert isinstance(found, Failed)
    assert "priority" in found.detail
    assert await types_of(store, KID) == []
