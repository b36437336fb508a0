"""UR-12, UR-14, UR-16, UR-18, UR-20, UR-22: decisions early, late, twice, broken, at once."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases.child import DyingStore
from cases.pay import ANSWER, TO
from cases.world import World, check_store, named, one_line
from cases.zygote import Zygote
from kit.deadlines import deadlines_passed

from journal.codec import Entry
from journal.doors import signal, state
from journal.ids import RunId
from journal.store import AppendAnswer, Store
from journal.stores.memory import MemoryStore
from journal.values import call_digest
from runfold import (
    Agent,
    AwaitingApproval,
    BadPayload,
    Completed,
    DecisionConflict,
    Failed,
    Indeterminate,
    RunFinished,
    RunfoldError,
    RunNotFound,
    StaleSignal,
    open_store,
    run,
)
from runfold.testing import ScriptedModel, say

STEP = "tool/1/0/charge"


async def waiting(store: Store, world: World, run_id: str, script: str = "gated") -> str:
    """A run that waits for an approval: its marker."""
    end = await run(store, world.agent(script), run_id, "pay")
    assert isinstance(end, AwaitingApproval)
    return end.pending[0].marker


async def unknown(store: Store, world: World, run_id: str) -> None:
    """A run whose charge was started and never answered."""
    end = await run(store, world.agent(at="tool:raise"), run_id, "pay")
    assert isinstance(end, Indeterminate)
    assert len(world.ledger.lines(run_id)) == 1


async def count(store: Store, run_id: str) -> int:
    return len((await store.load(RunId(run_id))).entries)


# ---- UR-12 ------------------------------------------------------------------------------------


class Meanwhile(DyingStore):
    """A store in which something else happens just before the n-th append."""

    def __init__(self, inner: Store, n: int, something: Callable[[], Any]) -> None:
        super().__init__(inner, "")
        self.n = n
        self.something = something

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        if len(self.appends) + 1 == self.n:
            self.appends.append("")
            await self.something()
        return await super().append(run_id, entry, expected=expected)


async def test_ur12_approve_before_the_run_waits(store: Store, world: World) -> None:
    """UR-12: approved at each moment from before the start to the suspension: before there is a
    run it is refused as such, later it is kept, and the run needs no second approve."""
    marker = await waiting(MemoryStore(), world, "r1")
    moments = 5 if store.shared else 3  # shared: also before the claim, and before the park
    for moment in range(1, moments + 1):
        run_id = f"r{moment}"
        early = marker.replace("r1/", f"{run_id}/", 1)
        if moment != 1:  # the digest binds the run: learn it from the same run elsewhere
            early = await waiting(MemoryStore(), world, run_id)
        said: list[str] = []

        async def approve(run_id: str = run_id, early: str = early, said: list[str] = said) -> None:
            try:
                receipt = await signal(store, run_id, "approve", {"marker": early})
                said.append(receipt.result)
            except RunfoldError as error:
                said.append(error.code)

        meanwhile = Meanwhile(store, moment, approve)
        end = await run(meanwhile, world.agent("gated"), run_id, "pay")  # type: ignore[arg-type]
        if moment == 1:
            assert said == ["run_not_found"]
            assert isinstance(end, AwaitingApproval)
            continue
        assert said == ["applied" if store.shared and moment == 5 else "kept"]
        assert isinstance(end, Completed), (moment, end)
        assert named(await check_store(store, run_id)).count("signal") == 1
        assert len(world.ledger.lines(run_id)) == 1


@pytest.mark.real
def test_ur12_approve_and_run_at_the_same_time(world: World, zygote: Zygote) -> None:
    """UR-12: 20 runs, each started and approved by two processes at once: an approve that was
    taken is enough; one that was not said that there is no such run."""
    markers = {f"r{number}": _marker(world, f"r{number}") for number in range(20)}
    where = ["--store", str(world.runs), "--json"]
    pairs = {
        run_id: (
            zygote.cli(*world.run_args(run_id, input="pay"), env=world.env("gated")),
            zygote.cli("approve", marker, *where),
        )
        for run_id, marker in markers.items()
    }
    for run_id, (runner, approver) in pairs.items():
        first, approve = runner.wait(), approver.wait()
        if approve.code == 0:
            assert first.code in (0, 3)
            assert world.run(run_id, script="gated").code == 0
        else:
            assert approve.json["error"]["code"] == "run_not_found"
            assert first.code == 3
        assert len(world.ledger.lines(run_id)) == (approve.code == 0)
        world.check(run_id)


def _marker(world: World, run_id: str) -> str:
    return asyncio.run(waiting(MemoryStore(), world, run_id))


def test_ur12_approve_of_a_run_that_does_not_exist_is_refused_visibly(world: World) -> None:
    """UR-12: never accepted and lost."""
    done = world.cli("approve", _marker(world, "r1"), "--store", str(world.runs))
    assert done.code == 8
    assert "run r1 does not exist" in one_line(done.err)
    assert not world.runs.exists()


# ---- UR-14 ------------------------------------------------------------------------------------


async def test_ur14_signals_to_a_finished_run(store: Store, world: World) -> None:
    """UR-14: approve, reject, reconcile after the end are refused with the final status; nothing
    is appended, also not by a repeat of the decision that counted."""
    marker = await waiting(store, world, "done-1")
    await signal(store, "done-1", "approve", {"marker": marker}, request_id="first")
    assert isinstance(await run(store, world.agent("gated"), "done-1"), Completed)
    refused = await waiting(store, world, "failed-1", "twice")
    for _ in range(2):
        await signal(store, "failed-1", "reject", {"marker": refused})
        end = await run(store, world.agent("twice"), "failed-1")
        refused = end.pending[0].marker if isinstance(end, AwaitingApproval) else ""
    assert isinstance(end, Completed)
    for run_id, its in (("done-1", marker), ("failed-1", f"failed-1/{STEP}@1.0123456789abcdef")):
        before = await count(store, run_id)
        for name, payload in (
            ("approve", {"marker": its}),
            ("reject", {"marker": its}),
            ("reconcile", {"step": STEP, "outcome": "retry"}),
            ("reconcile", {"step": STEP, "outcome": "done", "result": 1}),
        ):
            with pytest.raises(RunFinished, match="is completed"):
                await signal(store, run_id, name, payload)
        assert await count(store, run_id) == before
    same = await signal(store, "done-1", "approve", {"marker": marker}, request_id="first")
    assert same.result == "repeated"  # a caller that lost the answer is not told "too late"
    assert len(world.ledger.lines("done-1")) == 1
    await check_store(store, "done-1")


def test_ur14_the_command_says_the_final_status(world: World) -> None:
    """UR-14: exit 8, `run_finished`, for a completed and for a failed run."""
    assert world.run("ok", input="pay").code == 0
    agent = _never_usable(world)
    assert isinstance(agent, Failed)
    for run_id, status in (("ok", "completed"), ("bad", "failed")):
        done = world.reconcile(run_id, STEP, "--retry", "--json")
        assert done.code == 8
        assert status in one_line(done.err)
        assert done.json["error"]["code"] == "run_finished"
        world.check(run_id)


def _never_usable(world: World) -> Any:
    empty = Agent("pay", model=ScriptedModel(say(""), say(" "), say("\n")))
    return asyncio.run(run(world.store(), empty, "bad", "x"))


# ---- UR-16 ------------------------------------------------------------------------------------

MALFORMED: list[tuple[str, Any]] = [
    ("empty", b""),
    ("null", b"null"),
    ("list", b"[]"),
    ("brace", b"{"),
    ("text", b'"approve"'),
    ("number", b"17"),
    ("big-number", b"1" * 5000),
    ("not-utf8", b"\xff\xfe"),
    ("900 kB text", b'"' + b"a" * 900_000 + b'"'),
    ("1.2 MB", b'{"marker":"' + b"a" * 1_200_000 + b'"}'),
    ("deep", b'{"marker":' * 10_000 + b"1" + b"}" * 10_000),
    ("deep list", b"[" * 10_000 + b"]" * 10_000),
    ("not a field", b'{"approve":true}'),
    ("key twice", b'{"approve":true,"approve":false}'),
    ("marker twice", b'{"marker":"a","marker":"MARKER"}'),
    ("NaN", b'{"marker":NaN}'),
    ("Infinity", b'{"marker":"MARKER","comment":Infinity}'),
    ("gzip", gzip.compress(b'{"marker":"MARKER"}')),
    ("no marker", b"{}"),
    ("null marker", b'{"marker":null}'),
    ("empty marker", b'{"marker":""}'),
    ("marker list", b'{"marker":["MARKER"]}'),
    ("unknown field", b'{"marker":"MARKER","force":true}'),
    ("other run", b'{"marker":"r2/tool/1/0/charge@1.0123456789abcdef"}'),
    ("run in body", b'{"marker":"MARKER","run":"r2"}'),
    ("half pair", b'{"marker":"MARKER","comment":"\\ud83d"}'),
    ("comment number", b'{"marker":"MARKER","comment":1}'),
    ("trailing", b'{"marker":"MARKER"} x'),
    ("bom", b'\xef\xbb\xbf{"marker":"MARKER"}'),
    ("utf16", '{"marker":"MARKER"}'.encode("utf-16")),
    ("a float in Python", {"marker": float("nan")}),
    ("bytes in Python", {"marker": b"MARKER"}),
    ("a set in Python", {"marker": {"MARKER"}}),
]


async def test_ur16_malformed_signals(store: Store, world: World) -> None:
    """UR-16: each is refused with a bounded reason and nothing written; the run still waits, and
    a correct approve goes through."""
    marker = await waiting(store, world, "r1")
    before = await count(store, "r1")
    for what, payload in MALFORMED:
        sent = payload.replace(b"MARKER", marker.encode()) if type(payload) is bytes else payload
        with pytest.raises(BadPayload) as refused:
            await signal(store, "r1", "approve", sent)
        assert len(refused.value.message) < 500, what
        refused.value.message.encode()
    for name in ("approved", "", "APPROVE", "cancel\n", "a" * 5000, "../approve"):
        with pytest.raises(BadPayload) as refused:
            await signal(store, "r1", name, {"marker": marker})
        assert len(refused.value.message) < 500
    for step in ("tool/1/0/pay", "", "x" * 5000, "llm/1", STEP):
        with pytest.raises(StaleSignal) as stale:
            await signal(store, "r1", "reconcile", {"step": step, "outcome": "retry"})
        assert len(stale.value.message) < 500
    assert await count(store, "r1") == before
    assert (await state(store, "r1")).status == "awaiting_approval"
    await signal(store, "r1", "approve", b'{"marker":"%s"}' % marker.encode())
    assert isinstance(await run(store, world.agent("gated"), "r1"), Completed)
    assert len(world.ledger.lines()) == 1
    await check_store(store, "r1")


def test_ur16_malformed_markers_at_the_command(world: World) -> None:
    """UR-16: a marker that is none, exit 2; one that is not pending, exit 8; nothing written."""
    assert world.run("r1", input="pay", script="gated").code == 3
    data = world.path("r1").read_bytes()
    (pending,) = world.show("r1", "--json").json["pending"]
    marker: str = pending["marker"]
    wrong = [
        ("", 2),
        ("null", 2),
        (marker + "\n", 2),
        (marker.upper(), 2),
        (marker[:-1], 2),
        (f"../{marker}", 2),
        ("r1", 2),
        ("x" * 5000, 2),
        (marker[:-1] + ("0" if marker[-1] != "0" else "1"), 8),
        (marker.replace("r1/", "r2/", 1), 8),
        (marker.replace("@1.", "@2."), 8),
    ]
    for text, code in wrong:
        done = world.cli("approve", text, "--store", str(world.runs))
        assert done.code == code, (text, done)
        assert len(one_line(done.err)) < 700
    assert world.path("r1").read_bytes() == data
    assert world.cli("approve", marker, "--store", str(world.runs)).code == 0
    assert world.run("r1", script="gated").code == 0


# ---- UR-18 ------------------------------------------------------------------------------------


async def test_ur18_approved_one_thing_executed_another(store: Store, world: World) -> None:
    """UR-18: an approval for charge(10), which was rejected, does nothing for charge(9999); what
    runs is exactly what was shown, by digest and in the ledger."""
    first = await waiting(store, world, "r1", "twice")
    await signal(store, "r1", "reject", {"marker": first, "reason": "too early"})
    end = await run(store, world.agent("twice"), "r1")
    assert isinstance(end, AwaitingApproval)
    (pending,) = end.pending
    assert (pending.input, pending.marker != first) == ({"amount": 9999, "to": TO}, True)
    with pytest.raises(DecisionConflict):
        await signal(store, "r1", "approve", {"marker": first})
    for none in ({}, {"marker": ""}, {"marker": "r1"}):
        with pytest.raises(BadPayload):
            await signal(store, "r1", "approve", none)
    mixed = pending.marker.rpartition(".")[0] + "." + first.rpartition(".")[2]
    with pytest.raises(StaleSignal, match="not pending"):
        await signal(store, "r1", "approve", {"marker": mixed})
    now = await run(store, world.agent("twice"), "r1")
    assert isinstance(now, AwaitingApproval)
    assert now.pending == (pending,)
    assert not world.ledger.lines()

    receipt = await signal(store, "r1", "approve", {"marker": pending.marker})
    assert isinstance(await run(store, world.agent("twice"), "r1"), Completed)
    assert world.ledger.lines() == [("r1", "tool/2/0/charge", {"amount": 9999, "to": TO})]
    records = await check_store(store, "r1")
    (start,) = [r for r in records if r["type"] == "step.started" and r["kind"] == "tool"]
    assert start["digest"] == call_digest("charge", {"amount": 9999, "to": TO})
    assert (start["permit"], start["input"]) == (receipt.n, pending.input)


async def test_ur18_the_gate_changed_after_the_approval(store: Store, world: World) -> None:
    """UR-18: approved, then another revision of the tool is deployed: the approval covers nothing,
    the model is told, nothing runs."""
    marker = await waiting(store, world, "r1")
    await signal(store, "r1", "approve", {"marker": marker})
    changed = world.agent("gated")
    charge = changed.tools["charge"]
    changed.tools["charge"] = _with_revision(charge)
    assert isinstance(await run(store, changed, "r1"), Completed)
    assert not world.ledger.lines()
    (request,) = changed.model.requests
    assert request[-1].content["error"]["type"] == "outdated"


def _with_revision(tool: Any) -> Any:
    return replace(tool, revision="another")


# ---- UR-20 ------------------------------------------------------------------------------------


@pytest.mark.real
async def test_ur20_approve_and_reject_at_once(
    world: World, zygote: Zygote, place: str, namespace: str, tmp_path: Path
) -> None:
    """UR-20: two processes, released by a barrier, 25 runs on each store: one decision record; the
    loser is told who won; effects are the approves that won; a repeat is no error."""
    async with open_store(place, namespace=namespace) as store:
        markers = {f"r{n}": await waiting(store, world, f"r{n}") for n in range(25)}
        barrier = tmp_path / "barrier"
        about: dict[str, Any] = {"store": place, "namespace": namespace}
        pairs = {
            run_id: {
                name: zygote.call(
                    "cases.child:decide",
                    **about,
                    barrier=str(barrier),
                    run_id=run_id,
                    name=name,
                    payload={"marker": marker},
                )
                for name in ("approve", "reject")[:: 1 if int(run_id[1:]) % 2 else -1]
            }
            for run_id, marker in markers.items()
        }
        barrier.touch()
        approved = 0
        for run_id, pair in pairs.items():
            said = {name: child.wait().json for name, child in pair.items()}
            (winner,) = [name for name, answer in said.items() if "result" in answer]
            (loser,) = [name for name in said if name != winner]
            assert said[winner]["result"] == "applied"
            assert said[loser]["error"] == "decision_conflict"
            assert f"{winner} by child, record {said[winner]['n']}" in said[loser]["message"]
            again = await signal(store, run_id, winner, {"marker": markers[run_id]})
            assert (again.result, again.n) == ("repeated", said[winner]["n"])
            end = await run(store, world.agent("gated"), run_id)
            assert isinstance(end, Completed)
            assert end.message.content == ANSWER
            assert named(await check_store(store, run_id)).count("signal") == 1
            assert len(world.ledger.lines(run_id)) == (winner == "approve")
            approved += winner == "approve"
    assert len(world.ledger.lines()) == approved


# ---- UR-22 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "effects"),
    [
        ({"outcome": "done", "result": {"by": "hand"}}, {"outcome": "retry"}, 1),
        ({"outcome": "retry"}, {"outcome": "done", "result": {"by": "hand"}}, 2),
        ({"outcome": "done", "result": 1}, {"outcome": "done", "result": 2}, 1),
    ],
    ids=["a-done-retry", "b-retry-done", "done-done"],
)
async def test_ur22ab_the_second_reconcile_is_a_conflict(
    store: Store, world: World, first: dict[str, Any], second: dict[str, Any], effects: int
) -> None:
    """UR-22 a, b: the first decision stands, the other is a conflict that names it, a repeat of
    the first is answered as said before."""
    await unknown(store, world, "r1")
    receipt = await signal(store, "r1", "reconcile", {"step": STEP} | first)
    with pytest.raises(DecisionConflict, match=f"record {receipt.n}") as conflict:
        await signal(store, "r1", "reconcile", {"step": STEP} | second)
    assert conflict.value.winner == receipt.n
    again = await signal(store, "r1", "reconcile", {"step": STEP} | first)
    assert (again.result, again.n) == ("repeated", receipt.n)
    agent = world.agent()
    with deadlines_passed():
        assert isinstance(await run(store, agent, "r1"), Completed)
    assert len(world.ledger.lines()) == effects
    if effects == 1:
        assert agent.model.requests[-1][-1].content == first["result"]
    await check_store(store, "r1")


@pytest.mark.real
async def test_ur22c_two_reconciles_at_once(
    world: World, zygote: Zygote, place: str, namespace: str, tmp_path: Path
) -> None:
    """UR-22 c: done and retry from two processes at once, 25 runs on each store: one of them."""
    async with open_store(place, namespace=namespace) as store:
        runs = [f"r{n}" for n in range(25)]
        for run_id in runs:
            await unknown(store, world, run_id)
        barrier = tmp_path / "barrier"
        payloads: list[dict[str, Any]] = [
            {"step": STEP, "outcome": "done", "result": 7},
            {"step": STEP, "outcome": "retry"},
        ]
        pairs = [
            [
                zygote.call(
                    "cases.child:decide",
                    store=place,
                    namespace=namespace,
                    barrier=str(barrier),
                    run_id=run_id,
                    name="reconcile",
                    payload=payload,
                )
                for payload in payloads
            ]
            for run_id in runs
        ]
        barrier.touch()
        won = [[child.wait().json for child in pair] for pair in pairs]

        async def goes_on(run_id: str, said: list[dict[str, Any]]) -> None:
            assert sorted(answer.get("error", "won") for answer in said) == [
                "decision_conflict",
                "won",
            ]
            done = "result" in said[0]
            agent = world.agent()
            assert isinstance(await run(store, agent, run_id), Completed)
            assert len(world.ledger.lines(run_id)) == (1 if done else 2)
            assert named(await check_store(store, run_id)).count("signal") == 1

        with deadlines_passed():
            await asyncio.gather(*(goes_on(*each) for each in zip(runs, won, strict=True)))


async def test_ur22d_reconcile_of_what_is_not_unknown(store: Store, world: World) -> None:
    """UR-22 d: a step that is not Indeterminate, one that is not there, a completed run, a wrong
    start: refused, nothing written."""
    await unknown(store, world, "r1")
    before = await count(store, "r1")
    for payload in (
        {"step": "llm/1", "outcome": "retry"},
        {"step": "tool/1/1/charge", "outcome": "retry"},
        {"step": STEP, "outcome": "retry", "start": 1},
        {"step": STEP, "outcome": "retry", "start": 99},
    ):
        with pytest.raises(StaleSignal):
            await signal(store, "r1", "reconcile", payload)
    assert await count(store, "r1") == before
    assert isinstance(await run(store, world.agent(), "ok", "pay"), Completed)
    before = await count(store, "ok")
    with pytest.raises(RunFinished):
        await signal(store, "ok", "reconcile", {"step": STEP, "outcome": "retry"})
    with pytest.raises(RunNotFound):
        await signal(store, "none", "reconcile", {"step": STEP, "outcome": "retry"})
    assert await count(store, "ok") == before
    assert await count(store, "none") == 0


async def test_ur22e_a_result_that_is_too_large_or_no_json(store: Store, world: World) -> None:
    """UR-22 e: done with 3 MB, with what is not JSON, without a result, or retry with one."""
    await unknown(store, world, "r1")
    before = await count(store, "r1")
    for payload in (
        {"step": STEP, "outcome": "done", "result": "x" * 3_000_000},
        {"step": STEP, "outcome": "done", "result": float("nan")},
        {"step": STEP, "outcome": "done", "result": {1: 2}},
        {"step": STEP, "outcome": "done", "result": b"x"},
        {"step": STEP, "outcome": "done", "result": "\ud83d"},
        {"step": STEP, "outcome": "done"},
        {"step": STEP, "outcome": "retry", "result": 1},
        {"step": STEP, "outcome": "maybe"},
        {"step": STEP, "outcome": "retry", "start": True},
        {"step": STEP, "outcome": "retry", "start": "5"},
        b'{"step":"%s","outcome":"done","result":NaN}' % STEP.encode(),
        b'{"step":"%s","outcome":"done","result":1,"result":2}' % STEP.encode(),
    ):
        with pytest.raises(BadPayload):
            await signal(store, "r1", "reconcile", payload)
    assert await count(store, "r1") == before
    assert (await state(store, "r1")).status == "indeterminate"
    null = await signal(store, "r1", "reconcile", {"step": STEP, "outcome": "done", "result": None})
    assert null.result == "applied"  # null is a result
    agent = world.agent()
    assert isinstance(await run(store, agent, "r1"), Completed)
    assert agent.model.requests[-1][-1].content is None
    assert len(world.ledger.lines()) == 1


def test_ur22_indeterminate_is_not_failed_at_the_command(world: World) -> None:
    """UR-22: another status and exit code, from run, show and list; a bad --done is exit 2."""
    assert isinstance(_never_usable(world), Failed)
    assert world.run("r1", input="pay", at="tool:raise").code == 4
    codes = {run_id: world.show(run_id).code for run_id in ("bad", "r1")}
    assert codes == {"bad": 6, "r1": 4}
    assert world.list() == {"bad": "failed", "r1": "indeterminate"}
    data = world.path("r1").read_bytes()
    for how in (["--done", "not json"], ["--done", "NaN"], [], ["--done", "1", "--retry"]):
        done = world.reconcile("r1", STEP, *how)
        assert done.code == 2
        one_line(done.err)
    assert world.path("r1").read_bytes() == data
    assert json.loads(world.show("r1", "--json").out)["unknown"][0]["step"] == STEP
