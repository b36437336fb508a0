"""Which fault comes when, on whom, for how long: drawn from the seed before anything starts."""

from __future__ import annotations

import random
from typing import NamedTuple

RATES: dict[str, float] = {
    "worker_kill": 4,
    "worker_stop": 2,
    "worker_term": 2,
    "remote_kill": 3,
    "remote_stop": 2,
    "remote_term": 1,
    "bridge_kill": 2,
    "bridge_stop": 1,
    "bridge_term": 1,
    "server_kill": 1,
    "server_stop": 1,
    "step_down": 4,
    "cut": 4,
    "stall_in": 2,
    "stall_out": 2,
    "drop_acks": 6,
    "delay_acks": 2,
    "duplicate_task": 12,
    "disk_full": 0.3,
}
"""A minute. A worker that is stopped stays so for longer than the ack wait: a zombie. `remote`: one
over HTTP.
`stall_in`: nothing comes from the server; `stall_out`: nothing reaches it, then all of it, late."""

ONLY_CLUSTER = frozenset({"step_down"})

_SECONDS: dict[str, tuple[float, float]] = {
    "worker_kill": (0.0, 2.0),
    "worker_stop": (3.5, 9.0),
    "worker_term": (0.0, 1.0),
    "remote_kill": (0.0, 2.0),
    "remote_stop": (3.5, 9.0),
    "remote_term": (0.0, 1.0),
    "bridge_kill": (0.0, 2.0),
    "bridge_stop": (1.0, 8.0),
    "bridge_term": (0.0, 1.0),
    "server_kill": (0.0, 3.0),
    "server_stop": (0.3, 6.0),
    "stall_in": (0.3, 7.0),
    "stall_out": (0.3, 7.0),
    "delay_acks": (1.0, 6.0),
    "disk_full": (1.0, 4.0),
}


class Fault(NamedTuple):
    """`at` seconds after the start; `target`: of however many there are, its number modulo that;
    `seconds` until it is healed; `times`: how many at once, of
    the kinds where that is something."""

    at: float
    kind: str
    target: int
    seconds: float
    times: int

    def __str__(self) -> str:
        return f"{self.at:8.2f} {self.kind} #{self.target} {self.seconds:.2f}s x{self.times}"


def schedule(
    seed: int, duration_s: float, *, kinds: frozenset[str] | None, cluster: bool, pace: float
) -> list[Fault]:
    """All faults in order. Each kind has its own lots, so that leaving one out changes no other."""
    found: list[Fault] = []
    for kind, rate in RATES.items():
        if (kinds is not None and kind not in kinds) or (kind in ONLY_CLUSTER and not cluster):
            continue
        rng = random.Random(f"{seed}/{kind}")
        at = rng.expovariate(rate * pace / 60)
        while at < duration_s:
            low, high = _SECONDS.get(kind, (0.0, 0.0))
            seconds = rng.uniform(low, high)
            times = rng.choices((1, 2, 3), (6, 2, 1))[0]
            found.append(Fault(at, kind, rng.randrange(1000), seconds, times))
            at += rng.expovariate(rate * pace / 60)
    return sorted(found)
