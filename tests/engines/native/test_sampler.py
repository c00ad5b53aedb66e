"""The sampler: against a naive reference, as a distribution, and as a function of its own row alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrt.engines.native.sampler import sample, uniform
from dynrt.engines.scheduling.batch import SampleSpec
from dynrt.runtime.messages import SamplingParams


def spec(position: int = 0, banned_ids: tuple[int, ...] = (), **params: Any) -> SampleSpec:
    return SampleSpec(SamplingParams(max_tokens=1, **params), position, banned_ids)


def kept_weights(logits: torch.Tensor, wanted: SampleSpec) -> dict[int, float]:
    """Weight of each token that the filters keep, by sorting everything, in order of ids."""
    params = wanted.params
    candidates = {i: float(x) for i, x in enumerate(logits.tolist()) if i not in wanted.banned_ids}
    if params.top_k:
        lowest = sorted(candidates.values(), reverse=True)[: params.top_k][-1]
        candidates = {i: x for i, x in candidates.items() if x >= lowest}
    highest = max(candidates.values())
    weights = {i: math.exp((x - highest) / params.temperature) for i, x in candidates.items()}
    weights = {i: weight for i, weight in weights.items() if weight >= params.min_p}
    running, total = 0.0, sum(weights.values())
    for weight in sorted(weights.values(), reverse=True):
        running += weight
        if running >= params.top_p * total:
            return {i: w for i, w in weights.items() if w >= weight}
    return weights


def naive_sample(logits: torch.Tensor, wanted: SampleSpec) -> int:
    weights = kept_weights(logits, wanted)
    target = uniform(wanted.params.seed, wanted.position) * sum(weights.values())
    for token_id, weight in weights.items():
        target -= weight
        if target < 0:
            return token_id
    return max(weights)


def random_spec(rng: random.Random, vocab_size: int) -> SampleSpec:
    return spec(
        position=rng.randrange(1000),
        seed=rng.getrandbits(63),
        temperature=rng.choice([0.3, 0.7, 1.0, 1.7]),
        top_p=rng.choice([0.1, 0.51, 0.9, 0.97, 1.0]),
        top_k=rng.choice([0, 0, 2, 5, 100, 10_000]),
        min_p=rng.choice([0.0, 0.0, 0.001, 0.1]),
        banned_ids=tuple(rng.sample(range(vocab_size), rng.choice([0, 0, 1, 3]))),
    )


def random_logits(rng: random.Random, rows: int, vocab_size: int) -> torch.Tensor:
    """Some flat, some peaked, some with many equal values, as bfloat16 models have."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = rng.choice([0.5, 3.0, 10.0]) * torch.randn(rows, vocab_size, generator=generator)
    return logits.bfloat16().float() if rng.random() < 0.5 else logits


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), st.sampled_from([5, 64, 256, 300, 3000]))
def test_equals_the_naive_reference_and_ignores_the_rest_of_the_batch(
    rng: random.Random, vocab_size: int
) -> None:
    specs = [random_spec(rng, vocab_size) for _ in range(4)]
    specs.insert(2, spec(temperature=0.0))
    logits = random_logits(rng, len(specs), vocab_size)
    before = logits.clone()
    tokens = sample(logits, specs)
    assert torch.equal(logits, before)
    for row, wanted in enumerate(specs):
        assert sample(logits[row : row + 1], [wanted]) == [tokens[row]]
        if wanted.params.temperature:
            assert tokens[row] == naive_sample(logits[row], wanted)
        else:
            assert tokens[row] == int(logits[row].argmax())


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.2, "top_k": 12, "top_p": 0.7},
        {"temperature": 1.2, "min_p": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", ["seeds", "positions"])
def test_frequencies_are_the_probabilities(params: dict[str, float], stream: str) -> None:
    num_draws = 20_000
    logits = torch.randn(600, generator=torch.Generator().manual_seed(1)) * 2
    specs = [
        spec(seed=i, **params) if stream == "seeds" else spec(seed=3, position=i, **params)
        for i in range(num_draws)
    ]
    tokens = sample(logits.expand(num_draws, -1), specs)
    weights = kept_weights(logits, specs[0])
    total = sum(weights.values())
    expected = {token_id: num_draws * weight / total for token_id, weight in weights.items()}
    assert set(tokens) <= expected.keys()
    # Pearson's test; tokens expected fewer than 10 times are one class
    common = [token_id for token_id, count in expected.items() if count >= 10]
    observed = [tokens.count(token_id) for token_id in common]
    chi_square = sum((n - expected[i]) ** 2 / expected[i] for n, i in zip(observed, common, strict=True))
    rare_expected = num_draws - sum(expected[i] for i in common)
    if rare_expected > 10:
        chi_square += (num_draws - sum(observed) - rare_expected) ** 2 / rare_expected
    assert chi_square < len(common) + 5 * math.sqrt(2 * len(common)), "5 standard deviations off"


def test_many_tokens_below_top_p_are_found_by_sorting_all() -> None:
    logits = 0.01 * torch.randn(5000, generator=torch.Generator().manual_seed(0))
    specs = [spec(seed=seed, top_p=0.9) for seed in range(200)]
    kept = kept_weights(logits, specs[0])
    assert 4000 < len(kept) < 4700
    tokens = sample(logits.expand(200, -1), specs)
    assert set(tokens) <= kept.keys()
    assert tokens == [naive_sample(logits, wanted) for wanted in specs]


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_k": 1}, {"temperature": 1e-9}]
)
def test_greedy_in_every_spelling_takes_the_first_of_the_best(params: dict[str, float]) -> None:
    logits = torch.tensor([[0.0, 4.0, 1.0, 4.0]])
    assert all(sample(logits, [spec(seed=seed, **params)]) == [1] for seed in range(20))


