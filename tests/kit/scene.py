"""The demo (deploy/demo.sh) with local processes: three servers, three workers, two bridges, and
the people around them, who have the command line, a plain NATS client, and an eye on the bank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import nats
from cases.zygote import Child, Done, Zygote
from kit.partition import SplitCluster
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.codec import Entry
from journal.fleet import Fleet
from journal.ids import RunId
from journal.records import Claim
from journal.stores.jetstream import JetStreamStore

AGENT = f"{Path(__file__).with_name('demo_held.py')}:agent"
STREAM = "RUNFOLD_JOURNAL_0"
WAIT_S = 60.0
SAID_S = 2.0
"""A plain message that met no leader is gone; it is said again after this long."""


class Process:
    """`runfold worker` or `runfold bridge`."""

    def __init__(self, name: str, child: Child) -> None:
        self.name = name
        self._child = child

    @property
    def log(self) -> str:
        path = self._child.scratch / "err"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    @property
    def running(self) -> bool:
        return not self._child.ended.is_set()

    @property
    def health_url(self) -> str:
        found = re.search(r"(?:health|bridge): (http://[^/\s]+)", self.log)
        return f"{found[1]}/healthz" if found else ""

    async def says(self, text: str) -> None:
        def said() -> bool:
            assert text in self.log or self.running, self.log
            return text in self.log

        await eventually(said, WAIT_S, what=f"{self.name} says {text}")

    async def healthy(self) -> bool:
        return await asyncio.to_thread(_answers_ok, self.health_url)

    def send(self, number: signal.Signals) -> None:
        self._child.kill(number)

    async def ends(self, number: signal.Signals | None = None) -> Done:
        """By that signal, if one is given."""
        if number is not None:
            self.send(number)
        await eventually(lambda: not self.running, WAIT_S, what=f"{self.name} ends")
        return self._child.wait()


def _answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.HTTPError, OSError):
        return False


class Scene:
    """`async with scene_on(tmp_path) as scene`. `homes`: the server whose address
    each process was given; `reachable`: the servers that people can talk to."""

    def __init__(self, split: SplitCluster, zygote: Zygote, folder: Path) -> None:
        self.split = split
        self.processes: list[Process] = []
        self.homes: dict[str, NatsServer] = {}
        self.reachable = split.servers
        self._zygote = zygote
        self._bank = folder / "bank.jsonl"
        self._hold = folder / "hold"
        self._held = folder / "held"
        self._env = {
            "DEMO_LEDGER": str(self._bank),
            "DEMO_HOLD": str(self._hold),
            "DEMO_HELD": str(self._held),
        }

    # ---- processes ----------------------------------------------------------------------------

    @property
    def workers(self) -> list[Process]:
        return [one for one in self.processes if one.name.startswith("w") and one.running]

    async def worker(self, name: str, home: NatsServer) -> Process:
        words = ["--ack-wait", "2", "--grace", "5", "--name", name, "--health", "127.0.0.1:0"]
        return await self._begin(name, home, "worker", AGENT, *words)

    async def bridge(self, name: str, home: NatsServer) -> Process:
        return await self._begin(name, home, "bridge", "--no-auth", "--listen", "127.0.0.1:0")

    async def _begin(self, name: str, home: NatsServer, *words: str) -> Process:
        child = self._zygote.cli(*words, "--store", home.url, env=self._env)
        process = Process(name, child)
        self.homes[name] = home
        self.processes.append(process)
        await process.says("is ready" if words[0] == "worker" else "bridge: http")
        return process

    async def holder(self, run: str) -> Process:
        """Whose claim the run is under."""
        claim = (await self._claims(run))[-1]
        (found,) = (one for one in self.workers if claim.worker.startswith(f"{one.name}-"))
        return found

    async def _claims(self, run: str) -> list[Claim]:
        entries = await self.entries(run)
        return [entry.record for entry in entries if isinstance(entry.record, Claim)]

    # ---- people -------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return ",".join(server.url for server in self.reachable)

    async def runfold(self, *words: str, codes: Sequence[int] = (0,), store: str = "") -> Any:
        """The command's `--json`."""
        child = self._zygote.cli(*words, "--json", "--store", store or self.url)
        await eventually(child.ended.is_set, WAIT_S, what=f"{words} ends")
        done = child.wait()
        assert done.code in codes, (words, done)
        return json.loads(done.out) if done.out else None

    @contextlib.asynccontextmanager
    async def fleet(self) -> AsyncGenerator[Fleet]:
        """To look at runs more often than a command is quick."""
        async with JetStreamStore(self.url) as store:
            yield Fleet(store, by="the test")

    async def entries(self, run: str) -> tuple[Entry, ...]:
        async with JetStreamStore(self.url) as store:
            return (await store.load(RunId(run))).entries

    async def are(self, runs: Sequence[str], *statuses: str) -> None:
        async with self.fleet() as fleet:
            for run in runs:

                async def there(run: str = run) -> bool:
                    return (await fleet.get(run)).status in statuses

                await eventually(there, WAIT_S, what=f"{run} is {' or '.join(statuses)}")

    async def approve(self, *runs: str) -> None:
        """`nats pub runfold.signal.<run>.approve '{"marker": …}'`, by a client that knows nothing
        of Runfold. Said again until it was heard: the same approval twice is one."""
        inbox = await self.runfold("inbox")
        markers = {one["run"]: one["marker"] for one in inbox if one["kind"] == "approval"}
        client: Any = await nats.connect([one.url for one in self.reachable])
        try:
            async with self.fleet() as fleet:
                for run in runs:
                    await self._said(client, fleet, run, markers[run])
        finally:
            await client.close()

    async def _said(self, client: Any, fleet: Fleet, run: str, marker: str) -> None:
        async def heard() -> bool:
            return (await fleet.get(run)).status != "awaiting_approval"

        for _ in range(int(WAIT_S / SAID_S)):
            await client.publish(
                f"runfold.signal.{run}.approve", json.dumps({"marker": marker}).encode()
            )
            await client.flush()
            with contextlib.suppress(AssertionError):
                await eventually(heard, SAID_S)
                return
        raise AssertionError(f"nobody heard that {run} is approved")

    async def settle(self) -> list[str]:
        """The operator: each payment of which nobody knows is looked up at the bank; it happened,
        or it may be made again. Which runs those were."""
        unknown = [one for one in await self.runfold("inbox") if one["kind"] == "reconcile"]
        for one in unknown:
            about = ("reconcile", one["run"], one["step"], "--start", str(one["start"]))
            paid = self.payments(one["run"])
            how = ("--done-text", f"PAID-{paid}") if paid else ("--retry",)
            await self.runfold(*about, *how, codes=(0, 8))  # 8: it is known by now
        return [one["run"] for one in unknown]

    async def all_paid(self, runs: Sequence[str]) -> None:
        """Until they have completed; the operator settles what is unknown meanwhile."""
        async with self.fleet() as fleet:

            async def ended() -> bool:
                found = [(await fleet.get(run)).status for run in runs]
                assert not {"failed", "cancelled", "damaged"} & set(found), found
                if "indeterminate" in found:
                    await self.settle()
                return set(found) == {"completed"}

            await eventually(ended, 2 * WAIT_S, what=f"{runs} have completed")

    # ---- the bank -----------------------------------------------------------------------------

    def payments(self, run: str) -> int:
        """How often money moved for it."""
        text = self._bank.read_text() if self._bank.exists() else ""
        lines = [json.loads(line) for line in text.rpartition("\n")[0].split("\n") if line]
        return sum(line["run"] == run for line in lines)

    def hold(self) -> None:
        """From now on payments stay as they are in the middle."""
        self._held.unlink(missing_ok=True)
        self._hold.touch()

    def let_go(self) -> None:
        self._hold.unlink()

    async def in_the_middle(self, count: int) -> None:
        def there() -> bool:
            return self._held.exists() and self._held.read_text().count("\n") == count

        await eventually(there, WAIT_S, what=f"{count} payments are in the middle")

    # ---- the end ------------------------------------------------------------------------------

    async def each(self, condition: Callable[[Process], Any], what: str) -> None:
        for process in [one for one in self.processes if one.running]:

            async def met(process: Process = process) -> bool:
                assert process.running, process.log
                return bool(await condition(process))

            await eventually(met, WAIT_S, what=f"{process.name} {what}: {process.log[-500:]}")

    async def end(self) -> None:
        for process in self.processes:
            if process.running:
                await process.ends(signal.SIGKILL)


@contextlib.asynccontextmanager
async def scene_on(folder: Path) -> AsyncGenerator[Scene]:
    with Zygote() as zygote:
        split = await SplitCluster.start(folder / "servers")
        scene = Scene(split, zygote, folder)
        try:
            yield scene
        finally:
            await scene.end()
            await split.stop()
