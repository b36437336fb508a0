"""What is counted of durable work (R73): what the journals say, once, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from kit.build import (
    AT,
    RUN,
    FaultyStore,
    Killed,
    Log,
    PlainView,
    VirtualTime,
    approved,
    asked_for,
    cancel,
    claimed,
    goes_on,
    interrupted_of,
    parked,
    progress_of,
    result_of,
    resume,
    retry,
    start_of,
    started,
    submitted,
    write_as_other,
)
from kit.measured import Samples, by, named, parsed, samples, summed, total, types
from kit.registered import NOWHERE

from journal.codec import Entry
from journal.counting import Counting
from journal.doors import signal, start, submit
from journal.errors import Fenced, RunfoldError
from journal.families import LABEL_VALUES_MAX, OTHER, Counter, Family, Histogram
from journal.handle import Journal
from journal.log import Log as RunLog
from journal.observing import UNOBSERVED, Several, Trace, beside
from journal.records import Claim, Record, RunStarted
from journal.store import Store
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.metrics import WorkerMetrics
from worker.runner import run
from worker.service import Worker
from worker.tools import read, write

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]


MINUTE = "2026-01-02T03:05:05.678Z"
HOUR = "2026-01-02T04:04:05.678Z"
"""After AT."""


def counting() -> Counting:
    return Counting(lambda: 0.0)


def told(store: Store) -> Counting:
    """A process of its own, from now on: what it counts."""
    found = counting()
    store.observer = found
    return found


# ---- nothing is counted twice -------------------------------------------------------------------


@read
async def lookup(query: str) -> str:
    return f"nothing about {query}"


@write(name="pay", approval=False)
async def pay(amount: int) -> str:
    return "paid"


def clerk() -> Agent:
    model = ScriptedModel(call("lookup", query="x"), call("pay", amount=1), say("Paid."))
    return Agent("clerk", model=model, tools=[lookup, pay])


async def worked(store: FaultyStore) -> None:
    """As a process does: until the end, or its own."""
    with suppress(Killed, RunfoldError):
        await run(store, clerk(), RUN, "go")


async def undisturbed() -> tuple[FaultyStore, Samples]:
    store = FaultyStore(shared=True)
    only = told(store)
    await worked(store)
    return store, samples(only.families())


async def journal_of(store: FaultyStore) -> Sequence[Entry]:
    return (await PlainView(store).load(RUN)).entries


APPENDS = range(1, 14)
"""Of the clerk's run: its start, a claim, a start and a result for each of five steps, its end."""

WRITES_RESULT = 10


async def test_a_run_is_counted_as_its_journal_has_it():
    store, found = await undisturbed()
    assert store.appends == APPENDS[-1]
    assert by(found, "runfold_records_total", "type") == types(await journal_of(store))
    assert found == {
        'runfold_records_total{type="run.started"}': 1,
        'runfold_records_total{type="claim"}': 1,
        'runfold_records_total{type="step.started"}': 5,
        'runfold_records_total{type="step.completed"}': 5,
        'runfold_records_total{type="run.completed"}': 1,
        'runfold_claims_total{reason="new"}': 1,
        'runfold_steps_total{kind="model",outcome="result",replay="safe"}': 3,
        'runfold_steps_total{kind="tool",outcome="result",replay="safe"}': 1,
        'runfold_steps_total{kind="tool",outcome="result",replay="unsafe"}': 1,
        'runfold_runs_started_total{agent="clerk"}': 1,
        'runfold_runs_ended_total{agent="clerk",status="completed"}': 1,
        'runfold_step_seconds_count{kind="model"}': 3,
        'runfold_step_seconds_count{kind="tool"}': 2,
        **{key: count for key, count in found.items() if "_bucket{" in key},
    }


