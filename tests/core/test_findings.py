"""What two reviews found and is mended: one test for each promise that did not hold."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Killed,
    Log,
    PlainView,
    approved,
    asking,
    asks,
    claimed,
    done,
    folded,
    parked,
    request,
    result_of,
    retry,
    start_of,
    started,
    types_of,
    write_as_other,
)
from kit.deadlines import deadlines_passed

from journal.claims import Answer
from journal.codec import Damage, Entry
from journal.doors import signal, start, state
from journal.errors import (
    BadPayload,
    Fenced,
    IndeterminateError,
    NewerVersion,
    NotEncodable,
    ReplayMismatch,
    RunfoldError,
    StepFailed,
    StoreLocked,
)
from journal.handle import Journal
from journal.ids import RunId
from journal.messages import JSON, Message, Reply
from journal.records import Signal, StepStarted
from journal.stepping import RetryLater
from journal.store import Held, Store, Unknown
from journal.stores.file import FileStore
from journal.stores.memory import MemoryStore
from journal.views import AwaitingApproval, Completed, Indeterminate, Outcome, Waiting
from runfold import open_store
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.gate import Allow, Deny, NeedsApproval, PolicyGate
from worker.runner import run
from worker.tools import SAFE, Tool, ToolCall, read, write

pytestmark = pytest.mark.usefixtures("no_waiting")

LLM, LOOK, PAY = "llm/1", "tool/1/0/lookup", "tool/1/0/pay"
KEPT = approved(asking(9, 9, "later").marker)
PAST, FUTURE = "2001-01-01T00:00:00.000Z", "2999-01-01T00:00:00.000Z"
NOW_S = 0.05  # a time limit that is meant to pass
STUCK_S = 20
LOOPING = 500  # loads of the store: a run that goes on needs a few dozen

both = pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])


def ended(text: str) -> Completed:
    return Completed(Message(role="assistant", content=text))


async def opened(store: Store, **options: Any) -> Journal:
    return await Journal.open(
        store, RUN, **{"is_write": lambda tool: tool == "pay", "ack_wait_s": 30} | options
    )


async def fresh(store: FaultyStore) -> FaultyStore:
    await start(PlainView(store), "helpdesk", "go", run_id=RUN)
    return store


class World:
    """Calls of steps, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def call(self, step: str, raising: BaseException | None = None) -> Callable[[], Any]:
        async def fn() -> JSON:
            self.calls.append(step)
            if raising is not None:
                raise raising
            return f"result of {step}"

        return fn


class Gate:
    """A plain function's body: says that it runs, then waits to be let go."""

    def __init__(self) -> None:
        self.entered, self.go, self.left = threading.Event(), threading.Event(), threading.Event()

    def pass_through(self) -> str:
        self.entered.set()
        assert self.go.wait(STUCK_S)
        self.left.set()
        return "passed"


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, STUCK_S)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.go.set()  # a test that failed must not leave a thread that hangs


@pytest.fixture
def given_up() -> Iterator[threading.Event]:
    """Set once a handle waits for a write that is past its time limit."""
    event = threading.Event()

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "past its time limit" in record.getMessage():
                event.set()

    handler = Listen()
    logging.getLogger("runfold").addHandler(handler)
    yield event
    logging.getLogger("runfold").removeHandler(handler)


# ---- the lock of a directory ------------------------------------------------------------------


