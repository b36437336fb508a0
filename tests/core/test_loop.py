"""The built-in loop (R5, R26, R30-R36, UR-49): what a user sees of a run, whatever befalls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Killed,
    PlainView,
    asks,
    claimed,
    folded,
    request,
    types_of,
    write_as_other,
)
from kit.deadlines import deadlines_passed

from journal.doors import signal, start, state
from journal.errors import (
    Fenced,
    IndeterminateError,
    InputMismatch,
    ReplayMismatch,
    RunNotFound,
    StepFailed,
    ToolError,
    Transient,
)
from journal.handle import Journal
from journal.messages import Message, Reply, ToolSpec
from journal.terms import Bounds
from journal.views import AwaitingApproval, Completed, Failed, Indeterminate, Outcome, Waiting
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.gate import Deny, PolicyGate
from worker.runner import run
from worker.tools import SAFE, Tool, ToolCall, read, write

pytestmark = pytest.mark.usefixtures("no_waiting")


class Desk:
    """An agent with a scripted model, and the world its tools act on."""

    def __init__(self, *replies: Reply, **options: Any) -> None:
        self.model = ScriptedModel(*replies)
        self.effects: list[str] = []
        self.keys: list[str] = []
        self.raising: dict[str, BaseException] = {}
        self.returning: dict[str, Any] = {}
        self.options = options

        def act(call: ToolCall, text: str) -> Any:
            self.effects.append(text)
            self.keys.append(call.key)
            if call.name in self.raising:
                raise self.raising[call.name]
            return self.returning.get(call.name, f"{text} done")

        @read
        async def lookup(q: str, call: ToolCall) -> Any:
            return act(call, f"lookup {q}")

        @write
        async def pay(amount: int, call: ToolCall) -> Any:
            return act(call, f"pay {amount}")

        @write(approval=False)
        async def mail(to: str, call: ToolCall) -> Any:
            return act(call, f"mail {to}")

        @write(approval=False, replay=SAFE)
        async def note(text: str, call: ToolCall) -> Any:
            return act(call, f"note {text}")

        self.tools: list[Tool] = [lookup, pay, mail, note]

    @property
    def agent(self) -> Agent:
        return Agent("helpdesk", model=self.model, tools=self.tools, **self.options)

    async def run(self, store: Any, input: Any = None) -> Outcome:
        return await run(store, self.agent, RUN, input)

    def told(self, n: int = -1) -> list[Any]:
        """What the tools answered, as the model saw it in its n-th request."""
        return [message.content for message in self.model.requests[n] if message.role == "tool"]


def helpdesk(**options: Any) -> Desk:
    return Desk(call("lookup", q="VPN"), call("pay", amount=10), say("Ticket filed."), **options)


async def approve(store: Any, outcome: Outcome, name: str = "approve", index: int = 0) -> None:
    assert isinstance(outcome, AwaitingApproval | Indeterminate)
    await signal(PlainView(store), RUN, name, {"marker": outcome.pending[index].marker})


async def reconcile(store: Any, stopped: Outcome, /, **said: Any) -> None:
    assert isinstance(stopped, Indeterminate)
    payload = {"step": stopped.step, "start": stopped.unknown[0].start, **said}
    await signal(PlainView(store), RUN, "reconcile", payload)


def done(text: str) -> Completed:
    return Completed(Message(role="assistant", content=text))


# ---- the worked example (R33, R5) -------------------------------------------------------------


async def test_the_worked_example_record_by_record():
    store, desk = FaultyStore(), helpdesk()
    first = await desk.run(store, "VPN is down")
    assert isinstance(first, AwaitingApproval)
    (pending,) = first.pending
    assert (pending.step, pending.tool, pending.input) == ("tool/2/0/pay", "pay", {"amount": 10})
    assert await types_of(store) == ["run.started", *["step.started", "step.completed"] * 3]
    assert (len(desk.model.requests), desk.effects) == (2, ["lookup VPN"])

    await approve(store, first)
    assert await desk.run(store) == done("Ticket filed.")
    assert len(await types_of(store)) == 13
    assert (len(desk.model.requests), desk.effects) == (3, ["lookup VPN", "pay 10"])

    assert await desk.run(store, "VPN is down") == done("Ticket filed.")
    assert len(await types_of(store)) == 13
    assert len(desk.model.requests) == 3


async def test_running_again_before_the_approval_does_nothing_at_all():
    store, desk = FaultyStore(), helpdesk()
    first = await desk.run(store, "VPN is down")
    for _ in range(3):
        assert await desk.run(store) == first
    assert len(await types_of(store)) == 7
    assert len(desk.model.requests) == 2


async def test_the_steps_have_the_names_that_a_person_reads():
    store, desk = FaultyStore(), helpdesk()
    await approve(store, await desk.run(store, "VPN is down"))
    await desk.run(store)
    fold = await folded(store)
    assert list(fold.steps) == ["llm/1", "tool/1/0/lookup", "llm/2", "tool/2/0/pay", "llm/3"]


async def test_the_model_sees_the_conversation_with_every_result_under_its_own_call():
    store, desk = FaultyStore(), helpdesk(system="Be kind.")
    await approve(store, await desk.run(store, "VPN is down"))
    await desk.run(store)
    roles = [message.role for message in desk.model.requests[-1]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert desk.told() == ["lookup VPN done", "pay 10 done"]
    ids = [message.call_id for message in desk.model.requests[-1] if message.role == "tool"]
    assert ids == [reply.calls[0].id for reply in desk.model.replies[:2]]


async def test_a_run_on_a_shared_store_claims_parks_and_does_the_same():
    store, desk = FaultyStore(shared=True), helpdesk()
    first = await desk.run(store, "VPN is down")
    await approve(store, first)
    assert await desk.run(store) == done("Ticket filed.")
    types = await types_of(store)
    assert [t for t in types if t in ("claim", "park", "signal")] == [
        "claim",
        "park",
        "signal",
        "claim",
    ]
    assert len(types) == 13 + 3
    assert (len(desk.model.requests), desk.effects) == (3, ["lookup VPN", "pay 10"])


async def test_the_key_that_a_tool_gets_is_the_recorded_one():
    store, desk = FaultyStore(), helpdesk()
    await approve(store, await desk.run(store, "VPN is down"))
    await desk.run(store)
    fold = await folded(store)
    recorded = [fold.steps[step].last.key for step in ("tool/1/0/lookup", "tool/2/0/pay")]
    assert desk.keys == recorded


async def test_messages_as_input_are_the_conversation():
    store, desk = FaultyStore(), Desk(say("Hello."))
    given = [Message(role="user", content="hi"), Message(role="assistant", content="yes?")]
    desk.model.replies = (say("never"), say("Hello."))
    assert await desk.run(store, given) == done("Hello.")
    assert list(desk.model.requests[0]) == given


async def test_a_resume_of_a_run_that_does_not_exist_is_refused():
    store = FaultyStore()
    with pytest.raises(RunNotFound):
        await helpdesk().run(store)
    with pytest.raises(RunNotFound):
        await run(store, helpdesk().agent)
    assert store.appends == 0


async def test_a_run_goes_on_only_with_its_own_agent_and_input():
    store, desk = FaultyStore(), helpdesk()
    await desk.run(store, "VPN is down")
    with pytest.raises(InputMismatch):
        await desk.run(store, "another input")
    other = Agent("other", model=desk.model)
    with pytest.raises(InputMismatch):
        await run(store, other, RUN)
    assert len(await types_of(store)) == 7


# ---- the gate (R31) ---------------------------------------------------------------------------


async def test_a_rejected_call_is_never_started_and_the_model_sees_why():
    store, desk = FaultyStore(), helpdesk()
    first = await desk.run(store, "VPN is down")
    assert isinstance(first, AwaitingApproval)
    payload = {"marker": first.pending[0].marker, "reason": "too expensive"}
    await signal(store, RUN, "reject", payload)
    assert await desk.run(store) == done("Ticket filed.")
    assert desk.effects == ["lookup VPN"]
    refusal = desk.told()[1]["error"]
    assert (refusal["type"], "too expensive" in refusal["message"]) == ("rejected", True)
    step = (await folded(store)).steps["tool/2/0/pay"]
    assert (step.starts, step.completed.via if step.completed else None) == ([], "refused")


async def test_a_denied_call_is_answered_without_a_person():
    desk = Desk(call("pay", amount=10), say("Well then."))
    desk.options["gate"] = PolicyGate(desk.tools, {"pay": Deny("not at night")})
    store = FaultyStore()
    assert await desk.run(store, "go") == done("Well then.")
    assert (desk.effects, desk.told()[0]["error"]["message"]) == ([], "not at night")


async def test_an_approval_that_comes_before_its_gate_lets_the_call_run_at_once():
    store, desk = FaultyStore(), helpdesk()
    probe = helpdesk()
    first = await probe.run(FaultyStore(), "VPN is down")
    assert isinstance(first, AwaitingApproval)
    await start(store, "helpdesk", "VPN is down", run_id=RUN)
    receipt = await signal(store, RUN, "approve", {"marker": first.pending[0].marker})
    assert receipt.result == "kept"
    assert await desk.run(store) == done("Ticket filed.")
    assert desk.effects == ["lookup VPN", "pay 10"]


async def test_an_approval_that_comes_as_the_run_stops_is_acted_on():
    """It lands between the last look at the journal and the park: one of the two loses (R61)."""
    store, desk = FaultyStore(shared=True), helpdesk()
    real = store.append

    async def append(run_id: Any, entry: Any, *, expected: int) -> Any:
        if entry.type == "park":
            store.append = real  # type: ignore[method-assign]
            outcome = (await state(PlainView(store), RUN)).outcome
            assert outcome is None  # still claimed
            marker = (await folded(store)).pending()[0][1].marker
            await signal(PlainView(store), RUN, "approve", {"marker": marker})
        return await real(run_id, entry, expected=expected)

    store.append = append  # type: ignore[method-assign]
    assert await desk.run(store, "VPN is down") == done("Ticket filed.")
    assert "park" not in await types_of(store)


# ---- several calls in one reply (UR-49) -------------------------------------------------------

FOUR = asks(
    request("lookup", {"q": "x"}, id="c0"),
    request("pay", {"amount": 1}, id="c1"),
    request("pay", {"amount": 2}, id="c2"),
    request("mail", {"to": "anna"}, id="c3"),
)


async def test_calls_that_need_nobody_run_while_others_wait():
    store, desk = FaultyStore(), Desk(FOUR, say("All done."))
    first = await desk.run(store, "go")
    assert isinstance(first, AwaitingApproval)
    assert [pending.input for pending in first.pending] == [{"amount": 1}, {"amount": 2}]
    assert desk.effects == ["lookup x", "mail anna"]


async def test_each_approval_lets_its_own_call_run_once_and_nothing_else_again():
    store, desk = FaultyStore(), Desk(FOUR, say("All done."))
    first = await desk.run(store, "go")
    await approve(store, first, index=1)
    second = await desk.run(store)
    assert isinstance(second, AwaitingApproval)
    assert [pending.input for pending in second.pending] == [{"amount": 1}]
    assert desk.effects == ["lookup x", "mail anna", "pay 2"]
    await approve(store, second)
    assert await desk.run(store) == done("All done.")
    assert desk.effects == ["lookup x", "mail anna", "pay 2", "pay 1"]
    assert desk.told() == ["lookup x done", "pay 1 done", "pay 2 done", "mail anna done"]
    assert len(desk.model.requests) == 2


async def test_a_rejected_call_leaves_the_others_alone():
    store, desk = FaultyStore(), Desk(FOUR, say("All done."))
    first = await desk.run(store, "go")
    await approve(store, first, "reject", index=0)
    await approve(store, first, index=1)
    assert await desk.run(store) == done("All done.")
    assert desk.effects == ["lookup x", "mail anna", "pay 2"]
    answers = desk.told()
    assert (answers[0], answers[2], answers[3]) == ("lookup x done", "pay 2 done", "mail anna done")
    assert answers[1]["error"]["type"] == "rejected"


async def test_an_unknown_write_is_named_before_what_waits_for_approval():
    store, desk = FaultyStore(), Desk(FOUR, say("All done."))
    desk.raising["mail"] = ConnectionError("cut")
    outcome = await desk.run(store, "go")
    assert isinstance(outcome, Indeterminate)
    assert outcome.step == "tool/1/3/mail"
    assert [pending.input for pending in outcome.pending] == [{"amount": 1}, {"amount": 2}]


# ---- exceptions (R26) -------------------------------------------------------------------------


async def test_an_exception_of_a_read_is_its_result():
    store, desk = FaultyStore(), Desk(call("lookup", q="x"), say("Sorry."))
    desk.raising["lookup"] = KeyError("no such page")
    assert await desk.run(store, "go") == done("Sorry.")
    error = desk.told()[0]["error"]
    assert (error["type"], "no such page" in error["message"]) == ("KeyError", True)


@pytest.mark.parametrize("tool", ["lookup", "pay", "mail", "note"])
async def test_a_tool_error_is_the_result_of_any_tool(tool: str):
    arguments: dict[str, Any] = {"q": "x", "amount": 1, "to": "x", "text": "x"}
    name = {"lookup": "q", "pay": "amount", "mail": "to", "note": "text"}[tool]
    desk = Desk(call(tool, **{name: arguments[name]}), say("Sorry."))
    store = FaultyStore()
    desk.raising[tool] = ToolError("declined", {"code": 7})
    outcome = await desk.run(store, "go")
    if isinstance(outcome, AwaitingApproval):
        await approve(store, outcome)
        outcome = await desk.run(store)
    assert outcome == done("Sorry.")
    expected = {"type": "tool_error", "message": "declined", "data": {"code": 7}}
    assert desk.told() == [{"error": expected}]
    assert len(desk.effects) == 1


@pytest.mark.parametrize("error", [Transient("later"), Transient()])
async def test_a_transient_failure_of_a_read_is_not_recorded_and_the_run_goes_on_later(
    error: Exception,
):
    store, desk = FaultyStore(), Desk(call("lookup", q="x"), say("Found."))
    desk.raising["lookup"] = error
    with pytest.raises(StepFailed, match="lookup raised Transient") as raised:
        await desk.run(store, "go")
    assert raised.value.step == "tool/1/0/lookup"
    assert await types_of(store) == [
        "run.started",
        "step.started",
        "step.completed",
        "step.started",
    ]
    desk.raising.clear()
    assert await desk.run(store) == done("Found.")
    assert len(desk.model.requests) == 2


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError(), Transient("x"), OSError()])
async def test_any_other_exception_of_a_write_leaves_it_unknown_and_is_never_tried_again(
    error: Exception,
):
    store, desk = FaultyStore(), Desk(call("mail", to="anna"), say("Sent."))
    desk.raising["mail"] = error
    outcome = await desk.run(store, "go")
    assert isinstance(outcome, Indeterminate)
    desk.raising.clear()
    for _ in range(3):
        assert await desk.run(store) == outcome
    assert desk.effects == ["mail anna"]
    await reconcile(store, outcome, outcome="done", result="MAIL-7")
    assert await desk.run(store) == done("Sent.")
    assert (desk.effects, desk.told()) == (["mail anna"], ["MAIL-7"])


async def test_an_exception_of_a_write_that_dedupes_on_its_key_is_tried_again_later():
    store, desk = FaultyStore(), Desk(call("note", text="x"), say("Noted."))
    desk.raising["note"] = OSError("disk")
    with pytest.raises(StepFailed):
        await desk.run(store, "go")
    desk.raising.clear()
    assert await desk.run(store) == done("Noted.")
    assert desk.effects == ["note x", "note x"]
    assert len(set(desk.keys)) == 1


@pytest.mark.parametrize("error", [ValueError("quota"), TimeoutError(), ToolError("odd")])
async def test_an_exception_of_the_model_records_nothing_and_is_asked_again(error: Exception):
    class Flaky(ScriptedModel):
        async def reply(
            self, messages: Sequence[Message], tools: Sequence[ToolSpec], **rest: Any
        ) -> Reply:
            reply = await super().reply(messages, tools, **rest)
            if len(self.requests) == 1:
                raise error
            return reply

    store, desk = FaultyStore(), Desk()
    desk.model = Flaky(say("Hello."))
    with pytest.raises(StepFailed, match="the model call llm/1 failed") as raised:
        await desk.run(store, "go")
    assert raised.value.__cause__ is error
    assert await types_of(store) == ["run.started", "step.started"]
    assert await desk.run(store) == done("Hello.")


ENGINE = [IndeterminateError("x", step="s"), Fenced("x"), StepFailed("x", step="s")]


@pytest.mark.parametrize("error", ENGINE, ids=lambda error: type(error).__name__)
async def test_an_engine_error_of_another_run_says_nothing_about_this_one(error: Exception):
    """A tool that uses runfold itself: what comes out of it is an exception like any other."""
    store, desk = FaultyStore(), Desk(call("lookup", q="x"), call("mail", to="anna"), say("never"))
    desk.raising = {"lookup": error, "mail": error}
    outcome = await desk.run(store, "go")
    assert isinstance(outcome, Indeterminate)
    assert (outcome.step, desk.effects) == ("tool/2/0/mail", ["lookup x", "mail anna"])
    assert desk.told()[0]["error"]["type"] == type(error).__name__


async def test_a_write_whose_result_cannot_be_recorded_fails_the_run_and_never_runs_again():
    store, desk = FaultyStore(), Desk(call("mail", to="anna"), say("never"))
    desk.returning["mail"] = {1, 2}
    outcome = await desk.run(store, "go")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, "type set" in outcome.detail) == ("not_recordable", True)
    for _ in range(3):
        assert await desk.run(store) == outcome
    assert desk.effects == ["mail anna"]


@pytest.mark.parametrize("fault", ["killed before", "killed after"])
async def test_it_also_fails_the_run_where_the_process_died_before_saying_so(fault: Any):
    store, desk = FaultyStore({6: fault}), Desk(call("mail", to="anna"), say("never"))
    desk.returning["mail"] = {1, 2}
    with pytest.raises(Killed):
        await desk.run(store, "go")
    outcome = await desk.run(store)
    assert isinstance(outcome, Failed)
    assert (outcome.reason, desk.effects) == ("not_recordable", ["mail anna"])


async def test_a_read_whose_result_cannot_be_recorded_fails_the_run_naming_it():
    store, desk = FaultyStore(), Desk(call("lookup", q="x"), say("never"))
    desk.returning["lookup"] = b"bytes"
    outcome = await desk.run(store, "go")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, "type bytes" in outcome.detail) == ("not_recordable", True)


# ---- the model misbehaves (R36, R47) ----------------------------------------------------------

USELESS = {
    "empty": say(""),
    "blanks": say(" \n\t "),
    "cut off": Reply(text="I was about to", finish="length"),
    "cut off in a call": msgspec.structs.replace(call("mail", to="x"), finish="length"),
    "unknown tool": call("no_such_tool"),
    "bad arguments": call("pay", amount="ten"),
    "broken arguments": asks(request("mail", '{"to": "x', id="c")),
    "equal ids": asks(request("mail", {"to": "x"}, id="c"), request("mail", {"to": "y"}, id="c")),
}


@pytest.mark.parametrize("case", USELESS)
async def test_useless_replies_in_a_row_end_the_run_after_a_bounded_number(case: str):
    store, desk = FaultyStore(), Desk(*[USELESS[case]] * 10, bounds=Bounds(bad_replies=3))
    outcome = await desk.run(store, "go")
    assert isinstance(outcome, Failed)
    assert outcome.reason == "bad_replies"
    assert (len(desk.model.requests), desk.effects) == (3, [])
    assert await desk.run(store) == outcome


@pytest.mark.parametrize("case", USELESS)
async def test_a_useless_reply_is_answered_and_forgiven(case: str):
    bad, good = USELESS[case], call("lookup", q="x")
    store, desk = FaultyStore(), Desk(bad, bad, good, bad, bad, say("At last."))
    assert await desk.run(store, "go") == done("At last.")
    assert desk.effects == ["lookup x"]
    assert desk.model.requests[1][-1].role in ("tool", "user")


async def test_one_good_call_makes_a_reply_useful():
    mixed = asks(request("no_such_tool", {}, id="a"), request("lookup", {"q": "x"}, id="b"))
    store, desk = FaultyStore(), Desk(*[mixed] * 5, say("Done."), bounds=Bounds(bad_replies=2))
    assert await desk.run(store, "go") == done("Done.")


async def test_a_refusal_of_the_model_ends_the_run():
    store, desk = FaultyStore(), Desk(Reply(text="I can't do that.", finish="refusal"))
    outcome = await desk.run(store, "go")
    assert outcome == Failed("model_refused", "I can't do that.")


async def test_too_many_calls_in_one_reply_end_the_run_before_any_of_them():
    many = asks(*(request("mail", {"to": str(i)}, id=f"c{i}") for i in range(300)))
    store, desk = FaultyStore(), Desk(many)
    outcome = await desk.run(store, "go")
    assert isinstance(outcome, Failed)
    assert (outcome.reason, desk.effects) == ("calls_per_reply", [])


async def test_a_run_makes_at_most_its_number_of_model_calls():
    store, desk = FaultyStore(), Desk(*[call("lookup", q="x")] * 9, bounds=Bounds(iterations=4))
    outcome = await desk.run(store, "go")
    assert outcome == Failed("iterations", "4 model calls made")
    assert len(desk.model.requests) == 4
    assert await desk.run(store) == outcome


# ---- the code changed under the run -----------------------------------------------------------


async def test_recorded_results_need_no_tool_any_more():
    store, desk = FaultyStore(), helpdesk()
    await approve(store, await desk.run(store, "VPN is down"))
    desk.tools = [tool for tool in desk.tools if tool.spec.name != "lookup"]
    assert await desk.run(store) == done("Ticket filed.")


async def test_a_new_call_to_a_tool_that_is_gone_is_an_error_the_model_sees():
    store, desk = FaultyStore(), helpdesk()
    await approve(store, await desk.run(store, "VPN is down"))
    desk.tools = [tool for tool in desk.tools if tool.spec.name != "pay"]
    assert await desk.run(store) == done("Ticket filed.")
    assert desk.told()[1]["error"]["type"] == "unknown_tool"
    assert desk.effects == ["lookup VPN"]


async def test_a_permitted_retry_of_a_tool_that_is_gone_writes_nothing_and_keeps_its_permit():
    store, desk = FaultyStore(), Desk(call("mail", to="anna"), say("Sent."))
    desk.raising["mail"] = OSError()
    outcome = await desk.run(store, "go")
    await reconcile(store, outcome, outcome="retry")
    desk.raising.clear()
    tools, desk.tools = desk.tools, desk.tools[:2]
    before = await types_of(store)
    with pytest.raises(ReplayMismatch):
        await desk.run(store)
    assert await types_of(store) == before
    desk.tools = tools
    assert await desk.run(store) == done("Sent.")


# ---- crashes ----------------------------------------------------------------------------------

THREE = asks(
    request("lookup", {"q": "x"}, id="c0"),
    request("pay", {"amount": 1}, id="c1"),
    request("mail", {"to": "anna"}, id="c2"),
)
PROGRAMS: dict[str, tuple[tuple[Reply, ...], list[str], str]] = {
    "worked example": (
        (call("lookup", q="VPN"), call("pay", amount=10), say("Ticket filed.")),
        ["lookup VPN", "pay 10"],
        "Ticket filed.",
    ),
    "three calls in a reply": (
        (THREE, say("All done.")),
        ["lookup x", "mail anna", "pay 1"],
        "All done.",
    ),
}
WRITES = ("pay", "mail")
APPENDS = 16  # more than either program makes without a crash


async def to_the_end(desk: Desk, store: FaultyStore, how: str) -> tuple[Outcome, int]:
    """Run it again and again, a person doing what is asked; the outcome and the reconciles."""
    reconciles = 0
    for _ in range(12):
        outcome = await desk.run(store, "go")
        if isinstance(outcome, Waiting):
            assert store.shared  # who was killed in the write may as well be cut off, and at it
            with deadlines_passed():
                outcome = await desk.run(store)
        match outcome:
            case AwaitingApproval():
                await approve(store, outcome)
            case Indeterminate():
                reconciles += 1
                if how == "retry":
                    await reconcile(store, outcome, outcome="retry")
                else:
                    step = outcome.unknown[0]
                    said = {"pay": "pay {amount} done", "mail": "mail {to} done"}[step.tool]
                    text = said.format(**step.input)
                    await reconcile(store, outcome, outcome="done", result=text)
            case _:
                return outcome, reconciles
    raise AssertionError("the run does not end")


async def check(
    desk: Desk, store: FaultyStore, program: str, how: str, outcome: Outcome, reconciles: int
) -> None:
    _, effects, answer = PROGRAMS[program]
    assert outcome == done(answer)
    writes = [effect for effect in desk.effects if effect.startswith(WRITES)]
    expected = [effect for effect in effects if effect.startswith(WRITES)]
    assert reconciles <= 1
    assert set(writes) <= set(expected)
    assert len(writes) <= len(expected) + (reconciles if how == "retry" else 0)
    if how == "done":
        assert len(set(writes)) == len(writes)  # at most once, each
    if reconciles == 0:
        assert sorted(writes) == sorted(expected)  # exactly once, each
    assert desk.told() == [f"{effect} done" for effect in told_in_order(program)]
    assert (await folded(store)).open == {}


def told_in_order(program: str) -> list[str]:
    effects = PROGRAMS[program][1]
    return effects if program == "worked example" else [effects[0], effects[2], effects[1]]


@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("how", ["done", "retry"])
@pytest.mark.parametrize("fault", ["killed before", "killed after"])
async def test_a_crash_at_any_append_changes_no_answer_and_repeats_no_write(
    fault: Any, how: str, program: str, shared: bool
):
    reached = 0
    for at in range(1, APPENDS + 1):
        store, desk = FaultyStore({at: fault}, shared=shared), Desk(*PROGRAMS[program][0])
        try:
            outcome, reconciles = await to_the_end(desk, store, how)
        except Killed:
            reached += 1
            outcome, reconciles = await to_the_end(desk, store, how)
        await check(desk, store, program, how, outcome, reconciles)
    assert reached >= 10


@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("how", ["done", "retry"])
@pytest.mark.parametrize("tool", ["lookup", "pay", "mail"])
async def test_a_crash_inside_a_call_repeats_a_read_and_never_a_write(
    tool: str, how: str, program: str, shared: bool
):
    store, desk = FaultyStore(shared=shared), Desk(*PROGRAMS[program][0])
    desk.raising[tool] = Killed()
    try:
        outcome, reconciles = await to_the_end(desk, store, how)
    except Killed:
        desk.raising.clear()
        outcome, reconciles = await to_the_end(desk, store, how)
    await check(desk, store, program, how, outcome, reconciles)
    writes = [effect for effect in desk.effects if effect.startswith(tool)]
    used = any(effect.startswith(tool) for effect in PROGRAMS[program][1])
    again = tool == "lookup" or how == "retry"
    assert len(writes) == ((2 if again else 1) if used else 0)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("first", ["killed before", "killed after"])
@pytest.mark.parametrize("second", ["killed before", "killed after"])
async def test_two_crashes_change_no_answer_either(first: Any, second: Any, program: str):
    for at in range(1, APPENDS, 2):
        for later in range(at + 1, APPENDS + 3):
            faults = {at: first, later: second}
            store, desk = FaultyStore(faults), Desk(*PROGRAMS[program][0])
            reconciles = 0
            for _ in range(3):
                try:
                    outcome, more = await to_the_end(desk, store, "done")
                except Killed:
                    continue
                reconciles += more
                break
            else:
                raise AssertionError("killed more often than told")
            writes = [effect for effect in desk.effects if effect.startswith(WRITES)]
            assert outcome == done(PROGRAMS[program][2])
            assert len(set(writes)) == len(writes)
            assert (await folded(store)).open == {}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("fault", ["ack lost", "lost", "lands before the next append"])
async def test_a_lost_acknowledgement_is_nothing_that_a_user_sees(fault: Any, program: str):
    for at in range(1, APPENDS + 1):
        store, desk = FaultyStore({at: fault}), Desk(*PROGRAMS[program][0])
        outcome, reconciles = await to_the_end(desk, store, "done")
        await check(desk, store, program, "done", outcome, reconciles)
        assert reconciles == 0


@pytest.mark.parametrize("program", PROGRAMS)
async def test_a_holder_that_is_taken_over_stops_and_the_other_finishes(program: str):
    """UR-03: whoever loses an append to a newer claim does nothing more with this run."""
    for at in range(3, APPENDS):
        store, desk = FaultyStore(shared=True), Desk(*PROGRAMS[program][0])
        store.faults[at] = lambda store=store: write_as_other(store, claimed("rival"))
        seen: list[int] = []
        try:
            outcome, reconciles = await to_the_end(desk, store, "done")
        except Fenced:
            seen.append(len(desk.effects))
            # the rival's process is gone as well: nobody answers for it
            outcome, reconciles = await to_the_end(desk, store, "done")
        except AssertionError:
            continue  # the run had ended, or was not claimed, when the rival came
        await check(desk, store, program, "done", outcome, reconciles)


async def test_a_store_that_is_taken_over_in_the_middle_of_the_write_leaves_it_to_a_person():
    store, desk = FaultyStore(shared=True), Desk(call("mail", to="anna"), say("Sent."))
    store.faults[6] = lambda: write_as_other(store, claimed("rival"))  # the write's result
    with pytest.raises(Fenced):
        await desk.run(store, "go")
    outcome = await desk.run(store)
    assert isinstance(outcome, Indeterminate)
    await reconcile(store, outcome, outcome="done", result="seen in the outbox")
    assert await desk.run(store) == done("Sent.")
    assert (desk.effects, desk.told()) == (["mail anna"], ["seen in the outbox"])


async def test_a_run_is_left_unlocked_whatever_ended_it():
    for error in (Killed(), Transient(), KeyboardInterrupt()):
        store, desk = FaultyStore(), Desk(call("lookup", q="x"), say("Found."))
        desk.raising["lookup"] = error
        with pytest.raises((Killed, StepFailed, KeyboardInterrupt)):
            await desk.run(store, "go")
        assert await store.holder(RUN) is None  # type: ignore[arg-type]


async def test_reading_a_journal_changes_nothing():
    store, desk = FaultyStore(), helpdesk()
    await desk.run(store, "VPN is down")
    before = store.appends
    journal = await Journal.read(store, RUN)
    assert (journal.fold.status(), (await state(store, RUN)).records) == ("awaiting_approval", 7)
    assert store.appends == before
