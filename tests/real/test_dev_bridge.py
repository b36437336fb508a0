"""The bridge of `runfold dev`: its address, its crashes, its port, its end (R69)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.cli import AGENTS, RUNFOLD, Cli, Executed, nothing_runs_in
from kit.waiting import eventually

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

PORT = 8787
# A user's file of this name must not be taken for our package (STYLE 3).
SHADOWS = "raise SystemExit('the wrong bridge was imported')\n"
WITHOUT_UVICORN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "uvicorn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


class Dev:
    """`runfold dev` in a terminal; what it says stands in files."""

    def __init__(self, cli: Cli, child: Executed) -> None:
        self.cli = cli
        self.child = child

    def said(self) -> str:
        paths = (self.cli.folder / name for name in ("out", "err"))
        return "".join(path.read_text() for path in paths if path.exists())

    async def says(self, text: str) -> None:
        await eventually(
            lambda: text in self.said() or not self.child.running, 30, what=f"it says {text}"
        )
        assert text in self.said(), self.said()

    @property
    def address(self) -> str:
        found = re.search(r"^open (http://\S+) to watch, approve, reconcile$", self.said(), re.M)
        assert found is not None, self.said()
        return found[1]

    @property
    def state(self) -> dict[str, Any]:
        return json.loads(self.cli.folder.joinpath(".runfold", "server.json").read_bytes())

    def pid(self, command: str) -> int:
        """Of its child that does this."""
        children = Path(f"/proc/{self.child.pid}/task/{self.child.pid}/children").read_text()
        for word in children.split():
            words = Path(f"/proc/{word}/cmdline").read_bytes().split(b"\0")
            if command.encode() in words:
                return int(word)
        raise AssertionError(f"no {command} among {children}")

    async def ends(self) -> None:
        """With 0, and nothing of it is left."""
        self.child.send(signal.SIGINT)
        done = await self.child.done()
        assert done.code == 0, self.said()
        assert "Traceback" not in self.said()
        await nothing_is_left(self.cli)


async def nothing_is_left(cli: Cli) -> None:
    await nothing_runs_in(cli.folder)
    await nothing_runs_in(cli.folder / ".runfold")


async def begin(cli: Cli, *words: str) -> Dev:
    line = 'exec "$0" "$@" > out 2> err'
    agent = f"{AGENTS}:desk"
    child = await cli.execute("bash", "-c", line, RUNFOLD, "dev", agent, "--grace", "0", *words)
    dev = Dev(cli, child)
    await dev.says("is ready")
    return dev


async def status(url: str) -> int:
    """Of a GET; 0 where nobody listens."""
    async with httpx.AsyncClient(timeout=10) as client:
        try:
            return (await client.get(url)).status_code
        except httpx.ConnectError:
            return 0


@pytest.fixture
def cli(embedded: Cli) -> Cli:
    return embedded


@pytest.fixture
async def taken() -> AsyncIterator[int]:
    """A port that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


async def test_dev_says_where_the_page_is_and_takes_it_away_at_its_end(cli: Cli) -> None:
    for name in ("bridge.py", "worker.py"):
        cli.folder.joinpath(name).write_text(SHADOWS)
    cli.env |= {"RUNFOLD_TOKENS_FILE": "nowhere", "RUNFOLD_STORE": "nats://127.0.0.1:1"}
    dev = await begin(cli)
    del cli.env["RUNFOLD_STORE"]
    assert dev.state["http"] == dev.address and dev.state["url"].startswith("nats://")
    assert await asyncio.gather(status(f"{dev.address}/healthz"), status(dev.address)) == [200, 200]
    http = cli.on(dev.address)
    asked = await http("start", "desk", "--input", "x", "--id", "a1", "--wait", "30", "--json")
    assert asked.code == 3, asked
    follower = await cli.start("follow", "a1")
    assert (await http("approve", asked.json["pending"][0]["marker"])).code == 0
    followed = await follower.done()
    assert followed.code == 0, followed
    shown = [json.loads(line) for line in (await cli("follow", "a1", "--json")).out.splitlines()]
    assert [one["by"] for one in shown if one["type"] == "signal"] == ["dev"]
    address = dev.address
    await dev.ends()
    assert not cli.folder.joinpath(".runfold", "server.json").exists()
    assert await status(address) == 0
    assert "is stopping" in dev.said() and "--tokens" not in dev.said()


async def test_the_next_free_port_is_taken_and_a_crashed_bridge_comes_back_there(
    cli: Cli,
) -> None:
    with socket.socket() as first:
        try:
            first.bind(("127.0.0.1", PORT))
            first.listen()
        except OSError:  # somebody else has it: as good
            pass
        dev = await begin(cli)
    host, _, port = dev.address.rpartition(":")
    assert host == "http://127.0.0.1" and int(port) > PORT
    worker = dev.pid("worker")
    os.kill(dev.pid("bridge"), signal.SIGKILL)
    await dev.says("the bridge ended (signal SIGKILL); starting it again in 1 s")
    await dev.says(f"the bridge is back at {dev.address}")
    assert await status(f"{dev.address}/healthz") == 200
    assert dev.pid("worker") == worker
    bridge = dev.pid("bridge")
    os.kill(worker, signal.SIGKILL)
    await eventually(lambda: dev.said().count("is ready") == 2, 30)
    assert dev.pid("bridge") == bridge
    await dev.child.kill()
    await nothing_is_left(cli)


async def test_an_address_that_can_not_be_had_ends_dev_with_2(cli: Cli, taken: int) -> None:
    cases = [
        (["--listen", f"127.0.0.1:{taken}"], "Address already in use"),
        (["--listen", "0.0.0.0:0"], "this machine only"),
        (["--listen", "1", "--no-bridge"], "exclude"),
    ]
    for words, text in cases:
        done = await (await cli.execute(RUNFOLD, "dev", f"{AGENTS}:desk", *words)).done()
        assert done.code == 2 and text in done.err, done
        assert "Traceback" not in done.err and "is ready" not in done.err
        await nothing_is_left(cli)


async def test_without_the_extra_dev_says_how_to_get_it_and_goes_on(cli: Cli) -> None:
    cli.folder.joinpath("site").mkdir()
    cli.folder.joinpath("site", "sitecustomize.py").write_text(WITHOUT_UVICORN)
    cli.env["PYTHONPATH"] = str(cli.folder / "site")
    dev = await begin(cli)
    assert "uvicorn (pip install 'runfold[bridge]')" in dev.said()
    assert "http://" not in dev.said() and "http" not in dev.state
    await dev.ends()


async def test_the_address_stands_there_for_as_long_as_dev_does(cli: Cli) -> None:
    """Also where another program of this folder keeps the server, and over the server's crash."""
    dev = await begin(cli, "--listen", "0")
    line = ("worker", f"{AGENTS}:clock", "--name", "other")
    other = await cli.execute("bash", "-c", 'exec "$0" "$@" 2> other.err', RUNFOLD, *line)
    path = cli.folder / "other.err"
    await eventually(lambda: path.exists() and "is ready" in path.read_text(), 30)
    before = dev.state
    os.kill(before["pid"], signal.SIGKILL)
    await eventually(lambda: dev.state["pid"] != before["pid"], 30)
    assert dev.state == before | {"pid": dev.state["pid"]}
    assert await eventually(lambda: status(f"{dev.address}/healthz"), 30)
    dev.child.send(signal.SIGTERM)
    assert (await dev.child.done()).code == 0, dev.said()
    assert "http" not in dev.state and dev.state["url"] == before["url"]
    other.send(signal.SIGTERM)
    assert (await other.done()).code == 0
    await nothing_is_left(cli)
