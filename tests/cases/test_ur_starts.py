"""UR-24, UR-64: who starts a run, and under which name."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cases.child import DyingStore
from cases.world import PAY, World, check_store, one_line
from cases.zygote import Zygote
from kit.proxy import Proxy
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.doors import Started, signal, start, state
from journal.handle import Journal
from journal.ids import RunId
from journal.purging import purge
from journal.store import Store
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from runfold import Completed, InputMismatch, InvalidId, open_store, run

STEP = "tool/1/0/charge"
RECONCILE = {"step": STEP, "outcome": "retry"}

# ---- UR-24 ------------------------------------------------------------------------------------


async def test_ur24_fifty_concurrent_starts(store: Store, world: World) -> None:
    """UR-24: 50 starts of one id, half with another input: one run; who brought its input gets it,
    the others a conflict; the journal holds the winner's."""

    async def one(number: int) -> str:
        try:
            started = await start(store, "pay", {"to": "PQ"[number % 2]}, run_id="x")
        except InputMismatch:
            return "mismatch"
        return "created" if started.created else "there"

    said = await asyncio.gather(*(one(number) for number in range(50)))
    assert said.count("created") == 1
    won = "PQ"[said.index("created") % 2]
    assert {said[n] for n in range(50) if "PQ"[n % 2] == won} <= {"created", "there"}
    assert {said[n] for n in range(50) if "PQ"[n % 2] != won} == {"mismatch"}
    (record,) = await check_store(store, "x")
    assert record["input"] == {"to": won}
    assert isinstance(await run(store, world.agent(), "x"), Completed)
    with pytest.raises(InputMismatch):
        await start(store, "pay", {"to": "other"}, run_id="x")
    with pytest.raises(InputMismatch):
        await start(store, "another-agent", {"to": won}, run_id="x")
    assert not (await start(store, "pay", {"to": won}, run_id="x")).created
    assert len(await check_store(store, "x")) == (9 if store.shared else 8)


@pytest.mark.real
def test_ur24_concurrent_starts_by_the_command(
    world: World, zygote: Zygote, place: str, namespace: str, run_sync: Callable[..., Any]
) -> None:
    """UR-24: 12 processes: one effect; the others hear of another input, of who has the run, or
    get its answer."""
    where = ["--store", place, "--namespace", namespace, "--json", "--ack-wait", "1"]
    children = [
        zygote.cli("run", PAY, "--id", "x", "--input", "PQ"[n % 2], *where, env=world.env())
        for n in range(12)
    ]
    ends = [child.wait() for child in children]
    assert 0 in [end.code for end in ends]

    async def look() -> list[dict[str, Any]]:
        async with open_store(place, namespace=namespace) as store:
            return await check_store(store, "x")

    won = "PQ".index(run_sync(look())[0]["input"])
    for number, end in enumerate(ends):
        code = end.json.get("error", {}).get("code", "")
        if number % 2 != won:
            assert (end.code, code) == (8, "input_mismatch")
        else:
            assert (end.code, code) in ((0, ""), (8, "store_locked"), (8, "fenced"))
    assert len(world.ledger.lines()) == 1


@pytest.mark.real
async def test_ur24_a_start_whose_answer_was_lost(nats: NatsServer, namespace: str) -> None:
    """UR-24: the server's answer is lost and the client asks three times more: the same run."""
    await provision(nats.url, namespace=namespace)
    proxy = await Proxy.start(nats.url)
    try:
        async with JetStreamStore(proxy.url, namespace=namespace) as store:
            gone = proxy.drop_next_ack()
            counting = DyingStore(store, "")
            started = await start(counting, "pay", "P", run_id="x")  # type: ignore[arg-type]
            assert gone.is_set()
            assert started == Started(run_id=started.run_id, created=True)
            assert counting.appends == ["run.started"]  # not sent again: the journal told
            written = await store.load(RunId("x"))
            for _ in range(3):
                assert not (await start(counting, "pay", "P", run_id="x")).created  # type: ignore[arg-type]
            assert await store.load(RunId("x")) == written
            assert len(await check_store(store, "x")) == 1
    finally:
        await proxy.stop()


@pytest.mark.real
async def test_ur24_the_server_dies_between_request_and_answer(tmp_path: Path) -> None:
    """UR-24: killed with the request on the way, and again after the answer: a start that was
    answered can be read, at once and after every restart."""
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    try:
        await provision(server.url)
        async with JetStreamStore(server.url) as store:
            server.pause()
            counting = DyingStore(store, "")
            starting = asyncio.create_task(start(counting, "pay", "P", run_id="x"))  # type: ignore[arg-type]
            await asyncio.sleep(0)  # the record goes out, to a server that is silent
            await server.kill()
            await server.restart()
            assert (await starting).created
            for _ in range(2):
                assert (await state(store, "x")).records == 1
                await server.kill()
                await server.restart()
            again = await start(store, "pay", "P", run_id="x")
            assert not again.created
            assert (await check_store(store, "x"))[0]["input"] == "P"
    finally:
        await server.stop()


