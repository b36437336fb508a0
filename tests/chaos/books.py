"""What was acknowledged to whom, and what became of each run: the soak's own memory, outside the
product."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chaos.plans import Plan


class Told(NamedTuple):
    """A signal or input that was acknowledged. `n`: the ordinal of the receipt; None where only the
    SIGNALS stream said that it has it. `result`: of the receipt."""

    run: str
    name: str
    request: str
    payload: dict[str, Any]
    door: str
    n: int | None
    result: str


class Wrong(NamedTuple):
    """A violation. `run`: empty where it is not about one."""

    run: str
    what: str
    text: str


class Heard(NamedTuple):
    """A signal or input record, as far as acknowledgements are checked against it."""

    n: int
    name: str
    request: str
    payload: Any


@dataclass
class Book:
    """One run. `records`: how many it had when it was last checked; `decided`: what was said about
    a marker, or a start, to be said again the same; `told`: what was acknowledged."""

    plan: Plan
    begun: float
    acknowledged: bool = False
    parent: str = ""
    status: str = ""
    seen: float = 0.0
    ended: str = ""
    records: int = 0
    heard: list[Heard] = field(default_factory=list)
    withdrawn: set[str] = field(default_factory=set)
    placed: list[str] = field(default_factory=list)
    decided: dict[Any, dict[str, Any]] = field(default_factory=dict)
    told: list[Told] = field(default_factory=list)
    withdrawals: list[str] = field(default_factory=list)
    """Request ids of inputs whose withdrawal was acknowledged."""

    resumed: int = 0
    cancel_asked: bool = False


class Books:
    """All runs, and what went wrong."""

    def __init__(self) -> None:
        self.runs: dict[str, Book] = {}
        self.active: set[str] = set()
        self.wrong: list[Wrong] = []
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Answers that were none: by door and code. Asked again, as a rule."""

    def begin(self, plan: Plan, now: float, parent: str = "") -> Book:
        book = Book(plan, now, parent=parent, seen=now)
        self.runs[plan.run] = book
        self.active.add(plan.run)
        return book

    def violation(self, run: str, what: str, text: str) -> None:
        found = Wrong(run, what, text)
        if found not in self.wrong:
            self.wrong.append(found)
            print(f"VIOLATION {what} {run}: {text}", flush=True)
