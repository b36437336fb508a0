"""GET /inbox by pages: each run's items once, in order; the command line and the page read on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kit.bridge import Site, bridge_on
from kit.servers import NatsServer

from journal.errors import StoreUnavailable
from journal.ids import RunId
from journal.shards import shard_of
from journal.stores.provision import provision
from runfold.remote import BridgeRuns

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

RUNS = [f"run-{number:02}" for number in range(25)]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncIterator[Site]:
    """Every second of many runs is damaged: it waits for an operator."""
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace) as site, site.nats() as nats:
        for run in RUNS:
            await nats.jetstream().publish(f"{namespace}.journal.0.{run}", b"{}")
            await site.started(f"{run}-well")
        yield site


async def page(site: Site, **query: Any) -> tuple[list[str], str | None]:
    response = await site.get("/inbox", params=query)
    assert response.status_code == 200, response.text
    found = response.json()
    assert set(found) == {"items", "next"}
    return [item["run"] for item in found["items"]], found["next"]


async def test_pages_hold_every_item_once_and_in_order(site: Site) -> None:
    assert await page(site) == (RUNS, None)
    for limit in (1, 7, 25, 500):
        seen: list[str] = []
        query: dict[str, Any] = {"limit": limit}
        while True:
            items, following = await page(site, **query)
            assert len(items) <= limit
            seen += items
            if following is None:
                break
            query["after"] = following
        assert seen == RUNS
    assert await page(site, after=RUNS[-1]) == ([], None)


async def test_without_a_limit_a_hundred_are_told(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.looking.PAGE", 10)
    assert await page(site) == (RUNS[:10], RUNS[9])


async def test_what_is_no_page_is_refused(site: Site) -> None:
    for query in ("limit=0", "limit=501", "limit=x", "limit=1&limit=2", "status=damaged"):
        response = await site.get(f"/inbox?{query}")
        assert (response.status_code, response.json()["code"]) == (400, "bad_request")
    response = await site.get("/inbox?after=a%2Fb")
    assert (response.status_code, response.json()["code"]) == (400, "invalid_id")


async def test_the_command_line_shows_all_pages(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runfold.remote.LIST_PAGE", 4)
    async with BridgeRuns(site.bridge.address, "rf_read") as runs:
        assert [item.run for item in await runs.inbox()] == RUNS


async def test_a_journal_stream_that_is_gone_hides_no_other(
    nats_server: NatsServer, namespace: str
) -> None:
    await provision(nats_server.url, namespace=namespace, shards=2)
    async with bridge_on(nats_server.url, namespace) as site, site.nats() as nats:
        for run in RUNS:
            subject = f"{namespace}.journal.{shard_of(RunId(run), 2)}.{run}"
            await nats.jetstream().publish(subject, b"{}")
        assert (await page(site))[0] == RUNS
        gone = f"{namespace.upper()}_JOURNAL_0"
        await nats.jetstream().delete_stream(gone)
        found = (await site.get("/inbox", params={"limit": 7})).json()
        left = [run for run in RUNS if shard_of(RunId(run), 2) == 1]
        assert [item["run"] for item in found["items"]] == left[:7]
        assert found["unread"] == [gone] and found["next"] == left[6]
        async with BridgeRuns(site.bridge.address, "rf_read") as runs:
            with pytest.raises(StoreUnavailable, match=gone):
                await runs.inbox()
        await nats.jetstream().delete_stream(f"{namespace.upper()}_JOURNAL_1")
        assert (await site.get("/inbox")).status_code == 503
