"""Many prompts that begin alike, placed by the planner: how many prompt tokens need not be computed again."""

from __future__ import annotations

from random import Random

import msgspec

from dynrt.planner.traces import TraceRequest
from rig.planner_rule import PlannerRule
from rig.prefill_fleet import FleetShape, PrefillFleet


class SharedPrefix(msgspec.Struct, frozen=True):
    """Prompts of `prompt_tokens`, the first `shared_tokens` of them the same in all."""

    prompt_tokens: int = 4000
    shared_tokens: int = 1000
    block_tokens: int = 32
    num_requests: int = 400
    num_workers: int = 4
    requests_per_s: float = 9.0  # keeps 4 workers busy for 0.56 of the time

    def requests(self, random: Random) -> list[TraceRequest]:
        """In the form of a trace. The block in which prompts part ways is nobody's twice."""
        num_shared = self.shared_tokens // self.block_tokens
        num_own = -(-self.prompt_tokens // self.block_tokens) - num_shared
        arrival_s, requests = 0.0, []
        for number in range(self.num_requests):
            first_own = num_shared + number * num_own
            block_ids = [*range(num_shared), *range(first_own, first_own + num_own)]
            requests.append(
                TraceRequest(number, arrival_s, self.prompt_tokens, 100, block_ids, self.block_tokens)
            )
            arrival_s += random.expovariate(self.requests_per_s)
        return requests


class SharedPrefixServed(msgspec.Struct, frozen=True):
    """In % of the prompts' tokens."""

    prompt_tokens: int
    shared_tokens: int
    block_tokens: int
    workers_used: int
    saved_warm: float  # by each request behind the first of its worker; the least
    saved: float  # by all requests


def serve_shared_prefix(load: SharedPrefix, seed: int = 1) -> SharedPrefixServed:
    random = Random(seed)
    shape = FleetShape(load.num_workers, blocks_per_worker=10_000)
    fleet = PrefillFleet(shape)
    rule = PlannerRule(shape, random, block_tokens=load.block_tokens)
    served = fleet.run(load.requests(random), rule)
    warm, seen = [], set()
    for one in sorted(served, key=lambda one: one.began_at):
        if one.worker in seen:
            warm.append(one.hit_tokens)
        seen.add(one.worker)
    return SharedPrefixServed(
        prompt_tokens=load.prompt_tokens,
        shared_tokens=load.shared_tokens,
        block_tokens=load.block_tokens,
        workers_used=len(seen),
        saved_warm=100 * min(warm) / load.prompt_tokens,
        saved=100 * sum(one.hit_tokens for one in served) / (load.num_requests * load.prompt_tokens),
    )
