"""Core: which appends to one journal stream go together in one atomic batch (PROTOCOL 3).

A batch is stored with one sync where single appends need one each, but has a fixed cost that they
have not. Which is faster depends on the disk, the servers and how many append at once; so both are
measured, and each kind of load goes the way that answers it sooner. Nothing here is needed for
safety but that a batch has at most one record of a run: each record names the sequence it follows,
whichever way it goes, and can land only there, once.

Each append is in one place: it waits, it is alone on its way, or it is in the batch. It waits only
while others are answered, or a batch is on its way that may take it next; who comes first goes
first. Where nothing is answered for `hold_s`, what waits goes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct

GroupCommit: TypeAlias = Literal["auto", "on", "off"]
"""`on`: every append goes in a batch, also one alone."""

Way: TypeAlias = Literal["alone", "batch"]


class Bounds(Struct, frozen=True):
    """`least`: fewer go alone (a batch of 16 takes as long as 16 single appends on a fast disk).
    `alone_max`: what is alone on its way at once; more would be given up before the disk comes to
    them, and then be sent again. `hold_s`, `hold_max_s`: what waits goes alone when nothing was
    answered for twice as long as batches take, or as long as it would take alone, within these."""

    least: int = 16
    most: int = 256
    bytes_max: int = 1024 * 1024
    alone_max: int = 512
    hold_s: float = 0.05
    hold_max_s: float = 1.0


BOUNDS: Final = Bounds()

LOOK_S: Final = 0.1
"""How many append at once is the most that did in this time, and in that before."""

COHORTS: Final = 4
"""A way is measured over so many times as many records as go at once; the first so many are left
out: they tell of the change."""

TRIAL_SHARE: Final = 64
TRIAL_SOON: Final = 8
TRIAL_MAX_S: Final = 30.0
"""The slower way is tried again from time to time: the later, the slower it was and the longer that
takes, so that trials cost about a 64th; and not before eight times as long as one takes. But soon
enough that a stall, which makes any measurement useless, is forgotten."""

GAIN: Final = 0.9
"""Batches are to be faster by a tenth, else they are not worth it."""

PAUSE_S, PAUSE_MAX_S = 0.05, 5.0
"""No batch for so long after one that was not stored; doubled each time until one is."""


class Sends(Struct, frozen=True):
    """What is to be sent now: numbers of appends."""

    alone: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()


class _Append(Struct):
    """`since`: when it came. `told`: the load and the measurement that its answer counts for.
    `left`: nobody waits for its answer any more."""

    run: str
    size: int
    since: float
    told: tuple[_Load, int] | None = None
    left: bool = False


class _Load:
    """Appends of which about `size` are at once: how long each way takes until an answer."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.way: Way = "alone"
        self.measurement = 0
        self._took: dict[Way, float] = {}
        self._spent: dict[Way, float] = {}
        self._count = 0
        self._sum_s = 0.0
        self._began = 0.0
        self._trial_at = 0.0

    @property
    def alone_s(self) -> float:
        return self._took.get("alone", 0.0)

    def tell(self, measurement: int, took_s: float, now: float) -> None:
        """An append of the measurement was answered."""
        if measurement != self.measurement:
            return
        if not self._count:
            self._began = now
        self._count += 1
        if self._count > self._size:
            self._sum_s += took_s
        if self._count == COHORTS * self._size:
            self._next(now)

    def _next(self, now: float) -> None:
        mean_s = self._sum_s / (self._count - self._size)
        known_s, before = self._took.get(self.way), self._best()
        # A trial stands for itself: what it was compared with may be long ago.
        trial = self.way != before
        self._took[self.way] = mean_s if trial or known_s is None else (known_s + mean_s) / 2
        self._spent[self.way] = now - self._began
        best = self._best()
        other: Way = "alone" if best == "batch" else "batch"
        if other not in self._took:
            self.way = other
        elif trial or best != before:
            lost_by = self._took[other] / self._took[best] - 1
            wait_s = max(TRIAL_SOON, TRIAL_SHARE * lost_by) * self._spent[other]
            self._trial_at = now + min(wait_s, TRIAL_MAX_S)
            self.way = best
        else:
            self.way = other if now >= self._trial_at else best
        self.measurement += 1
        self._count, self._sum_s = 0, 0.0

    def _best(self) -> Way:
        batch_s, alone_s = self._took.get("batch"), self._took.get("alone")
        if batch_s is None or alone_s is None:
            return "alone"
        return "batch" if batch_s < GAIN * alone_s else "alone"


