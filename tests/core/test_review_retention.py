"""R15: what a review of purging found, each as the smallest case that showed it."""

from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from kit.build import FaultyStore, Killed, Log, answered, claimed, failed, started, submitted
from msgspec import structs

from journal.errors import RunNotFound
from journal.fleet import Fleet
from journal.ids import RunId
from journal.log import Log as RunLog
from journal.purging import Purger, named, purge
from journal.records import Record
from journal.retention import FINISHED, Evidence, Purge, Retention, decide_purge
from journal.store import Appended, Stamp
from journal.stores import archive, file_purge
from journal.stores.archive import Archive
from journal.stores.file import FileStore

NOW = Retention(keep_s=0, resumable_s=0)
RUN = RunId("a1")


class CutOff(FileStore):
    """Of a process that is killed between the tombstone and the trim."""

    async def trim(self, run_id: RunId, *, before: int) -> None:
        raise Killed


async def put(store: FileStore, *bodies: Record, at: str = "2026-01-01T00:00:00.000Z") -> None:
    log = Log()
    log.at = at
    tail = 0
    for body in bodies:
        log.add(body)
        answer = await store.append(RUN, log.entries[-1], expected=tail)
        assert isinstance(answer, Appended)
        tail = answer.tail


# ---- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [timedelta(seconds=2), timedelta(days=26_000)])
def test_who_names_a_run_purges_it_whatever_the_clocks_say_of_its_end(ahead: timedelta):
    """A server two seconds ahead of this machine, or a record stamped in 2099, kept it as young."""
    now = datetime(2026, 3, 1, tzinfo=UTC)
    log = Log()
    log.at = (now + ahead).isoformat()
    for body in (started(), answered()):
        log.add(body)
    found = Evidence(n=log.fold.n, stamp=Stamp(now + ahead, now + ahead), now=now, parent="none")
    assert decide_purge(log.fold, named(), found) == Purge()
    assert decide_purge(log.fold, Retention(keep_s=1), found) != Purge()


# ---- copies -------------------------------------------------------------------------------------


async def test_the_copy_that_a_second_purge_makes_is_no_purged_run(tmp_path: Path):
    """With the tombstone in it, a store of copies took it for one, and `purge --finished` there
    removed its records, of whatever age."""
    store, copies = FileStore(tmp_path / "runs"), Archive(tmp_path / "copies")
    await put(store, started(), answered())
    whole = store.path(RUN).read_bytes()
    with pytest.raises(Killed):
        await Purger(CutOff(tmp_path / "runs"), NOW, by="w9", archive=copies).purge(RUN)
    kept = FileStore(tmp_path / "copies")
    assert kept.path(RUN).read_bytes() == whole
    done = await Purger(store, NOW, by="w9", archive=copies).purge(RUN)
    assert (done.what, kept.path(RUN).read_bytes()) == ("finished", whole)
    assert [run async for run in kept.ended(age_s=3600, statuses=FINISHED)] == []
    assert not (await RunLog.read(kept, RUN)).gone


@pytest.mark.parametrize("links", [True, False])
async def test_of_two_stores_that_purge_into_one_folder_at_once_each_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
):
    """Both had looked for a file of that name and found none; the second took the first's place."""
    stores = [FileStore(tmp_path / name) for name in ("one", "other")]
    await put(stores[0], started(), answered("one"))
    await put(stores[1], started(), answered("other"))
    copies = Archive(tmp_path / "copies")
    copies.directory.mkdir()
    path, link = copies.directory / "a1.jsonl", os.link

    def too_late(source: Path, target: Path) -> None:
        """The other purge comes between whatever was looked at before and this."""
        monkeypatch.setattr(archive.os, "link", link)
        path.write_bytes(stores[1].path(RUN).read_bytes())
        link(source, target)

    def no_links(source: Path, target: Path) -> None:
        path.write_bytes(stores[1].path(RUN).read_bytes())
        raise OSError(archive.errno.EPERM, "no links here")

    monkeypatch.setattr(archive.os, "link", too_late if links else no_links)
    done = await Purger(stores[0], NOW, by="w9", archive=copies).purge(RUN)
    assert done.why == "archive" and b'"other"' in path.read_bytes()
    assert b'"one"' in stores[0].path(RUN).read_bytes()
    assert os.listdir(copies.directory) == ["a1.jsonl"]


async def test_a_copy_is_kept_where_a_file_system_has_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_links(source: Path, target: Path) -> None:
        raise OSError(archive.errno.EPERM, "no links here")

    store = FileStore(tmp_path / "runs")
    await put(store, started(), answered())
    whole = store.path(RUN).read_bytes()
    monkeypatch.setattr(archive.os, "link", no_links)
    done = await Purger(store, NOW, by="w9", archive=Archive(tmp_path / "copies")).purge(RUN)
    assert done.what == "purged" and (tmp_path / "copies" / "a1.jsonl").read_bytes() == whole


