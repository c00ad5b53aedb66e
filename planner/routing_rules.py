"""Rules by which other routers choose a worker, written from their descriptions: what to compare the planner with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from dynrt.planner.traces import TraceRequest


class Cache(Protocol):
    """One worker's prefix cache, as a rule may see it."""

    def match(self, block_ids: Sequence[int]) -> int:
        """How many leading ones of these blocks it holds."""


class Router:
    """What all rules have in common: they are told everything and by default note nothing."""

    def __init__(self, caches: Sequence[Cache], random: Random) -> None:
        self.caches = caches
        self.random = random

    @property
    def num_workers(self) -> int:
        return len(self.caches)

    def choose(self, request: TraceRequest, now: float) -> int:
        """The worker's index: by lot, where no rule knows better."""
        return self.random.randrange(self.num_workers)

    def prefilled(self, request: TraceRequest, worker: int) -> None:
        """Its first token is there."""

    def finished(self, request: TraceRequest, worker: int) -> None:
        """Its last token is there, after `prefilled`."""

    def cheapest(self, costs: Sequence[float]) -> int:
        """Ties are broken by lot."""
        limit = min(costs) + 1e-9
        return self.random.choice([worker for worker, cost in enumerate(costs) if cost <= limit])

    def uncached_tokens(self, request: TraceRequest) -> list[int]:
        """By worker."""
        usable = request.block_ids[: request.usable_blocks]
        return [request.prompt_tokens - cache.match(usable) * request.block_tokens for cache in self.caches]


class RoundRobin(Router):
    """One after the other."""

    def choose(self, request: TraceRequest, now: float) -> int:
        return request.number % self.num_workers


class AnyWorker(Router):
    """By lot."""


class LeastLoaded(Router):
    """The worker with the fewest open requests."""

    def __init__(self, caches: Sequence[Cache], random: Random) -> None:
        super().__init__(caches, random)
        self.open = [0] * self.num_workers

    def choose(self, request: TraceRequest, now: float) -> int:
        return self.take(self.cheapest(self.open))

    def take(self, worker: int) -> int:
        self.open[worker] += 1
        return worker

    def finished(self, request: TraceRequest, worker: int) -> None:
        self.open[worker] -= 1


class CacheAware(LeastLoaded):
    """`cache_aware` of vllm-router and sglang-router, with their default thresholds.

    A worker's cache is guessed from what was sent there. While loads are balanced: the longest match if it covers
    more than 0.3 of the prompt, else the smallest cache; otherwise the least loaded worker.
    """

    LEAST_MATCH = 0.3
    IMBALANCE_REQUESTS = 64
    IMBALANCE_RATIO = 1.5

    def __init__(self, caches: Sequence[Cache], random: Random) -> None:
        super().__init__(caches, random)
        self.sent: list[set[int]] = [set() for _ in caches]  # their bound lies above what traces hold

    def choose(self, request: TraceRequest, now: float) -> int:
        worker = self.take(self._pick(request.full_blocks))
        self.sent[worker].update(request.full_blocks)
        return worker

    def _pick(self, blocks: list[int]) -> int:
        most, least = max(self.open), min(self.open)
        if most - least > self.IMBALANCE_REQUESTS and most > self.IMBALANCE_RATIO * least:
            return self.open.index(least)
        matches = [_count_leading(sent, blocks) for sent in self.sent]
        if max(matches) > self.LEAST_MATCH * len(blocks):
            return matches.index(max(matches))
        return min(range(self.num_workers), key=lambda worker: len(self.sent[worker]))


class KvFormula(Router):
    """Dynamo's published cost, in blocks: `scale` × (prompt tokens to be computed there, these included) + distinct
    blocks that open requests hold there, these included.
    """

    def __init__(self, caches: Sequence[Cache], random: Random, scale: float = 1.0) -> None:
        super().__init__(caches, random)
        self.scale = scale
        self.to_compute = [0] * self.num_workers
        self.counted: dict[int, int] = {}  # tokens, by request
        self.active: list[Counter[int]] = [Counter() for _ in caches]

    def choose(self, request: TraceRequest, now: float) -> int:
        uncached = self.uncached_tokens(request)
        costs = [
            self.scale * (waiting + own) / request.block_tokens
            + len(active)
            + sum(block not in active for block in request.block_ids)
            for waiting, own, active in zip(self.to_compute, uncached, self.active, strict=True)
        ]
        worker = self.cheapest(costs)
        self.counted[request.number] = uncached[worker]
        self.to_compute[worker] += uncached[worker]
        self.active[worker].update(request.block_ids)
        return worker

    def prefilled(self, request: TraceRequest, worker: int) -> None:
        self.to_compute[worker] -= self.counted.pop(request.number)

    def finished(self, request: TraceRequest, worker: int) -> None:
        active = self.active[worker]
        for block in request.block_ids:
            active[block] -= 1
            if not active[block]:
                del active[block]


class WaitingPlusUncached(Router):
    """Prompt tokens to be computed there before it + `factor` × its own uncached ones."""

    def __init__(self, caches: Sequence[Cache], random: Random, factor: float) -> None:
        super().__init__(caches, random)
        self.factor = factor
        self.waiting = [0] * self.num_workers
        self.counted: dict[int, int] = {}  # tokens, by request

    def choose(self, request: TraceRequest, now: float) -> int:
        uncached = self.uncached_tokens(request)
        worker = self.cheapest(
            [waiting + self.factor * own for waiting, own in zip(self.waiting, uncached, strict=True)]
        )
        self.counted[request.number] = uncached[worker]
        self.waiting[worker] += uncached[worker]
        return worker

    def prefilled(self, request: TraceRequest, worker: int) -> None:
        self.waiting[worker] -= self.counted.pop(request.number)


RULES: dict[str, Callable[[Sequence[Cache], Random], Router]] = {
    "round-robin": RoundRobin,
    "random": AnyWorker,
    "least-loaded": LeastLoaded,
    "cache-aware": CacheAware,
    "kv-formula": KvFormula,
    "kv-formula-16": lambda caches, random: KvFormula(caches, random, scale=16),
    "ttft-a1": lambda caches, random: WaitingPlusUncached(caches, random, 1),
    "ttft-a2": lambda caches, random: WaitingPlusUncached(caches, random, 2),
    "ttft-a8": lambda caches, random: WaitingPlusUncached(caches, random, 8),
}


def _count_leading(held: set[int], block_ids: Sequence[int]) -> int:
    return next((index for index, block in enumerate(block_ids) if block not in held), len(block_ids))
