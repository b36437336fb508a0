"""Shell: tracing as a user turns it on (docs/tracing.md): `store.observer = tracing()` in a program
with a TracerProvider of its own; `--trace` of a command, which sends spans by OTLP over HTTP.

The environment says the rest, as OpenTelemetry has it: OTEL_EXPORTER_OTLP_*, OTEL_TRACES_SAMPLER,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_BSP_*, OTEL_SDK_DISABLED.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Final

import typer

from journal.observing import UNOBSERVED, Observer
from journal.shielded import Shielded

from .frame import UsageProblem
from .terminal import note

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import TracerProvider as AnyProvider

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
HINT: Final = "pip install 'runfold[otel]'"
FLUSH_S: Final = 3.0
"""A collector that does not answer keeps no process from ending."""

TraceOption = Annotated[
    bool | None,
    typer.Option(
        "--trace/--no-trace",
        envvar="RUNFOLD_TRACE",
        help="Send OpenTelemetry spans by OTLP over HTTP. Default: where "
        "OTEL_EXPORTER_OTLP_ENDPOINT is set.",
        show_default=False,
    ),
]


def tracing(provider: AnyProvider | None = None) -> Observer:
    """What to set a store's `observer` to; the spans go to the provider, else to the program's own.
    Raises ImportError without opentelemetry-api."""
    from journal.tracing import Tracing

    return Shielded(Tracing(provider))


@contextmanager
def traced(wanted: bool | None, service: str, namespace: str) -> Generator[Observer]:
    """The observer of a process: of nothing, unless tracing is asked for, by the option or by an
    endpoint in the environment. A provider that the user's own code has set is kept, and flushed
    by who set it. Raises UsageProblem where the extra is missing and the option was given."""
    if not asked_for(wanted):
        yield UNOBSERVED
        return
    try:
        own = _own_provider(service, namespace)
    except ImportError as error:
        if wanted:
            raise UsageProblem(f"tracing needs {error.name}", hint=HINT) from error
        note(f"no traces, though their endpoint is set: they need {error.name} ({HINT})")
        yield UNOBSERVED
        return
    try:
        yield tracing(own)
    finally:
        if own is not None:  # opentelemetry-sdk 1.45.2 keeps to no timeout of a flush
            flushing = Thread(target=own.shutdown, name="last spans", daemon=True)
            flushing.start()
            flushing.join(FLUSH_S)


def asked_for(wanted: bool | None) -> bool:
    """Whether the option, or without it the environment, asks for traces."""
    return wanted if wanted is not None else any(os.environ.get(name) for name in ENDPOINTS)


def _own_provider(service: str, namespace: str) -> TracerProvider | None:
    """One that exports, made the program's; None where that has one. Raises ImportError."""
    from opentelemetry.trace import ProxyTracerProvider, get_tracer_provider, set_tracer_provider

    if not isinstance(get_tracer_provider(), ProxyTracerProvider):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from . import __version__

    resource = Resource.create({SERVICE_VERSION: __version__, "runfold.namespace": namespace})
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    set_tracer_provider(provider)  # what the user's tools trace goes the same way
    return provider
