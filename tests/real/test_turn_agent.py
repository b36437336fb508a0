"""examples/turn_agent.py with a worker: a steer, a follow-up, and waits that an input ends."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.stores.provision import provision
from journal.views import Completed, RunState
from runfold import FileStore, Fleet, Waiting, Worker, connect, run
from runfold import state as state_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "turn_agent.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("turn_agent_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def fleet(nats_server: NatsServer, namespace: str, example: Any) -> AsyncIterator[Fleet]:
    """With a worker that serves the example's agent."""
    await provision(nats_server.url, namespace=namespace)
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(connect(nats_server.url, namespace=namespace))
        worker = Worker(nats_server.url, [example.agent], namespace=namespace, ack_wait_s=3.0)
        serving = asyncio.create_task(worker.serve())
        yield found
        await worker.stop()
        await serving


async def at(fleet: Fleet, run_id: str, status: str) -> RunState:
    async def there() -> RunState | None:
        found = await fleet.get(run_id)
        return found if found.status == status else None

    return await eventually(there, what=f"{run_id} is {status}")


async def lines(fleet: Fleet, run_id: str, turn: int) -> list[Any]:
    """The conversation after this many turns."""
    loaded = await fleet.store.load(run_id)  # type: ignore[arg-type]
    commits: list[Any] = [entry.record for entry in loaded.entries if entry.type == "commit"]
    return commits[turn - 1].state


async def test_it_is_steered_answers_a_follow_up_and_waits_for_either(fleet: Fleet, example: Any):
    reached, go = asyncio.Event(), asyncio.Event()

    async def search(query: str) -> str:
        reached.set()
        await go.wait()
        return f"see page {len(query)}"

    example.search = search
    await fleet.start("chat", "the VPN is down", run_id="chat")
    await asyncio.wait_for(reached.wait(), 20)
    await fleet.send("chat", "it is urgent", mode="steer", request_id="s1")
    go.set()

    waits = await at(fleet, "chat", "waiting")
    assert {on.what for on in waits.waiting_on} == {"timer", "input"}
    until = waits.waiting_on[0].until
    assert until is not None
    assert timedelta(minutes=59) < until - datetime.now(UTC) <= timedelta(hours=1)
    assert await lines(fleet, "chat", 1) == [
        ["user", "the VPN is down"],
        ["tool", "see page 15"],
        ["user", "it is urgent"],
        ["agent", "About the VPN is down and it is urgent: see page 15."],
    ]
    assert (await fleet.input("chat", "s1", wait_s=5)).status == "done"

    await fleet.send("chat", "and the printer?", mode="follow_up", request_id="f1")
    assert (await fleet.input("chat", "f1", wait_s=20)).status == "done"
    waits = await at(fleet, "chat", "waiting")
    assert (await lines(fleet, "chat", 2))[-1][1] == "About and the printer?: see page 16."

    await fleet.send("chat", "bye", mode="follow_up")
    ended = (await at(fleet, "chat", "completed")).outcome
    assert isinstance(ended, Completed)
    assert ended.message.content == "About bye: see page 3."


async def test_after_its_silence_it_closes_by_itself(fleet: Fleet, example: Any):
    example.SILENCE = timedelta(seconds=0.5)
    await fleet.start("chat", "hello", run_id="quiet")
    ended = (await at(fleet, "quiet", "completed")).outcome
    assert isinstance(ended, Completed)
    assert "nothing was said" in str(ended.message.content)


async def test_it_runs_on_a_directory_too(tmp_path: Path, example: Any):
    store = FileStore(tmp_path)
    for _ in range(2):
        assert isinstance(await run(store, example.agent, "chat", "hello"), Waiting)
    assert (await state_of(store, "chat")).status == "waiting"
    assert (await state_of(store, "chat")).model_calls == 1


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 80
