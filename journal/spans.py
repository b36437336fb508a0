"""Shell: spans and their contexts, as OpenTelemetry has them. What they are of: tracing.py."""

from __future__ import annotations

from contextlib import AbstractContextManager
from hashlib import blake2b
from typing import Any, Final

from msgspec import UNSET
from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    TracerProvider,
    set_span_in_context,
    use_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from .observing import Trace
from .records import StepCompleted, StepStarted

TRACEPARENT: Final = "traceparent"
TRACEPARENT_CHARS: Final = 55
"""Of version 00. A longer one is a later version's, or nobody's: not looked at."""

_propagator: Final = TraceContextTextMapPropagator()


# ---- contexts -----------------------------------------------------------------------------------


def parsed(text: str) -> SpanContext | None:
    """The context in a traceparent; None where it is none, or not one of version 00."""
    if len(text) != TRACEPARENT_CHARS or not text.startswith("00-"):
        return None
    found = otel.get_current_span(_propagator.extract({TRACEPARENT: text}, Context()))
    context = found.get_span_context()
    return context if context.is_valid else None


def written(span: Span) -> str:
    """The span's traceparent, made of its numbers; "" where nothing is traced."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get(TRACEPARENT, "")


def current() -> SpanContext | None:
    """Of the span that this task is in."""
    found = otel.get_current_span().get_span_context()
    return found if found.is_valid else None


def below(parent: SpanContext | None) -> Context:
    """Where a child of it is begun; without one, a trace."""
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())


def context_of(run_id: str, trace: Trace, provider: TracerProvider) -> SpanContext:
    """Where the run's spans hang. Of a run that was started without a trace, each process makes the
    same one up, from what only this run has; the provider decides whether it is sampled."""
    found = parsed(trace.run)
    if found is not None:
        return found
    made = blake2b(f"{run_id} {trace.first}".encode(), digest_size=24).digest()
    trace_id = int.from_bytes(made[:16], "big")
    flags = TraceFlags.SAMPLED if _samples(provider, trace_id) else TraceFlags.DEFAULT
    span_id = int.from_bytes(made[16:], "big")
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))


def _samples(provider: TracerProvider, trace_id: int) -> bool:
    """Whether it would sample a trace that begins here."""
    sampler: Any = getattr(provider, "sampler", None)  # the API knows of none
    if sampler is None:
        return True
    return sampler.should_sample(Context(), trace_id, "run").decision.is_sampled()


def inside(span: Span) -> AbstractContextManager[Span]:
    """While inside it is the current one. Its end, and what went wrong, are said elsewhere: an
    exception's text may hold anything."""
    return use_span(span, record_exception=False, set_status_on_exception=False)


# ---- what spans say -----------------------------------------------------------------------------


def fail(span: Span, what: str) -> None:
    """`what` is one of a few words, never a text."""
    span.set_attribute("error.type", what)
    span.set_status(Status(StatusCode.ERROR))


def step_name(start: StepStarted) -> str:
    return f"tool {start.tool}" if start.tool else start.kind


def step_attributes(run_id: str, start: StepStarted) -> dict[str, AttributeValue]:
    """Neither input nor result, for a trace is read by others than the journal; nor the key: by its
    digest they could try what the input was."""
    found: dict[str, AttributeValue] = {
        "runfold.run": run_id,
        "runfold.step": start.step,
        "runfold.start": start.n,
        "runfold.kind": start.kind,
        "runfold.replay": start.replay,
        "runfold.attempt": start.attempt,
    }
    if start.tool:
        found["runfold.tool"] = start.tool
    if start.permit:
        found["runfold.permit"] = start.permit
    return found


def end_step(span: Span, completed: StepCompleted) -> None:
    """With what the call came to: an error, or a result."""
    span.set_attribute("runfold.via", completed.via)
    if completed.error is not UNSET:
        span.set_attribute("runfold.outcome", "error")
        fail(span, completed.error.type)
    else:
        span.set_attribute("runfold.outcome", "result")
    span.end()
