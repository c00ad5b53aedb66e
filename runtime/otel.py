"""Requests as OpenTelemetry traces, with the attributes that its conventions have for generative AI.

A span's times are known before it is made: all but the request's own are made when it ends. They leave in batches, from
a thread of the SDK. Nothing that a client wrote is in them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from importlib.metadata import version
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.util.types import AttributeValue

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.request_metrics import EndedRequest
from dynrt.runtime.requests import GenerateRequest
from dynrt.runtime.stage_spans import stage_spans
from dynrt.runtime.trace_context import trace_id_of

log = logging.getLogger("dynrt.otel")

FLUSH_S = 3.0  # what is not told by then, as the runtime ends, is lost
TRACES_PATH = "/v1/traces"


def otlp_tracing(endpoint: str) -> OtelTracing:
    """Raises ConfigError if `endpoint` is no URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--otel is {endpoint!r}; it must be a URL such as http://127.0.0.1:4318")
    url = endpoint if parts.path.endswith(TRACES_PATH) else endpoint.rstrip("/") + TRACES_PATH
    return OtelTracing(OTLPSpanExporter(endpoint=url))


class OtelTracing:
    """A tracing.Tracing. Whether a trace without a parent is sampled, OTEL_TRACES_SAMPLER says; all are by default."""

    def __init__(self, exporter: SpanExporter) -> None:
        service = os.environ.get("OTEL_SERVICE_NAME", "dynrt")
        resource = Resource.create({"service.name": service, "service.version": version("dynrt")})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("dynrt")

    def begin(self, request: GenerateRequest, began_at: float) -> OtelTrace:
        span = self._tracer.start_span(
            f"{request.operation} {request.model}",
            context=_parent(request.traceparent),
            kind=SpanKind.SERVER,
            attributes=_asked(request),
            start_time=_wall_ns(began_at),
        )
        return OtelTrace(self._tracer, span)

    def close(self) -> None:
        """The SDK tries for half a minute to reach a receiver that is gone; nobody waits for that."""
        flush = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            log.warning("the last traces have not been taken", extra={"within_s": FLUSH_S})


class OtelTrace:
    """A tracing.Trace."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def end(self, ended: EndedRequest, error: BaseException | None) -> None:
        if not self._span.is_recording():
            return
        within = trace.set_span_in_context(self._span)
        for one in stage_spans(ended.times):
            child = self._tracer.start_span(
                one.name, within, attributes=one.values, start_time=_wall_ns(one.begins_at)
            )
            child.end(_wall_ns(one.ends_at))
        self._span.set_attributes(_answered(ended))
        if error is not None and ended.outcome == "failed":
            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_wall_ns(ended.ended_at))


def _wall_ns(at: float) -> int:
    """The wall clock's time at a moment of CLOCK_MONOTONIC."""
    return time.time_ns() - time.monotonic_ns() + int(at * 1e9)


def _parent(traceparent: str) -> Context:
    """As the client says; a context of its own without one."""
    context = Context()
    if not traceparent:
        return context
    parent = SpanContext(
        trace_id=int(trace_id_of(traceparent), 16),
        span_id=int(traceparent[36:52], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(traceparent[53:55], 16) & TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(parent), context)


def _asked(request: GenerateRequest) -> dict[str, AttributeValue]:
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": request.operation,
        "gen_ai.provider.name": "dynrt",
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.response.id": request.request_id,
        "gen_ai.response.model": request.model,
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if request.seeded:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes


def _answered(ended: EndedRequest) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.usage.input_tokens": ended.prompt_tokens,
        "gen_ai.usage.output_tokens": ended.output_tokens,
        "dynrt.outcome": ended.outcome,
    }
    if ended.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [ended.finish_reason]
    if ended.times.first_token_at is not None:
        attributes["dynrt.time_to_first_token_s"] = ended.times.first_token_at - ended.times.began_at
    return attributes
