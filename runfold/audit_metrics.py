"""Shell: what an audit that goes on counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Counts(Protocol):
    """Read from another thread while the audit goes on."""

    @property
    def violations(self) -> int: ...
    @property
    def runs(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def behind(self) -> int: ...
    @property
    def looked_at(self) -> float:
        """When the last look ended, in seconds since 1970; 0 before."""
        ...


class _Collector(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        totals = (
            ("violations", "Violations found in journals", counts.violations),
            ("runs", "Runs whose first record was audited", counts.runs),
            ("records", "Records audited", counts.records),
        )
        for name, about, value in totals:
            yield CounterMetricFamily(f"runfold_audit_{name}", about, value=value)
        gauges = (
            ("behind", "Records (of a directory: files) that wait to be audited", counts.behind),
            ("looked_at_seconds", "When the store was last asked for more", counts.looked_at),
        )
        for name, about, value in gauges:
            yield GaugeMetricFamily(f"runfold_audit_{name}", about, value=value)


def serve_metrics(host: str, port: int, counts: Counts) -> int:
    """GET /metrics from now on, in a thread that keeps no process from ending; the port, which is a
    free one for port 0. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(_Collector(counts))
    server, _ = start_http_server(port, host, registry)
    return server.server_port
