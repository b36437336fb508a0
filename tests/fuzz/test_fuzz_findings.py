"""What the targets of this folder found, reduced (docs/guarantees.md lists it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from fuzz.honest import file_of, journals
from kit import build
from kit.build import RUN, Log

from journal.audit import audit
from journal.codec import Damage, Entry
from journal.errors import JournalDamaged
from journal.records import Summary
from journal.store import Appended, Conflict
from journal.stores.file import FileStore
from journal.summary import restored
from journal.views import waiting_since
from journal.waits import due, instant_text, parse_instant
from runfold import Agent, Bounds, Completed, run
from runfold.terminal import print_run, timeline
from runfold.testing import ScriptedModel, say

NO_INSTANTS = ("soon", "", "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00")

(*BEFORE, NEXT) = journals()[0]
WHOLE = file_of(BEFORE)


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path)


async def test_a_torn_tail_is_one_for_who_reads_on_too(store: FileStore) -> None:
    """Found by `file`: read from the start, bytes behind the last line were a torn tail; read on
    from that line, a holder was told that line 1 is no journal."""
    for torn in (b"x", b" ", b"\xff\xfe", b"\0\0", b"{"):
        store.path(RUN).write_bytes(WHOLE + torn)
        for after in (0, len(WHOLE)):
            found = await store.load(RUN, after=after)
            assert (found.tail, found.torn) == (len(WHOLE), len(torn))


async def test_a_blank_line_is_damage_for_who_reads_on_too(store: FileStore) -> None:
    """Found by `file`: read on from the last line, a blank one behind it was a torn tail, and the
    next append removed it: the file was refused until then, and not any more."""
    store.path(RUN).write_bytes(WHOLE + b"\n")
    for after in (0, len(WHOLE)):
        with pytest.raises(JournalDamaged, match="blank line"):
            await store.load(RUN, after=after)
    assert await store.append(RUN, NEXT, expected=len(WHOLE)) == Conflict()
    assert store.path(RUN).read_bytes() == WHOLE + b"\n"


async def test_nothing_is_written_into_a_line(store: FileStore) -> None:
    """Found by `file`: a token one below the end, of a file that was another one, took the last
    line's end off, and the next line stood in it."""
    store.path(RUN).write_bytes(WHOLE)
    for expected in (1, 2, len(WHOLE) - 2, len(WHOLE) - 1, len(WHOLE) + 1):
        assert await store.append(RUN, NEXT, expected=expected) == Conflict()
        assert store.path(RUN).read_bytes() == WHOLE
    assert await store.append(RUN, NEXT, expected=len(WHOLE)) == Appended(
        len(WHOLE) + len(NEXT.raw) + 1
    )
    assert store.path(RUN).read_bytes() == file_of([*BEFORE, Entry(NEXT.record, NEXT.raw)])


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00.000Z", "yesterday", *NO_INSTANTS])
def test_a_commit_folds_whatever_its_time_says(at: str) -> None:
    """Found by `sweep`: `at` is informative only, and eight days before the year 1 is no date:
    every reader of the run ended in an OverflowError, the auditor too."""
    log = Log(build.started(), build.claimed())
    log.at = at
    log.add(build.goes_on({"turn": 1}))
    assert (log.fold.iteration, log.fold.status()) == (1, "running")
    assert audit(RUN, log.entries) == ()


@pytest.mark.parametrize("at", ["9999-12-31T23:59:59.999Z", "yesterday"])
async def test_a_run_with_a_bound_goes_on_whatever_its_start_says(at: str) -> None:
    """Found beside it: a run's time is bounded from its first record's `at` on."""
    log = Log()
    log.at = at
    log.add(build.started())
    agent = Agent("helpdesk", model=ScriptedModel(say("ok")), bounds=Bounds(duration_s=60))
    assert isinstance(await run(await log.store(), agent, RUN), Completed)


@pytest.mark.parametrize("text", NO_INSTANTS)
def test_what_has_no_date_in_utc_is_no_instant(text: str) -> None:
    """Found beside it: a wait until such an instant passed for one, and its timer could not be
    published."""
    with pytest.raises(ValueError, match=r"instant|isoformat"):
        parse_instant(text)
    if text:
        with pytest.raises(Damage, match="no instant"):
            Log(build.started(), build.claimed(), build.parked("pause", until=text))
    assert due("0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z")


@pytest.mark.parametrize("text", [text for text in NO_INSTANTS if text])
def test_a_commit_to_restart_at_waits_until_an_instant(text: str) -> None:
    """Found by `sweep`: read from the start it was damage; who went on from the commit took it, and
    ended in a ValueError when somebody asked what the run waits for."""
    log = Log(build.started(), build.claimed())
    commit = build.goes_on({"turn": 1}, until=text)
    entry = log.sealed(msgspec.structs.replace(commit, summary=Summary(revision="1")))
    for taken in (lambda: log.fold.copy().apply(entry), lambda: restored(log.entries[0], entry)):
        with pytest.raises(Damage, match="no instant"):
            taken()


@pytest.mark.parametrize("text", [text for text in NO_INSTANTS if text])
def test_a_deadline_is_an_instant(text: str) -> None:
    """Found beside it: nothing looked at a start's deadline until somebody had to know whether the
    call can still be running, and ended in a ValueError."""
    log = Log(build.started(), build.claimed())
    start = log.sealed(build.start_of("0/0", deadline=text))
    with pytest.raises(Damage, match="no instant"):
        log.fold.apply(start)
    assert "deadline" in [one.rule for one in audit(RUN, [*log.entries, start])]


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_what_waits_for_a_person_is_shown_whatever_its_time_says(at: str) -> None:
    """Found by `sweep`: `since` had no date in UTC, and `runfold inbox` none for it."""
    log = Log(build.started())
    log.at = at
    log.add(build.start_of("0/0"))
    assert instant_text(waiting_since(log.fold)) == "1970-01-01T00:00:00.000Z"


def test_a_step_without_a_name_is_shown() -> None:
    """Found by `sweep`: `runfold show` ended in an IndexError."""
    log = Log(build.started(), build.start_of(""))
    assert timeline(log.entries[-1]).endswith("start      null")


@pytest.mark.parametrize("odd", [{}, {"result": 1, "verdicts": [{"verdict": "allow"}]}])
def test_what_stands_behind_a_newer_versions_record_is_shown(odd: dict[str, Any]) -> None:
    """Found by `forgery`: nothing behind such a record is checked, and `runfold show` ended in a
    TypeError over a result of another shape."""
    log = Log(build.started())
    envelope = {"v": 1, "n": 2, "id": "0123456789ab-2", "prev": log.fold.head}
    newer = log.raw(msgspec.json.encode({"type": "step.judged", **envelope}))
    log.fold.apply(newer)
    envelope = {"v": 1, "n": 3, "id": "0123456789ab-3", "prev": log.fold.head}
    result = log.raw(
        msgspec.json.encode({"type": "step.completed", "step": "x", **envelope, **odd})
    )
    log.fold.apply(result)
    assert log.fold.status() == "newer"
    assert "step.completed" in timeline(result)


def test_a_printed_command_runs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Found beside it: no writer of ours names a step so; who copies the command must not mind."""
    log = Log(build.started(), build.start_of("0/0; touch gone"))
    print_run(log.fold, "")
    assert "runfold reconcile a1 '0/0; touch gone' --start 2" in capsys.readouterr().out
