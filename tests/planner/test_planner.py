"""The planner's choices: what must come out of the cost in the cases that went wrong elsewhere."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random
from typing import Literal

import msgspec
import pytest

from dynrt.planner.events import ROOT, BlocksStored, CacheCleared, CacheEvents
from dynrt.planner.plan import NoPlan, Plan, PlanRequest, WorkerFacts
from dynrt.planner.planner import EXPECTATION_S, Planner
from dynrt.runtime.messages import EngineLoad, StepTiming, pack_ids

SIZE = 16
Role = Literal["prefill", "decode", "both"]


def facts(worker_id: str, role: Role, num_blocks: int = 4096, context_length: int = 32768) -> WorkerFacts:
    return WorkerFacts(
        worker_id,
        role,
        block_size=SIZE,
        context_length=context_length,
        kv_bytes_per_token=8192,
        num_layers=8,
        num_blocks=num_blocks,
    )


def fleet(num_prefill: int, num_decode: int, seed: int = 0) -> Planner:
    """Workers p0, p1, … and d0, d1, …, all pairs connected, every one known to prefill 2 tokens a millisecond."""
    planner = Planner(Random(seed))
    prefills = [f"p{number}" for number in range(num_prefill)]
    decodes = [f"d{number}" for number in range(num_decode)]
    for worker_id in prefills:
        planner.worker_joined(facts(worker_id, "prefill"))
    for worker_id in decodes:
        planner.worker_joined(facts(worker_id, "decode"))
    for prefill in prefills:
        for decode in decodes:
            planner.pair_connected(prefill, decode)
    for worker_id in [*prefills, *decodes]:
        learn(planner, worker_id)
    return planner


def learn(planner: Planner, worker_id: str) -> None:
    """Steps of 2 ms + 0.5 ms a prompt token + 0.2 ms a decoding request."""
    for tokens in (16, 64, 128, 256, 384, 512, 32, 500) * 4:
        planner.step(
            worker_id, EngineLoad(), StepTiming((2 + 0.5 * tokens) / 1e3, 0.0, tokens, tokens**2, 0, 0)
        )
    for requests in (1, 2, 4, 8, 12, 16, 3, 6) * 4:
        timing = StepTiming((2 + 0.2 * requests) / 1e3, 0.0, 0, 0, requests, 100 * requests)
        planner.step(worker_id, EngineLoad(), timing)


class Requests:
    """Makes requests with keys and tokens of their own."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self,
        prompt: list[int],
        local_prefill: Literal["auto", "never", "always"] = "auto",
        exclude: tuple[str, ...] = (),
        salt: str = "",
        max_tokens: int = 100,
    ) -> PlanRequest:
        self.count += 1
        key = self.count.to_bytes(16, "big")
        return PlanRequest(key, salt, pack_ids(prompt), max_tokens, local_prefill, frozenset(exclude))

    def fresh(
        self,
        num_tokens: int,
        local_prefill: Literal["auto", "never", "always"] = "auto",
        max_tokens: int = 100,
    ) -> PlanRequest:
        start = 1_000_000 * (self.count + 1)
        return self(list(range(start, start + num_tokens)), local_prefill, max_tokens=max_tokens)


@pytest.fixture
def request_for() -> Requests:
    return Requests()


def made(planner: Planner, request: PlanRequest, now: float = 0.0) -> Plan:
    plan = planner.plan(request, now)
    assert isinstance(plan, Plan), plan
    return plan


def store(planner: Planner, worker_id: str, token_ids: list[int], seq: int = 0, first_key: int = 1) -> None:
    """The worker holds the whole blocks of these tokens."""
    count = len(token_ids) // SIZE
    keys = list(range(first_key, first_key + count))
    event = BlocksStored(ROOT, keys, pack_ids(token_ids[: count * SIZE]))
    assert planner.cache_events(worker_id, CacheEvents(seq, [event]))


def decode_streams(planner: Planner, request_for: Requests, count: int) -> None:
    """That many requests decode on d0 and nothing else is going on."""
    for _ in range(count):
        request = request_for.fresh(64, "always")
        made(planner, request)
        planner.first_token(request.key)


