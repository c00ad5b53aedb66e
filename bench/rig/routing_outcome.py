"""What a rule achieved on a simulated fleet, and what any rule could have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from dynrt.planner.traces import TraceRequest
from rig.prefill_fleet import BlockCache, FleetShape, Served


def oracle_hit_share(requests: Sequence[TraceRequest], num_blocks: int) -> float:
    """Share of prompt tokens that one cache of so many blocks would hit, each prompt stored as soon as it arrives."""
    cache = BlockCache(num_blocks)
    hit_tokens = 0
    for request in requests:
        hit_tokens += cache.match(request.block_ids[: request.usable_blocks]) * request.block_tokens
        cache.store(request.full_blocks)
    return hit_tokens / sum(request.prompt_tokens for request in requests)


class Outcome(msgspec.Struct, frozen=True):
    """What a rule achieved."""

    hit_share: float  # of prompt tokens
    requests_max_over_mean: float
    minute_max_over_mean: float  # prefill tokens of the busiest worker, mean over minutes
    busy: float  # share of the workers' time until the last request began
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float


def summarize(served: Sequence[Served], shape: FleetShape) -> Outcome:
    prompt_tokens = sum(one.prompt_tokens for one in served)
    computed_tokens = prompt_tokens - sum(one.hit_tokens for one in served)
    counts = [0] * shape.num_workers
    for one in served:
        counts[one.worker] += 1
    ttft_s = sorted(one.ttft_s for one in served)
    last_s = max(one.began_at for one in served)
    capacity = shape.prefill_tokens_per_s * shape.num_workers * last_s
    return Outcome(
        hit_share=1 - computed_tokens / prompt_tokens,
        requests_max_over_mean=_max_over_mean(counts),
        minute_max_over_mean=_mean([_max_over_mean(tokens) for tokens in _minutes(served, shape)]),
        busy=computed_tokens / capacity if capacity else 0.0,
        ttft_p50_s=_percentile(ttft_s, 0.5),
        ttft_p90_s=_percentile(ttft_s, 0.9),
        ttft_p99_s=_percentile(ttft_s, 0.99),
    )


def _minutes(served: Sequence[Served], shape: FleetShape) -> Iterator[list[int]]:
    """Prefill tokens of each worker, by the minute in which their prefill began."""
    minutes: dict[int, list[int]] = {}
    for one in served:
        tokens = minutes.setdefault(int(one.began_at // 60), [0] * shape.num_workers)
        tokens[one.worker] += one.prompt_tokens - one.hit_tokens
    return iter(minutes.values())


def _max_over_mean(values: Sequence[int]) -> float:
    return max(values) * len(values) / sum(values)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
