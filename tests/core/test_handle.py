"""PROTOCOL 3: the append rule. Whatever an append answers, each record is there once and no write
is called twice; a holder that lost the run, or does not know, goes on with nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Killed,
    Log,
    PlainView,
    VirtualTime,
    answered,
    approved,
    asking,
    claimed,
    folded,
    parked,
    result_of,
    retry,
    start_of,
    started,
    types_of,
    write_as_other,
)

from journal import limits
from journal.codec import Entry
from journal.doors import start
from journal.errors import (
    ConcurrentUse,
    Fenced,
    IndeterminateError,
    JournalDamaged,
    NewerVersion,
    NotEncodable,
    ReplayMismatch,
    RunFinished,
    RunNotFound,
    StoreLocked,
    StoreUnavailable,
    TooLarge,
    ToolError,
)
from journal.handle import Journal
from journal.ids import RunId
from journal.messages import JSON
from journal.records import RunStarted, StepCompleted
from journal.stepping import RetryLater
from journal.store import AppendAnswer, Loaded, Unknown
from journal.stores.memory import MemoryStore

LLM, READ, PAY = "llm/1", "tool/1/0/lookup", "tool/1/1/pay"
APPENDS = 6  # of the three steps below: a start and a result each
KEPT = approved(asking(9, 9, "later").marker)  # a signal about a call that is not there yet

pytestmark = pytest.mark.usefixtures("no_waiting")


class World:
    """What happened outside: each call of each step, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.during: dict[str, Callable[[], Awaitable[JSON]]] = {}

    def call(self, step: str) -> Callable[[], Awaitable[JSON]]:
        async def fn() -> JSON:
            self.calls.append(step)
            if step in self.during:
                return await self.during[step]()
            return f"result of {step}"

        return fn


async def opened(store: MemoryStore) -> Journal:
    return await Journal.open(store, RUN, is_write=lambda tool: tool == "pay", ack_wait_s=30)


async def three_steps(journal: Journal, world: World) -> list[JSON]:
    """A model call, a read, a write: what every test below goes through."""
    return [
        await journal.run_step(LLM, "model", world.call(LLM)),
        await journal.run_step(READ, "tool", world.call(READ), tool="lookup", input={"q": 1}),
        await journal.run_step(PAY, "tool", world.call(PAY), tool="pay", input={"amount": 1}),
    ]


async def fresh(store: FaultyStore) -> FaultyStore:
    await start(PlainView(store), "helpdesk", "go", run_id=RUN)
    return store


ALL = [f"result of {step}" for step in (LLM, READ, PAY)]
STEPS = ["step.started", "step.completed"] * 3


def ignoring_signals(types: list[str]) -> list[str]:
    return [type for type in types if type not in ("signal", "claim", "release")]


# ---- one fault at each append -----------------------------------------------------------------

FAULTS = ["ack lost", "lost", "lands in the read-back", "lands before the next append"]


@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
@pytest.mark.parametrize("at", range(1, APPENDS + 1))
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_append_of_unknown_outcome_is_settled_by_reading_back(
    fault: Any, at: int, shared: bool
):
    store = await fresh(FaultyStore(shared=shared))
    world = World()
    async with await opened(store) as journal:
        store.faults[store.appends + at] = fault
        assert await three_steps(journal, world) == ALL
    assert world.calls == [LLM, READ, PAY]
    assert ignoring_signals(await types_of(store)) == ["run.started", *STEPS]
    assert (await folded(store)).open == {}
    assert store.faults == {}


@pytest.mark.parametrize("at", range(1, APPENDS + 1))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stale", [1, 3])
async def test_a_stale_read_settles_nothing(fault: Any, at: int, stale: int):
    store = await fresh(FaultyStore(shared=True))
    world = World()
    async with await opened(store) as journal:
        store.faults[store.appends + at] = fault
        real, armed = store.append, [True]

        async def append(*args: Any, **kwargs: Any) -> Any:
            answer = await real(*args, **kwargs)
            if fault not in store.faults.values() and armed:
                armed.clear()
                store.stale_reads = stale
            return answer

        store.append = append  # type: ignore[method-assign]
        assert await three_steps(journal, world) == ALL
    store.stale_reads = 0
    assert world.calls == [LLM, READ, PAY]
    assert ignoring_signals(await types_of(store)) == ["run.started", *STEPS]
    assert (await folded(store)).open == {}


