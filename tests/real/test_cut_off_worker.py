"""A worker that nobody can reach, and that lives: its write goes on while it may (R22)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.fleet import Crew, crew_on
from kit.proxy import Proxy
from kit.servers import NatsServer

from journal.views import Indeterminate

pytestmark = pytest.mark.real


@pytest.fixture
async def crew(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        yield crew


@pytest.fixture
async def wire(nats_server: NatsServer) -> AsyncIterator[Proxy]:
    wire = await Proxy.start(nats_server.url)
    yield wire
    await wire.stop()


async def cut_off_in_its_write(crew: Crew, wire: Proxy, agent: str) -> None:
    """The first worker is in the middle of its write, connected to nothing; a second one comes."""
    first = await crew.worker(agent, url=wire.url)
    crew.hold("write", first)
    await crew.start(agent, "r")
    await crew.reaches("write", first)
    wire.refuse(True)
    wire.cut()
    await crew.worker(agent)


async def test_a_permitted_retry_waits_for_the_write_of_a_worker_that_was_cut_off(
    crew: Crew, wire: Proxy
) -> None:
    await cut_off_in_its_write(crew, wire, "writer")
    outcome = (await crew.status("r", "indeterminate")).outcome
    assert isinstance(outcome, Indeterminate)
    (unknown,) = outcome.unknown
    said = {"step": unknown.step, "start": unknown.start, "outcome": "retry"}
    await crew.fleet.signal("r", "reconcile", said)
    await nothing_is_called_beside_it(crew)


async def test_a_probe_waits_for_the_write_of_a_worker_that_was_cut_off(
    crew: Crew, wire: Proxy
) -> None:
    await cut_off_in_its_write(crew, wire, "prober")
    await nothing_is_called_beside_it(crew)


async def nothing_is_called_beside_it(crew: Crew) -> None:
    """The run waits, for as long as the write that was begun may run."""
    first, second = crew.workers
    run = await crew.until("r", lambda one: one.status == "waiting" or bool(crew.effects()))
    assert run.status == "waiting", crew.effects()
    assert "may still be running" in run.waiting_on[0].ended_by
    assert (crew.reached("write", first), crew.reached("write", second)) == (1, 0)
