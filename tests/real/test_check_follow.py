"""`runfold check --follow`: an audit that goes on, its metric, and what it survives (R70)."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kit.cli import Child, Cli, is_refused
from kit.guarded import Guarded, environ, guarded_server
from kit.raw_client import ask
from kit.servers import NatsServer
from kit.waiting import eventually

import journal.online_audit
from journal import doors, purging
from journal.audit import Violation
from journal.auditing import RunAudit
from journal.ids import RunId
from journal.online_audit import StreamsAudit, online_audit
from journal.stores.file import FileStore
from journal.stores.jetstream_raw import StreamEnd
from journal.stores.provision import provision

pytestmark = pytest.mark.real

AUDITED = "all that is there is audited: "


class Auditing:
    """One that runs."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self._to: str = child._to  # type: ignore[attr-defined]

    def said(self, stream: str = "out") -> str:
        path = Path(f"{self._to}.{stream}")
        return path.read_text() if path.exists() else ""

    async def caught_up(self) -> None:
        await eventually(lambda: AUDITED in self.said("err"), 30, what="the first look")

    async def finds(self, text: str, times: int = 1) -> None:
        await eventually(lambda: self.said().count(text) >= times, 30, what=text)

    async def metrics(self) -> dict[str, float]:
        found = re.search(r"metrics: (http://\S+)\n", self.said("err"))
        assert found is not None

        def get() -> str:
            with urllib.request.urlopen(found[1], timeout=5) as answer:
                return answer.read().decode()

        text = await asyncio.to_thread(get)
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        return {name.removeprefix("runfold_audit_"): float(value) for name, value in lines}

    async def stopped(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.child.send(number)
        return (await self.child.done()).code


async def follow(cli: Cli, *args: str) -> Auditing:
    found = Auditing(await cli.start("check", "--follow", *args))
    await found.caught_up()
    return found


async def test_a_violation_is_found_while_it_follows_and_the_metric_rises(cli: Cli) -> None:
    await cli.run("old", "clock")
    auditing = await follow(cli, "--metrics-port=0")
    assert f"{AUDITED}1 run, " in auditing.said("err")
    before = await auditing.metrics()
    assert (before["violations_total"], before["runs_total"], before["behind"]) == (0, 1, 0)
    assert before["looked_at_seconds"] > 0
    records = (await cli.run("new")).json["records"]

    async def read() -> bool:
        return (await auditing.metrics())["records_total"] == before["records_total"] + records

    await eventually(read, 30, what="the new run is audited")
    assert auditing.said() == ""
    await cli.append_chained("new", "step.completed", step="llm/9", result=1)
    await auditing.finds(f"run new record {records + 1}: unstarted: ")
    await cli.append_raw("old", b"garbage")
    await auditing.finds("run old record ")
    after = await auditing.metrics()
    assert after["violations_total"] == auditing.said().count("\n") >= 2
    assert after["runs_total"] == 2
    assert await auditing.stopped() == 1


async def test_a_record_that_this_version_cannot_judge_is_said_once_and_alarms(cli: Cli) -> None:
    """What comes behind it could be anything."""
    await cli.run("v1", "clock")
    auditing = await follow(cli, "--metrics-port=0")
    for _ in range(2):
        await cli.append_chained("v1", "step.paused")
    await auditing.finds(": newer: step.paused")
    await cli.append_raw("v1", b"garbage")
    await auditing.finds(": undecodable: ")
    assert auditing.said().count(": newer: ") == 1
    assert (await auditing.metrics())["violations_total"] == auditing.said().count("\n")
    assert await auditing.stopped() == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_ends_with_0_where_nothing_was_found(on_file: Cli, number: signal.Signals) -> None:
    await on_file.run("c1", "clock")
    auditing = await follow(on_file, "--json")
    assert await auditing.stopped(number) == 0
    assert auditing.said() == ""
    assert "Traceback" not in auditing.said("err")


async def test_with_json_each_violation_is_an_object(on_file: Cli) -> None:
    await on_file.run("c1", "clock")
    await on_file.append_raw("c1", b"garbage")
    auditing = await follow(on_file, "--json")
    assert await auditing.stopped() == 1
    assert json.loads(auditing.said()).keys() == {"run", "n", "rule", "text"}


async def test_it_goes_on_over_a_killed_server(tmp_path: Path) -> None:
    server = await NatsServer.start(tmp_path / "nats")
    await provision(server.url)
    cli = Cli(tmp_path / "work", server.url)
    try:
        await cli.run("c1", "clock")
        auditing = await follow(cli)
        await server.kill()
        await server.restart()
        assert (await cli.run("c2", "clock")).code == 0
        await cli.append_raw("c2", b"garbage")
        await auditing.finds("run c2 record 10: undecodable: ")
        assert await auditing.stopped() == 1
        assert "run c1" not in auditing.said()
    finally:
        await cli.end()
        await server.stop()


async def test_the_auditors_role_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    guarded = Guarded(await guarded_server(tmp_path))
    await provision(guarded.url("admin"))
    cli = Cli(tmp_path / "work", guarded.url("auditor"))
    try:
        async with guarded.store("worker") as store:
            await doors.start(store, "nobody", None, run_id="r1")
        auditing = await follow(cli)
        checked = await cli("check", "r1", "--json")
        assert (checked.code, checked.json["records"]) == (0, 1)
        exported, every = await cli.forked([["export", "r1"], ["check", "--all"]], at_once=2)
        assert (exported.code, exported.out.count("\n"), every.code) == (0, 1, 0)
        await ask(guarded.url("admin"), "runfold.journal.0.r1", b"forged")
        await auditing.finds("run r1 record 2: undecodable: ")
        assert await auditing.stopped() == 1
    finally:
        await cli.end()
        await guarded.server.stop()


async def test_a_port_that_is_taken_is_said(on_file: Cli) -> None:
    await on_file.run("c1", "clock")
    first = await follow(on_file, "--metrics-port=0")
    port = re.search(r":(\d+)/metrics", first.said("err"))
    assert port is not None
    second = await on_file("check", "--follow", f"--metrics-port={port[1]}", "--json")
    is_refused(second, 2, "usage")
    assert await first.stopped() == 0


# -- the audit itself, look by look -------------------------------------------------------------

Found = list[tuple[RunId | None, Violation]]


class Look:
    """An audit of the CLI's store, and what it has reported."""

    def __init__(self, store: Any) -> None:
        self.found: Found = []
        self.audit: Any = online_audit(
            store, lambda run, violation: self.found.append((run, violation))
        )

    @property
    def first(self) -> Any:
        """Of the first journal stream; of the directory."""
        return self.audit._audits[0] if isinstance(self.audit, StreamsAudit) else self.audit

    async def __call__(self) -> list[tuple[str | None, int, str]]:
        """What one more look reports."""
        self.found.clear()
        await self.audit.look()
        return [(run, one.n, one.rule) for run, one in self.found]


@asynccontextmanager
async def looking(cli: Cli) -> AsyncIterator[Look]:
    async with cli._opened() as store:
        yield Look(store)


async def test_each_violation_is_reported_once_whatever_is_kept(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no room for any audit, every record is taken behind a fresh reading of its run."""
    monkeypatch.setattr(journal.online_audit, "KEPT_RECORDS_MAX", 0)
    waiting = (await cli.run("d1")).json["records"]
    async with looking(cli) as look:
        assert await look() == []
        records = look.audit.records
        assert records == waiting == len(await cli.entries("d1"))
        await cli.append_chained("d1", "step.completed", step="llm/9", result=1)
        assert ("d1", waiting + 1, "unstarted") in await look()
        assert await look() == []
        await cli.append_raw("d1", b"garbage")
        assert {(run, n) for run, n, _ in await look()} == {("d1", waiting + 2)}
        assert (look.audit.runs, look.audit.records, look.audit.behind) == (1, waiting + 2, 0)


async def test_what_is_kept_is_bounded_and_ended_runs_are_dropped(cli: Cli) -> None:
    await cli.run("d1")
    await cli.run("c1", "clock")
    async with looking(cli) as look:
        await look()
        kept = look.first._kept
        assert kept.take(RunId("c1")) is None
        audit = kept.take(RunId("d1"))
        assert isinstance(audit, RunAudit) and kept._weight == 0


async def test_a_run_that_is_purged_between_two_looks_is_no_violation(cli: Cli) -> None:
    waiting = (await cli.run("p1")).json
    async with looking(cli) as look:
        assert await look() == []
        approve = await cli("approve", waiting["pending"][0]["marker"])
        assert (approve.code, (await cli.run("p1")).code) == (0, 0)
        async with cli._opened() as store:
            await purging.purge(store, "p1")
        assert await look() == []


async def test_records_that_are_gone_are_found(cli: Cli) -> None:
    """Taken away behind the store's back, and the run begun anew."""
    await cli.run("g1")
    async with looking(cli) as look:
        await look()
        if cli.kind == "file":
            cli.folder.joinpath("runs", "g1.jsonl").unlink()
            assert await look() == [("g1", 0, "lost")]
        else:
            stream = f"{cli.namespace.upper()}_JOURNAL_0"
            subject = {"filter": f"{cli.namespace}.journal.0.g1"}
            await ask(str(cli.store), f"$JS.API.STREAM.PURGE.{stream}", subject)
            await cli.run("g1", "clock")
            assert ("g1", 1, "lost") in await look()
        assert await look() == []


async def test_a_file_cut_short_is_found(on_file: Cli) -> None:
    await on_file.run("g1")
    path = on_file.folder / "runs" / "g1.jsonl"
    async with looking(on_file) as look:
        await look()
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-2]))
        assert await look() == [("g1", 0, "lost")]
        path.write_bytes(b"".join(lines[:2]) + b"x\n" + b"".join(lines[3:]))
        assert ("g1", 3, "undecodable") in await look()
        assert await look() == []


