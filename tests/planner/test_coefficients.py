"""The fit finds what steps cost, whatever the noise, and is sane before it has seen any."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dynrt.planner.coefficients import (
    LEARN_ALL,
    LEARN_EVERY,
    Coefficients,
    FleetFit,
    StepFit,
    assumed_coefficients,
    terms_of,
)
from dynrt.runtime.messages import StepTiming

KV_BYTES = 131072
TRUTH = Coefficients(8.0, 0.4, 3e-5, 0.3, 2e-3)


def step(
    prefill_tokens: int,
    prefill_context: int,
    decode_requests: int,
    decode_kv_tokens: int,
    truth: Coefficients = TRUTH,
    factor: float = 1.0,
) -> StepTiming:
    work = (1, prefill_tokens, prefill_context, decode_requests, decode_kv_tokens)
    duration_ms = sum(
        amount * cost for amount, cost in zip(work, msgspec.structs.astuple(truth), strict=True)
    )
    return StepTiming(factor * duration_ms / 1e3, 0.0, *work[1:])


def decode_step(random: Random, truth: Coefficients = TRUTH, factor: float = 1.0) -> StepTiming:
    requests = random.randint(1, 32)
    return step(0, 0, requests, requests * random.randint(50, 2000), truth, factor)


def prefill_step(random: Random, truth: Coefficients = TRUTH, factor: float = 1.0) -> StepTiming:
    start = random.randrange(0, 4096)
    tokens = random.randint(16, 512)
    return step(tokens, (start + tokens) ** 2 - start**2, 0, 0, truth, factor)


def learn(fit: StepFit, step: StepTiming) -> None:
    fit.add(step, terms_of(step))


def noise(random: Random) -> float:
    return 10.0 if random.random() < 0.02 else random.gauss(1.0, 0.08)


def assert_close(found: Coefficients, truth: Coefficients, tolerance: float) -> None:
    for name in Coefficients.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=tolerance), (name, found)


def test_known_coefficients_are_found_in_noise_with_stalls() -> None:
    random = Random(1)
    fit = StepFit()
    for _ in range(1000):
        make = random.choice((decode_step, prefill_step))
        learn(fit, make(random, factor=noise(random)))
    assert_close(fit.solve(assumed_coefficients(KV_BYTES)), TRUTH, 0.25)


def test_exact_steps_give_exact_coefficients() -> None:
    random = Random(2)
    fit = StepFit()
    for _ in range(400):
        learn(fit, random.choice((decode_step, prefill_step))(random))
    assert_close(fit.solve(assumed_coefficients(KV_BYTES)), TRUTH, 0.02)


def test_a_worker_that_slows_down_is_followed() -> None:
    random = Random(3)
    fit = StepFit()
    slow = Coefficients(*(3 * value for value in msgspec.structs.astuple(TRUTH)))
    for truth in (TRUTH, slow):
        for _ in range(2000):
            learn(fit, random.choice((decode_step, prefill_step))(random, truth))
    assert_close(fit.solve(assumed_coefficients(KV_BYTES)), slow, 0.1)


def test_decode_steps_do_not_wash_out_what_prefill_costs() -> None:
    random = Random(4)
    fit = StepFit()
    for _ in range(300):
        learn(fit, prefill_step(random))
    for _ in range(5000):
        learn(fit, decode_step(random))
    found = fit.solve(assumed_coefficients(KV_BYTES))
    assert found.prefill_token_ms == pytest.approx(TRUTH.prefill_token_ms, rel=0.05)


def test_without_samples_the_assumptions_stand_and_scale_with_the_kv() -> None:
    assumed = assumed_coefficients(KV_BYTES)
    found = StepFit().solve(assumed)
    assert_close(found, assumed, 1e-9)
    assert assumed_coefficients(2 * KV_BYTES).decode_kv_token_ms == 2 * assumed.decode_kv_token_ms


def test_a_decode_worker_is_believed_to_prefill_like_the_others() -> None:
    random = Random(5)
    fleet = FleetFit()
    fleet.add_worker("p", KV_BYTES)
    fleet.add_worker("d", KV_BYTES)
    for _ in range(600):
        fleet.add("p", prefill_step(random))
        fleet.add("d", decode_step(random))
    assert fleet.coefficients["d"].prefill_token_ms == pytest.approx(TRUTH.prefill_token_ms, rel=0.1)
    fleet.add_worker("new", KV_BYTES)
    assert fleet.coefficients["new"].prefill_token_ms == pytest.approx(TRUTH.prefill_token_ms, rel=0.1)


def test_workers_of_one_fleet_may_differ() -> None:
    random = Random(6)
    slow = Coefficients(*(4 * value for value in msgspec.structs.astuple(TRUTH)))
    fleet = FleetFit()
    for name in ("fast", "slow"):
        fleet.add_worker(name, KV_BYTES)
    for _ in range(300):
        fleet.add("fast", prefill_step(random))
        fleet.add("slow", prefill_step(random, slow))
    ratio = fleet.coefficients["slow"].prefill_token_ms / fleet.coefficients["fast"].prefill_token_ms
    assert ratio == pytest.approx(4, rel=0.1)


def test_of_many_steps_alike_few_are_enough_to_follow_a_worker_that_slows_down() -> None:
    random = Random(7)
    slow = Coefficients(*(3 * value for value in msgspec.structs.astuple(TRUTH)))
    fleet, fit = FleetFit(), StepFit()
    fleet.add_worker("w", KV_BYTES)
    wanted = 0
    for truth in (TRUTH, slow):
        for _ in range(8000):
            step = random.choice((decode_step, prefill_step))(random, truth)
            fleet.add("w", step)
            wanted += fit.wants(step)
    assert wanted < 16_000 / LEARN_EVERY + 2 * LEARN_ALL
    assert_close(fleet.coefficients["w"], slow, 0.1)


def test_a_step_without_duration_is_ignored() -> None:
    fleet = FleetFit()
    fleet.add_worker("w", KV_BYTES)
    before = fleet.coefficients["w"]
    fleet.add("w", StepTiming(0.0, 0.0, 512, 512**2, 0, 0))
    assert fleet.coefficients["w"] == before


steps = st.builds(
    StepTiming,
    duration_s=st.floats(1e-5, 100),
    ended_at=st.just(0.0),
    prefill_tokens=st.integers(0, 8192),
    prefill_context=st.integers(0, 10**10),
    decode_requests=st.integers(0, 256),
    decode_kv_tokens=st.integers(0, 10**7),
)


ALIKE = StepTiming(1e-5, 0.0, 0, prefill_context=2_499_999_999, decode_requests=0, decode_kv_tokens=2_450_674)


@given(st.lists(steps, min_size=1, max_size=30))
@example([ALIKE])  # what its context and its KV cost is told apart by less than rounding
def test_no_steps_whatever_make_a_coefficient_negative_or_infinite(samples: list[StepTiming]) -> None:
    fleet = FleetFit()
    fleet.add_worker("w", KV_BYTES)
    for sample in samples:
        fleet.add("w", sample)
        assert all(0 <= value < 1e9 for value in msgspec.structs.astuple(fleet.coefficients["w"]))
