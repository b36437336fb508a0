"""UR-27, UR-31 at `runfold check` and `export`: text that breaks stores, long journals; and every
damaged file of test_damaged_files.py (R70)."""

from __future__ import annotations

import resource
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cases.mutate import NEVER, REFUSED, TORN, mutants
from cases.test_damaged_files import ACC, made
from cases.test_ur_values import TEXTS, echoing, looking
from cases.world import World, cli
from cases.zygote import Zygote
from kit.build import Log, claimed

from journal.auditing import audit_run
from journal.codec import Entry
from journal.doors import signal
from journal.fold import Fold
from journal.ids import RunId
from journal.store import RawRecord
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.memory import MemoryStore
from runfold import AwaitingApproval, Completed, open_store, run

__all__ = ["made"]  # a fixture
LONG = 5_000
SHARED = Path("/work/shared/cases/files")


# ---- UR-27 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
def test_ur27_text_that_breaks_stores_is_audited_and_exported_exactly(
    place: str, namespace: str, name: str, tmp_path: Path, run_sync: Callable[..., Any]
) -> None:
    """UR-27: in inputs, results, keys, arguments, comments and answers: nothing is found, and the
    export holds the stored bytes."""
    text = TEXTS[name]

    async def made() -> list[bytes]:
        async with open_store(place, namespace=namespace) as store:
            end = await run(store, echoing(text), "r1", text)
            assert isinstance(end, AwaitingApproval)
            approve = {"marker": end.pending[0].marker, "comment": text[:16_000]}
            await signal(store, "r1", "approve", approve)
            assert isinstance(await run(store, echoing(text), "r1"), Completed)
            return [entry.raw for entry in (await store.load(RunId("r1"))).entries]

    raws = run_sync(made())
    where = ["--store", place, "--namespace", namespace]
    path = tmp_path / "export.jsonl"
    exported = cli("export", "r1", "-o", str(path), *where)
    assert (exported.code, exported.err) == (0, "")
    assert path.read_bytes() == b"".join(raw + b"\n" for raw in raws)
    for done in (cli("check", "r1", "--json", *where), cli("check", str(path), "--json")):
        assert (done.code, done.json["records"], done.json["violations"]) == (0, len(raws), [])