async def test_each_folder_that_was_made_for_copies_is_named_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of `a/b/copies` only the last name was synced: a power cut could take all copies."""
    synced: list[Path] = []
    sync = file_purge.sync_directory

    def noted(directory: Path) -> None:
        synced.append(directory)
        sync(directory)

    store = FileStore(tmp_path / "runs")
    await put(store, started(), answered())
    for module in (file_purge, archive):
        monkeypatch.setattr(module, "sync_directory", noted)
    copies = tmp_path / "a" / "b" / "copies"
    await Purger(store, NOW, by="w9", archive=Archive(copies)).purge(RUN)
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b", copies} <= set(synced)


def test_a_store_under_another_name_is_no_folder_for_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A mount, or a file system for which capital letters are the same: no path tells."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "mount").symlink_to(tmp_path / "runs")

    def unresolved(path: Path) -> Path:
        return path

    monkeypatch.setattr(Path, "resolve", unresolved)
    with pytest.raises(archive.InvalidId, match="is the store itself"):
        Purger(FileStore(tmp_path / "runs"), NOW, by="w9", archive=Archive(tmp_path / "mount"))


# ---- a directory --------------------------------------------------------------------------------


async def test_a_purge_by_another_user_leaves_the_file_to_who_could_read_it(tmp_path: Path):
    """A root's purge with umask 077 left tombstones that nobody else could read: the service's
    `list`, `check` and starts of these ids were denied."""
    store = FileStore(tmp_path)
    await put(store, started(), answered())
    os.chmod(store.path(RUN), 0o664)
    owner = (1234, 1235) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    os.chown(store.path(RUN), *owner)
    before = os.umask(0o077)
    try:
        await purge(store, RUN)
    finally:
        os.umask(before)
    told = store.path(RUN).stat()
    assert (stat.S_IMODE(told.st_mode), told.st_uid, told.st_gid) == (0o664, *owner)


async def test_who_read_a_tombstone_with_its_records_reads_on_when_they_are_gone(tmp_path: Path):
    """On a directory the tombstone came again, behind itself: the run was called damaged."""
    store = FileStore(tmp_path)
    await put(store, started(), failed(retriable=True))
    with pytest.raises(Killed):
        await Purger(CutOff(tmp_path), NOW, by="w8").purge(RUN)
    log = await RunLog.read(store, RUN)
    assert log.fold.purged is not None and log.fold.n == 3
    await Purger(store, NOW, by="w9").purge(RUN)
    await log.refresh()
    assert log.gone and log.fold.started is None
    await log.refresh()
    assert log.tail == store.path(RUN).stat().st_size


async def test_of_a_large_journal_only_its_end_is_read_to_trim_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All of it was; and of more than 2 GiB a read returns less, which passed for one that was
    trimmed before: it said purged, and freed nothing."""
    store = FileStore(tmp_path)
    await put(store, started(), answered("x" * 100_000))
    sizes: list[int] = []
    pread, trim = os.pread, file_purge.trim_file

    def noted(fd: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return pread(fd, size, offset)

    def watched(fd: int, path: Path, before: int) -> None:
        """Before it, the run is read as any other is."""
        with monkeypatch.context() as patch:
            patch.setattr(file_purge.os, "pread", noted)
            trim(fd, path, before)

    monkeypatch.setattr(file_purge, "trim_file", watched)
    await purge(store, RUN)
    assert [entry.type for entry in (await store.load(RUN)).entries] == ["run.purged"]
    assert sizes and max(sizes) < 10_000


# ---- who waits ----------------------------------------------------------------------------------


class EndsAsItIsWaitedFor(FaultyStore):
    """Whoever waits has read the run when it asks for its holder; then the run ends, and goes."""

    def __init__(self) -> None:
        super().__init__(shared=True)
        self.waited_for = False

    async def holder(self, run_id: RunId) -> str | None:
        if not self.waited_for:
            self.waited_for = True
            log = Log(started(), claimed(), submitted("i1"), answered())
            entry = log.entries[-1]
            await self.append(run_id, structs.replace(entry, status="completed"), expected=3)
            await purge(self, run_id)
        return None


@pytest.mark.parametrize("what", ["wait", "shown", "input"])
async def test_who_waits_for_a_run_that_ends_and_is_purged_is_told_so(what: str):
    """`wait` broke on an assertion; of an input it was said that there is none."""
    store = EndsAsItIsWaitedFor()
    await Log(started(), claimed(), submitted("i1")).store(store)
    fleet = Fleet(store)
    asked = {
        "wait": lambda: fleet.wait(RUN, timeout_s=30),
        "shown": lambda: fleet.shown(RUN, wait_s=30),
        "input": lambda: fleet.input(RUN, "i1", wait_s=30),
    }[what]
    with pytest.raises(RunNotFound, match="was purged"):
        await asked()
    assert store.waited_for
