"""Metrics: the names that others rely on are there from the start, and each runtime counts for itself."""

from __future__ import annotations

import pytest

from dynrt.runtime.messages import EngineLoad
from dynrt.runtime.metrics import Metrics


def lines(metrics: Metrics) -> dict[str, float]:
    shown = [line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in shown}


@pytest.mark.parametrize(
    "name",
    [
        *(
            f'dynrt_handoffs_total{{outcome="{outcome}"}}'
            for outcome in ("committed", "cancelled", "fenced", "failed")
        ),
        "dynrt_handoff_exposed_seconds_count",
        "dynrt_kv_bytes_pushed_total",
        'dynrt_prefill_tokens_total{source="computed"}',
        'dynrt_prefill_tokens_total{source="cached"}',
        'dynrt_plans_total{kind="remote"}',
        'dynrt_plans_total{kind="local"}',
        'vllm:num_requests_running{engine="0",model_name="tiny"}',
        'vllm:num_requests_waiting{engine="0",model_name="tiny"}',
        'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}',
        'vllm:prompt_tokens_total{engine="0",model_name="tiny"}',
        'vllm:generation_tokens_total{engine="0",model_name="tiny"}',
        'vllm:prefix_cache_queries_total{engine="0",model_name="tiny"}',
        'vllm:prefix_cache_hits_total{engine="0",model_name="tiny"}',
    ],
)
def test_name_is_there_before_anything_was_counted(name: str) -> None:
    assert lines(Metrics("tiny"))[name] == 0.0


def test_runtimes_of_one_process_count_apart() -> None:
    one, other = Metrics("tiny"), Metrics("tiny")
    one.kv_bytes_pushed.inc(5)
    assert lines(one)["dynrt_kv_bytes_pushed_total"] == 5.0
    assert lines(other)["dynrt_kv_bytes_pushed_total"] == 0.0


def test_loads_are_summed_and_those_of_lost_workers_vanish() -> None:
    metrics = Metrics("tiny")
    load = EngineLoad(2, 3, blocks_total=10, blocks_active=4, blocks_cached=1, preemptions_total=1)
    metrics.show_loads({"prefill-0": load, "decode-0": load})
    shown = lines(metrics)
    assert shown['vllm:num_requests_waiting{engine="0",model_name="tiny"}'] == 4.0
    assert shown['vllm:num_requests_running{engine="0",model_name="tiny"}'] == 6.0
    assert shown['vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'] == pytest.approx(0.4)
    assert shown['dynrt_kv_blocks{state="active",worker="decode-0"}'] == 4.0
    metrics.show_loads({"prefill-0": load})
    assert 'dynrt_kv_blocks{state="active",worker="decode-0"}' not in lines(metrics)
    metrics.show_loads({})
    assert lines(metrics)['vllm:kv_cache_usage_perc{engine="0",model_name="tiny"}'] == 0.0