# --- local or remote ------------------------------------------------------------------------------


def test_a_fresh_prompt_goes_remote_when_the_decode_worker_is_busy(request_for: Requests) -> None:
    planner = fleet(1, 1)
    decode_streams(planner, request_for, 4)
    plan = made(planner, request_for.fresh(1000))
    assert (plan.kind, plan.prefill, plan.decode) == ("remote", "p0", "d0")


def test_on_an_idle_fleet_a_handoff_buys_nothing(request_for: Requests) -> None:
    plan = made(fleet(1, 1), request_for.fresh(1000))
    assert plan.kind == "local"
    assert plan.runner_up is not None and plan.runner_up.terms.handoff_ms > 0


def test_a_small_uncached_remainder_stays_local(request_for: Requests) -> None:
    planner = fleet(1, 1)
    decode_streams(planner, request_for, 4)
    prompt = list(range(2000))
    store(planner, "d0", prompt)
    plan = made(planner, request_for(prompt))
    assert plan.kind == "local"
    assert plan.decode_hit_tokens == 1984, "the last token is always computed, and so its block"


def test_a_prefix_on_prefill_draws_the_request_there(request_for: Requests) -> None:
    planner = fleet(1, 1)
    prompt = list(range(2000))
    store(planner, "p0", prompt)
    plan = made(planner, request_for(prompt))
    assert (plan.kind, plan.prefill_hit_tokens, plan.decode_hit_tokens) == ("remote", 1984, 0)


def test_streams_are_not_interrupted_for_the_sake_of_a_hit_on_their_worker(request_for: Requests) -> None:
    planner = fleet(1, 1)
    decode_streams(planner, request_for, 3)
    prompt = list(range(2000))
    store(planner, "d0", prompt[:1000])
    plan = made(planner, request_for(prompt))
    assert (plan.kind, plan.reason) == ("remote", "expected sooner")
    assert plan.runner_up is not None and plan.runner_up.kind == "local"
    assert plan.score_ms > plan.runner_up.score_ms, "by score alone it would be local"


def test_never_forces_remote_and_always_forces_local(request_for: Requests) -> None:
    planner = fleet(1, 1)
    assert made(planner, request_for.fresh(20, "never")).kind == "remote"
    decode_streams(planner, request_for, 8)
    assert made(planner, request_for.fresh(2000, "always")).kind == "local"


def test_never_without_a_pair_still_serves(request_for: Requests) -> None:
    planner = fleet(0, 1)
    plan = made(planner, request_for.fresh(100, "never"))
    assert (plan.kind, plan.decode, plan.reason) == ("local", "d0", "no connected pair")


def test_without_a_decode_worker_the_prefill_worker_serves_alone(request_for: Requests) -> None:
    planner = fleet(2, 1)
    planner.worker_left("d0")
    plan = made(planner, request_for.fresh(100, "never"))
    assert plan.kind == "local" and plan.prefill in {"p0", "p1"} and plan.reason == "no decode worker"


def test_a_pair_that_is_not_connected_is_not_used(request_for: Requests) -> None:
    planner = fleet(2, 2)
    for pair in planner.pairs - {("p1", "d0")}:
        planner.pair_disconnected(*pair)
    for _ in range(10):
        plan = made(planner, request_for.fresh(500, "never"))
        assert (plan.prefill, plan.decode) == ("p1", "d0")


def test_workers_for_both_serve_either_side(request_for: Requests) -> None:
    planner = Planner(Random(0))
    for worker_id in ("x", "y"):
        planner.worker_joined(facts(worker_id, "both"))
    planner.pair_connected("x", "y")
    planner.pair_connected("x", "x")
    assert planner.pairs == {("x", "y")}
    plan = made(planner, request_for.fresh(500, "never"))
    assert (plan.prefill, plan.decode) == ("x", "y")


def test_a_slow_link_keeps_a_long_prompt_local(request_for: Requests) -> None:
    planner = fleet(1, 1)
    decode_streams(planner, request_for, 2)
    assert made(planner, request_for.fresh(4000)).kind == "remote"
    for _ in range(300):
        planner.pushed("p0", "d0", kv_bytes=10**5, duration_s=1.0)
    assert made(planner, request_for.fresh(4000)).kind == "local"


