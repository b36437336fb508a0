"""UR-44, UR-46, UR-62: blocked loops, swallowed cancellation, two processes on one directory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal as signals
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cases.world import PAY, World, check_store, one_line
from cases.zygote import Zygote
from kit.ledger import Ledger
from kit.waiting import eventually

from journal.ids import RunId
from journal.store import Store
from journal.stores import file_lock
from runfold import (
    Agent,
    Completed,
    Indeterminate,
    StoreLocked,
    StoreUnavailable,
    ToolCall,
    read,
    run,
    write,
)
from runfold.testing import ScriptedModel, call, say

STEP = "tool/1/0/charge"

# ---- UR-44 ------------------------------------------------------------------------------------


async def test_ur44_a_blocking_tool_stalls_nobody(store: Store, world: World) -> None:
    """UR-44: a plain `def` write that blocks: five other runs finish meanwhile in the same loop,
    a second run() of it is refused naming the holder (on a shared store the holder answers), and
    the write happens once."""
    go = threading.Event()
    ledger = Ledger(world.home / "slow")

    @write(approval=False)
    def charge(this: ToolCall) -> str:
        ledger.add(this.run_id, this.step, {})
        go.wait(60)
        return "paid"

    slow = Agent("pay", model=ScriptedModel(call("charge"), say("done")), tools=[charge])
    running = asyncio.create_task(run(store, slow, "slow", "x", ack_wait_s=1))
    try:
        await eventually(ledger.lines)
        for number in range(5):
            assert isinstance(await run(store, world.agent(), f"r{number}", "x"), Completed)
        with pytest.raises(StoreLocked) as locked:
            await run(store, slow, "slow", ack_wait_s=1)
        assert locked.value.holder
        assert not running.done()
    finally:
        go.set()
    assert isinstance(await running, Completed)
    assert len(ledger.lines()) == 1
    await check_store(store, "slow")


# ---- UR-46 ------------------------------------------------------------------------------------


async def _swallow(entered: asyncio.Event) -> str:
    entered.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "ok"
    return "never"


async def _shield(entered: asyncio.Event) -> str:
    entered.set()
    await asyncio.shield(asyncio.sleep(3600))
    return "never"


async def _catch_all(entered: asyncio.Event) -> str:
    entered.set()
    for _ in range(2):
        with contextlib.suppress(BaseException):
            await asyncio.Event().wait()
    return "at last"


async def _other_error(entered: asyncio.Event) -> str:
    entered.set()
    try:
        await asyncio.Event().wait()
    finally:
        raise ValueError("while cleaning up")


BODIES = [_swallow, _shield, _catch_all, _other_error]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__.strip("_"))
@pytest.mark.parametrize("unsafe", [True, False], ids=["write", "read"])
async def test_ur46_cancellation_is_not_swallowed(
    store: Store, body: Callable[[asyncio.Event], Awaitable[str]], unsafe: bool
) -> None:
    """UR-46: run() is cancelled inside a tool that makes something else of it: what the tool
    returns is no result; the run is free at once; a write is then unknown, a read runs again."""
    entered = asyncio.Event()
    stubborn = True

    async def charge() -> str:
        return await body(entered) if stubborn else "paid"

    tool: Any = write(approval=False)(charge) if unsafe else read(charge)
    agent = Agent("pay", model=ScriptedModel(call("charge"), say("done")), tools=[tool])
    running = asyncio.create_task(run(store, agent, "r1", "x", ack_wait_s=1))
    await entered.wait()
    running.cancel()
    await asyncio.sleep(0)
    while not running.done():
        running.cancel()  # a body that catches it twice is cancelled again, as a shutdown would
        await asyncio.sleep(0.01)
    assert running.cancelled()
    records = await check_store(store, "r1")
    assert all(r.get("step") != STEP for r in records if r["type"] == "step.completed")

    stubborn = False
    end = await run(store, agent, "r1", ack_wait_s=1)
    assert isinstance(end, Indeterminate if unsafe else Completed)
    await check_store(store, "r1")


async def test_ur46_a_cancel_that_meets_the_end_of_a_wait_for(world: World) -> None:
    """UR-46: 100 tries: the tool's own wait ends in the very tick of the cancellation: the run is
    done, unknown, or cancelled and goes on; never stuck, never twice."""
    store = world.store()
    ends: set[str] = set()
    for number in range(100):
        run_id, entered, finish = f"r{number}", asyncio.Event(), asyncio.Event()

        async def body(run_id: str = run_id, entered: Any = entered, finish: Any = finish) -> str:
            world.ledger.add(run_id, STEP, {})
            entered.set()
            await asyncio.wait_for(finish.wait(), 60)
            return "paid"

        agent = _agent(body)
        running = asyncio.create_task(run(store, agent, run_id, "x"))
        await entered.wait()
        finish.set()
        for _ in range(number % 7):
            await asyncio.sleep(0)
        running.cancel()
        (first,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError | Completed), first
        end = await run(store, agent, run_id)
        assert isinstance(end, Completed | Indeterminate)
        ends.add(type(end).__name__)
        assert len(world.ledger.lines(run_id)) == 1
        world.check(run_id)
    assert "Indeterminate" in ends


class _NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("this exception can't say what it is")


ENDS = {"exit 0": SystemExit(0), "exit 3": SystemExit(3), "generator": GeneratorExit()}


@pytest.mark.parametrize("end", [*ENDS, "no text"])
@pytest.mark.parametrize("kind", ["write", "read"])
async def test_ur46_a_tool_that_raises_what_nobody_expects(
    world: World, end: str, kind: str
) -> None:
    """UR-46's kind (Python execution hazards): `sys.exit` and the like out of a tool are that
    tool's failure: of a write unknown, of a read its result; never the end of the process."""

    def charge() -> str:
        raise ENDS.get(end) or _NoText

    tool: Any = write(approval=False)(charge) if kind == "write" else read(charge)
    agent = Agent("pay", model=ScriptedModel(call("charge"), say("done")), tools=[tool])
    try:
        found: Any = await run(world.store(), agent, "r1", "x")
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError):
            raise
        found = error
    assert isinstance(found, Indeterminate if kind == "write" else Completed)
    world.check("r1")


