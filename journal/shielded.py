"""Shell: an observer that calls code of others, kept from doing harm: what it raises ends it, and
nothing else. A provider's sampler or processor may raise, and a run must not stop for its trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import TypeVar

from .fold import Fold
from .ids import RunId
from .observing import UNOBSERVED, Observer, Trace
from .records import Claim, Record, StepStarted

log = logging.getLogger("runfold")

T = TypeVar("T")


class Shielded:
    """Tells the observer, until that raises: then its log line says so, and it is told no more."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def _told(self, tell: Callable[[Observer], T], otherwise: T) -> T:
        try:
            return tell(self._observer)
        except Exception:
            self._give_up()
            return otherwise

    def _give_up(self) -> None:
        if self._observer is not UNOBSERVED:
            name = type(self._observer).__name__
            log.exception("%s failed, and is off until this process is started again", name)
            self._observer = UNOBSERVED

    @contextmanager
    def _around(
        self, enter: Callable[[Observer], AbstractContextManager[object]]
    ) -> Generator[None]:
        def entered(observer: Observer) -> AbstractContextManager[object]:
            inside = enter(observer)
            inside.__enter__()
            return inside

        inside = self._told(entered, None)
        try:
            yield
        except BaseException as error:
            self._left(inside, error)
            raise
        self._left(inside, None)

    def _left(
        self, inside: AbstractContextManager[object] | None, error: BaseException | None
    ) -> None:
        """`error`, raised inside, goes on from here, whatever is made of it."""
        if inside is None:
            return
        try:
            if error is None:
                inside.__exit__(None, None, None)
            else:
                inside.__exit__(type(error), error, error.__traceback__)
        except Exception as other:
            if other is not error:
                self._give_up()

    # ---- what it is told ----------------------------------------------------------------------

    def door(
        self, what: str, trace: str, at: datetime | None = None
    ) -> AbstractContextManager[object]:
        return self._around(lambda observer: observer.door(what, trace, at))

    def carry(self, run_id: RunId, record: Record, trace: Trace) -> str:
        return self._told(lambda observer: observer.carry(run_id, record, trace), "")

    def appended(self, run_id: RunId, fold: Fold, record: Record, trace: Trace) -> None:
        self._told(lambda observer: observer.appended(run_id, fold, record, trace), None)

    def calling(self, run_id: RunId, start: StepStarted) -> AbstractContextManager[object]:
        return self._around(lambda observer: observer.calling(run_id, start))

    def replayed(self, run_id: RunId, step: str) -> None:
        self._told(lambda observer: observer.replayed(run_id, step), None)

    def woken(self, run_id: RunId, claim: Claim, since: str) -> None:
        self._told(lambda observer: observer.woken(run_id, claim, since), None)

    def fenced(self, run_id: RunId, claim: int) -> None:
        self._told(lambda observer: observer.fenced(run_id, claim), None)

    def let_go(self, run_id: RunId, claim: int) -> None:
        self._told(lambda observer: observer.let_go(run_id, claim), None)
