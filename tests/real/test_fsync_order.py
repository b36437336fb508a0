"""Records reach the disk before what they announce happens, seen from the kernel (UR-63)."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from kit.cli import RUNFOLD, Cli, Done, names, run_line
from kit.records import Chain
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.store import Appended
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed"),
]

STEP = "tool/2/0/create_ticket"
CALLS = "mkdir,openat,write,pwrite64,ftruncate,fsync,fdatasync"
LINE = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(.*)")


class Call(NamedTuple):
    """A system call: `begun` and `ended` are lines of the trace, so that threads can overlap."""

    name: str
    text: str
    begun: int
    ended: int

    @property
    def worked(self) -> bool:
        return re.search(r"= -1 ", self.text) is None


def parse(trace: str) -> list[Call]:
    """The calls in the order in which they ended; those that were cut in two are put together."""
    begun: dict[str, tuple[int, str]] = {}
    calls: list[Call] = []
    for number, line in enumerate(trace.split("\n")):
        found = LINE.match(line)
        if found is None:
            continue
        thread, name, rest = found.groups()
        if rest.endswith("<unfinished ...>"):
            begun[thread] = number, rest
            continue
        start, text = begun.pop(thread) if rest.startswith(" resumed>") else (number, "")
        calls.append(Call(name, text + rest, start, number))
    return calls


def first(calls: list[Call], name: str, *words: str, after: int = -1) -> Call:
    """The first such call that began after this line of the trace."""
    for call in calls:
        if call.name == name and call.begun > after and all(word in call.text for word in words):
            return call
    raise AssertionError(f"no {name} with {words} after line {after}")


async def traced(cli: Cli, *args: str, inject: tuple[str, ...] = ()) -> tuple[Done, list[Call]]:
    """The installed command under strace."""
    out = cli.folder / "trace"
    filters = inject or ("-e", f"trace={CALLS}")
    flags = ("-f", "-y", "-s", "100000", "-o", str(out))
    child = await cli.execute("strace", *flags, *filters, RUNFOLD, *args)
    done = await child.done()
    if "ptrace" in done.err and not out.exists():
        pytest.skip(f"strace can't trace here: {done.err[:200]}")
    return done, parse(out.read_text(errors="replace"))


@pytest.fixture(autouse=True)
def strace_works() -> None:
    probe = subprocess.run(["strace", "-e", "trace=none", "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"strace can't trace here: {probe.stderr[:200]}")


async def test_an_intent_is_on_disk_before_its_tool_is_called(on_file: Cli) -> None:
    done, calls = await traced(on_file, *run_line("y1", "quick", input="hello"))
    assert done.code == 0, done
    folder = str(on_file.folder.resolve())
    journal, runs = f"<{folder}/runs/y1.jsonl>", f"<{folder}/runs>"
    # A new folder and a new file have their directory entries synced.
    made = first(calls, "mkdir", '"runs"')
    first(calls, "fsync", f"<{folder}>", "= 0", after=made.ended)
    created = first(calls, "openat", journal, "O_CREAT")
    listed = first(calls, "fsync", runs, "= 0", after=created.ended)
    started = first(calls, "pwrite64", journal, "run.started")
    synced = first(calls, "fsync", journal, "= 0", after=started.ended)
    next_record = first(calls, "pwrite64", journal, "llm/1", after=started.ended)
    assert max(synced.ended, listed.ended) < next_record.begun
    # The write's start, its fsync, and only then the effect; its result after that.
    intent = first(calls, "pwrite64", journal, "step.started", STEP)
    intent_synced = first(calls, "fsync", journal, "= 0", after=intent.ended)
    effect = first(calls, "write", "/effects>", "create_ticket")
    opened = [call for call in calls if call.name == "openat" and '"effects"' in call.text]
    assert intent_synced.ended < opened[-1].begun < effect.begun
    result = first(calls, "pwrite64", journal, "step.completed", STEP)
    result_synced = first(calls, "fsync", journal, "= 0", after=result.ended)
    assert effect.ended < result.begun
    # The result is on disk before the model is asked about it.
    asked = [call for call in calls if call.name == "write" and "/requests>" in call.text]
    assert len(asked) == 3 and result_synced.ended < asked[-1].begun


async def test_each_record_is_synced_before_the_next_one(on_file: Cli) -> None:
    done, calls = await traced(on_file, *run_line("y2", "quick", input="hello"))
    assert done.code == 0, done
    journal = f"{on_file.folder.resolve()}/runs/y2.jsonl>"
    on_journal = [call for call in calls if journal in call.text.split(",")[0]]
    order = [call.name for call in on_journal if call.name in ("pwrite64", "fsync")]
    assert order == ["pwrite64", "fsync"] * done.json["records"]
    assert all(call.worked for call in on_journal if call.name in ("pwrite64", "fsync"))


async def test_an_intent_that_cannot_be_synced_calls_no_tool(on_file: Cli) -> None:
    """The first thing this process has to sync is the intent; every fsync of it fails."""
    marker = (await on_file.run("y3")).json["pending"][0]["marker"]
    assert (await on_file("approve", marker)).code == 0
    before = await on_file.contents()
    failing = ("-e", "trace=fsync", "-e", "inject=fsync:error=EIO")
    done, calls = await traced(on_file, *run_line("y3", "desk", input="hello"), inject=failing)
    assert any("INJECTED" in call.text for call in calls)
    assert (done.code, done.json["error"]["code"]) == (9, "store_unavailable"), done
    assert "Input/output error" in done.line
    assert on_file.effects("create_ticket") == []
    after = await on_file.contents()
    assert isinstance(after, dict) and isinstance(before, dict)
    journal = str(on_file.folder / "runs" / "y3.jsonl")
    assert after[journal] == before[journal]  # no half record, and none that was not acknowledged
    end = await on_file.run("y3")
    assert (end.code, end.json["message"]) == (0, "Ticket filed."), end
    assert len(on_file.effects("create_ticket")) == 1
    assert len(on_file.requests()) == 3
    assert names(await on_file.records("y3")).count(f"step.started {STEP}") == 1


async def test_a_result_that_cannot_be_synced_leaves_the_write_unknown(on_file: Cli) -> None:
    """The intent is on disk, the effect happened, its result can't be kept: a person is asked.

    Held in the tool, the process gets a tracer that fails what it syncs from then on.
    """
    on_file.hold("create_ticket")
    child = await on_file.begin("y4", "quick")
    await on_file.reached("create_ticket")
    out = on_file.folder / "trace"
    inject = ("-e", "trace=fsync", "-e", "inject=fsync:error=EIO")
    tracer = await on_file.execute("strace", "-f", *inject, "-o", str(out), "-p", str(child.pid))
    await _attached(child.pid)
    on_file.let_go("create_ticket")
    done = await child.done()
    assert (await tracer.done()).code == 0
    assert "INJECTED" in out.read_text()
    assert (done.code, done.json["error"]["code"]) == (9, "store_unavailable"), done
    again = await on_file.run("y4", "quick")
    assert (again.code, again.json["unknown"][0]["step"]) == (4, STEP), again
    assert (await on_file("reconcile", "y4", STEP, "--done", '"TICKET-1"')).code == 0
    assert (await on_file.run("y4", "quick")).code == 0
    assert len(on_file.effects("create_ticket")) == 1


async def _attached(pid: int) -> None:
    def traced() -> bool:
        return all(
            "TracerPid:\t0" not in task.joinpath("status").read_text()
            for task in Path(f"/proc/{pid}/task").iterdir()
        )

    await eventually(traced, what="every thread is traced")


@pytest.mark.parametrize("what", ["the file", "the directory"])
async def test_a_start_that_cannot_be_synced_is_an_error_and_the_next_one_is_clean(
    on_file: Cli, what: str
) -> None:
    folder = on_file.folder.resolve()
    (folder / "runs").mkdir()
    place = "runs/y5.jsonl" if what == "the file" else "runs"
    failing = ("-P", str(folder / place), "-e", "trace=fsync", "-e", "inject=fsync:error=EIO")
    line = run_line("y5", "quick", input="hello")
    done, calls = await traced(on_file, *line, inject=failing)
    assert any("INJECTED" in call.text for call in calls)
    assert (done.code, done.json["error"]["code"]) == (9, "store_unavailable"), done
    assert "Input/output error" in done.line
    assert on_file.requests() == [] and on_file.effects("create_ticket") == []
    end = await on_file.run("y5", "quick")
    assert (end.code, end.json["message"]) == (0, "Ticket filed."), end
    assert names(await on_file.records("y5")).count("run.started") == 1
    assert len(on_file.requests()) == 3


async def test_a_full_disk_is_an_error_and_loses_nothing(on_file: Cli) -> None:
    """ENOSPC in the middle of a record: what was written of it is cut off again."""
    marker = (await on_file.run("y6")).json["pending"][0]["marker"]
    assert (await on_file("approve", marker)).code == 0
    journal = on_file.folder / "runs" / "y6.jsonl"
    before = journal.read_bytes()
    failing = ("-e", "trace=pwrite64", "-P", str(journal.resolve()))
    failing += ("-e", "inject=pwrite64:error=ENOSPC")
    done, _ = await traced(on_file, *run_line("y6", "desk", input="hello"), inject=failing)
    assert (done.code, done.json["error"]["code"]) == (9, "store_unavailable"), done
    assert "No space left on device" in done.line
    assert journal.read_bytes() == before
    assert on_file.effects("create_ticket") == []
    assert (await on_file.run("y6")).code == 0
    assert len(on_file.effects("create_ticket")) == 1


async def test_a_batch_of_appends_is_synced_before_it_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Group commit leans on it: nats-server 2.15.1 writes all records of a batch, syncs the
    stream's file once, and answers."""
    monkeypatch.setenv("RUNFOLD_GROUP_COMMIT", "on")
    server = await NatsServer.start(tmp_path / "server", fsync=True)
    try:
        await provision(server.url)
        out = tmp_path / "trace"
        flags = ("-f", "-y", "-s", "1000", "-o", str(out), "-p", str(server.pid))
        async with JetStreamStore(server.url) as store:
            chains = [Chain(f"run-{number}") for number in range(8)]
            entries = [chain.started() for chain in chains]
            tracer = await asyncio.create_subprocess_exec(
                "strace", "-e", f"trace={CALLS},writev", *flags, stderr=subprocess.DEVNULL
            )
            await _attached(server.pid)
            answers = await asyncio.gather(
                *(
                    store.append(chain.run_id, entry, expected=0)
                    for chain, entry in zip(chains, entries, strict=True)
                )
            )
            tracer.terminate()
            await tracer.wait()
        assert all(isinstance(answer, Appended) for answer in answers)
    finally:
        await server.stop()
    calls = parse(out.read_text(errors="replace"))
    journal = "streams/RUNFOLD_JOURNAL_0/msgs/1.blk>"
    written = [call for call in calls if call.name == "pwrite64" and journal in call.text]
    assert len([call for call in written if "runfold.journal.0.run-" in call.text]) == 8
    synced = first(calls, "fsync", journal, "= 0", after=written[-1].ended)
    told = [
        call for call in calls if call.name.startswith("write") and '\\"count\\":8' in call.text
    ]
    assert len(told) == 1 and synced.ended < told[0].begun