def test_ur46_a_tool_that_exits_is_no_completed_run(world: World) -> None:
    """UR-46's kind: `sys.exit(0)` in a write under `runfold run` is no exit 0 of the command."""
    done = world.run("r1", input="x", at="tool:exit")
    assert world.show("r1").code == 4
    assert (done.code, done.out != "") == (4, True)


def _agent(body: Callable[[], Awaitable[str]]) -> Agent:
    @write(approval=False)
    async def charge() -> str:
        return await body()

    return Agent("pay", model=ScriptedModel(call("charge"), say("done")), tools=[charge])


# ---- UR-62 ------------------------------------------------------------------------------------


@pytest.mark.real
def test_ur62_two_processes_one_directory(
    world: World, zygote: Zygote, run_sync: Callable[..., Any]
) -> None:
    """UR-62: while a run works, show and list work beside it and change nothing; a second run is
    refused naming the holder; after kill -9 it is free at once."""
    held = zygote.cli(*world.run_args("r1", input="x"), env=world.env(at="tool:hold"))
    run_sync(eventually(world.ledger.lines))
    data = world.path("r1").read_bytes()
    shown = world.show("r1", "--json")
    assert (shown.code, shown.json["status"]) == (0, "running")
    assert shown.json["waiting_on"][0]["what"] == "worker"
    assert world.list() == {"r1": "running"}
    second = world.run("r1")
    assert second.code == 8
    assert f"process {held.pid} " in one_line(second.err)
    for how in ("--retry", "--done=1"):
        assert world.reconcile("r1", STEP, how).code == 8
    assert world.path("r1").read_bytes() == data
    assert world.run("r2", input="x").code == 0  # another run of the directory

    held.kill()
    again = zygote.cli(*world.run_args("r1"), env=world.env())  # does not wait for its end
    assert again.wait().code == 4
    assert held.wait().code == -9
    world.check("r1")
    assert len(world.ledger.lines("r1")) == 1


@pytest.mark.real
async def test_ur62_a_forked_child_of_a_killed_holder_does_not_keep_the_run(
    world: World, zygote: Zygote
) -> None:
    """UR-62: the holder forks, is killed, its child lives on with every descriptor: the run is
    free all the same."""
    holder = zygote.cli(*world.run_args("r1", input="x"), env=world.env(at="tool:fork"))
    await eventually((world.home / "forked").exists)
    assert (await asyncio.to_thread(holder.wait)).code == -9
    pid = int((world.home / "forked").read_text())
    try:
        os.kill(pid, 0)
        again = zygote.cli(*world.run_args("r1"), env=world.env())
        assert (await asyncio.to_thread(again.wait)).code == 4
        os.kill(pid, 0)
    finally:
        os.kill(pid, signals.SIGKILL)
    world.check("r1")


