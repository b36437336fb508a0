"""Health is red where a stream is gone; what is wrong is said once, and once that it is over."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.bridge import Site, bridge_on
from kit.guarded import Guarded, environ, guarded_server
from kit.raw_client import ask
from kit.servers import NatsServer
from kit.waiting import eventually

from bridge import pulse
from journal.stores.jetstream_streams import stream_config
from journal.stores.provision import provision

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
async def site(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Site]:
    monkeypatch.setattr(pulse, "PROBE_S", 0.2)
    monkeypatch.setattr(pulse, "LOOK_S", 0.1)
    await provision(nats_server.url, namespace=namespace)
    async with bridge_on(nats_server.url, namespace) as site:
        yield site


async def health(site: Site, path: str = "/healthz") -> list[str]:
    """Its problems."""
    response = await site.client(None).get(path)
    found = response.json()
    assert found["ok"] == (response.status_code == 200) == (not found["problems"])
    return found["problems"]


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == "runfold"]
    return [line for line in lines if line.startswith("health: ") and words in line]


@pytest.mark.parametrize(
    ("stream", "what"),
    [
        ("JOURNAL_0", "the journal can't be read"),
        ("TASKS", "the stream of tasks can't be read"),
        ("SIGNALS", "the stream of signals can't be read"),
    ],
)
async def test_health_is_red_while_a_stream_is_gone_and_the_log_says_so_once(
    site: Site, caplog: pytest.LogCaptureFixture, stream: str, what: str
) -> None:
    caplog.set_level(logging.WARNING, "runfold")

    async def green() -> bool:
        return await health(site) == []

    async def red() -> bool:
        return any(what in problem for problem in await health(site, "/readyz"))

    await eventually(green)
    async with site.nats() as nats:
        await nats.jetstream().delete_stream(f"{site.namespace.upper()}_{stream}")
    await eventually(red)
    await eventually(lambda: said(caplog, what), what="it is said")
    assert not [
        problem for problem in await health(site) if "nats://" in problem and what in problem
    ]
    await restored(site, stream)
    await eventually(green, 20)
    await eventually(lambda: said(caplog, f"it is over: {what}"), what="it is said to be over")
    assert len(said(caplog, what)) == 2, said(caplog, what)


async def restored(site: Site, stream: str) -> None:
    """By `init`; it makes no empty journal stream where there was one, as a restore would."""
    if stream == "JOURNAL_0":
        config = stream_config(site.namespace, 1)
        await ask(site.url, f"$JS.API.STREAM.CREATE.{config['name']}", config)
    await provision(site.url, namespace=site.namespace)


async def test_a_bridge_that_stops_says_nothing_of_its_health(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "runfold")
    async with site.nats() as nats:
        await nats.jetstream().delete_stream(f"{site.namespace.upper()}_TASKS")
    await eventually(lambda: said(caplog, "tasks"))
    await site.bridge.stop()
    await site.serving
    assert not [line for line in said(caplog, "") if re.search("stopping|over", line)]


# ---- permissions --------------------------------------------------------------------------------


async def test_each_of_several_journal_streams_is_looked_at(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "PROBE_S", 0.2)
    await provision(nats_server.url, namespace=namespace, shards=3)
    stream = f"{namespace.upper()}_JOURNAL_2"
    async with bridge_on(nats_server.url, namespace) as site:
        assert await health(site) == []
        await ask(nats_server.url, f"$JS.API.STREAM.DELETE.{stream}")

        async def red() -> bool:
            return any(
                f"journal stream {stream} can't be read" in one for one in await health(site)
            )

        await eventually(red)


@pytest.fixture
async def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    server = await guarded_server(tmp_path)
    found = Guarded(server)
    await provision(found.url("admin"))
    yield found
    await server.stop()


async def test_a_bridge_that_may_not_do_its_work_says_so_and_one_that_may_says_nothing(
    guarded: Guarded, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With credentials of deploy/nats: first its own, then a worker's."""
    monkeypatch.setattr(pulse, "PROBE_S", 0.2)
    monkeypatch.setattr(pulse, "LOOK_S", 0.1)
    caplog.set_level(logging.WARNING, "runfold")
    async with bridge_on(guarded.url("bridge"), "runfold") as site:

        async def green() -> bool:
            return await health(site) == []

        await eventually(green)
        await site.client().get("/workers")  # takes longer than several looks
        assert await green() and said(caplog, "") == []
    async with bridge_on(guarded.url("worker"), "runfold") as site:
        for word in ("signals: ", "stream of signals", "requests by NATS"):
            await eventually(lambda word=word: said(caplog, word), what=word)
        assert all("denies" in line for line in said(caplog, ""))
        assert await health(site)
