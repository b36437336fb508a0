"""`runfold purge`: what is removed, and what is kept and why; with copies; killed (R15)."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.cli import Cli, Done
from kit.guarded import Guarded, environ, guarded_server
from kit.servers import NatsServer
from kit.waiting import eventually

from journal import retaining
from journal.doors import start
from journal.errors import RunNotFound
from journal.fleet import Fleet
from journal.ids import RunId
from journal.retaining import keep_retaining
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from journal.terms import Complete
from worker.agent import turn
from worker.context import Context
from worker.service import Worker

pytestmark = pytest.mark.real

NOW = ("--finished", "--older-than", "0s")
KILLED = """
import os, signal, sys
import runfold.cli
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore

async def trim(self, run_id, *, before):
    os.kill(os.getpid(), signal.SIGKILL)

FileStore.trim = JetStreamStore.trim = trim
sys.argv = ["runfold", *sys.argv[1:]]
runfold.cli.main()
"""
"""The command, killed between the tombstone and what is removed behind it."""


def outcome(done: Done) -> list[tuple[str, str]]:
    """Each run that is named, and what became of it."""
    assert done.json.keys() == {"purged", "due", "kept", "runs", "unlisted"}, done
    return [(one["run"], one["why"] or one["what"]) for one in done.json["runs"]]


async def types(cli: Cli, run: str) -> list[str]:
    return [entry.type for entry in await cli.entries(run)]


async def test_a_run_is_purged_by_name_and_its_id_stays_used(cli: Cli) -> None:
    await cli.run("p1", "quick")
    await cli.run("d1")
    done = await cli("purge", "p1", "--json")
    assert (done.code, outcome(done)) == (0, [("p1", "purged")])
    assert await types(cli, "p1") == ["run.purged"]
    lines = [["list", "--json"], ["show", "p1"], ["purge", "d1"], ["purge", "no"]]
    listed, shown, waits, missing = await cli.forked(lines, at_once=4)
    assert [run["run"] for run in listed.json["runs"]] == ["d1"]
    assert (shown.code, waits.code, missing.code) == (8, 8, 8)
    assert "p1 was purged" in shown.line and "only finished runs are purged" in waits.line
    again, purged = await cli.run("p1", "quick"), await cli("purge", "p1", "--json")
    assert (again.code, "its id stays used" in again.line) == (8, True)
    assert (purged.code, outcome(purged)) == (0, [("p1", "finished")])


async def test_finished_runs_are_purged_once_their_copies_are_there(cli: Cli) -> None:
    for run in ("p1", "p2"):
        await cli.run(run, "quick")
    await cli.run("d1")
    assert (await cli("export", "p1", "-o", "p1.jsonl")).code == 0
    young, dry = await cli.forked(
        [["purge", "--finished", "--json"], ["purge", *NOW, "--dry-run", "--json"]], at_once=2
    )
    assert (young.code, young.json["purged"], len(await types(cli, "p1")) > 1) == (0, 0, True)
    assert (dry.json["due"], outcome(dry)) == (2, [("p1", "due"), ("p2", "due")])
    done = await cli("purge", *NOW, "--export", "copies", "--json")
    assert (done.code, outcome(done)) == (0, [("p1", "purged"), ("p2", "purged")])
    copies = cli.folder / "copies"
    assert sorted(path.name for path in copies.iterdir()) == ["p1.jsonl", "p2.jsonl"]
    assert (copies / "p1.jsonl").read_bytes() == (cli.folder / "p1.jsonl").read_bytes()
    checked, audited = await cli.forked(
        [["check", "copies/p1.jsonl", "copies/p2.jsonl"], ["check", "--all"]], at_once=2
    )
    assert (checked.code, audited.code) == (0, 0)
    assert [len(await types(cli, run)) > 1 for run in ("p1", "p2", "d1")] == [False, False, True]


async def test_a_run_is_kept_where_its_copy_can_not_be(cli: Cli) -> None:
    await cli.run("p1", "quick")
    copies = cli.folder / "copies"
    copies.mkdir()
    copies.joinpath("p1.jsonl").write_text("another store's run of that name\n")
    before = await cli.contents()
    done = await cli("purge", *NOW, "--export", "copies", "--json")
    assert (done.code, outcome(done)) == (1, [("p1", "archive")])
    assert [path.name for path in copies.iterdir()] == ["p1.jsonl"]
    copies.joinpath("p1.jsonl").write_text("")  # the beginning of a copy, as of one that was cut
    taken = await cli("purge", "p1", "--export", "p1.file")
    assert taken.code == 0 and (cli.folder / "p1.file" / "p1.jsonl").exists()
    assert await types(cli, "p1") == ["run.purged"]
    assert before != await cli.contents()


async def test_a_store_is_no_folder_for_its_own_copies(on_file: Cli) -> None:
    await on_file.run("p1", "quick")
    before = await on_file.contents()
    for folder in ("runs", str(on_file.folder / "x" / ".." / "runs")):
        done = await on_file("purge", *NOW, "--export", folder)
        assert (done.code, "is the store itself" in done.line) == (2, True)
    assert await on_file.contents() == before


async def test_what_an_audit_finds_fault_with_is_named_and_kept(cli: Cli) -> None:
    await cli.run("d1")
    about = {"action": "cancel", "reason": "out of nowhere", "at": "2026-01-01T00:00:00.000Z"}
    await cli.append_chained("d1", "commit", **about)
    await cli.run("p1", "quick")
    done = await cli("purge", *NOW, "--json")
    assert done.code == 1 and ("p1", "purged") in outcome(done)
    named = dict(outcome(done))["d1"]
    assert named in ("flawed", "damaged") and len(await types(cli, "d1")) > 1
    forced = await cli("purge", "d1", "--force")
    assert (forced.code == 0) == (named == "flawed"), forced


async def test_a_purge_killed_behind_its_tombstone_is_finished_by_the_next(cli: Cli) -> None:
    await cli.run("p1", "quick")
    records = len(await cli.entries("p1"))
    killed = await (await cli.execute(sys.executable, "-c", KILLED, "purge", "p1")).done()
    assert killed.code == -signal.SIGKILL
    left = await types(cli, "p1")
    assert (left[0], left[-1], len(left)) == ("run.started", "run.purged", records + 1)
    lines = [
        ["list", "--json"],
        ["list", "--status", "completed", "--json"],
        ["inbox", "--json"],
        ["show", "p1"],
        ["follow", "p1"],
        ["send", "p1", "hello"],
        ["cancel", "p1"],
        ["check", "--all"],
    ]
    listed, completed, inbox, *gone, checked = await cli.forked(lines, at_once=4)
    assert listed.json["runs"] == completed.json["runs"] == inbox.json == []
    for done in gone:
        assert (done.code, "p1 was purged" in done.err) == (8, True), done
    assert checked.code == 0
    done = await cli("purge", "--finished", "--json")  # whatever its age
    assert (done.code, outcome(done)) == (0, [("p1", "finished")])
    assert await types(cli, "p1") == ["run.purged"]


async def test_a_command_line_that_means_nothing_is_refused(on_file: Cli, all_refused: Any) -> None:
    purge = ["purge"]
    await all_refused(
        on_file,
        [
            (purge, 2, "usage"),
            ([*purge, "p1", "--finished"], 2, "usage"),
            ([*purge, "p1", "--older-than", "1d"], 2, "usage"),
            ([*purge, "p1", "--status", "failed"], 2, "usage"),
            ([*purge, "--finished", "--older-than", "30"], 2, "usage"),
            ([*purge, "--finished", "--older-than", "-1d"], 2, "usage"),
            ([*purge, "--finished", "--older-than", "999999w"], 2, "usage"),
            ([*purge, "--finished", "--status", "running"], 2, "usage"),
            ([*purge, "--finished", "--after", "../x"], 2, "invalid_id"),
            ([*purge, "../x"], 2, "invalid_id"),
        ],
    )


# ---- workers ------------------------------------------------------------------------------------


@turn("brief")
async def brief(ctx: Context) -> Complete:
    return Complete("Done.")


async def test_a_worker_that_is_told_to_purges_what_has_ended(
    nats_server: NatsServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retaining, "RETAIN_S", 0.02)
    await provision(nats_server.url, namespace=namespace)
    worker = Worker(nats_server.url, [brief], namespace=namespace, retain_s=0)
    serving = asyncio.create_task(worker.serve())

    async with JetStreamStore(nats_server.url, namespace=namespace) as store:
        await Fleet(store).start("brief", "hello", run_id="p1")

        async def purged() -> bool:
            entries = (await store.load(RunId("p1"))).entries
            return [entry.type for entry in entries] == ["run.purged"]

        await eventually(purged, 15)
    await worker.stop()
    await serving


async def test_who_may_not_purge_says_so_and_marks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A tombstone that nothing is removed behind would hide a run and free nothing."""
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    server = await guarded_server(tmp_path)
    try:
        guarded = Guarded(server)
        await provision(guarded.url("admin"))
        monkeypatch.setattr(retaining, "RETAIN_S", 0.02)
        async with guarded.store("worker") as store:
            await start(store, "a", "hello", run_id="p1")
            with caplog.at_level(logging.ERROR, "runfold"):
                await keep_retaining(store, 0, by="w1")
            assert "STREAM.PURGE.RUNFOLD_JOURNAL_0" in caplog.text
            assert "the worker goes on without" in caplog.text
            with pytest.raises(RunNotFound):
                await Fleet(store).get("p2")
    finally:
        await server.stop()
