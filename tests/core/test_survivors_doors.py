"""What mutants of the doors and of taking a run survived (docs/guards.md): who is told of what is
written, under which id and name it stands, and what is said to whom finds a run held or gone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from kit.build import (
    DEADLINE,
    RUN,
    FaultyStore,
    Killed,
    Log,
    PlainView,
    VirtualTime,
    answered,
    cancel,
    cancelled_end,
    claimed,
    goes_on,
    started,
    submitted,
    types_of,
    write_as_other,
)

from journal.claims import Answer
from journal.doors import signal, start, started_body, state, submit, wake, withdraw
from journal.errors import BadPayload, InvalidId, RunNotFound, StaleSignal, StoreLocked
from journal.handle import Journal
from journal.ids import RunId
from journal.limits import HOLDER_GRACE_S
from journal.log import Log as RunLog
from journal.purging import purge
from journal.store import Loaded

pytestmark = pytest.mark.usefixtures("no_waiting")


def started_here() -> Any:
    return started(revision="")


DOORS: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "signal": lambda store: signal(store, RUN, "cancel", {"reason": "enough"}),
    "input": lambda store: submit(store, RUN, "hurry"),
    "withdrawal": lambda store: withdraw(store, RUN, "i1"),
}


# ---- who takes a run ----------------------------------------------------------------------------


async def test_who_waits_for_an_earlier_holder_is_told_for_whom_and_how_long(time: VirtualTime):
    store = await Log(started_here(), claimed("w1")).store(FaultyStore(shared=True))
    told: list[str] = []
    journal = await Journal.open(store, RUN, is_write=lambda _: True, on_wait=told.append)
    await journal.close()
    assert told == [f"worker w1 does not answer; asking again in {HOLDER_GRACE_S:g} s"]


async def test_a_run_that_ended_as_its_holder_was_asked_is_not_said_to_be_held():
    store = await Log(started_here(), claimed("w1")).store(FaultyStore(shared=True))

    async def ask(worker: str, run_id: RunId, claim: int) -> Any:
        await write_as_other(store, answered())
        return "silent"

    store.ask = ask  # type: ignore[method-assign]
    journal = await Journal.open(store, RUN, is_write=lambda _: True)
    assert (journal.claim, journal.fold.finished) == (0, True)
    await journal.close()


@pytest.mark.parametrize(
    ("answer", "how"), [("yes", ""), ("silent", ", which is connected but does not answer")]
)
async def test_who_finds_a_run_held_is_told_by_whom(answer: Answer, how: str):
    store = await Log(started_here(), claimed("w1")).store(FaultyStore(shared=True))
    store.answers["w1"] = answer
    with pytest.raises(StoreLocked) as caught:
        await Journal.open(store, RUN, is_write=lambda _: True)
    assert caught.value.message == f"run a1 is being worked on by worker w1{how}"
    assert (caught.value.holder, caught.value.run_id) == ("w1", RUN)


async def test_a_claim_that_was_stored_and_fenced_before_it_was_known_is_no_claim():
    store = await Log(started_here()).store(FaultyStore(shared=True))
    store.answers["w2"] = "yes"
    store.faults[store.appends + 1] = "ack lost"
    load = store.load

    async def fenced_first(run_id: RunId, *, after: int = 0) -> Loaded:
        if len(await types_of(PlainView(store))) == 2:  # it is stored
            await write_as_other(store, claimed("w2"))
        return await load(run_id, after=after)

    store.load = fenced_first  # type: ignore[method-assign]
    with pytest.raises(StoreLocked, match="w2"):
        await Journal.open(store, RUN, is_write=lambda _: True)
    assert store.asked == ["w2"]


# ---- who starts a run ---------------------------------------------------------------------------


async def test_a_run_started_from_code_says_so_and_is_of_the_first_revision():
    store = FaultyStore(shared=True)
    made = await start(store, "helpdesk", "go", run_id=RUN)
    assert (made.run_id, made.created) == (RUN, True)
    log = await RunLog.read(store, RUN)
    begun = log.fold.started
    assert begun is not None
    assert (begun.revision, begun.by) == ("1", "library")


async def test_a_run_that_is_started_without_an_id_gets_one_of_its_own():
    store = FaultyStore()
    made = [await start(store, "helpdesk", "go") for _ in range(2)]
    assert made[0].run_id != made[1].run_id
    assert [run.created for run in made] == [True, True]
    assert await types_of(store, made[1].run_id) == ["run.started"]


async def test_a_run_of_an_agent_that_has_no_name_is_not_started():
    store = FaultyStore()
    with pytest.raises(InvalidId, match="not a"):
        await start(store, "no name", "go", run_id=RUN)
    assert await types_of(store) == []


def test_a_first_record_of_nobody_names_no_parent_key_or_revision():
    body = started_body(RUN, "helpdesk", "go")
    assert (body.revision, body.parent, body.depth, body.priority, body.key) == ("", "", 0, 0, "")


# ---- who sends a signal -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("child", {"run": "c1", "outcome": {"status": "completed"}}),
        ("late", {"step": "0/0", "start": 2, "result": 1}),
    ],
)
async def test_what_only_a_worker_may_say_nobody_else_says(name: str, payload: Any):
    store = await Log(started_here()).store(FaultyStore(shared=True))
    with pytest.raises(BadPayload):
        await signal(store, RUN, name, payload)
    assert await types_of(store) == ["run.started"]


async def test_a_signal_has_the_request_id_of_its_payload_and_is_the_librarys():
    store = await Log(started_here()).store(FaultyStore(shared=True))
    payload = {"reason": "enough", "request_id": "mine"}
    made = await signal(store, RUN, "cancel", payload)
    again = await signal(store, RUN, "cancel", payload)
    assert (made.request_id, made.result) == ("mine", "applied")
    assert (again.request_id, again.result, again.n) == ("mine", "repeated", made.n)
    assert (await store.load(RUN)).records[-1].by == "library"


@pytest.mark.parametrize("door", DOORS)
async def test_a_run_that_is_not_there_is_not_found(door: str):
    with pytest.raises(RunNotFound, match="does not exist"):
        await DOORS[door](FaultyStore(shared=True))


async def test_a_kept_signal_and_a_kept_input_have_the_id_they_were_kept_under():
    store = await Log(started_here()).store(FaultyStore(shared=True))
    kept = await submit(store, RUN, "hurry", kept_id="kept:7")
    assert kept.request_id == "kept:7"
    made = await signal(store, RUN, "cancel", {"reason": "enough"}, kept_id="kept:8")
    assert made.request_id == "kept:8"
    own = [record.request_id for record in (await store.load(RUN)).records[1:]]  # type: ignore[attr-defined]
    assert own == ["kept:7", "kept:8"]


# ---- who is told --------------------------------------------------------------------------------


class Telling(FaultyStore):
    """`told`, in order: what the holder is told, and the tasks that are published."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.told: list[Any] = []

    async def notify(self, run_id: RunId, payload: bytes) -> None:
        self.told.append((run_id, payload))

    async def wake(self, run_id: RunId, agent: str, **what: Any) -> None:
        self.told.append((run_id, agent, what))


