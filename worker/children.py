"""Shell: child runs of a turn handler: started, and their answers (R57).

Starting is idempotent: the id is derived from the parent's and a name, so the step that starts a
child is safe to repeat.
"""

from __future__ import annotations

from journal import ids
from journal.calling import Perform
from journal.doors import records_lost, start_in, started_body
from journal.errors import BadPayload, ChildFailed, InputMismatch
from journal.handle import Journal
from journal.ids import RunId
from journal.limits import CHILD_DEPTH_MAX
from journal.log import Log
from journal.messages import JSON
from journal.records import SPAWN, StepCompleted, StepStarted
from journal.steps import Call, make_call
from journal.stores.tasks import PRIORITIES
from journal.values import digest, normalise
from journal.views import end_json


def spawning(
    journal: Journal, position: str, agent: str, input: JSON, *, name: str, priority: int
) -> tuple[RunId, Call, Perform]:
    """The child's id, and the step that starts it. Raises InvalidId, BadPayload, InputMismatch
    (too deep), NotEncodable; nothing was written then."""
    child = child_id(journal.run_id, ids.name(name, "a child"))
    if priority not in PRIORITIES:
        raise BadPayload(f"a priority is -1, 0 or 1, not {priority}", run_id=journal.run_id)
    parent = journal.fold.started
    assert parent is not None
    if parent.depth >= CHILD_DEPTH_MAX:
        raise InputMismatch(
            f"run {journal.run_id} is {parent.depth} levels deep: it starts no child",
            run_id=journal.run_id,
        )
    value = normalise(input, f"the input of child {name}")
    what = {"run": child, "agent": ids.name(agent, "an agent"), "input": value}
    body = started_body(
        child, agent, value, parent=journal.run_id, depth=parent.depth + 1, priority=priority
    )

    async def perform(start: StepStarted) -> StepCompleted:
        log = await Log.read(journal.store, child, by=journal.worker)
        if await start_in(log, body) or not await records_lost(log):
            await journal.store.wake(child, agent, cause=1, priority=priority)
        return StepCompleted(step=position, result=child)

    return child, make_call(position, "tool", SPAWN, what, unsafe=False), perform


async def answer_of(journal: Journal, child: RunId) -> JSON:
    """The answer of a child that has ended; raises LookupError, ChildFailed. A large one is read
    from the child's own journal."""
    outcome = journal.fold.children.get(child)
    if outcome is None:
        raise LookupError(f"child run {child} has not ended, or is none of {journal.run_id}")
    if outcome.get("large"):
        outcome = end_json((await Log.read(journal.store, child)).fold)
    if outcome.get("status") == "completed":
        return outcome.get("message")
    raise ChildFailed(
        f"child run {child} {outcome.get('status')}: {outcome.get('reason', '')}",
        run_id=journal.run_id,
    )


def child_id(run_id: RunId, name: str) -> RunId:
    """`<run>.<name>`; where that is too long, a digest of both takes the end's place."""
    plain = f"{run_id}.{name}"
    if ids.valid_run_id(plain):
        return RunId(plain)
    return ids.run_id(f"{plain[:95]}.{digest(run_id, name)}")
