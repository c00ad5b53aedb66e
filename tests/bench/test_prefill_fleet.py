"""The simulated fleet: caches, times and what rules are told; and the planner as one of the rules."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig.planner_rule import PlannerRule
from rig.prefill_fleet import BlockCache, CacheChange, FleetShape, PrefillFleet, Step
from rig.routing_outcome import oracle_hit_share, summarize
from rig.routing_rules import OTHER_RULES
from rig.shared_prefix import SharedPrefix, serve_shared_prefix

from dynrt.planner.plan import Plan
from dynrt.planner.traces import TraceRequest

SHAPE = FleetShape(2, blocks_per_worker=6, prefill_tokens_per_s=10.0, token_interval_s=0.1, step_tokens=8)
PATHS = {(0,): 1, (0, 1): 2, (0, 2): 3, (0, 1, 1): 4, (0, 1, 2): 5, (0, 2, 1): 6, (1,): 7, (1, 1): 8}


def ask(number: int, at: float, tokens: int, block_ids: list[int], output_tokens: int = 1) -> TraceRequest:
    return TraceRequest(number, at, tokens, output_tokens, block_ids, block_tokens=4)


class ToFirst:
    """Sends all to worker 0 and keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, Step]] = []
        self.told: list[str] = []

    def choose(self, request: TraceRequest, now: float) -> int:
        return 0

    def stepped(self, worker: int, step: Step, now: float) -> None:
        self.steps.append((now, step))

    def prefilled(self, request: TraceRequest, worker: int, change: CacheChange) -> None:
        self.told.append(f"prefilled {request.number}")

    def finished(self, request: TraceRequest, worker: int) -> None:
        self.told.append(f"finished {request.number}")


def test_a_worker_serves_in_order_and_computes_what_its_cache_lacks() -> None:
    fleet = PrefillFleet(SHAPE)
    requests = [ask(0, 0.0, 10, [1, 2, 3]), ask(1, 0.5, 12, [1, 2, 4])]
    first, second = fleet.run(requests, ToFirst())
    assert (first.hit_tokens, first.ttft_s) == (0, pytest.approx(1.0))
    assert (second.hit_tokens, second.began_at) == (8, pytest.approx(1.0))
    assert second.ttft_s == pytest.approx(0.5 + 0.4)


def test_a_prompt_that_is_held_in_full_still_computes_its_last_block() -> None:
    fleet = PrefillFleet(SHAPE)
    _, again = fleet.run([ask(0, 0.0, 8, [1, 2]), ask(1, 5.0, 8, [1, 2])], ToFirst())
    assert (again.hit_tokens, again.ttft_s) == (4, pytest.approx(0.4))


def test_rules_are_told_of_steps() -> None:
    fleet = PrefillFleet(SHAPE)
    rule = ToFirst()
    fleet.run([ask(0, 0.0, 10, [1, 2, 3], output_tokens=30), ask(1, 0.5, 12, [1, 2, 4])], rule)
    assert [(round(now, 6), step.prefill_tokens) for now, step in rule.steps] == [
        (0.8, 8),
        (1.0, 2),
        (1.4, 4),
    ]
    assert [step.prefill_context for _, step in rule.steps] == [64, 100 - 64, 144 - 64]
    assert rule.told == ["prefilled 0", "prefilled 1", "finished 1", "finished 0"]


@given(st.lists(st.sampled_from(sorted(PATHS)), max_size=40), st.integers(3, 8))
def test_a_cache_holds_the_latest_blocks_and_never_a_child_without_its_parent(
    paths: list[tuple[int, ...]], num_blocks: int
) -> None:
    cache = BlockCache(num_blocks)
    held: dict[int, int] = {}  # block by key, from what the cache tells
    for path in paths:
        block_ids = [PATHS[path[:length]] for length in range(1, len(path) + 1)]
        change = cache.store(block_ids)
        for key in change.removed_keys:
            del held[key]
        assert not held.keys() & set(change.stored_keys)
        held |= dict(zip(change.stored_keys, change.stored_blocks, strict=True))
        assert cache.match(block_ids) == len(block_ids)
        assert len(held) == len(cache) <= num_blocks
        if change.stored_blocks and change.stored_blocks != block_ids:
            assert held[change.parent_key] == block_ids[-len(change.stored_blocks) - 1]
        parents = {block: PATHS.get(path[:-1]) for path, block in PATHS.items()}
        assert all(parents[block] in (None, *held.values()) for block in held.values())