# ---- UR-31 ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_run(run_sync: Callable[..., Any]) -> tuple[Entry, ...]:
    """A run of 5,000 records of 2 kB."""

    async def make() -> tuple[Entry, ...]:
        store = MemoryStore()
        assert isinstance(await run(store, looking(LONG // 4), "long", "x"), Completed)
        first, *others = (await store.load(RunId("long"))).entries
        log = Log(first.record, claimed())  # as on a server
        for entry in others:
            log.add(entry.record)
        return tuple(log.entries)

    entries: tuple[Entry, ...] = run_sync(make())
    assert len(entries) > LONG
    return entries


async def _child_audits(where: str, namespace: str) -> list[int]:
    """Records audited; records read; violations; memory grown, in KiB."""
    async with open_store(where, namespace=namespace) as store:
        assert isinstance(store, FileStore | JetStreamStore)
        counting = Counting(store)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        audited = await audit_run(counting, RunId("long"))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return [audited.records, counting.read, len(audited.violations), grown]


class Counting:
    """Journals, and how many records were read from them."""

    def __init__(self, inner: FileStore | JetStreamStore) -> None:
        self.read = 0
        self._inner = inner
        self.runs = inner.runs

    async def stored(
        self, run_id: RunId, *, after: int = 0
    ) -> AsyncGenerator[Sequence[RawRecord], None]:
        async for page in self._inner.stored(run_id, after=after):
            self.read += len(page)
            yield page


@pytest.mark.real
def test_ur31_a_long_journal_is_audited_reading_each_record_once(
    place: str,
    namespace: str,
    long_run: tuple[Entry, ...],
    run_sync: Callable[..., Any],
    zygote: Zygote,
) -> None:
    """UR-31: 5,000 records, 10 MB, in pages: memory grows by less than 50 MB (the case allows
    200)."""

    async def lay() -> None:
        async with open_store(place, namespace=namespace) as store:
            if isinstance(store, FileStore):
                store.directory.mkdir(parents=True)
                data = b"".join(entry.raw + b"\n" for entry in long_run)
                store.path(RunId("long")).write_bytes(data)
                return
            tail, fold = 0, Fold()
            for entry in long_run:
                fold.apply(entry)
                told = Entry(entry.record, entry.raw, fold.status())
                answer = await store.append(RunId("long"), told, expected=tail)
                tail = answer.tail  # type: ignore[union-attr]

    run_sync(lay())
    child = zygote.call("cases.test_ur_check:_child_audits", where=place, namespace=namespace)
    done = child.wait()
    assert done.code == 0, done.err
    records, read, found, grown = done.json
    assert (records, read, found) == (len(long_run), len(long_run), 0)
    assert grown < 50 * 1024


# ---- damaged files ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["going", "result", "complete"])
def test_every_damaged_file_is_named_in_a_store_and_as_a_file(
    world: World, made: dict[str, bytes], kind: str
) -> None:
    """Refused by other commands: exit 1, and a violation there or beside it. Torn: clean,
    and said. Never started: no such run."""
    world.runs.mkdir()
    path, copy = world.path(ACC), world.home / "copy.jsonl"
    for mutant in mutants(made[kind]):
        path.write_bytes(mutant.data)
        copy.write_bytes(mutant.data)
        online = world.cli("check", ACC, "--store", str(world.runs), "--json")
        offline = world.cli("check", str(copy), "--json")
        for done in (online, offline):
            match mutant.expect:
                case "refused":
                    assert done.code == 1, (mutant.name, done)
                    assert done.json["violations"], mutant.name
                case "torn":
                    assert (done.code, done.json["violations"]) == (0, []), (mutant.name, done)
                    assert "torn" in done.err, mutant.name
                case _:
                    assert done.code == 8, (mutant.name, done)
        if mutant.expect == REFUSED:
            ordinals = [found["n"] for found in online.json["violations"]]
            assert any(abs(n - mutant.line) <= 1 for n in ordinals), (mutant.name, ordinals)
    assert {mutant.expect for mutant in mutants(made[kind])} == {REFUSED, TORN, NEVER}


@pytest.mark.skipif(not SHARED.exists(), reason="../shared is not here")
def test_files_of_other_formats_are_answered_clearly(world: World) -> None:
    """The shared files themselves, which no version of Runfold wrote."""
    paths = sorted(SHARED.glob("*.jsonl"))
    assert len(paths) > 10
    for path in paths:
        done = world.cli("check", str(path), "--json")
        if done.code == 8:
            assert done.json["error"]["code"] == "run_not_found", path
        else:
            assert done.code == 1 and done.json["violations"], path
        assert "internal error" not in done.err


def test_a_copy_under_another_runs_name_is_found_in_the_store_and_not_as_a_file(
    world: World, made: dict[str, bytes]
) -> None:
    world.runs.mkdir()
    world.path("copy-1").write_bytes(made["complete"])
    done = world.cli("check", "copy-1", "--store", str(world.runs), "--json")
    assert (done.code, done.json["violations"][0]["rule"]) == (1, "run_id")
    assert world.cli("check", str(world.path("copy-1"))).code == 0


def test_a_line_longer_than_a_record_may_be_is_found_and_ends_the_export(
    world: World, made: dict[str, bytes]
) -> None:
    world.runs.mkdir()
    lines = made["complete"].splitlines(keepends=True)
    huge = b'{"x":"' + b"y" * (17 * 1024 * 1024) + b'"}\n'
    world.path(ACC).write_bytes(b"".join([*lines[:3], huge, *lines[3:]]))
    done = world.cli("check", ACC, "--store", str(world.runs), "--json")
    found = [(one["n"], one["rule"]) for one in done.json["violations"]]
    assert done.code == 1 and (4, "size") in found
    exported = world.cli("export", ACC, "--store", str(world.runs), "-o", str(world.home / "o"))
    assert exported.code == 1
    assert (world.home / "o").read_bytes() == b"".join(lines[:3])