async def test_ur62_a_child_forked_in_the_middle_of_an_append_does_not_keep_the_file(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UR-62: a tool forks while another thread of the process appends: the child has the locked
    descriptor too, and lives on; the next append goes through."""
    monkeypatch.setattr(file_lock, "LOCK_WAIT_S", 0.3)
    world.runs.mkdir()
    sync, children = os.fsync, list[int]()

    def fork_and_sync(fd: int) -> None:
        if not children:
            children.append(os.fork())
            if not children[0]:
                signals.pause()
        sync(fd)

    monkeypatch.setattr(os, "fsync", fork_and_sync)
    try:
        assert isinstance(await run(world.store(), world.agent(), "r1", "x"), Completed)
    finally:
        os.kill(children[0], signals.SIGKILL)
        await eventually(lambda: os.waitpid(children[0], os.WNOHANG) != (0, 0))


@pytest.fixture
def open_home(tmp_path: Path) -> Iterator[World]:
    """A world that another user can reach: pytest's own directories are closed to others."""
    home = Path(tempfile.mkdtemp(prefix="runfold-case-", dir="/tmp"))
    home.chmod(0o755)
    yield World(home)
    for path in [home, *home.rglob("*")]:
        path.chmod(0o755)
    shutil.rmtree(home)


@pytest.mark.real
@pytest.mark.parametrize("closed", ["directory", "journal", "unreadable"])
def test_ur62_a_directory_without_permission(open_home: World, zygote: Zygote, closed: str) -> None:
    """UR-62: read-only: show and list work, run and approve say permission (exit 9), not busy;
    what can't be read at all is a permission too, not an empty store."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become nobody")
    world = open_home
    assert world.run("done", input="x").code == 0
    assert world.run("r1", input="x", script="gated").code == 3
    (pending,) = world.show("r1", "--json").json["pending"]
    modes = {
        "directory": {world.runs: 0o555, world.runs / ".locks": 0o555},
        "journal": {
            world.runs: 0o777,
            world.runs / ".locks" / "r1": 0o666,
            world.path("r1"): 0o444,
        },
        "unreadable": {world.runs: 0o000},
    }
    for path, mode in modes[closed].items():
        path.chmod(mode)
    data = world.path("r1").read_bytes()

    def nobody(*args: str) -> Any:
        return zygote.cli(*args, env=world.env("gated"), uid=65534, cwd="/").wait()

    where = ["--store", str(world.runs), "--json"]
    shown, listed = nobody("show", "r1", *where), nobody("list", *where)
    if closed == "unreadable":
        assert shown.json["error"]["code"] == listed.json["error"]["code"] == "permission_denied"
        assert shown.code == listed.code == 9
    else:
        assert (shown.code, shown.json["status"]) == (3, "awaiting_approval")
        assert [run["status"] for run in listed.json["runs"]] == ["completed", "awaiting_approval"]
        assert nobody("show", "done", *where).code == 0
    for args in (world.run_args("r1", "--json"), ["approve", pending["marker"], *where]):
        refused = nobody(*args)
        if closed == "journal" and args[0] == "run":
            assert refused.code == 3  # nothing to append: it still waits
            continue
        assert refused.code == 9, refused
        assert refused.json["error"]["code"] == "permission_denied"
        assert str(world.runs) in one_line(refused.err)
    assert world.path("r1").read_bytes() == data
    assert not world.ledger.lines("r1")


READ_ONLY = """
mount --bind {runs} {runs} && mount -o remount,ro,bind {runs} || exit 77
for command in "show r1" "list" "run {pay} --id r1" "run {pay} --id new --input x"; do
  {python} -m runfold.cli $command --store {runs} --json
  echo "exit $?"
done
"""


@pytest.mark.real
def test_ur62_a_read_only_mount(world: World) -> None:
    """UR-62: show and list work; run says read-only and the path, exit 9. In a mount namespace of
    its own, which ends with the shell."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    assert world.run("r1", input="x", script="gated").code == 3
    script = READ_ONLY.format(runs=world.runs, pay=PAY, python=sys.executable)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        env=os.environ | world.env("gated") | {"PYTHONPATH": f"{root}:{root / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"mounting is not allowed here: {done.stderr[:200]}")
    lines = done.stdout.splitlines()
    assert lines[1::2] == ["exit 3", "exit 0", "exit 9", "exit 9"], done
    assert json.loads(lines[0])["status"] == "awaiting_approval"
    for answer in (lines[4], lines[6]):
        error = json.loads(answer)["error"]
        assert error["code"] == "permission_denied"
        assert str(world.runs) in error["message"] and "Read-only" in error["message"]
    assert world.list() == {"r1": "awaiting_approval"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
@pytest.mark.parametrize("which", ["flock"])
async def test_ur62_a_file_system_without_locks(
    world: World, monkeypatch: pytest.MonkeyPatch, which: str, number: int
) -> None:
    """UR-62: locking that fails is told apart from a lock that is held; nothing runs unlocked."""
    assert isinstance(await run(world.store(), world.agent(), "done", "x"), Completed)

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, which, refuse)
    with pytest.raises(StoreUnavailable) as refused:
        await run(world.store(), world.agent(), "r1", "x")
    assert not isinstance(refused.value, StoreLocked)
    assert os.strerror(number) in refused.value.message
    assert not world.ledger.lines("r1")
    assert world.asked() == ["llm/1", "llm/2"]
    monkeypatch.undo()
    assert isinstance(await run(world.store(), world.agent(), "r1", "x"), Completed)
    assert len(await check_store(world.store(), RunId("r1"))) == 8
