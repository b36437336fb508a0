"""What two reviews found and is mended, where it takes a process to see it."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.cli import AGENTS, RUNFOLD, Cli
from kit.servers import NatsServer

from journal.doors import state
from journal.ids import RunId
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

pytestmark = pytest.mark.real

RUN = RunId("a1")


def script(text: str, *args: object) -> str:
    """What a program of its own prints; it must end by itself."""
    command = [sys.executable, "-P", "-c", text, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def searched(directory: Path) -> None:
    """Each file is opened, read and closed in this process, as by a tool that looks for a word."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    assert found
    for path in found:
        path.read_bytes()


# ---- the lock of a directory ------------------------------------------------------------------

TRY = """
import asyncio, sys
from runfold import FileStore, StoreLocked
async def main():
    store = FileStore(sys.argv[1])
    print(await store.holder("a1"))
    try:
        async with store.hold("a1"):
            print("held")
    except StoreLocked as locked:
        print(locked.holder)
asyncio.run(main())
"""


async def test_another_process_is_kept_out_after_a_tool_searched_the_folder(tmp_path: Path) -> None:
    async with FileStore(tmp_path).hold(RUN):
        searched(tmp_path)
        holder, tried = script(TRY, tmp_path).splitlines()
        assert holder == tried
        assert holder.startswith(f"process {os.getpid()} on ")
    assert script(TRY, tmp_path).splitlines() == ["None", "held"]


FORKING_HOLDER = """
import asyncio, os, sys
from runfold import FileStore, StoreLocked
async def main():
    store, other = FileStore(sys.argv[1]), FileStore(sys.argv[1])
    mine, childs = os.pipe(), os.pipe()
    async with store.hold("a1"):
        child = os.fork()
        if child == 0:
            os.close(mine[1])
            os.write(childs[1], b".")
            os.read(mine[0], 1)     # lives until the parent is through
            os._exit(0)
        os.read(childs[0], 1)
        try:
            async with other.hold("a1"):
                print("taken away")
        except StoreLocked:
            print("still held")
    print(await other.holder("a1"))
    async with other.hold("a1"):
        print("free")
    os.close(mine[1])
    os.waitpid(child, 0)
asyncio.run(main())
"""


def test_a_forked_child_neither_takes_nor_keeps_its_parents_lock(tmp_path: Path) -> None:
    assert script(FORKING_HOLDER, tmp_path).splitlines() == ["still held", "None", "free"]


FORKED_USER = """
import asyncio, os, sys
from runfold import FileStore, start, state
store = FileStore(sys.argv[1])
asyncio.run(start(store, "a", "hi", run_id="a1"))
child = os.fork()
if child == 0:
    async def main():
        await start(store, "a", "hi", run_id="b1")
        print((await state(store, "a1")).status, flush=True)
    asyncio.run(main())
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print((asyncio.run(state(store, "b1"))).status)
"""


def test_a_store_goes_on_in_a_forked_child(tmp_path: Path) -> None:
    assert script(FORKED_USER, tmp_path).splitlines() == ["running", "running"]


# ---- the server -------------------------------------------------------------------------------


async def test_opening_a_store_whose_stream_forgets_says_so(
    nats_server: NatsServer, namespace: str
) -> None:
    said: list[str] = []

    class Listen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Listen()
    logger = logging.getLogger("runfold")
    logger.addHandler(handler)
    try:
        await provision(nats_server.url, namespace=namespace)
        async with JetStreamStore(nats_server.url, namespace=namespace):
            pass
        assert not [text for text in said if "DEGRADED" in text]
        async with Cli(Path(), nats_server.url, namespace).client() as client:
            js = client.jetstream()
            info = await js.stream_info(f"{namespace.upper()}_JOURNAL_0")
            info.config.max_age = 3600
            await js.update_stream(info.config)
        async with JetStreamStore(nats_server.url, namespace=namespace) as store:
            assert any("max_age" in what for what in store.degraded)
    finally:
        logger.removeHandler(handler)
    assert [text for text in said if "storage DEGRADED" in text and "max_age" in text]


# ---- the command ------------------------------------------------------------------------------


async def test_the_commands_that_show_prints_mean_the_same_store(tmp_path: Path) -> None:
    """A blank in the path and a namespace: through a shell, with nothing in the environment."""
    cli = Cli(tmp_path / "work", None)
    cli.env.pop("RUNFOLD_NAMESPACE")
    cli.env["PATH"] = f"{Path(RUNFOLD).parent}:{cli.env['PATH']}"
    where = ("--store", "my own runs; $HOME", "--namespace", "acme")
    agent = f"{AGENTS}:desk"
    try:
        assert (await cli("run", agent, "--id", "p1", "--input", "x", *where)).code == 3
        shown = await cli("show", "p1", *where)
        (approve,) = [line for line in shown.out.splitlines() if " approve " in line]
        (reject,) = [line for line in shown.out.splitlines() if " reject " in line]
        for line in (approve, reject):
            assert tuple(shlex.split(line)[-len(where) :]) == where
        answered = await (await cli.execute("sh", "-c", approve.strip())).done()
        assert answered.code == 0, answered
        assert (await cli("run", agent, "--id", "p1", *where)).code == 0
        assert len(cli.effects("create_ticket")) == 1
        state_there = await state(FileStore(cli.folder / where[1] / "acme"), "p1")
        assert state_there.status == "completed"
    finally:
        await cli.end()


TALKER = """
import asyncio, subprocess
from pathlib import Path
from runfold import Agent, read
from runfold.testing import ScriptedModel, call, say

@read
async def talk() -> str:
    subprocess.run(["echo", "of a child"], check=True)
    print("of the tool")
    Path("places").open("a").write("talk\\n")
    while Path("hold/talk").exists():
        await asyncio.sleep(0.005)
    return "said"

print("of the module")
agent = Agent("talker", model=ScriptedModel(call("talk"), say("Done.")), tools=[talk])
"""


@pytest.fixture
def talker(on_file: Cli) -> str:
    path = on_file.folder / "talker.py"
    path.write_text(TALKER)
    return f"{path}:agent"


OTHERS = ("of a child", "of the tool", "of the module")


async def test_what_tools_and_their_children_print_is_not_in_the_json(
    on_file: Cli, talker: str
) -> None:
    on_file.env.pop("PYTHONUNBUFFERED", None)  # what is only buffered must not come out later
    done = await on_file.typed("run", talker, "--id", "j1", "--input", "x", "--json")
    assert (done.code, done.json["message"]) == (0, "Done."), done
    assert all(done.err.count(text) == 1 for text in OTHERS), done


async def test_the_json_of_an_interrupted_run_is_one_object_all_the_same(
    on_file: Cli, talker: str
) -> None:
    on_file.hold("talk")
    child = await on_file.start("run", talker, "--id", "j2", "--input", "x", "--json")
    await on_file.reached("talk")
    child.send(signal.SIGINT)
    done = await child.done()
    assert (done.code, done.json["error"]["code"]) == (130, "interrupted"), done
    assert all(text in done.err for text in OTHERS), done
