"""Traces: a request's spans hang together, are sampled as the client says, and hold nothing of what was said."""

from __future__ import annotations

import builtins
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from dynrt.runtime.errors import ConfigError, EngineError
from dynrt.runtime.messages import SamplingParams, pack_ids
from dynrt.runtime.otel import OtelTracing
from dynrt.runtime.request_metrics import EndedRequest, RequestOutcome
from dynrt.runtime.request_times import RequestTimes, StageTimes
from dynrt.runtime.requests import GenerateRequest
from dynrt.runtime.tracing import NoTracing, open_tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"


def request_of(traceparent: str = "") -> GenerateRequest:
    sampling = SamplingParams(9, temperature=0.5, top_k=3, seed=7, stop=("secret",))
    return GenerateRequest(
        pack_ids([1, 2, 3]), sampling, "tiny", "r1", seeded=True, traceparent=traceparent, operation="chat"
    )


def ended(began_at: float, outcome: RequestOutcome = "finished") -> EndedRequest:
    stage = StageTimes("prefill-0", "decode-0", began_at + 1, began_at + 2, began_at + 3, began_at + 4)
    times = RequestTimes(began_at, began_at + 3, began_at + 5, [stage])
    reason = "stop" if outcome == "finished" else None
    return EndedRequest(outcome, reason, times, began_at + 6, prompt_tokens=3, output_tokens=2, max_tokens=9)


def trace_one(
    traceparent: str, outcome: RequestOutcome = "finished", error: Exception | None = None
) -> tuple[str, dict[str, ReadableSpan]]:
    """The traceparent for the engines, and the spans by name."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(exporter)
    began_at = time.monotonic() - 10
    trace = tracing.begin(request_of(traceparent), began_at)
    trace.end(ended(began_at, outcome), error)
    tracing.close()
    spans: tuple[ReadableSpan, ...] = exporter.get_finished_spans()
    return trace.traceparent, {span.name: span for span in spans}


def test_spans_hang_under_the_requests_and_that_under_the_clients() -> None:
    traceparent, spans = trace_one(SAMPLED)
    assert set(spans) == {"chat tiny", "plan", "queue", "prefill", "transfer", "decode"}
    request = spans.pop("chat tiny")
    assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT_ID
    assert request.kind is SpanKind.SERVER
    assert traceparent == f"00-{TRACE_ID}-{request.context.span_id:016x}-01"
    for span in spans.values():
        assert span.parent is not None and span.parent.span_id == request.context.span_id
        assert f"{span.context.trace_id:032x}" == TRACE_ID
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time


def test_times_are_those_of_the_wall_clock() -> None:
    _, spans = trace_one("")
    request = spans["chat tiny"]
    assert request.end_time - request.start_time == pytest.approx(6e9, abs=1e6)
    assert abs(request.start_time - (time.time_ns() - 10 * 10**9)) < 5 * 10**9
    assert spans["prefill"].end_time - spans["prefill"].start_time == pytest.approx(1e9, abs=1e6)


def test_a_request_without_a_trace_begins_one() -> None:
    traceparent, spans = trace_one("")
    assert spans["chat tiny"].parent is None
    assert traceparent.startswith(f"00-{spans['chat tiny'].context.trace_id:032x}-")


def test_what_the_client_does_not_sample_is_not_recorded_but_passed_on() -> None:
    traceparent, spans = trace_one(NOT_SAMPLED)
    assert spans == {}
    assert traceparent.startswith(f"00-{TRACE_ID}-") and traceparent.endswith("-00")


def test_attributes_are_those_of_the_conventions_and_tell_nothing_that_was_said() -> None:
    _, spans = trace_one("")
    attributes: dict[str, Any] = dict(spans["chat tiny"].attributes or {})
    assert attributes.pop("dynrt.time_to_first_token_s") == pytest.approx(3.0)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dynrt",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "r1",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "dynrt.outcome": "finished",
    }


def test_a_failure_is_an_error_and_a_client_that_left_is_none() -> None:
    _, spans = trace_one("", "failed", EngineError("what it says may quote a prompt"))
    failed = spans["chat tiny"]
    assert failed.status.status_code is StatusCode.ERROR and failed.status.description is None
    assert (failed.attributes or {})["error.type"] == "EngineError"
    _, spans = trace_one("", "cancelled")
    assert spans["chat tiny"].status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://x:4317", "http://"])
def test_an_endpoint_must_be_a_url(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="it must be a URL such as"):
        open_tracing(endpoint)


def test_without_the_extra_its_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_sdk(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "dynrt.runtime.otel":
            raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry.trace")
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_sdk)
    with pytest.raises(ConfigError, match=r"pip install 'dynrt\[otel\]'"):
        open_tracing("http://127.0.0.1:4318")


def test_without_an_endpoint_nothing_is_recorded() -> None:
    assert isinstance(open_tracing(None), NoTracing)
