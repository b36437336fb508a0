"""Shell: what a worker tells Prometheus: what was counted, and how it is now. Its import needs the
extra `metrics`."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from journal.counting import Counting
from journal.families import Family, gauge, gauges, shown

from .service import Worker


class WorkerMetrics(Collector):
    """All of a worker's metrics, at each `collect`; `counting` is its observer."""

    def __init__(self, worker: Worker, counting: Counting) -> None:
        self._worker = worker
        self._counting = counting

    def families(self) -> list[Family]:
        """From any thread."""
        return [*self._counting.families(), *gauges_of(self._worker)]

    def collect(self) -> Iterable[Metric]:
        return shown(self.families(), Metric)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self)


def gauges_of(worker: Worker) -> list[Family]:
    """How it is now."""
    load, well = worker.load(), worker.health().ok
    return [
        gauge("runfold_worker_active", "Runs and tasks at work", load.active),
        gauge("runfold_worker_concurrency", "So many at once at most", load.concurrency),
        gauge("runfold_worker_connected", "1 while connected to the NATS server", load.connected),
        gauge("runfold_worker_healthy", "1 while /healthz says 200", well),
        gauge(
            "runfold_worker_stubborn", "Tasks that ignore that they were cancelled", load.stubborn
        ),
        gauges(
            "runfold_worker_backlog",
            "Tasks that waited behind the last one that came, over the fleet; 0 after a pull that "
            "brought none",
            "agent",
            load.backlog,
        ),
    ]