@pytest.mark.parametrize("k", APPENDS)
async def test_a_run_that_was_killed_and_resumed_is_counted_once_over_both_processes(k: int):
    _, whole = await undisturbed()
    store = FaultyStore({k: "killed before"}, shared=True)
    first = told(store)
    await worked(store)
    done = by(samples(first.families()), "runfold_steps_total", "kind")
    second = told(store)
    await worked(store)
    both = summed(first, second)
    assert by(both, "runfold_records_total", "type") == types(await journal_of(store))
    if k == WRITES_RESULT:  # nobody knows what became of it: a person is asked
        return
    steps = {key: n for key, n in whole.items() if key.startswith("runfold_steps_total")}
    assert {key: n for key, n in both.items() if key.startswith("runfold_steps_total")} == steps
    assert samples(first.families()).get("runfold_steps_replayed_total", 0) == 0
    assert both.get("runfold_steps_replayed_total", 0) == sum(done.values())
    for name in ("runfold_runs_started_total", "runfold_runs_ended_total"):
        assert total(both, name) == 1


@pytest.mark.parametrize("fault", ["ack lost", "lands in the read-back", "lost"])
@pytest.mark.parametrize("k", APPENDS)
async def test_a_record_whose_acknowledgement_was_lost_is_counted_once(k: int, fault: Any):
    store = FaultyStore({k: fault}, shared=True)
    only = told(store)
    await worked(store)
    _, whole = await undisturbed()
    assert samples(only.families()) == whole
    assert by(whole, "runfold_records_total", "type") == types(await journal_of(store))


async def test_a_record_that_landed_just_before_the_run_was_taken_over_is_counted(
    time: VirtualTime,
):
    store = FaultyStore(shared=True)
    mine = told(store)
    await start(store, "clerk", "go", run_id=RUN)
    journal = await Journal.open(store, RUN, is_write=lambda tool: True)

    async def taken_over() -> None:
        await write_as_other(store, claimed("w9"))

    store.faults[store.appends + 1] = "ack lost"
    store.stale_reads = 1
    time.on_sleep.append(taken_over)
    body = start_of("s")
    with pytest.raises(Fenced):
        await journal.append(lambda fold: body)
    found = samples(mine.families())
    assert found['runfold_records_total{type="step.started"}'] == 1
    assert found["runfold_fenced_total"] == 1


async def test_a_record_with_our_id_that_another_process_wrote_is_not_ours_to_count():
    """Two bridges append what an HTTP worker gave an id to: one record, one count."""
    store = FaultyStore(shared=True)
    await Log(started(revision="")).store(store)
    ours, theirs = PlainView(store), PlainView(store)
    counts = [told(ours), told(theirs)]
    log, other = [await RunLog.read(one, RUN) for one in (ours, theirs)]
    for one, at in ((log, AT), (other, MINUTE)):
        one.by = "w1"
        body = msgspec.structs.replace(submitted("i7"), at=at)
        assert await one.append(lambda fold, b=body: b, record_id="fedcba987654-7") is not None
    assert len(await journal_of(store)) == 2
    assert [total(samples(one.families()), "runfold_records_total") for one in counts] == [1, 0]


# ---- fences -------------------------------------------------------------------------------------


async def test_a_holder_that_was_fenced_counts_one_fence_however_often_it_meets_it():
    store = FaultyStore(shared=True)
    await start(store, "clerk", "go", run_id=RUN)
    only = told(store)
    journal = await Journal.open(store, RUN, is_write=lambda tool: True)
    other = journal.succeed()
    await write_as_other(store, claimed("w9"))
    for one in (journal, other):
        for _ in range(2):
            with suppress(Fenced):
                await one.refresh()
            with suppress(Fenced):
                await one.append(lambda fold: progress_of("s"))
            one.lose()
    assert samples(only.families())["runfold_fenced_total"] == 1


# ---- waits --------------------------------------------------------------------------------------


def later(log: Log, *bodies: Record, at: str) -> Log:
    log.at = at
    for body in bodies:
        log.add(body)
    return log


def waits(*bodies: Record) -> Log:
    return Log(started(revision=""), claimed(), *bodies)


ASKED = asked_for("0/0")


