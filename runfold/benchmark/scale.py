"""Core: the workloads, and how much each measures: in full, or `--quick`."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Workload(StrEnum):
    """In the order in which they are measured."""

    W1 = "w1"
    W2 = "w2"
    W3 = "w3"
    W4 = "w4"
    W5 = "w5"
    W6 = "w6"


class Scale(Struct, frozen=True, kw_only=True):
    """`levels`: runs at once · `rounds` blocks of `block_s` a side and level · `runs_per_level`: of
    a worker, and at least `runs_least`, in `passes` · `journals`: recorded steps of a run that is
    resumed, `resumes` times each, a third of it where all is replayed · `takeovers` of each kind,
    and starts of a worker · `silent_default`: also of a worker that is silent for the default ack
    wait · `samples` of each latency · `parked` runs · `short` runs through one worker, looked at
    `looks` times."""

    name: str
    levels: tuple[int, ...]
    rounds: int
    block_s: float
    runs_per_level: int
    runs_least: int
    passes: int
    journals: tuple[int, ...]
    resumes: int
    takeovers: int
    silent_default: bool
    samples: int
    parked: tuple[int, ...]
    short: int
    looks: int


# Many short blocks: both sides must meet the same moods of a busy machine.
FULL = Scale(
    name="full",
    levels=(1, 16, 64, 256),
    rounds=12,
    block_s=0.5,
    runs_per_level=10,
    runs_least=100,
    passes=3,
    journals=(10, 100, 1_000, 10_000),
    resumes=20,
    takeovers=10,
    silent_default=True,
    samples=300,
    parked=(10_000,),
    short=20_000,
    looks=40,
)

QUICK = Scale(
    name="quick",
    levels=(1, 16, 64, 256),
    rounds=4,
    block_s=0.3,
    runs_per_level=3,
    runs_least=40,
    passes=1,
    journals=(10, 1_000, 10_000),
    resumes=7,
    takeovers=3,
    silent_default=False,
    samples=60,
    parked=(5_000,),
    short=2_000,
    looks=10,
)