# --- who can serve at all -------------------------------------------------------------------------


def test_no_worker_and_excluded_workers_give_no_plan(request_for: Requests) -> None:
    nobody = Planner(Random(0)).plan(request_for.fresh(10), 0.0)
    assert nobody == NoPlan("no_worker", "no worker is up")
    planner = fleet(1, 1)
    excluded = planner.plan(request_for([1, 2, 3], exclude=("p0", "d0")), 0.0)
    assert isinstance(excluded, NoPlan) and "2 excluded" in excluded.reason


def test_an_excluded_worker_is_skipped(request_for: Requests) -> None:
    planner = fleet(2, 2)
    for _ in range(10):
        plan = made(planner, request_for(list(range(500)), "never", exclude=("p0", "d1")))
        assert (plan.prefill, plan.decode) == ("p1", "d0")


def test_a_request_that_fits_no_cache_or_context_is_too_long(request_for: Requests) -> None:
    planner = Planner(Random(0))
    planner.worker_joined(facts("small", "both", num_blocks=4))
    planner.worker_joined(facts("short", "both", context_length=60))
    assert isinstance(planner.plan(request_for.fresh(60, max_tokens=5), 0.0), Plan)
    answer = planner.plan(request_for.fresh(60, max_tokens=6), 0.0)
    assert answer == NoPlan(
        "too_long",
        "the prompt has 60 tokens and max_tokens is 6, together more than any worker has room for; "
        "the largest takes 65",
    )


def unlike_sizes(prefill_blocks: dict[str, int], decode_blocks: dict[str, int]) -> Planner:
    """All pairs connected; workers named as their caches are."""
    planner = Planner(Random(0))
    for worker_id, num_blocks in prefill_blocks.items():
        planner.worker_joined(facts(worker_id, "prefill", num_blocks))
    for worker_id, num_blocks in decode_blocks.items():
        planner.worker_joined(facts(worker_id, "decode", num_blocks))
    for prefill, decode in product(prefill_blocks, decode_blocks):
        planner.pair_connected(prefill, decode)
    return planner


def test_what_the_decode_worker_will_reserve_must_fit_there_and_the_prompt_on_prefill(
    request_for: Requests,
) -> None:
    planner = unlike_sizes({"p-small": 10, "p-large": 20}, {"d-small": 30, "d-large": 40})
    for _ in range(10):
        plan = made(planner, request_for.fresh(200, "never", max_tokens=300))
        assert (plan.prefill, plan.decode) == ("p-large", "d-large")


def test_what_fits_no_decode_worker_is_decoded_by_a_prefill_worker_that_has_room(
    request_for: Requests,
) -> None:
    planner = unlike_sizes({"p-large": 40, "p-small": 10}, {"d": 20})
    plan = made(planner, request_for.fresh(100, "never", max_tokens=400))
    assert (plan.prefill, plan.decode, plan.reason) == ("p-large", "p-large", "too large for decode workers")


def test_a_prompt_that_fits_no_prefill_worker_is_prefilled_by_a_decode_worker(request_for: Requests) -> None:
    plan = made(unlike_sizes({"p": 10}, {"d": 40}), request_for.fresh(200, "never"))
    assert (plan.kind, plan.decode) == ("local", "d")


def test_a_request_under_way_waits_for_the_worker_that_had_room(request_for: Requests) -> None:
    request = msgspec.structs.replace(request_for.fresh(200, max_tokens=300), is_admitted=True)
    answer = unlike_sizes({"p": 20}, {"d": 20}).plan(request, 0.0)
    assert isinstance(answer, NoPlan) and answer.kind == "no_worker"


# --- spreading ------------------------------------------------------------------------------------


def test_misses_go_by_load_not_by_an_empty_cache(request_for: Requests) -> None:
    planner = fleet(4, 4)
    for number in range(200):
        store(planner, "p1", list(range(5000 * number, 5000 * number + 160)), number, 1 + 10 * number)
    counts = Counter(made(planner, request_for.fresh(1000, "never")).prefill for _ in range(40))
    assert set(counts.values()) == {10}