def searched(directory: Path) -> None:
    """Each file is opened, read and closed, as by a tool that looks for a word."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    assert found
    for path in found:
        path.read_bytes()


async def is_locked(directory: Path) -> None:
    other = FileStore(directory)
    with pytest.raises(StoreLocked, match="this process"):
        async with other.hold(RUN):
            pass
    assert await other.holder(RUN) == "this process"


async def test_opening_and_closing_the_lock_file_does_not_free_the_run(tmp_path: Path):
    """As a tool does that searches the folder: POSIX record locks were lost by it."""
    async with FileStore(tmp_path).hold(RUN):
        searched(tmp_path)
        os.close(os.open(tmp_path / ".locks" / RUN, os.O_RDWR))
        await is_locked(tmp_path)
    assert await FileStore(tmp_path).holder(RUN) is None


async def test_a_directory_by_another_name_holds_the_same_run(tmp_path: Path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    async with FileStore(real).hold(RUN):
        await is_locked(link)
        await is_locked(real)  # the refused one took nothing away


async def test_a_namespace_of_a_directory_keeps_its_runs_apart(tmp_path: Path):
    where = str(tmp_path / "store")
    inputs = {"runfold": "of the default", "x": "of x"}
    for namespace, input in inputs.items():
        async with open_store(where, namespace=namespace) as store:
            assert [run async for run in store.runs()] == []
            await start(store, "helpdesk", input, run_id=RUN)
    for namespace, input in inputs.items():
        async with open_store(where, namespace=namespace) as store:
            assert [run async for run in store.runs()] == [RUN]
            journal = await Journal.read(store, RUN)
            assert journal.fold.started is not None
            assert journal.fold.started.input == input


# ---- a write that dedupes on its key, under changed code --------------------------------------


def pay_tool(effects: list[str], revision: str = "1", *, crash: bool = False) -> Tool:
    @write(name="pay", revision=revision, replay=SAFE)
    async def pay(amount: int, call: ToolCall) -> str:
        effects.append(call.key)
        if crash:
            raise Killed
        return "paid"

    return pay


CHANGES: dict[str, tuple[str, NeedsApproval | Deny | None]] = {
    "tool revision": ("2", None),
    "gate text": ("1", NeedsApproval("another text")),
    "denied": ("1", Deny("frozen")),
}


@both
@pytest.mark.parametrize("change", CHANGES)
async def test_a_started_safe_write_of_changed_code_is_asked_about_never_called_failed(
    change: str, shared: bool
):
    """It may have happened: an error would make the model pay again, under another key."""
    store, effects = FaultyStore(shared=shared), list[str]()
    model = ScriptedModel(call("pay", amount=1), say("Paid."))
    old = Agent("a", model=model, tools=[pay_tool(effects, crash=True)])
    first = await run(store, old, RUN, "go")
    assert isinstance(first, AwaitingApproval)
    await signal(PlainView(store), RUN, "approve", {"marker": first.pending[0].marker})
    with pytest.raises(Killed):
        await run(store, old, RUN)

    revision, rule = CHANGES[change]
    tool = pay_tool(effects, revision)
    gate = PolicyGate([tool], {"pay": rule} if rule else None)
    new = Agent("a", model=model, tools=[tool], gate=gate)
    for _ in range(2):
        outcome = await run(store, new, RUN)
        assert isinstance(outcome, Indeterminate)
        assert outcome.step == PAY
        assert (await folded(store)).steps[PAY].completed is None
    said = {"step": PAY, "outcome": "done", "result": "seen in the books"}
    await signal(PlainView(store), RUN, "reconcile", said)
    assert await run(store, new, RUN) == ended("Paid.")
    assert len(effects) == 1
    assert [m.content for m in model.requests[-1] if m.role == "tool"] == ["seen in the books"]


# ---- a park whose acknowledgement was lost ----------------------------------------------------


class LostPark(FaultyStore):
    """A shared store: the first park is stored, then `person` acts, then its answer is lost."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.person: Callable[[], Any] | None = None
        self.loads = 0

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> Any:
        answer = await super().append(run_id, entry, expected=expected)
        if entry.type == "park" and self.person is not None:
            person, self.person = self.person, None
            await person()
            return Unknown("no acknowledgement")
        return answer

    async def load(self, run_id: RunId, *, after: int = 0) -> Any:
        self.loads += 1
        assert self.loads < LOOPING, "it reads for ever"
        return await super().load(run_id, after=after)


async def test_an_approval_between_a_lost_park_and_its_read_back_goes_on_under_a_new_claim():
    @write
    async def pay(amount: int) -> str:
        return "paid"

    store = LostPark()

    async def person() -> None:
        outcome = (await state(PlainView(store), RUN)).outcome
        assert isinstance(outcome, AwaitingApproval)
        await signal(PlainView(store), RUN, "approve", {"marker": outcome.pending[0].marker})

    store.person = person
    agent = Agent("a", model=ScriptedModel(call("pay", amount=1), say("Paid.")), tools=[pay])
    assert await run(store, agent, RUN, "go") == ended("Paid.")
    await goes_on_under_a_new_claim(store)


