"""Two releases of Runfold side by side: the newer one writes a type of record that the older one
does not know. The older one leaves such a run alone, and everything else goes on (R18, R51).
"""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cases.zygote import Done, Zygote
from kit.fleet import zygote
from kit.ledger import Ledger
from kit.newer import RELEASE as NEWER
from kit.scene import Process
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.fleet import Fleet
from journal.ids import RunId
from journal.records import RELEASE, Claim
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.stores.tasks_message import consumer_name

pytestmark = pytest.mark.real

AGENT = f"{Path(__file__).parents[1] / 'kit' / 'upgrade_agents.py'}:clerk"
WAIT_S = 60.0


class Upgrade:
    """A namespace, its workers of both releases, and the command lines of both."""

    def __init__(self, url: str, namespace: str, folder: Path, store: JetStreamStore) -> None:
        self.fleet = Fleet(store, by="test")
        self.store = store
        self._where = ["--store", url, "--namespace", namespace]
        self._folder = folder
        self._zygote: Zygote = zygote()
        self._processes: list[Process] = []
        (folder / "hold").mkdir(parents=True)

    async def worker(self, name: str, *, newer: bool = False, revisions: str = "1") -> Process:
        args = ["worker", AGENT, "--ack-wait", "1", "--grace", "20", "--health", "127.0.0.1:0"]
        args += ["--name", name, *self._where]
        env = {
            "UPGRADE_FOLDER": str(self._folder),
            "UPGRADE_WORKER": name,
            "UPGRADE_REVISIONS": revisions,
        }
        if newer:
            child = self._zygote.call("kit.newer:cli", args=args, env=env)
        else:
            child = self._zygote.cli(*args, env=env)
        process = Process(name, child)
        self._processes.append(process)
        await process.says("is ready")
        return process

    async def cli(self, *words: str, newer: bool = False) -> Done:
        args = [*words, *self._where]
        if newer:
            child = self._zygote.call("kit.newer:cli", args=args, env={})
        else:
            child = self._zygote.cli(*args)
        await eventually(child.ended.is_set, WAIT_S, what=f"{words} ends")
        return child.wait()

    # ---- what agents left (kit.fleet_agents) ----------------------------------------------------

    def hold(self) -> None:
        (self._folder / "hold" / "between").touch()

    def let_go(self) -> None:
        (self._folder / "hold" / "between").unlink()

    async def between(self, times: int) -> None:
        places = self._folder / "places"

        def there() -> bool:
            return places.exists() and places.read_text().count("between ") >= times

        await eventually(there, WAIT_S, what=f"{times} runs are between their writes")

    def effects(self, run: str) -> list[str]:
        return [step for _, step, _ in Ledger(self._folder / "effects").lines(run)]

    # ---- runs ---------------------------------------------------------------------------------

    async def start(self, run: str, *, notes: bool) -> str:
        await self.fleet.start("clerk", {"notes": notes}, run_id=run)
        return run

    async def claims(self, run: str) -> list[Claim]:
        records = (await self.store.load(RunId(run))).records
        return [record for record in records if isinstance(record, Claim)]

    async def types(self, run: str) -> list[str]:
        return [entry.type for entry in (await self.store.load(RunId(run))).entries]

    async def completed(self, *runs: str) -> None:
        """By the word that each run's last record carries, which any release can read."""

        async def all_are() -> bool:
            heads = {run: status async for run, status in self.store.heads()}
            return all(heads.get(RunId(run)) == "completed" for run in runs)

        await eventually(all_are, WAIT_S, what=f"{runs} have completed")

    async def end(self) -> None:
        for process in self._processes:
            if process.running:
                await process.ends(signal.SIGKILL)


@pytest.fixture
async def upgrade(
    nats_server: NatsServer, namespace: str, tmp_path: Path
) -> AsyncIterator[Upgrade]:
    await provision(nats_server.url, namespace=namespace)
    async with JetStreamStore(nats_server.url, namespace=namespace) as store:
        upgrade = Upgrade(nats_server.url, namespace, tmp_path / "left", store)
        try:
            yield upgrade
        finally:
            await upgrade.end()


async def drained(process: Process) -> None:
    """It was told to stop."""
    assert (await process.ends()).code == 0, process.log


async def left_by_a_newer_worker(upgrade: Upgrade, run: str) -> None:
    """Between its writes, with a `step.noted`; its worker was stopped in order."""
    upgrade.hold()
    newer = await upgrade.worker("new-1", newer=True)
    await upgrade.start(run, notes=True)
    await upgrade.between(1)
    newer.send(signal.SIGTERM)
    await newer.says("is stopping")
    upgrade.let_go()
    await drained(newer)
    types = await upgrade.types(run)
    assert (types.count("step.noted"), types[-1]) == (1, "release")
    assert upgrade.effects(run) == ["0/0"]


