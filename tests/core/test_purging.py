"""R15: a purge beside whatever else may happen to its run, in every order; and cut off anywhere."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kit.build import (
    RUN,
    FaultyStore,
    Killed,
    Log,
    answered,
    cancel,
    cancelled_end,
    child_ended,
    claimed,
    failed,
    folded,
    released,
    result_of,
    spawned,
    started,
    submitted,
    types_of,
)
from kit.interleaving import TURNS_MAX, Actor, Stage
from msgspec import structs

from journal.claims import Take, decide_claim
from journal.codec import Entry, decode
from journal.doors import signal, start, state, submit
from journal.errors import (
    InputMismatch,
    InvalidId,
    JournalDamaged,
    NewerVersion,
    RunFinished,
    RunNotFound,
    StaleSignal,
    StoreUnavailable,
)
from journal.fleet import Fleet
from journal.following import followed
from journal.ids import RunId
from journal.limits import RETENTION_S
from journal.listing import Filter
from journal.log import Log as RunLog
from journal.purging import Purged, Purger, purge
from journal.records import Claim, Record, RunPurged
from journal.retaining import retain
from journal.retention import Retention
from journal.store import Appended
from journal.stores import archive
from journal.stores.archive import Archive
from journal.stores.file import FileStore
from journal.stores.memory import MemoryStore

pytestmark = [pytest.mark.usefixtures("no_waiting"), pytest.mark.timeout(60)]

MONTH = timedelta(seconds=RETENTION_S)
FAILED: list[Record] = [started(), claimed(), failed(retriable=True)]
DONE: list[Record] = [started(), claimed(), submitted(), answered()]
NOW = Retention(keep_s=0, resumable_s=0)


class Timed(FaultyStore):
    """A store whose clock a test sets."""

    time = datetime.now(UTC)

    def clock(self) -> datetime:
        return self.time


async def stored(*bodies: Record, shared: bool = True) -> FaultyStore:
    store = FaultyStore(shared=shared)
    await Log(*bodies).store(store)
    return store


# ---- in every order -----------------------------------------------------------------------------


async def purges(store: MemoryStore) -> Purged:
    return await Purger(store, NOW, by="w9").purge(RUN)


async def reopens(store: MemoryStore) -> str:
    """Resume, and claim it as a worker would."""
    store.shared = True
    await signal(store, RUN, "resume", {})
    log = await RunLog.read(store, RUN, by="w2")
    claim = Claim(worker="w2", revision="1", reason="wake")

    def due(fold: Any) -> Claim | None:
        log.check_runnable()
        return claim if isinstance(decide_claim(fold, [], ack_wait_s=30), Take) else None

    return "claimed" if await log.append(due) is not None else "not claimed"


async def tells_late(store: MemoryStore) -> None:
    payload = {"step": "pay/1", "start": 3, "result": 1}
    await signal(store, RUN, "late", payload, request_id="late:3", worker=True)


async def starts_again(store: MemoryStore) -> bool:
    return (await start(store, "helpdesk", "VPN is down", run_id=RUN)).created


async def reads(store: MemoryStore) -> list[str]:
    """Twice; and as a page, and as a follower: what each found."""
    log = await RunLog.read(store, RUN)
    seen = ["gone" if log.gone else log.fold.status()]
    await log.refresh()
    seen += ["gone" if log.gone else log.fold.status()]
    page = await Fleet(store).page(Filter())
    seen += [run["status"] for run in page.runs] or ["gone"]
    try:
        async for _ in followed(store, RUN):
            pass
    except RunNotFound:
        seen.append("gone")
    return seen


class Came(NamedTuple):
    """What a schedule left, and what the purger and the other one came to."""

    types: list[str]
    purger: Any
    other: Any

    @property
    def live(self) -> bool:
        return "run.purged" not in self.types


async def every_order(bodies: list[Record], other: Actor) -> list[Came]:
    """Each of the two cut once by the other, and the purger killed before each of its operations.
    After each the next purge leaves a tombstone alone, where there is one at all."""
    most = 2
    for actors in ([purges, other], [other, purges]):
        alone = Stage(await stored(*bodies))
        await alone.play(actors)
        most = max(most, *(count + 2 for count in alone.operations))
    cuts = [(first, then) for first in range(most) for then in range(1, most)]
    plans: list[tuple[dict[str, Any], int]]
    plans = [({"first": first, "other": then}, flip) for first, then in cuts for flip in (0, 1)]
    for at, before in product(range(most), repeat=2):
        plans.append(({"first": before, "other": TURNS_MAX, "killed": (1, at)}, 1))
    found: list[Came] = []
    for plan, flip in plans:
        store = await stored(*bodies)
        actors = [other, purges] if flip else [purges, other]
        came = await Stage(store).play(actors, **plan)
        found.append(Came(await types_of(store), came[flip], came[1 - flip]))
        await finished_by_the_next(store)
    assert len(found) > 200
    return found


async def finished_by_the_next(store: FaultyStore) -> None:
    before = await types_of(store)
    assert before[0] in ("run.started", "run.purged")
    if "run.purged" in before:
        assert before[-1] == "run.purged"
        await purge(store, RUN)
        assert await types_of(store) == ["run.purged"]


async def test_a_resume_or_the_purge_wins_and_the_other_one_is_told():
    came = await every_order(FAILED, reopens)
    for one in came:
        if one.other == "claimed":
            assert one.live and one.types[-2:] == ["signal", "claim"], one
            assert isinstance(one.purger, Killed) or one.purger.what == "kept", one
        else:
            assert isinstance(one.other, RunNotFound) and not one.live, one
            assert isinstance(one.purger, Killed) or one.purger.what == "purged", one
    assert {one.live for one in came} == {True, False}
    assert any(
        isinstance(one.purger, Killed) and len(one.types) > 1 for one in came if not one.live
    )


async def test_of_two_purgers_one_appends_the_tombstone_and_both_leave_it_alone():
    for one in await every_order(DONE, purges):
        assert one.types.count("run.purged") == 1
        assert isinstance(one.other, Purged) and isinstance(one.purger, Purged | Killed)
        said = [who.what for who in (one.purger, one.other) if isinstance(who, Purged)]
        assert said.count("purged") <= 1 and set(said) <= {"purged", "finished", "kept"}
        assert "purged" in said or isinstance(one.purger, Killed)
        kept = [who for who in (one.purger, one.other) if getattr(who, "what", "") == "kept"]
        assert all(who.why == "changed" for who in kept)  # the other one's tombstone came between
        assert kept or one.types == ["run.purged"] or isinstance(one.purger, Killed)


@pytest.mark.parametrize("other", [tells_late, starts_again], ids=["late", "start"])
async def test_nothing_is_written_behind_a_tombstone(other: Actor):
    for one in await every_order(DONE, other):
        assert (
            isinstance(one.other, RunNotFound | RunFinished | InputMismatch) or one.other is False
        )
        assert one.types[-1] in ("run.purged", "run.completed")
        assert isinstance(one.purger, Killed) or one.types == ["run.purged"]


async def test_a_reader_finds_the_run_or_that_it_was_purged_and_never_damage():
    came = await every_order(DONE, reads)
    for one in came:
        assert isinstance(one.other, list) and one.other, one
        gone = one.other.index("gone") if "gone" in one.other else len(one.other)
        assert set(one.other[:gone]) <= {"completed"} and set(one.other[gone:]) <= {"gone"}
    assert {len(one.other) for one in came} > {3}


# ---- what is owed, and children -----------------------------------------------------------------

KID = RunId("a1.kid")


async def family(parent: list[Record], child: list[Record]) -> FaultyStore:
    store = await stored(*parent)
    log = Log(structs.replace(started(run=KID), parent=RUN, depth=1), *child)
    for position, entry in enumerate(log.entries):
        await store.append(KID, entry, expected=position)
    return store


SPAWNED: list[Record] = [started(), claimed(), spawned("0/1", KID), result_of("0/1", KID)]
TOLD = child_ended(KID, {"status": "completed", "message": "Done."})


async def purged_of(store: MemoryStore, wanted: Retention = NOW, *, dry: bool = False) -> list[str]:
    purger = Purger(store, wanted, by="w9", dry=dry)
    return [f"{one.run} {one.why or one.what}" async for one in purger.purge_ended()]


@pytest.mark.parametrize("parent", [SPAWNED, [*SPAWNED, TOLD]], ids=["untold", "told"])
async def test_a_child_stays_while_its_parent_goes_on(parent: list[Record]):
    """Its end may be owed still, and a large answer is read from its journal."""
    store = await family(parent, [claimed(), answered()])
    assert await purged_of(store) == ["a1 running", "a1.kid child"]
    with pytest.raises(StaleSignal, match="its parent a1 is there"):
        await purge(store, KID, force=True)


async def test_a_parent_goes_first_and_its_child_in_the_same_pass():
    store = await family([*SPAWNED, TOLD, answered()], [claimed(), answered()])
    assert await purged_of(store, dry=True) == ["a1 due", "a1.kid due"]
    assert len(await types_of(store)) > 1
    assert await purged_of(store) == ["a1 purged", "a1.kid purged"]


async def test_a_parents_tombstone_comes_after_its_children_were_cancelled():
    """What its end owes is paid first: behind the tombstone nobody would know of them."""
    off: list[Record] = [*SPAWNED, cancel(), cancelled_end()]
    store = await family(off, [claimed()])
    assert await purged_of(store) == ["a1 purged", "a1.kid running"]
    fold = await folded(store, KID)
    assert fold.cancel is not None and "its parent a1 has ended" in fold.cancel.reason
    again = await family(off, [claimed()])
    again.faults[again.appends + 1] = "killed before"
    with pytest.raises(Killed):
        await purge(again, RUN)
    assert (await types_of(again))[-1] == "commit"


@pytest.mark.dishonest
async def test_an_orphan_and_a_child_of_a_damaged_parent_are_kept():
    store = await family([], [claimed(), answered()])
    assert await purged_of(store) == ["a1.kid orphan"]
    store = await family(SPAWNED, [claimed(), answered()])
    raws = store._journals[RUN]  # pyright: ignore[reportPrivateUsage]
    raws[2] = b"garbage"
    assert await purged_of(store) == ["a1 damaged", "a1.kid child"]


# ---- who names a run, and who purges many -------------------------------------------------------


async def test_why_a_named_run_is_kept_is_said():
    with pytest.raises(RunNotFound, match="does not exist"):
        await purge(FaultyStore(), RUN)
    with pytest.raises(StaleSignal, match="only finished runs"):
        await purge(await stored(started(), claimed()), RUN)
    store = await stored(*FAILED)
    with pytest.raises(StaleSignal, match="resume can reopen it") as caught:
        await purge(store, RUN)
    assert "force" in caught.value.hint
    await purge(store, RUN, force=True)
    assert await types_of(store) == ["run.purged"]


@pytest.mark.dishonest
async def test_a_damaged_run_is_never_purged():
    store = await stored(*DONE)
    raws = store._journals[RUN]  # pyright: ignore[reportPrivateUsage]
    raws[3] = raws[3].replace(b"hurry", b"worry")
    with pytest.raises(JournalDamaged):
        await purge(store, RUN, force=True)
    assert await purged_of(store, Retention(keep_s=0, resumable_s=0, flawed=True)) == ["a1 damaged"]
    assert len(await store_raws(store)) == len(DONE)


async def test_what_a_newer_version_wrote_to_is_never_purged():
    log = Log(*DONE)
    raws = [entry.raw for entry in log.entries]
    newer = Log(*DONE[:3])
    raws[3:] = [newer.sealed(answered()).raw.replace(b'"run.completed"', b'"run.crowned"', 1)]
    store = FaultyStore(shared=True)
    for position, raw in enumerate(raws):
        await store.append(RUN, Entry(decode(raw), raw), expected=position)
    with pytest.raises(NewerVersion):
        await purge(store, RUN, force=True)
    assert await purged_of(store, Retention(keep_s=0, resumable_s=0, flawed=True)) == ["a1 newer"]
    assert await store_raws(store) == raws


async def store_raws(store: MemoryStore) -> list[bytes]:
    return [record.data async for page in store.stored(RUN) for record in page]


@pytest.mark.dishonest
async def test_what_an_audit_finds_fault_with_is_named_and_kept():
    """A journal that chains, and that no honest holder writes: a release out of nowhere."""
    store = await stored(started(), claimed(), released(), claimed(), claimed(), answered("x"))
    assert await purged_of(store) == ["a1 purged"]
    store = await stored(started(), claimed(), cancelled_end())
    assert await purged_of(store, dry=True) == ["a1 flawed"]
    assert await purged_of(store) == ["a1 flawed"]
    with pytest.raises(StaleSignal, match="record 3: cancel"):
        await purge(store, RUN)
    assert await purged_of(store, Retention(keep_s=0, flawed=True)) == ["a1 purged"]


async def test_by_time_only_old_runs_go_by_the_stores_clock_and_by_ours():
    store = Timed(shared=True)
    await Log(*DONE).store(store)
    ended = store.time
    for stores_age, our_age, what in (
        (2 * MONTH, MONTH / 2, "young"),
        (MONTH / 2, 2 * MONTH, "young"),
        (2 * MONTH, 2 * MONTH, "purged"),
    ):
        store.time = ended + stores_age
        purger = Purger(store, Retention(), by="w9", clock=lambda age=our_age: ended + age)
        assert [one.why or one.what async for one in purger.purge_ended()] == [what]


async def test_a_pass_is_bounded_and_goes_on_where_the_last_one_ended():
    store = FaultyStore(shared=True)
    for n in range(5):
        log = Log(started(run=f"r{n}"), claimed(), answered())
        for position, entry in enumerate(log.entries):
            await store.append(RunId(f"r{n}"), entry, expected=position)
    purger = Purger(store, NOW, by="w9")
    first = await retain(purger, runs_max=2)
    second = await retain(purger, after=first.cursor, runs_max=2)
    third = await retain(purger, after=second.cursor, runs_max=2)
    passes = [(one.purged, one.looked_at, one.cursor) for one in (first, second, third)]
    assert passes == [(2, 2, "r1"), (2, 2, "r3"), (1, 1, None)]


async def test_a_purge_that_can_not_tell_stops_and_the_next_one_goes_on():
    store = await stored(*DONE)
    store.every = "lost"
    with pytest.raises(StoreUnavailable):
        await purge(store, RUN)
    store.every = None
    assert (await types_of(store))[-1] == "run.completed"
    store.faults[store.appends + 1] = "ack lost"
    await purge(store, RUN)
    assert await types_of(store) == ["run.purged"]


# ---- a tombstone with records before it ---------------------------------------------------------


async def test_a_run_with_a_tombstone_is_gone_for_everybody_though_records_are_left():
    store = await stored(started(), claimed(), submitted("i1"), answered(), RunPurged())
    fleet = Fleet(store)
    assert (await fleet.page(Filter())).runs == []
    assert [run async for run in fleet.list()] == []
    assert await fleet.inbox() == []
    for asked in (
        state(store, RUN),
        fleet.shown(RUN),
        fleet.wait(RUN, timeout_s=0),
        fleet.input(RUN, "i1"),
        submit(store, RUN, "more"),
        signal(store, RUN, "cancel", {}),
        anext(fleet.follow(RUN, after=4)),
    ):
        with pytest.raises(RunNotFound, match="was purged"):
            await asked
    with pytest.raises(InputMismatch, match="stays used"):
        await start(store, "helpdesk", "VPN is down", run_id=RUN)
    assert await purged_of(store) == ["a1 finished"]
    assert await types_of(store) == ["run.purged"]


# ---- copies -------------------------------------------------------------------------------------


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


async def test_a_copy_holds_all_of_the_journal_whoever_else_purges_it(tmp_path: Path):
    """One that another purger's trim came into would be no copy: there is none, then."""
    found: list[int] = []

    async def keeps(store: MemoryStore) -> Purged:
        copies = Archive(tmp_path / str(len(found)))
        return await Purger(store, NOW, by="w8", archive=copies).purge(RUN)

    for first, other in product(range(9), range(1, 9)):
        for actors in ([purges, keeps], [keeps, purges]):
            store = await stored(*DONE)
            raws = await store_raws(store)
            await Stage(store).play(actors, first=first, other=other)
            path = tmp_path / str(len(found)) / f"{RUN}.jsonl"
            copied = lines(path) if path.exists() else None
            assert copied is None or copied[: len(raws)] == raws
            found.append(len(copied or ()))
    assert {0, len(DONE)} <= set(found)


