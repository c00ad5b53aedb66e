"""The cost terms, by hand-made cases whose answers follow from the formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.planner.candidates import Candidate, Demand, see_worker
from dynrt.planner.coefficients import Coefficients
from dynrt.planner.cost import DECODE_HORIZON, Terms, exposed_transfer_ms
from dynrt.planner.links import ASSUMED_HANDOFF_MS, Links
from dynrt.planner.load import Load
from dynrt.planner.plan import WorkerFacts

COSTS = Coefficients(
    step_ms=5, prefill_token_ms=0.5, prefill_context_ms=1e-4, decode_request_ms=0.1, decode_kv_token_ms=0.01
)


def seen(load: Load, prompt_tokens: int, hit_tokens: int = 0, output_tokens: int = 10) -> Candidate:
    """A worker whose KV cache takes 5,000 tokens."""
    facts = WorkerFacts("w", "both", 10, 8192, 1024, 4, num_blocks=500)
    return see_worker(facts, load, COSTS, Demand(prompt_tokens, output_tokens, 7.0), hit_tokens, lot=0.0)


def test_attention_to_a_cached_prefix_is_paid() -> None:
    fresh, behind_prefix = seen(Load(10), 1000), seen(Load(10), 4000, hit_tokens=3000)
    assert fresh.compute_ms == pytest.approx(5 + 500 + 100)
    assert behind_prefix.compute_ms == pytest.approx(5 + 500 + 1e-4 * (4000**2 - 3000**2))


def test_the_last_token_is_always_computed() -> None:
    candidate = seen(Load(10), 1000, hit_tokens=1000)
    assert (candidate.hit_tokens, candidate.prefill_hit_tokens) == (1000, 990)
    assert candidate.compute_ms == pytest.approx(5 + 0.5 * 10 + 1e-4 * (1000**2 - 990**2))


def test_the_queue_is_what_waits() -> None:
    load = Load(10)
    assert seen(load, 100).queue_ms == 0
    load.plan_prefill(b"a", 100, 100)
    load.plan_prefill(b"b", 100, 50)
    assert seen(load, 100).queue_ms == pytest.approx(2 * 5 + 0.5 * 150 + 1e-4 * (100**2 + 100**2 - 50**2))


def test_joining_a_batch_costs_both_sides() -> None:
    load = Load(10)
    assert seen(load, 1000).batch_ms == 0
    load.plan_decode(b"a", 200, 200)
    assert seen(load, 1000).batch_ms == pytest.approx(10 * ((0.1 + 2) + (0.1 + 10)))
    at_horizon = seen(load, 1000, output_tokens=DECODE_HORIZON)
    assert seen(load, 1000, output_tokens=10**6).batch_ms == at_horizon.batch_ms


def test_what_does_not_fit_is_computed_again() -> None:
    load = Load(10)
    load.plan_decode(b"a", 4900, 4900)
    assert seen(load, 100).queue_ms == 0
    assert seen(load, 140).queue_ms == pytest.approx(0.5 * 40)


def test_scores_are_sums_of_terms_in_which_the_uncached_time_counts_again() -> None:
    load = Load(10)
    load.plan_prefill(b"a", 100, 100)
    load.plan_decode(b"a", 100, 100)
    candidate = seen(load, 50)
    uncached_ms = 0.5 * 50 + 1e-4 * 50**2
    prefill_ms = candidate.queue_ms + 5 + 8 * uncached_ms
    assert candidate.prefill_score_ms == pytest.approx(prefill_ms)
    assert candidate.local_score_ms == pytest.approx(prefill_ms + candidate.batch_ms + uncached_ms)
    assert candidate.decode_ms == pytest.approx(candidate.queue_ms + candidate.batch_ms)


def test_a_fast_link_hides_everything() -> None:
    assert exposed_transfer_ms(100, 32, fresh_bytes=1e6, cached_bytes=0, bytes_per_ms=1e6) == 0


def test_a_slow_link_exposes_what_compute_does_not_cover() -> None:
    exposed = exposed_transfer_ms(100, 10, fresh_bytes=3e6, cached_bytes=0, bytes_per_ms=1e4)
    assert exposed == pytest.approx(300 - 100 + 1)  # 1 ms: a tenth of the first layer passes before it has KV


def test_a_hit_on_prefill_needs_the_link_as_much_in_less_time() -> None:
    without = exposed_transfer_ms(100, 10, fresh_bytes=1e6, cached_bytes=0, bytes_per_ms=2e4)
    with_hit = exposed_transfer_ms(25, 10, fresh_bytes=25e4, cached_bytes=75e4, bytes_per_ms=2e4)
    assert without == 0
    assert with_hit == pytest.approx(50 - 25)


@given(st.floats(0.1, 1e4), st.integers(1, 100), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(1, 1e7))
def test_exposed_time_is_within_its_bounds(
    compute_ms: float, num_layers: int, fresh: float, cached: float, rate: float
) -> None:
    exposed = exposed_transfer_ms(compute_ms, num_layers, fresh, cached, rate)
    assert 0 <= exposed <= (fresh + cached) / rate + 1e-6
    assert exposed >= (fresh + cached) / rate - compute_ms - 1e-6


def test_expected_is_the_sum_of_the_terms_and_says_so() -> None:
    terms = Terms(1, 2, 3, 4, 5)
    assert terms.expected_ms == 15
    assert terms.describe() == "15.0 ms (queue 1.0, compute 2.0, transfer 3.0, handoff 4.0, decode 5.0)"


def test_a_link_is_as_fast_as_it_was_ever_seen_lately() -> None:
    links = Links()
    links.add(("p", "d"))
    links.pushed(("p", "d"), 10**9, 0.1)
    assert links.rate(("p", "d")) == pytest.approx(1e7)
    links.pushed(("p", "d"), 10**6, 0.1)
    assert 0.9e7 < links.rate(("p", "d")) < 1e7
    for _ in range(300):
        links.pushed(("p", "d"), 10**6, 0.1)
    assert links.rate(("p", "d")) == pytest.approx(1e4)


def test_news_of_an_unknown_pair_is_none() -> None:
    links = Links()
    links.pushed(("p", "d"), 10**9, 0.1)
    assert ("p", "d") not in links


def test_the_fixed_cost_of_a_handoff_follows_the_cheapest_seen() -> None:
    links = Links()
    assert links.handoff_ms == ASSUMED_HANDOFF_MS
    links.exposed(0.002)
    assert links.handoff_ms == pytest.approx(2)
    for _ in range(100):
        links.exposed(0.02)
    assert links.handoff_ms == pytest.approx(20)
