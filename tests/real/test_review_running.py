"""A worker that waits with a write's result for its store is stopped like any other (R51)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from kit.fleet import crew_on
from kit.servers import NatsServer
from kit.waiting import eventually

from runfold.testing import ScriptedModel, call, say
from worker.agent import Agent
from worker.service import Worker
from worker.tools import write

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]


@pytest.mark.parametrize("grace_s", [0.5, 0.0])
async def test_a_worker_whose_write_ended_while_the_store_is_away_can_be_stopped(
    namespace: str, tmp_path: Path, grace_s: float
) -> None:
    """Of the write a person is asked then; it is not made again."""
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    calls: list[int] = []

    @write(name="pay", approval=False)
    async def pay(amount: int) -> str:
        calls.append(amount)
        await server.kill()
        return "paid"

    model = ScriptedModel(call("pay", amount=1), say("Done."))
    agent = Agent("payer", model=model, tools=[pay])

    def another() -> Worker:
        return Worker(server.url, [agent], namespace=namespace, ack_wait_s=1.0, grace_s=grace_s)

    async with crew_on(server.url, namespace, tmp_path / "crew") as crew:
        worker = another()
        serving = asyncio.create_task(worker.serve())
        await crew.start("payer", "p1")
        await eventually(lambda: calls and not worker.health().ok, what="the store is away")
        assert not serving.done()
        await worker.stop()
        await serving
        assert not worker.stubborn
        await server.restart()
        following = another()
        serving = asyncio.create_task(following.serve())
        await crew.status("p1", "indeterminate")
        await following.stop()
        await serving
        assert calls == [1]
    await server.stop()