@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
@pytest.mark.parametrize("at", range(1, APPENDS + 1))
async def test_a_signal_that_comes_in_between_only_moves_the_tail(at: int, shared: bool):
    store = await fresh(FaultyStore(shared=shared))
    world = World()
    async with await opened(store) as journal:
        store.faults[store.appends + at] = lambda: write_as_other(store, KEPT)
        assert await three_steps(journal, world) == ALL
        assert KEPT.payload["marker"] in journal.fold.decisions
    types = await types_of(store)
    assert types.count("signal") == 1
    assert ignoring_signals(types) == ["run.started", *STEPS]
    assert world.calls == [LLM, READ, PAY]
    await folded(store)


@pytest.mark.parametrize("at", range(1, APPENDS + 1))
@pytest.mark.parametrize("fault", FAULTS)
async def test_every_append_may_fail_once(fault: Any, at: int):
    """The same fault again at each later append, the retries of the failed ones included."""
    store = await fresh(FaultyStore())
    world = World()
    async with await opened(store) as journal:
        for later in range(at, 40, 2):
            store.faults[later] = fault
        assert await three_steps(journal, world) == ALL
    assert world.calls == [LLM, READ, PAY]
    assert await types_of(store) == ["run.started", *STEPS]


async def test_a_record_keeps_its_writer_id_over_retries_and_no_two_share_one():
    store = await fresh(FaultyStore({1: "lost", 2: lambda: write_as_other(store, KEPT), 5: "lost"}))
    async with await opened(store) as journal:
        await three_steps(journal, World())
    ids = [entry.record.id for entry in (await store.load(RUN)).entries]
    assert len(set(ids)) == len(ids)


