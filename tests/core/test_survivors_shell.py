"""What mutants of the shells around a claim survived (docs/guards.md): how a worker follows a task
message to a claim or settles it (taking.py, lease.py), and who else takes a run (ownership.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Log,
    VirtualTime,
    answered,
    asking,
    asks,
    claimed,
    folded,
    goes_on,
    model_start,
    parked,
    released,
    reply_of,
    request,
    result_of,
    spawned,
    start_of,
    started,
    types_of,
    write_as_other,
)

from journal.errors import RunfoldError, StoreUnavailable
from journal.ids import RunId
from journal.keys import Keys
from journal.lease import Lease
from journal.limits import HOLDER_GRACE_S, REVISIT_S, STALE_PAUSE_S, STALE_READS
from journal.store import Loaded
from journal.stores.tasks import Task
from journal.taking import Taken, Taking, Wanted, clock_of
from journal.terms import Bounds, Retry

ACK_WAIT_S = 30.0
PAY_OR_NOT = reply_of(1, asks(request("pay")), asking(1, 0, "pay"))
LATER = "2100-01-01T00:00:00.000Z"


class Shared(FaultyStore):
    """A store that also carries the questions about keys. `told`, in order: what the queue was told
    of the message, and the timers that were set. `rivals` answer for a key; `answering_for` are the
    keys that are held here. `on_load`: what happens before the next load."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.told: list[Any] = []
        self.rivals: list[bytes] = []
        self.answering_for: list[str] = []
        self.on_load: list[Callable[[], Any]] = []
        self.loads = 0

    def in_progress(self, task: Task) -> None:
        self.told.append("in_progress")

    def nak(self, task: Task, delay_s: float) -> None:
        self.told.append(("nak", round(delay_s, 3)))

    async def ack(self, task: Task) -> None:
        self.told.append("ack")

    async def wake_at(self, run_id: RunId, agent: str, **what: Any) -> None:
        self.told.append("timer")

    @asynccontextmanager
    async def reporting(
        self, answer: Callable[[bytes], bytes], topic: str
    ) -> AsyncGenerator[None, None]:
        self.answering_for.append(topic)
        try:
            yield
        finally:
            self.answering_for.remove(topic)

    async def ask_workers(self, wait_s: float, topic: str, question: bytes) -> list[bytes]:
        return self.rivals

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        self.loads += 1
        if self.on_load:
            await self.on_load.pop()()
        return await super().load(run_id, after=after)


class Plain(msgspec.Struct, frozen=True):
    """What a worker says of its agent."""

    revision: str = "1"
    accepts: tuple[str, ...] = ("1",)
    bounds: Bounds = Bounds()
    retry: Retry = Retry()
    loop: bool = True


def task_of(*, at: datetime | None = None, **fields: Any) -> Task:
    known: dict[str, Any] = {
        "run_id": RUN,
        "agent": "helpdesk",
        "cause": 1,
        "sequence": 7,
        "delivery": 1,
        "priority": 0,
        "pending": 0,
        "at": at or datetime.now(UTC),
        "reply": "",
        "arrived": 1000.0,
    }
    return Task(**(known | fields))


class Met:
    """A worker w3 that met a task of the run whose journal this is."""

    def __init__(self, store: Shared, *, restart_limit: int = 5, **how: bool) -> None:
        self.store = store
        any_store: Any = store
        self.taking = Taking(
            any_store, "w3", ack_wait_s=ACK_WAIT_S, restart_limit=restart_limit, **how
        )

    def lease(self, task: Task) -> Lease:
        return Lease(self.store, task, ACK_WAIT_S)  # pyright: ignore[reportArgumentType]

    async def take(self, wanted: Wanted | None = None, **fields: Any) -> Taken | None:
        task = task_of(**fields)
        return await self.taking.take(task, self.lease(task), Plain(), wanted)


async def met(log: Log, **how: Any) -> Met:
    store = Shared()
    await log.store(store)
    return Met(store, **how)


def keyed(run: str = RUN) -> Any:
    return msgspec.structs.replace(started(revision="", run=run), key="customer-1")


pytestmark = pytest.mark.usefixtures("no_waiting")


