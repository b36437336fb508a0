"""A worker that is killed is replaced at once, not after the ack wait (R51); in virtual time, with
those that live and keep their runs: tests/simulation/test_takeover.py.

"At once" is told by what is still there: the task of the killed worker's claim, which the server
gives to nobody else before the ack wait, ten minutes here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.fleet import Crew, WorkerProcess, crew_on, tap_on
from kit.servers import NatsServer
from kit.waiting import eventually

pytestmark = pytest.mark.real

FAR_S = {"ack_wait_s": 600.0, "sweep_s": 3600.0}


@pytest.fixture
async def crew(nats_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(nats_server.url, namespace, tmp_path) as crew:
        yield crew


async def at_work(crew: Crew, *runs: str) -> WorkerProcess:
    """The first worker, in the middle of these runs."""
    first = await crew.worker("reader", **FAR_S)
    crew.hold("read", first)
    for run in runs:
        await crew.start("reader", run)
        await crew.claimed_by(run, first)
    return first


async def adopted(crew: Crew, run: str, first: WorkerProcess) -> None:
    await crew.status(run, "completed")
    lost, taken = await crew.claims(run)
    assert (lost.worker, taken.reason) == (first.id, "adopted")
    assert taken.worker != first.id and await crew.task_left(lost.task)


async def test_a_killed_workers_runs_go_on_at_its_peers_at_once(crew: Crew) -> None:
    runs = [f"run-{number}" for number in range(5)]
    first = await at_work(crew, *runs)
    async with tap_on(crew.url) as tap:
        await crew.worker("reader", url=tap.url, **FAR_S)
        await crew.worker("reader", url=tap.url, **FAR_S)
        await eventually(lambda: first.id.encode() in tap.sent, what="it is watched")
        await first.kill()
        for run in runs:
            await adopted(crew, run, first)


async def test_a_worker_started_after_a_killed_one_goes_on_with_its_runs_at_once(
    crew: Crew,
) -> None:
    first = await at_work(crew, "run")
    await first.kill()
    await crew.worker("reader", **FAR_S)
    await adopted(crew, "run", first)


async def test_a_worker_that_is_silent_is_gone_once_the_server_has_given_it_up(
    tmp_path: Path, namespace: str
) -> None:
    """A host that vanishes says nothing, nor does a process that stands still: its connection stays
    until the server has missed its answers to pings, and then nobody is there."""
    conf = 'ping_interval: "1s"\nping_max: 2'
    server = await NatsServer.start(tmp_path / "server", extra_conf=conf)
    try:
        async with crew_on(server.url, namespace, tmp_path) as crew, tap_on(server.url) as tap:
            first = await at_work(crew, "run")
            await crew.worker("reader", url=tap.url, **FAR_S)
            await eventually(lambda: first.id.encode() in tap.sent, what="it is watched")
            await first.freeze()
            await adopted(crew, "run", first)
    finally:
        await server.stop()
