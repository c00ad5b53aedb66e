"""Metrics of requests: what counts where, and that telling a step's tokens in bulk loses none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from dynrt.runtime.messages import FinishReason
from dynrt.runtime.request_metrics import EndedRequest, RequestMetrics, RequestOutcome
from dynrt.runtime.request_times import RequestTimes, StageTimes


class Shown:
    """RequestMetrics, and what they show."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.metrics = RequestMetrics({"model_name": "tiny", "engine": "0"}, self._registry)

    def samples(self) -> list[Sample]:
        families = text_string_to_metric_families(generate_latest(self._registry).decode())
        return [sample for family in families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        return value_of(self.samples(), name, **labels)


def value_of(samples: list[Sample], name: str, **labels: str) -> float:
    [value] = [
        sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return value


def ended(outcome: RequestOutcome, reason: FinishReason | None = None) -> EndedRequest:
    stage = StageTimes("p", "d", planned_at=1.5, admitted_at=2.0, computed_at=3.0)
    times = RequestTimes(1.0, first_token_at=3.0, last_token_at=7.0, stages=[stage])
    return EndedRequest(outcome, reason, times, 7.5, prompt_tokens=30, output_tokens=5, max_tokens=100)


def test_a_finished_request_is_measured() -> None:
    shown = Shown()
    shown.metrics.ended(ended("finished", "length"))
    expected = {
        "e2e_request_latency_seconds": 6.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 1.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 5.0,
        "request_time_per_output_token_seconds": 1.0,
        "request_prompt_tokens": 30.0,
        "request_generation_tokens": 5.0,
        "request_params_max_tokens": 100.0,
    }
    samples = shown.samples()
    assert {name: value_of(samples, f"vllm:{name}_sum") for name in expected} == expected
    assert shown.value("dynrt_request_plan_seconds_sum") == 0.5


@pytest.mark.parametrize(
    ("outcome", "reason", "word"),
    [
        ("finished", "stop", "stop"),
        ("finished", "length", "length"),
        ("cancelled", None, "abort"),
        ("failed", None, "error"),
    ],
)
def test_each_end_has_vllms_word(outcome: RequestOutcome, reason: FinishReason | None, word: str) -> None:
    shown = Shown()
    shown.metrics.ended(ended(outcome, reason))
    assert shown.value("vllm:request_success_total", finished_reason=word) == 1.0
    assert shown.value("dynrt_requests_total", outcome=outcome) == 1.0
    assert shown.value("dynrt_request_seconds_count") == (outcome == "finished")


@settings(max_examples=30)
@given(st.lists(st.sampled_from([1.0, 2.0, 2.5])))
def test_every_token_behind_a_first_is_told(last_token_at: list[float]) -> None:
    shown = Shown()
    shown.metrics.tokens_followed(4.0, last_token_at)
    samples = shown.samples()
    assert value_of(samples, "dynrt_inter_token_seconds_count") == len(last_token_at)
    assert value_of(samples, "dynrt_inter_token_seconds_sum") == sum(4.0 - at for at in last_token_at)
    for bound in (1.5, 2.5, 5.0):
        expected = sum(4.0 - at <= bound for at in last_token_at)
        assert value_of(samples, "dynrt_inter_token_seconds_bucket", le=str(bound)) == expected


def test_a_clock_that_lags_makes_no_latency_negative() -> None:
    shown = Shown()
    shown.metrics.tokens_followed(4.0, [4.5, 4.5])
    assert shown.value("vllm:inter_token_latency_seconds_sum") == 0.0