# ---- a run that is taken ------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"remote": True}])
async def test_a_claim_says_who_took_the_run_by_which_delivery_and_leaves_the_message_alone(
    how: dict[str, bool],
):
    worker = await met(Log(started(revision="")), **how)
    taken = await worker.take(delivery=3)
    assert taken is not None
    claim = (await folded(worker.store)).claim
    assert claim == taken.claim
    assert claim is not None
    said = (claim.worker, claim.revision, claim.reason, claim.attempt, claim.by)
    assert said == ("w3", "1", "new", 1, "w3")
    assert (claim.task, claim.delivery, claim.remote) == (7, 3, bool(how))
    assert (taken.lost, worker.store.told) == (0, [])
    assert worker.taking.claiming == {RUN: 1}


@pytest.mark.parametrize(
    ("log", "limit", "lost"),
    [
        (Log(started(), claimed("w1")), 1, 1),
        (Log(started(), claimed("w1"), claimed("w2")), 1, 2),
        (Log(started(), claimed("w1"), claimed("w2"), released()), 1, 1),
        (Log(started(), claimed("w1"), claimed("w2")), 3, 0),  # below it nothing is said
        (Log(started()), 1, 0),
    ],
)
async def test_at_the_restart_limit_it_is_known_how_many_holders_in_a_row_were_lost(
    log: Log, limit: int, lost: int
):
    worker = await met(log, restart_limit=limit)
    taken = await worker.take()
    assert taken is not None
    assert taken.lost == lost


async def test_a_holder_is_asked_again_after_a_pause_and_both_answers_count(time: VirtualTime):
    worker = await met(Log(started(), claimed("w1")))
    taken = await worker.take()
    assert taken is not None
    assert taken.claim.reason == "adopted"
    assert (worker.store.asked, time.slept) == (["w1", "w1"], [0.0, HOLDER_GRACE_S])


async def test_with_an_open_write_the_second_ask_comes_after_the_ack_wait(time: VirtualTime):
    worker = await met(Log(started(), claimed("w1"), start_of("tool/1/0/pay")))
    assert await worker.take() is not None
    assert time.slept == [0.0, ACK_WAIT_S]


async def test_answers_about_a_holder_that_has_gone_are_not_counted_for_the_next_one():
    """Nobody answered once for w1, then w2 has it: w2 is asked twice, too."""
    worker = await met(Log(started(), claimed("w1", task=1)))
    store = worker.store
    store.on_load = [lambda: write_as_other(store, claimed("w2", task=1)), nothing]
    assert await worker.take() is not None
    assert store.asked == ["w1", "w2", "w2"]


async def nothing() -> None:
    pass


async def test_what_was_read_before_is_not_read_again():
    worker = await met(Log(started()))
    task = task_of()
    wanted = await worker.taking.look(task, worker.lease(task), Plain())
    assert wanted is not None
    loads = worker.store.loads
    taken = await worker.take(wanted)
    assert taken is not None
    assert taken.run is wanted.run
    assert worker.store.loads == loads


# ---- a run that is not taken --------------------------------------------------------------------


async def test_a_task_of_a_record_that_is_not_read_yet_is_given_back_after_so_many_reads(
    time: VirtualTime,
):
    worker = await met(Log(started()))
    assert await worker.take(cause=2) is None
    assert worker.store.told == [("nak", REVISIT_S)]
    assert time.slept == [STALE_PAUSE_S * n for n in range(1, STALE_READS + 1)]
    assert worker.store.loads == 1 + STALE_READS
    assert await types_of(worker.store) == ["run.started"]


async def test_a_task_whose_record_comes_late_is_followed(time: VirtualTime):
    log = Log(started(), claimed("w1"), released())
    worker = await met(log)
    worker.store.stale_reads = STALE_READS
    assert await worker.take(cause=3) is not None
    assert len(time.slept) == STALE_READS
    assert worker.store.told == []


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (Log(started(), claimed(), model_start(), PAY_OR_NOT, parked()), ["ack"]),
        (Log(started(), claimed(), parked("retry", until=LATER)), ["timer", "ack"]),
        (Log(started(), claimed(), answered()), ["ack"]),
        (Log(started(agent="another")), ["ack"]),
        (Log(started(), claimed("w1", task=6)), ["ack"]),
        (Log(started(), claimed("w1", task=7)), []),  # the owner's own message
    ],
)
async def test_what_a_task_comes_to_where_the_run_is_not_to_be_taken(log: Log, said: list[Any]):
    worker = await met(log)
    worker.store.answers["w1"] = "yes"
    assert await worker.take() is None
    assert worker.store.told == said
    assert await types_of(worker.store) == [entry.type for entry in log.entries]


