"""Spans that a test looks at: of this process, and of others, which send them by OTLP over HTTP."""

from __future__ import annotations

import gzip
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Sampler

from journal.tracing import Tracing


@dataclass(frozen=True)
class Seen:
    """A span that has ended. Ids in hex; `parent` is "" for a root; `links` are span ids."""

    name: str
    trace: str
    id: str
    parent: str
    kind: str
    links: tuple[tuple[str, str], ...]
    attributes: Mapping[str, Any]
    failed: bool
    events: tuple[str, ...]
    start_ns: int
    end_ns: int
    service: str
    text: str

    def __getitem__(self, name: Any) -> Any:  # an attribute, without its prefix
        return self.attributes[f"runfold.{name}"]


class Spans:
    """Those that have ended, in that order."""

    def __init__(self) -> None:
        self.all: list[Seen] = []

    def __iter__(self) -> Iterator[Seen]:
        return iter(list(self.all))

    def named(self, name: str) -> list[Seen]:
        return [span for span in self if span.name == name]

    def one(self, name: str) -> Seen:
        (found,) = self.named(name)
        return found

    def names(self) -> list[str]:
        return [span.name for span in self]

    def steps(self) -> list[Seen]:
        return [span for span in self if "runfold.step" in span.attributes]

    def counts(self) -> Counter[str]:
        return Counter(self.names())

    def traces(self) -> set[str]:
        return {span.trace for span in self}


class Kept(SpanExporter):
    def __init__(self, spans: Spans) -> None:
        self._spans = spans

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._spans.all += [_seen(span) for span in spans]
        return SpanExportResult.SUCCESS


def _seen(span: ReadableSpan) -> Seen:
    context = span.context
    assert context is not None and span.start_time is not None and span.end_time is not None
    return Seen(
        span.name,
        f"{context.trace_id:032x}",
        f"{context.span_id:016x}",
        f"{span.parent.span_id:016x}" if span.parent is not None else "",
        span.kind.name,
        tuple(
            (f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}") for link in span.links
        ),
        dict(span.attributes or {}),
        span.status.status_code.name == "ERROR",
        tuple(event.name for event in span.events),
        span.start_time,
        span.end_time,
        str(span.resource.attributes.get("service.name", "")),
        span.to_json(),
    )


def traced(sampler: Sampler | None = None) -> tuple[Tracing, Spans]:
    """What to give a store as its observer, and the spans that come of it."""
    spans = Spans()
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Kept(spans)))
    return Tracing(provider), spans


# ---- of other processes -------------------------------------------------------------------------


class Collector:
    """`url` is what OTEL_EXPORTER_OTLP_ENDPOINT is to be."""

    def __init__(self, url: str, spans: Spans) -> None:
        self.url = url
        self.spans = spans

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to send here, soon after each span has ended."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "20"}


@contextmanager
def collector() -> Iterator[Collector]:
    spans = Spans()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            request = ExportTraceServiceRequest.FromString(data)
            spans.all += [span for span in _sent(request) if self.path == "/v1/traces"]
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Collector(f"http://127.0.0.1:{server.server_port}", spans)
    finally:
        server.shutdown()
        server.server_close()


def _sent(request: ExportTraceServiceRequest) -> Iterator[Seen]:
    for resource in request.resource_spans:
        of = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Seen(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    ("", "INTERNAL", "SERVER", "CLIENT", "PRODUCER", "CONSUMER")[span.kind],
                    tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                    _attributes(span.attributes),
                    span.status.code == span.status.STATUS_CODE_ERROR,
                    tuple(event.name for event in span.events),
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    str(of["service.name"]),
                    str(span),
                )


def _attributes(found: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in found}