async def test_an_older_worker_leaves_a_newer_ones_run_alone_and_works_on_the_others(
    upgrade: Upgrade,
) -> None:
    await left_by_a_newer_worker(upgrade, "noted")
    before = await upgrade.store.load(RunId("noted"))
    old = await upgrade.worker("old-1")
    await is_offered_again_and_again(upgrade)
    plain = [await upgrade.start(f"plain-{n}", notes=False) for n in range(3)]
    await upgrade.completed(*plain)
    assert await old.healthy(), old.log
    assert "noted" not in old.log, old.log
    assert (await upgrade.store.load(RunId("noted"))).entries == before.entries

    await upgrade.worker("new-2", newer=True)
    await upgrade.completed("noted")
    assert upgrade.effects("noted") == ["0/0", "0/1"]
    old.send(signal.SIGTERM)
    await drained(old)
    await upgrade.completed(await upgrade.start("after", notes=True))
    for run in plain:
        assert upgrade.effects(run) == ["0/0", "0/1"]
    checked = await upgrade.cli("check", "--all", "--json", newer=True)
    assert (checked.code, checked.json["violations"], checked.json["newer"]) == (0, [], [])
    assert checked.json["runs"] == 5


async def is_offered_again_and_again(upgrade: Upgrade) -> None:
    """Its task is given back each time."""
    stream = f"{upgrade.store.namespace.upper()}_TASKS"

    async def again() -> bool:
        subject = f"$JS.API.CONSUMER.INFO.{stream}.{consumer_name('clerk', 0)}"
        reply: Any = await upgrade.store._connection.request(subject, b"", timeout_s=5)
        return bool(json.loads(reply.data)["delivered"]["consumer_seq"] >= 5)

    await eventually(again, WAIT_S, what="the run is offered five times")


async def test_where_only_older_workers_are_left_it_is_said_which_release_the_run_needs(
    upgrade: Upgrade,
) -> None:
    await left_by_a_newer_worker(upgrade, "noted")
    await upgrade.worker("old-1")
    records = (await upgrade.store.load(RunId("noted"))).entries

    shown = await upgrade.cli("show", "noted")
    assert shown.code == 1
    (line,) = [line for line in shown.out.splitlines() if "newer  " in line]
    assert line.endswith("step.noted: this version knows no such type; update this installation")
    raw = next(entry.raw for entry in records if entry.type == "step.noted")
    assert raw.decode()[:100] in shown.out
    shape = (await upgrade.cli("show", "noted", "--json")).json
    assert (shape["status"], shape["waiting_on"][0]["what"]) == ("newer", "operator")
    listed = (await upgrade.cli("list", "--json")).json["runs"]
    assert [(one["run"], one["status"]) for one in listed] == [("noted", "newer")]
    (problem,) = (await upgrade.cli("doctor", "--json")).json["runs"]
    assert problem["problem"] == "newer"
    assert f"(Runfold {NEWER})" in problem["what"] and "step.noted" in problem["what"]
    assert f"connected are workers of {RELEASE}" in problem["fix"]
    assert f"Runfold {RELEASE}" in (await upgrade.cli("workers")).out

    checked = await upgrade.cli("check", "noted", "--json")
    assert (checked.code, checked.json["violations"], checked.json["newer"]) == (1, [], ["noted"])
    exported = await upgrade.cli("export", "noted")
    assert exported.out.encode() == b"".join(entry.raw + b"\n" for entry in records)
    refused = await upgrade.cli("cancel", "noted", "--json")
    assert (refused.code, refused.json["error"]["code"]) == (1, "newer_version")
    assert (await upgrade.store.load(RunId("noted"))).entries == records


async def test_a_rolling_upgrade_under_load_loses_and_repeats_nothing(upgrade: Upgrade) -> None:
    """Runfold's release and the agent's revision change at once, one worker after the other. What
    was begun under the old revision is bound to it, and the new one says that it is compatible."""
    old = [await upgrade.worker(f"old-{n}") for n in range(2)]
    upgrade.hold()
    runs = [await upgrade.start(f"early-{n}", notes=True) for n in range(6)]
    await upgrade.between(6)
    for number, process in enumerate(old):
        await upgrade.worker(f"new-{number}", newer=True, revisions="2,1")
        runs += [await upgrade.start(f"late-{number}-{n}", notes=True) for n in range(4)]
        await upgrade.between(6 + 4 * (number + 1))
        process.send(signal.SIGTERM)
        await process.says("is stopping")
        upgrade.let_go()
        await drained(process)
        upgrade.hold()
    upgrade.let_go()
    await upgrade.completed(*runs)
    for run in runs:
        assert upgrade.effects(run) == ["0/0", "0/1"], run
    claims = [claim for run in runs for claim in await upgrade.claims(run)]
    assert {claim.runfold for claim in claims} == {RELEASE, NEWER}
    assert {claim.revision for claim in claims} == {"1", "2"}
    assert all(claim.reason in ("new", "wake") for claim in claims), "no worker was lost"
    checked = await upgrade.cli("check", "--all", "--json", newer=True)
    assert (checked.code, checked.json["violations"], checked.json["runs"]) == (0, [], len(runs))