@pytest.mark.parametrize(("delivery", "pause_s"), [(1, 0.1), (2, 0.2), (6, 3.2), (7, 5), (50, 5)])
async def test_a_task_for_another_revision_comes_again_soon_at_first(delivery: int, pause_s: float):
    worker = await met(Log(started(revision="2")))
    assert await worker.take(delivery=delivery) is None
    assert worker.store.told == [("nak", pause_s)]


async def test_a_message_that_was_left_is_not_touched_later_either():
    worker = await met(Log(started(), claimed("w1", task=7)))
    worker.store.answers["w1"] = "yes"
    task = task_of()
    lease = worker.lease(task)
    assert await worker.taking.take(task, lease, Plain()) is None
    lease.nak()
    assert worker.store.told == []


async def test_what_an_end_owes_is_paid_by_whoever_meets_its_task():
    """Its holder died between the record and the payment: the parent still hears of it."""
    store = Shared()
    child = Log(msgspec.structs.replace(started(run="c1"), parent=RUN, depth=1), claimed())
    child.add(answered())
    for position, entry in enumerate(child.entries):
        await store.append(RunId("c1"), entry, expected=position)
    waits = goes_on(until_child="c1")
    spawn = result_of("0/0", {"run": "c1"})
    await Log(started(), claimed(), spawned("0/0", "c1"), spawn, waits).store(store)
    assert await Met(store).take(run_id=RunId("c1")) is None
    assert ((await types_of(store))[-1], store.told) == ("signal", ["ack"])


async def test_a_worker_that_is_closed_says_so_and_asks_for_no_key():
    worker = await met(Log(keyed()))
    worker.taking.closed = True
    with pytest.raises(RunfoldError, match="being stopped") as caught:
        await worker.take()
    assert caught.value.run_id == RUN
    assert (worker.store.told, worker.taking.claiming) == ([("nak", 0.0)], {})


# ---- runs of one key ----------------------------------------------------------------------------


@pytest.mark.parametrize(("delivery", "pause_s"), [(1, 0.1), (4, 0.4), (10, 1.0), (40, 1.0)])
async def test_a_run_whose_key_another_run_holds_comes_again_a_little_later(
    delivery: int, pause_s: float
):
    worker = await met(Log(keyed()))
    worker.store.rivals = [b'{"run":"b7","held":true}']
    with pytest.raises(RunfoldError, match="customer-1 is active") as caught:
        await worker.take(delivery=delivery)
    assert caught.value.run_id == RUN
    assert worker.store.told == [("nak", pause_s)]
    assert (await types_of(worker.store), worker.taking.claiming) == (["run.started"], {})


async def free(keys: Keys) -> None:
    for task in list(keys._closing):
        await task


async def test_a_key_is_held_for_as_long_as_the_run_is_and_given_up_after():
    worker = await met(Log(keyed()))
    taken = await worker.take()
    assert taken is not None
    assert len(worker.store.answering_for) == 1
    taken.give()
    await free(worker.taking._keys)
    assert worker.store.answering_for == []


@pytest.mark.parametrize("when", ["before", "after", "as it is written"])
async def test_the_key_of_a_run_that_another_worker_took_is_given_up(when: str):
    """The claim is not due any more, or it was stored and another one stands behind it."""
    worker = await met(Log(keyed()))
    store = worker.store
    store.answers["w2"] = "yes"

    def other() -> Any:
        return write_as_other(store, claimed("w2"))

    match when:
        case "before":
            store.faults[store.appends + 1] = other
        case "after":
            store.faults[store.appends + 1] = "ack lost"
            store.on_load = [other, nothing]
        case _:

            async def fails() -> None:
                raise StoreUnavailable("no answer")

            store.faults[store.appends + 1] = fails
    if when == "as it is written":
        with pytest.raises(StoreUnavailable):
            await worker.take()
    else:
        assert await worker.take() is None
        assert store.told == ["ack"]
    await free(worker.taking._keys)
    assert store.answering_for == []


# ---- clocks -------------------------------------------------------------------------------------


def test_a_clock_that_is_behind_is_put_forward_to_when_the_task_was_published():
    now = datetime.now(UTC)
    ahead = clock_of(task_of(at=now + timedelta(hours=1)))()
    behind = clock_of(task_of(at=now - timedelta(hours=1)))()
    assert timedelta(hours=1) <= ahead - now < timedelta(hours=1, minutes=1)
    assert timedelta() <= behind - now < timedelta(minutes=1)
