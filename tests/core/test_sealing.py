"""A record of ours is one that every reader takes, or it is never sent (R18)."""

from __future__ import annotations

import pytest
from kit.build import RUN, FaultyStore, claimed, start_of

from journal.doors import start
from journal.errors import NotEncodable
from journal.log import Log
from journal.records import Commit, Park, Record, StepCompleted, StepError

UNREADABLE = {
    "a step that is no text": start_of(7, unsafe=False),  # type: ignore[arg-type]
    "a policy that is none": start_of("s", unsafe=False, policy="ask"),  # type: ignore[arg-type]
    "half a surrogate": StepCompleted(step="s", result="half \ud800"),
    "an error of another shape": StepCompleted(
        step="s",
        error=StepError(type="E", message=5),  # type: ignore[arg-type]
    ),
    "a park for another reason": Park(why="tea"),  # type: ignore[arg-type]
    "a state that no JSON has": Commit(action="continue", state={1, 2}, iteration="0"),  # type: ignore[arg-type]
}


async def held(*, shared: bool) -> tuple[FaultyStore, Log]:
    store = FaultyStore(shared=shared)
    await start(store, "helpdesk", "go", run_id=RUN)
    log = await Log.read(store, RUN)
    if shared:
        claim = await log.append(lambda fold: claimed())
        assert claim is not None
        log.claim = claim.n
    return store, log


@pytest.mark.parametrize("shared", [False, True], ids=["lock", "claim"])
@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_a_record_that_no_reader_would_take_is_never_sent(body: Record, shared: bool):
    store, log = await held(shared=shared)
    sent = store.appends
    with pytest.raises(NotEncodable, match="record can be made of this"):
        await log.append(lambda fold: body)
    assert store.appends == sent
    await log.append(lambda fold: start_of("s", unsafe=False))  # nothing is wrong with the run


@pytest.mark.parametrize("record_id", ["fedcba987654", "FEDCBA987654-1", "fedcba987654-x", " -1"])
async def test_a_record_under_an_id_that_is_none_is_never_sent(record_id: str):
    store, log = await held(shared=True)
    sent = store.appends
    with pytest.raises(NotEncodable, match="writer id"):
        await log.append(lambda fold: start_of("s", unsafe=False), record_id=record_id)
    assert store.appends == sent