def test_the_oracle_hits_what_one_cache_of_that_size_holds() -> None:
    requests = [
        ask(0, 0, 10, [1, 2, 3]),
        ask(1, 0, 10, [1, 2, 4]),
        ask(2, 0, 10, [5, 6, 7]),
        ask(3, 0, 10, [1, 2, 8]),
    ]
    assert oracle_hit_share(requests, 4) == (8 + 8) / 40
    assert oracle_hit_share(requests, 2) == 8 / 40


def random_requests(random: Random) -> list[TraceRequest]:
    """Prompts of a few families, close together in time."""
    requests, at = [], 0.0
    for number in range(300):
        family, length = random.randrange(5), random.randint(1, 4)
        block_ids = [10 * family + depth for depth in range(length)] + [1000 + number]
        requests.append(ask(number, at, 4 * length + random.randint(1, 4), block_ids, random.randint(1, 20)))
        at += random.expovariate(1.2)
    return requests


@pytest.mark.parametrize("name", OTHER_RULES)
def test_every_rule_serves_all_requests_with_no_more_hits_than_prompts(name: str) -> None:
    fleet = PrefillFleet(SHAPE)
    requests = random_requests(Random(3))
    served = fleet.run(requests, OTHER_RULES[name](fleet.caches, Random(1)))
    assert [one.prompt_tokens for one in served] == [request.prompt_tokens for request in requests]
    assert all(0 <= one.hit_tokens < one.prompt_tokens for one in served)
    assert {one.worker for one in served} == {0, 1}


def test_the_planner_knows_its_workers_caches_exactly_and_forgets_all_load() -> None:
    fleet = PrefillFleet(SHAPE)
    rule = CheckedPlannerRule(fleet)
    served = fleet.run(random_requests(Random(3)), rule)
    assert rule.num_checked > 20
    assert {one.worker for one in served} == {0, 1}
    for name in rule.names:
        load = rule.planner.load(name)
        assert load.prefill_requests == load.prefill_tokens == load.held_tokens == 0


class CheckedPlannerRule(PlannerRule):
    """Compares each plan's hit with the cache, whenever no earlier plan's blocks are still to come."""

    def __init__(self, fleet: PrefillFleet) -> None:
        super().__init__(SHAPE, Random(1), block_tokens=4)
        self.caches = fleet.caches
        self.num_checked = 0

    def plan(self, request: TraceRequest, now: float) -> Plan:
        is_settled = not any(self.planner.load(name).prefill_requests for name in self.names)
        plan = super().plan(request, now)
        if is_settled:
            usable = request.block_ids[: request.usable_blocks]
            cache = self.caches[self.names.index(plan.prefill)]
            assert plan.prefill_hit_tokens == 4 * cache.match(usable)
            self.num_checked += plan.prefill_hit_tokens > 0
        return plan


def test_shared_prompts_are_computed_once_per_worker() -> None:
    served = serve_shared_prefix(SharedPrefix(num_requests=60))
    assert served.saved_warm == 24.8
    assert served.workers_used > 1
    assert served.saved == pytest.approx(24.8 * (1 - served.workers_used / 60))


def test_a_summary_counts_hits_balance_and_waits() -> None:
    fleet = PrefillFleet(SHAPE)
    served = fleet.run([ask(0, 0.0, 10, [1, 2, 3]), ask(1, 0.5, 12, [1, 2, 4])], ToFirst())
    outcome = summarize(served, SHAPE)
    assert outcome.hit_share == pytest.approx(8 / 22)
    assert outcome.requests_max_over_mean == outcome.minute_max_over_mean == 2.0
    assert (outcome.ttft_p50_s, outcome.ttft_p99_s) == (pytest.approx(1.0), pytest.approx(1.0))
