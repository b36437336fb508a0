"""What mutants of the shells survived (docs/guards.md): promises that no other test looked at."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Log,
    PlainView,
    VirtualTime,
    claimed,
    released,
    result_of,
    retry,
    start_of,
    started,
    types_of,
    write_as_other,
)

from journal.claims import Answer
from journal.doors import start
from journal.errors import Fenced, InvalidId, ToolError
from journal.handle import Journal
from journal.limits import APPEND_BUDGET_S
from journal.messages import JSON
from journal.records import StepCompleted, StepStarted
from journal.stepping import RetryLater
from journal.steps import DidNotHappen, Probed, make_call
from journal.unknown import Ways

PAY = "tool/1/0/pay"


async def opened(*, shared: bool) -> tuple[FaultyStore, Journal, list[str]]:
    """A run that has just started, held; and the calls that were made."""
    store = FaultyStore(shared=shared)
    await start(PlainView(store), "helpdesk", "go", run_id=RUN)
    journal = await Journal.open(store, RUN, is_write=lambda _: True, ack_wait_s=30)
    return store, journal, []


@pytest.mark.parametrize("name", ["", "a step", "pay\n", "pay*", "ä", "p" * 201])
async def test_a_step_has_a_name_that_can_stand_in_keys_and_markers(name: str):
    store, journal, calls = await opened(shared=False)

    async def pay() -> JSON:
        calls.append(name)
        return None

    with pytest.raises(InvalidId, match="not a step's name"):
        await journal.run_step(name, "tool", pay, tool="pay")
    assert (calls, await types_of(store)) == ([], ["run.started"])


async def test_a_write_whose_start_took_longer_than_its_deadline_allows_is_not_made(
    time: VirtualTime,
):
    """The recorded deadline, after which a retry may be permitted, counts from the append's budget:
    a call that began later could still be running then."""
    store, journal, calls = await opened(shared=True)
    real = store.append

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await real(*args, **kwargs)
        time.now += APPEND_BUDGET_S + 1
        return answer

    async def pay() -> JSON:
        calls.append("pay")
        return None

    store.append = slow  # type: ignore[method-assign]
    with pytest.raises(ToolError, match="took too long"):
        await journal.run_step(PAY, "tool", pay, tool="pay")
    assert calls == []
    done = journal.fold.steps[PAY].completed
    assert done is not None
    assert done.via == "not_called"


@pytest.mark.dishonest
@pytest.mark.usefixtures("no_waiting")
async def test_a_result_is_not_recorded_beside_somebody_elses():
    """Past the lock, where nothing else fences: the step has its one result, and who made it again
    goes on with nothing."""
    store, journal, _ = await opened(shared=False)

    async def pay() -> JSON:
        await write_as_other(store, result_of(PAY, "theirs"))
        return "mine"

    with pytest.raises(Fenced, match="by somebody else"):
        await journal.run_step(PAY, "tool", pay, tool="pay")
    assert await types_of(store) == ["run.started", "step.started", "step.completed"]


async def test_a_handle_given_up_while_a_late_call_reads_the_tail_never_calls(time: VirtualTime):
    store, journal, calls = await opened(shared=True)
    append, load = store.append, store.load

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await append(*args, **kwargs)
        time.now += 11  # more than a third of the ack wait
        return answer

    async def given_up(*args: Any, **kwargs: Any) -> Any:
        journal.give_up()
        return await load(*args, **kwargs)

    async def pay() -> JSON:
        calls.append("pay")
        return None

    store.append, store.load = slow, given_up  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        await journal.run_step(PAY, "tool", pay, tool="pay")
    assert (calls, (await types_of(store))[-1]) == ([], "step.started")


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("answer", ["yes", "silent", "nobody"])
async def test_a_write_is_not_probed_while_its_call_may_still_run(answer: Answer):
    """ "It did not happen" would not be the last word then: the call may happen after it (R27)."""
    log = Log(started(), claimed("w0"), start_of(PAY, policy="probe"), released())
    store, probed = FaultyStore(shared=True), list[str]()
    await log.store(store)
    store.answers["w0"] = answer

    async def probe(key: str) -> Probed:
        probed.append(key)
        return DidNotHappen()

    async def perform(start: StepStarted) -> StepCompleted:
        raise AssertionError("called")

    call = make_call(PAY, "tool", "pay", None, unsafe=True, policy="probe")
    async with await Journal.open(store, RUN, is_write=lambda _: True) as journal:
        with pytest.raises(RetryLater):
            await journal.step(call, perform, Ways(probe=probe))
    assert probed == []
    assert "signal" not in await types_of(store)


@pytest.mark.parametrize("how", ["in its thread", "in the handle before"])
async def test_no_permitted_retry_runs_beside_a_call_that_this_process_left_running(how: str):
    """A lock says nothing of it: it is this very process that still makes the call (R22)."""
    log = Log(started(), start_of(PAY), retry(PAY, 2))
    store, calls = FaultyStore(), list[str]()
    await log.store(store)
    running: Future[Any] = Future()

    async def pay() -> JSON:
        calls.append("pay")
        return None

    journal = await Journal.open(store, RUN, is_write=lambda _: True)
    if how == "in its thread":
        journal.abandoned.append(running)
    else:
        journal.left.add(2)
    with pytest.raises(RetryLater):
        await journal.run_step(PAY, "tool", pay, tool="pay")
    assert calls == []
    running.set_result(None)
    journal.left.clear()
    journal.begin_turn()
    await journal.run_step(PAY, "tool", pay, tool="pay")
    assert calls == ["pay"]
    await journal.close()