async def test_a_copy_takes_the_place_of_a_beginning_of_it_and_of_nothing_else(tmp_path: Path):
    path = tmp_path / f"{RUN}.jsonl"
    for text, what in ((b"", "purged"), (b"{\n", "archive"), (None, "purged")):
        store = await stored(*DONE)
        whole = b"".join(raw + b"\n" for raw in await store_raws(store))
        path.write_bytes(whole[: len(whole) // 2] if text is None else text)
        before = path.read_bytes()
        done = await Purger(store, NOW, by="w9", archive=Archive(tmp_path)).purge(RUN)
        assert (done.why or done.what) == what
        assert path.read_bytes() == (whole if what == "purged" else before)
        assert (await types_of(store) == ["run.purged"]) == (what == "purged")
        assert os.listdir(tmp_path) == [path.name]


async def test_what_does_not_read_back_as_it_was_written_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A disk that loses what it said it had."""
    monkeypatch.setattr(archive.os, "fsync", lambda fd: os.ftruncate(fd, 100))
    store = await stored(*DONE)
    done = await Purger(store, NOW, by="w9", archive=Archive(tmp_path)).purge(RUN)
    assert done.why == "archive" and "does not read back" in done.text
    assert os.listdir(tmp_path) == [] and len(await types_of(store)) == len(DONE)


async def test_nothing_is_purged_whose_copy_can_not_be_written(tmp_path: Path):
    tmp_path.joinpath("file").touch()
    store = await stored(*DONE)
    purger = Purger(store, NOW, by="w9", archive=Archive(tmp_path / "file"))
    with pytest.raises(StoreUnavailable):
        await purger.purge(RUN)
    assert len(await types_of(store)) == len(DONE)


async def test_a_dry_purge_writes_no_copy(tmp_path: Path):
    store = await stored(*DONE)
    copies = Archive(tmp_path / "copies")
    done = await Purger(store, NOW, by="w9", archive=copies, dry=True).purge(RUN)
    assert (done.what, done.path, os.listdir(tmp_path)) == ("due", None, [])
    assert len(await types_of(store)) == len(DONE)


async def test_a_copy_is_synced_before_its_tombstone_and_that_before_what_it_stands_for_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whenever the power is cut there is the journal, or its copy and a tombstone."""
    done: list[str] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def synced(fd: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name[:2]}")
        fsync(fd)

    def replaced(source: Path, target: Path) -> None:
        done.append(f"{source.suffix} becomes {target.parent.name}/{target.name}")
        replace(source, target)

    def linked(source: Path, target: Path) -> None:
        done.append(f"{source.suffix} becomes {target.parent.name}/{target.name}")
        link(source, target)

    store = FileStore(tmp_path / "runs")
    log = Log(started(), answered())
    tail = 0
    for entry in log.entries:
        answer = await store.append(RUN, entry, expected=tail)
        assert isinstance(answer, Appended)
        tail = answer.tail
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "link", linked)
    await Purger(store, NOW, by="w9", archive=Archive(tmp_path / "copies")).purge(RUN)
    assert done == [
        "sync a1",  # the copy
        ".part becomes copies/a1.jsonl",
        "sync co",
        "sync a1",  # the tombstone
        "sync a1",  # the new file
        ".trim becomes runs/a1.jsonl",
        "sync ru",
    ]


async def test_bytes_of_a_torn_record_are_no_part_of_a_copy(tmp_path: Path):
    store = FileStore(tmp_path / "runs")
    log = Log(started(), answered())
    tail = 0
    for entry in log.entries:
        answer = await store.append(RUN, entry, expected=tail)
        assert isinstance(answer, Appended)
        tail = answer.tail
    with store.path(RUN).open("ab") as file:
        file.write(b'{"type":"sig')
    done = await Purger(store, NOW, by="w9", archive=Archive(tmp_path / "copies")).purge(RUN)
    assert done.what == "purged"
    assert lines(tmp_path / "copies" / "a1.jsonl") == [entry.raw for entry in log.entries]
    assert [entry.type for entry in (await store.load(RUN)).entries] == ["run.purged"]


def test_a_directory_is_not_the_folder_of_its_own_copies(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "x" / "..", tmp_path / "link"):
        with pytest.raises(InvalidId, match="is the store itself"):
            Purger(FileStore(tmp_path), NOW, by="w9", archive=Archive(folder))
