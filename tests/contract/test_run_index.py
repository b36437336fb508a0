"""R64, R84: a page of a list costs what is on it; and shows what there is now."""

from __future__ import annotations

from typing import Any

import pytest
from kit.raw_client import ask
from kit.records import fill, journal_of
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.doors import signal
from journal.fleet import Fleet
from journal.ids import RunId
from journal.listing import Filter, page
from journal.looks import Looks
from journal.stores import run_index
from journal.stores.jetstream import JetStreamStore

SUBJECT = "runfold.journal.0"


@pytest.fixture
def listings(direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Questions for all subjects of a stream."""
    asked: list[bytes] = []
    request = direct._connection.request

    async def noted(subject: str, payload: bytes, *args: Any, **options: Any) -> Any:
        if b"subjects_filter" in payload:
            asked.append(payload)
        return await request(subject, payload, *args, **options)

    monkeypatch.setattr(direct._connection, "request", noted)
    return asked


async def begin(store: JetStreamStore, *runs: str) -> None:
    for run in runs:
        await fill(store, journal_of(1, run))


def many() -> list[str]:
    return [f"r{number:02}" for number in range(40)]


async def pages(store: JetStreamStore, limit: int = 10) -> list[str]:
    found: list[str] = []
    after: RunId | None = None
    while True:
        part = await page(store, Filter(), after=after, limit=limit)
        found += [str(one["run"]) for one in part.runs]
        if (after := part.next) is None:
            return found


async def test_all_subjects_are_asked_for_once_for_all_pages(
    direct: JetStreamStore, listings: list[bytes]
) -> None:
    await begin(direct, *many())
    assert await pages(direct) == many()
    assert await pages(direct) == many()
    assert len(listings) == 1


async def test_what_came_since_is_listed_in_its_place(
    direct: JetStreamStore, listings: list[bytes]
) -> None:
    await begin(direct, *many())
    assert await pages(direct) == many()
    await begin(direct, "r05a", "a.b", "z")  # `.` sorts unlike the `~` of its subject
    await fill(direct, journal_of(2, "r39.1"))
    wanted = sorted([*many(), "r05a", "a.b", "z", "r39.1"])
    assert await pages(direct) == wanted
    assert len(listings) == 1
    await begin(direct, *(f"s{number}" for number in range(30)))  # too many to be read one by one
    assert await pages(direct) == sorted([*wanted, *(f"s{number}" for number in range(30))])
    assert len(listings) == 2


async def test_what_was_removed_by_hand_is_listed_no_more(
    direct: JetStreamStore, server: NatsServer
) -> None:
    async def remove(run: str) -> None:
        purge = {"filter": f"{SUBJECT}.{run}"}
        assert (await ask(server.url, "$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_0", purge))["success"]

    async def listed() -> list[str]:
        return [run async for run in direct.runs()]

    await begin(direct, *many())
    assert await listed() == many()
    await remove("r07")
    assert await listed() == [run for run in many() if run != "r07"]
    await remove("r08")
    await begin(direct, "new")  # as many as before
    left = [run for run in many() if run not in ("r07", "r08")]
    assert await listed() == sorted([*left, "new"])


async def test_a_stray_message_is_no_run_and_does_no_harm(
    direct: JetStreamStore, server: NatsServer, listings: list[bytes]
) -> None:
    await begin(direct, *many())
    await ask(server.url, f"{SUBJECT}._stray", b"x")
    assert await pages(direct) == many()
    await ask(server.url, f"{SUBJECT}._other", b"x")
    assert await pages(direct) == many()
    assert len(listings) == 1


async def test_ids_are_kept_for_a_moment_only(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that shows no lists holds nothing of runs that wait (R63)."""
    monkeypatch.setattr(run_index, "KEPT_S", 0.01)
    await begin(direct, *many())
    assert await pages(direct) == many()
    index = direct.shards[0].listing._index

    async def forgotten() -> bool:
        return index._kept is None

    await eventually(forgotten)


async def test_who_iterates_slowly_holds_nothing_of_runs_that_were_told(
    direct: JetStreamStore,
) -> None:
    """A listing tells whole records; kept for each that is only named, a list holds all."""
    await begin(direct, *many())
    looks = Looks(direct, by_heads=False)
    assert [run async for run in looks.candidates(None)] == many()
    assert not looks._heads


async def test_a_run_is_listed_as_it_is_when_its_turn_comes(direct: JetStreamStore) -> None:
    await begin(direct, "r1", "r2")
    runs = Fleet(direct).list()
    assert (await anext(runs)).records == 1
    await signal(direct, "r2", "cancel", {})
    assert (await anext(runs)).records == 2
    await runs.aclose()  # type: ignore[attr-defined]
