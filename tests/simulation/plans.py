"""What happens in a schedule, drawn from its seed: who is there, which runs, what people do, what
breaks and when."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from .agents import AGENTS

WINDOW_S: Final = 6.0
"""Faults happen within this; then the world must come to rest."""


class Odds(Struct, frozen=True, kw_only=True):
    """Of each message: how likely each fault is. `slow_s`: how long it takes at most, then.
    `in_call`: that the process of a call is killed or stalled before it has its effect, and behind.
    """

    slow: float = 0.0
    slow_s: float = 0.02
    lost: float = 0.0
    unanswered: float = 0.0
    lost_ack: float = 0.0
    late: float = 0.0
    never: float = 0.0
    refused: float = 0.0
    twice: float = 0.0
    forgotten: float = 0.0
    in_call: float = 0.0


LASTING: Final = ("stall", "partition", "pause")


class Event(Struct, frozen=True, kw_only=True):
    """A fault at a moment. `who`: which of those that it may hit. `fuse`: callbacks of its process
    until it happens, counted from `at_s`; `sends`: messages that it sends (the last one arrives,
    unless `lost`); none of them: at once. `for_s`: how long it lasts."""

    kind: str
    at_s: float
    who: int = 0
    fuse: int = 0
    sends: int = 0
    lost: bool = False
    for_s: float = 0.0

    @property
    def over_s(self) -> float:
        """When it is over, as far as can be said before."""
        return self.at_s + (self.for_s if self.kind.startswith(LASTING) else 0.0)


class Poke(Struct, frozen=True, kw_only=True):
    """Something a person does to a run, asked or not. `door`: by which way."""

    what: str
    at_s: float
    door: str


class RunPlan(Struct, frozen=True, kw_only=True):
    """`alone`: started by a process that calls `run()`, not by a fleet's door."""

    run: str
    agent: str
    at_s: float
    key: str | None = None
    priority: int = 0
    alone: bool = False
    pokes: tuple[Poke, ...] = ()


class Plan(Struct, frozen=True, kw_only=True):
    """`remotes`: workers over HTTP; they are there for runs of agent `remote`. `orderly`: in the
    end all processes are stopped, and nothing may be left."""

    seed: int
    profile: str
    workers: int
    bridges: int
    remotes: int
    ack_wait_s: float
    restart_limit: int
    orderly: bool
    skews_s: tuple[float, ...]
    odds: Odds
    runs: tuple[RunPlan, ...]
    events: tuple[Event, ...]


class Profile(Struct, frozen=True, kw_only=True):
    """`events`: how many of each kind there are, on average."""

    weight: int
    odds: Odds = Odds()
    events: dict[str, float] = {}


PROFILES: Final[dict[str, Profile]] = {
    "calm": Profile(weight=1),
    "lossy": Profile(
        weight=3,
        odds=Odds(slow=0.2, lost=0.01, unanswered=0.03, lost_ack=0.06, late=0.05, never=0.03),
        events={"redeliver": 0.5},
    ),
    "acks": Profile(
        weight=3,
        odds=Odds(slow=0.2, lost_ack=0.1, late=0.08, never=0.05, refused=0.05),
        events={"redeliver": 0.5},
    ),
    "doubled": Profile(
        weight=2,
        odds=Odds(slow=0.3, lost_ack=0.03, refused=0.04, twice=0.1, forgotten=0.1),
        events={"redeliver": 2.0, "cut": 0.5},
    ),
    "slow": Profile(weight=1, odds=Odds(slow=0.6, slow_s=0.4), events={"stall_worker": 0.5}),
    "killing": Profile(
        weight=4,
        odds=Odds(slow=0.1, lost_ack=0.02, in_call=0.1),
        events={
            "kill_worker": 2.0,
            "kill_bridge": 1.0,
            "kill_alone": 0.7,
            "drain_worker": 0.5,
            "kill_remote": 1.5,
        },
    ),
    "stalling": Profile(
        weight=3,
        odds=Odds(slow=0.1, late=0.02, in_call=0.1),
        events={
            "stall_worker": 1.6,
            "stall_bridge": 1.0,
            "stall_alone": 0.5,
            "redeliver": 0.5,
            "stall_remote": 1.0,
        },
    ),
    "servers": Profile(
        weight=3,
        odds=Odds(slow=0.2, late=0.03, lost_ack=0.02),
        events={"restart": 0.7, "leader": 1.0, "deposed": 0.7, "pause": 0.3, "cut": 0.7},
    ),
    "awful": Profile(
        weight=1,
        odds=Odds(slow=0.2, slow_s=0.05, lost_ack=0.08, late=0.08, twice=0.1, in_call=0.2),
        events={
            "kill_worker": 2.5,
            "stall_worker": 2.0,
            "kill_bridge": 1.5,
            "stall_bridge": 1.0,
            "kill_alone": 1.0,
            "kill_remote": 1.5,
            "stall_remote": 1.0,
            "cut": 1.0,
            "leader": 1.0,
            "redeliver": 2.0,
        },
    ),
    "wild": Profile(
        weight=3,
        odds=Odds(
            slow=0.3,
            slow_s=0.1,
            lost=0.01,
            unanswered=0.02,
            lost_ack=0.04,
            late=0.04,
            never=0.02,
            refused=0.03,
            twice=0.05,
            forgotten=0.05,
            in_call=0.05,
        ),
        events={
            "kill_worker": 1.0,
            "stall_worker": 1.0,
            "kill_bridge": 0.5,
            "drain_worker": 0.3,
            "kill_alone": 0.5,
            "kill_remote": 0.5,
            "stall_remote": 0.5,
            "restart": 0.3,
            "leader": 0.5,
            "deposed": 0.4,
            "cut": 0.7,
            "partition": 0.4,
            "redeliver": 1.0,
        },
    ),
}