def test_a_burst_of_siblings_shares_the_prefix_and_spreads(request_for: Requests) -> None:
    """No event arrives between these plans: what they know of each other is expectation and load."""
    planner = fleet(4, 4)
    shared = list(range(320))
    tails = [list(range(10**6 * number, 10**6 * number + 400)) for number in range(1, 61)]
    plans = [made(planner, request_for([*shared, *tail], "never")) for tail in tails]
    assert plans[1].prefill == plans[0].prefill and plans[1].prefill_hit_tokens == 320
    counts = Counter(plan.prefill for plan in plans)
    assert len(counts) == 4 and max(counts.values()) < 30
    assert sum(plan.prefill_hit_tokens == 0 for plan in plans) == 4, "each worker computes the prefix once"


def test_one_shared_first_block_does_not_draw_everything_to_one_worker(request_for: Requests) -> None:
    planner = fleet(8, 8)
    first_block = list(range(SIZE))
    store(planner, "p0", first_block)
    tails = [list(range(10**6 * number, 10**6 * number + 1000)) for number in range(1, 81)]
    counts = Counter(made(planner, request_for([*first_block, *tail], "never")).prefill for tail in tails)
    assert len(counts) == 8 and max(counts.values()) <= 12


def test_a_hot_prefix_is_left_when_the_queue_costs_more_than_the_hit(request_for: Requests) -> None:
    planner = fleet(2, 2)
    shared = list(range(160))
    store(planner, "p0", shared)
    for _ in range(6):
        made(planner, request_for.fresh(4000, "never"))
    for _ in range(3):
        request = request_for.fresh(4000, "never")
        made(planner, PlanRequest(request.key, "", request.prompt_ids, 1, "never", frozenset({"p1"})))
    assert made(planner, request_for([*shared, 1], "never")).prefill == "p1"


def test_decode_workers_are_used_alike(request_for: Requests) -> None:
    planner = fleet(2, 5)
    counts = Counter(made(planner, request_for.fresh(300, "never")).decode for _ in range(100))
    assert set(counts.values()) == {20}


def test_ties_fall_at_random(request_for: Requests) -> None:
    chosen = {made(fleet(4, 4, seed), request_for.fresh(100, "never")).prefill for seed in range(40)}
    assert chosen == {"p0", "p1", "p2", "p3"}


def test_the_second_turn_returns_to_the_worker_of_the_first(request_for: Requests) -> None:
    planner = fleet(4, 4)
    turn = list(range(400))
    first = request_for(turn, "never")
    plan = made(planner, first)
    store(planner, plan.prefill, turn)
    planner.first_token(first.key)
    planner.finished(first.key)
    assert made(planner, request_for([*turn, *range(500, 600)], "never"), 100.0).prefill == plan.prefill


# --- what is believed, and until when -------------------------------------------------------------


def test_a_cleared_cache_draws_nothing_more(request_for: Requests) -> None:
    planner = fleet(2, 1)
    prompt = list(range(800))
    store(planner, "p0", prompt)
    planner.cache_events("p0", CacheEvents(1, [CacheCleared()]))
    assert made(planner, request_for(prompt, "never")).prefill_hit_tokens == 0


def test_a_restarted_worker_is_empty_and_unconnected(request_for: Requests) -> None:
    planner = fleet(1, 1)
    prompt = list(range(800))
    store(planner, "p0", prompt)
    made(planner, request_for(prompt, "never"))
    planner.worker_joined(facts("p0", "prefill"))
    assert planner.pairs == set() and planner.load("p0").prefill_tokens == 0
    planner.pair_connected("p0", "d0")
    store(planner, "p0", prompt[:160])
    assert made(planner, request_for(prompt, "never")).prefill_hit_tokens == 160


def test_a_failed_request_leaves_neither_load_nor_expectation(request_for: Requests) -> None:
    planner = fleet(1, 1)
    prompt = list(range(800))
    request = request_for(prompt, "never")
    made(planner, request)
    planner.failed(request.key)
    planner.failed(request.key)
    assert planner.load("p0").prefill_tokens == 0 and planner.load("d0").decode_requests == 0
    plan = made(planner, request_for(prompt, "never"))
    assert (plan.prefill_hit_tokens, plan.decode_hit_tokens) == (0, 0)


