"""Which appends go together: every order of events for a few of them, and which way wins where."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from journal.grouping import BOUNDS, PAUSE_S, Bounds, Grouping

SMALL = Bounds(least=2, most=2, bytes_max=100, alone_max=2, hold_s=1.0, hold_max_s=1.0)

Event = tuple[Any, ...]


# ---- every order of events -----------------------------------------------------------------------


@dataclass
class Played:
    """What came of some events, checked after each. `alone` and `batched`: what was sent, and how
    often; `open`: appends without an answer that nobody gave up; `moved`: when one was answered, or
    a batch began."""

    grouping: Grouping
    now: float = 0.0
    runs: dict[int, str] = field(default_factory=dict)
    moved: float = 0.0
    alone: Counter[int] = field(default_factory=Counter)
    batched: Counter[int] = field(default_factory=Counter)
    open: set[int] = field(default_factory=set)

    def do(self, event: Event) -> None:
        grouping, now = self.grouping, self.now
        before = grouping.places["alone"]
        match event:
            case ("arrive", run):
                number = len(self.runs)
                self.runs[number] = run
                self.open.add(number)
                if grouping.arrive(number, run, 40, now):
                    self.alone[number] += 1
            case ("take",):
                self._take()
            case ("answered", number):
                grouping.answered(number, now)
                self.open.discard(number)
                self.moved = now
            case ("leave", number):
                grouping.leave(number)
                self.open.discard(number)
            case ("later",):
                self.now += SMALL.hold_s
            case ("refused",):
                grouping.refused(now)
                self.alone.update(grouping.places["alone"])
                self.alone.subtract(before)
            case (told,):
                self.open -= set(grouping.places["batch"])
                getattr(grouping, told)(now)
        self._check()

    def _take(self) -> None:
        waited = list(self.grouping.places["waiting"])
        under_way = self.grouping.places["batch"]
        sends = self.grouping.take(self.now)
        self.alone.update(sends.alone)
        self.batched.update(sends.batch)
        left = self.grouping.places["waiting"]
        assert [*sends.batch, *sends.alone, *left] != [] or not waited
        assert {*sends.batch, *sends.alone, *left} == set(waited)
        if sends.batch:
            runs = [self.runs[number] for number in sends.batch]
            assert len(set(runs)) == len(runs) <= SMALL.most
            # Who came first goes first, but for a second record of a run.
            passed = [n for n in waited if n < sends.batch[-1] and n not in sends.batch]
            assert all(self.runs[number] in runs for number in passed)
            self.moved = self.now
        # Held is only what a batch on its way may be followed by, and not for ever.
        full = len(self.grouping.places["alone"]) >= SMALL.alone_max
        stuck = self.now >= self.moved + SMALL.hold_s
        assert not left or full or ((under_way or sends.batch) and not stuck)

    def _check(self) -> None:
        places = self.grouping.places
        found = [number for one in places.values() for number in one]
        assert len(found) == len(set(found)), "an append is in two places"
        given_up = set(found) - self.open
        assert self.open <= set(found) and given_up <= set(places["batch"])
        assert max(self.batched.values(), default=0) <= 1, "sent in two batches"
        assert max(self.alone.values(), default=0) <= 1, "sent alone twice"
        if places["waiting"]:
            full = len(places["alone"]) >= SMALL.alone_max
            due = self.grouping.due()
            assert full if due is None else due <= self.moved + SMALL.hold_s
        else:
            assert self.grouping.due() is None

    def possible(self, appends: int) -> Iterator[Event]:
        places = self.grouping.places
        if len(self.runs) < appends:
            yield from (("arrive", run) for run in "AB")
        if places["waiting"]:
            yield ("take",)
            yield ("later",)
        yield from (("answered", number) for number in places["alone"])
        yield from (("leave", number) for number in {*self.open})
        if places["batch"]:
            yield from (("stored",), ("refused",), ("unknown",))

    @property
    def key(self) -> Any:
        """What the future depends on: which number it is does not matter, nor what is answered."""
        grouping, places = self.grouping, self.grouping.places
        waiting = [self.runs[n] for n in places["waiting"]]
        stuck = self.now - self.moved >= SMALL.hold_s
        sent = [
            sorted((self.runs[n], n in self.open) for n in places[x]) for x in ("alone", "batch")
        ]
        ways = [
            (size, load.way, load.measurement, load._count)
            for size, load in grouping._loads.items()
        ]
        return repr((len(self.runs), waiting, stuck, sent, grouping._again_at > self.now, ways))


def played(events: Sequence[Event], make: Callable[[], Grouping]) -> Played:
    world = Played(make())
    for event in events:
        world.do(event)
    return world


def settled(world: Played) -> None:
    """Whatever happened, everybody gets an answer: the servers answer, and time passes."""
    for _ in range(20):
        places = world.grouping.places
        if not any(places.values()):
            break
        for number in places["alone"]:
            world.do(("answered", number))
        if places["batch"]:
            world.do(("stored",))
        if places["waiting"]:
            world.do(("later",))
            world.do(("take",))
    assert not world.open and not any(world.grouping.places.values())


def always() -> Grouping:
    return Grouping("on", SMALL)


def together() -> Grouping:
    """Where batches have won."""
    grouping = Grouping("auto", SMALL)
    load = grouping._load(2)
    load.way = "batch"
    return grouping


@pytest.mark.parametrize(("make", "appends"), [(always, 3), (together, 4)])
def test_whatever_happens_each_append_is_in_one_place_and_gets_one_answer(
    make: Callable[[], Grouping], appends: int
) -> None:
    seen: set[Any] = set()
    todo: deque[tuple[Event, ...]] = deque([()])
    while todo:
        events = todo.popleft()
        world = played(events, make)
        if world.key in seen:
            continue
        seen.add(world.key)
        todo.extend((*events, event) for event in world.possible(appends))
        settled(world)
    assert len(seen) > 500


def test_a_record_too_many_or_too_large_for_the_batch_waits_for_the_next() -> None:
    grouping = Grouping("on", Bounds(most=3, bytes_max=100))
    for number, size in enumerate((10, 60, 60, 10, 10, 10, 10, 500)):
        assert not grouping.arrive(number, f"r{number}", size, 0.0)
    batches: list[tuple[int, ...]] = []
    while not batches or batches[-1]:
        batches.append(grouping.take(0.0).batch)
        grouping.stored(0.0)
    assert batches == [(0, 1), (2, 3, 4), (5, 6), (7,), ()]


def test_nothing_goes_in_a_batch_for_a_while_after_one_that_was_not_stored() -> None:
    now, grouping = 0.0, together()

    def begin(at: float) -> tuple[int, ...]:
        for number, run in enumerate("ABC"):
            grouping.arrive(number, run, 1, at)
        batch = grouping.take(at).batch
        for number in (*grouping.places["alone"], *grouping.places["waiting"]):
            grouping.leave(number)
        return batch

    for pause_s in (PAUSE_S, 2 * PAUSE_S, 4 * PAUSE_S):
        assert begin(now)
        grouping.unknown(now)
        assert not begin(now + 0.9 * pause_s)
        now += 1.1 * pause_s
    assert begin(now)
    grouping.stored(now)
    assert begin(now)
    grouping.refused(now)
    for number in grouping.places["alone"]:
        grouping.leave(number)
    assert not begin(now + 0.9 * PAUSE_S)
    assert begin(now + 1.1 * PAUSE_S)


# ---- which way wins ------------------------------------------------------------------------------


@dataclass
class Disk:
    """A stream's server, in seconds: appends alone take `alone_s` each, one after another; a batch
    `batch_s` and `each_s` for each record."""

    alone_s: float
    batch_s: float
    each_s: float = 0.00001


class Bench:
    """So many runs, each appending again `think_s` after its answer, on a clock of its own."""

    def __init__(self, disk: Disk, runs: int, *, think_s: float = 0.00002, refuses: bool = False):
        self.disk = disk
        self.refuses = refuses
        self.grouping = Grouping("auto")
        self.now = self.free_at = 0.0
        self.count: Counter[str] = Counter()
        self.longest_s = 0.0
        self._runs = runs
        self._think_s = think_s
        self._numbers = itertools.count()
        self._order = itertools.count()
        self._run_of: dict[int, tuple[str, float]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for run in range(runs):
            self._at(0.0, lambda run=run: self._append(f"r{run}"))

    def play(self, until_s: float) -> Counter[str]:
        """Of the records answered from now on: which way they went."""
        self.count = Counter()
        until_s += self.now
        while self._events and self._events[0][0] <= until_s:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._send()
        return self.count

    def _at(self, at: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at, next(self._order), do))

    def _append(self, run: str) -> None:
        number = next(self._numbers)
        self._run_of[number] = run, self.now
        if self.grouping.arrive(number, run, 500, self.now):
            self._alone(number)

    def _send(self) -> None:
        sends = self.grouping.take(self.now)
        for number in sends.alone:
            self._alone(number)
        if sends.batch:
            took_s = self.disk.batch_s + self.disk.each_s * len(sends.batch)
            self.free_at = max(self.free_at, self.now) + took_s
            self._at(self.free_at, lambda: self._batched(sends.batch))
        due = self.grouping.due()
        if due is not None:
            self._at(max(due, self.now), lambda: None)

    def _alone(self, number: int) -> None:
        self.free_at = max(self.free_at, self.now) + self.disk.alone_s
        self._at(self.free_at, lambda: self._answered(number, "alone"))

    def _answered(self, number: int, way: str) -> None:
        if way == "alone":
            self.grouping.answered(number, self.now)
        run, since = self._run_of.pop(number)
        self.count[way] += 1
        self.longest_s = max(self.longest_s, self.now - since)
        self._at(self.now + self._think_s, lambda: self._append(run))

    def _batched(self, numbers: Sequence[int]) -> None:
        if self.refuses:
            self.grouping.refused(self.now)
            for number in numbers:
                self._alone(number)
            return
        self.grouping.stored(self.now)
        for number in numbers:
            self._answered(number, "batch")


FAST = Disk(alone_s=0.00015, batch_s=0.003)
"""A good disk, synced at every append (measured, docs/performance.md)."""

SLOW = Disk(alone_s=0.004, batch_s=0.025)
NO_SYNC = Disk(alone_s=0.000012, batch_s=0.003)
CLUSTER = Disk(alone_s=0.0001, batch_s=0.001)


@pytest.mark.parametrize(
    ("disk", "runs", "way", "known_s"),
    [
        (FAST, 64, "batch", 1.0),
        (FAST, 256, "batch", 1.0),
        (FAST, 1, "alone", 1.0),
        (FAST, 8, "alone", 1.0),
        (FAST, 20, "alone", 1.0),
        (SLOW, 64, "batch", 6.0),
        (SLOW, 256, "batch", 9.0),
        (SLOW, 15, "alone", 6.0),
        (NO_SYNC, 64, "alone", 0.2),
        (NO_SYNC, 200, "alone", 0.2),
        (CLUSTER, 64, "batch", 1.0),
    ],
    ids=lambda value: str(value) if not isinstance(value, Disk) else "",
)
def test_the_way_that_answers_sooner_is_taken_but_for_trials(
    disk: Disk, runs: int, way: str, known_s: float
) -> None:
    """`known_s`: until both were measured."""
    bench = Bench(disk, runs)
    bench.play(known_s)
    count = bench.play(3 * known_s)
    assert count[way] > 0.9 * sum(count.values()), count


@pytest.mark.parametrize("runs", [64, 256])
def test_no_append_waits_much_longer_than_the_disk_needs(runs: int) -> None:
    bench = Bench(FAST, runs)
    bench.play(1.0)
    assert bench.longest_s < 2 * (runs * FAST.alone_s + FAST.batch_s + BOUNDS.hold_s)


def test_a_disk_that_became_slow_is_noticed() -> None:
    bench = Bench(FAST, 64)
    bench.disk = Disk(alone_s=0.00003, batch_s=0.003)
    bench.play(0.5)
    assert bench.count["alone"] > 0.9 * sum(bench.count.values()), bench.count
    bench.disk = SLOW
    bench.play(10.0)
    count = bench.play(10.0)
    assert count["batch"] > 0.9 * sum(count.values()), count


def test_where_batches_are_refused_few_are_sent() -> None:
    bench = Bench(FAST, 64, refuses=True)
    bench.play(1.0)
    assert bench.count["batch"] == 0
    count = bench.play(2.0)
    assert count["alone"] > 0.9 * 2.0 / FAST.alone_s, count
