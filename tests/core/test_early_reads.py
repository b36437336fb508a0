"""A read may run while its start travels; nothing else may, and no result comes before it (R25)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kit.build import RUN, PlainView, claimed, folded, write_as_other
from kit.reads import (
    LOOK,
    PAY,
    Function,
    begin,
    call_of,
    gated,
    job,
    opened,
    some_turns,
    types_of,
    until,
)

from journal.doors import signal
from journal.errors import Fenced, RunCancelled, StoreUnavailable
from journal.handle import Journal
from journal.messages import JSON
from journal.steps import Call, make_call

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(30)]


async def test_a_read_runs_while_its_start_travels_and_its_result_waits_for_it():
    store, journal = await opened()
    async with journal:
        gate, function = gated(store), Function()
        step = begin(journal, job(call_of(), function))
        await function.begun.wait()
        await gate.came()
        function.go_on.set()
        await until(lambda: function.ended != "")
        await some_turns()
        assert await types_of(store) == ["run.started"] and not step.done()
        gate.open.set()
        (completed,) = await step
        assert completed.result == "seen"
    assert await types_of(store) == ["run.started", "step.started", "step.completed"]


async def test_a_start_that_stands_first_changes_nothing_for_the_call():
    _store, journal = await opened()
    async with journal:
        function = Function()
        step = begin(journal, job(call_of(), function))
        await until(lambda: LOOK in journal.fold.open)
        await some_turns()
        assert function.begun.is_set() and not function.ended
        function.go_on.set()
        assert [one.result for one in await step] == ["seen"]


@pytest.mark.parametrize(
    "call",
    [
        make_call("llm/1", "model", "", None, unsafe=False),
        call_of(read=False),  # a write that dedupes on its key
        call_of(read=True, unsafe=True),  # declared a read, and the gate says otherwise
    ],
    ids=["model", "keyed write", "write"],
)
async def test_what_is_no_read_waits_for_its_start(call: Call):
    store, journal = await opened()
    async with journal:
        gate, function = gated(store), Function(at_once=True)
        step = begin(journal, job(call, function))
        await gate.came()
        await some_turns()
        assert not function.begun.is_set()
        gate.open.set()
        await step


async def test_in_a_directory_a_read_waits_for_its_start():
    store, journal = await opened(shared=False)
    async with journal:
        gate, function = gated(store), Function(at_once=True)
        step = begin(journal, job(call_of(), function))
        await gate.came()
        assert not function.begun.is_set()
        gate.open.set()
        await step


@pytest.mark.parametrize("read", [False, True], ids=["a write", "a read that the gate calls one"])
async def test_beside_a_write_a_read_waits_for_its_start_too(read: bool):
    store, journal = await opened()
    async with journal:
        gate, look, pay = gated(store), Function(at_once=True), Function(at_once=True)
        write = job(call_of(PAY, read=read, unsafe=True), pay)
        steps = begin(journal, job(call_of(), look), write)
        await gate.came()
        await some_turns()
        assert not look.begun.is_set() and not pay.begun.is_set()
        gate.open.set()
        assert len(await steps) == 2


async def test_a_read_that_the_journal_knows_as_a_write_is_none_in_a_group():
    store, journal = await opened()
    async with journal:
        broken = Function(at_once=True, raises=KeyError("gone"))
        with pytest.raises(KeyError):
            await journal.steps([job(call_of(PAY, read=False, unsafe=True), broken)])
    await signal(PlainView(store), RUN, "reconcile", {"step": PAY, "outcome": "retry"})
    store.otherwise = "no"
    async with await Journal.open(store, RUN, is_write=lambda tool: True) as journal:
        gate, look, pay = gated(store), Function(at_once=True), Function(at_once=True)
        steps = begin(journal, job(call_of(), look), job(call_of(PAY), pay))
        await gate.came()
        await some_turns()
        assert not look.begun.is_set() and not pay.begun.is_set()
        gate.open.set()
        assert [one.result for one in await steps] == ["seen"] * 2


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_read_whose_start_is_fenced_comes_to_nothing(at_once: bool):
    store, journal = await opened()
    function = Function(at_once=at_once)
    store.faults[store.appends + 1] = lambda: write_as_other(store, claimed("rival"))
    with pytest.raises(Fenced, match="rival"):
        await journal.steps([job(call_of(), function)])
    assert function.ended == ("by itself" if at_once else "cut off")
    await journal.close()
    assert await types_of(store) == ["run.started"]
    task = asyncio.current_task()
    assert task is not None and not task.cancelling()  # our own cutting off is over


@pytest.mark.parametrize("ends", ["at once", "before its start", "cut off"])
async def test_a_read_whose_run_is_cancelled_as_its_start_travels_comes_to_nothing(ends: str):
    store, journal = await opened()
    function = Function(at_once=ends == "at once")

    async def cancel() -> None:
        if ends == "before its start":
            function.go_on.set()
            await until(lambda: function.ended != "")
            await some_turns()
        await signal(PlainView(store), RUN, "cancel", {}, request_id="c1")

    store.faults[store.appends + 1] = cancel
    with pytest.raises(RunCancelled):
        await journal.steps([job(call_of(), function)])
    assert function.ended == ("cut off" if ends == "cut off" else "by itself")
    assert await types_of(store) == ["run.started", "signal"]
    await journal.close()


async def test_a_start_is_decided_before_the_call_begins_and_again_at_any_tail_after_it():
    store, journal = await opened()

    async def look() -> JSON:
        await signal(PlainView(store), RUN, "cancel", {}, request_id="c1")
        await journal.refresh()  # as a heartbeat does, between decision and append
        return "seen"

    with pytest.raises(RunCancelled):
        await journal.steps([job(call_of(), look)])
    assert await types_of(store) == ["run.started", "signal"]
    await journal.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_an_exception_of_a_read_is_raised_once_its_start_stands(at_once: bool):
    store, journal = await opened()
    async with journal:
        gate, function = gated(store), Function(at_once=at_once, raises=KeyError("gone"))
        step = begin(journal, job(call_of(), function))
        await gate.came()
        function.go_on.set()
        await some_turns()
        assert function.ended and not step.done()
        gate.open.set()
        with pytest.raises(KeyError):
            await step
        assert await types_of(store) == ["run.started", "step.started"]


@pytest.mark.parametrize("fault", ["ack lost", "lost", "lands in the read-back"])
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_start_of_unknown_outcome_is_settled_before_the_result(fault: Any, at_once: bool):
    store, journal = await opened()
    async with journal:
        function = Function(at_once=at_once)
        store.faults[store.appends + 1] = fault
        step = begin(journal, job(call_of(), function))
        await until(lambda: LOOK in journal.fold.steps)
        function.go_on.set()
        assert [one.result for one in await step] == ["seen"]
    assert await types_of(store) == ["run.started", "step.started", "step.completed"]


async def test_a_start_that_stays_unknown_ends_the_handle_and_the_call():
    store, journal = await opened()
    function = Function()
    store.every = "lost"
    with pytest.raises(StoreUnavailable):
        await journal.steps([job(call_of(), function)])
    assert function.ended == "cut off"
    again = Function(at_once=True)
    with pytest.raises(Fenced):
        await journal.steps([job(call_of(), again)])
    assert not again.begun.is_set()
    await journal.close()


@pytest.mark.parametrize("stands", [True, False])
async def test_a_cancelled_turn_ends_the_call_and_the_append_of_its_start(stands: bool):
    store, journal = await opened()
    gate, function = gated(store), Function()
    if stands:
        gate.open.set()
    step = begin(journal, job(call_of(), function))
    await function.begun.wait()
    await gate.came()
    await until(lambda: not stands or LOOK in journal.fold.open)
    step.cancel()
    await asyncio.wait([step])
    assert step.cancelled() and function.ended == "cut off"
    assert journal.cut_off is not stands and gate.open.is_set() is stands
    await journal.recover()
    again = Function(at_once=True)
    (completed,) = await journal.steps([job(call_of(), again)])
    assert completed.result == "seen"
    await journal.close()
    assert (await folded(store)).open == {}


async def test_a_turn_that_is_cancelled_while_its_start_fails_stays_cancelled():
    store, journal = await opened()

    async def look() -> JSON:
        try:
            await asyncio.Event().wait()
        finally:
            step.cancel()  # as whoever watches the turn does, while the call is being cut off

    store.faults[store.appends + 1] = lambda: write_as_other(store, claimed("rival"))
    step = begin(journal, job(call_of(), look))
    await asyncio.wait([step])
    assert step.cancelled()
    await journal.close()


async def test_what_a_read_reports_comes_after_its_start():
    store, journal = await opened()
    async with journal:

        async def look() -> JSON:
            await journal.progress(LOOK, "half")
            return "seen"

        await journal.steps([job(call_of(), look)])
    assert await types_of(store) == [
        *("run.started", "step.started"),
        *("step.progress", "step.completed"),
    ]


async def test_a_time_limit_of_the_call_is_its_own():
    _store, journal = await opened()
    async with journal:

        async def look() -> JSON:
            try:
                async with asyncio.timeout(0):
                    await asyncio.Event().wait()
            except TimeoutError:
                return "late"

        assert [one.result for one in await journal.steps([job(call_of(), look)])] == ["late"]


async def test_reads_at_once_have_each_their_start_before_their_result():
    store, journal = await opened()
    async with journal:
        functions = [Function() for _ in range(3)]
        jobs = [job(call_of(f"tool/1/{n}/look"), one) for n, one in enumerate(functions)]
        gate = gated(store)
        steps = begin(journal, *jobs)
        await gate.came()
        for one in functions:
            await one.begun.wait()
            one.go_on.set()
        gate.open.set()
        assert [one.result for one in await steps] == ["seen"] * 3
    fold = await folded(store)
    assert all(s.completed is not None and s.last.n < s.completed.n for s in fold.steps.values())
