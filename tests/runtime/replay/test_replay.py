"""Replays of tiny traces: times and hits by hand, the same course for the same seed, nothing left open."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_traces import BLOCK, ask, errors, small_config, write_profile

from dynrt.planner.traces import TraceRequest
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.replay.policies import POLICIES
from dynrt.runtime.replay.replay import MESSAGE_S, replay

STEP_S, TOKEN_S, REQUEST_S, KV_TOKEN_S = 5e-3, 1e-4, 5e-4, 1e-6  # as the profile has them


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_profile(tmp_path_factory.mktemp("profile"))


def decode_s(kv_tokens: int) -> float:
    """A step of one request that attends to so many tokens."""
    return STEP_S + REQUEST_S + KV_TOKEN_S * kv_tokens


def mixed_trace(seed: int, count: int) -> list[TraceRequest]:
    random = Random(seed)
    arrivals = sorted(random.uniform(0.0, 3.0) for _ in range(count))
    shared = [[1, 2, 3], [1, 2, 4, 5], [6], []]
    return [
        ask(number, at, random.randrange(70, 300), random.randrange(1, 60), random.choice(shared))
        for number, at in enumerate(arrivals)
    ]


def test_first_token_of_a_single_request_by_hand(profile: str) -> None:
    """A message to the prefill worker, its one step, a message back."""
    (one,) = replay([ask(0, 1.0, 100, 5)], small_config(profile)).served
    assert one.ttft_s == pytest.approx(MESSAGE_S + STEP_S + 100 * TOKEN_S + MESSAGE_S)


def test_last_token_of_a_single_request_by_hand(profile: str) -> None:
    """What its slow link carries after the first layer's KV is there; then the decode worker's steps."""
    (one,) = replay([ask(0, 0.0, 100, 5)], small_config(profile)).served
    prefill_s = STEP_S + 100 * TOKEN_S
    first_layer_s = 0.1 * prefill_s / 4
    push_s = 4 * 1e-5 + 7 * BLOCK * 4096 / 1e6  # four layers, one after the other: whole blocks are sent
    steps_s = sum(decode_s(100 + count) for count in range(1, 5))
    expected_s = MESSAGE_S + first_layer_s + push_s + steps_s + MESSAGE_S
    assert push_s > prefill_s, "the link is what takes long here"
    assert one.finished_at == pytest.approx(expected_s)
    assert one.itl_s == pytest.approx((one.finished_at - one.first_at) / 4)


def test_local_request_by_hand(profile: str) -> None:
    """Without a prefill worker: one step for the prompt, one for each further token."""
    (one,) = replay([ask(0, 0.0, 100, 4)], small_config(profile, prefill=0)).served
    steps_s = STEP_S + 100 * TOKEN_S + sum(decode_s(100 + count) for count in range(1, 4))
    assert one.finished_at == pytest.approx(2 * MESSAGE_S + steps_s)


def test_hits_by_hand(profile: str) -> None:
    """Far apart, so that each finds what those before it left: 0, 3 and 2 blocks, of the last all but one block."""
    trace = [
        ask(0, 0.0, 4 * BLOCK + 3, 3, [1, 2, 3]),
        ask(1, 5.0, 4 * BLOCK + 3, 3, [1, 2, 3]),
        ask(2, 10.0, 3 * BLOCK + 1, 3, [1, 2]),
        ask(3, 15.0, 3 * BLOCK, 3, [1, 2, 3]),
    ]
    served = replay(trace, small_config(profile)).served
    assert [one.cached_tokens for one in served] == [0, 3 * BLOCK, 2 * BLOCK, 2 * BLOCK]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_everything(profile: str, policy: str) -> None:
    """That nothing is left open then is asserted by the replay itself."""
    trace = mixed_trace(3, 25)
    replayed = replay(trace, small_config(profile, prefill=3, decode=2, local_prefill="auto"), policy)
    assert errors(replayed.served) == []
    assert [one.request for one in replayed.served] == trace
    assert len(replayed.prefill_workers) == 3


@pytest.mark.parametrize("policy", ["planner", "random", "kv-formula"])
def test_same_seed_same_course(profile: str, policy: str) -> None:
    config = small_config(profile, prefill=2, decode=2, local_prefill="auto", seed=5)
    trace = mixed_trace(1, 20)
    assert replay(trace, config, policy) == replay(trace, config, policy)


def test_another_seed_another_course(profile: str) -> None:
    trace = mixed_trace(1, 20)
    courses = [replay(trace, small_config(profile, prefill=2, seed=seed), "random").served for seed in (1, 2)]
    assert courses[0] != courses[1]


@settings(max_examples=10)
@given(seed=st.integers(0, 2**16), blocks=st.sampled_from([24, 40, 200]), prefill=st.integers(0, 2))
def test_skipped_steps_change_nothing(profile: str, seed: int, blocks: int, prefill: int) -> None:
    """Under a policy that does not go by what workers report: those reports become fewer."""
    trace = mixed_trace(seed, 12)
    config = small_config(profile, prefill=prefill, decode=2, blocks=blocks)
    step_by_step = replay(trace, config, "round-robin", longest_stretch=0)
    skipping = replay(trace, config, "round-robin")
    assert errors(skipping.served) == []
    for one, other in zip(step_by_step.served, skipping.served, strict=True):
        assert one.cached_tokens == other.cached_tokens
        assert one.first_at == pytest.approx(other.first_at, abs=1e-9)
        assert one.finished_at == pytest.approx(other.finished_at, abs=1e-9)


def test_each_answer_is_announced(profile: str) -> None:
    answered: list[None] = []
    replay(mixed_trace(2, 7), small_config(profile), on_finished=lambda: answered.append(None))
    assert len(answered) == 7


def test_request_longer_than_a_cache_is_refused(profile: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"request 1 .* 310 tokens .* 20 blocks of 16; .* has 12: raise --blocks"
    ):
        replay([ask(0, 0.0, 20, 5), ask(1, 0.0, 300, 10)], small_config(profile, blocks=12))


def test_empty_trace_is_refused(profile: str) -> None:
    with pytest.raises(ConfigError, match="no request"):
        replay([], small_config(profile))
