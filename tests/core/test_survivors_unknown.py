"""What mutants of unknown.py and stepping.py survived (docs/guards.md): when the call of a cut-off
write is over, what its policy may do, and a step whose call is made elsewhere."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kit.build import (
    DEADLINE,
    RUN,
    FaultyStore,
    Log,
    VirtualTime,
    cancel,
    claimed,
    done,
    error_of,
    released,
    result_of,
    retry,
    start_of,
    started,
    types_of,
    write_as_other,
)

from journal.calling import complete_step
from journal.claims import Answer
from journal.errors import Fenced
from journal.fold import Fold
from journal.handle import Journal
from journal.limits import PROBE_RETRIES_MAX
from journal.records import StepCompleted, StepStarted
from journal.stepping import Draining, RetryLater, do_step, start_step
from journal.steps import Ask, DidNotHappen, Happened, Probed, make_call
from journal.unknown import Superseded, Ways, doubt, settle, wait_over

PAY = "tool/1/0/pay"
PASSED = "2026-01-02T03:05:00.000Z"
ACK_WAIT_S = 30.0


async def opened(log: Log) -> tuple[FaultyStore, Journal]:
    store = FaultyStore(shared=True)
    await log.store(store)
    store.otherwise = "no"
    journal = await Journal.open(store, RUN, is_write=lambda _: True, ack_wait_s=ACK_WAIT_S)
    store.asked.clear()
    return store, journal


# ---- when an earlier call is over ---------------------------------------------------------------

HERE, REMOTE = False, True
FAR, LATE = DEADLINE, PASSED


@pytest.mark.parametrize(
    ("where", "deadline", "next_reason", "said", "over"),
    [
        (HERE, FAR, "wake", "no", True),
        (HERE, FAR, "wake", "yes", False),
        (HERE, LATE, "wake", "yes", False),  # it counts for more than any deadline
        (HERE, FAR, "wake", "silent", False),
        (HERE, LATE, "wake", "silent", True),
        (HERE, FAR, "wake", "nobody", False),  # cut off from us it may live
        (HERE, LATE, "wake", "nobody", True),
        (HERE, FAR, "adopted", "nobody", False),
        (HERE, FAR, "adopted", "silent", False),
        (REMOTE, FAR, "adopted", "no", False),  # of its call only the deadline tells
        (REMOTE, FAR, "adopted", "nobody", False),
        (REMOTE, FAR, "wake", "silent", False),
        (REMOTE, LATE, "wake", "nobody", True),
        (REMOTE, LATE, "wake", "no", True),
        (REMOTE, LATE, "wake", "silent", True),
        (REMOTE, LATE, "wake", "yes", False),
    ],
)
async def test_when_the_call_of_a_holder_before_can_no_longer_be_running(
    time: VirtualTime, where: bool, deadline: str, next_reason: str, said: Answer, over: bool
):
    log = Log(started(), claimed("w0", remote=where), start_of(PAY, deadline=deadline))
    if next_reason == "wake":
        log.add(released())
    log.add(claimed("w1", reason=next_reason))
    store, journal = await opened(log)
    store.answers["w0"] = said
    time.slept.clear()
    start = journal.fold.steps[PAY].last
    if over:
        await wait_over(journal, start)
    else:
        with pytest.raises(RetryLater) as caught:
            await wait_over(journal, start)
        said_of_it = (caught.value.step, caught.value.until, caught.value.run_id)
        assert said_of_it == (PAY, deadline, RUN)
    assert (store.asked, time.slept) == (["w0"], [])
    await journal.close()


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize(("deadline", "over"), [(FAR, False), (LATE, True)])
async def test_of_a_call_whose_claim_is_not_known_only_the_deadline_tells(
    deadline: str, over: bool
):
    """A fold that was restored lacks the claims from before its commit, and their steps."""
    store, journal = await opened(Log(started()))
    gone = msgspec.structs.replace(start_of(PAY, deadline=deadline), claim=99, n=98)
    if over:
        await wait_over(journal, gone)
    else:
        with pytest.raises(RetryLater):
            await wait_over(journal, gone)
    assert store.asked == []
    await journal.close()


@pytest.mark.usefixtures("no_waiting")
async def test_a_safe_call_is_not_waited_for():
    log = Log(started(), claimed("w0"), start_of("0/0", unsafe=False), released())
    store, journal = await opened(log)
    await wait_over(journal, journal.fold.steps["0/0"].last)
    assert store.asked == []
    await journal.close()


# ---- what a policy may do -----------------------------------------------------------------------


class Probe:
    """A probe that says what it is told, and remembers that it was asked."""

    def __init__(self, answer: Probed) -> None:
        self.answer, self.keys = answer, list[str]()

    async def __call__(self, key: str) -> Probed:
        self.keys.append(key)
        return self.answer


def asked(journal: Journal) -> Ask:
    return Ask(journal.fold.steps[PAY].last, "probe")


CALL = make_call(PAY, "tool", "pay", None, unsafe=True, policy="probe")


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("answer", [Happened("yes"), DidNotHappen()])
async def test_what_a_probe_says_is_not_written_over_what_a_person_said_meanwhile(answer: Probed):
    log = Log(started(), claimed("w0"), start_of(PAY, policy="probe"), released())
    store, journal = await opened(log)
    store.faults[store.appends + 1] = lambda: write_as_other(store, done(PAY, 3))
    assert await settle(journal, CALL, asked(journal), Probe(answer))
    assert (await types_of(store))[4:] == ["claim", "signal"]
    assert journal.fold.steps[PAY].reconciled[3].request_id == "r-done"
    await journal.close()


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("times", [PROBE_RETRIES_MAX, PROBE_RETRIES_MAX + 1])
async def test_a_write_that_was_probed_and_made_so_often_is_a_persons(times: int):
    log, permit = Log(started(), claimed("w0")), 0
    for _ in range(times):
        n = log.add(start_of(PAY, policy="probe", permit=permit))
        if n < 2 * times:
            permit = log.add(retry(PAY, n, request_id=f"probe:{n}"))
    log.add(released())
    store, journal = await opened(log)
    if times > PROBE_RETRIES_MAX:
        store.answers["w0"] = "nobody"  # and nothing is waited for first
    assert len(journal.fold.steps[PAY].starts) == times
    probe = Probe(Happened("yes"))
    settled = await settle(journal, CALL, asked(journal), probe)
    assert (settled, len(probe.keys)) == ((True, 1) if times <= PROBE_RETRIES_MAX else (False, 0))
    await journal.close()


@pytest.mark.usefixtures("no_waiting")
async def test_a_run_that_was_opened_for_looking_at_settles_nothing():
    log = Log(started(), claimed("w0"), start_of(PAY, policy="probe"), released())
    store, journal = await opened(log)
    claim, journal.claim = journal.claim, 0
    probe = Probe(Happened("yes"))
    assert not await settle(journal, CALL, asked(journal), probe)
    assert (probe.keys, (await types_of(store))[-1]) == ([], "claim")
    journal.claim = claim
    await journal.close()


@pytest.mark.usefixtures("no_waiting")
async def test_no_doubt_is_recorded_of_a_step_that_has_its_result():
    log = Log(started(), claimed("w0"), start_of("0/0", unsafe=False), result_of("0/0"), released())
    store, journal = await opened(log)
    await doubt(journal, journal.fold.steps["0/0"].last)
    assert (await types_of(store))[-1] == "claim"
    await journal.close()


# ---- steps --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_waiting")
async def test_a_step_that_is_superseded_is_not_started():
    store, journal = await opened(Log(started()))

    async def never(start: StepStarted) -> StepCompleted:
        raise AssertionError("called")

    asked_of: list[Fold] = []

    def over(fold: Fold) -> bool:
        asked_of.append(fold)
        return True

    with pytest.raises(Superseded):
        await do_step(journal, CALL, never, Ways(unless=over))
    assert asked_of == [journal.fold]
    assert (await types_of(store))[-1] == "claim"
    await journal.close()


@pytest.mark.usefixtures("no_waiting")
async def test_a_write_that_is_made_elsewhere_runs_from_its_start_to_its_result():
    """In between nothing takes it for one that nobody makes; behind it the next write may begin."""
    _, journal = await opened(Log(started()))
    start = await start_step(journal, CALL)
    assert isinstance(start, StepStarted)
    assert (journal.writing, start.step) == ({start.n}, PAY)
    made = await complete_step(journal, start, result_of(PAY, "paid"), "00000000000a-1")
    assert (made.result, made.id, journal.writing) == ("paid", "00000000000a-1", set())
    again = await start_step(journal, CALL)
    assert isinstance(again, StepCompleted)
    assert again.result == "paid"
    safe = make_call("0/9", "tool", "look", None, unsafe=False)
    looked = await start_step(journal, safe)
    assert isinstance(looked, StepStarted)
    assert journal.writing == set()
    await complete_step(journal, looked, result_of("0/9"), "00000000000a-2")
    await journal.close()


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("unsafe", [True, False])
@pytest.mark.parametrize("fails", [True, False])
async def test_only_what_a_write_returned_is_told_late(unsafe: bool, fails: bool):
    """By a holder that lost the run meanwhile: a read is made again, an error says nothing."""
    store, journal = await opened(Log(started()))
    call = make_call("0/0", "tool", "pay", None, unsafe=unsafe)

    async def perform(start: StepStarted) -> StepCompleted:
        await write_as_other(store, claimed("w9"))
        return error_of("0/0") if fails else result_of("0/0", "paid")

    with pytest.raises(Fenced):
        await do_step(journal, call, perform)
    told = journal.late[1] if journal.late else None
    assert told == ("paid" if unsafe and not fails else None)
    await journal.close()


async def test_a_late_call_of_a_run_that_is_still_ours_is_made(time: VirtualTime):
    store, journal = await opened(Log(started()))
    append = store.append

    async def slow(*args: Any, **kwargs: Any) -> Any:
        time.now += ACK_WAIT_S / 2
        return await append(*args, **kwargs)

    async def pay(start: StepStarted) -> StepCompleted:
        return result_of(PAY, "paid")

    store.append = slow  # type: ignore[method-assign]
    assert (await do_step(journal, CALL, pay)).result == "paid"
    await journal.close()


async def test_a_start_that_was_cancelled_on_its_way_is_answered_not_called(time: VirtualTime):
    store, journal = await opened(Log(started()))
    append = store.append

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await append(*args, **kwargs)
        time.now += ACK_WAIT_S / 2
        store.append = append  # type: ignore[method-assign]
        await write_as_other(store, cancel())
        return answer

    store.append = slow  # type: ignore[method-assign]
    ended = await start_step(journal, CALL)
    assert isinstance(ended, StepCompleted)
    assert (ended.via, journal.writing) == ("not_called", set())
    assert (await types_of(store))[-3:] == ["step.started", "signal", "step.completed"]
    await journal.close()


def test_what_ends_a_turn_has_its_code():
    assert Draining("m").code == "draining"
    assert RetryLater("m", step=PAY, until="", run_id=RUN).code == "waiting"
