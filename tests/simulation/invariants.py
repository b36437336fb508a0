"""What must hold after a schedule, whatever happened in it (PRODUCT.md R70, R77)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from journal.audit import audit
from journal.ids import RunId
from journal.records import (
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    Park,
    Record,
    RunCompleted,
    RunStarted,
    Signal,
    StepCompleted,
    StepStarted,
)

from .agents import CALLS
from .plans import REMOTE

if TYPE_CHECKING:
    from .people import Said
    from .world import World

HARMLESS = frozenset(
    ("slow", "lost_ack", "late", "never", "refused", "twice", "forgotten", "redeliver")
)
"""Faults of messages behind which nothing is ever unknown for long."""

HURRIED = frozenset({"bounded", "pair"})
"""Agents whose writes may be cut off by a time limit: of the turn; of a call that reports."""


def violations(world: World) -> list[str]:
    """Each as a text; empty for a schedule in which everything held."""
    found = list(world.loop.failures)
    journals = {str(run): world.records(run) for run in world.runs()}
    for run, records in journals.items():
        found += [f"run {run}: audit: {one.n} {one.rule}: {one.text}" for one in _audit(world, run)]
        found += [f"run {run}: {text}" for text in _calls(world, run, records)]
        found += [f"run {run}: {text}" for text in _end(world, run, records, journals)]
        found += [f"run {run}: {text}" for text in _inputs(records)]
    for said in world.said:
        found += [
            f"run {said.run}: {said.name} {said.request_id} by {said.door}, answered "
            f"{said.answer!r}: {text}"
            for text in _heard(world, said, journals.get(said.run, []))
        ]
    found += [text for run in journals for text in _order(world, run, journals[run])]
    for run in sorted(world.person.started):
        if not any(isinstance(one, RunStarted) for one in journals.get(run, [])):
            found.append(f"run {run} was acknowledged, and is not there")
    return found + (list(_left(world)) if world.over else [])


def _audit(world: World, run: str) -> Any:
    return audit(RunId(run), world.entries(run))


# ---- calls ---------------------------------------------------------------------------------------


def _calls(world: World, run: str, records: list[Record]) -> Iterator[str]:
    """A write is called once for each start that permits it; what it did, it did once for each
    call; a result that a call returned is one that it had."""
    agent = getattr(records[0], "agent", "")
    starts: Counter[str] = Counter()
    retries: Counter[str] = Counter()
    unsafe: set[str] = set()
    for record in records:
        match record:
            case StepStarted(kind="tool"):
                starts[record.step] += 1
                if record.replay == "unsafe":
                    unsafe.add(record.step)
            case Signal(name="reconcile") if record.payload.get("outcome") == "retry":
                retries[record.payload["step"]] += 1
    effects: Counter[str] = Counter()
    for effect in world.effects:
        if effect.run == run:
            effects[effect.step] += 1
    for step in sorted(unsafe):
        calls = world.calls[run, step]
        if calls > starts[step]:
            yield f"{step} was called {calls} times, and started {starts[step]} times"
        if calls > 1 + retries[step]:
            yield f"{step} was called {calls} times, and {retries[step]} retries were permitted"
        if effects[step] > 1 + retries[step]:
            yield f"{step} had {effects[step]} effects, and {retries[step]} retries were permitted"
    cancelled = False
    troubled = not world.injected.keys() <= HARMLESS or world.plan.odds.slow_s > 0.02
    for record in records:
        match record:
            case StepCompleted(step=step, via="run" | "late"):
                if step in unsafe and record.error is UNSET and not effects[step]:
                    yield f"{step} has a result, and was never made"
            case Signal(name="cancel"):
                cancelled = True
            case StepStarted(step=step, replay="unsafe") if cancelled:
                yield f"{step} was started, record {record.n}, behind a cancellation"
            case Park(why="reconcile") if not troubled and agent not in HURRIED:
                yield f"a person was asked, record {record.n}, though no process was in trouble"


# ---- ends ----------------------------------------------------------------------------------------


def _end(
    world: World, run: str, records: list[Record], journals: dict[str, list[Record]]
) -> Iterator[str]:
    started, last = records[0], records[-1]
    assert isinstance(started, RunStarted)
    end = next((one for one in reversed(records) if isinstance(one, RunCompleted | Commit)), None)
    match end:
        case RunCompleted():
            yield from _answer(world, started, records, end, journals)
        case Commit(action="cancel"):
            asked = any(isinstance(one, Signal) and one.name == "cancel" for one in records)
            if not asked:
                yield "it was cancelled, and nobody wanted it"
        case Commit(action="fail"):
            if not _may_fail(world, started, end, journals):
                yield f"it failed: {end.reason}: {end.detail}"
        case _:
            yield f"it ends in {type(last).__name__}"


def _may_fail(
    world: World, started: RunStarted, end: Commit, journals: dict[str, list[Record]]
) -> bool:
    match end.reason:
        case "duration" | "turn_timeout":
            return started.agent == "bounded"
        case "restart_limit":
            return world.plan.restart_limit < 1000
        case "child_failed":
            child = journals.get(f"{started.run}.kid", [])
            return not any(isinstance(one, RunCompleted) for one in child)
        case "step_failed":  # a safe call that a stall took past its time limit, again and again
            return world.stalls > 0
        case _:
            return False


def _answer(
    world: World,
    started: RunStarted,
    records: list[Record],
    end: RunCompleted,
    journals: dict[str, list[Record]],
) -> Iterator[str]:
    answer = content(end.message)
    if started.agent == "parent":
        child = journals[f"{started.run}.kid"]
        ended = next(one for one in child if isinstance(one, RunCompleted))
        if content(answer["child"]) != content(ended.message):
            yield f"the answer is {answer}, and the child's {ended.message}"
        return
    wanted = ("paid 20", "paid 21") if started.agent == REMOTE else CALLS[started.agent]
    calls = answer["calls"]
    if len(calls) != len(wanted):
        yield f"the answer has {calls}, not {wanted}"
    for text, got in zip(wanted, calls, strict=False):
        if not _allowed(world, started.agent, records, text, got):
            yield f"a call came to {got!r}, not {text!r}"
    placed = [one.request_id for one in records if isinstance(one, InputPlaced)]
    said = {one.request_id: one.content for one in records if isinstance(one, Input)}
    if answer["heard"] != [said[request] for request in placed]:
        yield f"it heard {answer['heard']}, and was told {placed}"


def _allowed(world: World, agent: str, records: list[Record], text: str, got: Any) -> bool:
    """Whether a call may come to this: what it comes to where nothing is in the way, what a person
    decided, or what its own policy says of a call that was cut off."""
    signals = [one for one in records if isinstance(one, Signal)]
    if got == text:
        return True
    if got == f"by hand: {text}":
        return any(one.name == "reconcile" and one.payload.get("result") == got for one in signals)
    if not isinstance(got, str):
        return False
    if got.startswith("error rejected") or (agent == "asker" and got.startswith("error")):
        return any(one.name == "reject" for one in signals)
    if "interrupted" in got:
        return agent == "cutter" and bool(world.injected)
    return text.startswith("found") and got == "error TimeoutError" and world.stalls > 0


def content(message: Any) -> Any:
    """What an answer says, as its agent made it."""
    if isinstance(message, dict) and "role" in message:
        message = message.get("content")
    return json.loads(message) if isinstance(message, str) else message


# ---- what people said ----------------------------------------------------------------------------


def _inputs(records: list[Record]) -> Iterator[str]:
    """Each is there once, placed at most once and not once it is withdrawn."""
    for kind in (Input, InputPlaced, InputWithdrawn):
        counted = Counter(one.request_id for one in records if isinstance(one, kind))
        yield from (f"{kind.__name__} {request} is there twice" for request in _over(counted))
    withdrawn = {one.request_id for one in records if isinstance(one, InputWithdrawn)}
    placed = {one.request_id for one in records if isinstance(one, InputPlaced)}
    yield from (f"{request} was placed and withdrawn" for request in sorted(withdrawn & placed))


def _over(counted: Counter[str]) -> list[str]:
    return [one for one, count in counted.items() if count > 1]


def _heard(world: World, said: Said, records: list[Record]) -> Iterator[str]:
    """What was acknowledged is in the journal, once, or refused with a reason."""
    if said.name == "withdraw":
        if said.answer == "withdrawn" and not any(
            isinstance(one, InputWithdrawn) and one.request_id == said.request_id for one in records
        ):
            yield "it is not in the journal"
        return
    kind: Any = Input if said.name == "input" else Signal
    exact = [
        one
        for one in records
        if isinstance(one, kind)
        and one.request_id == said.request_id
        and (kind is Input or one.name == said.name)
    ]
    if len(exact) > 1:
        yield f"it is in the journal {len(exact)} times"
    if said.answer == "applied" or (said.answer == "kept" and said.door != "stream"):
        if not exact:
            yield "it is not in the journal"
    elif said.answer == "kept" and not exact:
        if not _same(said, records) and not _refused(world, said):
            yield "it is neither in the journal nor refused"
    elif said.answer == "repeated" and not exact and not _same(said, records):
        yield "nothing that it repeats is in the journal"


def _same(said: Said, records: list[Record]) -> bool:
    """Whether somebody else said the same."""
    for one in records:
        if isinstance(one, Signal) and one.name == said.name:
            marker = said.payload.get("marker")
            if marker is None or one.payload.get("marker") == marker:
                return True
    return False


def _refused(world: World, said: Said) -> bool:
    return said.request_id in world.refused()


def _order(world: World, run: str, records: list[Record]) -> Iterator[str]:
    """What the SIGNALS stream kept is applied in its order, or refused. One that was refused may
    have been said again later, and applied then."""
    kept = world.kept(run)
    refusals = world.refused()
    streamed = {said.request_id for said in world.said if said.run == run and said.door == "stream"}
    applied = [
        one.request_id
        for one in records
        if isinstance(one, Signal | Input) and one.request_id in streamed
    ]
    sequences = list[int]()
    for request in applied:
        if request in kept:
            may_be = kept[request] if request in refusals else kept[request][:1]
            later = [one for one in may_be if not sequences or one > sequences[-1]]
            sequences.append(min(later or may_be))
    if sequences != sorted(sequences):
        yield f"run {run}: {applied} were kept as {sequences}"
    for request in applied:
        # What is delivered again behind a purge can't be told from what never came.
        refused = request in refusals and not world.purged(run)
        if len(kept.get(request, ())) == 1 and refused:
            yield f"run {run}: {request} was applied, and refused"


# ---- what is left --------------------------------------------------------------------------------


def _left(world: World) -> Iterator[str]:
    """Nothing goes on behind the end."""
    for task in world.loop.pending():
        if task.process is not None and not task.process.dead:
            yield f"task {task.get_name()} goes on"
    for client in world.server.clients:
        yield f"client {client.name} of {client.process} is still connected"
