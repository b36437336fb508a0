"""Shell: what an audit that goes on counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from journal.families import Family, counter, gauge, shown


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


def families(counts: Counts) -> list[Family]:
    return [
        counter("runfold_audit_violations", "Violations found in journals", counts.violations),
        counter("runfold_audit_runs", "Runs whose first record was audited", counts.runs),
        counter("runfold_audit_records", "Records audited", counts.records),
        gauge(
            "runfold_audit_behind",
            "Records (of a directory: files) that wait to be audited",
            counts.behind,
        ),
        gauge(
            "runfold_audit_looked_at_seconds",
            "When the store was last asked for more, in seconds since 1970; 0: not yet",
            counts.looked_at,
        ),
    ]


class _Collector(Collector):
    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        return shown(families(self._counts), Metric)


def serve_metrics(host: str, port: int, counts: Counts) -> int:
    """GET /metrics from now on, in a thread that keeps no process from ending; the port, which is a
    free one for port 0. Raises OSError."""
    registry = CollectorRegistry()
    registry.register(_Collector(counts))
    server, _ = start_http_server(port, host, registry)
    return server.server_port