@pytest.mark.parametrize("said", [{"outcome": "retry"}, {"outcome": "done", "result": 1}], ids=str)
async def test_a_reconcile_between_a_lost_park_and_its_read_back_goes_on_under_a_new_claim(
    said: dict[str, Any],
):
    calls: list[int] = []

    @write(approval=False)
    async def pay(amount: int) -> str:
        calls.append(amount)
        if len(calls) == 1:
            raise OSError
        return "paid"

    store = LostPark()

    async def person() -> None:
        await signal(PlainView(store), RUN, "reconcile", {"step": PAY, **said})

    store.person = person
    agent = Agent("a", model=ScriptedModel(call("pay", amount=1), say("Paid.")), tools=[pay])
    with deadlines_passed():
        assert await run(store, agent, RUN, "go") == ended("Paid.")
    assert len(calls) == (2 if said["outcome"] == "retry" else 1)
    await goes_on_under_a_new_claim(store)


async def goes_on_under_a_new_claim(store: LostPark) -> None:
    assert store.person is None
    types = [t for t in await types_of(store) if t in ("claim", "park", "signal")]
    assert types == ["claim", "park", "signal", "claim"]
    assert (await folded(store)).finished


# ---- whether an earlier call is over ----------------------------------------------------------


def begun(deadline: str) -> StepStarted:
    return msgspec.structs.replace(start_of(PAY), deadline=deadline)


async def retried(store: FaultyStore) -> bool:
    """Whether the permitted retry was called; else it waits."""
    world = World()
    async with await opened(store) as journal:
        try:
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
        except RetryLater:
            assert world.calls == []
            return False
    assert world.calls == [PAY]
    return True


async def shared_with(answer: Answer, deadline: str, *between: Any) -> FaultyStore:
    bodies = [started(), claimed("w1"), begun(deadline), *between, parked("reconcile")]
    store = await Log(*bodies, retry(PAY, 3)).store(FaultyStore(shared=True))
    store.answers["w1"] = answer
    return store


@pytest.mark.parametrize("deadline", [PAST, FUTURE], ids=["late", "in time"])
async def test_a_worker_that_says_it_still_runs_is_waited_for_whatever_the_deadline(deadline: str):
    store = await shared_with("yes", deadline)
    assert not await retried(store)
    assert store.asked == ["w1"]


@pytest.mark.parametrize("adopted", [False, True], ids=["", "adopted"])
@pytest.mark.parametrize("answer", ["nobody", "silent"])
@pytest.mark.parametrize(("deadline", "over"), [(PAST, True), (FUTURE, False)])
async def test_that_a_worker_can_not_be_reached_proves_nothing_until_the_deadline(
    deadline: str, over: bool, answer: Answer, adopted: bool
):
    """Cut off from everybody it lives, and its call goes on."""
    between = [claimed("w2", reason="adopted")] if adopted else []
    store = await shared_with(answer, deadline, *between)
    assert await retried(store) is over
    assert store.asked == ["w1"]


@pytest.mark.parametrize("answer", ["yes", "no", "nobody", "silent"])
@pytest.mark.parametrize("adopted", [False, True], ids=["", "adopted"])
@pytest.mark.parametrize(("deadline", "past"), [(PAST, True), (FUTURE, False)])
async def test_only_the_deadline_says_that_a_call_made_over_http_is_over(
    deadline: str, past: bool, adopted: bool, answer: Answer
):
    between = [claimed("w2", reason="adopted")] if adopted else []
    bodies = [started(), claimed("w1", remote=True), begun(deadline), *between, parked("reconcile")]
    store = await Log(*bodies, retry(PAY, 3)).store(FaultyStore(shared=True))
    store.answers["w1"] = answer
    assert await retried(store) is (past and answer != "yes")


@pytest.mark.dishonest
@pytest.mark.parametrize(("deadline", "over"), [(PAST, True), (FUTURE, False), ("", False)])
async def test_a_start_without_a_claim_is_over_only_past_the_deadline(deadline: str, over: bool):
    log = Log(started(), begun(deadline), retry(PAY, 2))
    store = await log.store(FaultyStore(shared=True))
    assert await retried(store) is over
    assert store.asked == []


