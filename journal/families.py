"""Core: numbers that grow, for Prometheus, as values: nothing here knows how they are shown.

Whoever counts does so on one thread; `family` may be asked for on another one meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from msgspec import Struct

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Values: TypeAlias = tuple[str, ...]
"""A label's value for each label of the family."""

LABEL_VALUES_MAX: Final = 100
"""Of a label whose values come from outside, as agents' names do: each is a series for ever."""

OTHER: Final = "~other"
"""Stands for all further ones; `~` is in no name."""


class Sample(NamedTuple):
    """`suffix` is what follows the family's name in the sample's."""

    suffix: str
    labels: dict[str, str]
    value: float


class Family(Struct, frozen=True, kw_only=True):
    """All samples of a name; a counter's name is without `_total`."""

    name: str
    kind: Kind
    about: str
    labels: Values = ()
    samples: tuple[Sample, ...] = ()


class Metric(Protocol):
    """What shows a family: prometheus_client's is one."""

    def add_sample(self, name: str, labels: dict[str, str], value: float) -> None: ...


Shown = TypeVar("Shown", bound=Metric)


def shown(families: Iterable[Family], make: Callable[[str, str, str], Shown]) -> list[Shown]:
    """Each family in a metric that `make` makes of name, about, kind."""
    found: list[Shown] = []
    for family in families:
        metric = make(family.name, family.about, family.kind)
        for suffix, labels, value in family.samples:
            metric.add_sample(family.name + suffix, labels, value)
        found.append(metric)
    return found


def counter(name: str, about: str, value: float) -> Family:
    """Of what is counted elsewhere."""
    samples = (Sample("_total", {}, float(value)),)
    return Family(name=name, kind="counter", about=about, samples=samples)


def gauge(name: str, about: str, value: float | None) -> Family:
    """What is so now; None where that is not known."""
    samples = () if value is None else (Sample("", {}, float(value)),)
    return Family(name=name, kind="gauge", about=about, samples=samples)


def gauges(name: str, about: str, label: str, values: Mapping[str, float]) -> Family:
    """What is so now, by one label."""
    samples = [Sample("", {label: word}, float(value)) for word, value in values.items()]
    return Family(name=name, kind="gauge", about=about, labels=(label,), samples=tuple(samples))


class Counter:
    """Counts by labels. `known`: values that are shown before the first one comes, or a rate would
    miss it; without labels it is shown from the start."""

    def __init__(
        self, name: str, about: str, labels: Values = (), known: Iterable[Values] = ()
    ) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._counts: dict[Values, float] = dict.fromkeys(known if labels else [()], 0.0)

    def add(self, *values: str, by: float = 1) -> None:
        counts = self._counts
        try:
            counts[values] += by
        except KeyError:
            counts[values] = by

    def put(self, count: float, *values: str) -> None:
        """Of what is counted elsewhere."""
        self._counts[values] = count

    def total(self) -> float:
        return sum(self._counts.copy().values())

    def family(self) -> Family:
        samples = [
            Sample("_total", dict(zip(self._labels, values, strict=True)), count)
            for values, count in self._counts.copy().items()
        ]
        return Family(
            name=self._name,
            kind="counter",
            about=self._about,
            labels=self._labels,
            samples=tuple(samples),
        )


class Histogram:
    """How long things took, by labels. `bounds`: seconds, rising. What is negative, over a clock
    that was set back, counts as 0."""

    def __init__(self, name: str, about: str, bounds: Sequence[float], labels: Values = ()) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._bounds = tuple(bounds)
        self._series: dict[Values, tuple[list[int], list[float]]] = {}
        if not labels:
            self._of(())

    def observe(self, seconds: float, *values: str) -> None:
        buckets, total = self._series.get(values) or self._of(values)
        if seconds < 0.0:
            seconds = 0.0
        buckets[bisect_left(self._bounds, seconds)] += 1
        total[0] += seconds

    def _of(self, values: Values) -> tuple[list[int], list[float]]:
        found = self._series.get(values)
        if found is None:
            found = self._series[values] = ([0] * (len(self._bounds) + 1), [0.0])
        return found

    def family(self) -> Family:
        samples: list[Sample] = []
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        for values, (buckets, total) in self._series.copy().items():
            labels = dict(zip(self._labels, values, strict=True))
            counts = list(accumulate(buckets))  # of one moment: the count is the last of them
            for name, count in zip(names, counts, strict=True):
                samples.append(Sample("_bucket", labels | {"le": name}, float(count)))
            samples.append(Sample("_count", labels, float(counts[-1])))
            samples.append(Sample("_sum", labels, total[0]))
        return Family(
            name=self._name,
            kind="histogram",
            about=self._about,
            labels=self._labels,
            samples=tuple(samples),
        )


class Words:
    """Label values from outside, bounded: the first so many, then `OTHER`."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def of(self, word: str) -> str:
        if word in self._known:
            return word
        if len(self._known) >= LABEL_VALUES_MAX:
            return OTHER
        self._known.add(word)
        return word
