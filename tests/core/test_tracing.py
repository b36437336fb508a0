"""Traces (R73): one a run, whoever works on it; a replay adds nothing; nothing private in them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
from kit.build import RUN, Fault, FaultyStore, Killed, PlainView, claimed, result_of, start_of
from kit.spans import Spans, traced
from kit.turns import Clock, Handler, World, agent_of, work
from msgspec.structs import replace
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased

import runfold.tracing
from journal import tracing
from journal.codec import Entry
from journal.doors import signal, start, state, submit, withdraw
from journal.early import NotDue
from journal.errors import BadPayload, NotEncodable, RunfoldError, StepFailed, TooLarge, ToolError
from journal.fold import Fold
from journal.handle import Journal
from journal.ids import RunId
from journal.limits import RECORD_BYTES_MAX
from journal.log import Log
from journal.messages import JSON
from journal.observing import Trace
from journal.records import Claim, Interrupted, StepCompleted, StepError, StepStarted
from journal.spans import parsed
from journal.store import AppendAnswer, Appended, Loaded
from journal.stores.file import FileStore
from journal.stores.memory import MemoryStore
from journal.terms import Complete, Continue, Fail, Next
from journal.tracing import Tracing
from journal.views import AwaitingApproval, Completed, Indeterminate, RunState
from worker.agent import Agent, turn
from worker.context import Context
from worker.models.scripted import ScriptedModel, call, say
from worker.runner import run
from worker.tools import ToolCall, read, write

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALLER_TRACE = CALLER[3:35]
UNSAMPLED = CALLER[:-2] + "00"
UNKNOWN_AFTER = 8
"""Records of `desk`'s run: the last one is the start of its write."""


