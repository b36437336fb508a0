"""Who holds a run: questions to workers, and their answers (PROTOCOL 4)."""

from __future__ import annotations

import asyncio

import pytest
from kit.raw_client import ask, connected
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.ids import RunId
from journal.stores.jetstream import JetStreamStore


async def test_a_worker_says_what_it_holds(direct: JetStreamStore, server: NatsServer) -> None:
    asked: list[tuple[str, int]] = []

    def held(run_id: RunId, claim: int) -> bool:
        asked.append((run_id, claim))
        return (run_id, claim) == ("run.1", 7)

    async with JetStreamStore(server.url) as other:
        assert await other.ask("w.1", RunId("run.1"), 7) == "nobody"
        async with direct.answering("w.1", held):
            assert await other.ask("w.1", RunId("run.1"), 7) == "yes"
            assert await other.ask("w.1", RunId("run.1"), 8) == "no"
            assert await direct.ask("w.1", RunId("run.1"), 7) == "yes"  # also itself
            assert await other.ask("w_1", RunId("run.1"), 7) == "nobody"
            assert asked == [("run.1", 7), ("run.1", 8), ("run.1", 7)]

        async def nobody() -> bool:  # once the server has the unsubscription of the other client
            return await other.ask("w.1", RunId("run.1"), 7) == "nobody"

        await eventually(nobody)


@pytest.mark.usefixtures("short_tries")
async def test_a_worker_that_does_not_answer_is_silent_not_gone(
    direct: JetStreamStore, server: NatsServer
) -> None:
    async with connected(server.url) as connection:
        await connection._nc.subscribe("runfold.worker.frozen")
        # Behind the subscription on the same connection (nats-py's own flush overtakes it).
        await connection.request("nobody.here", b"", timeout_s=5)
        assert await direct.ask("frozen", RunId("run-1"), 1) == "silent"


@pytest.mark.parametrize("worker", ["", "a b", "*", ">", "a\r\nPUB x 0", "é", "x" * 5_000])
async def test_a_worker_name_that_is_none_is_nobody(direct: JetStreamStore, worker: str) -> None:
    assert await direct.ask(worker, RunId("run-1"), 1) == "nobody"


@pytest.mark.usefixtures("short_tries")
async def test_a_worker_whose_answer_fails_keeps_its_run_and_goes_on_answering(
    direct: JetStreamStore, server: NatsServer
) -> None:
    def held(run_id: RunId, claim: int) -> bool:
        if claim == 1:
            raise ZeroDivisionError
        return True

    async with direct.answering("w", held):
        assert await direct.ask("w", RunId("run-1"), 1) == "silent"
        assert await direct.ask("w", RunId("run-1"), 2) == "yes"
        for question in (b"", b"{", b'{"run":1}', b"\xff"):
            assert "error" in await ask(server.url, "runfold.worker.w", question)
        assert await direct.ask("w", RunId("run-1"), 2) == "yes"


async def test_answering_leaves_no_subscription_however_it_ends(direct: JetStreamStore) -> None:
    subscriptions = direct._connection._nc._subs
    before = len(subscriptions)
    held = asyncio.Event()

    async def hold() -> None:
        async with direct.answering("w", lambda run_id, claim: True):
            held.set()
            await asyncio.Event().wait()

    holder = asyncio.create_task(hold())
    await held.wait()
    assert len(subscriptions) == before + 1
    holder.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holder
    assert len(subscriptions) == before
