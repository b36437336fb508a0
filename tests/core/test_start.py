"""R3, R4: a start is idempotent, and never changes what a run was started with."""

from __future__ import annotations

import pytest
from kit.build import RUN, FaultyStore, Log, answered, claimed, failed, started, types_of

from journal.codec import Entry
from journal.doors import start
from journal.errors import InputMismatch, InvalidId, NotEncodable
from journal.fold import Fold
from journal.records import Record, RunPurged
from journal.steps import decide_start, input_digest
from journal.stores.memory import MemoryStore


def test_an_id_without_a_run_is_started():
    assert decide_start(Fold(), started()) is True


RUNNING: dict[str, list[Record]] = {
    "running": [started(), claimed()],
    "completed": [started(), answered()],
    "failed": [started(), failed()],
}


@pytest.mark.parametrize("case", RUNNING)
def test_the_same_start_again_is_the_same_run(case: str):
    assert decide_start(Log(*RUNNING[case]).fold, started()) is False


@pytest.mark.parametrize("case", RUNNING)
@pytest.mark.parametrize(
    ("other", "what"),
    [
        (started("other input"), "input"),
        (started(None), "input"),
        (started(agent="other"), "agent"),
    ],
)
def test_another_start_under_the_id_is_refused(case: str, other: Record, what: str):
    with pytest.raises(InputMismatch, match=f"exists with another {what}; nothing was written"):
        decide_start(Log(*RUNNING[case]).fold, other)  # type: ignore[arg-type]


def test_a_purged_id_stays_used():
    log = Log(started(), answered(), RunPurged())
    tombstone = Fold()
    tombstone.apply(log.entries[-1])
    for fold in (log.fold, tombstone):
        with pytest.raises(InputMismatch, match="has been purged"):
            decide_start(fold, started())


def test_a_run_of_a_newer_version_is_left_alone():
    log = Log()
    raw = started_raw_of_version_2()
    log.fold.apply(Entry(log.raw(raw).record, raw))
    assert decide_start(log.fold, started()) is False


def started_raw_of_version_2() -> bytes:
    return Log(started()).entries[0].raw.replace(b'"v":1', b'"v":2')


def test_the_order_of_keys_makes_no_other_input():
    assert input_digest("a", {"x": 1, "y": 2}) == input_digest("a", {"y": 2, "x": 1})
    distinct = [("a", 1), ("a", 1.0), ("a", "1"), ("a", [1]), ("b", 1), ("a", None)]
    assert len({input_digest(agent, value) for agent, value in distinct}) == len(distinct)


# ---- the door ---------------------------------------------------------------------------------


async def test_a_repeated_start_writes_nothing():
    store = MemoryStore()
    first = await start(store, "helpdesk", {"a": 1, "b": 2}, run_id="a1")
    again = await start(store, "helpdesk", {"b": 2, "a": 1}, run_id="a1")
    assert (first.created, again.created) == (True, False)
    assert await types_of(store) == ["run.started"]


async def test_a_start_without_an_id_makes_a_run_of_its_own_each_time():
    store = MemoryStore()
    runs = {(await start(store, "helpdesk", "same")).run_id for _ in range(5)}
    assert len(runs) == 5


@pytest.mark.parametrize("same", [True, False])
async def test_two_starters_at_once_make_one_run(same: bool):
    """The other one's record comes between our read and our append."""
    store = FaultyStore()

    async def rival() -> None:
        await start(store, "helpdesk", "mine" if same else "theirs", run_id="a1")

    store.faults[1] = rival
    if same:
        assert (await start(store, "helpdesk", "mine", run_id="a1")).created is False
    else:
        with pytest.raises(InputMismatch):
            await start(store, "helpdesk", "mine", run_id="a1")
    assert await types_of(store) == ["run.started"]


async def test_a_start_whose_acknowledgement_was_lost_made_its_run():
    store = FaultyStore({1: "ack lost"})
    assert (await start(store, "helpdesk", "mine", run_id="a1")).created is True
    assert await types_of(store) == ["run.started"]


async def test_a_bad_start_reaches_no_store():
    store = FaultyStore()
    with pytest.raises(InvalidId):
        await start(store, "helpdesk", "x", run_id="../x")
    with pytest.raises(InvalidId):
        await start(store, "help desk", "x")
    with pytest.raises(NotEncodable, match="the input"):
        await start(store, "helpdesk", {1, 2}, run_id=RUN)
    assert store.appends == 0