HELD = [claimed()]
RESTING = [claimed(), goes_on(until_input=True)]
ASLEEP = [claimed(), goes_on(until=DEADLINE)]
OVER = [claimed(), cancel(request_id="r1"), cancelled_end()]


@pytest.mark.parametrize(
    ("log", "door", "told"),
    [
        (HELD, "signal", [(RUN, b"cancel")]),
        (HELD, "input", [(RUN, b"input")]),
        (RESTING, "signal", [(RUN, "helpdesk", {"cause": 4, "priority": 2})]),
        (RESTING, "input", [(RUN, "helpdesk", {"cause": 4, "priority": 2})]),
        (ASLEEP, "input", []),
        (OVER, "signal", []),
    ],
)
async def test_whoever_ends_a_wait_publishes_a_task_and_a_holder_is_told(
    log: Any, door: str, told: Any
):
    """As often as it is sent: the sender may have died between the record and the task."""
    store = Telling()
    await Log(msgspec.structs.replace(started_here(), priority=2), *log).store(store)
    for _ in range(2):
        if door == "signal":
            await signal(store, RUN, "cancel", {"reason": "enough"}, request_id="r1")
        else:
            await submit(store, RUN, "hurry", request_id="r1")
    assert store.told == told * 2


async def test_nobody_is_woken_for_a_run_that_somebody_holds():
    store = Telling()
    await Log(started_here(), claimed()).store(store)
    await wake(await RunLog.read(store, RUN))
    assert store.told == []


# ---- inputs -------------------------------------------------------------------------------------


async def test_an_input_is_to_steer_and_the_librarys_unless_somebody_says_otherwise():
    store = await Log(started_here()).store(FaultyStore(shared=True))
    made = await submit(store, RUN, "hurry", request_id="i1")
    again = await submit(store, RUN, "hurry", request_id="i1")
    said = (made.request_id, made.status, made.created, again.status, again.created)
    assert said == ("i1", "queued", True, "queued", False)
    record: Any = (await store.load(RUN)).records[-1]
    assert (record.n, record.mode, record.by) == (2, "steer", "library")


async def test_an_input_that_is_withdrawn_is_said_to_be():
    store = await Log(started_here(), submitted("i1")).store(FaultyStore(shared=True))
    for _ in range(2):
        assert (await withdraw(store, RUN, "i1")).status == "withdrawn"
    assert await types_of(store) == ["run.started", "input", "input.withdrawn"]
    assert (await store.load(RUN)).records[-1].by == "library"


# ---- looking and purging ------------------------------------------------------------------------


async def test_the_state_of_a_run_that_is_not_there_or_was_purged_is_not_found():
    with pytest.raises(RunNotFound, match="does not exist"):
        await state(FaultyStore(), RUN)
    store = await Log(started_here(), answered()).store()
    await purge(store, RUN)
    with pytest.raises(RunNotFound, match="was purged"):
        await state(store, RUN)


async def test_only_a_run_that_has_ended_is_purged():
    store = await Log(started_here(), submitted()).store()
    with pytest.raises(StaleSignal, match="only finished runs") as caught:
        await purge(store, RUN)
    assert caught.value.run_id == RUN
    assert await types_of(store) == ["run.started", "input"]
    with pytest.raises(RunNotFound):
        await purge(store, "b2")


async def test_a_purge_that_was_cut_off_is_finished_by_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
):
    store = await Log(started_here(), answered()).store()

    async def killed(run_id: RunId, *, before: int) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(store, "trim", killed)
        with pytest.raises(Killed):
            await purge(store, RUN)
    assert await types_of(store) == ["run.started", "run.completed", "run.purged"]
    for _ in range(2):
        await purge(store, RUN)
        assert await types_of(store) == ["run.purged"]
    assert (await store.load(RUN)).records[0].by == "library"
