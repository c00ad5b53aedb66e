"""What a replay comes to: the numbers by which policies are compared."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynrt.runtime.replay.replay import Replayed, Served, WorkerUse


class Limits(msgspec.Struct, frozen=True):
    """What a request must keep to count as good."""

    ttft_s: float
    itl_s: float


class Percentiles(msgspec.Struct, frozen=True):
    """By nearest rank."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """All zero if there are no values."""
        ordered = sorted(values) or [0.0]
        return cls(*(ordered[int(share * (len(ordered) - 1) + 0.5)] for share in (0.5, 0.9, 0.99)))


class Summary(msgspec.Struct, frozen=True):
    """Of one policy. Latencies are of the requests that were served."""

    policy: str
    requests: int
    failed: int
    first_error: str | None
    duration_s: float  # until the last token
    hit_share: float  # of all prompt tokens: not computed, because the prefill worker held them
    ttft_s: Percentiles
    itl_s: Percentiles  # of each request's mean time between tokens
    goodput_per_s: float  # requests within both limits
    good_share: float
    imbalance: float  # prompt tokens computed by the busiest prefill worker over the mean, mean over minutes
    busy_share: float  # of the prefill workers' time


def summarize(replayed: Replayed, limits: Limits) -> Summary:
    served = [one for one in replayed.served if one.error is None]
    errors = [one.error for one in replayed.served if one.error is not None]
    duration_s = max((one.finished_at for one in served), default=0.0)
    num_good = sum(_is_good(one, limits) for one in served)
    prompt_tokens = sum(one.request.prompt_tokens for one in served)
    return Summary(
        policy=replayed.policy,
        requests=len(replayed.served),
        failed=len(errors),
        first_error=errors[0] if errors else None,
        duration_s=duration_s,
        hit_share=sum(one.cached_tokens for one in served) / max(1, prompt_tokens),
        ttft_s=Percentiles.of([one.ttft_s for one in served]),
        itl_s=Percentiles.of([one.itl_s for one in served if one.request.output_tokens > 1]),
        goodput_per_s=num_good / duration_s if duration_s else 0.0,
        good_share=num_good / len(replayed.served),
        imbalance=_imbalance(replayed.prefill_workers),
        busy_share=_busy_share(replayed.prefill_workers, duration_s),
    )


def _is_good(one: Served, limits: Limits) -> bool:
    return one.ttft_s <= limits.ttft_s and one.itl_s <= limits.itl_s


def _imbalance(workers: Sequence[WorkerUse]) -> float:
    """1: all the same; the number of workers: one did everything. Minutes without work do not count."""
    by_minute: dict[int, list[int]] = {}
    for worker in workers:
        for minute, tokens in worker.prefill_tokens_by_minute.items():
            by_minute.setdefault(minute, []).append(tokens)
    ratios = [max(tokens) * len(workers) / sum(tokens) for tokens in by_minute.values() if sum(tokens)]
    return sum(ratios) / len(ratios) if ratios else 1.0


def _busy_share(workers: Sequence[WorkerUse], duration_s: float) -> float:
    return sum(worker.busy_s for worker in workers) / (duration_s * len(workers)) if duration_s else 0.0