def test_planning_an_open_request_anew_replaces_it(request_for: Requests) -> None:
    planner = fleet(1, 1)
    request = request_for.fresh(800, "never")
    made(planner, request)
    made(planner, request)
    assert planner.load("p0").prefill_tokens == 800 and planner.load("d0").decode_requests == 1


def test_an_expectation_ends_by_itself(request_for: Requests) -> None:
    planner = fleet(1, 1)
    prompt = list(range(800))
    expected_s = made(planner, request_for(prompt, "never")).expected_ms / 1e3
    soon = made(planner, request_for(prompt, "never"), now=1.0)
    assert soon.prefill_hit_tokens == 784
    late = made(planner, request_for(prompt, "never"), now=100 + expected_s + EXPECTATION_S)
    assert late.prefill_hit_tokens == 0


def test_a_gap_is_named_until_the_snapshot(request_for: Requests) -> None:
    planner = fleet(1, 1)
    assert not planner.cache_events("p0", CacheEvents(3, []))
    assert planner.incomplete_workers == ["p0"]


def test_first_token_and_end_are_idempotent_and_leave_zero(request_for: Requests) -> None:
    planner = fleet(1, 1)
    request = request_for.fresh(800, "never")
    made(planner, request)
    for _ in range(2):
        planner.first_token(request.key)
    assert planner.load("p0").prefill_tokens == 0 and planner.load("d0").decode_requests == 1
    for _ in range(2):
        planner.finished(request.key)
    planner.first_token(request.key)
    assert planner.load("d0").decode_requests == 0 and planner.load("d0").held_tokens == 0


def test_a_plan_explains_itself(request_for: Requests) -> None:
    planner = fleet(2, 1)
    prompt = list(range(800))
    store(planner, "p1", prompt[:640])
    text = made(planner, request_for(prompt, "never")).explain()
    assert text.splitlines()[0].startswith(
        "800 prompt tokens, remote: prefill on p1 (hit 640 tokens), decode on d0"
    )
    assert "because: local prefill never" in text
    assert "instead of: remote: prefill on p0 (hit 0 tokens)" in text


def finished(exclude: set[str], max_tokens: int = 8) -> PlanRequest:
    """A prompt of 160 tokens that p0 has computed."""
    return PlanRequest(
        bytes(16), "", pack_ids(range(160)), max_tokens, exclude=frozenset(exclude), is_admitted=True,
        prefilled_on="p0",
    )  # fmt: skip


def test_a_finished_prompt_goes_from_its_prefill_worker_to_a_decode_worker_that_was_not_tried() -> None:
    for seed in range(10):
        plan = fleet(2, 3, seed).plan(finished({"d0", "d2"}), 0.0)
        assert isinstance(plan, Plan) and (plan.prefill, plan.decode) == ("p0", "d1")


def test_tried_everywhere_it_stays_where_it_is() -> None:
    plan = fleet(2, 2).plan(finished({"d0", "d1"}), 0.0)
    assert isinstance(plan, Plan) and (plan.prefill, plan.decode, plan.kind) == ("p0", "p0", "local")


def test_a_finished_prompt_that_fits_nowhere_is_told_when_to_come_back() -> None:
    planner = fleet(1, 1)
    for number in range(20):
        planner.plan(PlanRequest(number.to_bytes(16, "little"), "", pack_ids(range(3000)), 10), 0.0)
    refused = planner.plan(finished({"d0"}, max_tokens=4096 * SIZE), 0.0)
    assert isinstance(refused, NoPlan) and refused.kind == "no_room" and refused.retry_after_s > 0.0
    assert "no decode worker has room" in refused.reason


def test_a_finished_prompt_whose_worker_has_left_is_computed_again() -> None:
    planner = fleet(2, 2)
    planner.worker_left("p0")
    refused = planner.plan(finished({"d0"}), 0.0)
    assert isinstance(refused, NoPlan) and refused.kind == "no_worker"
