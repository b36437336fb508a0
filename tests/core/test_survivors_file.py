"""What mutants of the file store survived: a file that is shorter than what was acknowledged, and a
write that fails half way (R11)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from kit.build import RUN, Log, start_of, started

from journal.codec import Entry
from journal.errors import JournalDamaged, StoreUnavailable
from journal.store import Appended, Conflict
from journal.stores.file import FileStore

ENTRIES = Log(started(), start_of("0/1"), start_of("0/2")).entries


async def held(tmp_path: Path) -> tuple[FileStore, int, Path]:
    """A store with the first two records, its tail, its file."""
    store, tail = FileStore(tmp_path / "runs"), 0
    for entry in ENTRIES[:2]:
        answer = await store.append(RUN, entry, expected=tail)
        assert isinstance(answer, Appended)
        tail = answer.tail
    return store, tail, store.path(RUN)


def raw(entries: list[Entry] | tuple[Entry, ...]) -> list[bytes]:
    return [entry.raw for entry in entries]


async def test_a_file_shorter_than_what_was_acknowledged_takes_no_record(tmp_path: Path):
    store, tail, path = await held(tmp_path)
    os.truncate(path, tail - 5)
    left = path.read_bytes()
    assert await store.append(RUN, ENTRIES[2], expected=tail) == Conflict()
    assert path.read_bytes() == left


async def test_a_file_shorter_than_what_was_acknowledged_is_damage(tmp_path: Path):
    store, tail, path = await held(tmp_path)
    os.truncate(path, tail - 5)
    with pytest.raises(JournalDamaged, match="were acknowledged"):
        await store.load(RUN, after=tail)


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
async def test_a_line_that_failed_to_sync_is_not_there(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
):
    """Written, perhaps in part, and not acknowledged: nobody may read it as if it were stored."""
    store, tail, path = await held(tmp_path)
    real = os.pwrite

    def fails(fd: int, *args: object) -> int:
        if failing == "pwrite":
            real(fd, b'{"half', tail)
        raise OSError(errno.EIO, "I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(os, failing, fails)
        with pytest.raises(StoreUnavailable, match="nothing was acknowledged"):
            await store.append(RUN, ENTRIES[2], expected=tail)
    assert path.stat().st_size == tail
    assert raw((await store.load(RUN)).entries) == raw(ENTRIES[:2])
    assert isinstance(await store.append(RUN, ENTRIES[2], expected=tail), Appended)
    assert raw((await store.load(RUN)).entries) == raw(ENTRIES)


async def test_bytes_behind_the_last_line_are_no_record_and_are_counted(tmp_path: Path):
    store, tail, path = await held(tmp_path)
    with path.open("ab") as file:
        file.write(ENTRIES[2].raw)  # whole, but for its end of line: never acknowledged
    loaded = await store.load(RUN)
    assert (raw(loaded.entries), loaded.tail) == (raw(ENTRIES[:2]), tail)
    assert loaded.torn == len(ENTRIES[2].raw)
