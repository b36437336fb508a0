"""`RUNFOLD_LOG=json`: what a worker and a bridge say on stderr is one JSON object a line (R73)."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.cli import AGENTS, RUNFOLD, Cli, Executed
from kit.waiting import eventually

from runfold.dev_bridge import _address

pytestmark = pytest.mark.real


class Speaking:
    """A command that runs, and each line it has said."""

    def __init__(self, child: Executed, err: Path) -> None:
        self.child = child
        self._err = err

    @property
    def lines(self) -> list[dict[str, Any]]:
        if not self._err.exists():
            return []
        whole = self._err.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    async def says(self, text: str) -> dict[str, Any]:
        def said() -> dict[str, Any] | None:
            return next((line for line in self.lines if text in line["message"]), None)

        return await eventually(said, 30, what=f"it says {text}")

    async def stopped(self) -> int:
        self.child.send(signal.SIGTERM)
        return (await self.child.done()).code


async def speaking(cli: Cli, *words: str) -> Speaking:
    err = f"{words[0]}.err"
    child = await cli.execute("bash", "-c", f'exec "$0" "$@" 2> {err}', RUNFOLD, *words)
    return Speaking(child, cli.folder / err)


async def test_a_worker_says_of_each_line_who_says_it_and_of_which_run(on_jetstream: Cli) -> None:
    cli = on_jetstream
    cli.hold("tick")
    words = ("--log-format", "json", "--name", "w", "--grace", "0")
    worker = await speaking(cli, "worker", f"{AGENTS}:clock", *words)
    ready = await worker.says("is ready")
    assert re.fullmatch(r"w-\d+-[0-9a-f]{8}", ready["worker"]) and ready["level"] == "info"
    await cli("start", "clock", "--input", "x", "--id", "c1")
    await cli.reached("tick")
    assert await worker.stopped() == 0
    cut_off = await worker.says("run c1 did not come to its next step")
    assert (cut_off["run"], cut_off["level"], cut_off["worker"]) == (
        "c1",
        "warning",
        ready["worker"],
    )
    assert (await worker.says("is stopping"))["level"] == "info"
    assert all(line["time"].endswith("Z") for line in worker.lines)


async def test_a_bridge_says_each_request_but_the_probes(on_jetstream: Cli) -> None:
    cli = on_jetstream
    cli.env["RUNFOLD_LOG"] = "json"
    bridge = await speaking(cli, "bridge", "--no-auth", "--listen", "127.0.0.1:0")
    address = (await bridge.says("bridge: http"))["message"].removeprefix("bridge: ")
    async with httpx.AsyncClient(base_url=address, timeout=30) as client:
        for path in ("/healthz", "/runs", "/x%0A%7B%22level%22:1%7D%1b[2J", "/readyz"):
            await client.get(path)
    assert await bridge.stopped() == 0
    told = [line for line in bridge.lines if line["logger"] == "runfold.access"]
    assert [(line["method"], line["path"], line["status"]) for line in told] == [
        ("GET", "/runs", 200),
        ("GET", '/x\n{"level":1}\x1b[2J', 404),
    ]
    assert all(line["seconds"] >= 0 for line in told)


async def test_a_command_that_cannot_begin_says_why_in_one_object(on_jetstream: Cli) -> None:
    cli = on_jetstream
    done = await cli("worker", "missing.py:agent", "--log-format", "json")
    assert done.code == 2
    line = json.loads(done.err)
    assert (line["level"], line["code"]) == ("error", "usage")


@pytest.mark.parametrize(
    ("line", "address"),
    [
        (b"runfold: bridge: http://127.0.0.1:8787", "http://127.0.0.1:8787"),
        (b'{"time":"x","message":"bridge: http://[::1]:80","worker":"w"}', "http://[::1]:80"),
        (b"runfold: bridge is stopping", ""),
        (b'{"message":"run x: bridge: http://127.0.0.1:8787"}', ""),
        (b"bridge: http://127.0.0.1:8787", ""),
    ],
)
def test_dev_finds_the_bridges_address_in_either(line: bytes, address: str) -> None:
    assert _address(line) == address
