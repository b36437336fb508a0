"""R53: a sweep misses no run that nobody would move on, and keeps only what it has to look at."""

from __future__ import annotations

import pytest
from kit.histories import LATER, seeded

from journal import sweep_book
from journal.fold import Fold
from journal.ids import RunId
from journal.sweep_book import Book, Mark, Rest, rest_of
from journal.waits import instant_text, other_code_may, parse_instant

RUN = RunId("a1")
FAR = "9999-01-01T00:00:00.000Z"
OTHER = "another revision"
WAITING = b"{}"  # no record: what it waits for is not known


def mark(seq: int = 1, stored: float = 0.0) -> Mark:
    return Mark(seq, stored)


def noted(word: str | None, data: bytes) -> Rest:
    """Where a book puts a run with this last record."""
    book = Book()
    book.note(RUN, word, mark(), data)
    if RUN in book.due:
        return book.due[RUN].until
    return "open" if RUN in book.open else "ended"


def is_sound(fold: Fold, rest: Rest) -> None:
    """Whatever could move the run on without another record, somebody looks at it then."""
    if fold.finished:
        return
    movable = (
        fold.claim is not None
        or fold.runnable()
        or (fold.wait is not None and bool(fold.wait.child))
        or other_code_may(fold, OTHER)
    )
    match rest:
        case "open":
            pass
        case "ended":
            assert not movable and not fold.runnable(FAR)
        case instant:
            assert not movable and not fold.runnable(text_of(instant - 1))
            assert fold.runnable(text_of(instant)) or not fold.runnable(FAR)


def text_of(instant: float) -> str:
    moved = parse_instant(LATER).timestamp()
    return LATER if instant == moved else instant_text(parse_instant(LATER).replace(year=2026))


@pytest.mark.parametrize("seed", range(150))
def test_what_is_not_kept_only_a_record_can_move_on(seed: int) -> None:
    fold = Fold()
    for entry in seeded(seed, 50).entries:
        fold.apply(entry)
        is_sound(fold, noted(fold.status(), entry.raw))
        is_sound(fold, rest_of(fold, OTHER))


def test_runs_that_rest_are_told_by_their_last_record() -> None:
    """Else each would be read once: a million of them by each worker."""
    found: set[str] = set()
    for seed in range(150):
        fold = Fold()
        for entry in seeded(seed, 50).entries:
            fold.apply(entry)
            found.add(f"{fold.status()} {noted(fold.status(), entry.raw)}")
    until = parse_instant(LATER).timestamp()
    assert {"running open", "completed ended", "failed ended", "awaiting_approval ended"} <= found
    assert {"waiting ended", f"waiting {until}", "indeterminate ended"} <= found


def test_a_run_is_kept_as_its_newest_record_says() -> None:
    book = Book()
    book.note(RUN, "running", mark(1), b"")
    assert list(book.open) == [RUN]
    book.note(RUN, "completed", mark(2), b"")
    assert not book.open and not book.due
    book.note(RUN, "running", mark(3), b"")  # reopened
    book.note(RUN, None, mark(4), b"")  # a word that is missing says nothing
    assert list(book.open) == [RUN]
    book.note(RUN, "purged", mark(5), b"")
    assert not book.open


def test_each_has_its_turn_and_the_young_wait() -> None:
    book = Book()
    for number in range(5):
        book.note(RunId(f"r{number}"), "running", mark(number, stored=float(number)), b"")
    seen: list[str] = []
    for _ in range(4):
        turn = book.turn(now=100.0, stored_before=3.0, runs_max=2)
        seen += [run for run, _ in turn]
        for run, _ in turn:
            book.looked(run, "open")
    assert seen == ["r0", "r1", "r2", "r3", "r0", "r1", "r2", "r3"]


def test_a_wait_for_a_time_is_looked_at_when_it_is_over_and_not_before() -> None:
    book = Book()
    book.note(RUN, "running", mark(1), b"")
    book.turn(now=0.0, stored_before=0.0, runs_max=9)
    book.looked(RUN, 50.0)
    assert book.turn(now=49.0, stored_before=99.0, runs_max=9) == []
    assert [run for run, _ in book.turn(now=50.0, stored_before=-1.0, runs_max=9)] == [RUN]
    # Whoever could not look at it then has it in its turn.
    assert [run for run, _ in book.turn(now=51.0, stored_before=0.0, runs_max=9)] == [RUN]


def test_what_is_looked_at_as_it_ends_is_not_kept() -> None:
    book = Book()
    book.note(RUN, "running", mark(1), b"")
    book.turn(now=0.0, stored_before=0.0, runs_max=9)
    book.note(RUN, "completed", mark(2), b"")
    book.looked(RUN, "open")
    assert not book.open


def test_all_are_listed_anew_where_what_was_noted_may_not_be_what_there_is() -> None:
    book = Book()
    assert book.must_list("then", last=0, runs=0, now=0.0)
    book.begin("then")
    book.listed(10)
    assert not book.must_list("then", last=10, runs=3, now=0.0)
    assert not book.must_list("then", last=500, runs=3, now=0.0)
    assert book.must_list("then", last=9, runs=3, now=0.0), "a backup was put back"
    assert book.must_list("now", last=10, runs=3, now=0.0), "another stream of that name"
    assert book.must_list("then", last=1_000_000, runs=3, now=0.0), "to list is less to read"
    assert not book.must_list("then", last=1_000_000, runs=600_000, now=0.0)
    book.listed(0)
    assert book.must_list("then", last=10, runs=3, now=0.0), "up to where is not known"


def test_of_more_runs_than_are_kept_each_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_book, "KEPT_MAX", 10)
    book, seen, listings = Book(), set[str](), 0
    for _ in range(40):
        if book.must_list("then", last=1, runs=35, now=0.0):
            listings += 1
            book.begin("then")
            for number in range(35):
                book.note(RunId(f"r{number:02}"), "running", mark(), b"")
                assert len(book.open) < 20
            book.listed(1)
            assert len(book.open) <= 10
        for run, _ in book.turn(now=0.0, stored_before=0.0, runs_max=3):
            seen.add(run)
            book.looked(run, "open")
    assert len(seen) == 35 and listings < 20


def test_of_more_waits_than_are_kept_none_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_book, "KEPT_MAX", 10)
    times = {RunId(f"r{number:02}"): float(100 + 7 * number % 35) for number in range(35)}
    book, found, now = Book(), dict[str, float](), 99.0
    while len(found) < 35 and now < 200:
        if book.must_list("then", last=1, runs=35, now=now):
            book.begin("then")
            for run, until in times.items():
                if run not in found:
                    book.note(run, "waiting", mark(), WAITING)
                    book.looked(run, until)
                    assert len(book.due) < 20
            book.listed(1)
            assert len(book.due) <= 10
        for run, _ in book.turn(now=now, stored_before=-1.0, runs_max=3):
            found[run] = now
            book.looked(run, "ended")
        now += 1.0
    assert all(times[run] <= at <= times[run] + 2 for run, at in found.items())
    assert len(found) == 35