async def test_a_stream_that_ends_before_what_was_read_of_it_is_found(
    on_jetstream: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power cut without fsync; for a moment it may be a deposed leader's answer."""
    await on_jetstream.run("g1")
    async with looking(on_jetstream) as look:
        await look()
        records = len(await on_jetstream.entries("g1"))
        journals = look.first._journals
        end = await journals.end()

        async def shorter() -> StreamEnd:
            return StreamEnd(records - 2, end.created)

        monkeypatch.setattr(journals, "end", shorter)
        assert await look() == []
        monkeypatch.setattr(journal.online_audit, "LOST_AFTER_S", 0.0)
        assert await look() == [(None, 0, "lost")]
        assert await look() == []


async def test_a_stream_that_was_made_anew_is_found_and_audited_from_its_first_record(
    on_jetstream: Cli,
) -> None:
    """However far it goes by then."""
    await on_jetstream.run("g1", "clock")
    async with looking(on_jetstream) as look:
        await look()
        for name in ("JOURNAL_0", "TASKS"):
            stream = f"{on_jetstream.namespace.upper()}_{name}"
            await ask(str(on_jetstream.store), f"$JS.API.STREAM.DELETE.{stream}", {})
        await provision(str(on_jetstream.store), namespace=on_jetstream.namespace)
        for run in ("g2", "g3"):
            await on_jetstream.run(run, "clock")
        seen = look.first.seen
        assert await look() == [(None, 0, "lost")]
        assert (look.first.seen > seen, look.audit.runs) == (True, 3)
        assert await look() == []


async def test_a_store_without_a_run_has_nothing_to_audit(tmp_path: Path) -> None:
    look = Look(FileStore(tmp_path / "none"))
    assert (await look(), look.audit.runs) == ([], 0)
