"""Every metric that the product shows, as the code makes it: for docs, dashboards and alerts."""

from __future__ import annotations

from typing import Any, NamedTuple

from prometheus_client.registry import Collector

from bridge.fleet_metrics import FleetLook
from bridge.metrics import Metrics
from journal.counting import Counting
from journal.families import Family
from journal.stores.jetstream import JetStreamStore
from runfold.audit_metrics import families as of_audit
from runfold.testing import ScriptedModel
from worker.agent import Agent
from worker.metrics import gauges_of
from worker.service import Worker

NOWHERE = "nats://127.0.0.1:1"


class Registered(NamedTuple):
    kind: str
    labels: tuple[str, ...]
    about: str


class _Counts:
    violations = runs = records = behind = 0
    looked_at = 0.0


def registered() -> dict[str, Registered]:
    """By name, a counter's as its samples have it, with `_total`."""
    found: dict[str, Registered] = {}
    worker = Worker(NOWHERE, [Agent("a", model=ScriptedModel())])
    families: list[Family] = [
        *Counting(lambda: 0.0).families(),
        *gauges_of(worker),
        *FleetLook(JetStreamStore(NOWHERE)).families(),
        *of_audit(_Counts()),
    ]
    for family in families:
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        found[name] = Registered(family.kind, family.labels, family.about)
    return found | _of_bridge()


def _of_bridge() -> dict[str, Registered]:
    """What the bridge makes with prometheus_client itself."""
    found: dict[str, Registered] = {}
    collectors: dict[Collector, Any] = Metrics()._registry._collector_to_names
    for collector in collectors:
        if (labels := getattr(collector, "_labelnames", None)) is None:
            continue
        for metric in collector.collect():
            name = f"{metric.name}_total" if metric.type == "counter" else metric.name
            found[name] = Registered(metric.type, tuple(labels), metric.documentation)
    return found