class Headers(FaultyStore):
    """A shared store that keeps each record's traceparent, as a stream's headers do."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.carried: dict[tuple[str, int], str] = {}

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        answer = await super().append(run_id, entry, expected=expected)
        if isinstance(answer, Appended):
            self.carried[run_id, answer.tail] = entry.trace
        return answer

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        loaded = await super().load(run_id, after=after)
        entries = [
            Entry(one.record, one.raw, one.status, one.position, one.commit, trace)
            for one in loaded.entries
            if (trace := self.carried.get((run_id, one.position), "")) is not None
        ]
        return Loaded(tuple(entries), loaded.tail, loaded.torn)


@contextlib.contextmanager
def program(name: str = "program") -> Any:
    """As in a program that is traced itself."""
    observer, _ = traced()
    with observer._tracer.start_as_current_span(name) as span:
        yield span


def ids_of(span: Any) -> tuple[str, str]:
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


def watched(store: Any, **options: Any) -> Spans:
    store.observer, spans = traced(**options)
    return spans


@read
def look(x: int) -> int:
    return x + 1


@write(approval=False)
def act(x: int) -> str:
    return "acted"


def desk() -> Agent:
    script = ScriptedModel(call("look", x=1), call("act", x=2), say("Done."))
    return Agent("desk", model=script, tools=[look, act])


# ---- the trace of a run -------------------------------------------------------------------------


async def test_a_run_is_one_trace_of_its_start_its_holding_and_its_steps() -> None:
    store = MemoryStore()
    spans = watched(store)
    await run(store, desk(), RUN, "hello")
    assert spans.names() == ["start desk", *["model", "tool look", "model", "tool act", "model"],
                             "run desk"]  # fmt: skip
    first, holding = spans.one("start desk"), spans.one("run desk")
    assert spans.traces() == {first.trace}
    assert (first.parent, holding.parent) == ("", first.id)
    assert {step.parent for step in spans.steps()} == {holding.id}
    assert [step["start"] for step in spans.steps()] == [2, 4, 6, 8, 10]
    assert holding["status"] == "completed" and not holding.failed
    acted = spans.one("tool act")
    assert (acted["replay"], acted["kind"], acted["via"]) == ("unsafe", "tool", "run")
    assert (acted["step"], acted["outcome"]) == ("tool/2/0/act", "result")
    optional = [sorted({"runfold.tool", "runfold.permit"} & set(one.attributes))
                for one in spans.steps()]  # fmt: skip
    assert optional == [[], ["runfold.tool"], [], ["runfold.tool"], []]
    assert (acted["tool"], acted["attempt"]) == ("act", 1)


async def test_a_run_goes_on_in_the_trace_of_the_program_that_starts_it() -> None:
    store = MemoryStore()
    spans = watched(store)
    with program() as span:
        await run(store, desk(), RUN, "hello")
    trace, id = ids_of(span)
    assert spans.traces() == {trace}
    assert spans.one("start desk").parent == id == spans.one("run desk").parent


async def test_a_run_that_was_started_elsewhere_keeps_its_trace_and_links_the_program() -> None:
    store = Headers()
    spans = watched(store)
    await start(store, "desk", "hello", run_id=RUN)
    with program() as span:
        await run(store, desk(), RUN)
    holding = spans.one("run desk")
    assert holding.trace == spans.one("start desk").trace != ids_of(span)[0]
    assert holding.links == (ids_of(span),)


async def test_a_program_of_the_runs_own_trace_is_what_its_spans_are_below() -> None:
    store = Headers()
    spans = watched(store)
    with program() as span:
        await start(store, "desk", "hello", run_id=RUN)
        await run(store, desk(), RUN)
    holding = spans.one("run desk")
    assert (holding.parent, holding.links) == (ids_of(span)[1], ())
    assert spans.one("start desk").kind == "PRODUCER"


async def test_a_request_that_starts_a_run_is_what_the_run_is_below() -> None:
    store = Headers()
    spans = watched(store)
    with store.observer.door("POST /runs", CALLER):
        await start(store, "desk", "hello", run_id=RUN)
    server, begun = spans.one("POST /runs"), spans.one("start desk")
    assert (server.trace, server.parent, begun.parent) == (CALLER_TRACE, CALLER[36:52], server.id)
    assert server.start_ns == begun.start_ns


async def test_another_process_goes_on_in_the_trace_that_the_journal_carries() -> None:
    store = Headers()
    here = watched(store)
    await start(store, "helpdesk", "go", run_id=RUN)
    there = watched(store)
    await work(store, agent_of(asking(World())))
    assert there.one("run helpdesk").parent == here.one("start helpdesk").id
    assert there.traces() == here.traces()


async def test_all_who_work_on_a_run_that_was_started_untraced_find_one_trace_for_it() -> None:
    store = Headers()
    await start(store, "helpdesk", "go", run_id=RUN)
    await start(store, "helpdesk", "go", run_id="other")
    found: dict[str, set[str]] = {RUN: set(), "other": set()}
    for run_id, traces in found.items():
        for text in ("hurry", "hurry more"):
            spans = watched(store)
            await submit(store, run_id, text)
            traces |= spans.traces()
    assert [len(traces) for traces in found.values()] == [1, 1]
    assert found[RUN] != found["other"]


async def test_a_sampler_decides_about_such_a_run_as_about_any() -> None:
    for ratio, sampled in ((0.0, False), (1.0, True)):
        store = Headers()
        await start(store, "helpdesk", "go", run_id=RUN)
        spans = watched(store, sampler=ParentBased(TraceIdRatioBased(ratio)))
        await submit(store, RUN, "hurry")
        assert spans.names() == ["input"] * sampled


async def test_a_trace_that_is_not_sampled_is_carried_and_makes_no_spans() -> None:
    store = Headers()
    spans = watched(store)
    with store.observer.door("POST /runs", UNSAMPLED):
        await start(store, "desk", "hello", run_id=RUN)
    await run(store, desk(), RUN)
    carried = store.carried[RUN, 1]
    assert carried[3:35] == CALLER_TRACE and carried.endswith("-00")
    assert spans.all == []


async def test_without_an_sdk_nothing_breaks() -> None:
    store = Headers()
    store.observer = Tracing(otel.NoOpTracerProvider())
    await start(store, "desk", "hello", run_id=RUN)
    await run(store, desk(), RUN)
    assert (await state(store, RUN)).status == "completed"


async def test_a_child_run_is_below_the_step_that_spawned_it() -> None:
    store = Headers()
    spans = watched(store)

    async def parent(ctx: Context) -> Next:
        if ctx.load_checkpoint() is None:
            child = await ctx.spawn("clerk", "go", name="c")
            return Continue(state=child, until_child=child)
        return Complete("done")

    await start(store, "helpdesk", "go", run_id=RUN)
    await work(store, agent_of(parent))
    await work(store, turn("clerk")(answering), run=f"{RUN}.c")
    await work(store, agent_of(parent))
    spawn, begun = spans.one("tool runfold.spawn"), spans.one("start clerk")
    assert begun.parent == spawn.id and spans.one("run clerk").parent == begun.id
    told, (_, woken) = spans.one("signal child"), spans.named("run helpdesk")
    assert told.parent == spans.one("start helpdesk").id
    assert woken.links == ((told.trace, told.id),) and len(spans.traces()) == 1


async def answering(ctx: Context) -> Next:
    return Complete("answer")


# ---- replay -------------------------------------------------------------------------------------


async def test_a_replayed_step_has_no_second_span() -> None:
    store, world = Headers(), World()
    agent = agent_of(asking(world))
    await start(store, "helpdesk", "go", run_id=RUN)
    first = watched(store)
    marker = marker_of(await work(store, agent))
    await signal(store, RUN, "approve", {"marker": marker})
    second = watched(store)
    await work(store, agent)
    assert world.calls == ["look", "pay"]
    assert [step["step"] for step in first.steps()] == ["0/0"]
    assert [step["step"] for step in second.steps()] == ["0/1"]
    await run(store, agent, RUN)
    assert len(first.steps()) + len(second.steps()) == 2


@pytest.mark.parametrize("records", range(1, 12))
async def test_each_call_has_one_span_wherever_the_run_was_cut_off(records: int) -> None:
    """The first process is gone after so many records; what it had open came to nothing."""
    store = FaultyStore({records + 1: "killed before"})
    spans = watched(store)
    with contextlib.suppress(Killed):
        await run(store, desk(), RUN, "hello")
    again = watched(store)
    outcome = await run(store, desk(), RUN)
    if isinstance(outcome, Indeterminate):
        payload = {"step": outcome.step, "outcome": "done", "result": "acted"}
        await signal(store, RUN, "reconcile", payload)
        await run(store, desk(), RUN)
        assert again.named("run desk")[-1].events == ("step settled",)
    steps = [step["step"] for step in (*spans.steps(), *again.steps()) if not step.failed]
    called = {"llm/1", "tool/1/0/look", "llm/2", "tool/2/0/act", "llm/3"}
    if records == UNKNOWN_AFTER:
        called.remove("tool/2/0/act")
    assert sorted(steps) == sorted(called)
    assert again.counts()["signal reconcile"] == (records == UNKNOWN_AFTER)


@pytest.mark.parametrize("fault", ["ack lost", "lost"])
async def test_an_append_that_was_in_doubt_has_one_span_all_the_same(
    no_waiting: None, fault: Fault
) -> None:
    store = FaultyStore(dict.fromkeys(range(1, 40, 2), fault))
    spans = watched(store)
    await run(store, desk(), RUN, "hello")
    assert spans.counts() == {"start desk": 1, "run desk": 1, "model": 3, "tool look": 1,
                              "tool act": 1}  # fmt: skip


# ---- signals ------------------------------------------------------------------------------------


def asking(world: World) -> Handler:
    async def handler(ctx: Context) -> Next:
        await ctx.tool(world.call("look", safe=True))
        paid = await ctx.tool(world.call("pay", approval="Pay?"))
        return Complete(paid.output)

    return handler


def marker_of(state: RunState) -> str:
    assert isinstance(state.outcome, AwaitingApproval)
    return state.outcome.pending[0].marker


@pytest.fixture
async def parked() -> tuple[Headers, Spans, str]:
    """A run that waits for an approval; its spans so far."""
    store = Headers()
    spans = watched(store)
    await start(store, "helpdesk", "go", run_id=RUN)
    return store, spans, marker_of(await work(store, agent_of(asking(World()))))


Parked = tuple[Headers, Spans, str]


async def test_a_signal_is_of_the_runs_trace_links_its_caller_and_the_claim_it(
    parked: Parked,
) -> None:
    store, spans, marker = parked
    with store.observer.door("POST /runs/{id}/signals/approve", CALLER):
        await signal(store, RUN, "approve", {"marker": marker})
    await work(store, agent_of(asking(World())))
    server, approve = spans.one("POST /runs/{id}/signals/approve"), spans.one("signal approve")
    assert (server.trace, server.parent, server.kind) == (CALLER_TRACE, CALLER[36:52], "SERVER")
    assert (approve.kind, approve["signal"]) == ("INTERNAL", "approve")
    assert approve.start_ns == server.start_ns  # from its arrival
    assert approve.trace == spans.one("start helpdesk").trace != server.trace
    assert approve.links == ((server.trace, server.id),)
    parked_claim, woken = spans.named("run helpdesk")
    assert (parked_claim["ended"], parked_claim["status"]) == ("park", "awaiting_approval")
    assert parked_claim.links == () and woken.links == ((approve.trace, approve.id),)
    assert parked_claim.end_ns <= approve.start_ns  # the wait itself is no span
    assert spans.one("tool pay").attributes["runfold.permit"] == approve["record"]


async def test_a_kept_signal_begins_when_it_was_stored_and_links_who_published_it(
    parked: Parked,
) -> None:
    store, spans, marker = parked
    stored = Clock()()
    with store.observer.door("signal approve", CALLER, stored):
        await signal(store, RUN, "approve", {"marker": marker})
    approve = spans.one("signal approve")
    assert (approve.kind, approve.links) == ("CONSUMER", ((CALLER_TRACE, CALLER[36:52]),))
    assert approve.start_ns == int(stored.timestamp() * 1e9)
    assert CALLER_TRACE not in spans.traces()


async def test_an_input_has_a_span_too_and_a_repeat_of_it_none(parked: Parked) -> None:
    store, spans, _ = parked
    for _ in range(2):
        with store.observer.door("POST /runs/{id}/inputs", ""):
            await submit(store, RUN, "hurry", request_id="i1")
    assert spans.counts()["input"] == 1
    assert (spans.one("input").links, spans.one("input").kind) == ((), "INTERNAL")
    await withdraw(store, RUN, "i1")
    assert spans.one("input withdrawn").parent == spans.one("input").parent


async def test_what_a_door_knew_is_forgotten_behind_it(parked: Parked) -> None:
    store, spans, _ = parked
    with store.observer.door("signal input", CALLER, Clock()()):
        pass
    await submit(store, RUN, "hurry")
    assert (spans.one("input").links, spans.one("input").kind) == ((), "INTERNAL")


async def test_in_a_program_that_traces_its_requests_itself_a_door_adds_no_server(
    parked: Parked,
) -> None:
    store, spans, _ = parked
    with program() as span, store.observer.door("POST /runs/{id}/inputs", CALLER):
        await submit(store, RUN, "hurry")
    assert spans.one("input").links == (ids_of(span),)
    assert spans.counts()["POST /runs/{id}/inputs"] == 0


async def test_a_request_that_fails_by_a_bug_says_so_where_it_has_a_span() -> None:
    observer, spans = traced()
    for caller in (CALLER, ""):
        with pytest.raises(ZeroDivisionError), observer.door("POST /runs", caller):
            raise ZeroDivisionError("s3cr3t")
        with pytest.raises(BadPayload), observer.door("POST /decisions", caller):
            raise BadPayload("s3cr3t")
    failed, refused = spans
    assert (failed.attributes["error.type"], failed.failed) == ("ZeroDivisionError", True)
    assert (refused.attributes["error.type"], refused.failed) == ("bad_payload", False)


async def test_who_is_refused_sees_why_in_the_own_trace_and_the_run_sees_nothing(
    parked: Parked,
) -> None:
    store, spans, _ = parked
    before = spans.counts()
    with pytest.raises(RunfoldError), store.observer.door("POST /decisions", CALLER):
        await signal(store, RUN, "approve", {"marker": f"{RUN}/0/1@1.0123456789abcdef"})
    (refused,) = spans.named("POST /decisions")
    assert refused.attributes["error.type"] == "stale_signal" and not refused.failed
    assert spans.counts() - before == {"POST /decisions": 1}


async def test_no_span_begins_after_its_end_whatever_clock_said_when_it_began(
    parked: Parked,
) -> None:
    store, spans, marker = parked
    with store.observer.door("signal approve", "", Clock()() + timedelta(hours=1)):
        await signal(store, RUN, "approve", {"marker": marker})
    approve = spans.one("signal approve")
    assert approve.start_ns <= approve.end_ns


@pytest.mark.parametrize("at", ["2999-01-01T00:00:00.000Z", "no instant", "2026-01-01T00:00:00Z"])
@pytest.mark.parametrize("there", ["claim", "run", "nothing"])
async def test_a_step_of_a_worker_over_http_is_told_by_who_records_its_result(
    at: str, there: str
) -> None:
    store = Headers()
    store.observer, here = traced()
    log = await held(store, remote=True)
    begun = replace(start_of("0/0", "look", unsafe=False), at=at)
    assert await log.append(lambda fold: begun)
    assert store.observer.open_spans == 1 and here.steps() == []
    if there != "claim":  # its header is not known there
        store.carried[RUN, 2] = ""
    if there == "nothing":
        store.carried[RUN, 1] = ""
    spans = watched(store)
    other = await Log.read(store, RUN)
    other.claim = 2
    await other.append(lambda fold: result_of("0/0"))
    step = spans.one("tool look")
    parents = {"claim": log.trace.claim, "run": log.trace.run, "nothing": ""}
    if there != "nothing":
        assert step.parent == parents[there][36:52]
    assert (step.trace == here.one("start helpdesk").trace) == (there != "nothing")
    assert store.observer.open_spans == 0
    assert step.start_ns <= step.end_ns
    if at.startswith("2026"):
        assert step.start_ns == 1767225600 * 10**9


@pytest.mark.parametrize("via", ["run", "not_called", "interrupted", "probe", "refused"])
async def test_of_such_a_step_there_is_a_span_only_where_a_call_came_to_something(via: Any) -> None:
    store = Headers()
    spans = watched(store)
    log = await held(store, remote=True)
    if via != "refused":
        policies: dict[str, Any] = {"interrupted": "interrupt", "probe": "probe"}
        begun = start_of("0/0", policy=policies.get(via, "reconcile"))
        await log.append(lambda fold: begun)
    fields: dict[str, Any] = {
        "not_called": {"error": StepError(type="not_called", message="s3cr3t")},
        "refused": {"error": StepError(type="denied", message="s3cr3t")},
        "interrupted": {"interrupted": Interrupted()},
    }.get(via, {"result": 1})
    await log.append(lambda fold: StepCompleted(step="0/0", via=via, **fields))
    store.observer.let_go(RunId(RUN), 2)
    told = [one["via"] for one in spans.steps()]
    settled = spans.one("run helpdesk").events
    assert (told, settled) == (
        ([via], ()) if via in ("run", "not_called") else ([], ("step settled",))
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        CALLER.upper(),
        CALLER[:-1],
        CALLER + "0",
        CALLER + " ",
        CALLER + "-x",
        CALLER.replace("-01", "-0g"),
        "ff" + CALLER[2:],
        "01" + CALLER[2:],
        "00-" + "0" * 32 + CALLER[35:],
        CALLER[:36] + "0" * 16 + CALLER[52:],
        CALLER[:-3] + "\r\n1",
        CALLER.replace("0af7", "0af٧"),
        " " + CALLER[:-1],
        CALLER.replace("-", "_"),
    ],
)
async def test_what_is_no_traceparent_is_as_if_it_were_not_there(text: str) -> None:
    assert parsed(text) is None
    store = Headers()
    spans = watched(store)
    with store.observer.door("POST /runs", text):
        await start(store, "desk", 1, run_id=RUN)
    assert spans.names() == ["start desk"] and spans.one("start desk").parent == ""
    assert parsed(store.carried[RUN, 1]) is not None


# ---- calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [MemoryStore, Headers], ids=["lock", "claim"])
async def test_what_a_tool_traces_itself_hangs_below_its_step_also_in_a_thread(store: Any) -> None:
    seen: dict[str, str] = {}

    def here() -> str:
        return ids_of(otel.get_current_span())[1]

    @read
    async def fetch() -> str:
        seen["fetch"] = here()
        return "fetched"

    @read
    def compute() -> str:
        seen["compute"] = here()
        return "computed"

    script = ScriptedModel(call("fetch"), call("compute"), say("Done."))
    opened = store()
    spans = watched(opened)
    await run(opened, Agent("desk", model=script, tools=[fetch, compute]), RUN, "hello")
    assert seen == {name: spans.one(f"tool {name}").id for name in seen} and len(seen) == 2
    starts = [r.n for r in (await opened.load(RUN)).records if isinstance(r, StepStarted)]
    assert [one.attributes["runfold.start"] for one in spans.steps()] == starts
    assert opened.observer.open_spans == 0
    assert not otel.get_current_span().get_span_context().is_valid


async def test_a_read_whose_start_was_not_due_leaves_no_span_open() -> None:
    store = Headers()
    spans = watched(store)
    observer = store.observer
    log = await held(store)
    begun = start_of("0/0", unsafe=False)
    early = replace(begun, claim=log.claim)
    calling = observer.calling(log.run_id, early)
    calling.__enter__()
    assert otel.get_current_span().get_span_context().is_valid
    assert not calling.__exit__(NotDue, NotDue(), None)
    assert observer.open_spans == 1
    await log.append(lambda fold: begun)  # it was due after all: another span
    observer.let_go(log.run_id, log.claim)
    assert [one.attributes["error.type"] for one in spans.steps()] == ["NotDue", "cut_off"]


async def test_nothing_that_was_said_or_went_wrong_is_in_a_span() -> None:
    secret = "s3cr3t"

    @write(approval=False)
    def pay(card: str, call: ToolCall) -> str:
        raise ToolError(f"{secret} declined", {"card": secret})

    @read
    def balance(card: str) -> str:
        return secret

    script = ScriptedModel(
        call("balance", card=secret), call("pay", card=secret), call("gone", x=secret), say(secret)
    )
    store = MemoryStore()
    spans = watched(store)
    agent = Agent("desk", model=script, tools=[pay, balance])
    await run(store, agent, RUN, secret)
    with pytest.raises(StepFailed):
        await run(store, Agent("desk", model=ScriptedModel(), tools=[]), "other", secret)
    assert spans.one("tool pay").failed and spans.one("tool pay")["outcome"] == "error"
    assert spans.one("tool pay").attributes["error.type"] == "tool_error"
    assert [secret in span.text for span in spans] == [False] * len(spans.all)


@pytest.mark.parametrize("safe", [True, False])
async def test_a_call_that_raised_and_left_no_result_says_so_once(safe: bool) -> None:
    store, world = MemoryStore(), World()
    world.raising["look"] = ZeroDivisionError("s3cr3t")
    spans = watched(store)

    async def handler(ctx: Context) -> Next:
        await ctx.tool(world.call("look", safe=safe))
        return Complete(None)

    with pytest.raises(StepFailed) if safe else contextlib.nullcontext():
        await run(store, agent_of(handler), RUN, "go")  # what became of a write a person says
    (failed,) = spans.steps()
    assert (failed.attributes["error.type"], failed.failed) == ("ZeroDivisionError", True)
    assert world.calls == ["look"]
    assert not any("s3cr3t" in span.text for span in spans)


@pytest.mark.parametrize("unsafe", [False, True])
async def test_a_call_whose_result_can_t_be_recorded_ends_as_the_journal_says(unsafe: bool) -> None:
    store = MemoryStore()
    spans = watched(store)
    await start(store, "helpdesk", "go", run_id=RUN)
    async with await Journal.open(store, RUN, is_write=lambda tool: unsafe) as journal:

        async def fn() -> Any:
            return float("nan")

        for _ in range(2):
            with pytest.raises((NotEncodable, ToolError)):
                await journal.run_step("s", "tool", fn, tool="look")
        assert store.observer.open_spans == 1
    kinds = [(one["outcome"] if unsafe else "", one.attributes["error.type"])
             for one in spans.steps()]  # fmt: skip
    # A read is made again; of a write it is recorded that it did happen.
    assert kinds == ([("error", "not_recordable")] if unsafe else [("", "NotEncodable")] * 2)


async def test_a_step_that_is_begun_again_ends_the_span_it_left_open() -> None:
    store = MemoryStore()
    spans = watched(store)
    await start(store, "helpdesk", "go", run_id=RUN)
    async with await Journal.open(store, RUN, is_write=lambda tool: False) as journal:

        async def fn() -> Any:
            assert store.observer.open_spans == 2
            return "x" * (RECORD_BYTES_MAX + 1)

        for _ in range(2):
            with pytest.raises(TooLarge):
                await journal.run_step("s", "tool", fn, tool="look")
    assert [one.attributes["error.type"] for one in spans.steps()] == ["cut_off"] * 2
    assert not spans.one("run helpdesk").failed  # left in order
    assert spans.one("run helpdesk")["agent"] == "helpdesk"


async def test_a_call_that_outlives_its_claim_changes_nothing_of_its_ended_span() -> None:
    observer, spans = traced()
    store = Headers()
    store.observer = observer
    log = await held(store)
    begun = await log.append(lambda fold: start_of("0/0", unsafe=False))
    assert begun is not None
    calling = observer.calling(log.run_id, begun)
    calling.__enter__()
    observer.let_go(log.run_id, 2)
    error = ZeroDivisionError()
    assert not calling.__exit__(type(error), error, None)
    with observer.calling(log.run_id, begun):  # of a claim that is not held here
        pass
    (step,), holding = spans.steps(), spans.one("run helpdesk")
    assert step.attributes["error.type"] == "cut_off"
    assert (holding["ended"], holding.attributes["error.type"]) == ("let_go", "let_go")


async def test_a_run_that_failed_is_a_failure_of_its_last_claim() -> None:
    store = Headers()
    spans = watched(store)

    async def handler(ctx: Context) -> Next:
        return Fail(reason="broken", detail="s3cr3t")

    await start(store, "helpdesk", "go", run_id=RUN)
    await work(store, agent_of(handler))
    holding = spans.one("run helpdesk")
    assert (holding["status"], holding["ended"], holding.failed) == ("failed", "commit", True)


async def held(store: Headers, **fields: Any) -> Log:
    """A run that is claimed, so that steps can be appended to it as its holder does."""
    await start(store, "helpdesk", "go", run_id=RUN)
    log = await Log.read(store, RUN)
    claim = await log.append(lambda fold: claimed(**fields))
    assert claim is not None
    log.claim = claim.n
    return log


# ---- holding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
async def test_a_claim_is_one_span_over_all_its_turns(shared: bool) -> None:
    store, world = Headers(), World()
    store.shared = shared

    async def handler(ctx: Context) -> Next:
        done = ctx.load_checkpoint() or 0
        await ctx.tool(world.call("look", done, safe=True))
        return Complete(done) if done == 2 else Continue(state=done + 1)

    spans = watched(store)
    await start(store, "helpdesk", "go", run_id=RUN)
    if not shared:
        await run(store, agent_of(handler), RUN)
    else:
        await work(store, agent_of(handler))
    holding = spans.one("run helpdesk")
    assert [step.parent for step in spans.steps()] == [holding.id] * 3
    if shared:
        assert (holding["claim"], holding["reason"], holding["worker"]) == (2, "wake", "w1")


async def test_who_lost_its_run_ends_its_spans() -> None:
    store, world = Headers(), World()
    spans = watched(store)
    await start(store, "helpdesk", "go", run_id=RUN)

    async def take_over() -> JSON:
        log = await Log.read(PlainView(store), RUN, by="w2")
        await log.append(lambda fold: Claim(worker="w2", revision="1", reason="redelivery"))
        return None

    async def handler(ctx: Context) -> Next:
        await ctx.model(take_over)
        return Complete(None)

    with pytest.raises(RunfoldError, match="taken over"):
        await work(store, agent_of(handler))
    holding = spans.one("run helpdesk")
    assert (holding["ended"], holding.failed) == ("fenced", True)
    assert spans.one("model").attributes["error.type"] == "cut_off"
    assert store.observer.open_spans == 0
    assert world.calls == []


async def test_many_runs_leave_nothing_behind(tmp_path: Any) -> None:
    store, kept = FileStore(tmp_path), Headers()
    store.observer, spans = traced()
    kept.observer = store.observer
    for number in range(20):
        await run(store, desk(), f"run-{number}", "hello")
        await start(kept, "desk", "hello", run_id=f"run-{number}")
        with contextlib.suppress(RunfoldError):
            await start(kept, "desk", "another", run_id=f"run-{number}")
        await run(kept, desk(), f"run-{number}")
    assert store.observer.open_spans == 0
    assert spans.counts() == {"start desk": 40, "run desk": 40, "model": 120, "tool look": 40,
                              "tool act": 40}  # fmt: skip


async def test_what_nobody_lets_go_of_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "HOLDING_MAX", 3)
    observer, spans = traced()
    for number in range(10):
        store = Headers()
        store.observer = observer
        await start(store, "desk", "hello", run_id=f"run-{number}")
        log = await Log.read(store, f"run-{number}")
        await log.append(lambda fold: Claim(worker="w1", revision="1", reason="new"))
    assert observer.open_spans == 3
    assert [span["run"] for span in spans.named("run desk")] == [f"run-{n}" for n in range(7)]


def test_a_start_that_lost_its_race_is_never_told() -> None:
    observer, spans = traced(ALWAYS_OFF)
    assert observer.open_spans == 0 and spans.all == []
    observer.fenced(RunId(RUN), 2)
    observer.let_go(RunId(RUN), 2)
    observer.appended(
        RunId(RUN), Fold(), Claim(n=2, worker="w", revision="1", reason="new"), Trace()
    )
    assert observer.open_spans == 0


class Faulty(SpanProcessor):
    """Raises at its `at`-th span, as it begins or ends."""

    def __init__(self, when: str, at: int) -> None:
        self.when, self.left = when, at

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._count("start")

    def on_end(self, span: Any) -> None:
        self._count("end")

    def _count(self, when: str) -> None:
        self.left -= when == self.when
        if when == self.when and self.left == 0:
            raise ZeroDivisionError("not the run's fault")


@pytest.mark.parametrize("when", ["start", "end"])
@pytest.mark.parametrize("at", range(1, 8))
async def test_what_a_provider_raises_ends_its_traces_and_no_run(
    caplog: pytest.LogCaptureFixture, when: str, at: int
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Faulty(when, at))
    store = Headers()
    store.observer = runfold.tracing.tracing(provider)
    with store.observer.door("POST /runs", CALLER):
        await start(store, "desk", "hello", run_id=RUN)
    outcome = await run(store, desk(), RUN)
    assert isinstance(outcome, Completed)
    assert [record.message for record in caplog.records] == [
        "Tracing failed, and is off until this process is started again"
    ]


def test_nothing_of_runfold_needs_opentelemetry_unless_it_is_asked_for() -> None:
    script = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "opentelemetry":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import runfold, runfold.cli, runfold.tracing, worker.service, bridge.service
from runfold.frame import UsageProblem
with runfold.tracing.traced(None, "s", "n") as observer:
    print(type(observer).__name__)
try:
    with runfold.tracing.traced(True, "s", "n"):
        pass
except UsageProblem as error:
    print(error.message, "|", error.hint)
import os
os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:1"
with runfold.tracing.traced(None, "s", "n") as observer:
    print(type(observer).__name__)
with runfold.tracing.traced(False, "s", "n") as observer:
    print(type(observer).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "Unobserved",
        "tracing needs opentelemetry | pip install 'runfold[otel]'",
        "Unobserved",
        "Unobserved",
    ]
    assert "no traces, though their endpoint is set" in done.stderr
