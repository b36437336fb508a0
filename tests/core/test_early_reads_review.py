"""Adversarial review of early reads (R25): what a read makes of its task harms nobody else, and a
call whose start is refused leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable

import pytest
from kit.build import (
    AT,
    RUN,
    FaultyStore,
    Log,
    PlainView,
    VirtualTime,
    claimed,
    folded,
    parked,
    retry,
    start_of,
    started,
    write_as_other,
)
from kit.reads import (
    LOOK,
    Function,
    Gate,
    begin,
    call_of,
    gated,
    job,
    opened,
    some_turns,
    types_of,
    until,
)

from journal.codec import Entry
from journal.doors import signal
from journal.errors import Fenced, RunCancelled, TooLarge
from journal.handle import Journal
from journal.ids import RunId
from journal.limits import RECORD_BYTES_MAX
from journal.messages import JSON
from journal.steps import make_call
from journal.store import AppendAnswer
from journal.unknown import Ways

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(30)]


class Panic(BaseException):
    """As an extension in Rust raises it: no Exception."""


def cancelling() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def test_a_read_that_ends_as_no_exception_leaves_no_append_and_no_cancellation_behind():
    store, journal = await opened()
    gate = gated(store)

    async def look() -> JSON:
        await gate.came()
        raise Panic

    before = asyncio.all_tasks()
    with pytest.raises(Panic):
        await journal.steps([job(call_of(), look)])
    assert asyncio.all_tasks() == before
    await write_as_other(store, claimed("rival"))
    gate.open.set()
    for _ in range(20):
        await asyncio.sleep(0)  # would raise CancelledError
    await journal.close()
    assert not cancelling()
    assert await types_of(store) == ["run.started"]


async def test_a_read_that_makes_no_exception_of_its_cutting_off_leaves_no_cancellation_behind():
    store, journal = await opened()

    async def look() -> JSON:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise Panic from None

    store.faults[store.appends + 1] = lambda: write_as_other(store, claimed("rival"))
    with pytest.raises(Panic):
        await journal.steps([job(call_of(), look)])
    assert not cancelling()
    await journal.close()
    assert await types_of(store) == ["run.started"]


async def test_nothing_that_a_call_of_a_refused_start_reports_is_recorded():
    store, journal = await opened()
    broken = Function(at_once=True, raises=KeyError("gone"))
    with pytest.raises(KeyError):
        await journal.steps([job(call_of(), broken)])
    await journal.close()
    journal = await Journal.open(store, RUN, is_write=lambda tool: False)
    assert LOOK in journal.fold.open  # by the start of the earlier holder

    reports: list[asyncio.Task[None]] = []

    async def look() -> JSON:
        reports.append(asyncio.create_task(journal.progress(LOOK, "by a task of its own")))
        await journal.progress(LOOK, "half")
        await asyncio.Event().wait()

    async def cancel() -> None:
        await signal(PlainView(store), RUN, "cancel", {}, request_id="c1")

    store.faults[store.appends + 1] = cancel
    with pytest.raises(RunCancelled):
        await journal.steps([job(call_of(), look)])
    await reports[0]
    assert await types_of(store) == ["run.started", "step.started", "signal"]
    await journal.close()


async def test_a_read_that_is_a_write_of_an_earlier_attempt_waits_for_its_start():
    store = FaultyStore(shared=True)
    await Log(
        *(started(), claimed(), start_of("0/0", "look", deadline=AT)),
        *(parked("reconcile", steps=("0/0",)), retry("0/0", 3)),
        *(claimed("w2"), parked("retry", afresh=True, until=AT), claimed("w3")),
    ).store(store)
    store.otherwise = "no"
    journal = await Journal.open(store, RUN, is_write=lambda tool: False)
    (honoured,) = journal.fold.honoured["look", call_of().digest]
    gate, function = gated(store), Function(at_once=True)
    call, perform, _ = job(call_of(), function)
    steps = begin(journal, (call, perform, Ways(honoured=honoured)))
    await gate.came()
    await some_turns()
    assert not function.begun.is_set()
    gate.open.set()
    await steps
    assert function.ended == "by itself"
    await journal.close()


async def test_while_it_is_recorded_that_a_write_was_not_called_the_run_is_not_given_up(
    time: VirtualTime,
):
    """A heartbeat that has seen the cancellation cuts the turn off once no write is under way."""
    store, journal = await opened()

    async def cancelled_long_before_its_ack() -> None:
        await signal(PlainView(store), RUN, "cancel", {}, request_id="c1")
        time.now += journal.ack_wait_s

    write = Function(at_once=True)
    real = store.append

    async def append(run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        answer = await real(run_id, entry, expected=expected)
        if entry.type == "step.started":
            await cancelled_long_before_its_ack()
        return answer

    store.append = append  # type: ignore[method-assign]
    gate = store.faults[store.appends + 2] = Gate()
    step = begin(journal, job(call_of(read=False, unsafe=True), write))
    await gate.came()
    assert journal.writes == 1 and not journal.idle.is_set()
    gate.open.set()
    (completed,) = await step
    assert completed.via == "not_called" and not write.begun.is_set()
    await journal.close()


async def test_a_call_that_waits_for_its_own_report_as_it_is_cut_off_ends():
    store, journal = await opened()

    async def look() -> JSON:
        report = asyncio.ensure_future(journal.progress(LOOK, "half"))
        try:
            await asyncio.Event().wait()
        finally:
            await report

    async def cancel() -> None:
        await signal(PlainView(store), RUN, "cancel", {}, request_id="c1")

    store.faults[store.appends + 1] = cancel
    async with asyncio.timeout(5):
        with pytest.raises(RunCancelled):
            await journal.steps([job(call_of(), look)])
    await journal.close()


async def _swallows() -> JSON:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "swallowed"


async def _uncancels() -> JSON:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        return "uncancelled"


async def _other_error() -> JSON:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise KeyError("gone") from None


async def _limited() -> JSON:
    async with asyncio.timeout(5):
        await asyncio.Event().wait()


async def _grouped() -> JSON:
    async with asyncio.TaskGroup() as group:
        group.create_task(_swallows())
        group.create_task(_other_error())


async def _slow_to_end() -> JSON:
    try:
        await asyncio.Event().wait()
    finally:
        for _ in range(5):
            await asyncio.sleep(0)


async def _in_a_thread() -> JSON:
    await asyncio.to_thread(lambda: None)
    await asyncio.Event().wait()


KINDS = [
    *(_swallows, _uncancels, _other_error, _limited, _grouped, _slow_to_end, _in_a_thread),
]


@pytest.mark.parametrize("look", KINDS)
async def test_whatever_a_read_makes_of_its_cutting_off_the_refusal_is_raised(
    look: Callable[[], JSON],
):
    store, journal = await opened()
    store.faults[store.appends + 1] = lambda: write_as_other(store, claimed("rival"))
    async with asyncio.timeout(5):
        with pytest.raises(Fenced, match="rival"):
            await journal.steps([job(call_of(), look)])
        assert not cancelling()
    await journal.close()
    assert await types_of(store) == ["run.started"]


@pytest.mark.parametrize("look", KINDS)
async def test_beside_others_a_read_whose_start_is_refused_harms_none(look: Callable[[], JSON]):
    """A start that is refused for itself (its input is too large) leaves the others theirs."""
    store, journal = await opened()
    async with journal:
        huge = make_call("tool/1/1/look", "tool", "look", "x" * RECORD_BYTES_MAX, unsafe=False,
                         read=True)  # fmt: skip
        other = Function()
        steps = begin(journal, job(huge, look), job(call_of(), other))
        await until(lambda: LOOK in journal.fold.open)
        other.go_on.set()
        with pytest.raises(TooLarge):
            await steps
        assert journal.fold.done(LOOK)
    fold = await folded(store)
    assert list(fold.steps) == [LOOK]


async def test_a_call_keeps_its_context_from_its_first_step_on():
    kept: contextvars.ContextVar[str] = contextvars.ContextVar("kept", default="")
    _store, journal = await opened()

    async def look() -> JSON:
        token = kept.set("mine")
        task = asyncio.current_task()
        await asyncio.sleep(0)
        assert asyncio.current_task() is task and kept.get() == "mine"
        kept.reset(token)  # raises in another context
        return kept.get()

    async with journal:
        assert [one.result for one in await journal.steps([job(call_of(), look)])] == [""]


@pytest.mark.parametrize("swallows", [True, False])
async def test_a_time_limit_around_a_read_stays_its_owners_while_its_start_is_refused(
    swallows: bool,
):
    store, journal = await opened()
    limits: list[asyncio.Timeout] = []

    async def look() -> JSON:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            limits[0].reschedule(0)  # it is over now
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not swallows:
                    raise
        return "late"

    store.faults[store.appends + 1] = lambda: write_as_other(store, claimed("rival"))

    async def turn() -> None:
        async with asyncio.timeout(None) as limit:
            limits.append(limit)
            await journal.steps([job(call_of(), look)])

    with pytest.raises(TimeoutError):
        await turn()
    assert not cancelling()
    await journal.close()