# ---- calls in threads -------------------------------------------------------------------------


class Answering(FaultyStore):
    """A shared store whose workers answer for themselves; its `hold` does nothing."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.workers: dict[str, Held] = {}

    async def ask(self, worker: str, run_id: RunId, claim: int) -> Answer:
        held = self.workers.get(worker)
        return "nobody" if held is None else "yes" if held(run_id, claim) else "no"

    @asynccontextmanager
    async def answering(self, worker: str, held: Held) -> AsyncGenerator[None, None]:
        self.workers[worker] = held
        try:
            yield
        finally:
            del self.workers[worker]

    @asynccontextmanager
    async def hold(self, run_id: RunId) -> AsyncGenerator[None, None]:
        yield


@both
async def test_a_read_in_a_hung_thread_does_not_keep_the_run_from_returning(
    gate: Gate, shared: bool
):
    @read(timeout_s=NOW_S)
    def lookup() -> str:
        return gate.pass_through()

    store = FaultyStore(shared=shared)
    agent = Agent("a", model=ScriptedModel(call("lookup"), say("Done.")), tools=[lookup])
    assert await run(store, agent, RUN, "go") == ended("Done.")
    assert not gate.left.is_set()


@both
async def test_a_read_in_a_hung_thread_does_not_keep_the_run_from_being_cancelled(
    gate: Gate, shared: bool
):
    @read
    def lookup() -> str:
        return gate.pass_through()

    store = FaultyStore(shared=shared)
    agent = Agent("a", model=ScriptedModel(call("lookup"), say("Done.")), tools=[lookup])
    task = asyncio.create_task(run(store, agent, RUN, "go"))
    await until(gate.entered)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not gate.left.is_set()


def slow_payer(gate: Gate) -> Agent:
    @write(approval=False, timeout_s=NOW_S)
    def pay() -> str:
        return gate.pass_through()

    return Agent("a", model=ScriptedModel(call("pay"), say("Paid.")), tools=[pay])


async def test_a_write_past_its_time_keeps_the_lock_until_its_thread_ends(
    gate: Gate, given_up: threading.Event, tmp_path: Path
):
    agent = slow_payer(gate)
    task = asyncio.create_task(run(FileStore(tmp_path), agent, RUN, "go"))
    await until(given_up)
    assert not task.done()
    await is_locked(tmp_path)
    with pytest.raises(StoreLocked):
        await run(FileStore(tmp_path), agent, RUN)
    gate.go.set()
    outcome = await task
    assert gate.left.is_set()
    assert isinstance(outcome, Indeterminate)
    assert await FileStore(tmp_path).holder(RUN) is None
    assert (await state(FileStore(tmp_path), RUN)).status == "indeterminate"


async def test_a_write_past_its_time_on_a_shared_store_lets_no_retry_run_beside_it(
    gate: Gate, given_up: threading.Event
):
    store, agent = Answering(), slow_payer(gate)
    task = asyncio.create_task(run(store, agent, RUN, "go"))
    await until(given_up)
    await signal(PlainView(store), RUN, "reconcile", {"step": PAY, "outcome": "retry"})
    gate.entered.clear()
    assert isinstance(await run(store, agent, RUN), Waiting)
    assert not gate.entered.is_set()
    assert not task.done()
    gate.go.set()
    assert isinstance(await task, Indeterminate)
    with deadlines_passed():
        assert await run(store, agent, RUN) == ended("Paid.")
    assert gate.entered.is_set()


# ---- the journal API --------------------------------------------------------------------------


@both
async def test_a_step_recorded_safe_that_is_a_write_today_is_settled_by_a_person(shared: bool):
    store, world = await fresh(FaultyStore(shared=shared)), World()
    async with await opened(store, is_write=lambda tool: False) as journal:
        with pytest.raises(OSError):
            await journal.run_step(LOOK, "tool", world.call(LOOK, OSError()), tool="lookup")
    for _ in range(2):
        async with await opened(store, is_write=lambda tool: True) as journal:
            with pytest.raises(IndeterminateError):
                await journal.run_step(LOOK, "tool", world.call(LOOK), tool="lookup")
        assert (await state(store, RUN)).status == "indeterminate"
    said = {"step": LOOK, "outcome": "done", "result": "seen"}
    assert (await signal(PlainView(store), RUN, "reconcile", said)).result == "applied"
    async with await opened(store, is_write=lambda tool: True) as journal:
        assert await journal.run_step(LOOK, "tool", world.call(LOOK), tool="lookup") == "seen"
    assert world.calls == [LOOK]


async def same_error_again(journal: Journal, world: World, error: RunfoldError) -> None:
    before = list(world.calls)
    for step, tool in (("tool/2/0/mail", "mail"), (LLM, None), (PAY, "pay")):
        kind: Any = "tool" if tool else "model"
        with pytest.raises(type(error)) as raised:
            await journal.run_step(step, kind, world.call(step), tool=tool)
        assert raised.value is error
    assert world.calls == before


async def test_after_an_unknown_write_the_handle_makes_no_further_step():
    store, world = await Log(started(), start_of(PAY)).store(FaultyStore()), World()
    async with await opened(store) as journal:
        with pytest.raises(IndeterminateError) as raised:
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
        await same_error_again(journal, world, raised.value)
    assert await types_of(store) == ["run.started", "step.started"]


async def test_after_a_replay_mismatch_the_handle_makes_no_further_step():
    store, world = await fresh(FaultyStore()), World()
    async with await opened(store) as journal:
        await journal.run_step(LOOK, "tool", world.call(LOOK), tool="lookup", input=1)
        before = await types_of(store)
        with pytest.raises(ReplayMismatch) as raised:
            await journal.run_step(LOOK, "tool", world.call(LOOK), tool="lookup", input=2)
        await same_error_again(journal, world, raised.value)
    assert await types_of(store) == before


async def test_after_being_fenced_the_handle_makes_no_further_step():
    store, world = await fresh(FaultyStore(shared=True)), World()
    async with await opened(store) as journal:
        await write_as_other(store, claimed("rival"))
        with pytest.raises(Fenced) as raised:
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
        await same_error_again(journal, world, raised.value)
    assert (await types_of(store))[-1] == "claim"


@both
async def test_the_steps_of_a_run_that_waits_for_a_person_answer_alike_on_every_store(shared: bool):
    bodies = [start_of(LOOK, "lookup", unsafe=False), result_of(LOOK, "found"), start_of(PAY)]
    log = Log(started(), claimed(), *bodies, parked("reconcile")) if shared else None
    store = await (log or Log(started(), *bodies)).store(FaultyStore(shared=shared))
    world = World()
    async with await opened(store) as journal:
        assert await journal.run_step(LOOK, "tool", world.call(LOOK), tool="lookup") == "found"
        with pytest.raises(IndeterminateError):
            await journal.run_step(PAY, "tool", world.call(PAY), tool="pay")
    assert world.calls == []


# ---- wrong types never brick a run ------------------------------------------------------------


@read
async def lookup() -> str:
    return "found"


HALF = "half \ud800"


def test_a_wrong_type_in_a_definition_is_refused_there():
    with pytest.raises(TypeError, match="revision"):
        Agent("a", model=ScriptedModel(), revision=2)  # type: ignore[arg-type]
    wrong: list[Any] = [Deny(5), NeedsApproval(None), "allow", True]  # type: ignore[arg-type]
    for rule in wrong:
        with pytest.raises(TypeError, match="lookup"):
            PolicyGate([lookup], {"lookup": rule})


class Says:
    """A gate that says the same of each call."""

    def __init__(self, decision: Any) -> None:
        self.decision = decision

    def decide(self, tool: object, input: JSON) -> Any:
        return self.decision

    def is_write(self, tool: str) -> bool:
        return False


@both
@pytest.mark.parametrize(
    "decision",
    [
        pytest.param(NeedsApproval(5), id="number"),  # type: ignore[arg-type]
        pytest.param(Deny(None), id="no reason"),  # type: ignore[arg-type]
        pytest.param("allow", id="word"),
        pytest.param(None, id="nothing"),
        pytest.param(NeedsApproval(HALF), id="half asked"),
        pytest.param(Deny(HALF), id="half denied"),
    ],
)
async def test_a_gate_that_says_no_decision_stops_the_run_and_leaves_it_readable(
    decision: Any, shared: bool
):
    store, gate = FaultyStore(shared=shared), Says(decision)
    model = ScriptedModel(call("lookup"), say("Done."))
    agent = Agent("a", model=model, tools=[lookup], gate=gate)
    with pytest.raises(StepFailed):
        await run(store, agent, RUN, "go")
    assert "step.completed" not in await types_of(store)
    assert (await state(store, RUN)).status == "running"
    gate.decision = Allow()
    assert await run(store, agent, RUN) == ended("Done.")


@both
async def test_a_step_of_no_kind_is_refused_and_leaves_the_run_readable(shared: bool):
    store, world = await fresh(FaultyStore(shared=shared)), World()
    kind: Any = "bogus"
    async with await opened(store) as journal:
        before = await types_of(store)
        with pytest.raises(NotEncodable):
            await journal.run_step(LLM, kind, world.call(LLM))
        assert (world.calls, await types_of(store)) == ([], before)
    assert (await state(store, RUN)).status == "running"
    async with await opened(store) as journal:
        assert await journal.run_step(LLM, "model", world.call(LLM))


@pytest.mark.parametrize("by", [5, HALF], ids=["number", "half"])
async def test_a_signal_by_what_is_no_name_writes_nothing(by: Any):
    store = await fresh(FaultyStore())
    with pytest.raises((RunfoldError, TypeError)):
        await signal(store, RUN, "approve", KEPT.payload, by=by)
    assert await types_of(store) == ["run.started"]
    assert (await signal(store, RUN, "approve", KEPT.payload)).result == "kept"


@pytest.mark.parametrize("request_id", [5, b"r", HALF], ids=["number", "bytes", "half"])
async def test_a_request_id_that_is_no_text_is_a_bad_payload(request_id: Any):
    store = await fresh(FaultyStore())
    with pytest.raises(BadPayload):
        await signal(store, RUN, "approve", KEPT.payload, request_id=request_id)
    assert await types_of(store) == ["run.started"]


@pytest.mark.parametrize("option", [{"by": HALF}, {"revision": HALF}], ids=["by", "revision"])
async def test_half_a_surrogate_in_a_start_is_refused_and_writes_nothing(option: dict[str, str]):
    store = FaultyStore()
    with pytest.raises(RunfoldError):
        await start(store, "helpdesk", "go", run_id=RUN, **option)
    assert await types_of(store) == []
    assert (await start(store, "helpdesk", "go", run_id=RUN)).created


async def test_half_a_surrogate_in_the_revision_of_a_claim_is_refused_and_writes_nothing():
    store = await fresh(FaultyStore(shared=True))
    with pytest.raises(RunfoldError):
        await opened(store, revision=HALF)
    assert await types_of(store) == ["run.started"]
    async with await opened(store):
        pass


@pytest.mark.parametrize(
    "message",
    [
        Message(role="user", content={1, 2}),  # type: ignore[arg-type]
        Message(role="bogus", content="hi"),  # type: ignore[arg-type]
    ],
    ids=["content", "role"],
)
async def test_a_message_that_is_none_is_not_recorded_as_input(message: Message):
    store = FaultyStore()
    with pytest.raises(NotEncodable):
        await run(store, Agent("a", model=ScriptedModel(say("Hi."))), RUN, [message])
    assert await types_of(store) == []


NO_REPLIES: dict[str, Any] = {
    "text None": Reply(text=None),  # type: ignore[arg-type]
    "text None with a call": msgspec.structs.replace(asks(request("lookup")), text=None),
    "bad finish": Reply(text="Hi.", finish="bogus"),  # type: ignore[arg-type]
    "dict": {"content": "Hi.", "text": 5},
    "nothing": None,
}


@both
@pytest.mark.parametrize("case", NO_REPLIES)
async def test_what_is_no_reply_is_not_recorded_and_the_next_run_goes_on(case: str, shared: bool):
    class Adapter:
        reply_with: Any = NO_REPLIES[case]

        async def reply(self, *args: Any, **options: Any) -> Any:
            return self.reply_with

    store, model = FaultyStore(shared=shared), Adapter()
    agent = Agent("a", model=model, tools=[lookup])
    for _ in range(2):
        with pytest.raises(StepFailed, match="no Reply"):
            await run(store, agent, RUN, "go")
        assert "step.completed" not in await types_of(store)
        assert (await state(store, RUN)).status == "running"
    model.reply_with = say("Hi.")
    assert await run(store, agent, RUN) == ended("Hi.")


# ---- records of a newer version ---------------------------------------------------------------


async def newer_as_other(store: MemoryStore) -> None:
    """A record of an unknown type at the tail, chained as it should be."""
    log = Log()
    for entry in (await MemoryStore.load(store, RUN)).entries:
        log.fold.apply(entry)
    raw = log.sealed(KEPT, nonce="fedcba987654").raw.replace(b'"signal"', b'"input"')
    await MemoryStore.append(store, RUN, log.raw(raw), expected=log.fold.n)


@both
@pytest.mark.parametrize("at", range(1, 7))
async def test_a_newer_record_before_an_append_stops_the_holder(at: int, shared: bool):
    """Between decision and append: it may be a claim or a cancel, so nothing is done after it."""
    store, world = await fresh(FaultyStore(shared=shared)), World()
    steps: list[Any] = [(LLM, "model", None), (LOOK, "tool", "lookup"), (PAY, "tool", "pay")]

    async def all_steps(journal: Journal) -> None:
        for step, kind, tool in steps:
            await journal.run_step(step, kind, world.call(step), tool=tool)

    async with await opened(store) as journal:
        before = len(await types_of(store))
        store.faults[store.appends + at] = lambda: newer_as_other(store)
        with pytest.raises(NewerVersion):
            await all_steps(journal)
        called = list(world.calls)
        with pytest.raises(RunfoldError):
            await journal.run_step("llm/9", "model", world.call("llm/9"))
    types = await types_of(store)
    assert world.calls == called == [step for step, _, _ in steps][: at // 2]
    assert (len(types), types[-1].startswith("input")) == (before + at, True)


async def test_a_newer_record_stops_the_built_in_loop_before_its_write():
    calls: list[str] = []

    @write(approval=False)
    async def pay() -> str:
        calls.append("pay")
        return "paid"

    store = FaultyStore(shared=True)
    agent = Agent("a", model=ScriptedModel(call("pay"), say("Paid.")), tools=[pay])
    store.faults[5] = lambda: newer_as_other(store)  # started, claim, the model's two, the start
    with pytest.raises(NewerVersion):
        await run(store, agent, RUN, "go")
    types = await types_of(store)
    assert (calls, len(types), types[-1].startswith("input")) == ([], 5, True)


async def test_a_reconcile_with_an_unknown_outcome_is_newer_and_never_a_permit():
    calls: list[str] = []

    @write(approval=False)
    async def pay() -> str:
        calls.append("pay")
        raise OSError

    store = FaultyStore()
    agent = Agent("a", model=ScriptedModel(call("pay"), say("Paid.")), tools=[pay])
    stopped: Outcome = await run(store, agent, RUN, "go")
    assert isinstance(stopped, Indeterminate)
    payload = {"step": PAY, "start": stopped.unknown[0].start, "outcome": "happened"}
    await write_as_other(store, Signal(name="reconcile", request_id="q", payload=payload))
    assert (await state(store, RUN)).status == "newer"
    with pytest.raises(NewerVersion):
        await run(store, agent, RUN)
    with pytest.raises(NewerVersion):
        await opened(store)
    assert calls == ["pay"]


def test_a_start_that_cites_a_done_as_its_permit_is_damage():
    log = Log(started(), start_of(PAY), done(PAY, 2))
    with pytest.raises(Damage, match="without a permit"):
        log.add(start_of(PAY, permit=3))
    permitted = Log(started(), start_of(PAY), retry(PAY, 2))
    permitted.add(start_of(PAY, permit=3))
