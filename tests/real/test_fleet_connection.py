"""A worker whose server goes away, comes back, forgets its consumer, or refuses it (R55)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest
from kit.fleet import Crew, crew_on
from kit.fleet_agents import AGENTS, Here
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.errors import StoreUnavailable
from journal.stores import jetstream_read
from worker import service
from worker.service import Worker

pytestmark = pytest.mark.real
CLOSED = 'authorization { users = [ { user: somebody, password: "else" } ] }'


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    """One that may be killed."""
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    yield server
    await server.stop()


@pytest.fixture
async def crew(own_server: NatsServer, namespace: str, tmp_path: Path) -> AsyncIterator[Crew]:
    async with crew_on(own_server.url, namespace, tmp_path / "crew") as crew:
        yield crew


@contextlib.asynccontextmanager
async def serving(crew: Crew) -> AsyncGenerator[tuple[Worker, asyncio.Task[None]]]:
    """A worker in this process, to look into."""
    ready = asyncio.Event()
    worker = Worker(
        crew.url,
        [AGENTS["quick"], AGENTS["reader"]],
        namespace=crew.namespace,
        ack_wait_s=1.0,
        on_ready=ready.set,
    )
    task = asyncio.create_task(worker.serve())
    await ready.wait()
    try:
        yield worker, task
    finally:
        worker.force()
        await asyncio.wait([task])


async def completes(crew: Crew, run: str) -> None:
    await crew.start("quick", run)
    await crew.status(run, "completed")


async def test_an_idle_worker_claims_each_run_that_is_started_after_its_server_was_bounced(
    crew: Crew, own_server: NatsServer
) -> None:
    worker = await crew.worker("quick", sweep_s=3600)
    await completes(crew, "before")
    for number in range(5):
        await own_server.kill()
        await own_server.restart()
        await completes(crew, f"after-{number}")
    assert worker.running
    for number in range(5):
        claims = await crew.claims(f"after-{number}")
        assert [(claim.worker, claim.reason) for claim in claims] == [(worker.id, "new")]


async def test_runs_at_work_while_their_server_is_bounced_lose_and_repeat_nothing(
    crew: Crew, own_server: NatsServer
) -> None:
    for _ in range(2):
        await crew.worker("roller", ack_wait_s=2.0)
    runs = [f"roll-{number}" for number in range(10)]
    for run in runs:
        await crew.start("roller", run, {"turns": 8})
    for iteration in (1, 3, 5):
        await crew.until(runs[-1], lambda run, least=iteration: run.iteration >= least)
        await own_server.kill()
        await own_server.restart()
    await crew.all_completed(runs)
    for run in runs:
        assert [step for _, step, _ in crew.effects(run)] == [f"{turn}/1" for turn in range(8)]


async def test_a_deleted_consumer_is_made_again_and_reported(crew: Crew) -> None:
    worker = await crew.worker("quick", sweep_s=3600)
    stream = f"{crew.namespace.upper()}_TASKS"
    for number, name in enumerate(("quick", "quick~high")):
        before = worker.log.count("can't be pulled")
        deleted = await crew.api(f"$JS.API.CONSUMER.DELETE.{stream}.{name}")
        assert deleted["success"]
        await completes(crew, f"run-{number}")
        await eventually(lambda n=before: worker.log.count("can't be pulled") > n, what="the log")

        async def there(name: str = name) -> bool:
            return "error" not in await crew.api(f"$JS.API.CONSUMER.INFO.{stream}.{name}")

        await eventually(there, what=f"{name} is there again")
    assert "consumer deleted" in worker.log.lower()


async def test_health_is_red_while_the_server_is_gone_and_green_when_it_is_back(
    crew: Crew, own_server: NatsServer
) -> None:
    async with serving(crew) as (worker, task):
        assert worker.health().ok, worker.health()
        await own_server.kill()
        await eventually(lambda: not worker.health().ok, what="red")
        assert "not connected" in " ".join(worker.health().problems)
        assert not worker.health().hopeless  # killing all workers brings no server back
        await own_server.restart()
        await eventually(lambda: worker.health().ok, what="green")
        await completes(crew, "after")
        assert not task.done()


async def test_a_worker_is_hopeless_once_its_loop_was_blocked_until_others_had_its_runs(
    crew: Crew,
) -> None:
    async with serving(crew) as (worker, _):

        def until_hopeless() -> bool:
            """Blocks this very loop; whether there was a time when it was known but not yet so."""
            hoped = False
            while not worker.health().hopeless:
                hoped = hoped or "blocked" in " ".join(worker.health().problems)
            return hoped

        assert until_hopeless()
        await eventually(lambda: worker.health().ok, what="green, as the loop goes on")
        assert not worker.health().hopeless


async def test_a_server_that_is_gone_for_longer_than_any_patience_ends_no_worker(
    crew: Crew, own_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it goes while the worker was asking it for something."""
    monkeypatch.setattr(jetstream_read, "READ_BUDGET_S", 0.3)
    monkeypatch.setattr(service, "PAUSE_S", 1.0)
    stream = f"{crew.namespace.upper()}_TASKS"
    async with serving(crew) as (worker, task):
        await crew.api(f"$JS.API.CONSUMER.DELETE.{stream}.quick")
        await eventually(lambda: not worker.health().ok, what="it is reported")
        await own_server.kill()
        gone_at = asyncio.get_running_loop().time()
        await eventually(lambda: task.done() or asyncio.get_running_loop().time() > gone_at + 5, 10)
        assert not task.done(), task.exception()
        assert not worker.health().ok
        monkeypatch.undo()
        await own_server.restart()
        await eventually(lambda: worker.health().ok, what="green")
        await completes(crew, "after")


async def test_a_connection_closed_for_good_ends_serve_with_its_reason_and_its_run_is_taken_over(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Here, "folder", crew.folder)
    crew.hold("read")
    async with serving(crew) as (worker, task):
        await crew.start("reader", "run")
        await crew.reaches("read")
        client = worker._store._connection._nc
        await client.publish("runfold.x", b"x" * client.max_payload, headers={"One": "too many"})
        await eventually(task.done, what="serve ends")
        assert isinstance(task.exception(), StoreUnavailable), task.exception()
        assert "maximum payload" in str(task.exception()).lower()
        assert not worker.health().ok
        first = worker.id
    crew.let_go("read")
    second = await crew.worker("reader")
    await crew.status("run", "completed")
    assert [one.worker for one in await crew.claims("run")] == [first, second.id]
    assert len(crew.effects("run")) == 1


async def test_a_worker_that_is_refused_after_a_restart_is_red_until_it_is_let_in_again(
    crew: Crew, own_server: NatsServer
) -> None:
    conf = own_server._dir / "nats-server.conf"
    open_to_all = conf.read_text()
    async with serving(crew) as (worker, task):
        conf.write_text(f"{open_to_all}\n{CLOSED}\n")
        await own_server.kill()
        await own_server.restart()
        await eventually(
            lambda: "authentication error" in own_server.log(), what="the server refuses it"
        )
        assert task.done() or not worker.health().ok
        conf.write_text(open_to_all)
        await own_server.kill()
        await own_server.restart()
        if not task.done():  # ending would do as well: R55
            await eventually(lambda: worker.health().ok, what="green")
            await completes(crew, "after")
