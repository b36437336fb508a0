"""Backup and restore of a fleet's streams, by the commands of docs/operations.md: what goes on as
if nothing had been, what an older backup would repeat, and the procedure that repeats nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from kit.fleet import WAIT_S, Crew, crew_on
from kit.nats_cli import installed, nats_command
from kit.servers import NatsServer
from kit.waiting import eventually

from journal import doors
from journal.ids import RunId
from journal.records import StepStarted
from journal.shards import shard_of
from journal.stores.provision import provision
from journal.views import AwaitingApproval, Indeterminate, RunState
from runfold.diagnosis import Found, diagnose

pytestmark = pytest.mark.real

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
BACKUP = "backup-2026-11-30"
JOURNALS = ("RUNFOLD_JOURNAL_0", "RUNFOLD_JOURNAL_1")


def blocks(heading: str) -> list[str]:
    """The ```sh blocks of a section."""
    section = re.split(r"^## ", DOCUMENT.read_text(), flags=re.M)
    (text,) = (part for part in section if part.startswith(f"{heading}\n"))
    return [textwrap.dedent(one) for one in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.M | re.S)]


(BACK_UP,) = blocks("Backup")
PUT_BACK, LOOK, LIST, CANCEL, BAR, OF_STREAM_1 = blocks("An older backup")


class Site:
    """A server, a fleet on it, and an operator with a shell in a folder of his own."""

    def __init__(self, server: NatsServer, crew: Crew, folder: Path) -> None:
        self.server = server
        self.crew = crew
        self.folder = folder

    async def types(self, commands: str) -> str:
        """What a block of the document prints; it must succeed."""
        tools = f"{installed(self.folder / 'bin')}:{Path(sys.executable).parent}"
        kept = {name: value for name, value in os.environ.items() if "RUNFOLD" not in name}
        shell = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            commands,
            cwd=self.folder,
            env=kept
            | {
                "PATH": f"{tools}:{os.environ['PATH']}",
                "RUNFOLD_STORE": self.server.url,
                "NATS_URL": self.server.url,
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await shell.communicate()
        assert shell.returncode == 0, (commands, out, err)
        return out.decode()

    async def loses(self, *streams: str) -> None:
        for stream in streams:
            await nats_command(self.server.url, "stream", "rm", stream, "--force")

    async def approve(self, run: str) -> None:
        outcome = (await self.crew.status(run, "awaiting_approval")).outcome
        assert isinstance(outcome, AwaitingApproval)
        await self.crew.fleet.signal(run, "approve", {"marker": outcome.pending[0].marker})

    async def reconcile(self, run: str, **answer: object) -> None:
        outcome = (await self.crew.status(run, "indeterminate")).outcome
        assert isinstance(outcome, Indeterminate)
        await self.crew.fleet.signal(run, "reconcile", {"step": outcome.step, **answer})

    async def is_over(self, run: str) -> RunState:
        async def over() -> RunState | None:
            state = await self.crew.fleet.get(run)
            return state if state.status in ("completed", "cancelled") else None

        return await eventually(over, WAIT_S, what=f"{run} is over")

    async def diagnosis(self) -> dict[str, Found]:
        found = await diagnose(self.crew.store, [], lambda said: None)
        return {one.run: one for one in found.found}


@contextlib.asynccontextmanager
async def site_on(server: NatsServer, folder: Path, crew: str) -> AsyncGenerator[Site]:
    async with crew_on(server.url, "runfold", folder / crew) as found:
        yield Site(server, found, folder)


async def a_fleet_at_work(site: Site) -> None:
    """Runs at every kind of place, in both streams, and a worker that holds some of them."""
    assert {shard_of(RunId(run), 2) for run in ("finished", "between", "inside", "asks")} == {0, 1}
    crew = site.crew
    crew.hold("between")
    crew.hold("write")
    await crew.worker("quick", "reader", "writer", "asker", grace_s=0.2)
    await crew.start("quick", "finished")
    await crew.start("reader", "between")
    await crew.start("writer", "inside")
    await crew.start("asker", "asks")
    await crew.all_completed(["finished"])
    await crew.reaches("between")
    await crew.reaches("write")
    await crew.status("asks", "awaiting_approval")


async def what_came_after_the_backup(site: Site) -> None:
    """All goes on and ends, with another run; then the worker is no more."""
    crew = site.crew
    crew.let_go("between")
    crew.let_go("write")
    await crew.fleet.start("asker", "x", run_id="later")
    for run in ("asks", "later"):
        await site.approve(run)
    await crew.all_completed(["between", "inside", "asks", "later"])
    await crew.workers[0].kill()
    assert writes(site) == {"between": 1, "inside": 1, "asks": 1, "later": 1}


def writes(*sites: Site) -> Counter[str]:
    return Counter(run for site in sites for run, _, _ in site.crew.effects())


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[NatsServer]:
    server = await NatsServer.start(tmp_path / "nats")
    await provision(server.url, shards=2)
    yield server
    await server.stop()


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncGenerator[NatsServer]:
    server = await NatsServer.start(tmp_path / "empty")
    yield server
    await server.stop()


async def test_a_fleet_that_stands_still_is_moved_and_goes_on_as_if_nothing_had_been(
    tmp_path: Path, server: NatsServer, empty: NatsServer
) -> None:
    async with site_on(server, tmp_path, "old") as old:
        await a_fleet_at_work(old)
        old.crew.workers[0].term()
        await old.crew.workers[0].ended()
        await old.types(BACK_UP)
    await nats_command(empty.url, "stream", "restore", str(tmp_path / BACKUP / JOURNALS[0]))
    for stream in (JOURNALS[1], "RUNFOLD_TASKS", "RUNFOLD_SIGNALS", "RUNFOLD_REJECTED"):
        await nats_command(empty.url, "stream", "restore", str(tmp_path / BACKUP / stream))
    async with site_on(empty, tmp_path, "new") as new:
        await new.crew.worker("reader", "writer", "asker")
        await new.approve("asks")
        await new.reconcile("inside", outcome="done", result="seen in the other system")
        await new.crew.all_completed(["finished", "between", "inside", "asks"])
        assert writes(old, new) == {"between": 1, "asks": 1}


async def test_an_older_backup_is_whole_and_a_worker_on_it_repeats_what_came_after_it(
    tmp_path: Path, server: NatsServer, empty: NatsServer
) -> None:
    """Why the procedure is there."""
    async with site_on(server, tmp_path, "old") as old:
        await a_fleet_at_work(old)
        await old.types(BACK_UP)
        await what_came_after_the_backup(old)
    for folder in sorted(tmp_path.joinpath(BACKUP).iterdir()):
        await nats_command(empty.url, "stream", "restore", str(folder))
    async with site_on(empty, tmp_path, "new") as new:
        assert " 0 violations" in await new.types("runfold check --all")
        await new.crew.worker("reader", "writer", "asker")
        await new.crew.all_completed(["between"])
        await new.approve("asks")
        await new.reconcile("inside", outcome="done", result="seen in the other system")
        await new.crew.all_completed(["finished", "inside", "asks"])
        # What had begun is asked about; what had not is made again, under the same keys.
        assert writes(old, new) == {"between": 2, "inside": 1, "asks": 2, "later": 1}
        assert keys(old, "between") == keys(new, "between")
        assert keys(old, "asks") == keys(new, "asks")


def keys(site: Site, run: str) -> list[object]:
    return [key for _, _, key in site.crew.effects(run)]


async def test_the_procedure_for_an_older_backup_repeats_no_write(
    tmp_path: Path, server: NatsServer
) -> None:
    async with site_on(server, tmp_path, "crew") as site:
        await a_fleet_at_work(site)
        await site.types(BACK_UP)
        await what_came_after_the_backup(site)
        await site.loses(*JOURNALS)

        await site.types(PUT_BACK)
        assert " 0 violations" in await site.types(LOOK)
        await site.types(LIST)
        unfinished = tmp_path.joinpath("unfinished.txt").read_text().split()
        assert unfinished == ["asks", "between", "inside"]
        await site.types(CANCEL)
        await site.types(BAR.replace("AGENT", "asker").replace("ID", "later").replace("INPUT", "x"))

        await site.crew.worker("reader", "writer", "asker", sweep_s=0.5)
        await site.reconcile("inside", outcome="retry")
        for run in ("asks", "between", "inside", "later"):
            assert (await site.is_over(run)).status == "cancelled"
        assert not (await site.crew.fleet.start("asker", "x", run_id="later")).created
        assert writes(site) == {"between": 1, "inside": 1, "asks": 1, "later": 1}


async def test_one_journal_stream_of_two_is_put_back_and_the_other_ones_runs_go_on(
    tmp_path: Path, server: NatsServer
) -> None:
    async with site_on(server, tmp_path, "crew") as site:
        crew = site.crew
        crew.hold("between")
        worker = await crew.worker("reader", "parent", sweep_s=0.5)
        old, current, parent = await runs_by_stream(site)
        await nats_command(
            server.url, "stream", "backup", JOURNALS[1], str(tmp_path / BACKUP / JOURNALS[1])
        )
        await crew.start("parent", parent)
        await crew.status(parent, "waiting")
        await worker.kill()
        await site.loses(JOURNALS[1])

        await site.types(PUT_BACK)
        await provision(server.url)
        await site.types(LIST + OF_STREAM_1)
        assert tmp_path.joinpath("of-stream-1.txt").read_text().split() == [old]
        await crew.fleet.cancel(old)

        crew.let_go("between")
        await crew.worker("reader", "parent", sweep_s=0.5)
        assert (await site.is_over(current)).status == "completed"
        assert (await site.is_over(old)).status == "cancelled"
        assert (await site.diagnosis())[parent].problem == "child_gone"
        await crew.fleet.cancel(parent)
        assert (await site.is_over(parent)).status == "cancelled"
        assert writes(site) == {current: 1}


async def runs_by_stream(site: Site) -> tuple[str, str, str]:
    """A run at work in stream 1, one in stream 0; the id of one in 0 whose child is in 1."""
    names = [f"r{number}" for number in range(64)]
    old = next(name for name in names if shard_of(RunId(name), 2) == 1)
    current = next(name for name in names if shard_of(RunId(name), 2) == 0)
    for run in (old, current):
        await site.crew.start("reader", run)
    for run in (old, current):
        await site.crew.until(run, lambda state: state.records >= 4)
    return (
        old,
        current,
        next(
            name
            for name in names
            if shard_of(RunId(name), 2) == 0
            and name != current
            and shard_of(RunId(f"{name}.kid"), 2) == 1
        ),
    )


async def test_doctor_names_a_run_whose_last_records_are_gone(
    tmp_path: Path, server: NatsServer
) -> None:
    """No worker takes it: to each the journal looks like what a deposed leader would answer."""
    async with site_on(server, tmp_path, "crew") as site:
        crew = site.crew
        await doors.start(crew.store, "quick", "x", run_id="r1")
        await crew.store.tasks.publish(RunId("r1"), "quick", cause=7)
        found = (await site.diagnosis())["r1"]
        assert (found.problem, "record 7" in found.what, "record 1" in found.what) == (
            "lost",
            True,
            True,
        )
        worker = await crew.worker("quick")
        await eventually(lambda: "its journal ends at 1" in worker.log, WAIT_S)
        assert not any(isinstance(one, StepStarted) for one in await crew.records("r1"))