# ---- fenced -----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, APPENDS + 1))
async def test_a_newer_claim_stops_the_holder_at_its_next_append(at: int):
    store = await fresh(FaultyStore(shared=True))
    world = World()
    journal = await opened(store)
    store.faults[store.appends + at] = lambda: write_as_other(store, claimed("rival"))
    with pytest.raises(Fenced, match="taken over by worker rival"):
        await three_steps(journal, world)
    types = await types_of(store)
    assert types[-1] == "claim"
    assert len(types) == 2 + at  # started, our claim, what came before, the rival's claim
    assert world.calls == [LLM, READ, PAY][: at // 2]


@pytest.mark.parametrize("at", range(1, APPENDS + 1))
async def test_a_fenced_holder_goes_on_with_nothing_even_if_its_own_record_landed(at: int):
    store = await fresh(FaultyStore(shared=True))
    world = World()
    journal = await opened(store)
    real = store.load

    async def load(*args: Any, **kwargs: Any) -> Any:
        store.load = real  # type: ignore[method-assign]
        await write_as_other(store, claimed("rival"))
        return await real(*args, **kwargs)

    # our record lands unacknowledged; before we read back, the rival has claimed
    real_append = store.append
    wanted = store.appends + at

    async def append(*args: Any, **kwargs: Any) -> Any:
        if store.appends + 1 == wanted:
            store.faults[wanted] = "ack lost"
            store.load = load  # type: ignore[method-assign]
        return await real_append(*args, **kwargs)

    store.append = append  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        await three_steps(journal, world)
    store.append, store.load = real_append, real  # type: ignore[method-assign]
    types = await types_of(store)
    assert types == ["run.started", "claim", *STEPS[:at], "claim"]
    assert world.calls == [LLM, READ, PAY][: at // 2]  # the step that was being started: not called


async def test_a_fenced_handle_stays_fenced_and_settles_nothing():
    store = await fresh(FaultyStore(shared=True))
    world = World()
    journal = await opened(store)
    await write_as_other(store, claimed("rival"))
    with pytest.raises(Fenced):
        await journal.refresh()
    before = await types_of(store)
    for _ in range(2):
        with pytest.raises(Fenced):
            await three_steps(journal, world)
    assert not journal.holds(journal.run_id, journal.claim)
    await journal.close()  # no release: that claim is not ours to end
    assert await types_of(store) == before
    assert world.calls == []


async def test_a_claim_that_ended_again_fences_all_the_same():
    """The rival came, did its part and parked: the stalled holder still holds nothing."""
    store = await fresh(FaultyStore(shared=True))
    journal = await opened(store)

    async def rival() -> None:
        await write_as_other(store, claimed("rival"))
        await write_as_other(store, parked("pause"))

    store.faults[store.appends + 1] = rival
    with pytest.raises(Fenced):
        await three_steps(journal, World())
    assert (await types_of(store))[-2:] == ["claim", "park"]


async def test_a_late_call_reads_the_tail_first(time: VirtualTime):
    """More than a third of the ack wait after publishing the start, it may belong to another."""
    store = await fresh(FaultyStore(shared=True))
    world = World()
    journal = await opened(store)
    await journal.run_step(LLM, "model", world.call(LLM))
    real = store.append

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await real(*args, **kwargs)
        time.now += 11
        await write_as_other(store, claimed("rival"))
        return answer

    store.append = slow  # type: ignore[method-assign]
    with pytest.raises(Fenced):
        await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == [LLM]


# ---- unknown for the whole budget -------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, APPENDS + 1))
@pytest.mark.parametrize("stale", [False, True])
async def test_an_append_that_stays_unknown_ends_the_handle(at: int, stale: bool):
    store = await fresh(FaultyStore(shared=True))
    world = World()
    journal = await opened(store)
    real, wanted = store.append, store.appends + at

    async def append(*args: Any, **kwargs: Any) -> Any:
        if store.appends + 1 == wanted:
            store.every = "ack lost" if stale else "lost"
            store.stale_reads = 10_000 if stale else 0
        return await real(*args, **kwargs)

    store.append = append  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="stored"):
        await three_steps(journal, world)
    store.append, store.every, store.stale_reads = real, None, 0  # type: ignore[method-assign]
    assert world.calls == [LLM, READ, PAY][: at // 2]
    types = await types_of(store)
    with pytest.raises((Fenced, IndeterminateError)):
        await three_steps(journal, world)
    assert world.calls == [LLM, READ, PAY][: at // 2]
    await journal.close()
    assert await types_of(store) == types  # no release either: the record may land later


async def test_an_unknown_append_is_tried_for_its_budget_and_no_longer(time: VirtualTime):
    store = await fresh(FaultyStore())
    async with await opened(store) as journal:
        store.every = "lost"
        began = time.now
        with pytest.raises(StoreUnavailable):
            await three_steps(journal, World())
        assert limits.APPEND_BUDGET_S <= time.now - began < limits.APPEND_BUDGET_S + 3
        assert all(pause <= 1.5 for pause in time.slept)


OUTAGE_S = 600.0


class Away(FaultyStore):
    """Neither takes nor tells anything from when `since` says until the outage is over."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(shared=True)
        self._time = time
        self.since: float | None = None

    def _is(self) -> bool:
        return self.since is not None and self._time.now < self.since + OUTAGE_S

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        if self._is():
            return Unknown("not connected")
        return await super().append(run_id, entry, expected=expected)

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        if self._is():
            self._time.now += limits.READ_BUDGET_S
            raise StoreUnavailable("not connected; gave up")
        return await super().load(run_id, after=after)


@pytest.mark.parametrize(("patience_s", "recorded"), [(0.0, False), (3600.0, True)])
async def test_a_workers_write_that_ends_while_the_store_is_away_is_recorded_when_it_is_back(
    time: VirtualTime, patience_s: float, recorded: bool
):
    store = await fresh(Away(time))
    world = World()

    async def goes_away() -> JSON:
        store.since = time.now
        return "paid"

    world.during[PAY] = goes_away
    journal = await opened(store)
    journal.result_patience_s = patience_s
    if recorded:
        assert (await three_steps(journal, world))[2] == "paid"
        assert (await types_of(store))[-1] == "step.completed"
        await journal.run_step("llm/2", "model", world.call("llm/2"))  # it goes on
    else:
        with pytest.raises(StoreUnavailable):
            await three_steps(journal, world)
    assert world.calls.count(PAY) == 1
    await journal.close()


async def test_only_the_result_of_a_write_is_tried_for_so_long(time: VirtualTime):
    store = await fresh(Away(time))
    world = World()

    async def goes_away() -> JSON:
        store.since = time.now
        return "seen"

    world.during[READ] = goes_away
    journal = await opened(store)
    journal.result_patience_s = 3600.0
    with pytest.raises(StoreUnavailable):
        await three_steps(journal, world)
    assert time.now < (store.since or 0.0) + OUTAGE_S
    await journal.close()


async def test_a_record_that_lands_after_the_handle_gave_up_is_an_unknown_write_to_the_next():
    store = await fresh(FaultyStore())
    world = World()
    journal = await opened(store)
    await journal.run_step(LLM, "model", world.call(LLM))
    store.every = "lost"
    late: list[tuple[Entry, int]] = []
    real = store.append

    async def append(run: Any, entry: Entry, *, expected: int) -> Any:
        late[:] = [(entry, expected)]
        return await real(run, entry, expected=expected)

    store.append = append  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    await journal.close()
    store.append, store.every = real, None  # type: ignore[method-assign]
    ((entry, expected),) = late
    await store.append(RUN, entry, expected=expected)
    async with await opened(store) as again:
        with pytest.raises(IndeterminateError, match=PAY):
            await again.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == [LLM]


# ---- the process dies -------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(1, APPENDS + 1))
@pytest.mark.parametrize("fault", ["killed before", "killed after"])
async def test_a_crash_at_any_append_repeats_no_write(fault: Any, at: int):
    store = await fresh(FaultyStore({at: fault}))
    world = World()
    with pytest.raises(Killed):
        async with await opened(store) as journal:
            await three_steps(journal, world)
    # the start of the write stands alone: only then nobody knows
    in_the_write = (fault, at) in [("killed after", 5), ("killed before", 6)]
    async with await opened(store) as journal:
        if in_the_write:
            with pytest.raises(IndeterminateError):
                await three_steps(journal, world)
        else:
            assert await three_steps(journal, world) == ALL
    assert world.calls.count(PAY) <= 1
    await folded(store)


async def test_a_cancelled_append_ends_the_handle_for_its_record_may_land():
    store = await fresh(FaultyStore(shared=True))
    journal = await opened(store)

    async def cancelled() -> None:
        raise asyncio.CancelledError

    store.faults[store.appends + 1] = cancelled
    with pytest.raises(asyncio.CancelledError):
        await three_steps(journal, World())
    before = await types_of(store)
    with pytest.raises(Fenced, match="no longer held"):
        await three_steps(journal, World())
    await journal.close()
    assert await types_of(store) == before


async def test_a_call_cancelled_in_the_middle_leaves_a_read_to_run_again_and_a_write_unknown():
    store = await fresh(FaultyStore())
    world = World()

    async def cancelled() -> JSON:
        raise asyncio.CancelledError

    async def cut_off(step: str, tool: str) -> None:
        world.during = {step: cancelled}
        async with await opened(store) as journal:
            with pytest.raises(asyncio.CancelledError):
                await journal.run_step(step, "tool", world.call(step), tool=tool)
        world.during = {}

    await cut_off(READ, "lookup")
    async with await opened(store) as journal:
        await journal.run_step(READ, "tool", world.call(READ), tool="lookup")
    await cut_off(PAY, "pay")
    async with await opened(store) as journal:
        with pytest.raises(IndeterminateError):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == [READ, READ, PAY]


async def test_nothing_is_started_beside_an_unknown_write():
    """R23: whatever the code asks for first when it takes the run up."""
    store = await fresh(FaultyStore())
    world = World()

    async def cancelled() -> JSON:
        raise asyncio.CancelledError

    world.during = {PAY: cancelled}
    async with await opened(store) as journal:
        with pytest.raises(asyncio.CancelledError):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    async with await opened(store) as journal:
        with pytest.raises(IndeterminateError) as raised:
            await journal.run_step("llm/9", "model", world.call("llm/9"))
    assert raised.value.step == PAY
    assert world.calls == [PAY]


# ---- the function's own failure (R26) ---------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("x"), ToolError("declined"), TimeoutError()])
@pytest.mark.parametrize(("step", "tool"), [(READ, "lookup"), (PAY, "pay"), (LLM, None)])
async def test_an_exception_of_the_function_is_never_recorded(
    error: Exception, step: str, tool: str | None
):
    store = await fresh(FaultyStore())
    world = World()

    async def fails() -> JSON:
        raise error

    world.during[step] = fails
    kind: Any = "model" if tool is None else "tool"
    async with await opened(store) as journal:
        with pytest.raises(type(error)):
            await journal.run_step(step, kind, world.call(step), tool=tool)
    assert await types_of(store) == ["run.started", "step.started"]
    world.during.clear()
    async with await opened(store) as journal:
        if step == PAY:
            with pytest.raises(IndeterminateError):
                await journal.run_step(step, kind, world.call(step), tool=tool)
        else:
            assert await journal.run_step(step, kind, world.call(step), tool=tool)
    assert world.calls == ([PAY] if step == PAY else [step, step])


@pytest.mark.parametrize("error", [NotEncodable("of another value"), TooLarge("another record")])
async def test_an_engine_error_out_of_the_function_itself_is_not_recorded_either(error: Exception):
    """A tool that uses runfold itself, for another run: nobody knows how far it got."""
    store = await fresh(FaultyStore())
    world = World()

    async def fails() -> JSON:
        raise error

    world.during[PAY] = fails
    async with await opened(store) as journal:
        with pytest.raises(type(error)):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert await types_of(store) == ["run.started", "step.started"]


async def test_in_the_same_process_a_write_that_went_wrong_is_not_called_again():
    store = await fresh(FaultyStore())
    world = World()

    async def fails() -> JSON:
        raise OSError

    world.during[PAY] = fails
    async with await opened(store) as journal:
        with pytest.raises(OSError):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
        await write_as_other(store, retry(PAY, 2))  # which no honest door would let through
        await journal.refresh()
        with pytest.raises(IndeterminateError):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == [PAY]


async def test_a_write_that_somebody_else_started_meanwhile_is_not_called():
    """As if a lock had let two in: the start loses, and the table is asked again."""
    store = await fresh(FaultyStore())
    world = World()
    store.faults[1] = lambda: write_as_other(store, start_of(PAY, "pay"))
    async with await opened(store) as journal:
        with pytest.raises(IndeterminateError):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == []
    assert await types_of(store) == ["run.started", "step.started"]


async def test_a_result_that_somebody_else_recorded_meanwhile_is_used():
    store = await fresh(FaultyStore())
    world = World()

    async def rival() -> None:
        await write_as_other(store, start_of(READ, "lookup", unsafe=False))
        await write_as_other(store, result_of(READ, "theirs"))

    store.faults[1] = rival
    async with await opened(store) as journal:
        value = await journal.run_step(READ, "tool", world.call(READ), tool="lookup")
    assert (value, world.calls) == ("theirs", [])


# ---- values (R16) -----------------------------------------------------------------------------

UNRECORDABLE = {
    "a set": ({1}, NotEncodable, "type set"),
    "a generator": ((i for i in ()), NotEncodable, "type generator"),
    "NaN": ([float("nan")], NotEncodable, "nan"),
    "half a surrogate": ("\ud83d", NotEncodable, "half a surrogate"),
    "too large": ("x" * 5000, TooLarge, "bytes"),
}


@pytest.fixture
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("journal.stores.memory.RECORD_BYTES_MAX", 3000)


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("case", UNRECORDABLE)
async def test_a_write_whose_result_cannot_be_recorded_did_happen_and_never_runs_again(case: str):
    value, error, named = UNRECORDABLE[case]
    store = await fresh(FaultyStore())
    world = World()

    async def bad() -> JSON:
        return value

    world.during[PAY] = bad
    async with await opened(store) as journal:
        with pytest.raises(error, match=named) as raised:
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
        assert raised.value.run_id == RUN
    for _ in range(3):
        async with await opened(store) as journal:
            with pytest.raises(ToolError, match=named):
                await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == [PAY]
    completed = (await store.load(RUN)).records[-1]
    assert isinstance(completed, StepCompleted)
    assert completed.error.type == "not_recordable"  # type: ignore[union-attr]


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("case", UNRECORDABLE)
async def test_a_read_whose_result_cannot_be_recorded_fails_at_once_and_runs_again_later(case: str):
    value, error, named = UNRECORDABLE[case]
    store = await fresh(FaultyStore())
    world = World()

    async def bad() -> JSON:
        return value

    world.during[READ] = bad
    async with await opened(store) as journal:
        with pytest.raises(error, match=named):
            await journal.run_step(READ, "tool", world.call(READ), tool="lookup")
        world.during.clear()
        assert await journal.run_step(READ, "tool", world.call(READ), tool="lookup")
    assert await types_of(store) == [
        "run.started",
        "step.started",
        "step.started",
        "step.completed",
    ]


@pytest.mark.usefixtures("small_records")
@pytest.mark.parametrize("case", UNRECORDABLE)
async def test_a_step_whose_input_cannot_be_recorded_does_not_begin(case: str):
    value, error, named = UNRECORDABLE[case]
    store = await fresh(FaultyStore())
    world = World()
    async with await opened(store) as journal:
        with pytest.raises(error, match=named):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay", input=[value])
    assert (world.calls, await types_of(store)) == ([], ["run.started"])


async def test_the_first_run_sees_the_value_that_a_replay_sees():
    store = await fresh(FaultyStore())
    world = World()

    async def loose() -> JSON:
        return {"pair": (1, 2.0), "big": 2**70}

    world.during[READ] = loose
    seen: list[JSON] = []
    for _ in range(2):
        async with await opened(store) as journal:
            seen.append(await journal.run_step(READ, "tool", world.call(READ), tool="lookup"))
    assert seen[0] == seen[1] == {"pair": [1, 2.0], "big": 2**70}
    assert world.calls == [READ]


# ---- one task at a time (R46) -----------------------------------------------------------------


async def test_two_tasks_on_one_handle_are_refused():
    store = await fresh(FaultyStore())
    world = World()
    async with await opened(store) as journal:

        async def intrude() -> JSON:
            with pytest.raises(ConcurrentUse):
                await journal.run_step(READ, "tool", world.call(READ), tool="lookup")
            return "went on"

        world.during[LLM] = intrude
        assert await journal.run_step(LLM, "model", world.call(LLM)) == "went on"
        assert await journal.run_step(READ, "tool", world.call(READ), tool="lookup")
    assert world.calls == [LLM, READ]


async def test_two_appends_at_once_on_one_handle_are_refused():
    store = await fresh(FaultyStore())
    journal = await Journal.read(store, RUN)
    store.faults[1] = lambda: asyncio.sleep(0)
    first = asyncio.ensure_future(journal.append(lambda fold: KEPT))
    await asyncio.sleep(0)
    with pytest.raises(ConcurrentUse):
        await journal.append(lambda fold: approved(asking(9, 8, "later").marker, "r2"))
    await first


# ---- opening ----------------------------------------------------------------------------------


async def test_a_run_that_does_not_exist_is_not_opened():
    store = FaultyStore()
    with pytest.raises(RunNotFound):
        await opened(store)
    assert store.appends == 0


async def test_a_lock_lets_one_holder_in_and_is_free_after_it():
    store = await fresh(FaultyStore())
    async with await opened(store):
        with pytest.raises(StoreLocked):
            await opened(store)
    async with await opened(store):
        pass


@pytest.mark.dishonest
async def test_a_damaged_journal_runs_nothing_and_names_the_place():
    log = Log(started(), start_of(READ, "lookup", unsafe=False), result_of(READ))
    del log.entries[1]
    store = await log.store(FaultyStore())
    with pytest.raises(JournalDamaged, match="is missing") as raised:
        await opened(store)
    assert raised.value.where == "memory, run a1, record 2"


async def test_a_journal_of_a_newer_version_runs_nothing():
    log = Log(started())
    raw = log.sealed(start_of(READ, "lookup")).raw.replace(b'"step.started"', b'"step.skipped"')
    log.entries.append(log.raw(raw))
    store = await log.store(FaultyStore())
    with pytest.raises(NewerVersion, match=r"step\.skipped"):
        await opened(store)


async def test_a_claim_in_a_store_without_claims_is_not_run():
    store = await Log(started(), claimed()).store(FaultyStore())
    with pytest.raises(JournalDamaged, match="holds a claim"):
        await opened(store)


async def test_a_finished_run_takes_no_step():
    store = await Log(started(), answered()).store(FaultyStore())
    async with await opened(store) as journal:
        with pytest.raises(RunFinished):
            await journal.run_step(LLM, "model", World().call(LLM))


async def test_another_call_at_a_recorded_position_writes_and_calls_nothing():
    store = await fresh(FaultyStore())
    world = World()
    async with await opened(store) as journal:
        await journal.run_step(READ, "tool", world.call(READ), tool="lookup", input={"q": 1})
        before = await types_of(store)
        with pytest.raises(ReplayMismatch) as raised:
            await journal.run_step(READ, "tool", world.call(READ), tool="lookup", input={"q": 2})
    assert (raised.value.position, raised.value.recorded) == (READ, 'tool lookup {"q":1}')
    assert raised.value.attempted == 'tool lookup {"q":2}'
    assert await types_of(store) == before
    assert world.calls == [READ]


# ---- claiming (PROTOCOL 4) --------------------------------------------------------------------


async def test_a_free_run_is_claimed_and_released():
    store = await fresh(FaultyStore(shared=True))
    async with await opened(store) as journal:
        assert journal.claim == 2
        assert journal.holds(journal.run_id, 2)
    assert await types_of(store) == ["run.started", "claim", "release"]


async def test_a_live_holder_is_left_alone():
    store = await Log(started(), claimed("w1")).store(FaultyStore(shared=True))
    store.answers["w1"] = "yes"
    with pytest.raises(StoreLocked, match="w1"):
        await opened(store)
    assert await types_of(store) == ["run.started", "claim"]


async def test_a_holder_that_is_gone_is_asked_twice_and_replaced(time: VirtualTime):
    store = await Log(started(), claimed("w1")).store(FaultyStore(shared=True))
    async with await opened(store) as journal:
        assert journal.claim == 3
    assert store.asked == ["w1", "w1"]
    assert time.slept == [limits.HOLDER_GRACE_S]


async def test_a_holder_that_is_gone_in_a_write_is_waited_for_first(time: VirtualTime):
    store = await Log(started(), claimed("w1"), start_of(PAY)).store(FaultyStore(shared=True))
    async with await opened(store):
        pass
    assert time.slept == [30]


async def test_answers_about_one_claim_say_nothing_about_the_next(time: VirtualTime):
    """While we wait to ask w1 again, w2 takes the run: w2 is asked for itself."""
    store = await Log(started(), claimed("w1")).store(FaultyStore(shared=True))
    store.answers["w2"] = "yes"

    async def taken() -> None:
        time.on_sleep.clear()
        await write_as_other(store, claimed("w2"))

    time.on_sleep.append(taken)
    with pytest.raises(StoreLocked, match="w2"):
        await opened(store)
    assert store.asked == ["w1", "w1", "w2"]


@pytest.mark.parametrize("rival_answers", ["yes", "nobody"])
async def test_of_two_takers_one_loses_the_append_and_asks_the_other(rival_answers: Any):
    store = await fresh(FaultyStore(shared=True))
    store.answers["rival"] = rival_answers
    store.faults[1] = lambda: write_as_other(store, claimed("rival"))
    if rival_answers == "yes":
        with pytest.raises(StoreLocked, match="rival"):
            await opened(store)
        assert await types_of(store) == ["run.started", "claim"]
    else:
        async with await opened(store) as journal:
            assert journal.claim == 3


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_claim_of_unknown_outcome_is_made_once(fault: Any):
    store = await fresh(FaultyStore({1: fault}, shared=True))
    async with await opened(store) as journal:
        assert journal.claim == 2
    assert await types_of(store) == ["run.started", "claim", "release"]


async def test_a_run_that_waits_for_a_person_is_not_claimed():
    store = await Log(started(), start_of(PAY)).store(FaultyStore(shared=True))
    async with await opened(store) as journal:
        assert journal.claim == 0
    assert await types_of(store) == ["run.started", "step.started"]


RETRIED = [started(), claimed("w1"), start_of(PAY), parked("reconcile"), retry(PAY, 3)]


@pytest.mark.parametrize(("answer", "over"), [("nobody", False), ("no", True), ("yes", False)])
async def test_a_permitted_retry_waits_until_the_earlier_call_is_over(answer: Any, over: bool):
    store = await Log(*RETRIED).store(FaultyStore(shared=True))
    store.answers["w1"] = answer
    world = World()
    async with await opened(store) as journal:
        if over:
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
        else:
            with pytest.raises(RetryLater):
                await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == ([PAY] if over else [])


async def test_every_write_records_a_deadline_and_nothing_else_does():
    store = await fresh(FaultyStore())
    async with await opened(store) as journal:
        await three_steps(journal, World())
    starts = [r for r in (await store.load(RUN)).records if hasattr(r, "deadline")]
    assert [bool(start.deadline) for start in starts] == [False, False, True]  # type: ignore[attr-defined]


async def test_the_run_is_the_recorded_one_whatever_the_caller_thinks():
    store = await fresh(FaultyStore())
    async with await opened(store) as journal:
        assert isinstance(journal.fold.started, RunStarted)
        assert journal.fold.started.input == "go"
