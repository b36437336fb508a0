"""An observer that calls code of others does no harm: what it raises ends it, and nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from kit.build import RUN, claimed, start_of

from journal.fold import Fold
from journal.ids import RunId
from journal.observing import Trace
from journal.shielded import Shielded

ID = RunId(RUN)
CLAIM, START, FOLD, TRACE = claimed(), start_of("0/0"), Fold(), Trace()


class Told:
    """Notes what it is told; raises at `raising`."""

    def __init__(self, raising: str = "") -> None:
        self.raising = raising
        self.heard: list[Any] = []

    def _hear(self, *what: Any) -> str:
        self.heard.append(what)
        if what[0] == self.raising:
            raise ZeroDivisionError("of the observer")
        return "carried"

    @contextmanager
    def _around(self, name: str, *what: Any) -> Any:
        self._hear(f"{name} entered", *what)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._hear(f"{name} left", error)

    def door(self, *what: Any) -> AbstractContextManager[object]:
        self._hear("door")
        return self._around("door", *what)

    def calling(self, *what: Any) -> AbstractContextManager[object]:
        self._hear("calling")
        return self._around("calling", *what)

    def carry(self, *what: Any) -> str:
        return self._hear("carry", *what)

    def appended(self, *what: Any) -> None:
        self._hear("appended", *what)

    def replayed(self, *what: Any) -> None:
        self._hear("replayed", *what)

    def woken(self, *what: Any) -> None:
        self._hear("woken", *what)

    def fenced(self, *what: Any) -> None:
        self._hear("fenced", *what)

    def let_go(self, *what: Any) -> None:
        self._hear("let_go", *what)


def everything(shielded: Shielded) -> tuple[str, list[str]]:
    """Whatever an observer can be told, and what was done inside."""
    done: list[str] = []
    with shielded.door("POST /runs", "trace"):
        carried = shielded.carry(ID, CLAIM, TRACE)
        shielded.appended(ID, FOLD, CLAIM, TRACE)
        done.append("door")
    with shielded.calling(ID, START):
        done.append("calling")
    shielded.replayed(ID, "0/0")
    shielded.woken(ID, CLAIM, "since")
    shielded.fenced(ID, 2)
    shielded.let_go(ID, 2)
    return carried, done


ALL = [
    ("door",),
    ("door entered", "POST /runs", "trace", None),
    ("carry", ID, CLAIM, TRACE),
    ("appended", ID, FOLD, CLAIM, TRACE),
    ("door left", None),
    ("calling",),
    ("calling entered", ID, START),
    ("calling left", None),
    ("replayed", ID, "0/0"),
    ("woken", ID, CLAIM, "since"),
    ("fenced", ID, 2),
    ("let_go", ID, 2),
]


def test_it_is_told_everything() -> None:
    told = Told()
    assert everything(Shielded(told)) == ("carried", ["door", "calling"])
    assert told.heard == ALL


@pytest.mark.parametrize("at", range(len(ALL)))
def test_what_it_raises_ends_it_and_nothing_else(caplog: pytest.LogCaptureFixture, at: int) -> None:
    told = Told(raising=ALL[at][0])
    carried, done = everything(Shielded(told))
    assert (carried, done) == ("carried" if at > 2 else "", ["door", "calling"])
    inside = at in (2, 3)  # whose door was entered is told that it is left
    assert told.heard == ALL[: at + 1] + [("door left", None)] * inside
    (line,) = caplog.records
    assert line.message == "Told failed, and is off until this process is started again"
    assert line.exc_info is not None and line.name == "runfold"


@pytest.mark.parametrize("raising", ["", "calling entered", "calling left"])
@pytest.mark.parametrize("error", [ValueError("own"), KeyboardInterrupt()])
def test_what_is_raised_inside_comes_out_as_it_was(raising: str, error: BaseException) -> None:
    told = Told(raising)
    shielded = Shielded(told)
    try:
        raise KeyError("handled around it")
    except KeyError:
        with pytest.raises(type(error)) as raised, shielded.calling(ID, START):
            raise error from None
        with shielded.door("POST /runs", ""):
            pass
    assert raised.value is error
    if raising != "calling entered":
        assert told.heard[2] == ("calling left", error)
    assert told.heard[-1][0] == (raising or "door left")
