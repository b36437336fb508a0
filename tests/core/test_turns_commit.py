"""Commits as points to restart at (R41): a long conversation, and one that fits no commit."""

from __future__ import annotations

from typing import Any

import pytest
from kit.build import RUN, FaultyStore, Killed, PlainView, folded, types_of
from kit.turns import agent_of, begun, ended, work

from journal.codec import Entry
from journal.doors import start
from journal.errors import TooLarge
from journal.fold import Fold
from journal.ids import RunId
from journal.limits import COMMIT_STEPS
from journal.log import Log
from journal.records import Commit
from journal.store import AppendAnswer, Loaded
from journal.summary import is_restart_point
from journal.terms import Complete, Continue, Next
from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.context import Context
from worker.runner import run
from worker.tools import read

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]

ROUNDS = 50
STEPS = 2 * ROUNDS + 1


class Restarting(FaultyStore):
    """A shared store that tells where to restart, and counts what it gave; with a limit on commits
    where `commit_bytes_max` says so."""

    def __init__(self, commit_bytes_max: int = 1 << 30) -> None:
        super().__init__(shared=True)
        self.commit_bytes_max = commit_bytes_max
        self.given: list[int] = []
        self.refused = 0

    async def resume(self, run_id: RunId) -> Loaded:
        loaded = await self.load(run_id)
        points = [n for n, e in enumerate(loaded.entries) if is_restart_point(e.record)]
        entries = loaded.entries
        if points:
            entries = (entries[0], *entries[points[-1] :])
        self.given.append(len(entries))
        return Loaded(entries, loaded.tail)

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        if isinstance(entry.record, Commit) and len(entry.raw) > self.commit_bytes_max:
            self.refused += 1
            raise TooLarge("too large for a message")
        return await super().append(run_id, entry, expected=expected)


class Long:
    """A loop of fifty rounds; `cut` dies at this call of the tool."""

    def __init__(self, cut: int = 0) -> None:
        self.looks = 0
        self.model = ScriptedModel(*[call("look", q="x")] * ROUNDS, say("Done."))

        @read
        async def look(q: str) -> str:
            self.looks += 1
            if self.looks == cut:
                raise Killed
            return "found"

        self.agent = Agent("helpdesk", model=self.model, tools=[look])


def parts(fold: Fold) -> dict[str, Any]:
    """What a fold says of a run, in plain values."""
    plain = "n head revision iteration attempt failures restarts state committed interrupted"
    kept = "cancel wait resumed end newer model_calls decisions requests inputs children"
    found = {name: getattr(fold, name) for name in f"{plain} {kept}".split()}
    steps = {name: (step.starts, step.completed, step.partial) for name, step in fold.steps.items()}
    claim = fold.claim and (fold.claim.n, fold.claim.worker, fold.claim.task, fold.claim.attempt)
    return found | {"steps": steps, "open": set(fold.open), "claim": claim}


async def started_long(store: Restarting) -> Restarting:
    await start(PlainView(store), "helpdesk", "go", run_id=RUN)
    return store


async def test_a_long_run_commits_every_so_many_steps_and_makes_each_once():
    store, long = await started_long(Restarting()), Long()
    assert (await work(store, long.agent)).outcome == ended("Done.")
    assert (await types_of(store)).count("commit") == (STEPS - 1) // COMMIT_STEPS
    assert (long.looks, len(long.model.requests)) == (ROUNDS, ROUNDS + 1)
    assert (await folded(store)).model_calls == ROUNDS + 1


@pytest.mark.parametrize("cut", [1, 16, 17, 40, ROUNDS])
async def test_whoever_takes_it_up_reads_from_the_last_commit_on_and_knows_the_same(cut: int):
    store, long = await started_long(Restarting()), Long(cut)
    with pytest.raises(Killed):
        await work(store, long.agent)
    full = await Log.read(store, RUN)
    resumed = await Log.resumed(store, RunId(RUN), by="w2")
    # the holder's lost claim stands in the summary; who was lost before the commit does not
    assert parts(resumed.fold) == parts(full.fold)
    assert store.given[-1] <= min(full.fold.n, 2 * COMMIT_STEPS + 8)
    long.looks += 1000
    assert (await work(store, long.agent)).outcome == ended("Done.")
    assert long.looks - 1000 == ROUNDS + 1  # the one that was cut off was made again


async def test_a_conversation_that_fits_no_commit_goes_on_without_one():
    store, long = await started_long(Restarting(commit_bytes_max=100)), Long()
    assert (await work(store, long.agent)).outcome == ended("Done.")
    assert "commit" not in await types_of(store)
    assert 1 <= store.refused <= 3  # tried ever more rarely, not at every step
    assert (long.looks, len(long.model.requests)) == (ROUNDS, ROUNDS + 1)


async def test_a_conversation_that_outgrows_its_commits_goes_on_from_the_last_one():
    store, long = await started_long(Restarting()), Long(40)
    with pytest.raises(Killed):
        await work(store, long.agent)
    commits = (await types_of(store)).count("commit")
    assert commits >= 1
    store.commit_bytes_max = 100
    assert (await work(store, long.agent)).outcome == ended("Done.")
    assert (await types_of(store)).count("commit") == commits


async def test_the_model_sees_the_same_conversation_with_and_without_commits():
    with_commits, without = Long(), Long()
    await work(await started_long(Restarting()), with_commits.agent)
    await work(await started_long(Restarting(commit_bytes_max=100)), without.agent)
    assert with_commits.model.requests == without.model.requests


async def test_a_handlers_commit_that_is_too_large_fails_with_a_reason():
    async def handler(ctx: Context) -> Next:
        return Continue(state="x" * 1000) if not ctx.iteration else Complete("x")

    store = await started_long(Restarting(commit_bytes_max=900))
    found = await run(store, agent_of(handler), RUN)
    assert getattr(found, "reason", None) == "not_recordable"


async def test_each_turn_of_a_handler_is_a_point_to_restart_at():
    async def handler(ctx: Context) -> Next:
        return Continue(state=ctx.iteration) if ctx.iteration < 9 else Complete("x")

    store = await begun()
    assert (await work(store, agent_of(handler))).outcome == ended("x")
    records = (await store.load(RunId(RUN))).records
    assert sum(is_restart_point(record) for record in records) == 9