@pytest.mark.parametrize(
    ("log", "over_at"),
    [
        (Log(started(revision="")), ""),
        (waits(), ""),
        (waits(parked("pause")), ""),
        (later(waits(parked("pause")), resume(), at=MINUTE), MINUTE),
        (later(later(waits(parked("pause")), resume(), at=MINUTE), cancel(), at=HOUR), MINUTE),
        (later(waits(parked(asks=(ASKED,))), submitted(), at=MINUTE), ""),
        (later(waits(parked(asks=(ASKED,))), approved(ASKED.marker), at=MINUTE), MINUTE),
        (later(waits(goes_on(until_input=True)), submitted(), at=MINUTE), MINUTE),
        (later(waits(goes_on(until_input=True, until=AT)), submitted(), at=MINUTE), AT),
        (later(waits(goes_on(until_input=True, until=HOUR)), submitted(), at=MINUTE), MINUTE),
        (waits(goes_on(until=HOUR)), HOUR),
        (later(waits(parked("pause")), resume(), claimed("w2"), at=MINUTE), ""),
    ],
)
async def test_a_wait_is_over_at_the_first_record_that_gives_a_holder_something_to_do(
    log: Log, over_at: str
):
    store = await log.store(FaultyStore(shared=True))
    assert (await RunLog.read(store, RUN)).over_at == over_at


@pytest.mark.parametrize(
    ("claim_at", "since", "count", "seconds"),
    [
        ("2026-01-02T03:05:06.678Z", MINUTE, 1, 1.0),
        (AT, MINUTE, 1, 0.0),  # a clock was set back, or is behind
        (AT, "when it suits me", 0, 0.0),
    ],
)
def test_a_wake_takes_from_then_to_the_claim_and_never_less_than_nothing(
    claim_at: str, since: str, count: int, seconds: float
):
    only = counting()
    claim = Claim(worker="w1", revision="1", reason="wake", at=claim_at)
    only.woken(RUN, claim, since)
    found = samples(only.families())
    assert found.get("runfold_wake_seconds_count", 0) == count
    assert found.get("runfold_wake_seconds_sum", 0) == seconds


async def test_a_signal_takes_from_its_arrival_to_its_record(time: VirtualTime):
    only = Counting(time.monotonic)
    store = await cut_off(parked("pause")).store(FaultyStore(shared=True))
    store.observer = only
    with only.door("signal", ""):
        time.now += 2.0
        await signal(store, RUN, "resume", {})
        await submit(store, RUN, "x")
        await signal(store, RUN, "late", {"step": "s", "start": 3, "result": 1}, worker=True)
    await signal(store, RUN, "cancel", {})  # by nobody that came through a door
    found = samples(only.families())
    assert (found["runfold_signal_seconds_count"], found["runfold_signal_seconds_sum"]) == (2, 4.0)


# ---- what became of writes ----------------------------------------------------------------------


def counted(log: Log) -> dict[str, float]:
    """By policy, of a journal whose records one process appended."""
    only, so_far = counting(), Log()
    for entry in log.entries:
        so_far.fold.apply(entry)
        only.appended(RUN, so_far.fold, entry.record, Trace())
    return by(samples(only.families()), "runfold_unknown_writes_total", "policy")


def cut_off(*after: Record, policy: Any = "reconcile") -> Log:
    return waits(start_of("s", policy=policy), *after)


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (cut_off(), {}),
        (cut_off(result_of("s")), {}),
        (cut_off(claimed("w2")), {"reconcile": 1}),
        (cut_off(claimed("w2"), claimed("w3")), {"reconcile": 1}),
        (cut_off(claimed("w2"), parked("reconcile")), {"reconcile": 1}),
        (cut_off(parked("reconcile")), {"reconcile": 1}),
        (cut_off(parked("reconcile"), cancel(), claimed("w2")), {"reconcile": 1}),
        (
            cut_off(parked("reconcile"), cancel(), claimed("w2"), parked("reconcile")),
            {"reconcile": 1},
        ),
        (cut_off(claimed("w2"), interrupted_of("s"), policy="interrupt"), {"interrupt": 1}),
        (cut_off(interrupted_of("s"), policy="interrupt"), {"interrupt": 1}),
        (cut_off(claimed("w2"), policy="probe"), {"probe": 1}),
        (cut_off(result_of("s", via="probe"), policy="probe"), {"probe": 1}),
        (cut_off(retry("s", 3, request_id="probe:3"), policy="probe"), {"probe": 1}),
        (cut_off(claimed("w2"), retry("s", 3, request_id="probe:3"), policy="probe"), {"probe": 1}),
    ],
)
def test_a_write_that_was_cut_off_is_counted_once_by_its_policy(
    log: Log, expected: dict[str, float]
):
    assert counted(log) == expected


