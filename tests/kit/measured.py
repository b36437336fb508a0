"""Metrics as a test reads them: each sample by its name and labels; and what a journal says of the
same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from journal.codec import Entry
from journal.counting import Counting
from journal.families import Family

Samples = dict[str, float]
"""`runfold_steps_total{kind="tool",…}` to its value; labels in the order of their names."""


def named(name: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels))
    return f"{name}{{{inside}}}" if inside else name


def samples(families: Iterable[Family]) -> Samples:
    """Of what was counted, but what is 0."""
    return {
        named(family.name + suffix, labels): value
        for family in families
        for suffix, labels, value in family.samples
        if value
    }


def parsed(text: str) -> Samples:
    """Of an answer to a scrape."""
    return {
        named(sample.name, sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str) -> float:
    """Over all labels."""
    return sum(value for key, value in found.items() if key.partition("{")[0] == name)


def by(found: Samples, name: str, label: str) -> dict[str, float]:
    """By one label, over the others."""
    sums: Counter[str] = Counter()
    for key, value in found.items():
        if key.partition("{")[0] == name and value:
            sums[key.partition(f'{label}="')[2].partition('"')[0]] += value  # type: ignore[assignment]
    return dict(sums)


def summed(*counted: Counting) -> Samples:
    """Over several processes."""
    sums: Counter[str] = Counter()
    for one in counted:
        sums.update(samples(one.families()))  # type: ignore[arg-type]
    return dict(sums)


def types(entries: Sequence[Entry]) -> dict[str, Any]:
    """How many records of each type."""
    return dict(Counter(entry.type for entry in entries))