def test_equally_likely_tokens_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]]).expand(300, -1)
    for params in ({"top_k": 2}, {"top_p": 0.75}):
        tokens = sample(logits, [spec(seed=seed, **params) for seed in range(300)])
        assert set(tokens) == {0, 1, 2, 3}


def test_banned_tokens_are_never_chosen() -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, -5.0]])
    assert sample(logits, [spec(temperature=0.0, banned_ids=(0, 1))]) == [2]
    for seed in range(50):
        assert sample(logits, [spec(seed=seed, temperature=5.0, banned_ids=(0, 2))])[0] in {1, 3}


def packed(allowed_ids: set[int], vocab_size: int) -> bytes:
    """A bit for each token, the lowest first."""
    bits = sum(1 << token_id for token_id in allowed_ids)
    return bits.to_bytes(-(-vocab_size // 8), "little")


@settings(max_examples=40)
@given(st.randoms(use_true_random=False), st.sampled_from([5, 64, 300]))
def test_only_allowed_tokens_are_chosen_and_other_rows_are_left_alone(
    rng: random.Random, vocab_size: int
) -> None:
    specs = [random_spec(rng, vocab_size) for _ in range(4)]
    logits = random_logits(rng, len(specs), vocab_size)
    allowed_ids = set(rng.sample(range(vocab_size), rng.randint(1, vocab_size)))
    tokens = sample(logits, specs, {2: packed(allowed_ids, vocab_size)})
    forbidden = tuple(set(range(vocab_size)) - allowed_ids)
    ruled = SampleSpec(specs[2].params, specs[2].position, forbidden)
    assert tokens[2] == naive_sample(logits[2], ruled)
    assert tokens[:2] + tokens[3:] == sample(logits[[0, 1, 3]], [specs[0], specs[1], specs[3]])


def test_a_top_p_just_below_1_keeps_the_last_token() -> None:
    logits = torch.zeros(1, 3000)
    top_p = math.nextafter(1.0, 0.0)
    tokens = {sample(logits, [spec(seed=seed, top_p=top_p)])[0] // 300 for seed in range(200)}
    assert tokens == set(range(10))


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 10), []) == []


def test_uniform_is_the_same_everywhere_for_ever() -> None:
    """A request may go on at a worker of another version: these values must not change."""
    assert uniform(0, 0) == 0.3859926107094097
    assert uniform(-(2**63), 2**40) == 0.4477259852003147
    drawn = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0.0 <= u < 1.0 for u in drawn)
    assert len(set(drawn)) == len(drawn)