# ---- bounds -------------------------------------------------------------------------------------


def test_agents_beyond_a_bound_share_one_series():
    only, fold = counting(), Log(started()).fold
    for n in range(LABEL_VALUES_MAX + 3):
        body = RunStarted(run=RUN, agent=f"a{n}", revision="", input=None, digest="")
        only.appended(RUN, fold, body, Trace())
    found = by(samples(only.families()), "runfold_runs_started_total", "agent")
    assert len(found) == LABEL_VALUES_MAX + 1 and found[OTHER] == 3


def test_of_calls_that_never_have_a_result_a_bounded_number_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("journal.counting.OPEN_MAX", 3)
    only, log = counting(), waits()
    for n in range(9):
        log.add(start_of(f"s{n}", unsafe=False))
        only.appended(RUN, log.fold, log.entries[-1].record, Trace())
        assert len(only._began) <= 3
    log.add(result_of("s8"))
    only.appended(RUN, log.fold, log.entries[-1].record, Trace())
    found = samples(only.families())
    assert found['runfold_step_seconds_count{kind="tool"}'] == 1
    assert found['runfold_records_total{type="step.started"}'] == 9


def test_a_duration_is_counted_in_its_bucket_and_all_above():
    found = Histogram("h", "", (0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0, -3.0):
        found.observe(seconds)
    assert samples([found.family()]) == {
        'h_bucket{le="0.1"}': 3,
        'h_bucket{le="1"}': 4,
        'h_bucket{le="+Inf"}': 5,
        "h_count": 5,
        "h_sum": pytest.approx(7.65),
    }


@pytest.mark.parametrize(
    ("made", "shown"),
    [
        (lambda: Counter("c", "").family(), [("_total", {}, 0.0)]),
        (lambda: Counter("c", "", ("a",)).family(), []),
        (lambda: Counter("c", "", ("a",), [("x",)]).family(), [("_total", {"a": "x"}, 0.0)]),
        (lambda: Histogram("h", "", (1,), ("a",)).family(), []),
    ],
)
def test_what_is_known_beforehand_is_shown_before_it_comes(
    made: Callable[[], Family], shown: list[Any]
):
    assert [tuple(sample) for sample in made().samples] == shown


# ---- several observers --------------------------------------------------------------------------


def test_one_observer_is_itself_and_of_two_each_is_told():
    one, two = counting(), counting()
    assert beside(UNOBSERVED, one) is one
    both = beside(one, two)
    assert isinstance(both, Several)
    log = waits(start_of("s"))
    claim, start_record = (entry.record for entry in log.entries[1:])
    assert both.carry(RUN, start_record, Trace()) == ""
    with both.door("signal", ""), both.calling(RUN, start_record):  # type: ignore[arg-type]
        both.appended(RUN, log.fold, start_record, Trace())
    both.replayed(RUN, "s")
    both.woken(RUN, claim, AT)  # type: ignore[arg-type]
    both.fenced(RUN, 2)
    both.let_go(RUN, 2)
    assert samples(one.families()) == samples(two.families())
    assert total(samples(one.families()), "runfold_fenced_total") == 1


# ---- how it is shown ----------------------------------------------------------------------------


def test_what_a_worker_shows_is_read_as_it_was_counted():
    only = counting()
    worker = Worker(NOWHERE, [clerk()], name="w")
    metrics = WorkerMetrics(worker, only)
    only.appended(RUN, Log(started(agent='"\\\n')).fold, started(agent='"\\\n'), Trace())
    found = parsed(metrics.text().decode())
    assert found == {
        named(family.name + suffix, labels): value
        for family in metrics.families()
        for suffix, labels, value in family.samples
    }
    assert found[named("runfold_runs_started_total", {"agent": '"\\\n'})] == 1
    assert found["runfold_worker_connected"] == found["runfold_worker_healthy"] == 0
    assert found['runfold_worker_backlog{agent="clerk"}'] == 0