class Grouping:
    """Of one journal stream and one process. `now`: seconds of a clock that never goes back."""

    def __init__(self, commit: GroupCommit = "auto", bounds: Bounds = BOUNDS) -> None:
        assert commit != "off"
        self._always = commit == "on"
        self._bounds = bounds
        self._waiting: dict[int, _Append] = {}
        self._alone: dict[int, _Append] = {}
        self._batch: dict[int, _Append] = {}
        self._loads: dict[int, _Load] = {}
        self._peak = self._peak_before = 0
        self._look_at = 0.0
        self._hold_s = bounds.hold_s
        self._batch_s = 0.0
        self._batch_began = 0.0
        self._moved_at = 0.0
        self._pause_s = PAUSE_S
        self._again_at = 0.0

    @property
    def places(self) -> Mapping[str, Sequence[int]]:
        """Of every append that has no answer yet."""
        return {
            "waiting": tuple(self._waiting),
            "alone": tuple(self._alone),
            "batch": tuple(self._batch),
        }

    # ---- what comes -------------------------------------------------------------------------

    def arrive(self, number: int, run: str, size: int, now: float) -> bool:
        """An append of so many bytes. True: it is on its way, alone; else it waits for `take`."""
        append = _Append(run, size, now)
        load = self._load_with(1 + len(self._waiting) + len(self._alone) + len(self._batch), now)
        full = len(self._alone) >= self._bounds.alone_max
        if self._waiting or full or self._together(load, now):
            self._waiting[number] = append
            return False
        append.told = _told(load)
        self._alone[number] = append
        return True

    def leave(self, number: int) -> None:
        """It was given up. One in the batch stays there: it was sent."""
        self._waiting.pop(number, None)
        self._alone.pop(number, None)
        if (append := self._batch.get(number)) is not None:
            append.left = True

    def answered(self, number: int, now: float) -> None:
        """One that was alone."""
        append = self._alone.pop(number, None)
        if append is not None:
            self._moved_at = now
            _tell(append, now)

    def stored(self, now: float) -> None:
        """The batch is."""
        took_s = now - self._batch_began
        self._batch_s = took_s if not self._batch_s else (3 * self._batch_s + took_s) / 4
        self._pause_s = PAUSE_S
        batch, self._batch = self._batch, {}
        for append in batch.values():
            _tell(append, now)

    def refused(self, now: float) -> None:
        """The batch is, which says of none of its records why: each that was not given up is on
        its way alone now."""
        batch, self._batch = self._batch, {}
        for number, append in batch.items():
            if not append.left:
                self._alone[number] = append  # what it takes counts for the batch
        self._back_off(now)

    def unknown(self, now: float) -> None:
        """Whether the batch was stored is."""
        self._batch = {}
        self._back_off(now)

    def _back_off(self, now: float) -> None:
        self._again_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)

    # ---- what goes --------------------------------------------------------------------------

    def take(self, now: float) -> Sends:
        """What goes now, of what waits."""
        if not self._waiting:
            return Sends()
        load = self._load_with(0, now)
        if not self._together(load, now):
            return Sends(alone=self._go_alone(load))
        batch: tuple[int, ...] = ()
        if not self._batch:
            batch = self._open(load, now)
            if not batch:
                return Sends(alone=self._go_alone(load))
        self._set_hold(load)
        stuck = not batch and now >= self._moved_at + self._hold_s
        return Sends(self._go_alone(load) if stuck else (), batch)

    def due(self) -> float | None:
        """When `take` is to be asked at the latest, once it was asked in this turn of the loop."""
        full = len(self._alone) >= self._bounds.alone_max
        return None if full or not self._waiting else self._moved_at + self._hold_s

    def _set_hold(self, load: _Load | None) -> None:
        bounds = self._bounds
        alone_s = load.alone_s if load is not None else 0.0
        hold_s = max(bounds.hold_s, 2 * self._batch_s, alone_s)
        self._hold_s = min(hold_s, bounds.hold_max_s)

    def _together(self, load: _Load | None, now: float) -> bool:
        if self._always:
            return True
        return load is not None and load.way == "batch" and now >= self._again_at

    def _open(self, load: _Load | None, now: float) -> tuple[int, ...]:
        """The batch of the first that wait; none where it would have one record."""
        bounds = self._bounds
        runs: set[str] = set()
        numbers: list[int] = []
        size = 0
        for number, append in self._waiting.items():
            if append.run in runs:
                continue
            if len(numbers) == bounds.most or (numbers and size + append.size > bounds.bytes_max):
                break
            runs.add(append.run)
            numbers.append(number)
            size += append.size
        # Where many are on their way alone, even one begins: what comes is held meanwhile, and the
        # next batch has it together.
        if len(numbers) == 1 and not self._always and len(self._alone) < bounds.least:
            return ()
        self._batch_began = self._moved_at = now
        for number in numbers:
            append = self._batch[number] = self._waiting.pop(number)
            append.told = _told(load)
        return tuple(numbers)

    def _go_alone(self, load: _Load | None) -> tuple[int, ...]:
        """All that waits, as far as there is room; also what was held for a batch: it counts for
        that way."""
        room = max(0, self._bounds.alone_max - len(self._alone))
        numbers = tuple(itertools.islice(self._waiting, room))
        for number in numbers:
            append = self._alone[number] = self._waiting.pop(number)
            append.told = _told(load)
        return numbers

    def _load_with(self, at_once: int, now: float) -> _Load | None:
        """Of as many as there were at once lately. None: too few for a batch."""
        if now >= self._look_at:
            fresh = now < self._look_at + LOOK_S
            self._peak_before = self._peak if fresh else 0
            self._peak, self._look_at = 0, now + LOOK_S
        self._peak = max(self._peak, at_once)
        peak = max(self._peak, self._peak_before)
        return None if peak < self._bounds.least else self._load(peak)

    def _load(self, at_once: int) -> _Load:
        bounds = self._bounds
        size = bounds.least
        while 2 * size <= min(at_once, bounds.most // 2):
            size *= 2
        if size not in self._loads:
            self._loads[size] = _Load(size)
        return self._loads[size]


def _told(load: _Load | None) -> tuple[_Load, int] | None:
    return None if load is None else (load, load.measurement)


def _tell(append: _Append, now: float) -> None:
    if append.told is not None:
        load, measurement = append.told
        load.tell(measurement, now - append.since, now)