FUSED: Final = frozenset(
    f"{what}_{whom}"
    for what in ("kill", "stall")
    for whom in ("worker", "bridge", "alone", "remote")
)
ONCE: Final = frozenset({"deposed"})
"""Two within moments are more than bridge/settling.py says it stands."""

DOORS: Final = ("stream", "api", "library")
REMOTE: Final = "remote"
"""The agent that workers over HTTP play (remote.py)."""

POKES: Final = ("cancel", "input", "withdraw", "again", "nonsense", "resume", "early")


def grouped(seed: int) -> bool:
    """Every third schedule: each append goes in an atomic batch."""
    return seed % 3 == 1


def draw(seed: int, profile: str | None = None) -> Plan:
    """The plan of a seed."""
    rng = random.Random(f"plan {seed}")
    names = list(PROFILES)
    weights = [PROFILES[name].weight for name in names]
    drawn = rng.choices(names, weights)[0]
    name = profile or drawn
    chosen = PROFILES[name]
    workers = rng.choice((1, 1, 2, 2, 2, 2, 3))
    more = 2 if seed % 9 == 1 else 0  # several in a batch
    runs = tuple(_run(rng, number) for number in range(rng.choice((1, 1, 2)) + more))
    remotes = rng.choice((1, 2)) if any(run.agent == REMOTE for run in runs) else 0
    lasting = chosen.events.get("kill_worker", 0) > 0
    return Plan(
        seed=seed,
        profile=name,
        workers=workers,
        bridges=rng.choice((1, 1, 1, 2)),
        ack_wait_s=rng.choice((1.0, 1.5, 3.0)),
        restart_limit=rng.choice((2, 1000)) if lasting and rng.random() < 0.2 else 1000,
        orderly=rng.random() < 0.25,
        skews_s=tuple(rng.choice((0.0, 0.0, -2.0, 1.5)) for _ in range(8)),
        odds=chosen.odds,
        runs=runs,
        remotes=remotes,
        events=tuple(_events(rng, chosen.events)),
    )


def _run(rng: random.Random, number: int) -> RunPlan:
    agent = rng.choice([*sorted(AGENTS), REMOTE])
    pokes = [
        Poke(what=rng.choice(POKES), at_s=rng.uniform(0.0, WINDOW_S), door=rng.choice(DOORS))
        for _ in range(rng.choice((0, 0, 1, 1, 2)))
    ]
    return RunPlan(
        run=f"r{number}",
        agent=agent,
        at_s=rng.choice((0.0, rng.uniform(0.0, 1.0))),
        key="k" if rng.random() < 0.05 else None,
        priority=rng.choice((0, 0, 0, -1, 1)),
        alone=agent != REMOTE and rng.random() < 0.15,
        pokes=tuple(sorted(pokes, key=lambda poke: poke.at_s)),
    )


def _events(rng: random.Random, wanted: dict[str, float]) -> Sequence[Event]:
    found: list[Event] = []
    for kind, mean in wanted.items():
        count = _poisson(rng, mean)
        for _ in range(min(count, 1) if kind in ONCE else count):
            fused = rng.choice(("", "fuse", "sends", "sends")) if kind in FUSED else ""
            found.append(
                Event(
                    kind=kind,
                    at_s=rng.choice((0.0, rng.uniform(0.0, WINDOW_S / 2))),
                    who=rng.randrange(8),
                    fuse=int(rng.expovariate(1 / 60)) + 1 if fused == "fuse" else 0,
                    sends=int(rng.expovariate(1 / 20)) + 1 if fused == "sends" else 0,
                    lost=rng.random() < 0.5,
                    for_s=rng.choice((0.3, 1.2, 2.5, 5.0)) * rng.uniform(0.5, 1.5),
                )
            )
    return sorted(found, key=lambda event: event.at_s)


def _poisson(rng: random.Random, mean: float) -> int:
    count, left = 0, rng.expovariate(1.0)
    while left < mean:
        count += 1
        left += rng.expovariate(1.0)
    return count
