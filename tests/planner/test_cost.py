"""The cost terms, by hand-made cases whose answers follow from the formulas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.planner.coefficients import Coefficients
from dynrt.planner.cost import (
    DECODE_HORIZON,
    Terms,
    batch_ms,
    exposed_transfer_ms,
    queue_ms,
    uncached_ms,
)
from dynrt.planner.links import ASSUMED_HANDOFF_MS, Links
from dynrt.planner.load import Load

COSTS = Coefficients(
    step_ms=5, prefill_token_ms=0.5, prefill_context_ms=1e-4, decode_request_ms=0.1, decode_kv_token_ms=0.01
)


def test_attention_to_a_cached_prefix_is_paid() -> None:
    fresh = uncached_ms(COSTS, 1000, 0)
    behind_prefix = uncached_ms(COSTS, 4000, 3000)
    assert fresh == pytest.approx(500 + 100)
    assert behind_prefix == pytest.approx(500 + 1e-4 * (4000**2 - 3000**2))


def test_the_queue_is_what_waits() -> None:
    load = Load(16)
    assert queue_ms(COSTS, load, 1000, 100) == 0
    load.plan_prefill(b"a", 100, 100)
    load.plan_prefill(b"b", 100, 50)
    waiting_ms = 2 * 5 + 0.5 * 150 + 1e-4 * (100**2 + 100**2 - 50**2)
    assert queue_ms(COSTS, load, 1000, 100) == pytest.approx(waiting_ms)


def test_joining_a_batch_costs_both_sides() -> None:
    load = Load(16)
    assert batch_ms(COSTS, load, 1000, 10) == 0
    load.plan_decode(b"a", 200, 200)
    assert batch_ms(COSTS, load, 1000, 10) == pytest.approx(10 * ((0.1 + 2) + (0.1 + 10)))
    assert batch_ms(COSTS, load, 1000, 10**6) == batch_ms(COSTS, load, 1000, DECODE_HORIZON)


def test_what_does_not_fit_is_computed_again() -> None:
    load = Load(16)
    load.plan_decode(b"a", 900, 900)
    assert queue_ms(COSTS, load, 1000, 100) == 0
    assert queue_ms(COSTS, load, 1000, 140) == pytest.approx(0.5 * 40)


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
