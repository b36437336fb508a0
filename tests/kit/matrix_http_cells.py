"""The cells of the crash matrix for workers over HTTP (R76): who meets which fault, and where."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

Policy: TypeAlias = Literal["reconcile", "interrupt", "probe"]
POLICIES: Final[tuple[Policy, ...]] = ("reconcile", "interrupt", "probe")
TOOLS: Final = ("alpha", "book", "gamma")
AT: Final = {"first": 0, "unsafe": 1, "last": 2}
ANSWER: Final = ["one", "three"]
PERSON: Final = "a person's word"

WORKER_STEP: Final = {
    "sent": "sent step.started {at}",
    "intent": "after step.started {at}",
    "in-before": "in {tool} before",
    "in-after": "in {tool} after",
    "unrecorded": "before step.completed {at}",
    "sent-result": "sent step.completed {at}",
    "recorded": "after step.completed {at}",
}
"""Places in the worker, by the requests it makes. `sent`: no answer was read yet."""

WORKER_RUN: Final = {
    "polled": "after poll",
    "sent-read": "sent journal.read",
    "claimed": "after journal.read",
    "unended": "before complete",
    "sent-end": "sent complete",
    "ended": "after complete",
}

BRIDGE_STEP: Final = {
    "start-before": "before step.started {step}",
    "start-after": "after step.started {step}",
    "result-before": "before step.completed {step}",
    "result-after": "after step.completed {step}",
}
"""Places in the bridge, by the records it appends."""

BRIDGE_RUN: Final = {
    "claim-before": "before claim new",
    "claim-after": "after claim new",
    "end-before": "before run.completed",
    "end-after": "after run.completed",
    "unacked": "before ack",
}


class Cell(NamedTuple):
    """`who`: worker or bridge meets the fault: kill; zombie-…: stopped past the ack wait and let go
    on beside its successor, while the run waits for a person (parked), or after the run's end.
    `tool`: the bridge is killed while the worker is in its tool."""

    who: Literal["worker", "bridge", "tool", "none"]
    seam: str
    at: str
    fault: str
    policy: Policy

    @property
    def id(self) -> str:
        return "-".join(word for word in self if word)

    @property
    def place(self) -> str:
        at = AT.get(self.at, 0)
        tool = TOOLS[at]
        match self.who, self.seam:
            case "none", _:
                return "nowhere"
            case "worker", "lingers" | "lingers-commit":
                return "in book before"
            case "worker", "committed":
                return f"after continue {at + 1}"
            case "bridge", "commit-before" | "commit-after":
                return f"{self.seam.partition('-')[2]} commit {at}"
            case "bridge", seam:
                place = BRIDGE_STEP.get(seam) or BRIDGE_RUN[seam]
                return place.format(step=f"0/{at}")
            case _, seam:
                place = WORKER_STEP.get(seam) or WORKER_RUN[seam]
                return place.format(at=at, tool=tool)

    @property
    def zombie(self) -> bool:
        return self.fault.startswith("zombie")

    @property
    def commits(self) -> bool:
        """Whether each call is a turn of its own."""
        return "commit" in self.seam

    @property
    def unknown(self) -> bool:
        """Nobody can know whether the unsafe call happened: its claim is lost in the middle."""
        if self.at != "unsafe":
            return False
        if self.who == "worker":
            known = ("sent-result", "recorded", "committed")
            return self.seam not in known
        return self.zombie and self.seam in ("start-after", "result-before")

    @property
    def lingers(self) -> bool:
        """Whether the zombie is let go on when all but its call's deadline says that it is over."""
        return self.seam.startswith("lingers")

    @property
    def called(self) -> bool:
        """Whether an unknown call was begun by who met the fault."""
        return self.seam not in ("sent", "intent", "start-after")

    @property
    def took_effect(self) -> bool:
        """Whether it had taken effect when the fault came."""
        return self.seam in ("in-after", "unrecorded", "result-before")

    @property
    def ended(self) -> bool:
        """Whether the run is over, for who comes after."""
        return self.seam in ("sent-end", "ended", "end-after", "unacked")

    def expected(self) -> tuple[str, int, int, int]:
        """Of the unsafe call: via; starts written; calls; effects."""
        if not self.unknown:
            return "run", 1, 1, 1
        called, effects = int(self.called), int(self.took_effect)
        if self.zombie:
            effects = called  # it goes on to its end
        if called and self.fault in ("zombie-beside", "zombie-parked"):
            return "late", 1, 1, 1  # and tells, before it is settled or a permitted retry began
        if self.policy == "reconcile":
            return "reconcile", 1, called, effects
        if self.policy == "interrupt":
            return "interrupted", 1, called, effects
        if self.took_effect:
            return "probe", 1, 1, 1
        # The probe spoke after the deadline; the effect of one that stood still lands all the same.
        return "run", 2, 1 + called, 1 + effects


def cells() -> list[Cell]:
    """All that mean something. The unsafe tool's policy matters at its own places; of zombies and
    bridges elsewhere one policy stands for all."""
    found = [Cell("none", "", "", "none", policy) for policy in POLICIES]
    for policy in POLICIES:
        whole = policy == "reconcile"
        found += [c for c in _worker(policy) if whole or c.at == "unsafe" or c.fault == "kill"]
        found += [c for c in _bridge(policy) if whole or c.unknown]
    for seam in ("lingers", "lingers-commit"):
        found += [
            Cell("worker", seam, "unsafe", "zombie-parked", policy)
            for policy in ("reconcile", "probe")
        ]
    return found


def _worker(policy: Policy) -> Iterator[Cell]:
    for seam in WORKER_RUN:
        yield from _with("worker", seam, "", policy)
    for at in AT:
        for seam in (*WORKER_STEP, "committed"):
            yield from _with("worker", seam, at, policy)


def _bridge(policy: Policy) -> Iterator[Cell]:
    for seam in BRIDGE_RUN:
        yield from _with("bridge", seam, "", policy)
    for at in AT:
        for seam in (*BRIDGE_STEP, "commit-before", "commit-after"):
            yield from _with("bridge", seam, at, policy)
        yield Cell("tool", "in-before", at, "kill", policy)
        yield Cell("tool", "in-after", at, "kill", policy)


def _with(who: Literal["worker", "bridge"], seam: str, at: str, policy: Policy) -> Iterator[Cell]:
    yield Cell(who, seam, at, "kill", policy)
    after = Cell(who, seam, at, "zombie-after", policy)
    yield after
    if not after.ended:
        parked = after.unknown and policy == "reconcile"
        yield after._replace(fault="zombie-parked" if parked else "zombie-beside")
