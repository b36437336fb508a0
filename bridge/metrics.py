"""Shell: what the bridge counts, in a registry of its own: a process may have several bridges.

The durable work that is done through its store is counted by `counting`, its store's observer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from journal.counting import Counting
from journal.families import Family, shown

METRICS_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
SIGNALS: Final = frozenset({"approve", "reject", "reconcile", "cancel", "resume", "input"})
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Labels are words of the code, or bounded in number: nobody makes series at will."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.counting = Counting(time.monotonic)
        self.show(self.counting.families)
        self._requests = Counter(
            "runfold_bridge_requests",
            "Requests answered",
            ("operation", "method", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "runfold_bridge_request_seconds",
            "Until an answer begins",
            ("operation",),
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._followers = Gauge(
            "runfold_bridge_followers", "Streams and waiting requests", registry=self._registry
        )
        self._signals = Counter(
            "runfold_bridge_signals",
            "Signals and inputs by what became of them, whatever the door",
            ("name", "result"),
            registry=self._registry,
        )
        self._connected = Gauge(
            "runfold_bridge_connected",
            "1 while connected to the NATS server",
            registry=self._registry,
        )

    def request(self, operation: str, method: str, status: int, seconds: float) -> None:
        """An answer began. `operation` is a name of the table, or empty."""
        self._requests.labels(operation, method, str(status)).inc()
        self._seconds.labels(operation).observe(seconds)

    def followers(self, count: int) -> None:
        self._followers.set(count)

    def signal(self, name: str, result: str) -> None:
        """`result`: applied, kept, repeated, or the code of the refusal. A name that is none counts
        as `other`."""
        self._signals.labels(name if name in SIGNALS else "other", result).inc()

    def connected_by(self, ask: Callable[[], bool]) -> None:
        """Where to look when asked."""
        self._connected.set_function(lambda: float(ask()))

    def show(self, families: Callable[[], list[Family]]) -> None:
        """These, too, as they are when asked."""
        self._registry.register(_Families(families))

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


class _Families(Collector):
    def __init__(self, families: Callable[[], list[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return shown(self._families(), Metric)