# ---- UR-64 ------------------------------------------------------------------------------------

BAD = [
    *("", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "C:x", "a:b", "x ", " x", "a*", ">", "a\tb"),
    *("a\nb", "a\0b", "%2e%2e", "~", "-rf", "é", "😀", "a~b", "_a", ".a", "a\r", "a\n", "\u0661"),
    *("x" * 129, "x" * 255, "x" * 5000, "a\u202eb", "ａ", "\ud83d"),
]
GOOD = [
    *("a", "A", "A-1_b", "a.b", "x.", "CON", "con", "nul.txt", "NUL.txt", "x" * 128, "X" * 128),
    str(uuid.UUID(int=5)),
]


def tree(home: Path) -> list[str]:
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


async def test_ur64_bad_ids_at_every_door_of_the_library(store: Store, world: World) -> None:
    """UR-64: one rule, one answer, before anything touches server or disk; the connection lives."""
    agent = world.agent()
    before = tree(world.home)
    for bad in BAD:
        marker = {"marker": f"r1/{STEP}@1.0123456789abcdef"}
        for door in (
            lambda bad=bad: start(store, "pay", "x", run_id=bad),
            lambda bad=bad: run(store, agent, bad, "x"),
            lambda bad=bad: run(store, agent, bad),
            lambda bad=bad, marker=marker: signal(store, bad, "approve", marker),
            lambda bad=bad: signal(store, bad, "reconcile", RECONCILE),
            lambda bad=bad: state(store, bad),
            lambda bad=bad: purge(store, bad),
            lambda bad=bad: Journal.read(store, bad),
            lambda bad=bad: Journal.open(store, bad, is_write=lambda _: True),
        ):
            with pytest.raises(InvalidId) as refused:
                await door()
            assert len(refused.value.message) < 1000
            refused.value.message.encode()
    assert tree(world.home) == before
    assert [run_id async for run_id in store.runs()] == []
    for good in GOOD:
        assert isinstance(await run(store, agent, good, "x"), Completed)
        await check_store(store, good)
        assert len(world.ledger.lines(good)) == 1
    assert [run_id async for run_id in store.runs()] == sorted(GOOD)


def test_ur64_bad_ids_at_the_command(world: World) -> None:
    """UR-64: exit 2 in one line from run, show, reconcile, approve; nothing is made anywhere."""
    for bad in BAD:
        of = bad if "/" not in bad else f"../{bad}"  # `a/b/tool/…` is a marker of run a
        for done in (
            world.run(bad, input="x"),
            world.cli("show", "--store", str(world.runs), "--", bad),
            world.cli("reconcile", "--retry", "--store", str(world.runs), "--", bad, STEP),
            world.cli(
                "approve", "--store", str(world.runs), "--", f"{of}/{STEP}@1.0123456789abcdef"
            ),
            world.cli("list", "--store", str(world.runs), "--after", bad),
        ):
            assert done.code == 2, (bad, done)
            assert len(one_line(done.err)) < 1000
    assert tree(world.home) == []


def test_ur64_file_names_stay_apart_and_inside(world: World) -> None:
    """UR-64: good ids are files in the directory, apart even where names ignore case."""
    for good in GOOD:
        assert world.run(good, input="x").code == 0
    files = [path.name for path in world.runs.iterdir() if path.suffix == ".jsonl"]
    assert len({name.lower() for name in files}) == len(files) == len(GOOD)
    assert {name.partition(".")[0].lower() for name in files}.isdisjoint({"con", "nul", ""})
    assert all(len(name) < 255 for name in files)
    assert world.list() == dict.fromkeys(GOOD, "completed")
    first = {json.loads(path.open().readline())["run"] for path in world.runs.glob("*.jsonl")}
    assert first == set(GOOD)


async def test_ur64_names_that_are_no_run_id_in_the_directory(world: World) -> None:
    """UR-64: files somebody else left are neither listed nor touched."""
    assert isinstance(await run(world.store(), world.agent(), "a", "x"), Completed)
    for name in ("..jsonl", ".jsonl", "a b.jsonl", "é.jsonl", "B.jsonl", "con.jsonl", "a.jsonl~"):
        (world.runs / name).write_text("not ours\n")
    assert [run_id async for run_id in world.store().runs()] == ["a"]
    await eventually(lambda: (world.runs / "B.jsonl").read_text() == "not ours\n")
