"""The cells of the crash matrix (R76): seam, position, fault, and policy of the unsafe tool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

Policy: TypeAlias = Literal["reconcile", "interrupt", "probe"]
POLICIES: tuple[Policy, ...] = ("reconcile", "interrupt", "probe")
STEPS = {"first": "tool/1/0/alpha", "unsafe": "tool/2/0/book", "after": "tool/3/0/gamma"}
BOOK = STEPS["unsafe"]
ANSWER = "3 calls: one, three."
PERSON = "a person's word"

PLACES = {
    "intent": "after step.started {step}",
    "in-before": "in {step} before",
    "in-after": "in {step} after",
    "unrecorded": "before step.completed {step}",
    "recorded": "after step.completed {step}",
}
UNKNOWN = ("intent", "in-before", "in-after", "unrecorded")
"""At the unsafe step: nobody can know whether it happened."""

TELLING = ("kill-repeat", "kill-sweep", "zombie")
"""Faults of a signaller, by what brings the wake: a repeat of the request, or the sweep."""


class Cell(NamedTuple):
    """`fault`: kill; zombie-beside, -parked, -after: stopped past the ack wait, and let go on while
    the successor works, while the run waits for a person, after it has ended. none: the crash-free
    run. TELLING: of a signaller."""

    seam: str
    at: str
    fault: str
    policy: Policy

    @property
    def id(self) -> str:
        return "-".join(word for word in self if word)

    @property
    def place(self) -> str:
        match self.seam, self.at:
            case ("before-claim", at):
                return f"before claim {'new' if at == 'first' else 'retry'}"
            case ("claimed", at):
                return f"after claim {'new' if at == 'first' else 'retry'}"
            case ("committed", "end"):
                return "after run.completed"
            case ("committed", at):
                return f"after commit {list(STEPS).index(at)}"
            case ("parked", "reconcile" | "approval"):
                return f"after park {self.at}"
            case ("parked", _):
                return "after park retry"
            case ("unacked", _):
                return "before ack"
            case ("unwoken" | "none", _):
                return "nowhere"
            case ("heartbeat", _):
                return "after heartbeat"
            case ("lingers", _):
                return PLACES["in-before"].format(step=BOOK)
            case _:
                return PLACES[self.seam].format(step=STEPS[self.at])

    @property
    def unknown(self) -> bool:
        return self.seam in UNKNOWN and self.at == "unsafe"

    @property
    def trigger(self) -> str:
        if self.at == "reconcile":
            return "write"
        if self.seam == "heartbeat":
            return "slow"
        again = self.seam in ("before-claim", "claimed") and self.at != "first"
        if again or (self.seam == "parked" and self.at in STEPS):
            return f"model {list(STEPS).index(self.at) + 1}"
        return ""

    @property
    def approval(self) -> bool:
        return self.at in ("approval", "approve")

    @property
    def person(self) -> bool:
        """Whether a person must settle the unsafe call."""
        return self.at == "reconcile" or (self.unknown and self.policy == "reconcile")

    @property
    def asks(self) -> bool:
        return self.person or (self.seam == "lingers" and self.policy == "reconcile")

    @property
    def rests(self) -> bool:
        """Whether the claim had ended when the fault came: no newer one tells that time is over."""
        return self.seam in ("parked", "unacked") or self.at == "end"

    @property
    def taken_over(self) -> bool:
        """Whether another worker must have claimed the run: not where it had ended, nor where the
        zombie is back in time to do so itself."""
        ended = self.seam == "unacked" or self.at == "end"
        back = self.seam == "parked" and self.fault == "zombie-parked"
        return not (ended or back or self.seam in ("unwoken", "none"))

    @property
    def deadline_s(self) -> float:
        """Of its write, in seconds from the start; 0: any. Short where the end of a call that is
        lost, or was never made, has to be waited for; longer where the run must be parked before,
        and the zombie be back."""
        if self.seam == "lingers":
            return 12.0
        if not self.unknown or self.policy != "probe":
            return 0.0
        if self.fault == "kill":
            return 3.0
        return 12.0 if self.seam == "intent" else 0.0

    @property
    def zombie(self) -> bool:
        return self.fault.startswith("zombie")


def cells() -> list[Cell]:
    """All that mean something. Not: `beside` where the successor has nothing left to work on;
    `beside` and `after` of a probed call: the probe waits for the end of that call (R22), so the
    zombie is let go on while the run is parked for it."""
    found = [Cell("none", at, "none", policy) for policy in POLICIES for at in ("", "approve")]
    for policy in POLICIES:
        for seam in PLACES:
            for at in STEPS:
                cell = Cell(seam, at, "kill", policy)
                if cell.unknown and policy == "reconcile":
                    found += _with(seam, at, policy, "beside", "parked", "after")
                elif cell.unknown and policy == "probe":
                    found += _with(seam, at, policy, "parked")
                else:
                    found += _with(seam, at, policy, "beside", "after")
        for seam in ("before-claim", "claimed", "committed", "parked"):
            for at in STEPS:
                found += _with(seam, at, policy, "beside", "after")
        found += _with("committed", "end", policy, "after")
        found += _with("unacked", "", policy, "after")
        found += _with("parked", "approval", policy, "beside", "parked", "after")
        found += _with("heartbeat", "first", policy, "beside", "after")
        found += [Cell("unwoken", "approve", fault, policy) for fault in TELLING]
    found += _with("parked", "reconcile", "reconcile", "beside", "parked", "after")
    found += [Cell("unwoken", "reconcile", fault, "reconcile") for fault in TELLING]
    found += [Cell("lingers", "unsafe", "zombie-parked", p) for p in ("probe", "reconcile")]
    return found


def _with(seam: str, at: str, policy: Policy, *zombies: str) -> Iterator[Cell]:
    yield Cell(seam, at, "kill", policy)
    for when in zombies:
        yield Cell(seam, at, f"zombie-{when}", policy)
