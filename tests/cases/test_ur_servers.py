"""UR-34, UR-38, UR-41, UR-42 as far as `run()` meets them: a server that forgets or refuses."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cases.world import PAY, World, check_store, one_line
from cases.zygote import Zygote
from kit.raw_client import ask, connected
from kit.servers import NatsServer

from journal.doors import signal, start, state
from journal.ids import RunId
from journal.stores import jetstream_read
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from runfold import Agent, Completed, Indeterminate, Reply, StoreUnavailable, ToolCall, run, write
from runfold.testing import ScriptedModel, call, say

pytestmark = pytest.mark.real
STEP = "tool/1/0/charge"

# ---- UR-38 ------------------------------------------------------------------------------------


async def test_ur38_a_server_that_loses_acknowledged_records(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UR-38: the server comes back with its data of before the charge's result. (a) The process
    that knows better notices that the subject went back and stops; (b) a fresh one sees a start
    without a result: Indeterminate. Never charged again."""
    monkeypatch.setattr(jetstream_read, "READ_BUDGET_S", 0.5)
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    data, copy = tmp_path / "server" / "jetstream", tmp_path / "copy"

    async def forget() -> None:
        await server.kill()
        shutil.rmtree(data)
        shutil.copytree(copy, data)
        await server.restart()

    @write(approval=False)
    async def charge(this: ToolCall) -> str:
        world.ledger.add(this.run_id, this.step, {})
        shutil.copytree(data, copy)
        return "paid"

    class Model(ScriptedModel):
        async def reply(self, *about: object, **how: object) -> Reply:
            found = await super().reply(*about, **how)  # type: ignore[arg-type]
            if found == self.replies[1]:
                await forget()
            return found

    agent = Agent("pay", model=Model(call("charge"), say("done")), tools=[charge])
    try:
        await provision(server.url)
        async with JetStreamStore(server.url) as store:
            with pytest.raises(StoreUnavailable, match=r"names \d+ as its last, before \d+"):
                await run(store, agent, "r1", "x", ack_wait_s=1)
            assert (await store.load(RunId("r1"))).records[-1].step == STEP  # type: ignore[union-attr]
        async with JetStreamStore(server.url) as store:
            end = await run(store, agent, "r1", ack_wait_s=1)
            assert isinstance(end, Indeterminate)
            assert end.step == STEP
            await check_store(store, "r1")
    finally:
        await server.stop()
    assert len(world.ledger.lines()) == 1


# ---- UR-34 ------------------------------------------------------------------------------------


async def test_ur34_approvals_outlive_the_server_and_every_process(
    world: World, tmp_path: Path
) -> None:
    """UR-34: 20 runs wait; the server is killed, no process is left; afterwards the pending list is
    the old one, with the markers noted before, and each approve works once."""
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    runs = [f"r{number}" for number in range(20)]
    try:
        await provision(server.url)
        async with JetStreamStore(server.url) as store:
            before = [await run(store, world.agent("gated"), run_id, "x") for run_id in runs]
        await server.kill()
        await server.restart()
        async with JetStreamStore(server.url) as store:
            after = [(await state(store, run_id)).outcome for run_id in runs]
            assert after == before
            for run_id, end in zip(runs, before, strict=True):
                marker = end.pending[0].marker  # type: ignore[union-attr]
                said = [
                    await signal(store, run_id, "approve", {"marker": marker}) for _ in range(2)
                ]
                assert [receipt.result for receipt in said] == ["applied", "repeated"]
                assert isinstance(await run(store, world.agent("gated"), run_id), Completed)
                assert len(world.ledger.lines(run_id)) == 1
                await check_store(store, run_id)
    finally:
        await server.stop()


# ---- UR-41 ------------------------------------------------------------------------------------

USERS = """
authorization {
  users = [
    { user: admin, password: p }
    { user: reader, password: p, permissions: { publish: { deny: ["runfold.journal.>"] } } }
    { user: noapi, password: p, permissions: { publish: { deny: ["$JS.API.>"] } } }
  ]
}
"""


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = await NatsServer.start(tmp_path / "guarded", extra_conf=USERS)
    yield server
    await server.stop()


async def test_ur41_a_missing_permission_or_stream_is_named(
    guarded: NatsServer, world: World, zygote: Zygote
) -> None:
    """UR-41: no right on the journal, no right on the API, a wrong password, no stream while
    somebody listens to everything: exit 9 in one line that names it; no claim, no tool, no model
    call; approve by a user who may not is refused the same way."""

    def as_user(user: str, password: str = "p") -> str:
        return guarded.url.replace("nats://", f"nats://{user}:{password}@")

    async def command(*args: str) -> str:
        child = zygote.cli(*args, "--json", env=world.env("gated"))
        done = await asyncio.to_thread(child.wait)
        assert done.code == 9, done
        assert "nats://reader:p@" not in done.err
        last = done.err.splitlines(keepends=True)[-1]  # before it: what the storage is worth
        return f"{done.json['error']['code']} {one_line(last)}"

    admin = as_user("admin")
    await provision(admin)
    runs = ["run", PAY, "--id", "r1", "--input", "x", "--store"]
    denied = await command(*runs, as_user("reader"))
    assert denied.startswith("permission_denied") and "runfold.journal.0.r1" in denied
    denied = await command(*runs, as_user("noapi"))
    assert denied.startswith("permission_denied") and "$JS.API.STREAM.INFO" in denied
    refused = await command(*runs, as_user("admin", "wr0ng"))
    assert refused.startswith("permission_denied") and "wr0ng" not in refused
    async with JetStreamStore(admin) as store:
        assert [run_id async for run_id in store.runs()] == []
        end = await run(store, world.agent("gated"), "r2", "x")
        (pending,) = end.pending  # type: ignore[union-attr]
        before = (await state(store, "r2")).records
        denied = await command("approve", pending.marker, "--store", as_user("reader"))
        assert denied.startswith("permission_denied") and "runfold.journal.0.r2" in denied
        assert (await state(store, "r2")).records == before

    await ask(admin, "$JS.API.STREAM.DELETE.RUNFOLD_JOURNAL_0")
    async with (
        connected(admin) as listener,
        listener.subscribed("runfold.>", _silent),
    ):
        missing = await command(*runs, admin)
        assert missing.startswith("not_provisioned") and "runfold init" in missing
    assert world.asked() == ["llm/1"]
    assert not world.ledger.lines()


async def _silent(question: object) -> bytes:
    return b""


# ---- UR-42 ------------------------------------------------------------------------------------


async def test_ur42_a_store_is_not_deaf_after_server_restarts(world: World, tmp_path: Path) -> None:
    """UR-42: the server is killed and restarted ten times under one open store; after each, a run
    completes and a second process's question is answered; no consumer is left."""
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    try:
        await provision(server.url)
        async with JetStreamStore(server.url) as store:
            for number in range(10):
                await server.kill()
                await server.restart()
                end = await run(store, world.agent(), f"r{number}", "x", ack_wait_s=1)
                assert isinstance(end, Completed)
                async with store.answering(f"w{number}", lambda run_id, claim: True):
                    assert await store.ask(f"w{number}", RunId("r0"), 2) == "yes"
            assert not (await start(store, "pay", "x", run_id="r0")).created
            info = await ask(server.url, "$JS.API.STREAM.INFO.RUNFOLD_JOURNAL_0")
            assert info["state"]["consumer_count"] == 0
            await check_store(store, "r9")
    finally:
        await server.stop()
    assert len(world.ledger.lines()) == 10
